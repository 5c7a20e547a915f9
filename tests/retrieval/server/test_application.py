"""The HTTP server over a bundle in memory: answers, refusals that name limits, health, metrics, logs without users."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.server.running import Running, running_server
from tests.retrieval.small_bundle import FIRST_ITEM, SmallBundle
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.scorer.requests import RecommendRequest
from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer
from torchrec_ext.retrieval.server.settings import Limits, ServerConfig
from torchrec_ext.retrieval.server.telemetry import Log, resident_bytes

USER = 7
LIMITS = Limits(body_bytes=20_000, k=20, candidates=30, rows=3, queue=2, time_ms=3_000)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return SmallBundle(tmp_path_factory.mktemp("made") / "bundle").bundle


@pytest.fixture(scope="module")
def running(bundle: Bundle) -> Iterator[Running]:
    with running_server(bundle, limits=LIMITS) as found:
        yield found


def test_recommend_answers_what_the_scorer_does(running: Running) -> None:
    answer = running.client().post(
        "/v1/recommend", {"user": {"user_id": USER}, "k": 3, "titles": True, "liked": 2}
    )
    expected = running.queued.scorer.recommend(
        RecommendRequest(user={"user_id": USER}, k=3, titles=True, liked=2)
    )
    assert answer.status == 200
    assert answer.json == {
        "items": expected.items,
        "scores": expected.scores,
        "user": "known",
        "unknown_user": False,
        "unknown_features": [],
        "vector": "live",
        "unknown_items": [],
        "bundle": running.queued.scorer.bundle.manifest.digest,
        "asked": 3,
        "answered": 3,
        "titles": expected.titles,
        "liked": expected.liked,
        "liked_titles": expected.liked_titles,
    }


def test_nearest_items_are_those_with_the_greatest_cosine(
    running: Running, bundle: Bundle
) -> None:
    item = 1_004
    answer = (
        running.client()
        .post("/v1/nearest", {"item": item, "k": 20, "titles": True})
        .json
    )
    vectors = bundle.store.rows(torch.arange(len(bundle.store)))
    cosines = torch.cosine_similarity(vectors, vectors[item - FIRST_ITEM][None])
    cosines[item - FIRST_ITEM] = -2
    best = cosines.topk(20)
    assert answer["items"] == (best.indices + FIRST_ITEM).tolist()
    assert answer["scores"] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert answer["titles"] == bundle.items.titles_of(best.indices.numpy())
    assert answer["bundle"] == bundle.manifest.digest


def test_the_example_of_a_person_never_seen_is_answered(
    running: Running, bundle: Bundle
) -> None:
    served = running.client().get("/v1/bundle").json
    assert served["example_user"] == {"age": 0.0, "history": []}
    # These histories are of the tables' rows, which are no ids of this catalogue, so
    # they have no titles.
    assert served["known_values"] == {"history": list(range(1, len(bundle.store) + 1))}
    assert served["known_titles"] == {}
    assert served["manifest"]["certificate"]["calibrated"] is True
    described = running.client().get("/openapi.json").json
    history = (
        described["components"]
        and described["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]
    )
    history = history["application/json"]["schema"]["properties"]["user"]["properties"][
        "history"
    ]
    assert history["items"]["examples"] == list(range(1, 21))
    for path in ("recommend", "score", "nearest", "embed"):
        content = described["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"][
            "application/json"
        ]
        assert running.client().post(f"/v1/{path}", content["example"]).status == 200


def test_a_first_stage_that_misses_most_is_told(bundle: Bundle) -> None:
    log = io.StringIO()
    queued = QueuedScorer(
        ServerConfig(bundle=Path("unused"), stage="dot", retrieve=1),
        bundle,
        log=Log(log),
    )
    queued.log_bundle()
    loaded, unsuitable = map(json.loads, log.getvalue().splitlines())
    assert loaded["stage_recall_at_10"] < 0.5
    assert unsuitable["event"] == "stage_unsuitable"
    assert "take --stage exact" in unsuitable["why"]
    queued.close()


def test_rows_that_do_not_fit_into_memory_are_logged(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchrec_ext.retrieval.store.store.available_memory", lambda: 0
    )
    log = io.StringIO()
    queued = QueuedScorer(ServerConfig(bundle=Path("unused")), bundle, log=Log(log))
    queued.log_bundle()
    _, on_disk = map(json.loads, log.getvalue().splitlines())
    assert on_disk["event"] == "rows_left_on_disk"
    assert "more than half of the memory" in on_disk["why"]
    queued.close()


def test_score_and_embed(running: Running) -> None:
    client = running.client()
    scores = client.post("/v1/score", {"user": {"user_id": 9_999}, "items": [1_001, 5]})
    assert (
        scores.status,
        scores.json["unknown_user"],
        scores.json["unknown_items"],
        len(scores.json["scores"]),
    ) == (
        200,
        True,
        [5],
        2,
    )
    vectors = client.post("/v1/embed", {"rows": [{"user_id": USER}]})
    assert (vectors.status, len(vectors.json["vectors"][0])) == (200, 8)
    items = client.post(
        "/v1/embed", {"rows": [{"item_id": 3, "price": 0.1}], "side": "candidate"}
    )
    assert (items.status, items.json["unknown_features"]) == (200, [[]])


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("recommend", b"{", 400, "the body is not JSON"),
        ("recommend", b"\xff\xfe{", 400, "the body is not JSON"),
        ("recommend", b"[" * 5_000, 400, "not JSON"),
        ("recommend", [], 422, "the body: it is a list; send a JSON object"),
        ("recommend", {}, 422, "user: it is missing"),
        (
            "recommend",
            {"user": 7},
            422,
            "user: it is a whole number; must be an object of features",
        ),
        (
            "recommend",
            {"usr": {}},
            422,
            "usr: there is no such field; did you mean 'user'?",
        ),
        ("recommend", {"u" * 10_000: 1}, 422, "u" * 200 + ": there is no such field"),
        (
            "recommend",
            {"user": {"u" * 10_000: 1}},
            422,
            "u" * 200 + ": a name of 10000 characters; the limit is 200",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "k": "10"},
            422,
            "k: it is a string; must be a whole number",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "k": True},
            422,
            "k: it is true or false",
        ),
        ("recommend", {"user": {"user_id": USER}, "k": None}, 422, "k: null"),
        (
            "recommend",
            {"user": {"user_id": USER}, "k": 0},
            422,
            "k: 0: must be 1 or more",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "k": 21},
            422,
            "k: 21; the limit is 20: ask for fewer",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": []},
            422,
            "candidates: the list is empty",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": [1_001] * 2},
            422,
            "candidates: 1001 more than once",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": list(range(31))},
            422,
            "31 entries; the limit is 30: send fewer",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": [1, "2"]},
            422,
            "must be ids, all whole numbers or all strings",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": [1.5]},
            422,
            "candidates: it holds a number",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": [2**63]},
            422,
            "an id is beyond 64 bits",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "candidates": ["a"]},
            422,
            "candidates: 'a' is a string",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "categories": ["Western"]},
            422,
            "categories: no item has 'Western'",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": ["War"]},
            422,
            "filter: it is a list; must be an object of lists of values by attribute",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"categories": "War"}},
            422,
            "filter.categories: it is a string; must be a list of values",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"year": [1990, True]}},
            422,
            "filter.year: it holds a whole number and true or false; must be values",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"year": [1990.5]}},
            422,
            "filter.year: it holds a number",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"year": []}},
            422,
            "filter.year: must be a list of one",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"yaer": [1990]}},
            422,
            "did you mean 'year'?",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"year": [9]}},
            422,
            "filter.year: no item has '9'",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"x" * 201: [9]}},
            422,
            "a name of 201 characters",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "filter": {"not": list(range(31))}},
            422,
            "filter.not: 31 entries; the limit is 30: send fewer",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "exclude_seen": 1},
            422,
            "exclude_seen: it is a whole number; must be true or false",
        ),
        (
            "recommend",
            {"user": {"user_id": USER}, "vector": "old"},
            422,
            "vector: 'old'; must be 'auto' or 'live'",
        ),
        (
            "embed",
            {"rows": [{"user_id": USER}], "side": ["query"]},
            422,
            "side: it is a list; must be 'query' or 'candidate'",
        ),
        (
            "recommend",
            {"user": {"user_id": USER, "age": {}}},
            422,
            "user.age: must be a value or a list of values",
        ),
        ("recommend", {"user": {"age": 0.5}}, 422, "user.history: it is missing"),
        (
            "recommend",
            {"user": {"user_id": USER, "agee": 0.5}},
            422,
            "user.agee: the model reads no such column; did you mean 'age'?",
        ),
        (
            "recommend",
            b'{"user": {"user_id": 7, "age": NaN}}',
            422,
            "user.age: nan: must be a finite number",
        ),
        (
            "recommend",
            b'{"user": {"user_id": 7, "age": 1e999}}',
            422,
            "user.age: inf: must be a finite number",
        ),
        ("recommend", {"user": {"user_id": 2**70}}, 422, "user.user_id: "),
        ("recommend", {"user": {"user_id": "\ud800"}}, 422, "user.user_id: "),
        ("score", {"user": {"user_id": USER}}, 422, "items: it is missing"),
        ("nearest", {}, 422, "item: it is missing"),
        ("nearest", {"item": 5}, 422, "item: '5' is not in the catalogue"),
        (
            "nearest",
            {"item": "a"},
            422,
            "item: 'a' is a string; ids here are whole numbers",
        ),
        (
            "nearest",
            {"item": True},
            422,
            "item: it is true or false; must be an id, a whole number or a string",
        ),
        ("nearest", {"item": 2**63}, 422, "an id is beyond 64 bits"),
        ("nearest", {"item": 1_001, "k": 0}, 422, "k: 0: must be 1 or more"),
        (
            "score",
            {"user": {"user_id": USER}, "items": []},
            422,
            "items: the list is empty",
        ),
        (
            "embed",
            {"rows": [{"item_id": 3}], "side": "candidate"},
            422,
            "rows[0].price: it is missing; the model reads item_id, price",
        ),
        (
            "embed",
            {"rows": [{"user_id": USER}] * 4},
            422,
            "rows: 4 entries; the limit is 3",
        ),
        (
            "embed",
            {"rows": [{"user_id": USER}, {"user_id": USER, "history": [1.5, "x"]}]},
            422,
            "rows",
        ),
        (
            "recommend",
            b" " * 20_001,
            413,
            "the body is longer than 20000 bytes, which is the limit",
        ),
    ],
)
def test_a_mistake_is_told_with_its_status(
    running: Running, path: str, body: Any, status: int, told: str
) -> None:
    answer = running.client().post(f"/v1/{path}", body)
    assert (answer.status, told in answer.told) == (status, True), answer.content


def test_a_limit_is_told_with_its_name_and_value(running: Running) -> None:
    answer = running.client().post(
        "/v1/recommend", {"user": {"user_id": USER}, "k": 21}
    )
    assert answer.json["error"] == {
        "code": "over_limit",
        "message": answer.told,
        "field": "k",
        "limit": {"name": "k", "value": 20},
    }


def test_pages_that_are_not_there_and_methods_that_are_not_allowed(
    running: Running,
) -> None:
    client = running.client()
    assert client.get("/v2").status == 404
    wrong = client.get("/v1/recommend")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert client.post("/v1/recommend", b"a=1", Content_Type="text/plain").status == 415


class Slow:
    """Holds the scorer up until it is let go."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        answer = running.queued.scorer.answer

        def held(requests: Sequence[Any]) -> Any:
            self.begun.set()
            self.let.wait(20)
            return answer(requests)

        monkeypatch.setattr(running.queued.scorer, "answer", held)


