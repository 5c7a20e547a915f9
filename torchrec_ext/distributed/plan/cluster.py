"""forecast(): predicts what a plan takes of each rank, in bytes and milliseconds, before anything runs.

compare(): sets the sharding types side by side, to show why a plan was taken and what another would cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from tabulate import tabulate
from torch import nn
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.plan.config import CACHING, Kernel, Sharding
from torchrec_ext.distributed.plan.devices import Cluster as Cluster
from torchrec_ext.distributed.plan.draft import Draft, PlanError
from torchrec_ext.distributed.plan.explain import bytes_per_weight, ranges, size_text
from torchrec_ext.distributed.plan.storage import state_storage
from torchrec_ext.distributed.sharders import OFF_THE_GPU
from torchrec_ext.distributed.tables import collections, tables_of

# Largest number of devices to try a kernel on.
_MOST_TRIED = 128
# An id is int64 and the length of a bag int32, as :class:`KeyedIds` has them.
_ID_BYTES = 8
_LENGTH_BYTES = 4
# Numbers of optimizer state for each weight.
_DENSE_STATE = {"adam": 2, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """Predicted memory and time of one rank under a plan.

    Args:
        rank: number of the rank, 0 <= rank < R.
        weights: bytes of the rank's shards.
        state: bytes of their optimizer state.
        buffers: bytes of ids and embeddings that pass through the rank in a step, and of rows cached from the host.
        dense: bytes of the dense layers with their gradients and optimizer state.
        host: bytes, of all of the above, that lie in the host's memory.
        ssd: bytes, of all of the above, that lie on the host's SSD.
        lookup_ms: ms of looking up the rank's rows for the global batch, forward and backward.
        exchange_ms: ms of exchanging ids, embeddings and gradients with other ranks.
    """

    rank: int
    weights: int = 0
    state: int = 0
    buffers: int = 0
    dense: int = 0
    host: int = 0
    ssd: int = 0
    lookup_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.weights + self.state + self.buffers + self.dense

    @property
    def device(self) -> int:
        """Bytes on the rank's GPU."""
        return self.total - self.host - self.ssd

    @property
    def ms(self) -> float:
        """Milliseconds of the rank's tables in a step, without any overlap and without dense layers."""
        return self.lookup_ms + self.exchange_ms


def forecast(
    draft: Draft, model: nn.Module, cluster: Cluster, optimizer: OptimizerConfig
) -> list[RankForecast]:
    """Returns the estimates of TorchRec's planner for ``draft``, rank by rank.

    Args:
        draft: plan with the planner's estimates.
        model: model that was planned, not sharded.
        cluster: devices that the plan was made for.
        optimizer: optimizers of tables and dense layers.
    """
    tables = {table.name: table for table in tables_of(model)}
    choices = optimizer.for_tables(model)
    dense = _dense_bytes(model, optimizer)
    ranks = [RankForecast(rank=rank, dense=dense) for rank in range(cluster.world_size)]
    for option in draft.options:
        table = tables[option.name]
        for rank, added in _shards(option, table, choices[option.name], cluster):
            sums = {
                name: getattr(ranks[rank], name) + value
                for name, value in added.items()
            }
            ranks[rank] = dataclasses.replace(ranks[rank], **sums)
    # A CPU has no memory but its host's, also for dense layers.
    if cluster.device == "cpu":
        return [dataclasses.replace(rank, host=rank.total) for rank in ranks]
    return ranks


def _shards(
    option: ShardingOption, table: BaseEmbeddingConfig, choice: Choice, cluster: Cluster
) -> Iterable[tuple[int, Mapping[str, float]]]:
    """Yields (rank, its shard's addition to the forecast) for each shard of one table."""
    input_share = _input_share(option, cluster)
    for shard in option.shards:
        weights = math.prod(shard.size) * bytes_per_weight(table)
        state = sum(
            dataclasses.astuple(
                state_storage(choice, shard.size, option.compute_kernel, cluster.device)
            )
        )
        perf = shard.perf
        storage = shard.storage
        yield (
            shard.rank,
            {
                "weights": weights,
                "state": state,
                "buffers": max(
                    storage.hbm + storage.ddr + storage.ssd - weights - state, 0
                ),
                "host": storage.ddr,
                "ssd": storage.ssd,
                "lookup_ms": perf.fwd_compute
                + perf.bwd_compute
                + perf.prefetch_compute,
                "exchange_ms": perf.fwd_comms
                + perf.bwd_comms
                + perf.input_dist_comms * input_share,
            },
        )


