"""Hits: the relevant items among the first k places of each query's list; the ranking figures are sums over them.

One row for each query, one column for each place::

    query 0, target at place 2        gains  0 1 0 0
    query 1, targets at 1 and 4       gains  1 0 0 1
    query 2, target behind place 4    gains  0 0 0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrec_ext.train.config import Figure

_DEFAULT_FIGURES: tuple[tuple[Figure, int], ...] = (("hr", 10), ("ndcg", 10))


class Hits(NamedTuple):
    """The first k places of U queries.

    Attributes:
        gains: grade of the item at each place, (U, k) float32; 0 for an irrelevant item.
        ideal: greatest grades of the query's relevant items, in descending order, (U, k) float32.
        relevant: number of relevant items of each query, (U,) int64.
    """

    gains: Tensor
    ideal: Tensor
    relevant: Tensor


def first_gains(scores: Tensor, grades: Tensor, k: int, start: int = 0) -> Tensor:
    """Returns the grades of the k best candidates of each query, (B, k), best first; 0 where there are fewer.

    Ties are broken by a seeded jitter: each order of equal scores is equally likely, another one for each query, and
    the same in every run, on any number of ranks.

    Args:
        scores: scores, (B, N), compared as float32; -inf leaves a candidate out.
        grades: grades, (B, N); 0 for an irrelevant candidate.
        k: number of first places.
        start: number of the first query.
    """
    width = min(k, scores.shape[1])
    scores = scores.float()
    values, best = scores.topk(width)
    # Ties within the list, and the tie that the list cuts; few rows have one, unless
    # scores are counts.
    has_tie = (values[:, 1:] == values[:, :-1]).any(1)
    has_tie |= (scores >= values[:, -1:]).sum(1) > width
    tied = has_tie.nonzero()[:, 0]
    if len(tied):
        best[tied] = _keys(scores[tied], start + tied).topk(width).indices
    shown = scores.gather(1, best) > -torch.inf
    return pad(grades.gather(1, best) * shown, (0, k - width))


def _keys(scores: Tensor, rows: Tensor) -> Tensor:
    """Returns int64 keys (B, N) in the order of the scores, random among equal ones, for queries ``rows`` (B,)."""
    # The bits of positive floats are in the order of the floats, those of negative ones
    # are reversed. 0.0 is added, because -0.0 has other bits than 0.0.
    bits = (scores + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(2**31, scores.shape[1:], generator=generator)
    # An odd factor of each query maps the numbers of 31 bits one to one.
    factors = 2 * (rows * 0x9E3779B1 % 2**30) + 1
    return ordered * 2**31 + ((factors[:, None] * drawn.to(rows.device)) & 0x7FFFFFFF)


def query_figures(
    hits: Hits, figures: Sequence[tuple[Figure, int]] = _DEFAULT_FIGURES
) -> dict[str, Tensor]:
    """Returns figures of each query, (U,) float64, by ``name@k``.

    ``hr``: whether a relevant item is among the first k. ``recall``: the share of the relevant items among the first k.
    ``precision``: the share of relevant items in the first k. ``ndcg``: the sum of grade / log2(1 + place), divided by
    its greatest possible value (Järvelin and Kekäläinen 2002). ``mrr``: 1 / place of the first relevant item, 0 beyond
    k. ``map``: the mean of the precisions at the relevant items' places, over as many as could be among the first k.

    These are RecBole's figures; ``ndcg`` with grades is scikit-learn's.

    Raises:
        ValueError: an unknown name, or a k below 1 or above the number of places.

    Example:
        >>> gains = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
        >>> hits = Hits(gains, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 1]))
        >>> query_figures(hits, [("hr", 2), ("mrr", 2)])["mrr@2"].tolist()
        [0.5, 0.0]
    """
    result = {}
    for name, k in figures:
        if name not in get_args(Figure):
            raise ValueError(
                f"figure {name!r}: must be one of {', '.join(get_args(Figure))}"
            )
        if not 1 <= k <= hits.gains.shape[1]:
            raise ValueError(
                f"{name}@{k}: must be 1 to {hits.gains.shape[1]} places, as many as were ranked"
            )
        result[f"{name}@{k}"] = _figure(name, hits, k)
    return result


def _figure(name: Figure, hits: Hits, k: int) -> Tensor:
    gains = hits.gains[:, :k].double()
    is_hit = (gains > 0).double()
    places = torch.arange(1, k + 1, dtype=torch.float64, device=gains.device)
    if name == "hr":
        return is_hit.amax(1)
    if name == "recall":
        return is_hit.sum(1) / hits.relevant
    if name == "precision":
        return is_hit.sum(1) / k
    if name == "mrr":
        return (is_hit / places).amax(1)
    if name == "map":
        precisions = is_hit.cumsum(1) / places
        return (precisions * is_hit).sum(1) / hits.relevant.clamp(max=k)
    discounts = 1 / torch.log2(places + 1)
    return gains @ discounts / (hits.ideal[:, :k].double() @ discounts)


def ranking_metrics(
    hits: Hits, figures: Sequence[tuple[Figure, int]] = _DEFAULT_FIGURES
) -> dict[str, float]:
    """Returns the mean of each figure over the queries by ``name@k``, see :func:`query_figures`."""
    return {
        name: float(values.mean())
        for name, values in query_figures(hits, figures).items()
    }
