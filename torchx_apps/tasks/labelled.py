"""The task of prediction: how likely is a user to take an item in the context of the row?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.datasets.config import PARTS
from torchrec_ext.data.datasets.labelled import LabelledData
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchx_apps.tasks.dynamic_ids import columns_like, values_of_prepared
from torchx_apps.tasks.export_data import (
    ExportData,
    of_labelled,
    without_item,
    without_item_tower,
)
from torchx_apps.tasks.task import BATCH_ROWS, Evaluator, Task


@dataclass(frozen=True)
class LabelledTask(Task):
    """Predicts the labels of held-out rows of ``data``; see :class:`torchx_apps.tasks.task.Task`."""

    data: LabelledData
    heading: str = "test rows"
    baseline_name: str = "the same for all"

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return self.data.validation.num_rows > 0

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        parts = [self.name]
        for split in PARTS:
            parts.append(f"{getattr(self.data, split).num_rows:,} {split} rows")
        for name, many in (("user_id", "users"), ("item_id", "items")):
            count = (
                f"{len(self.data.trained(name)):,}" if name in self.data.vocab else "no"
            )
            parts.append(f"{count} {many}")
        users = len(self.data.user_features)
        items = len(self.data.item_features)
        columns = {*self.data.features, *self.data.dense} - {"user_id", "item_id"}
        # All that is neither the user's nor the item's.
        parts.append(f"{len(columns) - users - items} columns of context")
        if users:
            parts.append(f"{users} of users")
        if items:
            parts.append(f"{items} of items")
        return ", ".join(parts)

    def unservable(self, model: Any) -> str | None:
        """Explains why no bundle can be made of these rows with this model; None if one can."""
        if "item_id" not in self.data.vocab:
            return without_item(f"the rows of '{self.data.name}' name no item")
        # The towers of preprocessed rows have the item's last; a bundle of other rows
        # finds it by its name.
        candidate = "item" if self.data.prepared is None else None
        return without_item_tower(model, self.data.towers["item"], candidate)

    @property
    def oov_ids(self) -> Mapping[str, int]:
        """Table row of ids unseen in training, by feature."""
        return self.data.oov_ids

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ChunkLoader:
        """Returns the loader of the labelled training rows."""
        if config.label is None or config.negatives:
            raise ValueError(
                f"loader.label={config.label} with loader.negatives={config.negatives}: the rows of '{self.name}' have "
                "labels of their own, negatives among them; set loader.label=label and loader.negatives=0"
            )
        if schema.catalogue:
            raise ValueError(
                f"model.loss=catalogue: the rows of '{self.name}' have no catalogue; take recipe stream "
                "over rec.data.preprocess's rows, or model.loss=in_batch"
            )
        return ChunkLoader(
            self.data.train, schema, config=config, rank=rank, world_size=world_size
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> LabelledEvaluator:
        """Returns the evaluator of AUC and log loss."""
        return LabelledEvaluator(self.data, schema, model, runtime)

    def raw_values(self, name: str) -> pa.Array:
        """See :meth:`Task.raw_values`."""
        if self.data.prepared is not None:
            return values_of_prepared(self.data.prepared, name)
        rows = np.arange(self.data.vocab[name])
        is_known = rows != self.data.oov_ids[name]
        # The row of unknown ids may be any, so the values behind it move up by one.
        values = pa.array(self.data.ids(name, rows[is_known]))
        return values.take(pa.array(np.cumsum(is_known) - 1, mask=~is_known))

    def same_ids(self, name: str) -> Sequence[str]:
        """Returns the columns that share a column's vocabulary."""
        return (
            [name]
            if self.data.prepared is None
            else columns_like(self.data.prepared, name)
        )

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns users and items; a request brings its own context."""
        return of_labelled(self.data, schema)


class LabelledEvaluator(Evaluator):
    """Evaluates AUC and log loss."""

    data: LabelledData

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        return self.classified

    def baseline(self, split: str) -> Record:
        """Returns the figures of predicting the training rows' share of positives for every row, the best constant."""
        share = float(self.data.train["label"].values.mean())
        labels = getattr(self.data, split)["label"].values
        if not self.calibrated:
            return {"auc": 0.5}
        log_loss = -np.log(np.where(labels > 0, share, 1 - share)).mean()
        return {"auc": 0.5, "log_loss": float(log_loss)}

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        predictions = self.predictions(getattr(self.data, split), BATCH_ROWS)
        figures = metrics.classification_metrics(*predictions, self.runtime)
        return {name: figures[name] for name in self.classified}
