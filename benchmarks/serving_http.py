"""The cost of a recommendation over HTTP: a service with its default flags, asked at a fixed rate even where it lags.

The recipe two_tower is trained on planted data and exported by the commands that a user runs. A request names a user
with all features: the user tower runs live, the whole catalogue is searched by the top NN (--stage exact, the default),
and the best 100 are answered. Requests are sent when they are due, 100 a second, over connections that are kept; a
latency counts from that moment, so that a queue is not hidden. The client shares the machine with the worker. `healthz`
is /healthz of the same service, asked at the same rate: what HTTP alone costs here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import LIMIT_S, ROOT, Options, Row, percentile, row

from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.server.load import ask, http_request

ITEMS, RATE = 4_000, 100.0
P50_MS, P99_MS = 5.0, 20.0


def trained_bundle(run: Path, items: int) -> Path:
    """Trains the recipe two_tower on planted data for two epochs and returns the bundle that its run ends with."""
    settings = [
        "data.name=planted",
        f"data.items={items}",
        "train.epochs=2",
        "train.eval_every=2",
        "export=require",
    ]
    command = [
        sys.executable,
        "-m",
        "torchx_apps.train",
        "--recipe",
        "two_tower",
        "--run-dir",
        str(run),
    ]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return run / "bundle"


@contextmanager
def service(bundle: Path, log: Path, *flags: str) -> Iterator[int]:
    """Starts a service and yields its port when it is ready."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torchx_apps.serve",
                str(bundle),
                "--port=0",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        # the server ends itself after --start seconds
        match = re.search(r":(\d+)/", process.stdout.readline())
        if match is None:
            raise RuntimeError(f"the service did not begin:\n{log.read_text()[-3000:]}")
        yield int(match[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def resident_mib(port: int) -> float:
    """Returns the memory of all workers together."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return (
        sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("serve_resident_bytes{")
        )
        / 2**20
    )


def recommendations(bundle: Bundle, count: int) -> list[bytes]:
    """Returns requests with all features of a user, so that each runs the user tower."""
    assert bundle.users is not None
    random = np.random.default_rng(0)
    rows = random.integers(0, len(bundle.users), count)
    columns = {
        name: values
        for name, values in bundle.users.rows(rows).items()
        if name in bundle.request_columns
    }
    requests = []
    for values in zip(*columns.values(), strict=True):
        user = dict(zip(columns, values, strict=True))
        requests.append(
            http_request(
                "POST",
                "/v1/recommend",
                json.dumps({"user": user, "k": 100, "vector": "live"}),
            )
        )
    return requests


HEALTH = (http_request("GET", "/healthz"),)


def http(options: Options) -> Iterator[Row]:
    """Times answers, counts failures and reads the worker's memory before and after the load."""
    items, seconds = (500, 1.0) if options.quick else (ITEMS, 6.0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = trained_bundle(folder / "run", items)
        requests = recommendations(Bundle.load(bundle), 512)
        plain, loads = [], []
        with service(bundle, folder / "log") as port:
            ask(port, RATE, 2, requests)  # warms up
            before = resident_mib(port)
            for _ in range(options.turns):
                plain.append(ask(port, RATE, seconds / 3, HEALTH))
                loads.append(ask(port, RATE, seconds, requests))
            after = resident_mib(port)
    catalogue = f"two_tower trained on planted data, {items:,} items, default flags"
    for percent, required in ((50, P50_MS), (99, P99_MS)):
        yield row(
            f"http p{percent}",
            [load.percentile(percent) for load in loads],
            "ms",
            required=required,
            machine="cores",
            healthz=round(
                percentile([each for load in plain for each in load.ms], percent), 3
            ),
            service=catalogue,
        )
    failed = sorted({reason for load in loads for reason in load.failed})
    yield row(
        "http failed requests",
        [len(load.failed) for load in loads],
        "requests",
        required=0,
        reasons=failed,
    )
    yield row("http memory", after, "MiB", baseline=before, service=catalogue)
