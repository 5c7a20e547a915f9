"""What a :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer` is asked, what it answers, and what it refuses.

Which items a request leaves to choose among: its filters as positions of the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Id = int | str
Source = Literal["live", "store", "redis"]


class RequestError(ValueError):
    """A request that cannot be answered as it is; ``field`` is the part of it that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def check_id_type(field: str, one: Id, kind: str) -> None:
    """Refuses an id of another type than ``kind``, ``int64`` or ``str``.

    Raises:
        RequestError: naming the id.
    """
    if isinstance(one, str) != (kind == "str"):
        given, wanted = ("a string", "whole numbers") if isinstance(one, str) else ("a whole number", "strings")
        raise RequestError(field, f"{str(one)[:100]!r} is {given}; ids here are {wanted}")


class UnavailableError(RuntimeError):
    """What the answer needs cannot be reached now; the same request may be answered later."""


@dataclass(frozen=True, kw_only=True)
class RecommendRequest:
    """Which items for this user.

    Args:
        user: raw features by column. The id alone where the bundle knows the users; features beside it take precedence
            over those that are known.
        k: how many; 1 or more. Where fewer are left, all of them are answered.
        candidates: ids to choose among; the whole catalogue where not given.
        retrieve: how many the index hands to the top NN, ``k`` at least; the scorer's own number where not given.
        exclude: ids that are left out.
        allowed: ids that alone may be answered.
        categories: only items of one of these.
        exclude_seen: leave out what the user has taken, where the bundle knows it.
        vector: ``live``: always run the user tower; ``auto``: take a stored vector where there is one and no feature is
            given.
        titles: answer titles too.
        liked: how many of the items that the user liked to answer beside.

    Raises:
        RequestError: k or retrieve below 1, or a list of candidates that is empty.
    """

    user: Mapping[str, Any]
    k: int = 10
    candidates: Sequence[Id] | None = None
    retrieve: int | None = None
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
            given = getattr(self, name)
            if given is not None and not len(given):
                raise RequestError(
                    name, "the list is empty, so nothing could be answered; leave it out for the whole catalogue"
                )


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """How much this user likes these items: ``user`` and ``vector`` as in :class:`RecommendRequest`, ``items`` ids, one or more.

    Raises:
        RequestError: no items.
    """

    user: Mapping[str, Any]
    items: Sequence[Id]
    vector: Literal["auto", "live"] = "auto"

    def __post_init__(self) -> None:
        if not len(self.items):
            raise RequestError("items", "the list is empty; give one id or more")


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
    """Outputs of the towers of one ``side`` for ``rows`` of raw features, one or more.

    Raises:
        RequestError: no rows.
    """

    rows: Sequence[Mapping[str, Any]]
    side: Literal["query", "candidate"] = "query"

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise RequestError("rows", "the list is empty; give one row or more")


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """What of the user was not in training.

    Args:
        unknown_user: the id is not among the users that the bundle knows, or none was given.
        unknown_features: columns whose value took the out-of-vocabulary row.
        vector: where the user's vector came from.
    """

    unknown_user: bool = False
    unknown_features: Sequence[str] = ()
    vector: Source = "live"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Ids, best first, of ``asked`` items or of as many as are left, with their scores: the model's logits.

    Args:
        items: (K,) ids.
        scores: (K,).
        asked: k of the request.
        cold: what of the user was not in training.
        unknown_items: ids of the request that the catalogue does not have. Candidates among them are scored as the
            unknown item.
        titles: (K,), where asked for and known.
        liked: ids that the user liked, the latest first, where asked for and known.
        liked_titles: their titles.
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
    """(N,) ``scores`` of the items that were asked for, in their order; the rest as in :class:`Recommendation`."""

    scores: list[float]
    cold: ColdStart
    bundle: str
    unknown_items: list[Id] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """(B, D) ``vectors``, and for each row the columns whose value took the out-of-vocabulary row."""

    vectors: Tensor
    unknown_features: list[list[str]]
    bundle: str


Request = RecommendRequest | ScoreRequest | EmbedRequest
Answer = Recommendation | Scores | Embedded


_NAMED = 5  # of many ids, so many are named in a message


