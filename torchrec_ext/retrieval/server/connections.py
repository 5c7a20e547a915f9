"""Connections: what a client may take before anything is known of it: bytes of a header, time in silence, and a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from torchrec_ext.retrieval.server.responses import Refusal, over_limit
from torchrec_ext.retrieval.server.settings import Limits

ADMITTED = "admitted"  # in the state of a request's scope: it bore the token, or none is asked for


class Connections:
    """The connections of one worker, held to its limits before and after the token is asked for.

    A head beyond ``header_bytes`` is answered with 431. A connection whose first byte, or the rest of a head, does not
    come within ``header_ms`` is closed, and so is one that leaves its answer unread for so long. Where one more than
    ``connections`` is opened, the one that has been without a request longest is closed, first among those of which no
    request was admitted yet; where all have a request under way, the new one is answered with 503.

    Args:
        limits: of the service.
        closed: is told why a connection was closed, in one word; see ``serve_connections_closed`` in the metrics.
    """

    def __init__(self, limits: Limits, closed: Callable[[str], None]) -> None:
        self.limits, self.closed = limits, closed
        self._unknown: dict[BoundedProtocol, None] = {}  # without a request now; the longest so first
        self._known: dict[BoundedProtocol, None] = {}

    def protocol(self) -> type[BoundedProtocol]:
        """What uvicorn makes for every connection, its argument ``http``."""
        return type("BoundedProtocol", (BoundedProtocol,), {"worker": self})

    def opened(self, one: BoundedProtocol) -> None:
        """Makes room for it, or closes it."""
        if len(one.connections) > self.limits.connections:
            longest = next(iter(self._unknown), None) or next(iter(self._known), None)
            if longest is None:
                one.answer(_busy(self.limits), "connections")
                one.transport.close()
                return
            self.busy(longest)
            longest.close("connections")
        self._unknown[one] = None

    def busy(self, one: BoundedProtocol) -> None:
        """It has a request under way, or is gone."""
        self._unknown.pop(one, None)
        self._known.pop(one, None)

    def idle(self, one: BoundedProtocol, admitted: bool) -> None:
        """It has been answered."""
        (self._known if admitted else self._unknown)[one] = None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 within :class:`Connections`; made by :meth:`Connections.protocol`."""

    worker: ClassVar[Connections]
    _timer: asyncio.TimerHandle | None = None
    _stage: str | None = "head"  # what is awaited of a message: its head, its body, or nothing
    _timed: tuple[int, str | None] = (0, None)  # the message and stage that the timer is for
    _messages = _calls = 0
    _parsed = 0  # bytes of the head, or of trailers, that the parser has given out
    _held = 0  # bytes that it has taken since
    _refused = _admitted = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self.worker.opened(self)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self.worker.busy(self)
        self._stage = None
        self._time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; what follows a head that was refused is dropped until the time is over."""
        if self._refused:
            return
        calls, self._stage = self._calls, self._stage or "head"
        super().data_received(data)
        # The parser copies a header that goes on with every piece that comes, and calls nobody before its end.
        self._held = 0 if self._calls != calls else self._held + len(data)
        if not self._refused and self._parsed + self._held > self.worker.limits.header_bytes:
            self._refuse()
        if not self.transport.is_closing():
            self._time()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._messages, self._parsed, self._stage = self._messages + 1, 0, "head"
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after the body."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head ends."""
        self._stage = "body"
        self.worker.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which the application holds to its own limit."""
        self._calls += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The message ends."""
        self._calls += 1
        self._stage = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer has been given to the transport."""
        self._admitted = self._admitted or ADMITTED in self.cycle.scope["state"]
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.worker.idle(self, self._admitted)

    def send_400_response(self, msg: str) -> None:
        """The parser has refused what came, or :meth:`_count` has."""
        if self._parsed > self.worker.limits.header_bytes:
            self._refuse()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """The client does not read what it asked for."""
        super().pause_writing()
        self._stage = "answer"
        self._time()

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._stage == "answer":
            self._stage = None
            self._time()

    def answer(self, refusal: Refusal, why: str) -> None:
        """Writes an answer that no application gave."""
        made = refusal.response()
        lines = [STATUS_LINE[made.status_code], *(b"%s: %s\r\n" % header for header in made.raw_headers)]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", bytes(made.body)]))
        self.worker.closed(why)

    def close(self, why: str) -> None:
        """Ends the connection, whatever is under way."""
        self.worker.closed(why)
        self.transport.abort()

    def _count(self, size: int) -> None:
        self._calls += 1
        self._parsed += size
        if self._parsed > self.worker.limits.header_bytes:
            raise ValueError("the head is too long")  # which the parser hands on as its own error

    def _refuse(self) -> None:
        """With an answer, which a client that is still sending would lose if the connection were closed at once."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.close("header_bytes")
        else:
            self.answer(_too_long(self.worker.limits), "header_bytes")
            self.transport.write_eof()

    def _time(self) -> None:
        """Begins to wait for what must come next, unless it has begun to."""
        if self._timed == (self._messages, self._stage):
            return
        self._timed = (self._messages, self._stage)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stage is not None:
            limits = self.worker.limits  # of a body the application says that it comes too late
            wait_ms = limits.header_ms + (limits.time_ms if self._stage == "body" else 0.0)
            self._timer = self.loop.call_later(wait_ms / 1e3, self.close, "silent")


def _too_long(limits: Limits) -> Refusal:
    most = limits.header_bytes
    message = (
        f"the address and the headers are longer than {most} bytes, which is the limit; send fewer or shorter headers"
    )
    return over_limit("header_bytes", most, message, status=431)


def _busy(limits: Limits) -> Refusal:
    most = limits.connections
    message = f"{most} connections have a request under way, which is the limit; come back in a second, or add workers"
    return over_limit("connections", most, message, status=503, retry=True)
