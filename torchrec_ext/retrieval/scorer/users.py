"""UserLookup: a request's user as a vector, stored or by the query tower, which runs once for a batch of users."""

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
from torchrec_ext.schema.validation import listed

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Made = TypeVar("Made")


@dataclass(frozen=True)
class ResolvedUser:
    """A user: vector (1, Dq), how much was not in training, and the row in the bundle's users, -1 if unknown."""

    vector: Tensor
    cold: ColdStart
    row: int


class UserLookup:
    """Looks up the users of a batch of requests in one bundle and its stores of users' vectors."""

    def __init__(self, bundle: Bundle, vectors: Sequence[UserVectors]) -> None:
        self._bundle, self._vectors = bundle, vectors
        self.key = bundle.users.key if bundle.users is not None else None

    def find(self, requests: Sequence[RecommendRequest | ScoreRequest]) -> list[ResolvedUser | Exception]:
        """Returns one user or error for each request."""
        if not requests:
            return []
        results: dict[int, ResolvedUser | Exception] = {}
        rows = self._rows(requests, results)
        self._take_stored(requests, rows, results)
        live = [index for index in range(len(requests)) if index not in results]
        embedded = self._embed([requests[index].user for index in live], [rows[index] for index in live])
        results |= dict(zip(live, embedded, strict=True))
        return [results[index] for index in range(len(requests))]

    def embed_rows(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[list[str]]]:
        """Returns (B, Dq) outputs for rows of raw features, and for each row the columns that are unknown.

        Raises:
            RequestError: the message names the row and the column.
        """
        known = [self._row(row, f"rows[{index}]") for index, row in enumerate(rows)]
        columns = self._columns(rows, known, [f"rows[{index}]" for index in range(len(rows))])
        vectors, unknown = _run(self._bundle.embed_with_unknown, columns, "rows")
        return _finite(vectors, "rows"), _named(unknown, len(rows))

    def embed_candidates(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[list[str]]]:
        """Returns (B, Dc) outputs for rows of an item's raw features; raises as :meth:`embed_rows`."""
        needed = self._bundle.candidate_columns
        for index, row in enumerate(rows):
            _check_finite(row, f"rows[{index}]")
            _check_there(needed, [name for name in needed if name not in row], f"rows[{index}]")
        columns = {name: [row[name] for row in rows] for name in needed}
        return _finite(_run(self._bundle.embed_candidates, columns, "rows"), "rows"), [[] for _ in rows]

    def _rows(
        self, requests: Sequence[RecommendRequest | ScoreRequest], results: dict[int, ResolvedUser | Exception]
    ) -> list[int]:
        """Returns each request's row in the bundle's users; errors go to ``results``."""
        rows = [-1] * len(requests)
        for index, request in enumerate(requests):
            try:
                rows[index] = self._row(request.user, "user")
            except RequestError as error:
                results[index] = error
        return rows

    def _row(self, user: Mapping[str, Any], where: str) -> int:
        users = self._bundle.users
        if users is None or users.key not in user:
            return -1
        given = user[users.key]
        if given is None:  # a row of nobody that is known, as logs have them
            return -1
        if type(given) not in (int, str):
            raise RequestError(
                f"{where}.{users.key}", f"{type(given).__name__} is not an id; ids are whole numbers or strings"
            )
        check_id_type(f"{where}.{users.key}", given, users.ids.kind)
        try:
            return int(users.ids.positions([given])[0])
        except (ValueError, OverflowError) as error:
            raise RequestError(f"{where}.{users.key}", str(error)) from None

    def _take_stored(
        self,
        requests: Sequence[RecommendRequest | ScoreRequest],
        rows: Sequence[int],
        results: dict[int, ResolvedUser | Exception],
    ) -> None:
        """Fills in users whose vector is stored; a store out of reach is passed over where the features are known."""
        if not self._vectors:
            return
        wanted = [
            index
            for index, request in enumerate(requests)
            if index not in results and request.vector == "auto" and set(request.user) == {self.key}
            if request.user[self.key] is not None  # type: ignore[index]  # None is no id, and would spoil its neighbours'
        ]
        failed: UnavailableError | None = None
        for store in self._vectors if wanted else ():
            ids = [requests[index].user[self.key] for index in wanted]  # type: ignore[index]
            try:
                vectors, there = store.find(ids, tower=self._bundle.query_digest, width=self._bundle.query_width)
            except UnavailableError as error:
                failed = error
                continue
            for number in np.flatnonzero(there & vectors.isfinite().all(dim=1).numpy()).tolist():
                index = wanted[number]
                cold = ColdStart(unknown_user=rows[index] < 0, vector=store.source)
                results[index] = ResolvedUser(vectors[number : number + 1], cold, rows[index])
            wanted = [index for index in wanted if index not in results]
        if failed is not None:
            results |= {index: failed for index in wanted if rows[index] < 0}

    def _embed(self, users: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> list[ResolvedUser | Exception]:
        """Embeds all users at once; where that fails, one by one, so that each gets its own error."""
        if not users:
            return []
        try:
            columns = self._columns(users, rows, ["user"] * len(users))
            vectors, masks = _run(self._bundle.embed_with_unknown, columns, "user")
            unknown = _named(masks, len(_finite(vectors, "user")))
        except RequestError as error:
            if len(users) == 1:
                return [error]
            return [self._embed([user], [row])[0] for user, row in zip(users, rows, strict=True)]
        known = self._bundle.users is not None
        return [
            ResolvedUser(
                vectors if len(rows) == 1 else vectors[index : index + 1],
                ColdStart(unknown_user=known and row < 0, unknown_features=unknown[index]),
                row,
            )
            for index, row in enumerate(rows)
        ]

    def _columns(
        self, users: Sequence[Mapping[str, Any]], rows: Sequence[int], where: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Returns the raw columns of the query towers: the request's values, over those known of the user."""
        needed = self._bundle.request_columns
        table = self._bundle.users
        known: dict[str, list[Any]] = {}
        complete = all(needed.keys() <= user.keys() for user in users)
        if table is not None and not complete:  # nothing is read where the requests have all columns
            known = {name: list(column) for name, column in table.rows(np.asarray(rows, np.int64)).items()}
        columns: dict[str, list[Any]] = {name: known.get(name, [None] * len(users)) for name in needed}
        for index, user in enumerate(users):
            for name in user:
                if name in columns:
                    columns[name][index] = user[name]
                elif name != self.key:
                    why = f"the model reads no such column{_nearest(name, needed)}"
                    raise RequestError(f"{where[index]}.{name}", why)
            _check_finite(user, where[index])
            # The features of an unknown user stand for a user who is an id and nothing else; beside features they would
            # hide a mistake.
            filled = table is not None and (rows[index] >= 0 or set(user) == {self.key})
            missing = [
                name for name in needed if name not in user and name != self.key and not (filled and name in known)
            ]
            _check_there(needed, missing, where[index])
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
            f"it is missing; the model reads {listed(needed)}, of which missing: {listed(missing)}",
        )


def _check_finite(row: Mapping[str, Any], where: str) -> None:
    for name, value in row.items():
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise RequestError(f"{where}.{name}", f"{number}: must be a finite number")


def _named(unknown: Mapping[str, NDArray[np.bool_]], rows: int) -> list[list[str]]:
    """Returns for each row the names of the columns that are unknown there."""
    named: list[list[str]] = [[] for _ in range(rows)]
    for name, mask in unknown.items():
        for row, missed in enumerate(mask.tolist()):
            if missed:
                named[row].append(name)
    return named


def _nearest(name: str, names: Mapping[str, str]) -> str:
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; it reads {listed(names)}"
