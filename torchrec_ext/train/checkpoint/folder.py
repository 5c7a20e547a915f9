"""CheckpointFolder: the checkpoints of one run, each complete or absent.

A checkpoint's manifest lists its files with their digests, so a damaged or mixed one is never loaded. CheckpointRanks
lets the ranks of a job agree on a checkpoint. check_shared() refuses, before the first step, a folder that some host
cannot see.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch.distributed as dist
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.sealed import (
    difference,
    json_digest,
    lock_folder,
    measure_stream,
    open_plain,
    rename_synced,
    sealed_json,
    sync_to_disk,
    write_whole,
)
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url, read_metadata

MANIFEST_NAME = "manifest.json"
# Format of manifests; a reader refuses newer ones.
MANIFEST_FORMAT = 1


def digest(files: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Returns size and SHA-256 of one file behind a path or an address."""
    with _open(files, path) as stream:
        return measure_stream(stream)


def _open(files: AbstractFileSystem, path: str) -> Any:
    """Opens a file for reading; a local one only if it is a plain file."""
    if not isinstance(files, LocalFileSystem):
        return files.open(path, "rb")
    # A local file is given by a path, or by file:// and a path.
    return open_plain(url_to_fs(path)[1])


def sealed(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest, including the digest of its own content."""
    return sealed_json({"format": MANIFEST_FORMAT, **content}, "sha256")


def manifest_digest(content: Mapping[str, Any]) -> str:
    """Returns the digest of a manifest with ``content``; a later checkpoint names its parent by it."""
    return json_digest({"format": MANIFEST_FORMAT, **content})


def opened(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a manifest.

    Args:
        data: bytes of the file.
        where: path of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    try:
        manifest = json.loads(data)
        sha = manifest.pop("sha256")
        version = manifest["format"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{where} is damaged: it is not a manifest") from None
    if isinstance(version, int) and version > MANIFEST_FORMAT:
        raise CheckpointError(
            f"{where} is of format {version}, this version reads up to {MANIFEST_FORMAT}: update torchrec-ext"
        )
    # The bytes are compared too: JSON with, for example, a key given twice has the same
    # content under other bytes.
    if sha != json_digest(manifest) or data != sealed(manifest):
        raise CheckpointError(
            f"{where} is damaged: its content does not fit its digest"
        )
    return manifest  # type: ignore[no-any-return]


def damaged(
    files: AbstractFileSystem,
    folder: str,
    listed: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
) -> str | None:
    """Describes the first damaged file of ``names``; None if all match the manifest."""
    for name in names:
        path = f"{folder}/{name}"
        expected = listed[name]
        try:
            wrong = difference(digest(files, path), expected)
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read: {error.strerror or error}"
        if wrong:
            return f"{path} {wrong}"
    return None


_STEP_NAME = re.compile(r"step-(\d{10})")
_PARTIAL = ".partial"
_AGAIN = ".again"
_ASIDE = re.compile(r"set-aside-(\d+)")
# Note of a pending move: it is written first, so that a kill never leaves half of the
# steps behind.
_MOVE_NOTE = "set-aside.json"


class _Move(NamedTuple):
    """Checkpoints, by step, on their way into a folder next to them."""

    folder: str
    steps: list[int]


class CheckpointFolder:
    """Folder of ``step-0000000120`` folders, on a local file system or behind any address fsspec opens.

    A checkpoint exists once its manifest exists. Locally it is written under another name, synced and renamed. An
    object store has no rename, so the manifest is written last. If a step is saved twice, the second checkpoint is in
    ``step-0000000120.again``, so that the first one stays until the second is complete: for a moment in a local folder,
    for good behind an address.

    Args:
        folder: a path, or an address such as ``s3://bucket/runs/a``.

    Raises:
        CheckpointError: an address that no installed driver opens.
    """

    def __init__(self, folder: str) -> None:
        self.remote = is_url(folder)
        try:
            self.files, self.root = _file_system(folder)
        except Exception as error:
            # Each driver has errors of its own: not installed, no such protocol, no
            # network, no right.
            raise CheckpointError(
                f"checkpoint folder '{folder}' cannot be opened ({type(error).__name__}: {error}); check the address, "
                "its driver and the network"
            ) from None
        self._address = folder.rstrip("/") if self.remote else self.root
        self._lock: IO[str] | None = None

    @property
    def address(self) -> str:
        """The folder's path or address."""
        return str(self._address)

    def path(self, step: int) -> str:
        """Returns the path or address of the checkpoint after ``step`` steps."""
        first, second = self._names_of_step(step)
        return second if self._is_whole(second) else first

    def writing(self, step: int) -> str:
        """Returns the path or address to write a checkpoint after ``step`` steps to."""
        first, second = self._names_of_step(step)
        if not self.remote:
            return first + _PARTIAL
        return second if self._is_whole(first) else first

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, newest first."""
        return sorted(
            {step for _, step, whole in self._entries() if whole}, reverse=True
        )

    def begin(self, step: int) -> str:
        """Makes an empty folder for the checkpoint after ``step`` steps, and returns its path or address.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            self._settle(step)
            path = self.writing(step)
            # A save that was killed has left it.
            if self.files.exists(path):
                self.files.rm(path, recursive=True)
            self.files.makedirs(path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder '{self.path(step)}' cannot be made: {error.strerror or error}"
            ) from None
        return path

    def commit(self, step: int, content: bytes) -> None:
        """Turns the written files into a checkpoint; ``content`` are the bytes of its manifest."""
        path = self.writing(step)
        first, second = self._names_of_step(step)
        if self.remote:
            other = first if path == second else second
            # The other checkpoint of this step is removed only after the new one
            # counts.
            with self.files.open(f"{path}/{MANIFEST_NAME}", "wb") as stream:
                stream.write(content)
            self._remove(other)
            return
        write_whole(f"{path}/{MANIFEST_NAME}", content)
        # A folder cannot be renamed onto another, so an existing first one is replaced
        # in two moves.
        target = second if os.path.exists(first) else first
        rename_synced(path, target)
        self._settle(step)

    def clean(self) -> list[str]:
        """Removes unfinished checkpoints, and returns their names."""
        unfinished = []
        for name, _, is_whole in self._entries():
            if not is_whole:
                self.files.rm(f"{self.root}/{name}", recursive=True)
                unfinished.append(name)
        # A kill between the commit and the renaming of a step that was saved twice
        # leaves both.
        for step in self.steps():
            self._settle(step)
        return unfinished

    def prune(self, keep: int, spare: Iterable[int] = ()) -> None:
        """Removes all checkpoints except the newest ``keep`` and the steps in ``spare``."""
        for step in self.steps()[keep:]:
            if step not in spare:
                for path in self._names_of_step(step):
                    self._remove(path)

    def set_aside(self, step: int) -> str | None:
        """Moves every checkpoint newer than ``step`` into a separate folder, out of reach of resume and pruning.

        A run that goes on from an earlier step is a new branch. Later checkpoints are not its past, but would be taken
        for its newest ones. All of them leave the list at the same moment. If a kill interrupts the move, the next
        :meth:`lock` finishes it.

        Returns:
            A line that names the steps and the folder, or None if no checkpoint is newer.
        """
        ahead = sorted(newer for newer in self.steps() if newer > step)
        if not ahead:
            return None
        number = 1
        for other in self._names():
            if match := _ASIDE.fullmatch(other):
                number = max(number, int(match[1]) + 1)
        name = f"set-aside-{number}"
        self.note(_MOVE_NOTE, {"folder": name, "steps": ahead})
        self._finish_setting_aside()
        steps = ", ".join(f"{newer:,}" for newer in ahead)
        ahead_of = f"which lie ahead of step {step:,}"
        return f"set aside: the checkpoints of step {steps}, {ahead_of}, are in {self._address}/{name}"

    def _finish_setting_aside(self) -> None:
        """Moves the checkpoints noted by :meth:`set_aside`; continues an interrupted attempt."""
        move = self._pending_move()
        if move is None:
            return
        aside = f"{self.root}/{move.folder}"
        self.files.makedirs(aside, exist_ok=True)
        paths: list[str] = []
        for step in move.steps:
            paths += self._names_of_step(step)
        for path in paths:
            source = f"{self.root}/{_name_of(path)}"
            # An interrupted attempt has moved it already, or the step was saved once.
            if not self.files.exists(source):
                continue
            if not self.remote:
                os.rename(source, f"{aside}/{_name_of(source)}")
                continue
            # Files move one by one, because moving a folder onto an existing one would
            # nest it.
            for file in self.files.find(source):
                self.files.mv(file, f"{aside}/{_name_of(source)}/{_name_of(file)}")
            # memory:// has folders, an object store has none.
            if self.files.exists(source):
                self.files.rm(source, recursive=True)
        if not self.remote:
            sync_to_disk(aside)
            sync_to_disk(self.root)
        self.files.rm(f"{self.root}/{_MOVE_NOTE}")

    def _pending_move(self) -> _Move | None:
        """Returns the note of :meth:`set_aside`; None if nothing is being set aside.

        Raises:
            CheckpointError: the note is not from :meth:`set_aside`, which only moves within this folder.
        """
        path = f"{self.root}/{_MOVE_NOTE}"
        if not self.files.exists(path):
            return None
        note = self.noted(_MOVE_NOTE)
        if not isinstance(note, dict):
            note = {}
        name = note.get("folder")
        steps = note.get("steps")
        is_folder = isinstance(name, str) and _ASIDE.fullmatch(name) is not None
        # type() and not isinstance(), because True and False are no steps.
        if (
            is_folder
            and isinstance(steps, list)
            and all(type(step) is int and step >= 0 for step in steps)
        ):
            return _Move(str(name), steps)
        raise CheckpointError(
            f"{path}: must name a folder set-aside-NUMBER and a list of steps; remove the file to "
            "leave all checkpoints where they are"
        )

    def _names_of_step(self, step: int) -> tuple[str, str]:
        """Returns the path of a step's checkpoint, and the path of a second one of the same step."""
        first = f"{self._address}/step-{step:010d}"
        return first, first + _AGAIN

    def _is_whole(self, path: str) -> bool:
        return bool(self.files.exists(f"{path}/{MANIFEST_NAME}"))

    def _remove(self, path: str) -> None:
        """Removes a checkpoint, manifest first, so that an incomplete one never counts."""
        if self._is_whole(path):
            self.files.rm(f"{path}/{MANIFEST_NAME}")
        if self.files.exists(path):
            self.files.rm(path, recursive=True)

    def _settle(self, step: int) -> None:
        """Keeps the second checkpoint of a step saved twice; locally it takes the name of the first."""
        first, second = self._names_of_step(step)
        if self._is_whole(second):
            self._remove(first)
            if not self.remote:
                rename_synced(second, first)

    def _names(self) -> list[str]:
        return [_name_of(path) for path in self.files.ls(self.root, detail=False)]

    def note(self, name: str, content: Any) -> None:
        """Writes a small JSON file next to the checkpoints, atomically in a local folder."""
        path = f"{self.root}/{name}"
        text = json.dumps(content) + "\n"
        if self.remote:
            # There may be no checkpoint yet.
            self.files.makedirs(self.root, exist_ok=True)
            with self.files.open(path, "w") as stream:
                stream.write(text)
            return
        write_whole(path, text.encode())

    def noted(self, name: str) -> Any:
        """Returns the content written by :meth:`note`; None if it is missing or damaged."""
        # Behind an address there is no atomic write, so a note may be cut short.
        with (
            contextlib.suppress(OSError, ValueError, RecursionError),
            self.files.open(f"{self.root}/{name}", "r") as stream,
        ):
            return json.loads(stream.read())
        return None

    def lock(self) -> None:
        """Keeps other jobs from writing here until :meth:`unlock` or the end of this process.

        Behind an address there is no lock, because an object store offers none.

        Raises:
            CheckpointError: another process holds it, the folder cannot be written, or its file system has no locks.
        """
        if self._lock is not None:
            return
        if not self.remote:
            self._lock = lock_folder(
                self.root,
                "lock",
                CheckpointError,
                shown=f"checkpoint folder '{self.root}'",
                busy="stop that job, or give this one another --run_dir",
                otherwise="choose another --run_dir",
            )
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._lock.flush()
        self._finish_setting_aside()

    def unlock(self) -> None:
        """Lets other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _entries(self) -> list[tuple[str, int, bool]]:
        """Returns (name, step, is it complete) of every checkpoint begun here."""
        if not self.files.exists(self.root):
            return []
        names = self._names()
        entries = []
        # All steps of a pending move leave the list at once, so that a resume never
        # sees half of them.
        moved_steps: list[int] = []
        if _MOVE_NOTE in names and (move := self._pending_move()) is not None:
            moved_steps = move.steps
        for name in names:
            match = _STEP_NAME.fullmatch(
                name.removesuffix(_PARTIAL).removesuffix(_AGAIN)
            )
            if match and int(match[1]) not in moved_steps:
                # A partial folder never counts, not even if a kill came between its
                # manifest and its new name.
                is_whole = not name.endswith(_PARTIAL) and self._is_whole(
                    f"{self.root}/{name}"
                )
                entries.append((name, int(match[1]), is_whole))
        return entries


def _file_system(folder: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a path or an address, and the folder's path there."""
    if not is_url(folder):
        folder = str(Path(folder).absolute())
    files, root = url_to_fs(folder)
    return files, root


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


# The others wait for a rank while it writes.
_TIMEOUT = timedelta(minutes=30)


class CheckpointRanks:
    """Lets the ranks of a job agree on a checkpoint, over a process group of their own.

    Every rank makes one, and all ranks call each method, from one thread at a time.

    Args:
        runtime: rank of this process, and the number of ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank = runtime.rank
        self.ranks = runtime.world_size
        self.group: dist.ProcessGroup | None = None
        # A thread meets the other ranks here while the training uses the group of all.
        if runtime.world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank."""
        return gather_objects(value, self.ranks, self.group)

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Runs ``action`` on rank 0; returns its result, or raises its exception, on every rank."""
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = action()
            # Any failure must reach the other ranks, which wait for the outcome.
            except Exception as error:
                outcome = error
        outcome = self.gathered(outcome)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


# A guard against files that are no manifest. The records of millions of steps fit: a
# manifest that was written must be read, or the run begins anew.
_MAX_MANIFEST_BYTES = 2**30
_MANIFEST_TYPES = {
    "step": int,
    "world_size": int,
    "tables": dict,
    "paths": dict,
    "layers": list,
    "row_parts": dict,
    "content": dict,
    "files": dict,
}


def read_checkpoint_manifest(path: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer format.
    """
    where = f"{path}/{MANIFEST_NAME}"
    saved = opened(
        _read_bytes(where, f"; is '{path}' a checkpoint?", _MAX_MANIFEST_BYTES), where
    )
    missing = [
        name
        for name, kind in _MANIFEST_TYPES.items()
        if not isinstance(saved.get(name), kind)
    ]
    if missing:
        raise CheckpointError(
            f"{where} is not the manifest of a checkpoint: it lacks {', '.join(missing)}"
        )
    return saved


def read_index(path: str) -> Metadata:
    """Returns torch's index of a checkpoint: the file of each chunk of each tensor.

    Raises:
        CheckpointError: it is missing, damaged, or was made to run code.
    """
    return read_metadata(_read_bytes(f"{path}/.metadata"), f"{path}/.metadata")


def damage(path: str, together: CheckpointRanks) -> str | None:
    """Describes the damage of a checkpoint, or returns None; the ranks share the reading of its files."""
    try:
        listed = read_checkpoint_manifest(path)["files"]
        wrong = damaged(
            url_to_fs(path)[0],
            path,
            listed,
            sorted(listed)[together.rank :: together.ranks],
        )
    # The list of files is a dict, but its entries may have another form.
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        wrong = str(error)
    return next(filter(None, together.gathered(wrong)), None)


def newest_good(
    folder: CheckpointFolder,
    together: CheckpointRanks,
    say: Callable[[str], None] = print,
) -> str | None:
    """Returns the path of the newest undamaged checkpoint, the same on every rank; None if there is none.

    Args:
        folder: checkpoints to choose from.
        together: ranks of the job; all call this function.
        say: called on rank 0 with a line for each newer, damaged checkpoint.
    """
    for step in together.on_main(folder.steps):
        path = folder.path(step)
        wrong = damage(path, together)
        if wrong is None:
            return path
        if together.rank == 0:
            say(f"checkpoint step {step}: {wrong}; the one before it is used")
    return None


def _read_bytes(where: str, hint: str = "", max_bytes: int | None = None) -> bytes:
    try:
        files, path = url_to_fs(where)
        # One byte more shows that the file is too large; -1 reads all of it.
        count = -1 if max_bytes is None else max_bytes + 1
        with _open(files, path) as stream:
            data: bytes = stream.read(count)
        if max_bytes is not None and len(data) > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has more than the {max_bytes:,} bytes that are read"
            )
        return data
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror or error}{hint}"
        ) from None


