"""Shared tables of towers that run on ranks of their own: one tower hosts them and looks them up for the others.

A table that several towers share has one set of ranks, so they must run on the same ranks, where the first of them
hosts it. Look-ups that the model has merged are hosted in the same way, by the towers of one set of ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import Jagged, KeyLayout, Keys, TowerBatch, concatenated, pack
from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.tower_plan import TowerPlan
from torchrec_ext.distributed.tower_parallel.exchange import TowerRows
from torchrec_ext.modules.shared_tables import (
    Joint,
    SharedTables,
    look_ups,
    readers,
    values_by_table,
)


class FeatureBags(NamedTuple):
    """Bags of one feature: ``values`` (V,) and the ``lengths`` (B,) of the bags."""

    values: Tensor
    lengths: Tensor


def sharing_groups(towers: Mapping[str, Any]) -> list[list[str]]:
    """Groups towers by shared tables: a group must run on the same ranks. Most groups are single towers."""
    groups = [[name] for name in towers]
    for names in readers(towers).values():
        # The groups of the towers that read this table become one.
        others = []
        joined: list[str] = []
        for group in groups:
            if set(group).isdisjoint(names):
                others.append(group)
            else:
                joined += group
        groups = [*others, joined]
    # Groups, and towers within a group, in the order of the model's towers.
    order = list(towers)
    groups = [sorted(group, key=order.index) for group in groups]
    return sorted(groups, key=lambda group: order.index(group[0]))


def towers_by_host(
    towers: Mapping[str, Any], placement: TowerPlacement
) -> dict[str, list[str]]:
    """Maps each host tower to the towers on its ranks with shared tables for it to look up, itself included."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, tower in towers.items():
        if getattr(tower, "released_tables", ()):
            by_ranks.setdefault(placement.ranks[name], []).append(name)
    return {names[0]: names for names in by_ranks.values()}


def host_look_ups(model: nn.Module, plan: ShardingPlan) -> None:
    """Moves the shared tables of ``model`` into their host towers, if ``plan`` places towers."""
    plan_entry = next(
        (
            (path, module)
            for path, module in plan.plan.items()
            if isinstance(module, TowerPlan)
        ),
        None,
    )
    shared = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, SharedTables)
    }
    if plan_entry is None or not shared:
        return
    towers_path, tower_plan = plan_entry
    towers: Any = model.get_submodule(towers_path)
    paths = {}
    values = {}
    for path, module in shared.items():
        for name, _, weight in values_by_table(module):
            paths[name] = path
            values[name] = weight
    for host, names in towers_by_host(
        dict(towers.items()), tower_plan.placement
    ).items():
        towers[host].lookups = hosted = look_ups(towers, names)
        for name, holder, _ in values_by_table(hosted):
            holder.weight = values[name]
            hosted.original_path = paths[name]
    for path in shared:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)


def unhosted(model: nn.Module, path: str) -> str:
    """Converts the ``path`` of a weight in the sharded model to its path in the unsharded one."""
    tower, _, rest = path.partition(".lookups.")
    if not rest:
        return path
    hosted = model.get_submodule(f"{tower}.lookups")
    # A tower of one's own may have a module of this name.
    if isinstance(hosted, SharedTables):
        return f"{hosted.original_path}.{rest}"
    return path


def split_joint(joint: KeyedJaggedTensor, queries: int) -> dict[str, FeatureBags]:
    """Splits ``batch.joint`` into bags by feature: Q bags of a feature of shared rows, B bags of any other.

    Args:
        joint: bags of stride Q + B, whose keys name both features, ``SHARED|ROW``.
        queries: Q.
    """
    by_feature: dict[str, FeatureBags] = {}
    for key in joint.keys():  # noqa: SIM118
        values = joint[key].values()
        lengths = joint[key].lengths()
        end = int(lengths[:queries].sum())
        halves = (
            FeatureBags(values[:end], lengths[:queries]),
            FeatureBags(values[end:], lengths[queries:]),
        )
        for feature, half in zip(key.split("|"), halves, strict=True):
            # A key without a feature of one kind has an empty name in its place.
            if feature:
                by_feature[feature] = half
    return by_feature


class HostedTower(NamedTuple):
    """A tower with hosted tables: its features, whether it reads the Q shared rows, and any rows received."""

    features: Sequence[str]
    shared: bool
    rows: TowerRows | None


def batch_of_arrivals(
    towers: Iterable[HostedTower], joint: Sequence[Joint], device: torch.device
) -> TowerBatch:
    """Builds a batch for :class:`SharedTables` from the rows received for the towers of a set of ranks.

    Args:
        towers: towers of the same ranks, which therefore receive the same rows in the same order.
        joint: keys that :class:`SharedTables` asks for.
        device: device of the rows.
    """
    towers = list(towers)
    heights = {False: 0, True: 0}
    for _, shared, rows in towers:
        if rows is not None:
            heights[shared] = max(heights[shared], rows.height)
    none = {}
    for shared, height in heights.items():
        no_ids = torch.empty(0, dtype=torch.int64, device=device)
        none[shared] = FeatureBags(
            no_ids, torch.zeros(height, dtype=torch.int32, device=device)
        )
    # Sharded collections keep the order of the keys that they saw first, whichever
    # towers are asked.
    bags: dict[bool, dict[str, FeatureBags]] = {False: {}, True: {}}
    for features, shared, _ in towers:
        bags[shared] |= dict.fromkeys(features, none[shared])
    for features, shared, rows in towers:
        if rows is not None:
            values = torch.split(rows.values, rows.lengths.sum(dim=1).tolist())
            bags[shared].update(
                zip(features, map(FeatureBags, values, rows.lengths), strict=True)
            )
    columns = {
        name: Jagged(*column) for name, column in (bags[False] | bags[True]).items()
    }
    by_row = tuple(bags[False])
    by_query = tuple(bags[True])
    joint_keys = None
    if joint:
        halves: list[str | None] = []
        for pair in joint:
            for name in pair:
                halves.append(name if name in columns else None)
        joint_keys = Keys(tuple(pair.key for pair in joint), tuple(halves))
    layout = KeyLayout(
        rows=Keys(by_row, by_row), shared=Keys(by_query, by_query), joint=joint_keys
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
