"""Scorer: answers requests by a bundle: recommend, score, nearest and embed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from torchrec_ext.retrieval.bundle import Bundle, Floats, GraphError, Side
from torchrec_ext.retrieval.catalogue import NOT, Id, IdArray
from torchrec_ext.retrieval.columns import Read
from torchrec_ext.retrieval.search import (
    Mask,
    QueryError,
    ScoreError,
    check_query,
    open_search,
    rank,
)
from torchrec_ext.schema.validation import DataError, did_you_mean, listed

Parameters = ParamSpec("Parameters")
_Result = TypeVar("_Result")
_MOST_NAMES = 5  # most ids in a message
_BLOCK = 2**16


class RequestError(ValueError):
    """A request has a wrong field, named by ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UserVectors(Protocol):
    """Stored outputs of the query side by user id; see :class:`~torchrec_ext.retrieval.store.StoredUsers`."""

    def find(self, user: Id, tower: str) -> Floats | None:
        """Returns the (Wq,) vector of a user by the side with that digest, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class RecommendRequest:
    """Asks for the best items of a user.

    Args:
        user: raw features by column. The id alone suffices if the bundle has a table of users; features next to the id
            take precedence over the table's.
        k: number of items, 1 or more. If fewer are left, the answer has all of them.
        candidates: ids to choose among; by default the whole catalogue.
        filter: answer only items with one of these values of each attribute, such as ``{"genre": ["Comedy", "War"],
            "release_year": [1995]}``. ``"not"`` lists ids to leave out.
        exclude_seen: leave out the items the user has taken, if the bundle knows them.
        vector: ``live`` always runs the query side; ``auto`` takes a stored vector if one exists and the request has
            no features.
        titles: return the items' titles too.
        liked: number of the user's liked items to return as well.

    Raises:
        RequestError: ``k`` below 1, or an empty list of candidates or of values.
    """

    user: Mapping[str, Any]
    k: int = 10
    candidates: Sequence[Id] | None = None
    filter: Mapping[str, Sequence[Id]] = field(default_factory=dict)
    exclude_seen: bool = True
    vector: Literal["auto", "live"] = "auto"
    titles: bool = False
    liked: int = 0

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("liked", 0)):
            value = getattr(self, name)
            if value < least:
                raise RequestError(name, f"{value}: must be {least} or more")
        if self.candidates is not None and not len(self.candidates):
            raise RequestError(
                "candidates",
                "the list is empty, so nothing could be answered; leave it out for the whole catalogue",
            )
        for name, values in self.filter.items():
            if not isinstance(values, list | tuple) or not values:
                raise RequestError(
                    f"filter.{name}",
                    "must be a list of one value or more; leave it out for no filter",
                )


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Asks for the model's logits of a user and some items.

    Args:
        user: see :class:`RecommendRequest`.
        items: ids of one item or more.
        vector: see :class:`RecommendRequest`.

    Raises:
        RequestError: ``items`` is empty.
    """

    user: Mapping[str, Any]
    items: Sequence[Id]
    vector: Literal["auto", "live"] = "auto"

    def __post_init__(self) -> None:
        if not len(self.items):
            raise RequestError("items", "the list is empty; give one id or more")


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
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
        if not len(self.rows):
            raise RequestError("rows", "the list is empty; give one row or more")


