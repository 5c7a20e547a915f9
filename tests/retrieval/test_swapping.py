"""Another bundle behind the pointer answers without a lost request; a broken one leaves the live one serving."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.retrieval.running import Server, serving
from tests.retrieval.small import Small
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.sealed import write_whole

pytestmark = pytest.mark.launch
BODY = {"user": {"user": 3}, "k": 5}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("swaps")
    for seed in (0, 1):
        Small(seed=seed).write(folder / str(seed))
    return [folder / "0", folder / "1"]


def wait_for(what: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


class Load:
    """Threads that ask until the block ends, and the statuses and digests of their answers."""

    def __init__(self, server: Server, threads: int = 3) -> None:
        self.statuses: list[Any] = []
        self.digests: set[str] = set()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(server,)) for _ in range(threads)
        ]

    def _ask(self, server: Server) -> None:
        client = server.client()
        while not self._end.is_set():
            try:
                answer = client.post("/v1/recommend", BODY)
                self.statuses.append(answer.status)
                self.digests.add(answer.json["bundle"])
            except Exception as error:
                self.statuses.append(error)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(
    "swaps", [6, pytest.param(200, marks=pytest.mark.slow(minutes=2))]
)
def test_swaps_lose_no_request(swaps: int, bundles: list[Path], tmp_path: Path) -> None:
    pointer = tmp_path / "pointer"
    write_whole(pointer, str(bundles[0]).encode())
    digests = [Bundle.load(each, verify=False).digest for each in bundles]
    with serving(pointer) as server, Load(server) as load:
        client = server.client()
        for number in range(1, swaps + 1):
            write_whole(pointer, str(bundles[number % 2]).encode())
            wanted = digests[number % 2]
            wait_for(lambda w=wanted: client.get("/readyz").json["bundle"] == w)
        asked = len(load.statuses)
    assert asked > 10
    assert set(load.statuses) == {200}
    assert load.digests == set(digests)


def test_a_refused_bundle_leaves_the_live_one(
    bundles: list[Path], tmp_path: Path
) -> None:
    live = shutil.copytree(bundles[0], tmp_path / "live")
    broken = shutil.copytree(bundles[1], tmp_path / "broken")
    (broken / "rows.npy").write_bytes(b"x" * (broken / "rows.npy").stat().st_size)
    link = tmp_path / "link"
    link.symlink_to(live)
    with serving(link) as server, Load(server) as load:
        client = server.client()
        link.unlink()
        link.symlink_to(broken)
        wait_for(lambda: client.get("/readyz").json["refused"])
        wait_for(lambda: bool(server.events("bundle_refused")))
        (event,) = server.events("bundle_refused")
        assert "does not fit its digest" in event["reason"]
        link.unlink()
        link.symlink_to(bundles[1])
        wait_for(lambda: not client.get("/readyz").json["refused"])
        digest = Bundle.load(bundles[1], verify=False).digest
        wait_for(lambda: client.get("/readyz").json["bundle"] == digest)
    assert set(load.statuses) == {200}


def test_the_bundle_of_a_run_is_followed(bundles: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(bundles[0], run / "bundle")
    with serving(run) as server:
        client = server.client()
        os.rename(run / "bundle", run / "old")
        shutil.copytree(bundles[1], run / "new")
        os.rename(run / "new", run / "bundle")
        digest = Bundle.load(bundles[1], verify=False).digest
        wait_for(lambda: client.get("/readyz").json["bundle"] == digest)


def test_sighup_replaces_workers_one_by_one(bundles: list[Path]) -> None:
    with serving(bundles[0], "--workers=2") as server:
        wait_for(lambda: len(server.events("ready")) == 2)
        before = {each["pid"] for each in server.events("ready")}
        with Load(server) as load:
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: len(server.events("ready")) == 4)
            time.sleep(1)
        assert {each["pid"] for each in server.events("ready")[2:]}.isdisjoint(before)
    assert set(load.statuses) == {200}
