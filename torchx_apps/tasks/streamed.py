"""The task of prediction on rows with labels: few rows are held in memory, more are read while they train."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.datasets.streamed import StreamedData, positive_share
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.data.negatives.mixed import CatalogueCandidates
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.dynamic_ids import columns_like, values_of_prepared
from torchx_apps.tasks.export_data import (
    ExportData,
    of_streamed,
    tower_columns,
    without_item,
    without_item_tower,
)
from torchx_apps.tasks.question import TaskQuestion
from torchx_apps.tasks.task import BATCH_ROWS, Figures, RankedEvaluator, RankedTask


@dataclass(frozen=True)
class StreamedTask(RankedTask):
    """Predicts the labels of held-out rows of ``data``; see :class:`torchx_apps.tasks.task.Task`."""

    ranked_by: ClassVar[str] = "data.ranked"

    data: StreamedData
    heading: str = "test rows"

    @property
    def prepared(self) -> StreamedData:
        """The folder of rec.data.preprocess that the rows come from."""
        return self.data

    @property
    def baseline_name(self) -> str:
        """Name of the baseline: one prediction for all rows and, where the catalogue is ranked, popularity."""
        roles = self.data.roles
        if self.data.ranked and roles.user and roles.item:
            return "the same for all, by popularity"
        return "the same for all"

    @cached_property
    def closed_forms(self) -> ClosedForms | None:
        """EASE of the users' and items' training rows with label 1; None without a user or item column."""
        user = self.data.roles.user
        item = self.data.roles.item
        if user is None or item is None:
            return None
        return ClosedForms(
            # User 0 is any unknown user.
            pairs=lambda: _clicks(self.data, np.arange(1, self.data.vocab[user])),
            num_pairs=self.data.splits["train"].num_rows,
            num_users=self.data.vocab[user],
            num_items=self.data.vocab[item],
            names=self.baselines,
            config=self.closed_form,
        )

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return "validation" in self.data.splits

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
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
        roles = self.data.roles
        return dataclasses.replace(
            config,
            label=config.label or roles.label,
            weight=config.weight or roles.weight,
        )

    def unservable(self, model: Any) -> str | None:
        """Explains why no bundle can be made of the rows with this model; None if one can."""
        if self.data.roles.item is None:
            return without_item(
                f"the preprocessing of '{self.data.name}' names no item"
            )
        return without_item_tower(model, self.data.towers["item"])

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """Returns the weighted share of positives among the training rows, never quite 0 or 1; reads all labels."""
        del config
        sums = self.data.task_positives["train"] if tasks else {}
        total = self.data.positives["train"][1]
        return [
            self.data.share("train"),
            *(positive_share(sums[name][0], total) for name in tasks),
        ]

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ChunkLoader:
        """Returns the loader of the labelled training rows; it reads them while the epoch runs."""
        if config.negatives:
            raise ValueError(
                f"loader.negatives={config.negatives}: the rows of '{self.name}' have labels of their own, negatives "
                "among them; set loader.negatives=0"
            )
        config = self.with_roles(config)
        source = self.data.rows("train", (config.label, config.weight))
        items = None
        everything = None
        # Reading the items takes a pass over the training rows.
        if schema.catalogue:
            item_ids, items = self.data.items
            everything = CatalogueCandidates(item_ids)
        return ChunkLoader(
            source,
            schema,
            config=config,
            items=items,
            negatives=everything,
            rank=rank,
            world_size=world_size,
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> StreamedEvaluator:
        """Returns the evaluator of AUC, log loss, normalised entropy, calibration and the catalogue's ranking.

        Raises:
            ValueError: figures or baselines of a ranking are set, and the catalogue is not ranked.
        """
        evaluator = StreamedEvaluator(
            self.data, schema, model, runtime, self.figures, self.closed_forms
        )
        baselines = self.closed_forms.names if self.closed_forms else ()
        if (self.figures or baselines) and evaluator.towers is None:
            setting = f"evaluation.baselines={','.join(baselines)}"
            if self.figures:
                setting = f"evaluation.metrics={','.join(evaluator.ranking_names)}"
            raise ValueError(
                f"{setting}: the catalogue of '{self.name}' is not ranked; that needs Prepared(user=, "
                "item=), data.ranked above 0, and a last tower of the item's columns alone"
            )
        return evaluator

    def raw_values(self, name: str) -> pa.Array:
        """See :meth:`Task.raw_values`."""
        return values_of_prepared(self.data, name)

    def same_ids(self, name: str) -> Sequence[str]:
        """Returns the columns that share a column's vocabulary."""
        return columns_like(self.data, name)

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the items of the training rows, and requests as they stand in the log.

        Raises:
            BundleError: the preprocessing names no item, or its folder has no raw rows.
        """
        return of_streamed(self.data, schema)


class _RankedRows(NamedTuple):
    """Held-out rows to rank the catalogue for, and their question."""

    rows: Chunk
    question: TaskQuestion


class StreamedEvaluator(RankedEvaluator):
    """Evaluates on rows read a batch at a time.

    Where the preprocessing names the columns of user and item, and the item's columns are those of the model's last
    tower, the whole catalogue is ranked for held-out rows with label 1, without the items that the same user has
    a training row with label 1 of.
    """

    data: StreamedData

    @cached_property
    def towers(self) -> list[str] | None:
        """Names of the model's towers, the item's last, if they can rank the catalogue; else None."""
        return ranking_towers(self.model.module, self.data)

    @cached_property
    def _rankings(self) -> dict[str, _RankedRows | None]:
        """The rankings asked for so far, by split."""
        return {}

    @property
    def tasks(self) -> list[str]:
        """Names of the model's tasks; none if it has one label."""
        return list(getattr(self.model.module, "tasks", ()))

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        names = []
        for prefix in [f"{name}_" for name in self.tasks] or [""]:
            names += [f"{prefix}{name}" for name in self.classified]
        if self.towers:
            names += self.ranking_names
        return names

    def baseline(self, split: str) -> Record:
        """Returns the figures of the best constant, the training rows' share of positives, and popularity's ranking."""
        figures: Record = {}
        for prefix, (positive, total), share in self._constants(split):
            rate = positive / total if total else 0.0
            classes = ((rate, share), (1 - rate, 1 - share))
            figures[f"{prefix}auc"] = 0.5
            if self.calibrated:
                figures[f"{prefix}log_loss"] = -sum(
                    weight * math.log(chance) for weight, chance in classes if weight
                )
        question = self.question(split)
        if question is not None:
            figures |= question.of_popularity(torch.from_numpy(self.data.popularity))
        return figures

    def question(self, split: str) -> TaskQuestion | None:
        """Returns the question about held-out rows with label 1; None if the catalogue is not ranked."""
        ranking = self._ranking(split)
        return None if ranking is None else ranking.question

    def _constants(
        self, split: str
    ) -> Iterator[tuple[str, tuple[float, float], float]]:
        """Yields each label's prefix of figures, its positives and their total, and their share in training."""
        data = self.data
        if not self.tasks:
            yield "", data.positives[split], data.share("train")
            return
        of_clicked = self.model.module.rows == "positive"
        for number, name in enumerate(self.tasks):
            # The first task decides what a click is; the others may be learned among
            # the clicked rows.
            among_clicked = of_clicked and number > 0
            sums = []
            for of in (split, "train"):
                every, some = data.task_positives[of][name]
                clicked, total = data.positives[of]
                sums.append((some, clicked) if among_clicked else (every, total))
            yield f"{name}_", sums[0], positive_share(*sums[1])

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        roles = self.data.roles
        runtime = self.runtime
        size = BATCH_ROWS * runtime.world_size
        sums: dict[str, metrics.ClassificationMetrics] = {}
        for output in self.outputs(
            self.data.splits[split], size, label=roles.label, weight=roles.weight
        ):
            tasks = getattr(output, "tasks", None) or {}
            outputs = {f"{name}_": task for name, task in tasks.items()} or {"": output}
            for prefix, each in outputs.items():
                classification = sums.setdefault(
                    prefix, metrics.ClassificationMetrics(runtime.device)
                )
                classification.update(each.logits, each.labels, each.weights)
        record: Record = {}
        for prefix, classification in sums.items():
            figures = classification.compute(runtime)
            record |= {f"{prefix}{name}": figures[name] for name in self.classified}
        ranking = self._ranking(split)
        if ranking is None or self.towers is None:
            return record
        # Read only now: the catalogue takes a pass over the training rows.
        builder = self.builder(self.data.items[1])
        return record | ranking.question.of_model(
            self.model.module, runtime, builder, ranking.rows, self.towers
        )

    def _ranking(self, split: str) -> _RankedRows | None:
        """Returns the rows to rank the catalogue for; None if it is not ranked."""
        if self.towers is None:
            return None
        if split not in self._rankings:
            rows = held_out_rows(self.data, split)
            self._rankings[split] = None
            if rows.num_rows:
                self._rankings[split] = _RankedRows(
                    rows, question_of(self.data, rows, self.ranking_figures)
                )
        return self._rankings[split]


