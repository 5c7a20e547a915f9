"""Users' vectors in a real Redis that goes away and comes back: degraded or 503 meanwhile, and recovered."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.redis_server import RedisServer
from tests.retrieval.server.launched import until
from tests.retrieval.server.running import running_server
from tests.retrieval.small_bundle import SmallBundle
from torchrec_ext.retrieval.scorer.requests import ScoreRequest
from torchrec_ext.retrieval.scorer.user_vectors import RemoteVectors, redis_vectors
from torchrec_ext.retrieval.store.redis import RedisStore
from torchrec_ext.retrieval.store.versions import StoreError

pytestmark = pytest.mark.launch
KNOWN, ELSEWHERE = 7, 5_000  # the second is known to the Redis alone


def test_a_redis_that_goes_away_degrades_to_what_is_known_and_recovers(
    tmp_path: Path,
) -> None:
    bundle, redis = SmallBundle(tmp_path / "bundle").bundle, RedisServer(tmp_path)
    assert bundle.users is not None
    fresh = 2 * bundle.embed_query(bundle.users.rows([KNOWN - 1, KNOWN]))

    def fill() -> None:
        store = RedisStore(redis.url, tower=bundle.query_digest, timeout_s=5)
        store.put([KNOWN, ELSEWHERE], fresh)
        store.close()
        other = RedisStore(redis.url, tower="another tower", timeout_s=5)
        other.put([8], fresh[:1])
        other.close()

    try:
        redis.start()
        fill()
        with running_server(bundle, vectors=redis_vectors(redis.url)) as running:

            def ask(user: int) -> tuple[int, str]:
                answer = running.client().post(
                    "/v1/score", {"user": {"user_id": user}, "items": [1_001]}
                )
                return answer.status, answer.json.get("vector") or answer.json["error"][
                    "code"
                ]

            # A busy machine may pass the store's 50 ms now and then; then the fuse lets
            # it rest for a second.
            until(lambda: ask(KNOWN) == (200, "redis"))
            until(lambda: ask(ELSEWHERE) == (200, "redis"))
            assert ask(8) == (200, "live"), "the vectors of another tower are not taken"
            redis.stop()
            until(lambda: ask(KNOWN) == (200, "live"))
            assert ask(ELSEWHERE) == (503, "unavailable")
            assert running.client().get("/readyz").json["vectors"] == {"redis": False}
            start = time.monotonic()
            assert [ask(KNOWN) for _ in range(20)] == [(200, "live")] * 20
            assert time.monotonic() - start < 20, (
                "requests do not wait for it one by one"
            )
            redis.start()
            fill()
            until(lambda: ask(ELSEWHERE) == (200, "redis"))
            assert running.client().get("/readyz").json["vectors"] == {"redis": True}
    finally:
        redis.stop()


def test_a_malformed_value_is_a_miss_of_its_user_alone(tmp_path: Path) -> None:
    bundle, redis = SmallBundle(tmp_path / "bundle").bundle, RedisServer(tmp_path)
    assert bundle.users is not None
    users = list(range(1, 9))
    whole = bundle.embed_query(bundle.users.rows(list(range(8))))
    size = 4 * bundle.query_width
    patient = RemoteVectors(
        lambda tower, width: RedisStore(
            redis.url, tower=tower, width=width, timeout_s=10
        ),
        (StoreError,),
    )
    try:
        redis.start()
        store = RedisStore(redis.url, tower=bundle.query_digest, timeout_s=10)
        store.put(users, whole)
        write, key = store._redis, store._keys(users)
        for user, value in {
            1: b"\xff" * size,
            2: b"odd",
            3: bytes(size - 4),
            4: bytes(2**25),
            5: b"",
        }.items():
            write.set(key[user - 1], value)
        write.delete(key[5])
        write.lpush(key[5], "a list")
        with running_server(bundle, vectors=[patient]) as running:

            def ask(user: int) -> tuple[int, str]:
                answer = running.client().post(
                    "/v1/score", {"user": {"user_id": user}, "items": [1_001]}
                )
                return answer.status, answer.json["vector"]

            assert [ask(user) for user in users] == [(200, "live")] * 6 + [
                (200, "redis")
            ] * 2
            asked = [
                ScoreRequest(user={"user_id": user}, items=[1_001]) for user in users
            ]
            together = [
                answer.cold.vector for answer in running.queued.scorer.answer(asked)
            ]  # type: ignore[union-attr]
            assert together == ["live"] * 6 + ["redis"] * 2
            assert ask(8) == (200, "redis")
            page = running.client().get("/metrics").content.decode()
            assert 'serve_malformed_vectors_total{source="redis"} 10.0' in page, (
                "5 of them, twice: nothing is no vector, but none"
            )
            assert running.client().get("/readyz").json["vectors"] == {"redis": True}
            assert running.log.getvalue().count("vectors_malformed") == 1
    finally:
        redis.stop()


def test_a_wrong_address_is_told_at_the_start() -> None:
    assert redis_vectors(None) == []
    pytest.importorskip("redis", reason="needs the extra `retrieval`")
    with pytest.raises(ValueError, match="http://nowhere"):
        redis_vectors("http://nowhere")
