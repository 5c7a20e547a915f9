"""Job: all that one training run needs.

This module imports no torch, so that a command line is checked at once; what a job trains is imported when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import CACHING, PlanConfig
from torchrec_ext.distributed.sync_config import Collectives, SyncConfig
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.modules.config import LOSSES
from torchrec_ext.schema.validation import check_choice, check_least, listed
from torchrec_ext.train.checkpoint.config import CheckpointConfig, StartConfig
from torchrec_ext.train.config import EvaluationConfig, TrainConfig
from torchx_apps.tasks.loading import ranking_task

if TYPE_CHECKING:
    from torchrec_ext.schema import BatchSchema
    from torchx_apps.tasks.task import Task


Export = Literal["never", "auto", "require"]


@dataclass(frozen=True, kw_only=True)
class IdsConfig:
    """Columns whose ids get and lose rows while the job trains, see docs/ids.md.

    Args:
        every: steps between two admissions; until the next one a new id reads the row of unknown ids.
        features: settings of these columns, as in ``--ids.features.item_id.capacity 1e6``. Columns with the same ids,
            such as a history of items, take the same.
    """

    every: int = 8
    features: Mapping[str, Dynamic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_least("ids.every", self.every)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All settings and functions of one training run.

    Args:
        name: name of the recipe.
        build: function that makes the model from ``model`` and the task's data, its tables on the meta device: an
            ``nn.Module`` with a method ``schema()``, whose forward returns (loss, output with ``loss`` and
            ``weights``), such as a TowerModel.
        model: frozen dataclass that ``build`` reads; if it has ``out_of_range``, ``schema()`` is called with it.
        data: frozen dataclass that says which rows ``task`` loads; it has ``name``.
        task: function that loads ``data``.
        loader: how rows become batches.
        id_dropout: share of ids, by feature, that read the out-of-vocabulary row in training, as in
            ``--id_dropout.item_id 0.1``: ids that training never saw are ranked by that row; see :func:`drop_ids`.
        ids: columns whose ids get and lose rows while the job trains.
        optimizer: optimizers of tables and dense layers.
        plan: how tables are spread over ranks.
        sync: what ranks exchange, and how often.
        train: length of the training, and the seed of everything.
        evaluation: ranking figures of the evaluations, where they should be others than the recipe's, and the
            baselines beside them.
        checkpoint: times and folder of the run's checkpoints.
        start: the checkpoint whose weights a new run begins with.
        pretrained: files of the vectors that a new run's tables begin with, by table, as in
            ``--pretrained.item_id vectors.parquet``; see :func:`read_vectors`.
        export: ``require`` ends a run with a bundle for serving in its folder; ``auto`` does so where the model can be
            served, and otherwise says why it cannot.
        device: ``cpu``, ``cuda`` or ``cuda:0``, see ``Runtime.start``; CUDA where not given, if the host has a GPU
            for each rank.
        collectives: ``shared_memory`` passes the collectives of CPU tensors through memory that the ranks of one host
            share, ``gloo`` through sockets; ``auto`` takes shared memory where all ranks are on one host and its
            library is built, see docs/parallel.md.
        threads: compute threads per rank; OMP_NUM_THREADS, which the component's --threads sets, where not given.
    """

    name: str
    build: Callable[[Any, Any], Any]
    model: Any
    data: Any = field(default_factory=DataConfig)
    task: Callable[..., Any] = ranking_task
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    id_dropout: Mapping[str, float] = field(default_factory=dict)
    ids: IdsConfig = field(default_factory=IdsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    start: StartConfig = field(default_factory=StartConfig)
    pretrained: Mapping[str, Path] = field(default_factory=dict)
    export: Export = "never"
    device: str | None = None
    collectives: Collectives = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        watched = self.train.early_stop.metric
        metrics = self.evaluation.metrics
        if metrics and "@" in watched and watched not in metrics:
            raise ValueError(
                f"train.early_stop.metric={watched} with evaluation.metrics={','.join(metrics)}: the evaluation has no "
                "such figure; add it, or watch one of these"
            )
        if self.ids.features:
            self._check_ids()
        check_choice("export", self.export, get_args(Export))
        check_choice("collectives", self.collectives, get_args(Collectives))

    def _check_ids(self) -> None:
        """Refuses settings that cannot go with dynamic ids.

        Raises:
            ValueError: naming the setting.
        """
        stop = self.train.early_stop
        loss: str = getattr(self.model, "loss", "")
        kernel = next(
            (choice.kernel for choice in self.plan.asked if choice.kernel in CACHING),
            "",
        )
        refusals = (
            (
                bool(self.id_dropout),
                f"id_dropout.{next(iter(self.id_dropout), '')}",
                "admit_after=2 trains the row of unknown ids, by every first sight; leave id_dropout out",
            ),
            (
                self.sync.mode != "every_step",
                f"sync.mode={self.sync.mode}",
                "a row begins anew on all ranks in one step; set sync.mode=every_step",
            ),
            (
                bool(kernel),
                f"plan.kernel={kernel}",
                "its cache of rows would miss those that begin anew; set fused or fused_uvm",
            ),
            (
                self.loader.device is not None,
                f"loader.device={self.loader.device}",
                "ids are mapped to rows on the host; leave loader.device out",
            ),
            (
                loss in LOSSES and LOSSES[loss].catalogue,
                f"model.loss={loss}",
                "every step reads all items, so that none could go; set model.loss=in_batch",
            ),
            (
                bool(stop.metric) and stop.restore,
                f"train.early_stop.metric={stop.metric}",
                "other ids have the rows by the last step; set train.early_stop.restore=false",
            ),
        )
        for applies, setting, why in refusals:
            if applies:
                raise ValueError(
                    f"{setting} with ids.features.{next(iter(self.ids.features))}: {why}"
                )


def schema_settings(job: Job) -> dict[str, Any]:
    """Returns the arguments that a job's settings give to its model's ``schema()``."""
    if not hasattr(job.model, "out_of_range"):
        return {}
    return {"out_of_range": job.model.out_of_range}


def schema_of(job: Job, task: Task, model: Any) -> BatchSchema:
    """Returns the schema of the job's batches, with any ids in dynamic columns; row 0 is that of unseen ids."""
    schema: BatchSchema = model.schema(**schema_settings(job))
    return schema.with_dynamic(dynamic_ids_of(job, task, schema))


def dynamic_ids_of(job: Job, task: Task, schema: BatchSchema) -> dict[str, Dynamic]:
    """Returns the settings of the job's dynamic ids by column, with further columns of the same ids; one a table.

    Raises:
        ValueError: the model reads no such column, or the task has no raw ids of it.
    """
    policies = dict(job.ids.features)
    tables: set[str] = set()
    for name in policies:
        feature = schema.feature(name)
        if feature is None:
            raise ValueError(
                f"ids.features.{name}: the model reads no such column of ids; it reads {listed(schema.keys)}"
            )
        tables.update(feature.tables)
    # The loop adds columns, so it goes over a copy.
    for name, policy in list(policies.items()):
        for other in task.same_ids(name):
            same = schema.feature(other)
            # Columns of one table have one set of rows, whichever of them names it.
            if same is not None and tables.isdisjoint(same.tables):
                policies[other] = policy
                tables.update(same.tables)
    return policies
