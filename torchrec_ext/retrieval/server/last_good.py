"""LastGood: the files of the bundle most recently served, for a new worker if the folder was overwritten. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torchrec_ext.retrieval.server.worker import Identity, identity
from torchrec_ext.sealed import files_below, make_hidden, remove_leftovers

_COPIED_BYTES = 2**20


class LastGood:
    """Keeps the files of one bundle in a hidden folder next to it.

    Large files become hard links: they take no space, and stay when the bundle's folder gets other files. Small ones
    become copies, because an editor or ``cp`` rewrites a file without making another. A large file that is rewritten
    so is lost: its pages are those that the workers have mapped.

    Args:
        log: receives an event if the files cannot be kept.

    Attributes:
        folders: folders for a new worker to load from, in order; empty before the first :meth:`keep`.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self.folders: list[Path] = []
        self._log = log
        self._files: Identity = ()
        self._hidden: Path | None = None
        self._lock = -1

    def keep(self, folder: Path) -> None:
        """Keeps the bundle in ``folder`` instead of the former one; called again for the same files, does nothing."""
        files = identity(folder)
        # A worker that began with the hidden folder serves files that are there
        # already.
        if files == self._files or folder == self._hidden:
            return
        self.close()
        self._files = files
        self.folders = [folder]
        target = folder.with_name(f"{folder.name}.served")
        try:
            remove_leftovers(target)
            self._hidden, self._lock = make_hidden(target)
            # copyfile() does not keep modes, so the folder keeps out whoever may not
            # read the bundle.
            self._hidden.chmod(0o700)
            for name, path in files_below(folder).items():
                _link_or_copy(path, self._hidden / name)
        except OSError as error:
            self.close()
            self._log(
                "last_good_not_kept",
                why=f"no files can be kept beside the bundle ({error.strerror}), so a new worker has none to serve if "
                "the folder is overwritten; write bundles to new folders",
            )
        else:
            self.folders.append(self._hidden)

    def close(self) -> None:
        """Removes the kept files."""
        if self._hidden is not None:
            shutil.rmtree(self._hidden, ignore_errors=True)
            os.close(self._lock)
            self._hidden = None


def _link_or_copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.stat().st_size < _COPIED_BYTES:
        shutil.copyfile(path, target)
    else:
        os.link(path, target)
