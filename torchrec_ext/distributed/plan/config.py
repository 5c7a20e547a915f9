"""PlanConfig: how tables are spread over ranks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torchrec_ext.schema.validation import check_choice

# TorchRec's names, here and below.
Sharding = Literal[
    "auto",
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
]
Kernel = Literal["auto", "dense", "fused", "fused_uvm", "fused_uvm_caching"]
# Kernels that cache a share of their rows on the GPU.
CACHING = ("fused_uvm_caching",)
Precision = Literal["fp32", "fp16", "bf16", "int8"]


class TableChoice(NamedTuple):
    """The choice for one table: its sharding type, its compute kernel, and the share of its rows that is cached."""

    sharding: str
    kernel: str
    cache_load_factor: float


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How tables are spread over ranks.

    Args:
        sharding: sharding type of every table, or ``auto``: TorchRec's planner chooses per table,
            but tables that are small all together (2^18 weights) are whole on each rank of a CPU job.
        kernel: TorchRec's compute kernel of every table: ``fused``, with the optimizer in its backward; ``fused_uvm``,
            rows in the host's memory, read over the bus; ``fused_uvm_caching``, those with a cache on the GPU;
            ``dense``, that of data_parallel tables; or ``auto``:
            TorchRec's planner chooses among the first three, and dense. A CPU has ``fused`` and ``dense``.
        cache_load_factor: share of a table's rows that its cache on the GPU holds, for ``fused_uvm_caching``;
            0 for TorchRec's .2.
        tables: exceptions by table: sharding type, kernel or both, and a cache_load_factor, as
            ``("user_id=row_wise", "ad_id=table_row_wise:fused_uvm_caching:cache_load_factor=0.1")``.
        memory_gb: memory per rank that tables may take, GiB; 0 for what the device has free, divided by its processes.
        reserve: share of that memory kept for dense layers, activations and buffers, 0 to 1.
        forward_precision: numbers in which ranks send each other embeddings of sharded tables: ``fp32``, ``fp16``,
            ``bf16``, or ``int8`` with two numbers of scale for 32 of them.
        backward_precision: numbers in which they send the gradients of these embeddings, as above.
        backward_loss_scale: factor of gradients while they travel as ``fp16``, which has nothing below 6e-8.
    """

    sharding: Sharding = "auto"
    kernel: Kernel = "auto"
    cache_load_factor: float = 0.0
    tables: tuple[str, ...] = ()
    memory_gb: float = 0.0
    reserve: float = 0.15
    forward_precision: Precision = "fp32"
    backward_precision: Precision = "fp32"
    backward_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_sharding("sharding", self.sharding)
        if self.kernel not in get_args(Kernel):
            raise ValueError(
                f"kernel: {self.kernel!r} must be one of {', '.join(get_args(Kernel))}"
            )
        _check_load_factor("", self.cache_load_factor, self.kernel)
        for exception in self.tables:
            self._exception(exception)
        self._check_precisions()
        if self.memory_gb < 0:
            raise ValueError(
                f"memory_gb={self.memory_gb}: must be positive, or 0 for what the device has free"
            )
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be at least 0 and below 1")

    def _check_precisions(self) -> None:
        for name in ("forward_precision", "backward_precision"):
            check_choice(name, getattr(self, name), get_args(Precision))
        if not 0 < self.backward_loss_scale < float("inf"):
            raise ValueError(
                f"backward_loss_scale={self.backward_loss_scale}: must be a positive number"
            )
        if self.backward_loss_scale != 1 and self.backward_precision not in (
            "fp16",
            "bf16",
        ):
            raise ValueError(
                f"backward_loss_scale={self.backward_loss_scale}: only for backward_precision=fp16 or bf16, but it is "
                f"{self.backward_precision}"
            )

    @property
    def quantised(self) -> bool:
        """Whether embeddings or their gradients travel in fewer than 32 bits."""
        return (self.forward_precision, self.backward_precision) != ("fp32", "fp32")

    @property
    def asked(self) -> list[TableChoice]:
        """Choices for every table, and for each exception in turn, whether the model has its table or not."""
        return [
            TableChoice(self.sharding, self.kernel, self.cache_load_factor),
            *map(self._exception, self.tables),
        ]

    def choices(self, names: Sequence[str]) -> dict[str, TableChoice]:
        """Returns the requested choice, ``auto`` included, for each of the tables ``names``.

        Raises:
            ValueError: an exception names none of the tables.
        """
        default, *exceptions = self.asked
        by_table = dict.fromkeys(names, default)
        for exception, choice in zip(self.tables, exceptions, strict=True):
            name = exception.partition("=")[0]
            if name not in by_table:
                tables = textwrap.shorten(", ".join(names), 100, placeholder=" ...")
                raise ValueError(
                    f"tables: {exception!r} names no table of the model; its tables are {tables}"
                )
            by_table[name] = choice
        return by_table

    def _exception(self, text: str) -> TableChoice:
        """Parses an exception such as ``ad_id=row_wise:fused_uvm``; missing parts are those of every table."""
        changes: dict[str, Any] = {}
        for word in re.split(r"[\s:]+", text.partition("=")[2].strip()):
            key, equals, number = word.partition("=")
            if equals and key == "cache_load_factor":
                try:
                    changes[key] = float(number)
                except ValueError:
                    raise ValueError(
                        f"tables: {text!r}: cache_load_factor={number}: must be a number"
                    ) from None
            elif word != "auto" and word in get_args(Kernel):
                changes["kernel"] = word
            else:
                _check_sharding(f"tables: {text!r}", word, ", or a kernel")
                changes["sharding"] = word
        kernel = changes.get("kernel", self.kernel)
        # The cache factor of every table has no meaning for this kernel.
        if kernel != self.kernel and kernel not in CACHING:
            changes.setdefault("cache_load_factor", 0.0)
        choice = TableChoice(
            self.sharding, self.kernel, self.cache_load_factor
        )._replace(**changes)
        _check_load_factor(
            f"tables: {text!r}: ", choice.cache_load_factor, choice.kernel
        )
        return choice


def _check_sharding(argument: str, value: str, more: str = "") -> None:
    if value not in get_args(Sharding):
        raise ValueError(
            f"{argument}: {value!r} must be one of {', '.join(get_args(Sharding))}{more}"
        )


def _check_load_factor(where: str, value: float, kernel: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(
            f"{where}cache_load_factor={value}: must be a share of the rows, 0 to 1"
        )
    if value and kernel not in ("auto", *CACHING):
        raise ValueError(
            f"{where}cache_load_factor={value}: only for kernel={' or '.join(CACHING)}, not kernel={kernel}"
        )
