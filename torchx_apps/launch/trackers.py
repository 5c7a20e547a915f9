"""MLflow and Weights & Biases behind TorchX's tracker interface.

They keep settings as settings, the figures of evaluations as curves, and of an artifact its path: nothing is copied to
a server. TorchX's own tracker `fsspec` writes files. `[torchx:tracker]` of .torchxconfig names trackers, and `config`
of `[tracker:NAME]` says where.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchx.tracker.api import Lineage, TrackerArtifact, TrackerBase, TrackerSource

PROJECT = "torchrec_ext"


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