def _input_share(option: ShardingOption, cluster: Cluster) -> float:
    """Returns the bytes of a shard's ids and lengths as a share of TorchRec's count.

    TorchRec counts the ids of the global batch for every shard. A shard of rows receives its own alone. The lengths of
    bags, which TorchRec does not count, reach every shard.
    """
    ids: float = _ID_BYTES * sum(option.input_lengths)
    if not ids:
        return 1.0
    of_host = cluster.local_world_size
    spread = {
        "row_wise": cluster.world_size,
        "table_row_wise": of_host,
        "grid_shard": of_host,
    }
    lengths: int = _LENGTH_BYTES * option.num_inputs
    return 1 / spread.get(option.sharding_type, 1) + lengths / ids


def _dense_bytes(model: nn.Module, optimizer: OptimizerConfig) -> int:
    """Returns the bytes of weights, gradients and optimizer state of everything but tables."""
    paths = tuple(f"{path}.".lstrip(".") for path, _ in collections(model))
    dense = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(paths)
    }
    if not dense:
        return 0
    choices = optimizer.for_layers(dense)
    total = 0
    for name, parameter in dense.items():
        # Each number has a weight, a gradient and its optimizer state, in float32.
        copies = 2 + _DENSE_STATE[choices[name].kind]
        total += 4 * parameter.numel() * copies
    return total


def forecast_text(ranks: list[RankForecast], cluster: Cluster) -> str:
    """Formats the forecasts as a table, ranks with equal figures in one line, and states each rank's memory."""
    groups: dict[tuple[object, ...], list[RankForecast]] = {}
    for rank in ranks:
        figures = dataclasses.replace(rank, rank=0)
        groups.setdefault(dataclasses.astuple(figures), []).append(rank)
    on_ssd = any(rank.ssd for rank in ranks)
    rows = []
    for same in groups.values():
        first = same[0]
        sizes = {
            "tables": first.weights,
            "state": first.state,
            "buffers": first.buffers,
            "dense layers": first.dense,
        }
        if cluster.device == "cuda":
            sizes["on the GPU"] = first.device
        sizes["in host memory"] = first.host
        if on_ssd:
            sizes["on the SSD"] = first.ssd
        row = {"rank": ranges([rank.rank for rank in same])}
        row.update(zip(sizes, map(size_text, sizes.values()), strict=True))
        row["look-up ms"] = f"{first.lookup_ms:.3f}"
        row["exchange ms"] = f"{first.exchange_ms:.3f}"
        rows.append(row)
    text = str(tabulate(rows, headers="keys", disable_numparse=True))
    slowest = max(ranks, key=lambda rank: rank.ms)
    has = f"{size_text(cluster.host_bytes)} of host memory"
    if cluster.device == "cuda":
        has = f"{size_text(cluster.device_bytes)} of GPU memory and {has}"
    if on_ssd:
        has += f" and {size_text(cluster.ssd_bytes)} of SSD"
    return (
        f"{text}\neach rank has {has} for these, {cluster.reserve:.0%} being kept back\n"
        f"tables of rank {slowest.rank}, the slowest, take {slowest.ms:.3f} ms a step by TorchRec's cost model, dense "
        "layers and "
        "overlap not counted"
    )


def memory_by_table(draft: Draft) -> dict[str, Storage]:
    """Sums TorchRec's memory of each table over all ranks, in bytes: GPU, host memory and SSD."""
    memory = {}
    for option in draft.options:
        storages = [shard.storage for shard in option.shards if shard.storage]
        memory[option.name] = sum(storages, Storage(hbm=0, ddr=0, ssd=0))
    return memory


