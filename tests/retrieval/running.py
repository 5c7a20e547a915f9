"""A server process on a free port of loopback, and a client that keeps its connection."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def told(self) -> str:
        return str(self.json["error"]["message"])


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def __call__(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> Answer:
        content = body
        if body is not None and not isinstance(body, bytes):
            content = json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content is not None:
            named.setdefault("Content-Type", "application/json")
        try:
            self.connection.request(method, path, content, named)
            answer = self.connection.getresponse()
        except (http.client.HTTPException, ConnectionError, BrokenPipeError):
            # The server closed the connection between two requests, as any may.
            self.connection.close()
            self.connection.request(method, path, content, named)
            answer = self.connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self("GET", path, **headers)


@dataclass
class Server:
    """A running server: its process, port, and the lines of its log so far."""

    process: subprocess.Popen[str]
    port: int = 0
    lines: list[str] = field(default_factory=list)

    def client(self) -> Client:
        return Client(self.port)

    def events(self, name: str) -> list[Any]:
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [each for each in found if each["event"] == name]

    def follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


@contextmanager
def serving(
    bundle: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serves a bundle until the block ends, and then ends the server by SIGTERM."""
    command = [sys.executable, "-m", "torchx_apps.serve", str(bundle), "--port=0"]
    process = subprocess.Popen(
        [*command, "--watch=0.05", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    server = Server(process)
    reader = threading.Thread(target=server.follow, daemon=True)
    reader.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r":(\d+)/", line)
        if found is None:
            process.wait(30)
            reader.join(5)
            raise AssertionError("".join(server.lines))
        server.port = int(found[1])
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            reader.join(5)
