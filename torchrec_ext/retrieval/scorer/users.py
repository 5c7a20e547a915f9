"""UserLookup: turns a request's user into a vector, stored or by the query tower, in one pass for a batch of users."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.bundle.request_columns import Read
from torchrec_ext.retrieval.scorer.requests import (
    ColdStart,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    UnavailableError,
    check_id_type,
)
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors
from torchrec_ext.schema.validation import did_you_mean, listed

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ResolvedUser:
    """A user: vector, cold-start flags, and the row in the bundle's users.

    Args:
        vector: (1, Dq) outputs of the query towers, stored or computed; None if they have not run yet.
        cold: see :class:`~torchrec_ext.retrieval.scorer.requests.ColdStart`.
        row: row in the bundle's users, -1 if unknown.
        columns: the parsed columns of the towers, if they have not run yet.
    """

    vector: Tensor | None
    cold: ColdStart
    row: int
    columns: Read | None = None


class UserLookup:
    """Looks up the users of a batch of requests in one bundle and its stores of users' vectors.

    Args:
        bundle: bundle with the query towers.
        vectors: stores of users' vectors, in the order to ask them.
        embeds_later: leave the towers of a request with given items to compiled code.
    """

    def __init__(
        self,
        bundle: Bundle,
        vectors: Sequence[UserVectors],
        *,
        embeds_later: bool = False,
    ) -> None:
        self._bundle = bundle
        self._embeds_later = embeds_later
        self._vectors = vectors
        self.key = bundle.users.key if bundle.users is not None else None
        # Features that are the id, as the towers read it.
        self._id_features = (
            [] if self.key is None else bundle.encoders[0].columns.features_of(self.key)
        )

    def find(
        self, requests: Sequence[RecommendRequest | ScoreRequest]
    ) -> list[ResolvedUser | Exception]:
        """Returns one user or error for each request."""
        if not requests:
            return []
        results: dict[int, ResolvedUser | Exception] = {}
        # In this order: a stored vector needs no features, and only the rest runs the
        # towers.
        rows = self._rows(requests, results)
        self._take_stored(requests, rows, results)
        for index in range(len(requests)) if self._embeds_later else ():
            if index not in results and _has_items(requests[index]):
                results[index] = self._read(requests[index].user, rows[index])
        live = [index for index in range(len(requests)) if index not in results]
        users = [requests[index].user for index in live]
        embedded = self._embed(users, [rows[index] for index in live])
        results |= dict(zip(live, embedded, strict=True))
        return [results[index] for index in range(len(requests))]

    def vector(self, user: ResolvedUser) -> Tensor:
        """Returns the (1, Dq) vector of a user.

        Raises:
            RequestError: the query towers give a number that is not finite.
        """
        if user.vector is not None:
            return user.vector
        assert user.columns is not None, "a user without a vector has columns"
        return _require_finite(self._bundle.encoders[0].vectors(user.columns), "user")

    def embed_rows(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, list[list[str]]]:
        """Embeds rows of raw features into (B, Dq); also returns each row's columns with unknown values.

        Raises:
            RequestError: the message names the row and the column.
        """
        where = [f"rows[{index}]" for index in range(len(rows))]
        user_rows = list(map(self._row, rows, where))
        columns = self._columns(rows, user_rows, where)
        vectors, unknown = _run(self._bundle.embed_with_unknown, columns, "rows")
        return _require_finite(vectors, "rows"), _unknown_columns(unknown, len(rows))

    def embed_candidates(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, list[list[str]]]:
        """Embeds rows of items' raw features into (B, Dc); returns and raises as :meth:`embed_rows`."""
        column_types = self._bundle.candidate_columns
        for index, row in enumerate(rows):
            _check_finite(row, f"rows[{index}]")
            _check_missing(
                column_types,
                [name for name in column_types if name not in row],
                f"rows[{index}]",
            )
        columns = {name: [row[name] for row in rows] for name in column_types}
        return _require_finite(
            _run(self._bundle.embed_candidates, columns, "rows"), "rows"
        ), [[] for _ in rows]

    def _rows(
        self,
        requests: Sequence[RecommendRequest | ScoreRequest],
        results: dict[int, ResolvedUser | Exception],
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
        user_id = user[users.key]
        if user_id is None:  # logs have rows without a user: nobody known
            return -1
        if type(user_id) not in (int, str):
            raise RequestError(
                f"{where}.{users.key}",
                f"{type(user_id).__name__} is not an id; ids are whole numbers or strings",
            )
        check_id_type(f"{where}.{users.key}", user_id, users.ids.kind)
        try:
            return int(users.ids.positions([user_id])[0])
        except (ValueError, OverflowError) as error:
            raise RequestError(f"{where}.{users.key}", str(error)) from None

    def _take_stored(
        self,
        requests: Sequence[RecommendRequest | ScoreRequest],
        rows: Sequence[int],
        results: dict[int, ResolvedUser | Exception],
    ) -> None:
        """Fills in users with a stored vector; users with known features do not need a reachable store."""
        if not self._vectors:
            return
        pending = [
            index
            for index, request in enumerate(requests)
            if index not in results
            and request.vector == "auto"
            and set(request.user) == {self.key}
            if request.user[self.key] is not None  # type: ignore[index]  # None is not an id and would spoil the others' type
        ]
        failure: UnavailableError | None = None
        for store in self._vectors if pending else ():
            ids = [requests[index].user[self.key] for index in pending]  # type: ignore[index]
            try:
                vectors, exists = store.find(
                    ids, tower=self._bundle.query_digest, width=self._bundle.query_width
                )
            except UnavailableError as error:
                failure = error
                continue
            for number in np.flatnonzero(
                exists & vectors.isfinite().all(dim=1).numpy()
            ).tolist():
                index = pending[number]
                unknown_user = rows[index] < 0
                cold = ColdStart(
                    user="new" if unknown_user else "known",
                    unknown_user=unknown_user,
                    vector=store.source,
                )
                results[index] = ResolvedUser(
                    vectors[number : number + 1], cold, rows[index]
                )
            pending = [index for index in pending if index not in results]
        # A user without a row in the bundle has no features, so nothing but the
        # unreachable vector could answer.
        if failure is not None:
            results |= {index: failure for index in pending if rows[index] < 0}

    def _embed(
        self, users: Sequence[Mapping[str, Any]], rows: Sequence[int]
    ) -> list[ResolvedUser | Exception]:
        """Embeds all users at once. If it fails, embeds one by one, so that each gets its own error."""
        if not users:
            return []
        try:
            columns = self._columns(users, rows, ["user"] * len(users))
            vectors, masks = _run(self._bundle.embed_with_unknown, columns, "user")
            unknown = _unknown_columns(masks, len(_require_finite(vectors, "user")))
        except RequestError as error:
            if len(users) == 1:
                return [error]
            return [
                self._embed([user], [row])[0]
                for user, row in zip(users, rows, strict=True)
            ]
        results: list[ResolvedUser | Exception] = []
        for index, row in enumerate(rows):
            results.append(
                ResolvedUser(
                    vectors[index : index + 1], self._cold(row, unknown[index]), row
                )
            )
        return results

    def _cold(self, row: int, unknown: Sequence[str]) -> ColdStart:
        """Says how much is new of a user in ``row`` of the bundle's users, with ``unknown`` features."""
        unknown_user = self._bundle.users is not None and row < 0
        is_new = row < 0
        if self._id_features:
            is_new = not set(self._id_features).isdisjoint(unknown)
        return ColdStart(
            user="new" if is_new else "known",
            unknown_user=unknown_user,
            unknown_features=unknown,
        )

    def _read(self, user: Mapping[str, Any], row: int) -> ResolvedUser | RequestError:
        """Parses one user's columns, for towers that run later."""
        try:
            rows = _run(
                self._bundle.encoders[0].read,
                self._columns([user], [row], ["user"]),
                "user",
            )
        except RequestError as error:
            return error
        return ResolvedUser(
            None, self._cold(row, _unknown_columns(rows.unknown, 1)[0]), row, rows
        )

    def _columns(
        self,
        users: Sequence[Mapping[str, Any]],
        rows: Sequence[int],
        where: Sequence[str],
    ) -> dict[str, list[Any]]:
        """Merges the raw columns of the query towers: the request's values override the user's stored ones."""
        column_types = self._bundle.request_columns
        table = self._bundle.users
        user_columns: dict[str, list[Any]] = {}
        complete = all(column_types.keys() <= user.keys() for user in users)
        # The table is not read if the requests have all columns.
        if table is not None and not complete:
            user_columns = {
                name: list(column)
                for name, column in table.rows(np.asarray(rows, np.int64)).items()
            }
        columns: dict[str, list[Any]] = {}
        for name in column_types:
            columns[name] = user_columns.get(name, [None] * len(users))
        for index, user in enumerate(users):
            for name in user:
                if name in columns:
                    columns[name][index] = user[name]
                elif name != self.key:
                    hint = did_you_mean(
                        name,
                        column_types,
                        f"it reads {listed(column_types)}",
                        cutoff=0.5,
                    )
                    raise RequestError(
                        f"{where[index]}.{name}",
                        f"the model reads no such column; {hint}",
                    )
            _check_finite(user, where[index])
            # The default features of an unknown user apply only to a request with
            # nothing but an id. Next to other features they would hide a missing
            # column.
            has_user_row = table is not None and (
                rows[index] >= 0 or set(user) == {self.key}
            )
            missing = [
                name
                for name in column_types
                if name not in user
                and name != self.key
                and not (has_user_row and name in user_columns)
            ]
            _check_missing(column_types, missing, where[index])
        return columns


def _has_items(request: RecommendRequest | ScoreRequest) -> bool:
    """Returns whether a request names the items to score, so that no search needs the user's vector."""
    return isinstance(request, ScoreRequest) or request.candidates is not None


def _run(
    embed: Callable[[Mapping[str, Sequence[Any]]], _Result],
    columns: Mapping[str, Sequence[Any]],
    where: str,
) -> _Result:
    try:
        return embed(columns)
    except (ValueError, OverflowError, TypeError) as error:
        raise RequestError(where, str(error)) from None


def _require_finite(vectors: Tensor, where: str) -> Tensor:
    # By numpy: for one row torch's dispatch takes longer than the check.
    if not np.isfinite(vectors.numpy()).all():
        raise RequestError(
            where, "the tower's output is not finite: a feature is too large"
        )
    return vectors


def _check_missing(
    column_types: Mapping[str, str], missing: Sequence[str], where: str
) -> None:
    if missing:
        raise RequestError(
            f"{where}.{missing[0]}",
            f"it is missing; the model reads {listed(column_types)}, of which missing: {listed(missing)}",
        )


def _check_finite(row: Mapping[str, Any], where: str) -> None:
    for name, value in row.items():
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise RequestError(
                    f"{where}.{name}", f"{number}: must be a finite number"
                )


def _unknown_columns(
    unknown: Mapping[str, NDArray[np.bool_]], rows: int
) -> list[list[str]]:
    """Returns for each row the names of its columns with unknown values."""
    names: list[list[str]] = [[] for _ in range(rows)]
    for name, mask in unknown.items():
        for row, is_unknown in enumerate(mask.tolist()):
            if is_unknown:
                names[row].append(name)
    return names
