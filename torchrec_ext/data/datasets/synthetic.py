"""Generated data whose right answer is known: checkerboard() can be learned exactly, planted() up to a known bound.

Both have the column names of ml-100k, so that every recipe runs on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.data.datasets.interactions import InteractionData, from_ratings

_Floats = NDArray[np.float64]
GENDERS, OCCUPATIONS, ZIP_PREFIXES, YEARS, GENRES = 2, 21, 11, 20, 18
# Users x items. planted() holds one float64 for each: 800 MB.
MOST_CELLS = 100_000_000


def checkerboard(
    *, users: int = 64, items: int = 64, history_length: int = 50, seed: int = 0
) -> InteractionData:
    """Generates users u who take item i if and only if u + i is even, in a random order; other features are noise.

    The answer: once a user's training and validation items are masked, only the test item of the right colour is left.
    So the best HR@k and NDCG@k are exactly 1 for every k, and popularity knows nothing. The idea is that of implicit's
    test data.

    Args:
        users: number of users, ids from 1.
        items: number of items, ids from 1; at least 6, so that everyone has something to train on.
        history_length: greatest length of a history.
        seed: seed of the order and the noise.
    """
    if users < 2 or items < 6:
        raise ValueError(
            f"checkerboard of users={users}, items={items}: needs at least 2 users and 6 items"
        )
    rng = np.random.default_rng([seed, users, items])
    user, item = (np.indices((users, items)).reshape(2, -1) + 1).astype(np.int64)
    shuffled = rng.permutation(np.flatnonzero((user + item) % 2 == 0))
    ratings = _ratings(
        user[shuffled],
        item[shuffled],
        np.arange(len(shuffled)),
        np.full(len(shuffled), 5),
    )
    titles = ["(unknown)"]
    for number in range(1, items + 1):
        colour = "black" if number % 2 else "white"
        titles.append(f"{colour} square {number}")
    data = from_ratings(
        name="checkerboard",
        ratings=ratings,
        users=_users(
            rng,
            users,
            occupation=rng.integers(1, OCCUPATIONS + 1, users),
            age=rng.normal(size=users),
        ),
        items=_items(rng, items, genre=rng.integers(1, GENRES + 1, items)),
        vocab=_vocab(users, items),
        dense=("age",),
        history_length=history_length,
        titles=titles,
    )
    best = dict.fromkeys(("HR@1", "HR@5", "HR@10", "NDCG@1", "NDCG@5", "NDCG@10"), 1.0)
    return dataclasses.replace(data, best=best)


def planted(
    *,
    users: int = 2_000,
    items: int = 800,
    clusters: int = 12,
    history_length: int = 50,
    seed: int = 0,
) -> InteractionData:
    """Generates users of latent tastes who take items of latent kinds, in proportion to :func:`planted_preferences`.

    Each user takes 15 to 45 different items, drawn one after the other in proportion to the preferences among those not
    yet taken. The signal is in the ids, in ``occupation`` (the taste, right 9 times of 10), ``age`` (noisily),
    ``genres`` (the kind) and the histories; ``gender``, ``zip_prefix`` and ``release_year`` are noise. Some times tie.

    The answer: no ranking of the items not yet taken is better, in expectation, than that by the preferences
    themselves, whose HR@k and NDCG@k are in ``best``. A model has to learn the preferences from a sample, so it stays
    below.

    Args:
        users: number of users, ids from 1.
        items: number of items, ids from 1.
        clusters: number of tastes, and of kinds of items; at most 18, the number of genres.
        history_length: greatest length of a history.
        seed: seed of the generator.
    """
    preferences = planted_preferences(
        users=users, items=items, clusters=clusters, seed=seed
    )
    rng = np.random.default_rng([seed, users, items, clusters, 1])
    # Drawn anew: the same seed gives the clusters of the preferences.
    taste, kind = _clusters(users, items, clusters, seed)
    user, item = _draw(rng, preferences)
    matching = taste[user] == kind[item]
    ratings = _ratings(user, item, _times(rng, user), np.where(matching, 5, 3))
    is_right = rng.random(users) < 0.9
    visible_taste = (
        np.where(is_right, taste[1:], rng.integers(clusters, size=users)) + 1
    )
    age = (taste[1:] / clusters - 0.5) * 3 + rng.normal(scale=0.5, size=users)
    data = from_ratings(
        name="planted",
        ratings=ratings,
        users=_users(rng, users, occupation=visible_taste, age=age),
        items=_items(rng, items, genre=kind[1:] + 1),
        vocab=_vocab(users, items),
        dense=("age",),
        history_length=history_length,
        titles=["(unknown)"]
        + [f"item {i}, kind {kind[i] + 1}" for i in range(1, items + 1)],
    )
    return dataclasses.replace(data, best=_best(preferences, data))


def planted_preferences(
    *, users: int = 2_000, items: int = 800, clusters: int = 12, seed: int = 0
) -> _Floats:
    """Returns (users + 1, items + 1) the probabilities of a user's first item in :func:`planted`.

    Row 0 and column 0 are 0.

    An item's weight falls as 1 / rank**0.7 within its kind, times 60 if its kind is the user's taste and 10 in the
    next kind.
    """
    if (
        not 2 <= clusters <= GENRES
        or items < 50
        or users < 1
        or users * items > MOST_CELLS
    ):
        raise ValueError(
            f"planted of users={users}, items={items}, clusters={clusters}: needs 2 to {GENRES} clusters, at least 50 "
            f"items, and users x items of at most {MOST_CELLS:,}"
        )
    taste, kind = _clusters(users, items, clusters, seed)
    # By taste and kind.
    affinity = np.ones((clusters, clusters))
    affinity[np.arange(clusters), (np.arange(clusters) + 1) % clusters] = 10.0
    np.fill_diagonal(affinity, 60.0)
    # Kinds go round, so the quotient is the rank within the kind.
    weight = (1.0 + np.arange(items) // clusters) ** -0.7
    weights = np.zeros((users + 1, items + 1))
    match = affinity[np.ix_(taste[1:], kind[1:])]
    weights[1:, 1:] = match * weight[_ranks(items, seed)]
    weights[1:] /= weights[1:].sum(axis=1, keepdims=True)
    return weights


def _ranks(items: int, seed: int) -> Int64:
    return np.random.default_rng([seed, items]).permutation(items)


def _clusters(users: int, items: int, clusters: int, seed: int) -> tuple[Int64, Int64]:
    """Draws the taste of each user id and the kind of each item id; index 0 is not used."""
    taste = np.random.default_rng([seed, users, clusters]).integers(
        clusters, size=users + 1
    )
    return taste, np.concatenate([[0], _ranks(items, seed) % clusters])


def _draw(rng: np.random.Generator, preferences: _Floats) -> tuple[Int64, Int64]:
    """Draws pairs without replacement, in order: the greatest log p + Gumbel noise first (Plackett-Luce)."""
    users = preferences.shape[0] - 1
    counts = rng.integers(15, 46, size=users)
    keys = np.log(preferences[1:, 1:])
    keys += rng.gumbel(size=keys.shape)
    ranked = np.argsort(-keys, axis=1)[:, : counts.max()] + 1
    is_drawn = np.arange(ranked.shape[1]) < counts[:, None]
    return np.arange(1, users + 1).repeat(is_drawn.sum(axis=1)), ranked[is_drawn]


def _times(rng: np.random.Generator, user: Int64) -> Int64:
    """Draws seconds in ascending order along a user's rows; a quarter of them equal the one before."""
    return np.cumsum(rng.integers(0, 4, size=len(user))) + 1_000_000


