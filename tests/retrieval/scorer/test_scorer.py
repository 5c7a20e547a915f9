"""The scorer answers what the model would, under every filter, and says what was not in training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.examples import ITEMS, USERS
from tests.retrieval.small_bundle import FIRST_ITEM, FIRST_USER, SmallBundle
from torchrec_ext.models.tower_model import Interaction
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.scorer.compiled import UserScorer
from torchrec_ext.retrieval.scorer.requests import (
    EmbedRequest,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    UnavailableError,
)
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.scorer.user_vectors import FolderVectors, RemoteVectors
from torchrec_ext.retrieval.store.writer import write_store

pytestmark = pytest.mark.unit
ALL = np.arange(FIRST_ITEM, FIRST_ITEM + ITEMS - 1)
USER = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SmallBundle:
    return SmallBundle(tmp_path_factory.mktemp("made") / "bundle")


@pytest.fixture(scope="module")
def dot(tmp_path_factory: pytest.TempPathFactory) -> SmallBundle:
    return SmallBundle(
        tmp_path_factory.mktemp("made") / "bundle", interaction="dot", seed=1
    )


@pytest.fixture
def scorer(made: SmallBundle) -> Scorer:
    return Scorer(made.bundle)


def best(made: SmallBundle, user: int, left: NDArray[np.int64]) -> list[int]:
    """Ids of ``left``, best first by the whole model."""
    logits = made.logits(np.full(len(left), user), left)
    return left[logits.sort(descending=True, stable=True).indices.numpy()].tolist()  # type: ignore[no-any-return]


def seen(user: int) -> list[int]:
    return [FIRST_ITEM + user % 49, FIRST_ITEM + (user + 5) % 49]


@pytest.mark.parametrize("interaction", ["top_nn", "dot", "cosine", "gmf"])
def test_scores_are_the_whole_models_on_100_000_random_pairs(
    interaction: Interaction, tmp_path: Path
) -> None:
    made = SmallBundle(tmp_path / "bundle", interaction=interaction)
    random = np.random.default_rng(0)
    users = random.integers(FIRST_USER, USERS, 500)
    items = random.integers(FIRST_ITEM, FIRST_ITEM + ITEMS - 1, (500, 200))
    asked = [
        ScoreRequest(user={"user_id": user}, items=own)
        for user, own in zip(users.tolist(), items.tolist(), strict=True)
    ]
    scores = torch.tensor(
        [cast(Any, one).scores for one in Scorer(made.bundle).answer(asked)]
    )
    whole = made.logits(users.repeat(200), items.reshape(-1)).view(500, 200)
    assert (scores - whole).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["made", "dot"])
def test_recommended_are_the_models_best_without_what_was_seen(
    kind: str, request: pytest.FixtureRequest
) -> None:
    made: SmallBundle = request.getfixturevalue(kind)
    scorer, users = Scorer(made.bundle), range(FIRST_USER, FIRST_USER + 20)
    answers = scorer.answer(
        [RecommendRequest(user={"user_id": user}, k=5) for user in users]
    )
    for user, answer in zip(users, answers, strict=True):
        assert (
            cast(Any, answer).items
            == best(made, user, ALL[~np.isin(ALL, seen(user))])[:5]
        )
        assert not cast(Any, answer).cold.unknown_user
    everything = scorer.recommend(
        RecommendRequest(user={"user_id": USER}, k=5, exclude_seen=False)
    )
    assert everything.items == best(made, USER, ALL)[:5]
    np.testing.assert_allclose(
        everything.scores,
        made.logits(np.full(5, USER), np.array(everything.items)),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"exclude": [1_001, 1_002]}, ~np.isin(ALL, [1_001, 1_002])),
        ({"allowed": [1_010, 1_011, 1_014]}, np.isin(ALL, [1_010, 1_011, 1_014])),
        ({"categories": ["War"]}, (ALL - FIRST_ITEM) % 3 == 2),
        (
            {"categories": ["War", "Comedy"], "exclude": [1_002]},
            ((ALL - FIRST_ITEM) % 3 != 1) & (ALL != 1_002),
        ),
        (
            {"categories": ["Comedy"], "allowed": [1_003, 1_004, 1_006]},
            np.isin(ALL, [1_003, 1_006]),
        ),
        (
            {"filter": {"categories": ["War"], "not": [1_002, 7]}},
            ((ALL - FIRST_ITEM) % 3 == 2) & (ALL != 1_002),
        ),
        ({"filter": {"studio": ["s5"]}}, ALL == 1_004),
        (
            {"filter": {"studio": ["s5", "s9", "s12"], "categories": ["War"]}},
            np.isin(ALL, [1_008, 1_011]),
        ),
        ({"filter": {"year": [1991, 1993], "studio": ["s31", "s5"]}}, ALL == 1_030),
        (
            {"filter": {"year": [1990]}, "categories": ["Comedy"]},
            np.isin(ALL, [1_000, 1_003, 1_006]),
        ),
        (
            {"filter": {"year": [1990]}, "allowed": [1_000, 1_020], "exclude": [1_003]},
            ALL == 1_000,
        ),
        (
            {
                "filter": {"year": [1992], "not": [1_020]},
                "candidates": [1_020, 1_021, 1_001],
            },
            ALL == 1_021,
        ),
        ({"candidates": [1_020, 1_004, 1_030]}, np.isin(ALL, [1_020, 1_004, 1_030])),
        (
            {
                "candidates": [1_020, 1_004, 1_030],
                "exclude": [1_004],
                "allowed": [1_004, 1_030],
            },
            ALL == 1_030,
        ),
    ],
)
def test_filters_hold_inside_the_search_and_among_candidates(
    made: SmallBundle, scorer: Scorer, filters: Any, left: NDArray[np.bool_]
) -> None:
    left = left & ~np.isin(ALL, seen(USER))
    plain = RecommendRequest(user={"user_id": USER + 1}, k=3)
    answer, other = scorer.answer(
        [RecommendRequest(user={"user_id": USER}, k=49, **filters), plain]
    )
    assert cast(Any, answer).items == best(made, USER, ALL[left])
    assert cast(Any, answer).asked == 49
    assert cast(Any, other).items == scorer.recommend(plain).items


def test_a_filter_that_leaves_nothing_answers_nothing(scorer: Scorer) -> None:
    answer = scorer.recommend(
        RecommendRequest(
            user={"user_id": USER}, filter={"year": [1991], "studio": ["s5"]}
        )
    )
    assert (answer.items, answer.scores) == ([], [])


def test_a_first_stage_by_products_hands_on_what_the_top_nn_ranks_and_says_what_it_misses(
    made: SmallBundle, dot: SmallBundle
) -> None:
    bundle, staged = made.bundle, Scorer(made.bundle, stage="dot", retrieve=12)
    answer = staged.recommend(
        RecommendRequest(user={"user_id": USER}, k=4, retrieve=9, exclude_seen=False)
    )
    vector = bundle.embed_query(
        {"user_id": [USER], "age": [made.ages[USER]], "history": [made.histories[USER]]}
    )
    nearest = ALL[(vector @ bundle.store.matrix().T)[0].topk(9).indices.numpy()]
    assert answer.items == best(made, USER, nearest)[:4]
    users = np.linspace(0, USERS - 2, 64).astype(np.int64) + FIRST_USER
    every = [set(best(made, user, ALL)[:5]) for user in users.tolist()]
    asked = [
        RecommendRequest(user={"user_id": user}, k=12, exclude_seen=False)
        for user in users.tolist()
    ]
    handed_on = [set(cast(Any, one).items) for one in staged.answer(asked)]
    share = sum(
        len(wanted & found) for wanted, found in zip(every, handed_on, strict=True)
    ) / (5 * len(users))
    assert 0 < share < 1
    assert staged.stage_recall(k=5) == pytest.approx(share)
    assert Scorer(made.bundle).stage_recall() is None
    assert Scorer(dot.bundle, stage="dot").stage_recall() is None, (
        "searched by its own score"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"store": "int8"}, {"interaction": "gmf"}, {"tables": "int8", "overlap": 0.1}],
)
def test_a_compiled_scorer_answers_alike(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request, answered or refused; int8 tables are compiled without the user tower."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    bundle = SmallBundle(tmp_path / "bundle", **settings).bundle
    plain, compiled = Scorer(bundle), Scorer(bundle, compile="auto")
    assert compiled._ready._score.compiled
    assert (compiled._ready._score_user is not None) == ("tables" not in settings)
    users: list[dict[str, Any]] = [{"user_id": user} for user in (1, 2, USER, 9_999)]
    users += [
        {"user_id": USER, "age": 0.3, "history": history}
        for history in ([], [4], [4, 5, 6], [777, 1])
    ]
    users += [{"user_id": USER, "age": age} for age in (1, float("nan"), 3e38)]
    items = [ALL.tolist(), [1_003], [1_003, 1_001], [1_003, 7], [7]]
    requests: list[Any] = [
        ScoreRequest(user=user, items=some) for user in users for some in items
    ]
    requests += [
        RecommendRequest(user=user, candidates=ALL[::2].tolist(), k=5, exclude=[1_004])
        for user in users
    ]
    requests += [RecommendRequest(user=user, k=5) for user in users]
    for batch in (requests, *([request] for request in requests)):
        for request, expected, answer in zip(
            batch, plain.answer(batch), compiled.answer(batch), strict=True
        ):
            if isinstance(expected, Exception):
                assert (type(answer), str(answer)) == (type(expected), str(expected)), (
                    request
                )
                continue
            np.testing.assert_allclose(
                cast(Any, answer).scores,
                cast(Any, expected).scores,
                rtol=1e-4,
                atol=1e-5,
            )
            assert replace(cast(Any, answer), scores=[]) == replace(
                cast(Any, expected), scores=[]
            )
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)
    assert Scorer(bundle, compile="auto")._ready._score.compiled, (
        "loaded, not compiled again"
    )
    if "tables" not in settings:
        monkeypatch.setattr(UserScorer, "__call__", lambda *_: torch.zeros(256))
        with pytest.warns(
            UserWarning,
            match="runs uncompiled: ValueError: compiled scores of an audited user differ by",
        ):
            assert Scorer(bundle, compile="auto")._ready._score_user is None


def test_features_of_the_request_take_precedence_over_known_ones(
    made: SmallBundle, scorer: Scorer
) -> None:
    answer = scorer.score(
        ScoreRequest(
            user={"user_id": USER, "age": 0.9, "history": [3, 4]}, items=ALL.tolist()
        )
    )
    vector = made.bundle.embed_query(
        {"user_id": [USER], "age": [0.9], "history": [[3, 4]]}
    )
    expected = made.bundle.interaction.score_all(vector, made.bundle.store.matrix())[0]  # type: ignore[operator]
    np.testing.assert_allclose(answer.scores, expected, atol=1e-5)
    known = scorer.score(ScoreRequest(user={"user_id": USER}, items=ALL.tolist()))
    assert not np.allclose(answer.scores, known.scores, atol=1e-5)


def test_a_cold_start_is_answered_and_said(made: SmallBundle, scorer: Scorer) -> None:
    answer = scorer.recommend(RecommendRequest(user={"user_id": 9_999}, k=3))
    assert (answer.cold.unknown_user, list(answer.cold.unknown_features)) == (
        True,
        ["user_id"],
    )
    anyone = scorer.recommend(RecommendRequest(user={"user_id": 9_998}, k=3))
    assert (anyone.items, anyone.scores) == (answer.items, answer.scores)
    given = scorer.recommend(
        RecommendRequest(user={"age": 0.5, "history": [2, 777]}, k=3)
    )
    assert given.cold.unknown_user
    assert "history" in given.cold.unknown_features
    unknown = scorer.score(ScoreRequest(user={"user_id": USER}, items=[77, 1_001, 78]))
    assert unknown.unknown_items == [77, 78]
    assert unknown.scores[0] == unknown.scores[2] != unknown.scores[1]
    vector = made.bundle.embed_query(
        {"user_id": [USER], "age": [made.ages[USER]], "history": [made.histories[USER]]}
    )
    oov = made.bundle.interaction.score_all(vector, made.bundle.unknown_candidate[None])  # type: ignore[operator]
    assert unknown.scores[0] == pytest.approx(float(oov[0, 0]), abs=1e-5)


def test_an_unknown_candidate_is_ranked_by_its_own_id_as_the_unknown_item(
    made: SmallBundle, scorer: Scorer
) -> None:
    asked = {
        "user": {"user_id": USER},
        "candidates": [77, 1_020, 1_021, 78],
        "exclude": [1_021],
        "titles": True,
    }
    answer = scorer.recommend(RecommendRequest(**asked))  # type: ignore[arg-type]
    assert sorted(cast(Any, answer.items)) == [77, 78, 1_020]
    assert answer.unknown_items == [77, 78]
    scores = scorer.score(
        ScoreRequest(user={"user_id": USER}, items=answer.items)
    ).scores
    assert answer.scores == scores == sorted(scores, reverse=True)
    assert [
        title
        for item, title in zip(answer.items, answer.titles, strict=True)
        if item != 1_020
    ] == ["", ""]
    assert answer.titles[answer.items.index(1_020)] == "Item <b>20</b>"
    alone = scorer.recommend(RecommendRequest(user={"user_id": 0}, candidates=[1]))
    assert (alone.items, alone.unknown_items, alone.cold.unknown_user) == (
        [1],
        [1],
        True,
    )


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (lambda: RecommendRequest(user={"user_id": 1}, k=0), "k: 0: must be 1 or more"),
        (
            lambda: RecommendRequest(user={"user_id": 1}, candidates=[]),
            "candidates: the list is empty",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, allowed=[]),
            "allowed: the list is empty",
        ),
        (
            lambda: RecommendRequest(
                user={"user_id": 1}, candidates=[1_001, 1_002, 1_001]
            ),
            "candidates: 1001 more than once",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, candidates=["a", "b"]),
            "candidates: 'a' is a string; ids here are whole numbers",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, categories=["Western"]),
            "categories: no item has 'Western'; there are Comedy, Drama, War",
        ),
        (
            lambda: RecommendRequest(
                user={"user_id": 1}, filter={"categorys": ["War"]}
            ),
            "filter.categorys: the items have no such attribute; did you mean 'categories'?",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter={"colour": ["red"]}),
            "filter.colour: the items have no such attribute; there are categories, year, studio, not",
        ),
        (
            lambda: RecommendRequest(
                user={"user_id": 1}, filter={"categories": ["Dramas"]}
            ),
            "filter.categories: no item has 'Dramas'; did you mean 'Drama'?",
        ),
        (
            lambda: RecommendRequest(
                user={"user_id": 1}, filter={"year": [1990, "1991"]}
            ),
            "filter.year: '1991' is str; its values are whole numbers",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter={"categories": [1]}),
            "filter.categories: '1' is int; its values are strings",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter={"categories": "War"}),
            "filter.categories: must be a list of one value or more",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter={"year": []}),
            "filter.year: must be a list of one value",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter=["War"]),
            "filter: it is list; must be lists of values",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1}, filter={"not": ["a"]}),
            "filter.not: 'a' is a string; ids here are whole numbers",
        ),
        (
            lambda: RecommendRequest(user={"user_id": "anna"}),
            "user.user_id: 'anna' is a string; ids here are whole numbers",
        ),
        (
            lambda: RecommendRequest(user={"user_id": [1]}),
            "user.user_id: list is not an id",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1, "agee": 1}),
            "user.agee: the model reads no such column; did you mean 'age'?",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1, "age": float("nan")}),
            "user.age: nan: must be a finite number",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1, "history": [1, float("inf")]}),
            "user.history: inf",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1, "age": "old"}),
            "user: column 'age', row 0",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 1, "age": None}),
            "user: column 'age', row 0: there is no value",
        ),
        (
            lambda: RecommendRequest(user={"age": 0.5}),
            "user.history: it is missing; the model reads ",
        ),
        (
            lambda: RecommendRequest(user={"user_id": 9_999, "age": 0.5}),
            "user.history: it is missing",
        ),
        (
            lambda: ScoreRequest(user={"user_id": 1}, items=[]),
            "items: the list is empty",
        ),
        (
            lambda: EmbedRequest(
                rows=[{"user_id": 1}, {"user_id": 1, "age": float("inf")}]
            ),
            "rows[1].age: inf",
        ),
        (lambda: EmbedRequest(rows=[]), "rows: the list is empty"),
    ],
)
def test_a_request_that_cannot_be_answered_is_told_and_troubles_no_other(
    scorer: Scorer, request_: Any, told: str
) -> None:
    good = RecommendRequest(user={"user_id": USER}, k=3)
    try:
        first, error, last = scorer.answer([good, request_(), good])
    except RequestError as refused:
        # what is wrong whatever the bundle is refused before
        error = refused
    else:
        assert (
            cast(Any, first).items
            == cast(Any, last).items
            == scorer.recommend(good).items
        )
    assert isinstance(error, RequestError)
    assert told in str(error)


def test_more_than_there_is_answers_all_and_says_how_many_were_asked(
    scorer: Scorer,
) -> None:
    answer = scorer.recommend(RecommendRequest(user={"user_id": USER}, k=1_000))
    assert (answer.asked, len(answer.items)) == (1_000, ITEMS - 1 - 2)


def test_without_a_table_of_users_every_feature_must_be_given(tmp_path: Path) -> None:
    scorer = Scorer(SmallBundle(tmp_path / "bundle", users=False).bundle)
    with pytest.raises(RequestError, match=r"user\.\w+: it is missing"):
        scorer.recommend(RecommendRequest(user={"user_id": USER}))
    answer = scorer.recommend(
        RecommendRequest(
            user={"user_id": USER, "age": 0.1, "history": []}, k=3, liked=3
        )
    )
    assert (len(answer.items), answer.liked, answer.cold.unknown_user) == (3, [], False)


def test_titles_and_what_was_liked_come_when_asked_for(scorer: Scorer) -> None:
    answer = scorer.recommend(
        RecommendRequest(user={"user_id": USER}, k=2, titles=True, liked=1)
    )
    assert answer.titles == [
        f"Item <b>{cast(int, item) - FIRST_ITEM}</b>" for item in answer.items
    ]
    assert (answer.liked, answer.liked_titles) == ([FIRST_ITEM + 7], ["Item <b>7</b>"])


def test_outputs_of_both_sides(made: SmallBundle, scorer: Scorer) -> None:
    found = scorer.embed(EmbedRequest(rows=[{"user_id": USER}, {"user_id": 9_999}]))
    expected = made.bundle.embed_query(
        {"user_id": [USER], "age": [made.ages[USER]], "history": [made.histories[USER]]}
    )
    torch.testing.assert_close(found.vectors[:1], expected)
    assert found.unknown_features == [[], ["user_id"]]
    items = scorer.embed(
        EmbedRequest(side="candidate", rows=[{"item_id": 4, "price": 4 / ITEMS}])
    )
    torch.testing.assert_close(items.vectors[0], made.bundle.store.matrix()[3])
    with pytest.raises(RequestError, match="price"):
        scorer.embed(EmbedRequest(side="candidate", rows=[{"item_id": 3}]))


class Fickle:
    """A store elsewhere, which can go away."""

    malformed = 0

    def __init__(self, vectors: FolderVectors, tower: str) -> None:
        self.there, self.asked, self._vectors, self._tower = True, 0, vectors, tower

    def find(self, ids: Sequence[Any]) -> Any:
        self.asked += 1
        if not self.there:
            raise ConnectionError("refused")
        return self._vectors.find(ids, tower=self._tower)


def stored(folder: Path, bundle: Bundle, tower: str) -> FolderVectors:
    """The vectors of users 7 and 8, doubled, so that one sees where they come from."""
    assert bundle.users is not None
    vectors = 2 * bundle.embed_query(
        bundle.users.rows([USER - FIRST_USER, USER + 1 - FIRST_USER])
    )
    write_store(folder, [(np.array([USER, USER + 1]), vectors)], tower=tower)
    return FolderVectors(folder)


def test_what_is_wrong_with_one_users_vector_leaves_the_others_alone(
    dot: SmallBundle, tmp_path: Path
) -> None:
    bundle = dot.bundle
    vectors = torch.stack(
        [
            torch.ones(bundle.query_width),
            3e38 * bundle.store.rows(torch.tensor([0]))[0].sign(),
        ]
    )
    write_store(
        tmp_path / "users",
        [(np.array([USER, USER + 1]), vectors)],
        tower=bundle.query_digest,
    )
    scorer = Scorer(bundle, vectors=[FolderVectors(tmp_path / "users")])
    users = [None, USER, USER + 1]
    for requests in (
        [ScoreRequest(user={"user_id": user}, items=ALL.tolist()) for user in users],
        [RecommendRequest(user={"user_id": user}, k=3) for user in users],
    ):
        nobody, known, huge = cast(Any, scorer.answer(requests))
        assert "user_id" in str(nobody)
        assert (known.cold.vector, known.cold.unknown_user) == ("store", False)
        assert isinstance(huge, RequestError)
        assert (
            str(huge)
            == "user: the scores are beyond float32: the stored vector is; embed the user again"
        )


def test_stored_vectors_are_taken_where_no_feature_is_given_and_only_of_the_same_tower(
    made: SmallBundle, tmp_path: Path
) -> None:
    bundle, request = made.bundle, RecommendRequest(user={"user_id": USER}, k=3)
    ours = Scorer(bundle, vectors=[stored(tmp_path / "a", bundle, bundle.query_digest)])
    vector = 2 * bundle.embed_query(
        {"user_id": [USER], "age": [made.ages[USER]], "history": [made.histories[USER]]}
    )
    answer = ours.score(ScoreRequest(user={"user_id": USER}, items=ALL.tolist()))
    expected = bundle.interaction.score_all(vector, bundle.store.matrix())[0]  # type: ignore[operator]
    np.testing.assert_allclose(answer.scores, expected, atol=1e-5)
    sources = [
        ours.recommend(one).cold.vector
        for one in (request, RecommendRequest(user={"user_id": USER + 2}))
    ]
    assert sources == ["store", "live"]
    assert (
        ours.recommend(
            RecommendRequest(user={"user_id": USER}, vector="live")
        ).cold.vector
        == "live"
    )
    assert (
        ours.recommend(RecommendRequest(user={"user_id": USER, "age": 0.1})).cold.vector
        == "live"
    )
    other = Scorer(bundle, vectors=[stored(tmp_path / "b", bundle, "another tower")])
    assert other.recommend(request).cold.vector == "live"


def test_a_store_that_goes_away_is_passed_over_for_a_while_and_taken_again(
    made: SmallBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(
        "torchrec_ext.retrieval.scorer.user_vectors.time.monotonic", lambda: now[0]
    )
    bundle, request = made.bundle, RecommendRequest(user={"user_id": USER}, k=3)
    remote = Fickle(stored(tmp_path, bundle, "a tower"), "a tower")
    vectors = RemoteVectors(
        lambda tower, width: remote, (ConnectionError,), retry_s=0.5
    )
    ours = Scorer(bundle, vectors=[vectors])
    assert ours.recommend(request).cold.vector == "redis"
    remote.there = False
    assert [ours.recommend(request).cold.vector for _ in range(3)] == ["live"] * 3
    assert remote.asked == 2, "after a failure it is left alone"
    assert not vectors.available
    with pytest.raises(
        UnavailableError, match="the redis of users' vectors is out of reach"
    ):
        ours.recommend(RecommendRequest(user={"user_id": 9_999}))
    remote.there = True
    now[0] += 0.6
    assert ours.recommend(request).cold.vector == "redis"
    assert vectors.available


def test_a_swap_is_whole_every_answer_is_of_the_bundle_it_names(
    made: SmallBundle, dot: SmallBundle
) -> None:
    bundles = [made.bundle, dot.bundle]
    request = RecommendRequest(user={"user_id": USER}, k=10)
    expected = {
        bundle.manifest.digest: Scorer(bundle).recommend(request).items
        for bundle in bundles
    }
    assert len({tuple(items) for items in expected.values()}) == 2
    ours, answers, ending = Scorer(made.bundle), [], threading.Event()

    def ask() -> None:
        while not ending.is_set():
            answers.append(ours.recommend(request))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        for bundle in bundles:
            ours.swap(bundle)
    ending.set()
    for thread in threads:
        thread.join()
    assert all(answer.items == expected[answer.bundle] for answer in answers)
