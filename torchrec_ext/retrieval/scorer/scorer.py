"""Scorer: ranks ids for requests by a bundle's stored embeddings, query tower and top NN; no candidate tower runs."""

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
from torchrec_ext.schema import DataError

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Stage = Literal["exact", "dot", "cosine"]
Int64 = NDArray[np.int64]
_MEASURED_K = 100
_MEASURED_ROWS = 256
Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class PendingRequest:
    """A recommendation that is being made: its index in the batch, its user and its filters."""

    index: int
    request: RecommendRequest
    user: ResolvedUser
    selection: Selection


class ReadyBundle:
    """One bundle, ready to answer: all that an answer needs, which never changes; see :class:`Scorer` for arguments."""

    def __init__(self, bundle: Bundle, vectors: Sequence[UserVectors], stage: Stage, compile: Compile) -> None:  # noqa: A002
        self.bundle = bundle
        self._score = CandidateScorer(bundle.projection, bundle.projected, compile=compile)
        self.populated = self._score.populated
        self.index = _first_stage(bundle, stage)
        if isinstance(self.index, Blockwise):
            self.index.quantize()  # here, where no request waits for it
        self.users = UserLookup(bundle, vectors)
        self.digest = bundle.manifest.digest
        self.size = len(bundle.store.ids)
        self.search_s, self.score_s = self._measured()
        # Of a row of each side's towers, as the latest answer took: their inputs are not known before.
        self.embed_s = {"query": 0.0, "candidate": 0.0}

    def scores(self, request: ScoreRequest, user: ResolvedUser) -> Scores:
        """Answers a request for scores."""
        positions, unknown = positions_of(self.bundle, "items", request.items)
        logits = _finite(self._logits(user.vector, positions), user)
        return Scores(scores=logits.tolist(), cold=user.cold, bundle=self.digest, unknown_items=unknown)

    def embed(self, request: EmbedRequest) -> Embedded:
        """Answers a request for towers' outputs."""
        start = time.thread_time()
        if request.side == "query":
            vectors, unknown = self.users.embed_rows(request.rows)
        else:
            vectors, unknown = self.users.embed_candidates(request.rows)
        self.embed_s[request.side] = (time.thread_time() - start) / len(request.rows)
        return Embedded(vectors=vectors, unknown_features=unknown, bundle=self.digest)

    def recommendations(self, wanted: Sequence[PendingRequest], retrieve: int) -> dict[int, Answer | Exception]:
        """Returns the answers by their indices.

        Requests that may be answered with any item share one search; each of the others has one of its own.
        """
        answers: dict[int, Answer | Exception] = {}
        groups: dict[int, list[PendingRequest]] = {}
        for pending in wanted:
            if pending.selection.candidates is not None:
                answers[pending.index] = guarded(self._ranked, pending, pending.selection.candidates)
            else:
                groups.setdefault(-1 if pending.selection.allowed is None else pending.index, []).append(pending)
        for group in groups.values():
            widths = [max(pending.request.k, pending.request.retrieve or retrieve) for pending in group]
            results = guarded(self._search, group, min(max(widths), self.size))
            for row, pending in enumerate(group):
                if isinstance(results, Exception):
                    answers[pending.index] = results
                    continue
                scores, positions = (result[row, : widths[row]] for result in results)
                exists = positions >= 0
                answers[pending.index] = guarded(self._ranked, pending, positions[exists], scores[exists])
        return answers

    def cost_s(self, request: Request, retrieve: int) -> float:
        """Returns the seconds of a request's towers, or of its search and the top NN, as measured before."""
        if isinstance(request, EmbedRequest):
            return self.embed_s[request.side] * len(request.rows)
        if isinstance(request, ScoreRequest):
            return self.score_s * len(request.items)
        if request.candidates is not None:
            return self.score_s * len(request.candidates)
        handed_on = 0 if self._final else min(self.size, max(request.k, request.retrieve or retrieve))
        return self.search_s + self.score_s * handed_on

    @torch.inference_mode()
    def _measured(self) -> tuple[float, float]:
        """Returns the thread's seconds for a search with one query, and for one row of the top NN."""
        if not self.size:
            return 0.0, 0.0
        query = torch.randn(1, self.bundle.query_width, generator=torch.Generator().manual_seed(0))
        positions = torch.arange(_MEASURED_ROWS) % self.size
        search_s = _least_seconds(lambda: self.index.search(query, min(_MEASURED_K, self.size)))
        return search_s, _least_seconds(lambda: self._logits(query, positions)) / _MEASURED_ROWS

    def _search(self, group: Sequence[PendingRequest], k: int) -> tuple[Tensor, Tensor]:
        filters = [pending.selection for pending in group]
        excluded = [each.excluded for each in filters] if any(len(each.excluded) for each in filters) else None
        queries = torch.cat([pending.user.vector for pending in group])
        scores, positions = self.index.search(queries, k, allowed=filters[0].allowed, excluded=excluded)
        return scores, positions

    def _ranked(self, pending: PendingRequest, positions: Tensor, scores: Tensor | None = None) -> Recommendation:
        """Ranks positions and answers the best ``k``; equal scores keep their order, which the index has chosen."""
        request = pending.request
        if scores is None or not self._final:
            scores = self._logits(pending.user.vector, positions)
        best = scores.sort(descending=True, stable=True).indices[: request.k]
        _finite(scores[best], pending.user)
        ranked, given = positions[best].numpy(), pending.selection.given
        if given is None or request.candidates is None:
            items = self._ids(ranked)
        else:  # the request's own ids, since an unknown item has no position
            items = [request.candidates[index] for index in given[best].tolist()]
        liked = self._liked(pending)
        return Recommendation(
            items=items,
            scores=scores[best].tolist(),
            asked=request.k,
            cold=pending.user.cold,
            bundle=self.digest,
            unknown_items=pending.selection.unknown,
            titles=self._titles(ranked) if request.titles else [],
            liked=self._ids(liked),
            liked_titles=self.bundle.items.titles_of(liked) if request.titles else [],
        )

    @cached_property
    def _final(self) -> bool:
        """Whether the index already searches by the model's own score."""
        return bool(self.index.metric == "top_nn")

    @cached_property
    def _unknown(self) -> Tensor:
        """(1, H) projected row of the unknown item."""
        try:
            return self.bundle.projection.candidates(self.bundle.unknown_candidate[None])
        except DataError as error:
            raise RequestError("items", f"an id is not in the catalogue, and {error}") from None

    def _logits(self, vector: Tensor, positions: Tensor) -> Tensor:
        """Returns (N,) logits of a user's vector (1, Dq) with positions (N,), -1 for the unknown item."""
        if positions.numpy().min(initial=0) >= 0:
            return self._score(vector[0], positions)
        known, projection = positions >= 0, self.bundle.projection
        scores = projection.score(projection.query(vector)[0], self._unknown).repeat(len(positions))
        scores[known] = self._score(vector[0], positions[known])
        return scores

    def _titles(self, positions: Int64) -> list[str]:
        """Returns titles of positions (N,), empty for an unknown item; an empty list where no item has one."""
        known = positions >= 0
        texts = iter(self.bundle.items.titles_of(positions[known]))
        titles = [next(texts, "") if exists else "" for exists in known.tolist()]
        return titles if any(titles) else []

    def _liked(self, pending: PendingRequest) -> Int64:
        """Returns positions of the user's liked items that the request asks for, the latest first."""
        users, count = self.bundle.users, pending.request.liked
        if not count or users is None or pending.user.row < 0:
            return np.empty(0, np.int64)
        return users.liked(pending.user.row)[::-1][:count]

    def _ids(self, positions: Int64) -> list[Id]:
        return self.bundle.store.ids.ids(positions).tolist()  # type: ignore[no-any-return]


