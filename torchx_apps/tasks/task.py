"""Task: a data set with the question that a model answers about it. Evaluator: the answers of a model, in figures."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.batch import ResumableLoader, TowerBatch
from torchrec_ext.data.columns import Chunk, Int64
from torchrec_ext.data.datasets.streamed import StreamedData
from torchrec_ext.data.files.arrow import Source
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.batch_schema import IdReplacement
from torchrec_ext.train import metrics
from torchrec_ext.train.config import ClosedFormConfig, EvaluationConfig, Figure, Record
from torchx_apps.tasks.baselines import Beside, ClosedForms
from torchx_apps.tasks.export_data import ExportData
from torchx_apps.tasks.question import K, TaskQuestion, item_batches

# Rows of a batch in an evaluation.
BATCH_ROWS = 8_192


class Evaluator(ABC):
    """Evaluates a model on held-out data; every rank calls each method but :meth:`baseline` and :meth:`beside`.

    Args:
        data: the task's data.
        schema: schema of the model's batches.
        model: the sharded model.
        runtime: this rank's runtime.

    Attributes:
        rows: puts the rows that dynamic ids have now in their place; None by default.
    """

    data: Any

    def __init__(
        self,
        data: Any,
        schema: BatchSchema,
        model: DistributedModelParallel,
        runtime: Runtime,
    ) -> None:
        self.data = data
        self.schema = schema
        self.model = model
        self.runtime = runtime
        self.rows: IdReplacement | None = None

    def builder(self, items: Chunk | None) -> BatchBuilder:
        """Returns a builder of batches for the model, whose ids are rows of its tables."""
        return BatchBuilder(self.schema, items, rows=self.rows)

    @property
    @abstractmethod
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""

    @abstractmethod
    def figures(self, split: str) -> Record:
        """Returns figures by name on the rows of ``validation`` or ``test``."""

    @abstractmethod
    def baseline(self, split: str) -> Record:
        """Returns the figures of a ranking or prediction without a model, as a minimum for models."""

    def validate(self) -> Record:
        """Returns the figures on the validation rows, for early stopping and the choice of settings."""
        return self.figures("validation")

    def test(self) -> Record:
        """Returns the figures on the test rows; switches the model to evaluation."""
        self.model.eval()
        return self.figures("test")

    def beside(self, split: str) -> Beside:
        """Returns the figures of EASE; none by default."""
        del split
        return Beside({}, {})

    def example(self) -> str:
        """Returns a few held-out rows as text for a person; empty by default, since ids mean nothing to a person."""
        return ""

    @property
    def calibrated(self) -> bool:
        """Whether the model's logits are odds, rather than scores for ranking only."""
        return bool(getattr(self.model.module, "calibrated", True))

    @property
    def classified(self) -> list[str]:
        """Names of the figures of the model's logits."""
        return metrics.classification_names(calibrated=self.calibrated)

    def outputs(
        self,
        rows: Chunk | Source,
        batch_size: int,
        *,
        label: str = "label",
        weight: str | None = None,
        items: Chunk | None = None,
    ) -> Iterator[Any]:
        """Yields the model's output for each batch of this rank's part of held-out rows.

        Args:
            rows: rows of all ranks.
            batch_size: number of rows of a batch, over all ranks.
            label: column of the labels.
            weight: column of the weights, or None.
            items: row i holds the features of item i; None if the rows have them.
        """
        config = LoaderConfig(
            batch_size=batch_size,
            negatives=0,
            label=label,
            weight=weight,
            shuffle=False,
        )
        rank = self.runtime.rank
        world_size = self.runtime.world_size
        # Figures do not depend on the order, so each rank reads its own part of files.
        loader = ChunkLoader(
            rows,
            self.schema,
            config=config,
            items=items,
            rank=rank,
            world_size=world_size,
            in_order=False,
        )
        loader.hook.replace = self.rows
        for batch in metrics.watched(loader, len(loader)):
            with torch.no_grad():
                # The first of two results is the loss.
                output = self.model.module(batch.to(self.runtime.device))[1]
            yield output

    def predictions(
        self, rows: Chunk, batch_size: int, *, items: Chunk | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, labels and weights of this rank's rows, (B,) each; arguments as for :meth:`outputs`."""
        outputs = list(self.outputs(rows, batch_size, items=items))
        logits = torch.cat([output.logits for output in outputs])
        labels = torch.cat([output.labels for output in outputs])
        return logits, labels, torch.cat([output.weights for output in outputs])


# Figures of a ranking, each with its number of items shown.
Figures = Sequence[tuple[Figure, int]]
# Those of a ranking if none are named.
USUAL_FIGURES: Figures = (("hr", K), ("ndcg", K))


class RankedEvaluator(Evaluator):
    """An evaluator with a ranking, whose question a model and its baselines answer side by side.

    Args:
        data: the task's data.
        schema: schema of the model's batches.
        model: the sharded model.
        runtime: this rank's runtime.
        figures: names of the ranking's figures with their numbers of items shown; the usual ones if empty.
        closed_forms: EASE of the training rows, if they are ranked too.
    """

    def __init__(
        self,
        data: Any,
        schema: BatchSchema,
        model: DistributedModelParallel,
        runtime: Runtime,
        figures: Figures = (),
        closed_forms: ClosedForms | None = None,
    ) -> None:
        super().__init__(data, schema, model, runtime)
        self.ranking_figures = figures or self.usual_figures
        self._closed_forms = closed_forms

    @property
    def usual_figures(self) -> Figures:
        """The ranking's figures if none are named."""
        return USUAL_FIGURES

    @abstractmethod
    def question(self, split: str) -> TaskQuestion | None:
        """Returns the ranking question about a split; None if nothing is ranked."""

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`: those of the ranking by default."""
        return self.ranking_names

    def baseline(self, split: str) -> Record:
        """Returns the figures of the popularity ranking on the same question; none if nothing is ranked."""
        question = self.question(split)
        if question is None:
            return {}
        return question.of_popularity(torch.from_numpy(self.data.popularity()))

    @property
    def ranking_names(self) -> list[str]:
        """Names of the ranking's figures."""
        return [f"{name}@{k}" for name, k in self.ranking_figures]

    def beside(self, split: str) -> Beside:
        """Returns the figures of EASE on the same question; it is fitted on the training rows."""
        question = self.question(split)
        if question is None:
            return Beside({}, {})
        return question.of_closed_forms(self._closed_forms)

    @property
    def catalogue_size(self) -> int:
        """Number of items that can be recommended."""
        return int(self.data.num_items)

    def catalogue(self, builder: BatchBuilder) -> Tensor:
        """Returns the vectors of the unknown item and of all items that can be recommended, (1 + I, D). Collective."""
        batches = item_batches(builder, self.catalogue_size + 1, self.runtime)
        return metrics.embed_all(self.model.module, "item", batches, self.runtime)

    def best_items(
        self, tower: str, query: TowerBatch, builder: BatchBuilder, user_items: Int64
    ) -> tuple[list[int], list[float]]:
        """Returns the K best items of the catalogue for a query of one row, and their scores.

        Args:
            tower: name of the query's tower.
            query: batch of the query.
            builder: maker of the items' batches.
            user_items: items of the query's user, which are left out.
        """
        model = self.model.module
        with torch.no_grad():
            items = self.catalogue(builder)
            vector = model.embed(tower, query.to(self.runtime.device))
            scores = model.interaction.score_all(vector, items)[0].cpu()
        # Row 0 is the unknown item.
        scores[0] = -torch.inf
        scores[torch.from_numpy(user_items)] = -torch.inf
        # A user may have taken all but a few.
        best = scores.topk(min(K, int((scores > -torch.inf).sum())))
        return best.indices.tolist(), best.values.tolist()


class Task(ABC):
    """A data set with its question; equal on every rank.

    A task says what its rows are, and makes their loader and evaluator. What else a job may ask has a default here.

    Attributes:
        data: the data, from which ``Job.build`` takes the number of rows of each table, for example. It has ``name``,
            ``best``, ``vocab`` (rows of each column's table) and ``id_values`` (values behind its ids); it may have
            ``licence`` and ``prepared``.
        ranked_by: key of the setting that has the catalogue ranked; empty if there is no such setting.
    """

    data: Any
    ranked_by: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Name of the data set."""
        return str(self.data.name)

    @property
    def licence(self) -> str | None:
        """Terms of the data set's publisher, if known."""
        licence: str | None = getattr(self.data, "licence", None)
        return licence

    @property
    def best(self) -> Mapping[str, float]:
        """Best possible figures of generated data, by name."""
        best: Mapping[str, float] = self.data.best
        return best

    @property
    @abstractmethod
    def heading(self) -> str:
        """Heading of the figures: the rows that are evaluated, and what against."""

    @property
    @abstractmethod
    def baseline_name(self) -> str:
        """Name of the baseline of :meth:`Evaluator.baseline`."""

    @property
    @abstractmethod
    def validates(self) -> bool:
        """Whether there are validation rows; without them nothing is measured while training."""

    @abstractmethod
    def describe(self) -> str:
        """Returns the set's name and size as one line."""

    @abstractmethod
    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ResumableLoader:
        """Returns the loader of one rank's training batches.

        Raises:
            ValueError: nothing can be learned from this data with these settings.
        """

    @abstractmethod
    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> Evaluator:
        """Returns the evaluator of a model on this rank."""

    @property
    def prepared(self) -> StreamedData | None:
        """The folder of rec.data.preprocess that the rows come from; None for rows of another origin."""
        prepared: StreamedData | None = getattr(self.data, "prepared", None)
        return prepared

    @property
    def closed_forms(self) -> ClosedForms | None:
        """EASE of the training rows; none by default."""
        return None

    def raw_values(self, name: str) -> pa.Array:
        """Returns the log's value of each row of a column's vocabulary, (V,) whole numbers or text, null for unknown.

        Dynamic ids are these values, which mean themselves on any day, unlike rows of a vocabulary.

        Raises:
            ValueError: the rows of the task have no dynamic ids, as by default.
        """
        raise ValueError(
            f"ids.features.{name}: a {type(self).__name__} has no dynamic ids; leave it out, or take --recipe "
            "two_tower, retrieval, ncf, n_tower, contextual_ncf, stream or multi_task"
        )

    def same_ids(self, name: str) -> Sequence[str]:
        """Returns the columns with the same ids as a column, such as a history of the items; itself by default."""
        return [name]

    def with_roles(self, config: LoaderConfig) -> LoaderConfig:
        """Fills the loader's columns from the data; there is nothing to fill by default."""
        return config

    def with_evaluation(
        self, evaluation: EvaluationConfig, closed_form: ClosedFormConfig
    ) -> Task:
        """Returns the task with these figures and baselines; by default rows are not ranked.

        Raises:
            ValueError: figures or baselines are set, and the rows are not ranked.
        """
        del closed_form
        settings = dataclasses.asdict(evaluation)
        texts = [
            f"evaluation.{name}={','.join(value)}"
            for name, value in settings.items()
            if value
        ]
        if texts:
            raise ValueError(
                f"{', '.join(texts)}: the rows of '{self.name}' have labels, which are predicted and not ranked; leave "
                "it out"
            )
        return self

    def unservable(self, model: Any) -> str | None:
        """Explains why no bundle can be made of these rows with this model; None if one can, as by default."""
        del model
        return None

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the part of the data needed to export a bundle.

        Raises:
            BundleError: there is none, as by default.
        """
        del schema
        raise BundleError(
            f"the task {type(self).__name__} has no method export_data(schema); write one as "
            "torchx_apps.tasks.export_data does, or call "
            "torchrec_ext.retrieval.export.export"
        )

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """Returns the weighted share of positives among the training rows as the loader gives them; never quite 0 or 1.

        The list has an entry for the loader's labels and one for each of ``tasks``. It is empty if a column is
        missing, which the loader refuses.

        Args:
            config: loader settings with the columns of labels and weights, and the negatives drawn for each row.
            tasks: names of further columns of labels.
        """
        rows = self.data.train
        names = [config.label, *tasks]
        if any(name and name not in rows for name in (*names, config.weight)):
            return []
        weights = (
            rows[config.weight].values.astype(np.float64) if config.weight else None
        )
        # Each row comes with its drawn negatives, which have label 0 in all tasks.
        loaded = 1 + config.negatives
        # Half a positive among all rows: log-odds of 0 or 1 would not be finite.
        least = 0.5 / (rows.num_rows * loaded + 1)
        shares = []
        for name in names:
            # Rows without a label are all positives.
            share = np.average(rows[name].values, weights=weights) if name else 1.0
            shares.append(float(np.clip(share / loaded, least, 1 - least)))
        return shares


def heading_of(candidates: Int64 | None) -> str:
    """Returns the heading of a ranking: the rows that are ranked, and the ``candidates`` they are ranked among."""
    if candidates is not None:
        return f"test items, among {candidates.shape[1]} others"
    return "test items, whole catalogue"


@dataclass(frozen=True)
class RankedTask(Task):
    """A task whose items are ranked.

    Args:
        data: the data.
        figures: names of the figures with their numbers of items shown; the task's usual ones if empty.
        baselines: baselines to rank; those that take little time if empty.
        closed_form: settings of EASE.
    """

    data: Any
    figures: Figures = ()
    baselines: Sequence[str] = ()
    closed_form: ClosedFormConfig = field(default_factory=ClosedFormConfig)

    def with_evaluation(
        self, evaluation: EvaluationConfig, closed_form: ClosedFormConfig
    ) -> RankedTask:
        """Returns the task with these figures and baselines."""
        figures = tuple(evaluation.figures) if evaluation.metrics else self.figures
        return dataclasses.replace(
            self,
            figures=figures,
            baselines=evaluation.baselines,
            closed_form=closed_form,
        )
