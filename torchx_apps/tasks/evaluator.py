"""Evaluator: classifies the labels of held-out rows, and ranks their items, by what the prepared folder holds.

question_of(): the one question that a model and its baselines answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.data.columns import Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.prepare import SESSION
from torchrec_ext.data.prepared import Prepared, positive_share
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.batch_schema import IdReplacement
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import check_output
from torchx_apps.tasks.baselines import Beside, ClosedForms
from torchx_apps.tasks.export_data import tower_columns
from torchx_apps.tasks.question import (
    SHOWN,
    Figures,
    K,
    TaskQuestion,
    batches_of,
    padded_lists,
)

# Rows of a batch in an evaluation.
BATCH_ROWS = 8_192
# Splits before a held-out one, whose items a user has taken.
_BEFORE = {"validation": ("train",), "test": ("train", "validation")}


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


class OutputCheck:
    """Checks the output of each step for the fields of an evaluation, so that no epoch is trained in vain.

    Args:
        data: the rows; those with labels are evaluated by the output's logits and labels.
    """

    def __init__(self, data: Any) -> None:
        self._names = ("logits", "labels") if data.form == "labels" else ()

    def see(self, output: Any) -> None:
        """Raises ValueError if the output lacks what the evaluation reads; tasks have logits of their own."""
        if not getattr(output, "tasks", None):
            check_output(output, self._names)

    def figures(self) -> Record:
        """There are none."""
        return {}


class Evaluator:
    """Evaluates a model on held-out rows; every rank calls each method but :meth:`baseline` and :meth:`beside`.

    Rows with labels are read a batch at a time. The catalogue is ranked for those with label 1 if the preprocessing
    names the columns of user and item, and the item's columns are those of the model's last tower.

    Args:
        data: the task's data.
        schema: schema of the model's batches.
        model: the sharded model.
        runtime: this rank's runtime.
        figures: names of the ranking's figures with their numbers of items shown; those of the set if empty.
        closed_forms: EASE of the training rows, if they are ranked too.

    Attributes:
        rows: puts the rows that dynamic ids have now in their place; None by default.
    """

    def __init__(
        self,
        data: Prepared,
        schema: BatchSchema,
        model: DistributedModelParallel,
        runtime: Runtime,
        figures: Figures = (),
        closed_forms: ClosedForms | None = None,
    ) -> None:
        self.data = data
        self.schema = schema
        self.model = model
        self.runtime = runtime
        self.rows: IdReplacement | None = None
        rule = data.evaluation
        usual = [(name, k) for k in rule.at for name in rule.figures]
        self.ranking_figures = figures or usual
        self._closed_forms = closed_forms
        # The questions asked for so far, by split.
        self._questions: dict[str, TaskQuestion | None] = {}

    def builder(self) -> BatchBuilder:
        """Returns a builder of batches for the model, whose ids are rows of its tables."""
        return BatchBuilder(self.schema, self.data.items, rows=self.rows)

    @cached_property
    def towers(self) -> list[str] | None:
        """Names of the model's towers, the item's last, if they can rank the catalogue; else None."""
        if self.data.form == "labels":
            return ranking_towers(self.model.module, self.data)
        return ["session" if self.data.form == "sessions" else "user", "item"]

    @property
    def tasks(self) -> list[str]:
        """Names of the model's tasks; none if it has one label."""
        return list(getattr(self.model.module, "tasks", ()))

    @property
    def calibrated(self) -> bool:
        """Whether the model's logits are odds, rather than scores for ranking only."""
        return bool(getattr(self.model.module, "calibrated", True))

    @property
    def classified(self) -> list[str]:
        """Names of the figures of the model's logits."""
        return metrics.classification_names(calibrated=self.calibrated)

    @property
    def ranking_names(self) -> list[str]:
        """Names of the ranking's figures."""
        return [f"{name}@{k}" for name, k in self.ranking_figures]

    @property
    def validated(self) -> list[str]:
        """Names of the figures of :meth:`validate`."""
        names = []
        if self.data.form == "labels":
            for prefix in [f"{name}_" for name in self.tasks] or [""]:
                names += [f"{prefix}{name}" for name in self.classified]
        if self.towers:
            names += self.ranking_names
        return names

    def validate(self) -> Record:
        """Returns the figures on the validation rows, for early stopping and the choice of settings."""
        return self.figures("validation")

    def test(self) -> Record:
        """Returns the figures on the test rows; switches the model to evaluation."""
        self.model.eval()
        return self.figures("test")

    def figures(self, split: str) -> Record:
        """Returns figures by name on the held-out rows of a split."""
        record: Record = {}
        if self.data.form == "labels":
            record |= self._classification(split)
        question = self.question(split)
        if question is None or self.towers is None:
            return record
        return record | question.of_model(
            self.model.module, self.runtime, self.builder(), self.towers
        )

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

    def beside(self, split: str) -> Beside:
        """Returns the figures of EASE on the same question; it is fitted on the training rows."""
        question = self.question(split)
        forms = self._closed_forms
        if question is None or forms is None:
            return Beside({}, {})
        beside = forms.beside(question.user_items, question.question, question.figures)
        return beside._replace(repeats=question.repeats, rule=question.rule)

    def question(self, split: str) -> TaskQuestion | None:
        """Returns the question about held-out items; None if the catalogue is not ranked."""
        if self.towers is None:
            return None
        if split not in self._questions:
            rows = held_out_rows(self.data, split)
            self._questions[split] = None
            if rows.num_rows:
                figures = self.ranking_figures
                self._questions[split] = question_of(self.data, split, rows, figures)
        return self._questions[split]

    def _classification(self, split: str) -> Record:
        roles = self.data.roles
        config = LoaderConfig(
            batch_size=BATCH_ROWS * self.runtime.world_size,
            negatives=0,
            label=roles.label,
            weight=roles.weight,
            shuffle=False,
        )
        # Figures do not depend on the order, so each rank reads its own part of files.
        loader = ChunkLoader(
            self.data.splits[split],
            self.schema,
            config=config,
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
            in_order=False,
        )
        loader.hook.replace = self.rows
        sums: dict[str, metrics.ClassificationMetrics] = {}
        for batch in loader:
            with torch.no_grad():
                # The first of two results is the loss.
                output = self.model.module(batch.to(self.runtime.device))[1]
            tasks = getattr(output, "tasks", None) or {}
            outputs = {f"{name}_": task for name, task in tasks.items()} or {"": output}
            for prefix, each in outputs.items():
                classification = sums.setdefault(
                    prefix, metrics.ClassificationMetrics()
                )
                classification.update(each.logits, each.labels, each.weights)
        record: Record = {}
        for prefix, classification in sums.items():
            figures = classification.compute(self.runtime)
            record |= {f"{prefix}{name}": figures[name] for name in self.classified}
        return record

    def _constants(
        self, split: str
    ) -> Iterator[tuple[str, tuple[float, float], float]]:
        """Yields each label's prefix of figures, its positives and their total, and their share in training."""
        data = self.data
        if data.form != "labels":
            return
        if not self.tasks:
            yield "", data.positives[split], data.share("train")
            return
        for name in self.tasks:
            sums = []
            for of in (split, "train"):
                sums.append((data.task_positives[of][name], data.positives[of][1]))
            yield f"{name}_", sums[0], positive_share(*sums[1])

    def example(self) -> str:
        """Returns the recommendations for the first test row as text for a person; empty for rows with labels."""
        if self.data.form == "labels":
            return ""
        return recommendation_text(self.data, self.recommend())

    def recommend(self, row: int = 0) -> Recommended:
        """Returns the K best items for the user of a test row, fewer if there are fewer new items for that user."""
        assert self.towers is not None, "the catalogue is ranked"
        rows = self.data.rows("test").slice(row, row + 1)
        builder = self.builder()
        model = self.model.module
        batches = batches_of(builder.item_batch, builder.items.num_rows, self.runtime)
        with torch.no_grad():
            items: Tensor = metrics.embed_all(model, "item", batches, self.runtime)
            query = builder.user_batch(rows).to(self.runtime.device)
            vector = model.embed(self.towers[0], query)
            scores = model.interaction.score_all(vector, items)[0].cpu()
        taken = user_items(self.data, "test", rows).values
        scores[torch.from_numpy(not_items(self.data))] = -torch.inf
        scores[torch.from_numpy(taken)] = -torch.inf
        # A user may have taken all but a few.
        best = scores.topk(min(K, int((scores > -torch.inf).sum())))
        user = int(rows[str(self.data.roles.user)].values[0])
        return Recommended(user, best.indices.tolist(), best.values.tolist())


