"""The task of prediction on preprocessed rows that are read while they train: clicks of a log of any size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Column, Int64, Windows, concatenate
from torchrec_ext.data.datasets.streamed import StreamedData
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchx_apps.tasks.export_data import ExportData, of_streamed
from torchx_apps.tasks.named_data import NamedData

BATCH_ROWS = 8_192  # rows of a rank's batch in an evaluation


@dataclass(frozen=True)
class StreamedTask(NamedData):
    """Predicts the labels of held-out rows of ``data``; see :class:`torchx_apps.tasks.job.Task`."""

    data: StreamedData
    asked: str = "test rows"
    baseline_name: str = "the same for all, by popularity"

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return "validation" in self.data.splits

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        rows = ", ".join(f"{source.num_rows:,} {split} rows" for split, source in self.data.splits.items())
        tables, dense = len(self.data.features), len(self.data.dense)
        return f"{self.name}, {rows}, {tables} tables of {sum(self.data.vocab.values()):,} rows, {dense} dense columns"

    def with_roles(self, config: LoaderConfig) -> LoaderConfig:
        """Returns loader settings that read the preprocessing's columns of label and weight, where they name none."""
        roles = self.data.roles
        return dataclasses.replace(config, label=config.label or roles.label, weight=config.weight or roles.weight)

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """Returns the weighted share of positives among the training rows, never quite 0 or 1; reads all labels."""
        del config, tasks
        return [self.data.share("train")]

    def loader(self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int) -> ChunkLoader:
        """Returns the loader of the training rows, which have labels, and which are read while the epoch runs."""
        source, config = self.data.splits["train"], self.with_roles(config)
        return ChunkLoader(source, schema, config=config, rank=rank, world_size=world_size)

    def evaluator(self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> StreamedEvaluator:
        """Returns the evaluator of AUC, log loss, normalised entropy, calibration and the catalogue's ranking."""
        return StreamedEvaluator(self.data, schema, model, runtime)

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the items of the training rows, and requests as they stand in the log.

        Raises:
            BundleError: the preprocessing names no item, or its folder has no raw rows.
        """
        return of_streamed(self.data, schema)


class _Asked(NamedTuple):
    """Rows for which the catalogue is ranked, by the model's ``towers``, the item's last."""

    towers: list[str]
    rows: Chunk
    question: metrics.Question


class StreamedEvaluator:
    """Evaluates on rows that are read a batch at a time; every rank calls each method but :meth:`baseline`.

    Where the preprocessing names the columns of user and item, and the item's columns are those of the model's last
    tower, the whole catalogue is ranked for held-out rows with label 1, without the items that the same user has
    a training row with label 1 of.
    """

    def __init__(
        self, data: StreamedData, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> None:
        self._data, self._schema, self._model, self._runtime = data, schema, model, runtime
        self._questions: dict[str, _Asked | None] = {}

    def validate(self) -> Record:
        """Returns the figures on the validation rows."""
        return self._figures("validation")

    def test(self) -> Record:
        """Returns the figures on the test rows."""
        self._model.eval()
        return self._figures("test")

    def baseline(self, split: str) -> Record:
        """Returns the figures of the best constant, the training rows' share of positives, and popularity's ranking."""
        (positive, total), share = self._data.positives[split], self._data.share("train")
        rate = positive / total
        classes = ((rate, share), (1 - rate, 1 - share))
        loss = -sum(weight * math.log(chance) for weight, chance in classes if weight)
        figures = {"auc": 0.5, "log_loss": loss}
        asked = self._asked(split)
        if asked is None:
            return figures
        counts = torch.zeros(self._data.vocab[str(self._data.roles.item)])
        for chunk in self._data.chunks("train", [self._data.roles.label, str(self._data.roles.item)]):
            clicked = chunk[str(self._data.roles.item)].values[chunk[self._data.roles.label].values > 0]
            counts += torch.from_numpy(np.bincount(clicked, minlength=len(counts)))
        return figures | metrics.ranking_metrics(metrics.popularity_ranks(counts, asked.question))

    def example(self) -> str:
        """Returns an empty text, since a row of ids means nothing to a person."""
        return ""

    def _figures(self, split: str) -> Record:
        roles, runtime = self._data.roles, self._runtime
        config = LoaderConfig(
            batch_size=BATCH_ROWS * runtime.world_size,
            negatives=0,
            label=roles.label,
            weight=roles.weight,
            shuffle=False,
        )
        source = self._data.splits[split]
        loader = ChunkLoader(source, self._schema, config=config, rank=runtime.rank, world_size=runtime.world_size)
        figures = metrics.ClassificationMetrics(runtime.device)
        with torch.no_grad():
            for batch in metrics.watched(loader, len(loader)):
                output = self._model.module(batch.to(runtime.device))[1]
                figures.update(output.logits, output.labels, output.weights)
        record = figures.compute(runtime)
        record.pop("auc_error")
        return {**record, **self._ranking(split)}

    def _asked(self, split: str) -> _Asked | None:
        """Returns the rows for which the catalogue is ranked; None where it is not."""
        if split not in self._questions:
            towers = ranking_towers(self._model.module, self._data)
            rows = held_out_rows(self._data, split) if towers else Chunk({})
            self._questions[split] = (
                _Asked(towers, rows, question_of(self._data, rows)) if towers and rows.num_rows else None
            )
        return self._questions[split]

    def _ranking(self, split: str) -> Record:
        """Returns HR and NDCG of the whole catalogue; nothing where the catalogue is not ranked."""
        asked = self._asked(split)
        if asked is None:
            return {}
        _, items = self._data.items
        builder = BatchBuilder(self._schema, items)
        shares = metrics.own_share(asked.rows.num_rows, self._runtime)
        queries = ((builder.user_batch(asked.rows.slice(rows.start, rows.stop)), keep) for rows, keep in shares)
        ids = np.arange(items.num_rows)
        batches = (
            (builder.item_batch(ids[rows]), keep) for rows, keep in metrics.own_share(items.num_rows, self._runtime)
        )
        ranks = metrics.catalogue_ranks(
            self._model.module, self._runtime, queries, batches, asked.question, towers=asked.towers
        )
        return metrics.ranking_metrics(ranks)


def ranking_towers(model: Any, data: StreamedData) -> list[str] | None:
    """Returns the model's towers where the last reads the item's columns, and no other does; else None."""
    made = getattr(model, "made_of", None)
    if not made or data.roles.user is None or data.roles.item is None or not data.ranked or len(made) < 2:
        return None
    item = {name for names in data.towers["item"] for name in names}
    read = {tower: set(_columns(how.arguments or {})) for tower, how in made.items()}
    *queries, last = read
    return [*queries, last] if read[last] == item and not any(read[tower] & item for tower in queries) else None


def _columns(arguments: Mapping[str, Any]) -> Iterator[str]:
    for table in arguments.get("tables", ()):
        yield from table.feature_names
    yield from arguments.get("dense", ())


def held_out_rows(data: StreamedData, split: str) -> Chunk:
    """Returns at most ``data.ranked`` rows of a split with label 1 and a known item, evenly spread over all of them."""
    roles = data.roles
    assert roles.item is not None
    asked = [roles.label, roles.item]
    whole, _ = data.items
    count = sum(int(_wanted(chunk, data, whole).sum()) for chunk in data.chunks(split, asked))
    every = max(1, -(-count // data.ranked))
    names = list(dict.fromkeys([*asked, *data.features, *data.dense]))
    pieces, passed = [], 0
    for chunk in data.chunks(split, names):
        rows = np.flatnonzero(_wanted(chunk, data, whole))
        chosen = rows[(np.arange(len(rows)) + passed) % every == 0]
        passed += len(rows)
        pieces.append(chunk.take(chosen))
    return Chunk({name: concatenate([piece[name] for piece in pieces]) for name in names})


def _wanted(chunk: Chunk, data: StreamedData, known: Int64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    wanted: np.ndarray[Any, np.dtype[np.bool_]] = (chunk[data.roles.label].values > 0) & np.isin(
        chunk[str(data.roles.item)].values, known
    )
    return wanted


def question_of(data: StreamedData, held_out: Chunk) -> metrics.Question:
    """Returns the question which place the item of each held-out row has in the catalogue."""
    roles, (known, _) = data.roles, data.items
    user, item = str(roles.user), str(roles.item)
    users, targets = held_out[user].values, held_out[item].values
    asked = np.unique(users[users > 0])
    pairs = []
    for chunk in data.chunks("train", [user, item, roles.label]):
        rows = np.flatnonzero((chunk[roles.label].values > 0) & np.isin(chunk[user].values, asked))
        pairs.append(np.stack([chunk[user].values[rows], chunk[item].values[rows]]))
    taken = np.unique(np.concatenate(pairs, axis=1), axis=1)
    windows = Windows(taken[0].searchsorted(users), taken[0].searchsorted(users, side="right"))
    lists = Column.from_windows(taken[1], windows)
    nobody = np.setdiff1d(np.arange(data.vocab[item]), known)
    return metrics.Question(
        targets=torch.from_numpy(targets),
        seen_rows=torch.from_numpy(np.arange(len(users)).repeat(lists.lengths)),
        seen_items=torch.from_numpy(lists.values),
        not_items=nobody.tolist(),
    )
