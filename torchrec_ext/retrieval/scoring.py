"""CandidateScorer: stored rows of given positions, and the top NN over them, in one compiled function."""

from __future__ import annotations

import threading
import warnings
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.retrieval.compiled_scores import Compiled, compiled_scores
from torchrec_ext.retrieval.projection import Projection
from torchrec_ext.retrieval.quantized import decode
from torchrec_ext.retrieval.store import EmbeddingStore

Compile = Literal["auto", "off"]


class CandidateScorer:
    """Scores of one query with candidates of a store; of a request nothing else is left to do.

    Rows are read where they lie in the memory-mapped file: compiled, they are gathered, summed with the query's half and put
    through the network in one pass, and no copy of them is written. Without a compiler the same runs operation by operation, and a
    warning says so once. Both are equal within 1e-5. May be called from several threads.

    Args:
        projection: of the interaction.
        store: of what ``projection.candidates`` made of the catalogue.
        compile: ``auto`` or ``off``; compiling takes some 10 seconds here, and is kept on disk: see
            :func:`~torchrec_ext.retrieval.compiled_scores.compiled_scores`.

    Raises:
        ValueError: a store of another width.
    """

    def __init__(self, projection: Projection, store: EmbeddingStore, *, compile: Compile = "auto") -> None:  # noqa: A002
        if compile not in ("auto", "off"):
            raise ValueError(f"compile={compile!r}: must be auto or off")
        if len(store) and store.width != projection.width:
            raise ValueError(
                f"store: rows are {store.width} wide, the projection's {projection.width}; store projection.candidates(...)"
            )
        self.projection, self.store = projection, store
        self._matrix, self._scales, self._size = store.matrix(), store.scales, len(store)
        self._buffers = threading.local()
        self._compiled = self._compile() if compile == "auto" else None

    @property
    def compiled(self) -> bool:
        """Whether it runs compiled; an interaction of which nothing can be projected does not."""
        return self._compiled is not None

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """(N,) scores of the query towers' outputs (D1,) with the rows at ``positions`` (N,) int64.

        Raises:
            ValueError: a position outside 0 to I - 1.
            StoreError: the store's file was cut off.
        """
        if not len(positions):
            return torch.empty(0)
        self.store.check()
        if self._compiled is not None:
            scores, outside = self._compiled(query, positions)
            if not outside:
                return scores
        places = positions.numpy()
        if places.view(np.uint64).max() >= self._size:  # where -1 is the greatest of all
            wrong = places[(places < 0) | (places >= self._size)][0]
            raise ValueError(f"positions: {wrong} is not a row of this store, which has {self._size}")
        query = self.projection.query(query)
        if self._matrix.dtype != torch.float32:
            scales = None if self._scales is None else self._scales[positions]
            return self.projection.score(query, decode(self._matrix.index_select(0, positions), scales))
        rows = self._buffer(len(positions))
        torch.index_select(self._matrix, 0, positions, out=rows)
        return self.projection.score(query, rows)

    def _buffer(self, count: int) -> Tensor:
        """Memory of this thread, so that no request waits for pages to be mapped."""
        kept: Tensor | None = getattr(self._buffers, "rows", None)
        if kept is None or len(kept) < count:
            kept = self._buffers.rows = torch.empty(1 << (count - 1).bit_length(), self.store.width)
        return kept[:count]

    def _compile(self) -> Compiled | None:
        try:
            return compiled_scores(self.projection, self._matrix, self._scales)
        except Exception as error:
            first = str(error).strip().splitlines()[0][:400]
            warnings.warn(f"the top NN runs uncompiled: {type(error).__name__}: {first}", stacklevel=3)
            return None
