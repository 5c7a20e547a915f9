"""A scorer's answers are the model's: ids, logits, filters, unknown users and items, swaps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.retrieval.small import USERS, Small
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.scorer import (
    EmbedRequest,
    RecommendRequest,
    RequestError,
    Scorer,
    ScoreRequest,
)
from torchrec_ext.retrieval.store import write_store

UNKNOWN = 999_999_999


@pytest.fixture(scope="module", params=["product", "top_nn"])
def small(request: pytest.FixtureRequest) -> Small:
    return Small(metric=request.param)


@pytest.fixture(scope="module")
def bundle(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("scorer") / "bundle"
    small.write(folder)
    return Bundle.load(folder)


@pytest.fixture(scope="module")
def scorer(bundle: Bundle) -> Scorer:
    return Scorer(bundle)


def best(small: Small, query: Any, k: int, leave: Any = ()) -> list[int]:
    logits = small.logits(query, small.rows)
    order = [
        place for place in np.argsort(-logits, kind="stable") if place not in leave
    ]
    return [int(small.ids[place]) for place in order[:k]]


def test_recommends_the_models_best(small: Small, scorer: Scorer) -> None:
    """A known user by id alone, without the item that the user has seen."""
    for user in range(1, USERS + 1):
        answer = scorer.recommend(RecommendRequest(user={"user": user}, k=9))
        query = small.known(user)
        assert answer.items == best(small, query, 9, leave=[user - 1])
        places = np.searchsorted(small.ids, answer.items)
        logits = small.logits(query, small.rows[places])
        np.testing.assert_allclose(answer.scores, logits, rtol=1e-5, atol=1e-5)
        assert not answer.unknown_user
    seen = RecommendRequest(user={"user": 3}, k=50, exclude_seen=False)
    assert len(scorer.recommend(seen).items) == 50


def test_recommend_and_score_give_one_number(small: Small, scorer: Scorer) -> None:
    """Whole catalogue, candidates, score: the last digit of a pair is the same in all three."""
    user = {"user": 5, "age": 0.3}
    answer = scorer.recommend(RecommendRequest(user=user, k=50, exclude_seen=False))
    numbers = dict(zip(answer.items, answer.scores, strict=True))
    for size in (1, 2, 7, 50):
        ids = np.random.default_rng(size).permutation(small.ids)[:size].tolist()
        scores = scorer.score(ScoreRequest(user=user, items=ids)).scores
        assert scores == [numbers[each] for each in ids]
        among = RecommendRequest(user=user, k=size, candidates=ids, exclude_seen=False)
        for item, score in zip(
            scorer.recommend(among).items, scorer.recommend(among).scores, strict=True
        ):
            assert score == numbers[item]


def test_unknown_items_are_scored_as_such_and_never_recommended(
    small: Small, scorer: Scorer
) -> None:
    answer = scorer.score(ScoreRequest(user={"user": 2}, items=[UNKNOWN, 100, -7]))
    expected = small.logits(small.known(2), small.row([0]))[0]
    np.testing.assert_allclose(answer.scores[0], expected, rtol=1e-5)
    assert answer.scores[2] == answer.scores[0]
    assert answer.unknown_items == [UNKNOWN, -7]
    for left_out in ([100], [UNKNOWN, 100]):
        ranked = scorer.recommend(
            RecommendRequest(
                user={"user": 2},
                candidates=[UNKNOWN, 120, 100, 120],
                filter={"not": left_out},
            )
        )
        assert ranked.items == [120]
        assert ranked.unknown_items == [UNKNOWN]


def test_filters(small: Small, scorer: Scorer) -> None:
    """Values of one attribute are alternatives, attributes must all fit, "not" leaves out."""
    answer = scorer.recommend(
        RecommendRequest(
            user={"user": 4},
            k=50,
            filter={"genres": ["Noir"], "year": [1991, 1993], "not": [180]},
        )
    )
    places = [
        place
        for place in range(50)
        if place % 3 == 2 and 1990 + place % 5 in (1991, 1993) and place not in (8, 3)
    ]
    leave = set(range(50)) - set(places)
    assert answer.items == best(small, small.known(4), 50, leave=leave)
    among = scorer.recommend(
        RecommendRequest(
            user={"user": 4},
            candidates=[100, 120, 130, 150, UNKNOWN],
            filter={"genres": ["Noir"]},
        )
    )
    assert set(among.items) == {120, 150}


def test_new_users(small: Small, scorer: Scorer) -> None:
    nobody = scorer.recommend(RecommendRequest(user={"user": 77}, k=5))
    assert nobody.items == best(small, small.query(0, [], 0), 5)
    assert nobody.unknown_user
    features = {"history": [3, 4], "age": 1.5, "user": 0}
    new = scorer.recommend(RecommendRequest(user=features, k=5))
    assert new.items == best(small, small.query(0, [3, 4], 1.5), 5)
    changed = scorer.recommend(RecommendRequest(user={"user": 6, "age": 9.0}, k=5))
    assert changed.items == best(small, small.query(6, [6, 7], 9.0), 5, leave=[5])


def test_liked_and_titles(scorer: Scorer) -> None:
    answer = scorer.recommend(
        RecommendRequest(user={"user": 3}, k=2, titles=True, liked=5)
    )
    assert answer.titles == [f"Film {item}" for item in answer.items]
    assert answer.liked == [120]
    assert answer.liked_titles == ["Film 120"]


def test_embed(small: Small, scorer: Scorer) -> None:
    rows = [
        {"user": 1, "history": [2, 1, 2], "age": 1.0},
        {"user": 99},
        {"user": -1, "history": [7, 10**9], "age": 2},
    ]
    expected = [
        small.query(1, [2, 1, 2], 1),
        small.query(0, [], 0),
        small.query(0, [7, 0], 2),
    ]
    answer = scorer.embed(EmbedRequest(rows=rows))
    np.testing.assert_allclose(answer.vectors, expected, rtol=1e-5, atol=1e-6)
    assert answer.unknown_features == [[], ["user"], ["user", "history"]]
    for row, vector in zip(rows, answer.vectors, strict=True):
        (alone,) = scorer.embed(EmbedRequest(rows=[row])).vectors
        np.testing.assert_allclose(alone, vector, rtol=1e-6, atol=1e-7)
    items = scorer.embed(EmbedRequest(rows=[{"item": 7}] * 200, side="candidate"))
    np.testing.assert_allclose(items.vectors[3], small.row(7), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"k": 0}, "k"),
        ({"user": {"user": 2**70}}, "user.user"),
        ({"user": {"age": 1.0}}, "user.history"),
        ({"user": {"user": 1, "age": float("nan")}}, "user.age"),
        ({"user": {"user": 1, "age": 1e39}}, "user.age"),
        ({"user": {"user": 1, "history": 3}}, "user.history"),
        ({"user": {"user": 1, "age": 1e38}}, "user"),
        ({"filter": {"genre": [1]}}, "filter.genre"),
        ({"filter": {"year": [1]}}, "filter.year"),
        ({"filter": {"year": "1990"}}, "filter.year"),
        ({"user": {}}, "user.history"),
    ],
)
def test_refusals_name_the_field(options: Any, field: str, scorer: Scorer) -> None:
    """Those that no test of the server has."""
    with pytest.raises(RequestError) as caught:
        scorer.recommend(RecommendRequest(**{"user": {"user": 1}, **options}))
    assert caught.value.field == field
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


def test_a_vector_beyond_float32_is_the_requests_error(scorer: Scorer) -> None:
    """Of a norm of 1e15 or more, infinite in float32, or NaN where two infinities meet."""
    for age in (1e18, 1e30, 3e38):
        user = {"user": 3, "history": [], "age": age}
        with pytest.raises(
            RequestError, match=r"user: .* cannot take a feature's value"
        ):
            scorer.recommend(RecommendRequest(user=user))
        with pytest.raises(
            RequestError, match=r"rows\[1\]: .* cannot take a feature's value"
        ):
            scorer.embed(EmbedRequest(rows=[user | {"age": 1.0}, user]))


def test_refusals_say_what_to_send(scorer: Scorer) -> None:
    """An id suffices if the bundle knows its users; a list that must not be empty is not left out."""
    for user in ({}, {"age": 1.0}, {"user": 77, "age": 1.0}):
        with pytest.raises(
            RequestError, match=r"missing.*; or 'user' of a stored user"
        ):
            scorer.recommend(RecommendRequest(user=user))
    for user in ({"user": None}, None):
        nobody = scorer.recommend(RecommendRequest(user=user))
        assert nobody.unknown_user
        assert (
            nobody.scores
            == scorer.recommend(RecommendRequest(user={"user": 77})).scores
        )
    with pytest.raises(RequestError, match=r"itm: the model reads no .* reads user, "):
        scorer.recommend(RecommendRequest(user={"itm": 1}))
    for of_nothing in (
        lambda: ScoreRequest(user={}, items=[]),
        lambda: EmbedRequest(rows=[]),
        lambda: RecommendRequest(user={}, candidates=[]),
    ):
        with pytest.raises(RequestError, match="a list of one value or more; "):
            of_nothing()


def test_two_scorers_give_one_order(bundle: Bundle) -> None:
    """Two processes with the bundle answer alike, digit by digit, whatever they were asked before."""
    first = Scorer(bundle)
    second = Scorer(Bundle.load(bundle.folder))
    for user in range(1, USERS + 1):
        request = RecommendRequest(user={"user": user}, k=25)
        assert first.recommend(request) == second.recommend(request)


def test_stored_vectors(small: Small, bundle: Bundle, tmp_path: Path) -> None:
    """A stored vector is taken for an id alone, if the bundle's query side made it of the bundle's features."""
    other = small.query(9, [1], 3.0).astype(np.float32)
    tower = bundle.digest_of("query")

    def scorer(tower: str = tower, features: str = "", side: str = "query") -> Scorer:
        store = write_store(
            tmp_path / "users",
            [(np.array([5]), other[None])],
            tower=tower,
            features=features,
            side=side,
            shape=(1, len(other)),
            overwrite=True,
        )
        return Scorer(bundle, store)

    stored = scorer().recommend(RecommendRequest(user={"user": 5}, k=4))
    assert stored.vector == "store"
    assert stored.items == best(small, other, 4, leave=[4])
    for user in ({"user": 5, "age": 0.5}, {"user": 6}, {"user": None}, None):
        assert scorer().recommend(RecommendRequest(user=user)).vector == "live"
    for made_by, features, vector in (
        (tower, bundle.features_digest, "store"),
        (tower, "those of yesterday", "live"),
        ("another", "", "live"),
    ):
        answer = scorer(made_by, features).recommend(RecommendRequest(user={"user": 5}))
        assert answer.vector == vector
    with pytest.raises(BundleError, match="vectors of the candidate side"):
        scorer(side="candidate")
