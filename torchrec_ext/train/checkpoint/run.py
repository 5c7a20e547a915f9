"""RunCheckpoints: saves and restores a run, so that it goes on as if it had never stopped.

Records are the log's, and a checkpoint holds their number alone, so its size does not grow with the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import ResumableLoader
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.sealed import package_versions
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.config import CheckpointConfig as CheckpointConfig
from torchrec_ext.train.checkpoint.config import StartConfig as StartConfig
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    read_checkpoint,
)
from torchrec_ext.train.checkpoint.load import (
    empty_tensors,
    load_checkpoint,
    load_tensors,
)
from torchrec_ext.train.checkpoint.state import State, model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.report.progress import Window

# Key that stands for a tensor in a JSON state; no loader has such a key.
_TENSOR_KEY = "a tensor of the checkpoint"
# Beginning of the names of a loader's tensors.
_LOADER = "loader."


@dataclass
class Position:
    """The position of a run: ``done`` steps of ``epoch``, ``step`` steps in all.

    Args:
        epoch: counted from 0.
        done: number of steps of this epoch so far.
        step: number of steps of the run so far.
        ended: whether the epoch has been evaluated, so that the next one begins.
        records: number of records so far.
    """

    epoch: int = 0
    done: int = 0
    step: int = 0
    ended: bool = False
    records: int = 0

    def begin(self, epoch: int) -> None:
        """Moves to the first step of ``epoch``."""
        self.epoch = epoch
        self.done = 0
        self.ended = False


class DynamicLoader(Protocol):
    """A loader with dynamic ids, such as a DynamicIdLoader."""

    def load_ids(self, state: Mapping[str, Any]) -> None:
        """Continues with the ids of a loader's state."""

    def load_vocabularies(self) -> None:
        """Begins with the rows that ids have in vocabularies."""


@runtime_checkable
class ResumableObserver(Protocol):
    """An observer of steps whose sums since the last record go on after a resume; they are equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, for JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with sums of :meth:`state_dict`."""


class CheckpointedRun(Protocol):
    """The parts of a run saved in a checkpoint."""

    model: nn.Module
    optimizer: KeyedOptimizer
    runtime: Runtime
    at: Position

    def settle(self) -> None:
        """Completes deferred work, so that the state is equal on all ranks and safe to save; all ranks call it."""

    @property
    def loader(self) -> Any:
        """The loader of the training batches."""

    @property
    def watch(self) -> EarlyStopWatch:
        """The state of early stopping."""

    @property
    def window(self) -> Window:
        """The sums of the next record."""

    @property
    def observer(self) -> Any:
        """The observer of the steps, a :class:`ResumableObserver` if it has sums; None without one."""


