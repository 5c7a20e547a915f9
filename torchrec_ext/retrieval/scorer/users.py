"""The user of a request: features put together, the query tower run once for a batch of users, or a stored vector taken."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.scorer.requests import (
    ColdStart,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    UnavailableError,
    check_id_type,
)
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Made = TypeVar("Made")


@dataclass(frozen=True)
class ResolvedUser:
    """A user: the vector (1, Dq), what was not in training, and the place among the bundle's users, -1 for an unknown one."""

    vector: Tensor
    cold: ColdStart
    place: int


class UserLookup:
    """Finds the users of a batch of requests, with one bundle."""

    def __init__(self, bundle: Bundle, vectors: Sequence[UserVectors]) -> None:
        self._bundle, self._vectors = bundle, vectors
        self.key = bundle.users.key if bundle.users is not None else None

    def find(self, requests: Sequence[RecommendRequest | ScoreRequest]) -> list[ResolvedUser | Exception]:
        """One user or error for each request."""
        if not requests:
            return []
        found: dict[int, ResolvedUser | Exception] = {}
        places = self._places(requests, found)
        self._take_stored(requests, places, found)
        live = [at for at in range(len(requests)) if at not in found]
        found |= dict(
            zip(live, self._embed([requests[at].user for at in live], [places[at] for at in live]), strict=True)
        )
        return [found[at] for at in range(len(requests))]

    def embed_rows(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[list[str]]]:
        """(B, Dq) of rows of raw features, and for each the columns that took the out-of-vocabulary row.

        Raises:
            RequestError: naming the row and the column.
        """
        places = [self._place(row, f"rows[{at}]") for at, row in enumerate(rows)]
        columns = self._columns(rows, places, [f"rows[{at}]" for at in range(len(rows))])
        vectors, unknown = _run(self._bundle.embed_with_unknown, columns, "rows")
        return _finite(vectors, "rows"), _named(unknown, len(rows))

    def embed_candidates(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[list[str]]]:
        """(B, Dc) of rows of an item's raw features; raises as :meth:`embed_rows`."""
        needed = self._bundle.candidate_columns
        for at, row in enumerate(rows):
            _check_finite(row, f"rows[{at}]")
            _check_there(needed, [name for name in needed if name not in row], f"rows[{at}]")
        columns = {name: [row[name] for row in rows] for name in needed}
        return _finite(_run(self._bundle.embed_candidates, columns, "rows"), "rows"), [[] for _ in rows]

    def _places(
        self, requests: Sequence[RecommendRequest | ScoreRequest], found: dict[int, ResolvedUser | Exception]
    ) -> list[int]:
        places = []
        for at, request in enumerate(requests):
            places.append(-1)
            try:
                places[at] = self._place(request.user, "user")
            except RequestError as error:
                found[at] = error
        return places

    def _place(self, user: Mapping[str, Any], where: str) -> int:
        users = self._bundle.users
        if users is None or users.key not in user:
            return -1
        given = user[users.key]
        if type(given) not in (int, str):
            raise RequestError(
                f"{where}.{users.key}", f"{type(given).__name__} is no id; ids are whole numbers or strings"
            )
        check_id_type(f"{where}.{users.key}", given, users.ids.kind)
        try:
            return int(users.ids.positions([given])[0])
        except (ValueError, OverflowError) as error:
            raise RequestError(f"{where}.{users.key}", str(error)) from None

    def _take_stored(
        self,
        requests: Sequence[RecommendRequest | ScoreRequest],
        places: Sequence[int],
        found: dict[int, ResolvedUser | Exception],
    ) -> None:
        """Fills in those whose vector is stored; a store out of reach is passed over while the features are known."""
        wanted = [
            at
            for at, request in enumerate(requests)
            if at not in found and request.vector == "auto" and self.key is not None and set(request.user) == {self.key}
        ]
        failed: UnavailableError | None = None
        for store in self._vectors if wanted else ():
            ids = [requests[at].user[self.key] for at in wanted]  # type: ignore[index]
            try:
                vectors, there = store.find(ids, tower=self._bundle.query_digest, width=self._bundle.query_width)
            except UnavailableError as error:
                failed = error
                continue
            for row in np.flatnonzero(there & vectors.isfinite().all(dim=1).numpy()).tolist():
                cold = ColdStart(unknown_user=places[wanted[row]] < 0, vector=store.source)
                found[wanted[row]] = ResolvedUser(vectors[row : row + 1], cold, places[wanted[row]])
            wanted = [at for at in wanted if at not in found]
        if failed is not None:
            found |= {at: failed for at in wanted if places[at] < 0}

    def _embed(self, users: Sequence[Mapping[str, Any]], places: Sequence[int]) -> list[ResolvedUser | Exception]:
        """All at once; where that fails one by one, so that each gets its own error."""
        if not users:
            return []
        try:
            columns = self._columns(users, places, ["user"] * len(users))
            vectors, judged = _run(self._bundle.embed_with_unknown, columns, "user")
            unknown = _named(judged, len(_finite(vectors, "user")))
        except RequestError as error:
            if len(users) == 1:
                return [error]
            return [self._embed([user], [place])[0] for user, place in zip(users, places, strict=True)]
        known = self._bundle.users is not None
        return [
            ResolvedUser(
                vectors[row : row + 1],
                ColdStart(unknown_user=known and place < 0, unknown_features=unknown[row]),
                place,
            )
            for row, place in enumerate(places)
        ]

    def _columns(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[int], where: Sequence[str]
    ) -> dict[str, list[Any]]:
        """The raw columns of the query towers: what the request says, over what is known of the user."""
        needed = self._bundle.request_columns
        table = self._bundle.users
        known: dict[str, list[Any]] = {}
        if table is not None and not all(
            needed.keys() <= row.keys() for row in rows
        ):  # nothing is read that no request leaves out
            known = {name: list(column) for name, column in table.rows(np.asarray(places, np.int64)).items()}
        columns: dict[str, list[Any]] = {name: known.get(name, [None] * len(rows)) for name in needed}
        for at, row in enumerate(rows):
            for name in row:
                if name in columns:
                    columns[name][at] = row[name]
                elif name != self.key:
                    raise RequestError(f"{where[at]}.{name}", f"the model reads no such column{_nearest(name, needed)}")
            _check_finite(row, where[at])
            # What is known of nobody stands for a user who is an id and nothing else; beside features it would hide a
            # mistake.
            alone = table is not None and (places[at] >= 0 or set(row) == {self.key})
            missing = [
                name for name in needed if name not in row and name != self.key and not (alone and name in known)
            ]
            _check_there(needed, missing, where[at])
        return columns