def in_background(
    running: Running, *bodies: Any, path: str = "/v1/recommend"
) -> tuple[list[Any], list[threading.Thread]]:
    answers: list[Any] = [None] * len(bodies)

    def ask(place: int) -> None:
        answers[place] = running.client().post(path, bodies[place])

    threads = [
        threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    return answers, threads


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_is_429_and_what_waits_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, asked = Slow(running, monkeypatch), {"user": {"user_id": USER}, "k": 3}
    first, one = in_background(running, asked)
    assert slow.begun.wait(20)
    rest, others = in_background(running, asked, asked)
    until(lambda: running.queued.waiting() == 2)
    refused = running.client().post("/v1/recommend", asked)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.json["error"]["limit"] == {"name": "queue", "value": 2}
    assert running.client().get("/healthz").status == 200
    slow.let.set()
    for thread in (*one, *others):
        thread.join(20)
    assert [answer.status for answer in first + rest] == [200, 200, 200]


def test_searches_are_admitted_by_what_they_cost_and_run_in_slices(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(bundle, limits=Limits(time_ms=20_000)) as running:
        monkeypatch.setattr(
            running.queued.scorer._ready, "search_s", 6.0, raising=False
        )
        slow, asked = Slow(running, monkeypatch), {"user": {"user_id": USER}, "k": 3}
        held, batches = running.queued.scorer.answer, list[list[str]]()

        def noted(requests: Sequence[Any]) -> Any:
            batches.append([type(one).__name__ for one in requests])
            return held(requests)

        monkeypatch.setattr(running.queued.scorer, "answer", noted)
        answers, threads = in_background(running, asked)
        assert slow.begun.wait(20)
        for waiting in (1, 2):
            others = in_background(running, asked)
            answers, threads = answers + others[0], threads + others[1]
            until(lambda waiting=waiting: running.queued.waiting() == waiting)
        refused = running.client().post("/v1/recommend", asked)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert (
            "before this one take 18,000 ms and it takes 6,000, and the limit is 20000 ms; come back"
            in refused.told
        )
        assert refused.json["error"]["limit"] == {"name": "time_ms", "value": 20_000}
        # no search
        among = in_background(running, {**asked, "candidates": [1_001, 1_002]})
        until(lambda: running.queued.waiting() == 3)
        slow.let.set()
        for thread in (*threads, *among[1]):
            thread.join(20)
        assert batches == [
            ["RecommendRequest"],
            ["RecommendRequest"] * 2,
            ["RecommendRequest"],
        ]
        monkeypatch.setattr(
            running.queued.scorer._ready, "search_s", 21.0, raising=False
        )
        too_long = running.client().post("/v1/recommend", asked)
        assert (too_long.status, too_long.json["error"]["limit"]) == (
            413,
            {"name": "time_ms", "value": 20_000},
        )
        assert (
            "a search of all 49 items takes 21,000 ms here, and the limit is 20000 ms; name `candidates`"
            in too_long.told
        )


def test_items_to_score_are_admitted_by_what_they_cost(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As whole-catalogue searches are: a dozen together are not begun, and few items go first."""
    user = {"user": {"user_id": USER}}
    with running_server(bundle, limits=Limits(time_ms=20_000)) as running:
        assert 0 < running.queued.scorer._ready.score_s < 0.01
        monkeypatch.setattr(running.queued.scorer._ready, "score_s", 0.4)
        client, ids = running.client(), [1_001] * 20
        many: list[tuple[str, dict[str, Any]]] = [
            ("/v1/score", {**user, "items": ids}),
            (
                "/v1/recommend",
                {**user, "k": 3, "candidates": list(range(1_001, 1_021))},
            ),
        ]
        slow = Slow(running, monkeypatch)
        answers, threads = in_background(
            running, {**user, "k": 3, "candidates": list(range(1_001, 1_041))}
        )
        assert slow.begun.wait(20)
        for path, asked in many:
            refused = client.post(path, asked)
            assert (refused.status, refused.json["error"]["limit"]["name"]) == (
                429,
                "time_ms",
            )
            assert "before this one take 16,000 ms and it takes 8,000" in refused.told
        slow.let.set()
        for thread in threads:
            thread.join(20)
        assert answers[0].status == 200
        too_many = client.post("/v1/score", {**user, "items": ids * 3})
        assert too_many.status == 413
        assert (
            "scoring 60 items takes 24,000 ms here, and the limit is 20000 ms; name fewer"
            in too_many.told
        )
        monkeypatch.setattr(running.queued.scorer._ready, "score_s", 1e-3)
        assert client.post("/v1/score", {**user, "items": ids}).status == 200


def test_rows_to_embed_are_admitted_by_what_they_cost(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row takes is known from the answer before."""
    with running_server(bundle, limits=Limits(time_ms=20_000)) as running:
        ready, asked = running.queued.scorer._ready, {"rows": [{"user_id": USER}] * 3}
        assert running.client().post("/v1/embed", asked).status == 200
        assert 0 < ready.embed_s["query"] < 1
        monkeypatch.setitem(ready.embed_s, "query", 4.0)
        slow = Slow(running, monkeypatch)
        answers, threads = in_background(running, asked, path="/v1/embed")
        assert slow.begun.wait(20)
        refused = running.client().post("/v1/embed", asked)
        assert (refused.status, refused.json["error"]["limit"]["name"]) == (
            429,
            "time_ms",
        )
        assert "before this one take 12,000 ms and it takes 12,000" in refused.told
        monkeypatch.setitem(ready.embed_s, "query", 7.0)
        too_many = running.client().post("/v1/embed", asked)
        assert too_many.status == 413
        assert (
            "embedding 3 rows takes 21,000 ms here, and the limit is 20000 ms; give fewer, or"
            in too_many.told
        )
        slow.let.set()
        for thread in threads:
            thread.join(20)
        assert answers[0].status == 200


def test_a_client_that_goes_away_leaves_the_queue(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, asked = Slow(running, monkeypatch), {"user": {"user_id": USER}, "k": 3}
    answers, threads = in_background(running, asked)
    assert slow.begun.wait(20)
    body = json.dumps(asked).encode()
    for _ in range(3):  # more than the queue takes
        with socket.create_connection(("127.0.0.1", running.port)) as raw:
            raw.sendall(
                b"POST /v1/recommend HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            until(lambda: running.queued.in_flight == 2)
        until(lambda: running.queued.in_flight == 1)
    slow.let.set()
    threads[0].join(20)
    assert answers[0].status == 200
    assert '"status": 499' in running.log.getvalue()
    assert running.client().post("/v1/recommend", asked).status == 200


def test_a_store_that_is_cut_off_under_the_service_is_503_and_ends_nothing(
    tmp_path: Path,
) -> None:
    made = SmallBundle(tmp_path / "bundle")
    with running_server(made.bundle) as running:
        rows = next((tmp_path / "bundle" / "store").glob("*/rows.bin"))
        os.truncate(rows, 8)
        answer = running.client().post("/v1/recommend", {"user": {"user_id": USER}})
        assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")
        assert "changed in place" in answer.told
        assert running.client().get("/healthz").status == 200


def test_what_takes_too_long_is_503_and_a_body_that_never_ends_408(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(bundle, limits=Limits(time_ms=50)) as running:
        slow = Slow(running, monkeypatch)
        answer = running.client().post("/v1/recommend", {"user": {"user_id": USER}})
        assert (answer.status, answer.json["error"]["limit"]) == (
            503,
            {"name": "time_ms", "value": 50},
        )
        assert "retry-after" in answer.headers
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as raw:
            # a body that never comes
            raw.sendall(
                b"POST /v1/recommend HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 408"), (
                "and then it is closed"
            )
        slow.let.set()


def test_a_body_of_100_mb_is_refused_and_not_kept(running: Running) -> None:
    client, before = running.client(), resident_bytes()
    declared = client.post("/v1/recommend", bytes(100_000_000))
    assert (declared.status, declared.json["error"]["limit"]) == (
        413,
        {"name": "body_bytes", "value": 20_000},
    )
    connection = running.client().connection
    connection.request(
        "POST",
        "/v1/recommend",
        (bytes(1_000_000) for _ in range(100)),
        encode_chunked=True,
    )
    assert connection.getresponse().status == 413
    assert resident_bytes() - before < 60_000_000
    assert client.get("/healthz").status == 200


def test_a_token_is_asked_of_callers_and_not_of_probes(bundle: Bundle) -> None:
    with running_server(bundle, token="a secret of some length") as running:
        client, asked = running.client(), {"user": {"user_id": USER}}
        missing = client.post("/v1/recommend", asked)
        assert (missing.status, missing.headers["www-authenticate"]) == (401, "Bearer")
        for wrong in (
            "Bearer another",
            "a secret of some length",
            "Bearer a secret of some lengthh",
            "Bearer \xe9",
        ):
            assert (
                client.post("/v1/recommend", asked, Authorization=wrong).status == 401
            )
        assert client.get("/metrics").status == 401
        assert (
            client.post(
                "/v1/recommend", asked, Authorization="Bearer a secret of some length"
            ).status
            == 200
        )
        assert [
            client.get(path).status
            for path in ("/healthz", "/readyz", "/", "/openapi.json")
        ] == [200] * 4
        running.queued.refuse("/srv/bundle/store: of another tower")
        assert "srv" not in client.get("/readyz").json["refused"]
        bearer = {"Authorization": "Bearer a secret of some length"}
        assert (
            client.get("/readyz", **bearer).json["refused"]
            == "/srv/bundle/store: of another tower"
        )
        assert client.get("/v1/bundle", **bearer).json["sample_users"][:2] == [1, 2]
        assert "secret" not in running.log.getvalue()
        assert "secret" not in repr(running.queued.settings)
    with pytest.raises(ValueError, match="the token is empty"):
        ServerConfig(bundle=running.queued.settings.bundle, token=" ")


def test_ids_of_users_are_offered_to_callers_on_this_machine(bundle: Bundle) -> None:
    with running_server(
        bundle, allowed_hosts=("localhost", "127.0.0.1", "::1")
    ) as running:
        assert running.client().get("/v1/bundle").json["sample_users"][:2] == [1, 2]
    with running_server(
        bundle, allowed_hosts=("127.0.0.1", "shop.example.com")
    ) as running:
        assert running.client().get("/v1/bundle").json["sample_users"] == []


def test_ids_of_users_are_not_told_without_a_token(running: Running) -> None:
    served = running.client().get("/v1/bundle").json
    assert (served["users"] > 0, served["user_kind"], served["sample_users"]) == (
        True,
        "int64",
        [],
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("a.example.com", 200),
        ("[::1]:80", 200),
        ("evil.test", 400),
        ("example.com", 400),
        ("", 400),
    ],
)
def test_a_host_of_another_name_is_refused(
    bundle: Bundle, host: str, status: int
) -> None:
    with running_server(
        bundle, allowed_hosts=("localhost", "*.Example.com", "::1")
    ) as running:
        answer = running.client().post(
            "/v1/recommend", {"user": {"user_id": USER}}, Host=host
        )
    assert answer.status == status
    if status == 400:
        assert (
            "and this server answers to localhost, *.Example.com, ::1; ask under"
            in answer.json["error"]["message"]
        )


def test_ready_says_what_is_served_and_what_was_refused(
    running: Running, bundle: Bundle
) -> None:
    client = running.client()
    assert client.get("/readyz").json == {
        "status": "ready",
        "bundle": bundle.manifest.digest,
        "refused": None,
        "vectors": {},
    }
    running.queued.refuse("/srv/bundle/store: of another tower")
    refused = client.get("/readyz", Authorization="Bearer None").json["refused"]
    assert (
        refused
        == "a bundle was refused; the log of the server says why, and so does this page to those who bear its token"
    )
    assert client.post("/v1/recommend", {"user": {"user_id": USER}}).status == 200
    running.queued.swap(running.queued.scorer.bundle)
    assert client.get("/readyz").json["refused"] is None


def test_a_drain_refuses_new_requests_and_finishes_those_it_has(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(bundle) as running:
        slow, asked = Slow(running, monkeypatch), {"user": {"user_id": USER}}
        answers, threads = in_background(running, asked)
        assert slow.begun.wait(20)
        running.queued.draining = True
        refused = running.client().post("/v1/recommend", asked)
        assert (
            refused.status,
            refused.headers["retry-after"],
            refused.headers["connection"],
        ) == (503, "1", "close")
        ready = running.client().get("/readyz")
        assert (ready.status, ready.json["status"]) == (503, "draining")
        slow.let.set()
        threads[0].join(20)
        assert answers[0].status == 200


def samples(running: Running) -> dict[str, float]:
    lines = running.client().get("/metrics").content.decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (
            line.rpartition(" ") for line in lines if not line.startswith("#")
        )
    }


def test_metrics_count_what_was_asked(running: Running) -> None:
    name = 'serve_requests_total{route="/v1/recommend",status="200"}'
    before = samples(running)
    for _ in range(3):
        running.client().post("/v1/recommend", {"user": {"user_id": 9_999}})
    running.client().get("/v3/users/12345")
    after = samples(running)
    assert after[name] - before[name] == 3
    assert after["serve_cold_starts_total"] - before["serve_cold_starts_total"] == 3
    assert after['serve_requests_total{route="other",status="404"}'] >= 1
    assert after['serve_request_seconds_count{route="/v1/recommend"}'] >= 3


def test_an_error_of_ours_is_500_and_told_in_the_log_without_its_words(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(requests: Sequence[Any]) -> Any:
        raise KeyError("user 4711")

    monkeypatch.setattr(running.queued.scorer, "answer", broken)
    answer = running.client().post("/v1/recommend", {"user": {"user_id": USER}})
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal")
    assert "4711" not in answer.content.decode() + running.log.getvalue()
    line = next(
        json.loads(line)
        for line in running.log.getvalue().splitlines()
        if '"event": "error"' in line
    )
    assert line["error"] == "KeyError"
    assert any("broken" in frame for frame in line["at"])


def test_logs_are_json_and_hold_nothing_of_users(running: Running) -> None:
    asked = {
        "user": {"user_id": 73_219_001, "age": 0.73219002, "history": [73_219_003]},
        "exclude": [73_219_004],
    }
    client = running.client()
    assert client.post("/v1/recommend", asked).status == 200
    for path in ("/v1/users/73219005", "/?user=73219006"):
        client.get(path)
    client.post("/v1/recommend", {"user": {"73219007": 1}})
    lines = running.log.getvalue().splitlines()
    assert {"time", "event", "pid"} <= set(json.loads(lines[-1]))
    assert json.loads(lines[-1])["route"] == "/v1/recommend"
    assert "73219" not in running.log.getvalue()


def test_pages_come_with_a_policy_and_name_nothing_elsewhere(running: Running) -> None:
    client = running.client()
    for path in (
        "/",
        "/docs",
        "/static/page.css",
        "/static/page.js",
        "/static/docs.js",
        "/static/icon.svg",
    ):
        answer = client.get(path)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        text = answer.content.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http:" not in text
        assert "https:" not in text
        assert "style=" not in text
        assert "innerHTML" not in text
