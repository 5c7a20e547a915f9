"""A run in trackers: what a job writes to those that `[torchx:tracker]` of .torchxconfig names."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_ext.train.config import Record

if TYPE_CHECKING:
    from torchx.tracker.api import AppRun

# Of a folder, where it has them.
_ARTIFACTS = (
    "checkpoints", "bundle", "plan.txt", "summary.json", "training.png", "preprocessor",
    "manifest.json",
)  # fmt: skip
# Variable with the handle of the TorchX job.
_JOB = "TORCHX_JOB_ID"
_TRACKERS = "TORCHX_TRACKERS"


class Tracking:
    """Writes a run's configuration, figures and paths to trackers; see :meth:`start`.

    A tracker that fails later is left out for the rest of the run, with one warning.

    Args:
        path: the run folder.
        runs: TorchX's run in each tracker by the tracker's name; none for a run that nobody tracks.
    """

    def __init__(self, path: Path, runs: Mapping[str, AppRun]) -> None:
        self._path = path
        self._runs = dict(runs)

    @classmethod
    def start(
        cls,
        path: Path,
        config: Mapping[str, Any],
        *,
        member: str = "",
        folder: str = "run_folder",
    ) -> Tracking:
        """Begins a run in every tracker that ``torchx run`` names to its jobs; no other process may do so too.

        Args:
            path: the run folder.
            config: settings, nested.
            member: name of this network, where a job trains several.
            folder: name of the folder among the artifacts.

        Raises:
            ValueError: there is no such tracker, or it cannot be reached.
        """
        settings = {key: _plain(value) for key, value in _flat(config)}
        runs = _runs_from_env(path, member)
        for name, run in runs.items():
            try:
                run.add_metadata(**settings)
                run.add_artifact(folder, str(path.absolute()))
            except Exception as error:
                raise ValueError(_unreachable(name, error)) from None
        return cls(path, runs)

    def log(self, record: Record) -> None:
        """Writes the figures of an evaluation, or the message of a run ended by an error."""
        if record["kind"] == "eval":
            figures = {
                f"eval.{name}": value
                for name, value in record.items()
                if isinstance(value, float)
            }
            # Each step gets a name of its own, since TorchX's tracker shows any one of several values of a name.
            step = record["step"]
            self._metadata(
                {f"{name} at step {step}": value for name, value in figures.items()}
            )
        elif record["kind"] == "error":
            self._metadata(
                {"error": str(record.get("message", "the loss is not finite"))}
            )

    def end(self, figures: Mapping[str, Any] | None = None) -> None:
        """Writes figures (by default those of ``summary.json``) and the paths of the run's files."""
        if not self._runs:
            return
        if figures is None:
            figures = json.loads((self._path / "summary.json").read_text())
        self._metadata({name: _plain(value) for name, value in _flat(figures)})
        self._each(self._finish)

    def _finish(self, run: AppRun) -> None:
        for name in _ARTIFACTS:
            path = self._path.absolute() / name
            if path.exists():
                run.add_artifact(name, str(path))

    def _metadata(self, values: Mapping[str, Any]) -> None:
        self._each(lambda run: run.add_metadata(**values))

    def _each(self, call: Callable[[AppRun], None]) -> None:
        # Over a copy, because a tracker that fails is left out from then on.
        for name, run in list(self._runs.items()):
            try:
                call(run)
            except Exception as error:
                del self._runs[name]
                warnings.warn(
                    f"tracker {name}: {_reason(error)}; the run goes on, and this tracker hears no more of it",
                    stacklevel=3,
                )


@contextmanager
def tracked(
    path: Path | None, config: Mapping[str, Any], *, folder: str
) -> Iterator[dict[str, Any]]:
    """Tracks a job without training.

    Args:
        path: the folder that the job makes; None if this rank makes none, and nothing is tracked.
        config: settings, nested.
        folder: name of the folder among the artifacts.

    Yields:
        A dictionary for the job's figures, which are written at its end; where it fails the error is, in one line.

    Raises:
        ValueError: there is no such tracker, or it cannot be reached.
    """
    figures: dict[str, Any] = {}
    if path is None:
        yield figures
        return
    tracking = Tracking.start(path, config, folder=folder)
    try:
        yield figures
    except Exception as error:
        tracking.log({"kind": "error", "message": _reason(error)})
        raise
    tracking.end(figures)


def _runs_from_env(path: Path, member: str) -> dict[str, AppRun]:
    """Returns TorchX's run of this process in each tracker, so that one which fails leaves the others alone."""
    names = [name for name in os.environ.get(_TRACKERS, "").split(",") if name]
    if not names:
        # A run that nobody tracks needs no TorchX.
        return {}
    from torchx.tracker.api import AppRun

    try:
        of_job = AppRun.run_from_env()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tracker {', '.join(names)}: needs the package {error.name}: pip install '{error.name}'"
        ) from None
    except Exception as error:
        raise ValueError(_unreachable(", ".join(names), error)) from None
    backends = list(of_job.backends)
    if len(backends) != len(names):
        raise ValueError(
            f"tracker {', '.join(names)}: TorchX finds {len(backends)} of {len(names)}; [torchx:tracker] of "
            ".torchxconfig may name fsspec, another entry point of torchx.tracker, or module:function"
        )
    # A job that TorchX has not started has no handle.
    run = of_job.id if _JOB in os.environ else str(path.absolute())
    if member:
        run += f"/{member}"
    return {
        name: AppRun(run, [backend])
        for name, backend in zip(names, backends, strict=True)
    }


def _unreachable(name: str, error: Exception) -> str:
    return (
        f"tracker {name}: cannot be reached: {_reason(error)}; correct `config` under [tracker:{name}] in "
        f".torchxconfig, or take {name} out of [torchx:tracker]"
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested values by their dotted names.

    Example:
        >>> list(_flat({"train": {"epochs": 2}, "test": {"hr@10": 0.5}}))
        [('train.epochs', 2), ('test.hr@10', 0.5)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