def memory_text(draft: Draft) -> str:
    """Formats each table's kernel, and its memory over all ranks, as a table."""
    memory = memory_by_table(draft)
    rows = []
    for option in sorted(draft.options, key=lambda option: option.name):
        stored = memory[option.name]
        cached = ""
        if option.compute_kernel in CACHING:
            cached = f"{option.cache_load_factor or UVM_CACHING_RATIO:.0%}"
        rows.append(
            [
                option.name,
                option.compute_kernel,
                cached,
                *map(size_text, (stored.hbm, stored.ddr, stored.ssd)),
            ]
        )
    headers = ["table", "kernel", "cached", "on all GPUs", "in host memory", "on SSDs"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


@dataclass(frozen=True, kw_only=True)
class KernelFit:
    """Whether a plan fits with one compute kernel for every table.

    Args:
        kernel: compute kernel.
        largest: the rank that needs most, None if there is no plan.
        devices: least number of devices tried that have a plan; 0 for none.
    """

    kernel: Kernel
    largest: RankForecast | None = None
    devices: int = 0


def kernel_fits(
    plan: Callable[[Kernel, int], Sequence[RankForecast]], cluster: Cluster
) -> list[KernelFit]:
    """Tries the kernels of a GPU on the cluster's devices, and on twice as many until they fit.

    Args:
        plan: function that forecasts a kernel on a number of devices, or raises PlanError.
        cluster: the devices.
    """
    fits = []
    for kernel in ("fused", *OFF_THE_GPU):
        fit = KernelFit(kernel=kernel)  # type: ignore[arg-type]
        devices = cluster.world_size
        # The cluster itself is tried however large it is.
        while not fit.devices and devices <= max(_MOST_TRIED, cluster.world_size):
            with suppress(PlanError):
                largest = max(plan(fit.kernel, devices), key=lambda rank: rank.total)
                fit = dataclasses.replace(fit, largest=largest, devices=devices)
            devices *= 2
        fits.append(fit)
    return fits


def kernel_fits_text(fits: Sequence[KernelFit], cluster: Cluster) -> str:
    """Formats the kernels as a table: devices that are enough, and the memory of the rank that needs most."""
    rows = []
    for fit in fits:
        if fit.largest is None:
            why = f"more than {_MOST_TRIED}"
            if fit.kernel == "key_value" and not cluster.ssd_gb:
                why = "needs --ssd"
            rows.append([fit.kernel, why, "", "", ""])
        else:
            sizes = map(
                size_text, (fit.largest.device, fit.largest.host, fit.largest.ssd)
            )
            rows.append([fit.kernel, f"{fit.devices:,}", *sizes])
    headers = [
        "kernel for every table",
        "devices that fit",
        "GPU of the largest rank",
        "host memory",
        "SSD",
    ]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Forecast of one sharding type for every table.

    Args:
        sharding: sharding type.
        ms: milliseconds of the slowest rank's tables in a step; infinite where refused.
        largest: bytes of the rank that needs most.
        refused: why there is no such plan, in one line; empty if there is one.
    """

    sharding: Sharding
    ms: float = float("inf")
    largest: int = 0
    refused: str = ""


def compare(
    plan: Callable[[Sharding], Sequence[RankForecast]],
    known: Mapping[Sharding, Sequence[RankForecast]],
) -> list[Alternative]:
    """Forecasts every sharding type for all tables.

    Args:
        plan: function that forecasts a sharding type rank by rank, or raises PlanError.
        known: forecasts that need not be made again, by sharding type.
    """
    alternatives = []
    for sharding in get_args(Sharding):
        alternative = Alternative(sharding=sharding)
        try:
            ranks = known[sharding] if sharding in known else plan(sharding)
        except PlanError as error:
            # The first clause alone fits into a cell of the table.
            reason = (
                str(error)
                .splitlines()[0]
                .removeprefix("no sharding plan fits: ")
                .partition(";")[0]
            )
            alternatives.append(dataclasses.replace(alternative, refused=reason))
        else:
            slowest = max(rank.ms for rank in ranks)
            largest = max(rank.total for rank in ranks)
            alternatives.append(
                dataclasses.replace(alternative, ms=slowest, largest=largest)
            )
    return alternatives


def alternatives_text(
    alternatives: Sequence[Alternative], taken: Sharding, *, advise: bool = True
) -> str:
    """Formats the alternatives as a table, and says whether another than the one ``taken`` should be faster.

    Args:
        alternatives: forecasts of the sharding types.
        taken: sharding type of the plan.
        advise: whether the plan rests on these forecasts; if it does not, none is said to be faster.
    """
    rows = []
    for option in alternatives:
        if option.refused:
            rows.append([option.sharding, "", option.refused])
            continue
        name: str = option.sharding
        if name == taken:
            name += " (taken)"
        rows.append([name, f"{option.ms:.3f}", size_text(option.largest)])
    headers = ["sharding", "ms of the slowest rank", "largest rank, or why not"]
    text = str(tabulate(rows, headers=headers, disable_numparse=True))
    current = next(option for option in alternatives if option.sharding == taken)
    best = min(alternatives, key=lambda option: option.ms)
    # TorchRec's estimates are off by more than the last 5 %.
    if not advise or best.refused or best.ms > 0.95 * current.ms:
        return text
    how = f"{best.ms:.3f} against {current.ms:.3f} ms"
    if current.refused:
        how = f"{best.ms:.3f} ms"
    why = ""
    if "column" in best.sharding:
        why = "TorchRec's planner leaves tables of up to 128 columns whole unless told otherwise; "
    faster = f"{best.sharding} for every table is foreseen to be faster, {how}"
    return f"{text}\n{faster}: {why}plan.sharding={best.sharding} asks for it"
