"""The server answers as the scorer does, refuses in one line that names the place, and goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.retrieval.running import Client, Server, serving
from tests.retrieval.small import Small
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import Scorer
from torchrec_ext.retrieval.server.app import _ASKED
from torchrec_ext.retrieval.store import write_store
from torchx_apps import serve

pytestmark = pytest.mark.launch
RECOMMEND = "/v1/recommend"


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            RECOMMEND,
            {
                "user": {"user": 4},
                "k": 7,
                "titles": True,
                "liked": 2,
                "filter": {"year": [1991, 1992], "not": [110]},
            },
        ),
        (RECOMMEND, {"user": None}),
        (
            "/v1/score",
            {
                "user": {"history": [1, 99], "age": 1, "user": 77},
                "items": [100, 5, 110],
            },
        ),
        ("/v1/embed", {"rows": [{"history": [1, 99], "age": 1, "user": 77}]}),
    ],
)
def test_answers_are_the_scorers(
    path: str, body: Any, client: Client, folder: Path
) -> None:
    kind, method = _ASKED[path]
    wanted = method(Scorer(Bundle.load(folder)), msgspec.convert(body, kind))
    assert client.post(path, body).json == json.loads(msgspec.json.encode(wanted))


MILLION = list(range(1_000_000))


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (RECOMMEND, {"user": {"user": "x"}}, 422, "user.user"),
        (RECOMMEND, {"user": {"usr": 1}}, 422, "user.usr"),
        (RECOMMEND, b'{"user": {"user": 1, "age": NaN}}', 400, None),
        (RECOMMEND, b'{"user": {"user": 1, "age": 1e999}}', 422, "user[...]"),
        (RECOMMEND, b'{"user": ' * 5000, 400, None),
        ("/v1/embed", b'{"rows": [' + b'{"a": ' * 20_000, 400, None),
        (RECOMMEND, b"\xff", 400, None),
        (RECOMMEND, {}, 422, None),
        (RECOMMEND, {"user": {"user": 1}, "k": 1001}, 422, "k"),
        (RECOMMEND, {"user": {"user": 1}, "k": True}, 422, "k"),
        (
            RECOMMEND,
            {"user": {"user": 1}, "candidates": MILLION[:10_001]},
            422,
            "candidates",
        ),
        (RECOMMEND, {"user": {"user": 1}, "candidates": MILLION}, 413, None),
        (RECOMMEND, {"user": {"user": 1}, "vector": "live"}, 422, None),
        ("/v1/embed", {"rows": [{"user": 1}, {"usr": 2}]}, 422, "rows[1].usr"),
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


def test_the_description_holds_every_route_and_the_bundles_columns(
    client: Client,
) -> None:
    described = client.get("/openapi.json").json
    assert described["openapi"] == "3.1.0"
    assert list(described["paths"]) == list(_ASKED)
    rows = described["components"]["schemas"]["EmbedRequest"]["properties"]["rows"]
    user, item = rows["items"]["anyOf"]
    assert set(user["properties"]) == {"user", "history", "age"}
    assert user["additionalProperties"] is False
    assert set(item["properties"]) == {"item"}


def test_pages_and_probes(client: Client, folder: Path) -> None:
    for path in ("/", "/static/page.js", "/static/page.css"):
        page = client.get(path)
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
    digest = Bundle.load(folder, verify=False).digest
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert client.get("/healthz", Host=host).json == {"status": "ok"}
    ready = client.get("/readyz").json
    assert (ready["bundle"], ready["refused"]) == (digest, False)
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
        *("--allowed-hosts", "A.example", "[::1]", "127.0.0.1"),
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
        features = {"user": {"user": 2, "history": [2, 3], "age": 0.2}}
        live = client.post(RECOMMEND, features, **bearer).json
        assert (stored.pop("vector"), live.pop("vector")) == ("store", "live")
        assert stored["items"] == live["items"]
        figures = client.get("/metrics", **bearer).content.decode()
        for source in ("store", "live"):
            assert f'serve_user_vectors_total{{from="{source}"}} 1.0' in figures
        shutil.rmtree(tmp_path / "users")
        deadline = time.monotonic() + 30
        while not client.get("/readyz").json["refused"]:
            assert time.monotonic() < deadline
        assert client.post(RECOMMEND, body, **bearer).json["vector"] == "store"
        assert client.get("/v1/bundle", **bearer).json["sample_users"]
        foreign = client.get("/healthz", Host="evil.example")
        assert (foreign.status, foreign.json["error"]["code"]) == (400, "host")
        assert "'evil.example'; ask by an allowed name" in foreign.told
        for host in ("a.example:80", "[::1]:80"):
            assert client.get("/healthz", Host=host).status == 200


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
        (tmp_path / "none", "--port=0", "there is none in"),
        (folder, f"--port={server.port}", "cannot listen"),
        (folder, "--port=99999", "port must be 0-65535"),
        (folder, "--workers=0", "workers=0: must be 1 or more"),
    ):
        assert serve.main([str(bundle), flag]) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert what in line
    # These a worker says, in a process of its own.
    for bundle, flag, what in (
        (broken, "--limit-concurrency=9", "does not fit its digest"),
        (folder, f"--vectors={folder}", "is a bundle, no store"),
    ):
        command = [sys.executable, "-m", "torchx_apps.serve", str(bundle), "--port=0"]
        run = subprocess.run(
            [*command, flag], capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 1
        lines = run.stderr.splitlines()
        (line,) = [line for line in lines if line.startswith("error: ")]
        assert what in line


USER = {"user": 3, "history": [1, 2], "age": 0.5}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        RECOMMEND,
        {
            "user": USER,
            "k": 3,
            "candidates": [100, 110],
            "filter": {"year": [1990], "not": [100]},
            "titles": True,
            "liked": 1,
        },
    ),
    ("/v1/score", {"user": USER, "items": [100, 999]}),
    ("/v1/embed", {"rows": [USER, {"user": 1}], "side": "query"}),
    ("/v1/embed", {"rows": [{"item": 3}], "side": "candidate"}),
]
STRANGE = st.recursive(
    st.sampled_from([None, True, 2**70, 1e308, "", "\ud800", "x" * 3000])
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=2)
        | st.dictionaries(st.text(max_size=5), each, max_size=2)
    ),
    max_leaves=3,
)


def near(value: Any) -> st.SearchStrategy[Any]:
    """Values like this one, of which parts are missing or something else."""
    inner: st.SearchStrategy[Any] = st.just(value)
    if isinstance(value, dict):
        fields = {name: near(each) for name, each in value.items()}
        inner = st.fixed_dictionaries({}, optional=fields)
    if isinstance(value, list):
        inner = st.lists(st.one_of(*map(near, value)), max_size=3)
    return inner | STRANGE


@pytest.mark.parametrize("count", [300, pytest.param(8_000, marks=pytest.mark.slow)])
def test_fuzzed_requests_get_no_5xx(count: int, client: Client) -> None:
    asked = st.one_of(*(st.tuples(st.just(path), near(body)) for path, body in BODIES))
    statuses = set()

    @settings(max_examples=count, deadline=None, database=None)
    @given(asked=asked)
    def law(asked: tuple[str, Any]) -> None:
        path, body = asked
        answer = client.post(path, json.dumps(body).encode())
        statuses.add(answer.status)
        assert answer.status in (200, 400, 422), answer.content

    law()
    assert {200, 422} <= statuses


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
