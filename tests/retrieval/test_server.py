"""The server answers as the scorer does, refuses in one line that names the place, and goes on."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.retrieval.running import Client, Server, serving
from tests.retrieval.small import Small
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import (
    EmbedRequest,
    NearestRequest,
    RecommendRequest,
    Scorer,
    ScoreRequest,
)
from torchrec_ext.retrieval.store import write_store
from torchx_apps import serve

pytestmark = pytest.mark.launch
RECOMMEND = "/v1/recommend"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("server") / "bundle"
    Small().write(out)
    return out


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose parent and workers can import no torch."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchrec', 'fbgemm_gpu', 'onnx'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    paths = os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    with serving(folder, env={"PYTHONPATH": paths}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return server.client()


def test_answers_are_the_scorers(client: Client, folder: Path) -> None:
    scorer = Scorer(Bundle.load(folder))
    filters = {"year": [1991, 1992], "not": [110]}
    body = {"user": {"user": 4}, "k": 7, "titles": True, "liked": 2, "filter": filters}
    got = client.post(RECOMMEND, body).json
    wanted = scorer.recommend(
        RecommendRequest(user={"user": 4}, k=7, titles=True, liked=2, filter=filters)
    )
    assert (got["items"], got["titles"]) == (wanted.items, wanted.titles)
    assert got["scores"] == wanted.scores
    assert (got["asked"], got["liked"]) == (7, wanted.liked)
    assert (got["user"], got["vector"], got["bundle"]) == (
        "known",
        "live",
        wanted.bundle,
    )
    user = {"history": [1, 99], "age": 1, "user": 77}
    scored = client.post("/v1/score", {"user": user, "items": [100, 5, 110]}).json
    of_scorer = scorer.score(ScoreRequest(user=user, items=[100, 5, 110]))
    assert scored["scores"] == of_scorer.scores
    assert scored["unknown_items"] == [5]
    assert scored["unknown_features"] == ["user", "history"]
    assert client.post(RECOMMEND, {"user": None}).json["unknown_user"] is True
    near = client.post("/v1/nearest", {"item": 100, "k": 3}).json
    assert near["items"] == scorer.nearest(NearestRequest(item=100, k=3)).items
    vectors = client.post("/v1/embed", {"rows": [user]}).json["vectors"]
    embedded = scorer.embed(EmbedRequest(rows=[user])).vectors
    np.testing.assert_array_equal(np.float32(vectors), embedded)


MILLION = list(range(1_000_000))


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (RECOMMEND, {"user": {"user": "x"}}, 422, "user.user"),
        (RECOMMEND, {"user": {"usr": 1}}, 422, "user.usr"),
        (RECOMMEND, {"user": {"user": 1, "history": [1, "a"]}}, 422, "user.history"),
        (RECOMMEND, b'{"user": {"user": 1, "age": NaN}}', 400, None),
        (RECOMMEND, b'{"user": {"user": 1, "age": 1e999}}', 422, "user[...]"),
        (RECOMMEND, b'{"user": ' * 5000, 400, None),
        ("/v1/embed", b'{"rows": [' + b'{"a": ' * 20_000, 400, None),
        (RECOMMEND, b"\xff", 400, None),
        (RECOMMEND, {}, 422, None),
        (RECOMMEND, {"user": {"user": 1}, "k": 1001}, 422, "k"),
        (RECOMMEND, {"user": {"user": 1}, "k": True}, 422, "k"),
        (RECOMMEND, {"user": {"user": 1}, "candidates": [1, 1]}, 422, "candidates"),
        (
            RECOMMEND,
            {"user": {"user": 1}, "candidates": MILLION[:10_001]},
            422,
            "candidates",
        ),
        (RECOMMEND, {"user": {"user": 1}, "candidates": MILLION}, 413, None),
        (RECOMMEND, {"user": {"user": 1}, "vector": "redis"}, 422, "vector"),
        ("/v1/score", {"user": {"user": 1}, "items": []}, 422, "items"),
        ("/v1/nearest", {"item": 7}, 422, "item"),
        ("/v1/embed", {"rows": [{"user": 1}, {"usr": 2}]}, 422, "rows[1].usr"),
        ("/v1/embed", {"rows": [{"user": 1}, {"age": 2}]}, 422, "rows[1].history"),
        ("/v1/embed", {"rows": [{"user": 1}] * 257}, 422, "rows"),
        ("/v1/nothing", {}, 404, None),
        ("/healthz", {}, 405, None),
    ],
)
def test_refusals(
    path: str, body: Any, status: int, field: str | None, client: Client
) -> None:
    answer = client.post(path, body)
    assert answer.status == status, answer.content
    error = answer.json["error"]
    assert error.get("field") == field
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 300
    assert client.post(RECOMMEND, {"user": {"user": 1}}).status == 200


def test_other_content_is_refused(client: Client) -> None:
    answer = client.post(RECOMMEND, b"a=1", Content_Type="text/plain")
    assert (answer.status, answer.json["error"]["code"]) == (415, "not_json")


def test_the_description_holds_every_route_and_its_examples_answer(
    client: Client,
) -> None:
    described = client.get("/openapi.json").json
    assert described["openapi"] == "3.1.0"
    posts = {
        path: each["post"]
        for path, each in described["paths"].items()
        if "post" in each
    }
    assert len(posts) == 4
    for path, operation in posts.items():
        example = operation["requestBody"]["content"]["application/json"]["example"]
        assert client.post(path, example).status == 200
    user = described["components"]["schemas"]["User"]
    assert set(user["properties"]) == {"user", "history", "age"}
    assert user["additionalProperties"] is False
    rows = described["components"]["schemas"]["EmbedRequest"]["properties"]["rows"]
    names = [each["$ref"].rpartition("/")[2] for each in rows["items"]["anyOf"]]
    assert names == ["User", "Item"]


def test_pages_and_probes(client: Client, folder: Path) -> None:
    for path in ("/", "/docs", "/static/page.js", "/static/page.css"):
        page = client.get(path)
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
    digest = Bundle.load(folder, verify=False).digest
    assert client.get("/healthz").json == {"status": "ok"}
    ready = client.get("/readyz").json
    assert (ready["bundle"], ready["refused"]) == (digest, None)
    shown = client.get("/v1/bundle").json
    assert shown["sample_users"] == list(range(1, 21))
    assert shown["example_user"] == {"history": [], "age": 0.0}
    figures = client.get("/metrics").content.decode()
    assert re.search(
        r'serve_requests_total\{route="/healthz",status="200"\} \d', figures
    )
    for line in (
        'serve_bundle_loads_total{result="refused"} 0.0',
        "serve_bundle_created_seconds 1.7959104e+09",
    ):
        assert line in figures
    (memory,) = re.findall(
        r"^serve_resident_bytes\{.*\} ([\d.e+]+)$", figures, re.MULTILINE
    )
    assert float(memory) > 1e6


def test_the_log_has_no_data_of_callers(server: Server, client: Client) -> None:
    secret = 123_456_789
    client.post(RECOMMEND, {"user": {"user": secret}})
    client.post(RECOMMEND, {"user": {"user": f"x{secret}"}})
    client.get(f"/v1/{secret}")
    client(f"X{secret}", "/")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not any(
        each["route"] == "other" for each in server.events("request")
    ):
        time.sleep(0.05)
    assert str(secret) not in "".join(server.lines)


def test_token_hosts_and_stored_users(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    bundle = Bundle.load(folder, verify=False)
    write_store(
        tmp_path / "users",
        [(np.arange(1, 21), bundle.query.embed(Small().users().features))],
        tower=bundle.digest_of("query"),
        side="query",
        shape=(20, bundle.query.width),
    )
    flags = (
        f"--token-file={tmp_path / 'token'}",
        *("--allowed-hosts", "a.example", "127.0.0.1"),
        f"--vectors={tmp_path / 'users'}",
    )
    with serving(folder, *flags) as server:
        client = server.client()
        body = {"user": {"user": 2}}
        assert client.post(RECOMMEND, body).status == 401
        assert client.get("/metrics").status == 401
        assert client.get("/healthz").status == 200
        wrong = client.post(RECOMMEND, body, Authorization="Bearer secrets")
        assert "the token is wrong" in wrong.told
        bearer = {"Authorization": "Bearer secret"}
        stored = client.post(RECOMMEND, body, **bearer).json
        live = client.post(RECOMMEND, {**body, "vector": "live"}, **bearer).json
        assert (stored.pop("vector"), live.pop("vector")) == ("store", "live")
        assert stored["items"] == live["items"]
        figures = client.get("/metrics", **bearer).content.decode()
        for source in ("store", "live"):
            assert f'serve_user_vectors_total{{from="{source}"}} 1.0' in figures
        assert client.get("/readyz").json["vectors"] == {"store": True}
        assert client.get("/v1/bundle", **bearer).json["sample_users"]
        foreign = client.get("/healthz", Host="evil.example")
        assert (foreign.status, foreign.json["error"]["code"]) == (400, "host")
        assert client.get("/healthz", Host="A.example:80").status == 200


def test_a_server_for_all_hosts_hides_ids_has_a_limit_and_ends_with_its_parent(
    folder: Path,
) -> None:
    with serving(folder, "--allowed-hosts=*", "--limit-concurrency=3") as server:
        shown = server.client().get("/v1/bundle").json
        assert shown["sample_users"] == []
        assert "user" not in shown["example_user"]
        held = [server.client() for _ in range(6)]
        assert {each.get("/healthz").status for each in held} == {200, 503}
        # The worker sees that its parent was killed.
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                server.client().get("/healthz")
            except OSError:
                return
            time.sleep(0.2)
    raise AssertionError("the worker still answers")


def test_a_worker_that_fails_in_an_unknown_way_ends(folder: Path) -> None:
    """A worker that is only restarted would keep its server from ever starting and from ever ending."""
    program = f"""
