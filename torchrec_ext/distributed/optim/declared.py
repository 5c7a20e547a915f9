"""declare_table_optimizer(): tells TorchRec which optimizer runs in the backward of which table.

chosen_optimizer(): what the caller has declared by TorchRec's own ``apply_optimizer_in_backward``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import nn
from torch.distributed.optim import (
    # torchrec has a name of its own for this function, but it is deprecated.
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig, Override
from torchrec_ext.distributed.optim.kinds import KINDS
from torchrec_ext.distributed.sharders import refused_because
from torchrec_ext.distributed.tables import collections

FUSED_ON_CPU = ("adagrad", "row_wise_adagrad", "sgd")
_TAGS = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
# Attribute of a table that keeps the caller's declaration, because ours overwrites it.
_CALLERS = "_declared_by_the_caller"
Declaration = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def chosen_optimizer(
    model: nn.Module, optimizer: OptimizerConfig | None
) -> OptimizerConfig:
    """Returns ``optimizer``, or the declarations of ``apply_optimizer_in_backward`` as a config, else defaults.

    Args:
        model: unsharded model.
        optimizer: optimizers of all tables and layers, or None.

    Raises:
        ValueError: both are given, or a declaration cannot be expressed by OptimizerConfig.
    """
    declared: dict[str, Declaration] = {}
    for name, parameter in _tables_of(model):
        declaration = _declared(parameter)
        if declaration is not None:
            declared[name] = declaration
    if not declared:
        return optimizer or OptimizerConfig()
    if optimizer is not None:
        name, (kind, arguments) = next(iter(declared.items()))
        raise ValueError(
            f"optimizer= is given, but apply_optimizer_in_backward has declared {kind.__name__}("
            f"{_text(arguments)}) for table '{name}'; leave out one of them; per_table={{'{name}': "
            "Override(kind='sgd', lr=0.1)}} says the same"
        )
    return OptimizerConfig(
        per_table={
            name: _as_override(name, *declaration)
            for name, declaration in declared.items()
        }
    )


def undeclared(model: nn.Module) -> list[str]:
    """Returns the names of the tables of an unsharded model without an optimizer declared by the caller."""
    return [
        name for name, parameter in _tables_of(model) if _declared(parameter) is None
    ]


def _tables_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for _, collection in collections(model):
        for name, parameter in collection.named_parameters():
            yield name.split(".")[1], parameter


def _declared(parameter: nn.Parameter) -> Declaration | None:
    """Returns the caller's declaration, also after a call of :func:`declare_table_optimizer`."""
    if hasattr(parameter, _CALLERS):
        return cast(Declaration | None, getattr(parameter, _CALLERS))
    if not hasattr(parameter, "_optimizer_classes"):
        return None
    return parameter._optimizer_classes[-1], parameter._optimizer_kwargs[-1]  # type: ignore[attr-defined]


def _as_override(
    name: str, kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]
) -> Override:
    """Returns a declaration as an exception of ``per_table``, with FBGEMM's defaults as TorchRec has them."""
    settings = {"lr": 0.01, "eps": 1e-8, **arguments}
    defaults = {
        "betas": (0.9, 0.999),
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0,
        "momentum": 0,
        "amsgrad": False,
    }
    others = {}
    for key, value in settings.items():
        # NaN equals nothing, so a setting without a default always counts.
        if key not in ("lr", "eps") and defaults.get(key, math.nan) != value:
            others[key] = value
    if kind not in KINDS or others:
        supported_kinds = ", ".join(dict.fromkeys(KINDS.values()))
        raise ValueError(
            f"table '{name}': apply_optimizer_in_backward has declared {kind.__name__}({_text(others)}); only lr and "
            f"eps of {supported_kinds} can be taken over; give optimizer=OptimizerConfig(...) instead"
        )
    return Override(
        kind=KINDS[kind], lr=float(settings["lr"]), eps=float(settings["eps"])
    )


def _text(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def declare_table_optimizer(
    model: nn.Module, optimizer: OptimizerConfig
) -> dict[str, Choice]:
    """Declares to TorchRec the optimizer in the backward of every table; a second call replaces the first.

    The planner counts its state, and sharding builds it into the kernels.

    Args:
        model: unsharded model.
        optimizer: optimizers of its tables.

    Returns:
        Optimizer of each table, by name.
    """
    choices = optimizer.for_tables(model)
    for _, collection in collections(model):
        for name, parameter in collection.named_parameters():
            setattr(parameter, _CALLERS, _declared(parameter))
            # A second declaration would be added to the first, and TorchRec refuse
            # both.
            for tag in _TAGS:
                if hasattr(parameter, tag):
                    delattr(parameter, tag)
            kind, arguments = choices[name.split(".")[1]].fused()
            apply_optimizer_in_backward(kind, [parameter], arguments)
    return choices


def shardings(
    tables: Iterable[BaseEmbeddingConfig],
    choices: Mapping[str, Choice],
    asked: Mapping[str, str],
    device: str,
) -> dict[str, str]:
    """Returns the sharding type of each table: as asked, or data_parallel for ``auto`` without a kernel.

    Args:
        tables: configurations of the tables.
        choices: optimizers by table name, from :func:`declare_table_optimizer`.
        asked: sharding type asked for, by table name, ``auto`` included.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: a table is to be sharded, and nothing runs its optimizer on the device.
    """
    result = {}
    for table in tables:
        sharding = asked[table.name]
        choice = choices[table.name]
        if not has_kernel(choice, device) and sharding != "data_parallel":
            can_be_whole = refused_because(table, "data_parallel", device) is None
            if sharding != "auto" or not can_be_whole:
                raise ValueError(_without_kernel(table, choice, device, can_be_whole))
            sharding = "data_parallel"
        result[table.name] = sharding
    return result


def _without_kernel(
    table: BaseEmbeddingConfig, choice: Choice, device: str, can_be_whole: bool
) -> str:
    """Explains that no kernel runs a table's optimizer, and what to set."""
    rule = "weight decay" if choice.weight_decay else choice.kind
    prefix = f"optimizer.per_table.{table.name}."
    # The rates of Adam are too low for Adagrad.
    remedy = f"{prefix}kind=adagrad, {prefix}lr=0.05"
    if choice.weight_decay:
        remedy = f"{prefix}weight_decay=0"
    if can_be_whole:
        remedy = f"plan.tables.{table.name}.sharding=data_parallel, or {remedy}"
    return f"table '{table.name}': FBGEMM has no kernel of {rule} for the {device}; set {remedy}"


def has_kernel(choice: Choice, device: str) -> bool:
    """Whether FBGEMM runs the table optimizer in its backward on the device, ``cpu`` or ``cuda``."""
    if choice.weight_decay:
        return False
    return choice.kind in FUSED_ON_CPU or (device == "cuda" and choice.kind != "adam")
