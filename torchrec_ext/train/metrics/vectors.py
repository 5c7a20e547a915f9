"""vector_figures(): figures of the vectors of any model over a whole catalogue, with popularity beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from torchrec_ext.train.config import EvaluationConfig
from torchrec_ext.train.metrics.catalogue import Question
from torchrec_ext.train.metrics.hits import hits_by, popularity_hits, ranking_metrics

Similarity = Literal["dot", "cosine"]
Array = Tensor | NDArray[Any]
Pairs = Tensor | NDArray[Any] | Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class VectorFigures:
    """Figures of vectors over a whole catalogue.

    Args:
        figures: figures of the vectors, by ``name@k``.
        popularity: figures of the ranking by the number of seen pairs of an item, also those of users without a
            held-out pair; empty without seen pairs.
        users: number of users with a held-out pair.
        pairs: number of held-out pairs.
        seen_before: number of held-out pairs that are among the seen pairs; they count as missed.
        without_vector: number of held-out pairs whose item has no vector; they count as missed.
    """

    figures: dict[str, float]
    popularity: dict[str, float]
    users: int
    pairs: int
    seen_before: int
    without_vector: int


def vector_figures(
    users: Array,
    items: Array,
    held_out: Pairs,
    seen: Pairs | None = None,
    *,
    metrics: Sequence[str] = ("hr@10", "recall@10", "ndcg@10"),
    similarity: Similarity = "dot",
) -> VectorFigures:
    """Ranks all items for each user with a held-out pair, without the items that the user has seen.

    Figures are those of :func:`query_figures`, means over the users. A held-out item that its user has already seen
    counts as missed: a server that leaves out seen items never returns it.

    Args:
        users: vectors, (U, D).
        items: vectors, (I, D).
        held_out: pairs to find, (P, 2): the row of a user and the row of an item, or -1 for an item without a vector.
            A pair given twice counts once, but for pairs with -1.
        seen: pairs to leave out, (S, 2), in the same form; -1 also for a user without a vector.
        metrics: figures with the length of the list: ``hr``, ``recall``, ``precision``, ``ndcg``, ``mrr`` or ``map``.
        similarity: ``dot`` or ``cosine``.

    Raises:
        ValueError: a shape, a row or a metric is wrong, a vector is not finite, or no held-out item has a vector.

    Example:
        >>> vectors = torch.eye(3)
        >>> seen = [(0, 1), (1, 1), (2, 2)]
        >>> result = vector_figures(vectors, vectors, [(0, 0), (1, 2), (2, 2)], seen, metrics=["hr@1"])
        >>> result.figures, result.popularity, result.seen_before
        ({'hr@1': 0.3333333333333333}, {'hr@1': 0.3333333333333333}, 1)
    """
    requested = EvaluationConfig(metrics=tuple(metrics)).figures
    user_vectors = _vectors("users", users)
    item_vectors = _vectors("items", items)
    if user_vectors.shape[1] != item_vectors.shape[1]:
        raise ValueError(
            f"users: width {user_vectors.shape[1]}, items: width {item_vectors.shape[1]}; must be equal"
        )
    count = len(item_vectors)
    pairs = _pairs("held_out", held_out, (0, len(user_vectors)), count)
    with_vector = torch.unique(pairs[pairs[:, 1] >= 0], dim=0)
    if not len(with_vector):
        raise ValueError(
            "held_out: none of its items has a vector; give pairs of rows of users and items"
        )
    pairs = torch.cat([with_vector, pairs[pairs[:, 1] < 0]])
    pairs = pairs[pairs[:, 0].argsort(stable=True)]
    asked, target_rows = torch.unique(pairs[:, 0], return_inverse=True)
    taken = _pairs("seen", [] if seen is None else seen, (-1, len(user_vectors)), count)
    # The last entry belongs to users without a vector, -1.
    query = torch.full((len(user_vectors) + 1,), -1)
    query[asked] = torch.arange(len(asked))
    is_left_out = (query[taken[:, 0]] >= 0) & (taken[:, 1] >= 0)
    question = Question(
        targets=pairs[:, 1],
        target_rows=target_rows,
        seen_rows=query[taken[is_left_out, 0]],
        seen_items=taken[is_left_out, 1],
        not_items=(),
    )
    k = max(k for _, k in requested)
    queries = user_vectors[asked]
    if similarity == "cosine":
        queries = normalize(queries, dim=1)
        item_vectors = normalize(item_vectors, dim=1)
    hits = hits_by(lambda block: queries[block] @ item_vectors.T, question, count, k=k)
    popularity = {}
    if seen is not None:
        counts = taken[taken[:, 1] >= 0, 1].bincount(minlength=count)
        popularity = ranking_metrics(popularity_hits(counts, question, k=k), requested)
    return VectorFigures(
        figures=ranking_metrics(hits, requested),
        popularity=popularity,
        users=question.queries,
        pairs=len(pairs),
        seen_before=int(question.repeats.sum()),
        without_vector=len(pairs) - len(with_vector),
    )


def _vectors(name: str, vectors: Array) -> Tensor:
    if not isinstance(vectors, Tensor):
        # A copy, because arrays that were read from a file are often read-only.
        vectors = torch.tensor(np.asarray(vectors, dtype=np.float32))
    tensor = vectors.float()
    if tensor.dim() != 2 or not len(tensor):
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)}; must be (rows, width), with a row at least"
        )
    is_finite = tensor.isfinite().all(1)
    if not is_finite.all():
        row = int(is_finite.logical_not().nonzero()[0])
        raise ValueError(
            f"{name}: the vector of row {row} is not finite; leave it out, or mend it"
        )
    return tensor


def _pairs(name: str, pairs: Pairs, users: tuple[int, int], items: int) -> Tensor:
    """Returns pairs of int64, (P, 2); ``users`` is the least row of a user, and the number of users."""
    if isinstance(pairs, Tensor):
        pairs = pairs.cpu().numpy()
    array = np.array(pairs, dtype=np.int64)
    if not array.size:
        return torch.zeros(0, 2, dtype=torch.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(
            f"{name}: shape {array.shape}; must be (pairs, 2), the row of a user and the row of an item"
        )
    tensor = torch.from_numpy(array)
    for side, (least, count) in (("user", users), ("item", (-1, items))):
        rows = tensor[:, 0 if side == "user" else 1]
        is_wrong = (rows < least) | (rows >= count)
        if is_wrong.any():
            row = int(rows[is_wrong][0])
            raise ValueError(
                f"{name}: {side} {row}; must be a row of the {count:,} {side} vectors, {least} at least"
            )
    return tensor
