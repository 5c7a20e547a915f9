"""train_stack(): the loop of a stack, in which each member has its own epochs, evaluations, early stop and end."""

from __future__ import annotations

import dataclasses
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
from torchrec_ext.networks.saving import MemberRun, MemberWindow, drawing_from, is_over, optimizer_of
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.train.best import BestWeights
from torchrec_ext.train.checkpoint.run_checkpoints import Position, RunCheckpoints
from torchrec_ext.train.config import Record
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.finite import RunStoppedError
from torchrec_ext.train.loop import Loader, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Member:
    """One network of a stack and how it is trained.

    Args:
        network: unsharded, its tables in memory.
        loader: its batches; members with one loader read it once.
        optimizer: of its weights.
        train: its epochs, schedules, evaluations and early stop.
        seed: of its dropout.
        checkpoints: saves it as a run of its own, and says where it begins; of all members at the same steps, or of none.
    """

    network: nn.Module
    loader: Loader
    optimizer: OptimizerConfig
    train: TrainConfig
    seed: int = 0
    checkpoints: RunCheckpoints | None = None


def train_stack(
    members: Mapping[str, Member],
    *,
    evaluate: Callable[[str], Record] | None = None,
    log: Callable[[str, Record], None] | None = None,
    codistillation: Codistillation | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, list[Record]]:
    """Trains networks of one shape as one stack; the networks of ``members`` have learned when it returns.

    A member leaves when its epochs are over, when it stops early, and when its loss is no number: the others go on, faster.

    Args:
        members: by name.
        evaluate: from a name to the figures of that member as it is, after the epochs that its ``train.eval_every`` says.
        log: called with a name and a record of that member.
        codistillation: how members learn from each other, where they do. After a resume the peers are those of that step.
        stop: asked after each step; where it says yes, all members are saved, and the run ends.

    Returns:
        The records of each member, as :func:`torchrec_ext.train.loop.train` makes them; the last of one whose loss is no number has
        the kind ``error``, and nothing was written by that step.

    Raises:
        StackError: networks of different shapes, or loaders of which one has more steps than another.
        RunStoppedError: ``stop`` said so.
    """
    try:
        run = _Run(members, evaluate, log, codistillation or Codistillation(), stop)
        while run.active and run.at.epoch < max(member.train.epochs for member in members.values()):
            run.epoch()
        run.restore_best()
    finally:
        for member in members.values():
            if member.checkpoints is not None:
                member.checkpoints.close()
    return run.history


