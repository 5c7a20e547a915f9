"""OptimizerConfig: which optimizer updates tables and dense layers, how fast, and what it costs in memory.

Choice: the optimizer of one table or dense layer. Override: an exception for some of them, parsed from a short text.

RowAdam: FBGEMM's Adam family for tables that every rank holds whole, as a torch optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,  # torchrec's own name for it is deprecated
)
from torchrec import optim as placeholders
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_ext.distributed.sharders import refused_because
from torchrec_ext.distributed.tables import collections, table_configs


class RowAdam(torch.optim.Optimizer):
    """Adam that updates only the rows of a (rows, D) table that have a gradient; moments of the others stand still.

    The bias correction counts steps, not a row's own updates, as FBGEMM's fused kernels and TensorFlow Addons' LazyAdam
    do. With a gradient in every row it equals torch.optim.Adam; where rows are rare it learns differently.

    Args:
        params: tables, (rows, D) each.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: number added to the root of the second moment.
        row_wise: whether a row has one second moment, the mean over its columns (FBGEMM's partial row-wise Adam).
        trust_ratio: whether each row's update is scaled by |row| / |update|, where neither is 0 (LAMB, You et al. 2020,
            a row being a layer).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        row_wise: bool = False,
        trust_ratio: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "row_wise": row_wise, "trust_ratio": trust_ratio}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    state, rule = self.state[table], {name: group[name] for name in self.defaults}
                    _start(state, table, rule["row_wise"])
                    rows = rows_with_gradient(table.grad)
                    move_rows(table, rows, table.grad[rows], state, **rule)


def _start(state: dict[str, Any], table: Tensor, row_wise: bool) -> None:
    if not state:
        shape = (len(table), 1) if row_wise else table.shape
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
        state["exp_avg_sq"] = torch.zeros(shape, dtype=table.dtype, device=table.device)
    state["step"] += 1


def move_rows(
    table: Tensor,
    rows: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    row_wise: bool = False,
    trust_ratio: bool = False,
) -> None:
    """Makes one step of :class:`RowAdam` for some rows of a table, in place.

    Args:
        table: (rows, D) table, changed in place.
        rows: (n,) distinct row numbers.
        grad: (n, D) gradient of these rows.
        state: ``step``, which counts this step already, and the moments ``exp_avg`` and ``exp_avg_sq``, changed in
            place.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: number added to the root of the second moment.
        row_wise: see :class:`RowAdam`.
        trust_ratio: see :class:`RowAdam`.
    """
    steps, (beta1, beta2) = float(state["step"]), betas
    square = grad.square().mean(1, keepdim=True) if row_wise else grad.square()
    first = state["exp_avg"][rows].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"][rows].lerp_(square, 1 - beta2)
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
    update = first / (1 - beta1**steps) / adam_denominator(second, steps, beta2, eps)
    if trust_ratio:
        weight_norm, update_norm = table[rows].norm(dim=1, keepdim=True), update.norm(dim=1, keepdim=True)
        update *= torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
    table.index_add_(0, rows, update, alpha=-lr)


def adam_denominator(second: Tensor, steps: float, beta2: float, eps: float) -> Tensor:
    """The root of Adam's second moment, corrected for its first ``steps``, plus ``eps``; a new tensor."""
    corrected: Tensor = second / (1 - beta2**steps)
    return corrected.sqrt_().add_(eps)


def rows_with_gradient(grad: Tensor) -> Tensor:
    """Returns (n,) the numbers of the rows of a (rows, D) gradient that are not all 0."""
    return grad.ne(0).any(dim=1).nonzero().squeeze(1)


TableOptimizer = Literal["adagrad", "row_wise_adagrad", "sgd", "adam", "lazy_adam", "partial_row_wise_adam", "lamb"]
DenseOptimizer = Literal["adam", "adagrad", "sgd"]
# TorchRec derives the kernel from the class, and the planner the bytes of state; the Adam classes here are never run.
_FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
    "adam": placeholders.Adam,
    "lazy_adam": placeholders.Adam,
    "partial_row_wise_adam": placeholders.PartialRowWiseAdam,
    "lamb": placeholders.LAMB,
}
_UNFUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "lazy_adam": RowAdam,
    "partial_row_wise_adam": RowAdam,
    "lamb": RowAdam,
}
_ADAM = ("adam", "lazy_adam", "partial_row_wise_adam", "lamb")
_NUMBERS = ("lr", "weight_decay", "l2", "eps")


