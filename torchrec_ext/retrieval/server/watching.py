"""Watching where the bundle is: another one is loaded beside the live one and takes its place; a broken one is told and left."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_ext.retrieval.manifest import NAME as MANIFEST

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle import Bundle


Identity = tuple[object, ...]
_LONGEST_POINTER = 4096
_OF_A_RUN = "bundle"  # what torchx_apps.training calls the bundle that a run ends with


def bundle_folder(pointer: Path) -> Path:
    """The folder that ``pointer`` leads to: itself, through links, or what is written in it; of a run's folder the bundle in it.

    Raises:
        ValueError: it leads to no folder.
    """
    target = pointer
    if pointer.is_file():
        with pointer.open("rb") as file:
            written = file.read(_LONGEST_POINTER).decode(errors="replace").strip()
        target = pointer.parent / written if written else pointer
    if not os.path.isdir(target):  # of a name that no file can have it is False
        what = "there is no such file or folder" if target == pointer else f"it names {str(target)[:200]!r}, which is no folder"
        raise ValueError(f"bundle {str(pointer)!r}: {what}; give a bundle's folder, a link to one, or a text file with its path")
    of_a_run = target / _OF_A_RUN
    return (of_a_run if not (target / MANIFEST).exists() and (of_a_run / MANIFEST).is_file() else target).resolve()


def identity(pointer: Path) -> Identity:
    """Changes whenever another bundle, or a change inside it, would be found; never raises."""
    try:
        folder = bundle_folder(pointer)
        seen = []
        for parent, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                about = os.stat(os.path.join(parent, name))
                seen.append((parent, name, about.st_ino, about.st_size, about.st_mtime_ns))
        return (str(folder), *seen)
    except (OSError, ValueError) as error:
        return (type(error).__name__,)


class Watcher(threading.Thread):
    """Looks at ``pointer`` every ``every_s`` seconds, and at once after :meth:`look`.

    A change is acted on when it has stood for one look more, so that what is being written is not read half.

    Args:
        pointer: see :func:`bundle_folder`.
        load: from a folder to its bundle; what it raises is the reason why the folder is refused.
        serve: is given a bundle that was loaded; what it raises is the reason why that one is not served.
        refuse: is told why one was not.
        tick: is called at every look; an OSError of it is passed over.
        every_s: seconds between two looks.
        served: the identity of what is served already, taken before that was loaded; what ``pointer`` has now where not given.
    """

    def __init__(
        self,
        pointer: Path,
        load: Callable[[Path], Bundle],
        serve: Callable[[Bundle], None],
        refuse: Callable[[str], None],
        tick: Callable[[], None],
        every_s: float,
        served: Identity | None = None,
    ) -> None:
        super().__init__(name="bundle-watcher", daemon=True)
        self._pointer, self._every_s, self._tick = pointer, every_s, tick
        self._load, self._serve, self._refuse = load, serve, refuse
        self._wake = threading.Event()
        self._ending = False
        self._acted = identity(pointer) if served is None else served

    def look(self) -> None:
        """Looks now, also at what was refused before."""
        self._acted = ()
        self._wake.set()

    def end(self) -> None:
        """Looks no more."""
        self._ending = True
        self._wake.set()

    def run(self) -> None:
        """Until :meth:`end`."""
        before = self._acted
        while True:
            self._wake.wait(self._every_s)
            at_once = self._wake.is_set()
            self._wake.clear()
            if self._ending:
                return
            with contextlib.suppress(OSError):  # of files there may be none left for a moment; the next look tries again
                self._tick()
            now = identity(self._pointer)
            if now != self._acted and (now == before or at_once):
                self._acted = now
                self._act()
            before = now

    def _act(self) -> None:
        try:
            self._serve(self._load(bundle_folder(self._pointer)))
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error))
