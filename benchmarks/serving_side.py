"""One side of serving.py, in a process of its own: this package, or the one before the road by ONNX Runtime.

It reads commands from standard input, a JSON list a line, and answers each with a line of JSON: bundles to export, and
calls to time. Which side it is, the PYTHONPATH says.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged

# The server of torch is made by the newer side.
NEW = "old" not in sys.argv[1:]
if NEW:
    from torchrec_ext.retrieval.bundle import Bundle
    from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers
    from torchrec_ext.retrieval.export import export
    from torchrec_ext.retrieval.scorer import Scorer, ScoreRequest
    from torchrec_ext.retrieval.search import open_search
else:
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
    from torchrec_ext.retrieval.exporting.export import export
    from torchrec_ext.retrieval.scorer.requests import ScoreRequest
    from torchrec_ext.retrieval.scorer.scorer import Scorer

WIDTH, HISTORY, USERS = 64, 20, 100_000
K = 100
SHARES = (0.0001, 0.01, 0.1, 0.5, 1.0)


def network(items: int, interaction: str) -> TowerModel:
    """Makes towers 128-64 over item, category and price, and over user, history and age."""

    def table(name: str, rows: int, **options: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=WIDTH,
            **options,
        )

    torch.manual_seed(0)
    user = [table("user_id", USERS), table("history", items, pooling=PoolingType.MEAN)]
    return two_tower(
        user,
        [table("item_id", items), table("category", 1_000)],
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(128, WIDTH),
        interaction=interaction,
    ).eval()


def questions(items: int, number: int) -> list[dict[str, Any]]:
    """Returns random users' features, as a request's JSON gives them."""
    random = np.random.default_rng(0)
    return [
        {
            "user_id": int(random.integers(1, USERS)),
            "history": random.integers(1, items, HISTORY).tolist(),
            "age": round(float(random.random()), 3),
        }
        for _ in range(number)
    ]


def make(folder: str, items: int, interaction: str) -> dict[str, float]:
    """Exports a bundle with 512 users, and an attribute with values that shares of the items have."""
    ids = np.arange(items)
    rows = {"item_id": ids, "category": ids % 1_000, "price": np.ones(items, "f4")}
    draws = np.random.default_rng(0).random((len(SHARES), items))
    names = [f"{share:g}" for share in SHARES]
    having = [draw < share for share, draw in zip(SHARES, draws, strict=True)]
    values = [
        [name for name, mask in zip(names, having, strict=True) if mask[item]]
        for item in range(items)
    ]
    users = pa.Table.from_pylist(questions(items, 512)).cast(
        pa.schema(
            {
                "user_id": pa.int64(),
                "history": pa.list_(pa.int64()),
                "age": pa.float32(),
            }
        )
    )
    nobody = pa.array([[]] * 512, pa.list_(pa.int64()))
    start = time.perf_counter()
    export(
        network(items, interaction),
        folder,
        catalogue=Catalogue(
            ids=ids, features=pa.table(rows), attributes=pa.table({"share": values})
        ),
        users=NamedUsers(
            key="user",
            ids=np.arange(512),
            features=users,
            unknown={"user_id": 0, "history": [], "age": 0.0},
            seen=nobody,
            liked=nobody,
        ),
    )
    return {"seconds": time.perf_counter() - start}


class Calls:
    """The calls of a bundle that can be timed.

    Args:
        folder: folder of the bundle.
        count: items to score, 0 for none.
        number: number of different requests.
    """

    def __init__(self, folder: str, count: int, number: int) -> None:
        self.bundle = Bundle.load(folder)
        items = len(self.bundle.items)
        self.users = questions(items, number)
        random = np.random.default_rng(1)
        self.items = [
            random.permutation(items)[:count].tolist()
            if count == items
            else random.choice(items, count, replace=False).tolist()
            for _ in range(number if count else 0)
        ]
        self.scorer = Scorer(self.bundle)
        self.by_name: dict[str, Callable[[int], object]] = {"score": self.score}
        if NEW:
            self._new()
        else:
            self._old()

    def score(self, number: int) -> object:
        """From a request's values to a list of scores."""
        request = ScoreRequest(user=self.users[number], items=self.items[number])
        return self.scorer.score(request).scores

    def _new(self) -> None:
        bundle = self.bundle
        queries = bundle.query.embed(self.users)
        search = open_search(bundle)
        self.by_name["search"] = lambda number: search.search(queries[number], K)
        attribute = bundle.items.attribute("share")
        for share in SHARES:
            value = f"{share:g}"
            self.by_name[f"search {value}"] = lambda number, value=value: search.search(
                queries[number], K, attribute.mask([value])
            )
        self._by_hand()

    def _by_hand(self) -> None:
        """What a user of ONNX Runtime writes around its two calls: look-ups without a check, and nothing else."""
        folder = self.bundle.folder
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        query, pairs = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx", options)
            for name in ("query", "pairs")
        )
        leaves = self.bundle.manifest.content["graphs"]["query"]["leaves"]
        tables = {
            name: np.load(
                folder / entry.get("file", f"tables/{name}.npy"), mmap_mode="r"
            )
            for name, entry in self.bundle.manifest.content["tables"].items()
        }
        rows = np.load(folder / "rows.npy", mmap_mode="r")

        def answered(number: int) -> object:
            user = self.users[number]
            inputs = {}
            for leaf in leaves:
                value = user[leaf["column"]]
                if leaf["kind"] == "pooled":
                    bag = tables[leaf["table"]][np.atleast_1d(value)]
                    inputs[leaf["input"]] = bag.mean(axis=0, keepdims=True)
                elif leaf["kind"] == "rows":
                    inputs[leaf["input"]] = tables[leaf["table"]][[value]]
                else:
                    inputs[leaf["input"]] = np.array([value], leaf["dtype"])
            vector = query.run(None, inputs)[0]
            chosen = rows[np.array(self.items[number])]
            return pairs.run(None, {"query": vector, "rows": chosen})[0].tolist()

        self.by_name["by hand"] = answered

    def _old(self) -> None:
        bundle = self.bundle
        # The earlier commit's own baseline: one graph of user tower, tables and top NN
        # over pre-projected rows.
        if self.items:
            import torchrec_ext

            sys.path.insert(
                0, str(Path(torchrec_ext.__file__).parents[1] / "benchmarks")
            )
            from serving_scores import ProjectedTop, Question, in_onnx

            with tempfile.TemporaryDirectory() as folder:
                one = in_onnx(
                    bundle,
                    ProjectedTop(bundle.projection),
                    bundle.projected,
                    Path(folder) / "one.onnx",
                )
            self.by_name["one graph"] = lambda number: one(
                Question(self.users[number], self.items[number])
            )
        columns = {name: [user[name] for user in self.users] for name in self.users[0]}
        queries = bundle.embed_query(columns)
        index = bundle.index
        if hasattr(index, "quantize"):
            index.quantize()
        attribute = bundle.items.attribute("share")

        def search(number: int, value: str | None = None) -> object:
            allowed = None
            if value is not None:
                bits = attribute.bits([value])
                mask = np.unpackbits(bits, count=index.size, bitorder="little")
                allowed = torch.from_numpy(mask.view(np.bool_))
            return index.search(queries[number : number + 1], K, allowed=allowed)

        self.by_name["search"] = search
        for share in SHARES:
            value = f"{share:g}"
            self.by_name[f"search {value}"] = lambda number, value=value: search(
                number, value
            )