class RunCheckpoints:
    """Saves a run by the settings in ``config``, and restores it.

    A resumed run equals the uninterrupted one sample for sample, and on the same plan and ranks bit for bit. A
    checkpoint holds weights, optimizer rows and counts, the loader's position, the random states of each rank
    (dropout) and early stopping; schedules follow from the step. On another number of ranks each rank draws
    new dropout, and the current record is completed.

    Three things are not equal bit for bit:

    - Captured and compiled steps (``train.compile``) equal eager ones to rounding, and a resumed run makes its first
      steps eager.
    - Under local SGD and DiLoCo all ranks take the first step after a resume together, with rank 0's optimizer state on
      every rank and no outer momentum.
    - On three ranks or more, with over 1 MiB of dense gradients, that step is rounded differently, see
      :func:`settle_buckets`.

    Args:
        checkpointer: writes and reads the checkpoints.
        config: epochs and steps between two checkpoints.
        resume: path of the checkpoint to begin from; None starts a new run.
        about: further entries of the manifest, ready for JSON, such as the job's settings.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        *,
        resume: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._resume = resume
        self._about = about or {}
        self._last_saved_step: int | None = None

    @property
    def saves(self) -> bool:
        """Whether anything is saved, the best evaluation included."""
        return self._config.saves

    def last_good(self) -> str:
        """Returns the newest checkpoint of the run's folder, after the save in flight; empty without one."""
        # A save that has failed is of the step that went wrong.
        with suppress(CheckpointError):
            self._checkpointer.wait()
        folder = self._checkpointer.folder
        return next(map(folder.path, folder.steps()), "")

    def restore(self, run: CheckpointedRun) -> Position:
        """Loads the checkpoint to begin from, if there is one, and returns the position of the run.

        Raises:
            CheckpointError: the checkpoint was saved from another model.
            ValueError: the loader cannot resume, or data or batch size have changed.
        """
        if not isinstance(run.loader, ResumableLoader):
            raise ValueError(
                "checkpoints need a loader with state_dict(step=) and load_state_dict(), and "
                f"a {type(run.loader).__name__} lacks them"
            )
        if self._resume is None:
            return Position()
        checkpointer = self._checkpointer
        index = checkpointer.verified(self._resume).index
        sums = [
            name
            for name in index.state_dict_metadata
            if name.startswith("rank.") and name.endswith(".sums")
        ]
        prefixes = [_LOADER, f"rank.{run.runtime.rank}."]
        # Another number of ranks shares all sums, see _share_sums().
        if len(sums) != run.runtime.world_size:
            prefixes += sums
        extra = empty_tensors(index, prefixes)
        saved = checkpointer.load(
            self._resume, model_state(run.model, run.optimizer), extra
        )
        content = saved["content"]
        position = Position(**content["position"])
        run.watch.load_state_dict(content["watch"])
        # Checkpoints of earlier releases lack the observer's sums.
        if isinstance(run.observer, ResumableObserver) and "observer" in content:
            run.observer.load_state_dict(content["observer"])
        if saved["world_size"] == run.runtime.world_size:
            _restore_rank(extra, run)
        elif sums:
            _share_sums([extra[name] for name in sums], run)
        try:
            run.loader.load_state_dict(_with_tensors(content["loader"], extra))
        # The rest of the epoch would have other samples than the missing ones.
        except ValueError as error:
            raise ValueError(f"checkpoint '{self._resume}': {error}") from None
        # Resumed in its own folder, the run need not save this step again; in another
        # folder it must.
        if _parent(self._resume) == checkpointer.folder.address:
            self._last_saved_step = position.step
            checkpointer.together.on_main(
                lambda: _mark_again(checkpointer.folder, content["watch"]["best"])
            )
        return position

    def after_step(self, run: CheckpointedRun) -> None:
        """Saves a checkpoint if one is due after this step."""
        if _is_due(run.at.step, self._config.steps):
            self.save(run)

    def before_evaluation(self, run: CheckpointedRun, *, last: bool) -> None:
        """Saves if a checkpoint is due or in the ``last`` epoch, because an evaluation may take long and be stopped.

        A run resumed from here evaluates first.
        """
        self._save_if_due(run, wanted=last)

    def after_epoch(self, run: CheckpointedRun, *, last: bool, best: bool) -> None:
        """Saves if a checkpoint is due, or after the ``last`` epoch; marks it if it is the ``best`` so far.

        A checkpoint saved before the evaluation is not saved again: a run that goes on from it evaluates once more.
        """
        if self._save_if_due(run, wanted=last or best) and best:
            self._checkpointer.mark_best(run.at.step, run.watch.best or {})

    def _save_if_due(self, run: CheckpointedRun, *, wanted: bool) -> bool:
        config = self._config
        saves = _is_due(run.at.epoch + 1, config.epochs) or _is_due(
            run.at.step, config.steps
        )
        saves |= config.saves and wanted
        if saves:
            self.save(run)
        return saves

    def load_weights(self, model: nn.Module, step: int) -> bool:
        """Loads the weights saved after ``step`` if they still exist; returns whether they do; all ranks call it.

        Args:
            model: model from :func:`hybrid_parallel`, or unsharded.
            step: step of a checkpoint in the run's folder, or in the folder that the run was resumed from.
        """
        checkpointer = self._checkpointer
        checkpointer.wait()
        together = checkpointer.together
        roots = [checkpointer.folder.address]
        if self._resume:
            roots.append(_parent(self._resume))
        for root in roots:
            folder = CheckpointFolder(root)
            if step not in together.on_main(folder.steps):
                continue
            # On all ranks alike.
            with suppress(CheckpointError):
                saved = checkpointer.verified(folder.path(step))
                # Without the optimizer, whose state has no use after the end of a run.
                load_tensors(saved, model_state(model).tensors, together.group)
                return True
        return False

    def save(self, run: CheckpointedRun) -> None:
        """Begins to save in the background, unless this step is saved already."""
        if self._last_saved_step == run.at.step:
            return
        run.settle()
        extra = _state_of_rank(run)
        content = {
            **self._about,
            "versions": package_versions(),
            "position": vars(run.at),
            "watch": run.watch.state_dict(),
            "loader": _without_tensors(run.loader.state_dict(step=run.at.done), extra),
        }
        if isinstance(run.observer, ResumableObserver):
            content["observer"] = run.observer.state_dict()
        self._checkpointer.save(
            run.at.step, model_state(run.model, run.optimizer), extra, content
        )
        self._last_saved_step = run.at.step

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._checkpointer.close()


