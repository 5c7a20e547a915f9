"""Exact indexes: compare every candidate, or rule it out by an 8-bit copy of the rows, so that no result is missed.

TopK keeps the greatest scores over blocks of candidates, exact to the last tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize, pad

from torchrec_ext.retrieval.index.bounds import Bools, Float32s, ScoreBounds
from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.schema.validation import check_least

_SAMPLE = 8_192  # scores of the first block, to estimate the first threshold


class TopK:
    """Keeps the K greatest scores of each query over blocks of scores. Among equal scores the smaller position wins.

    Args:
        queries: number of queries, Q.
        k: number of scores to keep for each, K.
    """

    def __init__(self, queries: int, k: int) -> None:
        self._k = k
        self._best = [_Best(k) for _ in range(queries)]

    def add(self, start: int, scores: Tensor, allowed: Bools | None = None) -> None:
        """Adds scores (Q, n) of the positions from ``start`` on; call it in ascending order.

        Scores of -inf are skipped, and so are positions that are False in ``allowed`` (n,).
        """
        for best, row in zip(self._best, scores.numpy(), strict=True):
            best.add(start, row, allowed)

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns scores (Q, K), descending, and positions (Q, K), padded with -inf and -1."""
        scores = np.full((len(self._best), self._k), -np.inf, np.float32)
        positions = np.full((len(self._best), self._k), -1)
        for row, best in enumerate(self._best):
            indices, values = best.result()
            scores[row, : len(values)] = values
            positions[row, : len(indices)] = indices
        return torch.from_numpy(scores), torch.from_numpy(positions)


