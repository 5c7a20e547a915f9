"""resized(): fits saved ids to tables of other capacities, and says where their rows were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.ids.index import EMPTY
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.ids.rows import expected_sightings, sightings_decay, spread_rows

_EMPTY_ROW = {"ids": EMPTY, "score": 0.0, "age": 0.0, "seen": 0, "sightings": 0}


def resized(
    state: Mapping[str, Any], tables: Mapping[str, Dynamic]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fits a saved state of :class:`DynamicIds` to tables of other capacities.

    A larger table keeps its rows. A smaller one evicts the ids that would go first, and the rows of all others move.

    Args:
        state: the saved state.
        tables: settings of each table.

    Returns:
        The state to load, and by table the saved row of each row, (capacity,) int64; -1 for a row without an id.

    Raises:
        ValueError: a table without settings.

    Example:
        >>> from torchrec_ext.ids import DynamicIds
        >>> ids = DynamicIds({"item": Dynamic(capacity=4)})
        >>> _ = ids.step({"item": torch.tensor([7, 8, 8, 9, 9])})
        >>> state, rows = resized(ids.state_dict(), {"item": Dynamic(capacity=3)})
        >>> state["tables"]["item"]["ids"][rows["item"] > 0].tolist()
        [8, 9]
    """
    missing = [name for name in state["tables"] if name not in tables]
    if missing:
        raise ValueError(
            f"table '{missing[0]}' was saved and has no settings; those with some are {', '.join(tables)}"
        )
    fitted_tables = {}
    sources = {}
    lost = 0
    for name, table in state["tables"].items():
        # States before 0.1.0 have neither.
        saved = {"age": torch.ones(len(table["ids"])), "lookups": 0, **table}
        policy = tables[name]
        rows = len(saved["ids"])
        if policy.capacity >= rows:
            fitted_tables[name] = saved
            sources[name] = torch.cat(
                [torch.arange(rows), torch.full((policy.capacity - rows,), -1)]
            )
            continue
        staying = _staying(saved, policy, state["now"])
        lost += int((saved["ids"] != EMPTY).sum()) - len(staying)
        # Of each new row the saved one: weights and optimizer state are moved by it.
        source = torch.full((policy.capacity,), -1)
        source[0] = 0
        # As if they had been admitted one after the other: RowPool knows by their
        # number which rows are free.
        source[spread_rows(torch.arange(1, len(staying) + 1), policy.capacity)] = (
            staying
        )
        fitted = {**saved, "used": len(staying) + 1}
        for key, value in _EMPTY_ROW.items():
            fitted[key] = torch.where(
                source >= 0, saved[key].cpu()[source.clamp(min=0)], value
            )
        fitted_tables[name] = fitted
        sources[name] = source
    counts = {**state["counts"], "evicted": state["counts"]["evicted"] + lost}
    return {**state, "counts": counts, "tables": fitted_tables}, sources


def _staying(saved: Mapping[str, Any], policy: Dynamic, now: int) -> Tensor:
    """Returns the rows that a smaller table keeps, ascending, as if step ``now`` + 1 evicted the others."""
    live = (saved["ids"].cpu() != EMPTY).nonzero().squeeze(1)
    if policy.evict == "lfu":
        sightings = saved["sightings"].cpu()
        lookups = int(sightings.sum())
        left = sightings_decay(lookups, policy.half_life, len(sightings))
        score = saved["score"].cpu() * left + sightings
        age = saved["age"].cpu() * left + 1 - left
        lookups += int(saved["lookups"])
        silence = (now + 1 - saved["seen"].cpu()).double() * (lookups / (now + 1))
        rank = expected_sightings(score, age, silence, policy.half_life)
    else:
        rank = saved["seen"].cpu()
    # Of equal ones the lowest rows go first, as in any eviction.
    order = torch.argsort(rank[live], stable=True)
    staying: Tensor = (
        live[order[max(0, len(live) - policy.capacity + 1) :]].sort().values
    )
    return staying


def moved_rows(tensor: Tensor, source: Tensor) -> Tensor:
    """Returns the rows of a saved tensor at ``source``, see :func:`resized`; zeros for a row without an id."""
    rows = tensor[source.clamp(min=0).to(tensor.device)]
    rows[(source < 0).to(tensor.device)] = 0
    return rows