def _finite(scores: Tensor, user: ResolvedUser) -> Tensor:
    """Returns scores, which JSON can hold only if they are finite."""
    if not np.isfinite(scores.numpy()).all():
        why = "a feature is too large" if user.cold.vector == "live" else "the stored vector is; embed the user again"
        raise RequestError("user", f"the scores are beyond float32: {why}")
    return scores


def _least_seconds(function: Callable[[], object]) -> float:
    """Returns the thread's seconds for a call, the shorter of two."""
    seconds = []
    for _ in range(2):
        start = time.thread_time()
        function()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def _first_stage(bundle: Bundle, stage: Stage) -> Index:
    if stage == "exact" or bundle.metric != "top_nn":
        return bundle.index
    width = bundle.query_width
    if width != bundle.store.width:
        raise ValueError(
            f"stage={stage!r}: the query towers' outputs are {width} wide, the candidate tower's {bundle.store.width}: "
            "there is no product of both; take stage='exact'"
        )
    return ExactIndex(bundle.store, stage)


def guarded(
    function: Callable[Given, Made], *arguments: Given.args, **options: Given.kwargs
) -> Made | RequestError | UnavailableError:
    """Returns the result of ``function``, or this request's own error; a store that was cut off is unavailable."""
    try:
        return function(*arguments, **options)
    except RequestError as error:
        return error
    except StoreError:
        return UnavailableError("the files of the bundle that is served were changed in place; serve a whole one")


