"""Folders that are whole or not there, whatever ends the process; a full disk told in words."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_ext.data.files.find import DataFile
from torchrec_ext.schema import DataError
from torchrec_ext.sealed import make_hidden, remove_leftovers, replace_folder, visible_name

_FULL = ("no space left", "disk full", "out of disk", "disk quota", "not enough disk", "max_temp_directory_size")


@contextmanager
def whole_folder(out: Path, *, overwrite: bool, mark: str) -> Iterator[Path]:
    """A folder to write into, which takes its name when the block ends well and vanishes when it does not.

    A process that is killed leaves a hidden folder, ``.NAME.partial-HOST-PID``, which the next one for the same name
    removes, from whatever host; one that is being written is locked, and stays. An earlier result is replaced in one
    step. On a file system that has no such step it is moved aside for a moment, in which :func:`~torchrec_ext.sealed.existing_folder` finds it;
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
        remove_leftovers(out)
    _check_free(out, overwrite, mark)
    with hidden_folder(out) as staging:
        with disk_errors(out, writing=False):
            yield staging
        with disk_errors(out):
            replace_folder(staging, out)


@contextmanager
def hidden_folder(out: Path) -> Iterator[Path]:
    """An empty hidden folder beside ``out`` for the time of the block, locked; what killed processes left there is removed.

    Raises:
        DataError: it cannot be made.
    """
    with disk_errors(out):
        remove_leftovers(out)
        staging, held = make_hidden(out)
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
        shown = visible_name(out)
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


def _free(out: Path) -> str:
    at = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    spill = Path(tempfile.gettempdir())
    mib = {place: f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB" for place in (at, spill)}
    return (
        f"{mib[at]} are free in {visible_name(at)}, {mib[spill]} in {spill}, where DuckDB puts what memory cannot hold"
    )
