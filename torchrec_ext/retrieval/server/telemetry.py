"""Telemetry of the server: Prometheus metrics summed over workers, and JSON log lines without data of users."""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import datetime, timezone
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

_SECONDS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)


class Metrics:
    """Metrics of this process, in the folder of all workers' that ``PROMETHEUS_MULTIPROC_DIR`` names."""

    def __init__(self) -> None:
        # Each process writes its figures into files, which page() sums up.
        counter = partial(Counter, registry=None)
        self.requests = counter(
            "serve_requests", "Requests by route and status", ["route", "status"]
        )
        self.seconds = Histogram(
            "serve_request_seconds",
            "From request to answer",
            ["route"],
            buckets=_SECONDS,
            registry=None,
        )
        self.cold = counter("serve_cold_starts", "Answers to unknown users")
        self.vectors = counter(
            "serve_user_vectors", "Answers by where the user's vector is from", ["from"]
        )
        self.swaps = counter(
            "serve_bundle_loads", "Bundles that were loaded or refused", ["result"]
        )
        # There from the start, so that an alarm on the first refusal can be written.
        for result in ("loaded", "refused"):
            self.swaps.labels(result)
        self.created = Gauge(
            "serve_bundle_created_seconds",
            "When the live bundle was exported, since 1970; the oldest of all workers",
            multiprocess_mode="livemin",
            registry=None,
        )

    def page(self) -> bytes:
        """Returns the metrics of all workers in Prometheus' text form."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return bytes(generate_latest(registry))

    content_type = CONTENT_TYPE_LATEST


def log(event: str, **values: object) -> None:
    """Writes a line of JSON to standard error: ``time`` (UTC), ``event``, ``pid`` and the values of the event.

    Values never contain ids, features, addresses, paths as typed, or error messages, because those may contain them.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = {"time": now.replace("+00:00", "Z"), "event": event, "pid": os.getpid()}
    # In one piece, because all workers write there.
    sys.stderr.write(json.dumps({**line, **values}) + "\n")
    sys.stderr.flush()


def where(error: BaseException) -> dict[str, object]:
    """Returns an error's type and its traceback, without its message."""
    # Not the message: it may contain a caller's ids or features.
    lines = traceback.format_tb(error.__traceback__)[-12:]
    return {"error": type(error).__name__, "at": lines}
