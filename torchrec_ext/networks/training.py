"""train_stack(): the loop of a stack; each member has its own epochs, evaluations, early stop and end.

MemberRun: a member as a run of its own, with the checkpoint of a network trained alone.

StalePeers: the predictions of an older copy of a stack, for codistillation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.capture.policy import Compile
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.compiled import StackSteps
from torchrec_ext.networks.config import Codistillation as Codistillation
from torchrec_ext.networks.graph import Inputs, trace_logits
from torchrec_ext.networks.optimizer import StackedOptimizer, StackedWeights
from torchrec_ext.networks.skeleton import (
    StackedSteps,
    StackError,
    are_one,
    jagged_of,
    tensors_of,
    unlike_members,
)
from torchrec_ext.networks.stack import Losses, Stack, dense_parameters
from torchrec_ext.train.checkpoint.run import Position, RunCheckpoints
from torchrec_ext.train.config import Record
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.guards.finite import RunStoppedError
from torchrec_ext.train.loop import BestWeights, Loader, TrainConfig


@dataclass
class MemberWindow:
    """The sums of a member since its last record: loss, steps and rows, (3,) float64."""

    sums: Tensor


@dataclass
class MemberRun:
    """One member as a run of its own, for :class:`RunCheckpoints` to save and restore.

    Args:
        model: the network, whose weights are views of the stack's.
        optimizer: the member's part of the stack's optimizer, see :func:`optimizer_of`.
        loader: loader of its batches.
        watch: state of its early stop.
        window: sums of its next record.
        at: position of the member in its run.
        runtime: runtime of one rank.
    """

    model: nn.Module
    optimizer: KeyedOptimizer
    loader: Any
    watch: EarlyStopWatch
    window: MemberWindow
    at: Position
    runtime: Runtime

    def settle(self) -> None:
        """Does nothing, since a stack defers no work."""


def is_over(at: Position, epochs: int) -> bool:
    """Whether a member at this position has left the stack, after the last of its epochs or an early stop."""
    return at.ended and (
        at.epoch + 1 >= epochs or any(record["kind"] == "stop" for record in at.history)
    )


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Makes torch draw on the CPU from ``generator``'s state inside it, and advances ``generator`` by these draws."""
    # No device: dropout of a stack is drawn on the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())


def optimizer_of(
    stack: Stack, optimizer: StackedOptimizer, member: str
) -> KeyedOptimizer:
    """Returns one member's part of a stack's optimizer under its own names; state is shared, not copied.

    Args:
        stack: the stack that the member belongs to.
        optimizer: the stack's optimizer, after a step or :meth:`StackedOptimizer.begin`.
        member: name of the member.
    """
    network = stack.networks[member]
    own_names = dict(zip(stack.dense.weights, dense_parameters(network), strict=True))
    params: dict[str, Tensor] = {}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for _, entry, _ in optimizer.entries():
        if member not in entry.members:
            continue
        for name, parts in _parts(
            stack, entry, optimizer.states(entry)[member]
        ).items():
            # A table is called PATH.TABLE in the stack.
            key = own_names.get(name) or "{}.embedding_bags.{}.weight".format(
                *name.rsplit(".", 1)
            )
            params[key] = network.get_parameter(key)
            state[params[key]] = parts
    return KeyedOptimizer(params, state, [])


