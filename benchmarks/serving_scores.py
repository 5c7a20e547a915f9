"""One user and hundreds of items, from the request's values to a list of scores, on one thread.

Ours is `Scorer.score`, which the HTTP service calls with its default flags: ids become positions, the user tower runs
on the request's own features, and the top NN runs over stored rows, uncompiled. The baselines get the same features and
the positions themselves, and run the user tower too. `compiled` rows are the same call of a scorer with compile="auto",
for which one call of machine code gets the request's columns and positions.

- score-naive: the whole network on a batch with the user beside each item, as an evaluation does it;
- score-tower-once: the same network with the user tower run once;
- score-onnx: ONNX Runtime, one graph of user tower and top NN over stored outputs of the item tower;
- score-onnx, pre-projected: the same with our stored rows, which hold the item half of the top NN's first layer.

`tensors` rows leave out what is done in Python around it: a batch that is ready against our user tower and
CandidateScorer on tensors. The ceiling is that of the candidates' rows, gathered and not scored. first-1000 compares
the first 1,000 scores of a store that was not in the page cache when it was opened with later ones.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pyarrow as pa
import torch
from harness import Options, Row, calls_in_turn, number_of_calls, row
from serving import compared, p99_ms
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.retrieval import ScoreRequest
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import Catalogue
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.onnx.layers import PaddedTower, write_onnx
from torchrec_ext.retrieval.scorer.candidates import CandidateScorer
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.store.store import ROWS, EmbeddingStore
from torchrec_ext.schema import BatchSchema, Jagged

WIDTH, HISTORY, USERS = 64, 20, 100_000
FIRST = 1_000


class Question(NamedTuple):
    """One user's features, as a request's JSON gives them, and the items to score."""

    user: dict[str, Any]
    items: list[int]


def network(items: int, shared: tuple[str, ...] = ()) -> TowerModel:
    """Makes towers 128-64 over item, category and price, and over user, history and age, with a top NN over both."""

    def table(name: str, rows: int, **options: object) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=WIDTH,
            **options,
        )  # type: ignore[arg-type]

    torch.manual_seed(0)
    user = [table("user_id", USERS), table("history", items, pooling=PoolingType.MEAN)]
    item = [table("item_id", items), table("category", 1_000)]
    return two_tower(
        user,
        item,
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(128, WIDTH),
        interaction="top_nn",
        shared=shared,
    ).eval()


def questions(number: int, items: int, count: int) -> list[Question]:
    """Returns random users with random items, which differ from question to question."""
    random = np.random.default_rng(0)
    return [
        Question(
            {
                "user_id": int(random.integers(1, USERS)),
                "history": random.integers(1, items, HISTORY).tolist(),
                "age": round(float(random.random()), 3),
            },
            random.permutation(items)[:count].tolist()
            if count == items
            else random.choice(items, count).tolist(),
        )
        for _ in range(number)
    ]


def batch_of(schema: BatchSchema, question: Question, *, once: bool) -> TowerBatch:
    """Returns the network's batch: the user beside each item, or once."""
    items = torch.tensor(question.items)
    count = len(items)
    users = 1 if once else count
    history = torch.tensor(question.user["history"])
    return schema.assemble(
        {
            "user_id": Jagged(torch.full((users,), question.user["user_id"])),
            "history": Jagged(
                history.repeat(users), torch.full((users,), HISTORY, dtype=torch.int32)
            ),
            "item_id": Jagged(items),
            "category": Jagged(items % 1_000),
        },
        {"age": torch.full((users,), question.user["age"]), "price": torch.ones(count)},
        labels=torch.zeros(count),
        index=torch.zeros(count, dtype=torch.int64) if once else None,
        shared_rows=torch.arange(1) if once else None,
    )


