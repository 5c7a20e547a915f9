"""Choice: the optimizer of one table or dense layer, and the short text by which a config makes an exception for it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torchrec import optim as placeholders
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_ext.distributed.row_adam import RowAdam

TableOptimizer = Literal["adagrad", "row_wise_adagrad", "sgd", "adam", "lazy_adam", "partial_row_wise_adam", "lamb"]
DenseOptimizer = Literal["adam", "adagrad", "sgd"]
# TorchRec takes the kernel and the planner the bytes of state from the class; those of the Adam family are never run.
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
    """One exception: the text it was given as, the pattern, and what it changes."""

    item: str
    pattern: str
    changes: dict[str, Any]

    def fits(self, name: str, path: str) -> bool:
        """Whether the pattern is the ``name``, or ``path`` or one of the modules above it, * and ? standing for any letters.

        Example:
            >>> towers = Override(item="", pattern="towers.user", changes={})
            >>> towers.fits("user_id", "towers.user.embeddings"), towers.fits("item_id", "towers.user_2.embeddings")
            (True, False)
        """
        parts = path.split(".")
        candidates = [name, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))]
        return any(fnmatchcase(candidate, self.pattern) for candidate in candidates)


def parse_override(field: str, item: str, kinds: Sequence[str]) -> Override:
    """The exception that a text such as ``user_id=adam lr=0.01`` makes; a colon separates as well as a space.

    Raises:
        ValueError: it has no pattern, changes nothing, or names an unknown optimizer, setting or number.

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
        raise ValueError(f"{field}: {item!r}: write PATTERN=OPTIMIZER, PATTERN=lr=NUMBER or both, such as user_id=sgd lr=0.1")
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
    """The optimizer of one table or dense parameter; the fields are those of :class:`OptimizerConfig`."""

    kind: str
    lr: float
    eps: float
    betas: tuple[float, float]
    weight_decay: float
    l2: float = 0.0

    def changed(self, overrides: Iterable[Override]) -> Choice:
        """With the changes of all ``overrides``, the later winning."""
        changes = {key: value for override in overrides for key, value in override.changes.items()}
        return dataclasses.replace(self, **changes)

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments by which TorchRec chooses FBGEMM's kernel; weight decay is not its business."""
        arguments: dict[str, Any] = {"lr": self.lr} if self.kind == "sgd" else {"lr": self.lr, "eps": self.eps}
        if self.kind in _ADAM:
            arguments |= {"beta1": self.betas[0], "beta2": self.betas[1]}
        return _FUSED[self.kind], arguments

    def emulated(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The same for a table of which :class:`ShardedAdam` takes the gradient; never with a plain SGD table in one kernel."""
        return placeholders.SGD, self.fused()[1]

    def unfused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class and arguments of the torch optimizer with the same rule; weight decay is not its business either."""
        arguments: dict[str, Any] = {"lr": self.lr} if self.kind == "sgd" else {"lr": self.lr, "eps": self.eps}
        if self.kind in _ADAM:
            arguments["betas"] = self.betas
        if self.l2:
            arguments["weight_decay"] = self.l2  # torch's name for it in Adam, the only kind that has it
        if _UNFUSED[self.kind] is RowAdam:
            arguments |= {"row_wise": self.kind == "partial_row_wise_adam", "trust_ratio": self.kind == "lamb"}
        return _UNFUSED[self.kind], arguments

    def state_bytes(self, table: BaseEmbeddingConfig) -> int:
        """Bytes of optimizer state that ``table`` needs beside its weights."""
        width = 4 * table.embedding_dim
        per_row = {"adagrad": width, "row_wise_adagrad": 4, "sgd": 0, "partial_row_wise_adam": width + 4}.get(self.kind, 2 * width)
        return int(table.num_embeddings * per_row)
