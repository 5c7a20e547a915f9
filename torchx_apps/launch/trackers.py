"""MLflow and Weights & Biases behind TorchX's tracker interface; TorchX's own tracker `fsspec` writes files.

Both keep settings as settings, a figure `NAME at step N` as a point of a curve, and of an artifact its path: nothing is
copied to a server. `[torchx:tracker]` of .torchxconfig names trackers, and `config` of `[tracker:NAME]` says where.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchx.tracker.api import Lineage, TrackerArtifact, TrackerBase, TrackerSource

PROJECT = "torchrec_ext"
# Figures of a whole run, next to those of the test.
_LAST = ("seconds", "samples_per_s", "data_wait", "peak_memory_mib")
# Prefixes of the figures of a training, a preprocessing and an export.
_FIGURES = ("test.", "missing.", "unknown.", "bundle.")
_AT_STEP = re.compile(r"(.+) at step (\d+)")


def split_figures(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, float, int | None]]]:
    """Splits metadata into settings and figures, each of these with its name, value and step, None for a last one.

    Example:
        >>> split_figures({"train.epochs": 2, "eval.auc at step 7": 0.5, "test.auc": 0.6})
        ({'train.epochs': 2}, [('eval.auc', 0.5, 7), ('test.auc', 0.6, None)])
    """
    settings: dict[str, Any] = {}
    figures: list[tuple[str, float, int | None]] = []
    for key, value in values.items():
        match = _AT_STEP.fullmatch(key)
        if match:
            figures.append((match[1], float(value), int(match[2])))
        elif isinstance(value, float) and (key.startswith(_FIGURES) or key in _LAST):
            figures.append((key, value, None))
        else:
            settings[key] = value
    return settings, figures


class MLflowTracker(TrackerBase):  # type: ignore[misc]
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
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._ids: dict[str, str] = {}

    def add_metadata(self, run_id: str, **kwargs: object) -> None:
        """Writes settings as parameters and figures as metrics; a changed parameter becomes a tag too."""
        from mlflow.entities import Metric, Param, RunTag

        settings, figures = split_figures({_mlflow_name(key): value for key, value in kwargs.items()})
        inside = self._inside(run_id, create=True)
        now = int(time.time() * 1e3)
        recorded = self._client.get_run(inside).data.params
        params = [Param(key, str(value)) for key, value in settings.items() if key not in recorded]
        tags = [
            RunTag(key, str(value)) for key, value in settings.items() if recorded.get(key, str(value)) != str(value)
        ]
        metrics = [Metric(name, value, now, step or 0) for name, value, step in figures]
        self._client.log_batch(inside, metrics, [], tags)
        # MLflow takes at most 100 parameters at once.
        for first in range(0, len(params), 100):
            self._client.log_batch(inside, params=params[first : first + 100])

    def metadata(self, run_id: str) -> Mapping[str, object]:
        """Returns parameters, the last value of each metric, and tags."""
        data = self._client.get_run(self._inside(run_id)).data
        tags = {
            key: value for key, value in data.tags.items() if not key.startswith(("mlflow.", "artifact.", "source."))
        }
        return {**data.params, **data.metrics, **tags}

    def add_artifact(self, run_id: str, name: str, path: str, metadata: Mapping[str, object] | None = None) -> None:
        """Notes the path of an artifact."""
        self._client.set_tag(self._inside(run_id, create=True), f"artifact.{name}", path)

    def artifacts(self, run_id: str) -> Mapping[str, TrackerArtifact]:
        """Returns the artifacts by name."""
        return {name: TrackerArtifact(name, path, None) for name, path in self._tags(run_id, "artifact.")}

    def add_source(self, run_id: str, source_id: str, artifact_name: str | None = None) -> None:
        """Records the run from which this one began."""
        self._client.set_tag(self._inside(run_id, create=True), f"source.{artifact_name or ''}", source_id)

    def sources(self, run_id: str, artifact_name: str | None = None) -> Iterable[TrackerSource]:
        """Returns the runs from which this one began."""
        sources = [TrackerSource(source, name or None) for name, source in self._tags(run_id, "source.")]
        return [source for source in sources if artifact_name in (None, source.artifact_name)]

    def run_ids(self, **kwargs: str | None) -> Iterable[str]:
        """Returns the names of all runs, or of the runs begun from ``parent_run_id``."""
        names = [run.info.run_name for run in self._client.search_runs([self._experiment])]
        parent = kwargs.get("parent_run_id")
        if not parent:
            return names
        return [name for name in names if any(source.source_run_id == parent for source in self.sources(name))]

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
            name = run_id.replace("'", "")
            runs = self._client.search_runs([self._experiment], f"attributes.run_name = '{name}'")
            if not runs and not create:
                raise ValueError(f"MLflow has no run {name}; `torchx tracker list jobs` lists those that it has")
            run = runs[0] if runs else self._client.create_run(self._experiment, run_name=name)
            self._ids[run_id] = run.info.run_id
        return self._ids[run_id]


def _mlflow_name(key: str) -> str:
    """Returns the key as a name allowed by MLflow.

    Example:
        >>> _mlflow_name("test.hr@10")
        'test.hr_10'
    """
    return re.sub(r"[^\w\-. /]", "_", key)


class WandbTracker(TrackerBase):  # type: ignore[misc]
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
        """Writes settings as config and figures as history and summary."""
        settings, figures = split_figures(kwargs)
        run = self._run(run_id)
        run.config.update(settings, allow_val_change=True)
        steps = sorted({step for _, _, step in figures if step is not None})
        for step in steps:
            run.log({name: value for name, value, at_step in figures if at_step == step} | {"trainer/step": step})
        run.summary.update({name: value for name, value, step in figures if step is None})

    def add_artifact(self, run_id: str, name: str, path: str, metadata: Mapping[str, object] | None = None) -> None:
        """Notes the path of an artifact."""
        self._run(run_id).config.update({f"artifact.{name}": path}, allow_val_change=True)

    def add_source(self, run_id: str, source_id: str, artifact_name: str | None = None) -> None:
        """Records the run from which this one began."""
        self._run(run_id).config.update({f"source.{artifact_name or 'run'}": source_id}, allow_val_change=True)

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
                settings=self._wandb.Settings(silent=True, init_timeout=30, console="off"),
            )
        return self._runs[run_id]

    def artifacts(self, run_id: str) -> Mapping[str, TrackerArtifact]:
        """Not to be read here; see :meth:`run_ids`."""
        return self._unread()

    def metadata(self, run_id: str) -> Mapping[str, object]:
        """Not to be read here; see :meth:`run_ids`."""
        return self._unread()

    def sources(self, run_id: str, artifact_name: str | None = None) -> Iterable[TrackerSource]:
        """Not to be read here; see :meth:`run_ids`."""
        return self._unread()

    def lineage(self, run_id: str) -> Lineage:
        """Not to be read here; see :meth:`run_ids`."""
        return self._unread()

    def run_ids(self, **kwargs: str | None) -> Iterable[str]:
        """Not to be read here: Weights & Biases shows its runs on its own pages.

        Raises:
            ValueError: always.
        """
        return self._unread()

    def _unread(self) -> Any:
        raise ValueError(
            f"Weights & Biases lists the runs of project {self._project} on its own pages; name "
            "another tracker first in [torchx:tracker] to list runs here"
        )