def recommendation_text(data: Prepared, recommended: Recommended) -> str:
    """Returns recommendations for the first test row as text, with items that its user took before, and its own."""
    row = data.rows("test").slice(0, 1)
    before = user_items(data, "test", row).values
    if data.form == "sessions":
        before = row[SESSION].values
    titles = data.titles
    held_out = int(row[str(data.roles.item)].values[0])
    who = data.values_of(str(data.roles.user))[recommended.user]
    shown = "; ".join(titles[item] for item in before[-SHOWN:])
    lines = [
        f"user {who} took before: {shown}",
        f"{len(recommended.items)} recommendations (the held-out item was: {titles[held_out]}):",
    ]
    scored = zip(recommended.items, recommended.scores, strict=True)
    for rank, (item, score) in enumerate(scored, start=1):
        mark = "   <- the held-out item" if item == held_out else ""
        lines.append(f"{rank:3}. {titles[item]}  ({score:.2f}){mark}")
    return "\n".join(lines)


def ranking_towers(model: Any, data: Prepared) -> list[str] | None:
    """Returns the model's towers if the last reads exactly the item's columns, and no other any of them; else None."""
    if data.roles.user is None or data.roles.item is None or not data.ranked:
        return None
    towers = getattr(model, "towers", None)
    if not towers or len(towers) < 2:
        return None
    features, dense = data.towers["item"]
    item = {*features, *dense}
    columns = [set(tower_columns(tower)) for tower in towers.values()]
    *queries, last = columns
    # A query tower with a column of the item would have to run for each pair.
    if last != item or any(query & item for query in queries):
        return None
    return list(towers)


