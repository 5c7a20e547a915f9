"""The service as its users start it: ready, swapped under load, drained; and what it says when it cannot begin."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from torchrec_ext.components import serve as component  # type: ignore[import-not-found]
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

from tests.retrieval.server.launched import Launched, launched, until
from tests.retrieval.small_bundle import SmallBundle
from torchx_apps import serve

ASKED = {"user": {"user_id": 7}, "k": 5}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[SmallBundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return [SmallBundle(folder / f"bundle-{seed}", seed=seed) for seed in range(2)]


def point(link: Path, target: Path) -> None:
    """Atomically."""
    fresh = link.with_name("fresh")
    fresh.symlink_to(target)
    os.replace(fresh, link)


@pytest.fixture(scope="module")
def service(
    bundles: list[SmallBundle], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("serve")
    point(folder / "live", bundles[0].folder)
    token = folder / "token"
    token.write_text("a token of this test\n")
    flags = [
        str(folder / "live"),
        "--workers=2",
        "--watch=0.2",
        "--drain=0.5",
        f"--token-file={token}",
    ]
    with launched(folder / "log", *flags) as found:
        yield found


class Load:
    """Threads that ask without a pause, each on one connection, until the block ends."""

    def __init__(self, service: Launched, threads: int = 2) -> None:
        self.answers: list[tuple[int, str]] = []
        self.errors: list[Exception] = []
        self._service, self._ending = service, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def _ask(self) -> None:
        client = self._service.client()
        while not self._ending.is_set():
            try:
                answer = client.post(
                    "/v1/recommend", ASKED, Authorization="Bearer a token of this test"
                )
            except Exception as error:
                self.errors.append(error)
                return
            self.answers.append((answer.status, answer.json.get("bundle", "")))
            if answer.status == 503:
                return
            time.sleep(0.005)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)


def newest(service: Launched, name: str, **values: str) -> bool:
    """Whether the newest event about a bundle is this one in both workers' log: the kernel chooses who answers."""
    last: dict[int, dict[str, str]] = {}
    for line in service.log.read_text().splitlines():
        event = (
            json.loads(line)
            if line.startswith("{") and line.endswith("}")
            else {"event": ""}
        )
        if event["event"] in ("bundle_loaded", "bundle_refused"):
            last[event["pid"]] = event
    return len(last) == 2 and all(
        {"event": name, **values}.items() <= event.items() for event in last.values()
    )


@pytest.mark.launch
def test_bundles_are_swapped_under_load_without_a_lost_request(
    service: Launched, bundles: list[SmallBundle], tmp_path: Path
) -> None:
    live = Path(service.process.args[3])  # type: ignore[index]
    digests = [made.bundle.manifest.digest for made in bundles]
    assert service.said.startswith(
        f"serving bundle {digests[0][:12]} at http://127.0.0.1:"
    )
    with Load(service) as load:
        for place in (1, 0, 1):
            point(live, bundles[place].folder)
            until(
                lambda place=place: newest(
                    service, "bundle_loaded", digest=digests[place]
                )
            )
        # A folder that is broken is refused, and told; what is live goes on, also when
        # its own folder goes away.
        broken = tmp_path / "broken"
        shutil.copytree(bundles[0].folder, broken)
        (broken / "items.arrow").write_bytes(b"")
        point(live, broken)
        until(lambda: newest(service, "bundle_refused", serving=digests[1]))
        # without it no path is told
        bearer = {"Authorization": "Bearer a token of this test"}
        told = service.client().get("/readyz", **bearer).json
        assert ("items.arrow" in told["refused"], told["bundle"]) == (True, digests[1])
        assert "items.arrow" not in service.client().get("/readyz").json["refused"]
        moving = tmp_path / "moving"
        shutil.copytree(bundles[0].folder, moving)
        point(live, moving)
        service.process.send_signal(signal.SIGHUP)
        until(lambda: newest(service, "bundle_loaded", digest=digests[0]))
        shutil.rmtree(moving)
        until(lambda: newest(service, "bundle_refused", serving=digests[0]))
        assert service.client().get("/readyz").json["bundle"] == digests[0]
        point(live, bundles[0].folder)
        until(lambda: newest(service, "bundle_loaded", digest=digests[0]))
        assert service.client().get("/readyz").json["refused"] is None
    assert not load.errors
    assert len(load.answers) > 20
    assert {status for status, _ in load.answers} == {200}
    assert {digest for _, digest in load.answers} == set(digests)


