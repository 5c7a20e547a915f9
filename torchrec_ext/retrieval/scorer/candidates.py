"""CandidateScorer: gathers stored rows and runs the top NN over them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.scorer.compiled import compiled_scores
from torchrec_ext.retrieval.store.row_formats import decode
from torchrec_ext.retrieval.store.store import EmbeddingStore

_Compiled = TypeVar("_Compiled")
ScoreCompile = Literal["auto", "off"]


class CandidateScorer:
    """Scores one query with candidates of a store; safe to call from several threads.

    The constructor reads the rows of the memory-mapped file into memory. Compiled code gathers rows, adds the query's
    half and runs the network in one pass, without writing a copy of the rows. Without a compiler the same runs
    operation by operation, and a warning says so once. Both are equal within 1e-5.

    Args:
        projection: projection of the interaction.
        store: store of the catalogue's ``projection.candidates(...)``.
        compile: ``auto`` or ``off``; compiling takes some 10 seconds, and the result is cached on disk: see
            :func:`~torchrec_ext.retrieval.scorer.compiled.compiled_scores`.

    Attributes:
        populated: whether the rows were read into memory; see
            :meth:`~torchrec_ext.retrieval.store.store.EmbeddingStore.populate`.

    Raises:
        ValueError: the store has another width.
    """

    def __init__(
        self,
        projection: Projection,
        store: EmbeddingStore,
        *,
        compile: ScoreCompile = "auto",  # noqa: A002
    ) -> None:
        if compile not in ("auto", "off"):
            raise ValueError(f"compile={compile!r}: must be auto or off")
        if len(store) and store.width != projection.width:
            raise ValueError(
                f"store: rows are {store.width} wide, the projection's {projection.width}; store "
                "projection.candidates(...)"
            )
        self.projection = projection
        self.store = store
        self._matrix = store.matrix()
        self._scales = store.scales
        self._size = len(store)
        # One for each thread, because requests are answered beside each other.
        self._buffers = threading.local()
        self.populated = store.populate()
        self._compiled = None
        if compile == "auto":
            self._compiled = compiled_or_none(
                lambda: compiled_scores(projection, self._matrix, self._scales)
            )

    @property
    def compiled(self) -> bool:
        """Whether scoring runs compiled; it never does for an interaction without a projection."""
        return self._compiled is not None

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """Returns (N,) scores of the query towers' outputs (D1,) with the rows at ``positions`` (N,) int64.

        Raises:
            ValueError: a position is outside 0 to I - 1.
            StoreError: the store's file was cut off.
        """
        if not len(positions):
            return torch.empty(0)
        self.store.check()
        if self._compiled is not None:
            scores, unusable = self._compiled([query], positions)
            if not unusable:
                return scores
            # The compiled code clamps wrong positions; the checks below raise for them.
        rows_wanted = positions.numpy()
        # As unsigned numbers, negative positions are the greatest.
        if rows_wanted.view(np.uint64).max() >= self._size:
            wrong = rows_wanted[(rows_wanted < 0) | (rows_wanted >= self._size)][0]
            raise ValueError(
                f"positions: {wrong} is not a row of this store, which has {self._size}"
            )
        query = self.projection.query_of_one(query)
        # Decoding writes new rows in any case, so that the buffer would save nothing.
        if self._matrix.dtype != torch.float32:
            scales = None if self._scales is None else self._scales[positions]
            return self.projection.score(
                query, decode(self._matrix.index_select(0, positions), scales)
            )
        rows = self._buffer(len(positions))
        torch.index_select(self._matrix, 0, positions, out=rows)
        return self.projection.score_in_place(query, rows)

    def _buffer(self, count: int) -> Tensor:
        """Returns this thread's reusable buffer for rows: mapping fresh pages would delay each request."""
        buffer: Tensor | None = getattr(self._buffers, "rows", None)
        if buffer is None or len(buffer) < count:
            # Rounded up to a power of two, so that the buffer seldom has to grow.
            buffer = self._buffers.rows = torch.empty(
                1 << (count - 1).bit_length(), self.store.width
            )
        return buffer[:count]


def compiled_or_none(compile: Callable[[], _Compiled]) -> _Compiled | None:  # noqa: A002
    """Returns the result of a compilation. If it fails, warns with the reason and returns None."""
    try:
        return compile()
    except Exception as error:
        # A compiler's message has pages; its first line names the cause.
        first = str(error).strip().splitlines()[0][:400]
        warnings.warn(
            f"the top NN runs uncompiled: {type(error).__name__}: {first}", stacklevel=3
        )
        return None
