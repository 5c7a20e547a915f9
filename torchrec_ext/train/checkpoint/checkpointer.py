"""Checkpointer: saves a state beside the training, loads it under any other plan, and finds the last good one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_ext.distributed.explain import size_text
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint import manifest
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.parts import LoadPlanner, Part, Parts, SavePlanner, State
from torchrec_ext.train.checkpoint.row_parts import inherited
from torchrec_ext.train.checkpoint.state import ModelState, RowState
from torchrec_ext.train.checkpoint.storage import CheckpointError, read_metadata, reader, writer

_TIMEOUT = timedelta(minutes=30)


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank has one, and all ranks call each method together.

    A save copies the state of this rank and returns; a thread writes it while the training goes on, over a process group of its
    own. One save is in flight at a time.

    Args:
        folder: where they are; on several hosts one that all of them see.
        runtime: this process's place in the job.
        keep: how many of the newest stay.

    Raises:
        CheckpointError: the folder cannot be written, or another job writes it.
    """

    def __init__(self, folder: str, runtime: Runtime, *, keep: int = 3) -> None:
        self.folder, self._runtime, self._keep = CheckpointFolder(folder), runtime, keep
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if runtime.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._copies: dict[str, Any] = {}
        self._on_main(self.folder.lock)

    def save(self, step: int, state: ModelState, extra: State | None = None, content: Mapping[str, Any] | None = None) -> None:
        """Begins to save, after the save before has ended.

        Args:
            step: steps made.
            state: of the model and its optimizers.
            extra: more tensors by name, such as random states; a name is of one rank, or alike on all.
            content: what JSON can hold, the same on every rank; goes into the manifest.

        Raises:
            CheckpointError: the save before has failed, on every rank alike.
        """
        self.wait()
        copies = self._copied({**state.everything(), **(extra or {})})
        described = {
            "step": step,
            "world_size": self._runtime.world_size,
            "tables": state.tables,
            "row_parts": {name: list(own.widths) for name, own in self._row_states(state).items()},
            "content": content or {},
        }
        self._running = self._thread.submit(self._write, step, copies, described)

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            CheckpointError: it has failed, on every rank alike; the checkpoint before it is as it was.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def mark_best(self, step: int, figures: Mapping[str, Any]) -> None:
        """Keeps the checkpoint of ``step`` however many follow it, in place of the one marked before."""
        if self._runtime.is_main:
            self.folder.note("best.json", {"step": step, **figures})

    def last_good(self, say: Callable[[str], None] = print) -> str | None:
        """The newest checkpoint without damage, on every rank the same; None where there is none.

        Args:
            say: called on rank 0 with a line for each newer one that is damaged.
        """
        for step in self._on_main(self.folder.steps):
            path = self.folder.path(step)
            damage = self.damage(path)
            if damage is None:
                return path
            if self._runtime.is_main:
                say(f"checkpoint step {step}: {damage}; the one before it is used")
        return None

    def damage(self, path: str) -> str | None:
        """What is wrong with a checkpoint, or None; the ranks share the reading of its files."""
        rank, ranks = self._runtime.rank, self._runtime.world_size
        try:
            listed = self._manifest(path)["files"]
            found = manifest.damage(url_to_fs(path)[0], path, listed, sorted(listed)[rank::ranks])
        except (CheckpointError, KeyError, TypeError, AttributeError) as error:
            found = str(error)
        return next((each for each in self._gathered(found) if each), None)

    def load(self, path: str, state: ModelState, extra: State | None = None) -> dict[str, Any]:
        """Writes a checkpoint into the tensors of ``state`` and ``extra``, whatever plan and number of ranks it was saved with.

        Args:
            path: from :meth:`last_good`, or any other that :meth:`damage` has found whole.
            state: of the model and its optimizers.
            extra: tensors to fill as well; names that were not saved are left as they are.

        Returns:
            The manifest.

        Raises:
            CheckpointError: it is of another model; every difference is named.
        """
        saved = self._manifest(path)
        metadata = self.metadata(path)
        counted = state.counted()
        wanted = {**state.tensors, **counted}
        wanted |= {name: held for name, held in (extra or {}).items() if name in metadata.state_dict_metadata}
        self._check(path, saved, wanted, state, metadata)
        parts: dict[str, Parts] = {}
        for name, own in state.row_states.items():
            there = tuple(saved["row_parts"][name])
            if there == own.widths:
                wanted[name] = Parts((own.rows, len(there)), own.parts)
            else:
                rows = {part.offsets[0]: len(part.tensor) for part in own.parts}
                like = own.parts[0].tensor if own.parts else torch.empty(0)
                parts[name] = Parts(
                    (own.rows, len(there)), [Part(like.new_empty(count, len(there)), (row, 0)) for row, count in rows.items()]
                )
        try:
            dcp.load(
                {**wanted, **parts},
                storage_reader=reader(path),
                planner=LoadPlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint '{path}' could not be read: {_cause(error)}") from None
        state.count(counted)
        for name, held in parts.items():
            own, there = state.row_states[name], tuple(saved["row_parts"][name])
            for part in own.parts:
                row, number = part.offsets
                start = sum(own.widths[:number])
                part.tensor.copy_(inherited(held.at((row, 0)), there, start, start + own.widths[number]))
        return saved

    def metadata(self, path: str) -> Any:
        """What a checkpoint's index says of its tensors."""
        where = f"{path}/.metadata"
        try:
            with fsspec.open(where, "rb") as stream:
                return read_metadata(stream.read(), where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from None

    def _manifest(self, path: str) -> dict[str, Any]:
        where = f"{path}/{manifest.NAME}"
        try:
            with fsspec.open(where, "rb") as stream:
                return manifest.opened(stream.read(), where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror or error}; is '{path}' a checkpoint?") from None

    def _check(self, path: str, saved: Mapping[str, Any], wanted: State, state: ModelState, metadata: Any) -> None:
        """Refuses what would be dropped or left as it is."""
        there = {name: tuple(getattr(held, "size", ())) for name, held in metadata.state_dict_metadata.items()}
        mine = {name: tuple(held.size()) for name, held in wanted.items()}
        both = {name: (size, mine[name]) for name, size in there.items() if name in mine and size != mine[name]}
        lines = [f"{name} is {now} and was saved as {before}" for name, (before, now) in both.items()]
        lines += [f"{name} was not saved" for name in {**mine, **state.row_states} if name not in there]
        known = {*mine, *state.row_states, *(f"tables.{name}.{slot}" for name in state.tables for slot in _slots(state))}
        lines += [f"{name} is not in this model" for name in there if name.startswith(("tables.", "dense.")) and name not in known]
        said = self._gathered(lines)
        everyone = list(dict.fromkeys(line for own in said for line in own if self._agreed(line, said)))
        if everyone:
            more = f"; and {len(everyone) - 8} more" if len(everyone) > 8 else ""
            raise CheckpointError(f"checkpoint '{path}' is of another model or optimizer: {'; '.join(everyone[:8])}{more}")

    @staticmethod
    def _agreed(line: str, said: list[list[str]]) -> bool:
        """A rank that holds no part of a table does not know its names; another one does."""
        return not line.endswith("is not in this model") or all(line in own for own in said)

    def _write(self, step: int, copies: State, described: Mapping[str, Any]) -> None:
        needed = sum(self._gathered(_bytes(copies)))
        self._on_main(lambda: self._make_room(step, needed))
        path = self.folder.writing(step)
        try:
            dcp.save(
                copies,
                storage_writer=writer(path),
                planner=SavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(self._why(path, needed, error)) from None
        own = [f"{path}/{name}" for name in self._names(path)]
        files: dict[str, Any] = {}
        for digests in self._gathered({name.rpartition("/")[2]: manifest.digest(self.folder.files, name) for name in own}):
            files |= digests
        self._on_main(lambda: self._commit(step, {**described, "files": files}))

    def _commit(self, step: int, content: Mapping[str, Any]) -> None:
        self.folder.commit(step, manifest.sealed(content))
        best = self.folder.noted("best.json")
        self.folder.prune(self._keep, [best["step"]] if isinstance(best, dict) and "step" in best else [])

    def _make_room(self, step: int, needed: int) -> None:
        self.folder.begin(step)
        if not self.folder.remote and (free := shutil.disk_usage(self.folder.root).free) < needed:
            raise CheckpointError(self._no_space(self.folder.path(step), needed, free))

    def _no_space(self, path: str, needed: int, free: int) -> str:
        return (
            f"no space left for checkpoint '{path}': it needs {size_text(needed)}, {size_text(free)} are free; the one before it "
            "is as it was; make room, keep fewer with checkpoint.keep, or choose another --run-dir, and go on with --resume auto"
        )

    def _why(self, path: str, needed: int, error: BaseException) -> str:
        if not self.folder.remote and (free := shutil.disk_usage(self.folder.root).free) < needed // 10:
            return self._no_space(path, needed, free)
        return f"checkpoint '{path}' could not be written: {_cause(error)}; the one before it is as it was"

    def _names(self, path: str) -> list[str]:
        """The files of this rank."""
        mine = [f"__{self._runtime.rank}_", *([".metadata"] if self._runtime.is_main else [])]
        names = [name.rstrip("/").rpartition("/")[2] for name in self.folder.files.ls(path, detail=False)]
        return [name for name in names if name.startswith(tuple(mine))]

    def _copied(self, state: State) -> State:
        """The state in memory of its own, the same at each save."""

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

    def _row_states(self, state: ModelState) -> dict[str, Any]:
        """Those of all ranks: one that holds no part of a table has none of it."""
        return {name: own for ranks in self._gathered(_without_tensors(state)) for name, own in ranks.items()}

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._runtime.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0, or raises there, on every rank."""
        outcome: Any = None
        if self._runtime.is_main:
            try:
                outcome = action()
            except Exception as error:
                outcome = error
        outcome = self._gathered(outcome)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _slots(state: ModelState) -> set[str]:
    return {name.rpartition(".")[2] for name in [*state.tensors, *state.row_states] if name.startswith("tables.")} | {"weight"}


def _without_tensors(state: ModelState) -> dict[str, Any]:
    return {name: RowState(own.widths, own.rows) for name, own in state.row_states.items()}


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank on which something did, in one line."""
    failures = list(getattr(error, "failures", {}).values())
    cause = failures[0][0] if failures else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _bytes(state: State) -> int:
    tensors = [part.tensor for held in state.values() if isinstance(held, Parts) for part in held.parts]
    tensors += [held for held in state.values() if isinstance(held, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
