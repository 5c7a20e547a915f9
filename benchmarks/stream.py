"""From an event to the first answer that knows it: a file a second, rec.train.stream and rec.serve.http.

    python benchmarks/stream.py [--quick]

10,000 events a second of 1 M users and 200,000 items, for ten minutes, after all of them have been seen once. 100
requests a second, and a bundle every 1.5 seconds. Trainer and server have a core each; writer and client share them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
from harness import ROOT, command_line, row
from serving import asked

RATE, REQUESTS, PUBLISH_S, CLIENTS = 10_000, 100, 1.5, 8
# by --quick: users, items, seconds
SIZES = {False: (1_000_000, 200_000, 600), True: (5_000, 1_000, 15)}
_TICK_S, _FILE_S = 0.05, 1.0


def names(count, kind):
    return np.random.default_rng(kind).integers(-(2**62), 2**62, count)


def write_known(folder, users, items):
    """Writes a part in which each user and each item is there once; returns its number of events."""
    count = max(users, items)
    places = np.random.default_rng(3).permutation(count)
    columns = {
        "user_id": names(users, 1)[places % users].tolist(),
        "item_id": names(items, 2)[places % items].tolist(),
        "clicked": (np.random.default_rng(4).random(count) < 0.3).astype(int).tolist(),
    }
    lines = [
        json.dumps({**dict(zip(columns, values, strict=True)), "time": 0.0})
        for values in zip(*columns.values(), strict=True)
    ]
    (folder / "part-0.jsonl").write_text("\n".join(lines) + "\n")
    return count


def write_events(folder, users, items, times, ending):
    """Writes a file of events a second, few of them frequent, and notes when each event happened."""
    random = np.random.default_rng(5)
    user_ids, item_ids = names(users, 1), names(items, 2)
    begin = time.time()
    number = 0
    happened = []
    lines = []
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

    def __init__(self, port, ids, number, ending):
        super().__init__(daemon=True)
        self.ms = []
        self.failed = 0
        self.first = {}
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self._arguments = ids, number, ending

    def run(self):  # noqa: D102  (a thread's)
        ids, number, ending = self._arguments
        begin = time.time()
        while not ending.is_set():
            due = begin + number / REQUESTS
            time.sleep(max(0.0, due - time.time()))
            body = {"user": {"user_id": int(ids[number * 7_919 % len(ids)])}, "k": 10}
            number += CLIENTS
            status, answer = asked(self._connection, body)
            now = time.time()
            self.ms.append((now - due) * 1e3)
            if status == 200:
                self.first.setdefault(json.loads(answer)["bundle"], now)
            else:
                self.failed += 1


def started(stack, words, core, log):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def waits(
    first,
    bundles,
    times,
    known,
):
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


def settings(folder, users, items, quick):
    """Flags of the trainer."""
    words = {
        "data.folder": folder / "log",
        "run_dir": folder / "run",
        "keep": 4,
        "publish-s": PUBLISH_S,
        "data.label": "clicked",
        "data.time": "time",
        "loader.negatives": 0,
        "loader.batch_size": 1000,
        "model.interaction": "dot",
        "checkpoint.steps": 500,
        "data.batch_s": 0.2,
        "model.tower_widths": "64,32",
        "ids.features.user_id.capacity": users + 1,
        "ids.features.item_id.capacity": items + 1,
    }
    if quick:
        # A capture would take longer than the run.
        words["train.compile"] = "off"
    return [f"--{key}={value}" for key, value in words.items()]


def fresh(options):
    users, items, seconds = SIZES[options.quick]
    # As in the server: the thread that writes events must not keep those that ask from
    # noticing their answers.
    sys.setswitchinterval(5e-4)
    cores = sorted(os.sched_getaffinity(0))
    bundles = {}
    times = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log, current = folder / "log", folder / "run" / "bundles" / "current"
        log.mkdir()
        known = write_known(log, users, items)
        words = [
            "torchx_apps.train_stream",
            *settings(folder, users, items, options.quick),
        ]
        trainer = started(stack, words, cores[0], folder / "trainer.txt")
        threading.Thread(target=trainer.stdout.read, daemon=True).start()

        def look():
            """Notes the newest bundle; returns its number of events."""
            if trainer.poll() is not None:
                raise RuntimeError((folder / "trainer.txt").read_text()[-2000:])
            try:
                newest = current.parent / current.read_text().strip() / "manifest.json"
                manifest = json.loads(newest.read_text())
            except (OSError, ValueError):
                return 0
            # As answers name it: by the digest of the content.
            bundles[manifest["digest"]] = manifest["certificate"]["events"]
            return int(manifest["certificate"]["events"])

        while look() < known:
            time.sleep(0.2)
        words = ["torchx_apps.serve", str(current), "--port=0", "--watch=0.1"]
        server = started(
            stack, [*words, "--log=events"], cores[-1], folder / "server.txt"
        )
        match = re.search(r":(\d+)/", server.stdout.readline())
        if match is None:
            raise RuntimeError((folder / "server.txt").read_text()[-2000:])
        ending, port = threading.Event(), int(match[1])
        ids = names(users, 1)
        clients = [Client(port, ids, number, ending) for number in range(CLIENTS)]
        arguments = (log, users, items, times, ending)
        writer = threading.Thread(target=write_events, args=arguments, daemon=True)
        for thread in (writer, *clients):
            thread.start()
        end = time.time() + seconds
        while time.time() < end:
            look()
            time.sleep(0.1)
        ending.set()
        for thread in (writer, *clients):
            thread.join()
    first = {}
    for client in clients:
        for digest, moment in client.first.items():
            first[digest] = min(first.get(digest, moment), moment)
    ms = [value for client in clients for value in client.ms]
    failed = sum(client.failed for client in clients)
    size = f"{users:,} users, {items:,} items"
    for what, values, unit in (
        ("event to answer", waits(first, bundles, times, known), "s"),
        ("answers", ms, "ms"),
    ):
        for percent in (50, 99):
            figure = float(np.percentile(values, percent))
            yield row(f"fresh, {what} p{percent}, {size}", figure, unit)
    yield row(f"fresh, answers that failed, {size}", failed, "answers")


if __name__ == "__main__":
    command_line(__doc__, {"fresh": fresh})