class OneGraph(nn.Module):
    """The user tower and the top NN as one graph, so that ONNX Runtime is called once."""

    def __init__(
        self, tower: nn.Module, top: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.tower, self.top = tower, top

    def forward(
        self, user_id: Tensor, history: Tensor, age: Tensor, candidates: Tensor
    ) -> Tensor:
        """Returns (N,) scores of one user, (1,), (1, L) and (1,), with candidates (N, D)."""
        scores: Tensor = self.top(self.tower(user_id, history, age), candidates)
        return scores


class PlainTop(nn.Module):
    """The interaction as it was trained."""

    def __init__(self, interaction: nn.Module) -> None:
        super().__init__()
        self.interaction = interaction

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (N,) scores of (1, D) and (N, D)."""
        scores: Tensor = self.interaction(
            [query.expand(candidates.shape[0], -1), candidates]
        )
        return scores


class ProjectedTop(nn.Module):
    """The interaction without the item half of its first layer, which the stored rows hold."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (N,) scores of (1, D) and (N, width)."""
        scores: Tensor = self.projection.score(
            self.projection.query(query)[0], candidates
        )
        return scores


def in_onnx(
    bundle: Bundle, top: nn.Module, stored: EmbeddingStore, path: Path
) -> Callable[[Question], list[float]]:
    """Returns ONNX Runtime's answer, on one thread, from stored rows."""
    tower = PaddedTower(bundle.encoders[0], "user")
    assert [each.name for each in tower.inputs] == ["user_id", "history", "age"]
    names = ("user_id", "history", "age", "candidates")
    values = (
        torch.tensor([5]),
        torch.arange(1, HISTORY + 1)[None],
        torch.ones(1),
        stored.matrix()[:4].clone(),
    )
    dynamic = (None, None, None, {0: torch.export.Dim("rows", min=2)})
    write_onnx(
        OneGraph(tower, top).eval(),
        dict(zip(names, values, strict=True)),
        dynamic,
        path,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    rows = stored.matrix().numpy()

    def answered(question: Question) -> list[float]:
        given = {
            "user_id": np.array([question.user["user_id"]]),
            "history": np.array([question.user["history"]]),
            "age": np.array([question.user["age"]], np.float32),
            "candidates": rows[np.array(question.items)],
        }
        scores: list[float] = session.run(None, given)[0].tolist()
        return scores

    return answered


class Sides:
    """The model of a catalogue, whole and as a bundle, and every side that answers for it.

    Args:
        folder: folder for the bundle and ONNX files.
        items: size of the catalogue.
    """

    def __init__(self, folder: Path, items: int) -> None:
        self.whole, self.once = network(items), network(items, ("user",))
        self.once.load_state_dict(self.whole.state_dict())
        self.schemas = {False: self.whole.schema(), True: self.once.schema()}
        ids = np.arange(items)
        rows = pa.table(
            {
                "item_id": ids,
                "category": ids % 1_000,
                "price": np.ones(items, np.float32),
            }
        )
        users = [question.user for question in questions(512, items, 1)]
        export(
            self.whole,
            folder / "bundle",
            catalogue=Catalogue(ids=ids, features=rows),
            queries=pa.Table.from_pylist(users).cast(
                pa.schema(
                    {
                        "user_id": pa.int64(),
                        "history": pa.list_(pa.int64()),
                        "age": pa.float32(),
                    }
                )
            ),
        )
        self.bundle = Bundle.load(folder / "bundle")
        self.scorer = Scorer(self.bundle)
        self.compiled = Scorer(self.bundle, compile="auto")
        bundle = self.bundle
        self.onnx = in_onnx(
            bundle,
            PlainTop(self.whole.interaction),
            bundle.store,
            folder / "plain.onnx",
        )
        self.projected = in_onnx(
            bundle,
            ProjectedTop(bundle.projection),
            bundle.projected,
            folder / "projected.onnx",
        )

    def of_network(self, question: Question, *, once: bool) -> list[float]:
        """Returns the network's scores from a request."""
        with torch.inference_mode():
            batch = batch_of(self.schemas[once], question, once=once)
            scores: list[float] = (
                (self.once if once else self.whole).logits(batch).tolist()
            )
        return scores

    def ours(self, question: Question) -> list[float]:
        """Returns the service's scores from a request."""
        return self.scorer.score(
            ScoreRequest(user=question.user, items=question.items)
        ).scores

    def ours_compiled(self, question: Question) -> list[float]:
        """Returns the scores of a scorer that compiles."""
        return self.compiled.score(
            ScoreRequest(user=question.user, items=question.items)
        ).scores

    def from_requests(
        self, asked: list[Question]
    ) -> dict[str, Callable[[int], object]]:
        """Returns the sides that begin with a request."""
        matrix = self.bundle.projected.matrix()
        rows = torch.empty(len(asked[0].items), self.bundle.projected.width)
        # Positions of other requests, so that the gathered rows are in no cache for the
        # others.
        others = [torch.tensor(question.items) for question in reversed(asked)]
        return {
            "naive": lambda number: self.of_network(asked[number], once=False),
            "tower-once": lambda number: self.of_network(asked[number], once=True),
            "onnx": lambda number: self.onnx(asked[number]),
            "onnx, pre-projected": lambda number: self.projected(asked[number]),
            "ours": lambda number: self.ours(asked[number]),
            "compiled": lambda number: self.ours_compiled(asked[number]),
            "gather": lambda number: torch.index_select(
                matrix, 0, others[number], out=rows
            ),
        }

    def from_tensors(self, asked: list[Question]) -> dict[str, Callable[[int], object]]:
        """Returns the whole network on batches that are ready, and ours on columns and positions that are."""
        encoder = self.bundle.encoders[0]
        scorer = CandidateScorer(
            self.bundle.projection, self.bundle.projected, compile="off"
        )
        batches = [
            batch_of(self.schemas[False], question, once=False) for question in asked
        ]
        read = [
            encoder.read({name: [value] for name, value in question.user.items()})
            for question in asked
        ]
        positions = [torch.tensor(question.items) for question in asked]

        def naive(number: int) -> None:
            with torch.inference_mode():
                self.whole.logits(batches[number])

        def ours(number: int) -> None:
            with torch.inference_mode():
                scorer(encoder.vectors(read[number])[0], positions[number])

        return {"naive": naive, "ours": ours}

    def check(self, question: Question) -> None:
        """Compares the scores of all sides."""
        expected = torch.tensor(self.of_network(question, once=False))
        others = {
            "tower-once": self.of_network(question, once=True),
            "onnx": self.onnx(question),
            "pre-projected": self.projected(question),
            "ours": self.ours(question),
            "compiled": self.ours_compiled(question),
        }
        for name, scores in others.items():
            difference = float((torch.tensor(scores) - expected).abs().max())
            assert difference < 1e-5, (
                f"{name} differs from the whole network by {difference:.1e}"
            )


REQUIRED_OF_COMPILED = {
    "naive": None,
    "tower-once": None,
    "onnx": 1.5,
    "onnx, pre-projected": None,
}
REQUIRED = {"naive": 25.0, "tower-once": 14.0, "onnx": 1.4, "onnx, pre-projected": None}


def scores(options: Options) -> Iterator[Row]:
    """Times 1 user x 500 candidates of 1,000,000 items, and x 1,000 of a store of 1,000, which stays in the cache."""
    torch.set_num_threads(1)
    items, calls = (20_000, 20) if options.quick else (1_000_000, 300)
    number = number_of_calls(options.turns, calls)
    with tempfile.TemporaryDirectory() as folder:
        sides, asked = Sides(Path(folder), items), questions(number, items, 500)
        sides.check(asked[0])
        times = calls_in_turn(sides.from_requests(asked), options.turns, calls)
        for name, required in REQUIRED.items():
            yield compared(
                f"score-{name}, 500 of {items:,}",
                times[name],
                times["ours"],
                required,
                ceiling=ceiling(times, name),
                machine="memory",
            )
            yield compared(
                f"score-{name}, compiled, 500 of {items:,}",
                times[name],
                times["compiled"],
                REQUIRED_OF_COMPILED[name],
                ceiling=ceiling(times, name),
                machine="memory",
            )
        for name, side, most in (("", "ours", 0.25), ("compiled, ", "compiled", 0.15)):
            milliseconds = [1e3 * statistics.median(turn) for turn in times[side]]
            yield row(
                f"score-p50, {name}500 candidates",
                milliseconds,
                "ms",
                required=most,
                p99=p99_ms(times[side]),
            )
        few = calls // 5  # batches are made beforehand, which takes longer than they
        times = calls_in_turn(
            sides.from_tensors(asked[: number_of_calls(options.turns, few)]),
            options.turns,
            few,
        )
        yield compared(
            f"score-naive, 500 of {items:,}, tensors",
            times["naive"],
            times["ours"],
            None,
            machine="memory",
        )
        del sides
        gc.collect()
        yield from first_scores(Path(folder) / "bundle", options, items)
    with tempfile.TemporaryDirectory() as folder:
        sides, asked = Sides(Path(folder), 1_000), questions(number, 1_000, 1_000)
        sides.check(asked[0])
        times = calls_in_turn(
            {
                name: call
                for name, call in sides.from_requests(asked).items()
                if not name.startswith(("tower", "onnx"))
            },
            options.turns,
            calls,
        )
        yield compared(
            "score-naive, 1,000 of 1,000",
            times["naive"],
            times["ours"],
            60.0,
            ceiling=ceiling(times, "naive"),
        )
        yield compared(
            "score-naive, compiled, 1,000 of 1,000",
            times["naive"],
            times["compiled"],
            20.0,
            ceiling=ceiling(times, "naive"),
        )


def ceiling(times: Mapping[str, list[list[float]]], name: str) -> float:
    """Returns the ratio that the stored rows alone would have, gathered and not scored."""
    return statistics.median(itertools.chain(*times[name])) / statistics.median(
        itertools.chain(*times["gather"])
    )


def first_scores(folder: Path, options: Options, items: int) -> Iterator[Row]:
    """Times the first scores of a store that is opened when nothing of it is in the page cache, and later ones."""
    bundle = Bundle.load(folder, verify=False)
    projection, store = bundle.projection, bundle.projected.folder
    queries = torch.randn(2 * FIRST, WIDTH)
    del bundle
    first: list[list[float]] = []
    later: list[list[float]] = []
    opened: list[float] = []
    random = np.random.default_rng(1)
    for _ in range(options.turns):
        gc.collect()
        drop_from_page_cache(store / ROWS)
        start = time.perf_counter()
        scorer = CandidateScorer(projection, EmbeddingStore(store), compile="off")
        opened.append(1e3 * (time.perf_counter() - start))
        times = []
        with torch.inference_mode():
            for query in queries:
                positions = torch.from_numpy(random.choice(items, 500))
                start = time.perf_counter()
                scorer(query, positions)
                times.append(time.perf_counter() - start)
        del scorer
        first.append(times[:FIRST])
        later.append(times[FIRST:])
    yield compared(
        f"first-1000, 500 of {items:,}, against later ones",
        later,
        first,
        None,
        machine="disk",
        opened_ms=round(statistics.median(opened), 1),
    )


def drop_from_page_cache(path: Path) -> None:
    """Drops a file from the page cache, when nothing is left to be written; it must be mapped by nobody."""
    os.sync()  # else the disk is busy with the files of the export
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
