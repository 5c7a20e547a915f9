"""Generated data whose right answer is known, in memory and as prepared folders.

planted() can be learned up to a known bound; planted_context() and planted_log_folder() make rows with labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column, Int64, Windows
from torchrec_ext.data.config import PARTS, PLANTED
from torchrec_ext.data.features import RawColumns
from torchrec_ext.data.files.arrow import as_arrow
from torchrec_ext.data.pairs import PairRows, set_of_pairs
from torchrec_ext.data.prepare import (
    RAW_ITEMS,
    RAW_REQUESTS,
    RAW_USERS,
    RawSet,
    Roles,
    vocabulary_with_counts,
    write_rows,
)
from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, History
from torchrec_ext.data.preprocess.history import GAPS
from torchrec_ext.data.splits import TEST, Split, leave_one_out

_Floats = NDArray[np.float64]
GENDERS, OCCUPATIONS, ZIP_PREFIXES, YEARS, GENRES = 2, 21, 11, 20, 18
# Users x items. planted() holds one float64 for each: 800 MB.
MOST_CELLS = 100_000_000
# Length of the longest planted sequence.
LONGEST_SEQUENCE = 20


def planted(
    *,
    users: int = 2_000,
    items: int = 800,
    clusters: int = 12,
    history_length: int = 50,
    seed: int = 0,
) -> RawSet:
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
    split = leave_one_out(user, item, _times(rng, user), history_length)
    is_right = rng.random(users) < 0.9
    visible_taste = (
        np.where(is_right, taste[1:], rng.integers(clusters, size=users)) + 1
    )
    age = (taste[1:] / clusters - 0.5) * 3 + rng.normal(scale=0.5, size=users)
    titles = [f"item {i}, kind {kind[i] + 1}" for i in range(1, items + 1)]
    sides = {
        "user": _users(rng, occupation=visible_taste, age=age),
        "item": _items(rng, titles, genre=kind[1:] + 1),
    }
    best = _best(preferences, user[split.rows], item[split.rows], split.part)
    return _set_of(PLANTED, user, item, split, sides, best)


def _set_of(
    name: str,
    user: Int64,
    item: Int64,
    split: Split,
    sides: Mapping[str, RawColumns],
    best: Mapping[str, float],
) -> RawSet:
    # A history holds places among the sorted items, of which some may be nobody's.
    history = split.history
    places = np.unique(item).searchsorted(history.values)
    raw = set_of_pairs(
        name,
        PairRows(pa.array(user), pa.array(item), None),
        split._replace(history=Column(places, history.offsets)),
        sides,
        numbers=("age",),
    )
    return dataclasses.replace(raw, best=best)


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


def _best(
    preferences: _Floats, user: Int64, item: Int64, part: NDArray[np.int8]
) -> Mapping[str, float]:
    """Returns the expected figures of ranking test items by the true preferences, other parts' items masked."""
    is_test = part == TEST
    users = user[is_test]
    weights = preferences[users]
    taken = Column.grouped(item[~is_test], user[~is_test], len(preferences))
    masked_items = taken.take(users)
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


def _users(
    rng: np.random.Generator, *, occupation: Int64, age: _Floats
) -> dict[str, pa.Array]:
    users = len(age)
    return {
        "user_id": pa.array(np.arange(1, users + 1)),
        "gender": pa.array(rng.integers(1, GENDERS + 1, users)),
        "occupation": pa.array(occupation),
        "zip_prefix": pa.array(rng.integers(1, ZIP_PREFIXES + 1, users)),
        "age": pa.array(age.astype(np.float32)),
    }


