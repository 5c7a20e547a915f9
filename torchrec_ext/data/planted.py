"""Planted: generated clicks whose chances are known, so the best possible figures are known too.

The views of it are planted(), pairs to rank; planted_sequences(), sessions; and planted_log_set(), rows with labels:
a log with clicks, conversions and histories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column, Int64, Windows
from torchrec_ext.data.config import PARTS, PLANTED, Roles
from torchrec_ext.data.features import RawColumns
from torchrec_ext.data.files.arrow import as_arrow
from torchrec_ext.data.pairs import set_of_pairs
from torchrec_ext.data.prepare import RawSet
from torchrec_ext.data.preprocess import Categorify, History, TimeFeatures
from torchrec_ext.data.preprocess.history import GAPS
from torchrec_ext.data.splits import TEST, leave_one_out

_Floats = NDArray[np.float64]
GENRES = 18
# Users x items. The preferences hold one float64 for each: 800 MB.
MOST_CELLS = 100_000_000
# Seconds of 25 November 2017 in Beijing, the first day of Taobao's log.
_FIRST_DAY = 1_511_539_200


class Clicks(NamedTuple):
    """E clicks, each user's one after the other in the order of time.

    Attributes:
        users: (E,) ids from 1.
        items: (E,) ids from 1.
        times: (E,) seconds since 1970.
        is_next: (E,) whether the click before it is of the same visit.
    """

    users: Int64
    items: Int64
    times: Int64
    is_next: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Users of latent tastes who take items of latent kinds.

    An item's weight falls as 1 / rank**fall within its kind, times ``affinity`` if its kind is the user's taste, or the
    next one. Within a visit the next click is on the kind after the last one's in a share ``follows`` of cases.

    Args:
        users: number of users, ids from 1.
        items: number of items, ids from 1.
        clusters: number of tastes, and of kinds of items.
        lengths: least and greatest number of a user's clicks.
        follows: share of a visit's clicks whose kind the click before tells.
        visits: chance that a click begins a visit, a day or two after the last.
        affinity: weights of the user's own kind, and of the next one; that of the others is 1.
        fall: power by which an item's weight falls within its kind.
        again: let a user take an item again.
        seed: seed of the generator.

    Raises:
        ValueError: the sizes leave nothing to learn.
    """

    users: int
    items: int
    clusters: int
    lengths: tuple[int, int] = (15, 45)
    follows: float = 0.0
    visits: float = 0.0
    affinity: tuple[float, float] = (60.0, 10.0)
    fall: float = 0.7
    again: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        too_long = not self.again and self.items < self.lengths[1] + 5
        if too_long or self.users < 1 or self.users * self.items > MOST_CELLS:
            raise ValueError(
                f"planted of users={self.users}, items={self.items}: needs at least {self.lengths[1] + 5} items, and "
                f"users x items of at most {MOST_CELLS:,}"
            )

    @cached_property
    def tastes(self) -> Int64:
        """The taste of each user id, (users + 1,); index 0 is not used."""
        rng = np.random.default_rng([self.seed, self.users, self.clusters])
        return rng.integers(self.clusters, size=self.users + 1)

    @cached_property
    def kinds(self) -> Int64:
        """The kind of each item id, (items + 1,); index 0 is not used."""
        return np.concatenate([[0], self._ranks % self.clusters])

    @cached_property
    def _ranks(self) -> Int64:
        return np.random.default_rng([self.seed, self.items]).permutation(self.items)

    @cached_property
    def preferences(self) -> _Floats:
        """The chances of a user's first item, (users + 1, items + 1); row 0 and column 0 are 0."""
        # Kinds go round, so the quotient is the rank within the kind.
        weight = (1.0 + np.arange(self.items) // self.clusters) ** -self.fall
        affinity = np.array([*self.affinity, *np.ones(self.clusters)])
        distance = (self.kinds[1:] - self.tastes[1:, None]) % self.clusters
        weights = np.zeros((self.users + 1, self.items + 1))
        weights[1:, 1:] = affinity[distance] * weight[self._ranks]
        weights[1:] /= weights[1:].sum(axis=1, keepdims=True)
        return weights

    def chances(self, weights: _Floats, last: Int64, is_next: Any) -> _Floats:
        """Returns the chances (B, items + 1) of the next item.

        Args:
            weights: (B, items + 1) preferences, 0 for items that cannot be taken.
            last: (B,) the items before.
            is_next: (B,) whether they are of the same visit.
        """
        chances: _Floats = weights / weights.sum(axis=1, keepdims=True)
        if self.follows:
            following = (self.kinds[last] + 1) % self.clusters
            weights = weights * (self.kinds == following[:, None])
            total = weights.sum(axis=1, keepdims=True)
            share = self.follows * (is_next[:, None] & (total > 0))
            chances = (1 - share) * chances + share * weights / np.maximum(
                total, 1e-300
            )
        return chances

    def chances_of(self, clicks: Clicks, rows: Int64) -> _Floats:
        """Returns the chances (B, items + 1) of the item of each of the clicks ``rows`` (B,)."""
        users = clicks.users[rows]
        weights = self.preferences[users]
        if not self.again:
            starts = clicks.users.searchsorted(users)
            taken = Column.from_windows(clicks.items, Windows(starts, rows))
            weights[taken.owners, taken.values] = 0.0
        return self.chances(weights, clicks.items[rows - 1], clicks.is_next[rows])

    def best(self, clicks: Clicks, rows: Int64) -> dict[str, float]:
        """Returns the expected figures of ranking the items of clicks ``rows`` (B,) by their chances."""
        # One of them is the answer, greatest first.
        top = -np.sort(-self.chances_of(clicks, rows), axis=1)[:, :10]
        gain = 1 / np.log2(np.arange(10) + 2)
        figures = {}
        for name, gains in (("HR", top), ("NDCG", top * gain)):
            for k in (1, 5, 10):
                figures[f"{name}@{k}"] = float(gains[:, :k].sum(axis=1).mean())
        return figures

    def draw(self, rng: np.random.Generator) -> Clicks:
        """Draws the clicks of all users: the greatest log chance + Gumbel noise each time."""
        least, most = self.lengths
        counts = rng.integers(least, most + 1, size=self.users)
        weights = self.preferences[1:]
        is_next = np.ones((self.users, most), bool)
        if self.follows or self.again:
            is_next = rng.random((self.users, most)) >= self.visits
            is_next[:, 0] = False
            weights = weights.copy()
            items = np.zeros((self.users, most), np.int64)
            for step in range(most):
                chances = self.chances(weights, items[:, step - 1], is_next[:, step])
                with np.errstate(divide="ignore"):
                    keys = np.log(chances) + rng.gumbel(size=weights.shape)
                items[:, step] = keys.argmax(axis=1)
                if not self.again:
                    weights[np.arange(self.users), items[:, step]] = 0
        else:
            # Without replacement and with chances that stay, one sort draws them all
            # (Plackett-Luce).
            keys = np.log(weights[:, 1:])
            keys += rng.gumbel(size=keys.shape)
            items = np.argsort(-keys, axis=1)[:, : counts.max()] + 1
        is_drawn = np.arange(items.shape[1]) < counts[:, None]
        users = np.arange(1, self.users + 1).repeat(is_drawn.sum(axis=1))
        is_next = is_next[:, : items.shape[1]][is_drawn]
        gaps = rng.integers(0, 4, size=len(users))
        if self.visits:
            gaps = np.where(is_next, 60 + 60 * gaps, 86_400 + 20_000 * gaps)
        # From the user's own first click on, at any second of a day.
        times = np.cumsum(gaps)
        if self.visits:
            first = users.searchsorted(np.arange(1, self.users + 1))
            begin = rng.integers(86_400, size=self.users) - times[first]
            times += _FIRST_DAY + begin[users - 1]
        else:
            times += 1_000_000
        return Clicks(users, items[is_drawn], times, is_next)


def planted(
    *,
    users: int = 2_000,
    items: int = 800,
    clusters: int = 12,
    history_length: int = 50,
    seed: int = 0,
) -> RawSet:
    """Generates pairs: each user takes 15 to 45 different items, drawn by :attr:`Planted.preferences`.

    The signal is in the ids, in ``occupation`` (the taste, right 9 times of 10), ``age`` (noisily), ``genres`` (the
    kind) and the histories; ``gender``, ``zip_prefix`` and ``release_year`` are noise. Some times tie.

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
    model = Planted(users=users, items=items, clusters=clusters, seed=seed)
    rng = np.random.default_rng([seed, users, items, clusters, 1])
    clicks = model.draw(rng)
    split = leave_one_out(clicks.users, clicks.items, clicks.times, history_length)
    taste = model.tastes[1:]
    is_right = rng.random(users) < 0.9
    visible = np.where(is_right, taste, rng.integers(clusters, size=users)) + 1
    age = (taste / clusters - 0.5) * 3 + rng.normal(scale=0.5, size=users)
    side_of_users = {
        "user_id": np.arange(1, users + 1),
        "gender": rng.integers(1, 3, users),
        "occupation": visible,
        "zip_prefix": rng.integers(1, 12, users),
        "age": age.astype(np.float32),
    }
    genre = model.kinds[1:] + 1
    second = rng.integers(1, GENRES + 1, items)
    # Drawn for all items, and left out where it is the item's own genre already.
    has_second = (rng.random(items) < 0.5) & (second != genre)
    both = np.stack([np.ones(items, dtype=bool), has_second], axis=1)
    genres = np.stack([genre, second], axis=1)[both]
    titles = [f"item {item}, kind {kind}" for item, kind in enumerate(genre, 1)]
    side_of_items = {
        "item_id": pa.array(np.arange(1, items + 1)),
        "title": pa.array(titles),
        "release_year": pa.array(rng.integers(1, 21, items)),
        "genres": as_arrow(Column.from_lengths(genres, 1 + has_second)),
    }
    # A history holds places among the sorted items, of which some may be nobody's.
    history = split.history
    places = np.unique(clicks.items).searchsorted(history.values)
    raw = set_of_pairs(
        PLANTED,
        pa.array(clicks.users),
        pa.array(clicks.items),
        split._replace(history=Column(places, history.offsets)),
        {
            "user": _arrays(side_of_users),
            "item": side_of_items,
        },
    )
    return dataclasses.replace(
        raw, best=model.best(clicks, split.rows[split.part == TEST])
    )


def planted_sequences(
    *, users: int = 4_000, items: int = 400, seed: int = 0
) -> tuple[Clicks, dict[str, float]]:
    """Generates sequences of 4 to 20 items: with probability .7 an item's fixed successor follows, else any item.

    No item is taken twice. Returns the clicks, and the best figures on the last items. Popularity knows nothing.

    Args:
        users: number of users.
        items: number of items, at least 25.
        seed: seed of the generator.
    """
    model = Planted(
        users=users,
        items=items,
        clusters=items,
        lengths=(4, 20),
        follows=0.7,
        affinity=(1.0, 1.0),
        fall=0.0,
        seed=seed,
    )
    clicks = model.draw(np.random.default_rng([seed, users, items]))
    last = np.cumsum(np.bincount(clicks.users)[1:]) - 1
    return clicks, model.best(clicks, last)


def _arrays(rows: Mapping[str, Any]) -> RawColumns:
    return {name: pa.array(values) for name, values in rows.items()}


def _in_parts(rows: Mapping[str, Any]) -> tuple[dict[str, RawColumns], slice]:
    """Cuts rows into eight tenths for training and one for each other part; returns the rows of the test, too."""
    size = len(next(iter(rows.values())))
    cuts = [0, int(0.8 * size), int(0.9 * size), size]
    splits = {}
    for part, start, stop in zip(PARTS, cuts[:-1], cuts[1:], strict=True):
        splits[part] = _arrays({name: rows[name][start:stop] for name in rows})
    return splits, slice(cuts[2], size)


def best_prediction(chances: _Floats, labels: NDArray[Any]) -> dict[str, float]:
    """Returns the figures of the true ``chances`` of (B,) labels, which no prediction beats: AUC and log loss."""
    values, index = np.unique(chances, return_inverse=True)
    positive = np.bincount(index, labels, len(values))
    negative = np.bincount(index, 1 - labels, len(values))
    # Negatives below each chance, half of those that tie.
    below = np.cumsum(negative) - negative / 2
    likelihood = np.where(labels > 0, chances, 1 - chances)
    return {
        "auc": float((positive * below).sum() / (positive.sum() * negative.sum())),
        "log_loss": float(-np.log(likelihood).mean()),
    }


class PlantedLog(NamedTuple):
    """A generated log of E clicks in the form of Taobao's, in the order of time.

    Attributes:
        columns: user_id, item_id, category_id and timestamp of each click, (E,) int64.
        bought: (E,) whether the click was followed by a purchase: six of ten clicks on an even category, else one.
        model: the generator.
        clicks: its clicks, by user.
        rows: (E,) each click's place among them.
    """

    columns: dict[str, Int64]
    bought: NDArray[np.bool_]
    model: Planted
    clicks: Clicks
    rows: Int64


def planted_log(
    *,
    users: int = 300,
    items: int = 300,
    clicks: int = 60,
    follows: float = 0.7,
    seed: int = 0,
) -> PlantedLog:
    """Generates clicks in visits: the latest click, if less than an hour old, tells the category of the next one.

    Args:
        users: number of users, ids from 1.
        items: number of items, ids from 1, in six categories.
        clicks: greatest number of a user's clicks; the least is half of it.
        follows: share of a visit's further clicks whose category the click before tells; with 0 no session tells more
            than its user.
        seed: seed of the generator.
    """
    model = Planted(
        users=users,
        items=items,
        clusters=6,
        lengths=(clicks // 2, clicks),
        follows=follows,
        visits=0.2,
        affinity=(10.0 if follows else 25.0, 1.0),
        fall=0.0,
        again=True,
        seed=seed,
    )
    rng = np.random.default_rng([seed, users, items, clicks])
    drawn = model.draw(rng)
    rows = np.lexsort((drawn.users, drawn.times))
    columns = {
        "user_id": drawn.users[rows],
        "item_id": drawn.items[rows],
        "category_id": model.kinds[drawn.items[rows]],
        "timestamp": drawn.times[rows],
    }
    bought = rng.random(len(rows)) < _buys(columns["category_id"])
    return PlantedLog(columns, bought, model, drawn, rows)


def _buys(categories: Int64) -> _Floats:
    """Returns the chance that a click on a category is followed by a purchase."""
    return np.where(categories % 2 == 0, 0.6, 0.1)


def planted_log_set(*, seed: int = 0, sessions: bool = True) -> RawSet:
    """Returns the rows of :func:`planted_log` as the preprocessing recipe taobao makes them, one drawn item a click.

    The best possible figures are those of the labels ``click`` and ``conversion`` on the test rows.

    Args:
        seed: seed of the generator.
        sessions: whether the latest clicks tell the next one. Otherwise the user alone does, so a model that reads a
            session as a bag can be as good as any.
    """
    follows = 0.7 if sessions else 0.0
    log = planted_log(users=150, items=120, clicks=130, follows=follows, seed=seed)
    columns = log.columns
    size = len(log.bought)
    rng = np.random.default_rng([seed, 1])
    # Two rows for each click: the clicked item, and one that is drawn uniformly.
    clicks = np.arange(size).repeat(2)
    items = columns["item_id"][clicks]
    items[1::2] = rng.integers(1, log.model.items + 1, size)
    click = np.tile(np.array([1.0, 0.0], np.float32), size)
    # A drawn item that is the clicked one would have both labels.
    mask = (click > 0) | (items != columns["item_id"][clicks])
    clicks, items, click = clicks[mask], items[mask], click[mask]
    categories = log.model.kinds[items]
    splits, test = _in_parts(
        {
            "user_id": columns["user_id"][clicks],
            "timestamp": columns["timestamp"][clicks],
            "item_id": items,
            "category_id": categories,
            "click": click,
            "conversion": click * log.bought[clicks],
            "weight": (1 + items % 2).astype(np.float32),
        }
    )
    chances = log.model.chances_of(log.clicks, log.rows[clicks[test]])
    # Against an item that is drawn uniformly.
    odds = chances[np.arange(len(chances)), items[test]] * log.model.items
    clicked = odds / (1 + odds)
    # Those of the click stand under their plain names, too, since the click is the
    # label.
    best = best_prediction(clicked, click[test])
    converted = clicked * _buys(categories[test])
    for name, chance in (("click", clicked), ("conversion", converted)):
        figures = best_prediction(chance, splits["test"][name].to_numpy())
        best |= {f"{name}_{figure}": value for figure, value in figures.items()}
    return RawSet(
        name=PLANTED,
        splits=splits,
        roles=Roles(
            label="click",
            tasks=("conversion",),
            user="user_id",
            item="item_id",
            user_features=["history", "history_category_id", "history_gap"],
            item_features=["category_id"],
        ),
        kept=("click", "conversion", "weight"),
        best=best,
        steps=[
            History(
                user="user_id",
                item="item_id",
                time="timestamp",
                length=10,
                also=("category_id",),
                gaps=GAPS,
            ),
            Categorify(column="item_id", also=("history",)),
            Categorify(column="category_id", also=("history_category_id",)),
            Categorify(column="user_id"),
            TimeFeatures(column="timestamp", features=("hour",)),
        ],
        events=_arrays(columns),
    )
