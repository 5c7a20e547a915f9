"""Scorer: requests to ranked ids, by a bundle's stored embeddings, its query tower and its top NN alone.

ReadyBundle: one bundle, ready to rank, score and embed for users who have been found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.index.exact import Blockwise, ExactIndex, Index
from torchrec_ext.retrieval.scorer.candidates import CandidateScorer, Compile
from torchrec_ext.retrieval.scorer.requests import (
    Answer,
    Embedded,
    EmbedRequest,
    Id,
    Recommendation,
    RecommendRequest,
    Request,
    RequestError,
    ScoreRequest,
    Scores,
    Selection,
    UnavailableError,
    positions_of,
    selection,
)
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors
from torchrec_ext.retrieval.scorer.users import ResolvedUser, UserLookup
from torchrec_ext.retrieval.store.versions import StoreError

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Stage = Literal["exact", "dot", "cosine"]
Int64 = NDArray[np.int64]
_MEASURED_K = 100
Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class PendingRequest:
    """A recommendation on its way: its place in the batch, for whom, and among what."""

    at: int
    request: RecommendRequest
    user: ResolvedUser
    selection: Selection


class ReadyBundle:
    """One bundle, ready: everything that an answer needs, none of which changes; see :class:`Scorer` for its arguments."""

    def __init__(self, bundle: Bundle, vectors: Sequence[UserVectors], stage: Stage, compile: Compile) -> None:  # noqa: A002
        self.bundle = bundle
        self._score = CandidateScorer(bundle.projection, bundle.projected, compile=compile)
        self.index = _first_stage(bundle, stage)
        if isinstance(self.index, Blockwise):
            self.index.quantize()  # here, where no request waits for it
        self.users = UserLookup(bundle, vectors)
        self.digest = bundle.manifest.digest
        self.size = len(bundle.store.ids)
        self.search_s = self._measured()

    def scores(self, request: ScoreRequest, user: ResolvedUser) -> Scores:
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

    def recommendations(self, wanted: Sequence[PendingRequest], retrieve: int) -> dict[int, Answer | Exception]:
        """The answers by their places: one search for all that have no filter over the whole catalogue, one for each other."""
        answers: dict[int, Answer | Exception] = {}
        groups: dict[int, list[PendingRequest]] = {}
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

    def _search(self, group: Sequence[PendingRequest], k: int) -> tuple[Tensor, Tensor]:
        chosen = [one.selection for one in group]
        excluded = [part.excluded for part in chosen] if any(len(part.excluded) for part in chosen) else None
        queries = torch.cat([one.user.vector for one in group])
        scores, positions = self.index.search(queries, k, allowed=chosen[0].allowed, excluded=excluded)
        return scores, positions

    def _ranked(self, one: PendingRequest, positions: Tensor, scores: Tensor | None = None) -> Recommendation:
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

    def _liked(self, one: PendingRequest) -> Int64:
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
            f"stage={stage!r}: the query towers' outputs are {width} wide, the candidate tower's {bundle.store.width}: "
            "there is "
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


class Scorer:
    """Answers requests with one bundle, and with another from the moment :meth:`swap` returns.

    A request runs the query tower once (or takes a stored vector), searches the index for candidates under the
    request's filters (or takes those that are given), and scores these by the top NN over their stored embeddings; the
    candidate tower does not run. Several requests share one pass through the tower and one search. Any number of
    threads may ask and swap: an answer is of one bundle throughout, whose digest it bears.

    Args:
        bundle: what answers.
        vectors: stored vectors of users, in the order in which they are asked.
        retrieve: how many the first stage hands to the top NN where the request does not say.
        stage: where a top NN scores, how candidates are found for it: ``exact`` asks the top NN about the whole
            catalogue; ``dot`` and ``cosine`` rank the towers' outputs by that product first, which takes a fraction of
            the time and misses what such a product does not see: :meth:`stage_recall` measures it. Other models are
            searched by their own score.
        compile: ``auto`` compiles the top NN, 10 s where its weights are new here; it pays for many candidates in one
            request. See :class:`~torchrec_ext.retrieval.scorer.candidates.CandidateScorer`.

    Raises:
        ValueError: retrieve below 1, or a stage of towers whose outputs have different widths.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        vectors: Sequence[UserVectors] = (),
        retrieve: int = 100,
        stage: Stage = "exact",
        compile: Compile = "off",  # noqa: A002
    ) -> None:
        if retrieve < 1:
            raise ValueError(f"retrieve={retrieve}: must be 1 or more; 100 to 1,000 is usual")
        self.retrieve = retrieve
        self._vectors = vectors
        self._stage: Stage = stage
        self._compile: Compile = compile
        self._ready = ReadyBundle(bundle, vectors, stage, compile)

    @property
    def bundle(self) -> Bundle:
        """What answers now."""
        return self._ready.bundle

    def swap(self, bundle: Bundle) -> None:
        """From now on answers with ``bundle``; what has begun ends with the one before."""
        self._ready = ReadyBundle(bundle, self._vectors, self._stage, self._compile)

    def search_s(self, request: Request) -> float:
        """Seconds that a request's search over the whole catalogue takes, as measured when the bundle was taken; 0 without one."""
        searches = isinstance(request, RecommendRequest) and request.candidates is None
        return self._ready.search_s if searches else 0.0

    def stage_recall(self, k: int = 10, users: int = 64) -> float | None:
        """The share of the ``k`` best items by the model's own score that the first stage hands on, over some known users.

        None where nothing can be missed, or no user is known to measure it on.
        """
        ready, bundle = self._ready, self._ready.bundle
        if ready.index is bundle.index or bundle.users is None:
            return None
        places = np.linspace(0, len(bundle.users) - 1, min(users, len(bundle.users))).astype(np.int64)
        queries = bundle.embed_query(bundle.users.rows(places))
        best = bundle.index.search(queries, k)[1]
        handed_on = ready.index.search(queries, max(k, self.retrieve))[1]
        return float((best[:, :, None] == handed_on[:, None, :]).any(dim=2).float().mean())

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """The best items of one user.

        Raises:
            RequestError: the request cannot be answered as it is.
            UnavailableError: the user's vector is stored where it cannot be reached, and its features are not known.
        """
        return cast(Recommendation, self._one(request))

    def score(self, request: ScoreRequest) -> Scores:
        """The model's logits for one user and some items; raises as :meth:`recommend`."""
        return cast(Scores, self._one(request))

    def embed(self, request: EmbedRequest) -> Embedded:
        """Outputs of towers; raises as :meth:`recommend`."""
        return cast(Embedded, self._one(request))

    def _one(self, request: Request) -> Answer:
        (answer,) = self.answer([request])
        if isinstance(answer, Exception):
            raise answer
        return answer

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """One answer to each, in order; a request that cannot be answered gets its error and troubles no other."""
        ready = self._ready
        answers: dict[int, Answer | Exception] = {}
        asked = [(at, request) for at, request in enumerate(requests) if not isinstance(request, EmbedRequest)]
        found = ready.users.find([request for _, request in asked])
        wanted: list[PendingRequest] = []
        for (at, request), user in zip(asked, found, strict=True):
            if isinstance(user, Exception):
                answers[at] = user
            elif isinstance(request, ScoreRequest):
                answers[at] = guarded(ready.scores, request, user)
            else:
                chosen = guarded(selection, request, ready.bundle, user.place)
                if isinstance(chosen, Exception):
                    answers[at] = chosen
                else:
                    wanted.append(PendingRequest(at, request, user, chosen))
        answers |= ready.recommendations(wanted, self.retrieve)
        for at, one in enumerate(requests):
            if isinstance(one, EmbedRequest):
                answers[at] = guarded(ready.embed, one)
        return [answers[at] for at in range(len(requests))]