class Whole:
    """The whole network in torch on a batch with the user beside each item, and FAISS's own exact search."""

    def __init__(self, items: int, count: int, number: int) -> None:
        self.users = questions(items, number)
        random = np.random.default_rng(1)
        self.model = network(items, "top_nn")
        self.schema = self.model.schema()
        self.items = [random.integers(0, items, count) for _ in range(number)]
        self.by_name: Mapping[str, Callable[[int], object]] = {"whole": self.score}

    def score(self, number: int) -> object:
        """From a request's values to a list of scores."""
        user = self.users[number]
        items = torch.from_numpy(self.items[number])
        count = len(items)
        lengths = torch.full((count,), HISTORY, dtype=torch.int32)
        with torch.inference_mode():
            batch = self.schema.assemble(
                {
                    "user_id": Jagged(torch.full((count,), user["user_id"])),
                    "history": Jagged(
                        torch.tensor(user["history"]).repeat(count), lengths
                    ),
                    "item_id": Jagged(items),
                    "category": Jagged(items % 1_000),
                },
                {"age": torch.full((count,), user["age"]), "price": torch.ones(count)},
                labels=torch.zeros(count),
            )
            return self.model.logits(batch).tolist()


class Flat:
    """FAISS's exact search of products."""

    def __init__(self, folder: str, number: int) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        rows = np.load(Path(folder) / "rows.npy")
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        queries = np.random.default_rng(0).normal(size=(number, rows.shape[1]))
        queries = queries.astype(np.float32)
        self.by_name = {
            "flat": lambda number: index.search(queries[number : number + 1], K)
        }