@dataclass(frozen=True, kw_only=True)
class Override:
    """An exception for some tables or layers.

    Args:
        item: text that it was parsed from.
        pattern: names or module paths that it applies to, with * and ?.
        changes: values by field of :class:`Choice`.
    """

    item: str
    pattern: str
    changes: dict[str, Any]

    def fits(self, name: str, path: str) -> bool:
        """Whether the pattern matches ``name``, ``path`` or the path of a module above it.

        Example:
            >>> towers = Override(item="", pattern="towers.user", changes={})
            >>> towers.fits("user_id", "towers.user.embeddings"), towers.fits("item_id", "towers.user_2.embeddings")
            (True, False)
        """
        modules = path.split(".")
        candidates = [name, *(".".join(modules[:end]) for end in range(1, len(modules) + 1))]
        return any(fnmatchcase(candidate, self.pattern) for candidate in candidates)


def parse_override(field: str, item: str, kinds: Sequence[str]) -> Override:
    """Parses an exception such as ``user_id=adam lr=0.01``; a colon separates as well as a space.

    Args:
        field: name of the setting, for messages.
        item: text of the exception.
        kinds: names of the optimizers that it may choose.

    Raises:
        ValueError: the text has no pattern, changes nothing, or names an unknown optimizer, setting or number.

    Example:
        >>> parse_override("per_table", "genres=sgd:lr=0.5", ("sgd", "adam")).changes
        {'kind': 'sgd', 'lr': 0.5}
        >>> parse_override("per_table", "genres=sdg", ("sgd", "adam"))
        Traceback (most recent call last):
        ...
        ValueError: per_table: 'genres=sdg': the optimizer 'sdg' must be one of sgd, adam
    """
    pattern, _, rest = item.partition("=")
    words = re.split(r"[\s:]+", rest.strip())
    if not pattern.strip() or words == [""]:
        raise ValueError(
            f"{field}: {item!r}: write PATTERN=OPTIMIZER, PATTERN=lr=NUMBER or both, such as user_id=sgd lr=0.1"
        )
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            if key not in kinds:
                raise ValueError(f"{field}: {item!r}: the optimizer {key!r} must be one of {', '.join(kinds)}")
            changes["kind"] = key
        elif key in _NUMBERS:
            changes[key] = _number(field, item, key, text)
        else:
            raise ValueError(f"{field}: {item!r}: there is no setting {key!r}; settings are {', '.join(_NUMBERS)}")
    return Override(item=item, pattern=pattern.strip(), changes=changes)


