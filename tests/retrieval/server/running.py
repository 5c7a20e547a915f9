"""A server in this process on a free port of loopback, and a client that keeps its connection."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors
from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.retrieval.server.telemetry import Log
from torchrec_ext.retrieval.server.worker import uvicorn_config


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
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def __call__(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> Answer:
        content = (
            body
            if body is None or isinstance(body, bytes)
            else json.dumps(body).encode()
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content is not None:
            named.setdefault("Content-Type", "application/json")
        self.connection.request(method, path, content, named)
        answer = self.connection.getresponse()
        return Answer(
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self("GET", path, **headers)


@dataclass
class Running:
    queued: QueuedScorer
    port: int
    log: io.StringIO

    def client(self) -> Client:
        return Client(self.port)


@contextmanager
def running_server(
    bundle: Bundle, *, vectors: Sequence[UserVectors] = (), **settings: Any
) -> Iterator[Running]:
    """Runs a server with ``bundle`` until the block ends."""
    log = io.StringIO()
    queued = QueuedScorer(
        ServerConfig(bundle=Path("unused"), **settings),
        bundle,
        vectors=vectors,
        log=Log(log),
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(queued))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Running(queued, listening.getsockname()[1], log)
    finally:
        server.should_exit = True
        thread.join(20)
        queued.close()
