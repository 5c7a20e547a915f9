"""From an event to the first answer that knows it: a file a second, rec.train.stream and rec.serve.http.

10,000 events a second of 1 M users and 200,000 items, for ten minutes, after all of them have been seen once. 100
requests a second, and a bundle every 1.5 seconds. Trainer and server have a core each; writer and client share them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import ROOT, Options, Row, row
from load import answered, http_request

RATE, REQUESTS, PUBLISH_S = 10_000, 100, 1.5
# by --quick: users, items, seconds
SIZES = {False: (1_000_000, 200_000, 600), True: (5_000, 1_000, 15)}
_TICK_S = 0.05
_FILE_S = 1.0


def names(count: int, kind: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(kind).integers(-(2**62), 2**62, count)


def write_known(folder: Path, users: int, items: int) -> int:
    """Writes a part in which each user and each item is there once; returns its number of events."""
    count = max(users, items)
    places = np.random.default_rng(3).permutation(count)
    columns = {
        "user_id": names(users, 1)[places % users],
        "item_id": names(items, 2)[places % items],
    }
    columns["clicked"] = (np.random.default_rng(4).random(count) < 0.3).astype(
        np.float32
    )
    pq.write_table(
        pa.table({**columns, "time": np.zeros(count)}),
        folder / "part-0.parquet",
        write_page_checksum=True,
    )
    return count


def write_events(
    folder: Path, users: int, items: int, times: list[float], ending: threading.Event
) -> None:
    """Writes a file of events a second, few of them frequent, and notes when each event happened."""
    random = np.random.default_rng(5)
    user_ids, item_ids = names(users, 1), names(items, 2)
    begin = time.time()
    number = 0
    happened: list[float] = []
    lines: list[str] = []
    while not ending.wait(_TICK_S):
        now = time.time()
        count = int((now - begin) * RATE) - len(happened)
        drawn = random.random((3, count)) ** 2
        for user, item, luck in zip(
            *(drawn * [[users], [items], [1]]).tolist(), strict=True
        ):
            event = {
                "user_id": int(user_ids[int(user)]),
                "item_id": int(item_ids[int(item)]),
                "time": now,
            }
            lines.append(json.dumps({**event, "clicked": int(luck < 0.3)}) + "\n")
        happened.extend([now] * count)
        if now - begin >= (number + 1) * _FILE_S:
            number += 1
            (folder / "_part.jsonl").write_text("".join(lines))
            (folder / "_part.jsonl").rename(folder / f"part-{number}.jsonl")
            lines.clear()
            times.extend(happened[len(times) :])


class Client(threading.Thread):
    """Asks at a rate, over one connection for each of several threads; notes the first answer of each bundle."""

    def __init__(
        self, port: int, users: int, number: int, of: int, ending: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.ms: list[float] = []
        self.failed: list[str] = []
        self.first: dict[str, float] = {}
        self._arguments = port, names(users, 1), number, of, ending

    def run(self) -> None:  # noqa: D102  (a thread's)
        port, users, number, of, ending = self._arguments
        begin = time.time()
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        while not ending.is_set():
            due = begin + number / REQUESTS
            time.sleep(max(0.0, due - time.time()))
            user = int(users[number * 7_919 % len(users)])
            number += of
            try:
                body = json.dumps({"user": {"user_id": user}, "k": 10})
                connection.sendall(http_request("POST", "/v1/recommend", body))
                status, answer = answered(connection)
                now = time.time()
                self.ms.append((now - due) * 1e3)
                if status == b"200":
                    self.first.setdefault(json.loads(answer)["bundle"], now)
                else:
                    self.failed.append(status.decode())
            except OSError as error:
                self.failed.append(type(error).__name__)
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)


def started(
    stack: ExitStack, arguments: list[str], core: int, log: Path
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["taskset", "-c", str(core), sys.executable, "-m", *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def waits(
    first: Mapping[str, float],
    bundles: Mapping[str, int],
    times: list[float],
    known: int,
) -> list[float]:
    """Returns the seconds from the oldest event that only a bundle and later ones know to an answer of one of them."""
    seconds = []
    events = sorted(
        (count, digest) for digest, count in bundles.items() if count > known
    )
    for place, (_, _) in enumerate(events[:-1]):
        before = max(events[place][0] - known, 0)
        answers = [
            first[digest] for _, digest in events[place + 1 :] if digest in first
        ]
        if answers and before < len(times):
            seconds.append(min(answers) - times[before])
    return seconds


def fresh(options: Options) -> Iterator[Row]:
    users, items, seconds = SIZES[options.quick]
    if os.environ.get("FRESH_S"):
        seconds = int(os.environ["FRESH_S"])
    # As in the server: the thread that writes events must not keep those that ask from
    # noticing their answers.
    sys.setswitchinterval(5e-4)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log, current = folder / "log", folder / "run" / "bundles" / "current"
        log.mkdir()
        known = write_known(log, users, items)
        sets = [
            "data.label=clicked",
            "data.time=time",
            "loader.negatives=0",
            "loader.batch_size=1000",
        ]
        sets += [
            "model.interaction=dot",
            "checkpoint.steps=500",
            "data.batch_s=0.2",
            "model.tower_widths=64,32",
        ]
        if options.quick:
            # A capture would take longer than the run.
            sets.append("train.compile=off")
        arguments = [
            "torchx_apps.train_stream",
            f"--data.folder={log}",
            f"--run_dir={folder / 'run'}",
            "--keep=4",
        ]
        arguments += [f"--publish-s={PUBLISH_S}", *(f"--{text}" for text in sets)]
        arguments += [
            f"--ids.features.user_id.capacity={users + 1}",
            f"--ids.features.item_id.capacity={items + 1}",
        ]
        trainer = started(stack, arguments, cores[0], folder / "trainer.txt")
        threading.Thread(
            target=lambda: trainer.stdout and trainer.stdout.read(), daemon=True
        ).start()
        bundles: dict[str, int] = {}

        def look() -> int:
            """Notes the newest bundle; returns its number of events."""
            try:
                manifest = json.loads(
                    (
                        current.parent / current.read_text().strip() / "manifest.json"
                    ).read_text()
                )
            except (OSError, ValueError):
                return 0
            # As answers name it: by the digest of the content.
            bundles[manifest["digest"]] = manifest["certificate"]["events"]
            return int(manifest["certificate"]["events"])

        while look() < known:
            assert trainer.poll() is None, (folder / "trainer.txt").read_text()[-2000:]
            time.sleep(0.2)
        server_flags = [
            "torchx_apps.serve",
            str(current),
            "--port=0",
            "--watch=0.1",
            "--log=events",
        ]
        server = started(stack, server_flags, cores[-1], folder / "server.txt")
        assert server.stdout is not None
        match = re.search(r":(\d+)/", server.stdout.readline())
        assert match, (folder / "server.txt").read_text()[-2000:]
        ending = threading.Event()
        times: list[float] = []
        clients = [
            Client(int(match[1]), users, number, 8, ending) for number in range(8)
        ]
        writer = threading.Thread(
            target=write_events, args=(log, users, items, times, ending), daemon=True
        )
        for thread in (writer, *clients):
            thread.start()
        end = time.time() + seconds
        while time.time() < end:
            assert trainer.poll() is None, (folder / "trainer.txt").read_text()[-2000:]
            look()
            time.sleep(0.1)
        ending.set()
        for thread in (writer, *clients):
            thread.join()
        trained = max(bundles.values()) - known
    first: dict[str, float] = {}
    for client in clients:
        for digest, moment in client.first.items():
            first[digest] = min(first.get(digest, moment), moment)
    oldest = waits(first, bundles, times, known)
    ms = sorted(value for client in clients for value in client.ms)
    failed = [text for client in clients for text in client.failed]
    size = f"{users:,} users, {items:,} items"
    more = {
        "events": trained,
        "written": len(times),
        "seconds": seconds,
        "bundles": len(first),
    }
    yield row(
        f"fresh, event to answer p50, {size}",
        float(np.percentile(oldest, 50)),
        "s",
        **more,
    )
    yield row(
        f"fresh, event to answer p99, {size}",
        float(np.percentile(oldest, 99)),
        "s",
        required=5.0,
    )
    yield row(
        f"fresh, answers p50, {size}",
        float(np.percentile(ms, 50)),
        "ms",
        answers=len(ms),
    )
    yield row(
        f"fresh, answers p99, {size}", float(np.percentile(ms, 99)), "ms", required=20.0
    )
    yield row(
        f"fresh, answers that failed, {size}",
        len(failed),
        "answers",
        required=0,
        reasons=sorted(set(failed)),
    )
