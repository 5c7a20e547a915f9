"""QueuedScorer: a worker's scorer behind a queue, with the state of its bundle, metrics and log."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from torchrec_ext.retrieval.scorer.batching import MicroBatcher, QueueFullError
from torchrec_ext.retrieval.scorer.requests import (
    Answer,
    EmbedRequest,
    NearestRequest,
    Recommendation,
    RecommendRequest,
    Request,
    RequestError,
    ScoreRequest,
    Scores,
    UnavailableError,
    UserSource,
)
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors
from torchrec_ext.retrieval.server.responses import ClientGoneError, Refusal, over_limit
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.retrieval.server.telemetry import Log, Metrics

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

_LOG_EVERY_S = 60.0  # events that any request may cause are counted each time but logged at most this often
_SOON_S = 0.02  # most answers are there before; only then is it worth a task to notice that the client has gone
_SLICES = (
    4  # one batch may take a quarter of the time limit, so that others get their turn
)
_STAGE_RECALL = 0.5  # below, the top NN never scores most of its own best items


class QueuedScorer:
    """The scorer of one worker behind a bounded queue for the handlers.

    Args:
        settings: limits and the other settings of the server.
        bundle: bundle that answers first.
        vectors: see :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer`.
        log: receives events.

    Attributes:
        lingering: whether the worker is about to end and still takes requests.
        draining: whether the worker is about to end and takes no more requests.
        in_flight: number of requests without an answer yet.
        refused: reason for refusing the newest bundle, or None.
    """

    def __init__(
        self,
        settings: ServerConfig,
        bundle: Bundle,
        *,
        vectors: Sequence[UserVectors] = (),
        log: Log | None = None,
    ) -> None:
        self.settings = settings
        self.scorer = Scorer(
            bundle,
            vectors=vectors,
            retrieve=settings.retrieve,
            stage=settings.stage,
            compile=settings.compile,
        )
        self.vectors = vectors
        self.metrics = Metrics()
        self.log = log or Log()
        self.lingering = self.draining = False
        self.in_flight = 0
        self.refused: str | None = None
        self._malformed: dict[UserSource, int] = {store.source: 0 for store in vectors}
        self._logged = -_LOG_EVERY_S
        self._batcher: MicroBatcher[Request, Answer] = MicroBatcher(
            self._answer,
            max_batch=settings.max_batch,
            max_wait_ms=settings.max_wait_ms,
            capacity=settings.limits.queue,
            cost_s=self._cost_s,
            max_cost_s=settings.limits.time_ms / 1e3 / _SLICES,
        )

    def bears_token(self, authorization: str) -> bool:
        """Returns whether a header has the token; False if the server has no token."""
        token = self.settings.token
        expected = f"Bearer {token}".encode()
        # In constant time, so that the time of an answer says nothing about the token.
        return token is not None and hmac.compare_digest(
            authorization.encode("latin-1", "replace"), expected
        )

    def close(self) -> None:
        """Answers the waiting requests, then ends the queue."""
        self._batcher.close()

    def swap(self, bundle: Bundle) -> None:
        """Replaces the live bundle."""
        self.scorer.swap(bundle)
        self.refused = None
        self.metrics.swaps.labels("loaded").inc()
        self.log_bundle()

    def log_bundle(self) -> None:
        """Logs the live bundle and its first stage's recall; warns about rows on disk and a low recall."""
        recall = self.scorer.stage_recall()
        measured: dict[str, Any] = {}
        if recall is not None:
            measured = {
                "stage": self.settings.stage,
                "stage_recall_at_10": round(recall, 4),
            }
        self.log("bundle_loaded", digest=self.scorer.bundle.manifest.digest, **measured)
        if not self.scorer.populated:
            why = "they would take more than half of the memory that is left; requests read from disk what no other has"
            self.log("rows_left_on_disk", why=why)
        if recall is not None and recall < _STAGE_RECALL:
            remedy = "take --stage exact, or a greater --retrieve"
            self.log(
                "stage_unsuitable",
                why=f"{recall:.0%} of the top NN's 10 best are handed on to it; {remedy}",
            )

    def refuse(self, why: str) -> None:
        """Keeps the live bundle and logs the reason for refusing another one."""
        self.refused = why
        self.metrics.swaps.labels("refused").inc()
        self.log("bundle_refused", why=why, serving=self.scorer.bundle.manifest.digest)

    async def ask(self, request: Request, receive: Receive, deadline: float) -> Answer:
        """Returns the scorer's answer.

        Args:
            request: request to answer.
            receive: ASGI's receive of the connection; if the client goes away, its request leaves the queue.
            deadline: latest time of the answer, by ``time.monotonic``.

        Raises:
            Refusal: 413, 422, 429 or 503.
            ClientGoneError: the client has gone.
        """
        limits = self.settings.limits
        self._admit(request)
        try:
            answer = asyncio.wrap_future(self._batcher.submit(request))
        except QueueFullError:
            message = f"{limits.queue} requests wait already, which is the limit; come back in a second, or add workers"
            raise over_limit("queue", limits.queue, message, status=429) from None
        gone: asyncio.Future[None] | None = None
        try:
            left_s = max(0.0, deadline - time.monotonic())
            await asyncio.wait({answer}, timeout=min(left_s, _SOON_S))
            if not answer.done() and left_s > _SOON_S:
                # Wait for the client too: nobody needs the answer after the client has
                # gone.
                gone = asyncio.ensure_future(_gone(receive))
                either: set[asyncio.Future[Any]] = {answer, gone}
                await asyncio.wait(
                    either,
                    timeout=left_s - _SOON_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if answer.done():
                return answer.result()
            # The request leaves the queue.
            answer.cancel()
            if gone is not None and gone.done():
                raise ClientGoneError
            raise too_late(limits.time_ms)
        except RequestError as error:
            raise Refusal(422, "invalid", str(error), field=error.field) from None
        except UnavailableError as error:
            raise Refusal(503, "unavailable", str(error)) from None
        finally:
            if gone is not None:
                gone.cancel()

    def _cost_s(self, request: Request) -> float:
        """Estimates a request's seconds; 0 if a full queue of such requests fits into the time limit."""
        cost_s = self.scorer.cost_s(request)
        limits = self.settings.limits
        if cost_s * limits.queue > limits.time_ms / 1e3:
            return cost_s
        return 0.0

    def _admit(self, request: Request) -> None:
        """Refuses a request that cannot finish in time, because it would also delay others."""
        cost_ms = 1e3 * self._cost_s(request)
        if not cost_ms:
            return
        most = self.settings.limits.time_ms
        if cost_ms > most:
            what, remedy = self._costly(request)
            message = (
                f"{what} takes {cost_ms:,.0f} ms here, and the limit is {most:g} ms; "
                f"{remedy} or a greater --time-ms"
            )
            raise over_limit("time_ms", most, message, status=413)
        waiting_ms = 1e3 * self._batcher.backlog_s
        if waiting_ms + cost_ms > most:
            message = (
                f"the requests before this one take {waiting_ms:,.0f} ms and it takes {cost_ms:,.0f}, and the limit "
                f"is {most:g} ms; come back in a second, ask for less, or add workers"
            )
            raise over_limit("time_ms", most, message, status=429)

    def _costly(self, request: Request) -> tuple[str, str]:
        """Describes a request's slow operation and the remedy."""
        if isinstance(request, ScoreRequest):
            return (
                f"scoring {len(request.items):,} items",
                "name fewer, in several requests, or start the server with",
            )
        if isinstance(request, RecommendRequest) and request.candidates is not None:
            return (
                f"ranking {len(request.candidates):,} candidates",
                "name fewer, or start the server with",
            )
        if isinstance(request, EmbedRequest):
            return (
                f"embedding {len(request.rows):,} rows",
                "give fewer, or start the server with",
            )
        if isinstance(request, NearestRequest):
            return "a search for the nearest items", "start the server with"
        items = f"{len(self.scorer.bundle.store.ids):,} items"
        remedy = "name `candidates`, or start the server with --stage dot, an approximate index"
        return f"a search of all {items}", remedy

    def _answer(self, requests: Sequence[Request]) -> Sequence[Answer | Exception]:
        start = time.perf_counter()
        answers = self.scorer.answer(requests)
        self.metrics.batch.observe(len(requests))
        self.metrics.batch_seconds.observe(time.perf_counter() - start)
        # Once a batch, because each count writes to this worker's file of metrics.
        cold = 0
        for each in answers:
            if isinstance(each, Recommendation | Scores) and each.cold.unknown_user:
                cold += 1
        if cold:
            self.metrics.cold.inc(cold)
        for store in self.vectors:
            self._count_malformed(store.source, store.malformed)
        return answers

    def _count_malformed(self, source: UserSource, total: int) -> None:
        # The store counts since it was opened, Prometheus wants the increase.
        if total > self._malformed[source]:
            self.metrics.malformed.labels(source).inc(total - self._malformed[source])
            self._malformed[source] = total
            if time.monotonic() - self._logged >= _LOG_EVERY_S:
                self._logged = time.monotonic()
                why = "they are no vectors of this tower, and their users are served from features: embed these again"
                self.log("vectors_malformed", source=source, so_far=total, why=why)

    def busy_s(self) -> float:
        """Returns the running time of the current batch in seconds."""
        return self._batcher.busy_s

    def waiting(self) -> int:
        """Returns the number of requests in the queue."""
        return len(self._batcher)


def too_late(time_ms: float) -> Refusal:
    """Returns the refusal of a request beyond its time limit."""
    message = f"no answer within {time_ms:g} ms, which is the limit; come back in a second, or ask for fewer items"
    return over_limit("time_ms", time_ms, message, status=503)


async def _gone(receive: Receive) -> None:
    """Waits until the client has gone, after its body has been read."""
    message: Any = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
