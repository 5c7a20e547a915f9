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

from torchrec_ext.durable import synced
from torchrec_ext.train.checkpoint import manifest
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url

_NAME = re.compile(r"step-(\d{10})")
_PARTIAL = ".partial"
_ASIDE = re.compile(r"set-aside-(\d+)")


class CheckpointFolder:
    """A folder of ``step-0000000120`` folders, on a local file system or behind any address that fsspec opens.

    A checkpoint is one from the moment its manifest is there. Locally it is written beside, synced and renamed; an object store
    has no rename, and its manifest is written last.

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
        """Of the checkpoint after ``step`` steps."""
        return f"{self._address}/step-{step:010d}"

    def writing(self, step: int) -> str:
        """Where that checkpoint is written."""
        return self.path(step) if self.remote else self.path(step) + _PARTIAL

    def steps(self) -> list[int]:
        """Of the whole checkpoints, the newest first."""
        return sorted((step for _, step, whole in self._found() if whole), reverse=True)

    def begin(self, step: int) -> None:
        """Makes an empty place to write to.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self.writing(step)
        try:
            if self.files.exists(path):
                self.files.rm(path, recursive=True)
            self.files.makedirs(path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder '{path}' cannot be made: {error.strerror or error}") from None

    def commit(self, step: int, content: bytes) -> None:
        """Makes what was written a checkpoint, whose manifest is ``content``."""
        path = self.writing(step)
        with self.files.open(f"{path}/{manifest.NAME}", "wb") as stream:
            stream.write(content)
            if not self.remote:
                stream.flush()
                os.fsync(stream.fileno())
        if not self.remote:
            synced(path)
            if os.path.exists(self.path(step)):  # of a run that this one, resumed before it, is overtaking
                self.files.rm(self.path(step), recursive=True)
            os.rename(path, self.path(step))
            synced(self.root)

    def clean(self) -> list[str]:
        """Removes what was never finished, and says what."""
        left = [name for name, _, whole in self._found() if not whole]
        for name in left:
            self.files.rm(f"{self.root}/{name}", recursive=True)
        return left

    def prune(self, keep: int, spare: Iterable[int] = ()) -> None:
        """Removes all but the newest ``keep`` and those in ``spare``; the manifest first, so that none is ever half there."""
        for step in self.steps()[keep:]:
            if step not in spare:
                self.files.rm(f"{self.path(step)}/{manifest.NAME}")
                self.files.rm(self.path(step), recursive=True)

    def set_aside(self, step: int) -> str | None:
        """Moves every checkpoint newer than ``step`` into a folder of its own, where none is resumed or pruned by itself.

        A run that goes on from an earlier step is another branch from there on: what lies ahead of it is not its past, and would
        else be taken for the newest, and what the run saves for the oldest.

        Returns:
            A line that names the steps and the folder, or None where nothing lies ahead.
        """
        ahead = sorted(newer for newer in self.steps() if newer > step)
        if not ahead:
            return None
        taken = [int(match[1]) for match in map(_ASIDE.fullmatch, self._names()) if match]
        name = f"set-aside-{max(taken, default=0) + 1}"
        self.files.makedirs(f"{self.root}/{name}", exist_ok=True)
        for newer in reversed(ahead):  # the newest first: whatever interrupts this, none is resumed with its past set aside
            at = f"{self.root}/{self.path(newer).rpartition('/')[2]}"
            self.files.mv(at, f"{self.root}/{name}/{at.rpartition('/')[2]}", recursive=True)
        steps = ", ".join(f"{newer:,}" for newer in ahead)
        return f"set aside: the checkpoints of step {steps}, which lie ahead of step {step:,}, are in {self._address}/{name}"

    def _names(self) -> list[str]:
        return [path.rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]

    def note(self, name: str, content: Any) -> None:
        """Writes a small JSON file beside the checkpoints, as a whole."""
        path = f"{self.root}/{name}"
        text = json.dumps(content) + "\n"
        if self.remote:
            self.files.makedirs(self.root, exist_ok=True)  # where nothing was saved yet; a store without folders has nothing to do
            with self.files.open(path, "w") as stream:
                stream.write(text)
            return
        Path(f"{path}.new").write_text(text)
        os.replace(f"{path}.new", path)

    def noted(self, name: str) -> Any:
        """What :meth:`note` wrote; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, ValueError), self.files.open(f"{self.root}/{name}", "r") as stream:
            return json.loads(stream.read())
        return None

    def lock(self) -> None:
        """Keeps other jobs from writing here until :meth:`unlock` or the end of this process; an object store offers no lock.

        Raises:
            CheckpointError: another process holds it, or the folder cannot be written.
        """
        if self.remote or self._lock is not None:
            return
        try:
            os.makedirs(self.root, exist_ok=True)
            held = open(f"{self.root}/lock", "a+")  # noqa: SIM115  (held until the process ends)
        except OSError as error:
            raise CheckpointError(f"checkpoint folder '{self.root}' cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.seek(0)
            owner = held.read().strip() or "another process"
            held.close()
            raise CheckpointError(
                f"checkpoint folder '{self.root}' is being written by {owner}; stop that job, or give this one another --run-dir"
            ) from None
        held.truncate(0)
        held.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        held.flush()
        self._lock = held

    def unlock(self) -> None:
        """Lets other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _found(self) -> list[tuple[str, int, bool]]:
        """(name, step, whether it is whole) of everything that was begun here."""
        if not self.files.exists(self.root):
            return []
        found = []
        for name in self._names():
            match = _NAME.fullmatch(name.removesuffix(_PARTIAL))
            if match:
                whole = not name.endswith(_PARTIAL) and self.files.exists(f"{self.root}/{name}/{manifest.NAME}")
                found.append((name, int(match[1]), whole))
        return found
