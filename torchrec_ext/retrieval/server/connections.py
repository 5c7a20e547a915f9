"""Connections: limits for unknown clients: bytes of a request's head, seconds of silence, number of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from torchrec_ext.retrieval.server.responses import Refusal, over_limit
from torchrec_ext.retrieval.server.settings import Limits

_PIPELINED = (
    16  # waiting requests of one connection; each takes memory even without a token
)
ADMITTED = "admitted"  # key in the state of a request's scope: it has the token, or none is required


class Connections:
    """Enforces the connection limits of one worker, before and after the token check.

    A head beyond ``header_bytes`` is answered with 431. A connection is closed if its first byte, or the rest of a
    head, does not arrive within ``header_ms``, or if its answer stays unread for as long. If more than ``connections``
    are open, the longest idle one is closed, first among those without an admitted request. If all have a request in
    progress, the new one is answered with 503. Of the requests a client sends before it has an answer, 16 wait. Later
    ones are dropped, and the last answer closes the connection.

    Args:
        limits: limits of the server.
        closed: called with the reason for closing a connection, one word; see ``serve_connections_closed``.
    """

    def __init__(self, limits: Limits, closed: Callable[[str], None]) -> None:
        self.limits = limits
        self.closed = closed
        # Idle connections without and with an admitted request. Dicts keep the order of
        # insertion, so the first key has been idle longest, and drop any key at once,
        # unlike a queue.
        self._idle_unadmitted: dict[BoundedProtocol, None] = {}
        self._idle_admitted: dict[BoundedProtocol, None] = {}

    def protocol(self) -> type[BoundedProtocol]:
        """Returns the protocol class for uvicorn's argument ``http``, one instance per connection."""
        return type("BoundedProtocol", (BoundedProtocol,), {"worker": self})

    def opened(self, connection: BoundedProtocol) -> None:
        """Makes room for a new connection, or closes it."""
        if len(connection.connections) > self.limits.connections:
            longest = next(chain(self._idle_unadmitted, self._idle_admitted), None)
            if longest is None:
                connection.answer(_busy(self.limits), "connections")
                connection.transport.close()
                return
            self.busy(longest)
            longest.close("connections")
        self._idle_unadmitted[connection] = None

    def busy(self, connection: BoundedProtocol) -> None:
        """Marks a connection as busy with a request, or as gone."""
        self._idle_unadmitted.pop(connection, None)
        self._idle_admitted.pop(connection, None)

    def idle(self, connection: BoundedProtocol, admitted: bool) -> None:
        """Marks a connection as idle after an answer."""
        if admitted:
            self._idle_admitted[connection] = None
        else:
            self._idle_unadmitted[connection] = None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol within the limits of :class:`Connections`; see :meth:`Connections.protocol`."""

    worker: ClassVar[Connections]
    _timer: asyncio.TimerHandle | None = None
    _stage: str | None = (
        "head"  # awaited piece of a message: its head, its body, or none
    )
    # message and stage of the running timer
    _timer_key: tuple[int, str | None] = (0, None)
    _messages = _calls = 0
    _head_bytes = 0  # bytes of the head, or of trailers, passed on by the parser
    _pending_bytes = 0  # bytes given to the parser since its last callback
    _refused = _admitted = _full = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Called when a client has connected."""
        super().connection_made(transport)
        self.worker.opened(self)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the client has gone."""
        self.worker.busy(self)
        self._stage = None
        self._time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; drops bytes after a refused head until the timer closes the connection."""
        if self._refused:
            return
        calls = self._calls
        self._stage = self._stage or "head"
        super().data_received(data)
        # The parser makes no callback before a header's end, so a growing header must
        # be counted here.
        self._pending_bytes += len(data)
        if self._calls != calls:
            self._pending_bytes = 0
        if (
            not self._refused
            and self._head_bytes + self._pending_bytes > self.worker.limits.header_bytes
        ):
            self._refuse()
        if not self.transport.is_closing():
            self._time()

    def on_message_begin(self) -> None:
        """Called when a head begins."""
        if len(self.pipeline) >= _PIPELINED:
            self._full = True
            # The parser reports it as its own error.
            raise ValueError("too many requests wait")
        self._messages += 1
        self._head_bytes = 0
        self._stage = "head"
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called for a piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for a header, or a trailer after the body."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when the head ends."""
        self._stage = "body"
        self.worker.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called for a piece of the body; the application limits the body itself."""
        self._calls += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called when the message ends."""
        self._calls += 1
        self._stage = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called when the answer has been given to the transport."""
        self._admitted = self._admitted or ADMITTED in self.cycle.scope["state"]
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.worker.idle(self, self._admitted)

    def send_400_response(self, msg: str) -> None:
        """Called when the parser, :meth:`_count` or :meth:`on_message_begin` has refused the bytes."""
        if self._full:
            self._refused = True
            self._stage = None
            self.cycle.keep_alive = False  # of the last waiting request
            self.worker.closed("pipelined")
        elif self._head_bytes > self.worker.limits.header_bytes:
            self._refuse()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Called when the client does not read its answer."""
        super().pause_writing()
        self._stage = "answer"
        self._time()

    def resume_writing(self) -> None:
        """Called when the client reads again."""
        super().resume_writing()
        if self._stage == "answer":
            self._stage = None
            self._time()

    def answer(self, refusal: Refusal, why: str) -> None:
        """Writes an answer without the application."""
        response = refusal.response()
        text = STATUS_LINE[response.status_code]
        for header in response.raw_headers:
            text += b"%s: %s\r\n" % header
        self.transport.write(text + b"connection: close\r\n\r\n" + bytes(response.body))
        self.worker.closed(why)

    def close(self, why: str) -> None:
        """Aborts the connection, even with a request in progress."""
        self.worker.closed(why)
        # close() would first wait until the client reads what is written.
        self.transport.abort()

    def _count(self, size: int) -> None:
        self._calls += 1
        self._head_bytes += size
        if self._head_bytes > self.worker.limits.header_bytes:
            # The parser reports it as its own error.
            raise ValueError("the head is too long")

    def _refuse(self) -> None:
        """Answers 431, without closing at once: a client still sending would lose the answer."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.close("header_bytes")
        else:
            self.answer(_too_long(self.worker.limits), "header_bytes")
            self.transport.write_eof()

    def _time(self) -> None:
        """Starts the timer for the next piece of the message, unless it is running."""
        if self._timer_key == (self._messages, self._stage):
            return
        self._timer_key = (self._messages, self._stage)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stage is not None:
            limits = self.worker.limits
            wait_ms = limits.header_ms
            # The application itself answers a late body.
            if self._stage == "body":
                wait_ms += limits.time_ms
            self._timer = self.loop.call_later(wait_ms / 1e3, self.close, "silent")


def _too_long(limits: Limits) -> Refusal:
    most = limits.header_bytes
    message = (
        f"the address and the headers are longer than {most} bytes, which is the "
        "limit; send fewer or shorter headers"
    )
    return over_limit("header_bytes", most, message, status=431)


def _busy(limits: Limits) -> Refusal:
    most = limits.connections
    message = f"{most} connections have a request under way, which is the limit; come back in a second, or add workers"
    return over_limit("connections", most, message, status=503)
