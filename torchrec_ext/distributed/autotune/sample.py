"""What the measurements before training run on: a copy of the model with smaller tables, and a batch whose ids fit into them.

Stopwatch: how long something takes on all ranks at the same time, and the exchanges between them.
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
from torchrec_ext.distributed.tables import collections, table_configs

BYTES = 64 * 2**20  # of all tables of a sample together: twice a large cache, and quick to fill


@dataclass(frozen=True)
class Sample:
    """What takes about the time of the model, and little memory.

    Args:
        model: unsharded, its tables on the meta device.
        batch: of this rank.
    """

    model: nn.Module
    batch: TowerBatch

    @classmethod
    def of(cls, model: nn.Module, batch: TowerBatch) -> Sample:
        """The sample of an unsharded ``model``, which stays as it is."""
        rows = _rows_of(model)
        made = copy.deepcopy(model)
        for path, collection in list(collections(model)):
            parent, _, name = path.rpartition(".")
            setattr(made.get_submodule(parent), name, _smaller(collection, rows))
        for module in made.modules():  # what towers say of their tables, too
            for name, value in vars(module).items():
                if isinstance(value, list) and value and all(isinstance(one, BaseEmbeddingConfig) for one in value):
                    setattr(module, name, [_fewer(table, rows) for table in value])
        return cls(made, _below_in(batch, rows))


def _rows_of(model: nn.Module) -> int:
    """How many rows of each table are kept, at most, so that all take :data:`BYTES` or less."""
    tables = [table for _, collection in collections(model) for table in table_configs(collection)]
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


def _below_in(batch: TowerBatch, rows: int) -> TowerBatch:
    """``batch`` with every id below ``rows``; those that were stay as they are."""
    shared = batch.shared
    return dataclasses.replace(
        batch,
        sparse=_below(batch.sparse, rows),
        shared=None if shared is None else SharedRows(_below(shared.sparse, rows), shared.dense, shared.index),
        joint=None if batch.joint is None else _below(batch.joint, rows),
        weighted=None if batch.weighted is None else _below(batch.weighted, rows),
    )


def _below(bags: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=bags.keys(),
        values=bags.values() % rows,
        lengths=bags.lengths(),
        weights=bags.weights_or_none(),
        stride=bags.stride(),
    )


def bags_for(features: Sequence[str], batch: TowerBatch) -> KeyedJaggedTensor | None:
    """The KeyedJaggedTensor of ``batch`` that has these ``features``; None where none has all of them."""
    parts = [batch.sparse, batch.shared.sparse if batch.shared is not None else None, batch.joint, batch.weighted]
    return next((part for part in parts if part is not None and set(features) <= set(part.keys())), None)


def resized(batch: TowerBatch, features: Sequence[str], rows: int) -> KeyedJaggedTensor:
    """``rows`` rows of the ``features`` alone: those of ``batch``, again from the first where there are too few."""
    values, lengths = [], []
    for name in features:
        own = batch.bags(name)
        place = torch.arange(rows) % max(own.lengths().numel(), 1)
        ends = torch.cat([own.lengths().new_zeros(1), own.lengths().cumsum(0)])
        picked = own.lengths()[place]
        starts = ends[:-1][place].repeat_interleave(picked)
        within = torch.arange(int(picked.sum())) - (picked.cumsum(0) - picked).repeat_interleave(picked)
        values.append(own.values()[starts + within])
        lengths.append(picked)
    return KeyedJaggedTensor(keys=list(features), values=torch.cat(values), lengths=torch.cat(lengths), stride=rows)


def resized_dense(dense: Tensor, columns: slice, rows: int) -> Tensor:
    """``rows`` rows of some columns likewise."""
    return dense[:, columns][torch.arange(rows) % max(len(dense), 1)]


def flat_values(embedded: Any) -> Tensor:
    """All that a collection, sharded or not, returns: of an EmbeddingBagCollection or an EmbeddingCollection."""
    waited = embedded.wait() if hasattr(embedded, "wait") else embedded
    if isinstance(waited, dict):
        return torch.cat([part.values().flatten() for part in waited.values()])
    return waited.values()  # type: ignore[no-any-return]


def run_backward(outputs: list[Tensor]) -> None:
    """Runs the backward of them all, from gradients of one."""
    for output in outputs:
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]


_IN_A_ROW = 0.1  # seconds of one call before it is the next one's turn
_ROUNDS = (5, 15)


class Stopwatch:
    """Times calls; every rank makes the same ones, and gets the time of the slowest.

    Args:
        runtime: this process's place in the job.
        seconds: to spend on each figure.
    """

    def __init__(self, runtime: Runtime, seconds: float = 0.05) -> None:
        self._runtime, self._seconds = runtime, seconds

    def ms(self, call: Callable[[], object]) -> float:
        """The lower quartile of the ms of a call, after one that does not count: other work on the machine only ever adds."""
        self._once(call)
        first = self._slowest(self._once(call))
        repeats = min(max(int(self._seconds / max(first, 1e-6)), 3), 20)  # the same on every rank
        times = []
        for _ in range(repeats):
            dist.barrier()
            times.append(self._once(call))
        return 1e3 * self._slowest(sorted(times)[len(times) // 4])

    def in_turn(self, calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
        """The median of the ms of each call, a few of each in a row, round by round.

        A machine's speed moves by a fifth within seconds, which so hits all of them alike, and the median is what
        training sees.

        Args:
            calls: what to time.
            seconds: to spend on each, about.
        """
        firsts = [self._slowest(self._once(call)) for call in calls]
        inner = [min(max(int(_IN_A_ROW / max(first, 1e-6)), 1), 8) for first in firsts]
        spent = sum(first * count for first, count in zip(firsts, inner, strict=True))
        rounds = min(
            max(int(seconds * len(calls) / max(spent, 1e-6)), _ROUNDS[0]), _ROUNDS[1]
        )  # the same on every rank
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, count, found in zip(calls, inner, times, strict=True):
                dist.barrier()
                found.append(self._once(call, count))
        return [1e3 * statistics.median(map(self._slowest, found)) for found in times]

    def all_to_all(self, size: int) -> Line:
        """By the bytes that a rank sends to all others together, from none to ``size``."""
        return self._line(size, self._to_others)

    def all_reduce(self, size: int) -> Line:
        """By bytes, from none to ``size``."""
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
        """Each other rank gets an equal share, this one nothing."""
        others = self._runtime.world_size - 1
        share = len(sent) // others
        counts = [0 if rank == self._runtime.rank else share for rank in range(self._runtime.world_size)]
        dist.all_to_all_single(torch.empty_like(sent[: share * others]), sent[: share * others], counts, counts)

    def _once(self, call: Callable[[], object], count: int = 1) -> float:
        """Seconds of a call, the mean of ``count``."""
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
        found = torch.tensor(seconds, dtype=torch.float64, device=self._runtime.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)
