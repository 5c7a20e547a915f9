"""Checkpointer: saves a state by torch's async_save, loads it under any plan, finds the last good checkpoint."""

from __future__ import annotations

import math
import shutil
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema.validation import check_least
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    Saved,
    check_shared,
    damage,
    newest_good,
    read_checkpoint,
)
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.state import (
    ModelState,
    Parts,
    SavePlanner,
    State,
    content_as_json,
)
from torchrec_ext.train.checkpoint.storage import (
    CheckpointError,
    Writer,
    cause,
    index_as_json,
)


class _Save(NamedTuple):
    """A save in flight: its step, and torch's future."""

    step: int
    future: Any


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank has one, and all ranks call each method together.

    A save copies the state of this rank and returns; torch writes it in a thread while the training goes on, over a
    process group of its own. One save is in flight at a time.

    Args:
        folder: folder of the checkpoints; on several hosts a shared one.
        runtime: rank and device of this process.
        keep: number of newest checkpoints to keep.

    Raises:
        CheckpointError: the folder cannot be written, another job writes it, or not all ranks see it.
    """

    def __init__(self, folder: str, runtime: Runtime, *, keep: int = 3) -> None:
        self.folder = CheckpointFolder(folder)
        self._runtime = runtime
        check_least("Checkpointer: keep", keep)
        self._keep = keep
        self.together = CheckpointRanks(runtime)
        self._running: _Save | None = None
        self._copies = _Copies()
        # The step that was loaded; newer checkpoints are of another future.
        self._begun: float = math.inf
        self._has_saved = False
        # The checkpoint whose files were compared with their digests last.
        self._good: str | None = None
        if runtime.world_size > 1 or self.folder.remote:
            check_shared(self.folder, self.together)
        self.together.on_main(self.folder.lock)

    def save(
        self,
        step: int,
        state: ModelState,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to save in the background, once the previous save has ended.

        Args:
            step: number of steps of the run so far.
            state: state of the model and its optimizers.
            content: what else :meth:`load` returns, such as the state of a loader: values that JSON holds, and tensors
                among them; the same on every rank.

        Raises:
            CheckpointError: the previous save has failed, on every rank alike.
            TypeError: a value of ``content`` is neither.
        """
        self.wait()
        tensors: State = {}
        own_content = content_as_json(content or {}, tensors)
        self.together.on_main(lambda: self._make_room(step))
        self._has_saved = True
        about = {
            "step": step,
            "world_size": self._runtime.world_size,
            "paths": state.paths,
            "content": own_content,
        }

        def seal(digests: dict[str, Any], index: Metadata) -> None:
            manifest = {**about, "tensors": index_as_json(index), "files": digests}
            self.folder.seal(step, manifest)
            self.folder.prune(self._keep)

        group = self.together.group
        future = dcp.async_save(
            {**state.everything(), **tensors},
            storage_writer=Writer(self.folder.path(step), seal),
            planner=SavePlanner(),
            process_group=group,
            async_stager=self._copies,
            no_dist=group is None,
        )
        assert isinstance(future, Future), "torch gives more for a stager of its own"
        future.add_done_callback(self._leave_if_lost)
        self._running = _Save(step, future)

    def _leave_if_lost(self, future: Future[Any]) -> None:
        """Leaves the group of a save in which a rank was lost.

        The others wait there for this one. A process waits at its end for the thread of its save, so they could not
        end, and this one may wait for them in a step.
        """
        error = future.exception()
        # A failure that all ranks know of is a CheckpointException.
        if isinstance(error, RuntimeError):
            # Their frames hold the group.
            traceback.clear_frames(error.__traceback__)
            self.together.leave()

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            CheckpointError: the save has failed, on every rank alike; the checkpoint before it is unchanged.
        """
        running = self._running
        self._running = None
        if running is None:
            return
        try:
            running.future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(self._explain_failure(running.step, error)) from None

    def close(self) -> None:
        """Waits for the save in flight, and lets other jobs write into the folder."""
        try:
            self.wait()
        finally:
            self._copies.close()
            self.folder.unlock()

    def mark_best(self, step: int) -> None:
        """Moves the mark of the best checkpoint to ``step``; the marked checkpoint is never pruned.

        It waits for the save in flight, so that the mark never names a checkpoint that is not complete.
        """
        self.wait()

        def mark() -> None:
            self.folder.mark_best(step)
            self.folder.prune(self._keep)

        self.together.on_main(mark)

    def last_good(self, say: Callable[[str], None] = print) -> str | None:
        """Returns the newest checkpoint without damage, the same on every rank; None if there is none.

        Collective: a rank that calls it alone waits for the others, and fails after 30 minutes.

        Args:
            say: called on rank 0 with a line for each newer, damaged checkpoint.
        """
        self.wait()
        self._good = newest_good(self.folder, self.together, say)
        return self._good

    def load(
        self,
        path: str,
        state: ModelState,
        *,
        partial: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint into ``state``, saved under any plan and number of ranks.

        The first save after it sets aside the checkpoints ahead of this one.

        Args:
            path: checkpoint; its files are compared with their digests before anything of them is read.
            state: state of the model and its optimizers, from :func:`model_state`.
            partial: whether the model may differ, see :class:`StartConfig`. New rows begin as row 0 of their table.

        Returns:
            The manifest: ``step``, ``world_size``, and the saved ``content``, among others.

        Raises:
            CheckpointError: the checkpoint is damaged, or was saved from another model; the first differences are
                named.
        """
        saved = self.verified(path)
        content, _ = load_checkpoint(saved, state, self.together, partial=partial)
        self._begun = saved.manifest["step"]
        self._has_saved = False
        return saved.manifest | {"content": content}

    def verified(self, path: str) -> Saved:
        """Returns a checkpoint after a check of its digests, unless :meth:`last_good` has just made it. Collective.

        Raises:
            CheckpointError: it is damaged.
        """
        self.wait()
        if path != self._good:
            wrong = damage(path, self.together)
            if wrong:
                raise CheckpointError(wrong)
        # Once: files may change later.
        self._good = None
        return read_checkpoint(path)

    def _make_room(self, step: int) -> None:
        # Later on none is ahead of the run.
        if not self._has_saved:
            line = self.folder.set_aside(min(step, self._begun))
            if line:
                print(line, flush=True)
        self.folder.begin(step)

    def _explain_failure(self, step: int, error: BaseException) -> str:
        first = cause(error)
        # Our own words need no others around them.
        if first.startswith(f"{CheckpointError.__name__}: "):
            return first.partition(": ")[2]
        # torch's text does not say it. An object store says nothing about its room.
        if not self.folder.remote and (
            # as torch's writer of zip files says it
            "unexpected pos" in first
            or shutil.disk_usage(self.folder.address).free < 2**20
        ):
            first = "no space is left; make room, or lower checkpoint.keep"
        before = "; the one before it is as it was" if self.folder.steps() else ""
        return f"checkpoint '{self.folder.path(step)}' could not be written: {first}{before}"


class _Copies(AsyncStager):
    """Copies a state into buffers of the host, which the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: the copy is complete when :meth:`stage` returns."""
        return False

    def synchronize_staging(self) -> None:
        """Does nothing, see :attr:`should_synchronize_after_execute`."""

    def close(self) -> None:
        """Gives the memory of the buffers back."""
        self._buffers.clear()

    @torch.no_grad()
    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the copies by the same names."""
        copies: dict[str, Any] = {}
        for name, value in state_dict.items():
            if isinstance(value, Parts):
                copies[name] = value.map(
                    lambda tensor, number, name=name: self._copy(
                        f"{name}/{number}", tensor
                    )
                )
            else:
                copies[name] = self._copy(name, value)
        return copies

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or buffer.shape != tensor.shape
            or buffer.dtype != tensor.dtype
        ):
            buffer = self._buffers[key] = torch.empty_like(
                tensor, device="cpu", memory_format=torch.contiguous_format
            )
        return buffer.copy_(tensor)
