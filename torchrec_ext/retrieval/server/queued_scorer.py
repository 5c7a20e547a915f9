"""Service: the scorer behind its queue, what is true of it now, and how a handler asks it."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from torchrec_ext.retrieval.scorer.batching import MicroBatcher, QueueFullError
from torchrec_ext.retrieval.scorer.requests import Answer, Embedded, Request, RequestError, Source, UnavailableError
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.scorer.user_vectors import UserVectors
from torchrec_ext.retrieval.server.responses import ClientGoneError, Refusal, over_limit
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.retrieval.server.telemetry import Log, Metrics

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

_TOLD_EVERY_S = 60.0  # what every request may bring is counted each time, and told once in so long
_SLICES = 4  # of the time limit: for how long of it one batch may search, before others come in between
_STAGE_RECALL = 0.5  # below it most of what the top NN would have put first is never scored


class QueuedScorer:
    """One worker's.

    Args:
        settings: limits and the rest.
        bundle: what it serves first.
        vectors: see :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer`.
        log: where events go.

    Attributes:
        draining: whether it is about to end and takes no more requests.
        in_flight: requests that it has and has not answered.
        refused: why the bundle that should be served now is not, or None.
    """

    def __init__(
        self, settings: ServerConfig, bundle: Bundle, *, vectors: Sequence[UserVectors] = (), log: Log | None = None
    ) -> None:
        self.settings = settings
        self.scorer = Scorer(
            bundle, vectors=vectors, retrieve=settings.retrieve, stage=settings.stage, compile=settings.compile
        )
        self.vectors = vectors
        self.metrics = Metrics()
        self.log = log or Log()
        self.draining = False
        self.in_flight = 0
        self.refused: str | None = None
        self._malformed: dict[Source, int] = {store.source: 0 for store in vectors}
        self._told = -_TOLD_EVERY_S
        self._batcher: MicroBatcher[Request, Answer] = MicroBatcher(
            self._answer,
            max_batch=settings.max_batch,
            max_wait_ms=settings.max_wait_ms,
            capacity=settings.limits.queue,
            cost_s=lambda request: self.scorer.search_s(request),
            max_cost_s=settings.limits.time_ms / 1e3 / _SLICES,
        )

    def bears_token(self, authorization: str) -> bool:
        """Whether a header is that of a caller with the token; False where the service has none."""
        token = self.settings.token
        expected = f"Bearer {token}".encode()
        return token is not None and hmac.compare_digest(authorization.encode("latin-1", "replace"), expected)

    def close(self) -> None:
        """Answers what waits, then ends."""
        self._batcher.close()

    def swap(self, bundle: Bundle) -> None:
        """Takes the place of the bundle before."""
        self.scorer.swap(bundle)
        self.refused = None
        self.metrics.swaps.labels("loaded").inc()
        self.log_bundle()

    def log_bundle(self) -> None:
        """A line on what is served, with what its first stage misses."""
        recall = self.scorer.stage_recall()
        measured = {} if recall is None else {"stage": self.settings.stage, "stage_recall_at_10": round(recall, 4)}
        self.log("bundle_loaded", digest=self.scorer.bundle.manifest.digest, **measured)
        if recall is not None and recall < _STAGE_RECALL:
            remedy = "take --stage exact, or a greater --retrieve"
            self.log("stage_unsuitable", why=f"{recall:.0%} of the top NN's 10 best are handed on to it; {remedy}")

    def refuse(self, why: str) -> None:
        """Goes on with the bundle that is live, and says why."""
        self.refused = why
        self.metrics.swaps.labels("refused").inc()
        self.log("bundle_refused", why=why, serving=self.scorer.bundle.manifest.digest)

    async def ask(self, request: Request, receive: Receive, deadline: float) -> Answer:
        """The scorer's answer.

        Args:
            request: what is asked.
            receive: of the connection; a client that goes away takes its request out of the queue.
            deadline: of ``time.monotonic``.

        Raises:
            Refusal: 413, 422, 429 or 503.
            ClientGoneError: nobody waits any more.
        """
        limits = self.settings.limits
        self._admit(request)
        try:
            answer = asyncio.wrap_future(self._batcher.submit(request))
        except QueueFullError:
            message = f"{limits.queue} requests wait already, which is the limit; come back in a second, or add workers"
            raise over_limit("queue", limits.queue, message, status=429, retry=True) from None
        gone = asyncio.ensure_future(_gone(receive))
        either: set[asyncio.Future[Any]] = {answer, gone}
        try:
            await asyncio.wait(
                either, timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return answer.result()
            answer.cancel()
            if gone.done():
                raise ClientGoneError
            raise too_late(limits.time_ms)
        except RequestError as error:
            raise Refusal(422, "invalid", str(error), field=error.field) from None
        except UnavailableError as error:
            raise Refusal(503, "unavailable", str(error), retry=True) from None
        finally:
            gone.cancel()

    def _admit(self, request: Request) -> None:
        """Raises the refusal of a search that could not be answered in time, and would keep others from it."""
        search_ms, most = 1e3 * self.scorer.search_s(request), self.settings.limits.time_ms
        if search_ms > most:
            message = (
                f"a search of all {len(self.scorer.bundle.store.ids):,} items takes {search_ms:,.0f} ms here, and the "
                "limit is "
                f"{most:g} ms; name `candidates`, or start the server with --stage dot, an approximate index or a "
                "greater --time-ms"
            )
            raise over_limit("time_ms", most, message, status=413)
        if search_ms and (waiting_ms := 1e3 * self._batcher.backlog_s) + search_ms > most:
            message = (
                f"the searches before this one take {waiting_ms:,.0f} ms and it takes {search_ms:,.0f}, and the limit "
                f"is {most:g} "
                "ms; come back in a second, name `candidates`, or add workers"
            )
            raise over_limit("time_ms", most, message, status=429, retry=True)

    def _answer(self, requests: Sequence[Request]) -> Sequence[Answer | Exception]:
        start = time.perf_counter()
        answers = self.scorer.answer(requests)
        self.metrics.batch.observe(len(requests))
        self.metrics.batch_seconds.observe(time.perf_counter() - start)
        cold = sum(1 for one in answers if not isinstance(one, Exception | Embedded) and one.cold.unknown_user)
        if cold:
            self.metrics.cold.inc(cold)
        for store in self.vectors:
            self._count_malformed(store.source, store.malformed)
        return answers

    def _count_malformed(self, source: Source, total: int) -> None:
        if total > self._malformed[source]:
            self.metrics.malformed.labels(source).inc(total - self._malformed[source])
            self._malformed[source] = total
            if time.monotonic() - self._told >= _TOLD_EVERY_S:
                self._told = time.monotonic()
                why = "they are no vectors of this tower, and their users are served from features: embed these again"
                self.log("vectors_malformed", source=source, so_far=total, why=why)

    def busy_s(self) -> float:
        """Seconds that the batch in the scorer has taken so far."""
        return self._batcher.busy_s

    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._batcher)


def too_late(time_ms: float) -> Refusal:
    """The answer to a request that took longer than it may."""
    message = f"no answer within {time_ms:g} ms, which is the limit; come back in a second, or ask for fewer items"
    return over_limit("time_ms", time_ms, message, status=503, retry=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone; its body has been read."""
    message: Any = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
