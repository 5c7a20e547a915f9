"""A run in trackers: what a job writes to those that `[torchx:tracker]` of .torchxconfig names."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchx.tracker.api import AppRun

# Of a folder, where it has them.
_ARTIFACTS = (
    "checkpoints", "bundle", "plan.txt", "summary.json", "preprocessor",
    "manifest.json",
)  # fmt: skip
# Variable with the handle of the TorchX job.
_JOB = "TORCHX_JOB_ID"
_TRACKERS = "TORCHX_TRACKERS"


class Tracking:
    """Writes a run's settings, and at its end its figures and paths, to every tracker that ``torchx run`` names.

    If a tracker fails at the end, one warning says so.

    Args:
        path: the folder that the job makes.
        config: settings, nested.
        member: name of this network, where a job trains several.
        folder: name of the folder among the artifacts.

    Raises:
        ValueError: there is no such tracker, or it cannot be reached.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        *,
        member: str = "",
        folder: str = "run_folder",
    ) -> None:
        self._path = path
        self._run: AppRun | None = None
        self._names = os.environ.get(_TRACKERS, "")
        # A run that nobody tracks needs no TorchX.
        if not self._names:
            return
        try:
            self._run = run = _run_of(path, member, self._names.count(",") + 1)
            run.add_metadata(**_plain(config))
            run.add_artifact(folder, str(path.absolute()))
        except Exception as error:
            raise ValueError(
                f"tracker {self._names}: cannot be reached: {_reason(error)[:80]}; correct `config` under "
                "[tracker:NAME] in .torchxconfig, or [torchx:tracker]"
            ) from None

    def end(self, figures: Mapping[str, Any] | None = None) -> None:
        """Writes figures, by default those of ``summary.json``, and the paths of the folder's files."""
        if self._run is None:
            return
        if figures is None:
            figures = json.loads((self._path / "summary.json").read_text())
        try:
            self._run.add_metadata(**_plain(figures))
            for name in _ARTIFACTS:
                path = self._path.absolute() / name
                if path.exists():
                    self._run.add_artifact(name, str(path))
        except Exception as error:
            warnings.warn(
                f"tracker {self._names}: {_reason(error)}; the job has ended well, its folder has all",
                stacklevel=2,
            )


@contextmanager
def tracked(
    path: Path, config: Mapping[str, Any], *, folder: str
) -> Iterator[dict[str, Any]]:
    """Tracks a job without training; yields a dictionary for its figures, see :class:`Tracking` for the rest."""
    figures: dict[str, Any] = {}
    tracking = Tracking(path, config, folder=folder)
    yield figures
    tracking.end(figures)


def _run_of(path: Path, member: str, trackers: int) -> AppRun:
    """Returns TorchX's run of this process in all trackers."""
    from torchx.tracker.api import AppRun

    of_job = AppRun.run_from_env()
    backends = list(of_job.backends)
    if len(backends) != trackers:
        raise LookupError(f"TorchX finds {len(backends)} of {trackers} by their names")
    # A job that TorchX has not started has no handle.
    run = of_job.id if _JOB in os.environ else str(path.absolute())
    return AppRun(f"{run}/{member}" if member else run, backends)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested values by their dotted names.

    Example:
        >>> list(flat({"train": {"epochs": 2}, "test": {"hr@10": 0.5}}))
        [('train.epochs', 2), ('test.hr@10', 0.5)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested values by their dotted names; what is neither a number nor a text, as text."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat(values)
    }
