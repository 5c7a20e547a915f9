"""The task of ranking: which item does a user take next, among all that he or she has not taken yet?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Int64
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.loader import (
    ChunkLoader,
    LoaderConfig,
    labelled_rows,
    training_loader,
)
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.dynamic_ids import columns_like, values_of_prepared
from torchx_apps.tasks.export_data import ExportData, of_streamed
from torchx_apps.tasks.question import (
    SHOWN,
    TaskQuestion,
    padded_lists,
    recommendation_lines,
)
from torchx_apps.tasks.task import Figures, RankedEvaluator, RankedTask, heading_of

HELD_OUT = ("validation", "test")


@dataclass(frozen=True)
class RankingTask(RankedTask):
    """Ranks held-out items of ``data`` as ``data.evaluation`` says; see :class:`torchx_apps.tasks.task.Task`.

    Raises:
        ValueError: there are no test rows.
    """

    data: InteractionData
    baseline_name: str = "popularity"

    def __post_init__(self) -> None:
        if not self.data.test.num_rows:
            raise ValueError(
                f"set '{self.data.name}' has no test rows: no user has the 3 interactions that a split by time needs"
            )

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are ranked, and the candidates they are ranked among."""
        return heading_of(candidates_of(self.data, "test"))

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return self.data.validation.num_rows > 0

    @cached_property
    def closed_forms(self) -> ClosedForms:
        """EASE of the training rows."""
        return ClosedForms(
            pairs=lambda: self.data.pairs("train"),
            num_pairs=self.data.train.num_rows,
            num_users=self.data.vocab["user_id"],
            num_items=self.data.items.num_rows,
            names=self.baselines,
            config=self.closed_form,
        )

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        rows = self.data.test.num_rows
        users = len(np.unique(self.data.test["user_id"].values))
        held_out = f"{rows:,} held-out items of {users:,} users"
        if rows == users:
            held_out = f"{users:,} users with a held-out item"
        text = f"{self.name}, {self.data.train.num_rows:,} training rows, {held_out}, {self.data.num_items:,} items"
        return "\n".join([text, *self.data.prepared.describe_columns()])

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ChunkLoader:
        """Returns the loader of the training rows with negatives."""
        # The schema has a label range where the loss reads labels, and none if it
        # compares rows.
        if (
            config.negatives == 0
            and not config.label
            and schema.label_range is not None
        ):
            raise ValueError(
                "loader.negatives=0 without loader.label: every row would have label 1; draw negatives, "
                "set loader.label, or model.loss=in_batch"
            )

        return training_loader(
            self.data, schema, config, rank=rank, world_size=world_size
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> RankingEvaluator:
        """Returns the evaluator for the figures of ``data.evaluation``."""
        return RankingEvaluator(
            self.data, schema, model, runtime, self.figures, self.closed_forms
        )

    def raw_values(self, name: str) -> pa.Array:
        """See :meth:`Task.raw_values`."""
        return values_of_prepared(self.data.prepared, name)

    def same_ids(self, name: str) -> Sequence[str]:
        """Returns the columns that share a column's vocabulary."""
        return columns_like(self.data.prepared, name)

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and the users as they were before their test items."""
        pairs = self.data.pairs("train", "validation")
        return of_streamed(self.data.prepared, schema, taken=(pairs.users, pairs.items))


@dataclass(frozen=True)
class Recommended:
    """Recommendations for a user, best first.

    Args:
        user: row of the user.
        items: rows of the items, (K,).
        scores: scores of the items, (K,).
    """

    user: int
    items: list[int]
    scores: list[float]


class RankingEvaluator(RankedEvaluator):
    """Ranks the held-out items of each user; the user's validation items count as taken in the test."""

    data: InteractionData

    @property
    def usual_figures(self) -> Figures:
        """Those of the publishers' protocol."""
        protocol = self.data.evaluation
        return [(name, k) for k in protocol.at for name in protocol.figures]

    @cached_property
    def _builder(self) -> BatchBuilder:
        return self.builder(self.data.items)

    @cached_property
    def _labelled(self) -> dict[str, Chunk]:
        """Held-out rows with negatives, for the AUC, by split; without splits whose items have candidates."""
        if self.data.evaluation.candidates:
            return {}
        splits = [name for name in HELD_OUT if getattr(self.data, name).num_rows]
        return {split: labelled_rows(self.data, split) for split in splits}

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        # Rows with candidates of their own are ranked among these alone.
        if self.data.evaluation.candidates:
            return self.ranking_names
        return ["auc", *self.ranking_names]

    def question(self, split: str) -> TaskQuestion:
        """Returns the question about the held-out items of a split."""
        return heldout_question(self.data, split, self.ranking_figures)

    def example(self) -> str:
        """Returns the recommendations for the user of the first test row, as text."""
        return recommendation_text(self.data, self.recommend())

    def recommend(self, user_row: int = 0) -> Recommended:
        """Returns the K best items for the user of a test row, fewer if there are fewer new items for that user."""
        row = self.data.test.slice(user_row, user_row + 1)
        user = row["user_id"].values
        query = self._builder.user_batch(row)
        user_items = self.data.seen(user, "train", "validation").values
        return Recommended(
            int(user[0]), *self.best_items("user", query, self._builder, user_items)
        )

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        rows = getattr(self.data, split)
        if self.data.evaluation.by == "user":
            # One question for each user, in the order of the users' ids.
            rows = rows.take(np.unique(rows["user_id"].values, return_index=True)[1])
        figures = self.question(split).of_model(
            self.model.module, self.runtime, self._builder, rows
        )
        if self.data.evaluation.candidates:
            return figures
        predictions = self.predictions(
            self._labelled[split], batch_size=4_096, items=self.data.items
        )
        return {"auc": metrics.auc(*predictions, self.runtime), **figures}


def heldout_question(
    data: InteractionData, split: str, figures: Figures
) -> TaskQuestion:
    """Returns the question about the held-out items of ``split``, for a model and its baselines."""
    evaluation = data.evaluation
    rows = getattr(data, split)
    users = rows["user_id"].values
    targets = rows["item_id"].values
    target_rows: Int64 | None = None
    # All held-out items of a user are one question.
    if evaluation.by == "user":
        order = np.argsort(users, kind="stable")
        targets = targets[order]
        users, target_rows = np.unique(users[order], return_inverse=True)
    before = ("train",) if split == "validation" else ("train", "validation")
    return TaskQuestion.about(
        targets,
        data.seen(users, *before),
        figures,
        candidates=candidates_of(data, split),
        target_rows=target_rows,
        keep_seen=evaluation.keep_seen,
        not_items=(0, *range(data.num_items + 1, data.items.num_rows)),
    )


def candidates_of(data: InteractionData, split: str) -> Int64 | None:
    """Returns (rows, N) the candidates of each held-out row, filled up with -1; None for the whole catalogue."""
    name = data.evaluation.candidates
    return None if name is None else padded_lists(getattr(data, split)[name])


def recommendation_text(data: InteractionData, recommended: Recommended) -> str:
    """Returns recommendations as text: titles, with what the user liked before and the item that was held out."""
    users = data.users_by_row
    items = data.items_by_row
    titles = data.titles or [f"item {item}" for item in items.tolist()]
    liked = data.liked.slice(recommended.user, recommended.user + 1).values[-SHOWN:]
    row = int((data.test["user_id"].values == recommended.user).argmax())
    held_out = int(data.test["item_id"].values[row])
    lines = [
        f"user {users[recommended.user]} liked before: "
        + "; ".join(titles[item] for item in liked)
    ]
    lines += recommendation_lines(
        recommended.items, recommended.scores, titles.__getitem__, [held_out]
    )
    return "\n".join(lines)
