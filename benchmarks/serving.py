"""Serving: scores, searches and the HTTP service, on one thread.

    python benchmarks/serving.py [--only ROW ...] [--turns 3] [--quick]

Towers 128-64 over item, category and price, and over user, history and age, under a top network. `score ...`: from a
request's values to a list of scores, against the whole network in torch on a batch with the user beside each item.
`exact search ...`: the 100 greatest products of a million rows of 64, against FAISS's flat index, and under a filter.
`top NN over all`: the 100 best by the top network over a whole catalogue. `http ...`: 100 of 4,000 items from all
features of a user, 100 requests a second over one connection, against a plain server of Starlette and torch over stored
outputs of the item tower, and the seconds until the service answers.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from harness import ROOT, command_line, in_turn, milliseconds, row
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers
from torchrec_ext.retrieval.export import export
from torchrec_ext.retrieval.scorer import Scorer, ScoreRequest
from torchrec_ext.retrieval.search import open_search
from torchrec_ext.schema import Jagged

WIDTH, HISTORY, USERS, K = 64, 20, 100_000, 100
RATE = 100.0
ONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def network(items, interaction):
    """Makes towers 128-64 over item, category and price, and over user, history and age."""

    def table(name, rows, **options):
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


def questions(items, number):
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


def make(folder, items, interaction):
    """Exports a bundle with 512 users, and an attribute with a value that one item in a hundred has."""
    ids = np.arange(items)
    rows = {"item_id": ids, "category": ids % 1_000, "price": np.ones(items, "f4")}
    draws = np.random.default_rng(0).random(items) < 0.01
    values = [["rare"] if rare else [] for rare in draws.tolist()]
    types = {
        "user_id": pa.int64(),
        "history": pa.list_(pa.int64()),
        "age": pa.float32(),
    }
    users = pa.Table.from_pylist(questions(items, 512)).cast(pa.schema(types))
    attributes = pa.table({"share": values})
    export(
        network(items, interaction),
        folder,
        catalogue=Catalogue(ids=ids, features=pa.table(rows), attributes=attributes),
        users=NamedUsers(
            key="user",
            ids=np.arange(512),
            features=users,
            unknown={"user_id": 0, "history": [], "age": 0.0},
        ),
    )
    return Bundle.load(folder)


class Whole:
    """The network in torch, asked for a user's features beside those of each item."""

    def __init__(self, items):
        self.model = network(items, "top_nn")
        self._schema = self.model.schema()

    def batch(self, user, items):
        """Returns a batch with the user beside each item."""
        ids, count = torch.tensor(items), len(items)
        history = torch.tensor(user["history"], dtype=torch.int64)
        lengths = torch.full((count,), len(history), dtype=torch.int32)
        columns = {
            "user_id": Jagged(torch.full((count,), user["user_id"])),
            "history": Jagged(history.repeat(count), lengths),
            "item_id": Jagged(ids),
            "category": Jagged(ids % 1_000),
        }
        dense = {"age": torch.full((count,), user["age"]), "price": torch.ones(count)}
        return self._schema.assemble(columns, dense, labels=torch.zeros(count))

    def score(self, user, items):
        """From a request's values to a list of scores."""
        with torch.inference_mode():
            return self.model.logits(self.batch(user, items)).tolist()


def times_of(sides, turns, calls):
    """Milliseconds of a call of each side by turn; no call of a side repeats another."""
    asked = {}
    for name, call in sides.items():
        numbers = itertools.count()
        asked[name] = functools.partial(lambda c, n: c(next(n)), call, numbers)
    times = in_turn(asked, turns, calls)
    return {name: milliseconds(seconds) for name, seconds in times.items()}


def scores(options):
    """500 of a million items, and 1,000 of 1,000, from a request's values to a list of scores."""
    sizes = [(20_000, 500)] if options.quick else [(1_000_000, 500), (1_000, 1_000)]
    for items, count in sizes:
        yield scored(items, count, options.turns)