def _items(
    rng: np.random.Generator, titles: Sequence[str], *, genre: Int64
) -> dict[str, pa.Array]:
    """Gives every item its genre, and every other item a second one, drawn at random."""
    items = len(titles)
    second = rng.integers(1, GENRES + 1, items)
    # Drawn for all items, and left out where it is the item's own genre already.
    has_second = (rng.random(items) < 0.5) & (second != genre)
    genres = np.stack([genre, second], axis=1)
    is_genre = np.stack([np.ones(items, dtype=bool), has_second], axis=1)
    both = Column.from_lengths(genres[is_genre], 1 + has_second.astype(np.int64))
    return {
        "item_id": pa.array(np.arange(1, items + 1)),
        "title": pa.array(titles),
        "release_year": pa.array(rng.integers(1, YEARS + 1, items)),
        "genres": as_arrow(both),
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


def planted_context(*, rows: int = 60_000, seed: int = 0) -> RawSet:
    """Generates clicks with log-odds from a user's taste and an item's kind, moved by the hour, not by the weekday.

    The column ``weight``, 1 or 2 by the weekday, is read if ``loader.weight`` names it.

    The answer: no score can order the rows better than the log-odds themselves, whose AUC and log loss on the test rows
    are in ``best``.

    Args:
        rows: number of rows of all parts together, eight tenths for training and one for each other part.
        seed: seed of the generator.
    """
    users = 300
    items = 200
    rng = np.random.default_rng([seed, rows, users, items])
    sizes = {"user_id": users, "item_id": items, "hour": 24, "weekday": 7}
    ids = {name: rng.integers(size, size=rows) for name, size in sizes.items()}
    taste = rng.normal(size=(users, 4))
    kind = rng.normal(size=(items, 4))
    # How much more an item is wanted at night than at noon.
    evening = rng.normal(size=items)
    logits = (taste[ids["user_id"]] * kind[ids["item_id"]]).sum(1)
    logits += 2 * evening[ids["item_id"]] * np.cos(2 * np.pi * ids["hour"] / 24) - 1
    chance = 1 / (1 + np.exp(-logits))
    label = (rng.random(rows) < chance).astype(np.float32)
    numbers = {"label": label, "weight": (1 + ids["weekday"] % 2).astype(np.float32)}
    tenth = rows // 10
    cuts = [0, rows - 2 * tenth, rows - tenth, rows]
    splits = {}
    for part, start, stop in zip(PARTS, cuts[:-1], cuts[1:], strict=True):
        splits[part] = {
            name: pa.array(values[start:stop])
            for name, values in (ids | numbers).items()
        }
    test = slice(rows - tenth, rows)
    return RawSet(
        name=PLANTED,
        splits=splits,
        roles=Roles(label="label", user="user_id", item="item_id"),
        kept=("label", "weight"),
        best=best_prediction(logits[test], chance[test], label[test]),
    )


def planted_log_folder(
    folder: Path, *, seed: int = 0, sessions: bool = True
) -> dict[str, float]:
    """Writes the rows of :func:`planted_log` as the preprocessing recipe taobao would, with one drawn item a click.

    Args:
        folder: an empty folder.
        seed: seed of the generator.
        sessions: whether the latest clicks tell the next one. Otherwise the user alone does, so a model that reads a
            session as a bag can be as good as any.

    Returns:
        The best possible figures of the labels ``click`` and ``conversion`` on the test rows.
    """
    follows, favourite = (0.7, 0.6) if sessions else (0.0, 0.8)
    log = planted_log(
        users=150, items=120, visits=20, follows=follows, favourite=favourite, seed=seed
    )
    length = 10
    columns = log.columns
    size = len(log.bought)
    rng = np.random.default_rng([seed, 1])
    # Two rows for each click: the clicked item, and one that is drawn uniformly.
    clicks = np.arange(size).repeat(2)
    shown_items = columns["item_id"][clicks]
    shown_items[1::2] = rng.integers(1, int(shown_items.max()) + 1, size)
    click = np.tile(np.array([1.0, 0.0]), size)
    # A drawn item that is the clicked one would have both labels, so its row is
    # dropped.
    mask = (click > 0) | (shown_items != columns["item_id"][clicks])
    clicks = clicks[mask]
    shown_items = shown_items[mask]
    click = click[mask]
    categories = int(columns["category_id"].max()) + 1
    rows: dict[str, Any] = {
        "user_id": columns["user_id"][clicks],
        "timestamp": columns["timestamp"][clicks],
        "item_id": shown_items,
        "category_id": shown_items % categories,
        "click": click,
        "conversion": click * log.bought[clicks],
        "weight": 1.0 + shown_items % 2,
    }
    rows |= _past(columns, clicks, length)
    # By time, since the log is in its order.
    cuts = [0, int(0.8 * len(clicks)), int(0.9 * len(clicks)), len(clicks)]
    splits = {}
    for split, start, stop in zip(PARTS, cuts[:-1], cuts[1:], strict=True):
        splits[split] = {name: values[start:stop] for name, values in rows.items()}
    steps = (
        History(
            user="user_id",
            item="item_id",
            time="timestamp",
            length=length,
            also=("category_id",),
            gaps=GAPS,
        ),
        Categorify(column="item_id", also=("history",)),
        Categorify(column="category_id", also=("history_category_id",)),
        Categorify(column="user_id"),
    )
    vocabularies = [
        vocabulary_with_counts(pa.array(splits["train"][step.writes[0]]))
        for step in steps[1:]
    ]
    labels = ("click", "conversion")
    numbers = (*labels, "weight")
    raw = dict.fromkeys(columns, "int64") | dict.fromkeys(numbers, "float32")
    fitted = FittedPreprocessor(
        steps=steps, keep=numbers, raw=raw, states=({}, *vocabularies)
    )
    names = fitted.request_columns
    # A request lists its candidates separately, so its rows have no item.
    requests = {
        name: splits["train"][name][-1_000:]
        for name in names
        if name not in ("item_id", "category_id")
    }
    training_items = np.unique(splits["train"]["item_id"])
    roles = Roles(
        label=labels[0],
        tasks=labels[1:],
        user="user_id",
        item="item_id",
        user_features=["history", "history_category_id", "history_gap"],
        item_features=["category_id"],
    )
    users, last = np.unique(columns["user_id"][::-1], return_index=True)
    latest = _past(columns, size - 1 - last, length, itself=1)
    is_training_user = np.isin(users, splits["train"]["user_id"])
    raw_tables = {
        RAW_REQUESTS: pa.table(requests),
        RAW_ITEMS: pa.table(
            {"item_id": training_items, "category_id": training_items % categories}
        ),
        RAW_USERS: pa.table({"user_id": users, **latest}).filter(
            pa.array(is_training_user)
        ),
    }
    write_rows(folder, fitted, splits, raw_tables, roles, recipe=PLANTED)
    test = slice(cuts[2], cuts[3])
    odds = log.odds(clicks[test], shown_items[test])
    click_chance = odds / (1 + odds)
    chances = {
        "click": click_chance,
        "conversion": click_chance * log.buys(shown_items[test]),
    }
    # Those of the click stand under their plain names, too, since the click is the
    # label.
    best = best_prediction(click_chance, click_chance, click[test])
    for name, chance in chances.items():
        for figure, value in best_prediction(chance, chance, rows[name][test]).items():
            best[f"{name}_{figure}"] = value
    return best


def _past(
    columns: Mapping[str, Int64], clicks: Int64, length: int, itself: int = 0
) -> dict[str, pa.Array]:
    """Lists each row's latest earlier clicks as a request does, a few more than are read.

    With ``itself=1`` the row's own click is the last of them.
    """
    users = columns["user_id"]
    # A user's clicks one after the other, in the order of time, and the place of each
    # click among them.
    order = np.argsort(users, kind="stable")
    place = np.argsort(order)[clicks]
    first = users[order].searchsorted(users[clicks])
    past = Column.from_windows(
        order, Windows(np.maximum(first, place - length - 2), place + itself)
    )
    sources = {"items": "item_id", "times": "timestamp", "category_id": "category_id"}
    histories = {}
    for name, column in sources.items():
        histories[f"history_{name}"] = as_arrow(
            Column(columns[column][past.values], past.offsets)
        )
    return histories


def planted_sequences(
    *, users: int = 4_000, items: int = 400, seed: int = 0
) -> tuple[Column, dict[str, float]]:
    """Generates sequences: with probability .7 an item's fixed successor follows, else any item.

    No item is taken twice. Returns the sequences, and the figures of the best rule on the last items.

    The rule ranks the successor of the last item first, if it has not been taken, and the others in any order.
    Popularity knows nothing.

    Args:
        users: number of users.
        items: number of items, at least 30.
        seed: seed of the generator.
    """
    if users < 1 or items < LONGEST_SEQUENCE + 10:
        raise ValueError(
            f"planted sequences of users={users}, items={items}: needs at least 1 user and "
            f"{LONGEST_SEQUENCE + 10} items"
        )
    rng = np.random.default_rng([seed, users, items])
    rows = np.arange(users)
    successor = rng.permutation(items)
    lengths = rng.integers(4, LONGEST_SEQUENCE + 1, users)
    steps = np.zeros((users, LONGEST_SEQUENCE), dtype=np.int64)
    available = np.ones((users, items), dtype=bool)
    for step in range(LONGEST_SEQUENCE):
        # At step 0 this reads the last column, which is still 0; ``follows`` is False
        # there.
        following = successor[steps[:, step - 1]]
        follows = (rng.random(users) < 0.7) & available[rows, following] & (step > 0)
        # The greatest of uniform numbers is a uniform choice among the available items.
        others = (rng.random((users, items)) * available).argmax(axis=1)
        steps[:, step] = np.where(follows, following, others)
        available[rows, steps[:, step]] = False
    inside = np.arange(LONGEST_SEQUENCE) < lengths[:, None]
    sequences = Column.from_lengths(steps[inside].astype(np.int64) + 1, lengths)
    return sequences, _best_of_rule(steps, lengths, successor)


def _best_of_rule(steps: Int64, lengths: Int64, successor: Int64) -> dict[str, float]:
    """Returns the expected figures of the rule on the last items; earlier items are left out of the ranking."""
    rows = np.arange(len(steps))
    last = lengths - 1
    targets = steps[rows, last]
    guesses = successor[steps[rows, last - 1]]
    available = np.ones((len(steps), len(successor)), dtype=bool)
    before = np.arange(steps.shape[1]) < last[:, None]
    available[np.nonzero(before)[0], steps[before]] = False
    # Number of places that the guess takes: none if the user has taken the successor
    # already.
    first = available[rows, guesses].astype(np.int64)
    # Of each figure the sum of its gains at the first n places, for n from 0 to 10.
    gains = {
        "HR@1": np.arange(11.0).clip(max=1),
        "HR@10": np.arange(11.0),
        "NDCG@10": np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, 12)))]),
    }
    figures = {}
    for name, upto in gains.items():
        # All other items come in any order: each of them has the same share of the
        # gains that are left.
        by_chance = (upto[-1] - upto[first]) / (available.sum(axis=1) - first)
        figures[name] = float(np.where(targets == guesses, upto[1], by_chance).mean())
    return figures