def _best(preferences: _Floats, data: InteractionData) -> Mapping[str, float]:
    """Returns the expected figures of ranking test items by the true preferences, other parts' items masked."""
    users = data.test["user_id"].values
    weights = preferences[users]
    masked_items = data.seen(users, "train", "validation")
    weights[masked_items.owners, masked_items.values] = 0.0
    # The chance of each test item that is left, greatest first: one of them is the
    # answer.
    top = -np.sort(-weights, axis=1)[:, :10] / weights.sum(axis=1, keepdims=True)
    gain = 1 / np.log2(np.arange(10) + 2)
    figures = {}
    for name, gains in (("HR", top), ("NDCG", top * gain)):
        for k in (1, 5, 10):
            figures[f"{name}@{k}"] = float(gains[:, :k].sum(axis=1).mean())
    return figures


def _ratings(user: Int64, item: Int64, time: Int64, rating: Int64) -> Chunk:
    return Chunk(
        {
            "user_id": Column(user),
            "item_id": Column(item),
            "timestamp": Column(time),
            "rating": Column(rating),
        }
    )


def _users(
    rng: np.random.Generator, users: int, *, occupation: Int64, age: _Floats
) -> Chunk:
    return Chunk(
        {
            "user_id": Column(np.arange(users + 1)),
            "gender": _with_unknown(rng.integers(1, GENDERS + 1, users)),
            "occupation": _with_unknown(occupation),
            "zip_prefix": _with_unknown(rng.integers(1, ZIP_PREFIXES + 1, users)),
            "age": Column(np.concatenate([[0], age]).astype(np.float32)),
        }
    )


def _items(rng: np.random.Generator, items: int, *, genre: Int64) -> Chunk:
    """Gives every item its genre, and every other item a second one, drawn at random."""
    second = rng.integers(1, GENRES + 1, items)
    # Drawn for all items, and left out where it is the item's own genre already.
    has_second = (rng.random(items) < 0.5) & (second != genre)
    genres = np.stack([genre, second], axis=1)
    is_genre = np.stack([np.ones(items, dtype=bool), has_second], axis=1)
    both = genres[is_genre]
    return Chunk(
        {
            "item_id": Column(np.arange(items + 1)),
            "release_year": _with_unknown(rng.integers(1, YEARS + 1, items)),
            "genres": Column.from_lengths(both, np.concatenate([[0], 1 + has_second])),
        }
    )


def _with_unknown(ids: Int64) -> Column:
    return Column(np.concatenate([[0], ids]))


