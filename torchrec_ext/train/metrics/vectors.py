"""vector_ranks(): exact ranks in a whole catalogue by the vectors of any model, in blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor
from torch.nn.functional import normalize

from torchrec_ext.train.metrics.catalogue import Question, ranks_of
from torchrec_ext.train.metrics.ranking import TargetRanks

Similarity = Literal["dot", "cosine"]
# Scores of 1 MiB stay in the cache between the passes over them.
SCORES = 2**18
# With fewer queries a block, a large catalogue would be read from memory for each of
# them.
QUERIES = 8


def vector_ranks(
    queries: Tensor,
    items: Tensor,
    question: Question,
    *,
    similarity: Similarity = "dot",
    depth: int | None = None,
) -> Iterator[tuple[int, TargetRanks]]:
    """Ranks each query's targets among all items by the product of their vectors, a block of queries at a time.

    Next to the vectors it holds 2**18 scores, or the scores of 8 queries if these are more: three copies during the
    comparison.

    Args:
        queries: vectors, (U, D) float32, one for each query of the question.
        items: vectors, (I, D) float32; row i is item i.
        question: targets, and items to leave out.
        similarity: ``dot`` or ``cosine``.
        depth: see :func:`ranks_of`.

    Yields:
        The number of queries ranked so far, and the ranks of a block's targets.

    Raises:
        ValueError: the shapes do not fit each other or the question, or a score is NaN.
    """
    if queries.dim() != 2 or items.dim() != 2 or queries.shape[1] != items.shape[1]:
        raise ValueError(
            f"vectors of shape {tuple(queries.shape)} and {tuple(items.shape)}: must be (U, D) and (I, D)"
        )
    if len(queries) != question.queries:
        raise ValueError(
            f"{len(queries)} vectors for {question.queries} queries; give one for each, in their order"
        )
    if similarity == "cosine":
        queries = normalize(queries, dim=1)
        items = normalize(items, dim=1)
    rows = max(QUERIES, SCORES // max(1, len(items)))
    for start in range(0, len(queries), rows):
        block = queries[start : start + rows]
        yield (
            start + len(block),
            ranks_of(block @ items.T, question, start, depth=depth),
        )
