"""Several copies of the sharded tables, averaged at an interval: TorchRec's DMPCollection, also on the CPU.

Apart from parallel.py, its one importer, because it stands in for a constructor of TorchRec's, private parts and all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import (
    DMPCollectionContext,
    ModuleSharder,
    ShardingEnv2D,
    ShardingPlan,
)

from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections

AVERAGED = ("adagrad", "row_wise_adagrad", "sgd")


class CollectionOnCpu(DMPCollection):
    """TorchRec's DMPCollection on the CPU, despite its constructor's check; divides sums, as gloo has no mean.

    Args:
        module: model with its tables on the meta device.
        device: the CPU.
        plan: sharding plan made for ``sharding_group_size`` ranks.
        world_size: R, the number of ranks.
        sharding_group_size: number of ranks that shard one copy of the tables.
        global_pg: process group of all ranks.
        sharders: TorchRec's sharders, as for DistributedModelParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> None:
        self._device = device
        self._pg = global_pg
        self._global_rank = dist.get_rank(global_pg)
        context = DMPCollectionContext(
            module=None, plan=plan, sharding_group_size=sharding_group_size
        )
        self._default_ctx = context
        self._ctxs = [context]
        self._submodule_ctxs: list[DMPCollectionContext] = []
        self._sharder_map = {sharder.module_type: sharder for sharder in sharders}
        groups = self._create_process_groups(
            self._global_rank, world_size, sharding_group_size
        )
        context.device_mesh, context.sharding_pg, context.replica_pg = groups
        self._remap_sharding_plan(
            plan,
            self._global_rank,
            world_size // sharding_group_size,
            sharding_group_size,
        )
        env = ShardingEnv2D(
            context.sharding_pg, context.replica_pg, global_pg, context.device_mesh
        )
        DistributedModelParallel.__init__(self, module, env, device, plan, sharders)
        self._group_sharded_modules(self._ctxs)
        self._cache_sync_tensors(self._ctxs)
        self._use_sharded_relay = False
        self._sharded_relay_state = None
        self._custom_all_reduce = self._mean
        # TorchRec 1.9 reads this attribute before it sets it.
        self._all_reduce_hook = None

    def _remap_sharding_plan(
        self, plan: ShardingPlan, *args: Any, **kwargs: Any
    ) -> None:
        """Remaps the plan as TorchRec does, but without a device index for a CPU."""
        super()._remap_sharding_plan(plan, *args, **kwargs)
        for tables in plan.plan.values():
            for sharding in tables.values():
                if isinstance(sharding.sharding_spec, EnumerableShardingSpec):
                    for shard in sharding.sharding_spec.shards:
                        assert shard.placement is not None
                        shard.placement = _remote_device(
                            f"rank:{shard.placement.rank()}/{self._device}"
                        )

    def _mean(self, tensors: list[Tensor]) -> None:
        group = self._default_ctx.replica_pg
        for tensor in tensors:
            # `data`: in semi-sync a backward still holds the tables as saved tensors
            # and would refuse a change, though it only writes to them.
            dist.all_reduce(tensor.data, group=group)
            tensor.data.div_(dist.get_world_size(group))


def copies_of_tables(
    model: nn.Module,
    runtime: Runtime,
    plan: ShardingPlan,
    copies: int,
    sharders: list[ModuleSharder[nn.Module]],
) -> DMPCollection:
    """Shards ``model`` with several copies of its tables; TorchRec's pipelines average them at their interval.

    Args:
        model: model with its tables on the meta device.
        runtime: this process's rank and device.
        plan: sharding plan of one copy; changed in place into the plan of this rank's copy.
        copies: number of copies, at least 2 and a divisor of R.
        sharders: TorchRec's sharders, as for DistributedModelParallel.
    """
    # TorchRec's constructor refuses any device but a GPU.
    make = DMPCollection
    if runtime.device.type == "cpu":
        make = CollectionOnCpu
    assert dist.group.WORLD is not None
    return make(
        module=model,
        device=runtime.device,
        plan=plan,
        world_size=runtime.world_size,
        sharding_group_size=runtime.world_size // copies,
        global_pg=dist.group.WORLD,
        sharders=sharders,
    )


def refuse_unaveraged(
    model: nn.Module, plan: ShardingPlan, choices: Mapping[str, Choice]
) -> None:
    """Refuses optimizers with a state that TorchRec's DMPCollection does not average.

    Raises:
        ValueError: a sharded table has an optimizer of the Adam family; the message names it.
    """
    for path, _ in collections(model):
        for name, sharding in (plan.get_plan_for_module(path) or {}).items():
            if (
                sharding.sharding_type != "data_parallel"
                and choices[name].kind not in AVERAGED
            ):
                raise ValueError(
                    f"sync.table_copies: the state of table '{name}' ({choices[name].kind}) is not averaged; set "
                    f"optimizer.per_table={name}=adagrad (or {', '.join(AVERAGED[1:])}), or "
                    f"plan.tables={name}=data_parallel"
                )
