"""Guard: around every request the token, the host, the drain, errors as answers, the count, the time and one log line."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrec_ext.retrieval.server.connections import ADMITTED
from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer
from torchrec_ext.retrieval.server.responses import ClientGoneError, Refusal
from torchrec_ext.retrieval.server.telemetry import where

_ALWAYS = ("/healthz", "/readyz", "/metrics")  # also while the service drains
_CLIENT_GONE = 499  # as nginx counts it; never sent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


class Guard:
    """An ASGI application around another.

    Args:
        app: what answers.
        queued: whose state, token, metrics and log.
        routes: paths that there are; others are counted and logged as one, so that nothing a caller typed stands in a
            log.
    """

    def __init__(self, app: ASGIApp, queued: QueuedScorer, routes: frozenset[str]) -> None:
        self._app, self._queued, self._routes = app, queued, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        queued, status, path = self._queued, 0, scope["path"]
        scope["app"] = self  # Starlette's routes then raise for 404 and 405

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_RAW_HEADERS]
                if queued.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        queued.in_flight += 1
        try:
            self._admit(path, Headers(scope=scope))
            if queued.settings.token is None or self._guarded(path):
                scope["state"][ADMITTED] = True
            await self._app(scope, receive, answered)
        except ClientGoneError:
            status = _CLIENT_GONE
        except Exception as error:
            if status:
                raise
            await self._refusal(error).response()(scope, receive, answered)
        finally:
            queued.in_flight -= 1
            self._note(scope["method"], path, status, time.perf_counter() - start)

    def _admit(self, path: str, headers: Headers) -> None:
        """Raises the refusal of a request that must not come through."""
        named, allowed = _host(headers.get("host", "")), self._queued.settings.allowed_hosts
        if not any(
            one in ("*", named) or (one.startswith("*.") and named.endswith(one[1:])) for one in map(str.lower, allowed)
        ):
            message = (
                f"the header Host names {named[:100]!r}, and this server answers to {', '.join(allowed)}; ask under "
                "such a name, "
                "or start it with --allowed_hosts"
            )
            raise Refusal(400, "host", message)
        if self._queued.draining and path not in _ALWAYS:
            raise Refusal(
                503, "draining", "this server is about to end; ask again, another one will answer", retry=True
            )
        if self._queued.settings.token is not None and self._guarded(path):
            given = headers.get("authorization", "")
            if not self._queued.bears_token(given):
                words = "the token is wrong" if given else "there is no token"
                message = f"{words}; send the header `Authorization: Bearer TOKEN`"
                raise Refusal(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})

    @staticmethod
    def _guarded(path: str) -> bool:
        return path.startswith("/v1/") or path == "/metrics"

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):
            message = {
                404: "there is no such page; see /openapi.json",
                405: "not with this method; see the header Allow",
            }
            told = message.get(error.status_code, str(error.detail))
            return Refusal(error.status_code, "http", told, headers=error.headers)
        self._queued.log("error", **where(error))
        return Refusal(500, "internal", "an error of the server, which its log names; the request is not at fault")

    def _note(self, method: str, path: str, status: int, seconds: float) -> None:
        queued = self._queued
        route = path if path in self._routes else "other"
        queued.metrics.requests.labels(route, status).inc()
        queued.metrics.seconds.labels(route).observe(seconds)
        if queued.settings.log_requests:
            queued.log(
                "request",
                method=method if len(method) < 10 else "other",
                route=route,
                status=status,
                ms=round(seconds * 1e3, 2),
            )


def _host(header: str) -> str:
    """The name or address in a header Host, without its port; an IPv6 address without its brackets.

    Example:
        >>> _host("recs.example.com:8000"), _host("[::1]:8000"), _host("[::1")
        ('recs.example.com', '::1', '')
    """
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
