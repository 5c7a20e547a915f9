"""The task of sessions: which item does a user take next, after those before, among the whole catalogue?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.datasets.sequences import (
    HELD_OUT,
    HeldOut,
    SequenceData,
    most_recent,
    training_windows,
)
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.sessions import SessionLoader
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.session import CANDIDATES, SESSION
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.config import Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.export_data import ExportData, of_sequences
from torchx_apps.tasks.question import SHOWN, TaskQuestion, recommendation_lines
from torchx_apps.tasks.task import (
    USUAL_FIGURES,
    Figures,
    RankedEvaluator,
    RankedTask,
    heading_of,
)


@dataclass(frozen=True)
class SessionTask(RankedTask):
    """Ranks each user's last items among all items not taken before; see :class:`torchx_apps.tasks.task.Task`.

    Where the set gives candidates, each is ranked among its own.

    Raises:
        ValueError: there are no test rows.
    """

    data: SequenceData
    baseline_name: str = "popularity"
    validates: bool = True
    figures: Figures = USUAL_FIGURES

    @cached_property
    def closed_forms(self) -> ClosedForms:
        """EASE and ALS of the training items, in whatever order."""
        sequences = self.data.training()
        return ClosedForms(
            pairs=lambda: (sequences.owners, sequences.values),
            num_pairs=len(sequences.values),
            num_users=len(sequences),
            num_items=self.data.num_items + 1,
            roles={CANDIDATES: "item"},
            names=self.baselines,
            config=self.closed_form,
        )

    def __post_init__(self) -> None:
        if not len(self.data.held_out("test").targets):
            held_out = self.data.least - 1 if self.data.test_items > 1 else "two"
            raise ValueError(
                f"set '{self.data.name}' has no test rows: no user has the {self.data.least} items that holding out "
                f"{held_out} of them needs"
            )

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are ranked, and the candidates they are ranked among."""
        return heading_of(self.data.candidates)

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        training = self.data.training()
        return (
            f"{self.name}, {len(training):,} users with {len(training.values):,} items to train on, "
            f"{len(self.data.held_out('test').targets):,} held-out items, {self.data.num_items:,} items in the "
            "catalogue"
        )

    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> SessionLoader:
        """Returns the loader of the training sequences, cut to make each item but a user's first a target once."""
        if schema.catalogue and config.negatives:
            raise ValueError(
                f"model.loss=catalogue with loader.negatives={config.negatives}: these are a sample of the catalogue; "
                "set loader.negatives=0, or model.loss=sampled_softmax"
            )
        windows = training_windows(self.data.training(), self.data.max_length)
        return SessionLoader(
            windows,
            schema,
            config=config,
            num_items=self.data.num_items,
            rank=rank,
            world_size=world_size,
        )

    def evaluator(
        self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> SessionEvaluator:
        """Returns the evaluator of ``figures``."""
        return SessionEvaluator(
            self.data, schema, model, runtime, self.figures, self.closed_forms
        )

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and each user's items before the test item."""
        del schema
        return of_sequences(self.data)


class SessionEvaluator(RankedEvaluator):
    """Ranks the held-out items of each user; in the test the user's validation item counts as taken before."""

    data: SequenceData

    @cached_property
    def _builder(self) -> BatchBuilder:
        # Item 0 is the unknown one.
        return BatchBuilder(
            self.schema, Chunk({CANDIDATES: Column(np.arange(self.data.num_items + 1))})
        )

    @cached_property
    def _held_out(self) -> dict[str, HeldOut]:
        return {split: self.data.held_out(split) for split in HELD_OUT}

    def example(self) -> str:
        """Describes the first test user's last items and the model's recommendations after them."""
        held_out = self._held_out["test"]
        before = held_out.before.slice(0, 1)
        rows = held_out.target_rows
        # A user may have several held-out items.
        answers = held_out.targets[:1] if rows is None else held_out.targets[rows == 0]
        query = self._builder.user_batch(self._sessions(before))
        items, scores = self.best_items("session", query, self._builder, before.values)
        lines = [
            f"the first user took last: {', '.join(map(self._name, before.values[-SHOWN:]))}"
        ]
        lines += recommendation_lines(items, scores, self._name, answers.tolist())
        return "\n".join(lines)

    def _name(self, item: int) -> str:
        names = self.data.item_ids
        return f"item {item if names is None else names[item]}"

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        rows = self._sessions(self._held_out[split].before)
        return self.question(split).of_model(
            self.model.module,
            self.runtime,
            self._builder,
            rows,
            towers=("session", "item"),
        )

    def question(self, split: str) -> TaskQuestion:
        """Returns the question about the held-out items of a split."""
        held_out = self._held_out[split]
        return TaskQuestion.about(
            held_out.targets,
            held_out.before,
            self.ranking_figures,
            candidates=self.data.candidates.get(split),
            target_rows=held_out.target_rows,
        )

    def _sessions(self, before: Column) -> Chunk:
        """Returns query rows: the most recent items that the model reads of each of Q lists."""
        return Chunk({SESSION: most_recent(before, self.data.max_length)})