def _clicks(data: StreamedData, users: Int64) -> tuple[Int64, Int64]:
    """Returns users (P,) and items (P,) of the training rows with label 1 and one of ``users``."""
    user = str(data.roles.user)
    item = str(data.roles.item)
    pairs = []
    for rows in data.clicked(user, item):
        mask = np.isin(rows[user].values, users)
        pairs.append(np.stack([rows[user].values[mask], rows[item].values[mask]]))
    owners, items = np.concatenate(pairs, axis=1)
    return owners, items


def ranking_towers(model: Any, data: StreamedData) -> list[str] | None:
    """Returns the model's towers if the last reads exactly the item's columns, and no other any of them; else None."""
    if data.roles.user is None or data.roles.item is None or not data.ranked:
        return None
    towers = getattr(model, "made_of", None)
    if not towers or len(towers) < 2:
        return None
    features, dense = data.towers["item"]
    item = {*features, *dense}
    columns = [set(tower_columns(how.arguments or {})) for how in towers.values()]
    *queries, last = columns
    # A query tower with a column of the item would have to run for each pair.
    if last != item or any(query & item for query in queries):
        return None
    return list(towers)


def held_out_rows(data: StreamedData, split: str) -> Chunk:
    """Returns at most ``data.ranked`` rows of a split with label 1, evenly spread over all of them."""
    roles = data.roles
    assert roles.item is not None
    roles_read = [roles.label, roles.item]
    # A first pass counts the rows to choose from, since a split may not fit memory.
    count = sum(
        int((chunk[roles.label].values > 0).sum())
        for chunk in data.chunks(split, [roles.label])
    )
    every = max(1, -(-count // data.ranked))
    names = list(dict.fromkeys([*roles_read, *data.features, *data.dense]))
    pieces = []
    passed = 0
    for chunk in data.chunks(split, names):
        rows = np.flatnonzero(chunk[roles.label].values > 0)
        # Every n-th of all chunks together, however the files are cut.
        sample = rows[(np.arange(len(rows)) + passed) % every == 0]
        passed += len(rows)
        pieces.append(chunk.take(sample))
    return concatenate_rows(pieces, names)


def question_of(data: StreamedData, held_out: Chunk, figures: Figures) -> TaskQuestion:
    """Returns the question for a model and its baselines: the place of each held-out item in the catalogue."""
    item = str(data.roles.item)
    item_ids, _ = data.items
    users = held_out[str(data.roles.user)].values
    # User 0 is any unknown user, of whom nobody knows what he or she has taken.
    owners, items = np.unique(_clicks(data, np.unique(users[users > 0])), axis=1)
    user_items = Column.grouped(items, owners, 1 + int(users.max())).take(users)
    nobody = np.setdiff1d(np.arange(data.vocab[item]), item_ids)
    return TaskQuestion.about(
        held_out[item].values, user_items, figures, not_items=nobody.tolist()
    )
