"""TowerSharder: runs towers at the same time on ranks of their own.

TorchRec's ``EmbeddingTowerSharder`` pins a tower to one host, runs on CUDA alone and pays exchanges of its own for each
tower. Here a tower has any ranks: TorchRec shards its tables over their process group in any way,
DistributedDataParallel replicates its dense layers on it, and all towers share one exchange each way
(:mod:`torchrec_ext.distributed.tower_parallel.exchange`). Outputs and gradients are the flat model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    LazyGetItemMixin,
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.tower_plan import TowerPlan
from torchrec_ext.distributed.sharders import (
    BagSharder,
    SequenceSharder,
    ShardedBags,
    ShardedSequences,
)
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
        """Does nothing: initialise_tables draws the tables; TorchRec would broadcast from a rank a tower may lack."""


class _Sequences(ShardedSequences):
    def reset_parameters(self) -> None:
        """Does nothing: see _Bags."""


class TowerBagSharder(BagSharder):
    """Shards an EmbeddingBagCollection over any group of ranks; :func:`initialise_tables` must fill its tables."""

    @property
    def sharded_module_type(self) -> type[ShardedBags]:
        """Class of the sharded module: ShardedBags that are not initialised."""
        return _Bags


class TowerSequenceSharder(SequenceSharder):
    """Shards an EmbeddingCollection over any group of ranks; :func:`initialise_tables` must fill its tables."""

    @property
    def sharded_module_type(self) -> type[ShardedSequences]:
        """Class of the sharded module: ShardedSequences that are not initialised."""
        return _Sequences


def tower_groups(
    placement: TowerPlacement, everyone: dist.ProcessGroup, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """Creates the process groups of all towers, and returns those of this rank's towers by name. Collective."""
    local: dict[str, dist.ProcessGroup] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        tuple(range(placement.world_size)): everyone
    }
    for tower, ranks in placement.ranks.items():
        # All ranks of the job must create every group, in one order; towers on the same
        # ranks share theirs.
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank(everyone) in ranks:
            local[tower] = groups[ranks]
    return local


def shard_tower(
    tower: nn.Module,
    plans: Mapping[str, EmbeddingModuleShardingPlan],
    sharders: Mapping[type, ModuleSharder[nn.Module]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[KeyedJaggedTensor, Tensor], Tensor]:
    """Shards ``tower`` in place over the ranks of ``group``, and returns a function to run it. Collective.

    Args:
        tower: unsharded tower; its dense layers are equal on all ranks.
        plans: sharding plans of its collections by their path in the tower; ranks count within the job.
        sharders: sharders by type of collection.
        group: process group of the tower's ranks.
        device: device of this rank.
    """
    # Given the group, the constructor would make a device mesh of the job's first ranks
    # instead of the group's.
    env = ShardingEnv.from_local(dist.get_world_size(group), dist.get_rank(group))
    env.process_group = group
    members = dist.get_process_group_ranks(group)
    # DistributedDataParallel must leave these sharded parameters and buffers as they
    # are.
    by_rank = []
    for path, collection in list(collections(tower)):
        parent, _, name = path.rpartition(".")
        sharded = sharders[type(collection)].shard(
            collection, _within(plans[path], members), env, device
        )
        setattr(tower.get_submodule(parent), name, sharded)
        by_rank += [
            f"{path}.{state}"
            for state, _ in (*sharded.named_parameters(), *sharded.named_buffers())
        ]
    tower.to(device)
    for module in tower.modules():
        # A BatchNorm of ours or of torch: its batch spans the tower's ranks.
        if hasattr(module, "process_group"):
            module.process_group = group  # type: ignore[assignment]
    dense = [name for name, _ in tower.named_parameters() if name not in by_rank]
    # DistributedDataParallel refuses a module without parameters, and one rank has
    # nothing to average.
    if env.world_size == 1 or not dense:
        return tower
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tower, by_rank)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(
        tower,
        process_group=group,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )


def _within(
    plan: EmbeddingModuleShardingPlan, members: list[int]
) -> EmbeddingModuleShardingPlan:
    """Returns the plan with ``ranks`` counted within the group; TorchRec counts shard placements over all ranks."""
    local = {}
    for name, sharding in plan.items():
        ranks = sharding.ranks
        if ranks is not None:
            ranks = list(map(members.index, ranks))
        local[name] = dataclasses.replace(sharding, ranks=ranks)
    return EmbeddingModuleShardingPlan(local)


def needs_equal_rows(
    plans: Iterable[EmbeddingModuleShardingPlan], ranks: tuple[int, ...]
) -> bool:
    """Whether all ranks of a tower must look up equally many rows: row_wise tables exchange equal pieces."""
    kinds: set[str] = set()
    for plan in plans:
        kinds |= {sharding.sharding_type for sharding in plan.values()}
    return len(ranks) > 1 and ShardingType.ROW_WISE.value in kinds