def held_out_rows(data: Prepared, split: str) -> Chunk:
    """Returns the held-out rows to rank for; of labelled rows at most ``data.ranked`` with label 1, evenly spread."""
    roles = data.roles
    if data.form != "labels":
        return data.rows(split)
    # A first pass counts the rows to choose from, since a split may not fit memory.
    count = sum(chunk.num_rows for chunk in data.clicked(split, str(roles.item)))
    every = max(1, -(-count // data.ranked))
    ids = (roles.label, roles.item, roles.user, data.evaluation.candidates)
    names = list(dict.fromkeys(filter(None, (*ids, *data.features, *data.dense))))
    pieces = []
    passed = 0
    for chunk in data.clicked(split, *names):
        # Every n-th of all chunks together, however the files are cut.
        pieces.append(chunk.take(np.arange(-passed % every, chunk.num_rows, every)))
        passed += chunk.num_rows
    return concatenate_rows(pieces, names)


def not_items(data: Prepared) -> Int64:
    """Returns the rows of the items' table that are never ranked: the unknown item, and items without training row."""
    rows = np.arange(data.vocab[str(data.roles.item)])
    return np.setdiff1d(rows, data.item_ids)


def user_items(data: Prepared, split: str, rows: Chunk) -> Column:
    """Returns what each row's user has taken before it: the items of earlier splits, and of the row's own session."""
    taken = data.seen(rows[str(data.roles.user)].values, *_BEFORE[split])
    if data.form != "sessions":
        return taken
    session = rows[SESSION]
    owners = np.concatenate([taken.owners, session.owners])
    items = np.concatenate([taken.values, session.values])
    pairs = np.unique(np.stack([owners[items > 0], items[items > 0]]), axis=1)
    return Column.grouped(pairs[1], pairs[0], rows.num_rows)


def question_of(
    data: Prepared, split: str, held_out: Chunk, figures: Figures
) -> TaskQuestion:
    """Returns the question for a model and its baselines: the place of each held-out item in the catalogue.

    Args:
        data: the set.
        split: the split that the rows are of.
        held_out: rows of the split.
        figures: names of the figures with their numbers of items shown.
    """
    rule = data.evaluation
    # A copy, because Arrow's memory is read-only.
    targets = held_out[str(data.roles.item)].values.copy()
    target_rows = None
    if rule.by == "user":
        # All held-out items of a user are one query, in the order of the users' ids.
        users = held_out[str(data.roles.user)].values
        # Users without a training row all have id 0: no two of their rows are known to
        # be one user's.
        users = np.where(users > 0, users, -1 - np.arange(len(users)))
        _, first, rows = np.unique(users, return_index=True, return_inverse=True)
        # An item counts once for its user, but each new item is an answer of its own.
        answers = np.where(targets > 0, targets, -1 - np.arange(len(targets)))
        pairs = np.unique(np.stack([rows, answers]), axis=1)
        target_rows = torch.from_numpy(pairs[0].copy())
        targets = np.maximum(pairs[1], -1)
        held_out = held_out.take(first)
    taken = user_items(data, split, held_out)
    among: dict[str, Any] = {}
    if rule.candidates is not None:
        lists = padded_lists(held_out[rule.candidates])
        among["candidates"] = torch.from_numpy(lists)
    else:
        among["not_items"] = not_items(data).tolist()
        # Some protocols rank what a user has taken, too.
        if not rule.keep_seen:
            among["seen_rows"] = torch.from_numpy(taken.owners)
            among["seen_items"] = torch.from_numpy(taken.values)
    question = metrics.Question(
        targets=torch.from_numpy(targets), target_rows=target_rows, **among
    )
    return TaskQuestion(
        rows=held_out, question=question, user_items=taken, figures=figures
    )
