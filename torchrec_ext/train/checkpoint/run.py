"""RunCheckpoints: saves and restores a run, so that it goes on as if it had never stopped.

Records are the log's, and a checkpoint holds their number alone, so its size does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import ResumableLoader
from torchrec_ext.distributed.runtime import gather_objects
from torchrec_ext.sealed import package_versions
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.config import CheckpointConfig as CheckpointConfig
from torchrec_ext.train.checkpoint.config import StartConfig as StartConfig
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    read_checkpoint,
)
from torchrec_ext.train.checkpoint.load import load_checkpoint, load_tensors
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError

if TYPE_CHECKING:
    from torchrec_ext.train.loop import TrainingRun


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
        resume: path of the checkpoint to begin from, in the checkpointer's folder; None starts a new run.
        about: further entries of the manifest, ready for JSON, such as the job's settings.

    Raises:
        ValueError: ``resume`` is in another folder.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        *,
        resume: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        folder = checkpointer.folder.address
        # Of a path, absolute or not, and whatever its last slash.
        if resume is not None and (
            CheckpointFolder(resume.rstrip("/").rpartition("/")[0]).address != folder
        ):
            raise ValueError(
                f"resume={resume[:60]!r}: a run goes on in its own folder, {folder[-60:]}; a new one takes begin_with"
            )
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

    def restore(self, run: TrainingRun) -> Position:
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
        state = model_state(run.model, run.optimizer)
        content = checkpointer.load(self._resume, state)["content"]
        position = Position(**content["position"])
        run.watch.load_state_dict(content["watch"])
        if content["observer"] and hasattr(run.observer, "load_state_dict"):
            run.observer.load_state_dict(content["observer"])
        _restore_rank(content["ranks"], run)
        try:
            run.loader.load_state_dict(content["loader"])
        # The rest of the epoch would have other samples than the missing ones.
        except ValueError as error:
            raise ValueError(f"checkpoint '{self._resume}': {error}") from None
        self._last_saved_step = position.step
        checkpointer.together.on_main(
            lambda: _mark_again(checkpointer.folder, content["watch"]["best"])
        )
        return position

    def after_step(self, run: TrainingRun) -> None:
        """Saves a checkpoint if one is due after this step."""
        if _is_due(run.at.step, self._config.steps):
            self.save(run)

    def before_evaluation(self, run: TrainingRun, *, last: bool) -> None:
        """Saves if a checkpoint is due or in the ``last`` epoch, because an evaluation may take long and be stopped.

        A run resumed from here evaluates first.
        """
        self._save_if_due(run, wanted=last)

    def after_epoch(self, run: TrainingRun, *, last: bool, best: bool) -> None:
        """Saves if a checkpoint is due, or after the ``last`` epoch; marks it if it is the ``best`` so far.

        A checkpoint saved before the evaluation is not saved again: a run that goes on from it evaluates once more.
        """
        if self._save_if_due(run, wanted=last or best) and best:
            self._checkpointer.mark_best(run.at.step)

    def _save_if_due(self, run: TrainingRun, *, wanted: bool) -> bool:
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
            step: step of a checkpoint.
        """
        checkpointer = self._checkpointer
        checkpointer.wait()
        together, folder = checkpointer.together, checkpointer.folder
        if step not in together.on_main(folder.steps):
            return False
        # On all ranks alike.
        with suppress(CheckpointError):
            saved = checkpointer.verified(folder.path(step))
            # Without the optimizer, whose state has no use after the end of a run.
            load_tensors(saved, model_state(model).tensors, together.group)
            return True
        return False

    def save(self, run: TrainingRun) -> None:
        """Begins to save in the background, unless this step is saved already."""
        if self._last_saved_step == run.at.step:
            return
        run.settle()
        observer = None
        if hasattr(run.observer, "state_dict"):
            observer = run.observer.state_dict()
        content = {
            **self._about,
            "versions": package_versions(),
            "position": vars(run.at),
            "watch": run.watch.state_dict(),
            "observer": observer,
            "loader": run.loader.state_dict(step=run.at.done),
            "ranks": gather_objects(_state_of_rank(run), run.runtime.world_size),
        }
        self._checkpointer.save(
            run.at.step, model_state(run.model, run.optimizer), content
        )
        self._last_saved_step = run.at.step

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._checkpointer.close()


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _mark_again(folder: CheckpointFolder, best: Mapping[str, Any] | None) -> None:
    """Moves the mark back to the best evaluation before the step where a run goes on."""
    step = best["best_step"] if best else None
    if folder.best() != step:
        folder.mark_best(step)


def _state_of_rank(run: TrainingRun) -> dict[str, Any]:
    """Returns this rank's state: the random states for dropout, and the sums of the next record."""
    state = {"cpu": torch.get_rng_state(), "sums": run.window.sums.cpu()}
    if run.runtime.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(run.runtime.device)
    return state


def _restore_rank(saved: Sequence[Mapping[str, Tensor]], run: TrainingRun) -> None:
    """Restores this rank's state, given those of all ranks; another number of them shares the sums alone."""
    runtime = run.runtime
    sums = torch.stack([state["sums"] for state in saved])
    if len(saved) == runtime.world_size:
        own = saved[runtime.rank]
        torch.set_rng_state(own["cpu"])
        # A run saved on a GPU may go on without one, and the other way round.
        if "cuda" in own and runtime.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], runtime.device)
        sums = sums[runtime.rank]
    else:
        # A record takes the mean of the ranks' losses and steps, and adds up their
        # rows: no row is lost.
        sums = torch.cat([sums[:, :2].mean(0), sums[:, 2:].sum(0)])
        if runtime.rank > 0:
            sums[2] = 0
    run.window.sums.copy_(sums)


def begin_with(
    path: str,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    together: CheckpointRanks,
    config: StartConfig,
    cold: Mapping[str, int],
    loader: Any = None,
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
    content, matched = load_checkpoint(
        saved,
        model_state(model, optimizer),
        together,
        partial=config.partial,
        cold=cold,
    )
    if loader is not None:
        loader.load_ids(content["loader"])
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
