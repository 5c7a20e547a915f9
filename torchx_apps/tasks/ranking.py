"""The task of ranking: which item does a user take next, among all that he or she has not taken yet?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.streamed import StreamedData
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.data.loader.id_dropout import unseen_as_oov
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig, labelled_rows, training_loader
from torchrec_ext.data.negatives.hard import Index
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Figure, Record
from torchx_apps.tasks.baselines import ClosedForms
from torchx_apps.tasks.export_data import ExportData, of_interactions
from torchx_apps.tasks.question import SHOWN, TaskQuestion, best_new_items, recommendation_lines
from torchx_apps.tasks.task import RankedEvaluator, RankedTask

# Figures, each with its number of items shown.
Figures = Sequence[tuple[Figure, int]]


@dataclass(frozen=True)
class RankingTask(RankedTask):
    """Ranks held-out items of ``data`` as ``data.evaluation`` says; see :class:`torchx_apps.tasks.task.Task`.

    Raises:
        ValueError: there are no test rows.
    """

    data: InteractionData
    baseline_name: str = "popularity"
    _evaluators: list[RankingEvaluator] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not self.data.test.num_rows:
            raise ValueError(
                f"set '{self.data.name}' has no test rows: no user has the 3 interactions that a split by time needs"
            )

    @property
    def heading(self) -> str:
        """Heading of the figures: the rows that are ranked, and the candidates they are ranked among."""
        if "test" in self.data.evaluation.candidates:
            return f"test items, among {self.data.evaluation.candidates['test'].shape[1]} others"
        return "test items, whole catalogue"

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return self.data.validation.num_rows > 0

    @property
    def prepared(self) -> StreamedData | None:
        """The folder of rec.data.preprocess that the rows come from, or None."""
        prepared: StreamedData | None = self.data.prepared
        return prepared

    @cached_property
    def closed_forms(self) -> ClosedForms:
        """EASE and ALS of the training rows."""
        return ClosedForms(
            pairs=lambda: self.data.pairs("train"),
            num_pairs=self.data.train.num_rows,
            num_users=self.data.vocab["user_id"],
            num_items=self.data.items.num_rows,
            roles={"user_id": "user", "item_id": "item", "history": "history"},
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
        missed = int((self.data.test["item_id"].values > self.data.num_items).sum())
        text = f"{self.name}, {self.data.train.num_rows:,} training rows, {held_out}, {self.data.num_items:,} items"
        if missed:
            text += f" ({missed:,} held-out items are outside of the catalogue: neither trained nor described)"
        return text

    def loader(self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int) -> ChunkLoader:
        """Returns the loader of the training rows with negatives; the last evaluator's model scores hard negatives."""
        # The schema has a label range where the loss reads labels, and none if it compares rows.
        if config.negatives == 0 and not config.label and schema.label_range is not None:
            raise ValueError(
                "loader.negatives=0 without loader.label: every row would have label 1; draw negatives, name the "
                "column with the labels, or use a loss that compares rows, such as model.loss=in_batch"
            )

        def refresh(epoch: int) -> Index:
            return self._evaluators[-1].hardest(config.hard_k)

        return training_loader(self.data, schema, config, refresh=refresh, rank=rank, world_size=world_size)

    def evaluator(self, schema: BatchSchema, model: DistributedModelParallel, runtime: Runtime) -> RankingEvaluator:
        """Returns the evaluator for the figures of ``data.evaluation``."""
        self._evaluators.append(RankingEvaluator(self.data, schema, model, runtime, self.figures, self.closed_forms))
        return self._evaluators[-1]

    def export_data(self, schema: BatchSchema) -> ExportData:
        """Returns the catalogue, and the users as they were before their test items."""
        return of_interactions(self.data, schema)


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

    def __init__(
        self,
        data: InteractionData,
        schema: BatchSchema,
        model: DistributedModelParallel,
        runtime: Runtime,
        figures: Figures = (),
        closed_forms: ClosedForms | None = None,
    ) -> None:
        protocol = data.evaluation
        usual_figures = [(name, k) for k in protocol.at for name in protocol.figures]
        super().__init__(schema, model, runtime, figures or usual_figures, closed_forms)
        self._data = data
        # The evaluation does what serving does: a user or an item without a training row has the unknown id's table row
        # and its own features. That table row is trained where ids are dropped; otherwise it has its initial values,
        # which all such items share.
        self._items = self._with_oov_ids(data.items, "item_id")
        self._builder = BatchBuilder(schema, self._items)
        whole = [split for split in ("validation", "test") if split not in data.evaluation.candidates]
        self._labelled = {
            split: self._with_oov_ids(labelled_rows(data, split), "user_id")
            for split in whole
            if getattr(data, split).num_rows
        }

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        return self.ranking_names if "validation" in self._data.evaluation.candidates else ["auc", *self.ranking_names]

    def question(self, split: str) -> TaskQuestion:
        """Returns the question about the held-out items of a split."""
        return heldout_question(self._data, split, self.ranking_figures)

    def baseline(self, split: str) -> Record:
        """Returns the ranking figures of the popularity ranking on the same items and candidates."""
        return self.question(split).of_popularity(torch.from_numpy(self._data.popularity()))

    def example(self) -> str:
        """Returns the recommendations for the user of the first test row, as text."""
        return recommendation_text(self._data, self.recommend())

    def recommend(self, user_row: int = 0) -> Recommended:
        """Returns the K best items for the user of a test row, fewer if there are fewer new items for that user."""
        row = self._data.test.slice(user_row, user_row + 1)
        user = row["user_id"].values
        row = self._with_oov_ids(row, "user_id")
        model = self.model.module
        with torch.no_grad():
            items = self._catalogue()
            vector = model.embed("user", self._builder.user_batch(row).to(self.runtime.device))
            scores = model.interaction.score_all(vector, items)[0].cpu()
        user_items = self._data.seen(user, "train", "validation").values
        return Recommended(int(user[0]), *best_new_items(scores, user_items))

    def hardest(self, k: int) -> Index:
        """Returns a function from users to their hard negatives, by the model as it is now, in evaluation. Collective.

        Hard negatives are the ``k`` items that the model ranks highest among those that a user has not taken: users
        (N,) to rows (N, k), with 0 if there are fewer. The function itself needs no other rank.
        """
        self.model.eval()
        owners = self._data.train["user_id"].values
        # A user's last row has the longest history.
        users, from_end = np.unique(owners[::-1], return_index=True)
        model = self.model.module
        train = self._data.train.take(len(owners) - 1 - from_end)
        shares = metrics.own_share(len(users), self.runtime)
        batches = ((self._builder.user_batch(train.slice(rows.start, rows.stop)), keep) for rows, keep in shares)
        vectors = metrics.embed_all(model, "user", batches, self.runtime)
        items = self._catalogue()

        @torch.no_grad()
        def index(queries: Int64) -> Int64:
            best = np.zeros((len(queries), min(k, len(items) - 1)), dtype=np.int64)
            trained = np.flatnonzero(np.isin(queries, users))
            scores = model.interaction.score_all(vectors[users.searchsorted(queries[trained])], items).cpu()
            own_items = self._data.seen(queries[trained])
            scores[np.arange(len(trained)).repeat(own_items.lengths), own_items.values] = -torch.inf
            scores[:, 0] = -torch.inf
            values, rows = scores.topk(best.shape[1])
            best[trained] = torch.where(values > -torch.inf, rows, 0).numpy()
            return best

        return index

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        chunk = self._with_oov_ids(getattr(self._data, split).take(_query_rows(self._data, split)), "user_id")
        shares = metrics.own_share(chunk.num_rows, self.runtime)
        queries = ((self._builder.user_batch(chunk.slice(rows.start, rows.stop)), keep) for rows, keep in shares)
        model = self.model.module
        items = self._item_batches(self._data.items.num_rows)
        figures = self.question(split).of_model(model, self.runtime, queries, items)
        whole = split not in self._data.evaluation.candidates
        return {"auc": self._auc(split), **figures} if whole else figures

    def _auc(self, split: str) -> float:
        config = LoaderConfig(batch_size=4096, negatives=0, label="label", shuffle=False)
        rank = self.runtime.rank
        world_size = self.runtime.world_size
        loader = ChunkLoader(
            self._labelled[split], self.schema, config=config, items=self._items, rank=rank, world_size=world_size
        )
        return metrics.auc(*self.predictions(loader), self.runtime)

    def _with_oov_ids(self, rows: Chunk, name: str) -> Chunk:
        """Replaces ids without a training row by the unknown id."""
        feature = self.schema.feature(name)
        return unseen_as_oov(rows, self._data.train, feature) if feature else rows

    def _item_batches(self, rows: int) -> Iterator[metrics.Kept]:
        ids = np.arange(rows)
        return ((self._builder.item_batch(ids[rows]), keep) for rows, keep in metrics.own_share(len(ids), self.runtime))

    def _catalogue(self) -> torch.Tensor:
        batches = self._item_batches(self._data.num_items + 1)
        return metrics.embed_all(self.model.module, "item", batches, self.runtime)