@dataclass(frozen=True, kw_only=True)
class NearestRequest:
    """Asks for the items nearest to an item: those with the greatest cosine of the stored rows.

    Args:
        item: id of the item.
        k: number of items, 1 or more. If the catalogue has fewer others, the answer has all of them.
        titles: return the items' titles too.

    Raises:
        RequestError: ``k`` below 1.
    """

    item: Id
    k: int = 10
    titles: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise RequestError("k", f"{self.k}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Says how much of a user was not in training.

    Args:
        user: whether the user's id is ``known``: a trained row is its own, or no tower reads ids and the bundle's
            users have it; else ``new``.
        unknown_user: whether the user's id is missing, or not among the bundle's users.
        unknown_features: columns with a value mapped to the out-of-vocabulary row.
        vector: source of the user's vector.
    """

    user: Literal["known", "new"] = "known"
    unknown_user: bool = False
    unknown_features: Sequence[str] = ()
    vector: Literal["live", "store"] = "live"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best K items of a user, with the model's logits.

    Args:
        items: (K,) ids, the best first.
        scores: (K,) logits.
        asked: ``k`` of the request; K is smaller if fewer items are left.
        cold: how much of the user was not in training.
        unknown_items: ids of the request that the catalogue lacks, each once. Candidates among them are scored as the
            unknown item.
        titles: (K,) titles, if requested and known.
        liked: ids of items the user liked, the latest first, if requested and known.
        liked_titles: titles of the liked items.
        bundle: digest of the bundle that answered.
    """

    items: list[Id]
    scores: list[float]
    asked: int
    cold: ColdStart
    bundle: str
    unknown_items: list[Id] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    liked: list[Id] = field(default_factory=list)
    liked_titles: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Logits of the N items of a request, in their order; for the other fields see :class:`Recommendation`."""

    scores: list[float]
    cold: ColdStart
    bundle: str
    unknown_items: list[Id] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """(B, W) outputs of a side, and each row's columns with a value mapped to the out-of-vocabulary row."""

    vectors: Floats
    unknown_features: list[list[str]]
    bundle: str


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The K items nearest to an item, the nearest first; see :class:`NearestRequest`.

    Args:
        items: (K,) ids, without the item itself.
        scores: (K,) cosines.
        titles: (K,) titles, if requested and known.
        bundle: digest of the bundle that answered.
    """

    items: list[Id]
    scores: list[float]
    titles: list[str]
    bundle: str


class _User(NamedTuple):
    """A user of a request: vector (Wq,), how much of it is new, and the row in the bundle's users, -1 if unknown."""

    vector: Floats
    cold: ColdStart
    row: int


class _Ready:
    """One bundle with everything an answer needs, immutable; see :class:`Scorer` for arguments."""

    def __init__(self, bundle: Bundle, vectors: UserVectors | None) -> None:
        self.bundle = bundle
        self.digest = bundle.digest
        self._vectors = vectors
        self._search = open_search(bundle)
        self._ids = bundle.items.ids
        # Now, before any request waits for it.
        _ = bundle.items.attributes
        self._key = bundle.users.key if bundle.users is not None else None
        # Columns that are the id, as the model reads it.
        self._id_features: list[str] = []
        if self._key is not None:
            self._id_features = bundle.query.columns.features_of(self._key)

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """See :meth:`Scorer.recommend`."""
        user = self._user(request.user, request.vector)
        excluded, unknown = self._positions(
            f"filter.{NOT}", request.filter.get(NOT, ())
        )
        excluded = excluded[excluded >= 0]
        mask = self._mask(request)
        if request.exclude_seen and self.bundle.users is not None:
            seen = self.bundle.users.seen(user.row)
            excluded = np.concatenate([excluded, seen])
        if request.candidates is None:
            if len(excluded):
                if mask is None:
                    mask = np.ones(len(self.bundle.rows), np.bool_)
                mask[excluded] = False
            scores, positions = _checked(
                self._search.search, user.vector, request.k, mask
            )
            items = self._ids.ids(positions)
        else:
            items, scores, positions, more = self._among(
                request, user, mask, excluded, set(unknown)
            )
            unknown += more
        return Recommendation(
            items=items,
            scores=scores.tolist(),
            asked=request.k,
            cold=user.cold,
            bundle=self.digest,
            unknown_items=list(dict.fromkeys(unknown)),
            titles=self._titles(positions) if request.titles else [],
            **self._liked(request, user),
        )

    def _among(
        self,
        request: RecommendRequest,
        user: _User,
        mask: Mask | None,
        excluded: IdArray,
        left_out: set[Id],
    ) -> tuple[list[Id], Floats, IdArray, list[Id]]:
        """Ranks the request's candidates; ties keep the request's order."""
        assert request.candidates is not None
        candidates = request.candidates
        positions, unknown = self._positions("candidates", candidates)
        if len(set(candidates)) < len(candidates):
            raise RequestError(
                "candidates",
                f"{_list_duplicates(candidates)} more than once; give each candidate once",
            )
        is_known = positions >= 0
        # An unknown item has no attribute, so a filter drops it.
        keep = is_known | (mask is None)
        if mask is not None:
            keep &= mask[positions]
        if len(excluded):
            keep &= ~(is_known & np.isin(positions, excluded))
        if left_out:
            keep &= [each not in left_out for each in candidates]
        chosen = np.flatnonzero(keep)
        scores = self._logits(user, positions[chosen], unknown)
        best = rank(scores, request.k)
        items = [candidates[index] for index in chosen[best].tolist()]
        return items, scores[best], positions[chosen][best], unknown

    def score(self, request: ScoreRequest) -> Scores:
        """See :meth:`Scorer.score`."""
        user = self._user(request.user, request.vector)
        positions, unknown = self._positions("items", request.items)
        return Scores(
            scores=self._logits(user, positions, unknown).tolist(),
            cold=user.cold,
            bundle=self.digest,
            unknown_items=list(dict.fromkeys(unknown)),
        )

    def embed(self, request: EmbedRequest) -> Embedded:
        """See :meth:`Scorer.embed`."""
        rows = list(request.rows)
        side = self.bundle.candidate
        if request.side == "query":
            side = self.bundle.query
            rows = [
                self._columns(row, self._row(row, where), where)
                for row, where in _numbered(rows)
            ]
        for row, where in _numbered(rows):
            _check_row(side, row, where)
        read = _read(side, rows, "rows")
        vectors = _vectors(side, read, "rows")
        if not np.isfinite(vectors).all():
            index = int((~np.isfinite(vectors)).any(axis=1).argmax())
            raise RequestError(
                f"rows[{index}]",
                "the vector is not finite: a feature is too large; send smaller numbers",
            )
        return Embedded(
            vectors=vectors,
            unknown_features=[_unknown(read, row) for row in range(len(rows))],
            bundle=self.digest,
        )

    def nearest(self, request: NearestRequest) -> Nearest:
        """See :meth:`Scorer.nearest`."""
        position, unknown = self._positions("item", [request.item])
        if unknown:
            raise RequestError(
                "item",
                f"{str(request.item)[:100]!r} is not in the catalogue; send an id that is",
            )
        rows = self.bundle.rows
        vector = rows[position[0]].astype(np.float32)
        cosines = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK].astype(np.float32, copy=False)
            cosines[start : start + _BLOCK] = block @ vector
        cosines /= np.maximum(self._norms * self._norms[position[0]], 1e-30)
        # The item itself has no score below all others.
        cosines[position[0]] = -np.inf
        best = rank(cosines, min(request.k, len(rows) - 1))
        return Nearest(
            items=self._ids.ids(best),
            scores=cosines[best].tolist(),
            titles=self._titles(best) if request.titles else [],
            bundle=self.digest,
        )

    @cached_property
    def _norms(self) -> Floats:
        """(N,) norms of the stored rows; made when a request first needs them, by one pass over the rows."""
        norms = np.empty(len(self.bundle.rows), np.float32)
        for start in range(0, len(norms), _BLOCK):
            block = self.bundle.rows[start : start + _BLOCK].astype(np.float32)
            norms[start : start + _BLOCK] = np.linalg.norm(block, axis=1)
        return norms

    def _user(self, user: Mapping[str, Any], vector: str) -> _User:
        row = self._row(user, "user")
        key = self._key
        if (
            self._vectors is not None
            and vector == "auto"
            and key is not None
            and set(user) == {key}
            and user[key] is not None
        ):
            stored = self._vectors.find(user[key], self.bundle.query_digest)
            if stored is not None and len(stored) == self.bundle.query.width:
                cold = ColdStart(unknown_user=row < 0, vector="store")
                return _User(stored, cold, row)
        side = self.bundle.query
        columns = self._columns(user, row, "user")
        read = _read(side, [columns], "user")
        query = _vectors(side, read, "user")[0]
        _checked(check_query, query)
        unknown = _unknown(read, 0)
        is_new = row < 0
        if self._id_features:
            is_new = not set(self._id_features).isdisjoint(unknown)
        cold = ColdStart(
            user="new" if is_new else "known",
            unknown_user=self.bundle.users is not None and row < 0,
            unknown_features=unknown,
        )
        return _User(query, cold, row)

    def _row(self, user: Mapping[str, Any], where: str) -> int:
        """Returns a user's row in the bundle's users, -1 if unknown."""
        users = self.bundle.users
        if users is None or users.key not in user:
            return -1
        user_id = user[users.key]
        if user_id is None:  # logs have rows without a user: nobody known
            return -1
        try:
            return int(users.ids.positions([user_id])[0])
        except ValueError as error:
            raise RequestError(f"{where}.{users.key}", str(error)) from None

    def _columns(
        self, user: Mapping[str, Any], row: int, where: str
    ) -> Mapping[str, Any]:
        """Returns one row of the query side's columns: the request's values override the user's stored ones."""
        raw = self.bundle.query.columns.raw
        table = self.bundle.users
        for name in user:
            if name not in raw and name != self._key:
                hint = did_you_mean(
                    name[:50], raw, f"it reads {listed(raw)}", cutoff=0.5
                )
                raise RequestError(
                    f"{where}.{name[:50]}", f"the model reads no such column; {hint}"
                )
        if raw.keys() <= user.keys():
            return user
        stored: dict[str, Any] = {}
        # The features of an unknown user apply only to a request with nothing but an
        # id. Next to other features they would hide a missing column.
        if table is not None and (row >= 0 or set(user) == {self._key}):
            features = table.features(row)
            stored = {name: values[0] for name, values in features.items()}
        if table is not None and table.key in raw and table.key not in user:
            stored[table.key] = table.features(-1).get(table.key, [None])[0]
        return {**stored, **user}

    def _mask(self, request: RecommendRequest) -> Mask | None:
        """Returns (N,) whether an item has one of the wanted values of each attribute; None without attributes."""
        mask: Mask | None = None
        for name, values in request.filter.items():
            if name == NOT:
                continue
            try:
                more = self.bundle.items.attribute(name).mask(values)
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

    def _logits(self, user: _User, positions: IdArray, unknown: Sequence[Id]) -> Floats:
        """Returns (N,) logits of a user with positions (N,), -1 for the ``unknown`` ids."""
        if not len(positions):
            return np.zeros(0, np.float32)
        # Position -1 reads the first item's row; its logit is then replaced.
        logits = self.bundle.logits(user.vector, positions)
        if positions.min() < 0:
            try:
                row = self.bundle.unknown_item
            except DataError as error:
                raise RequestError(
                    "items",
                    f"{str(unknown[0])[:50]!r} is not in the catalogue, and {error}",
                ) from None
            logits[positions < 0] = self.bundle.pairs(user.vector, row)[0]
        if not np.isfinite(logits).all():
            index = int((~np.isfinite(logits)).argmax())
            item = self._ids.ids(np.maximum(positions[index : index + 1], 0))[0]
            raise ScoreError(
                f"item {str(item)[:60]}: its score is {logits[index]}: the bundle cannot score it; export another one"
            )
        return logits

    def _titles(self, positions: Sequence[int] | IdArray) -> list[str]:
        """Returns titles of positions (N,), empty for an unknown item; an empty list if no item has a title."""
        positions = np.asarray(positions)
        is_known = positions >= 0
        texts = iter(self.bundle.items.titles_of(positions[is_known]))
        titles = [next(texts, "") if exists else "" for exists in is_known.tolist()]
        return titles if any(titles) else []

    def _liked(self, request: RecommendRequest, user: _User) -> dict[str, Any]:
        """Returns the requested number of the user's liked items, the latest first, and their titles."""
        if not request.liked or self.bundle.users is None or user.row < 0:
            return {}
        positions = self.bundle.users.liked(user.row)[::-1][: request.liked]
        titles = self.bundle.items.titles_of(positions) if request.titles else []
        return {"liked": self._ids.ids(positions), "liked_titles": titles}


