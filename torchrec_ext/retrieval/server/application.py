"""ASGI application of a worker: its routes, and a guard to check host and token and to count, time and log requests.

worker.py imports this file late, because the supervisor runs without Starlette and torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrec_ext.retrieval.scorer.requests import (
    Answer,
    Embedded,
    EmbedRequest,
    Nearest,
    NearestRequest,
    Recommendation,
    RecommendRequest,
    Request,
    ScoreRequest,
)
from torchrec_ext.retrieval.server import openapi, parsing
from torchrec_ext.retrieval.server.connections import ADMITTED
from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer
from torchrec_ext.retrieval.server.responses import (
    ClientGoneError,
    Refusal,
    json_response,
    over_limit,
)
from torchrec_ext.retrieval.server.settings import Limits
from torchrec_ext.retrieval.server.telemetry import where
from torchrec_ext.schema.validation import listed

_PAGES = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/static/page.css": ("page.css", "text/css"),
    "/static/page.js": ("page.js", "text/javascript"),
    "/static/docs.js": ("docs.js", "text/javascript"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
_REFUSED = "a bundle was refused; the log of the server says why, and so does this page to those who bear its token"
_LATE = "the body is late"  # why a task was cancelled
_SAMPLE = 200  # number of user ids offered by the page


def application(queued: QueuedScorer) -> Guard:
    """Returns the ASGI application of one worker."""
    endpoints = _Endpoints(queued)
    routes = [
        Route("/v1/recommend", endpoints.asking(RecommendRequest), methods=["POST"]),
        Route("/v1/score", endpoints.asking(ScoreRequest), methods=["POST"]),
        Route("/v1/nearest", endpoints.asking(NearestRequest), methods=["POST"]),
        Route("/v1/embed", endpoints.asking(EmbedRequest), methods=["POST"]),
        Route("/v1/bundle", endpoints.bundle, methods=["GET"]),
        Route("/healthz", endpoints.healthy, methods=["GET"]),
        Route("/readyz", endpoints.ready, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/openapi.json", endpoints.description, methods=["GET"]),
    ]
    routes += [
        Route(path, _static(*page), methods=["GET"]) for path, page in _PAGES.items()
    ]
    return Guard(
        Router(routes, redirect_slashes=False),
        queued,
        frozenset(route.path for route in routes),
    )


class _Endpoints:
    def __init__(self, queued: QueuedScorer) -> None:
        self._queued = queued

    def asking(self, kind: Callable[..., Request]) -> Callable[[HttpRequest], Any]:
        """Returns a handler: parses a request and answers it by the scorer."""
        queued = self._queued
        limits = self._queued.settings.limits

        async def handle(request: HttpRequest) -> Response:
            deadline = time.monotonic() + limits.time_ms / 1e3
            body = parsing.read_object(await _content(request, limits, deadline))
            answer = await queued.ask(
                parsing.request_of(kind, body, limits), request.receive, deadline
            )
            return json_response(_as_json(answer))

        return handle

    async def bundle(self, request: HttpRequest) -> Response:
        """Describes the live bundle for people and the page. Includes user ids only if the server is private."""
        bundle = self._queued.scorer.bundle
        private = self._queued.settings.is_private
        users: dict[str, Any] = {
            "user_key": None,
            "user_kind": None,
            "users": 0,
            "sample_users": [],
        }
        if bundle.users is not None:
            ids = bundle.users.ids
            users.update(user_key=bundle.users.key, user_kind=ids.kind, users=len(ids))
            if private:
                users["sample_users"] = ids.ids(range(min(_SAMPLE, len(ids)))).tolist()
        column_values = openapi.known_values(bundle, private=private)
        titles = {}
        for name, values in column_values.items():
            texts = openapi.item_titles(bundle, values)
            if texts:
                titles[name] = texts
        return json_response(
            {
                "digest": bundle.manifest.digest,
                "manifest": bundle.manifest.as_json(),
                "items": len(bundle.store.ids),
                **users,
                "columns": dict(bundle.request_columns),
                "example_user": openapi.example_user(bundle, private=private),
                "known_values": column_values,
                "known_titles": titles,
                "categories": list(bundle.items.categories),
                "limits": vars(self._queued.settings.limits),
            }
        )

    async def healthy(self, request: HttpRequest) -> Response:
        """Reports a running process."""
        return json_response({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Reports readiness and the live bundle; the reason of a refused bundle only with the token."""
        queued = self._queued
        reason = queued.refused
        status = "ready"
        code = 200
        if queued.lingering or queued.draining:
            status = "draining"
            code = 503
        if reason is not None and not queued.bears_token(
            request.headers.get("authorization", "")
        ):
            reason = _REFUSED
        return json_response(
            {
                "status": status,
                "bundle": queued.scorer.bundle.manifest.digest,
                "refused": reason,
                "vectors": {store.source: store.available for store in queued.vectors},
            },
            status=code,
        )

    async def metrics(self, request: HttpRequest) -> Response:
        """Returns the metrics of all workers."""
        self._queued.metrics.waiting.set(self._queued.waiting())
        # In a thread, because it reads the files of all workers, and requests should
        # not wait for that.
        page = await asyncio.get_running_loop().run_in_executor(
            None, self._queued.metrics.page
        )
        return Response(
            page, headers={"Content-Type": self._queued.metrics.content_type}
        )

    async def description(self, request: HttpRequest) -> Response:
        """Returns the OpenAPI description for the live bundle."""
        return json_response(
            openapi.document(self._queued.scorer.bundle, self._queued.settings)
        )


