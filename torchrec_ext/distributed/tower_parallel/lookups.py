"""Tables that towers do not hold themselves, where towers run on ranks of their own.

A table that several towers share has one place, so they must run on the same ranks, where the first of them holds it
and looks it up for all. Look-ups that the model has merged are looked up together likewise, by the towers of one set of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import Jagged, KeyLayout, Keys, TowerBatch, concatenated, pack
from torchrec_ext.distributed.placement import TowerPlacement, TowerPlan
from torchrec_ext.distributed.tower_parallel.exchange import TowerRows
from torchrec_ext.modules.shared_tables import Joint, SharedTables, look_ups, readers, values_by_table


class FeatureBags(NamedTuple):
    """The bags of one feature: ``values`` and their ``lengths``."""

    values: Tensor
    lengths: Tensor


def sharing_groups(towers: Mapping[str, Any]) -> list[list[str]]:
    """The towers that must run on the same ranks, because they share tables; most stand alone."""
    found = [[name] for name in towers]
    for names in readers(towers).values():
        together = [unit for unit in found if not set(unit).isdisjoint(names)]
        found = [unit for unit in found if unit not in together]
        found.append([name for unit in together for name in unit])
    order = list(towers)
    return sorted((sorted(unit, key=order.index) for unit in found), key=lambda unit: order.index(unit[0]))


def towers_by_host(towers: Mapping[str, Any], placement: TowerPlacement) -> dict[str, list[str]]:
    """By the first of them the towers on the same ranks that hold not all of their tables themselves."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, tower in towers.items():
        if getattr(tower, "released_tables", ()):
            by_ranks.setdefault(placement.ranks[name], []).append(name)
    return {names[0]: names for names in by_ranks.values()}


def host_look_ups(model: nn.Module, plan: ShardingPlan) -> None:
    """Moves the tables beside the towers of ``model`` to the towers that host them under ``plan``, where it places towers."""
    placed = next(((path, own) for path, own in plan.plan.items() if isinstance(own, TowerPlan)), None)
    beside = {path: module for path, module in model.named_modules() if isinstance(module, SharedTables)}
    if placed is None or not beside:
        return
    path, own = placed
    towers: Any = model.get_submodule(path)
    stood = {name: at for at, module in beside.items() for name, _, _ in values_by_table(module)}
    values = {name: weight for module in beside.values() for name, _, weight in values_by_table(module)}
    for host, names in towers_by_host(dict(towers.items()), own.placement).items():
        towers[host].lookups = hosted = look_ups(towers, names)
        for name, holder, _ in values_by_table(hosted):
            holder.weight = values[name]
            hosted.original_path = stood[name]
    for path in beside:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)


def unhosted(model: nn.Module, path: str) -> str:
    """The path that a weight has in the unsharded model, of one that has ``path`` in a sharded one."""
    tower, _, rest = path.partition(".lookups.")
    hosted = model.get_submodule(f"{tower}.lookups") if rest else None
    return f"{hosted.original_path}.{rest}" if isinstance(hosted, SharedTables) else path


def split_joint(joint: KeyedJaggedTensor, queries: int) -> dict[str, FeatureBags]:
    """By feature the bags that stand in ``batch.joint``: Q of a shared one, B of another."""
    found: dict[str, FeatureBags] = {}
    for key in joint.keys():  # noqa: SIM118
        values, lengths = joint[key].values(), joint[key].lengths()
        place = int(lengths[:queries].sum())
        halves = FeatureBags(values[:place], lengths[:queries]), FeatureBags(values[place:], lengths[queries:])
        found |= {feature: half for feature, half in zip(key.split("|"), halves, strict=True) if feature}
    return found


class HostedTower(NamedTuple):
    """One tower of a set of ranks: its features, whether its rows are the Q shared ones, and those that came, if it was asked."""

    features: Sequence[str]
    shared: bool
    rows: TowerRows | None


def batch_of_arrivals(towers: Iterable[HostedTower], joint: Sequence[Joint], device: torch.device) -> TowerBatch:
    """What :class:`SharedTables` looks up, of the rows that came for the towers of a set of ranks.

    Args:
        towers: whose rows of a kind are the same ones in the same order, as their ranks are the same.
        joint: the keys that :class:`SharedTables` asks for.
        device: of the rows.
    """
    towers = list(towers)
    heights = [
        max((rows.height for _, own, rows in towers if own == shared and rows), default=0) for shared in (False, True)
    ]
    none = [
        FeatureBags(torch.empty(0, dtype=torch.int64, device=device), torch.zeros(n, dtype=torch.int32, device=device))
        for n in heights
    ]
    # Sharded collections keep the order of the keys that they saw first, whichever towers are asked.
    bags = [
        {name: none[shared] for features, own, _ in towers if own == shared for name in features}
        for shared in (False, True)
    ]
    for features, shared, rows in towers:
        if rows is not None:
            values = torch.split(rows.values, rows.lengths.sum(dim=1).tolist())
            bags[shared].update(zip(features, map(FeatureBags, values, rows.lengths), strict=True))
    columns = {name: Jagged(*column) for kind in bags for name, column in kind.items()}
    by_row, by_query = (tuple(bags[shared]) for shared in (False, True))
    halves = [name if name in columns else None for pair in joint for name in pair]
    layout = KeyLayout(
        rows=Keys(by_row, by_row),
        shared=Keys(by_query, by_query),
        joint=Keys(tuple(pair.key for pair in joint), tuple(halves)) if joint else None,
    )
    return pack(
        layout,
        lambda keys, sizes: concatenated(keys, sizes, columns, device),
        dense=torch.empty(heights[False], 0, device=device),
        labels=torch.empty(heights[False], device=device),
        weights=torch.empty(heights[False], device=device),
        total_weight=torch.ones((), device=device),
        shared_dense=torch.empty(heights[True], 0, device=device),
        index=torch.empty(0, dtype=torch.int64, device=device),
    )