def _parts(
    stack: Stack, entry: StackedWeights, state: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Splits one member's state of an entry by weight, by name."""
    if entry.is_table:
        return {entry.name: state}
    names = [entry.name]
    # An entry of one dense weight has its columns alone, one of all has them side by
    # side.
    if entry.parameter.numel() == len(entry.members) * stack.dense.matrix.shape[1]:
        names = list(stack.dense.weights)
    shapes = [stack.dense.weights[name].shape[1:] for name in names]
    sizes = [shape.numel() for shape in shapes]
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for slot, value in state.items():
        # A scalar, such as a count of steps, belongs to each weight.
        pieces: Sequence[Tensor] = [value] * len(names)
        if value.dim():
            pieces = list(
                map(Tensor.view, torch.split(value.reshape(-1), sizes), shapes)
            )
        for name, piece in zip(names, pieces, strict=True):
            parts[name][slot] = piece
    return parts


class StalePeers:
    """An older copy of a stack; its members predict for each other.

    Args:
        stack: two or more members that read one batch.
        config: burn-in, and steps between two copies.

    Raises:
        StackError: the stack has one member.
    """

    def __init__(self, stack: Stack, config: Codistillation) -> None:
        if len(stack.members) < 2:
            raise StackError(
                f"codistillation with the one member {stack.members}: it learns from peers; stack two or more"
            )
        self._stack = stack
        self._config = config
        self._dense: list[Tensor] = []
        self._tables: dict[str, list[Tensor]] = {}
        self._graphs: dict[tuple[object, ...], GraphModule] = {}
        members = len(stack.members)
        # Row k: the members other than k.
        others = []
        for member in range(members):
            others.append([*range(member), *range(member + 1, members)])
        self._others = torch.tensor(others)

    @torch.no_grad()
    def copy(self) -> None:
        """Copies the members' weights as they are now."""
        weights = self._stack.dense.weights.values()
        self._dense = [value.detach().clone() for value in weights]
        self._tables = {}
        for path, stacked in self._stack.tables.items():
            self._tables[path] = [
                stacked.weight(table).detach().clone() for table in stacked.tables
            ]

    def logits(self, batches: Sequence[TowerBatch], step: int) -> Tensor | None:
        """Returns the logits of each member's peers for its rows, (K, K - 1, B); None before the burn-in is over.

        Args:
            batches: one batch, given once for each member.
            step: number of the step, counted from 0 over the run.

        Raises:
            StackError: the members read different batches.
        """
        if not are_one(batches):
            raise StackError(
                "codistillation between members that read different rows: peers predict for the same rows; let all "
                "read one loader (the same loader settings and seed)"
            )
        if step < self._config.burn_in or self._stack.skeleton is None:
            return None
        if not self._dense or (step - self._config.burn_in) % self._config.every == 0:
            self.copy()
        stale = self._predict(batches)
        return stale[self._others.to(stale.device)]

    @torch.no_grad()
    def _predict(self, batches: Sequence[TowerBatch]) -> Tensor:
        skeleton = self._stack.skeleton
        assert skeleton is not None, "logits() returns before the first step"
        pooled = []
        for path, tables in self._stack.tables.items():
            reads = skeleton.tables[path].reads
            pooled.append(
                tables.look_up(
                    [jagged_of(batch, reads) for batch in batches], self._tables[path]
                )
            )
        inputs = Inputs(
            self._dense,
            list(self._stack.tables),
            pooled,
            tensors_of(batches[0]),
            [],
            [],
            True,
        )
        key = inputs.shapes()
        if key not in self._graphs:
            self._graphs[key] = trace_logits(skeleton, inputs)
        return self._graphs[key](*inputs.flat())  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One network of a stack and its training.

    Args:
        network: unsharded network, its tables in memory.
        loader: batches of the network; members with one loader read it once.
        optimizer: optimizer settings of its weights.
        train: epochs, schedules, evaluations, early stop and compilation; the last is the same for all members.
        seed: seed of its dropout.
        checkpoints: saves it as a run of its own, and says where it begins; all members save at the same steps, or
            none does.
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
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Record]]:
    """Trains networks of one shape as one stack; the networks of ``members`` are trained in place.

    A member leaves when its epochs are over, when it stops early, and when its loss is not finite: the others go on,
    faster.

    Args:
        members: networks by name, and how each is trained.
        evaluate: takes a name and returns the present figures of that member; called after the epochs that its
            ``train.eval_every`` says.
        log: called with a name and a record of that member.
        codistillation: how members learn from each other, if they do. After a resume the peers are those of that step.
        stop: called after each step; if it returns True, all members are saved, and the run ends.
        say: receives the lines that say whether steps are compiled, see :class:`StackSteps`.

    Returns:
        The records of each member, as :func:`torchrec_ext.train.loop.train` makes them; the last of a member whose loss
        is not finite has the kind ``error``, and nothing was written by that step.

    Raises:
        StackError: the networks have different shapes, or their loaders different numbers of steps.
        RunStoppedError: ``stop`` returned True.
    """
    try:
        run = _Run(
            members, evaluate, log, codistillation or Codistillation(), stop, say
        )
        while run.active and run.at.epoch < max(
            member.train.epochs for member in members.values()
        ):
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
        say: Callable[[str], None],
    ) -> None:
        self._members = members
        self._evaluate = evaluate
        self._log = log or (lambda name, record: None)
        self._stop = stop
        self._say = say
        self._codistillation = codistillation
        steps = {name: len(member.loader) for name, member in members.items()}
        if (unlike := unlike_members(steps)) is not None:
            first, other = unlike
            raise StackError(
                f"'{first}' has {steps[first]} steps an epoch and '{other}' {steps[other]}: members of a stack step "
                "together; give both the same rows and loader.batch_size, or train them beside each other"
            )
        # Members agree in both.
        self._steps = next(iter(steps.values()))
        self._compile = _compile_of_all(members)
        self._watches: dict[str, EarlyStopWatch] = {}
        self._best: dict[str, BestWeights] = {}
        self.history: dict[str, list[Record]] = {}
        networks = {}
        seeds = {}
        optimizers = {}
        schedules = {}
        total_steps = {}
        for name, member in members.items():
            self.history[name] = []
            # A runtime of one rank: other ranks have other members.
            self._watches[name] = EarlyStopWatch(member.train.early_stop, Runtime())
            if member.train.early_stop.metric:
                self._best[name] = BestWeights(member.network)
            networks[name] = member.network
            seeds[name] = member.seed
            optimizers[name] = member.optimizer
            schedules[name] = member.train.tables_schedule, member.train.dense_schedule
            total_steps[name] = member.train.epochs * self._steps
        self._stack = Stack(networks, seeds=seeds)
        self._optimizer = StackedOptimizer(
            self._stack, optimizers, schedules=schedules, steps=total_steps
        )
        self._peers = self._new_peers()
        # Made last: it counts the steps from the position of a resumed run.
        self._step: StackSteps | None = None
        self._window = _Window(self.active)
        self.at = Position()
        if self._active_checkpoints():
            self._restore()
        self._step = self._new_step()

    @property
    def active(self) -> list[str]:
        if not self._stack:
            return []
        return self._stack.members

    def _new_peers(self) -> StalePeers | None:
        # The last member has no peers left to learn from.
        if self._codistillation.weight and len(self.active) > 1:
            return StalePeers(self._stack, self._codistillation)
        return None

    def _new_step(self) -> StackSteps | None:
        if not self.active:
            return None
        total = self._steps * max(
            self._members[name].train.epochs for name in self.active
        )
        return StackSteps(
            self._stack,
            self._optimizer,
            compile=self._compile,
            done=self.at.step,
            total=total,
            say=self._say,
        )

    def epoch(self) -> None:
        """Trains the rest of the epoch."""
        # Each loader once: members may share one, and its batches then.
        by_id = {}
        for name in self.active:
            loader = self._members[name].loader
            by_id[id(loader)] = loader
        loaders = list(by_id.values())
        if not self.at.done:
            for loader in loaders:
                loader.set_epoch(self.at.epoch)
            self._window = _Window(self.active)
        for name in self.active:
            self._members[name].network.train()
        # Stale peers predict for batches, so these are made before the step and not in
        # it.
        streams: list[Iterable[DrawnStep | TowerBatch]] = []
        for loader in loaders:
            steps = getattr(loader, "steps", None)
            if callable(steps) and not self._peers:
                streams.append(steps())
            else:
                streams.append(loader)
        for items in zip(*streams, strict=True):
            item_of_loader = {
                id(loader): item for loader, item in zip(loaders, items, strict=True)
            }
            item_of_member = {
                name: item_of_loader[id(self._members[name].loader)]
                for name in self.active
            }
            if not self._train(self.at.epoch + 1, item_of_member, self._window):
                return
        self._end_of_epoch(self.at.epoch + 1)
        self.at.begin(self.at.epoch + 1)

    def restore_best(self) -> None:
        """Restores the weights of each member's best evaluation, if its early stop watched for it."""
        for name, member in self._members.items():
            steps = [
                record["step"]
                for record in self.history[name]
                if record["kind"] != "error"
            ]
            # A member that diverged keeps the weights at which it ended.
            if name not in self._best or len(steps) < len(self.history[name]):
                continue
            record = self._best[name].restore(
                self._watches[name], max(steps, default=0), member.checkpoints
            )
            if record is not None:
                self._log(name, record)

    def _restore(self) -> None:
        """Restores all members from their checkpoints, if there are any."""
        self._optimizer.begin()
        position_of = {}
        for name, checkpoints in self._active_checkpoints():
            position_of[name] = self._restore_one(name, checkpoints)
        finished = []
        for name, position in position_of.items():
            # The log of a resumed run begins with the records of the run before.
            for record in position.history:
                self._log(name, record)
            if is_over(position, self._members[name].train.epochs):
                finished.append(name)
        # A loader shared with a finished member now has that member's position: restore
        # the others once more.
        if finished:
            for name, checkpoints in self._active_checkpoints():
                if name not in finished:
                    position_of[name] = self._restore_one(name, checkpoints)
        if len(finished) == len(self.active):
            self._leave(finished)
            return
        positions = set()
        for name, position in position_of.items():
            if name not in finished:
                positions.add(
                    (position.epoch, position.done, position.step, position.ended)
                )
        if len(positions) > 1:
            steps = ", ".join(
                f"'{name}' at step {position.step}"
                for name, position in position_of.items()
            )
            raise StackError(
                f"the members' checkpoints stand apart: {steps}; give those of one step, as members step together"
            )
        ((epoch, done, step, ended),) = positions
        self.at = Position(epoch=epoch, done=done, step=step)
        self._optimizer.go_on(step)
        if ended:
            self.at.begin(epoch + 1)
        self._leave(finished)

    def _restore_one(self, name: str, checkpoints: RunCheckpoints) -> Position:
        run = self._as_run(name)
        # A checkpoint holds torch's random state, which for a member is that of its own
        # generator.
        with drawing_from(self._stack.generators[name]):
            at = checkpoints.restore(run)
        self._window.put(name, run.window.sums)
        self.history[name] = at.history
        return at

    def _active_checkpoints(self) -> list[tuple[str, RunCheckpoints]]:
        """The checkpoints of the remaining members, by name."""
        checkpoints_of = []
        for name in self.active:
            checkpoints = self._members[name].checkpoints
            if checkpoints is not None:
                checkpoints_of.append((name, checkpoints))
        return checkpoints_of

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
        for name, checkpoints in self._active_checkpoints():
            with drawing_from(self._stack.generators[name]):
                how(checkpoints, self._as_run(name))

    def _train(
        self, epoch: int, items: Mapping[str, DrawnStep | TowerBatch], window: _Window
    ) -> bool:
        """Makes one step of all members; False when no member is left."""
        losses = self._move(items)
        # A step with a diverged member has written nothing: the others take it again
        # without that member.
        while not losses.finite():
            self._drop_diverged(epoch, losses.loss)
            if not self.active:
                return False
            losses = self._move(items)
        self.at.step += 1
        self.at.done += 1
        window.add(self.active, losses)
        for name in self.active:
            config = self._members[name].train
            if self.at.step % config.log_every == 0 or self.at.done == self._steps:
                record = {
                    "kind": "train",
                    "epoch": epoch,
                    "step": self.at.step,
                    **window.take(name),
                }
                if config.tables_schedule.changes or config.dense_schedule.changes:
                    record |= self._optimizer.rates(name)
                self._keep(name, record)
        due = [
            checkpoints.due_after(self.at.step)
            for _, checkpoints in self._active_checkpoints()
        ]
        # Collecting a member's state takes as long as some steps: only when a
        # checkpoint is due.
        if self.at.done < self._steps and any(due):
            self._save(RunCheckpoints.after_step)
        if self._stop is not None and self._stop():
            self._end_here()
        return True

    def _end_here(self) -> None:
        where = f"step {self.at.step} of epoch {self.at.epoch + 1}"
        if not self._active_checkpoints():
            raise RunStoppedError(
                f"stopped by a signal after {where}; nothing was saved, since the run has no checkpoints"
            )
        self._save(RunCheckpoints.save)
        raise RunStoppedError(
            f"stopped by a signal after {where}, which is saved; go on with --resume auto"
        )

    def _move(self, items: Mapping[str, DrawnStep | TowerBatch]) -> Losses:
        assert self._step is not None, "members are left"
        batches = self._stack.joined([items[name] for name in self.active])
        peers = None
        if self._peers and not isinstance(batches, StackedSteps):
            peers = self._peers.logits(batches, self.at.step)
        return self._step(batches, peers=peers, weight=self._codistillation.weight)

    def _drop_diverged(self, epoch: int, losses: Tensor) -> None:
        diverged = []
        for name, loss in zip(self.active, losses.tolist(), strict=True):
            if math.isfinite(loss):
                continue
            diverged.append(name)
            message = (
                f"'{name}': the loss is {loss} at step {self.at.step + 1} of epoch {epoch}; nothing was written by "
                "this step, and the member ends; lower its optimizer.tables_lr or optimizer.dense_lr, or set "
                "optimizer.clip_norm"
            )
            self._keep(
                name,
                {
                    "kind": "error",
                    "epoch": epoch,
                    "step": self.at.step + 1,
                    "message": message,
                },
            )
        self._leave(diverged)

    def _end_of_epoch(self, epoch: int) -> None:
        ended = []
        best = []
        for name in self.active:
            config = self._members[name].train
            last = epoch == config.epochs
            if last:
                ended.append(name)
            if self._evaluate is None or not (last or epoch % config.eval_every == 0):
                continue
            self._members[name].network.eval()
            record = {
                "kind": "eval",
                "epoch": epoch,
                "step": self.at.step,
                **self._evaluate(name),
            }
            watch = self._watches[name]
            # Members that evaluate best so far keep their weights, for the end of their
            # run.
            if watch.see(record):
                best.append(name)
                record["best"] = True
                if config.early_stop.restore:
                    self._best[name].keep()
            self._keep(name, record)
            stop = watch.stops()
            if stop is not None and not last:
                self._keep(name, {"epoch": epoch, "step": self.at.step, **stop})
                ended.append(name)
        for name, checkpoints in self._active_checkpoints():
            with drawing_from(self._stack.generators[name]):
                checkpoints.after_epoch(
                    self._as_run(name, ended=True),
                    last=name in ended,
                    best=name in best,
                )
        self._leave(ended)

    def _leave(self, names: Iterable[str]) -> None:
        leaving = list(names)
        if not leaving:
            return
        if len(leaving) == len(self.active):
            if self._step is not None:
                self._step.finish()
            self._stack = None  # type: ignore[assignment]
            return
        self._stack = self._stack.without(leaving)
        self._optimizer = self._optimizer.kept(self._stack)
        self._peers = self._new_peers()
        self._step = self._new_step()

    def _keep(self, name: str, record: Record) -> None:
        self.history[name].append(record)
        self._log(name, record)


