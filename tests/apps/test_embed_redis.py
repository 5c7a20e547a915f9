"""rec.embed --redis: users' vectors in a real Redis, read by a server; and a Redis that is away or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import run_ranks
from tests.retrieval.bundles import bundle_of, contents
from tests.retrieval.redis_server import RedisServer
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.store.redis import RedisStore
from torchx_apps import embed
from torchx_apps.jobs import embedding as catalogue
from torchx_apps.jobs import embedding as embed_redis
from torchx_apps.jobs.embedding import TowerGroup

USER = 7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def redis(server: RedisServer) -> Iterator[RedisServer]:
    if server.process is None:
        server.start()
    client = client_of(server)
    client.flushall()
    yield server
    client.close()


def client_of(server: RedisServer) -> Any:
    from redis import Redis

    return Redis.from_url(server.url)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, and its users in rows of no order."""
    root = tmp_path_factory.mktemp("embed")
    bundle_of(root / "bundle")
    users = contents()["users"].features
    pq.write_table(
        users.take(list(reversed(range(len(users))))),
        root / "users.parquet",
        row_group_size=9,
    )
    return root


def main(root: Path, url: str, *flags: object) -> int:
    users = [
        "--catalogue",
        str(root / "users.parquet"),
        "--id=user_id",
        "--tower=query",
        f"--redis={url}",
    ]
    return embed.main([str(root / "bundle"), *users, *map(str, flags)])


def stored(
    bundle: Bundle, redis: RedisServer, ids: list[int]
) -> tuple[torch.Tensor, list[bool]]:
    store = RedisStore(redis.url, tower=bundle.query_digest, timeout_s=5)
    try:
        vectors, there = store.find(ids)
        return vectors, there.tolist()
    finally:
        store.close()


