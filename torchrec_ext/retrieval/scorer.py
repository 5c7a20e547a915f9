"""Scorer: answers requests by a bundle: recommend, score and embed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from torchrec_ext.retrieval.bundle import Bundle, Floats, GraphError, Side
from torchrec_ext.retrieval.catalogue import NOT, Id, IdArray, UserTable
from torchrec_ext.retrieval.search import (
    Mask,
    check_scores,
    open_search,
)
from torchrec_ext.retrieval.store import Store
from torchrec_ext.schema.validation import DataError, listed

_NO_LIMIT = "leave it out for no limit"
# Beyond this norm, it is the request's features that make a score overflow.
_GREATEST_VECTOR = 1e15


class RequestError(ValueError):
    """A request has a wrong field, named by ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class _Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RecommendRequest(_Request, frozen=True, kw_only=True):
    """Asks for the best items of a user.

    Args:
        user: raw features by column. The id alone suffices if the bundle has a table of users; features next to the id
            take precedence over the table's. None is somebody unknown.
        k: number of items, 1 or more. If fewer are left, the answer has all of them.
        candidates: ids to choose among; by default the whole catalogue.
        filter: answer only items with one of these values of each attribute, such as ``{"genre": ["Comedy", "War"],
            "release_year": [1995]}``. ``"not"`` lists ids to leave out.
        exclude_seen: leave out the items the user has taken, if the bundle knows them.
        titles: return the items' titles too.
        liked: number of the user's latest items to return as well.

    Raises:
        RequestError: ``k`` below 1, or an empty list of candidates or of values.
    """

    user: Mapping[str, Any] | None
    k: int = 10
    candidates: Sequence[Id] | None = None
    filter: Mapping[str, Sequence[Id]] = {}
    exclude_seen: bool = True
    titles: bool = False
    liked: int = 0

    def __post_init__(self) -> None:
        _check_least("k", self.k, 1)
        _check_least("liked", self.liked, 0)
        if self.candidates is not None:
            _check_list("candidates", self.candidates, _NO_LIMIT)
        for name, values in self.filter.items():
            _check_list(f"filter.{name}", values, _NO_LIMIT)


class ScoreRequest(_Request, frozen=True, kw_only=True):
    """Asks for the model's logits of a user and some items.

    Args:
        user: see :class:`RecommendRequest`.
        items: ids of one item or more.

    Raises:
        RequestError: ``items`` is empty.
    """

    user: Mapping[str, Any] | None
    items: Sequence[Id]

    def __post_init__(self) -> None:
        _check_list("items", self.items, "give ids of the catalogue")


class EmbedRequest(_Request, frozen=True, kw_only=True):
    """Asks for the outputs of the query side or of the candidate side.

    Args:
        rows: raw features by column, of one row or more.
        side: ``query`` or ``candidate``.

    Raises:
        RequestError: ``rows`` is empty.
    """

    rows: Sequence[Mapping[str, Any]]
    side: Literal["query", "candidate"] = "query"

    def __post_init__(self) -> None:
        _check_list("rows", self.rows, "give an object for each row")


def _check_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise RequestError(field, f"{value}: must be {least} or more")