from pathlib import Path
from torchrec_ext.retrieval.server import app
from torchrec_ext.retrieval.server.settings import ServerConfig

class Broken:
    def __init__(self, settings):
        raise RuntimeError("unknown")

app.Served = Broken
ServerConfig(bundle=Path({str(folder)!r})).to_environment()
app.create()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 3  # uvicorn's status of a failed start
    assert run.stderr.splitlines()[-1] == "error: unknown"


def test_starts_that_fail_say_one_line(
    folder: Path, server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    Small(seed=1).write(broken)
    (broken / "pairs.onnx").write_bytes(b"x" * (broken / "pairs.onnx").stat().st_size)
    for bundle, flag, what in (
        (tmp_path / "none", "--port=0", "there is no such file or folder"),
        (folder, f"--port={server.port}", "cannot listen"),
        (folder, "--workers=0", "workers=0: must be 1 or more"),
        (folder, "--allowed-hosts=*a", "allowed_hosts: '*a'"),
    ):
        assert serve.main([str(bundle), flag]) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert what in line
    # These a worker says, in a process of its own.
    for bundle, flag, what in (
        (broken, "--limit-concurrency=9", "does not have the SHA-256"),
        (folder, f"--vectors={folder}", "is a bundle, no store"),
    ):
        command = [sys.executable, "-m", "torchx_apps.serve", str(bundle), "--port=0"]
        run = subprocess.run(
            [*command, flag], capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 1
        lines = run.stderr.splitlines()
        (line,) = [line for line in lines if "Child process" not in line]
        assert what in line


def mutated(draw: random.Random, value: Any) -> Any:
    """Returns a value with one part replaced by something else."""
    strange = draw.choice(
        [
            None,
            True,
            -1,
            0,
            2**70,
            1e308,
            "",
            "\u0000",
            "x" * 3000,
            [],
            {},
            [[]],
            [None],
        ]
    )
    if draw.random() < 0.4 or not isinstance(value, dict | list) or not value:
        return strange
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [
            mutated(draw, each) if index == place else each
            for index, each in enumerate(value)
        ]
    name = draw.choice(list(value))
    if draw.random() < 0.2:
        return {**value, draw.choice(["\ud800", "", "k", "user", "a.b"]): strange}
    return {**value, name: mutated(draw, value[name])}


def fuzz(client: Client, count: int) -> dict[int, int]:
    draw = random.Random(0)
    user = {"user": 3, "history": [1, 2], "age": 0.5}
    seeds = [
        (
            RECOMMEND,
            {
                "user": user,
                "k": 3,
                "candidates": [100, 110],
                "filter": {"year": [1990], "not": [100]},
                "vector": "live",
                "titles": True,
                "liked": 1,
            },
        ),
        ("/v1/score", {"user": user, "items": [100, 999]}),
        ("/v1/nearest", {"item": 100, "k": 2, "titles": True}),
        ("/v1/embed", {"rows": [user, {"user": 1}], "side": "query"}),
        ("/v1/embed", {"rows": [{"item": 3}], "side": "candidate"}),
    ]
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, body = draw.choice(seeds)
        content = json.dumps(mutated(draw, body)).encode()
        if draw.random() < 0.1:
            place = draw.randrange(len(content))
            content = (
                content[:place]
                + bytes([draw.randrange(256)])
                + content[place + draw.randrange(5) :]
            )
        answer = client.post(path, content)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status in (200, 400, 422), (path, content, answer.content)
    return statuses


def test_fuzzed_requests_get_no_5xx(client: Client) -> None:
    assert set(fuzz(client, 500)) == {200, 400, 422}


@pytest.mark.slow
def test_8000_fuzzed_requests_get_no_5xx(client: Client) -> None:
    assert set(fuzz(client, 8_000)) == {200, 400, 422}


def test_a_killed_worker_is_replaced(folder: Path) -> None:
    with serving(folder, "--workers=2") as server:
        client = server.client()
        # The line may come after the answer, since another thread reads it.
        while not (ready := server.events("ready")):
            time.sleep(0.02)
        os.kill(ready[0]["pid"], signal.SIGKILL)
        for _ in range(50):
            assert server.client().post(RECOMMEND, {"user": {"user": 1}}).status == 200
            time.sleep(0.02)
        deadline = time.monotonic() + 30
        while len(server.events("ready")) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(server.events("ready")) == 3
        assert client.get("/healthz").status == 200