@dataclass(frozen=True)
class Selection:
    """What the search of one request is bound to.

    Args:
        candidates: (N,) positions to choose among, with all filters applied, -1 for an unknown item; None for the whole
            catalogue.
        given: (N,) which of the request's candidates each is.
        allowed: (I,) bool, or None for all; of no use beside ``candidates``.
        excluded: positions, likewise.
        unknown: ids of the request that the catalogue does not have.
    """

    candidates: Tensor | None
    given: Tensor | None
    allowed: Tensor | None
    excluded: Tensor
    unknown: list[Id]


def selection(request: RecommendRequest, bundle: Bundle, place: int) -> Selection:
    """The filters of a request by the user at ``place`` of the bundle's users, -1 for an unknown one.

    Raises:
        RequestError: a category that no item has, a candidate given twice, or ids of another type than the catalogue's.
    """
    excluded, unknown = positions_of(bundle, "exclude", request.exclude)
    excluded = excluded[excluded >= 0] if unknown else excluded
    if request.exclude_seen and bundle.users is not None and place >= 0:
        seen = torch.from_numpy(bundle.users.seen(place))
        excluded = torch.cat([excluded, seen]) if len(excluded) else seen
    allowed = None
    if request.allowed is not None:
        positions, more = positions_of(bundle, "allowed", request.allowed)
        allowed = _mask(positions[positions >= 0], len(bundle.store.ids))
        unknown += more
    if request.categories:
        category = _in_categories(bundle, request.categories)
        allowed = category if allowed is None else allowed & category
    if request.candidates is None:
        return Selection(None, None, allowed, excluded, unknown)
    candidates, more = positions_of(bundle, "candidates", request.candidates, once=True)
    left = _left(candidates, allowed, excluded, len(bundle.store.ids))
    return Selection(candidates[left], left, None, excluded, unknown + more)


def positions_of(bundle: Bundle, field: str, ids: Sequence[Id], *, once: bool = False) -> tuple[Tensor, list[Id]]:
    """(N,) positions of ``ids``, -1 for those that the catalogue does not have or no more, and these ids.

    Args:
        bundle: whose catalogue.
        field: of the request, for messages.
        ids: all int or all str.
        once: refuse an id that is given twice.

    Raises:
        RequestError: ids of another type than the catalogue's, or an id given twice.
    """
    if not len(ids):
        return torch.empty(0, dtype=torch.int64), []
    check_id_type(field, ids[0], bundle.store.ids.kind)
    try:
        positions = np.array(bundle.store.ids.positions(cast(Sequence[int], ids)))
    except ValueError as error:
        raise RequestError(field, str(error)) from None
    live = bundle.store.live
    positions[(positions >= 0) & ~live[positions]] = -1
    if once and len(set(ids)) < len(ids):
        raise RequestError(field, f"{_twice(ids)} more than once; give each candidate once")
    return torch.from_numpy(positions), [ids[at] for at in np.flatnonzero(positions < 0).tolist()]


def _twice(ids: Sequence[Id]) -> str:
    seen: set[Id] = set()
    twice = dict.fromkeys(one for one in ids if one in seen or seen.add(one))  # type: ignore[func-returns-value]
    named = ", ".join(repr(one) for one in list(twice)[:_NAMED])
    return f"{named} and {len(twice) - _NAMED} others" if len(twice) > _NAMED else named


def _mask(positions: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[positions] = True
    return mask


def _in_categories(bundle: Bundle, names: Sequence[str]) -> Tensor:
    known: Sequence[str] = bundle.items.categories
    for name in names:
        if name not in known:
            listed = ", ".join(known[:20]) or "none"
            raise RequestError("categories", f"{name!r} is no category of this catalogue; it has {listed}")
    masks = [bundle.items.in_category(name) for name in names]
    return torch.stack(masks).any(dim=0) if len(masks) > 1 else masks[0]


def _left(candidates: Tensor, allowed: Tensor | None, excluded: Tensor, size: int) -> Tensor:
    """(N,) which of the candidates the filters leave. An unknown item is in no category and on no list of allowed ones."""
    stays = torch.ones(size, dtype=torch.bool) if allowed is None else allowed.clone()
    stays[excluded] = False
    keep: NDArray[np.bool_] = np.where(candidates < 0, allowed is None, stays.numpy()[candidates])
    return torch.from_numpy(np.flatnonzero(keep))