def _number(field: str, item: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{field}: {item!r}: {key}={text}: must be a number of 0 or more")
    return value


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Optimizer of one table or dense parameter.

    Args:
        kind: name of the optimizer.
        lr: learning rate.
        eps: number added to the denominator of Adagrad and Adam.
        betas: decay rates of Adam's first and second moment.
        weight_decay: decoupled weight decay.
        l2: factor of the squared norm added to the loss; ``adam`` only.
    """

    kind: str
    lr: float
    eps: float
    betas: tuple[float, float]
    weight_decay: float
    l2: float = 0.0

    def changed(self, overrides: Iterable[Override]) -> Choice:
        """Returns a copy with the changes of all ``overrides``, of which later ones win."""
        changes = {key: value for override in overrides for key, value in override.changes.items()}
        return dataclasses.replace(self, **changes)

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns the class and arguments by which TorchRec chooses FBGEMM's kernel, without weight decay."""
        arguments: dict[str, Any] = {"lr": self.lr} if self.kind == "sgd" else {"lr": self.lr, "eps": self.eps}
        if self.kind in _ADAM:
            arguments |= {"beta1": self.betas[0], "beta2": self.betas[1]}
        return _FUSED[self.kind], arguments

    def emulated(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns class and arguments for a table of :class:`ShardedAdam`, kept out of the kernel of SGD tables."""
        return placeholders.SGD, self.fused()[1]

    def unfused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns the class and arguments of the torch optimizer with the same rule, without weight decay."""
        arguments: dict[str, Any] = {"lr": self.lr} if self.kind == "sgd" else {"lr": self.lr, "eps": self.eps}
        if self.kind in _ADAM:
            arguments["betas"] = self.betas
        if self.l2:
            arguments["weight_decay"] = self.l2  # torch's name for l2 in Adam, the only kind that has it
        if _UNFUSED[self.kind] is RowAdam:
            arguments |= {"row_wise": self.kind == "partial_row_wise_adam", "trust_ratio": self.kind == "lamb"}
        return _UNFUSED[self.kind], arguments

    def state_bytes(self, table: BaseEmbeddingConfig) -> int:
        """Returns the bytes of optimizer state that ``table`` needs beside its weights."""
        width = 4 * table.embedding_dim
        per_row = {"adagrad": width, "row_wise_adagrad": 4, "sgd": 0, "partial_row_wise_adam": width + 4}.get(
            self.kind, 2 * width
        )
        return int(table.num_embeddings * per_row)


FUSED_ON_CPU = ("adagrad", "row_wise_adagrad", "sgd")
# Larger tables of adam and lazy_adam are left to the planner: a replica's step sweeps all its rows.
REPLICATED_WEIGHTS = 2**20
EMULATED = ("adam", "lazy_adam")  # ShardedAdam runs them where no kernel does
_TAGS = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
_CALLERS = "_declared_by_the_caller"  # attribute of a table with the values of these tags before ours
Declaration = tuple[type[torch.optim.Optimizer], dict[str, Any]]
# Adam in a backward updates only the rows of the batch, as FBGEMM's does.
_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    placeholders.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    placeholders.Adagrad: "adagrad",
    RowWiseAdagrad: "row_wise_adagrad",
    torch.optim.Adam: "lazy_adam",
    placeholders.Adam: "lazy_adam",
    placeholders.PartialRowWiseAdam: "partial_row_wise_adam",
    placeholders.LAMB: "lamb",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizers of the tables and of the dense layers.

    For tables, ``adagrad``, ``row_wise_adagrad`` (one number per row, or one per piece of a row where columns are
    split) and ``sgd`` run inside the backward of sharded tables, touch only the rows of the batch, and learn the same
    under every plan. ``lazy_adam``, ``partial_row_wise_adam`` and ``lamb`` are FBGEMM's Adam family, which also touches
    only the rows of the batch; its kernels exist for CUDA alone. ``adam`` is torch.optim.Adam, which updates every row
    at every step, as most published recipes do, and takes time in proportion to its tables; FBGEMM has no kernel of it.
    A table that no kernel runs is data_parallel where the plan is free, and updated by a torch optimizer; large or
    sharded tables of ``adam`` and ``lazy_adam`` are updated by :class:`ShardedAdam`, and those of other optimizers are
    refused.

    Args:
        tables: optimizer of the tables.
        tables_lr: learning rate of the tables.
        dense: optimizer of the dense layers.
        dense_lr: learning rate of the dense layers.
        eps: number added to the denominator of Adagrad and Adam; one for all tables and layers, so that a table learns
            the same however it is sharded.
        betas: decay rates of Adam's first and second moment.
        tables_weight_decay: decoupled weight decay of tables (Loshchilov & Hutter 2019): each step multiplies the rows
            that get a gradient in it by 1 - learning rate x this.
        dense_weight_decay: decoupled weight decay of every dense parameter.
        tables_l2: ``adam`` only: half of this times the sum of squares of the whole table is added to the loss. It
            draws rows that the data rarely mention towards 0, in the batch or not, and hardly holds back frequent ones.
        per_table: exceptions ``PATTERN=KIND lr=.. weight_decay=.. eps=..``, each setting optional; the pattern is a
            table's name or the path of a module that holds it, with * and ?: ``("user_id=adam lr=0.01",
            "towers.item=sgd")``. The last that fits wins, field by field.
        per_layer: exceptions of the same form for dense layers, by module or parameter path:
            ``("towers.user.mlp=lr=0.01", "*.bias=weight_decay=0")``.
        clip_norm: greatest norm of the gradient of all dense layers and data_parallel tables together, over all ranks;
            0 for no limit. Sharded tables are outside it: their update runs inside the backward, before the whole norm
            is known.
    """

    tables: TableOptimizer = "adagrad"
    tables_lr: float = 0.05
    dense: DenseOptimizer = "adam"
    dense_lr: float = 1e-3
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    tables_weight_decay: float = 0.0
    dense_weight_decay: float = 0.0
    tables_l2: float = 0.0
    per_table: tuple[str, ...] = ()
    per_layer: tuple[str, ...] = ()
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.tables not in get_args(TableOptimizer):
            raise ValueError(f"tables={self.tables!r}: must be one of {', '.join(get_args(TableOptimizer))}")
        if self.dense not in get_args(DenseOptimizer):
            raise ValueError(f"dense={self.dense!r}: must be one of {', '.join(get_args(DenseOptimizer))}")
        decays = ("tables_weight_decay", "dense_weight_decay", "tables_l2")
        for name in ("tables_lr", "dense_lr", "eps", *decays, "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: must be a number of 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: must be two numbers of at least 0 and below 1, such as 0.9,0.999")
        self._overrides("per_table")
        self._overrides("per_layer")

    def _overrides(self, field: Literal["per_table", "per_layer"]) -> list[Override]:
        kinds = get_args(TableOptimizer if field == "per_table" else DenseOptimizer)
        return [parse_override(field, item, kinds) for item in getattr(self, field)]

    def for_tables(self, model: nn.Module) -> dict[str, Choice]:
        """Returns the optimizer of each table of ``model``, sharded or not, by table name.

        Raises:
            ValueError: an exception matches no table, or ``l2`` is set for an optimizer other than adam.
        """
        names = {table.name: path for path, collection in collections(model) for table in table_configs(collection)}
        default = Choice(
            kind=self.tables,
            lr=self.tables_lr,
            eps=self.eps,
            betas=self.betas,
            weight_decay=self.tables_weight_decay,
            l2=self.tables_l2,
        )
        return _decide("table", default, self._overrides("per_table"), names)

    def for_layers(self, names: Iterable[str]) -> dict[str, Choice]:
        """Returns the optimizer of each dense parameter, by its name.

        Raises:
            ValueError: an exception matches no parameter, or ``l2`` is set for an optimizer other than adam.
        """
        default = Choice(
            kind=self.dense, lr=self.dense_lr, eps=self.eps, betas=self.betas, weight_decay=self.dense_weight_decay
        )
        return _decide("dense layer", default, self._overrides("per_layer"), {name: name for name in names})


def _decide(what: str, default: Choice, overrides: list[Override], paths: Mapping[str, str]) -> dict[str, Choice]:
    for override in overrides:
        if not any(override.fits(name, path) for name, path in paths.items()):
            raise ValueError(
                f"per_{what.split()[-1]}: '{override.item}' fits no {what} of the model, which are {', '.join(paths)}"
            )
    choices = {name: default.changed([o for o in overrides if o.fits(name, path)]) for name, path in paths.items()}
    for name, choice in choices.items():
        if choice.l2 and choice.kind != "adam":
            raise ValueError(
                f"{what} '{name}': l2={choice.l2} with the optimizer {choice.kind}: it moves every row at every step, "
                "as only adam does; choose adam, or weight_decay, which shrinks what the batch touched"
            )
    return choices


def chosen_optimizer(model: nn.Module, optimizer: OptimizerConfig | None) -> OptimizerConfig:
    """Returns ``optimizer``, or a config of what ``apply_optimizer_in_backward`` declared, with defaults for the rest.

    Args:
        model: unsharded model.
        optimizer: optimizers of all tables and layers, or None.

    Raises:
        ValueError: both are given, or a declaration cannot be expressed by OptimizerConfig.
    """
    declarations = {name: _declared(parameter) for name, parameter in _tables_of(model)}
    declared = {name: declaration for name, declaration in declarations.items() if declaration is not None}
    if not declared:
        return optimizer or OptimizerConfig()
    if optimizer is not None:
        name, (kind, arguments) = next(iter(declared.items()))
        raise ValueError(
            f"optimizer= is given, but apply_optimizer_in_backward has declared {kind.__name__}({_text(arguments)}) "
            f"for table '{name}'; leave out one of them: per_table=('{name}=sgd lr=0.1',) of OptimizerConfig says the "
            "same"
        )
    return OptimizerConfig(per_table=tuple(_as_override(name, *declaration) for name, declaration in declared.items()))


def undeclared(model: nn.Module) -> list[str]:
    """Returns the names of the tables of an unsharded model for which the caller has declared no optimizer."""
    return [name for name, parameter in _tables_of(model) if _declared(parameter) is None]


def _tables_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for _, collection in collections(model):
        yield from ((name.split(".")[1], parameter) for name, parameter in collection.named_parameters())


def _declared(parameter: nn.Parameter) -> Declaration | None:
    """Returns what the caller has declared, also after :func:`declare_table_optimizer` has declared its own."""
    if hasattr(parameter, _CALLERS):
        return cast(Declaration | None, getattr(parameter, _CALLERS))
    if not hasattr(parameter, "_optimizer_classes"):
        return None
    return parameter._optimizer_classes[-1], parameter._optimizer_kwargs[-1]  # type: ignore[attr-defined]


def _as_override(name: str, kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str:
    """Returns a declaration as an exception of ``per_table``; what it omits is FBGEMM's default, as for TorchRec."""
    given = {"lr": 0.01, "eps": 1e-8, **arguments}
    usual = {"betas": (0.9, 0.999), "beta1": 0.9, "beta2": 0.999, "weight_decay": 0, "momentum": 0, "amsgrad": False}
    strange = {
        key: value for key, value in given.items() if key not in ("lr", "eps") and usual.get(key, math.nan) != value
    }
    if kind not in _KINDS or strange:
        raise ValueError(
            f"table '{name}': apply_optimizer_in_backward has declared {kind.__name__}({_text(arguments)}), of which "
            f"{_text(strange) or kind.__name__} is not among {', '.join(dict.fromkeys(_KINDS.values()))} with lr and "
            "eps; give optimizer=OptimizerConfig(...) and leave the declaration out"
        )
    return f"{name}={_KINDS[kind]} lr={float(given['lr'])!r} eps={float(given['eps'])!r}"


def _text(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def declare_table_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, emulated: Container[str] = frozenset()
) -> dict[str, Choice]:
    """Tells TorchRec which optimizer runs in the backward of every table; a second call replaces the first.

    The planner counts its state, and sharding builds it into the kernels.

    Args:
        model: unsharded model.
        optimizer: optimizers of its tables.
        emulated: names of the tables that :class:`ShardedAdam` updates.

    Returns:
        Optimizer of each table, by name.
    """
    choices = optimizer.for_tables(model)
    for _, collection in collections(model):
        for name, parameter in collection.named_parameters():
            setattr(parameter, _CALLERS, _declared(parameter))
            for tag in _TAGS:
                if hasattr(parameter, tag):
                    delattr(parameter, tag)
            table = name.split(".")[1]
            kind, arguments = choices[table].emulated() if table in emulated else choices[table].fused()
            apply_optimizer_in_backward(kind, [parameter], arguments)
    return choices


def shardings(
    tables: Iterable[BaseEmbeddingConfig], choices: Mapping[str, Choice], asked: Mapping[str, str], device: str
) -> dict[str, str]:
    """Returns the sharding type of each table: as asked, or mostly data_parallel for ``auto`` without a kernel.

    Args:
        tables: configurations of the tables.
        choices: optimizers by table name, from :func:`declare_table_optimizer`.
        asked: sharding type asked for, by table name, ``auto`` included.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: a table is to be sharded, and nothing runs its optimizer on the device.
    """
    return {table.name: _sharding(table, choices[table.name].kind, asked[table.name], device) for table in tables}


def _sharding(table: BaseEmbeddingConfig, optimizer: str, sharding: str, device: str) -> str:
    if has_kernel(optimizer, device) or sharding == "data_parallel":
        return sharding
    emulated = optimizer in EMULATED and table.data_type == DataType.FP32
    small = table.num_embeddings * table.embedding_dim <= REPLICATED_WEIGHTS
    if sharding == "auto" and (small or not emulated) and refused_because(table, "data_parallel", device) is None:
        return "data_parallel"
    if emulated:
        return sharding
    raise ValueError(
        f"table '{table.name}': FBGEMM has no kernel of {optimizer} for the {device}, so the table must be fp32 and on "
        f"every rank, with plan.tables={table.name}=data_parallel; or choose adam or lazy_adam, fp32 too, or "
        f"row_wise_adagrad, adagrad or sgd with optimizer.per_table={table.name}=adagrad"
    )


def has_kernel(optimizer: str, device: str) -> bool:
    """Whether FBGEMM runs the table optimizer in its backward on the device, ``cpu`` or ``cuda``."""
    return optimizer in FUSED_ON_CPU or (device == "cuda" and optimizer != "adam")
