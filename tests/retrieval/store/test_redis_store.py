"""The Redis store against a real server: batches, expiry, versions, a server that goes away and comes back."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.retrieval.redis_server import RedisServer
from torchrec_ext.retrieval.store.redis import RedisStore, StoreUnreachable
from torchrec_ext.retrieval.store.versions import StoreError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


def store(server: RedisServer, tower: str, **options: object) -> RedisStore:
    return RedisStore(server.url, tower=tower, **({"timeout_s": 5.0} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 7, 1_000])
def test_found_as_put_in_any_batches(server: RedisServer, batch: int) -> None:
    mine = store(server, f"a{batch}", batch=batch)
    ids = list(range(50))
    vectors = torch.randn(50, 6)
    mine.put(ids, vectors)
    found, there = mine.find([3, 999, 49, 3])
    assert there.tolist() == [True, False, True, True]
    assert torch.equal(
        found, torch.stack([vectors[3], torch.zeros(6), vectors[49], vectors[3]])
    )
    mine.put([3], vectors[:1])
    assert torch.equal(mine.find([3])[0], vectors[:1])
    assert mine.delete([3, 4, 999]) == 2
    assert mine.find([3, 4, 5])[1].tolist() == [False, False, True]
    assert mine.find([])[1].tolist() == []


def test_towers_do_not_mix(server: RedisServer) -> None:
    old, new = store(server, "old", name="v"), store(server, "new", name="v")
    old.put(["ann"], torch.ones(1, 4))
    assert not new.find(["ann"])[1].any()
    new.put(["ann"], torch.zeros(1, 2))
    assert torch.equal(old.find(["ann"])[0], torch.ones(1, 4))


def test_a_vector_expires(server: RedisServer) -> None:
    brief = store(server, "brief", expiry_s=600)
    brief.put([1], torch.ones(1, 2))
    assert brief.find([1])[1].all()
    key = f"{brief._prefix}1"
    assert 0 < brief._redis.pttl(key) <= 600_000
    brief._redis.pexpire(key, 1)
    end = time.monotonic() + 20
    while brief.find([1])[1].any() and time.monotonic() < end:
        time.sleep(0.01)
    assert not brief.find([1])[1].any()
    lasting = store(server, "lasting", expiry_s=None)
    lasting.put([1], torch.ones(1, 2))
    assert lasting._redis.pttl(f"{lasting._prefix}1") == -1


def test_values_of_two_widths_are_damage(server: RedisServer) -> None:
    mine = store(server, "w")
    mine.put([1], torch.ones(1, 2))
    mine.put([2], torch.ones(1, 3))
    with pytest.raises(
        StoreError, match=r"have \[8, 12\] bytes; one tower has one width"
    ):
        mine.find([1, 2])


def test_refused(server: RedisServer) -> None:
    with pytest.raises(ValueError, match="tower='': must be the digest"):
        store(server, "")
    with pytest.raises(ValueError, match="timeout_s=0: must be greater than 0"):
        store(server, "t", timeout_s=0)
    with pytest.raises(ValueError, match="url='nowhere': "):
        RedisStore("nowhere", tower="t")
    for url in (
        "http://me:secret@host/0",
        "redis://:se/cret@host",
        "redis://:se?cret@host:x",
        "redis://host:x?password=a@secret",
    ):
        message = r"url='(http|redis)://[a-z./0:]*': is not the address of a Redis"
        with pytest.raises(ValueError, match=message) as error:
            RedisStore(url, tower="t")
        assert "cret" not in str(error.value)
    with pytest.raises(ValueError, match=r"vectors: shape \(1, 2\) for 2 ids"):
        store(server, "t").put([1, 2], torch.ones(1, 2))
    with pytest.raises(ValueError, match="finite numbers"):
        store(server, "t").put([1], torch.full((1, 2), torch.nan))


def test_a_server_that_goes_away_is_told_at_once_and_one_that_comes_back_is_used_again(
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path)
    mine = RedisStore(
        server.url.replace("//", "//user:secret@"), tower="t", timeout_s=5.0
    )
    with pytest.raises(StoreUnreachable, match="does not answer") as error:
        mine.find([1])  # before it was ever there
    assert "secret" not in str(error.value)
    mine = RedisStore(server.url, tower="t", timeout_s=5.0)
    server.start()
    try:
        for round_number in range(2):
            mine.put([1], torch.full((1, 2), float(round_number)))
            assert mine.find([1])[0].tolist() == [[float(round_number)] * 2]
            server.stop()
            with pytest.raises(StoreUnreachable):
                mine.find([1])
            with pytest.raises(ConnectionError):
                mine.put([1], torch.ones(1, 2))
            server.start()
            # empty, as it came back, and by the same object
            assert not mine.find([1])[1].any()
    finally:
        server.stop()


def test_a_wrong_password_is_not_told_as_a_server_that_is_away(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        admin = RedisStore(server.url, tower="t", timeout_s=5.0)
        admin._redis.config_set("requirepass", "right")
        with pytest.raises(StoreError, match="refuses: ") as error:
            RedisStore(
                server.url.replace("//", "//:wrong@"), tower="t", timeout_s=5.0
            ).find([1])
        assert not isinstance(error.value, StoreUnreachable)
        assert "wrong@" not in str(error.value)
        assert (
            not RedisStore(
                server.url.replace("//", "//:right@"), tower="t", timeout_s=5.0
            )
            .find([1])[1]
            .any()
        )
    finally:
        server.stop()


def test_a_server_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        mine = RedisStore(server.url, tower="t", timeout_s=0.1)
        server.process.send_signal(19)  # type: ignore[union-attr]  # SIGSTOP
        with pytest.raises(StoreUnreachable, match="Timeout"):
            mine.find([1])
    finally:
        server.stop()
