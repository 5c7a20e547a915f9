"""OptimizerConfig: which optimizer moves tables and dense layers, how fast, and what it costs in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,  # torchrec's own name for it is deprecated
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_ext.distributed.tables import collections

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
_TAGS = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizers of the tables and of the dense layers.

    Args:
        tables: runs inside the backward of sharded tables and touches only the rows of the batch. FBGEMM's CPU kernels know these
            three; row_wise_adagrad keeps one number per row, but splits that number where columns are split.
        tables_lr: learning rate of the tables.
        dense: optimizer of the dense layers.
        dense_lr: learning rate of the dense layers.
        eps: added to the denominator of Adagrad and Adam; the same everywhere, so a table learns the same however it is sharded.
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
        for name in ("tables_lr", "dense_lr", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: must be a number of 0 or more")

    def table_settings(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments for tables, fused or not."""
        return _TABLE_OPTIMIZERS[self.tables], _settings(self.tables, self.tables_lr, self.eps)

    def dense_settings(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments for dense layers."""
        return _DENSE_OPTIMIZERS[self.dense], _settings(self.dense, self.dense_lr, self.eps)

    def state_bytes(self, table: BaseEmbeddingConfig) -> int:
        """Bytes of optimizer state that ``table`` needs beside its weights."""
        per_row = {"adagrad": 4 * table.embedding_dim, "row_wise_adagrad": 4, "sgd": 0}[self.tables]
        return int(table.num_embeddings * per_row)


def declare_table_optimizer(model: nn.Module, optimizer: OptimizerConfig) -> None:
    """Tells TorchRec which optimizer runs in the backward of every table of the unsharded ``model``, once or anew.

    The planner counts its state, and sharding builds it into the kernels.
    """
    tables = [parameter for _, collection in collections(model) for parameter in collection.parameters()]
    for parameter in tables:
        for tag in _TAGS:
            if hasattr(parameter, tag):
                delattr(parameter, tag)
    kind, arguments = optimizer.table_settings()
    apply_optimizer_in_backward(kind, tables, arguments)


def _settings(name: str, lr: float, eps: float) -> dict[str, Any]:
    return {"lr": lr} if name == "sgd" else {"lr": lr, "eps": eps}
