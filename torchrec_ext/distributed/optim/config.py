"""OptimizerConfig: which optimizer updates tables and dense layers, how fast, and what it costs in memory.

Choice: the optimizer of one table or dense layer. Override: an exception for some of them.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrec_ext.schema.validation import check_choice, listed

if TYPE_CHECKING:
    import torch
    from torch import nn

TableOptimizer = Literal["adagrad", "row_wise_adagrad", "sgd", "adam", "lazy_adam"]
DenseOptimizer = Literal["adam", "adagrad", "sgd"]
_ADAM = ("adam", "lazy_adam")
_NUMBERS = ("lr", "weight_decay", "l2", "eps")


@dataclass(frozen=True, kw_only=True)
class Override:
    """An exception for some tables or layers; settings left out are those of all others.

    Args:
        kind: name of the optimizer.
        lr: learning rate.
        weight_decay: decoupled weight decay, of dense layers under ``adam``.
        l2: factor of the squared norm added to the loss; ``adam`` only.
        eps: number added to the denominator of Adagrad and Adam.

    Raises:
        ValueError: nothing is given, or a number is negative.

    Example:
        >>> Override(kind="sgd", lr=0.5).changes
        {'kind': 'sgd', 'lr': 0.5}
    """

    kind: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    l2: float | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: must be a number of 0 or more")
        if not self.changes:
            raise ValueError(f"give one of kind, {', '.join(_NUMBERS)}")

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes, by field of :class:`Choice`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern with * and ? matches a table, a dense parameter, or the path of a module above it.

    Example:
        >>> _fits("towers.user", "towers.user.mlp.0.weight"), _fits("towers.user", "towers.user_2.mlp.0.weight")
        (True, False)
    """
    # The path of each module from the top down: a, a.b, a.b.c.
    paths = accumulate(name.split("."), "{}.{}".format)
    return any(fnmatchcase(path, pattern) for path in paths)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Optimizer of one table or dense parameter.

    Args:
        kind: name of the optimizer.
        lr: learning rate.
        eps: number added to the denominator of Adagrad and Adam.
        betas: decay rates of Adam's first and second moment.
        weight_decay: decoupled weight decay, AdamW's.
        l2: factor of the squared norm added to the loss; ``adam`` only.
    """

    kind: str
    lr: float
    eps: float
    betas: tuple[float, float]
    weight_decay: float
    l2: float = 0.0

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"lr": self.lr}
        if self.kind != "sgd":
            arguments["eps"] = self.eps
        return arguments

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns the class and arguments for TorchRec's choice of an FBGEMM kernel."""
        from torchrec_ext.distributed.optim.kinds import FUSED

        arguments = self._arguments()
        if self.kind in _ADAM:
            arguments |= {"beta1": self.betas[0], "beta2": self.betas[1]}
        return FUSED[self.kind], arguments

    def unfused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns the class and arguments of the torch optimizer with the same rule."""
        from torchrec_ext.distributed.optim.kinds import UNFUSED

        arguments = self._arguments()
        if self.kind in _ADAM:
            arguments["betas"] = self.betas
        if self.kind == "adam":
            # torch calls Adam's l2 term weight_decay, and AdamW's decay a decoupled one.
            arguments["weight_decay"] = self.weight_decay or self.l2
            arguments["decoupled_weight_decay"] = self.weight_decay > 0
        return UNFUSED[self.kind], arguments

    @property
    def state_numbers(self) -> tuple[int, int]:
        """Numbers of optimizer state per weight, and per row of a table or of its shard; 32 bits each."""
        # The others have Adam's two moments for each weight.
        numbers = {"adagrad": (1, 0), "row_wise_adagrad": (0, 1), "sgd": (0, 0)}
        return numbers.get(self.kind, (2, 0))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizers of the tables and of the dense layers.

    For tables, ``adagrad``, ``row_wise_adagrad`` (one number per row, or one per piece of a row where columns are
    split) and ``sgd`` run inside the backward of sharded tables, touch only the rows of the batch, and learn the same
    under every plan. ``lazy_adam`` is FBGEMM's Adam, which also touches only the rows of the batch; its kernel exists
    for CUDA alone. ``adam`` is torch.optim.Adam, which updates every row at every step, as most published recipes do,
    and takes time in proportion to its tables; FBGEMM has no kernel of it, nor of weight decay by one rule. A table
    that no kernel runs is data_parallel where the plan is free, and updated by a torch optimizer; if it is to be
    sharded it is refused.

    Args:
        tables: optimizer of the tables.
        tables_lr: learning rate of the tables.
        dense: optimizer of the dense layers.
        dense_lr: learning rate of the dense layers.
        eps: number added to the denominator of Adagrad and Adam; one for all tables and layers, so that a table learns
            the same however it is sharded.
        betas: decay rates of Adam's first and second moment.
        dense_weight_decay: decoupled weight decay of every dense parameter (Loshchilov & Hutter 2019), under ``adam``.
        tables_l2: ``adam`` only: half of this times the sum of squares of the whole table is added to the loss. It
            draws rows that the data rarely mention towards 0, in the batch or not, and hardly holds back frequent ones.
        per_table: exceptions by a table's name, with * and ?, as in ``--optimizer.per_table.user_id.kind adam`` or
            ``{"item_*": Override(kind="sgd")}``. The last that fits wins, field by field.
        per_layer: exceptions for dense layers, by module or parameter path: ``{"towers.user.mlp": Override(lr=0.01),
            "*.bias": Override(weight_decay=0)}``.
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
    dense_weight_decay: float = 0.0
    tables_l2: float = 0.0
    per_table: Mapping[str, Override] = field(default_factory=dict)
    per_layer: Mapping[str, Override] = field(default_factory=dict)
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        check_choice("tables", self.tables, get_args(TableOptimizer))
        check_choice("dense", self.dense, get_args(DenseOptimizer))
        decays = ("dense_weight_decay", "tables_l2")
        for name in ("tables_lr", "dense_lr", "eps", *decays, "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: must be a number of 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas={self.betas}: must be two numbers of at least 0 and below 1, such as 0.9,0.999"
            )
        for place, kinds in (
            ("per_table", get_args(TableOptimizer)),
            ("per_layer", get_args(DenseOptimizer)),
        ):
            for pattern, override in getattr(self, place).items():
                if override.kind is not None:
                    check_choice(f"{place}.{pattern}.kind", override.kind, kinds)

    def for_tables(self, model: nn.Module) -> dict[str, Choice]:
        """Returns the optimizer of each table of ``model``, sharded or not, by table name.

        Raises:
            ValueError: an exception matches no table, has a weight decay, or ``l2`` for an optimizer other than adam.
        """
        from torchrec_ext.distributed.tables import tables_of

        default = Choice(
            kind=self.tables,
            lr=self.tables_lr,
            eps=self.eps,
            betas=self.betas,
            weight_decay=0.0,
            l2=self.tables_l2,
        )
        names = [table.name for table in tables_of(model)]
        return _decide("table", default, self.per_table, names)

    def for_layers(self, names: Iterable[str]) -> dict[str, Choice]:
        """Returns the optimizer of each dense parameter, by its name.

        Raises:
            ValueError: an exception matches no parameter, or a decay is set for an optimizer other than adam.
        """
        default = Choice(
            kind=self.dense,
            lr=self.dense_lr,
            eps=self.eps,
            betas=self.betas,
            weight_decay=self.dense_weight_decay,
        )
        return _decide("dense layer", default, self.per_layer, list(names))


def _decide(
    what: str,
    default: Choice,
    overrides: Mapping[str, Override],
    names: Sequence[str],
) -> dict[str, Choice]:
    for pattern in overrides:
        if not any(_fits(pattern, name) for name in names):
            raise ValueError(
                f"per_{what.split()[-1]}: '{pattern}' fits no {what} of the model, which are {listed(names)}"
            )
    choices = {}
    for name in names:
        changes: dict[str, Any] = {}
        for pattern, override in overrides.items():
            if _fits(pattern, name):
                changes |= override.changes
        choice = dataclasses.replace(default, **changes)
        choices[name] = choice
        for decay in ("l2", "weight_decay"):
            if getattr(choice, decay) and choice.kind != "adam":
                raise ValueError(
                    f"{what} '{name}': {decay}={getattr(choice, decay)} with the optimizer {choice.kind}; choose adam"
                )
        if choice.weight_decay and (choice.l2 or what == "table"):
            raise ValueError(
                f"{what} '{name}': weight_decay={choice.weight_decay} is of dense layers without l2; a table takes l2"
            )
    return choices
