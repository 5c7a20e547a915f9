"""Indexes: the candidates of the greatest scores. These search all of them, so what they find is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchrec_ext.retrieval.blockwise import Blockwise, Metric
from torchrec_ext.retrieval.projection import Projection
from torchrec_ext.retrieval.store import EmbeddingStore

_BLOCK = 2**24  # bytes of rows at a time, read once
_DECODED = 2**20  # where they are not stored as float32: what is made of them stays in the cache
_PAIRS = 2**17  # floats of pairs at a time through a network: a core's share of the second-level cache
_EPS = 1e-12  # of torch.nn.functional.normalize


class Index(Protocol):
    """Finds the positions of the greatest scores.

    Attributes:
        metric: ``dot``, ``cosine`` or ``top_nn``, whose scores are the model's own and final.
        size: I, positions that it knows.
    """

    metric: Metric
    size: int

    def search(
        self, queries: Tensor, k: int, *, allowed: Tensor | None = None, excluded: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores (Q, K), descending, and positions (Q, K) int64; -inf and -1 where fewer than K are left.

        Filters act inside the search: K are found where K are left.

        Args:
            queries: (Q, D) outputs of the query towers.
            k: K, 1 or more; more than there are gives all.
            allowed: (I,) bool, such as those of a category.
            excluded: for each query the positions to leave out, such as what the user has already taken.

        Raises:
            ValueError: queries of another width or with numbers that are not finite, a wrong k or filter.
        """
        ...


class ExactIndex(Blockwise):
    """Every candidate's dot product or cosine, in blocks of a memory-mapped store: right by construction, nothing to build.

    Args:
        source: a store, whose tombstones are never found, or vectors (I, D).
        metric: ``dot`` or ``cosine``: that of the model's loss.

    Example:
        >>> index = ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), "dot")
        >>> index.search(torch.tensor([[1.0, 0.5]]), 2)[1].tolist()
        [[2, 0]]
    """

    def __init__(self, source: EmbeddingStore | Tensor, metric: Metric) -> None:
        check_metric(metric)
        self.width = source.shape[1] if isinstance(source, Tensor) else source.width
        super().__init__(source, _bytes(source) // (4 * max(1, self.width)))
        self.metric = metric
        self._inverse_norms = self._norms().clamp(min=_EPS).reciprocal() if metric == "cosine" else None

    def _norms(self) -> Tensor:
        norms = [self._block(start, stop).norm(dim=1) for start, stop in self.blocks()]
        return torch.cat(norms) if norms else torch.empty(0)

    def rows(self, start: int, stop: int) -> Tensor:
        """See :meth:`Blockwise.rows`."""
        block = self._block(start, stop)
        return normalize(block) if self.metric == "cosine" else block

    def _prepared(self, queries: Tensor) -> Tensor:
        if queries.shape[1] != self.width and self.size:
            raise ValueError(
                f"queries: {queries.shape[1]} wide, the stored vectors are {self.width}; give the query tower's outputs"
            )
        return normalize(queries) if self.metric == "cosine" else queries

    def _scores(self, queries: Tensor, start: int, stop: int, out: Tensor) -> None:
        _products(queries, self._block(start, stop), out)
        if self._inverse_norms is not None:
            out.mul_(self._inverse_norms[start:stop])


class ScoredIndex(Blockwise):
    """Every candidate's score by the model's own interaction, from projected rows: exact retrieval under a top NN.

    Args:
        projection: of the interaction.
        source: what ``projection.candidates`` made of the catalogue, in a store or (I, width).
    """

    metric: Metric = "top_nn"

    def __init__(self, projection: Projection, source: EmbeddingStore | Tensor) -> None:
        width = source.shape[1] if isinstance(source, Tensor) else source.width
        if len(source) and width != projection.width:
            raise ValueError(
                f"source: rows are {width} wide, the projection's {projection.width}; store projection.candidates(...)"
            )
        super().__init__(source, (_bytes(source) // 4 if projection.linear else _PAIRS) // max(1, projection.width))
        self.projection = projection
        self._by_products = projection.linear

    def _prepared(self, queries: Tensor) -> Tensor:
        return self.projection.query(queries)

    def _factors(self, prepared: Tensor) -> Tensor:
        return prepared[:, :-1]

    def _constant(self, prepared: Tensor) -> Tensor:
        return prepared[:, -1]

    def _scores(self, queries: Tensor, start: int, stop: int, out: Tensor) -> None:
        block = self._block(start, stop)
        if self.projection.linear:
            _products(self._factors(queries), block, out)
            out.add_(self._constant(queries)[:, None])
        else:
            torch.stack([self.projection.score(query, block) for query in queries], out=out)


def _bytes(source: EmbeddingStore | Tensor) -> int:
    return _BLOCK if isinstance(source, Tensor) or source.dtype == "fp32" else _DECODED


def _products(queries: Tensor, rows: Tensor, out: Tensor) -> None:
    """Fills ``out`` (Q, N)."""
    if len(queries) == 1:  # numpy's product with a vector runs at the speed of the memory; torch's took 1.5 times as long
        np.dot(rows.numpy(), queries[0].numpy(), out=out[0].numpy())
    else:
        torch.mm(queries, rows.T, out=out)


def check_metric(metric: str) -> None:
    """Raises ValueError for a metric by which vectors cannot be searched."""
    if metric not in ("dot", "cosine"):
        remedy = "a top NN is searched by ScoredIndex" if metric == "top_nn" else f"one of {', '.join(get_args(Metric)[:2])}"
        raise ValueError(f"metric={metric!r}: must be dot or cosine, that of the model's loss; {remedy}")
