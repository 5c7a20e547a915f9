"""hybrid_parallel(): shards tables, with optimizers in their backward, and replicates dense layers.

settle_buckets(): sums gradients in one order from the first step on, so that a resumed run rounds as one that went on.

DistributedDataParallel rebuilds its buckets after its first backward, in the order in which the gradients arrived. How
a sum over three ranks or more is rounded depends on a number's position in its bucket: gloo and NCCL reduce in rings,
and each piece of a bucket begins at another rank. Without this, the first step after a resume differs by a rounding
from the same step of a run that went on.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_ext.batch  # noqa: F401 -- leaves out a notice of torch, which means TorchRec
from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import (
    declare_table_optimizer,
    shardings,
)
from torchrec_ext.distributed.optim.hybrid import (
    HybridOptimizer,
    keyed_optimizers,
)
from torchrec_ext.distributed.optim.sharded import (
    OneBackward,
    read_past_caches,
)
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import on_own_device, plan_sharding
from torchrec_ext.distributed.runtime import (
    Runtime,
    calm_gloo,
    gather_objects,
    refuse_differences,
)
from torchrec_ext.distributed.sharders import sharders
from torchrec_ext.distributed.shared_memory.sharing import sharing_as_all_ranks_do
from torchrec_ext.distributed.tables import (
    collections,
    initialise_tables,
    rows_of_tables,
    table_configs,
    table_shardings,
    tables_of,
    without_init_fn,
)
from torchrec_ext.ids.ranks import host_group
from torchrec_ext.schema.validation import listed


def settle_buckets(model: nn.Module) -> None:
    """Makes every DistributedDataParallel in ``model`` keep its first bucket layout. Collective, before the first step.

    Two ranks do not need it: a sum of two numbers is rounded in one way. It is not done where gradients fill several
    buckets (over 1 MiB) either: there the layout by arrival lets the sums overlap with the backward.
    """
    for module in model.modules():
        if (
            isinstance(module, DistributedDataParallel)
            and module.process_group.size() > 2
        ):
            size = sum(
                parameter.nbytes
                for parameter in module._module_parameters
                if parameter.requires_grad
            )
            if size <= dist._DEFAULT_FIRST_BUCKET_BYTES:
                module.reducer._push_all_rebuilt_params()


def hybrid_parallel(
    model: nn.Module,
    runtime: Runtime,
    *,
    plan: ShardingPlan | PlanConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
) -> tuple[DistributedModelParallel, HybridOptimizer]:
    """Shards the tables of ``model`` over the ranks and replicates its dense layers.

    Args:
        model: any module that holds EmbeddingBagCollections or EmbeddingCollections; changed in place. Tables on the
            meta device are drawn, with their ``init_fn`` if they have one. Other tables keep their rows: those of rank
            0, as its dense layers and buffers, are copied to all ranks. Dense layers that are frozen now stay so.
        runtime: this process's rank and device.
        plan: TorchRec's sharding plan, or settings by which :func:`plan_sharding` makes one; by default its own.
        optimizer: optimizers and learning rates; by default :class:`OptimizerConfig`'s.
        seed: seed of the drawn tables' initial values, which depend on it and the table's name alone, not on the plan
            and not on the ranks.

    Returns:
        TorchRec's DistributedModelParallel, and one optimizer for all of it, for a loop of your own or any of
        TorchRec's pipelines: it drives the sharded tables (whose step runs in the backward), the replicated tables and
        the dense layers.

    Raises:
        ValueError: the model has no parameters; the plan shards a table whose optimizer nothing runs on the device; an
            exception names no table or layer; two collections have tables of one name; a table has rows on some ranks
            and none on others, is frozen, or has an optimizer by ``apply_optimizer_in_backward``; ranks have other
            tables or settings; the plan is of another model.
    """
    _refuse_managed_collision(model)
    _refuse_one_name(model)
    if not any(True for _ in model.parameters()):
        raise ValueError(
            f"model: {type(model).__name__} has no parameters, so there is nothing to train; give the module that "
            "holds the tables and layers"
        )
    _refuse_differences(model, runtime, optimizer, plan, seed)
    optimizer = optimizer or OptimizerConfig()
    if not isinstance(plan, ShardingPlan):
        plan = plan_sharding(model, runtime, plan, optimizer=optimizer)
    _refuse_other_tables(model, plan)
    plan = on_own_device(plan, runtime)
    choices = declare_table_optimizer(model, optimizer)
    _refuse_without_kernel(model, plan, choices, runtime.device.type)
    layers = optimizer.for_layers(dense_layers(model))
    given = _given_rows(model, runtime)
    # TorchRec passes deprecated arguments, and calls deprecated collectives and
    # ShardedTensor in every step, and its caller, who reads the sharded state too, cannot
    # choose others. Of torch's, TorchRec's and our own modules alone, and at the end of
    # the list: filters of the user's own come first.
    deprecated = (
        r"`torch\.distributed\.\w+_tensor` is deprecated|Please use DTensor instead|"
        "`broadcast_buffers` is deprecated"
    )
    warnings.filterwarnings(
        "ignore", deprecated, FutureWarning, module=r"torch(rec(_ext)?)?\.", append=True
    )
    with sharing_as_all_ranks_do(), without_init_fn(model):
        sharded = DistributedModelParallel(
            model,
            device=runtime.device,
            plan=plan,
            sharders=sharders(),
        )
    initialise_tables(sharded, seed, given)
    read_past_caches(sharded)
    settle_buckets(sharded)
    # Gloo's threads exist once all groups of a step do.
    calm_gloo()
    return sharded, _optimizer(sharded, optimizer.clip_norm, choices, layers)


def _refuse_managed_collision(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            raise ValueError(
                f"'{path}' has TorchRec's managed collision, whose tables train under TorchRec's own sharders; take "
                "plain tables with torchrec_ext.ids.DynamicIds, or DistributedModelParallel"
            )


def _refuse_one_name(model: nn.Module) -> None:
    paths: dict[str, str] = {}
    for path, collection in collections(model):
        for table in table_configs(collection):
            other = paths.setdefault(table.name, path)
            if other != path:
                raise ValueError(
                    f"'{other}' and '{path}' both have a table '{table.name}', by which plans and first values know "
                    "it; give each a name of its own, as one adopt_tables(model) does"
                )


def _refuse_differences(
    model: nn.Module,
    runtime: Runtime,
    optimizer: OptimizerConfig | None,
    plan: ShardingPlan | PlanConfig | None,
    seed: int,
) -> None:
    """Refuses ranks with other tables or settings, which would train apart or wait for each other."""
    mine: dict[str, Any] = {"seed": seed}
    for table in tables_of(model):
        mine[f"table '{table.name}'"] = (
            f"{table.num_embeddings:,} x {table.embedding_dim}"
        )
    for name, settings in (("optimizer", optimizer), ("plan", plan)):
        if isinstance(settings, OptimizerConfig | PlanConfig):
            for key, value in dataclasses.asdict(settings).items():
                mine[f"{name}.{key}"] = repr(value)
    refuse_differences(mine, runtime.world_size)


def _refuse_other_tables(model: nn.Module, plan: ShardingPlan) -> None:
    for path, collection in collections(model):
        planned = plan.plan.get(path)
        names = [table.name for table in table_configs(collection)]
        if isinstance(planned, EmbeddingModuleShardingPlan) and planned.keys() != {
            *names
        }:
            raise ValueError(
                f"plan: has the tables {listed(planned)} for '{path}', where the model has {listed(names)}; make "
                "one of this model by plan_sharding"
            )


def _given_rows(model: nn.Module, runtime: Runtime) -> dict[str, Tensor]:
    """Returns the rows of the tables with memory by name, after copying rank 0's and its buffers to all ranks."""
    given = rows_of_tables(model)
    for rank, names in enumerate(gather_objects(set(given), runtime.world_size)):
        differing = names ^ set(given)
        if differing:
            raise ValueError(
                f"'{min(differing)}' is on the meta device on rank {rank} or {runtime.rank}, and not on the other; "
                "build the model on one kind of device on all ranks"
            )
    if runtime.world_size > 1:
        group = host_group()
        # TorchRec's DistributedDataParallel copies parameters alone.
        buffers = [each for each in model.buffers() if not each.is_meta]
        for tensor in [*given.values(), *buffers]:
            first = tensor.contiguous()
            dist.broadcast(
                first, src=0, group=group if first.device.type == "cpu" else None
            )
            # An expanded buffer cannot be written, and seldom needs to be.
            if not first.equal(tensor):
                tensor.copy_(first)
    return given


