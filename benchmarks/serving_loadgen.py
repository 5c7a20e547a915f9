"""The HTTP service under MLPerf's LoadGen, scenario Server: requests at random times, a bound on the 99th percentile.

A study, which runs where --only names it and mlcommons-loadgen is installed (pip install mlcommons-loadgen). Service
and requests are those of serving_http.py. LoadGen draws the times of a Poisson process, measures each request from its
time, and calls the run VALID if the percentile, the duration and the number of requests are reached, and its own test
for early stopping holds. LOADGEN_MS sets the bound. The numbers of its summary are in the row.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Options, Row, row
from serving_http import ITEMS, RATE, recommendations, service, trained_bundle

from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.server.load import CONNECTIONS, answered

BOUND_MS = float(os.environ.get("LOADGEN_MS", "30"))
SECONDS = 60.0
SHOWN = (
    "Scenario",
    "Result is",
    "Scheduled samples per second",
    "Completed samples per second",
    "50.00",
    "99.00",
)


class Clients:
    """Threads that send LoadGen's requests, each over a connection of its own."""

    def __init__(self, loadgen: Any, port: int, requests: Sequence[bytes]) -> None:
        self._loadgen = loadgen
        self._port = port
        self._requests = requests
        self._samples: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failed = 0
        for _ in range(CONNECTIONS):
            threading.Thread(target=self._send, daemon=True).start()

    def issue(self, samples: Sequence[Any]) -> None:
        """Called by LoadGen when requests are due."""
        for sample in samples:
            self._samples.put((sample.id, sample.index))

    def _send(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        while True:
            number, index = self._samples.get()
            connection.sendall(self._requests[index])
            status, _ = answered(connection)
            self.failed += status != b"200"
            self._loadgen.QuerySamplesComplete(
                [self._loadgen.QuerySampleResponse(number, 0, 0)]
            )


def summary(
    port: int, requests: Sequence[bytes], seconds: float, folder: Path
) -> tuple[dict[str, str], int]:
    """Runs LoadGen; returns its summary by name, and the number of requests that failed."""
    import mlperf_loadgen as loadgen

    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = RATE
    settings.server_target_latency_ns = int(BOUND_MS * 1e6)
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms = int(seconds * 1e3)
    settings.min_query_count = int(seconds * RATE)
    output = loadgen.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    log = loadgen.LogSettings()
    log.log_output = output
    log.enable_trace = False
    clients = Clients(loadgen, port, requests)
    sut = loadgen.ConstructSUT(clients.issue, lambda: None)
    samples = loadgen.ConstructQSL(
        len(requests), len(requests), lambda _: None, lambda _: None
    )
    loadgen.StartTestWithLogSettings(sut, samples, settings, log)
    loadgen.DestroyQSL(samples)
    loadgen.DestroySUT(sut)
    text = (folder / "mlperf_log_summary.txt").read_text()
    return dict(
        re.findall(r"^\s*(\S.*?)\s*: (.*?)\s*$", text, re.MULTILINE)
    ), clients.failed


def loadgen(options: Options) -> Iterator[Row]:
    """Runs the scenario once, for a minute."""
    seconds = 3.0 if options.quick else SECONDS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = trained_bundle(folder / "run", 500 if options.quick else ITEMS)
        requests = recommendations(Bundle.load(bundle), 512)
        with service(bundle, folder / "log") as port:
            found, failed = summary(port, requests, seconds, folder)
    shown = {name: value for name, value in found.items() if name.startswith(SHOWN)}
    valid = found.get("Result is") == "VALID" and not failed
    name = f"loadgen, scenario Server, {RATE:g} a second, p99 within {BOUND_MS:g} ms"
    yield row(
        name, float(valid), "valid", better="more", required=1, failed=failed, **shown
    )
