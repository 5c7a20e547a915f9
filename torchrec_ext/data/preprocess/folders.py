"""Folders as results: complete or absent, never replacing anything else; a full disk is reported with a remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_ext.data.files.sources import DataFile
from torchrec_ext.schema import DataError
from torchrec_ext.sealed import (
    begin_folder,
    replace_folder,
    visible_name,
)

_FULL = (
    "no space left",
    "disk full",
    "out of disk",
    "disk quota",
    "not enough disk",
    "max_temp_directory_size",
)


@contextmanager
def whole_folder(out: Path, *, overwrite: bool, mark: str) -> Iterator[Path]:
    """Yields a folder to write to; it is renamed to ``out`` if the block succeeds, and removed if it raises.

    A process that is killed leaves a hidden folder, ``.NAME.partial``, which the next one for the same name takes over;
    one that is being written is locked, and a second writer is refused. An earlier result that is replaced is hidden
    for a moment, in which :func:`~torchrec_ext.sealed.existing_folder` finds it; after a kill the next process puts it
    back.

    Args:
        out: path of the result.
        overwrite: replace an earlier result.
        mark: pattern of a file that every earlier result has; a folder without one is never replaced.

    Raises:
        DataError: there is something at ``out`` already, or another process writes it, or it cannot be written.
    """
    if re.match(r"\w+:/", str(out)) or not out.name:
        raise DataError(
            f"{out}: must be the path of a folder to make; write to this machine or a mounted disk, and copy it from "
            "there"
        )
    with disk_errors(out):
        staging, lock = begin_folder(out)
    try:
        # An earlier result that a killed process hid is put back, and counts.
        _check_free(out, overwrite, mark)
        with disk_errors(out, writing=False):
            yield staging
        with disk_errors(out):
            replace_folder(staging, out)
    except BaseException:
        # While it is locked: behind, it may be another process's.
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def keep_sources(out: Path, files: Iterable[DataFile]) -> None:
    """Refuses to replace a folder with source files in it.

    Raises:
        DataError: naming the file.
    """
    for file in files:
        # Resolved, because either path may lead over a link.
        if not file.remote and out.resolve() in Path(file.path).resolve().parents:
            raise DataError(
                f"{out}: holds {file.name}, which is being read; choose another folder for the result"
            )


def _check_free(out: Path, overwrite: bool, mark: str) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise DataError(
            f"{out}: there is something already; choose another folder, or give --overwrite true (overwrite=True)"
        )
    if not any(out.glob(mark)):
        raise DataError(
            f"{out}: is not the folder of an earlier result (it has no {mark}), and is not replaced; choose another one"
        )


@contextmanager
def disk_errors(out: Path, *, writing: bool = True) -> Iterator[None]:
    """Raises a DataError with a remedy if the disk is full or cannot be written.

    Args:
        out: folder that is being written.
        writing: whether every system error in the block is one of writing; otherwise only a full disk is reported so.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        folder = visible_name(out)
        # DuckDB wraps the system's error, so its number may be gone and only its words
        # are left.
        full = isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
        )
        if full or any(word in str(error).lower() for word in _FULL):
            raise DataError(
                f"{folder}: the disk is full; free space there, or in TMPDIR, where DuckDB puts what exceeds memory; "
                f"nothing partial was left ({error})"
            ) from error
        if writing and isinstance(error, OSError):
            raise DataError(
                f"{folder}: cannot be written ({error.strerror or error}); choose another folder; nothing partial was "
                "left"
            ) from error
        raise
