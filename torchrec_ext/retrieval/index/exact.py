"""Blockwise: exact search, block by block, or by an 8-bit copy of the rows that says which of them are worth a look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.bounds import ScoreBounds
from torchrec_ext.retrieval.store import EmbeddingStore
from torchrec_ext.retrieval.top_k import TopK

Metric = Literal["dot", "cosine", "top_nn"]


class Blockwise:
    """Scores block by block, filtered, into :class:`TopK`; equal scores are ordered by the smaller position."""

    metric: Metric
    _by_products = True
    _bounds: ScoreBounds | None = None
    _inverse_norms: Tensor | None = None

    def __init__(self, source: EmbeddingStore | Tensor, rows_per_block: int) -> None:
        self.source = source
        self.size = len(source)
        self._rows = max(1, rows_per_block)
        live = None if isinstance(source, Tensor) else torch.from_numpy(source.live.copy())
        self.live = None if live is None or bool(live.all()) else live

    def search(
        self, queries: Tensor, k: int, *, allowed: Tensor | None = None, excluded: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~torchrec_ext.retrieval.index.Index`."""
        check_request(queries, k, self.size, allowed, excluded)
        if not isinstance(self.source, Tensor):
            self.source.check()
        with torch.inference_mode():
            prepared = self._prepared(queries)
            shown = self.live if allowed is None else allowed if self.live is None else allowed & self.live
            hidden = None if shown is None else ~shown
            hide = [places.numpy() for places in excluded or ()]  # in numpy, where some numbers are found in no time
            if self._bounds is None:
                return self._of_all(prepared, k, hidden, hide)
            found = []
            told = self._bounds.greatest(self._factors(prepared).numpy(), k, self._gathered, hidden, hide)
            for at, one in enumerate(told):
                query = prepared[at : at + 1]
                if one is None:
                    found.append(self._of_all(query, k, hidden, hide[at : at + 1]))
                else:
                    scores = torch.from_numpy(one[1])[None] + self._constant(query)
                    found.append((padded(scores, k, -torch.inf), padded(torch.from_numpy(one[0])[None], k, -1)))
        return torch.cat([scores for scores, _ in found]), torch.cat([positions for _, positions in found])

    def quantize(self) -> bool:
        """Keeps a copy of the rows in 8 bits, by which a search passes over most of them: a quarter as much is read.

        What is found stays exact: see :class:`~torchrec_ext.retrieval.bounds.ScoreBounds`. Nothing is kept where a score is no
        product of query and row, of fewer than 2^20 numbers or more than 2^29, or where it does not pay on this processor.

        Returns:
            Whether it is kept.
        """
        width = self.source.shape[1] if isinstance(self.source, Tensor) else self.source.width
        if self._bounds is None and self._by_products and ScoreBounds.worth(self.size, width):
            bounds = ScoreBounds.of_rows((self.rows(start, stop) for start, stop in self.blocks()), (self.size, width))
            if bounds.pays(self.rows(*self.blocks()[0]), self._gathered):
                bounds.warm_up()
                self._bounds = bounds
        return self.quantized

    @property
    def quantized(self) -> bool:
        """Whether :meth:`quantize` keeps a copy."""
        return self._bounds is not None

    def _of_all(self, prepared: Tensor, k: int, hidden: Tensor | None, hide: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        best = TopK(len(prepared), min(k, max(1, self.size)))
        # One buffer for all blocks: fresh memory for each costs as much as finding the greatest scores in it.
        buffer = torch.empty(len(prepared) * min(self._rows, self.size))
        for start, stop in self.blocks():
            scores = buffer[: len(prepared) * (stop - start)].view(len(prepared), -1)
            self._scores(prepared, start, stop, scores)
            if hidden is not None:
                scores.masked_fill_(hidden[start:stop], -torch.inf)
            for row, places in zip(scores.numpy(), hide, strict=False):
                row[places[(places >= start) & (places < stop)] - start] = -np.inf
            best.add(start, scores)
        scores, positions = best.result()
        return padded(scores, k, -torch.inf), padded(positions, k, -1)

    def _gathered(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """(N, D) as they are compared."""
        if isinstance(self.source, Tensor):
            rows = self.source.numpy().take(places, axis=0)
        elif self.source.dtype == "fp32":
            rows = self.source.matrix().numpy().take(places, axis=0)
        else:
            rows = self.source.rows(torch.from_numpy(places)).numpy()
        if self._inverse_norms is not None:
            rows *= self._inverse_norms.numpy()[places, None]
        return rows

    def blocks(self) -> list[tuple[int, int]]:
        """First and last + 1 of the positions that are read together."""
        return [(start, min(start + self._rows, self.size)) for start in range(0, self.size, self._rows)]

    def _prepared(self, queries: Tensor) -> Tensor:
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, D) as they are compared: of a cosine normalised."""
        return self._block(start, stop)

    def _factors(self, prepared: Tensor) -> Tensor:
        """(Q, D) by which rows are multiplied, where scores are products."""
        return prepared

    def _constant(self, prepared: Tensor) -> Tensor | float:
        """(Q,) what is added to these."""
        return 0.0

    def _scores(self, queries: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Fills ``out`` (Q, stop - start)."""
        raise NotImplementedError

    def _block(self, start: int, stop: int) -> Tensor:
        return self.source[start:stop] if isinstance(self.source, Tensor) else self.source.block(start, stop)


def check_request(queries: Tensor, k: int, size: int, allowed: Tensor | None, excluded: Sequence[Tensor] | None) -> None:
    """Raises ValueError for what an index's ``search`` does not take."""
    # In numpy, whose calls take a fraction of torch's.
    if queries.dim() != 2 or not len(queries) or not np.isfinite(queries.numpy()).all():
        raise ValueError(f"queries: shape {tuple(queries.shape)}; must be (Q, D) finite numbers, Q at least 1")
    if k < 1:
        raise ValueError(f"k={k}: must be 1 or more")
    if allowed is not None and (allowed.shape != (size,) or allowed.dtype != torch.bool):
        raise ValueError(f"allowed: shape {tuple(allowed.shape)} of {allowed.dtype}; must be ({size},) bool, one for each position")
    if excluded is not None and len(excluded) != len(queries):
        raise ValueError(f"excluded: {len(excluded)} sets of positions for {len(queries)} queries; give one for each")
    for places in (each.numpy() for each in excluded or ()):
        if len(places) and (places.min() < 0 or places.max() >= size):
            wrong = places[(places < 0) | (places >= size)]
            raise ValueError(f"excluded: {int(wrong[0])} is no position (0 to {size - 1}); leave unknown ids, -1, out")


def padded(found: Tensor, k: int, value: float) -> Tensor:
    """(Q, K) of (Q, fewer)."""
    if found.shape[1] == k:
        return found
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=value)