class _Window:
    """The mean loss and the rows of each member since its last record."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, (0.0, 0, 0))
        self._starts = dict.fromkeys(names, time.perf_counter())

    def sums(self, name: str) -> Tensor:
        """Returns a member's loss, steps and rows, (3,) float64, as a checkpoint keeps them."""
        return torch.tensor(self._sums[name], dtype=torch.float64)

    def put(self, name: str, sums: Tensor) -> None:
        """Restores a member's sums."""
        total, steps, rows = sums.tolist()
        self._sums[name] = total, int(steps), int(rows)

    def add(self, names: Sequence[str], losses: Losses) -> None:
        for name, loss, rows in zip(
            names, losses.loss.tolist(), losses.rows.tolist(), strict=True
        ):
            total, steps, counted = self._sums[name]
            self._sums[name] = total + loss, steps + 1, counted + rows

    def take(self, name: str) -> dict[str, Any]:
        (total, steps, rows) = self._sums[name]
        now = time.perf_counter()
        seconds = now - self._starts[name]
        self._starts[name] = now
        self._sums[name] = 0.0, 0, 0
        return {"loss": total / steps, "rows": rows, "rows_per_s": rows / seconds}


def _compile_of_all(members: Mapping[str, Member]) -> Compile:
    choices = {name: member.train.compile for name, member in members.items()}
    if (unlike := unlike_members(choices)) is not None:
        first, other = unlike
        raise StackError(
            f"train.compile is {choices[first]} in '{first}' and {choices[other]} in '{other}': members of a stack "
            "step together; give both the same"
        )
    return next(iter(choices.values()))
