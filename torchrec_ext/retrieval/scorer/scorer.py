"""Scorer: ranks ids by a bundle's stored embeddings, query tower and top NN, without the candidate tower."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.retrieval.index.exact import Blockwise, ExactIndex, Index
from torchrec_ext.retrieval.scorer.candidates import (
    CandidateScorer,
    ScoreCompile,
    compiled_or_none,
)
from torchrec_ext.retrieval.scorer.compiled import UserScorer
from torchrec_ext.retrieval.scorer.requests import (
    Answer,
    Embedded,
    EmbedRequest,
    Id,
    Nearest,
    NearestRequest,
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
from torchrec_ext.retrieval.store.ids import IdArray
from torchrec_ext.retrieval.store.versions import StoreError
from torchrec_ext.schema import DataError

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Stage = Literal["exact", "dot", "cosine"]
_MEASURED_K = 100
_MEASURED_ROWS = 256
Parameters = ParamSpec("Parameters")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class PendingRequest:
    """A recommendation in progress: its index in the batch, its user and its filters."""

    index: int
    request: RecommendRequest
    user: ResolvedUser
    selection: Selection


class ReadyBundle:
    """One bundle with everything an answer needs, immutable; see :class:`Scorer` for arguments."""

    def __init__(
        self,
        bundle: Bundle,
        vectors: Sequence[UserVectors],
        stage: Stage,
        compile: ScoreCompile,  # noqa: A002
    ) -> None:
        self.bundle = bundle
        self._score = CandidateScorer(
            bundle.projection, bundle.projected, compile=compile
        )
        self._score_user: UserScorer | None = None
        if self._score.compiled and UserScorer.takes(bundle):
            self._score_user = compiled_or_none(lambda: UserScorer(bundle, self._score))
        self.populated = self._score.populated
        self.index = _first_stage(bundle, stage)
        if isinstance(self.index, Blockwise):
            self.index.quantize()  # now, before any request waits for it
        _ = bundle.items.attributes  # likewise
        self.users = UserLookup(
            bundle, vectors, embeds_later=self._score_user is not None
        )
        self.digest = bundle.manifest.digest
        self.size = len(bundle.store.ids)
        # Measured on this machine, because a batch takes requests by their cost.
        self.search_s, self.score_s = self._measure_seconds()
        # Seconds per row of each side's towers, from the latest answer: there are no
        # inputs to measure with before.
        self.embed_s = {"query": 0.0, "candidate": 0.0}
        self.nearest_s = 0.0

    def scores(self, request: ScoreRequest, user: ResolvedUser) -> Scores:
        """Answers a request for scores."""
        positions, unknown = positions_of(self.bundle, "items", request.items)
        logits = _require_finite(self._logits(user, positions), user)
        return Scores(
            scores=logits.numpy().tolist(),  # half the time of a tensor's own
            cold=user.cold,
            bundle=self.digest,
            unknown_items=unknown,
        )

    def embed(self, request: EmbedRequest) -> Embedded:
        """Answers a request for towers' outputs."""
        start = time.thread_time()
        if request.side == "query":
            vectors, unknown = self.users.embed_rows(request.rows)
        else:
            vectors, unknown = self.users.embed_candidates(request.rows)
        self.embed_s[request.side] = (time.thread_time() - start) / len(request.rows)
        return Embedded(vectors=vectors, unknown_features=unknown, bundle=self.digest)

    def nearest(self, request: NearestRequest) -> Nearest:
        """Answers a request for the items nearest to an item."""
        start = time.thread_time()
        item, unknown = positions_of(self.bundle, "item", [request.item])
        if unknown:
            raise RequestError(
                "item",
                f"{str(request.item)[:100]!r} is not in the catalogue; send an id that is",
            )
        cosines, found = self._by_cosine.search(
            self.bundle.store.rows(item), request.k, excluded=[item]
        )
        exists = found[0] >= 0
        positions = found[0][exists].numpy()
        self.nearest_s = time.thread_time() - start
        return Nearest(
            items=self._ids(positions),
            scores=cosines[0][exists].tolist(),
            titles=self._titles(positions) if request.titles else [],
            bundle=self.digest,
        )

    def recommendations(
        self, requests: Sequence[PendingRequest], retrieve: int
    ) -> dict[int, Answer | Exception]:
        """Returns the answers by their indices.

        Requests without ``candidates`` and ``allowed`` items share one search. Each request with ``allowed`` items gets
        its own.
        """
        answers: dict[int, Answer | Exception] = {}
        groups: dict[int, list[PendingRequest]] = {}
        for pending in requests:
            if pending.selection.candidates is not None:
                answers[pending.index] = guarded(
                    self._rank, pending, pending.selection.candidates
                )
                continue
            # A search takes one mask of allowed items, so only requests without a mask
            # can share it, under key -1.
            key = -1 if pending.selection.allowed is None else pending.index
            groups.setdefault(key, []).append(pending)
        for group in groups.values():
            widths = [
                max(pending.request.k, pending.request.retrieve or retrieve)
                for pending in group
            ]
            # One search for the largest request; each request takes its own width of
            # the results.
            results = guarded(self._search, group, min(max(widths), self.size))
            for row, pending in enumerate(group):
                if isinstance(results, Exception):
                    answers[pending.index] = results
                    continue
                scores, positions = (result[row, : widths[row]] for result in results)
                exists = positions >= 0
                answers[pending.index] = guarded(
                    self._rank, pending, positions[exists], scores[exists]
                )
        return answers

    def cost_s(self, request: Request, retrieve: int) -> float:
        """Estimates a request's seconds from measured times of its towers, or of its search and the top NN."""
        if isinstance(request, EmbedRequest):
            return self.embed_s[request.side] * len(request.rows)
        if isinstance(request, NearestRequest):
            return self.nearest_s
        if isinstance(request, ScoreRequest):
            return self.score_s * len(request.items)
        if request.candidates is not None:
            return self.score_s * len(request.candidates)
        # Only candidates that the index hands on run through the top NN.
        handed_on = (
            0
            if self._final
            else min(self.size, max(request.k, request.retrieve or retrieve))
        )
        return self.search_s + self.score_s * handed_on

    @torch.inference_mode()
    def _measure_seconds(self) -> tuple[float, float]:
        """Measures a search with one query, and one row of the top NN, in seconds of this thread."""
        if not self.size:
            return 0.0, 0.0
        # A generator of its own: a server must not change the process's random numbers.
        query = torch.randn(
            1, self.bundle.query_width, generator=torch.Generator().manual_seed(0)
        )
        positions = torch.arange(_MEASURED_ROWS) % self.size
        search_s = _least_seconds(
            lambda: self.index.search(query, min(_MEASURED_K, self.size))
        )
        return search_s, _least_seconds(
            lambda: self._score(query[0], positions)
        ) / _MEASURED_ROWS

    def _search(self, group: Sequence[PendingRequest], k: int) -> tuple[Tensor, Tensor]:
        filters = [pending.selection for pending in group]
        excluded = None
        if any(len(each.excluded) for each in filters):
            excluded = [each.excluded for each in filters]
        queries = torch.cat([self.users.vector(pending.user) for pending in group])
        scores, positions = self.index.search(
            queries, k, allowed=filters[0].allowed, excluded=excluded
        )
        return scores, positions

    def _rank(
        self, pending: PendingRequest, positions: Tensor, scores: Tensor | None = None
    ) -> Recommendation:
        """Ranks positions and returns the best ``k``; ties keep the order of the index."""
        request = pending.request
        if scores is None or not self._final:
            scores = self._logits(pending.user, positions)
        # Stable, unlike topk, so that equal scores have one order on every machine.
        best = scores.sort(descending=True, stable=True).indices[: request.k]
        _require_finite(scores[best], pending.user)
        ranked = positions[best].numpy()
        request_indices = pending.selection.indices
        if request_indices is None or request.candidates is None:
            items = self._ids(ranked)
        else:  # use the request's own ids, because an unknown item has no position
            items = [
                request.candidates[index] for index in request_indices[best].tolist()
            ]
        liked = self._liked(pending)
        return Recommendation(
            items=items,
            scores=scores[best].numpy().tolist(),
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
        """Whether the index searches by the model's own score, so that no top NN follows."""
        return bool(self.index.metric == "top_nn")

    @cached_property
    def _by_cosine(self) -> ExactIndex:
        """Index of the stored vectors by cosine; made when a request first needs it, by one pass over the store."""
        if isinstance(self.index, ExactIndex) and self.index.metric == "cosine":
            return self.index
        return ExactIndex(self.bundle.store, "cosine")

    @cached_property
    def _unknown(self) -> Tensor:
        """(1, H) projected row of the unknown item."""
        try:
            return self.bundle.projection.candidates(
                self.bundle.unknown_candidate[None]
            )
        except DataError as error:
            raise RequestError(
                "items", f"an id is not in the catalogue, and {error}"
            ) from None

    def _logits(self, user: ResolvedUser, positions: Tensor) -> Tensor:
        """Returns (N,) logits of a user with positions (N,), -1 for the unknown item."""
        if self._score_user is not None and user.columns is not None and len(positions):
            scores = self._score_user(user.columns, positions)
            if scores is not None:
                return scores
            # An unknown item, or a user whose vector is not finite: the code below
            # answers, or says why not.
        vector = self.users.vector(user)
        if positions.numpy().min(initial=0) >= 0:
            return self._score(vector[0], positions)
        is_known = positions >= 0
        projection = self.bundle.projection
        # All positions get the unknown item's score; those of known items are then
        # overwritten.
        scores = projection.score(projection.query(vector)[0], self._unknown).repeat(
            len(positions)
        )
        scores[is_known] = self._score(vector[0], positions[is_known])
        return scores

    def _titles(self, positions: IdArray) -> list[str]:
        """Returns titles of positions (N,), empty for an unknown item; an empty list if no item has a title."""
        is_known = positions >= 0
        texts = iter(self.bundle.items.titles_of(positions[is_known]))
        titles = [next(texts, "") if exists else "" for exists in is_known.tolist()]
        return titles if any(titles) else []

    def _liked(self, pending: PendingRequest) -> IdArray:
        """Returns positions of the requested number of the user's liked items, the latest first."""
        users = self.bundle.users
        count = pending.request.liked
        if not count or users is None or pending.user.row < 0:
            return np.empty(0, np.int64)
        return users.liked(pending.user.row)[::-1][:count]

    def _ids(self, positions: IdArray) -> list[Id]:
        return self.bundle.store.ids.ids(positions).tolist()  # type: ignore[no-any-return]


def _require_finite(scores: Tensor, user: ResolvedUser) -> Tensor:
    """Raises RequestError unless all scores are finite, because JSON has no infinity; returns them."""
    if not np.isfinite(scores.numpy()).all():
        why = "the stored vector is; embed the user again"
        if user.cold.vector == "live":
            why = "a feature is too large"
        raise RequestError("user", f"the scores are beyond float32: {why}")
    return scores


def _least_seconds(function: Callable[[], object]) -> float:
    """Returns the thread's seconds for a call, the shorter of two calls."""
    seconds = []
    # The first call also loads code and pages, which later ones do not pay for.
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
    function: Callable[Parameters, _Result],
    *arguments: Parameters.args,
    **options: Parameters.kwargs,
) -> _Result | RequestError | UnavailableError:
    """Calls ``function``; returns its result or the request's own error. A truncated store counts as unavailable."""
    try:
        return function(*arguments, **options)
    except RequestError as error:
        return error
    except StoreError:
        return UnavailableError(
            "the files of the bundle that is served were changed in place; serve a whole one"
        )


