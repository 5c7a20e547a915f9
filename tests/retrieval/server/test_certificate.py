"""A certificate: the first choice that is in time is served; what is not reached is said in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from torchrec_ext.retrieval.server import certificate
from torchrec_ext.retrieval.server.certificate import Target, certify, choices
from torchrec_ext.retrieval.server.load import Load, ask, http_request
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchx_apps import serve

pytestmark = pytest.mark.unit
TARGET = Target(p99_ms=5.0, rate=300.0)


class Measurement:
    """A service that takes as long as its settings say."""

    def __init__(
        self, settings: ServerConfig, p99: dict[tuple[str, int], float]
    ) -> None:
        self._ms = p99[settings.stage, settings.workers]
        self._recall = 1.0 if settings.stage == "exact" else 0.5

    def questions(self) -> list[bytes]:
        return [b"?"]

    def load(self, questions: list[bytes], rate: float) -> Load:
        return Load([self._ms * rate / TARGET.rate] * 100)

    def stage_recall(self) -> float:
        return self._recall


def certified(
    p99: dict[tuple[str, int], float], monkeypatch: pytest.MonkeyPatch
) -> tuple[ServerConfig, list[str]]:
    @contextmanager
    def serving(settings: ServerConfig) -> Iterator[Measurement]:
        if (settings.stage, settings.workers) not in p99:
            raise ValueError("it cannot begin")
        yield Measurement(settings, p99)

    monkeypatch.setattr(certificate, "_serving", serving)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    said: list[str] = []
    settings = ServerConfig(bundle=Path("bundle"))
    return certify(
        choices(settings, [settings.bundle], ["exact", "dot"], 2), TARGET, said.append
    ), said


def test_the_first_choice_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = certified({("exact", 1): 7.0, ("exact", 2): 4.0}, monkeypatch)
    assert (found.stage, found.workers) == ("exact", 2)
    assert said[1:] == [
        "  1 worker, stage exact, bundle: p50 7 ms, p99 7 ms",
        "  2 workers, stage exact, bundle: p50 4 ms, p99 4 ms; holds",
    ]


def test_a_stage_that_misses_items_is_not_taken_and_what_is_reached_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {("exact", 1): 18.0, ("exact", 2): 12.0, ("dot", 1): 1.0}
    with pytest.raises(
        ValueError, match="--p99 5ms at --qps 300: not reached here"
    ) as error:
        certified(times, monkeypatch)
    assert str(error.value).endswith(
        "the best of 3, 2 workers, stage exact, bundle, has 12 ms; it answers 75/s in time"
    )
    assert len(str(error.value)) < 200
    with pytest.raises(ValueError, match=r"nor is it in time at 37\.5/s"):
        certified({("exact", 1): 80.0}, monkeypatch)
    with pytest.raises(ValueError, match="it cannot begin"):
        certified({}, monkeypatch)
    _, said = certified({("exact", 2): 4.0}, monkeypatch)
    assert said[1] == "  1 worker, stage exact, bundle: left out: it cannot begin"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--p99=0", "--qps=3"], "--p99 '0': must be a time above 0 with its unit"),
        (["--p99=0ms", "--qps=3"], "--p99 '0ms': must be"),
        (["--p99=5", "--qps=3"], "--p99 '5': must be"),
        (["--p99=-5ms", "--qps=3"], "--p99 '-5ms': must be"),
        (["--p99=5ms", "--qps=-1"], "--qps -1: must be requests a second"),
        (["--p99=5ms", "--qps=nan"], "--qps nan: must be"),
        (["--p99=5ms"], "--p99 and --qps: give both"),
        (["--qps=5"], "--p99 and --qps: give both"),
        (
            ["--also=another"],
            "--also and --requests: these choose a bundle by --p99 and --qps",
        ),
        (
            ["--p99=5ms", "--qps=3", "--requests=no-file"],
            "--requests no-file: it cannot be read",
        ),
    ],
)
def test_a_wrong_certificate_is_refused_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["no-bundle", *flags]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(message)
    assert len(said[0]) < 200


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good" else 503)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


def test_every_request_of_a_load_is_timed_or_told() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        good = http_request("GET", "/good")
        load = ask(server.server_port, 400.0, 0.1, [good, http_request("GET", "/bad")])
        server.shutdown()
    assert (len(load.ms), load.failed) == (40, ["503"] * 20)
    refused = ask(server.server_port, 100.0, 0.02, [good])
    assert (refused.ms, refused.failed) == ([], ["ConnectionRefusedError"] * 2)
