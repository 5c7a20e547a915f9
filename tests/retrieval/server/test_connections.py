"""What a client may take before its token is asked for: bytes of a head, time in silence, and connections."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.server.launched import until
from tests.retrieval.server.running import Running, running_server
from tests.retrieval.small_bundle import SmallBundle
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.server.connections import BoundedProtocol
from torchrec_ext.retrieval.server.settings import Limits
from torchrec_ext.retrieval.server.worker import allow_files

pytestmark = pytest.mark.unit
ASKED, TOKEN = {"user": {"user_id": 7}, "k": 3}, "a secret of some length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MIB = 2**20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return SmallBundle(tmp_path_factory.mktemp("made") / "bundle").bundle


@pytest.fixture(scope="module")
def running(bundle: Bundle) -> Iterator[Running]:
    with running_server(bundle, token=TOKEN) as found:
        yield found


def closed(running: Running, why: str) -> float:
    return float(running.queued.metrics.closed.labels(why)._value.get())


def sent(port: int, *parts: bytes) -> bytes:
    """All that the server says until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        for part in parts:
            raw.sendall(part)
        return raw.makefile("rb").read()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(
            [b"GET / HTTP/1.1\r\nHost: a\r\nA: ", *[b"a" * MIB] * 8], id="one header"
        ),
        pytest.param([b"GET / HTTP/1.1\r\n", b"a: b\r\n" * MIB], id="many headers"),
        pytest.param([b"GET /" + b"a" * MIB], id="an address"),
        pytest.param(
            [b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 2**15 + b"\r\n\r\n"],
            id="a head in one piece",
        ),
        pytest.param([b"\r\n" * MIB], id="empty lines"),
    ],
)
def test_a_head_that_is_too_long_is_431_whatever_it_is_made_of(
    running: Running, parts: list[bytes]
) -> None:
    head, _, body = sent(running.port, *parts).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["limit"] == {
        "name": "header_bytes",
        "value": 2**15,
    }
    assert running.client().post("/v1/recommend", ASKED, **BEARER).status == 200


def test_trailers_without_end_close_the_connection(running: Running) -> None:
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "
    before = closed(running, "header_bytes")
    with contextlib.suppress(OSError):  # closed while it sends
        sent(running.port, head, *[b"a" * MIB] * 8)
    assert closed(running, "header_bytes") == before + 1


def test_a_head_within_the_limit_passes_in_pieces_one_after_the_other(
    running: Running,
) -> None:
    body = json.dumps(ASKED).encode()
    head = (
        b"POST /v1/recommend HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\nA: "
        % (
            TOKEN.encode(),
            len(body),
        )
    )
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as raw:
        for _ in range(3):
            for part in (head, *[b"a" * 1_000] * 30, b"\r\n\r\n", body):
                raw.sendall(part)
            assert raw.recv(MIB).startswith(b"HTTP/1.1 200")


def test_requests_sent_before_an_answer_wait_up_to_a_limit_and_keep_nobody_waiting(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    said = sent(
        running.port,
        asked * 10 + b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    assert said.count(b"HTTP/1.1 200 ") == 11
    before, begun = closed(running, "pipelined"), list[int]()
    counted = BoundedProtocol.on_headers_complete

    def noted(connection: BoundedProtocol) -> None:
        begun.append(1)
        counted(connection)

    monkeypatch.setattr(BoundedProtocol, "on_headers_complete", noted)
    with ExitStack() as stack:
        for _ in range(30):
            raw = stack.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=20)
            )
            raw.sendall(asked * 5_000)
        assert running.client().get("/healthz").status == 200
        until(lambda: closed(running, "pipelined") == before + 30)
    assert len(begun) <= 30 * 17 + 1
    said = sent(running.port, asked * 40)
    assert said.count(b"HTTP/1.1 200 ") == 17
    assert said.count(b"connection: close") == 1
    assert said.rindex(b"connection: close") > said.rindex(b"HTTP/1.1 200 ")


def test_sockets_that_are_silent_or_never_end_a_head_are_closed_and_others_go_on(
    bundle: Bundle,
) -> None:
    with (
        running_server(bundle, limits=Limits(header_ms=300, time_ms=200)) as running,
        ExitStack() as stack,
    ):
        client = running.client()
        assert client.post("/v1/recommend", ASKED).status == 200
        begun = [
            b"",
            b"GET / HT",
            b"\r\n",
            b"POST /v1/score HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET",
        ]
        sockets = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=20)
            )
            for _ in begun
        ]
        for raw, data in zip(sockets, begun, strict=True):
            raw.sendall(data)
        for raw in sockets:
            raw.makefile("rb").read()  # to its end
        assert closed(running, "silent") == 4, (
            "a body that never comes is 408, from the application"
        )
        port = client.connection.sock.getsockname()
        assert client.post("/v1/recommend", ASKED).status == 200
        assert client.connection.sock.getsockname() == port, (
            "a connection that was answered is kept"
        )


def test_beyond_the_most_connections_the_one_longest_without_a_request_makes_room(
    bundle: Bundle,
) -> None:
    with (
        running_server(bundle, token=TOKEN, limits=Limits(connections=8)) as running,
        ExitStack() as stack,
    ):
        client = running.client()
        assert client.post("/v1/recommend", ASKED, **BEARER).status == 200
        own = client.connection.sock.getsockname()

        def connected() -> socket.socket:
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=20)
            )

        silent = [connected() for _ in range(40)]
        until(lambda: closed(running, "connections") == 33)
        for raw in silent[:33]:
            assert raw.recv(1) == b"", "the oldest"
        for _ in range(5):
            refused = running.client()
            # answered, and still of nobody
            assert refused.get("/v1/bundle").status == 401
        assert client.post("/v1/recommend", ASKED, **BEARER).status == 200
        assert client.connection.sock.getsockname() == own
        assert running.client().post("/v1/recommend", ASKED, **BEARER).status == 200


def test_where_all_connections_have_a_request_under_way_a_new_one_is_503(
    bundle: Bundle,
) -> None:
    with (
        running_server(bundle, limits=Limits(connections=2, time_ms=20_000)) as running,
        ExitStack() as stack,
    ):
        for _ in range(2):
            raw = stack.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=20)
            )
            raw.sendall(
                b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
        until(lambda: running.queued.in_flight == 2)
        head, _, body = sent(running.port).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["limit"] == {"name": "connections", "value": 2}


def test_a_worker_may_open_a_file_for_each_connection_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        allow_files(500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 756
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 1_024))
    with pytest.raises(
        ValueError,
        match=r"--max-connections 1000: a process here may open 1024 files, 256 of which .*; give 768",
    ):
        allow_files(1_000)
