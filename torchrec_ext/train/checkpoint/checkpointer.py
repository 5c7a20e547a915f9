"""Checkpointer: saves a state while the training goes on, loads it under any plan, finds the last good checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_ext.distributed.plan.explain import size_text
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint import folder as manifest
from torchrec_ext.train.checkpoint.folder import CheckpointFolder, CheckpointRanks, check_shared, newest_good
from torchrec_ext.train.checkpoint.load import load_checkpoint
from torchrec_ext.train.checkpoint.state import ModelState, Parts, SavePlanner, State
from torchrec_ext.train.checkpoint.storage import CheckpointError, cause, writer


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank has one, and all ranks call each method together.

    A save copies the state of this rank and returns; a thread writes it while the training goes on, over a process
    group of its own. One save is in flight at a time.

    Args:
        folder: folder of the checkpoints; on several hosts one that all of them see.
        runtime: rank and device of this process.
        keep: number of newest checkpoints that stay.

    Raises:
        CheckpointError: the folder cannot be written, another job writes it, or not all ranks see it.
    """

    def __init__(self, folder: str, runtime: Runtime, *, keep: int = 3) -> None:
        self.folder, self._runtime, self._keep = CheckpointFolder(folder), runtime, keep
        self.together = CheckpointRanks(runtime)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_stand_back)
        self._running: Future[None] | None = None
        self._copies: dict[str, Any] = {}
        self._parent: dict[str, Any] | None = None  # step and digest of the checkpoint that the next one follows
        if runtime.world_size > 1 or self.folder.remote:
            check_shared(folder, runtime.rank, self.together.gathered)
        self.together.on_main(self.folder.lock)

    def save(
        self, step: int, state: ModelState, extra: State | None = None, content: Mapping[str, Any] | None = None
    ) -> None:
        """Begins to save in the background, after the save before has ended.

        Args:
            step: steps that the run has made.
            state: state of the model and its optimizers.
            extra: further tensors by name, such as random states; a name belongs to one rank, or is equal on all.
            content: further entries of the manifest, which JSON can hold, the same on every rank.

        Raises:
            CheckpointError: the save before has failed, on every rank alike.
        """
        self.wait()
        copies = self._copied({**state.everything(), **(extra or {})})
        described = {
            "step": step,
            "world_size": self._runtime.world_size,
            "tables": state.tables,
            "paths": state.paths,
            "content": json.loads(json.dumps(content or {})),  # as it is now: it is written while the run goes on
            **self._of_all_ranks(state),
        }
        self._running = self._thread.submit(self._write, step, copies, described)

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            CheckpointError: the save has failed, on every rank alike; the checkpoint before it is unchanged.
        """
        running, self._running = self._running, None
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
        """Marks the checkpoint of ``step`` as the best, which stays however many follow it; the mark moves to it."""
        before = self._running

        def mark() -> None:
            if before is not None:
                before.result()  # where the save has failed, the one marked before stays
            self.together.on_main(lambda: self._marked(step, figures))

        self._running = self._thread.submit(mark)

    def _marked(self, step: int, figures: Mapping[str, Any]) -> None:
        self.folder.note("best.json", {"step": step, **figures})
        self.folder.prune(self._keep, [step])

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a small file beside the checkpoints; rank 0 alone does."""
        if self._runtime.is_main:
            self.folder.note(name, content)

    def last_good(self, say: Callable[[str], None] = print) -> str | None:
        """Returns the newest checkpoint without damage, the same on every rank; None where there is none.

        Args:
            say: called on rank 0 with a line for each newer checkpoint that is damaged.
        """
        return newest_good(self.folder, self.together, say)

    def load(self, path: str, state: ModelState, extra: State | None = None) -> dict[str, Any]:
        """Writes a run's checkpoint into its model, under any plan and number of ranks; see :func:`load_checkpoint`."""
        return load_checkpoint(path, state, self.together, extra)[0]

    def branch(
        self, saved: Mapping[str, Any], best: Mapping[str, Any] | None, say: Callable[[str], None] = print
    ) -> None:
        """Sets aside the checkpoints ahead of the one that a run goes on from, which is the parent of the next save.

        Args:
            saved: the checkpoint's manifest, as :meth:`load_checkpoint` returns it.
            best: figures and ``best_step`` of the best checkpoint that the loaded run knew, or None.
            say: called on rank 0 with a line where something was set aside.
        """
        self._parent = {"step": saved["step"], "sha256": manifest.manifest_digest(saved)}
        line = self.together.on_main(lambda: self._set_aside(saved["step"], best))
        if line and self._runtime.is_main:
            say(line)

    def _set_aside(self, step: int, best: Mapping[str, Any] | None) -> str | None:
        """Moves checkpoints ahead of ``step`` away; marks as best the best one up to that step, if it is there."""
        line = self.folder.set_aside(step)
        marked, steps = self.folder.noted("best.json"), self.folder.steps()
        if isinstance(marked, dict) and marked.get("step") not in steps:
            kept = best if best is not None and best["best_step"] in steps else None
            self.folder.note("best.json", kept and {"step": kept["best_step"], **kept})
        return line

    def _write(self, step: int, copies: State, described: Mapping[str, Any]) -> None:
        needed = sum(self.together.gathered(_bytes(copies)))
        path = self.together.on_main(lambda: self._make_room(step, needed))
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
            raise CheckpointError(self._why(path, needed, error)) from None
        digests: dict[str, Any] = {}
        for written in self.together.gathered(files.digests):
            digests |= written
        self.together.on_main(lambda: self._commit(step, {**described, "files": digests}))

    def _commit(self, step: int, content: Mapping[str, Any]) -> None:
        content = {**content, "parent": self._parent}
        self.folder.commit(step, manifest.sealed(content))
        self._parent = {"step": step, "sha256": manifest.manifest_digest(content)}
        best = self.folder.noted("best.json")
        self.folder.prune(self._keep, [best["step"]] if isinstance(best, dict) and "step" in best else [])

    def _make_room(self, step: int, needed: int) -> str:
        line = self._set_aside(step, None)  # what is newer is of another run, for this one begins anew
        if line:
            print(line, flush=True)
        path = self.folder.begin(step)
        if not self.folder.remote and (free := shutil.disk_usage(self.folder.root).free) < needed:
            raise CheckpointError(self._no_space(self.folder.path(step), needed, free))
        return path

    def _no_space(self, path: str, needed: int, free: int) -> str:
        return (
            f"no space left for checkpoint '{path}': it needs {size_text(needed)}, {size_text(free)} are free; make "
            "room, lower checkpoint.keep, or choose another --run-dir, and go on with --resume auto"
        )

    def _why(self, path: str, needed: int, error: BaseException) -> str:
        if not self.folder.remote and (free := shutil.disk_usage(self.folder.root).free) < needed // 10:
            return self._no_space(path, needed, free)
        return f"checkpoint '{path}' could not be written: {cause(error)}; the one before it is as it was"

    def _copied(self, state: State) -> State:
        """Copies the state into buffers that are reused by each save."""

        def copy(key: str, tensor: Tensor) -> Tensor:
            held = self._copies.get(key)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = self._copies[key] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
            return held.copy_(tensor)

        with torch.no_grad():
            return {
                name: held.map(lambda tensor, number, name=name: copy(f"{name}/{number}", tensor))
                if isinstance(held, Parts)
                else copy(name, held)
                for name, held in state.items()
            }

    def _of_all_ranks(self, state: ModelState) -> dict[str, Any]:
        """What a rank without a shard of a table or layer does not know: paths of layers, and widths of columns."""
        layers = [
            name.removeprefix("dense.") for name in state.tensors if name.startswith("dense.") and "@" not in name
        ]
        ranks = self.together.gathered(
            (layers, {name: list(row_state.widths) for name, row_state in state.row_states.items()})
        )
        return {
            "layers": sorted({name for row_state, _ in ranks for name in row_state}),
            "row_parts": {name: widths for _, row_state in ranks for name, widths in row_state.items()},
        }


def _stand_back() -> None:
    """Lowers the priority of the writing thread below the training's; Linux has priorities by thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _bytes(state: State) -> int:
    tensors = [shard.tensor for held in state.values() if isinstance(held, Parts) for shard in held.parts]
    tensors += [held for held in state.values() if isinstance(held, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
