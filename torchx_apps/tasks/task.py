"""Task: a prepared folder with the question that a model answers about it: labels, pairs or sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.batch import ResumableLoader
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.loader import training_loader
from torchrec_ext.data.prepared import Prepared, positive_share
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.validation import listed
from torchrec_ext.train.config import EvaluationConfig
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.evaluator import Evaluator as Evaluator
from torchx_apps.tasks.export_data import (
    ExportData,
    of_prepared,
    without_item_tower,
)
from torchx_apps.tasks.question import Figures


@dataclass(frozen=True)
class Task:
    """A data set with its question; equal on every rank. What a job asks of it can be overridden.

    Args:
        data: the set; ``data.form`` says what is asked. Rows with ``labels`` are classified, and the catalogue is
            ranked for those with label 1. Of ``pairs`` and ``sessions`` the held-out items are ranked.
        figures: names of the ranking's figures with their numbers of items shown; those of the set if empty.
        baselines: baselines to rank; those that take little time if empty.
        ease_l2: penalty of EASE.

    Raises:
        ValueError: there are no test rows.
    """

    data: Prepared
    figures: Figures = ()
    baselines: Sequence[str] = ()
    ease_l2: float = 500.0

    @property
    def ranked_by(self) -> str:
        """Key of the setting that has the catalogue ranked; empty if it always is."""
        return "data.ranked" if self.data.form == "labels" else ""

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.data.name

    @property
    def best(self) -> Mapping[str, float]:
        """Best possible figures of generated data, by name."""
        return self.data.best

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are evaluated, and what against."""
        if self.data.form == "labels":
            return "test rows"
        if self.data.evaluation.candidates:
            return "test items, among their candidates"
        return "test items, whole catalogue"

    @property
    def baseline_name(self) -> str:
        """Name of the baseline of :meth:`Evaluator.baseline`."""
        if self.data.form != "labels":
            return "popularity"
        roles = self.data.roles
        if self.data.ranked and roles.user and roles.item:
            return "the same for all, by popularity"
        return "the same for all"

    @property
    def validates(self) -> bool:
        """Whether there are validation rows; without them nothing is measured while training."""
        return "validation" in self.data.splits

    @cached_property
    def closed_forms(self) -> ClosedForms | None:
        """EASE of the pairs of the training rows; None without a user or item column."""
        user = self.data.roles.user
        item = self.data.roles.item
        if user is None or item is None:
            return None
        return ClosedForms(
            pairs=lambda: self.data.taken("train"),
            num_pairs=self.data.splits["train"].num_rows,
            num_users=self.data.vocab[user],
            num_items=self.data.vocab[item],
            names=self.baselines,
            l2=self.ease_l2,
        )

    def describe(self) -> str:
        """Returns the set's name and size as one line, and then its columns."""
        rows = ", ".join(
            f"{source.num_rows:,} {split} rows"
            for split, source in self.data.splits.items()
        )
        tables = len(self.data.features)
        dense = len(self.data.dense)
        text = f"{self.name}, {rows}, {tables} tables of {sum(self.data.vocab.values()):,} rows, {dense} dense columns"
        return "\n".join([text, *self.data.describe_columns()])

    def with_roles(self, config: LoaderConfig) -> LoaderConfig:
        """Fills the loader's label and weight columns from the preprocessing, if they are not set."""
        if self.data.form != "labels":
            return config
        roles = self.data.roles
        return dataclasses.replace(
            config,
            label=config.label or roles.label,
            weight=config.weight or roles.weight,
        )

    def with_evaluation(self, evaluation: EvaluationConfig) -> Task:
        """Returns the task with these figures and baselines."""
        return dataclasses.replace(
            self,
            figures=tuple(evaluation.figures) or self.figures,
            baselines=evaluation.baselines,
            ease_l2=evaluation.ease_l2,
        )

    def unservable(self, model: Any) -> str | None:
        """Explains why no bundle can be made of these rows with this model; None if one can."""
        if self.data.roles.item is None:
            return (
                f"the preprocessing of '{self.data.name}' names no item, and a bundle stores a vector of each; name "
                "the item's column, or take --export never, and torchx_apps.publish for the weights"
            )
        if self.data.form != "labels":
            return None
        return without_item_tower(model, self.data.towers["item"])

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """Returns the weighted share of positives among the training rows as the loader gives them; never quite 0 or 1.

        The list has an entry for the loader's labels and one for each of ``tasks``.

        Args:
            config: loader settings with the negatives drawn for each row.
            tasks: names of further columns of labels.
        """
        if self.data.form == "labels":
            return [self.data.share("train", name) for name in ("", *tasks)]
        # Each positive comes with its drawn negatives.
        rows = self.data.splits["train"].num_rows
        return [positive_share(rows, rows * (1 + config.negatives))]

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ResumableLoader:
        """Returns the loader of one rank's training batches.

        Raises:
            ValueError: nothing can be learned from this data with these settings.
        """
        form = self.data.form
        if form == "sessions" and schema.catalogue and config.negatives:
            raise ValueError(
                f"model.loss=catalogue with loader.negatives={config.negatives}: these are a sample of the catalogue; "
                "set loader.negatives=0, or model.loss=sampled_softmax"
            )
        # The schema has a label range where the loss reads labels, and none if it
        # compares rows.
        if (
            form == "pairs"
            and not (config.negatives or config.label)
            and schema.label_range is not None
        ):
            raise ValueError(
                "loader.negatives=0 without loader.label: every row would have label 1; draw negatives, "
                "set loader.label, or model.loss=in_batch"
            )
        return training_loader(
            self.data,
            schema,
            self.with_roles(config),
            rank=rank,
            world_size=world_size,
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> Evaluator:
        """Returns the evaluator of a model on this rank.

        Raises:
            ValueError: figures or baselines of a ranking are set, and the catalogue is not ranked.
        """
        forms = self.closed_forms
        evaluator = Evaluator(self.data, schema, model, runtime, self.figures, forms)
        baselines = forms.names if forms else ()
        if (self.figures or baselines) and evaluator.towers is None:
            setting = f"evaluation.baselines={','.join(baselines)}"
            if self.figures:
                setting = f"evaluation.metrics={','.join(evaluator.ranking_names)}"
            raise ValueError(
                f"{setting}: the catalogue of '{self.name}' is not ranked; that needs Prepare(user=, "
                "item=), data.ranked above 0, and a last tower of the item's columns alone"
            )
        return evaluator

    def raw_values(self, name: str) -> pa.Array:
        """Returns the log's value of each row of a column's vocabulary, (V,) whole numbers or text, null for unknown.

        Dynamic ids are these values, which mean themselves on any day, unlike rows of a vocabulary.

        Raises:
            ValueError: the rows are sessions, which have no dynamic ids; or there is no such column.
        """
        if self.data.form == "sessions":
            raise ValueError(
                f"ids.features.{name}: sessions have no dynamic ids; leave it out, or take --recipe two_tower, ncf, "
                "n_tower, contextual_ncf, stream or multi_task"
            )
        if name not in self.data.features:
            raise ValueError(
                f"ids.features.{name}: is no column of ids; those are {listed(self.data.features)}"
            )
        return self.data.raw_values(name)

    def same_ids(self, name: str) -> Sequence[str]:
        """Returns the columns with the same ids as a column, such as a history of the items."""
        return self.data.same_ids(name)

    def export_data(
        self, schema: BatchSchema, catalogue: Sequence[str] = ()
    ) -> ExportData:
        """Returns the catalogue, and the users as they were before the test rows.

        Args:
            schema: columns of the model.
            catalogue: parquet files of the items to serve; the training's if empty.

        Raises:
            BundleError: the folder has no raw rows.
            DataError: the catalogue lacks a column, or has one of another type.
        """
        return of_prepared(self.data, schema, catalogue)