def scored(items, count, turns):
    calls, random = 100, np.random.default_rng(1)
    number = (turns + 1) * calls
    users = questions(items, number)
    chosen = [random.permutation(items)[:count].tolist() for _ in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        scorer, whole = Scorer(make(Path(folder), items, "top_nn")), Whole(items)

        def ours(each):
            request = ScoreRequest(user=users[each], items=chosen[each])
            return scorer.score(request).scores

        def theirs(each):
            return whole.score(users[each], chosen[each])

        times = times_of({"ours": ours, "whole": theirs}, turns, calls)
    name = f"score {count:,} of {items:,}, against the whole network"
    return row(name, times["ours"], "ms", baseline=times["whole"])


def search(options):
    """Exact search by products, with and without a filter; and by a top network over a whole catalogue."""
    fewer = 50 if options.quick else 1
    items = 1_000_000 // fewer
    times = searched(items, "dot", options.turns)
    ours, name = times.pop("ours"), f"exact search, 100 of {items:,} x 64"
    if baseline := times.pop("FAISS flat", None):
        yield row(f"{name}, against FAISS flat", ours, "ms", baseline=baseline)
    for side, filtered in times.items():
        yield row(f"{name}, {side}, against none", filtered, "ms", baseline=ours)
    items = 100_000 // fewer
    ours = searched(items, "top_nn", options.turns)["ours"]
    yield row(f"top NN over all of {items:,} x 64", ours, "ms")


def searched(items, interaction, turns):
    """Milliseconds of the 100 best of all items, and of the sides beside it."""
    calls = 20
    number = (turns + 1) * calls
    with tempfile.TemporaryDirectory() as folder:
        bundle = make(Path(folder), items, interaction)
        queries = bundle.query.embed(questions(items, number))
        opened, attribute = open_search(bundle), bundle.items.attributes["share"]
        sides = {"ours": lambda each: opened.search(queries[each], K)}
        if interaction == "dot":
            sides["filter of 1.00%"] = lambda each: opened.search(
                queries[each], K, attribute.mask(["rare"])
            )
        if interaction == "dot" and find_spec("faiss"):
            sides["FAISS flat"] = flat(np.load(Path(folder) / "rows.npy"), number)
        return times_of(sides, turns, calls)


def flat(rows, number):
    """FAISS's exact search of products."""
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    random = np.random.default_rng(0)
    queries = random.normal(size=(number, rows.shape[1])).astype(np.float32)
    return lambda each: index.search(queries[each : each + 1], K)


def torch_app(items):
    """A plain server of the same network: Starlette, JSON, and torch over stored outputs of the item tower."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    torch.set_num_threads(1)
    whole = Whole(items)
    with torch.inference_mode():
        nothing = {"user_id": 0, "history": [], "age": 0.0}
        stored = whole.model.embed("item", whole.batch(nothing, range(items)))

    async def recommend(request):
        user = (await request.json())["user"]
        with torch.inference_mode():
            vector = whole.model.embed("user", whole.batch(user, [0]))
            logits = whole.model.interaction([vector.expand(items, -1), stored])
            best = logits.topk(K)
        answer = {"items": best.indices.tolist(), "scores": best.values.tolist()}
        return JSONResponse(answer)

    return Starlette(routes=[Route("/v1/recommend", recommend, methods=["POST"])])


PLAIN = """import socket, sys, uvicorn
import serving
app = serving.torch_app(int(sys.argv[1]))
made = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{made.getsockname()[1]}/", flush=True)
config = uvicorn.Config(app, log_level="warning", access_log=False)
uvicorn.Server(config).run(sockets=[made])
"""


@contextmanager
def service(*command, log):
    """Starts a service; yields its port and the seconds until it answered."""
    start = time.perf_counter()
    path = f"{ROOT}:{ROOT / 'benchmarks'}"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=log.parent,
            env={**os.environ, **ONE, "PYTHONPATH": path},
        )
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)/", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"the service did not begin:\n{log.read_text()[-2000:]}")
        yield int(found[1]), time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def asked(connection, body):
    """Returns the status and the body of an answer to a POST."""
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/recommend", json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def ask(port, seconds, bodies):
    """Sends requests when they are due; returns milliseconds of each from that moment."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    start, ms = time.perf_counter() + 0.1, []
    for number in range(int(RATE * seconds)):
        due = start + number / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        status, _ = asked(connection, bodies[number % len(bodies)])
        ms.append((time.perf_counter() - due) * 1e3)
        if status != 200:
            raise RuntimeError(f"the service answered {status}")
    connection.close()
    return ms


def http(options):
    """100 of 4,000 items by a top NN from all features of a user, 100 requests a second; ready after; memory."""
    items, seconds = 4_000, 1.0 if options.quick else 6.0
    bodies = [{"user": user, "k": K} for user in questions(items, 512)]
    loads = {"ours": [], "torch": []}
    ready = []
    with tempfile.TemporaryDirectory() as folder:
        bundle, log = Path(folder) / "bundle", Path(folder) / "log"
        make(bundle, items, "top_nn")
        app = ("-m", "torchx_apps.serve", bundle, "--port=0", "--log=events")
        commands = {"ours": app, "torch": ("-c", PLAIN, items)}
        for turn in range(-1, options.turns):
            for name, command in commands.items():
                with service(*command, log=log) as (port, took):
                    ask(port, 1, bodies)  # warms up
                    if turn < 0:
                        continue
                    loads[name].append(ask(port, seconds, bodies))
                    if name == "ours":
                        ready.append(took)
    for percent in (50, 99):
        ours, theirs = (
            [float(np.percentile(ms, percent)) for ms in of_side]
            for of_side in loads.values()
        )
        name = f"http p{percent}, against a torch server"
        yield row(name, ours, "ms", baseline=theirs)
    yield row("http ready after", ready, "s")


if __name__ == "__main__":
    if any(os.environ.get(name) != "1" for name in ONE):
        # Libraries read them when they are imported.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE})
    torch.set_num_threads(1)
    packages = "numpy onnxruntime uvicorn"
    rows = {"scores": scores, "search": search, "http": http}
    command_line(__doc__, rows, packages=packages)