def load_with_loader(
    path: str, model: nn.Module, optimizer: KeyedOptimizer, together: CheckpointRanks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads a checkpoint into a model; returns its manifest, and the state of the run's loader. Collective."""
    saved = read_checkpoint(path)
    tensors = empty_tensors(saved.index, [_LOADER])
    load_checkpoint(saved, model_state(model, optimizer), together, tensors)
    loader = _with_tensors(saved.manifest["content"]["loader"], tensors)
    return saved.manifest, loader


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _mark_again(folder: CheckpointFolder, best: Mapping[str, Any] | None) -> None:
    """Moves the mark to the best evaluation of a run that goes on, which a later one may have had."""
    mark = best and {"step": best["best_step"], **best}
    if folder.best() != mark:
        folder.mark_best(mark)


def _parent(path: str) -> str:
    """Returns the folder of a checkpoint."""
    return path.rstrip("/").rpartition("/")[0]


def _state_of_rank(run: CheckpointedRun) -> State:
    """Returns this rank's state: the random states for dropout, and the sums of the next record."""
    states = {"cpu": torch.get_rng_state(), "sums": run.window.sums}
    if run.runtime.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(run.runtime.device)
    return {f"rank.{run.runtime.rank}.{name}": value for name, value in states.items()}


def _restore_rank(states: State, run: CheckpointedRun) -> None:
    prefix = f"rank.{run.runtime.rank}."
    torch.set_rng_state(states[f"{prefix}cpu"])  # type: ignore[arg-type]
    run.window.sums.copy_(states[f"{prefix}sums"])  # type: ignore[arg-type]
    # A run saved on a GPU may go on without one, and the other way round.
    cuda = states.get(f"{prefix}cuda")
    if cuda is not None and run.runtime.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, run.runtime.device)  # type: ignore[arg-type]


def _share_sums(by_rank: Sequence[Any], run: CheckpointedRun) -> None:
    """Continues the next record with the sums of another number of ranks, so that no row is lost."""
    saved = torch.stack([sums.cpu() for sums in by_rank])
    # A record takes the mean of the ranks' losses and steps, and adds up their rows.
    shared = torch.cat([saved[:, :2].mean(0), saved[:, 2:].sum(0)])
    if run.runtime.rank > 0:
        shared[2] = 0
    run.window.sums.copy_(shared)


def _without_tensors(state: Any, tensors: State) -> Any:
    """Makes a loader's state ready for JSON: moves its tensors to ``tensors``."""

    def moved(tensor: Tensor) -> dict[str, str]:
        name = f"{_LOADER}{len(tensors)}"
        tensors[name] = tensor
        return {_TENSOR_KEY: name}

    return json.loads(json.dumps(state, default=moved))


def _with_tensors(state: Any, tensors: State) -> Any:
    def put_back(values: dict[str, Any]) -> Any:
        return tensors[values[_TENSOR_KEY]] if _TENSOR_KEY in values else values

    return json.loads(json.dumps(state), object_hook=put_back)


def begin_with(
    path: str,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    together: CheckpointRanks,
    config: StartConfig,
    cold: Mapping[str, int],
    loader: DynamicLoader | None = None,
) -> str:
    """Loads the checkpoint at ``path``; returns a text about differences to the model; all ranks call it.

    Args:
        path: checkpoint without damage.
        model: model from :func:`hybrid_parallel`.
        optimizer: optimizer from :func:`hybrid_parallel`.
        together: the ranks that load.
        config: whether the model may differ.
        cold: row of each table for unseen ids.
        loader: loader whose dynamic ids go on with those of the checkpoint, or with its vocabularies; None without.
    """
    saved = read_checkpoint(path)
    tensors = {} if loader is None else empty_tensors(saved.index, [_LOADER])
    matched = load_checkpoint(
        saved,
        model_state(model, optimizer),
        together,
        tensors,
        partial=config.partial,
        cold=cold,
    )
    if loader is not None:
        state = _with_tensors(saved.manifest["content"]["loader"], tensors)
        if "ids" in state:
            loader.load_ids(state)
        else:
            loader.load_vocabularies()
    lines = [
        f"begun with the weights of {path}, after {saved.manifest['step']:,} steps"
    ]
    for name, rows in matched.grown.items():
        lines.append(
            f"table '{name}' had {rows:,} rows, the others begin as row {cold.get(name, 0)}"
        )
    # A table with other rows has a line already.
    prefixes = tuple(f"tables.{name}." for name in matched.grown)
    lines += [line for line in matched.said if not line.startswith(prefixes)]
    return "\n".join(lines)
