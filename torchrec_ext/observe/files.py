"""FilesWritten: the files that a step writes."""

from __future__ import annotations

import functools
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DESCRIPTORS = Path("/proc/self/fd")
_NO_FILES = ("/proc/", "/dev/", "/sys/")
_STANDARD = 3  # descriptors of the standard streams lie below
_watchers: set[FilesWritten] = set()


class FilesWritten:
    """The files that this process opens for writing, renames or writes meanwhile.

    Attributes:
        paths: paths of the files.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def __enter__(self) -> FilesWritten:
        _add_hook()
        self._start = time.time_ns()
        self._sizes = {path: about.st_size for path, about in _open_for_writing()}
        _watchers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watchers.discard(self)
        for path, about in _open_for_writing():
            # A lock file that stays empty is not written, although another process may
            # touch it.
            is_empty = not about.st_size and not self._sizes.get(path, 1)
            if about.st_mtime_ns >= self._start and not is_empty:
                self.paths.add(path)

    def note(self) -> str:
        """Returns a sentence about these files; empty if there are none."""
        paths = sorted(
            path
            for path in self.paths
            if not path.startswith(_NO_FILES) and not path.endswith(".pyc")
        )
        if not paths:
            return ""
        more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
        return f"the step wrote to files for real, and they are not put back: {', '.join(paths[:5])}{more}"


def _open_for_writing() -> Iterator[tuple[str, os.stat_result]]:
    """Yields the regular files that are open for writing, by path."""
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.exists() else ():
        try:
            about = os.fstat(int(entry.name))
            path = os.readlink(entry)
            flags = (
                Path(f"/proc/self/fdinfo/{entry.name}")
                .read_text()
                .split("flags:")[1]
                .split()[0]
            )
        except OSError:  # closed meanwhile, as the descriptor of this listing
            continue
        writable = (
            int(flags, 8) & (os.O_WRONLY | os.O_RDWR) and int(entry.name) >= _STANDARD
        )
        # A file without a link has no name any more: it is gone when it is closed.
        if writable and stat.S_ISREG(about.st_mode) and about.st_nlink:
            yield path, about


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watchers or event not in ("open", "os.rename"):
        return
    if event == "os.rename":
        path: Any = args[1]
    else:
        path, mode, flags = args
        if isinstance(mode, str):
            writes = any(letter in mode for letter in "wax+")
        else:
            # os.open has flags and no mode.
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
        # A number is a descriptor, whose path was seen when it was opened.
        if not writes or isinstance(path, int):
            return
    for each in _watchers:
        each.paths.add(os.fsdecode(path))


@functools.cache
def _add_hook() -> None:
    """Adds the audit hook once: Python cannot remove one."""
    sys.addaudithook(_audit)
