"""CheckpointFolder: the checkpoints of one run, each complete or absent.

A checkpoint is what torch.distributed.checkpoint writes, sealed by a manifest that is written last. It has torch's
index as JSON, and lists the files with their digests, so a damaged or mixed checkpoint is never loaded.
CheckpointRanks lets the ranks of a job agree on a checkpoint. check_shared() refuses, before the first step, a folder
that some host cannot see.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.sealed import (
    difference,
    measure_stream,
    open_plain,
    sealed_json,
    sync_to_disk,
    take_lock,
    write_whole,
)
from torchrec_ext.train.checkpoint.storage import (
    CheckpointError,
    index_from_json,
    is_url,
)

MANIFEST_NAME = "manifest.json"
_BEST_NAME = "best.json"
# Format of manifests; a reader refuses others.
MANIFEST_FORMAT = 3


def _open(files: AbstractFileSystem, path: str) -> Any:
    """Opens a file for reading; a local one only if it is a plain file."""
    if not isinstance(files, LocalFileSystem):
        return files.open(path, "rb")
    # A local file is given by a path, or by file:// and a path.
    return open_plain(url_to_fs(path)[1])


def sealed(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest, including the digest of its own content."""
    return sealed_json({"format": MANIFEST_FORMAT, **content}, "sha256")