@pytest.mark.launch
def test_both_workers_count_into_one_page_of_metrics(service: Launched) -> None:
    name = 'serve_requests_total{route="/v1/score",status="422"}'
    headers = {"Authorization": "Bearer a token of this test"}
    for _ in range(12):
        service.client().post("/v1/score", {}, **headers)

    def pages() -> list[str]:
        return [
            service.client().get("/metrics", **headers).content.decode()
            for _ in range(4)
        ]

    # A worker counts a request after its answer has left, so a page of the other worker
    # may come before the count.
    until(lambda: all(f"{name} 12.0" in page for page in pages()))
    workers = [
        line
        for line in pages()[0].splitlines()
        if line.startswith("serve_resident_bytes{")
    ]
    assert len(workers) == 2
    assert service.client().post("/v1/score", {}).status == 401


@pytest.mark.slow
@pytest.mark.launch
def test_a_worker_that_dies_is_replaced(service: Launched) -> None:
    assert service.client().get("/readyz").status == 200
    pid = until(lambda: service.events("request"))[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    ended = until(lambda: service.events("worker_ended"))
    assert (ended[0]["worker"], ended[0]["status"]) == (pid, -signal.SIGKILL)
    assert service.client().get("/readyz").status == 200
    until(
        lambda: (
            len({event["pid"] for event in service.events("request")} - {pid}) == 2
            or service.client().get("/healthz") is None
        )
    )


@pytest.mark.launch
@pytest.mark.slow
def test_a_worker_that_dies_under_a_refused_bundle_is_replaced_by_one_with_the_last_good(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(bundles[1].folder, bad)
    (bad / "architecture.json").write_text("{}")
    live = tmp_path / "live"
    point(live, bundles[0].folder)
    with launched(tmp_path / "log", str(live), "--watch=0.2") as service:
        point(live, bundles[1].folder)
        until(lambda: len(service.events("bundle_loaded")) == 2)
        point(live, bad)
        until(lambda: service.events("bundle_refused"))
        os.kill(service.events("bundle_loaded")[0]["pid"], signal.SIGKILL)
        until(lambda: status_of_a_request(service) == 200)
        until(lambda: len(service.events("bundle_refused")) == 2)
        answer = service.client().post("/v1/recommend", ASKED)
        assert answer.json["bundle"] == bundles[1].bundle.manifest.digest
        assert len(service.events("worker_ended")) == 1
        point(live, bundles[0].folder)
        until(
            lambda: (
                service.client().get("/readyz").json["bundle"]
                == bundles[0].bundle.manifest.digest
            )
        )


def replaced_by_broken(folder: Path) -> None:
    """As an export with --overwrite, or rsync, does: the name leads to other files, of which one is broken."""
    fresh = folder.with_name("fresh")
    shutil.copytree(folder, fresh)
    (fresh / "architecture.json").write_text("{}")
    shutil.rmtree(folder)
    fresh.rename(folder)


def rewritten_broken(folder: Path) -> None:
    """As an editor or `cp` does: the file stays the same one, with other content."""
    (folder / "architecture.json").write_text("{}")


def _is_kept(folder: Path) -> bool:
    """Says whether the hidden copy beside a served bundle has its files."""
    try:
        (kept,) = folder.parent.glob(f".{folder.name}.served.*")
        return {path.name for path in kept.iterdir()} == {
            path.name for path in folder.iterdir()
        } and (kept / "manifest.json").read_bytes() == (
            folder / "manifest.json"
        ).read_bytes()
    except (FileNotFoundError, ValueError):
        # The copy is being replaced.
        return False


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [replaced_by_broken, rewritten_broken])
def test_a_worker_that_dies_under_a_bundle_overwritten_in_place_is_replaced_by_one_with_the_last_good(
    bundles: list[SmallBundle], tmp_path: Path, overwrite: Callable[[Path], None]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundles[0].folder, folder)
    with launched(tmp_path / "log", str(folder), "--watch=0.2") as service:
        overwrite(folder)
        until(lambda: service.events("bundle_refused"))
        os.kill(service.events("bundle_loaded")[0]["pid"], signal.SIGKILL)
        until(lambda: status_of_a_request(service) == 200)
        until(lambda: len(service.events("bundle_refused")) == 2)
        answer = service.client().post("/v1/recommend", ASKED)
        assert answer.json["bundle"] == bundles[0].bundle.manifest.digest
        # The folder made right, in place again: it is served, and is the last good one
        # from then on.
        shutil.copytree(bundles[1].folder, tmp_path / "right")
        shutil.rmtree(folder)
        (tmp_path / "right").rename(folder)
        until(
            lambda: (
                service.client().get("/readyz").json["bundle"]
                == bundles[1].bundle.manifest.digest
            )
        )
        until(lambda: _is_kept(folder))
        overwrite(folder)
        until(lambda: len(service.events("bundle_refused")) == 3)
        os.kill(service.events("bundle_loaded")[-1]["pid"], signal.SIGKILL)
        until(lambda: status_of_a_request(service) == 200)
        answer = service.client().post("/v1/recommend", ASKED)
        assert answer.json["bundle"] == bundles[1].bundle.manifest.digest
        assert service.end() == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.launch
@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    with launched(tmp_path / "log", str(bundles[0].folder), "--hang=3") as service:
        pid = service.events("bundle_loaded")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        hanging = until(lambda: service.events("worker_hangs"))
        assert hanging[0]["worker"] == pid
        assert hanging[0]["silent_s"] >= 3
        until(lambda: len(service.events("bundle_loaded")) == 2)
        assert service.client().post("/v1/recommend", ASKED).status == 200


def starting(supervisor: int, known: set[int]) -> int | None:
    """The process of a worker that is not among ``known``."""
    children = (
        Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    )
    found = [
        int(pid)
        for pid in children
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return next((pid for pid in found if pid not in known), None)


@pytest.mark.launch
@pytest.mark.slow
def test_a_worker_that_hangs_while_it_starts_is_replaced_and_does_not_keep_sigterm_from_draining(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    stopped: list[int] = []

    def stop_the_first(supervisor: int) -> None:
        stopped.append(until(lambda: starting(supervisor, set())))
        os.kill(stopped[0], signal.SIGSTOP)

    with launched(
        tmp_path / "log", str(bundles[0].folder), "--hang=5", begun=stop_the_first
    ) as service:
        assert [event["worker"] for event in service.events("worker_hangs")] == stopped
        assert service.client().post("/v1/recommend", ASKED).status == 200
        live = service.events("bundle_loaded")[0]["pid"]
        os.kill(live, signal.SIGKILL)
        os.kill(
            until(lambda: starting(service.process.pid, {live, *stopped})),
            signal.SIGSTOP,
        )
        assert service.end() == 0
    assert not service.events("killed")


def status_of_a_request(service: Launched) -> int | None:
    """None where the worker that had it ended."""
    try:
        return service.client().post("/v1/recommend", ASKED).status
    except (OSError, http.client.HTTPException):
        return None


@pytest.mark.launch
@pytest.mark.slow
def test_a_bundle_that_is_cut_off_under_the_server_is_told_and_put_right(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundles[0].folder, folder)
    rows, tables = list(folder.rglob("rows.bin")), list(folder.rglob("tables/*"))
    whole = {path: path.read_bytes() for path in (*rows, *tables)}

    def put_right() -> None:
        for path, content in whole.items():
            path.write_bytes(content)

    with launched(tmp_path / "log", str(folder), "--watch=0.2") as service:
        assert status_of_a_request(service) == 200
        for path in rows:
            os.truncate(path, 10)
        until(lambda: status_of_a_request(service) == 503)
        put_right()
        until(lambda: status_of_a_request(service) == 200)
        assert not service.events("worker_ended")
        # A table that is read where it was cut ends the process: the kernel's answer,
        # which nothing in it can catch.
        for path in tables:
            os.truncate(path, 0)
        until(lambda: status_of_a_request(service) is None)
        ended = until(lambda: service.events("worker_ended"))
        assert ended[0]["status"] == -signal.SIGBUS
        assert (
            "a file of the bundle was cut off while it was served (SIGBUS); put it right"
            in ended[0]["why"]
        )
        # The next worker begins with the copies of these small files; large ones would
        # have to be put right first.
        until(lambda: status_of_a_request(service) == 200)
        put_right()
        until(lambda: status_of_a_request(service) == 200)


@pytest.mark.launch
def test_sigterm_drains_and_ends_with_0(service: Launched) -> None:
    with Load(service) as load:
        until(lambda: len(load.answers) > 5)
        assert service.end() == 0
    statuses = Counter(status for status, _ in load.answers)
    assert not load.errors, "a connection was cut while a request was under way"
    assert set(statuses) == {200, 503}
    assert service.events("draining")
    assert "Traceback" not in service.log.read_text()
    assert "a token of this test" not in service.log.read_text()


class Balancer:
    """What a Service of Kubernetes does: a connection stays with its server, a new one goes to one that is listed."""

    def __init__(self, servers: list[Launched]) -> None:
        self.listed = servers
        self.statuses: Counter[tuple[int, int]] = Counter()  # by port and status
        self.lost: list[str] = []
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(4)
        ]

    def _ask(self, number: int) -> None:
        server, client = None, None
        for turn in itertools.count(number):
            if self._ending.is_set():
                return
            if client is None or server is None:
                server = self.listed[turn % len(self.listed)]
                client = server.client()
            try:
                answer = client.post("/v1/recommend", ASKED)
                self.statuses[server.port, answer.status] += 1
                if answer.headers.get("connection") == "close":
                    client = None
            except Exception as error:
                self.lost.append(repr(error))
                client = None
            time.sleep(0.005)

    def __enter__(self) -> Balancer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)


def probes(*flags: str) -> list[tuple[str, str]]:
    """What the kubelet asks the pods of `rec.serve.http --manifest`: path and header Host."""
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    from torchx_apps.launch.kubernetes import service_files

    mounts = ["type=volume", "src=bundles", "dst=/bundles"]
    made = service_files(
        component.http(
            *flags, bundle="/bundles/a", manifest="k8s", image="a:1", mounts=mounts
        ),
        {},
    )
    (container,) = made["deployment.yaml"]["spec"]["template"]["spec"]["containers"]
    asked = [
        container[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "readiness", "liveness")
    ]
    return [(probe["path"], probe["httpHeaders"][0]["value"]) for probe in asked]


@pytest.mark.slow
@pytest.mark.launch
def test_a_rolling_update_loses_no_request(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    """By a balancer that hears of the end late, and whose clients keep the connections that they have."""
    flags = [str(bundles[0].folder), "--linger=2", "--drain=0.2"]
    hosts = "--allowed-hosts=*.example.com,127.0.0.1"
    with (
        launched(tmp_path / "old", *flags, hosts) as old,
        launched(tmp_path / "new", *flags, hosts) as new,
    ):
        for path, header in probes(hosts):
            assert new.client().get(path, Host=header).status == 200
        with Balancer([old]) as clients:
            until(lambda: clients.statuses[old.port, 200] > 20)
            old.process.send_signal(signal.SIGTERM)
            until(lambda: old.client().get("/readyz").status == 503)
            before = clients.statuses[old.port, 200]
            until(lambda: clients.statuses[old.port, 200] > before + 5)
            clients.listed = [new]
            assert old.process.wait(60) == 0
            until(lambda: clients.statuses[new.port, 200] > 20)
        assert clients.lost == []
        assert set(clients.statuses) == {(old.port, 200), (new.port, 200)}


def test_a_port_that_is_taken_is_told(
    bundles: list[SmallBundle], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([str(bundles[0].folder), f"--port={port}"]) == 1
    told = f"--host 127.0.0.1 --port {port}: it is in use; give another, or --port 0 for any that is free"
    assert capsys.readouterr().err.strip() == told


@pytest.mark.launch
def test_a_bundle_that_is_broken_keeps_it_from_beginning(
    bundles: list[SmallBundle], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bundles[0].folder, broken)
    (broken / "interaction.safetensors").unlink()
    done = run(str(broken), "--port=0")
    assert done.returncode == 1
    assert (
        "interaction.safetensors: the manifest lists it, and it is missing"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchx_apps.serve", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port=99999"], "--port 99999"),
        (["--port=0", "--host=192.0.2.1"], "this machine has no such address"),
        (["--workers=0"], "workers=0: must be 1 or more"),
        (
            ["--workers=99999"],
            "99999 workers on one machine: they need 25,000 GiB before they read any data, and it has",
        ),
        (["--hang=0"], "hang_s=0.0: must be greater than 0"),
        (["--linger=-1"], "linger_s=-1.0: must be 0 or more"),
        (["--hang=2"], "hang_s=2: must be more than the 2 s of time_ms=2000"),
        (
            ["--allowed-hosts=a,b*"],
            "allowed_hosts: 'b*'; must be a name or an address without a port, *.example.com, or *",
        ),
        (["--start=0"], "start_s=0.0: must be greater than 0"),
        (["--max-k=0"], "limit k=0: must be 1 or more"),
        (["--watch=0"], "watch_s=0.0: must be greater than 0"),
        (["--token-file=nowhere"], "--token-file nowhere: it cannot be read"),
    ],
)
def test_a_wrong_flag_is_told_with_its_value(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["bundle", *flags]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ([], ("localhost", "127.0.0.1", "::1")),
        (["--host=127.0.0.2"], ("localhost", "127.0.0.1", "::1", "127.0.0.2")),
        (["--host=0.0.0.0"], ("*",)),
        (["--host=0.0.0.0", "--allowed-hosts=a, *.b.c"], ("a", "*.b.c")),
    ],
)
def test_a_loopback_address_is_asked_for_under_its_own_names(
    flags: list[str], hosts: tuple[str, ...]
) -> None:
    assert (
        serve._settings(serve._parser().parse_args(["bundle", *flags])).allowed_hosts
        == hosts
    )


@pytest.mark.unit
def test_the_component_is_listed_and_says_what_was_asked() -> None:
    assert "rec.serve.http" in get_components()
    flags = [
        "--bundle",
        "runs/a/bundle",
        "--port",
        "80",
        "--workers",
        "3",
        "--token_file",
        "token",
        "--vectors",
        "users",
        "--",
        "--max-k",
        "9",
    ]
    (role,) = materialize_appdef(component.http, flags).roles
    words = "-m torchx_apps.serve runs/a/bundle --host=127.0.0.1 --port=80 --workers=3 --token-file=token"
    words += " --vectors=users --max-k 9"
    assert (role.args, role.port_map, role.env["OMP_NUM_THREADS"]) == (
        words.split(),
        {"http": 80},
        "1",
    )


class TestValid(ComponentTestCase):
    def test_http(self) -> None:
        self.validate(component, "http")


@pytest.mark.unit
def test_an_empty_token_is_none_that_anybody_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHREC_EXT_TOKEN", "")
    assert serve.main(["bundle"]) == 1
    assert "the token is empty" in capsys.readouterr().err
