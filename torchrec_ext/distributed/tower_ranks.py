"""One tower on its ranks: a process group, its tables sharded over it by TorchRec, its dense layers replicated on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.sharded_bags import ShardedBags
from torchrec_ext.distributed.sharders import BagSharder, SequenceSharder
from torchrec_ext.distributed.tables import collections


class _Bags(ShardedBags):
    def reset_parameters(self) -> None:
        """Nothing: initialise_tables draws each table. TorchRec's broadcasts from rank 0 of the job, which a tower may lack."""


class _Sequences(ShardedEmbeddingCollection):
    def reset_parameters(self) -> None:
        """Nothing: see _Bags."""


class TowerBagSharder(BagSharder):
    """Shards an EmbeddingBagCollection over any group of ranks; its tables hold nothing until :func:`initialise_tables`."""

    @property
    def sharded_module_type(self) -> type[ShardedBags]:
        """ShardedBags that keep the values they are given."""
        return _Bags


class TowerSequenceSharder(SequenceSharder):
    """The same of an EmbeddingCollection."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """See the base class."""
        return _Sequences(module, params, env, self.fused_params, device, qcomm_codecs_registry=self.qcomm_codecs_registry)


def tower_sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for every kind of collection that a placed tower may hold."""
    return [TowerBagSharder(), TowerSequenceSharder()]


def tower_groups(placement: TowerPlacement, everyone: dist.ProcessGroup, timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """The process group of each tower of this rank; every rank calls it, because all take part in making each group."""
    own: dict[str, dist.ProcessGroup] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(placement.world_size)): everyone}
    for tower, ranks in placement.ranks.items():
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank(everyone) in ranks:
            own[tower] = made[ranks]
    return own


def on_ranks(
    tower: nn.Module,
    plans: Mapping[str, EmbeddingModuleShardingPlan],
    sharders: Mapping[type, ModuleSharder[nn.Module]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[KeyedJaggedTensor, Tensor], Tensor]:
    """What runs ``tower``, changed in place, on the ranks of ``group``: called by all of them together.

    Args:
        tower: unsharded; its dense layers are equal on all ranks.
        plans: of its collections by their path in it, with ranks of the job.
        sharders: by type of collection.
        group: its ranks.
        device: of this rank.
    """
    # With the group, the constructor would make a device mesh of the job's first ranks, which is none of this group's.
    env = ShardingEnv.from_local(dist.get_world_size(group), dist.get_rank(group))
    env.process_group = group
    members = dist.get_process_group_ranks(group)
    tables = []
    for path, collection in list(collections(tower)):
        parent, _, name = path.rpartition(".")
        sharded = sharders[type(collection)].shard(collection, _within(plans[path], members), env, device)
        setattr(tower.get_submodule(parent), name, sharded)
        tables += [f"{path}.{own}" for own, _ in sharded.named_parameters()]
    tower.to(device)
    for module in tower.modules():
        if hasattr(module, "process_group"):  # a BatchNorm of ours or of torch: its batch is that of the tower's ranks
            module.process_group = group  # type: ignore[assignment]
    dense = [name for name, _ in tower.named_parameters() if name not in tables]
    if env.world_size == 1 or not dense:
        return tower
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tower, tables)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(tower, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False)


def _within(plan: EmbeddingModuleShardingPlan, members: list[int]) -> EmbeddingModuleShardingPlan:
    """TorchRec counts ``ranks`` within the group, but the placements of shards over all ranks."""
    return EmbeddingModuleShardingPlan(
        {
            name: dataclasses.replace(own, ranks=None if own.ranks is None else [members.index(rank) for rank in own.ranks])
            for name, own in plan.items()
        }
    )


def needs_equal_rows(plans: Iterable[EmbeddingModuleShardingPlan], ranks: tuple[int, ...]) -> bool:
    """Whether all ranks of a tower look up as many rows, so that the exchange of its row_wise tables is one of equal parts."""
    kinds = {own.sharding_type for plan in plans for own in plan.values()}
    return len(ranks) > 1 and ShardingType.ROW_WISE.value in kinds
