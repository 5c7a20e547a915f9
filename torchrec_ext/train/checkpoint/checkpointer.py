"""Checkpointer: saves a state while the training goes on, loads it under any plan, finds the last good checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_ext.distributed.plan.explain import size_text
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.sealed import yield_to_others
from torchrec_ext.train.checkpoint import folder as manifest
from torchrec_ext.train.checkpoint.config import Change
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    check_shared,
    newest_good,
)
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.state import ModelState, Parts, SavePlanner, State
from torchrec_ext.train.checkpoint.storage import CheckpointError, cause, writer


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank has one, and all ranks call each method together.

    A save copies the state of this rank and returns; a thread writes it while the training goes on, over a process
    group of its own. One save is in flight at a time.

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
        self._keep = keep
        self.together = CheckpointRanks(runtime)
        # One thread, because the ranks' collectives over the group of checkpoints must
        # come in one order.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=yield_to_others
        )
        self._running: Future[None] | None = None
        self._copies: dict[str, Any] = {}
        # Step and digest of the previous checkpoint.
        self._parent: dict[str, Any] | None = None
        if runtime.world_size > 1 or self.folder.remote:
            check_shared(folder, runtime.rank, self.together.gathered)
        self.together.on_main(self.folder.lock)

    def save(
        self,
        step: int,
        state: ModelState,
        extra: State | None = None,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to save in the background, once the previous save has ended.

        Args:
            step: number of steps of the run so far.
            state: state of the model and its optimizers.
            extra: further tensors by name, such as random states; a name belongs to one rank, or is equal on all.
            content: further entries of the manifest, ready for JSON, the same on every rank.

        Raises:
            CheckpointError: the previous save has failed, on every rank alike.
        """
        self.wait()
        copies = self._copy_state({**state.everything(), **(extra or {})})
        content = {
            "step": step,
            "world_size": self._runtime.world_size,
            "tables": state.tables,
            "paths": state.paths,
            # A copy, because it is written while the run goes on.
            "content": json.loads(json.dumps(content or {})),
            **self._gather_layout(state),
        }
        self._running = self._thread.submit(self._write, step, copies, content)

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            CheckpointError: the save has failed, on every rank alike; the checkpoint before it is unchanged.
        """
        running = self._running
        self._running = None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits for the save in flight, ends the thread, and lets other jobs write into the folder."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.folder.unlock()

    def mark_best(self, step: int, figures: Mapping[str, Any]) -> None:
        """Moves the mark of the best checkpoint to ``step``; the marked checkpoint is never pruned."""
        # The mark waits in the same thread for the save, so that it never names a
        # checkpoint that is not complete.
        save_in_flight = self._running

        def mark() -> None:
            if save_in_flight is not None:
                # It raises if the save has failed, so that the previous mark stays.
                save_in_flight.result()
            self.together.on_main(lambda: self._mark_best_now(step, figures))

        self._running = self._thread.submit(mark)

    def _mark_best_now(self, step: int, figures: Mapping[str, Any]) -> None:
        self.folder.note("best.json", {"step": step, **figures})
        self.folder.prune(self._keep, [step])

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a small file next to the checkpoints, on rank 0 only."""
        if self._runtime.is_main:
            self.folder.note(name, content)

    def last_good(self, say: Callable[[str], None] = print) -> str | None:
        """Returns the newest checkpoint without damage, the same on every rank; None if there is none.

        Collective: a rank that calls it alone waits for the others, and fails after 30 minutes.

        Args:
            say: called on rank 0 with a line for each newer, damaged checkpoint.
        """
        return newest_good(self.folder, self.together, say)

    def load(
        self,
        path: str,
        state: ModelState,
        extra: State | None = None,
        *,
        allow: Sequence[Change] = (),
    ) -> dict[str, Any]:
        """Loads a checkpoint into ``state`` and ``extra``, saved under any plan and number of ranks.

        Args:
            path: checkpoint, as :meth:`last_good` returns it.
            state: state of the model and its optimizers, from :func:`model_state`.
            extra: further tensors to load; names without a saved tensor are left unchanged.
            allow: differences to allow between the model and the checkpoint, see :class:`StartConfig`. New rows of
                ``more_rows`` begin as row 0 of their table.

        Returns:
            The manifest: ``step``, ``world_size``, ``tables``, and the saved ``content``, among others.

        Raises:
            CheckpointError: the checkpoint was saved from another model; the first differences are named.
        """
        return load_checkpoint(path, state, self.together, extra, allow=allow)[0]

    def branch(
        self,
        saved: Mapping[str, Any],
        best: Mapping[str, Any] | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Sets aside the checkpoints ahead of the loaded one, and makes that the parent of the next save.

        Args:
            saved: the checkpoint's manifest, as :meth:`load` returns it.
            best: figures and ``best_step`` of the best evaluation in the loaded run, or None.
            say: called on rank 0 with a line if something was set aside.
        """
        self._parent = {
            "step": saved["step"],
            "sha256": manifest.manifest_digest(saved),
        }
        line = self.together.on_main(lambda: self._set_aside(saved["step"], best))
        if line and self._runtime.is_main:
            say(line)

    def _set_aside(self, step: int, best: Mapping[str, Any] | None) -> str | None:
        """Moves checkpoints ahead of ``step`` away; marks the best one up to that step, if it still exists."""
        line = self.folder.set_aside(step)
        marked = self.folder.noted("best.json")
        steps = self.folder.steps()
        if isinstance(marked, dict) and marked.get("step") not in steps:
            note = None
            if best is not None and best["best_step"] in steps:
                note = {"step": best["best_step"], **best}
            self.folder.note("best.json", note)
        return line

    def _write(self, step: int, copies: State, content: Mapping[str, Any]) -> None:
        needed_bytes = sum(self.together.gathered(_size_in_bytes(copies)))
        path = self.together.on_main(lambda: self._make_room(step, needed_bytes))
        try:
            files = writer(path)
            dcp.save(
                copies,
                storage_writer=files,
                planner=SavePlanner(),
                process_group=self.together.group,
                no_dist=self.together.group is None,
            )
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                self._explain_failure(path, needed_bytes, error)
            ) from None
        digests: dict[str, Any] = {}
        for digests_of_rank in self.together.gathered(files.digests):
            digests |= digests_of_rank
        self.together.on_main(lambda: self._commit(step, {**content, "files": digests}))

    def _commit(self, step: int, content: Mapping[str, Any]) -> None:
        content = {**content, "parent": self._parent}
        # The manifest is written last: a checkpoint without one does not count.
        self.folder.commit(step, manifest.sealed(content))
        self._parent = {"step": step, "sha256": manifest.manifest_digest(content)}
        best = self.folder.noted("best.json")
        spare = []
        if isinstance(best, dict) and "step" in best:
            spare.append(best["step"])
        self.folder.prune(self._keep, spare)

    def _make_room(self, step: int, needed_bytes: int) -> str:
        # Newer checkpoints are of another run, because this one begins anew.
        line = self._set_aside(step, None)
        if line:
            print(line, flush=True)
        path = self.folder.begin(step)
        free = self._free_bytes()
        if free < needed_bytes:
            raise CheckpointError(
                self._no_space(self.folder.path(step), needed_bytes, free)
            )
        return path

    def _free_bytes(self) -> int:
        # An object store says nothing about its room.
        if self.folder.remote:
            return sys.maxsize
        return shutil.disk_usage(self.folder.root).free

    def _no_space(self, path: str, needed_bytes: int, free: int) -> str:
        return (
            f"no space left for checkpoint '{path}': it needs {size_text(needed_bytes)}, {size_text(free)} are free; "
            "make room, lower checkpoint.keep, or choose another --run_dir, and go on with the same --run_dir"
        )

    def _explain_failure(
        self, path: str, needed_bytes: int, error: BaseException
    ) -> str:
        # Other files may have filled the disk during the save: then "no space" explains
        # the error better than its text.
        free = self._free_bytes()
        if free < needed_bytes // 10:
            return self._no_space(path, needed_bytes, free)
        return f"checkpoint '{path}' could not be written: {cause(error)}; the one before it is as it was"

    def _copy_state(self, state: State) -> State:
        """Copies the state into buffers, reused by each save."""

        def copy(key: str, tensor: Tensor) -> Tensor:
            buffer = self._copies.get(key)
            if (
                buffer is None
                or buffer.shape != tensor.shape
                or buffer.dtype != tensor.dtype
            ):
                buffer = self._copies[key] = torch.empty_like(
                    tensor, device="cpu", memory_format=torch.contiguous_format
                )
            return buffer.copy_(tensor)

        copies: State = {}
        with torch.no_grad():
            for name, value in state.items():
                if isinstance(value, Parts):
                    copies[name] = value.map(
                        lambda tensor, number, name=name: copy(
                            f"{name}/{number}", tensor
                        )
                    )
                else:
                    copies[name] = copy(name, value)
        return copies

    def _gather_layout(self, state: ModelState) -> dict[str, Any]:
        """Gathers paths of layers and widths of columns, because a rank without a shard does not know them."""
        layers = set()
        for name in state.tensors:
            # Names with @ are an optimizer's state of a layer.
            if name.startswith("dense.") and "@" not in name:
                layers.add(name.removeprefix("dense."))
        widths = {
            name: list(row_state.widths) for name, row_state in state.row_states.items()
        }
        layers_of_all: set[str] = set()
        widths_of_all: dict[str, list[int]] = {}
        for layers_of_rank, widths_of_rank in self.together.gathered((layers, widths)):
            layers_of_all |= layers_of_rank
            widths_of_all |= widths_of_rank
        # Sorted, because the manifest's digest must not depend on the order of a set.
        return {"layers": sorted(layers_of_all), "row_parts": widths_of_all}


def _size_in_bytes(state: State) -> int:
    size = 0
    for value in state.values():
        if isinstance(value, Parts):
            size += sum(shard.tensor.nbytes for shard in value.parts)
        else:
            size += value.nbytes
    return size