def main() -> None:
    torch.set_num_threads(1)
    open_sides: dict[str, Any] = {}
    kinds: Mapping[str, Any] = {"calls": Calls, "whole": Whole, "flat": Flat}
    # What libraries print must not come between the answers.
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        word, *values = json.loads(line)
        answer: object = None
        if word == "make":
            answer = make(*values)
        elif word == "open":
            open_sides.clear()
            for kind, *arguments in values:
                for name, call in kinds[kind](*arguments).by_name.items():
                    open_sides[name] = call
            answer = sorted(open_sides)
        elif word == "time":
            name, first, calls = values
            seconds = []
            for number in range(first, first + calls):
                start = time.perf_counter()
                open_sides[name](number)
                seconds.append(time.perf_counter() - start)
            answer = seconds
        print(json.dumps(answer), file=out, flush=True)


def torch_server(items: int) -> Any:
    """A plain server of the same network: Starlette, JSON, and torch over stored outputs of the item tower."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    torch.set_num_threads(1)
    model = network(items, "top_nn")
    schema = model.schema()
    nobody = torch.zeros(items, dtype=torch.int64)
    everything = torch.arange(items)

    def batch(user: Mapping[str, Any], count: int) -> Any:
        history = torch.tensor(user["history"], dtype=torch.int64)
        lengths = torch.full((count,), len(history), dtype=torch.int32)
        return schema.assemble(
            {
                "user_id": Jagged(torch.full((count,), user["user_id"])),
                "history": Jagged(history.repeat(count), lengths),
                "item_id": Jagged(everything[:count]),
                "category": Jagged(everything[:count] % 1_000),
            },
            {"age": torch.full((count,), user["age"]), "price": torch.ones(count)},
            labels=nobody[:count].float(),
        )

    with torch.inference_mode():
        nothing = {"user_id": 0, "history": [], "age": 0.0}
        stored = model.embed("item", batch(nothing, items))

    async def recommend(request: Request) -> JSONResponse:
        user = (await request.json())["user"]
        with torch.inference_mode():
            vector = model.embed("user", batch(user, 1))
            logits = model.interaction([vector.expand(items, -1), stored])
            best = logits.topk(K)
        return JSONResponse(
            {"items": best.indices.tolist(), "scores": best.values.tolist()}
        )

    return Starlette(routes=[Route("/v1/recommend", recommend, methods=["POST"])])


def torch_app() -> Any:
    """For uvicorn: the plain server with 4,000 items."""
    return torch_server(4_000)


if __name__ == "__main__":
    main()
