"""Scores of every query with every candidate, and the widths of the towers that they come from.

The query of a score is the output of every tower but the last, concatenated; the candidate is that of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HIDDEN_FLOATS = 2**17  # of a block of pairs: half a MiB, a core's share of the second-level cache
HIDDEN_FLOATS_GPU = 2**27  # half a GiB: on a GPU many pairs at once


def over_pairs(queries: Tensor, candidates: Tensor, score: Callable[[Tensor, Tensor], Tensor], width: int) -> Tensor:
    """(B, N) scores of queries (B, ...) with candidates (N, ...), over blocks of pairs that stay in the cache.

    That is several times as fast as all pairs at once.

    Args:
        queries: (B, D1).
        candidates: (N, D2).
        score: from (b, 1, D1) and (1, n, D2) to (b, n).
        width: floats that ``score`` needs for a pair.
    """
    pairs = max(1, (HIDDEN_FLOATS if queries.device.type == "cpu" else HIDDEN_FLOATS_GPU) // max(1, width))
    blocks = torch.split(candidates, pairs)
    rows = [
        torch.cat([score(some[:, None], block[None]) for block in blocks], dim=1)
        for some in torch.split(queries, max(1, pairs // max(1, len(candidates))))
    ]
    return torch.cat(rows)


def cross_product(query: Tensor, candidate: Tensor) -> Tensor:
    """(b, n, D1 + D2): each of the queries (b, 1, D1) beside each of the candidates (1, n, D2)."""
    shape = (query.shape[0], candidate.shape[1], -1)
    return torch.cat([query.expand(shape), candidate.expand(shape)], dim=2)


def query_and_candidate(interaction: str, widths: Sequence[int]) -> tuple[int, int]:
    """(D1, D2): the width of a query and of a candidate; D1 is 0 where there is one tower.

    Raises:
        ValueError: no tower, or one of no width.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"{interaction} needs towers, each of width 1 or more, got {shapes(widths) or 'none'}")
    return sum(widths[:-1]), widths[-1]


def equal_width(interaction: str, widths: Sequence[int], *, towers: int | None = None, remedy: str) -> int:
    """D, the width of every tower.

    Raises:
        ValueError: towers of different widths, or not as many as ``towers``.
    """
    many = "towers" if towers is None else "two towers"
    if len(widths) < 2 or (towers or len(widths)) != len(widths) or len(set(widths)) > 1 or min(widths) < 1:
        raise ValueError(
            f"{interaction} needs {many} of equal width, got {shapes(widths) or 'none'}; give them one last width, or use {remedy}"
        )
    return widths[0]


def shapes(widths: Sequence[int]) -> str:
    """The towers' outputs as a message names them."""
    return ", ".join(f"(B, {width})" for width in widths)
