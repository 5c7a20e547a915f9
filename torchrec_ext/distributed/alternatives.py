"""compare(): the sharding types beside one another, so that one sees why a plan was taken, and what another would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from tabulate import tabulate

from torchrec_ext.distributed.drafting import PlanError
from torchrec_ext.distributed.explain import size_text
from torchrec_ext.distributed.forecast import RankForecast
from torchrec_ext.distributed.planning import Sharding


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One sharding type for every table.

    Args:
        sharding: which.
        ms: a step of the slowest rank's tables; infinite where refused.
        largest: bytes of the rank that needs most.
        refused: why there is no such plan, in one line; empty where there is one.
    """

    sharding: Sharding
    ms: float = float("inf")
    largest: int = 0
    refused: str = ""


def compare(
    plan: Callable[[Sharding], Sequence[RankForecast]], known: Mapping[Sharding, Sequence[RankForecast]]
) -> list[Alternative]:
    """Every sharding type, by what is ``known`` of it, or what ``plan`` foresees for it or refuses with a PlanError."""
    found = []
    for sharding in get_args(Sharding):
        one = Alternative(sharding=sharding)
        try:
            ranks = known[sharding] if sharding in known else plan(sharding)
        except PlanError as error:
            reason = str(error).splitlines()[0].removeprefix("no sharding plan fits: ").partition(";")[0]
            found.append(dataclasses.replace(one, refused=reason))
        else:
            slowest, largest = max(rank.ms for rank in ranks), max(rank.total for rank in ranks)
            found.append(dataclasses.replace(one, ms=slowest, largest=largest))
    return found


def alternatives_text(alternatives: Sequence[Alternative], taken: Sharding) -> str:
    """The alternatives as a table, and whether another is foreseen to be faster than the one ``taken``."""
    rows = [
        [
            one.sharding + (" (taken)" if one.sharding == taken and not one.refused else ""),
            "" if one.refused else f"{one.ms:.3f}",
            one.refused or size_text(one.largest),
        ]
        for one in alternatives
    ]
    text = str(tabulate(rows, headers=["sharding", "ms of the slowest rank", "largest rank, or why not"], disable_numparse=True))
    own = next(one for one in alternatives if one.sharding == taken)
    best = min(alternatives, key=lambda one: one.ms)
    if best.refused or best.ms > 0.95 * own.ms:
        return text
    how = f"{best.ms:.3f} ms" if own.refused else f"{best.ms:.3f} against {own.ms:.3f} ms"
    why = "TorchRec's planner leaves tables of up to 128 columns whole unless told otherwise; " if "column" in best.sharding else ""
    faster = f"{best.sharding} for every table is foreseen to be faster, {how}"
    return f"{text}\n{faster}: {why}plan.sharding={best.sharding} asks for it"
