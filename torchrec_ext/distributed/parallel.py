"""hybrid_parallel(): model-parallel tables with optimizers in their backward, data-parallel dense layers, in one function."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_ext.distributed.optimizers import OptimizerConfig, declare_table_optimizer
from torchrec_ext.distributed.planning import plan_sharding, sharders
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables


def hybrid_parallel(
    model: nn.Module,
    runtime: Runtime,
    *,
    plan: ShardingPlan | None = None,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """Shards the tables of ``model`` over the ranks and replicates its dense layers.

    Args:
        model: any module that holds EmbeddingBagCollections or EmbeddingCollections; changed in place. Its tables are usually on
            the meta device; its dense layers on all ranks become those of rank 0.
        runtime: this process's place in the job.
        plan: TorchRec's sharding plan; made by :func:`plan_sharding` where not given.
        optimizer: optimizers and learning rates.
        seed: of the tables' first values, which depend on it and the table's name alone: not on the plan, not on the ranks.

    Returns:
        TorchRec's DistributedModelParallel, and one optimizer for all of it, for a loop of your own or any of TorchRec's pipelines:
        the tables' (whose step runs in the backward), the replicated tables' and the dense layers'.
    """
    optimizer = optimizer or OptimizerConfig()
    plan = plan or plan_sharding(model, runtime, optimizer=optimizer)
    declare_table_optimizer(model, optimizer)
    sharded = DistributedModelParallel(model, device=runtime.device, plan=plan, sharders=sharders())
    initialise_tables(sharded, seed)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, *_other_optimizers(sharded, optimizer)])


def _other_optimizers(model: DistributedModelParallel, optimizer: OptimizerConfig) -> list[tuple[str, KeyedOptimizer]]:
    """For what no backward updates: replicated tables, by the rule of the sharded ones, and the dense layers."""
    paths = tuple(f"{path}." if path else "" for path, _ in collections(model.module))
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {name: value for name, value in parameters.items() if name.startswith(paths)}
    dense = {name: value for name, value in parameters.items() if name not in replicated}
    groups = [
        ("replicated_tables", replicated, *optimizer.table_settings()),
        ("dense", dense, *optimizer.dense_settings()),
    ]
    return [
        (name, KeyedOptimizerWrapper(values, lambda params, make=make, arguments=arguments: make(params, **arguments)))
        for name, values, make, arguments in groups
        if values
    ]
