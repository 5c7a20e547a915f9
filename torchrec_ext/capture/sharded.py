"""moved_parameters(): the parameters of a sharded model as plain tensors, each table whole on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import DataType

from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.memory import (
    STATE_COUNTS,
    UpdatedParameter,
    state_tensors,
)
from torchrec_ext.capture.update_rules import UPDATES
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.tables import (
    Shard,
    collections,
    kernels_by_table,
    local_shards,
)


def moved_parameters(
    model: nn.Module, optimizer: HybridOptimizer
) -> list[UpdatedParameter]:
    """Returns all parameters of ``optimizer`` on this one rank, after its first step, which creates its state.

    Raises:
        CannotCaptureError: a table is split, not fp32, off the GPU, or has an update rule outside of :data:`UPDATES`.
    """
    for _, collection in collections(model):
        for name, kernel in kernels_by_table(collection).items():
            if kernel not in ("dense", "fused"):
                raise CannotCaptureError(
                    f"table '{name}' has kernel={kernel}, whose rows a captured step does not reach"
                )
    groups: dict[int, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        groups |= {id(parameter): group for parameter in group["params"]}
    by_name = owners(optimizer)
    shards = list(local_shards(model))
    result = []
    for name, weight, choice, config in _named_parameters(model, optimizer, shards):
        fqn = config.fqn if config else name
        if choice.kind not in UPDATES:
            raise CannotCaptureError(
                f"'{name}' is moved by {choice.kind}, which has no captured form; those with one: {list(UPDATES)}"
            )
        parameters = by_name.get(fqn, [])
        group = next(
            groups[id(parameter)] for parameter in parameters if id(parameter) in groups
        )
        values = [optimizer.state.get(parameter, {}) for parameter in parameters]
        state, steps = state_tensors(values[-1])
        if len(state) != STATE_COUNTS[choice.kind]:
            raise CannotCaptureError(
                f"'{fqn}' has {len(state)} tensors of {choice.kind} state, not {STATE_COUNTS[choice.kind]}: run a step"
            )
        sharded = config is not None and isinstance(parameters[0], ShardedTensor)
        result.append(
            UpdatedParameter(
                name,
                config is not None,
                sharded,
                weight.detach(),
                state,
                steps,
                group,
                choice,
            )
        )
    return result


def owners(optimizer: HybridOptimizer) -> dict[str, list[Any]]:
    """Maps names in the unwrapped model to the parameters of ``optimizer``; of two, the kernel's is first."""
    result: dict[str, list[Any]] = {}
    prefixes = {name for name, _ in optimizer.optimizers if name}
    for key, parameter in optimizer.params.items():
        # With several optimizers, TorchRec prefixes a parameter's name by its
        # optimizer's.
        first, _, rest = key.partition(".")
        if first in prefixes:
            key = rest
        result.setdefault(key, []).append(parameter)
    return result


def _named_parameters(
    model: nn.Module, optimizer: HybridOptimizer, shards: list[Shard]
) -> Iterator[tuple[str, Tensor, Choice, Shard | None]]:
    for shard in shards:
        config = shard.config
        if shard.tensor.shape != (config.num_embeddings, config.embedding_dim):
            raise CannotCaptureError(
                f"table '{config.name}' is split: this rank holds {tuple(shard.tensor.shape)} of it"
            )
        if config.data_type != DataType.FP32:
            raise CannotCaptureError(
                f"table '{config.name}' is {config.data_type.value}; a captured step moves fp32 tables alone"
            )
        yield config.name, shard.tensor, optimizer.table_choices[config.name], shard
    tables = {shard.fqn for shard in shards}
    for name, parameter in get_unwrapped_module(model).named_parameters():
        if name not in tables and parameter.requires_grad:
            yield name, parameter, optimizer.layer_choices[name], None