class _Run:
    def __init__(
        self,
        members: Mapping[str, Member],
        evaluate: Callable[[str], Record] | None,
        log: Callable[[str, Record], None] | None,
        codistillation: Codistillation,
        stop: Callable[[], bool] | None,
    ) -> None:
        self._members, self._evaluate, self._log, self._stop = members, evaluate, log, stop
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
        self._best = {name: BestWeights(member.network) for name, member in members.items() if member.train.early_stop.metric}
        self._window = _Window(self.active)
        self.at = Position()
        if self._saved():
            self._restore()

    @property
    def active(self) -> list[str]:
        return self._stack.members if self._stack else []

    def _new_peers(self) -> StalePeers | None:
        return StalePeers(self._stack, self._codistillation) if self._codistillation.weight and len(self.active) > 1 else None

    def epoch(self) -> None:
        """What is left of it."""
        loaders = list({id(self._members[name].loader): self._members[name].loader for name in self.active}.values())
        if not self.at.done:
            for loader in loaders:
                loader.set_epoch(self.at.epoch)
            self._window = _Window(self.active)
        for name in self.active:
            self._members[name].network.train()
        for batches in zip(*loaders, strict=True):
            read = {id(loader): batch for loader, batch in zip(loaders, batches, strict=True)}
            if not self._train(
                self.at.epoch + 1, {name: read[id(self._members[name].loader)] for name in self.active}, self._window
            ):
                return
        self._end_of_epoch(self.at.epoch + 1)
        self.at.begin(self.at.epoch + 1)

    def restore_best(self) -> None:
        """Each member goes back to the weights of its best evaluation, where its early stop watched for it."""
        for name, member in self._members.items():
            steps = [record["step"] for record in self.history[name] if record["kind"] != "error"]
            best = self._watches[name].better_than(max(steps, default=0))
            if best is None or self.history[name][-1]["kind"] == "error":
                continue
            found = self._best[name].held
            if found:
                self._best[name].put_back()
            elif member.checkpoints is not None:
                found = member.checkpoints.load_weights(member.network, best["best_step"])
            told = self._watches[name].told(best)
            text = (
                f"restored {told}" if found else f"{told} was the best, but its checkpoint is gone: the weights are the last step's"
            )
            if self._log is not None:
                self._log(name, {"kind": "restore", "epoch": best["best_epoch"], "step": best["best_step"], "message": text})

    def _restore(self) -> None:
        """All members stand where their checkpoints say; at the beginning where there are none."""
        self._optimizer.begin()
        stand = {name: self._restore_one(name, checkpoints) for name, checkpoints in self._saved()}
        for name, record in ((name, record) for name, own in stand.items() for record in own.history):
            if self._log is not None:
                self._log(name, record)
        over = [name for name, own in stand.items() if is_over(own, self._members[name].train.epochs)]
        if over:  # whose loader, where it is that of others too, stands where they left
            stand |= {name: self._restore_one(name, checkpoints) for name, checkpoints in self._saved() if name not in over}
        if len(over) == len(self.active):
            self._leave(over)
            return
        found = {(own.epoch, own.done, own.step, own.ended) for name, own in stand.items() if name not in over}
        if len(found) > 1:
            steps = ", ".join(f"'{name}' at step {own.step}" for name, own in stand.items())
            raise StackError(f"the members' checkpoints stand apart: {steps}; give those of one step, as members step together")
        ((epoch, done, step, ended),) = found
        self.at = Position(epoch=epoch, done=done, step=step)
        self._optimizer.go_on(step)
        if ended:
            self.at.begin(epoch + 1)
        self._leave(over)

    def _restore_one(self, name: str, checkpoints: RunCheckpoints) -> Position:
        run = self._as_run(name)
        with drawing_from(self._stack.generators[name]):
            at = checkpoints.restore(run)
        self._window.put(name, run.window.sums)
        self.history[name] = at.history
        return at

    def _saved(self) -> list[tuple[str, RunCheckpoints]]:
        """Of the members that are left."""
        found = ((name, self._members[name].checkpoints) for name in self.active)
        return [(name, checkpoints) for name, checkpoints in found if checkpoints is not None]

    def _as_run(self, name: str, *, ended: bool = False) -> MemberRun:
        return MemberRun(
            model=self._members[name].network,
            optimizer=optimizer_of(self._stack, self._optimizer, name),
            loader=self._members[name].loader,
            watch=self._watches[name],
            window=MemberWindow(self._window.sums(name)),
            at=dataclasses.replace(self.at, ended=ended, history=self.history[name]),
            runtime=Runtime(),
        )

    def _save(self, how: Callable[[RunCheckpoints, MemberRun], None]) -> None:
        for name, checkpoints in self._saved():
            with drawing_from(self._stack.generators[name]):
                how(checkpoints, self._as_run(name))

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
        self.at.step, self.at.done = self.at.step + 1, self.at.done + 1
        window.add(self.active, losses, [batches[name] for name in self.active])
        for name in self.active:
            if self.at.step % self._members[name].train.log_every == 0 or self.at.done == self._steps:
                config = self._members[name].train
                changing = config.tables_schedule.changes or config.dense_schedule.changes
                rates = self._optimizer.rates(name) if changing else {}
                self._keep(name, {"kind": "train", "epoch": epoch, "step": self.at.step, **window.take(name), **rates})
        if self.at.done < self._steps:
            self._save(RunCheckpoints.after_step)
        if self._stop is not None and self._stop():
            self._end_here()
        return True

    def _end_here(self) -> None:
        where = f"step {self.at.step} of epoch {self.at.epoch + 1}"
        if not self._saved():
            raise RunStoppedError(f"stopped by a signal after {where}; nothing was saved, since the run has no checkpoints")
        self._save(RunCheckpoints.save)
        raise RunStoppedError(f"stopped by a signal after {where}, which is saved; go on with --resume auto")

    def _backward(self, batches: Sequence[TowerBatch]) -> Tensor:
        peers = self._peers.logits(batches, self.at.step) if self._peers else None
        return self._stack.backward(batches, peers=peers, weight=self._codistillation.weight).loss

    def _drop_diverged(self, epoch: int, losses: Tensor) -> None:
        lost = {name: loss for name, loss in zip(self.active, losses.tolist(), strict=True) if not math.isfinite(loss)}
        for name, loss in lost.items():
            message = (
                f"'{name}': the loss is {loss} at step {self.at.step + 1} of epoch {epoch}; nothing was written by this step, and "
                "the member ends here: lower its optimizer.tables_lr or optimizer.dense_lr, set optimizer.clip_norm, or look for "
                "extreme values in the data"
            )
            self._keep(name, {"kind": "error", "epoch": epoch, "step": self.at.step + 1, "message": message})
        self._leave(lost)

    def _end_of_epoch(self, epoch: int) -> None:
        ended, best = [], []
        for name in self.active:
            config, last = self._members[name].train, epoch == self._members[name].train.epochs
            if last:
                ended.append(name)
            if self._evaluate is None or not (last or epoch % config.eval_every == 0):
                continue
            self._members[name].network.eval()
            record = {"kind": "eval", "epoch": epoch, "step": self.at.step, **self._evaluate(name)}
            watch = self._watches[name]
            if watch.see(record):
                best.append(name)
                if config.early_stop.restore:
                    self._best[name].keep()
            self._keep(name, {**record, "best": True} if name in best else record)
            if (stop := watch.stops()) and not last:
                self._keep(name, {"epoch": epoch, "step": self.at.step, **stop})
                ended.append(name)
        for name, checkpoints in self._saved():
            with drawing_from(self._stack.generators[name]):
                checkpoints.after_epoch(self._as_run(name, ended=True), last=name in ended, best=name in best)
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

    def sums(self, name: str) -> Tensor:
        """Loss, steps and rows, as a checkpoint keeps them."""
        return torch.tensor(self._sums[name], dtype=torch.float64)

    def put(self, name: str, sums: Tensor) -> None:
        """Goes on from there."""
        total, steps, rows = sums.tolist()
        self._sums[name] = total, int(steps), int(rows)

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
