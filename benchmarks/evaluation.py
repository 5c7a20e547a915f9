"""Ranking of a whole catalogue of MovieLens 1M's shape on one core: 6,040 users x 3,706 items, a million pairs seen.

    python benchmarks/evaluation.py [--turns 3] [--quick]

`dot` and `top-nn` are seconds from columns to HR@10 and NDCG@10 of two towers (embeddings of 32, output of 64, history
of up to 50) under a dot product and under a top NN of 128 and 64: embedding, scoring, masking, ranking. The baseline
has the towers' outputs already and does what users write: `dot` makes the whole matrix of scores and sorts it, `top-nn`
runs the interaction over one user beside all items at a time and sorts (for 300 of them, scaled up to all). Both sides
must find the same places. `required` is a limit in seconds, and `plain_s` the baseline's seconds. `memory` is the most
resident memory that this process has had before any baseline ran, torch and the data included.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import torch
from harness import Options, Row, command_line, in_turn, peak_mb, row
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.train.metrics import (
    Hits,
    Kept,
    Question,
    catalogue_hits,
    embed_all,
    own_share,
    ranking_metrics,
)

USERS, ITEMS, PAIRS, HISTORY, DIM, K = 6_040, 3_706, 1_000_209, 50, 32, 10
SIZES = {
    "user_id": USERS + 1,
    "gender": 3,
    "age": 8,
    "occupation": 22,
    "history": ITEMS + 1,
}
ITEM_SIZES = {"item_id": ITEMS + 1, "year": 82, "genres": 19}
BASELINE_USERS = 300
LIMITS = {"dot": 5.0, "top-nn": 60.0, "memory": 1000.0}
HERE = Runtime()
Figures = dict[str, float]


def made() -> tuple[Chunk, Chunk, Question]:
    """A row for each user, a row for each item, and what to ask: a popular item, not among those seen."""
    rng = np.random.default_rng(0)
    counts = np.minimum(20 + rng.geometric(1 / 146, USERS), ITEMS // 2)
    counts = np.maximum((counts * (PAIRS / counts.sum())).astype(np.int64), 1)
    orders = [
        np.minimum(ITEMS * rng.random(2 * count + 40) ** 2, ITEMS - 1).astype(np.int64)
        + 1
        for count in counts
    ]
    taken = [
        np.unique(order)[:count] for order, count in zip(orders, counts, strict=True)
    ]
    targets = np.array(
        [rng.choice(np.setdiff1d(np.arange(1, ITEMS + 1), own)) for own in taken]
    )
    lengths = np.array([len(own) for own in taken])
    recent = [own[:HISTORY] for own in taken]
    users = Chunk(
        {
            "user_id": Column(np.arange(1, USERS + 1)),
            **{
                name: Column(rng.integers(1, SIZES[name], USERS))
                for name in ("gender", "age", "occupation")
            },
            "history": Column.from_lengths(
                np.concatenate(recent), np.array([len(own) for own in recent])
            ),
        }
    )
    genres = rng.integers(1, 4, ITEMS + 1)
    items = Chunk(
        {
            "item_id": Column(np.arange(ITEMS + 1)),
            "year": Column(rng.integers(1, ITEM_SIZES["year"], ITEMS + 1)),
            "genres": Column.from_lengths(
                rng.integers(1, ITEM_SIZES["genres"], genres.sum()), genres
            ),
        }
    )
    question = Question(
        targets=torch.from_numpy(targets),
        seen_rows=torch.arange(USERS).repeat_interleave(torch.from_numpy(lengths)),
        seen_items=torch.from_numpy(np.concatenate(taken)),
    )
    return users, items, question


def model_of(interaction: str) -> TowerModel:
    torch.manual_seed(0)
    tables = [
        [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=rows,
                embedding_dim=DIM,
                pooling=PoolingType.MEAN,
            )
            for name, rows in sizes.items()
        ]
        for sizes in (SIZES, ITEM_SIZES)
    ]
    return two_tower(
        *tables, tower_widths=(64,), interaction=interaction, top_widths=(128, 64)
    ).eval()  # type: ignore[arg-type]


class Case:
    """One model, evaluated by us and plainly."""

    def __init__(
        self, interaction: str, users: Chunk, items: Chunk, question: Question
    ) -> None:
        self.model = model_of(interaction)
        self.users = users
        self.items = items
        self.question = question
        self.builder = BatchBuilder(self.model.schema(), items)

    def batches(self, side: str) -> list[Kept]:
        """What a tower reads, made anew from the columns."""
        rows = self.users if side == "user" else self.items
        shares = own_share(rows.num_rows, HERE)
        if side == "user":
            return [
                (self.builder.user_batch(rows.slice(share.start, share.stop)), keep)
                for share, keep in shares
            ]
        return [
            (self.builder.item_batch(rows["item_id"].values[share]), keep)
            for share, keep in shares
        ]

    def hits(self, k: int = K) -> Hits:
        """Ours, from the columns."""
        return catalogue_hits(
            self.model,
            HERE,
            self.batches("user"),
            self.batches("item"),
            self.question,
            k=k,
        )

    def ours(self) -> Figures:
        """Ours, from the columns to the figures."""
        return ranking_metrics(self.hits())

    def embedded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of both towers, which the baseline starts from."""
        queries, items = (
            embed_all(self.model, side, self.batches(side), HERE)
            for side in ("user", "item")
        )
        return queries, items

    @torch.no_grad()
    def whole_matrix(self, queries: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Plainly: every score at once, every row sorted."""
        scores = queries @ items.T
        scores[self.question.seen_rows, self.question.seen_items] = -torch.inf
        scores[:, 0] = -torch.inf
        order = scores.argsort(dim=1, descending=True)
        return (order == self.question.targets[:, None]).int().argmax(dim=1)

    @torch.no_grad()
    def user_by_user(
        self, queries: torch.Tensor, items: torch.Tensor, users: int
    ) -> torch.Tensor:
        """Plainly: the interaction over one user beside every item, sorted."""
        places = []
        for user in range(users):
            scores = self.model.interaction(
                [queries[user].expand(len(items), -1), items]
            )
            seen = self.question.seen_rows == user
            scores[self.question.seen_items[seen]] = -torch.inf
            scores[0] = -torch.inf
            places.append(
                int(
                    (scores.argsort(descending=True) == self.question.targets[user])
                    .int()
                    .argmax()
                )
            )
        return torch.tensor(places)


def agree(ours: Hits, plain: torch.Tensor) -> None:
    """Of the users that the baseline ranked; sums in another order may swap two items that all but tie."""
    places = ours.gains[: len(plain)].argmax(dim=1)
    if int((places - plain).abs().max()) > 3:
        raise SystemExit(
            f"the two sides disagree: ours {places.tolist()[:10]}, plain {plain.tolist()[:10]}"
        )


def whole(options: Options) -> Iterator[Row]:
    """Yields the rows of both interactions, and the memory."""
    users, items, question = made()
    dot, top = (
        Case(interaction, users, items, question) for interaction in ("dot", "top_nn")
    )
    sides = {"dot": dot.ours, "top-nn": top.ours}
    figures = {name: side() for name, side in sides.items()}
    ours_mb = peak_mb()
    vectors, top_vectors = dot.embedded(), top.embedded()
    some = 60 if options.quick else BASELINE_USERS
    agree(dot.hits(ITEMS), dot.whole_matrix(*vectors))
    agree(top.hits(ITEMS), top.user_by_user(*top_vectors, some))
    plain = {
        "dot plain": lambda: dot.whole_matrix(*vectors),
        "top-nn plain": lambda: top.user_by_user(*top_vectors, some),
    }
    times = in_turn({**sides, **plain}, options.turns)
    times["top-nn plain"] = [each * USERS / some for each in times["top-nn plain"]]
    for name in sides:
        plain_s = round(statistics.median(times[f"{name} plain"]), 3)
        yield row(
            name,
            times[name],
            "s",
            required=LIMITS[name],
            plain_s=plain_s,
            **figures[name],
        )
    yield row(
        "memory",
        ours_mb,
        "MB",
        required=LIMITS["memory"],
        with_baseline_mb=round(peak_mb()),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, {"whole": whole}, turns=3, packages="numpy")
