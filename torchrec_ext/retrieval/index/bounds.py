"""ScoreBounds: bounds every score by an 8-bit copy of the rows, so that few exact scores are computed.

Memory bandwidth limits an exact search, because it reads every row. With 8 bits instead of 32 it reads a quarter. The
Cauchy-Schwarz inequality bounds the error of each approximate score. Rows that cannot be among the greatest K are
skipped, and the few others are computed exactly, so no result is missed. This is the first stage of ScaNN and of
FAISS's IndexRefine, without their losses.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.store.row_formats import encode

Bools = NDArray[np.bool_]
Float32s = NDArray[np.float32]
Positions = NDArray[np.int64]
TopProducts = tuple[Positions, Float32s]
_ROWS = 2**17  # rows at a time, so that their products stay in the cache
_SAMPLE = 2_048  # scores of a block, to guess the K-th greatest
_WORTH_FLOATS = 2**20  # fewer numbers are read faster than they are bounded
_MOST_FLOATS = 2**29  # limit of the copy, because every process has its own
_SHARE = 32  # at most 1/32 of the rows may be results, or be computed exactly; beyond, computing all is faster
_LOWEST = float(np.finfo(np.float32).min)
# Within these limits products of norms neither underflow nor overflow.
_LEAST = 1e-25
_GREATEST = 1e37
# Queries, K and numbers of the trial in pays().
_TRIAL_QUERIES = 4
_TRIAL_K = 100
_TRIAL_FLOATS = 2**26
_WARM = 32  # kernels are compiled beforehand for up to this many queries at once
# Columns of the copy are a multiple of it: a kernel reads them in such groups.
_LANES = 16

# Returns the (Q, N) products of (Q, D) queries and (N, D) rows of int8, in the given
# int32 memory or its own.
CodeProducts = Callable[[Tensor, Tensor, Tensor], Tensor]


class ScoreBounds:
    """Finds the greatest products of queries with I rows; safe to call from several threads.

    Args:
        codes: (I, D) int8 copy of the rows, with columns of zeros up to a multiple of 16.
        scales: (I,) float32; codes times scale approximate a row.
        errors: (I,) float32 upper bounds of the norm of row minus codes times scale.
        norms: (I,) float32 upper bounds of the norm of codes times scale.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, errors: Float32s, norms: Float32s
    ) -> None:
        self.codes = codes
        self._scales = scales
        self._errors = errors
        # A norm of 0 would make a bound of width 0.
        self._norms = np.maximum(norms, np.float32(1e-30))
        self._block_maxima = []
        for block in self._blocks():
            self._block_maxima.append(
                (float(errors[block].max()), float(self._norms[block].max()))
            )
        self._greatest = max(error + norm for error, norm in self._block_maxima)
        self._kernel: CodeProducts = _int32_products
        self._buffers = threading.local()

    @property
    def most_queries(self) -> int:
        """Number of queries at once beyond which products of all rows are faster."""
        return _MOST_QUERIES.get(self._kernel, sys.maxsize)

    @property
    def _slack(self) -> float:
        """Roundings of a product, as a share of its factors' norms."""
        # In float32 D each, the bound's and the exact one's; and one of the kernel.
        return (self.codes.shape[1] + 8) * 2.0**-22 + _KERNELS[self._kernel]

    @classmethod
    def of_rows(cls, blocks: Iterable[Tensor], shape: tuple[int, int]) -> ScoreBounds:
        """Copies float32 rows, streamed in blocks, ``shape`` (I, D) in total."""
        size, width = shape
        codes = torch.zeros(size, -(-width // _LANES) * _LANES, dtype=torch.int8)
        scales = torch.empty(size)
        errors = torch.empty(size)
        norms = torch.empty(size)
        start = 0
        for block in blocks:
            rows = slice(start, start + len(block))
            coded, scale = encode(block, "int8")
            assert scale is not None
            # In float64, so that the errors are those of the codes; the factors cover
            # the rounding to float32.
            near = coded.double() * scale.double()[:, None]
            codes[rows, :width] = coded
            scales[rows] = scale
            errors[rows] = (block.double() - near).norm(dim=1) * (1 + 2.0**-22)
            norms[rows] = near.norm(dim=1) * (1 + 2.0**-22)
            start += len(block)
        return cls(codes, scales, errors.numpy(), norms.numpy())

    @staticmethod
    def worth(rows: int, width: int) -> bool:
        """Returns whether a copy of this many numbers is worth its cost and its memory."""
        return _WORTH_FLOATS <= rows * width <= _MOST_FLOATS

    def pays(
        self,
        blocks: Callable[[], Iterable[Tensor]],
        rows: Callable[[Positions], Float32s],
    ) -> bool:
        """Measures on this processor which kernel is fastest, and whether bounds are faster than all products.

        Some processors are slow with 8 bits, and the bounds of nearly equal rows rule out too few.

        Args:
            blocks: function that yields the float32 rows as a search of all of them reads them.
            rows: see :meth:`greatest`.
        """
        size = len(self.codes)
        queries = rows(np.linspace(0, size - 1, _TRIAL_QUERIES).astype(np.int64))
        query = torch.from_numpy(queries[0])
        # As many rows as no cache holds: a server's next request finds none there.
        count = min(size, max(1, _TRIAL_FLOATS // self.codes.shape[1]))
        memory = torch.empty(1, min(_ROWS, size), dtype=torch.int32)

        def products_of_all() -> None:
            done = 0
            for block in blocks():
                torch.mv(block, query)
                done += len(block)
                if done >= count:
                    break

        def products_of_copy(kernel: CodeProducts) -> None:
            for block in self._blocks():
                codes = self.codes[block]
                kernel(codes[:1], codes, memory[:, : len(codes)])
                if block.stop >= count:
                    break

        # Only the products: the steps after them cost the same either way.
        least_s = _seconds(products_of_all)
        codes = self.codes[:_ROWS]
        exact = _int32_products(codes[:1], codes, memory).double()
        fastest: CodeProducts | None = None
        for kernel, rounding in _KERNELS.items():
            error = kernel(codes[:1], codes, memory) - exact
            if not (error.abs() <= rounding * exact.abs()).all():
                continue
            seconds = _seconds(functools.partial(products_of_copy, kernel))
            if seconds < least_s:
                least_s = seconds
                fastest = kernel
        if fastest is None:
            return False
        self._kernel = fastest
        k = max(1, min(_TRIAL_K, size // (2 * _SHARE)))
        return None not in self.greatest(queries, k, rows)

    def warm_up(self) -> None:
        """Compiles the kernels beforehand; each takes some milliseconds of the first search otherwise."""
        count = 1
        while count <= min(_WARM, self.most_queries):
            # A kernel depends on a block's length: all have one length, except perhaps
            # the last.
            for block in {
                len(self.codes[each]): each for each in self._blocks()
            }.values():
                codes = self.codes[block]
                products = torch.empty(count, len(codes), dtype=torch.int32)
                self._kernel(codes[:1].expand(count, -1).contiguous(), codes, products)
            count *= 2

    def greatest(
        self,
        queries: Float32s,
        k: int,
        rows: Callable[[Positions], Float32s],
        allowed: Bools | None = None,
        excluded: Sequence[Positions] = (),
    ) -> list[TopProducts | None]:
        """Returns positions and values of each query's K greatest products, descending; ties are in order of positions.

        A result is shorter than K if fewer rows remain. It is None if K, or the number of rows to compute exactly, is a
        large share of all rows, or if numbers are too large or too small for bounds.

        Args:
            queries: (Q, D), finite.
            k: results per query, K.
            rows: function from positions (N,) to exact rows (N, D).
            allowed: (I,) bool, True for positions to return; None for all.
            excluded: further positions to leave out for each query; empty for none.
        """
        size = len(self.codes)
        if k * _SHARE > size:
            return [None] * len(queries)
        searches = [
            _Query(query, k, self._greatest, self._slack, size // _SHARE)
            for query in queries
        ]
        # A kernel is compiled for each number of queries, so numbers are rounded up to
        # powers of two.
        coded = np.zeros(
            (1 << (len(searches) - 1).bit_length(), self.codes.shape[1]), np.int8
        )
        coded[: len(searches), : queries.shape[1]] = [query.codes for query in searches]
        products, scores = self._memory(len(coded) * min(_ROWS, size))
        for block, block_maxima in zip(self._blocks(), self._block_maxima, strict=True):
            mask: Bools | None = None
            if allowed is not None:
                mask = allowed[block]
                if not mask.any():
                    continue
            count = block.stop - block.start
            of_block = self._kernel(
                torch.from_numpy(coded),
                self.codes[block],
                products[: len(coded) * count].view(-1, count),
            )
            for index, query in enumerate(searches):
                if not query.bounded:
                    continue
                copy_scores = (
                    scores[:count].copy_(of_block[index]).mul_(self._scales[block])
                )
                values = copy_scores.numpy()
                if excluded:
                    out = excluded[index]
                    values[
                        out[(out >= block.start) & (out < block.stop)] - block.start
                    ] = -np.inf
                query.add(
                    block.start,
                    values,
                    self._errors[block],
                    self._norms[block],
                    block_maxima,
                    rows,
                    mask,
                )
        return [query.result() for query in searches]

    def _blocks(self) -> list[slice]:
        size = len(self.codes)
        return [
            slice(start, min(start + _ROWS, size)) for start in range(0, size, _ROWS)
        ]

    def _memory(self, products: int) -> tuple[Tensor, Tensor]:
        """Returns this thread's reusable buffers for int32 products and one query's scores."""
        buffers: tuple[Tensor, Tensor] | None = getattr(self._buffers, "pair", None)
        if buffers is None or len(buffers[0]) < products:
            buffers = self._buffers.pair = (
                torch.empty(products, dtype=torch.int32),
                torch.empty(min(_ROWS, len(self.codes))),
            )
        return buffers


class _Query:
    """One query in 8 bits and its greatest products so far. Scores of the copy are in units of the query's scale.

    Attributes:
        bounded: whether the bounds can decide this query.
        codes: (D,) whole numbers from -127 to 127.
        of_errors: factor of a row's error in the width of its bound.
        of_norms: factor of a row's norm in that width, for the query's own error and for rounding.
    """

    def __init__(
        self, query: Float32s, k: int, greatest: float, slack: float, row_budget: int
    ) -> None:
        exact = query.astype(np.float64)
        norm = float(exact @ exact) ** 0.5
        self.scale = float(max(exact.max(), -exact.min())) / 127
        products = (norm * greatest, norm * greatest / max(self.scale, _LEAST))
        self.bounded = (
            self.scale > _LEAST and min(products) > _LEAST and max(products) < _GREATEST
        )
        self.codes = np.zeros(len(query))
        if self.bounded:
            self.codes = np.rint(exact / self.scale)
            error = exact - self.codes * self.scale
            self.of_errors = norm / self.scale * (1 + slack)
            own = float(error @ error) ** 0.5
            self.of_norms = (own * (1 + slack) + slack * norm) / self.scale
        self._query = query
        self._k = k
        self._row_budget = row_budget
        self._kth_product: float | None = None  # the K-th greatest product so far
        self._positions = np.empty(0, np.int64)
        self._values = np.empty(0, np.float32)

    def add(
        self,
        start: int,
        copy_scores: Float32s,
        errors: Float32s,
        norms: Float32s,
        block_maxima: tuple[float, float],
        rows: Callable[[Positions], Float32s],
        allowed: Bools | None,
    ) -> None:
        """Adds a block: computes the exact products of the rows that can be among the greatest K.

        Args:
            start: first position of the block.
            copy_scores: (n,) scores of the copy, -inf for positions to leave out.
            errors: (n,) errors of the rows.
            norms: (n,) norms of the rows.
            block_maxima: greatest error and norm of the block.
            rows: see :meth:`ScoreBounds.greatest`.
            allowed: (n,) bool, True for positions to return; None for all.
        """
        above = np.inf  # rows with a copy score from here on are computed already
        guesses: list[float] = []
        # The first block has no threshold yet: computing its best rows by the copy
        # gives one.
        if self._kth_product is None:
            guesses = _guesses(copy_scores, self._k, allowed)
        for guess in guesses:
            self._compute(start, _between(copy_scores, guess, above, allowed), rows)
            above = guess
            if self._kth_product is not None:
                break
        if self._kth_product is None:
            # All rows so far were computed exactly, and they are fewer than K.
            self.bounded = self.bounded and above == _LOWEST
            return
        threshold = self._kth_product / self.scale
        block_threshold = (
            threshold
            - self.of_errors * block_maxima[0]
            - self.of_norms * block_maxima[1]
        )
        # First by the block's widest bound, one comparison a row; only the survivors
        # are bounded one by one.
        if block_threshold < above:
            survivors = _between(copy_scores, block_threshold, above, allowed)
            reach = (
                self.of_errors * errors[survivors] + self.of_norms * norms[survivors]
            )
            self._compute(
                start, survivors[copy_scores[survivors] + reach >= threshold], rows
            )

    def _compute(
        self, start: int, indices: Positions, rows: Callable[[Positions], Float32s]
    ) -> None:
        self._row_budget -= len(indices)
        if self._row_budget < 0:
            self.bounded = False
        if not self.bounded or not len(indices):
            return
        positions = indices + start
        # einsum computes row by row, so that equal rows have equal products.
        self._positions = np.concatenate([self._positions, positions])
        self._values = np.concatenate(
            [self._values, np.einsum("nd,d->n", rows(positions), self._query)]
        )
        # Rows of later blocks must exceed it, so each block rules out more than the one
        # before.
        if len(self._values) >= self._k:
            self._kth_product = float(np.partition(self._values, -self._k)[-self._k])

    def result(self) -> TopProducts | None:
        """Returns the positions and products of the greatest K; None if the bounds cannot decide the query."""
        if not self.bounded:
            return None
        # By value, and equal values by position.
        order = np.lexsort((self._positions, -self._values))[: self._k]
        return self._positions[order], self._values[order]


def _between(
    scores: Float32s, low: float, high: float, allowed: Bools | None
) -> Positions:
    """Returns (M,) indices of the allowed scores from ``low`` to below ``high``."""
    inside = scores >= low
    if high != np.inf:
        inside &= scores < high
    indices = np.flatnonzero(inside)
    # They are few: looking them up takes a hundredth of the time of writing -inf to
    # half of the scores.
    if allowed is not None:
        indices = indices[allowed[indices]]
    return indices


def _guesses(scores: Float32s, k: int, allowed: Bools | None) -> list[float]:
    """Estimates the allowed scores at about ranks 2 K, 8 K and 32 K from a sample."""
    positions = _drawn(len(scores))
    sample = scores[positions]
    if allowed is not None:
        sample = np.where(allowed[positions], sample, np.float32(-np.inf))
    sample = np.sort(sample)[::-1]
    guesses = []
    for times in (1, 4, 16):
        # Rather too low: a guess that K rows do not reach is followed by the next.
        rank = min(_SAMPLE, 2 * k * times * _SAMPLE // len(scores) + 4 * times)
        guesses.append(max(float(sample[rank - 1]), _LOWEST))
    return guesses


@functools.cache
def _drawn(size: int) -> Positions:
    """Draws a fixed random sample of positions; every n-th could be of one category in an ordered catalogue."""
    return np.random.default_rng(0).integers(0, size, _SAMPLE)


def _int32_products(queries: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """See :data:`CodeProducts`: exact, and fast where the processor has an instruction for it (VNNI, AMX)."""
    return torch._int_mm(queries, rows.T, out=out)


def _bfloat16_products(queries: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """See :data:`CodeProducts`: sums in float32, rounded to bfloat16; fast with AVX2 too."""
    # Whole numbers up to 256 are exact in bfloat16.
    return torch._weight_int8pack_mm(queries.bfloat16(), rows, _ones(len(rows)))


# Kernels, and the greatest relative error of their products.
_KERNELS: Mapping[CodeProducts, float] = {
    _int32_products: 0.0,
    _bfloat16_products: 2.0**-8,
}
# Queries at once up to which the copy is faster: for 8, products of all rows in float32
# take less than this kernel, which converts the codes for every 4.
_MOST_QUERIES: Mapping[CodeProducts, int] = {_bfloat16_products: 4}


@functools.lru_cache(maxsize=8)
def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _seconds(function: Callable[[], object]) -> float:
    """Returns the shortest of three calls in seconds; a first call warms up kernel and memory."""
    function()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
