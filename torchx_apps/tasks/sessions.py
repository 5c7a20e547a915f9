"""The task of sessions: which item does a user take next, after those before, among the whole catalogue?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Column
from torchrec_ext.data.datasets.sequences import (
    HELD_OUT,
    HeldOut,
    SequenceData,
    most_recent,
    training_windows,
)
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.sessions import SessionBatches, SessionLoader
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.session import CANDIDATES
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Figure, Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.export_data import ExportData, of_sequences
from torchx_apps.tasks.question import SHOWN, K, TaskQuestion, best_new_items, recommendation_lines
from torchx_apps.tasks.task import RankedEvaluator, RankedTask


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
    figures: Sequence[tuple[Figure, int]] = (("hr", K), ("ndcg", K))

    @cached_property
    def closed_forms(self) -> ClosedForms:
        """EASE and ALS of the training items, in whatever order."""
        sequences = self.data.training()
        return ClosedForms(
            pairs=lambda: (np.arange(len(sequences)).repeat(sequences.lengths), sequences.values),
            num_pairs=len(sequences.values),
            num_users=len(sequences),
            num_items=self.data.num_items + 1,
            roles={CANDIDATES: "item"},
            names=self.baselines,
            config=self.closed_form,
        )

    def __post_init__(self) -> None:
        if not len(self.data.held_out("test").targets):
            raise ValueError(
                f"set '{self.data.name}' has no test rows: no user has the {self.data.least} items that holding out "
                f"{self.data.least - 1 if self.data.test_items > 1 else 'two'} of them needs"
            )

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are ranked, and the candidates they are ranked among."""
        if "test" in self.data.candidates:
            return f"test items, among {self.data.candidates['test'].shape[1]} others"
        return "test items, whole catalogue"

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        training = self.data.training()
        return (
            f"{self.name}, {len(training):,} users with {len(training.values):,} items to train on, "
            f"{len(self.data.held_out('test').targets):,} held-out items, {self.data.num_items:,} items in the "
            "catalogue"
        )

    def loader(self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int) -> SessionLoader:
        """Returns the loader of the training sequences, cut to make each item but a user's first a target once."""
        if schema.catalogue and config.negatives:
            raise ValueError(
                f"model.loss=catalogue with loader.negatives={config.negatives}: these are a sample of the catalogue; "
                "set loader.negatives=0, or model.loss=sampled_softmax"
            )
        windows = training_windows(self.data.training(), self.data.max_length)
        return SessionLoader(
            windows, schema, config=config, num_items=self.data.num_items, rank=rank, world_size=world_size
        )

    def evaluator(self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> SessionEvaluator:
        """Returns the evaluator of ``figures``."""
        return SessionEvaluator(self.data, schema, model, runtime, self.figures, self.closed_forms)

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and each user's items before the test item."""
        del schema
        return of_sequences(self.data)


class SessionEvaluator(RankedEvaluator):
    """Ranks the held-out items of each user; in the test the user's validation item counts as taken before."""

    def __init__(
        self,
        data: SequenceData,
        schema: BatchSchema,
        model: DistributedModelParallel,
        runtime: Runtime,
        figures: Sequence[tuple[Figure, int]],
        closed_forms: ClosedForms | None = None,
    ) -> None:
        super().__init__(schema, model, runtime, figures, closed_forms)
        self._data = data
        self._batches = SessionBatches(schema)
        self._held_out = {split: data.held_out(split) for split in HELD_OUT}

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        return self.ranking_names

    def baseline(self, split: str) -> Record:
        """Returns the figures of the popularity ranking on the same items and candidates."""
        return self.question(split).of_popularity(torch.from_numpy(self._data.popularity()))

    def example(self) -> str:
        """Describes the first test user's last items and the model's recommendations after them."""
        held_out = self._held_out["test"]
        before = held_out.before.slice(0, 1)
        rows = held_out.target_rows
        answers = held_out.targets[:1] if rows is None else held_out.targets[rows == 0]
        with torch.no_grad():
            items = metrics.embed_all(self.model.module, "item", self._items(), self.runtime)
            batch = self._batches.sessions(most_recent(before, self._data.max_length)).to(self.runtime.device)
            session = self.model.module.embed("session", batch)
            scores = self.model.module.interaction.score_all(session, items)[0].cpu()
        lines = [f"the first user took last: {', '.join(self._name(item) for item in before.values[-SHOWN:])}"]
        lines += recommendation_lines(*best_new_items(scores, before.values), self._name, answers.tolist())
        return "\n".join(lines)

    def _name(self, item: int) -> str:
        return f"item {item if self._data.item_ids is None else self._data.item_ids[item]}"

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        sessions = self._sessions(most_recent(self._held_out[split].before, self._data.max_length))
        return self.question(split).of_model(
            self.model.module, self.runtime, sessions, self._items(), towers=("session", "item")
        )

    def question(self, split: str) -> TaskQuestion:
        """Returns the question about the held-out items of a split."""
        held_out = self._held_out[split]
        candidates = self._data.candidates.get(split)
        if candidates is None:
            return TaskQuestion(
                question=_of_catalogue(held_out), user_items=held_out.before, figures=self.ranking_figures
            )
        ids = np.concatenate([held_out.targets[:, None], candidates], axis=1)
        return TaskQuestion(question=torch.from_numpy(ids), user_items=held_out.before, figures=self.ranking_figures)

    def _sessions(self, sessions: Column) -> Iterator[metrics.Kept]:
        for rows, keep in metrics.own_share(len(sessions), self.runtime):
            yield self._batches.sessions(sessions.slice(rows.start, rows.stop)), keep

    def _items(self) -> Iterator[metrics.Kept]:
        ids = np.arange(self._data.num_items + 1)
        return ((self._batches.items(ids[rows]), keep) for rows, keep in metrics.own_share(len(ids), self.runtime))


def _of_catalogue(held_out: HeldOut) -> metrics.Question:
    return metrics.Question(
        targets=torch.from_numpy(held_out.targets),
        target_rows=None if held_out.target_rows is None else torch.from_numpy(held_out.target_rows),
        seen_rows=torch.from_numpy(np.arange(len(held_out.users)).repeat(held_out.before.lengths)),
        seen_items=torch.from_numpy(held_out.before.values),
    )
