"""CheckpointFolder: the checkpoints of one run side by side, each there as a whole or not at all.

The manifest of a checkpoint: what belongs to it and the digest of each file, so that no damage and no mixture is ever
loaded.

A checkpoint's own account of itself, and what is wrong with it.

CheckpointRanks: what the ranks of a job learn from each other around a checkpoint, over a process group of its own.

check_shared(): a folder that cannot be written, or that only one of several hosts sees, is refused before the first
step.
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
from typing import IO, Any

import torch.distributed as dist
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.distributed.runtime import Runtime
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

NAME = "manifest.json"
FORMAT = 1
_BLOCK = 2**22


def digest(files: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Size and SHA-256 of one file."""
    local = isinstance(files, LocalFileSystem)
    with open_plain(url_to_fs(path)[1]) if local else files.open(path, "rb") as stream:  # a path, or file:// and a path
        return measure_stream(stream)


def sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with a digest of its own content."""
    return sealed_json({"format": FORMAT, **content}, "sha256")


def manifest_digest(content: Mapping[str, Any]) -> str:
    """The digest that a manifest of ``content`` is sealed with, by which a later checkpoint names its parent."""
    return json_digest({"format": FORMAT, **content})


def opened(data: bytes, where: str) -> dict[str, Any]:
    """The content of a manifest.

    Args:
        data: its bytes.
        where: its path, for messages.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    try:
        whole = json.loads(data)
        sha = whole.pop("sha256")
        version = whole["format"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{where} is damaged: it is not a manifest") from None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{where} is of format {version}, this version reads up to {FORMAT}: update torchrec-ext")
    if sha != json_digest(whole) or data != sealed(whole):
        raise CheckpointError(f"{where} is damaged: its content does not fit its digest")
    return whole  # type: ignore[no-any-return]


