"""Sample: a copy of the model with smaller tables and a batch whose ids fit them, for measurements before training.

Stopwatch: times calls on all ranks at the same time, and the exchanges between them.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.distributed.plan.measurements import Line
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, table_configs, tables_of

BYTES = 64 * 2**20  # size of all tables of a sample together: twice a large cache, and quick to fill


@dataclass(frozen=True)
class Sample:
    """A small model and batch that take about the time of the large ones, and little memory.

    Args:
        model: unsharded model with its tables on the meta device.
        batch: batch of this rank.
        more: further batches of this rank, of equal or other rows, so that a trial does not read the same rows, which
            are in a cache by then, in every step.
    """

    model: nn.Module
    batch: TowerBatch
    more: tuple[TowerBatch, ...] = ()

    @property
    def batches(self) -> list[TowerBatch]:
        """All batches."""
        return [self.batch, *self.more]

    @classmethod
    def of(cls, model: nn.Module, batch: TowerBatch, more: Sequence[TowerBatch] = ()) -> Sample:
        """Makes the sample of an unsharded ``model``, which is not changed."""
        rows = _most_rows(model)
        small = copy.deepcopy(model)
        for path, collection in list(collections(model)):
            parent, _, name = path.rpartition(".")
            setattr(small.get_submodule(parent), name, _smaller(collection, rows))
        for module in small.modules():  # the lists of tables that towers keep, too
            for name, value in vars(module).items():
                if isinstance(value, list) and value and all(isinstance(item, BaseEmbeddingConfig) for item in value):
                    setattr(module, name, [_fewer(table, rows) for table in value])
        return cls(small, _wrap_batch(batch, rows), tuple(_wrap_batch(other, rows) for other in more))


def _most_rows(model: nn.Module) -> int:
    """Returns how many rows of each table may be kept so that all together take :data:`BYTES` or less."""
    tables = tables_of(model)
    low, high = 1, max((table.num_embeddings for table in tables), default=1)
    while low < high:
        middle = (low + high + 1) // 2
        size = sum(min(table.num_embeddings, middle) * table.embedding_dim * 4 for table in tables)
        low, high = (middle, high) if size <= BYTES else (low, middle - 1)
    return low


def _fewer(table: BaseEmbeddingConfig, rows: int) -> BaseEmbeddingConfig:
    return dataclasses.replace(table, num_embeddings=min(table.num_embeddings, rows))


def _smaller(collection: nn.Module, rows: int) -> nn.Module:
    tables: list[Any] = [_fewer(table, rows) for table in table_configs(collection)]
    device = torch.device("meta")
    if isinstance(collection, EmbeddingBagCollection):
        bags: nn.Module = EmbeddingBagCollection(tables=tables, is_weighted=collection.is_weighted(), device=device)
        return bags
    assert isinstance(collection, EmbeddingCollection)
    lists: nn.Module = EmbeddingCollection(tables=tables, need_indices=collection.need_indices(), device=device)
    return lists


def _wrap_batch(batch: TowerBatch, rows: int) -> TowerBatch:
    """Returns ``batch`` with ids modulo ``rows``; smaller ids stay as they are."""
    shared = batch.shared
    return dataclasses.replace(
        batch,
        sparse=_wrap(batch.sparse, rows),
        shared=None if shared is None else SharedRows(_wrap(shared.sparse, rows), shared.dense, shared.index),
        joint=None if batch.joint is None else _wrap(batch.joint, rows),
        weighted=None if batch.weighted is None else _wrap(batch.weighted, rows),
    )


def _wrap(bags: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=bags.keys(),
        values=bags.values() % rows,
        lengths=bags.lengths(),
        weights=bags.weights_or_none(),
        stride=bags.stride(),
    )


def bags_for(features: Sequence[str], batch: TowerBatch) -> KeyedJaggedTensor | None:
    """Returns the KeyedJaggedTensor of ``batch`` that has these ``features``; None where none has all of them."""
    kjts = [batch.sparse, batch.shared.sparse if batch.shared is not None else None, batch.joint, batch.weighted]
    return next((kjt for kjt in kjts if kjt is not None and set(features) <= set(kjt.keys())), None)


def resized(batch: TowerBatch, features: Sequence[str], rows: int) -> KeyedJaggedTensor:
    """Returns ``rows`` rows of the ``features`` of ``batch``, repeated from the first where there are too few."""
    values, lengths = [], []
    for name in features:
        bags = batch.bags(name)
        index = torch.arange(rows) % max(bags.lengths().numel(), 1)
        ends = torch.cat([bags.lengths().new_zeros(1), bags.lengths().cumsum(0)])
        picked = bags.lengths()[index]
        starts = ends[:-1][index].repeat_interleave(picked)
        within = torch.arange(int(picked.sum())) - (picked.cumsum(0) - picked).repeat_interleave(picked)
        values.append(bags.values()[starts + within])
        lengths.append(picked)
    return KeyedJaggedTensor(keys=list(features), values=torch.cat(values), lengths=torch.cat(lengths), stride=rows)


def resized_dense(dense: Tensor, columns: slice, rows: int) -> Tensor:
    """Returns ``rows`` rows of some columns of (B, Fd) ``dense``, repeated from the first where there are too few."""
    return dense[:, columns][torch.arange(rows) % max(len(dense), 1)]


def flat_values(embedded: Any) -> Tensor:
    """Returns all values of what a collection returned, whether sharded or not, pooled or not, as one tensor."""
    waited = embedded.wait() if hasattr(embedded, "wait") else embedded
    if isinstance(waited, dict):
        return torch.cat([jagged.values().flatten() for jagged in waited.values()])
    return waited.values()  # type: ignore[no-any-return]


def run_backward(outputs: list[Tensor]) -> None:
    """Runs the backward of every output, from gradients of 1."""
    for output in outputs:
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]


_IN_A_ROW = 0.1  # seconds of repeating one call before it is the next one's turn
_ROUNDS = (5, 15)


class Stopwatch:
    """Times calls; every rank makes the same calls, and gets the time of the slowest rank.

    Args:
        runtime: this process's rank and device.
        seconds: time to spend on each figure.
    """

    def __init__(self, runtime: Runtime, seconds: float = 0.05) -> None:
        self._runtime, self._seconds = runtime, seconds

    def ms(self, call: Callable[[], object]) -> float:
        """Returns the lower quartile of the ms of a call, after a warm-up: other work on the machine only ever adds."""
        self._once(call)
        first = self._slowest(self._once(call))
        repeats = min(max(int(self._seconds / max(first, 1e-6)), 3), 20)  # the same on every rank
        times = []
        for _ in range(repeats):
            dist.barrier()
            times.append(self._once(call))
        return 1e3 * self._slowest(sorted(times)[len(times) // 4])

    def in_turn(self, calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
        """Returns the median of the ms of each call, a few of each in a row, round by round.

        A machine's speed varies by a fifth within seconds, which affects all calls alike this way; the median is what
        training sees.

        Args:
            calls: functions to time.
            seconds: approximate time to spend on each.
        """
        firsts = [self._slowest(self._once(call)) for call in calls]
        inner = [min(max(int(_IN_A_ROW / max(first, 1e-6)), 1), 8) for first in firsts]
        spent = sum(first * count for first, count in zip(firsts, inner, strict=True))
        # The same on every rank.
        rounds = min(max(int(seconds * len(calls) / max(spent, 1e-6)), _ROUNDS[0]), _ROUNDS[1])
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, count, samples in zip(calls, inner, times, strict=True):
                dist.barrier()
                samples.append(self._once(call, count))
        return [1e3 * statistics.median(map(self._slowest, samples)) for samples in times]

    def all_to_all(self, size: int) -> Line:
        """Measures an all-to-all by the bytes that a rank sends to all others together, from none to ``size``."""
        return self._line(size, self._to_others)

    def all_reduce(self, size: int) -> Line:
        """Measures an all-reduce by its bytes, from none to ``size``."""
        return self._line(size, dist.all_reduce)

    def _line(self, size: int, exchange: Callable[[torch.Tensor], object]) -> Line:
        if self._runtime.world_size == 1:
            return Line(fixed=0.0, each=0.0)
        points = []
        for count in (64, max(size // 4, 128)):
            sent = torch.zeros(count, device=self._runtime.device)
            points.append((4.0 * count, self.ms(lambda sent=sent: exchange(sent))))  # type: ignore[misc]
        return Line.through(*points)

    def _to_others(self, sent: torch.Tensor) -> None:
        """Sends each other rank an equal share, and nothing to this one."""
        others = self._runtime.world_size - 1
        share = len(sent) // others
        counts = [0 if rank == self._runtime.rank else share for rank in range(self._runtime.world_size)]
        dist.all_to_all_single(torch.empty_like(sent[: share * others]), sent[: share * others], counts, counts)

    def _once(self, call: Callable[[], object], count: int = 1) -> float:
        """Returns the mean seconds of ``count`` calls."""
        self._settle()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self._settle()
        return (time.perf_counter() - start) / count

    def _settle(self) -> None:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)

    def _slowest(self, seconds: float) -> float:
        if self._runtime.world_size == 1:
            return seconds
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._runtime.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)
