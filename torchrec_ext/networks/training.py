"""train_stack(): the loop of a stack, in which each member has its own epochs, evaluations, early stop and end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.peers import Codistillation, StalePeers
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.loop import Loader, Record, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Member:
    """One network of a stack and how it is trained.

    Args:
        network: unsharded, its tables in memory.
        loader: its batches; members with one loader read it once.
        optimizer: of its weights.
        train: its epochs, schedules, evaluations and early stop.
        seed: of its dropout.
    """

    network: nn.Module
    loader: Loader
    optimizer: OptimizerConfig
    train: TrainConfig
    seed: int = 0


def train_stack(
    members: Mapping[str, Member],
    *,
    evaluate: Callable[[str], Record] | None = None,
    log: Callable[[str, Record], None] | None = None,
    codistillation: Codistillation | None = None,
) -> dict[str, list[Record]]:
    """Trains networks of one shape as one stack; the networks of ``members`` have learned when it returns.

    A member leaves when its epochs are over, when it stops early, and when its loss is no number: the others go on, faster.

    Args:
        members: by name.
        evaluate: from a name to the figures of that member as it is, after the epochs that its ``train.eval_every`` says.
        log: called with a name and a record of that member.
        codistillation: how members learn from each other, where they do.

    Returns:
        The records of each member, as :func:`torchrec_ext.train.loop.train` makes them; the last of one whose loss is no number has
        the kind ``error``, and nothing was written by that step.

    Raises:
        StackError: networks of different shapes, or loaders of which one has more steps than another.
    """
    run = _Run(members, evaluate, log, codistillation or Codistillation())
    for epoch in range(max(member.train.epochs for member in members.values())):
        if run.active:
            run.epoch(epoch)
    return run.history


class _Run:
    def __init__(
        self,
        members: Mapping[str, Member],
        evaluate: Callable[[str], Record] | None,
        log: Callable[[str, Record], None] | None,
        codistillation: Codistillation,
    ) -> None:
        self._members, self._evaluate, self._log = members, evaluate, log
        self._codistillation = codistillation
        self._steps = _steps_of_all(members)
        self._stack = Stack(
            {name: member.network for name, member in members.items()}, seeds={name: m.seed for name, m in members.items()}
        )
        self._optimizer = StackedOptimizer(
            self._stack,
            {name: member.optimizer for name, member in members.items()},
            schedules={name: (m.train.tables_schedule, m.train.dense_schedule) for name, m in members.items()},
            steps={name: m.train.epochs * self._steps for name, m in members.items()},
        )
        self._peers = self._new_peers()
        self._watches = {name: EarlyStopWatch(member.train.early_stop, Runtime()) for name, member in members.items()}
        self.history: dict[str, list[Record]] = {name: [] for name in members}
        self._step = 0

    @property
    def active(self) -> list[str]:
        return self._stack.members if self._stack else []

    def _new_peers(self) -> StalePeers | None:
        return StalePeers(self._stack, self._codistillation) if self._codistillation.weight and len(self.active) > 1 else None

    def epoch(self, epoch: int) -> None:
        loaders = list({id(self._members[name].loader): self._members[name].loader for name in self.active}.values())
        for loader in loaders:
            loader.set_epoch(epoch)
        for name in self.active:
            self._members[name].network.train()
        window = _Window(self.active)
        for batches in zip(*loaders, strict=True):
            read = {id(loader): batch for loader, batch in zip(loaders, batches, strict=True)}
            if not self._train(epoch, {name: read[id(self._members[name].loader)] for name in self.active}, window):
                return
        self._end_of_epoch(epoch)

    def _train(self, epoch: int, batches: Mapping[str, TowerBatch], window: _Window) -> bool:
        """One step of all; False when no member is left."""
        there = {id(batch): batch.to(self._stack.flat.device) for batch in batches.values()}
        losses = self._backward([there[id(batches[name])] for name in self.active])
        while not torch.isfinite(losses).all():
            self._drop_diverged(epoch, losses)
            if not self.active:
                return False
            losses = self._backward([there[id(batches[name])] for name in self.active])
        self._optimizer.step()
        self._step += 1
        window.add(self.active, losses, [batches[name] for name in self.active])
        for name in self.active:
            if self._step % self._members[name].train.log_every == 0 or self._step % self._steps == 0:
                config = self._members[name].train
                changing = config.tables_schedule.changes or config.dense_schedule.changes
                rates = self._optimizer.rates(name) if changing else {}
                self._keep(name, {"kind": "train", "epoch": epoch, "step": self._step, **window.take(name), **rates})
        return True

    def _backward(self, batches: Sequence[TowerBatch]) -> Tensor:
        peers = self._peers.logits(batches, self._step) if self._peers else None
        return self._stack.backward(batches, peers=peers, weight=self._codistillation.weight).loss

    def _drop_diverged(self, epoch: int, losses: Tensor) -> None:
        lost = {name: loss for name, loss in zip(self.active, losses.tolist(), strict=True) if not math.isfinite(loss)}
        for name, loss in lost.items():
            message = (
                f"'{name}': the loss is {loss} at step {self._step + 1} of epoch {epoch}; nothing was written by this step, and "
                "the member ends here: lower its optimizer.tables_lr or optimizer.dense_lr, set optimizer.clip_norm, or look for "
                "extreme values in the data"
            )
            self._keep(name, {"kind": "error", "epoch": epoch, "step": self._step + 1, "message": message})
        self._leave(lost)

    def _end_of_epoch(self, epoch: int) -> None:
        ended = []
        for name in self.active:
            config, last = self._members[name].train, epoch + 1 == self._members[name].train.epochs
            if last:
                ended.append(name)
            if self._evaluate is None or not (last or (epoch + 1) % config.eval_every == 0):
                continue
            self._members[name].network.eval()
            record = {"kind": "eval", "epoch": epoch, "step": self._step, **self._evaluate(name)}
            watch = self._watches[name]
            self._keep(name, {**record, "best": True} if watch.see(record) else record)
            if (stop := watch.stops()) and not last:
                self._keep(name, {"epoch": epoch, "step": self._step, **stop})
                ended.append(name)
        self._leave(ended)

    def _leave(self, names: Iterable[str]) -> None:
        gone = list(names)
        if not gone:
            return
        if len(gone) == len(self.active):
            self._stack = None  # type: ignore[assignment]
            return
        self._stack = self._stack.without(gone)
        self._optimizer = self._optimizer.kept(self._stack)
        self._peers = self._new_peers()

    def _keep(self, name: str, record: Record) -> None:
        self.history[name].append(record)
        if self._log is not None:
            self._log(name, record)


class _Window:
    """The mean loss and the rows of each member since its last record."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, (0.0, 0, 0))
        self._starts = dict.fromkeys(names, time.perf_counter())

    def add(self, names: Sequence[str], losses: Tensor, batches: Sequence[TowerBatch]) -> None:
        rows = {id(batch): int((batch.weights > 0).sum()) for batch in batches}
        for name, loss, batch in zip(names, losses.tolist(), batches, strict=True):
            total, steps, counted = self._sums[name]
            self._sums[name] = total + loss, steps + 1, counted + rows[id(batch)]

    def take(self, name: str) -> dict[str, Any]:
        (total, steps, rows), now = self._sums[name], time.perf_counter()
        seconds, self._starts[name] = now - self._starts[name], now
        self._sums[name] = 0.0, 0, 0
        return {"loss": total / steps, "rows": rows, "rows_per_s": rows / seconds}


def _steps_of_all(members: Mapping[str, Member]) -> int:
    steps = {name: len(member.loader) for name, member in members.items()}
    first = next(iter(steps))
    other = next((name for name, count in steps.items() if count != steps[first]), None)
    if other is not None:
        raise StackError(
            f"'{first}' has {steps[first]} steps an epoch and '{other}' {steps[other]}: members of a stack step together; give "
            "both the same rows and loader.batch_size, or train them beside each other"
        )
    return steps[first]
