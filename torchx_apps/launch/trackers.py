"""A run in trackers: what a job writes there, and MLflow and Weights & Biases behind TorchX's tracker interface.

MLflow and Weights & Biases keep settings as settings, the figures of evaluations as curves, and of an artifact its
path: nothing is copied to a server. TorchX's own tracker `fsspec` writes files. `[torchx:tracker]` of .torchxconfig
names trackers, and `config` of `[tracker:NAME]` says where.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchx.tracker.api import (
    Lineage,
    TrackerArtifact,
    TrackerBase,
    TrackerSource,
    tracker_config_env_var_name,
)

from torchrec_ext.train.config import Record

PROJECT = "torchrec_ext"
# Figures of a whole run, next to those of the test.
_LAST = ("seconds", "samples_per_s", "data_wait", "peak_memory_mib")
# Prefixes of the figures of a training, a preprocessing and an export.
_FIGURES = ("test.", "missing.", "unknown.", "bundle.")
# Of a folder, where it has them.
_ARTIFACTS = (
    "checkpoints", "bundle", "plan.txt", "summary.json", "training.png", "preprocessor", "preprocess.png",
    "manifest.json", "evaluation.json", "evaluation.png",
)  # fmt: skip
# Package extras by tracker.
_KNOWN = {"mlflow": "mlflow", "wandb": "wandb"}
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
        # TorchX's interface has no end of a run.
        if hasattr(tracker, "close"):
            tracker.close()

    def _metadata(self, values: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.add_metadata(self.run, **values))

    def _figures(self, figures: Mapping[str, float], step: int | None = None) -> None:
        # Any other tracker has names with values. Each step gets a name of its own
        # there, since TorchX's tracker shows any one of several values of a name.
        suffix = "" if step is None else f" at step {step}"
        values = {f"{name}{suffix}": value for name, value in figures.items()}

        def add(tracker: Any) -> None:
            if isinstance(tracker, FigureTracker):
                tracker.add_figures(self.run, figures, step)
            else:
                tracker.add_metadata(self.run, **values)

        self._each(add)

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
        extra = f"torchrec-ext[{_KNOWN[name]}]" if name in _KNOWN else error.name
        raise ValueError(
            f"tracker {name}: needs the package {error.name}: pip install '{extra}'"
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


class FigureTracker(TrackerBase):
    """A tracker with curves: it takes figures as numbers with their step."""

    def add_figures(
        self, run_id: str, figures: Mapping[str, float], step: int | None
    ) -> None:
        """Writes figures by name, those of an evaluation with their step; None for those of the whole run."""
        raise NotImplementedError


class MLflowTracker(FigureTracker):
    """MLflow: a run for each TorchX run, in the experiment MLFLOW_EXPERIMENT_NAME, by default ``torchrec_ext``.

    Args:
        address: address of the server or store; the variable MLFLOW_TRACKING_URI says it where None.
    """

    def __init__(self, address: str | None) -> None:
        # A job does not wait minutes for a server that is gone.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        self._client = MlflowClient(address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(name)
        )
        self._ids: dict[str, str] = {}

    def add_metadata(self, run_id: str, **kwargs: object) -> None:
        """Writes settings as parameters; one that changed becomes a tag too."""
        from mlflow.entities import Param, RunTag

        settings = {_mlflow_name(key): str(value) for key, value in kwargs.items()}
        inside = self._inside(run_id, create=True)
        recorded = self._client.get_run(inside).data.params
        params = [
            Param(key, value) for key, value in settings.items() if key not in recorded
        ]
        tags = [
            RunTag(key, value)
            for key, value in settings.items()
            if recorded.get(key, value) != value
        ]
        self._client.log_batch(inside, tags=tags)
        # MLflow takes at most 100 parameters at once.
        for first in range(0, len(params), 100):
            self._client.log_batch(inside, params=params[first : first + 100])

    def add_figures(
        self, run_id: str, figures: Mapping[str, float], step: int | None
    ) -> None:
        """Writes figures as metrics."""
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        metrics = [
            Metric(_mlflow_name(name), value, now, step or 0)
            for name, value in figures.items()
        ]
        self._client.log_batch(self._inside(run_id, create=True), metrics)

    def metadata(self, run_id: str) -> Mapping[str, object]:
        """Returns parameters, the last value of each metric, and tags."""
        data = self._client.get_run(self._inside(run_id)).data
        values = {**data.params, **data.metrics}
        for key, value in data.tags.items():
            if not key.startswith(("mlflow.", "artifact.", "source.")):
                values[key] = value
        return values

    def add_artifact(
        self,
        run_id: str,
        name: str,
        path: str,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Notes the path of an artifact."""
        self._client.set_tag(
            self._inside(run_id, create=True), f"artifact.{name}", path
        )

    def artifacts(self, run_id: str) -> Mapping[str, TrackerArtifact]:
        """Returns the artifacts by name."""
        return {
            name: TrackerArtifact(name, path, None)
            for name, path in self._tags(run_id, "artifact.")
        }

    def add_source(
        self, run_id: str, source_id: str, artifact_name: str | None = None
    ) -> None:
        """Records the run from which this one began."""
        self._client.set_tag(
            self._inside(run_id, create=True),
            f"source.{artifact_name or ''}",
            source_id,
        )

    def sources(
        self, run_id: str, artifact_name: str | None = None
    ) -> Iterable[TrackerSource]:
        """Returns the runs from which this one began."""
        sources = [
            TrackerSource(source, name or None)
            for name, source in self._tags(run_id, "source.")
        ]
        return [
            source
            for source in sources
            if artifact_name in (None, source.artifact_name)
        ]

    def run_ids(self, **kwargs: str | None) -> Iterable[str]:
        """Returns the names of all runs, or of the runs begun from ``parent_run_id``."""
        names = [
            run.info.run_name for run in self._client.search_runs([self._experiment])
        ]
        parent = kwargs.get("parent_run_id")
        if not parent:
            return names
        begun = []
        for name in names:
            if any(source.source_run_id == parent for source in self.sources(name)):
                begun.append(name)
        return begun

    def lineage(self, run_id: str) -> Lineage:
        """Not told by TorchX's interface.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("TorchX has no lineage yet")

    def close(self) -> None:
        """Marks the runs of this process as finished."""
        for inside in self._ids.values():
            self._client.set_terminated(inside)

    def _tags(self, run_id: str, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in self._client.get_run(self._inside(run_id)).data.tags.items():
            if key.startswith(prefix):
                yield key[len(prefix) :], value

    def _inside(self, run_id: str, *, create: bool = False) -> str:
        """Returns MLflow's id of a run."""
        if run_id not in self._ids:
            # A quote would end the name in MLflow's search.
            name = run_id.replace("'", "")
            runs = self._client.search_runs(
                [self._experiment], f"attributes.run_name = '{name}'"
            )
            if not runs and not create:
                raise ValueError(
                    f"MLflow has no run {name}; `torchx tracker list jobs` lists those that it has"
                )
            run = (
                runs[0]
                if runs
                else self._client.create_run(self._experiment, run_name=name)
            )
            self._ids[run_id] = run.info.run_id
        return self._ids[run_id]


