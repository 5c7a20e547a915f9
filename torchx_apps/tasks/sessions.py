"""The task of sessions: which item does a user take next, after those before, among the whole catalogue?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchx_apps.tasks.export_data import ExportData, of_sequences
from torchx_apps.tasks.named_data import NamedData

K = 10
SHOWN = 5


@dataclass(frozen=True)
class SessionTask(NamedData):
    """Ranks each user's last item among all items not taken before; see :class:`torchx_apps.tasks.job.Task`.

    Raises:
        ValueError: there are no test rows.
    """

    data: SequenceData
    asked: str = "test items, whole catalogue"
    baseline_name: str = "popularity"
    validates: bool = True

    def __post_init__(self) -> None:
        if not len(self.data.held_out("test").targets):
            raise ValueError(
                f"set '{self.data.name}' has no test rows: no user has the 3 items that holding out two of them needs"
            )

    def describe(self) -> str:
        """Returns the set's name and size as one line."""
        training = self.data.training()
        return (
            f"{self.name}, {len(training):,} users with {len(training.values):,} items to train on, "
            f"{len(self.data.held_out('test').targets):,} held-out items, {self.data.num_items:,} items in the "
            "catalogue"
        )

    def loader(self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int) -> SessionLoader:
        """Returns the loader of the training sequences, cut so that each item but a user's first is a target once."""
        windows = training_windows(self.data.training(), self.data.max_length)
        return SessionLoader(
            windows, schema, config=config, num_items=self.data.num_items, rank=rank, world_size=world_size
        )

    def evaluator(self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> SessionEvaluator:
        """Returns the evaluator of HR@10 and NDCG@10."""
        return SessionEvaluator(self.data, schema, model, runtime)

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and the items that each user took before the test item."""
        del schema
        return of_sequences(self.data)


class SessionEvaluator:
    """Evaluates a model on the held-out items of ``data``; every rank calls each method but :meth:`baseline`."""

    def __init__(
        self, data: SequenceData, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime
    ) -> None:
        self._data, self._model, self._runtime = data, model, runtime
        self._batches = SessionBatches(schema)
        self._held_out = {split: data.held_out(split) for split in HELD_OUT}

    def validate(self) -> Record:
        """Returns HR@10 and NDCG@10 on the validation items."""
        return self._figures("validation")

    def test(self) -> Record:
        """Returns HR@10 and NDCG@10 on the test items; each user's validation item then counts as taken before."""
        self._model.eval()
        return self._figures("test")

    def baseline(self, split: str) -> Record:
        """Returns HR@10 and NDCG@10 of the popularity ranking on the same items and candidates."""
        popularity = torch.from_numpy(self._data.popularity())
        return metrics.ranking_metrics(metrics.popularity_ranks(popularity, _question(self._held_out[split])), K)

    def example(self) -> str:
        """Returns the first test user's last items and what the model recommends after them."""
        held_out = self._held_out["test"]
        before = held_out.before.slice(0, 1)
        with torch.no_grad():
            items = metrics.embed_all(self._model.module, "item", self._items(), self._runtime)
            batch = self._batches.sessions(most_recent(before, self._data.max_length)).to(self._runtime.device)
            session = self._model.module.embed("session", batch)
            scores = self._model.module.interaction.score_all(session, items)[0].cpu()
        scores[0] = -torch.inf
        scores[torch.from_numpy(before.values)] = -torch.inf
        best = scores.topk(min(K, int((scores > -torch.inf).sum())))
        lines = [f"the first user took last: {', '.join(self._name(item) for item in before.values[-SHOWN:])}"]
        lines += [
            f"{len(best.indices)} recommendations (the held-out item was: {self._name(int(held_out.targets[0]))}):"
        ]
        for rank, (item, score) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1):
            mark = "   <- the held-out item" if item == held_out.targets[0] else ""
            lines.append(f"{rank:3}. {self._name(item)}  ({score:.2f}){mark}")
        return "\n".join(lines)

    def _name(self, item: int) -> str:
        return f"item {item if self._data.item_ids is None else self._data.item_ids[item]}"

    def _figures(self, split: str) -> Record:
        held_out = self._held_out[split]
        recent = most_recent(held_out.before, self._data.max_length)
        ranks = metrics.catalogue_ranks(
            self._model.module,
            self._runtime,
            self._sessions(recent),
            self._items(),
            _question(held_out),
            towers=("session", "item"),
        )
        return metrics.ranking_metrics(ranks, K)

    def _sessions(self, sessions: Column) -> Iterator[metrics.Kept]:
        for rows, keep in metrics.own_share(len(sessions), self._runtime):
            yield self._batches.sessions(sessions.slice(rows.start, rows.stop)), keep

    def _items(self) -> Iterator[metrics.Kept]:
        ids = np.arange(self._data.num_items + 1)
        return ((self._batches.items(ids[rows]), keep) for rows, keep in metrics.own_share(len(ids), self._runtime))


def _question(held_out: HeldOut) -> metrics.Question:
    return metrics.Question(
        targets=torch.from_numpy(held_out.targets),
        seen_rows=torch.from_numpy(np.arange(len(held_out.targets)).repeat(held_out.before.lengths)),
        seen_items=torch.from_numpy(held_out.before.values),
    )
