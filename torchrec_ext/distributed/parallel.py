"""hybrid_parallel(): model-parallel tables with optimizers in their backward, data-parallel dense layers, in one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,  # torchrec's own name for it is deprecated
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_ext.distributed.planning import plan_sharding, sharders
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables

TableOptimizer = Literal["adagrad", "row_wise_adagrad", "sgd"]
DenseOptimizer = Literal["adam", "adagrad", "sgd"]
_TABLE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
}
_DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizers of the tables and of the dense layers.

    Args:
        tables: runs inside the backward of sharded tables and touches only the rows of the batch. FBGEMM's CPU kernels know these
            three; row_wise_adagrad keeps one number per row, but splits that number where columns are split.
        tables_lr: learning rate of the tables.
        dense: optimizer of the dense layers.
        dense_lr: learning rate of the dense layers.
        eps: added to Adagrad's denominator, everywhere the same, so that a table learns the same however it is sharded.
    """

    tables: TableOptimizer = "adagrad"
    tables_lr: float = 0.05
    dense: DenseOptimizer = "adam"
    dense_lr: float = 1e-3
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.tables not in get_args(TableOptimizer):
            raise ValueError(f"tables={self.tables!r}: must be one of {', '.join(get_args(TableOptimizer))}")
        if self.dense not in get_args(DenseOptimizer):
            raise ValueError(f"dense={self.dense!r}: must be one of {', '.join(get_args(DenseOptimizer))}")
        for name in ("tables_lr", "dense_lr"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: a learning rate must be 0 or more")

    def table_settings(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments for tables, fused or not."""
        return _TABLE_OPTIMIZERS[self.tables], _settings(self.tables, self.tables_lr, self.eps)

    def dense_settings(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments for dense layers."""
        return _DENSE_OPTIMIZERS[self.dense], _settings(self.dense, self.dense_lr, self.eps)


def _settings(name: str, lr: float, eps: float) -> dict[str, Any]:
    return {"lr": lr} if name == "sgd" else {"lr": lr, "eps": eps}


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
    plan = plan or plan_sharding(model, runtime)
    tables = [parameter for _, collection in collections(model) for parameter in collection.parameters()]
    table_class, table_arguments = optimizer.table_settings()
    apply_optimizer_in_backward(table_class, tables, table_arguments)
    sharded = DistributedModelParallel(model, device=runtime.device, plan=plan, sharders=sharders())
    initialise_tables(sharded, seed)
    return sharded, CombinedOptimizer([sharded.fused_optimizer, *_other_optimizers(sharded, optimizer)])


def _other_optimizers(model: DistributedModelParallel, optimizer: OptimizerConfig) -> list[tuple[str, KeyedOptimizer]]:
    """For what no backward updates: replicated tables, by the rule of the sharded ones, and the dense layers."""
    paths = tuple(f"{path}." for path, _ in collections(model.module))
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
