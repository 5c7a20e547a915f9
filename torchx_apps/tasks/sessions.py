"""The task of sessions: which item does a user take next, after those before, among the whole catalogue?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.datasets.sets import SESSION
from torchrec_ext.data.datasets.streamed import StreamedData
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.sessions import SessionLoader
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema, DataError
from torchrec_ext.train.config import Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.export_data import ExportData, of_streamed
from torchx_apps.tasks.question import (
    SHOWN,
    TaskQuestion,
    padded_lists,
    recommendation_lines,
)
from torchx_apps.tasks.task import (
    USUAL_FIGURES,
    Figures,
    RankedEvaluator,
    RankedTask,
    heading_of,
)

HELD_OUT = ("validation", "test")


class Sessions(NamedTuple):
    """The rows of a split: B users, their earlier items, and the item that is next, (B,); 0 is an unknown one."""

    users: Int64
    before: Column
    next: Int64

    @property
    def sequences(self) -> Column:
        """The earlier items of each row, and the next one after them."""
        ends = np.arange(len(self.next))
        owners = np.concatenate([self.before.owners, ends])
        items = np.concatenate([self.before.values, self.next])
        return Column.grouped(items, owners, len(self.next))


@dataclass(frozen=True)
class SessionTask(RankedTask):
    """Ranks each user's last items among all items not taken before; see :class:`torchx_apps.tasks.task.Task`.

    Where the set gives candidates, each is ranked among its own.

    Raises:
        DataError: the rows have no session, or no session has the items' ids.
    """

    data: StreamedData
    baseline_name: str = "popularity"
    figures: Figures = USUAL_FIGURES

    def __post_init__(self) -> None:
        tables = self.data.tables
        roles = self.data.roles
        if SESSION not in tables or tables[SESSION] != tables.get(str(roles.item)):
            raise DataError(
                f"data.name={self.name}: its rows have no column '{SESSION}' with the ids of the items before a row's "
                "item; take --recipe stream, or a folder with the log itself"
            )

    @cached_property
    def rows(self) -> dict[str, Sessions]:
        """The rows by split."""
        return {split: sessions_of(self.data, split) for split in self.data.splits}

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return "validation" in self.data.splits

    @cached_property
    def closed_forms(self) -> ClosedForms:
        """EASE of the training items, in whatever order."""
        return ClosedForms(
            pairs=lambda: pairs_of(self.rows["train"]),
            num_pairs=len(self.rows["train"].sequences.values),
            num_users=self.data.vocab[str(self.data.roles.user)],
            # With the row of what is outside the catalogue.
            num_items=num_items(self.data) + 2,
            names=self.baselines,
            config=self.closed_form,
        )

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are ranked, and the candidates they are ranked among."""
        return heading_of(candidates_of(self.data, "test"))

    def describe(self) -> str:
        """Returns the set's name and size as one line, and then its columns."""
        train = self.rows["train"]
        test = self.rows["test"]
        text = (
            f"{self.name}, {len(train.next):,} sessions of {len(np.unique(train.users)):,} users to train on, "
            f"{len(test.next):,} held-out items, {num_items(self.data):,} items in the catalogue"
        )
        return "\n".join([text, *self.data.describe_columns()])

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> SessionLoader:
        """Returns the loader of the training sessions: each item of a session but the first is a target."""
        if schema.catalogue and config.negatives:
            raise ValueError(
                f"model.loss=catalogue with loader.negatives={config.negatives}: these are a sample of the catalogue; "
                "set loader.negatives=0, or model.loss=sampled_softmax"
            )
        return SessionLoader(
            self.rows["train"].sequences,
            schema,
            config=config,
            num_items=num_items(self.data),
            rank=rank,
            world_size=world_size,
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> SessionEvaluator:
        """Returns the evaluator of ``figures``."""
        return SessionEvaluator(
            self.data,
            schema,
            model,
            runtime,
            self.figures,
            self.closed_forms,
            rows=self.rows,
        )

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and each user's items before the test item."""
        sequences = [self.rows[split].sequences for split in ("train", "validation")]
        users = [
            self.rows[split].users[each.owners]
            for split, each in zip(("train", "validation"), sequences, strict=True)
        ]
        taken = (
            np.concatenate(users),
            np.concatenate([each.values for each in sequences]),
        )
        served = np.arange(1, num_items(self.data) + 1)
        return of_streamed(self.data, schema, served=served, taken=taken)


def num_items(data: StreamedData) -> int:
    """Returns the number of items that a training session has: ids 1 to this."""
    return data.vocab[str(data.roles.item)] - 1


def sessions_of(data: StreamedData, split: str) -> Sessions:
    """Reads the sessions of a split."""
    user = str(data.roles.user)
    item = str(data.roles.item)
    names = [user, item, SESSION]
    rows = concatenate_rows(list(data.chunks(split, names)), names)
    return Sessions(rows[user].values, rows[SESSION], rows[item].values)


def pairs_of(rows: Sessions) -> tuple[Int64, Int64]:
    """Returns users (P,) and items (P,), each pair once; the unknown user has none."""
    sequences = rows.sequences
    users = rows.users[sequences.owners]
    known = (users > 0) & (sequences.values > 0)
    pairs = np.stack([users[known], sequences.values[known]])
    users, items = np.unique(pairs, axis=1)
    return users, items


def candidates_of(data: StreamedData, split: str) -> Int64 | None:
    """Returns (rows, N) the candidates of each held-out row, filled up with -1; None for the whole catalogue."""
    name = data.evaluation.candidates
    if name is None:
        return None
    return padded_lists(
        concatenate_rows(list(data.chunks(split, [name])), [name])[name]
    )


class SessionEvaluator(RankedEvaluator):
    """Ranks the held-out items of each user; in the test the user's validation item counts as taken before.

    Args:
        arguments: those of :class:`RankedEvaluator`.
        rows: the rows by split.
    """

    data: StreamedData

    def __init__(self, *arguments: Any, rows: Mapping[str, Sessions]) -> None:
        super().__init__(*arguments)
        self._rows = rows

    @property
    def catalogue_size(self) -> int:
        """Number of items that can be recommended."""
        return num_items(self.data)

    @cached_property
    def _taken(self) -> tuple[Int64, Int64]:
        return pairs_of(self._rows["train"])

    @cached_property
    def _builder(self) -> BatchBuilder:
        # Item 0 is the unknown one; after the catalogue comes what is outside of it, the
        # unknown one again.
        items = np.arange(num_items(self.data) + 2)
        items[-1] = 0
        return BatchBuilder(
            self.schema, Chunk({str(self.data.roles.item): Column(items)})
        )

    @property
    def popularity(self) -> Int64:
        """The number of users who have taken an item, by row of the ranked items."""
        _, items = self._taken
        return np.bincount(items, minlength=num_items(self.data) + 2).astype(np.int64)

    def baseline(self, split: str) -> Record:
        """Returns the figures of the ranking by the number of users who have taken an item."""
        return self.question(split).of_popularity(torch.from_numpy(self.popularity))

    def example(self) -> str:
        """Describes the first test user's last items and the model's recommendations after them."""
        rows = self._rows["test"]
        before = rows.before.slice(0, 1)
        query = self._builder.user_batch(Chunk({SESSION: before}))
        taken = self._user_items(rows).slice(0, 1).values
        items, scores = self.best_items("session", query, self._builder, taken)
        lines = [
            f"the first user took last: {', '.join(map(self._name, before.values[-SHOWN:]))}"
        ]
        lines += recommendation_lines(items, scores, self._name, [int(rows.next[0])])
        return "\n".join(lines)

    @cached_property
    def _item_ids(self) -> Array:
        values = self.data.id_values[self.data.tables[str(self.data.roles.item)]]
        return values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def _name(self, item: int) -> str:
        return f"item {self._item_ids[item - 1]}" if item > 0 else "an unknown item"

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        return self.question(split).of_model(
            self.model.module,
            self.runtime,
            self._builder,
            Chunk({SESSION: self._rows[split].before}),
            towers=("session", "item"),
        )

    def question(self, split: str) -> TaskQuestion:
        """Returns the question about the held-out items of a split."""
        rows = self._rows[split]
        outside = num_items(self.data) + 1
        candidates = candidates_of(self.data, split)
        return TaskQuestion.about(
            np.where(rows.next > 0, rows.next, outside),
            self._user_items(rows),
            self.ranking_figures,
            candidates=candidates,
            not_items=(0, outside),
        )

    def _user_items(self, rows: Sessions) -> Column:
        """Returns what each row's user has taken before it: all training items, and those of the row's session."""
        users, items = self._taken
        size = 1 + int(max(users.max(initial=0), rows.users.max(initial=0)))
        taken = Column.grouped(items, users, size).take(rows.users)
        owners = np.concatenate([taken.owners, rows.before.owners])
        values = np.concatenate([taken.values, rows.before.values])
        known = values > 0
        pairs = np.unique(np.stack([owners[known], values[known]]), axis=1)
        return Column.grouped(pairs[1], pairs[0], len(rows.next))
