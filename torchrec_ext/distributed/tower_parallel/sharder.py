"""TowerSharder: towers at the same time on ranks of their own, at the granularity of processes.

TorchRec's ``EmbeddingTowerSharder`` pins a tower to one host, runs on CUDA alone and pays exchanges of its own for each
tower. Here a tower has any ranks: TorchRec shards its tables over them in any way, DistributedDataParallel replicates
its dense layers on them, and all towers share one exchange each way
(:mod:`torchrec_ext.distributed.tower_parallel.exchange`). Outputs and gradients are the flat model's.

One tower on its ranks: a process group, its tables sharded over it by TorchRec, its dense layers replicated on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    LazyGetItemMixin,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.distributed.placement import TowerPlacement, TowerPlan
from torchrec_ext.distributed.sharders import BagSharder, SequenceSharder, ShardedBags
from torchrec_ext.distributed.tables import collections
from torchrec_ext.distributed.tower_parallel.exchange import (
    ExchangeContext,
    ReceivedRows,
    TowerExchange,
    TowerRows,
    TowerSpec,
    Widths,
)
from torchrec_ext.distributed.tower_parallel.lookups import (
    FeatureBags,
    HostedTower,
    batch_of_arrivals,
    split_joint,
    towers_by_host,
)
from torchrec_ext.modules.tower import Towers


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
        return _Sequences(
            module, params, env, self.fused_params, device, qcomm_codecs_registry=self.qcomm_codecs_registry
        )


def tower_sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for every kind of collection that a placed tower may hold."""
    return [TowerBagSharder(), TowerSequenceSharder()]


def tower_groups(
    placement: TowerPlacement, everyone: dist.ProcessGroup, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """The process group of each tower of this rank; every rank calls it, because all take part in making each group."""
    own: dict[str, dist.ProcessGroup] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(placement.world_size)): everyone}
    for tower, ranks in placement.ranks.items():
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank(everyone) in ranks:
            own[tower] = made[ranks]
    return own


def shard_tower(
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
            name: dataclasses.replace(
                own, ranks=None if own.ranks is None else [members.index(rank) for rank in own.ranks]
            )
            for name, own in plan.items()
        }
    )


def needs_equal_rows(plans: Iterable[EmbeddingModuleShardingPlan], ranks: tuple[int, ...]) -> bool:
    """Whether all ranks of a tower look up as many rows, so that the exchange of its row_wise tables is one of equal parts."""
    kinds = {own.sharding_type for plan in plans for own in plan.values()}
    return len(ranks) > 1 and ShardingType.ROW_WISE.value in kinds


class _Outputs(LazyGetItemMixin[str, Tensor], LazyAwaitable[dict[str, Tensor]]):
    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def _wait_impl(self) -> dict[str, Tensor]:
        return self._outputs