def _vocab(users: int, items: int) -> dict[str, int]:
    return {
        "user_id": users + 1,
        "gender": GENDERS + 1,
        "occupation": OCCUPATIONS + 1,
        "zip_prefix": ZIP_PREFIXES + 1,
        "history": items + 1,
        "item_id": items + 1,
        "release_year": YEARS + 1,
        "genres": GENRES + 1,
    }


def best_prediction(
    scores: _Floats, chances: _Floats, labels: _Floats
) -> dict[str, float]:
    """Returns the figures of the true ``chances`` of (B,) labels, which no prediction beats: AUC and log loss.

    Args:
        scores: scores in the order of the chances, for the area under the ROC curve; a tie counts half.
        chances: probability that a label is 1.
        labels: the labels that were drawn, 0 or 1.
    """
    values, index = np.unique(scores, return_inverse=True)
    positive = np.bincount(index, labels, len(values))
    negative = np.bincount(index, 1 - labels, len(values))
    # Negatives below each score, half of those that tie.
    below = np.cumsum(negative) - negative / 2
    likelihood = np.where(labels > 0, chances, 1 - chances)
    return {
        "auc": float((positive * below).sum() / (positive.sum() * negative.sum())),
        "log_loss": float(-np.log(likelihood).mean()),
    }


class PlantedLog(NamedTuple):
    """A generated log of n clicks in the form of Taobao's, in the order of time.

    Attributes:
        columns: user_id, item_id, category_id and timestamp of each click, (n,) int64.
        bought: whether the click was followed by a purchase, (n,) bool.
        odds: odds that a row is the click and not an item drawn uniformly in its place, as a function of the rows'
            clicks (m,) and their items (m,).
        buys: chance that a click on each item (m,) is followed by a purchase, as a function of the items.
    """

    columns: dict[str, Int64]
    bought: NDArray[np.bool_]
    odds: Callable[[Int64, Int64], NDArray[np.float64]]
    buys: Callable[[Int64], NDArray[np.float64]]


def planted_log(
    *,
    users: int = 300,
    items: int = 300,
    visits: int = 10,
    follows: float = 0.7,
    favourite: float = 0.6,
    seed: int = 0,
) -> PlantedLog:
    """Generates clicks: the latest click, if less than an hour old, tells the category of the next one.

    A visit is a few clicks, minutes apart; visits are a day or more apart. Within a visit the category is the one after
    that of the click before, in a share ``follows`` of cases. Else, and for the first click of a visit, it is the
    user's own in a share ``favourite`` of cases, or any one. Six of ten clicks on an even category are followed by a
    purchase, others one of ten.

    Args:
        users: number of users, ids from 1.
        items: number of items, ids from 1; item i is of category i % 6.
        visits: number of visits of each user.
        follows: share of a visit's further clicks whose category the click before tells; with 0 no session tells more
            than its user.
        favourite: share of all other clicks that are on the user's own category.
        seed: seed of the generator.
    """
    categories = 6
    rng = np.random.default_rng([seed, users, items, categories, visits])
    rows = []
    for user in range(1, users + 1):
        # The first day of Taobao's log: 25 November 2017 in Beijing.
        now = 1_511_539_200 + int(rng.integers(86_400))
        for _ in range(visits):
            category = 0
            for click in range(int(rng.integers(3, 8))):
                follow = click > 0 and rng.random() < follows
                other = (
                    user % categories
                    if rng.random() < favourite
                    else int(rng.integers(categories))
                )
                category = (category + 1) % categories if follow else other
                item = category + categories * int(rng.integers(items // categories))
                # Ids begin at 1: item 0, which is of category 0, becomes the last
                # multiple of ``categories``.
                rows.append(
                    (
                        now,
                        user,
                        item or categories * (items // categories),
                        category,
                        click > 0,
                    )
                )
                now += int(rng.integers(60, 300))
            now += int(rng.integers(86_400, 2 * 86_400))
    times, owners, item_ids, kinds, in_visit = np.array(sorted(rows), dtype=np.int64).T
    # The category of the user's previous click, if it is of the same visit; else -1.
    before = np.full(len(rows), -1)
    last = dict.fromkeys(range(users + 1), -1)
    for row, (user, category) in enumerate(
        zip(owners.tolist(), kinds.tolist(), strict=True)
    ):
        before[row] = last[user] if in_visit[row] else -1
        last[user] = category

    def buys(candidates: Int64) -> NDArray[np.float64]:
        return np.where(candidates % categories % 2 == 0, 0.6, 0.1)

    def odds(clicks: Int64, candidates: Int64) -> NDArray[np.float64]:
        following = candidates % categories == (before[clicks] + 1) % categories
        alone: NDArray[np.float64] = (
            1
            - favourite
            + favourite
            * categories
            * (owners[clicks] % categories == candidates % categories)
        )
        return np.where(
            before[clicks] < 0,
            alone,
            (1 - follows) * alone + follows * categories * following,
        )

    columns = {
        "user_id": owners,
        "item_id": item_ids,
        "category_id": kinds,
        "timestamp": times,
    }
    return PlantedLog(columns, rng.random(len(rows)) < buys(item_ids), odds, buys)