class Scorer:
    """Answers requests with one bundle, and with another from the moment :meth:`swap` returns.

    A request runs the query tower once (or takes a stored vector), searches the index for candidates under its filters
    (or takes given ones), and scores these by the top NN over their stored embeddings; the candidate tower does not
    run. Several requests share one pass through the tower and one search. Any number of threads may ask and swap: one
    bundle makes the whole answer, which has its digest.

    Args:
        bundle: bundle that answers.
        vectors: stores of users' vectors, in the order in which they are asked.
        retrieve: number of candidates that the first stage hands to the top NN, where the request does not say.
        stage: first stage of a model with a top NN: ``exact`` scores the whole catalogue by the top NN; ``dot`` and
            ``cosine`` rank the towers' outputs by that product first, which takes a fraction of the time and misses
            items, as :meth:`stage_recall` measures. Other models are searched by their own score.
        compile: ``auto`` compiles the top NN, in 10 s where its weights are new on this machine; it pays for many
            candidates in one request. See :class:`~torchrec_ext.retrieval.scorer.candidates.CandidateScorer`.

    Raises:
        ValueError: ``retrieve`` below 1, or a ``stage`` for towers whose outputs have different widths.
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
        """Bundle that answers now."""
        return self._ready.bundle

    @property
    def populated(self) -> bool:
        """Whether the stored rows were read into memory; if not, the first requests for each read the disk."""
        return self._ready.populated

    def swap(self, bundle: Bundle) -> None:
        """Answers with ``bundle`` from now on; requests that have begun end with the one before."""
        self._ready = ReadyBundle(bundle, self._vectors, self._stage, self._compile)

    def cost_s(self, request: Request) -> float:
        """Returns the seconds of a request's towers, or of its search and the top NN, as measured before."""
        return self._ready.cost_s(request, self.retrieve)

    def stage_recall(self, k: int = 10, users: int = 64) -> float | None:
        """Measures the share of the ``k`` best items by the model's own score that the first stage hands on.

        Args:
            k: number of best items.
            users: number of known users that are asked for.

        Returns:
            The share, or None where nothing can be missed, or no user is known to measure it on.
        """
        ready, bundle = self._ready, self._ready.bundle
        if ready.index is bundle.index or bundle.users is None:
            return None
        rows = np.linspace(0, len(bundle.users) - 1, min(users, len(bundle.users))).astype(np.int64)
        queries = bundle.embed_query(bundle.users.rows(rows))
        best = bundle.index.search(queries, k)[1]
        handed_on = ready.index.search(queries, max(k, self.retrieve))[1]
        return float((best[:, :, None] == handed_on[:, None, :]).any(dim=2).float().mean())

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """Returns the best items of one user.

        Raises:
            RequestError: the request cannot be answered as it is.
            UnavailableError: the store of the user's vector is out of reach, and the user's features are not known.
        """
        return cast(Recommendation, self._answer(request))

    def score(self, request: ScoreRequest) -> Scores:
        """Returns the model's logits for one user and some items; raises as :meth:`recommend`."""
        return cast(Scores, self._answer(request))

    def embed(self, request: EmbedRequest) -> Embedded:
        """Returns outputs of towers; raises as :meth:`recommend`."""
        return cast(Embedded, self._answer(request))

    def _answer(self, request: Request) -> Answer:
        (answer,) = self.answer([request])
        if isinstance(answer, Exception):
            raise answer
        return answer

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Returns one answer for each request, in order; one that cannot be answered gets its own error."""
        ready = self._ready
        answers: dict[int, Answer | Exception] = {}
        asked = [(index, request) for index, request in enumerate(requests) if not isinstance(request, EmbedRequest)]
        users = ready.users.find([request for _, request in asked])
        wanted: list[PendingRequest] = []
        for (index, request), user in zip(asked, users, strict=True):
            if isinstance(user, Exception):
                answers[index] = user
            elif isinstance(request, ScoreRequest):
                answers[index] = guarded(ready.scores, request, user)
            else:
                filters = guarded(selection, request, ready.bundle, user.row)
                if isinstance(filters, Exception):
                    answers[index] = filters
                else:
                    wanted.append(PendingRequest(index, request, user, filters))
        answers |= ready.recommendations(wanted, self.retrieve)
        for index, each in enumerate(requests):
            if isinstance(each, EmbedRequest):
                answers[index] = guarded(ready.embed, each)
        return [answers[index] for index in range(len(requests))]