def _checked(
    function: Callable[Parameters, _Result],
    *arguments: Parameters.args,
    **options: Parameters.kwargs,
) -> _Result:
    try:
        return function(*arguments, **options)
    except QueryError as error:
        raise RequestError("user", str(error)) from None


def _numbered(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], str]]:
    return [(row, f"rows[{index}]") for index, row in enumerate(rows)]


def _check_row(side: Side, row: Mapping[str, Any], where: str) -> None:
    raw = side.columns.raw
    missing = [name for name in raw if name not in row]
    if missing:
        raise RequestError(
            f"{where}.{missing[0]}",
            f"it is missing; the model reads {listed(raw)}, of which missing: {listed(missing)}"
            + ("; an empty list is []" if raw[missing[0]].startswith("list") else ""),
        )


def _read(side: Side, rows: Sequence[Mapping[str, Any]], where: str) -> Read:
    """Reads rows, each with all columns."""
    for index, row in enumerate(rows):
        place = where if len(rows) == 1 and where == "user" else f"{where}[{index}]"
        _check_row(side, row, place)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(
                    f"{place}.{name}", f"{value}: must be a finite number"
                )
    try:
        if len(rows) == 1:
            return side.columns.read_row(rows[0])
        return side.columns.read(rows)
    except (ValueError, OverflowError, TypeError) as error:
        # The column where the message names one: a form shows it beside its field.
        named = re.search(r"column '([^']+)'", str(error))
        if named and named[1] in side.columns.raw and len(rows) == 1:
            where = f"{where}.{named[1]}"
        raise RequestError(where, str(error)) from None


