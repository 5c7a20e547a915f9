"""Which items a request leaves to choose among: its filters as positions of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.requests import Id, RecommendRequest, RequestError, check_kind

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle import Bundle

_NAMED = 5  # of many ids, so many are named in a message


@dataclass(frozen=True)
class Selection:
    """What the search of one request is bound to.

    Args:
        candidates: (N,) positions to choose among, with all filters applied, -1 for an unknown item; None for the whole catalogue.
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
    check_kind(field, ids[0], bundle.store.ids.kind)
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
