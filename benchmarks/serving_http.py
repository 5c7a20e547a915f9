"""The cost of a recommendation over HTTP: a service in its own processes, asked at a fixed rate even where it lags.

    python benchmarks/serving_http.py                            # 20 seconds
    python benchmarks/serving_http.py --minutes 10 --swaps 10    # and swaps of bundles meanwhile

A request names a user with features of its own: the user tower runs live, the index hands 100 of 100,000 items to the
top NN, and these are ranked. Requests are sent when they are due, 100 a second, over connections that are kept; a
latency counts from that moment, so that a queue is not hidden. The client shares the machine with the workers. The
baseline is /healthz of the same service, asked at the same rate: what HTTP alone costs here. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from serving_rows import Options, Row
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export

ITEMS, USERS, HISTORY, WIDTH = 100_000, 10_000, 20, 64
CONNECTIONS = 16
P50_MS, P99_MS = 5.0, 20.0
_BYTES = 2**16


def make_bundle(folder: Path, seed: int, user_width: int = WIDTH) -> None:
    """A two-tower model with a top NN over ITEMS items, untrained: what it answers is of no matter here."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)

    def table(name: str, rows: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=32, pooling=PoolingType.MEAN
        )

    device = torch.device("cpu")
    user = Tower(
        [table("user_id", USERS + 1), table("history", ITEMS + 1)], (128, user_width), dense=["age"], device=device
    )
    item = Tower([table("item_id", ITEMS + 1), table("genre", 20)], (128, WIDTH), device=device)
    model = TowerModel({"user": user, "item": item}, interaction_layer("top_nn", [user_width, WIDTH], (64,)))
    for (
        tower
    ) in model.towers.values():  # as far apart as trained ones; TorchRec begins with +-1 / sqrt(rows), all but alike
        for weight in tower.embeddings.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    items, users = np.arange(1, ITEMS + 1), np.arange(1, USERS + 1)
    lists = pa.array(random.integers(1, ITEMS, (USERS, HISTORY)).tolist(), type=pa.list_(pa.int64()))
    seen = pa.array(random.integers(0, ITEMS, (USERS, HISTORY)).tolist(), type=pa.list_(pa.int64()))
    features = pa.table({"user_id": users, "history": lists, "age": random.random(USERS).astype(np.float32)})
    unknown = {"user_id": 0, "history": [], "age": 0.0}
    export(
        model.eval(),
        folder,
        catalogue=Catalogue(ids=items, features=pa.table({"item_id": items, "genre": items % 20})),
        users=NamedUsers(key="user_id", ids=users, features=features, unknown=unknown, seen=seen, liked=seen),
    )


@contextmanager
def service(pointer: Path, workers: int, log: Path) -> Iterator[int]:
    """The port of a service that is ready."""
    flags = [str(pointer), f"--workers={workers}", "--port=0", "--stage=dot", "--log=events"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchx_apps.serve", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    found = re.search(r":(\d+)/", process.stdout.readline())
    if found is None:
        sys.exit(log.read_text())
    try:
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@dataclass
class Load:
    """What came of the requests of one run: milliseconds of each, and what failed."""

    ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return round(float(np.percentile(self.ms, share)), 3)


def ask(port: int, rate: float, seconds: float, requests: list[bytes]) -> Load:
    """Sends requests when they are due, each thread every CONNECTIONS-th of them over a connection of its own.

    Threads that block wake some 0.1 ms after their time; timers of asyncio are whole milliseconds, and its client took
    1.2 ms of a request here, which is no part of the service.
    """
    load, start = Load(), time.perf_counter() + 0.1
    due = [(start + place / rate, requests[place % len(requests)]) for place in range(int(rate * seconds))]
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(lambda thread: one_after_the_other(port, due[thread::CONNECTIONS], load), range(CONNECTIONS)))
    return load


def one_after_the_other(port: int, requests: list[tuple[float, bytes]], load: Load) -> None:
    """Over one connection; where it is lost the request has failed, and the next opens another."""
    connection: socket.socket | None = None
    for due, request in requests:
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            connection = connection or socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(request)
            status = answered(connection)
            load.ms.append((time.perf_counter() - due) * 1e3)
            if status != b"200":
                load.failed.append(status.decode())
        except OSError as error:
            load.failed.append(type(error).__name__)
            connection = None


def answered(connection: socket.socket) -> bytes:
    """The status of an answer, when all of it has come."""
    found = more(connection)
    while b"\r\n\r\n" not in found:
        found += more(connection)
    head, _, body = found.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    left = (int(length[1]) if length else 0) - len(body)
    while left > 0:
        left -= len(more(connection))
    return head.split(b" ", 2)[1]


