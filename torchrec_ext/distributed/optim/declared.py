"""declare_table_optimizer(): tells TorchRec which optimizer runs in the backward of which table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torch import nn
from torch.distributed.optim import (
    # torchrec has a name of its own for this function, but it is deprecated.
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingConfig,
)

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.sharders import refused_because
from torchrec_ext.distributed.tables import collections

FUSED_ON_CPU = ("adagrad", "row_wise_adagrad", "sgd")
_TAGS = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
# Attribute of a table whose declaration is ours.
_OURS = "_declared_by_torchrec_ext"


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

    Raises:
        ValueError: a table is frozen, or the caller has declared its optimizer by TorchRec's own
            ``apply_optimizer_in_backward``.
    """
    choices = optimizer.for_tables(model)
    for _, collection in collections(model):
        for name, parameter in collection.named_parameters():
            table = name.split(".")[1]
            if hasattr(parameter, "_optimizer_classes") and not hasattr(
                parameter, _OURS
            ):
                raise ValueError(
                    f"table '{table}': apply_optimizer_in_backward has declared its optimizer; leave that out, and "
                    "give optimizer=OptimizerConfig(...)"
                )
            if not parameter.requires_grad:
                raise ValueError(
                    f"table '{table}': requires_grad=False, but a kernel trains every table; leave that out, and set "
                    f"optimizer.per_table.{table}.lr=0"
                )
            setattr(parameter, _OURS, True)
            # A second declaration would be added to the first, and TorchRec refuse
            # both.
            for tag in _TAGS:
                vars(parameter).pop(tag, None)
            kind, arguments = choices[table].fused()
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
    """Explains that a table's optimizer has no kernel, with the setting to change."""
    prefix = f"optimizer.per_table.{table.name}."
    # The rates of Adam are too low for Adagrad.
    remedy = f"{prefix}kind=adagrad, {prefix}lr=0.05"
    if can_be_whole:
        remedy = f"plan.tables.{table.name}.sharding=data_parallel, or {remedy}"
    elif isinstance(table, EmbeddingConfig) and table.data_type == DataType.FP32:
        remedy += ", or read it by an EmbeddingBag"
    return f"table '{table.name}': FBGEMM has no kernel of {choice.kind} for the {device}; set {remedy}"


def has_kernel(choice: Choice, device: str) -> bool:
    """Whether FBGEMM runs the table optimizer in its backward on the device, ``cpu`` or ``cuda``."""
    return choice.kind in FUSED_ON_CPU or (device == "cuda" and choice.kind != "adam")
