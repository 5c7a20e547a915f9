"""What the service tells of itself: Prometheus metrics summed over the workers, and JSON log lines without a word of its users."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64)
SHARED = (
    "PROMETHEUS_MULTIPROC_DIR"  # where all workers of a service write; read by prometheus_client when it is imported
)


class Metrics:
    """Counted in this process; :meth:`page` sums over all workers where ``PROMETHEUS_MULTIPROC_DIR`` names a folder for them."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        self._registry = own
        self.requests = Counter("serve_requests", "Requests by route and status", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "serve_request_seconds", "From request to answer", ["route"], buckets=_SECONDS, registry=own
        )
        self.batch = Histogram("serve_batch_requests", "Requests answered together", buckets=_SIZES, registry=own)
        self.batch_seconds = Histogram(
            "serve_batch_seconds", "Of a batch in the scorer", buckets=_SECONDS, registry=own
        )
        self.cold = Counter("serve_cold_starts", "Answers to unknown users", registry=own)
        self.swaps = Counter("serve_bundle_loads", "Bundles that were loaded or refused", ["result"], registry=own)
        self.malformed = Counter(
            "serve_malformed_vectors", "Stored vectors that are none of the tower's", ["source"], registry=own
        )
        self.closed = Counter("serve_connections_closed", "Connections closed for a limit", ["why"], registry=own)
        self.waiting = Gauge("serve_queue_requests", "Requests that wait", multiprocess_mode="livesum", registry=own)
        self.memory = Gauge(
            "serve_resident_bytes", "Resident memory by worker", multiprocess_mode="liveall", registry=own
        )

    def page(self) -> bytes:
        """The metrics of all workers in Prometheus' text form."""
        if SHARED not in os.environ:
            return bytes(generate_latest(self._registry))
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return bytes(generate_latest(registry))

    content_type = CONTENT_TYPE_LATEST


def forget_worker(pid: int) -> None:
    """Takes the gauges of a worker that has ended out of the page; its counts stay."""
    multiprocess.mark_process_dead(pid)


class Log:
    """Lines of JSON: ``time`` (UTC), ``event``, ``pid`` and what the event has.

    Never given ids, features, addresses, paths as typed, or messages of errors in which these could stand.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __call__(self, event: str, **values: object) -> None:
        """Writes one line."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e3):03d}Z"
        self._stream.write(json.dumps({"time": stamp, "event": event, "pid": os.getpid(), **values}) + "\n")
        self._stream.flush()


def where(error: BaseException) -> dict[str, object]:
    """The type of an error and the lines it came through, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "at": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-12:]]}


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