def _mlflow_name(key: str) -> str:
    """Returns the key as a name allowed by MLflow.

    Example:
        >>> _mlflow_name("test.hr@10")
        'test.hr_10'
    """
    return re.sub(r"[^\w\-. /]", "_", key)


class WandbTracker(FigureTracker):
    """Weights & Biases: a run for each TorchX run, in a project; its own pages list runs, figures and artifacts.

    Args:
        project: PROJECT or ENTITY/PROJECT; ``torchrec_ext`` where None.
    """

    def __init__(self, project: str | None) -> None:
        import wandb

        self._wandb = wandb
        self._entity, _, self._project = (project or PROJECT).rpartition("/")
        self._runs: dict[str, Any] = {}

    def add_metadata(self, run_id: str, **kwargs: object) -> None:
        """Writes settings as config."""
        self._run(run_id).config.update(kwargs, allow_val_change=True)

    def add_figures(
        self, run_id: str, figures: Mapping[str, float], step: int | None
    ) -> None:
        """Writes the figures of a step as history, and those of the whole run as summary."""
        if step is None:
            self._run(run_id).summary.update(figures)
        else:
            self._run(run_id).log({**figures, "trainer/step": step})

    def add_artifact(
        self,
        run_id: str,
        name: str,
        path: str,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Notes the path of an artifact."""
        self._run(run_id).config.update(
            {f"artifact.{name}": path}, allow_val_change=True
        )

    def add_source(
        self, run_id: str, source_id: str, artifact_name: str | None = None
    ) -> None:
        """Records the run from which this one began."""
        self._run(run_id).config.update(
            {f"source.{artifact_name or 'run'}": source_id}, allow_val_change=True
        )

    def close(self) -> None:
        """Ends the runs of this process, and sends any remaining data."""
        for run in self._runs.values():
            run.finish()

    def _run(self, run_id: str) -> Any:
        if run_id not in self._runs:
            self._runs[run_id] = self._wandb.init(
                entity=self._entity or None,
                project=self._project,
                id=re.sub(r"\W+", "-", run_id),
                name=run_id,
                resume="allow",
                reinit="create_new",
                settings=self._wandb.Settings(
                    silent=True, init_timeout=30, console="off"
                ),
            )
        return self._runs[run_id]

    def run_ids(self, *_: Any, **__: Any) -> Any:
        """Not to be read here: Weights & Biases shows its runs on its own pages.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"Weights & Biases lists the runs of project {self._project} on its own pages; name "
            "another tracker first in [torchx:tracker] to list runs here"
        )

    artifacts = metadata = sources = lineage = run_ids