def opened(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a manifest.

    Args:
        data: bytes of the file.
        where: path of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    try:
        manifest = json.loads(data)
        del manifest["sha256"]
        version = manifest["format"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{where} is damaged: it is not a manifest") from None
    if isinstance(version, int) and version != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{where} is of format {version}, this version reads {MANIFEST_FORMAT}: take the release that wrote it (1: "
            "0.1.0), whose torchx_apps.publish keeps the weights"
        )
    # The bytes, its digest among them: JSON with, for example, a key given twice has the
    # same content under other bytes.
    if data != sealed(manifest):
        raise CheckpointError(
            f"{where} is damaged: its content does not fit its digest"
        )
    return manifest  # type: ignore[no-any-return]


_STEP_NAME = re.compile(r"step-(\d{10})")


class CheckpointFolder:
    """Folder of ``step-0000000120`` folders, on a local file system or behind any address fsspec opens.

    A checkpoint exists once its manifest exists, which is written last, and no longer once it is removed, first.

    Args:
        folder: a path, or an address such as ``s3://bucket/runs/a``.

    Attributes:
        address: the absolute path, or the address.
        files: the file system behind it.
        remote: whether it is an address.

    Raises:
        CheckpointError: an address that no installed driver opens.
    """

    def __init__(self, folder: str) -> None:
        self.remote = is_url(folder)
        # Not the slashes of memory:// and file:///, whose rest is a local path to fsspec.
        self.address = re.sub(r"(?<![:/])/+$", "", folder)
        if not self.remote:
            self.address = str(Path(folder).absolute())
        # A cache in front of a store need not hold what others have written.
        if self.remote and "::" in folder:
            raise CheckpointError(
                f"checkpoint folder '{folder}': an address without '::' is needed; name the store itself"
            )
        try:
            self.files = url_to_fs(self.address)[0]
        except Exception as error:
            # Each driver has errors of its own: not installed, no such protocol, no
            # network, no right.
            raise CheckpointError(
                f"checkpoint folder '{folder}' cannot be opened ({type(error).__name__}: {error}); check the address, "
                "its driver and the network"
            ) from None
        self._lock: IO[str] | None = None

    def path(self, step: int) -> str:
        """Returns the path or address of the checkpoint after ``step`` steps."""
        return f"{self.address}/step-{step:010d}"

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, newest first."""
        return sorted(
            (step for step in self._begun() if self._is_whole(step)), reverse=True
        )

    def begin(self, step: int) -> None:
        """Makes an empty folder for the checkpoint after ``step`` steps.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self.path(step)
        try:
            self.remove(step)
            self.files.makedirs(path, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint folder '{path}' cannot be made: {error.strerror or error}"
            ) from None

    def seal(self, step: int, content: Mapping[str, Any]) -> None:
        """Makes the written files a checkpoint: writes its manifest."""
        self.write(f"{self.path(step)}/{MANIFEST_NAME}", sealed(content))
        if not self.remote:
            sync_to_disk(self.address)

    def clean(self) -> list[str]:
        """Removes unfinished checkpoints, and returns their names."""
        unfinished = [step for step in self._begun() if not self._is_whole(step)]
        for step in unfinished:
            self.remove(step)
        return [_name_of(self.path(step)) for step in unfinished]

    def prune(self, keep: int) -> None:
        """Removes all checkpoints except the newest ``keep`` and the best."""
        best = self.best()
        for step in self.steps()[keep:]:
            if step != best:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, manifest first, so that an incomplete one never counts."""
        path = self.path(step)
        if self._is_whole(step):
            self.files.rm(f"{path}/{MANIFEST_NAME}")
        if self.files.exists(path):
            self.files.rm(path, recursive=True)

    def set_aside(self, step: float) -> str | None:
        """Renames every checkpoint newer than ``step``, out of reach of resume and pruning.

        A run that goes on from an earlier step, or begins anew, has another future. The newest one goes first: if a
        kill interrupts it, the newest that is left is still of the former run, as if nobody had gone back.

        Returns:
            A line that names the steps, or None if no checkpoint is newer.
        """
        ahead = [newer for newer in self.steps() if newer > step]
        for newer in ahead:
            aside = f"{self.address}/aside-{newer:010d}"
            if self.files.exists(aside):
                self.files.rm(aside, recursive=True)
            # An object store moves file by file. One that is missing is found by the
            # digests.
            self.files.mv(self.path(newer), aside, recursive=True)
        if not ahead:
            return None
        steps = ", ".join(f"{newer:,}" for newer in sorted(ahead))
        return f"set aside: the checkpoints of step {steps}, ahead of step {step:,}, are {self.address}/aside-*"

    def mark_best(self, step: int | None) -> None:
        """Marks the checkpoint of the best evaluation; None for none."""
        mark = json.dumps({"step": step})
        self.write(f"{self.address}/{_BEST_NAME}", f"{mark}\n".encode())

    def best(self) -> int | None:
        """Returns the step that :meth:`mark_best` has marked; None if it is none, or damaged."""
        mark = None
        # Behind an address there is no atomic write, so a mark may be cut short.
        with (
            contextlib.suppress(OSError, ValueError, RecursionError),
            _open(self.files, f"{self.address}/{_BEST_NAME}") as stream,
        ):
            mark = json.loads(stream.read())
        return mark.get("step") if isinstance(mark, dict) else None

    def write(self, path: str, content: bytes) -> None:
        """Writes a file below the folder, atomically in a local one."""
        # There may be no checkpoint yet.
        self.files.makedirs(self.address, exist_ok=True)
        if self.remote:
            with self.files.open(path, "wb") as stream:
                stream.write(content)
        else:
            write_whole(path, content)

    def lock(self) -> None:
        """Keeps other jobs from writing here until :meth:`unlock` or the end of this process.

        Behind an address there is no lock, because an object store offers none.

        Raises:
            CheckpointError: another process holds it, the folder cannot be written, or its file system has no locks.
        """
        if self._lock is not None or self.remote:
            return
        folder = f"checkpoint folder '{self.address}'"
        remedy = "or give this one another --run_dir"
        try:
            self.files.makedirs(self.address, exist_ok=True)
            file = open(f"{self.address}/lock", "a")  # noqa: SIM115  (held until unlock)
            is_free = take_lock(file)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written or locked: {error.strerror or error}; mount its file system with locks, "
                f"{remedy}"
            ) from None
        if not is_free:
            file.close()
            raise CheckpointError(
                f"{folder} is being written by another job; stop that job, {remedy}"
            )
        self._lock = file

    def unlock(self) -> None:
        """Lets other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _is_whole(self, step: int) -> bool:
        return bool(self.files.exists(f"{self.path(step)}/{MANIFEST_NAME}"))

    def _begun(self) -> list[int]:
        """Returns the steps of all checkpoints begun here, complete or not."""
        if not self.files.exists(self.address):
            return []
        names = [_name_of(path) for path in self.files.ls(self.address, detail=False)]
        return [int(match[1]) for match in map(_STEP_NAME.fullmatch, names) if match]


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
        self._has_left = False
        # A thread meets the other ranks here while the training uses the group of all.
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank.

        Raises:
            CheckpointError: this rank has left.
        """
        if self._has_left:
            raise CheckpointError("a rank was lost while a checkpoint was written")
        return gather_objects(value, self.ranks, self.group)

    def leave(self) -> None:
        """Closes the connections of the group: a rank that waits in it fails at once, instead of after 30 minutes."""
        if self.group is not None:
            self._has_left = True
            dist.destroy_process_group(self.group)
            self.group = None

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


# A guard against files that are no manifest.
_MAX_MANIFEST_BYTES = 2**30
_MANIFEST_TYPES = {
    "step": int,
    "world_size": int,
    "paths": dict,
    "tensors": dict,
    "content": dict,
    "files": dict,
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint's path, manifest, and torch's index of it: the file of each chunk of each tensor."""

    path: str
    manifest: dict[str, Any]
    index: Metadata


def read_checkpoint(path: str) -> Saved:
    """Returns what a checkpoint says of itself; its files are not read.

    Raises:
        CheckpointError: it has no manifest, or one that is damaged or of another format.
    """
    where = f"{path}/{MANIFEST_NAME}"
    try:
        with _open(*url_to_fs(where)) as stream:
            data: bytes = stream.read(_MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{where} cannot be read: {error.strerror or error}; is '{path}' a checkpoint?"
        ) from None
    manifest = opened(data, where)
    for name, kind in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(
                f"{where} is not the manifest of a checkpoint: it lacks {name}"
            )
    return Saved(path, manifest, index_from_json(manifest["tensors"], where))


def damage(path: str, together: CheckpointRanks) -> str | None:
    """Describes the damage of a checkpoint, or returns None; the ranks share the reading of its files."""
    wrong = None
    try:
        listed = read_checkpoint(path).manifest["files"]
        for name in sorted(listed)[together.rank :: together.ranks]:
            wrong = wrong or _file_damage(f"{path}/{name}", listed[name])
    # The list of files is a dict, but its entries may have another form.
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        wrong = str(error)
    return next(filter(None, together.gathered(wrong)), None)


def _file_damage(path: str, listed: Mapping[str, Any]) -> str | None:
    """Describes how a file differs from its entry in the manifest; None if it does not."""
    try:
        with _open(url_to_fs(path)[0], path) as stream:
            wrong = difference(measure_stream(stream), listed)
    except FileNotFoundError:
        wrong = "is missing"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
    return f"{path} {wrong}" if wrong else None


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
            say(f"checkpoint step {step}: {wrong}; it is left out")
    return None


def check_shared(folder: CheckpointFolder, together: CheckpointRanks) -> None:
    """Refuses a folder if some rank cannot see the files of rank 0 in it; all ranks call it together.

    Otherwise each host would keep only its own ranks' part of a checkpoint, and nobody could load it.

    Raises:
        CheckpointError: on every rank alike, naming rank and remedy.
    """
    # A new random name, which no client has cached as missing.
    name = together.on_main(lambda: f".shared-{secrets.token_hex(8)}")
    path = f"{folder.address}/{name}"

    def write() -> None:
        try:
            folder.write(path, b"seen by all ranks?\n")
        except Exception as error:
            # Each driver has errors of its own: no such bucket, no right, no network.
            raise CheckpointError(
                f"folder '{folder.address}' cannot be written: {type(error).__name__}({error}); check the address, its "
                "rights and the network"
            ) from None

    together.on_main(write)
    # fsspec's drivers keep the listing of a folder.
    folder.files.invalidate_cache()
    seen = together.gathered(bool(folder.files.exists(path)))
    together.on_main(lambda: folder.files.rm(path))
    if not all(seen):
        raise CheckpointError(
            f"folder '{folder.address}': rank {seen.index(False)} cannot see what rank 0 writes; give a folder that "
            "all hosts share: --run_dir, or checkpoint.folder=s3://bucket/runs"
        )