def damaged(
    files: AbstractFileSystem, folder: str, listed: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> str | None:
    """What is wrong with the first damaged one of ``names``, which the manifest lists; None where all are as they were written."""
    for name in names:
        path, wanted = f"{folder}/{name}", listed[name]
        try:
            wrong = difference(digest(files, path), wanted)
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read: {error.strerror or error}"
        if wrong:
            return f"{path} {wrong}"
    return None


_NAME = re.compile(r"step-(\d{10})")
_PARTIAL, _AGAIN = ".partial", ".again"
_ASIDE = re.compile(r"set-aside-(\d+)")
_MOVING = "set-aside.json"  # what is being set aside: written first, so that no kill leaves a part of it to be resumed


class CheckpointFolder:
    """A folder of ``step-0000000120`` folders, on a local file system or behind any address that fsspec opens.

    A checkpoint is one from the moment its manifest is there. Locally it is written beside, synced and renamed; an
    object store has no rename, and its manifest is written last. A step that is saved twice is for a moment, and behind
    an address for good, in ``step-0000000120.again``, so that the first one stays until the second is whole.

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
                f"checkpoint folder '{folder}' cannot be opened ({type(error).__name__}: {error}); check the address, "
                "its driver "
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
            raise CheckpointError(
                f"checkpoint folder '{self.path(step)}' cannot be made: {error.strerror or error}"
            ) from None
        return path

    def commit(self, step: int, content: bytes) -> None:
        """Makes what was written a checkpoint, whose manifest is ``content``."""
        path, (first, second) = self.writing(step), self._places(step)
        if self.remote:
            with self.files.open(f"{path}/{NAME}", "wb") as stream:
                stream.write(content)
            self._remove(first if path == second else second)
            return
        write_whole(f"{path}/{NAME}", content)
        rename_synced(path, second if os.path.exists(first) else first)
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

        A run that goes on from an earlier step is another branch from there on: what lies ahead of it is not its past,
        and would else be taken for the newest, and what the run saves for the oldest. From one moment to the next none
        of them is listed any more; a move that a kill has interrupted is finished by the next :meth:`lock`.

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
            sync_to_disk(aside)
            sync_to_disk(self.root)
        self.files.rm(f"{self.root}/{_MOVING}")

    def _places(self, step: int) -> tuple[str, str]:
        """Where the checkpoint of a step is, and where it is once the step was saved twice."""
        first = f"{self._address}/step-{step:010d}"
        return first, first + _AGAIN

    def _is_whole(self, path: str) -> bool:
        return bool(self.files.exists(f"{path}/{NAME}"))

    def _remove(self, path: str) -> None:
        """The manifest first, so that no checkpoint is ever half there."""
        if self._is_whole(path):
            self.files.rm(f"{path}/{NAME}")
        if self.files.exists(path):
            self.files.rm(path, recursive=True)

    def _settle(self, step: int) -> None:
        """Of a step that was saved twice only the later one stays; locally it takes the name of the first."""
        first, second = self._places(step)
        if self._is_whole(second):
            self._remove(first)
            if not self.remote:
                rename_synced(second, first)

    def _names(self) -> list[str]:
        return [_name_of(path) for path in self.files.ls(self.root, detail=False)]

    def note(self, name: str, content: Any) -> None:
        """Writes a small JSON file beside the checkpoints, as a whole."""
        path = f"{self.root}/{name}"
        text = json.dumps(content) + "\n"
        if self.remote:
            self.files.makedirs(
                self.root, exist_ok=True
            )  # where nothing was saved yet; a store without folders has nothing to do
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
            self._lock = lock_folder(
                self.root,
                "lock",
                CheckpointError,
                shown=f"checkpoint folder '{self.root}'",
                busy="stop that job, or give this one another --run-dir",
                otherwise="choose another --run-dir",
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
                found.append(
                    (name, int(match[1]), not name.endswith(_PARTIAL) and self._is_whole(f"{self.root}/{name}"))
                )
        return found


def _name_of(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


_TIMEOUT = timedelta(minutes=30)  # a rank may write for as long


class CheckpointRanks:
    """Every rank makes one and calls each method alike, from one thread at a time.

    Args:
        runtime: this process's place in the job.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.ranks = runtime.rank, runtime.world_size
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if runtime.world_size > 1 else None

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_main(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0, or raises there, on every rank."""
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = action()
            except Exception as error:
                outcome = error
        outcome = self.gathered(outcome)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


_MOST_BYTES = 16 * 2**20  # of a manifest, which lists the files of all ranks: a hundred thousand
_CONTENT = {
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
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer format.
    """
    where = f"{path}/{NAME}"
    saved = opened(_bytes(where, f"; is '{path}' a checkpoint?", _MOST_BYTES), where)
    lacks = [name for name, kind in _CONTENT.items() if not isinstance(saved.get(name), kind)]
    if lacks:
        raise CheckpointError(f"{where} is no manifest of a checkpoint: it lacks {', '.join(lacks)}")
    return saved


def read_index(path: str) -> Metadata:
    """Where each part of each tensor is.

    Raises:
        CheckpointError: it is missing, damaged, or was made to run code.
    """
    return read_metadata(_bytes(f"{path}/.metadata"), f"{path}/.metadata")


def damage(path: str, together: CheckpointRanks) -> str | None:
    """What is wrong with a checkpoint, or None; the ranks share the reading of its files."""
    try:
        listed = read_checkpoint_manifest(path)["files"]
        found = damaged(url_to_fs(path)[0], path, listed, sorted(listed)[together.rank :: together.ranks])
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        found = str(error)
    return next((each for each in together.gathered(found) if each), None)


def newest_good(folder: CheckpointFolder, together: CheckpointRanks, say: Callable[[str], None] = print) -> str | None:
    """The newest checkpoint of a folder without damage, the same on every rank; None where there is none.

    Args:
        folder: of checkpoints.
        together: all ranks call it.
        say: called on rank 0 with a line for each newer one that is damaged.
    """
    for step in together.on_main(folder.steps):
        path = folder.path(step)
        if (wrong := damage(path, together)) is None:
            return path
        if together.rank == 0:
            say(f"checkpoint step {step}: {wrong}; the one before it is used")
    return None


def _bytes(where: str, hint: str = "", most: int | None = None) -> bytes:
    try:
        files, path = url_to_fs(where)
        with open_plain(path) if isinstance(files, LocalFileSystem) else files.open(path, "rb") as stream:
            data: bytes = stream.read(-1 if most is None else most + 1)
        if most is not None and len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than the {most:,} bytes that are read")
        return data
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}{hint}") from None


_LATE_S = 30.0  # for which a client of NFS may go on believing that a folder it once looked for is not there


def check_shared(folder: str, rank: int, gathered: Callable[[Any], list[Any]]) -> None:
    """Refuses a folder in which not every rank sees what rank 0 writes; all ranks call it together.

    Each host would keep the parts of a checkpoint that its own ranks write, and no one could load it.

    Args:
        folder: a path, which each rank takes from its own working folder, or an address that fsspec opens.
        rank: of this process.
        gathered: from this rank's value, of what JSON holds, to those of all ranks in rank order.

    Raises:
        CheckpointError: on every rank alike, naming ranks, hosts and remedy.
    """
    files, root = url_to_fs(folder if is_url(folder) else str(Path(folder).absolute()))
    name, wrong = gathered(_write(files, root) if rank == 0 else None)[0]
    if wrong:
        raise CheckpointError(f"folder '{folder}' cannot be written: {wrong}")
    seen = gathered((rank == 0 or _appears(files, f"{root}/{name}"), socket.gethostname()))
    if rank == 0:
        files.rm(f"{root}/{name}")
    blind = [f"rank {number} on {host}" for number, (sees, host) in enumerate(seen) if not sees]
    if blind:
        more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
        raise CheckpointError(
            f"folder '{folder}': {blind[0]}{more} cannot see what rank 0 on {seen[0][1]} writes there, and what the "
            "ranks save "
            "could never be loaded; give a folder that all hosts share, by an absolute path, with --run_dir "
            "(checkpoints also with "
            "checkpoint.folder, to an address such as s3://bucket/runs)"
        )


def _write(files: AbstractFileSystem, root: str) -> tuple[str, str]:
    """The name of a new file, which no rank can have looked for before, and what went wrong."""
    name = f".shared-{secrets.token_hex(8)}"
    try:
        files.makedirs(root, exist_ok=True)
        with files.open(f"{root}/{name}", "wb") as stream:
            stream.write(b"seen by all ranks?\n")
    except OSError as error:
        return name, str(error.strerror or error)
    except (
        Exception
    ) as error:  # of an address each driver has its own: no such bucket, no right, no network, only to be read
        return name, f"{type(error).__name__}({error}); check the address, its rights and the network"
    return name, ""


def _appears(files: AbstractFileSystem, path: str) -> bool:
    end = time.monotonic() + _LATE_S
    while True:
        files.invalidate_cache()
        if files.exists(path):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
