"""forecast(): what a plan takes of each rank, in bytes and milliseconds, before anything runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tabulate import tabulate
from torch import nn
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.distributed.cluster import Cluster
from torchrec_ext.distributed.drafting import Draft
from torchrec_ext.distributed.explain import bytes_per_weight, ranges, size_text
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.tables import collections, table_configs

_DENSE_STATE = {"adam": 2, "adagrad": 1, "sgd": 0}  # numbers for each weight


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """One rank under a plan.

    Args:
        rank: 0 <= rank < R.
        weights: bytes of its parts of tables.
        state: bytes of optimizer state for these.
        buffers: bytes of ids and embeddings that go through it in a step, and of rows cached from the host.
        dense: bytes of the dense layers with their gradients and optimizer state.
        host: of all these the bytes that lie in the host's memory.
        lookup_ms: of its rows for the global batch, forward and backward.
        exchange_ms: of ids, embeddings and gradients with other ranks.
    """

    rank: int
    weights: int = 0
    state: int = 0
    buffers: int = 0
    dense: int = 0
    host: int = 0
    lookup_ms: float = 0.0
    exchange_ms: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.weights + self.state + self.buffers + self.dense

    @property
    def ms(self) -> float:
        """Of its tables in a step, where nothing overlaps; dense layers are not in it."""
        return self.lookup_ms + self.exchange_ms


def forecast(draft: Draft, model: nn.Module, cluster: Cluster, optimizer: OptimizerConfig) -> list[RankForecast]:
    """What TorchRec's planner reckons for ``draft``, rank by rank.

    Args:
        draft: the plan.
        model: that was planned, not sharded.
        cluster: the devices.
        optimizer: of tables and dense layers.
    """
    tables = {table.name: table for _, collection in collections(model) for table in table_configs(collection)}
    choices = optimizer.for_tables(model)
    dense = _dense_bytes(model, optimizer)
    ranks = [RankForecast(rank=rank, dense=dense) for rank in range(cluster.world_size)]
    for option in draft.options:
        table = tables[option.name]
        for rank, added in _shards(option, table, choices[option.name]):
            old = ranks[rank]
            ranks[rank] = RankForecast(
                rank=rank,
                dense=dense,
                **{name: getattr(old, name) + value for name, value in added.items()},
            )
    if cluster.device == "cpu":
        return [dataclasses.replace(rank, host=rank.total) for rank in ranks]
    return ranks


def _shards(option: ShardingOption, table: BaseEmbeddingConfig, choice: Choice) -> Iterable[tuple[int, Mapping[str, float]]]:
    """(rank, what its part adds) for each part of one table."""
    elements = table.num_embeddings * table.embedding_dim
    for shard in option.shards:
        share = math.prod(shard.size) / elements
        weights = math.prod(shard.size) * bytes_per_weight(table)
        state = math.ceil(choice.state_bytes(table) * share)
        perf, storage = shard.perf, shard.storage
        yield (
            shard.rank,
            {
                "weights": weights,
                "state": state,
                "buffers": max(storage.hbm + storage.ddr - weights - state, 0),
                "host": storage.ddr,
                "lookup_ms": perf.fwd_compute + perf.bwd_compute + perf.prefetch_compute,
                "exchange_ms": perf.fwd_comms + perf.bwd_comms + perf.input_dist_comms,
            },
        )


def _dense_bytes(model: nn.Module, optimizer: OptimizerConfig) -> int:
    """Weights, gradients and optimizer state of what is no table."""
    paths = tuple(f"{path}." if path else "" for path, _ in collections(model))
    dense = {name: parameter for name, parameter in model.named_parameters() if not name.startswith(paths)}
    choices = optimizer.for_layers(dense) if dense else {}
    return sum(4 * value.numel() * (2 + _DENSE_STATE[choices[name].kind]) for name, value in dense.items())


def forecast_text(ranks: list[RankForecast], cluster: Cluster) -> str:
    """The ranks as a table, those with the same figures in one line, and what each has."""
    groups: dict[tuple[object, ...], list[RankForecast]] = {}
    for rank in ranks:
        groups.setdefault(tuple(dataclasses.astuple(dataclasses.replace(rank, rank=0))), []).append(rank)
    rows = []
    for same in groups.values():
        first = same[0]
        sizes = [first.weights, first.state, first.buffers, first.dense]
        sizes += [first.total - first.host] if cluster.device == "cuda" else []
        times = [f"{first.lookup_ms:.3f}", f"{first.exchange_ms:.3f}"]
        rows.append([ranges([rank.rank for rank in same]), *map(size_text, [*sizes, first.host]), *times])
    gpu = ["on the GPU"] if cluster.device == "cuda" else []
    headers = ["rank", "tables", "state", "buffers", "dense layers", *gpu, "in host memory", "look-up ms", "exchange ms"]
    text = str(tabulate(rows, headers=headers, disable_numparse=True))
    slowest = max(ranks, key=lambda rank: rank.ms)
    has = f"{size_text(cluster.host_bytes)} of host memory"
    if cluster.device == "cuda":
        has = f"{size_text(cluster.device_bytes)} of GPU memory and {has}"
    return (
        f"{text}\neach rank has {has} for these, {cluster.reserve:.0%} being kept back\n"
        f"tables of rank {slowest.rank}, the slowest, take {slowest.ms:.3f} ms a step by TorchRec's cost model, dense layers and "
        "overlap not counted"
    )