def _vectors(side: Side, read: Read, where: str) -> Floats:
    try:
        return side(read.columns)
    except DataError as error:
        raise RequestError(where, str(error)) from None
    # The bundle's audit ran the same graph, so it is these values that it cannot take.
    except GraphError as error:
        raise RequestError(
            where, f"the model cannot take these values ({error.why}); send others"
        ) from None


def _unknown(read: Read, row: int) -> list[str]:
    return [name for name, mask in read.unknown.items() if mask[row]]


def _list_duplicates(ids: Sequence[Id]) -> str:
    """Lists repeated ids for a message, in the order of their second occurrence."""
    earlier_ids: set[Id] = set()
    duplicates: dict[Id, None] = {}
    for each in ids:
        if each in earlier_ids:
            duplicates[each] = None
        earlier_ids.add(each)
    names = ", ".join(repr(each)[:40] for each in list(duplicates)[:_MOST_NAMES])
    if len(duplicates) > _MOST_NAMES:
        return f"{names} and {len(duplicates) - _MOST_NAMES} others"
    return names


class Scorer:
    """Answers requests with one bundle, and with another from the moment :meth:`swap` returns.

    A request runs the query side once, or takes a stored vector. It searches the catalogue under its filters, or takes
    the request's candidates. The candidate side does not run. Any number of threads may ask and swap: each answer
    comes from one bundle and has its digest.

    Args:
        bundle: bundle that answers.
        vectors: store of users' vectors, or None.
    """

    def __init__(self, bundle: Bundle, vectors: UserVectors | None = None) -> None:
        self._vectors = vectors
        self._ready = _Ready(bundle, vectors)

    @property
    def bundle(self) -> Bundle:
        """Current bundle."""
        return self._ready.bundle

    def swap(self, bundle: Bundle) -> None:
        """Replaces the bundle. Requests in progress finish with the previous one."""
        # One assignment, which is atomic: a request reads the bundle once and keeps it.
        self._ready = _Ready(bundle, self._vectors)

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """Returns the best items of one user.

        Raises:
            RequestError: the request cannot be answered as it is.
            ScoreError: the bundle gives an item a score that is NaN or infinite.
        """
        return self._ready.recommend(request)

    def score(self, request: ScoreRequest) -> Scores:
        """Returns the model's logits for one user and some items; raises as :meth:`recommend`."""
        return self._ready.score(request)

    def embed(self, request: EmbedRequest) -> Embedded:
        """Returns outputs of a side; raises as :meth:`recommend`."""
        return self._ready.embed(request)

    def nearest(self, request: NearestRequest) -> Nearest:
        """Returns the items nearest to an item; raises as :meth:`recommend`."""
        return self._ready.nearest(request)