def _check_list(field: str, values: Any, remedy: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise RequestError(field, f"must be a list of one value or more; {remedy}")


class _OfUser(Struct, kw_only=True, omit_defaults=True):
    unknown_user: bool
    unknown_features: list[str]
    vector: Literal["live", "store"]
    bundle: str
    unknown_items: list[Id]


class Recommendation(_OfUser, kw_only=True, omit_defaults=True):
    """The best K items of a user, with the model's logits.

    Args:
        items: (K,) ids, the best first.
        scores: (K,) logits.
        asked: ``k`` of the request; K is smaller if fewer items are left.
        unknown_user: whether the user's id is missing, or not among the bundle's users.
        unknown_features: columns with a value mapped to the out-of-vocabulary row.
        vector: source of the user's vector, ``live`` or ``store``.
        unknown_items: ids of the request that the catalogue lacks, each once.
        titles: (K,) titles, if requested and known.
        liked: ids of the user's items, the latest first, if requested and known.
        liked_titles: titles of the liked items.
        bundle: digest of the bundle that answered.
    """

    items: list[Id]
    scores: list[float]
    asked: int
    titles: list[str] = []
    liked: list[Id] = []
    liked_titles: list[str] = []


class Scores(_OfUser, kw_only=True):
    """Logits of the N items of a request, in their order; for the other fields see :class:`Recommendation`."""

    scores: list[float]


class Embedded(Struct, kw_only=True):
    """(B, W) outputs of a side, and each row's columns with a value mapped to the out-of-vocabulary row."""

    vectors: list[list[float]]
    unknown_features: list[list[str]]
    bundle: str


class _User(NamedTuple):
    """A user of a request: vector (Wq,), the answer's fields about it, and the row in the bundle's users, or -1."""

    vector: Floats
    fields: dict[str, Any]
    row: int


class Scorer:
    """Answers requests with one bundle.

    A request runs the query side once, or takes a stored vector. It searches the catalogue under its filters, or takes
    the request's candidates. The candidate side does not run. Any number of threads may ask.

    Args:
        bundle: bundle that answers.
        vectors: store of users' vectors, which answers if the bundle would compute the same; or None.

    Raises:
        BundleError: the store has vectors of items.
    """

    def __init__(self, bundle: Bundle, vectors: Store | None = None) -> None:
        self.bundle = bundle
        self.digest = bundle.digest
        fits = vectors is not None and vectors.fits(bundle)
        self._vectors = vectors if fits else None
        self._search = open_search(bundle)
        self._ids = bundle.items.ids
        # Now, before any request waits for it.
        _ = bundle.items.attributes
        self._key = bundle.users.key if bundle.users is not None else None

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """Returns the best items of one user.

        Raises:
            RequestError: the request cannot be answered as it is.
            ScoreError: the bundle gives an item a score that is NaN or infinite.
        """
        user = self._user(request.user)
        excluded, unknown = self._positions(
            f"filter.{NOT}", request.filter.get(NOT, ())
        )
        excluded = excluded[excluded >= 0]
        mask = self._mask(request)
        if request.exclude_seen and self.bundle.users is not None:
            excluded = np.concatenate([excluded, self.bundle.users.seen(user.row)])
        if len(excluded):
            if mask is None:
                mask = np.ones(len(self.bundle.rows), np.bool_)
            mask[excluded] = False
        if request.candidates is None:
            scores, positions = self._search.search(user.vector, request.k, mask)
        else:
            known, more = self._positions("candidates", request.candidates)
            unknown += more
            chosen = np.unique(known[known >= 0])
            if mask is not None:
                chosen = chosen[mask[chosen]]
            scores, positions = self._search.among(user.vector, request.k, chosen)
        return Recommendation(
            items=self._ids.ids(positions),
            scores=scores.tolist(),
            asked=request.k,
            unknown_items=list(dict.fromkeys(unknown)),
            **user.fields,
            titles=self.bundle.items.titles_of(positions) if request.titles else [],
            **self._liked(request, user),
        )

    def score(self, request: ScoreRequest) -> Scores:
        """Returns the model's logits for one user and some items; raises as :meth:`recommend`."""
        user = self._user(request.user)
        positions, unknown = self._positions("items", request.items)
        # Position -1 reads the first item's row; its logit is then replaced.
        logits = self.bundle.logits(user.vector, positions)
        if unknown:
            try:
                row = self.bundle.unknown_item
            except DataError as error:
                raise RequestError(
                    "items",
                    f"{str(unknown[0])[:50]!r} is not in the catalogue, and {error}",
                ) from None
            logits[positions < 0] = self.bundle.pairs(user.vector, row)[0]
        check_scores(self.bundle, logits, positions)
        return Scores(
            scores=logits.tolist(),
            unknown_items=list(dict.fromkeys(unknown)),
            **user.fields,
        )

    def embed(self, request: EmbedRequest) -> Embedded:
        """Returns outputs of a side; raises as :meth:`recommend`."""
        side = self.bundle.candidate
        if request.side == "query":
            side = self.bundle.query
        rows, places = [], []
        for index, row in enumerate(request.rows):
            where = f"rows[{index}]"
            number = self._row(row, where) if request.side == "query" else -1
            rows.append(self._columns(side, row, number, where))
            places.append(where)
        vectors, unknown = _embedded(side, rows, places)
        return Embedded(
            vectors=vectors.tolist(), unknown_features=unknown, bundle=self.digest
        )

    def _user(self, user: Mapping[str, Any] | None) -> _User:
        key = self._key
        if user is None:
            user = {} if key is None else {key: None}
        row = self._row(user, "user")
        query: Floats | None = None
        unknown: list[str] = []
        source = "store"
        only = user.get(key) if key is not None and set(user) == {key} else None
        if self._vectors is not None and only is not None:
            query = self._vectors.find(only)
        if query is None:
            source = "live"
            side = self.bundle.query
            columns = self._columns(side, user, row, "user")
            (query,), (unknown,) = _embedded(side, [columns], ["user"])
        fields = {
            "unknown_user": self.bundle.users is not None and row < 0,
            "unknown_features": unknown,
            "vector": source,
            "bundle": self.digest,
        }
        return _User(query, fields, row)

    def _row(self, user: Mapping[str, Any], where: str) -> int:
        """Returns a user's row in the bundle's users, -1 if unknown."""
        users = self.bundle.users
        # Logs have rows without a user: nobody known.
        if users is None or user.get(users.key) is None:
            return -1
        try:
            return int(users.ids.positions([user[users.key]])[0])
        except ValueError as error:
            raise RequestError(f"{where}.{users.key}", str(error)) from None

    def _columns(
        self, side: Side, row: Mapping[str, Any], user: int, where: str
    ) -> Mapping[str, Any]:
        """Returns one row of a side's columns: of a query, the request's values override the stored ones of a user."""
        raw = side.columns.raw
        table = self.bundle.users if side is self.bundle.query else None
        key = None if table is None else table.key
        for name in row:
            if name not in raw and name != key:
                names = listed(raw if key is None else {key: "", **raw})
                raise RequestError(
                    f"{where}.{name[:50]}",
                    f"the model reads no such column; it reads {names}",
                )
        # An id of null is nobody's: the bundle says which value the model then reads.
        sent = {
            name: value
            for name, value in row.items()
            if name != key or value is not None
        }
        whole = sent
        if table is not None and not raw.keys() <= sent.keys():
            whole = {**self._stored(table, row, user), **sent}
        missing = [name for name in raw if name not in whole]
        if missing:
            also = f", and so are {listed(missing[1:])}" if missing[1:] else ""
            stored = "" if key is None else f"; or '{key}' of a stored user"
            raise RequestError(
                f"{where}.{missing[0]}",
                f"it is missing{also}; send a value of each, an empty list as [], all of a history{stored}",
            )
        return whole

    def _stored(
        self, table: UserTable, user: Mapping[str, Any], row: int
    ) -> dict[str, Any]:
        """Returns the features of the bundle's user in ``row`` that may stand beside those of a request."""
        stored = table.features(row)
        # The features of an unknown user apply only to a request with nothing but an
        # id. Next to other features they would hide a missing column.
        if row < 0 and set(user) != {table.key}:
            return {name: stored[name] for name in stored if name == table.key}
        for *lists, time in self.bundle.query.columns.histories:
            # One history is one unit: lists of two would be mixed, and the stored time
            # would cut newer events.
            if not user.keys().isdisjoint(lists):
                for name in (*lists, time):
                    stored.pop(name, None)
        return stored

    def _mask(self, request: RecommendRequest) -> Mask | None:
        """Returns (N,) whether an item has one of the wanted values of each attribute; None without attributes."""
        mask: Mask | None = None
        for name, values in request.filter.items():
            if name == NOT:
                continue
            attributes = self.bundle.items.attributes
            if name not in attributes:
                names = listed([*attributes, NOT])
                why = f"the items have no such attribute; there are {names}"
                raise RequestError(f"filter.{name}", why)
            try:
                more = attributes[name].mask(values)
            except ValueError as error:
                raise RequestError(f"filter.{name}", str(error)) from None
            mask = more if mask is None else mask & more
        return mask

    def _positions(self, field: str, ids: Sequence[Id]) -> tuple[IdArray, list[Id]]:
        """Returns (N,) positions of ids, -1 for unknown ones, and the list of those."""
        if not len(ids):
            return np.zeros(0, np.int64), []
        try:
            positions = self._ids.positions(ids)
        except ValueError as error:
            raise RequestError(field, str(error)) from None
        if positions.min() >= 0:
            return positions, []
        unknown = np.flatnonzero(positions < 0).tolist()
        return positions, [ids[index] for index in unknown]

    def _liked(self, request: RecommendRequest, user: _User) -> dict[str, Any]:
        """Returns the requested number of the user's liked items, the latest first, and their titles."""
        if not request.liked or self.bundle.users is None or user.row < 0:
            return {}
        positions = self.bundle.users.seen(user.row)[::-1][: request.liked]
        titles = self.bundle.items.titles_of(positions) if request.titles else []
        return {"liked": self._ids.ids(positions), "liked_titles": titles}


def _embedded(
    side: Side, rows: Sequence[Mapping[str, Any]], places: Sequence[str]
) -> tuple[Floats, list[list[str]]]:
    """Returns (B, W) outputs of rows with all columns, and each row's columns with a value mapped to the unknown row.

    ``places`` are the fields of the rows.
    """
    # Rows are read together, which takes a quarter of the time of one by one.
    where = places[0] if len(rows) == 1 else "rows"
    columns = side.columns
    try:
        read = columns.read_row(rows[0]) if len(rows) == 1 else columns.read(rows)
        vectors = side(read.columns)
    # The bundle's audit ran the same graph, so it is these values that it cannot take.
    except GraphError as error:
        why = f"the model cannot take these values ({error.why}); send others"
        raise RequestError(where, why) from None
    except (ValueError, OverflowError, TypeError) as error:
        # The column where the message names one: a form shows it beside its field.
        named = re.search(r"column '([^']+)'", str(error))
        if named and named[1] in columns.raw and len(rows) == 1:
            where = f"{where}.{named[1]}"
        raise RequestError(where, str(error)) from None
    unknown = []
    for row, (vector, place) in enumerate(zip(vectors, places, strict=True)):
        _check_vector(vector, place)
        unknown.append([name for name, mask in read.unknown.items() if mask[row]])
    return vectors, unknown


def _check_vector(vector: Floats, where: str) -> None:
    """Refuses a vector (W,) that no model can score: with NaN or infinity, or of a norm beyond 1e15."""
    # The refusal says what overflowed.
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(vector @ vector)
    # Written so, because NaN is below nothing.
    if not squares <= _GREATEST_VECTOR**2:
        raise RequestError(
            where,
            "the model's result is not a number, infinite or beyond 1e15: it cannot take a feature's value, as log(0), "
            "or a value that large; send values as in training",
        )
