"""Scorer: requests to ranked ids, by a bundle's stored embeddings, its query tower and its top NN alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from torchrec_ext.retrieval.requests import (
    Answer,
    Embedded,
    EmbedRequest,
    Recommendation,
    RecommendRequest,
    Request,
    ScoreRequest,
    Scores,
)
from torchrec_ext.retrieval.scoring import Compile
from torchrec_ext.retrieval.selection import selection
from torchrec_ext.retrieval.serving import Serving, Stage, Wanted, guarded
from torchrec_ext.retrieval.vectors import UserVectors

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle import Bundle


class Scorer:
    """Answers requests with one bundle, and with another from the moment :meth:`swap` returns.

    A request runs the query tower once (or takes a stored vector), searches the index for candidates under the request's filters
    (or takes those that are given), and scores these by the top NN over their stored embeddings; the candidate tower does
    not run. Several requests share one pass through the tower and one search. Any number of threads may
    ask and swap: an answer is of one bundle throughout, whose digest it bears.

    Args:
        bundle: what answers.
        vectors: stored vectors of users, in the order in which they are asked.
        retrieve: how many the first stage hands to the top NN where the request does not say.
        stage: where a top NN scores, how candidates are found for it: ``exact`` asks the top NN about the whole catalogue; ``dot``
            and ``cosine`` rank the towers' outputs by that product first, which takes a fraction of the time and misses what such a
            product does not see: :meth:`stage_recall` measures it. Other models are searched by their own score.
        compile: ``auto`` compiles the top NN, 10 s where its weights are new here; it pays for many candidates in one request. See
            :class:`~torchrec_ext.retrieval.scoring.CandidateScorer`.

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
        self._serving = Serving(bundle, vectors, stage, compile)

    @property
    def bundle(self) -> Bundle:
        """What answers now."""
        return self._serving.bundle

    def swap(self, bundle: Bundle) -> None:
        """From now on answers with ``bundle``; what has begun ends with the one before."""
        self._serving = Serving(bundle, self._vectors, self._stage, self._compile)

    def search_s(self, request: Request) -> float:
        """Seconds that a request's search over the whole catalogue takes, as measured when the bundle was taken; 0 without one."""
        searches = isinstance(request, RecommendRequest) and request.candidates is None
        return self._serving.search_s if searches else 0.0

    def stage_recall(self, k: int = 10, users: int = 64) -> float | None:
        """The share of the ``k`` best items by the model's own score that the first stage hands on, over some known users.

        None where nothing can be missed, or no user is known to measure it on.
        """
        serving, bundle = self._serving, self._serving.bundle
        if serving.index is bundle.index or bundle.users is None:
            return None
        places = np.linspace(0, len(bundle.users) - 1, min(users, len(bundle.users))).astype(np.int64)
        queries = bundle.embed_query(bundle.users.rows(places))
        best = bundle.index.search(queries, k)[1]
        handed_on = serving.index.search(queries, max(k, self.retrieve))[1]
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
        serving = self._serving
        answers: dict[int, Answer | Exception] = {}
        asked = [(at, request) for at, request in enumerate(requests) if not isinstance(request, EmbedRequest)]
        found = serving.users.find([request for _, request in asked])
        wanted: list[Wanted] = []
        for (at, request), user in zip(asked, found, strict=True):
            if isinstance(user, Exception):
                answers[at] = user
            elif isinstance(request, ScoreRequest):
                answers[at] = guarded(serving.scores, request, user)
            else:
                chosen = guarded(selection, request, serving.bundle, user.place)
                if isinstance(chosen, Exception):
                    answers[at] = chosen
                else:
                    wanted.append(Wanted(at, request, user, chosen))
        answers |= serving.recommendations(wanted, self.retrieve)
        for at, one in enumerate(requests):
            if isinstance(one, EmbedRequest):
                answers[at] = guarded(serving.embed, one)
        return [answers[at] for at in range(len(requests))]