def _static(name: str, kind: str) -> Callable[[HttpRequest], Any]:
    # Read once, when the worker starts.
    content = (files("torchrec_ext.retrieval.server") / "static" / name).read_bytes()

    async def page(request: HttpRequest) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return page


async def _content(request: HttpRequest, limits: Limits, deadline: float) -> bytes:
    """Reads the body; refuses it as soon as it is too long or too late. uvicorn skips the rest."""
    kind = (
        request.headers.get("content-type", "application/json")
        .split(";")[0]
        .strip()
        .lower()
    )
    if kind != "application/json":
        raise Refusal(
            415,
            "not_json",
            "the content type must be application/json; send the header `Content-Type: application/json`",
        )
    # Refuse by the declared length first, before any memory is taken; a client may also
    # declare none.
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_long(limits)
    body = bytearray()
    more = True
    while more:
        message = await _received(request.receive, limits, deadline)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limits.body_bytes:
            raise _too_long(limits)
    return bytes(body)


async def _received(receive: Receive, limits: Limits, deadline: float) -> Message:
    """Returns the next piece of the body, without the task that ``asyncio.wait_for`` makes even if it is there."""
    task = asyncio.current_task()
    assert task is not None
    # Cancels the handler itself, with a word by which its own timer is known from any
    # other cancellation.
    timer = asyncio.get_running_loop().call_later(
        max(0.0, deadline - time.monotonic()), task.cancel, _LATE
    )
    try:
        return await receive()
    except asyncio.CancelledError as error:
        if error.args == (_LATE,):
            raise _body_too_late(limits) from None
        raise
    finally:
        timer.cancel()


def _too_long(limits: Limits) -> Refusal:
    message = (
        f"the body is longer than {limits.body_bytes} bytes, which is the limit; send "
        "fewer ids, in several requests"
    )
    return over_limit("body_bytes", limits.body_bytes, message, status=413)


def _body_too_late(limits: Limits) -> Refusal:
    """Returns the refusal of a late body (a late answer: :func:`too_late`); it closes the connection."""
    message = f"the body has not come within {limits.time_ms:g} ms, which is the limit; send it at once, and to its end"
    return over_limit(
        "time_ms", limits.time_ms, message, status=408, headers={"Connection": "close"}
    )


def _as_json(answer: Answer) -> dict[str, Any]:
    values = dict(vars(answer))
    if isinstance(answer, Embedded):
        values["vectors"] = answer.vectors.tolist()
    elif not isinstance(answer, Nearest):
        values |= vars(values.pop("cold"))
    if isinstance(answer, Recommendation):
        values["answered"] = len(answer.items)
    # Only in answers to requests that ask for them.
    for name in ("titles", "liked", "liked_titles"):
        if not values.get(name, True):
            del values[name]
    return values