def heldout_question(data: InteractionData, split: str, figures: Figures) -> TaskQuestion:
    """Returns the question about the held-out items of ``split``, for a model and its baselines."""
    rows = getattr(data, split)
    candidates = data.evaluation.candidates.get(split)
    users = rows["user_id"].values
    own_items = data.seen(np.unique(users) if data.evaluation.by == "user" else users, *_before(split))
    if candidates is None:
        question = _of_catalogue(data, split, own_items)
        return TaskQuestion(question=question, user_items=own_items, figures=figures, num_items=data.num_items)
    ids = np.concatenate([rows["item_id"].values[:, None], candidates], axis=1)
    return TaskQuestion(question=torch.from_numpy(ids), user_items=own_items, figures=figures)


def _query_rows(data: InteractionData, split: str) -> Int64:
    """Returns the query rows of a split: all rows, or each user's first, in the order of the users' ids."""
    users = getattr(data, split)["user_id"].values
    return np.arange(len(users)) if data.evaluation.by == "row" else np.unique(users, return_index=True)[1]


def _before(split: str) -> tuple[str, ...]:
    """Returns the splits with a user's items before those of a split."""
    return ("train",) if split == "validation" else ("train", "validation")


def _of_catalogue(data: InteractionData, split: str, own_items: Column) -> metrics.Question:
    """Returns the question about the whole catalogue, for queries of users with the items ``own_items``, Q rows."""
    users, targets = (getattr(data, split)[name].values for name in ("user_id", "item_id"))
    rows = None
    if data.evaluation.by == "user":
        order = np.argsort(users, kind="stable")
        rows = np.unique(users[order], return_inverse=True)[1]
        targets = targets[order]
    if data.evaluation.keep_seen:
        own_items = Column.from_lengths(targets[:0], np.zeros(len(own_items), dtype=np.int64))
    return metrics.Question(
        targets=torch.from_numpy(targets),
        target_rows=None if rows is None else torch.from_numpy(rows),
        seen_rows=torch.from_numpy(np.arange(len(own_items)).repeat(own_items.lengths)),
        seen_items=torch.from_numpy(own_items.values),
        not_items=(0, *range(data.num_items + 1, data.items.num_rows)),
    )


def recommendation_text(data: InteractionData, recommended: Recommended) -> str:
    """Returns recommendations as text: titles, with what the user liked before and the item that was held out."""
    users = data.users_by_row
    items = data.items_by_row
    titles = data.titles or [f"item {item}" for item in items.tolist()]
    liked = data.liked.slice(recommended.user, recommended.user + 1).values[-SHOWN:]
    row = int((data.test["user_id"].values == recommended.user).argmax())
    held_out = int(data.test["item_id"].values[row])
    lines = [f"user {users[recommended.user]} liked before: " + "; ".join(titles[item] for item in liked)]
    lines += recommendation_lines(recommended.items, recommended.scores, titles.__getitem__, [held_out])
    return "\n".join(lines)
