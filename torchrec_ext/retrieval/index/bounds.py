"""ScoreBounds: how great each score can be, from an 8-bit copy of the rows, so that few need be computed.

An exact search reads every row, and the memory's speed is its limit; of 8 bits instead of 32 a quarter is read. How far
a score of the copy can be from the true one is known by the Cauchy-Schwarz inequality, so what cannot be among the
greatest K is passed over and the rest, some more than K, is computed exactly: nothing is missed. The first stage of
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
Places = NDArray[np.int64]
Found = tuple[Places, Floats]
_ROWS = 2**17  # at a time: what is made of them stays in the cache
_SAMPLE = 2_048  # of these, scores that say what is worth a look
_WORTH_FLOATS = 2**20  # of rows below which reading them costs less than the steps here
_MOST_FLOATS = 2**29  # of the copy, which every process has of its own
_SHARE = 32  # K, and what is computed of the rows, may be this part of them: else it is faster to compute them all
_LOWEST = float(np.finfo(np.float32).min)
_LEAST, _GREATEST = 1e-25, 1e37  # between these no product of norms loses digits, or overflows
_TRIED, _K = 4, 100  # queries that say whether it pays, and how many of the greatest they ask for
_WARM = 32  # queries at once, for which kernels are made beforehand


class ScoreBounds:
    """Of products of queries with I rows. May be asked from several threads.

    Args:
        codes: (I, D) int8.
        scales: (I,) float32; a row is near its codes times its scale.
        errors: (I,) float32, the norm of what it differs by, or more.
        norms: (I,) float32, that of codes times scale, or more.
    """

    def __init__(self, codes: Tensor, scales: Tensor, errors: Floats, norms: Floats) -> None:
        self.codes, self._scales, self._errors = codes, scales, errors
        self._norms = np.maximum(
            norms, np.float32(1e-30)
        )  # so that a bound is never narrower than the least numbers there are
        self._most = [(float(errors[own].max()), float(self._norms[own].max())) for own in self._blocks()]
        self._greatest = max(error + norm for error, norm in self._most)
        # In float32 a product is off by up to D roundings of its factors' norms: the bound's, and the exact one's.
        self._slack = (codes.shape[1] + 8) * 2.0**-22
        self._buffers = threading.local()

    @classmethod
    def of_rows(cls, blocks: Iterable[Tensor], shape: tuple[int, int]) -> ScoreBounds:
        """Of rows in float32, streamed, of ``shape`` I, D together."""
        codes = torch.empty(shape, dtype=torch.int8)
        scales, errors, norms = (torch.empty(shape[0]) for _ in range(3))
        start = 0
        for block in blocks:
            own = slice(start, start + len(block))
            coded, scale = encode(block, "int8")
            assert scale is not None
            near = coded.double() * scale.double()[:, None]
            codes[own], scales[own] = coded, scale
            errors[own] = (block.double() - near).norm(dim=1) * (1 + 2.0**-22)
            norms[own] = near.norm(dim=1) * (1 + 2.0**-22)
            start += len(block)
        return cls(codes, scales, errors.numpy(), norms.numpy())

    @staticmethod
    def worth(rows: int, width: int) -> bool:
        """Whether so many rows are worth a copy in 8 bits, and not too many for one."""
        return _WORTH_FLOATS <= rows * width <= _MOST_FLOATS

    def pays(self, first: Tensor, rows: Callable[[Places], Floats]) -> bool:
        """Whether it is faster here than the products of all rows.

        Not every processor is fast with 8 bits, and of rows that are nearly alike the bounds tell too little.

        Args:
            first: (N, D), rows from the first on; some of them are the queries.
            rows: see :meth:`greatest`.
        """
        queries = first[:: max(1, len(first) // _TRIED)][:_TRIED].numpy()
        if any(
            found is None for found in self.greatest(queries, max(1, min(_K, len(self.codes) // (2 * _SHARE))), rows)
        ):
            return False
        codes, scores = self.codes[: len(first)], np.empty(len(first), np.float32)
        products = torch.empty(1, len(first), dtype=torch.int32)
        # The products alone: what follows takes as long either way, and the rows are in a cache here, in which a
        # server's are not.
        whole = _seconds(lambda: np.dot(first.numpy(), queries[0], out=scores))
        return _seconds(lambda: _int8_products(codes[:1], codes, products)) < whole

    def warm_up(self) -> None:
        """Makes the kernels, each of which would keep the first search that needs it waiting for some milliseconds."""
        count = 1
        while count <= _WARM:
            for own in {len(self.codes[block]): block for block in self._blocks()}.values():
                codes = self.codes[own]
                _int8_products(
                    codes[:1].expand(count, -1).contiguous(), codes, torch.empty(count, len(codes), dtype=torch.int32)
                )
            count *= 2

    def greatest(
        self,
        queries: Floats,
        k: int,
        rows: Callable[[Places], Floats],
        hidden: Tensor | None = None,
        excluded: Sequence[Places] = (),
    ) -> list[Found | None]:
        """For each query the positions of the greatest K of its products, and these, descending; of equal ones the first.

        Fewer where fewer are left. None where K, or what would have to be computed, is a large part of all, or the
        numbers are too large or too small to say.

        Args:
            queries: (Q, D), finite.
            k: K.
            rows: (N, D) of positions (N,), exact.
            hidden: (I,) bool, positions that do not count.
            excluded: for each query more of them; or none at all.
        """
        size = len(self.codes)
        if k * _SHARE > size:
            return [None] * len(queries)
        asked = [_Query(query, k, self._greatest, self._slack, size // _SHARE) for query in queries]
        # Kernels are made for each number of queries: of few numbers few.
        coded = np.zeros((1 << (len(asked) - 1).bit_length(), queries.shape[1]), np.int8)
        coded[: len(asked)] = [query.codes for query in asked]
        products, scores = self._memory(len(coded) * min(_ROWS, size))
        for own, most in zip(self._blocks(), self._most, strict=True):
            count = own.stop - own.start
            of_block = products[: len(coded) * count].view(-1, count)
            _int8_products(torch.from_numpy(coded), self.codes[own], of_block)
            for at, query in enumerate(asked):
                if query.told:
                    near = scores[:count].copy_(of_block[at]).mul_(self._scales[own])
                    if hidden is not None:
                        near.masked_fill_(hidden[own], -torch.inf)
                    values = near.numpy()
                    if excluded:
                        places = excluded[at]
                        values[places[(places >= own.start) & (places < own.stop)] - own.start] = -np.inf
                    query.add(own.start, values, self._errors[own], self._norms[own], most, rows)
        return [query.found() for query in asked]

    def _blocks(self) -> list[slice]:
        size = len(self.codes)
        return [slice(start, min(start + _ROWS, size)) for start in range(0, size, _ROWS)]

    def _memory(self, products: int) -> tuple[Tensor, Tensor]:
        """Of this thread, so that no search waits for pages to be mapped: for int32 products, and the scores of one query."""
        kept: tuple[Tensor, Tensor] | None = getattr(self._buffers, "kept", None)
        if kept is None or len(kept[0]) < products:
            kept = self._buffers.kept = (
                torch.empty(products, dtype=torch.int32),
                torch.empty(min(_ROWS, len(self.codes))),
            )
        return kept


class _Query:
    """One query: in 8 bits, and the greatest of its products so far. Scores of the copy are in units of the query's scale.

    Attributes:
        told: whether the bounds say anything of it.
        codes: (D,) whole numbers from -127 to 127.
        of_errors: what a row's error adds to the reach of a bound.
        of_norms: what its norm adds, for the query's own error and for rounding.
    """

    def __init__(self, query: Floats, k: int, greatest: float, slack: float, most: int) -> None:
        exact = query.astype(np.float64)
        norm, self.scale = float(exact @ exact) ** 0.5, float(max(exact.max(), -exact.min())) / 127
        products = (norm * greatest, norm * greatest / max(self.scale, _LEAST))
        self.told = self.scale > _LEAST and min(products) > _LEAST and max(products) < _GREATEST
        self.codes = np.rint(exact / self.scale) if self.told else np.zeros(len(query))
        if self.told:
            error = exact - self.codes * self.scale
            self.of_errors = norm / self.scale * (1 + slack)
            self.of_norms = (float(error @ error) ** 0.5 + slack * norm) / self.scale
        self._query, self._k, self._left = query, k, most
        self._least: float | None = None  # the K-th greatest product so far
        self._places, self._values = np.empty(0, np.int64), np.empty(0, np.float32)

    def add(
        self,
        start: int,
        near: Floats,
        errors: Floats,
        norms: Floats,
        most: tuple[float, float],
        rows: Callable[[Places], Floats],
    ) -> None:
        """Scores (n,) of the copy from the position ``start`` on, -inf where they do not count.

        Args:
            start: the first position.
            near: the scores.
            errors: (n,) of the rows.
            norms: (n,) of the rows.
            most: the greatest of both.
            rows: see :meth:`ScoreBounds.greatest`.
        """
        above = np.inf  # from here on they have been computed
        for guess in _guesses(near, self._k) if self._least is None else ():
            self._compute(start, _between(near, guess, above), rows)
            above = guess
            if self._least is not None:
                break
        if self._least is None:
            self.told = self.told and above == _LOWEST  # all that count have been computed, fewer than K so far
            return
        least = self._least / self.scale
        enough = least - self.of_errors * most[0] - self.of_norms * most[1]
        if enough < above:
            places = _between(near, enough, above)
            reach = self.of_errors * errors[places] + self.of_norms * norms[places]
            self._compute(start, places[near[places] + reach >= least], rows)

    def _compute(self, start: int, places: Places, rows: Callable[[Places], Floats]) -> None:
        self._left -= len(places)
        if self._left < 0:
            self.told = False
        if not self.told or not len(places):
            return
        places = places + start
        # Row by row, so that equal rows have equal products.
        self._places = np.concatenate([self._places, places])
        self._values = np.concatenate([self._values, np.einsum("nd,d->n", rows(places), self._query)])
        if len(self._values) >= self._k:
            self._least = float(np.partition(self._values, -self._k)[-self._k])

    def found(self) -> Found | None:
        """The positions and products."""
        if not self.told:
            return None
        order = np.lexsort((self._places, -self._values))[: self._k]
        return self._places[order], self._values[order]


def _between(near: Floats, least: float, above: float) -> Places:
    """(M,) places of these scores."""
    return np.flatnonzero(near >= least if above == np.inf else (near >= least) & (near < above))


def _guesses(near: Floats, k: int) -> list[float]:
    """Scores that some 2 K, 8 K and 32 K surpass, by a sample."""
    sample = np.sort(near[_drawn(len(near))])[::-1]
    ranks = [min(_SAMPLE, 2 * k * times * _SAMPLE // len(near) + 4 * times) for times in (1, 4, 16)]
    return [max(float(sample[rank - 1]), _LOWEST) for rank in ranks]


@functools.cache
def _drawn(size: int) -> Places:
    """Some of as many places, drawn once: every n-th would be of one category where a catalogue has an order."""
    return np.random.default_rng(0).integers(0, size, _SAMPLE)


def _int8_products(queries: Tensor, rows: Tensor, out: Tensor) -> None:
    """Fills ``out`` (Q, N) int32 with the products of (Q, D) and (N, D) int8."""
    torch._int_mm(queries, rows.T, out=out)


def _seconds(function: Callable[[], object]) -> float:
    """The least of some calls; the first makes the kernel and reads the rows."""
    function()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
