"""PlanConfig: how tables are spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from torchrec_ext.schema.validation import check_choice, listed

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
# Kernels with their rows in the host's memory.
OFF_THE_GPU = ("fused_uvm", "fused_uvm_caching")
# Kernels that cache a share of their rows on the GPU.
CACHING = ("fused_uvm_caching",)


class TableChoice(NamedTuple):
    """The choice for one table: its sharding type, its compute kernel, and the share of its rows that is cached."""

    sharding: str
    kernel: str
    cache_load_factor: float


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """An exception for one table; settings left out are those of every table.

    Args:
        sharding: sharding type.
        kernel: compute kernel.
        cache_load_factor: share of its rows that its cache on the GPU holds.

    Raises:
        ValueError: there is no such type or kernel.
    """

    sharding: Sharding | None = None
    kernel: Kernel | None = None
    cache_load_factor: float | None = None

    def __post_init__(self) -> None:
        if self.sharding is not None:
            check_choice("sharding", self.sharding, get_args(Sharding))
        if self.kernel is not None:
            check_choice("kernel", self.kernel, get_args(Kernel))


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
        tables: exceptions by table, as in ``--plan.tables.user_id.sharding row_wise`` or
            ``{"ad_id": TablePlan(kernel="fused_uvm_caching", cache_load_factor=0.1)}``.
        memory_gb: memory per rank that tables may take, GiB; 0 for what the device has free, divided by its processes.
        reserve: share of that memory kept for dense layers, activations and buffers, 0 to 1.
    """

    sharding: Sharding = "auto"
    kernel: Kernel = "auto"
    cache_load_factor: float = 0.0
    tables: Mapping[str, TablePlan] = field(default_factory=dict)
    memory_gb: float = 0.0
    reserve: float = 0.15

    def __post_init__(self) -> None:
        check_choice("sharding", self.sharding, get_args(Sharding))
        check_choice("kernel", self.kernel, get_args(Kernel))
        _check_load_factor("", self.cache_load_factor, self.kernel)
        if not isinstance(self.tables, Mapping):
            raise TypeError(
                f"tables={str(self.tables)[:40]}: must map tables to their exceptions; write "
                "{'ad_id': TablePlan(sharding='row_wise')}"
            )
        for name, given in self.tables.items():
            if not isinstance(given, TablePlan):
                raise TypeError(
                    f"tables: '{name}' has {str(given)[:40]!r}; write {{'{name}': TablePlan(sharding='row_wise')}}"
                )
            self._exception(name)
        if self.memory_gb < 0:
            raise ValueError(
                f"memory_gb={self.memory_gb}: must be positive, or 0 for what the device has free"
            )
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be at least 0 and below 1")

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
        by_table = dict.fromkeys(names, self.asked[0])
        for name in self.tables:
            if name not in by_table:
                raise ValueError(
                    f"tables.{name}: is no table of the model; its tables are {listed(names)}"
                )
            by_table[name] = self._exception(name)
        return by_table

    def _exception(self, name: str) -> TableChoice:
        """Returns the choice for a table of ``tables``."""
        given = self.tables[name]
        kernel = given.kernel or self.kernel
        load_factor = given.cache_load_factor
        if load_factor is None:
            # The cache factor of every table has no meaning for a kernel without a cache.
            has_cache = kernel == self.kernel or kernel in CACHING
            load_factor = self.cache_load_factor if has_cache else 0.0
        _check_load_factor(f"tables.{name}: ", load_factor, kernel)
        return TableChoice(given.sharding or self.sharding, kernel, load_factor)


def _check_load_factor(where: str, value: float, kernel: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(
            f"{where}cache_load_factor={value}: must be a share of the rows, 0 to 1"
        )
    if value and kernel not in ("auto", *CACHING):
        raise ValueError(
            f"{where}cache_load_factor={value}: only for kernel={' or '.join(CACHING)}, not kernel={kernel}"
        )