class _Best:
    """The K greatest scores of one query.

    A block is compared with the K-th score so far, and only greater scores are sorted: sorting everything would cost as
    much as the products themselves. Numpy finds the few greater scores of a block ten times as fast as torch.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._threshold = -np.inf
        self._candidates: list[tuple[NDArray[np.int64], Float32s]] = []
        self._waiting = 0

    def add(self, start: int, scores: Float32s, allowed: Bools | None) -> None:
        if not self._candidates and len(scores) > self._k:
            # The K-th of some of them is no greater than that of all, and takes a tenth
            # of the time.
            step = max(1, len(scores) // max(_SAMPLE, 8 * self._k))
            sample = scores[::step]
            if allowed is not None:
                sample = np.where(allowed[::step], sample, np.float32(-np.inf))
            self._threshold = float(
                np.nextafter(_kth(sample, self._k), np.float32(-np.inf))
            )
        indices = np.flatnonzero(scores > self._threshold)
        if allowed is not None:
            indices = indices[allowed[indices]]
        if not len(indices):
            return
        greater = scores[indices]
        # This happens with many equal scores, or with scores that rise with the
        # position.
        if len(greater) > self._k:
            kth = _kth(greater, self._k)
            indices = indices[greater >= kth]
            greater = greater[greater >= kth]
            # K scores precede the later positions, so equal later ones lose.
            self._threshold = float(kth)
        self._candidates.append((indices + start, greater))
        self._waiting += len(indices)
        if self._waiting > 2 * self._k:
            self.result()

    def result(self) -> tuple[NDArray[np.int64], Float32s]:
        """Returns positions and scores, K or fewer, greatest first, and forgets all others."""
        if not self._candidates:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        positions, scores = (
            np.concatenate(arrays) for arrays in zip(*self._candidates, strict=True)
        )
        # Equal scores stay in the order of their positions.
        order = np.argsort(-scores, kind="stable")[: self._k]
        positions = positions[order]
        scores = scores[order]
        if len(scores) == self._k:
            self._threshold = float(scores[-1])
        self._candidates = [(positions, scores)]
        self._waiting = 0
        return positions, scores


def _kth(scores: Float32s, k: int) -> np.float32:
    """Returns the K-th greatest of more than K scores."""
    kth: np.float32 = np.partition(scores, -k)[-k]
    return kth


Metric = Literal["dot", "cosine", "top_nn"]
# Up to these shares of allowed rows, gathering them is faster than reading, or than
# running a network over, all rows.
FEW = 1 / 32
FEW_OF_NETWORK = 3 / 4
# Rows are multiplied in groups of this many: BLAS sums the rows of a smaller rest in
# another order, and then a row's score would depend on its neighbours, and so on the
# filter.
_LANES = 64


class Blockwise:
    """Base of the exact indexes: scores block by block, filtered, into :class:`TopK`."""

    metric: Metric
    _by_products = True
    _few_share = FEW
    _bounds: ScoreBounds | None = None
    _inverse_norms: Tensor | None = None

    def __init__(self, source: EmbeddingStore | Tensor, rows_per_block: int) -> None:
        self.source = source
        self.size = len(source)
        self._rows = max(1, rows_per_block)
        # None if all are live, the usual case: then no mask is applied to any block.
        self.live: Tensor | None = None
        if not isinstance(source, Tensor) and not source.live.all():
            # A copy, because torch warns about the read-only mapped file.
            self.live = torch.from_numpy(source.live.copy())

    def search(
        self,
        queries: Tensor,
        k: int,
        *,
        allowed: Tensor | None = None,
        excluded: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`~torchrec_ext.retrieval.index.exact.Index`."""
        check_request(queries, k, self.size, allowed, excluded)
        if not isinstance(self.source, Tensor):
            self.source.check()
        with torch.inference_mode():
            prepared = self.prepared(queries)
            candidate_mask = self.candidate_mask(allowed)
            excluded_positions = [positions.numpy() for positions in excluded or ()]
            mask: Bools | None = None
            if candidate_mask is not None:
                mask = candidate_mask.numpy()
                count = np.count_nonzero(mask)
                if count <= self.size * self._few_share:
                    return self._search_few(
                        prepared, k, np.flatnonzero(mask), excluded_positions
                    )
                # Every block would be masked for nothing.
                if count == self.size:
                    mask = None
            bounds = self._bounds_for(len(prepared))
            if bounds is None:
                return self._search_all(prepared, k, mask, excluded_positions)
            results = []
            bounded = bounds.greatest(
                self.factors(prepared).numpy(),
                k,
                self._gathered,
                mask,
                excluded_positions,
            )
            for row, best in enumerate(bounded):
                query = prepared[row : row + 1]
                if best is None:
                    results.append(
                        self._search_all(
                            query, k, mask, excluded_positions[row : row + 1]
                        )
                    )
                    continue
                positions, products = best
                scores = torch.from_numpy(products)[None] + self.constant(query)
                results.append(
                    pad_results(scores, torch.from_numpy(positions)[None], k)
                )
        return join_results(results)

    def candidate_mask(self, allowed: Tensor | None) -> Tensor | None:
        """Returns (I,) bool, True for live positions that are allowed; None for all positions."""
        if self.live is None:
            return allowed
        if allowed is None:
            return self.live
        return allowed & self.live

    def quantize(self) -> bool:
        """Adds an 8-bit copy of the rows. Searches then skip most rows and read a quarter of the bytes.

        Results stay exact: see :class:`~torchrec_ext.retrieval.index.bounds.ScoreBounds`. No copy is kept if scores are
        not products of query and row, for fewer than 2^20 numbers or more than 2^29, or if a trial on this processor is
        not faster.

        Returns:
            Whether a copy is kept.
        """
        width = _width(self.source)
        if (
            self._bounds is None
            and self._by_products
            and ScoreBounds.worth(self.size, width)
        ):
            bounds = ScoreBounds.of_rows(
                (self.rows(start, stop) for start, stop in self.blocks()),
                (self.size, width),
            )
            if bounds.pays(
                lambda: (self.block(*each) for each in self.blocks()), self._gathered
            ):
                bounds.warm_up()
                self._bounds = bounds
        return self.quantized

    @property
    def quantized(self) -> bool:
        """Whether :meth:`quantize` keeps a copy."""
        return self._bounds is not None

    def _search_all(
        self,
        prepared: Tensor,
        k: int,
        mask: Bools | None,
        excluded_positions: Sequence[NDArray[np.int64]],
    ) -> tuple[Tensor, Tensor]:
        best = TopK(len(prepared), k)
        # One buffer for all blocks: allocating one per block costs as much as finding
        # its greatest scores.
        buffer = torch.empty(len(prepared) * min(self._rows, self.size))
        for start, stop in self.blocks():
            # Filling scores with -inf where the mask is False would take a quarter of
            # the time of the products.
            allowed: Bools | None = None
            if mask is not None:
                allowed = mask[start:stop]
                if not allowed.any():
                    continue
            scores = buffer[: len(prepared) * (stop - start)].view(len(prepared), -1)
            self._score(prepared, self.block(start, stop), slice(start, stop), scores)
            for row, positions in zip(scores.numpy(), excluded_positions, strict=False):
                row[
                    positions[(positions >= start) & (positions < stop)] - start
                ] = -np.inf
            best.add(start, scores, allowed)
        return best.result()

    def _search_few(
        self,
        prepared: Tensor,
        k: int,
        allowed: NDArray[np.int64],
        excluded_positions: Sequence[NDArray[np.int64]],
    ) -> tuple[Tensor, Tensor]:
        """Scores the positions ``allowed`` (N,), ascending, and no others."""
        best = TopK(len(prepared), k)
        for start in range(0, len(allowed), self._rows):
            positions = allowed[start : start + self._rows]
            scores = torch.empty(len(prepared), len(positions))
            self._score(
                prepared,
                torch.from_numpy(self.stored(positions)),
                torch.from_numpy(positions),
                scores,
            )
            for row, left_out in zip(scores.numpy(), excluded_positions, strict=False):
                row[np.isin(positions, left_out)] = -np.inf
            best.add(start, scores)
        best_scores, indices = best.result()
        # Index -1 of the padding reads the last entry, -1.
        return best_scores, torch.from_numpy(np.append(allowed, -1)[indices.numpy()])

    def _bounds_for(self, queries: int) -> ScoreBounds | None:
        """Returns the bounds, if they are faster than all products for so many queries at once."""
        if self._bounds is None or queries > self._bounds.most_queries:
            return None
        return self._bounds

    def _score(
        self, prepared: Tensor, rows: Tensor, positions: slice | Tensor, out: Tensor
    ) -> None:
        if self._bounds_for(len(prepared)) is None:
            self.fill_scores(prepared, rows, positions, out)
            return
        # As the bounds compute the rows that they cannot rule out, so that no filter
        # changes an item's score.
        if self._inverse_norms is not None:
            rows = rows * self._inverse_norms[positions][:, None]
        for query, scores in zip(torch.split(prepared, 1), out, strict=True):
            products = np.einsum(
                "nd,d->n", rows.numpy(), self.factors(query)[0].numpy()
            )
            torch.add(torch.from_numpy(products), self.constant(query), out=scores)

    def stored(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the (N, D) rows at positions (N,)."""
        if isinstance(self.source, Tensor):
            return self.source.numpy().take(positions, axis=0)
        if self.source.format.exact:
            return self.source.matrix().numpy().take(positions, axis=0)
        return self.source.rows(torch.from_numpy(positions)).numpy()

    def _gathered(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the (N, D) rows at positions (N,), normalised for a cosine."""
        rows = self.stored(positions)
        if self._inverse_norms is not None:
            rows *= self._inverse_norms.numpy()[positions, None]
        return rows

    def blocks(self) -> list[tuple[int, int]]:
        """Returns the first and last + 1 position of each block."""
        return [
            (start, min(start + self._rows, self.size))
            for start in range(0, self.size, self._rows)
        ]

    def prepared(self, queries: Tensor) -> Tensor:
        """Returns queries (Q, D) in the form that the other methods take."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns (stop - start, D) rows, normalised for a cosine."""
        return self.block(start, stop)

    def factors(self, prepared: Tensor) -> Tensor:
        """Returns the (Q, D) factors of the rows, for scores that are products."""
        return prepared

    def constant(self, prepared: Tensor) -> Tensor | float:
        """Returns the (Q,) constants to add to the products."""
        return 0.0

    def fill_scores(
        self, queries: Tensor, rows: Tensor, positions: slice | Tensor, out: Tensor
    ) -> None:
        """Fills ``out`` (Q, N) with the scores of the stored rows (N, D) at ``positions``."""
        raise NotImplementedError

    def block(self, start: int, stop: int) -> Tensor:
        """Returns (stop - start, D) rows as they are kept."""
        if isinstance(self.source, Tensor):
            return self.source[start:stop]
        return self.source.block(start, stop)


def check_request(
    queries: Tensor,
    k: int,
    size: int,
    allowed: Tensor | None,
    excluded: Sequence[Tensor] | None,
) -> None:
    """Validates the arguments of an index's ``search``; raises ValueError."""
    # Numpy's calls take a fraction of torch's.
    if queries.dim() != 2 or not len(queries) or not np.isfinite(queries.numpy()).all():
        raise ValueError(
            f"queries: shape {tuple(queries.shape)}; must be (Q, D) finite numbers, Q at least 1"
        )
    check_least("k", k)
    if allowed is not None and (
        allowed.shape != (size,) or allowed.dtype != torch.bool
    ):
        raise ValueError(
            f"allowed: shape {tuple(allowed.shape)} of {allowed.dtype}; must be ({size},) bool, one for each position"
        )
    if excluded is not None and len(excluded) != len(queries):
        raise ValueError(
            f"excluded: {len(excluded)} sets of positions for {len(queries)} queries; give one for each"
        )
    for each in excluded or ():
        positions = each.numpy()
        if len(positions) and (positions.min() < 0 or positions.max() >= size):
            wrong = int(positions[(positions < 0) | (positions >= size)][0])
            raise ValueError(
                f"excluded: {wrong} is not a position (0 to {size - 1}); leave out unknown ids, -1"
            )


def pad_results(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Pads scores and positions (Q, K or fewer) to (Q, K), with -inf and -1."""
    if scores.shape[1] == k:
        return scores, positions
    padding = (0, k - scores.shape[1])
    return pad(scores, padding, value=-torch.inf), pad(positions, padding, value=-1)


def join_results(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins the scores and positions (1, K) of one query each to (Q, K)."""
    scores, positions = zip(*results, strict=True)
    return torch.cat(scores), torch.cat(positions)


_BLOCK = 2**24  # bytes of float32 rows read at a time
# bytes of rows in other formats, so that the decoded rows stay in the cache
_DECODED = 2**20
_UNFOLDED = 2**28  # bytes of rows with the first layer's half applied
# floats of pairs at a time through a network: a core's share of the second-level cache
_PAIRS = 2**17
_EPS = 1e-12  # as in torch.nn.functional.normalize


class Index(Protocol):
    """Finds the positions of the greatest scores.

    Attributes:
        metric: ``dot``, ``cosine`` or ``top_nn``, whose scores are the model's own and final.
        size: number of positions, I.
    """

    metric: Metric
    size: int

    def search(
        self,
        queries: Tensor,
        k: int,
        *,
        allowed: Tensor | None = None,
        excluded: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns scores (Q, K), descending, and positions (Q, K) int64, padded with -inf and -1.

        Filters act inside the search, so it returns K results if K candidates pass. Ties are in the order of positions.

        Args:
            queries: (Q, D) outputs of the query towers.
            k: results per query, 1 or more; the rest is padding if there are fewer.
            allowed: (I,) bool, True for positions to return, such as the items of a category.
            excluded: positions to leave out of each query's results, such as items the user has taken.

        Raises:
            ValueError: queries of another width or with numbers that are not finite, a wrong k or filter.
        """
        ...


class ExactIndex(Blockwise):
    """Searches every candidate by dot product or cosine, in blocks of a memory-mapped store, without building anything.

    Args:
        source: store, or vectors (I, D). A store's tombstones are never returned.
        metric: ``dot`` or ``cosine``: that of the model's loss.

    Example:
        >>> index = ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), "dot")
        >>> index.search(torch.tensor([[1.0, 0.5]]), 2)[1].tolist()
        [[2, 0]]
    """

    def __init__(self, source: EmbeddingStore | Tensor, metric: Metric) -> None:
        check_metric(metric)
        self.width = _width(source)
        super().__init__(source, _bytes(source) // (4 * max(1, self.width)))
        self.metric = metric
        if metric == "cosine":
            # Stored rows stay as they are, in the mapped file: a product with 1 / norm
            # follows each score.
            norms = [
                self.block(start, stop).norm(dim=1) for start, stop in self.blocks()
            ]
            self._inverse_norms = (
                torch.cat([torch.empty(0), *norms]).clamp(min=_EPS).reciprocal()
            )

    def rows(self, start: int, stop: int) -> Tensor:
        """See :meth:`Blockwise.rows`."""
        block = self.block(start, stop)
        if self.metric == "cosine":
            return normalize(block)
        return block

    def prepared(self, queries: Tensor) -> Tensor:
        """See :meth:`Blockwise.prepared`.

        Raises:
            ValueError: the queries have another width than the vectors.
        """
        if queries.shape[1] != self.width and self.size:
            raise ValueError(
                f"queries: {queries.shape[1]} wide, the stored vectors are {self.width}; give the query tower's outputs"
            )
        if self.metric == "cosine":
            return normalize(queries)
        return queries

    def fill_scores(
        self, queries: Tensor, rows: Tensor, positions: slice | Tensor, out: Tensor
    ) -> None:
        """See :meth:`Blockwise.fill_scores`."""
        _products(queries, rows, out)
        if self._inverse_norms is not None:
            out.mul_(self._inverse_norms[positions])


class ScoredIndex(Blockwise):
    """Searches every candidate by the model's own interaction over projected rows: exact retrieval under a top NN.

    Args:
        projection: projection of the interaction.
        source: the catalogue's ``projection.candidates(...)``, in a store or as (I, width).
    """

    metric: Metric = "top_nn"

    def __init__(self, projection: Projection, source: EmbeddingStore | Tensor) -> None:
        width = _width(source)
        if len(source) and width != projection.width:
            raise ValueError(
                f"source: rows are {width} wide, the projection's {projection.width}; store projection.candidates(...)"
            )
        floats_per_block = _bytes(source) // 4 if projection.linear else _PAIRS
        super().__init__(source, floats_per_block // max(1, projection.width))
        self.projection = projection
        self._by_products = projection.linear
        self._unfolded_rows: Tensor | None = None
        if not projection.linear:
            self._few_share = FEW_OF_NETWORK

    def quantize(self) -> bool:
        """See :meth:`Blockwise.quantize`. Before the rows of a top NN, its first layer's half of an item is applied.

        Each search would do so otherwise, for half of its time. The result is kept up to 256 MiB.
        """
        wider = self.projection.unfolded()
        if wider is not None and 4 * self.size * wider.width <= _UNFOLDED:
            halves = torch.empty(self.size, wider.width)
            for start, stop in self.blocks():
                block = self.block(start, stop)
                halves[start:stop] = wider.candidates(_padded(block))[: len(block)]
            self._unfolded_rows = halves
            self.projection = wider
            self._rows = max(1, _PAIRS // wider.width)
        return super().quantize()

    def block(self, start: int, stop: int) -> Tensor:
        """See :meth:`Blockwise.block`."""
        if self._unfolded_rows is not None:
            return self._unfolded_rows[start:stop]
        return super().block(start, stop)

    def stored(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """See :meth:`Blockwise.stored`."""
        if self._unfolded_rows is not None:
            return self._unfolded_rows.numpy().take(positions, axis=0)
        return super().stored(positions)

    def prepared(self, queries: Tensor) -> Tensor:
        """See :meth:`Blockwise.prepared`."""
        return self.projection.query(queries)

    def factors(self, prepared: Tensor) -> Tensor:
        """See :meth:`Blockwise.factors`."""
        return prepared[:, :-1]

    def constant(self, prepared: Tensor) -> Tensor:
        """See :meth:`Blockwise.constant`."""
        return prepared[:, -1]

    def fill_scores(
        self, queries: Tensor, rows: Tensor, positions: slice | Tensor, out: Tensor
    ) -> None:
        """See :meth:`Blockwise.fill_scores`."""
        if self.projection.linear:
            _products(self.factors(queries), rows, out)
            out.add_(self.constant(queries)[:, None])
            return
        padded = _padded(rows)
        buffer = torch.empty_like(padded)
        for query, scores in zip(queries, out, strict=True):
            scores.copy_(
                self.projection.score_in_place(query, padded, buffer)[: len(rows)]
            )


def _padded(rows: Tensor) -> Tensor:
    padding = -len(rows) % _LANES
    if padding:
        rows = pad(rows, (0, 0, 0, padding))
    return rows


def _width(source: EmbeddingStore | Tensor) -> int:
    if isinstance(source, Tensor):
        return source.shape[1]
    return source.width


def _bytes(source: EmbeddingStore | Tensor) -> int:
    """Returns the bytes of a block of rows."""
    if isinstance(source, Tensor) or source.format.exact:
        return _BLOCK
    return _DECODED


def _products(queries: Tensor, rows: Tensor, out: Tensor) -> None:
    """Fills ``out`` (Q, N) with the products of queries (Q, D) and rows (N, D)."""
    rest = len(rows) % _LANES
    if rest and len(rows) > rest:
        _products(queries, rows[:-rest], out[:, :-rest])
    if rest:
        # Rows of zeros fill the last group; only the products of its own rows are
        # taken.
        last = torch.zeros(_LANES, rows.shape[1])
        last[:rest] = rows[len(rows) - rest :]
        products = torch.empty(len(queries), _LANES)
        _products(queries, last, products)
        out[:, len(rows) - rest :] = products[:, :rest]
    elif len(queries) == 1:  # numpy's matrix-vector product takes 1.2 times as long
        torch.mv(rows, queries[0], out=out[0])
    else:
        torch.mm(queries, rows.T, out=out)


def check_metric(metric: str) -> None:
    """Raises ValueError unless the metric is dot or cosine."""
    if metric not in ("dot", "cosine"):
        remedy = "one of dot, cosine"
        if metric == "top_nn":
            remedy = "a top NN is searched by ScoredIndex"
        raise ValueError(
            f"metric={metric!r}: must be dot or cosine, that of the model's loss; {remedy}"
        )
