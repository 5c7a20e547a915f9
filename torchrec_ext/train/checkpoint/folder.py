"""CheckpointFolder: the checkpoints of one run side by side, each there as a whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from torchrec_ext.durable import no_locks, synced, write_whole
from torchrec_ext.train.checkpoint import manifest
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url

_NAME = re.compile(r"step-(\d{10})")
_PARTIAL, _AGAIN = ".partial", ".again"
_ASIDE = re.compile(r"set-aside-(\d+)")
_MOVING = "set-aside.json"  # what is being set aside: written first, so that no kill leaves a part of it to be resumed


class CheckpointFolder:
    """A folder of ``step-0000000120`` folders, on a local file system or behind any address that fsspec opens.

    A checkpoint is one from the moment its manifest is there. Locally it is written beside, synced and renamed; an object store
    has no rename, and its manifest is written last. A step that is saved twice is for a moment, and behind an address for good,
    in ``step-0000000120.again``, so that the first one stays until the second is whole.

    Args:
        folder: a path, or an address such as ``s3://bucket/runs/a``.

    Raises:
        CheckpointError: an address that no installed driver opens.
    """

    def __init__(self, folder: str) -> None:
        self.remote = is_url(folder)
        try:
            self.files, self.root = url_to_fs(folder if self.remote else str(Path(folder).absolute()))
        except Exception as error:  # each driver has its own: not installed, no such protocol, no network, no right
            raise CheckpointError(
                f"checkpoint folder '{folder}' cannot be opened ({type(error).__name__}: {error}); check the address, its driver "
                "and the network"
            ) from None
        self._address = folder.rstrip("/") if self.remote else self.root
        self._lock: IO[str] | None = None

    @property
    def address(self) -> str:
        """The folder's path or address."""
        return str(self._address)

    def path(self, step: int) -> str:
        """The path or address of the checkpoint after ``step`` steps."""
        first, second = self._places(step)
        return second if self._is_whole(second) else first

    def writing(self, step: int) -> str:
        """The path or address that a checkpoint after ``step`` steps is written to."""
        first, second = self._places(step)
        if not self.remote:
            return first + _PARTIAL
        return second if self._is_whole(first) else first

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, the newest first."""
        return sorted({step for _, step, whole in self._found() if whole}, reverse=True)

    def begin(self, step: int) -> str:
        """Makes an empty place to write the checkpoint after ``step`` steps to, and returns its path or address.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            self._settle(step)
            path = self.writing(step)
            if self.files.exists(path):
                self.files.rm(path, recursive=True)
            self.files.makedirs(path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder '{self.path(step)}' cannot be made: {error.strerror or error}") from None
        return path

    def commit(self, step: int, content: bytes) -> None:
        """Makes what was written a checkpoint, whose manifest is ``content``."""
        path, (first, second) = self.writing(step), self._places(step)
        if self.remote:
            with self.files.open(f"{path}/{manifest.NAME}", "wb") as stream:
                stream.write(content)
            self._remove(first if path == second else second)
            return
        write_whole(f"{path}/{manifest.NAME}", content)
        os.rename(path, second if os.path.exists(first) else first)
        synced(self.root)
        self._settle(step)

    def clean(self) -> list[str]:
        """Removes what was never finished, and says what."""
        found = self._found()
        left = [name for name, _, whole in found if not whole]
        for name in left:
            self.files.rm(f"{self.root}/{name}", recursive=True)
        for step in {step for _, step, whole in found if whole}:
            self._settle(step)
        return left

    def prune(self, keep: int, spare: Iterable[int] = ()) -> None:
        """Removes all but the newest ``keep`` and those in ``spare``."""
        for step in self.steps()[keep:]:
            if step not in spare:
                for path in self._places(step):
                    self._remove(path)

    def set_aside(self, step: int) -> str | None:
        """Moves every checkpoint newer than ``step`` into a folder of its own, where none is resumed or pruned by itself.

        A run that goes on from an earlier step is another branch from there on: what lies ahead of it is not its past, and would
        else be taken for the newest, and what the run saves for the oldest. From one moment to the next none of them is listed any
        more; a move that a kill has interrupted is finished by the next :meth:`lock`.

        Returns:
            A line that names the steps and the folder, or None where nothing lies ahead.
        """
        ahead = sorted(newer for newer in self.steps() if newer > step)
        if not ahead:
            return None
        taken = [int(match[1]) for match in map(_ASIDE.fullmatch, self._names()) if match]
        name = f"set-aside-{max(taken, default=0) + 1}"
        self.note(_MOVING, {"folder": name, "steps": ahead})
        self._finish_setting_aside()
        steps = ", ".join(f"{newer:,}" for newer in ahead)
        return f"set aside: the checkpoints of step {steps}, which lie ahead of step {step:,}, are in {self._address}/{name}"

    def _finish_setting_aside(self) -> None:
        """Moves what is noted to be moved, from wherever an earlier attempt has come to."""
        moving = self.noted(_MOVING)
        if not isinstance(moving, dict):
            return
        aside = f"{self.root}/{moving['folder']}"
        self.files.makedirs(aside, exist_ok=True)
        for path in (path for step in moving["steps"] for path in self._places(step)):
            at = f"{self.root}/{_name_of(path)}"
            if not self.files.exists(at):
                continue
            if not self.remote:
                os.rename(at, f"{aside}/{_name_of(at)}")
                continue
            for file in self.files.find(at):  # one by one: a folder that is there already would be moved into
                self.files.mv(file, f"{aside}/{_name_of(at)}/{_name_of(file)}")
            if self.files.exists(at):  # memory:// has folders, an object store none
                self.files.rm(at, recursive=True)
        if not self.remote:
            synced(aside)
            synced(self.root)
        self.files.rm(f"{self.root}/{_MOVING}")

    def _places(self, step: int) -> tuple[str, str]:
        """Where the checkpoint of a step is, and where it is once the step was saved twice."""
        first = f"{self._address}/step-{step:010d}"
        return first, first + _AGAIN

    def _is_whole(self, path: str) -> bool:
        return bool(self.files.exists(f"{path}/{manifest.NAME}"))

    def _remove(self, path: str) -> None:
        """The manifest first, so that no checkpoint is ever half there."""
        if self._is_whole(path):
            self.files.rm(f"{path}/{manifest.NAME}")
        if self.files.exists(path):
            self.files.rm(path, recursive=True)

    def _settle(self, step: int) -> None:
        """Of a step that was saved twice only the later one stays; locally it takes the name of the first."""
        first, second = self._places(step)
        if self._is_whole(second):
            self._remove(first)
            if not self.remote:
                os.rename(second, first)
                synced(self.root)

    def _names(self) -> list[str]:
        return [_name_of(path) for path in self.files.ls(self.root, detail=False)]

    def note(self, name: str, content: Any) -> None:
        """Writes a small JSON file beside the checkpoints, as a whole."""
        path = f"{self.root}/{name}"
        text = json.dumps(content) + "\n"
        if self.remote:
            self.files.makedirs(self.root, exist_ok=True)  # where nothing was saved yet; a store without folders has nothing to do
            with self.files.open(path, "w") as stream:
                stream.write(text)
            return
        write_whole(path, text.encode())

    def noted(self, name: str) -> Any:
        """What :meth:`note` wrote; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, ValueError), self.files.open(f"{self.root}/{name}", "r") as stream:
            return json.loads(stream.read())
        return None

    def lock(self) -> None:
        """Keeps other jobs from writing here until :meth:`unlock` or the end of this process; an object store offers no lock.

        Raises:
            CheckpointError: another process holds it, the folder cannot be written, or its file system has no locks.
        """
        if self._lock is not None:
            return
        if not self.remote:
            self._lock = self._locked()
        self._finish_setting_aside()

    def _locked(self) -> IO[str]:
        try:
            os.makedirs(self.root, exist_ok=True)
            held = open(f"{self.root}/lock", "a+")  # noqa: SIM115  (held until the process ends)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder '{self.root}' cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            owner = held.read().strip() or "another process"
            held.close()
            raise CheckpointError(
                f"checkpoint folder '{self.root}' is being written by {owner}; stop that job, or give this one another --run-dir"
            ) from None
        except OSError as error:
            held.close()
            raise CheckpointError(f"checkpoint folder '{self.root}' {no_locks(error)}, or choose another --run-dir") from None
        held.truncate(0)
        held.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        held.flush()
        return held

    def unlock(self) -> None:
        """Lets other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _found(self) -> list[tuple[str, int, bool]]:
        """(name, step, whether it is whole) of everything that was begun here."""
        if not self.files.exists(self.root):
            return []
        names, found = self._names(), []
        moving = self.noted(_MOVING) if _MOVING in names else None
        gone = moving["steps"] if isinstance(moving, dict) else []
        for name in names:
            match = _NAME.fullmatch(name.removesuffix(_PARTIAL).removesuffix(_AGAIN))
            if match and int(match[1]) not in gone:
                found.append((name, int(match[1]), not name.endswith(_PARTIAL) and self._is_whole(f"{self.root}/{name}")))
        return found


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