# paths with answers even while the worker drains
_ALWAYS = ("/healthz", "/readyz", "/metrics")
_CLIENT_GONE = 499  # nginx's status for the metrics; never sent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_RAW_HEADERS = [
    (name.lower().encode(), value.encode()) for name, value in _HEADERS.items()
]


class Guard:
    """ASGI middleware: admits requests, turns errors into answers, counts, times and logs.

    Args:
        app: application that answers.
        queued: state, token, metrics and log of the worker.
        routes: known paths; all others are counted and logged as "other", so that no log has a caller's text.
    """

    def __init__(
        self, app: ASGIApp, queued: QueuedScorer, routes: frozenset[str]
    ) -> None:
        self._app = app
        self._queued = queued
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        queued = self._queued
        status = 0
        path = scope["path"]
        # Starlette's routes raise for 404 and 405 if there is an app, so these answers
        # are our own too.
        scope["app"] = self

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_RAW_HEADERS]
                if queued.lingering or queued.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        queued.in_flight += 1
        try:
            self._admit(path, Headers(scope=scope))
            if queued.settings.token is None or self._needs_token(path):
                scope["state"][ADMITTED] = True
            await self._app(scope, receive, send_counted)
        except ClientGoneError:
            status = _CLIENT_GONE
        except Exception as error:
            if status:  # the answer has begun, so no other can be sent
                raise
            await self._refusal(error).response()(scope, receive, send_counted)
        finally:
            queued.in_flight -= 1
            self._note(scope["method"], path, status, time.perf_counter() - start)

    def _admit(self, path: str, headers: Headers) -> None:
        """Refuses requests with a wrong host or token, and most requests while the worker drains."""
        host_name = _host(headers.get("host", ""))
        allowed = self._queued.settings.allowed_hosts
        if not _is_allowed(host_name, allowed):
            message = (
                f"the header Host names {host_name[:100]!r}, and this server answers to {listed(allowed)}; ask under "
                "such a name, or start it with --allowed_hosts"
            )
            raise Refusal(400, "host", message)
        if self._queued.draining and path not in _ALWAYS:
            raise Refusal(
                503,
                "draining",
                "this server is about to end; ask again, another one will answer",
            )
        if self._queued.settings.token is not None and self._needs_token(path):
            authorization = headers.get("authorization", "")
            if not self._queued.bears_token(authorization):
                words = "the token is wrong" if authorization else "there is no token"
                message = f"{words}; send the header `Authorization: Bearer TOKEN`"
                raise Refusal(
                    401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"}
                )

    @staticmethod
    def _needs_token(path: str) -> bool:
        return path.startswith("/v1/") or path == "/metrics"

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):
            messages = {
                404: "there is no such page; see /openapi.json",
                405: "not with this method; see the header Allow",
            }
            message = messages.get(error.status_code, str(error.detail))
            return Refusal(error.status_code, "http", message, headers=error.headers)
        self._queued.log("error", **where(error))
        return Refusal(
            500,
            "internal",
            "an error of the server, which its log names; the request is not at fault",
        )

    def _note(self, method: str, path: str, status: int, seconds: float) -> None:
        queued = self._queued
        route = path if path in self._routes else "other"
        queued.metrics.requests.labels(route, status).inc()
        queued.metrics.seconds.labels(route).observe(seconds)
        if queued.settings.log_requests:
            # A method is the caller's text, which may be long.
            if len(method) >= 10:
                method = "other"
            queued.log(
                "request",
                method=method,
                route=route,
                status=status,
                ms=round(seconds * 1e3, 2),
            )


def _is_allowed(host_name: str, allowed: Sequence[str]) -> bool:
    for host in map(str.lower, allowed):
        if host in ("*", host_name):
            return True
        if host.startswith("*.") and host_name.endswith(host[1:]):
            return True
    return False


def _host(header: str) -> str:
    """Returns the name or address in a Host header, without port; an IPv6 address without brackets.

    Example:
        >>> _host("recs.example.com:8000"), _host("[::1]:8000"), _host("[::1")
        ('recs.example.com', '::1', '')
    """
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
