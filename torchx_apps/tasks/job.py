"""Job: all that one training run needs.

This module imports no torch, so that a command line is checked at once; what a job trains is imported when it is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import CACHING, PlanConfig
from torchrec_ext.distributed.sync_config import Collectives, SyncConfig
from torchrec_ext.modules.config import LOSSES
from torchrec_ext.schema.validation import check_choice, check_least, listed
from torchrec_ext.train.checkpoint.config import CheckpointConfig, StartConfig
from torchrec_ext.train.config import ClosedFormConfig, EvaluationConfig, TrainConfig
from torchx_apps.config import with_settings
from torchx_apps.tasks.loading import ranking_task

if TYPE_CHECKING:
    from torchrec_ext.ids.policy import Dynamic
    from torchrec_ext.schema import BatchSchema
    from torchx_apps.tasks.task import Task

# Variable with the topology of a job that goes on with the nodes that are up, as the
# component was given it.
ELASTIC = "TORCHREC_EXT_ELASTIC"

Lookups = Literal["auto", "merged", "apart"]
Export = Literal["never", "auto", "require"]


@dataclass(frozen=True, kw_only=True)
class IdsConfig:
    """Columns whose ids get and lose rows while the job trains, see docs/ids.md.

    Args:
        every: steps between two admissions; until the next one a new id reads the row of unknown ids.
        features: settings of these columns, fields of :class:`Dynamic`. Each is a text, as in ``--ids.features
            item_id=dynamic,capacity=1e6,admit_after=2,evict=lfu``. Columns with the same ids, such as a history of
            items, take the same.

    Raises:
        ValueError: a column's settings lack the capacity, or are out of range.

    Example:
        >>> IdsConfig(features=("item_id=dynamic,capacity=1e6",)).policies()["item_id"].capacity
        1000000
        >>> IdsConfig(features=("item_id=static",))
        Traceback (most recent call last):
        ...
        ValueError: ids.item_id=static: must begin with dynamic,capacity=ROWS, as in ids.item_id=dynamic,capacity=1e6
    """

    every: int = 8
    features: tuple[str, ...] = field(default=(), metadata={"open": True})

    def __post_init__(self) -> None:
        check_least("ids.every", self.every)
        self.policies()

    def policies(self) -> dict[str, Dynamic]:
        """Returns the settings of ``features`` by column."""
        policies = {}
        for text in self.features:
            # Imported here: the package needs torch, and a job without such ids need
            # not.
            from torchrec_ext.ids.policy import Dynamic

            name, _, settings = text.partition("=")
            kind, *values = settings.split(",")
            if kind != "dynamic" or not any(
                value.startswith("capacity=") for value in values
            ):
                raise ValueError(
                    f"ids.{text}: must begin with dynamic,capacity=ROWS, as in ids.{name}=dynamic,capacity=1e6"
                )
            try:
                policies[name] = with_settings(Dynamic(capacity=2), values)
            except ValueError as error:
                raise ValueError(f"ids.{name}: {error}") from None
        return policies


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
        task: function that loads ``data``; called as ``task(data, progress=...)``, it raises DatasetUnavailable where
            the set is not to be had.
        loader: how rows become batches.
        id_dropout: share of ids, by feature, that read the out-of-vocabulary row in training, as
            ``("item_id=0.1",)``: ids that training never saw are ranked by that row; see :class:`IdDropout`.
        ids: columns whose ids get and lose rows while the job trains.
        optimizer: optimizers of tables and dense layers.
        plan: how tables are spread over ranks.
        lookups: ``merged`` looks up the tables of all towers in one exchange, or in one for each set of ranks where
            towers have ranks of their own; ``apart`` goes tower by tower, with the same result; ``auto`` merges
            on several ranks, unless ``plan.towers`` or a path in ``optimizer.per_table`` prevents it.
        sync: what ranks exchange, and how often.
        train: length of the training, and the seed of everything.
        evaluation: ranking figures of the evaluations, where they should be others than the recipe's, and the
            baselines beside them.
        closed_form: settings of EASE as a baseline.
        checkpoint: times and folder of the run's checkpoints.
        start: the checkpoint whose weights a new run begins with.
        pretrained: files of the vectors that a new run's tables begin with, by table, as
            ``("item_id=vectors.parquet",)``; see :func:`read_vectors`.
        export: ``require`` ends a run with a bundle for serving in its folder; ``auto`` does so where the model can be
            served, and otherwise says why it cannot.
        fallback: generated set to use where the real one is not to be had; None stops and says how to get the real one.
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
    id_dropout: tuple[str, ...] = ()
    ids: IdsConfig = field(default_factory=IdsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    lookups: Lookups = "auto"
    sync: SyncConfig = field(default_factory=SyncConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    closed_form: ClosedFormConfig = field(default_factory=ClosedFormConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    start: StartConfig = field(default_factory=StartConfig)
    pretrained: tuple[str, ...] = ()
    export: Export = "never"
    fallback: Literal["planted"] | None = None
    device: str | None = None
    collectives: Collectives = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        # Parsed for their errors alone, before any data are loaded.
        self.id_dropout_rates()
        self.pretrained_files()
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
        check_choice("lookups", self.lookups, get_args(Lookups))
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
                f"id_dropout={','.join(self.id_dropout)}",
                "admit_after=2 trains the row of unknown ids, by every first sight; leave id_dropout out",
            ),
            (
                self.sync.mode != "every_step",
                f"sync.mode={self.sync.mode}",
                "a row begins anew on all ranks in one step; set sync.mode=every_step",
            ),
            (
                self.plan.towers != "data_parallel",
                f"plan.towers={self.plan.towers}",
                "their towers are on every rank; set plan.towers=data_parallel",
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
                    f"{setting} with ids.{self.ids.features[0].partition('=')[0]}: {why}"
                )

    def pretrained_files(self) -> dict[str, Path]:
        """Returns the files of ``pretrained`` by table."""
        files = {}
        for text in self.pretrained:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ValueError(
                    f"pretrained: {text!r} must be a table and a file, such as item_id=vectors.parquet"
                )
            files[name] = Path(path)
        return files

    def id_dropout_rates(self) -> dict[str, float]:
        """Returns the shares of ``id_dropout`` by feature."""
        rule = "must be a feature and a share of its bags, such as item_id=0.1"
        return numbers_by_name("id_dropout", self.id_dropout, rule)


def numbers_by_name(key: str, texts: Iterable[str], rule: str) -> dict[str, float]:
    """Returns the numbers of a setting's ``name=number`` texts by name.

    Raises:
        ValueError: a text has no number; the message ends with ``rule``.
    """
    numbers = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise ValueError(f"{key}: {text!r} {rule}") from None
    return numbers


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
    policies = job.ids.policies()
    tables: set[str] = set()
    for name in policies:
        feature = schema.feature(name)
        if feature is None:
            raise ValueError(
                f"ids.{name}: the model reads no such column of ids; it reads {listed(schema.keys)}"
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


def check_elastic(job: Job, topology: str | None = None) -> None:
    """Refuses settings for a fixed number of ranks, if the job trains on however many nodes are up.

    Args:
        job: the job.
        topology: MIN:MAXxPROCS of the launch; that of this process's environment where not given, empty for none.

    Raises:
        ValueError: naming the setting.
    """
    topology = os.environ.get(ELASTIC, "") if topology is None else topology
    if not topology:
        return
    least, _, rest = topology.partition(":")
    procs = rest.partition("x")[2]
    ranks = int(least) * int(procs)
    towers = job.plan.towers
    if ":" in towers or (towers == "tower_parallel" and ranks < 2):
        raise ValueError(
            f"plan.towers={towers} with -j {topology}: it gives towers ranks of their own, whose number changes with "
            f"the nodes that are up; set plan.towers=auto, or write -j {rest}"
        )