def dense_layers(model: nn.Module) -> list[str]:
    """Returns the names of all parameters of an unsharded ``model`` outside embedding collections."""
    tables = _table_prefixes(model)
    return [name for name, _ in model.named_parameters() if not name.startswith(tables)]


def _table_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths with which names of tables begin."""
    # A model may be a collection itself, at the empty path, with which all names begin.
    return tuple(f"{path}.".lstrip(".") for path, _ in collections(model))


def _refuse_without_kernel(
    model: nn.Module, plan: ShardingPlan, choices: Mapping[str, Choice], device: str
) -> None:
    planned = {
        name: sharding.sharding_type for name, sharding in table_shardings(plan).items()
    }
    tables = [table for table in tables_of(model) if table.name in planned]
    shardings(tables, choices, planned, device)


def _optimizer(
    model: DistributedModelParallel,
    clip_norm: float,
    choices: Mapping[str, Choice],
    layers: Mapping[str, Choice],
) -> HybridOptimizer:
    """Combines the fused optimizers with those of the replicated tables and dense layers."""
    paths = _table_prefixes(model)
    tables = {}
    dense = {}
    for name, value in in_backward_optimizer_filter(model.named_parameters()):
        if name.startswith(paths):
            tables[name] = value
        elif value.requires_grad:
            dense[name] = value
    # A parameter of a collection is called PATH.TABLE.weight.
    table_choices = {name: choices[name.split(".")[-2]] for name in tables}
    return HybridOptimizer(
        model.fused_optimizer,
        keyed_optimizers("replicated_tables", tables, table_choices),
        keyed_optimizers("dense", dense, layers),
        one_backward=OneBackward(model),
        clip_norm=clip_norm,
        table_choices=choices,
        layer_choices=layers,
    )