class _Outputs(LazyGetItemMixin[str, Tensor], LazyAwaitable[dict[str, Tensor]]):
    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def _wait_impl(self) -> dict[str, Tensor]:
        return self._outputs


class ShardedTowers(
    ShardedModule[KJTList, dict[str, Tensor], dict[str, Tensor], ExchangeContext],
    FusedOptimizerModule,
):
    """Sharded :class:`Towers`: each rank holds and runs the towers that the plan gives it. A call is collective.

    Args:
        module: unsharded towers; rank 0's dense layers and buffers are copied to all ranks.
        plan: ranks of each tower, and how its tables are sharded over them.
        sharders: sharders by type of collection.
        env: TorchRec's environment of all ranks.
        device: device of this rank.
        timeout: timeout of the collectives of each tower.
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
        self._placement = plan.placement
        self._world_size = env.world_size
        self._reads = dict(module.reads)
        towers: dict[str, Any] = dict(module.items())
        self._features = {name: _features(tower) for name, tower in towers.items()}
        self._run: dict[str, Callable[..., Tensor]] = {}
        self._hosts = towers_by_host(towers, plan.placement)
        host_of: dict[str, str] = {}
        for host, names in self._hosts.items():
            host_of |= dict.fromkeys(names, host)
        self._device = device
        everyone: dist.ProcessGroup = env.process_group
        specs = {}
        for name, tower in towers.items():
            plans = [
                *plan.tables[name].values(),
                *plan.tables[host_of.get(name, name)].values(),
            ]
            specs[name] = TowerSpec(
                widths=Widths(
                    len(self._features[name]),
                    len(tower.dense) + self._reads[name].weights,
                ),
                out=tower.out_features,
                shared=self._reads[name].shared,
                equal=needs_equal_rows(plans, plan.placement.ranks[name]),
            )
        # All towers' specs are known on all ranks, since each rank packs rows for
        # towers that it lacks.
        self._exchange = TowerExchange(plan.placement, specs, everyone, device)
        groups = tower_groups(plan.placement, everyone, timeout)
        for name, tower in towers.items():
            for value in (*tower.parameters(), *tower.buffers()):
                # Tables are still on the meta device and have no values to copy.
                if value.device.type != "meta":
                    copied = value.detach().to(device)
                    dist.broadcast(copied, src=0, group=everyone)
                    value.detach().copy_(copied)
            if name in groups:
                self.add_module(name, tower)
                self._run[name] = shard_tower(
                    tower, plan.tables[name], sharders, groups[name], device
                )

    def create_context(self) -> ExchangeContext:
        """Returns an empty context for one batch."""
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
        host_lengths: Mapping[str, Tensor] | None = None,
    ) -> KJTListSplitsAwaitable[ExchangeContext]:
        """Starts to send each row to the ranks of its towers.

        The arguments are those of :meth:`Towers.forward`; ``joint`` is the batch's, which holds the bags of shared
        tables. The host's lengths are not used, because rows of other ranks arrive without theirs.
        """
        tower_rows = {}
        queries = 0
        if shared_dense is not None:
            queries = len(shared_dense)
        shared_bags: dict[str, FeatureBags] = {}
        if joint is not None:
            shared_bags = split_joint(joint, queries)
        if names is None:
            names = list(self._reads)
        for name in names:
            shared, columns, weighs, _ = self._reads[name]
            kjt: Any = sparse
            matrix: Any = dense
            column = weights
            if shared:
                kjt = shared_sparse
                matrix = shared_dense
                column = shared_weights
            numbers = matrix[:, columns]
            # Weights travel as one more dense column; padding rows have weight 0.
            if weighs:
                if column is None:
                    column = numbers.new_ones(len(numbers))
                numbers = torch.cat([numbers, column[:, None]], dim=1)
            tower_rows[name] = _rows(kjt, shared_bags, numbers, self._features[name])
        return KJTListSplitsAwaitable(
            [self._exchange.begin(ctx, tower_rows, (len(dense), queries))], ctx
        )

    def compute(self, ctx: ExchangeContext, dist_input: KJTList) -> dict[str, Tensor]:
        """Runs this rank's towers on all received rows; outputs are in the order of the sending ranks."""
        received: ReceivedRows = dist_input[0]
        outputs = {}
        shared = self._shared_values(received.rows)
        for name, rows in received.rows.items():
            kjt = KeyedJaggedTensor(
                self._features[name],
                rows.values,
                lengths=rows.lengths.reshape(-1),
                stride=rows.height,
            )
            options: dict[str, Any] = {}
            if name in shared:
                options["looked_up"] = shared[name]
            dense = rows.dense
            if self._reads[name].weights:
                options["weights"] = dense[:, -1]
                dense = dense[:, :-1]
            output = self._run[name](kjt, dense, **options).float()
            scale = len(self._placement.ranks[name]) / self._world_size
            if output.requires_grad and scale != 1:
                # Gradients are averaged over the tower's ranks here, but over all ranks
                # in the flat model.
                output.register_hook(lambda gradient, scale=scale: gradient * scale)  # type: ignore[no-untyped-call]
            outputs[name] = output
        return outputs

    def _shared_values(self, rows: Mapping[str, TowerRows]) -> dict[str, Any]:
        """Looks up hosted tables for the received rows; returns their values by tower."""
        values: dict[str, Any] = {}
        for host, names in self._hosts.items():
            present = [name for name in names if name in rows]
            if present:
                look_ups: Any = self.get_submodule(host).lookups
                towers = [
                    HostedTower(
                        self._features[name], self._reads[name].shared, rows.get(name)
                    )
                    for name in names
                ]
                batch = batch_of_arrivals(towers, look_ups.joint, self._device)
                values |= dict.fromkeys(present, look_ups(batch, present))
        return values

    def output_dist(
        self, ctx: ExchangeContext, output: dict[str, Tensor]
    ) -> LazyAwaitable[dict[str, Tensor]]:
        """Sends the outputs back to the ranks of their rows."""
        return _Outputs(self._exchange.back(ctx, output))

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the towers' modules too for a containing model, but only this module if called directly.

        TorchRec's pipelines take over the input dist of every collection within a module that they pipeline, to start
        it a batch ahead; the towers' collections run inside :meth:`compute` and must be left alone.
        """
        if memo is None:
            return iter([(prefix, self)])
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(
            memo, prefix, remove_duplicate
        )
        return modules

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_parameters(
                f"{prefix}.{name}".lstrip("."), recurse, remove_duplicate
            )

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_buffers(
                f"{prefix}.{name}".lstrip("."), recurse, remove_duplicate
            )

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Optimizer of the tables of this rank's towers."""
        optimizers: list[Any] = []
        for name, tower in self.named_children():
            for path, collection in collections(tower):
                optimizers.append((f"{name}.{path}", collection.fused_optimizer))
        return CombinedOptimizer(optimizers)

    def holders(self, model: nn.Module, names: Iterable[str]) -> dict[str, int]:
        """Returns how many ranks hold each of these parameters of ``model``, by name."""
        path = next(path for path, module in model.named_modules() if module is self)
        # A parameter outside the towers is on all ranks.
        holders = dict.fromkeys(names, self._world_size)
        for tower in self._run:
            prefix = f"{path}.{tower}.".lstrip(".")
            for name in holders:
                if name.startswith(prefix):
                    holders[name] = len(self._placement.ranks[tower])
        return holders

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Class of the unsharded module: :class:`Towers`."""
        return Towers


def _features(tower: Any) -> list[str]:
    features: dict[str, None] = {}
    for table in tower.tables:
        features |= dict.fromkeys(table.feature_names)
    return list(features)


def _rows(
    kjt: KeyedJaggedTensor,
    shared_bags: Mapping[str, FeatureBags],
    dense: Tensor,
    features: list[str],
) -> TowerRows:
    """Builds the rows for a tower; features missing in ``kjt`` are in ``shared_bags``."""
    keys = kjt.keys()
    if not shared_bags or set(features) <= set(keys):
        if keys != features:
            kjt = kjt.permute([keys.index(name) for name in features])
        return TowerRows(
            kjt.values().long(),
            kjt.lengths().int().view(len(features), kjt.stride()),
            dense,
        )
    by_feature = dict(shared_bags)
    for key, bags in kjt.to_dict().items():
        by_feature[key] = FeatureBags(bags.values(), bags.lengths())
    values = torch.cat([by_feature[name].values for name in features])
    lengths = torch.stack([by_feature[name].lengths for name in features])
    return TowerRows(values.long(), lengths.int(), dense)


class TowerSharder(ModuleSharder[Towers]):
    """Sharder from :class:`Towers` with a :class:`TowerPlan` to :class:`ShardedTowers`.

    Args:
        timeout: timeout of the collectives of each tower.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._sharders = {
            sharder.module_type: sharder
            for sharder in [TowerBagSharder(), TowerSequenceSharder()]
        }
        self._timeout = timeout

    def shard(
        self,
        module: Towers,
        params: TowerPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTowers:
        """Shards ``module`` by the plan ``params``. Collective."""
        return ShardedTowers(
            module,
            params,
            self._sharders,
            env,
            device or torch.device("cpu"),
            self._timeout,
        )

    def shardable_parameters(self, module: Towers) -> dict[str, nn.Parameter]:
        """Returns nothing: the tables of each tower are planned by themselves."""
        return {}

    @property
    def module_type(self) -> type[Towers]:
        """Class of the unsharded module: :class:`Towers`."""
        return Towers
