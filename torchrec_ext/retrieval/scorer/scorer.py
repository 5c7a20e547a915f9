"""Serving: one bundle, ready to rank, score and embed for users who have been found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.blockwise import Blockwise
from torchrec_ext.retrieval.index import ExactIndex, Index
from torchrec_ext.retrieval.requests import (
    Answer,
    Embedded,
    EmbedRequest,
    Id,
    Recommendation,
    RecommendRequest,
    RequestError,
    ScoreRequest,
    Scores,
    UnavailableError,
)
from torchrec_ext.retrieval.scoring import CandidateScorer, Compile
from torchrec_ext.retrieval.selection import Selection, positions_of
from torchrec_ext.retrieval.snapshots import StoreError
from torchrec_ext.retrieval.users import Found, Users
from torchrec_ext.retrieval.vectors import UserVectors

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle import Bundle

Stage = Literal["exact", "dot", "cosine"]
Int64 = NDArray[np.int64]
_MEASURED_K = 100
Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Wanted:
    """A recommendation on its way: its place in the batch, for whom, and among what."""

    at: int
    request: RecommendRequest
    user: Found
    selection: Selection


class Serving:
    """One bundle, ready: everything that an answer needs, none of which changes; see :class:`Scorer` for its arguments."""

    def __init__(self, bundle: Bundle, vectors: Sequence[UserVectors], stage: Stage, compile: Compile) -> None:  # noqa: A002
        self.bundle = bundle
        self._score = CandidateScorer(bundle.projection, bundle.projected, compile=compile)
        self.index = _first_stage(bundle, stage)
        if isinstance(self.index, Blockwise):
            self.index.quantize()  # here, where no request waits for it
        self.users = Users(bundle, vectors)
        self.digest = bundle.manifest.digest
        self.size = len(bundle.store.ids)
        self.search_s = self._measured()

    def scores(self, request: ScoreRequest, user: Found) -> Scores:
        """The answer to one request."""
        positions, unknown = positions_of(self.bundle, "items", request.items)
        logits = self._logits(user.vector, positions)
        return Scores(scores=logits.tolist(), cold=user.cold, bundle=self.digest, unknown_items=unknown)

    def embed(self, request: EmbedRequest) -> Embedded:
        """The answer to one request."""
        bundle = self.bundle
        if request.side == "query":
            vectors, unknown = self.users.embed_rows(request.rows)
        else:
            vectors, unknown = self.users.embed_candidates(request.rows)
        return Embedded(vectors=vectors, unknown_features=unknown, bundle=bundle.manifest.digest)

    def recommendations(self, wanted: Sequence[Wanted], retrieve: int) -> dict[int, Answer | Exception]:
        """The answers by their places: one search for all that have no filter over the whole catalogue, one for each other."""
        answers: dict[int, Answer | Exception] = {}
        groups: dict[int, list[Wanted]] = {}
        for one in wanted:
            if one.selection.candidates is not None:
                answers[one.at] = guarded(self._ranked, one, one.selection.candidates)
            else:
                groups.setdefault(-1 if one.selection.allowed is None else one.at, []).append(one)
        for group in groups.values():
            width = [max(one.request.k, one.request.retrieve or retrieve) for one in group]
            found = guarded(self._search, group, min(max(width), self.size))
            for row, one in enumerate(group):
                if isinstance(found, Exception):
                    answers[one.at] = found
                else:
                    scores, positions = (part[row, : width[row]] for part in found)
                    there = positions >= 0
                    answers[one.at] = guarded(self._ranked, one, positions[there], scores[there])
        return answers

    @torch.inference_mode()
    def _measured(self) -> float:
        """Seconds that the search for one query takes this thread, the shorter of two: what it costs where nothing else runs."""
        if not self.size:
            return 0.0
        query = torch.randn(1, self.bundle.query_width, generator=torch.Generator().manual_seed(0))
        taken = []
        for _ in range(2):
            start = time.thread_time()
            self.index.search(query, min(_MEASURED_K, self.size))
            taken.append(time.thread_time() - start)
        return min(taken)

    def _search(self, group: Sequence[Wanted], k: int) -> tuple[Tensor, Tensor]:
        chosen = [one.selection for one in group]
        excluded = [part.excluded for part in chosen] if any(len(part.excluded) for part in chosen) else None
        queries = torch.cat([one.user.vector for one in group])
        scores, positions = self.index.search(queries, k, allowed=chosen[0].allowed, excluded=excluded)
        return scores, positions

    def _ranked(self, one: Wanted, positions: Tensor, scores: Tensor | None = None) -> Recommendation:
        """The best ``k`` of some positions; of equal scores the one before, which the index puts in the order of its own."""
        if scores is None or not self._final:
            scores = self._logits(one.user.vector, positions)
        best = scores.sort(descending=True, stable=True).indices[: one.request.k]
        places, given = positions[best].numpy(), one.selection.given
        if given is None or one.request.candidates is None:
            items = self._ids(places)
        else:  # by what the request calls them, since an unknown one has no position
            items = [one.request.candidates[at] for at in given[best].tolist()]
        liked = self._liked(one)
        return Recommendation(
            items=items,
            scores=scores[best].tolist(),
            asked=one.request.k,
            cold=one.user.cold,
            bundle=self.digest,
            unknown_items=one.selection.unknown,
            titles=self._titles(places) if one.request.titles else [],
            liked=self._ids(liked),
            liked_titles=self.bundle.items.titles_of(liked) if one.request.titles else [],
        )

    @cached_property
    def _final(self) -> bool:
        """Whether the index already searches by the model's own score."""
        return bool(self.index.metric == "top_nn")

    @cached_property
    def _unknown(self) -> Tensor:
        """(1, H) the unknown item as the store holds the others."""
        return self.bundle.projection.candidates(self.bundle.unknown_candidate[None])

    def _logits(self, vector: Tensor, positions: Tensor) -> Tensor:
        """(N,) of a user's vector (1, Dq) and positions (N,), -1 for the unknown item."""
        known = positions >= 0
        if bool(known.all()):
            return self._score(vector[0], positions)
        projection = self.bundle.projection
        scores = projection.score(projection.query(vector)[0], self._unknown).repeat(len(positions))
        scores[known] = self._score(vector[0], positions[known])
        return scores

    def _titles(self, positions: Int64) -> list[str]:
        """Of positions (N,); nothing for an unknown item, and nothing at all where no item has one."""
        known = positions >= 0
        titles = iter(self.bundle.items.titles_of(positions[known]))
        found = [next(titles, "") if there else "" for there in known.tolist()]
        return found if any(found) else []

    def _liked(self, one: Wanted) -> Int64:
        users = self.bundle.users
        if not one.request.liked or users is None or one.user.place < 0:
            return np.empty(0, np.int64)
        return users.liked(one.user.place)[::-1][: one.request.liked]

    def _ids(self, positions: Int64) -> list[Id]:
        return self.bundle.store.ids.ids(positions).tolist()  # type: ignore[no-any-return]


def _first_stage(bundle: Bundle, stage: Stage) -> Index:
    if stage == "exact" or bundle.metric != "top_nn":
        return bundle.index
    width = bundle.query_width
    if width != bundle.store.width:
        raise ValueError(
            f"stage={stage!r}: the query towers' outputs are {width} wide, the candidate tower's {bundle.store.width}: there is "
            "no product of both; take stage='exact'"
        )
    return ExactIndex(bundle.store, stage)


def guarded(
    function: Callable[Given, Made], *arguments: Given.args, **options: Given.kwargs
) -> Made | RequestError | UnavailableError:
    """What ``function`` returns, or the error that is this request's own; of a store that was cut off, that it is not there."""
    try:
        return function(*arguments, **options)
    except RequestError as error:
        return error
    except StoreError:
        return UnavailableError("the files of the bundle that is served were changed in place; serve a whole one")