def on_ranks(runtime: Runtime, root: Path, url: str) -> str:
    catalogue.BLOCK_ROWS = 4
    bundle = Bundle.load(root / "bundle")
    rows = TowerGroup(
        bundle, list(bundle.query), runtime, [str(root / "users.parquet")], "user_id"
    )
    return embed_redis.fill_redis(rows, url, None, [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_write_the_vectors_of_all_users(
    ranks: int, folder: Path, redis: RedisServer
) -> None:
    (message,) = set(run_ranks(on_ranks, ranks, folder, redis.url))
    bundle, client = Bundle.load(folder / "bundle"), client_of(redis)
    assert (
        message
        == f"redis: {redis.url} (100 x 8 of tower user ({bundle.query_digest[:12]}) written, kept for ever)"
    )
    assert bundle.users is not None
    ids = bundle.users.ids.ids().tolist()
    vectors, there = stored(bundle, redis, ids)
    assert all(there)
    torch.testing.assert_close(
        vectors,
        bundle.embed_query(bundle.users.rows(range(len(ids)))),
        rtol=0,
        atol=1e-6,
    )
    assert client.pttl(f"user:{bundle.query_digest}:{USER}") == -1
    client.close()


def test_vectors_expire_and_are_taken_out(
    folder: Path, redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, client = Bundle.load(folder / "bundle"), client_of(redis)
    for flags, longest in (([], 86_400_000), (["--expire=50"], 50_000)):
        assert main(folder, redis.url, *flags) == 0
        assert (
            longest - 40_000
            < client.pttl(f"user:{bundle.query_digest}:{USER}")
            <= longest
        )
    assert "written, kept for 50 s)" in capsys.readouterr().out
    only = [
        str(folder / "bundle"),
        "--tower=query",
        f"--redis={redis.url}",
        f"--delete={USER},5000",
    ]
    assert embed.main(only) == 0
    assert capsys.readouterr().out.endswith("; 1 of 2 deleted)\n")
    assert stored(bundle, redis, [USER, 8])[1] == [False, True]
    client.close()


def away(redis: RedisServer) -> None:
    redis.stop()


def full(redis: RedisServer) -> None:
    client = client_of(redis)
    client.config_set("maxmemory", 1)
    client.close()


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (away, "does not answer (Error 111 connecting to"),
        (full, "refuses: Command # 1 (SET user:"),
    ],
)
def test_a_redis_that_goes_away_or_is_full_midway_is_told_and_the_same_command_mends_it(
    trouble: Any,
    message: str,
    folder: Path,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vectors, blocks = TowerGroup.vectors, []

    def troubled(rows: TowerGroup, block: Any) -> torch.Tensor:
        blocks.append(block)
        if len(blocks) == 3:
            trouble(redis)
        return vectors(rows, block)

    monkeypatch.setattr(TowerGroup, "vectors", troubled)
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    # a Redis without a password lets its default user in with any
    url = redis.url.replace("//", "//default@")
    assert main(folder, url) == 1
    output = capsys.readouterr().err
    assert f"{redis.url} {message}" in output
    assert (
        " (18 of 100 rows were written, or a few more: run the same command again, which writes them all)"
        in output
    )
    assert "secret" not in output
    assert "Traceback" not in output
    redis.stop()
    redis.start()
    assert main(folder, url) == 0
    output = capsys.readouterr().out
    assert "(100 x 8 of tower user" in output
    assert "secret" not in output


def test_a_redis_that_is_not_there_is_told_before_the_tower_runs(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TowerGroup, "vectors", lambda *_: pytest.fail("the tower ran"))
    absent = RedisServer(tmp_path).url
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    assert main(folder, absent) == 1
    output = capsys.readouterr().err
    assert f"{absent} does not answer" in output
    assert (
        "is redis-server running there? (no row is known to be written: run the same command again"
        in output
    )
    assert "secret" not in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tower=item"],
            "--redis holds users' vectors, and item makes others: add --tower query",
        ),
        (["--delete=7"], "--delete: 7 is also among the ids to write; leave it out"),
        (
            ["--delete=x"],
            "--delete: ids must be whole numbers like those of the store; got x",
        ),
        (["--expire=-1"], "--expire -1.0: must be seconds, or 0 for never"),
        (
            ["--store=fp16"],
            "--store fp16: is for --out; a store keeps its type when it is refreshed, and a Redis has fp32",
        ),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    flags: list[str],
    message: str,
    folder: Path,
    redis: RedisServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(folder, redis.url, *flags) == 1
    assert message in capsys.readouterr().err
    client = client_of(redis)
    assert client.dbsize() == 0
    client.close()


def test_the_password_comes_from_a_file_or_the_environment_and_is_shown_nowhere(
    folder: Path,
    redis: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = client_of(redis)
    client.config_set("requirepass", "hunter/2")
    try:
        assert main(folder, redis.url) == 1
        (tmp_path / "password").write_text("hunter/2\n")
        assert (
            main(folder, redis.url, "--redis-password-file", tmp_path / "password") == 0
        )
        client.flushall()
        monkeypatch.setenv("REDIS_PASSWORD", "hunter/2")
        assert main(folder, redis.url) == 0
        assert client.dbsize() > 0
        monkeypatch.setenv("REDIS_PASSWORD", "hunter/3")
        assert main(folder, redis.url) == 1
        assert (
            main(folder, redis.url.replace("://", "://:hunter/2@".replace("/2", "2")))
            == 1
        )
        (tmp_path / "empty").touch()
        assert main(folder, redis.url, "--redis-password-file", tmp_path / "empty") == 1
    finally:
        client.config_set("requirepass", "")
    printed = "".join(capfd.readouterr())
    assert "hunter" not in printed
    for message in (
        f"{redis.url} refuses: ",
        "--redis: the address holds a password",
        "empty: it is empty; write",
    ):
        assert message in printed


def test_a_user_twice_is_refused(
    folder: Path, redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = contents()["users"].features
    pq.write_table(
        pa.concat_tables([users, users.slice(3, 1)]), tmp_path / "twice.parquet"
    )
    assert main(folder, redis.url, "--catalogue", tmp_path / "twice.parquet") == 1
    assert (
        "ids: 4 stands at rows 3 and 100; each id must be there once"
        in capsys.readouterr().err
    )


@pytest.mark.launch
def test_a_server_answers_from_the_redis_that_the_command_filled_as_the_live_tower_does(
    folder: Path, redis: RedisServer, tmp_path: Path
) -> None:
    for package in ("uvicorn", "starlette", "prometheus_client"):
        pytest.importorskip(package, reason="needs the extra `serve`")
    from tests.retrieval.server.launched import launched, until

    assert main(folder, redis.url) == 0
    with launched(
        tmp_path / "log", str(folder / "bundle"), f"--redis={redis.url}"
    ) as service:

        def ask(user: int, vector: str) -> tuple[str, list[Any]]:
            answer = (
                service.client()
                .post(
                    "/v1/recommend",
                    {"user": {"user_id": user}, "k": 10, "vector": vector},
                )
                .json
            )
            return answer["vector"], [answer["items"], answer["scores"]]

        for user in (USER, 100):
            # A busy machine may pass the server's 50 ms now and then.
            _, (items, scores) = until(
                lambda user=user: (reply := ask(user, "auto"))[0] == "redis" and reply
            )
            source, live = ask(user, "live")
            assert (source, live[0]) == ("live", items)
            assert scores == pytest.approx(live[1], abs=1e-5)
            assert len(items) == 10
