"""A server in processes of its own, as its users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.retrieval.server.running import Client

PATIENCE_S = 90


@dataclass
class Launched:
    process: subprocess.Popen[str]
    port: int
    said: str
    log: Path

    def client(self) -> Client:
        return Client(self.port)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [
            line for line in self.log.read_text().splitlines() if line.startswith("{")
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def launched(
    log: Path, *flags: str, begun: Callable[[int], object] = id, **environ: str
) -> Iterator[Launched]:
    """`python -m torchx_apps.serve` on a free port, ready; killed at the end of the block if it still runs.

    ``begun`` is called with its process when that has begun.
    """
    command = [sys.executable, "-m", "torchx_apps.serve", *flags, "--port=0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )
    try:
        begun(process.pid)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert address, log.read_text()
        yield Launched(process, int(address[1]), line, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()  # type: ignore[union-attr]


def until(condition: Callable[[], Any]) -> Any:
    """Returns the result of ``condition`` as soon as it is true."""
    end = time.monotonic() + PATIENCE_S
    result = condition()
    while not result:
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)
        result = condition()
    return result