class ShardedTowers(
    ShardedModule[KJTList, dict[str, Tensor], dict[str, Tensor], ExchangeContext], FusedOptimizerModule
):
    """:class:`Towers` of which each rank holds and runs those that its plan gives it; called as Towers is, by all ranks together.

    Args:
        module: unsharded; dense layers and buffers of all ranks become those of rank 0.
        plan: the ranks of each tower, and how its tables are sharded over them.
        sharders: by type of collection.
        env: all ranks.
        device: of this rank.
        timeout: of the collectives of each tower.
    """

    def __init__(
        self,
        module: Towers,
        plan: TowerPlan,
        sharders: Mapping[type, ModuleSharder[nn.Module]],
        env: ShardingEnv,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._placement, self._world_size = plan.placement, env.world_size
        self._reads = dict(module.reads)
        towers: dict[str, Any] = dict(module.items())
        self._features = {name: _features(tower) for name, tower in towers.items()}
        self._run: dict[str, Callable[..., Tensor]] = {}
        self._hosts = towers_by_host(towers, plan.placement)
        host = {name: host for host, names in self._hosts.items() for name in names}
        self._device = device
        everyone: dist.ProcessGroup = env.process_group
        journeys = {
            name: TowerSpec(
                widths=Widths(len(self._features[name]), len(tower.dense) + self._reads[name].weights),
                out=tower.out_features,
                shared=self._reads[name].shared,
                equal=needs_equal_rows(
                    [*plan.tables[name].values(), *plan.tables[host.get(name, name)].values()],
                    plan.placement.ranks[name],
                ),
            )
            for name, tower in towers.items()
        }
        self._exchange = TowerExchange(plan.placement, journeys, everyone, device)
        groups = tower_groups(plan.placement, everyone, timeout)
        for name, tower in towers.items():
            for value in (*tower.parameters(), *tower.buffers()):
                if value.device.type != "meta":  # tables
                    of_first = value.detach().to(device)
                    dist.broadcast(of_first, src=0, group=everyone)
                    value.detach().copy_(of_first)
            if name in groups:
                self.add_module(name, tower)
                self._run[name] = shard_tower(tower, plan.tables[name], sharders, groups[name], device)

    def create_context(self) -> ExchangeContext:
        """For one batch."""
        return ExchangeContext()

    def input_dist(
        self,
        ctx: ExchangeContext,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        shared_sparse: KeyedJaggedTensor | None = None,
        shared_dense: Tensor | None = None,
        *,
        joint: KeyedJaggedTensor | None = None,
        names: Sequence[str] | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> KJTListSplitsAwaitable[ExchangeContext]:
        """Begins to send each row to the ranks of its towers.

        The arguments are those of :meth:`Towers.forward`; ``joint`` is the batch's, which holds the bags of shared
        tables.
        """
        own = {}
        beside = {} if joint is None else split_joint(joint, 0 if shared_dense is None else len(shared_dense))
        for name in self._reads if names is None else names:
            shared, columns, weighs = self._reads[name]
            rows, matrix = (shared_sparse, shared_dense) if shared else (sparse, dense)
            taken = matrix[:, columns]  # type: ignore[index]
            if weighs:  # they travel as one dense column more; rows that only fill up are of weight 0
                counted = shared_weights if shared else weights
                taken = torch.cat([taken, (taken.new_ones(len(taken)) if counted is None else counted)[:, None]], dim=1)
            own[name] = _rows(rows, beside, taken, self._features[name])
        counts = len(dense), 0 if shared_dense is None else len(shared_dense)
        return KJTListSplitsAwaitable([self._exchange.begin(ctx, own, counts)], ctx)

    def compute(self, ctx: ExchangeContext, dist_input: KJTList) -> dict[str, Tensor]:
        """The outputs of this rank's towers for all rows that came, in the order of the ranks that they came from."""
        arrived: ReceivedRows = dist_input[0]
        outputs = {}
        lent = self._lent(arrived.rows)
        for name, rows in arrived.rows.items():
            kjt = KeyedJaggedTensor(
                self._features[name], rows.values, lengths=rows.lengths.reshape(-1), stride=rows.height
            )
            beside: dict[str, Any] = {"looked_up": lent[name]} if name in lent else {}
            dense = rows.dense
            if self._reads[name].weights:
                dense, beside["weights"] = dense[:, :-1], dense[:, -1]
            output = self._run[name](kjt, dense, **beside).float()
            scale = len(self._placement.ranks[name]) / self._world_size
            if output.requires_grad and scale != 1:
                # TorchRec and DistributedDataParallel average over the tower's ranks, in the flat model over all.
                output.register_hook(lambda gradient, scale=scale: gradient * scale)  # type: ignore[no-untyped-call]
            outputs[name] = output
        return outputs

    def _lent(self, rows: Mapping[str, TowerRows]) -> dict[str, Any]:
        """By tower what the tables that it does not hold have for the rows that came."""
        found: dict[str, Any] = {}
        for host, names in self._hosts.items():
            asked = [name for name in names if name in rows]
            if asked:
                look_ups: Any = self.get_submodule(host).lookups
                arriving = [
                    HostedTower(self._features[name], self._reads[name].shared, rows.get(name)) for name in names
                ]
                found |= dict.fromkeys(
                    asked, look_ups(batch_of_arrivals(arriving, look_ups.joint, self._device), asked)
                )
        return found

    def output_dist(self, ctx: ExchangeContext, output: dict[str, Tensor]) -> LazyAwaitable[dict[str, Tensor]]:
        """Each row's outputs on the rank that it came from."""
        return _Outputs(self._exchange.back(ctx, output))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As part of a model with the towers' modules; asked directly, itself alone.

        TorchRec's pipelines take over the input dist of every collection within a module that they pipeline, so that it
        begins a batch ahead; those of the towers run inside :meth:`compute`.
        """
        return iter([(prefix, self)]) if memo is None else super().named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_parameters(f"{prefix}.{name}" if prefix else name, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Those of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_buffers(f"{prefix}.{name}" if prefix else name, recurse, remove_duplicate)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Of the tables of this rank's towers."""
        return CombinedOptimizer(
            [
                (f"{name}.{path}", collection.fused_optimizer)
                for name, tower in self.named_children()
                for path, collection in collections(tower)
            ]
        )

    def holders(self, model: nn.Module, names: Iterable[str]) -> dict[str, int]:
        """How many ranks hold each of these parameters of ``model``, by name."""
        path = next(path for path, module in model.named_modules() if module is self)
        counts = {f"{path}.{tower}.".lstrip("."): len(self._placement.ranks[tower]) for tower in self._run}
        return {
            name: next((n for tower, n in counts.items() if name.startswith(tower)), self._world_size) for name in names
        }

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Towers."""
        return Towers


def _features(tower: Any) -> list[str]:
    return list(dict.fromkeys(feature for table in tower.tables for feature in table.feature_names))


def _rows(kjt: KeyedJaggedTensor, beside: Mapping[str, FeatureBags], dense: Tensor, features: list[str]) -> TowerRows:
    """``beside``: the bags of features that ``kjt`` has not."""
    keys = kjt.keys()
    if not beside or set(features) <= set(keys):
        own = kjt if keys == features else kjt.permute([keys.index(name) for name in features])
        return TowerRows(own.values().long(), own.lengths().int().view(len(features), own.stride()), dense)
    bags = [FeatureBags(kjt[name].values(), kjt[name].lengths()) if name in keys else beside[name] for name in features]
    return TowerRows(
        torch.cat([bag.values for bag in bags]).long(), torch.stack([bag.lengths for bag in bags]).int(), dense
    )


class TowerSharder(ModuleSharder[Towers]):
    """Makes :class:`ShardedTowers` of the :class:`Towers` for which a plan has a :class:`TowerPlan`.

    Args:
        timeout: of the collectives of each tower.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._sharders = {sharder.module_type: sharder for sharder in tower_sharders()}
        self._timeout = timeout

    def shard(
        self,
        module: Towers,
        params: TowerPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTowers:
        """Sharded as ``params`` says; every rank calls it."""
        return ShardedTowers(module, params, self._sharders, env, device or torch.device("cpu"), self._timeout)

    def shardable_parameters(self, module: Towers) -> dict[str, nn.Parameter]:
        """None of its own: the tables of each tower are planned by themselves."""
        return {}

    @property
    def module_type(self) -> type[Towers]:
        """Towers."""
        return Towers
