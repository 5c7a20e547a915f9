"""A run in trackers: what a job writes to those that `[torchx:tracker]` of .torchxconfig names."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrec_ext.train.config import Record

# Figures of a whole run, next to those of the test.
_LAST = ("seconds", "samples_per_s", "data_wait", "peak_memory_mib")
# Prefixes of the figures of a training, a preprocessing and an export.
_FIGURES = ("test.", "missing.", "unknown.", "bundle.")
# Of a folder, where it has them.
_ARTIFACTS = (
    "checkpoints", "bundle", "plan.txt", "summary.json", "training.png", "preprocessor",
    "manifest.json",
)  # fmt: skip
# Variable with the handle of the TorchX job.
JOB = "TORCHX_JOB_ID"
_TRACKERS = "TORCHX_TRACKERS"
_PARENT = "TORCHX_PARENT_RUN_ID"


class Tracking:
    """Writes a run's configuration, figures and paths to trackers; see :meth:`start`.

    A tracker that fails later is left out for the rest of the run, with one warning.

    Args:
        run: name of the run: the handle of its TorchX job, and the member's name where the job trains several.
        path: the run folder.
        trackers: objects of :class:`torchx.tracker.api.TrackerBase` by name; none for a run that nobody tracks.
    """

    def __init__(self, run: str, path: Path, trackers: Mapping[str, Any]) -> None:
        self.run = run
        self._path = path
        self._trackers = dict(trackers)

    @classmethod
    def start(
        cls,
        path: Path,
        config: Mapping[str, Any],
        *,
        member: str = "",
        folder: str = "run_folder",
    ) -> Tracking:
        """Begins a run in every tracker of the variable TORCHX_TRACKERS; no other process may do so too.

        Args:
            path: the run folder.
            config: settings, nested.
            member: name of this network, where a job trains several.
            folder: name of the folder among the artifacts.

        Raises:
            ValueError: there is no such tracker, or it cannot be reached.
        """
        names = filter(None, os.environ.get(_TRACKERS, "").split(","))
        run = os.environ.get(JOB) or str(path.absolute())
        if member:
            run += f"/{member}"
        tracking = cls(run, path, {name: _tracker(name) for name in names})
        settings = {key: _plain(value) for key, value in _flat(config)}
        for name, tracker in tracking._trackers.items():
            try:
                tracker.add_metadata(tracking.run, **settings)
                tracker.add_artifact(tracking.run, folder, str(path.absolute()))
                if os.environ.get(_PARENT):
                    tracker.add_source(tracking.run, os.environ[_PARENT])
            except Exception as error:
                raise ValueError(_unreachable(name, error)) from None
        return tracking

    def log(self, record: Record) -> None:
        """Writes the figures of an evaluation, or the message of a run ended by an error."""
        if record["kind"] == "eval":
            figures = {
                f"eval.{name}": value
                for name, value in record.items()
                if isinstance(value, float)
            }
            self._figures(figures, record["step"])
        elif record["kind"] == "error":
            self._metadata(
                {"error": str(record.get("message", "the loss is not finite"))}
            )

    def end(self, figures: Mapping[str, Any] | None = None) -> None:
        """Writes figures (by default those of ``summary.json``) and the paths of the run's files."""
        if not self._trackers:
            return
        if figures is None:
            figures = json.loads((self._path / "summary.json").read_text())
        numbers = {}
        metadata = {}
        for name, value in _flat(figures):
            if isinstance(value, float) and (
                name.startswith(_FIGURES) or name in _LAST
            ):
                numbers[name] = value
            else:
                metadata[name] = _plain(value)
        self._metadata(metadata)
        if numbers:
            self._figures(numbers)
        self._each(self._finish)

    def _finish(self, tracker: Any) -> None:
        for name in _ARTIFACTS:
            path = self._path.absolute() / name
            if path.exists():
                tracker.add_artifact(self.run, name, str(path))

    def _metadata(self, values: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.add_metadata(self.run, **values))

    def _figures(self, figures: Mapping[str, float], step: int | None = None) -> None:
        # Each step gets a name of its own, since TorchX's tracker shows any one of
        # several values of a name.
        suffix = "" if step is None else f" at step {step}"
        self._metadata({f"{name}{suffix}": value for name, value in figures.items()})

    def _each(self, call: Callable[[Any], None]) -> None:
        # Over a copy, because a tracker that fails is left out from then on.
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._trackers[name]
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


def _tracker(name: str) -> Any:
    # A run that nobody tracks needs no TorchX.
    from torchx.tracker.api import tracker_config_env_var_name
    from torchx.util.entrypoints import load_group
    from torchx.util.modules import load_module

    by_name = load_group("torchx.tracker") or {}
    factory = by_name.get(name) or load_module(name)
    if factory is None:
        raise ValueError(
            f"tracker {name}: there is none of this name; [torchx:tracker] of .torchxconfig may name "
            f"{', '.join(sorted(by_name))}, or module:function"
        )
    try:
        return factory(os.environ.get(tracker_config_env_var_name(name)))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tracker {name}: needs the package {error.name}: pip install '{error.name}'"
        ) from None
    except Exception as error:
        raise ValueError(_unreachable(name, error)) from None


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
