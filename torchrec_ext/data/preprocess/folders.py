"""Folders that are whole or not there, whatever ends the process; a full disk told in words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_ext.data.files.find import DataFile
from torchrec_ext.schema import DataError
from torchrec_ext.sealed import exchange, synced

_FULL = ("no space left", "disk full", "out of disk", "disk quota", "not enough disk", "max_temp_directory_size")
_HOST = socket.gethostname()


@contextmanager
def whole_folder(out: Path, *, overwrite: bool, mark: str) -> Iterator[Path]:
    """A folder to write into, which takes its name when the block ends well and vanishes when it does not.

    A process that is killed leaves a hidden folder, ``.NAME.partial-HOST-PID``, which the next one for the same name
    removes, from whatever host; one that is being written is locked, and stays. An earlier result is replaced in one
    step. On a file system that has no such step it is moved aside for a moment, in which :func:`standing` finds it;
    after a kill the next process puts it back.

    Args:
        out: its name.
        overwrite: replace an earlier one.
        mark: the pattern of a file that every earlier one has: a folder without it holds something else, and is never
            replaced.

    Raises:
        DataError: there is something of that name already, or it cannot be written.
    """
    if re.match(r"\w+:/", str(out)) or not out.name:
        raise DataError(
            f"{out}: must be the path of a folder to make; write to this machine or a mounted disk, and copy it from "
            "there"
        )
    with disk_errors(out):
        _remove_leftovers(out)
    _check_free(out, overwrite, mark)
    with hidden_folder(out) as staging:
        with disk_errors(out, writing=False):
            yield staging
        with disk_errors(out):
            _replace(staging, out)


@contextmanager
def hidden_folder(out: Path) -> Iterator[Path]:
    """An empty hidden folder beside ``out`` for the time of the block, locked; what killed processes left there is removed.

    Raises:
        DataError: it cannot be made.
    """
    staging = out.parent / f".{out.name}.partial-{_HOST}-{os.getpid()}"
    with disk_errors(out):
        _remove_leftovers(out)
        held = _made_and_locked(staging)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(held)


def keep_sources(out: Path, files: Iterable[DataFile]) -> None:
    """Refuses to replace a folder that holds what is read.

    Raises:
        DataError: naming the file.
    """
    inside = next(
        (file.name for file in files if not file.remote and out.resolve() in Path(file.path).resolve().parents), None
    )
    if inside:
        raise DataError(f"{out}: holds {inside}, which is being read; choose another folder for the result")


def _check_free(out: Path, overwrite: bool, mark: str) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise DataError(f"{out}: there is something already; choose another folder, or allow it to be overwritten")
    if not any(out.glob(mark)):
        raise DataError(
            f"{out}: is not the folder of an earlier result (it has no {mark}), and is not replaced; choose another one"
        )


def _made_and_locked(staging: Path) -> int:
    """Makes the folder, and holds its lock as long as the returned file descriptor is open."""
    while True:
        staging.mkdir(parents=True)
        handle = os.open(staging, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if staging.exists():
            return handle
        os.close(handle)  # another process took it for a leftover before it was locked


def _remove_leftovers(out: Path) -> None:
    """What killed processes left behind; an earlier result that one of them had moved aside is put back."""
    for old in _hidden(out, "old"):
        writer = out.with_name(old.name.replace(f".{out.name}.old-", f".{out.name}.partial-", 1))
        if writer.exists() and not _remove_unless_written(writer):
            continue
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
    for left in _hidden(out, "partial"):
        _remove_unless_written(left)


def _hidden(out: Path, kind: str) -> list[Path]:
    return list(out.parent.glob(glob.escape(f".{out.name}.{kind}-") + "*"))


def _remove_unless_written(folder: Path) -> bool:
    """Removes the folder where no process is writing it; whether it is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        if _is_written(handle, folder.name):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(handle)


def _is_written(handle: int, name: str) -> bool:
    """Whether a process holds the folder's lock; on a file system without locks the folder's name says whose it is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        host, _, process = name.partition(".partial-")[2].rpartition("-")
        return host != _HOST or not process.isdecimal() or (int(process) != os.getpid() and _runs(int(process)))
    return False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def standing(out: Path) -> Path:
    """The folder, or where it is while, without a step that replaces folders, it makes place for another one."""
    return out if out.exists() else next(iter(_hidden(out, "old")), out)


def _replace(staging: Path, out: Path) -> None:
    if not out.exists() or not exchange(staging, out):
        _replace_in_two_steps(staging, out)
    synced(out.absolute().parent)


def _replace_in_two_steps(staging: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.old-{_HOST}-{os.getpid()}"
    if out.exists():
        out.rename(old)
    try:
        staging.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def disk_errors(out: Path, *, writing: bool = True) -> Iterator[None]:
    """Puts into words what a disk says that is full or read-only.

    Args:
        out: what is being written.
        writing: nothing else happens in the block, so that every system error is one of writing; else only a full disk
            is told.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        shown = _shown(out)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(word in str(error).lower() for word in _FULL):
            raise DataError(
                f"{shown}: the disk is full ({_free(out)}); free space, or choose another disk (TMPDIR for the "
                "second); nothing "
                f"partial was left ({error})"
            ) from error
        if writing and isinstance(error, OSError):
            raise DataError(
                f"{shown}: cannot be written ({error.strerror or error}); choose another folder; nothing partial was "
                "left"
            ) from error
        raise


def _shown(out: Path) -> Path:
    """The folder by the name that it is going to have."""
    return Path(*(re.sub(rf"^\.(.+)\.partial-{re.escape(_HOST)}-\d+$", r"\1", part) for part in out.parts))


def _free(out: Path) -> str:
    at = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    spill = Path(tempfile.gettempdir())
    mib = {place: f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB" for place in (at, spill)}
    return f"{mib[at]} are free in {_shown(at)}, {mib[spill]} in {spill}, where DuckDB puts what memory cannot hold"