# An NFS client may cache for this long that a file is missing.
_LATE_S = 30.0


def check_shared(folder: str, rank: int, gathered: Callable[[Any], list[Any]]) -> None:
    """Refuses a folder if some rank cannot see the files of rank 0 in it; all ranks call it together.

    Otherwise each host would keep only its own ranks' part of a checkpoint, and nobody could load it.

    Args:
        folder: path, which each rank takes from its own working folder, or address that fsspec opens.
        rank: rank of this process.
        gathered: function from a JSON value of this rank to the values of all ranks, in rank order.

    Raises:
        CheckpointError: on every rank alike, naming ranks, hosts and remedy.
    """
    files, root = _file_system(folder)
    probe = None
    if rank == 0:
        probe = _write_probe(files, root)
    name, wrong = gathered(probe)[0]
    if wrong:
        raise CheckpointError(f"folder '{folder}' cannot be written: {wrong}")
    sees_file = rank == 0 or _wait_for_file(files, f"{root}/{name}")
    views = gathered((sees_file, socket.gethostname()))
    if rank == 0:
        files.rm(f"{root}/{name}")
    blind = []
    for number, (sees, host) in enumerate(views):
        if not sees:
            blind.append(f"rank {number} on {host}")
    if blind:
        more = ""
        if len(blind) > 1:
            more = f" and {len(blind) - 1} more"
        raise CheckpointError(
            f"folder '{folder}': {blind[0]}{more} cannot see what rank 0 on {views[0][1]} writes; "
            "give a folder that all hosts share: --run_dir, or checkpoint.folder=s3://bucket/runs"
        )


def _write_probe(files: AbstractFileSystem, root: str) -> tuple[str, str]:
    """Writes a file with a new random name, which no client has cached as missing; returns its name and the error."""
    name = f".shared-{secrets.token_hex(8)}"
    try:
        files.makedirs(root, exist_ok=True)
        with files.open(f"{root}/{name}", "wb") as stream:
            stream.write(b"seen by all ranks?\n")
    except OSError as error:
        return name, str(error.strerror or error)
    except Exception as error:
        # Each driver has errors of its own: no such bucket, no right, no network,
        # read-only.
        return (
            name,
            f"{type(error).__name__}({error}); check the address, its rights and the network",
        )
    return name, ""


def _wait_for_file(files: AbstractFileSystem, path: str) -> bool:
    """Waits for a file; returns whether it appeared in time."""
    end = time.monotonic() + _LATE_S
    while True:
        # fsspec's drivers keep the listing of a folder.
        files.invalidate_cache()
        if files.exists(path):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
