"""The recipe session: which item a user takes next, by a causal transformer over those before; Amazon Beauty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig

from torchrec_ext.data.columns import Column
from torchrec_ext.data.datasets.sequences import (
    HELD_OUT,
    HeldOut,
    SequenceConfig,
    SequenceData,
    load_sequences,
    most_recent,
    training_windows,
)
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.sessions import SessionBatches, SessionLoader
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.session import NextItemModel
from torchrec_ext.modules.session_encoder import Attention, Position, SessionEncoder
from torchrec_ext.modules.tower import Activation
from torchrec_ext.schema import BatchSchema, OutOfRange
from torchrec_ext.train import metrics
from torchrec_ext.train.config import EarlyStop, Record
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.tasks.export_data import ExportData, of_sequences
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.named_data import NamedData

K = 10
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """The model of the recipe ``session``.

    Args:
        embedding_dim: D, columns of the item table and width of the transformer.
        init_std: standard deviation of the table's initial values.
        layers: number of the transformer's layers.
        heads: number of attention heads, a divisor of D.
        hidden: width of the feed-forward network's hidden layer.
        activation: activation of that hidden layer.
        dropout: share of values dropped at the input and in the layers.
        position: learned position vectors, counted from the ``start`` of a session or from its ``end``, or ``none``.
        attention: ``bucketed`` (hardly any padding), ``nested`` (none; on a GPU) or ``padded``; the result is the same.
        out_of_range: what happens to an id outside the table: ``error``, or ``oov``, which reads row 0.
    """

    embedding_dim: int = 64
    init_std: float = 0.05
    layers: int = 2
    heads: int = 2
    hidden: int = 128
    activation: Activation = "gelu"
    dropout: float = 0.3
    position: Position = "start"
    attention: Attention = "bucketed"
    out_of_range: OutOfRange = "error"


def session() -> Job:
    """Items taken so far -> causal transformer -> softmax over the catalogue, one table for both; Amazon Beauty."""
    return Job(
        name="session",
        build=build_session,
        model=SessionConfig(),
        data=SequenceConfig(),
        task=session_task,
        # 256 x 8 = 2,048 candidates that all targets of a step share; with negatives=0 all items.
        loader=LoaderConfig(batch_size=256, negatives=8),
        optimizer=OptimizerConfig(tables_lr=0.1, dense_lr=1e-3),
        # Ends by the validation items: a set of few or long sequences has few steps an epoch, and needs more epochs.
        train=TrainConfig(epochs=60, eval_every=4, early_stop=EarlyStop(metric="ndcg@10", patience=1)),
    )


def build_session(config: SessionConfig, data: SequenceData) -> NextItemModel:
    """Builds the model over the items of ``data``, its table on the meta device."""
    encoder = SessionEncoder(
        config.embedding_dim,
        data.max_length,
        layers=config.layers,
        heads=config.heads,
        hidden=config.hidden,
        activation=config.activation,
        dropout=config.dropout,
        causal=True,
        position=config.position,
        attention=config.attention,
    )
    table = EmbeddingConfig(
        name="item_id",
        num_embeddings=data.vocab["item_id"],
        embedding_dim=config.embedding_dim,
        init_fn=partial(torch.nn.init.normal_, std=config.init_std),
    )
    return NextItemModel(table, encoder, device=torch.device("meta"))


def session_task(config: SequenceConfig, *, progress: bool = True) -> SessionTask:
    """Loads the set that ``config`` names; nothing is downloaded, so there is no ``progress`` to show."""
    del progress
    return SessionTask(load_sequences(config))


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
