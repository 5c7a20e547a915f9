"""SwappingIndex: an index that is built anew beside the one that answers, then takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from torchrec_ext.retrieval.index.exact import Index, Metric


class SwappingIndex:
    """Answers from its index while :meth:`refresh` builds another; a search that has begun ends on the one that it began on.

    Args:
        index: to begin with.
    """

    def __init__(self, index: Index) -> None:
        self.live = index
        self._building = threading.Lock()

    @property
    def metric(self) -> Metric:
        """Of the index that answers now."""
        return self.live.metric

    @property
    def size(self) -> int:
        """Of the index that answers now."""
        return self.live.size

    def search(
        self, queries: Tensor, k: int, *, allowed: Tensor | None = None, excluded: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`torchrec_ext.retrieval.index.exact.Index`."""
        return self.live.search(queries, k, allowed=allowed, excluded=excluded)

    def refresh(self, build: Callable[[], Index]) -> Index:
        """Builds in the caller's thread, then swaps; where ``build`` raises, the live index stays.

        Returns:
            The index that answered before.

        Raises:
            ValueError: another metric than the live one's, or a refresh is under way.
        """
        if not self._building.acquire(blocking=False):
            raise ValueError("refresh: the index is being built already; wait for that")
        try:
            new, old = build(), self.live
            if new.metric != old.metric:
                raise ValueError(
                    f"refresh: metric {new.metric} in place of {old.metric}; an index keeps its model's metric"
                )
            self.live = new
            return old
        finally:
            self._building.release()
