"""train_stack(): the loop of a stack; each member has its own epochs, evaluations, early stop and end.

Member: one network of a stack and its training; its checkpoints are those of a network trained alone.

StalePeers: the predictions of an older copy of a stack, for codistillation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import DrawnStep, TowerBatch
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
            members,
            evaluate,
            log or (lambda name, record: None),
            codistillation or Codistillation(),
            stop or (lambda: False),
            say,
        )
        epochs = max(member.train.epochs for member in members.values())
        while run.active and run.at.epoch < epochs:
            run.epoch()
        for member_run in run.runs:
            record = member_run.restore_best()
            if record is not None and log is not None:
                log(member_run.name, record)
    finally:
        for member in members.values():
            if member.checkpoints is not None:
                member.checkpoints.close()
    return {member_run.name: member_run.at.history for member_run in run.runs}


class MemberWindow:
    """The mean loss and the rows of a member since its last record.

    Attributes:
        sums: loss, steps and rows, (3,) float64.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discards the sums."""
        self.sums = torch.zeros(3, dtype=torch.float64)
        self._start = time.perf_counter()

    def add(self, loss: float, rows: int) -> None:
        """Adds a step."""
        self.sums += self.sums.new_tensor([loss, 1, rows])

    def take(self) -> dict[str, Any]:
        """Returns the figures of a record, and restarts."""
        total, steps, rows = self.sums.tolist()
        seconds = time.perf_counter() - self._start
        self.restart()
        return {"loss": total / steps, "rows": int(rows), "rows_per_s": rows / seconds}


class MemberRun:
    """One member as a run of its own, for :class:`RunCheckpoints` to save and restore.

    Args:
        name: name of the member.
        member: its network and its training.

    Attributes:
        optimizer: the member's part of the stack's optimizer, see :func:`optimizer_of`; set for each save.
        watch: state of its early stop.
        best: weights of its best evaluation, if the early stop watches a figure.
        window: sums of its next record.
        at: its records so far, and for each save its position.
        runtime: runtime of one rank, because other ranks have other members.
    """

    optimizer: KeyedOptimizer

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self.member = member
        self.model = member.network
        self.loader = member.loader
        self.runtime = Runtime()
        self.watch = EarlyStopWatch(member.train.early_stop, self.runtime)
        self.best: BestWeights | None = None
        if member.train.early_stop.metric:
            self.best = BestWeights(member.network)
        self.window = MemberWindow()
        self.at = Position()

    def settle(self) -> None:
        """Does nothing, since a stack defers no work."""

    def restore_best(self) -> Record | None:
        """Restores the weights of the best evaluation if the early stop watched for it; returns the record of that."""
        history = self.at.history
        # A member that diverged keeps the weights at which it ended.
        if self.best is None or any(record["kind"] == "error" for record in history):
            return None
        last = max((record["step"] for record in history), default=0)
        return self.best.restore(self.watch, last, self.member.checkpoints)


class _Run:
    """The state of one call of :func:`train_stack`: its members, those that are left, and their position."""

    def __init__(
        self,
        members: Mapping[str, Member],
        evaluate: Callable[[str], Record] | None,
        log: Callable[[str, Record], None],
        codistillation: Codistillation,
        stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._evaluate = evaluate
        self._log = log
        self._stop = stop
        self._say = say
        self._codistillation = codistillation
        _check_alike(members)
        self.runs = [MemberRun(name, member) for name, member in members.items()]
        self.active = self.runs
        self._steps = len(self.runs[0].loader)
        networks = {}
        seeds = {}
        optimizers = {}
        schedules = {}
        total_steps = {}
        for name, member in members.items():
            networks[name] = member.network
            seeds[name] = member.seed
            optimizers[name] = member.optimizer
            schedules[name] = member.train.tables_schedule, member.train.dense_schedule
            total_steps[name] = member.train.epochs * self._steps
        self._stack = Stack(networks, seeds=seeds)
        self._optimizer = StackedOptimizer(
            self._stack, optimizers, schedules=schedules, steps=total_steps
        )
        self._peers: StalePeers | None = None
        self._step: StackSteps | None = None
        self.at = Position()
        if any(member.checkpoints is not None for member in members.values()):
            self._resume()
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Begins to step the members that are left, from this position on."""
        if not self.active:
            return
        self._peers = None
        # The last member has no peers left to learn from.
        if self._codistillation.weight and len(self.active) > 1:
            self._peers = StalePeers(self._stack, self._codistillation)
        epochs = max(run.member.train.epochs for run in self.active)
        self._step = StackSteps(
            self._stack,
            self._optimizer,
            compile=self.active[0].member.train.compile,
            done=self.at.step,
            total=self._steps * epochs,
            say=self._say,
        )

    def epoch(self) -> None:
        """Trains the rest of the epoch."""
        # Each loader once: members may share one, and its batches then.
        loaders = {id(run.loader): run.loader for run in self.active}
        if not self.at.done:
            for loader in loaders.values():
                loader.set_epoch(self.at.epoch)
            for run in self.active:
                run.window.restart()
        for run in self.active:
            run.model.train()
        # Stale peers predict for batches, so these are made before the step and not in
        # it.
        streams: list[Iterable[DrawnStep | TowerBatch]] = []
        for loader in loaders.values():
            steps = getattr(loader, "steps", None)
            if callable(steps) and not self._peers:
                streams.append(steps())
            else:
                streams.append(loader)
        for items in zip(*streams, strict=True):
            self._train(dict(zip(loaders, items, strict=True)))
            if not self.active:
                return
        self._end_of_epoch()
        self.at.begin(self.at.epoch + 1)

    def _resume(self) -> None:
        """Restores all members from their checkpoints, if there are any."""
        self._optimizer.begin()
        saved = self._on_checkpoints(_restore)
        finished = []
        for run in saved:
            # The log of a resumed run begins with the records of the run before.
            for record in run.at.history:
                self._log(run.name, record)
            if is_over(run.at, run.member.train.epochs):
                finished.append(run)
        # A loader shared with a finished member now has that member's position: restore
        # the others once more.
        if finished:
            self._on_checkpoints(_restore, without=finished)
        positions = []
        for run in saved:
            if run not in finished:
                positions.append(dataclasses.replace(run.at, history=[]))
        if positions:
            self.at = positions[0]
            if any(position != self.at for position in positions):
                steps = ", ".join(
                    f"'{run.name}' at step {run.at.step}" for run in saved
                )
                raise StackError(
                    f"the members' checkpoints stand apart: {steps}; give those of one step, as members step together"
                )
            self._optimizer.go_on(self.at.step)
            if self.at.ended:
                self.at.begin(self.at.epoch + 1)
        self._leave(finished)

    def _on_checkpoints(
        self,
        call: Callable[[RunCheckpoints, MemberRun], None],
        *,
        ended: bool = False,
        without: Collection[MemberRun] = (),
    ) -> list[MemberRun]:
        """Calls for each remaining member that has checkpoints, as a run of its own; returns these members."""
        called = []
        for run in self.active:
            checkpoints = run.member.checkpoints
            if checkpoints is None or run in without:
                continue
            run.optimizer = optimizer_of(self._stack, self._optimizer, run.name)
            run.at = dataclasses.replace(self.at, ended=ended, history=run.at.history)
            # A checkpoint holds torch's random state, which for a member is that of its
            # own generator.
            with drawing_from(self._stack.generators[run.name]):
                call(checkpoints, run)
            called.append(run)
        return called

    def _train(self, items: Mapping[int, DrawnStep | TowerBatch]) -> None:
        """Makes one step of all members, on ``items`` by the id of their loader."""
        losses = self._move(items)
        # A step with a diverged member has written nothing: the others take it again
        # without that member.
        while not losses.finite():
            self._drop_diverged(losses.loss)
            if not self.active:
                return
            losses = self._move(items)
        self.at.step += 1
        self.at.done += 1
        is_due = False
        for run, loss, rows in zip(
            self.active, losses.loss.tolist(), losses.rows.tolist(), strict=True
        ):
            run.window.add(loss, rows)
            config = run.member.train
            if self.at.step % config.log_every == 0 or self.at.done == self._steps:
                record = self._stamped("train", **run.window.take())
                if config.tables_schedule.changes or config.dense_schedule.changes:
                    record |= self._optimizer.rates(run.name)
                self._keep(run, record)
            checkpoints = run.member.checkpoints
            if checkpoints is not None and checkpoints.due_after(self.at.step):
                is_due = True
        # Collecting a member's state takes as long as some steps: only when a
        # checkpoint is due.
        if self.at.done < self._steps and is_due:
            self._on_checkpoints(RunCheckpoints.after_step)
        if self._stop():
            self._end_here()

    def _end_here(self) -> None:
        saved = bool(self._on_checkpoints(RunCheckpoints.save))
        where = f"after step {self.at.step} of epoch {self.at.epoch + 1}"
        raise RunStoppedError.at(where, saved=saved)

    def _move(self, items: Mapping[int, DrawnStep | TowerBatch]) -> Losses:
        assert self._step is not None, "members are left"
        batches = self._stack.joined([items[id(run.loader)] for run in self.active])
        peers = None
        if self._peers and not isinstance(batches, StackedSteps):
            peers = self._peers.logits(batches, self.at.step)
        return self._step(batches, peers=peers, weight=self._codistillation.weight)

    def _drop_diverged(self, losses: Tensor) -> None:
        diverged = []
        step = self.at.step + 1
        for run, loss in zip(self.active, losses.tolist(), strict=True):
            if math.isfinite(loss):
                continue
            diverged.append(run)
            message = (
                f"'{run.name}': the loss is {loss} at step {step} of epoch {self.at.epoch + 1}; nothing was written by "
                "this step, and the member ends; lower its optimizer.tables_lr or optimizer.dense_lr, or set "
                "optimizer.clip_norm"
            )
            self._keep(run, self._stamped("error", message=message) | {"step": step})
        self._leave(diverged)

    def _end_of_epoch(self) -> None:
        epoch = self.at.epoch + 1
        ended = []
        best = []
        for run in self.active:
            config = run.member.train
            last = epoch == config.epochs
            if last:
                ended.append(run)
            if self._evaluate is None or not (last or epoch % config.eval_every == 0):
                continue
            run.model.eval()
            record = self._stamped("eval", **self._evaluate(run.name))
            # Members that evaluate best so far keep their weights, for the end of their
            # run.
            if run.watch.see(record):
                best.append(run)
                record["best"] = True
                if config.early_stop.restore and run.best is not None:
                    run.best.keep()
            self._keep(run, record)
            stop = run.watch.stops()
            if stop is not None and not last:
                self._keep(run, self._stamped(**stop))
                ended.append(run)

        def save(checkpoints: RunCheckpoints, run: MemberRun) -> None:
            checkpoints.after_epoch(run, last=run in ended, best=run in best)

        self._on_checkpoints(save, ended=True)
        self._leave(ended)

    def _leave(self, leaving: Collection[MemberRun]) -> None:
        if not leaving:
            return
        self.active = [run for run in self.active if run not in leaving]
        if self.active:
            self._stack = self._stack.without([run.name for run in leaving])
            self._optimizer = self._optimizer.kept(self._stack)
            self._begin_steps()
        elif self._step is not None:
            self._step.finish()

    def _stamped(self, kind: str, **figures: Any) -> Record:
        """Returns a record of this moment."""
        now = {"kind": kind, "epoch": self.at.epoch + 1, "step": self.at.step}
        return now | figures

    def _keep(self, run: MemberRun, record: Record) -> None:
        run.at.history.append(record)
        self._log(run.name, record)


def _restore(checkpoints: RunCheckpoints, run: MemberRun) -> None:
    run.at = checkpoints.restore(run)


def _check_alike(members: Mapping[str, Member]) -> None:
    """Checks that members have equally many steps, and compile alike, since they step together."""
    steps = {name: len(member.loader) for name, member in members.items()}
    if (unlike := unlike_members(steps)) is not None:
        first, other = unlike
        raise StackError(
            f"'{first}' has {steps[first]} steps an epoch and '{other}' {steps[other]}: members of a stack step "
            "together; give both the same rows and loader.batch_size, or train them beside each other"
        )
    choices = {name: member.train.compile for name, member in members.items()}
    if (unlike := unlike_members(choices)) is not None:
        first, other = unlike
        raise StackError(
            f"train.compile is {choices[first]} in '{first}' and {choices[other]} in '{other}': members of a stack "
            "step together; give both the same"
        )
