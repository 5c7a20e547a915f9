"""ScoreBounds: bounds of every score from an 8-bit copy of the rows, so that few scores need be computed.

An exact search reads every row, and memory bandwidth is its limit; 8 bits instead of 32 read a quarter. The
Cauchy-Schwarz inequality bounds how far a score of the copy is from the true one, so rows that cannot be among the
greatest K are passed over and the rest, some more than K, computed exactly: nothing is missed. It is the first stage of
ScaNN and of FAISS's IndexRefine, without their losses.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.store.row_formats import encode

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]
TopProducts = tuple[Positions, Floats]
_ROWS = 2**17  # rows at a time: their products stay in the cache
_SAMPLE = 2_048  # scores of a block that give the first guess of the K-th
_WORTH_FLOATS = 2**20  # fewer numbers cost less to read than the steps here
_MOST_FLOATS = 2**29  # numbers of the copy, of which every process has its own
_SHARE = 32  # K, and the rows that are computed exactly, may be 1/32 of all: beyond, computing all is faster
_LOWEST = float(np.finfo(np.float32).min)
_LEAST, _GREATEST = 1e-25, 1e37  # between these no product of norms loses digits, or overflows
_TRIED, _K = 4, 100  # queries that decide whether bounds pay, and the K that they ask for
_WARM = 32  # queries at once for which kernels are compiled beforehand


class ScoreBounds:
    """Finds the greatest products of queries with I rows; safe to call from several threads.

    Args:
        codes: (I, D) int8 copy of the rows.
        scales: (I,) float32; a row is near its codes times its scale.
        errors: (I,) float32 upper bounds of the norm of row minus codes times scale.
        norms: (I,) float32 upper bounds of the norm of codes times scale.
    """

    def __init__(self, codes: Tensor, scales: Tensor, errors: Floats, norms: Floats) -> None:
        self.codes, self._scales, self._errors = codes, scales, errors
        self._norms = np.maximum(norms, np.float32(1e-30))  # no bound is narrower than the smallest numbers
        self._most = [(float(errors[block].max()), float(self._norms[block].max())) for block in self._blocks()]
        self._greatest = max(error + norm for error, norm in self._most)
        # In float32 a product is off by up to D roundings of its factors' norms: the bound's, and the exact one's.
        self._slack = (codes.shape[1] + 8) * 2.0**-22
        self._buffers = threading.local()

    @classmethod
    def of_rows(cls, blocks: Iterable[Tensor], shape: tuple[int, int]) -> ScoreBounds:
        """Copies float32 rows, streamed in blocks whose rows are ``shape`` (I, D) together."""
        codes = torch.empty(shape, dtype=torch.int8)
        scales, errors, norms = (torch.empty(shape[0]) for _ in range(3))
        start = 0
        for block in blocks:
            rows = slice(start, start + len(block))
            coded, scale = encode(block, "int8")
            assert scale is not None
            near = coded.double() * scale.double()[:, None]
            codes[rows], scales[rows] = coded, scale
            errors[rows] = (block.double() - near).norm(dim=1) * (1 + 2.0**-22)
            norms[rows] = near.norm(dim=1) * (1 + 2.0**-22)
            start += len(block)
        return cls(codes, scales, errors.numpy(), norms.numpy())

    @staticmethod
    def worth(rows: int, width: int) -> bool:
        """Returns whether rows of this number and width are worth a copy in 8 bits, and not too many for one."""
        return _WORTH_FLOATS <= rows * width <= _MOST_FLOATS

    def pays(self, first: Tensor, rows: Callable[[Positions], Floats]) -> bool:
        """Measures whether bounds are faster on this processor than the products of all rows.

        Not every processor is fast with 8 bits, and bounds of rows that are nearly alike rule out too few.

        Args:
            first: (N, D) rows from the first on; some of them serve as queries.
            rows: see :meth:`greatest`.
        """
        queries = first[:: max(1, len(first) // _TRIED)][:_TRIED].numpy()
        results = self.greatest(queries, max(1, min(_K, len(self.codes) // (2 * _SHARE))), rows)
        if any(result is None for result in results):
            return False
        codes, scores = self.codes[: len(first)], np.empty(len(first), np.float32)
        products = torch.empty(1, len(first), dtype=torch.int32)
        # Only the products: the steps after them cost the same either way, and here, unlike in a server, the rows are
        # in a cache.
        whole = _seconds(lambda: np.dot(first.numpy(), queries[0], out=scores))
        return _seconds(lambda: _int8_products(codes[:1], codes, products)) < whole

    def warm_up(self) -> None:
        """Compiles the kernels, each of which would delay the first search that needs it by some milliseconds."""
        count = 1
        while count <= _WARM:
            for block in {len(self.codes[each]): each for each in self._blocks()}.values():
                codes = self.codes[block]
                _int8_products(
                    codes[:1].expand(count, -1).contiguous(), codes, torch.empty(count, len(codes), dtype=torch.int32)
                )
            count *= 2

    def greatest(
        self,
        queries: Floats,
        k: int,
        rows: Callable[[Positions], Floats],
        hidden: Tensor | None = None,
        excluded: Sequence[Positions] = (),
    ) -> list[TopProducts | None]:
        """Returns each query's K greatest products, descending, after their positions; equal ones by position.

        There are fewer than K where fewer are left. A query's result is None where K, or the number of rows to compute
        exactly, is a large share of all, or where its numbers are too large or too small for bounds.

        Args:
            queries: (Q, D), finite.
            k: results per query, K.
            rows: function from positions (N,) to exact rows (N, D).
            hidden: (I,) bool, positions that are left out.
            excluded: further positions that are left out, for each query; or none at all.
        """
        size = len(self.codes)
        if k * _SHARE > size:
            return [None] * len(queries)
        asked = [_Query(query, k, self._greatest, self._slack, size // _SHARE) for query in queries]
        # A kernel is compiled for each number of queries, so numbers are rounded up to powers of two.
        coded = np.zeros((1 << (len(asked) - 1).bit_length(), queries.shape[1]), np.int8)
        coded[: len(asked)] = [query.codes for query in asked]
        products, scores = self._memory(len(coded) * min(_ROWS, size))
        for block, most in zip(self._blocks(), self._most, strict=True):
            count = block.stop - block.start
            of_block = products[: len(coded) * count].view(-1, count)
            _int8_products(torch.from_numpy(coded), self.codes[block], of_block)
            for index, query in enumerate(asked):
                if not query.bounded:
                    continue
                near = scores[:count].copy_(of_block[index]).mul_(self._scales[block])
                if hidden is not None:
                    near.masked_fill_(hidden[block], -torch.inf)
                values = near.numpy()
                if excluded:
                    out = excluded[index]
                    values[out[(out >= block.start) & (out < block.stop)] - block.start] = -np.inf
                query.add(block.start, values, self._errors[block], self._norms[block], most, rows)
        return [query.result() for query in asked]

    def _blocks(self) -> list[slice]:
        size = len(self.codes)
        return [slice(start, min(start + _ROWS, size)) for start in range(0, size, _ROWS)]

    def _memory(self, products: int) -> tuple[Tensor, Tensor]:
        """Returns this thread's buffers for int32 products and one query's scores, so that no search maps new pages."""
        buffers: tuple[Tensor, Tensor] | None = getattr(self._buffers, "kept", None)
        if buffers is None or len(buffers[0]) < products:
            buffers = self._buffers.kept = (
                torch.empty(products, dtype=torch.int32),
                torch.empty(min(_ROWS, len(self.codes))),
            )
        return buffers


class _Query:
    """One query in 8 bits, and its greatest products so far. Scores of the copy are in units of the query's scale.

    Attributes:
        bounded: whether the bounds can decide this query.
        codes: (D,) whole numbers from -127 to 127.
        of_errors: factor of a row's error in the width of its bound.
        of_norms: factor of a row's norm in that width, for the query's own error and for rounding.
    """

    def __init__(self, query: Floats, k: int, greatest: float, slack: float, most: int) -> None:
        exact = query.astype(np.float64)
        norm, self.scale = float(exact @ exact) ** 0.5, float(max(exact.max(), -exact.min())) / 127
        products = (norm * greatest, norm * greatest / max(self.scale, _LEAST))
        self.bounded = self.scale > _LEAST and min(products) > _LEAST and max(products) < _GREATEST
        self.codes = np.rint(exact / self.scale) if self.bounded else np.zeros(len(query))
        if self.bounded:
            error = exact - self.codes * self.scale
            self.of_errors = norm / self.scale * (1 + slack)
            self.of_norms = (float(error @ error) ** 0.5 + slack * norm) / self.scale
        self._query, self._k, self._left = query, k, most
        self._least: float | None = None  # the K-th greatest product so far
        self._positions, self._values = np.empty(0, np.int64), np.empty(0, np.float32)

    def add(
        self,
        start: int,
        near: Floats,
        errors: Floats,
        norms: Floats,
        most: tuple[float, float],
        rows: Callable[[Positions], Floats],
    ) -> None:
        """Takes a block of the copy's scores, and computes exactly the rows that may be among the greatest K.

        Args:
            start: first position of the block.
            near: (n,) scores of the copy, -inf where a position is left out.
            errors: (n,) errors of the rows.
            norms: (n,) norms of the rows.
            most: greatest error and norm of the block.
            rows: see :meth:`ScoreBounds.greatest`.
        """
        above = np.inf  # scores of the copy from here on have been computed exactly
        for guess in _guesses(near, self._k) if self._least is None else ():
            self._compute(start, _between(near, guess, above), rows)
            above = guess
            if self._least is not None:
                break
        if self._least is None:
            self.bounded = self.bounded and above == _LOWEST  # all have been computed, fewer than K so far
            return
        least = self._least / self.scale
        enough = least - self.of_errors * most[0] - self.of_norms * most[1]
        if enough < above:
            near_enough = _between(near, enough, above)
            reach = self.of_errors * errors[near_enough] + self.of_norms * norms[near_enough]
            self._compute(start, near_enough[near[near_enough] + reach >= least], rows)

    def _compute(self, start: int, indices: Positions, rows: Callable[[Positions], Floats]) -> None:
        self._left -= len(indices)
        if self._left < 0:
            self.bounded = False
        if not self.bounded or not len(indices):
            return
        positions = indices + start
        # Row by row, so that equal rows have equal products.
        self._positions = np.concatenate([self._positions, positions])
        self._values = np.concatenate([self._values, np.einsum("nd,d->n", rows(positions), self._query)])
        if len(self._values) >= self._k:
            self._least = float(np.partition(self._values, -self._k)[-self._k])

    def result(self) -> TopProducts | None:
        """Returns the positions and products of the greatest K; None where the bounds cannot decide the query."""
        if not self.bounded:
            return None
        order = np.lexsort((self._positions, -self._values))[: self._k]
        return self._positions[order], self._values[order]


def _between(near: Floats, least: float, above: float) -> Positions:
    """Returns (M,) indices of the scores from ``least`` to below ``above``."""
    return np.flatnonzero(near >= least if above == np.inf else (near >= least) & (near < above))


def _guesses(near: Floats, k: int) -> list[float]:
    """Estimates, by a sample, scores that about 2 K, 8 K and 32 K others surpass."""
    sample = np.sort(near[_drawn(len(near))])[::-1]
    ranks = [min(_SAMPLE, 2 * k * times * _SAMPLE // len(near) + 4 * times) for times in (1, 4, 16)]
    return [max(float(sample[rank - 1]), _LOWEST) for rank in ranks]


@functools.cache
def _drawn(size: int) -> Positions:
    """Draws a sample of ``size`` positions, once: every n-th would be of one category in an ordered catalogue."""
    return np.random.default_rng(0).integers(0, size, _SAMPLE)


def _int8_products(queries: Tensor, rows: Tensor, out: Tensor) -> None:
    """Fills ``out`` (Q, N) int32 with the products of (Q, D) and (N, D) int8."""
    torch._int_mm(queries, rows.T, out=out)


def _seconds(function: Callable[[], object]) -> float:
    """Returns the shortest time of five calls, after one that compiles the kernel and reads the rows."""
    function()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