def more(connection: socket.socket) -> bytes:
    found = connection.recv(_BYTES)
    if not found:
        raise ConnectionResetError("closed within an answer")
    return found


def recommendations(count: int) -> list[bytes]:
    """Requests with features of their own, so that each runs the user tower."""
    random = np.random.default_rng(0)
    found = []
    for user in random.integers(1, USERS, count).tolist():
        features = {
            "user_id": user,
            "age": round(random.random(), 3),
            "history": random.integers(1, ITEMS, HISTORY).tolist(),
        }
        body = json.dumps({"user": features, "k": 100, "retrieve": 100, "vector": "live"}).encode()
        head = "POST /v1/recommend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        found.append(f"{head}\r\n\r\n".encode() + body)
    return found


def resident_mib(port: int) -> float:
    """Of all workers together."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("serve_resident_bytes{")) / 2**20


def swapped(pointer: Path, bundles: list[Path], count: int, seconds: float) -> None:
    """Points at the other bundle ``count`` times, evenly over ``seconds``."""
    for place in range(count):
        time.sleep(seconds / (count + 1))
        fresh = pointer.with_name("fresh")
        fresh.symlink_to(bundles[(place + 1) % len(bundles)])
        os.replace(fresh, pointer)


def measured(
    port: int, options: argparse.Namespace, pointer: Path, bundles: list[Path]
) -> tuple[Load, Load, list[float]]:
    health = [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    requests, seconds = recommendations(512), options.minutes * 60
    ask(port, options.rate, 3, requests)  # warms up
    plain = ask(port, options.rate, min(10, seconds), health)
    memory = [resident_mib(port)]
    swapping = threading.Thread(target=swapped, args=(pointer, bundles, options.swaps, seconds))
    swapping.start()
    load = Load()
    pieces = max(1, round(options.minutes))
    for _ in range(pieces):
        piece = ask(port, options.rate, seconds / pieces, requests)
        load.ms += piece.ms
        load.failed += piece.failed
        memory.append(resident_mib(port))
    swapping.join()
    return plain, load, memory


def row(name: str, ours: float, unit: str, *, baseline: float | None = None, required: float | None = None) -> Row:
    ratio = None if required is None or not ours else round(required / ours, 2)
    return {
        "name": name,
        "baseline": baseline,
        "ours": ours,
        "unit": unit,
        "ratio": ratio,
        "required": required,
        "ceiling": None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1 / 3)
    parser.add_argument("--swaps", type=int, default=0)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keeps the bundles there, and takes them from there the next time")
    return parser


def http(asked: Options) -> Iterator[Row]:
    """The rows as benchmarks/serving.py asks for them."""
    yield from figures(_parser().parse_args(["--minutes", "0.05"] if asked.quick else []))


def main() -> None:
    rows = figures(_parser().parse_args())
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "torchrec", "starlette", "uvicorn", "torchrec-ext")
    }
    print(
        json.dumps(
            {"benchmark": "serving_http", "versions": versions, "cores": len(os.sched_getaffinity(0)), "rows": rows}
        )
    )


def figures(options: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        bundles = [folder / f"bundle-{seed}" for seed in range(2 if options.swaps else 1)]
        for seed, path in enumerate(bundles):
            if not path.exists():
                make_bundle(path, seed)
        pointer = Path(temporary) / "live"
        pointer.symlink_to(bundles[0].absolute())
        log = Path(temporary) / "log"
        with service(pointer, options.workers, log) as port:
            plain, load, memory = measured(port, options, pointer, [path.absolute() for path in bundles])
        loads = [json.loads(line) for line in log.read_text().splitlines() if '"bundle_' in line]
    print(
        f"{len(load.ms)} answers, {len(load.failed)} failures {sorted(set(load.failed))}; bundles loaded: {len(loads)} "
        "(by worker)"
    )
    print(
        f"resident memory of all workers, MiB: {', '.join(f'{value:.0f}' for value in memory)}; load "
        f"{os.getloadavg()[0]:.1f}"
    )
    cores = len(os.sched_getaffinity(0))
    if os.getloadavg()[0] > cores + 1:
        print(
            f"others use this machine: a load of {os.getloadavg()[0]:.1f} on {cores} cores says nothing of these "
            "latencies"
        )
    return [
        row("http p50", load.percentile(50), "ms", baseline=plain.percentile(50), required=P50_MS),
        row("http p99", load.percentile(99), "ms", baseline=plain.percentile(99), required=P99_MS),
        row("http failed requests", len(load.failed), "requests", required=0),
        row("http memory", round(memory[-1], 1), "MiB", baseline=round(memory[0], 1)),
    ]


if __name__ == "__main__":
    main()
