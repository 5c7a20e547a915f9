"""Job: all that one training run needs. Task: what its data is, and what is asked of a model about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.datasets.catalog import DataConfig
from torchrec_ext.data.loader.loader import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.checkpoint.run import CheckpointConfig, StartConfig
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import Loader, TrainConfig
from torchx_apps.tasks.export_data import ExportData
from torchx_apps.tasks.ranking import ranking_task

Lookups = Literal["auto", "merged", "apart"]
Export = Literal["never", "auto", "require"]


class Evaluator(Protocol):
    """The figures of a model on held-out data; every rank calls each method but :meth:`baseline`."""

    def validate(self) -> Record:
        """Figures by name on the validation part: during training, and what early stopping and a choice of settings may look at."""

    def test(self) -> Record:
        """Figures by name on the test part; puts the model into evaluation."""

    def baseline(self, part: str) -> Record:
        """Those of the figures that need no model, on ``validation`` or ``test``: what a model must beat. Needs no other rank."""

    def example(self) -> str:
        """A few held-out rows as a person would look at them, or nothing."""


class Task(Protocol):
    """A data set with its question; the same on every rank."""

    @property
    def name(self) -> str:
        """Of the data set."""

    @property
    def licence(self) -> str | None:
        """What its publisher asks of users."""

    @property
    def data(self) -> Any:
        """What ``Job.build`` reads, such as the rows that each table needs."""

    @property
    def asked(self) -> str:
        """Heading of the figures: which rows, against what."""

    @property
    def baseline_name(self) -> str:
        """What :meth:`Evaluator.baseline` is."""

    @property
    def validates(self) -> bool:
        """Whether there are validation rows; without them nothing is measured while training."""

    @property
    def best(self) -> Mapping[str, float]:
        """The best possible figures, where they are known."""

    def describe(self) -> str:
        """One line: how much of what."""

    def loader(self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int) -> Loader:
        """The training batches of one rank.

        Raises:
            ValueError: settings from which nothing can be learned on this data.
        """

    def evaluator(self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> Evaluator:
        """Who measures ``model``."""

    def export_data(self, schema: BatchSchema) -> ExportData:
        """What a bundle needs of the data."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that one training run needs.

    Args:
        name: of the recipe.
        build: makes the model from ``model`` and the task's data, its tables on the meta device: an ``nn.Module`` with
            a method ``schema(out_of_range=...)``, whose forward returns (loss, output with ``loss`` and ``weights``),
            as a TowerModel.
        model: a frozen dataclass that ``build`` reads; it has ``out_of_range``.
        data: which rows: a frozen dataclass that ``task`` reads; it has ``name``.
        task: loads ``data``; called as ``task(data, progress=...)``, it raises DatasetUnavailable where the set is not
            to be had.
        loader: how rows become batches.
        id_dropout: by feature, the share of bags that are the out-of-vocabulary row in training, as
            ``("item_id=0.1",)``: what an id that training never saw is ranked by; see :class:`IdDropout`.
        optimizer: how parameters move.
        plan: how tables are spread over ranks.
        lookups: ``merged`` looks up the tables of all towers in one exchange, of towers on ranks of their own those of
            the same ranks in one; ``apart`` tower by tower, with the same result; ``auto`` merges on several ranks,
            unless ``plan.towers`` or a path in ``optimizer.per_table`` stands against it.
        sync: how often ranks exchange what.
        train: how long, and the seed of everything.
        checkpoint: when the run is saved, and where.
        start: the checkpoint whose weights a new run begins with.
        pretrained: vectors that a new run's tables begin with, by table, as ``("item_id=vectors.parquet",)``: see
            :func:`read_vectors`.
        export: ``require`` ends a run with a bundle for serving in its folder; ``auto`` does so where the model can be
            served, and says why not where it cannot.
        fallback: the generated set to use where the real one is not to be had, or None: stop and say how to get it.
        device: ``cpu``, ``cuda`` or ``cuda:0``, see ``Runtime.start``; CUDA on a host with GPUs where not given.
        streams: run the towers of a rank on CUDA streams of their own, beside one another.
        threads: compute threads per rank; OMP_NUM_THREADS, which the component's --threads sets, where not given.
    """

    name: str
    build: Callable[[Any, Any], Any]
    model: Any
    data: Any = field(default_factory=DataConfig)
    task: Callable[..., Task] = ranking_task
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    id_dropout: tuple[str, ...] = ()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    lookups: Lookups = "auto"
    sync: SyncConfig = field(default_factory=SyncConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    start: StartConfig = field(default_factory=StartConfig)
    pretrained: tuple[str, ...] = ()
    export: Export = "never"
    fallback: Literal["planted"] | None = None
    device: str | None = None
    streams: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self.id_dropout_rates(), self.pretrained_files()
        if self.export not in get_args(Export):
            raise ValueError(f"export={self.export!r}: must be one of {', '.join(get_args(Export))}")
        if self.lookups not in get_args(Lookups):
            raise ValueError(f"lookups={self.lookups!r}: must be one of {', '.join(get_args(Lookups))}")

    def pretrained_files(self) -> dict[str, Path]:
        """``pretrained`` by table."""
        files = {}
        for text in self.pretrained:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ValueError(f"pretrained: {text!r} must be a table and a file, such as item_id=vectors.parquet")
            files[name] = Path(path)
        return files

    def id_dropout_rates(self) -> dict[str, float]:
        """``id_dropout`` by feature."""
        rates = {}
        for text in self.id_dropout:
            name, _, rate = text.partition("=")
            try:
                rates[name] = float(rate)
            except ValueError:
                raise ValueError(
                    f"id_dropout: {text!r} must be a feature and a share of its bags, such as item_id=0.1"
                ) from None
        return rates


def schema_of(job: Job, task: Task, model: Any) -> BatchSchema:
    """The schema of the job's batches; a task that has ``oov_ids`` says by feature which row an id that training never saw has."""
    schema: BatchSchema = model.schema(out_of_range=job.model.out_of_range)
    rows: Mapping[str, int] = getattr(task, "oov_ids", {})
    if not any(rows.get(name) for name in schema.keys):
        return schema
    return model.schema(  # type: ignore[no-any-return]
        out_of_range=job.model.out_of_range, oov_ids={name: row for name, row in rows.items() if name in schema.keys}
    )