def _run(
    embed: Callable[[Mapping[str, Sequence[Any]]], Made], columns: Mapping[str, Sequence[Any]], where: str
) -> Made:
    try:
        return embed(columns)
    except (ValueError, OverflowError, TypeError) as error:
        raise RequestError(where, str(error)) from None


def _finite(vectors: Tensor, where: str) -> Tensor:
    if not np.isfinite(vectors.numpy()).all():
        raise RequestError(where, "the tower's output is not finite: a feature is too large")
    return vectors


def _check_there(needed: Mapping[str, str], missing: Sequence[str], where: str) -> None:
    if missing:
        raise RequestError(
            f"{where}.{missing[0]}",
            f"it is missing; the model reads {', '.join(needed)}, of which missing: {', '.join(missing)}",
        )


def _check_finite(row: Mapping[str, Any], where: str) -> None:
    for name, value in row.items():
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise RequestError(f"{where}.{name}", f"{number}: must be a finite number")


def _named(unknown: Mapping[str, NDArray[np.bool_]], rows: int) -> list[list[str]]:
    """For each row the columns that are unknown there."""
    named: list[list[str]] = [[] for _ in range(rows)]
    for name, mask in unknown.items():
        for row in np.flatnonzero(mask).tolist():
            named[row].append(name)
    return named


def _nearest(name: str, names: Mapping[str, str]) -> str:
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; it reads {', '.join(names)}"
