"""Evaluation: how the publishers of a set rank its held-out items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torchrec_ext.data.columns import Int64

Figure = Literal["hr", "recall", "ndcg", "mrr"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Against what a held-out item is ranked, and which figures are told.

    Args:
        at: numbers of places that are looked at, K.
        figures: ``hr``, ``recall``, ``ndcg``, ``mrr``.
        by: ``row``: each held-out row is a question of its own; ``user``: all held-out items of a user are the answers to one.
        keep_seen: rank what the user has taken before too.
        candidates: by part, (rows of the part, N) item ids, below 0 for none: each row's item is ranked among its own N and nothing
            else. Where a part is not named, the candidates are the whole catalogue.
    """

    at: tuple[int, ...] = (10,)
    figures: tuple[Figure, ...] = ("hr", "ndcg")
    by: Literal["row", "user"] = "row"
    keep_seen: bool = False
    candidates: Mapping[str, Int64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.at or min(self.at) < 1:
            raise ValueError(f"at={self.at}: must be one number of places or more, each 1 or more")
        unknown = sorted(set(self.figures) - set(get_args(Figure)))
        if unknown or not self.figures:
            raise ValueError(f"figures={self.figures}: must be some of {', '.join(get_args(Figure))}")
