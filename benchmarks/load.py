"""ask(): sends requests to a service at a fixed rate, even where it lags, and times each from the moment it was due.

Certificates and benchmarks are clients by it. It needs neither torch nor another package.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

CONNECTIONS = 16
_BYTES = 2**16
_PATIENCE_S = 30.0


@dataclass
class Load:
    """Times of a run's requests in milliseconds, and the reasons of failures."""

    ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """Returns a percentile in milliseconds, of the requests that were answered; infinity if none was.

        Example:
            >>> Load([1.0, 2.0, 9.0]).percentile(50), Load([1.0, 2.0, 9.0]).percentile(99), Load().percentile(99)
            (2.0, 9.0, inf)
        """
        if not self.ms:
            return math.inf
        return sorted(self.ms)[math.ceil(len(self.ms) * percent / 100) - 1]


def http_request(method: str, path: str, body: str | None = None) -> bytes:
    """Returns the bytes of a request, with a JSON body or none."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    content = body.encode()
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


def ask(port: int, rate: float, seconds: float, requests: Sequence[bytes]) -> Load:
    """Sends requests when they are due, each thread every CONNECTIONS-th of them over a connection of its own.

    Threads that block wake some 0.1 ms after their time; timers of asyncio are whole milliseconds, and its client took
    1.2 ms of a request here, which is no part of the service.
    """
    load = Load()
    start = time.perf_counter() + 0.1  # when every thread is there
    due = []
    for number in range(max(1, int(rate * seconds))):
        due.append((start + number / rate, requests[number % len(requests)]))
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        # list(), because only reading a result raises what its thread has raised.
        list(
            threads.map(
                lambda thread: one_after_the_other(
                    port, due[thread::CONNECTIONS], load
                ),
                range(CONNECTIONS),
            )
        )
    return load


def one_after_the_other(
    port: int, requests: list[tuple[float, bytes]], load: Load
) -> None:
    """Sends requests over one connection; where it is lost the request has failed, and the next opens another."""
    connection: socket.socket | None = None
    for due, request in requests:
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            connection = connection or socket.create_connection(
                ("127.0.0.1", port), timeout=_PATIENCE_S
            )
            connection.sendall(request)
            status, _ = answered(connection)
            load.ms.append((time.perf_counter() - due) * 1e3)
            if status != b"200":
                load.failed.append(status.decode())
        except OSError as error:
            load.failed.append(type(error).__name__)
            connection = None
    if connection is not None:
        connection.close()


def answered(connection: socket.socket) -> tuple[bytes, bytes]:
    """Returns the status and the body of an answer, when all of it has come."""
    received = _more(connection)
    while b"\r\n\r\n" not in received:
        received += _more(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += _more(connection)
    return head.split(b" ", 2)[1], body


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(_BYTES)
    if not received:
        raise ConnectionResetError("closed within an answer")
    return received
