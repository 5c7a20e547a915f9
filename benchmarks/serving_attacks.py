"""A server at 100 requests a second under attack: p99 and failures before, during and after each attack.

A study of about three minutes, which runs where --only names it. One worker serves an untrained bundle with --stage dot
and takes requests over connections that are kept; beside them somebody new connects and asks five times a second.
Meanwhile: a header of 100 MiB, again and again; 1,500 sockets that say nothing, where the server begins with the usual
limit of 1,024 files; and a bundle whose towers have other widths, which `--stage dot` cannot serve. At the end a good
bundle is pointed to. No attacker bears the token; all of them share the machine with the server. The baseline of each
p99 is that before.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from harness import Options, Row, row
from serving_http import RATE, recommendations, service
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.server.load import Load, ask, one_after_the_other

TOKEN = "the token of this benchmark"
HEADER_MIB, SOCKETS, FILES = 100, 1_500, 1_024
NEW_A_SECOND = 5
ITEMS, USERS, HISTORY, WIDTH = 100_000, 10_000, 20, 64
Attack = Callable[[int, threading.Event], None]


def make_bundle(folder: Path, seed: int, user_width: int = WIDTH) -> None:
    """Exports an untrained two-tower model with a top NN: what it answers is of no matter here."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)

    def table(name: str, rows: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=32,
            pooling=PoolingType.MEAN,
        )

    device = torch.device("cpu")
    user = Tower(
        [table("user_id", USERS + 1), table("history", ITEMS + 1)],
        (128, user_width),
        dense=["age"],
        device=device,
    )
    item = Tower(
        [table("item_id", ITEMS + 1), table("genre", 20)], (128, WIDTH), device=device
    )
    model = TowerModel(
        {"user": user, "item": item},
        interaction_layer("top_nn", [user_width, WIDTH], (64,)),
    )
    # As far apart as trained ones; TorchRec begins with +-1 / sqrt(rows), all but
    # alike.
    for tower in model.towers.values():
        for weight in tower.embeddings.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    items, users = np.arange(1, ITEMS + 1), np.arange(1, USERS + 1)
    lists = pa.array(
        random.integers(1, ITEMS, (USERS, HISTORY)).tolist(), type=pa.list_(pa.int64())
    )
    seen = pa.array(
        random.integers(0, ITEMS, (USERS, HISTORY)).tolist(), type=pa.list_(pa.int64())
    )
    features = pa.table(
        {
            "user_id": users,
            "history": lists,
            "age": random.random(USERS).astype(np.float32),
        }
    )
    unknown = {"user_id": 0, "history": [], "age": 0.0}
    export(
        model.eval(),
        folder,
        catalogue=Catalogue(
            ids=items, features=pa.table({"item_id": items, "genre": items % 20})
        ),
        users=NamedUsers(
            key="user_id",
            ids=users,
            features=features,
            unknown=unknown,
            seen=seen,
            liked=seen,
        ),
    )


def long_header(port: int, ending: threading.Event) -> None:
    """One after the other, until told to end."""
    piece = b"a" * 2**20
    while not ending.is_set():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=120) as attacker,
        ):
            attacker.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ")
            for _ in range(HEADER_MIB):
                attacker.sendall(piece)
            attacker.recv(2**16)
        ending.wait(0.1)


def silent_sockets(port: int, ending: threading.Event) -> None:
    """All at once, held until told to end."""
    with contextlib.ExitStack() as held:
        sockets = []
        for _ in range(SOCKETS):
            with contextlib.suppress(OSError):
                sockets.append(
                    held.enter_context(
                        socket.create_connection(("127.0.0.1", port), timeout=5)
                    )
                )
        ending.wait()
        print(
            f"of {len(sockets)} silent sockets {sum(map(is_open, sockets))} are open after all that time"
        )


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return bool(one.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def measured(
    port: int,
    asked: list[bytes],
    seconds: float,
    rate: float,
    attack: Attack | None = None,
) -> tuple[Load, Load]:
    """The load over connections that are kept, and that of newcomers, of which each opens one of its own."""
    ending, newcomers = threading.Event(), Load()
    bearing = f"Authorization: Bearer {TOKEN}\r\nContent-Type".encode()
    requests = [request.replace(b"Content-Type", bearing) for request in asked]
    start = time.perf_counter()
    due = [
        (start + number / NEW_A_SECOND, request)
        for number, request in enumerate(requests[: int(NEW_A_SECOND * seconds)])
    ]
    threads = [
        threading.Thread(
            target=lambda: [
                one_after_the_other(port, [each], newcomers) for each in due
            ]
        )
    ]
    threads += (
        [] if attack is None else [threading.Thread(target=attack, args=(port, ending))]
    )
    for thread in threads:
        thread.start()
    load = ask(port, rate, seconds, requests)
    threads[0].join()
    ending.set()
    for thread in threads:
        thread.join()
    return load, newcomers


def point(pointer: Path, bundle: Path) -> None:
    fresh = pointer.with_name("fresh")
    fresh.symlink_to(bundle)
    os.replace(fresh, pointer)


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as page:
        return str(json.load(page)["bundle"])


def attacks(options: Options) -> Iterator[Row]:
    """Measures p99 and failures before, during and after each attack."""
    seconds = 3.0 if options.quick else 15.0
    torch.set_num_threads(1)
    os.environ["TORCHREC_EXT_TOKEN"] = TOKEN
    # for the server
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundles = {"bundle-0": WIDTH, "bundle-1": WIDTH, "bundle-uneven": WIDTH // 2}
        for seed, (name, width) in enumerate(bundles.items()):
            make_bundle(folder / name, seed, width)
        good, other, uneven = (folder / name for name in bundles)
        pointer, log = folder / "live", folder / "log"
        pointer.symlink_to(good)
        asked = recommendations(Bundle.load(good), 512)
        with service(pointer, log, "--stage=dot", "--log=events") as port:
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (SOCKETS + FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            )
            first = served(port)

            def swap(port: int, ending: threading.Event) -> None:
                point(pointer, uneven)

            measured(port, asked, 3, RATE)  # warms up
            phases: dict[str, Attack | None] = {
                "before": None,
                f"header of {HEADER_MIB} MiB": long_header,
                f"{SOCKETS:,} silent sockets": silent_sockets,
                "bundle of other widths": swap,
                "after": None,
            }
            before = 0.0
            for name, attack in phases.items():
                load, newcomers = measured(port, asked, seconds, RATE, attack)
                before = before or load.percentile(99)
                yield row(f"{name}, p99", load.percentile(99), "ms", baseline=before)
                count = int(RATE * seconds)
                yield row(
                    f"{name}, failures of {count}",
                    len(load.failed),
                    "requests",
                    required=0,
                )
                count = int(NEW_A_SECOND * seconds)
                yield row(
                    f"{name}, failures of {count} newcomers",
                    len(newcomers.failed),
                    "requests",
                )
            point(pointer, other)
            end = time.monotonic() + 30
            while served(port) == first and time.monotonic() < end:
                time.sleep(0.1)
            afterwards = float(served(port) != first)
        refused = [
            json.loads(line)["why"]
            for line in log.read_text().splitlines()
            if '"bundle_refused"' in line
        ]
    yield row(
        "a good bundle is served afterwards",
        afterwards,
        "of 1",
        better="more",
        required=1,
        refused=refused,
    )
