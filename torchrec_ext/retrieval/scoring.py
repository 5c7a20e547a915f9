"""CandidateScorer: stored rows of given positions, and the top NN over them, in one compiled function."""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch._inductor
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_ext.retrieval.projection import Projection
from torchrec_ext.retrieval.quantized import decode
from torchrec_ext.retrieval.store import EmbeddingStore

Int64 = NDArray[np.int64]
Compile = Literal["auto", "off"]
_COUNTS = (128, 512, 1_024)  # of candidates, for which functions are compiled; a call is padded to one, or cut


class CandidateScorer:
    """Scores of one query with candidates of a store; of a request nothing else is left to do.

    Rows are read where they lie in the memory-mapped file: compiled, they are gathered, summed with the query's half and put
    through the network in one pass, and no copy of them is written. Without a compiler the same runs operation by operation, and a
    warning says so once. Both are equal within 1e-5. May be called from several threads.

    Args:
        projection: of the interaction.
        store: of what ``projection.candidates`` made of the catalogue.
        compile: ``auto`` or ``off``; compiling takes some seconds here, and is cached on disk by torch.

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
        self._compiled = self._compile() if compile == "auto" and len(store) else {}

    @property
    def compiled(self) -> bool:
        """Whether it runs compiled; an interaction of which nothing can be projected does not."""
        return bool(self._compiled)

    def __call__(self, query: Tensor, positions: Tensor) -> Tensor:
        """(N,) scores of ``projection.query``'s (Hq,) with the rows at ``positions`` (N,) int64.

        Raises:
            ValueError: a position outside 0 to I - 1.
            StoreError: the store's file was cut off.
        """
        places = positions.numpy()
        if not len(places):
            return torch.empty(0)
        if places.view(np.uint64).max() >= self._size:  # where -1 is the greatest of all
            wrong = places[(places < 0) | (places >= self._size)][0]
            raise ValueError(f"positions: {wrong} is not a row of this store, which has {self._size}")
        self.store.check()
        query = query.detach().contiguous()
        return self._in_pieces(query, positions, places) if self._compiled else self._eager(query, positions)

    def _in_pieces(self, query: Tensor, positions: Tensor, places: Int64) -> Tensor:
        """Of counts that were compiled; what stands behind the positions of the last piece is scored too, and cut off."""
        length = len(places)
        if length > _COUNTS[-1]:
            pieces = torch.split(positions, _COUNTS[-1])
            return torch.cat([self._in_pieces(query, piece, piece.numpy()) for piece in pieces])
        count = _COUNTS[bisect_left(_COUNTS, length)]
        if length < count:
            array, positions = self._filled(count)
            array[:length] = places
        scores = self._compiled[count](self._matrix, self._scales, query, positions)
        return scores if length == count else scores[:length]

    def _filled(self, count: int) -> tuple[Int64, Tensor]:
        """Memory of this thread for ``count`` positions, each of them of this store: those of a call before, or 0."""
        kept: dict[int, tuple[Int64, Tensor]] | None = getattr(self._buffers, "positions", None)
        if kept is None:
            arrays = {each: np.zeros(each, np.int64) for each in _COUNTS}
            kept = self._buffers.positions = {each: (array, torch.from_numpy(array)) for each, array in arrays.items()}
        return kept[count]

    def _eager(self, query: Tensor, positions: Tensor) -> Tensor:
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

    def _compile(self) -> dict[int, Callable[..., Tensor]]:
        """By the number of candidates; none where nothing is projected, or there is no compiler."""
        projection, matrix, scales = self.projection, self._matrix, self._scales
        if projection.query_width is None:  # every layer is the pair's, and runs in blocks of its own
            return {}

        def scored(matrix: Tensor, scales: Tensor | None, query: Tensor, positions: Tensor) -> Tensor:
            rows = matrix[positions].float()
            return projection.score(query, rows if scales is None else rows * scales[positions][:, None])

        # Compiled for these shapes alone and called as it is: torch.compile's checks around it take longer than the scores.
        made: dict[int, Callable[..., Tensor]] = {}
        try:
            for count in _COUNTS:
                given: list[Tensor | int | torch.SymInt | None] = [
                    matrix,
                    scales,
                    torch.zeros(projection.query_width),
                    torch.zeros(count, dtype=torch.int64),
                ]
                with torch.no_grad():
                    traced = make_fx(scored)(*given)
                    made[count] = torch._inductor.standalone_compile(traced, given, dynamic_shapes="from_example_inputs")
                    made[count](*given)
        except Exception as error:
            first = str(error).strip().splitlines()[0][:200]
            warnings.warn(f"the top NN runs uncompiled: {type(error).__name__}: {first}", stacklevel=3)
            return {}
        return made
