"""Ranking of a whole catalogue of MovieLens 1M's shape on one core: 6,040 users x 3,706 items, a million pairs seen.

    python benchmarks/evaluation.py [--repeats 5] [--baseline-users 604] [--cpu_seconds]

`dot` and `top-nn` are seconds from columns to HR@10 and NDCG@10 of two towers (embeddings of 32, output of 64, history
of up to 50) under a dot product and under a top NN of 128 and 64: embedding, scoring, masking, ranking. The baseline
has the towers' outputs already and does what users write: `dot` makes the whole matrix of scores and sorts it, `top-nn`
runs the interaction over one user beside all items at a time and sorts (for --baseline-users of them, scaled up to
all). Both sides in turn, medians. `required` is a limit, and `ratio` how often what was measured fits into it. `memory`
is the most resident memory that this process has had, before any baseline ran and after. Both sides must find the same
ranks. With --cpu_seconds the seconds are those of the processor, for a machine that others use. Last line: one JSON
object.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.batch_builder import BatchBuilder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.train.metrics import (
    Kept,
    Question,
    TargetRanks,
    catalogue_ranks,
    embed_all,
    own_share,
    ranking_metrics,
)

USERS, ITEMS, PAIRS, HISTORY, DIM, K = 6_040, 3_706, 1_000_209, 50, 32, 10
SIZES = {"user_id": USERS + 1, "gender": 3, "age": 8, "occupation": 22, "history": ITEMS + 1}
ITEM_SIZES = {"item_id": ITEMS + 1, "year": 82, "genres": 19}
LIMITS = {"dot": 5.0, "top-nn": 60.0, "memory": 1000.0}
HERE = Runtime()
Figures = dict[str, float]


def made() -> tuple[Chunk, Chunk, Question]:
    """A row for each user, a row for each item, and what to ask: a popular item, not among those seen."""
    rng = np.random.default_rng(0)
    counts = np.minimum(20 + rng.geometric(1 / 146, USERS), ITEMS // 2)
    counts = np.maximum((counts * (PAIRS / counts.sum())).astype(np.int64), 1)
    orders = [np.minimum(ITEMS * rng.random(2 * count + 40) ** 2, ITEMS - 1).astype(np.int64) + 1 for count in counts]
    taken = [np.unique(order)[:count] for order, count in zip(orders, counts, strict=True)]
    targets = np.array([rng.choice(np.setdiff1d(np.arange(1, ITEMS + 1), own)) for own in taken])
    lengths = np.array([len(own) for own in taken])
    recent = [own[:HISTORY] for own in taken]
    users = Chunk(
        {
            "user_id": Column(np.arange(1, USERS + 1)),
            **{name: Column(rng.integers(1, SIZES[name], USERS)) for name in ("gender", "age", "occupation")},
            "history": Column.from_lengths(np.concatenate(recent), np.array([len(own) for own in recent])),
        }
    )
    genres = rng.integers(1, 4, ITEMS + 1)
    items = Chunk(
        {
            "item_id": Column(np.arange(ITEMS + 1)),
            "year": Column(rng.integers(1, ITEM_SIZES["year"], ITEMS + 1)),
            "genres": Column.from_lengths(rng.integers(1, ITEM_SIZES["genres"], genres.sum()), genres),
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
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM, pooling=PoolingType.MEAN
            )
            for name, rows in sizes.items()
        ]
        for sizes in (SIZES, ITEM_SIZES)
    ]
    return two_tower(*tables, tower_widths=(64,), interaction=interaction, top_widths=(128, 64)).eval()  # type: ignore[arg-type]


class Case:
    """One model, evaluated by us and plainly."""

    def __init__(self, interaction: str, users: Chunk, items: Chunk, question: Question) -> None:
        self.model, self.users, self.items, self.question = model_of(interaction), users, items, question
        self.builder = BatchBuilder(self.model.schema(), items)

    def batches(self, side: str) -> list[Kept]:
        """What a tower reads, made anew from the columns."""
        rows = self.users if side == "user" else self.items
        shares = own_share(rows.num_rows, HERE)
        if side == "user":
            return [(self.builder.user_batch(rows.slice(share.start, share.stop)), keep) for share, keep in shares]
        return [(self.builder.item_batch(rows["item_id"].values[share]), keep) for share, keep in shares]

    def ranks(self) -> TargetRanks:
        """Ours, from the columns."""
        return catalogue_ranks(self.model, HERE, self.batches("user"), self.batches("item"), self.question)

    def ours(self) -> Figures:
        """Ours, from the columns to the figures."""
        return ranking_metrics(self.ranks(), K)

    def embedded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of both towers, which the baseline starts from."""
        queries, items = (embed_all(self.model, side, self.batches(side), HERE) for side in ("user", "item"))
        return queries, items

    @torch.no_grad()
    def whole_matrix(self, queries: torch.Tensor, items: torch.Tensor) -> TargetRanks:
        """Plainly: every score at once, every row sorted."""
        scores = queries @ items.T
        scores[self.question.seen_rows, self.question.seen_items] = -torch.inf
        scores[:, 0] = -torch.inf
        order = scores.argsort(dim=1, descending=True)
        places = (order == self.question.targets[:, None]).int().argmax(dim=1)
        return TargetRanks(places, torch.zeros_like(places))

    @torch.no_grad()
    def user_by_user(self, queries: torch.Tensor, items: torch.Tensor, users: int) -> TargetRanks:
        """Plainly: the interaction over one user beside every item, sorted."""
        places = []
        for row in range(users):
            scores = self.model.interaction([queries[row].expand(len(items), -1), items])
            scores[self.question.seen_by(row, row + 1)[1]] = -torch.inf
            scores[0] = -torch.inf
            places.append(int((scores.argsort(descending=True) == self.question.targets[row]).int().argmax()))
        return TargetRanks(torch.tensor(places), torch.zeros(users, dtype=torch.int64))


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def row(name: str, ours: float, baseline: float, unit: str) -> dict[str, object]:
    ratio = round(LIMITS[name] / ours, 2)
    rounded = {"baseline": round(baseline, 3), "ours": round(ours, 3)}
    return {"name": name, **rounded, "unit": unit, "ratio": ratio, "required": LIMITS[name], "ceiling": None}


