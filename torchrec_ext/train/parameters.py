"""What an optimizer moves, as plain tensors: each table and dense parameter with its state, its rule and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import DataType

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer
from torchrec_ext.distributed.tables import Shard, local_shards
from torchrec_ext.train.lowering import CannotCaptureError
from torchrec_ext.train.updates import UPDATES

_STATES = {"adam": 2, "lazy_adam": 2, "adagrad": 1, "row_wise_adagrad": 1, "sgd": 0}


@dataclass
class Moved:
    """One parameter and what moves it; the tensors are the optimizer's and the model's own memory.

    Args:
        name: of a table, or of a dense parameter in the unwrapped model.
        table: whether it is a table, (rows, D).
        sharded: whether it is a table that TorchRec shards: outside of the limit on the gradient's norm.
        weight: its values.
        state: in the order of its rule, see :mod:`updates`.
        steps: the optimizer's counters of the steps that it has made.
        group: holds ``lr``.
        choice: the rule and its numbers.
    """

    name: str
    table: bool
    sharded: bool
    weight: Tensor
    state: list[Tensor]
    steps: list[Tensor]
    group: dict[str, Any]
    choice: Choice


def moved_parameters(model: nn.Module, optimizer: HybridOptimizer) -> list[Moved]:
    """Every parameter that ``optimizer`` moves on this one rank, after its first step, which makes its state.

    Raises:
        CannotCaptureError: a table that is split, not fp32, or moved by a rule that is not in :data:`UPDATES`.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    by_name = owners(optimizer)
    shards = list(local_shards(model))
    found = []
    for name, weight, choice, config in _named(model, optimizer, shards):
        fqn = config.fqn if config else name
        if choice.kind not in UPDATES:
            raise CannotCaptureError(
                f"'{name}' is moved by {choice.kind}, which has no captured form; those with one: {list(UPDATES)}"
            )
        own = by_name.get(fqn, [])
        group = next((groups[id(parameter)] for parameter in own if id(parameter) in groups), None)
        if group is None:
            raise CannotCaptureError(f"no optimizer moves '{fqn}'")
        values = [optimizer.state.get(parameter, {}) for parameter in own]
        # Of two, the kernel's and that of ShardedAdam on top of it, the last has the state.
        state, steps = _state(values[-1])
        if len(state) != _STATES[choice.kind]:
            raise CannotCaptureError(
                f"'{fqn}' has {len(state)} tensors of {choice.kind} state, not {_STATES[choice.kind]}: run a step"
            )
        sharded = config is not None and isinstance(own[0], ShardedTensor)
        found.append(Moved(name, config is not None, sharded, weight.detach(), state, steps, group, choice))
    return found


def owners(optimizer: HybridOptimizer) -> dict[str, list[Any]]:
    """What ``optimizer`` moves by its name in the unwrapped model; of two, the kernel's is first."""
    found: dict[str, list[Any]] = {}
    prefixes = {name for name, _ in optimizer.optimizers if name}
    for key, parameter in optimizer.params.items():
        first, _, rest = key.partition(".")  # TorchRec puts the name of an optimizer among several before that of a parameter
        found.setdefault(rest if first in prefixes else key, []).append(parameter)
    return found


def _named(model: nn.Module, optimizer: HybridOptimizer, shards: list[Shard]) -> Iterator[tuple[str, Tensor, Choice, Shard | None]]:
    for shard in shards:
        config = shard.config
        if shard.tensor.shape != (config.num_embeddings, config.embedding_dim):
            raise CannotCaptureError(f"table '{config.name}' is split: this rank holds {tuple(shard.tensor.shape)} of it")
        if config.data_type != DataType.FP32:
            raise CannotCaptureError(f"table '{config.name}' is {config.data_type.value}; a captured step moves fp32 tables alone")
        yield config.name, shard.tensor, optimizer.of_tables[config.name], shard
    tables = {shard.fqn for shard in shards}
    for name, parameter in get_unwrapped_module(model).named_parameters():
        if name not in tables and parameter.requires_grad:
            yield name, parameter, optimizer.of_layers[name], None


def _state(state: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    tensors, steps = [], []
    for name, value in state.items():
        value = value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
        if name.split(".")[-1] == "step":
            steps.append(value if isinstance(value, Tensor) else torch.tensor(float(value)))
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors, steps
