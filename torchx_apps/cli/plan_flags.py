"""The flags of rec.plan: tables, devices and what is asked of a plan, checked before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import Kernel, PlanConfig, Sharding
from torchrec_ext.distributed.plan.devices import Cluster
from torchx_apps.cli.overrides import nearest

# ROWSxDIM or ROWSxDIMxIDS, such as 300Mx64 or 12.5Mx64x20.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmb]?)x(\d+)(?:x(\d+(?:\.\d+)?))?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


class TableSize(NamedTuple):
    """A table: its name, ``rows`` and ``dim`` columns, and the mean number of ``ids`` of a row of the data."""

    name: str
    rows: int
    dim: int
    ids: float


def check_flags(options: argparse.Namespace, plan: PlanConfig | None) -> None:
    """Refuses flags unfit for a plan.

    Args:
        options: flags of rec.plan.
        plan: the plan of the tables' recipe, or None if ``--tables`` lists them.

    Raises:
        ValueError: a flag is wrong, or the recipe places its towers.
    """
    cluster_of(options)
    if plan is None:
        parse_tables(options.tables)
        batch_size_of(options.batch_size or 1024)
    elif plan.towers not in ("data_parallel", "auto"):
        raise ValueError(
            f"plan.towers={plan.towers}: plans for other devices have towers on every rank; leave it out"
        )
    with_flags(plan or PlanConfig(), options)
    if options.optimizer:
        OptimizerConfig(tables=options.optimizer)


def parse_tables(text: str) -> list[TableSize]:
    """Parses a text such as ``ad=300Mx64,history=12Mx64x20``.

    Raises:
        ValueError: an item is not a table, or a name is given twice.

    Example:
        >>> [tuple(table) for table in parse_tables("ad=1.5Mx64,h=9Kx8x20")]
        [('ad', 1500000, 64, 1.0), ('h', 9000, 8, 20.0)]
        >>> parse_tables("ad=300M*64")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --tables: 'ad=300M*64': write NAME=ROWSxDIM, such as ad=300Mx64, or ad=300Mx64x20 with 20 ids ...
    """
    tables: dict[str, TableSize] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, size = item.partition("=")
        match = _SIZE.fullmatch(size.strip())
        if not match or not name.strip():
            raise ValueError(
                f"--tables: {item!r}: write NAME=ROWSxDIM, such as ad=300Mx64, or ad=300Mx64x20 with 20 ids in a row"
            )
        rows = round(float(match[1]) * _UNITS[match[2].lower()])
        if rows < 1 or int(match[3]) < 1:
            raise ValueError(
                f"--tables: {item!r}: a table has at least one row and one column"
            )
        if name in tables:
            raise ValueError(
                f"--tables names '{name}' twice; give each table a name of its own"
            )
        tables[name] = TableSize(name, rows, int(match[3]), float(match[4] or 1))
    if not tables:
        raise ValueError(
            f"--tables {text!r} names no table; write NAME=ROWSxDIM, such as ad=300Mx64"
        )
    return list(tables.values())


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Returns the devices described by the flags.

    Raises:
        ValueError: a number is impossible for a cluster.
    """
    return Cluster(
        world_size=options.world_size,
        local_world_size=min(8, options.world_size)
        if options.local_world_size is None
        else options.local_world_size,
        device=options.device,
        hbm_gb=options.hbm,
        ddr_gb=options.ddr,
        ssd_gb=options.ssd,
        intra_gb_s=options.intra,
        inter_gb_s=options.inter,
        memory_gb_s=options.memory_rate,
        reserve=options.reserve,
    )


def with_flags(plan: PlanConfig, options: argparse.Namespace) -> PlanConfig:
    """Returns ``plan`` with the flags' sharding type, kernel and cache.

    Raises:
        ValueError: a flag is wrong.
    """
    if options.sharding:
        plan = dataclasses.replace(plan, sharding=sharding_of(options.sharding))
    changes: dict[str, Any] = {}
    if options.kernel:
        _check_one_of("--kernel", options.kernel, get_args(Kernel))
        changes["kernel"] = options.kernel
    if options.cache_load_factor is not None:
        changes["cache_load_factor"] = options.cache_load_factor
    return dataclasses.replace(plan, **changes)


def sharding_of(name: str) -> Sharding:
    """Returns a sharding type by name.

    Raises:
        ValueError: there is none.
    """
    _check_one_of("--sharding", name, get_args(Sharding))
    return name  # type: ignore[return-value]


def _check_one_of(flag: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ValueError(
            f"{flag} {name}: must be one of {', '.join(names)}{nearest(name, names)}"
        )


def batch_size_of(rows: int) -> int:
    """Returns the rows of a device and step.

    Raises:
        ValueError: there is none.
    """
    if rows < 1:
        raise ValueError(
            f"--batch-size {rows}: a device needs at least one row in a step"
        )
    return rows