def agree(ours: TargetRanks, plain: TargetRanks) -> None:
    """Of the users that the baseline ranked; sums in another order may swap two items that all but tie."""
    count = len(plain.better)
    ours = TargetRanks(ours.better[:count], ours.ties[:count])
    if int((ours.better - plain.better).abs().max()) > 3:
        raise SystemExit(f"the two sides disagree: ours {ranking_metrics(ours, K)}, plain {ranking_metrics(plain, K)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baseline-users", type=int, default=604, help="how many users the baseline of top-nn ranks")
    parser.add_argument(
        "--cpu_seconds", action="store_true", help="count processor seconds, of which one thread has one per second"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    torch.set_num_threads(1)
    users, items, question = made()
    dot, top = (Case(interaction, users, items, question) for interaction in ("dot", "top_nn"))
    times: dict[str, list[float]] = {"dot": [], "top-nn": [], "dot plain": [], "top-nn plain": []}
    print(f"{len(question.seen_rows):,} pairs seen; untrained, dot finds {dot.ours()}, top-nn {top.ours()}")
    ours_mb = peak_mb()
    vectors, top_vectors = dot.embedded(), top.embedded()
    some = min(options.baseline_users, USERS)
    agree(dot.ranks(), dot.whole_matrix(*vectors))
    agree(top.ranks(), top.user_by_user(*top_vectors, some))
    for _ in range(options.repeats):
        times["dot"].append(seconds(dot.ours, clock))
        times["dot plain"].append(seconds(lambda: dot.whole_matrix(*vectors), clock))
        times["top-nn"].append(seconds(top.ours, clock))
        times["top-nn plain"].append(seconds(lambda: top.user_by_user(*top_vectors, some), clock) * USERS / some)
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = [
        row(name, medians[name], medians[f"{name} plain"], "CPU s" if options.cpu_seconds else "s")
        for name in ("dot", "top-nn")
    ]
    rows.append(row("memory", ours_mb, peak_mb(), "MB"))
    for entry in rows:
        print(
            f"{entry['name']:8s} {entry['ours']:9.3f} {entry['unit']:5s} plain {entry['baseline']:9.3f}, limit "
            f"{entry['required']}"
        )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores and not options.cpu_seconds:
        print(f"note: a load of {load:.1f} on {cores} cores, so others took time from both sides")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "torchrec", "torchrec-ext")}
    print(json.dumps({"benchmark": "evaluation", "versions": versions, "cores": cores, "rows": rows}))


if __name__ == "__main__":
    main()
