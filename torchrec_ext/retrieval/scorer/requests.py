"""Requests, answers and errors of a :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer`, and a request's filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.bundle.tables import CATEGORIES, NOT

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Id = int | str
UserSource = Literal["live", "store", "redis"]


class RequestError(ValueError):
    """A request has a wrong field, named by ``field``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check_id_type(field: str, value: Id, kind: str) -> None:
    """Refuses an id of another type than ``kind``, ``int64`` or ``str``.

    Raises:
        RequestError: the message names the id.
    """
    if isinstance(value, str) != (kind == "str"):
        what = "a string" if isinstance(value, str) else "a whole number"
        expected = "whole numbers" if isinstance(value, str) else "strings"
        raise RequestError(
            field, f"{str(value)[:100]!r} is {what}; ids here are {expected}"
        )


class UnavailableError(RuntimeError):
    """A required store is out of reach. The same request may succeed later."""


@dataclass(frozen=True, kw_only=True)
class RecommendRequest:
    """Asks for the best items of a user.

    Args:
        user: raw features by column. The id alone suffices if the bundle has a table of users; features next to the id
            take precedence over the table's.
        k: number of items, 1 or more. If fewer are left, the answer has all of them.
        candidates: ids to choose among; by default the whole catalogue.
        retrieve: number of items from the index for the top NN, at least ``k``; by default the scorer's setting.
        filter: answer only items with one of these values of each attribute, such as ``{"genre": ["Comedy", "War"],
            "release_year": [1995]}``. ``"not"`` lists ids to leave out.
        exclude: ids to leave out, as ``filter={"not": ...}``.
        allowed: answer only these ids.
        categories: answer only items of one of these categories, as ``filter={"categories": ...}``.
        exclude_seen: leave out the items the user has taken, if the bundle knows them.
        vector: ``live`` always runs the user tower; ``auto`` takes a stored vector if one exists and the request has no
            features.
        titles: return the items' titles too.
        liked: number of the user's liked items to return as well.

    Raises:
        RequestError: ``k`` or ``retrieve`` below 1, or an empty list of candidates or of values.
    """

    user: Mapping[str, Any]
    k: int = 10
    candidates: Sequence[Id] | None = None
    retrieve: int | None = None
    filter: Mapping[str, Sequence[Id]] = field(default_factory=dict)
    exclude: Sequence[Id] = ()
    allowed: Sequence[Id] | None = None
    categories: Sequence[str] = ()
    exclude_seen: bool = True
    vector: Literal["auto", "live"] = "auto"
    titles: bool = False
    liked: int = 0

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("retrieve", 1), ("liked", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(name, f"{value}: must be {least} or more")
        for name in ("candidates", "allowed"):
            ids = getattr(self, name)
            if ids is not None and not len(ids):
                why = "the list is empty, so nothing could be answered; leave it out for the whole catalogue"
                raise RequestError(name, why)
        if not isinstance(self.filter, Mapping):
            raise RequestError(
                "filter",
                f"it is {type(self.filter).__name__}; must be lists of values by attribute",
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
    """Asks for the outputs of the query towers or of the candidate tower.

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
    """Asks for the items nearest to an item: those with the greatest cosine of the candidate tower's outputs.

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
    vector: UserSource = "live"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best K items of a user, with the model's logits.

    Args:
        items: (K,) ids, the best first.
        scores: (K,) logits.
        asked: ``k`` of the request; K is smaller if fewer items are left.
        cold: how much of the user was not in training.
        unknown_items: ids of the request that the catalogue lacks. Candidates among them are scored as the unknown
            item.
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
    """(B, D) outputs of towers, and each row's columns with a value mapped to the out-of-vocabulary row."""

    vectors: Tensor
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


Request = RecommendRequest | ScoreRequest | EmbedRequest | NearestRequest
Answer = Recommendation | Scores | Embedded | Nearest


_MOST_NAMES = 5  # most ids in a message


@dataclass(frozen=True)
class Selection:
    """Filters of one request, as positions of the catalogue.

    Args:
        candidates: (N,) positions to choose among after all filters, -1 for an unknown item; None for the whole
            catalogue.
        indices: (N,) index of each of ``candidates`` in the request's candidates.
        allowed: (I,) bool, True for positions to choose among, or None for all; None if ``candidates`` is set.
        excluded: positions to leave out; already applied if ``candidates`` is set.
        unknown: ids of the request that the catalogue lacks.
    """

    candidates: Tensor | None
    indices: Tensor | None
    allowed: Tensor | None
    excluded: Tensor
    unknown: list[Id]


def selection(request: RecommendRequest, bundle: Bundle, row: int) -> Selection:
    """Converts a request's filters to positions, for the user in ``row`` of the bundle's users, -1 if unknown.

    Raises:
        RequestError: an unknown attribute or value, a repeated candidate, or ids of another type than the catalogue's.
    """
    excluded, unknown = positions_of(bundle, "exclude", request.exclude)
    if NOT in request.filter:
        positions, more_unknown = positions_of(
            bundle, f"filter.{NOT}", request.filter[NOT]
        )
        excluded = torch.cat([excluded, positions])
        unknown += more_unknown
    if unknown:  # ids outside of the catalogue cannot be recommended anyway
        excluded = excluded[excluded >= 0]
    if request.exclude_seen and bundle.users is not None and row >= 0:
        seen_positions = torch.from_numpy(bundle.users.seen(row))
        excluded = (
            torch.cat([excluded, seen_positions]) if len(excluded) else seen_positions
        )
    allowed = _matching(request, bundle)
    if request.allowed is not None:
        positions, more_unknown = positions_of(bundle, "allowed", request.allowed)
        mask = _mask(positions[positions >= 0], len(bundle.store.ids))
        allowed = mask if allowed is None else allowed & mask
        unknown += more_unknown
    if request.candidates is None:
        return Selection(None, None, allowed, excluded, unknown)
    candidates, more_unknown = positions_of(
        bundle, "candidates", request.candidates, once=True
    )
    # The candidates that pass the filters; `allowed` drops unknown items.
    size = len(bundle.store.ids)
    stays = torch.ones(size, dtype=torch.bool) if allowed is None else allowed.clone()
    stays[excluded] = False
    # Position -1 reads the last item's entry, which np.where() then ignores.
    keep: NDArray[np.bool_] = np.where(
        candidates < 0, allowed is None, stays.numpy()[candidates]
    )
    indices = torch.from_numpy(np.flatnonzero(keep))
    return Selection(
        candidates[indices], indices, None, excluded, unknown + more_unknown
    )


def positions_of(
    bundle: Bundle, field: str, ids: Sequence[Id], *, once: bool = False
) -> tuple[Tensor, list[Id]]:
    """Returns (N,) positions of ids, -1 for missing or removed ids, and the list of those ids.

    Args:
        bundle: bundle with the catalogue.
        field: field of the request, for messages.
        ids: ids, all int or all str.
        once: refuse repeated ids.

    Raises:
        RequestError: ids of another type than the catalogue's, or a repeated id.
    """
    if not len(ids):
        return torch.empty(0, dtype=torch.int64), []
    check_id_type(field, ids[0], bundle.store.ids.kind)
    try:
        positions = bundle.store.ids.positions(cast(Sequence[int], ids))
    except ValueError as error:
        raise RequestError(field, str(error)) from None
    if not bundle.store.all_live:
        positions[(positions >= 0) & ~bundle.store.live[positions]] = -1
    if once and len(set(ids)) < len(ids):
        raise RequestError(
            field, f"{_list_duplicates(ids)} more than once; give each candidate once"
        )
    if positions.min() >= 0:
        return torch.from_numpy(positions), []
    unknown = [ids[index] for index in np.flatnonzero(positions < 0).tolist()]
    return torch.from_numpy(positions), unknown


def _list_duplicates(ids: Sequence[Id]) -> str:
    """Lists repeated ids for a message, in the order of their second occurrence."""
    earlier_ids: set[Id] = set()
    duplicates: dict[Id, None] = {}
    for each in ids:
        if each in earlier_ids:
            duplicates[each] = None
        earlier_ids.add(each)
    names = ", ".join(repr(each) for each in list(duplicates)[:_MOST_NAMES])
    if len(duplicates) > _MOST_NAMES:
        return f"{names} and {len(duplicates) - _MOST_NAMES} others"
    return names


def _mask(positions: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[positions] = True
    return mask


def _matching(request: RecommendRequest, bundle: Bundle) -> Tensor | None:
    """Returns (I,) bool, whether an item has one of the wanted values of each attribute; None without attributes."""
    conditions = [
        (f"filter.{name}", name, values)
        for name, values in request.filter.items()
        if name != NOT
    ]
    if request.categories:
        conditions.append((CATEGORIES, CATEGORIES, request.categories))
    bits = None
    for where, name, values in conditions:
        try:
            more = bundle.items.attribute(name).bits(cast(Sequence[str], values))
        except ValueError as error:
            raise RequestError(where, str(error)) from None
        bits = more if bits is None else bits & more
    if bits is None:
        return None
    mask = np.unpackbits(bits, count=len(bundle.items), bitorder="little")
    return torch.from_numpy(mask.view(np.bool_))