class Scorer:
    """Answers requests with one bundle, and with another from the moment :meth:`swap` returns.

    A request runs the query tower once (or takes a stored vector). It searches the index for candidates under its
    filters (or takes the request's candidates). The top NN then scores these over their stored embeddings; the
    candidate tower does not run. Several requests share one pass through the tower and one search. Any number of
    threads may ask and swap: each answer comes from one bundle and has its digest.

    Args:
        bundle: bundle that answers.
        vectors: stores of users' vectors, in the order to ask them.
        retrieve: number of candidates from the first stage for the top NN, unless the request sets it.
        stage: first stage of a model with a top NN. ``exact`` scores the whole catalogue by the top NN. ``dot`` and
            ``cosine`` first rank the towers' outputs by that product. This takes a fraction of the time but misses
            items; see :meth:`stage_recall`. Other models are searched by their own score.
        compile: ``auto`` compiles the scoring of named items, from the user's columns to the scores, and the top NN
            alone for stored vectors. This takes 20 s if the weights are new on this machine, and about 1 s otherwise.
            See :func:`~torchrec_ext.retrieval.scorer.compiled.compiled_scores`.

    Raises:
        ValueError: ``retrieve`` below 1, or ``stage`` is a product but the towers' outputs have different widths.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        vectors: Sequence[UserVectors] = (),
        retrieve: int = 100,
        stage: Stage = "exact",
        compile: ScoreCompile = "off",  # noqa: A002
    ) -> None:
        if retrieve < 1:
            raise ValueError(
                f"retrieve={retrieve}: must be 1 or more; 100 to 1,000 is usual"
            )
        self.retrieve = retrieve
        self._vectors = vectors
        self._stage: Stage = stage
        self._compile: ScoreCompile = compile
        self._ready = ReadyBundle(bundle, vectors, stage, compile)

    @property
    def bundle(self) -> Bundle:
        """Current bundle."""
        return self._ready.bundle

    @property
    def populated(self) -> bool:
        """Whether the stored rows were read into memory. If not, the first request for a row reads the disk."""
        return self._ready.populated

    def swap(self, bundle: Bundle) -> None:
        """Replaces the bundle. Requests in progress finish with the previous one."""
        # One assignment, which is atomic: a request reads the bundle once and keeps it.
        self._ready = ReadyBundle(bundle, self._vectors, self._stage, self._compile)

    def cost_s(self, request: Request) -> float:
        """Estimates a request's seconds from measured times of its towers, or of its search and the top NN."""
        return self._ready.cost_s(request, self.retrieve)

    def stage_recall(self, k: int = 10, users: int = 64) -> float | None:
        """Measures the first stage's recall of the ``k`` best items by the model's own score.

        Args:
            k: number of best items.
            users: number of users from the bundle's table to measure with.

        Returns:
            The recall, or None if the first stage is exact or the bundle has no users to measure with.
        """
        ready = self._ready
        bundle = self._ready.bundle
        if ready.index is bundle.index or bundle.users is None:
            return None
        count = min(users, len(bundle.users))
        rows = np.linspace(0, len(bundle.users) - 1, count).astype(np.int64)
        queries = bundle.embed_query(bundle.users.rows(rows))
        best = bundle.index.search(queries, k)[1]
        handed_on = ready.index.search(queries, max(k, self.retrieve))[1]
        hits = (best[:, :, None] == handed_on[:, None, :]).any(dim=2)
        return float(hits.float().mean())

    def recommend(self, request: RecommendRequest) -> Recommendation:
        """Returns the best items of one user.

        Raises:
            RequestError: the request cannot be answered as it is.
            UnavailableError: the store of the user's vector is out of reach, and the user's features are unknown.
        """
        return cast(Recommendation, self._answer(request))

    def score(self, request: ScoreRequest) -> Scores:
        """Returns the model's logits for one user and some items; raises as :meth:`recommend`."""
        return cast(Scores, self._answer(request))

    def embed(self, request: EmbedRequest) -> Embedded:
        """Returns outputs of towers; raises as :meth:`recommend`."""
        return cast(Embedded, self._answer(request))

    def nearest(self, request: NearestRequest) -> Nearest:
        """Returns the items nearest to an item; raises as :meth:`recommend`."""
        return cast(Nearest, self._answer(request))

    def _answer(self, request: Request) -> Answer:
        (answer,) = self.answer([request])
        if isinstance(answer, Exception):
            raise answer
        return answer

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Returns one answer or error for each request, in order."""
        # Read once: a swap in the middle must not mix two bundles.
        ready = self._ready
        answers: dict[int, Answer | Exception] = {}
        user_requests = [
            (index, request)
            for index, request in enumerate(requests)
            if isinstance(request, RecommendRequest | ScoreRequest)
        ]
        users = ready.users.find([request for _, request in user_requests])
        pending_requests: list[PendingRequest] = []
        for (index, request), user in zip(user_requests, users, strict=True):
            if isinstance(user, Exception):
                answers[index] = user
            elif isinstance(request, ScoreRequest):
                answers[index] = guarded(ready.scores, request, user)
            else:
                filters = guarded(selection, request, ready.bundle, user.row)
                if isinstance(filters, Exception):
                    answers[index] = filters
                else:
                    pending_requests.append(
                        PendingRequest(index, request, user, filters)
                    )
        answers |= ready.recommendations(pending_requests, self.retrieve)
        for index, each in enumerate(requests):
            if isinstance(each, EmbedRequest):
                answers[index] = guarded(ready.embed, each)
            elif isinstance(each, NearestRequest):
                answers[index] = guarded(ready.nearest, each)
        return [answers[index] for index in range(len(requests))]
