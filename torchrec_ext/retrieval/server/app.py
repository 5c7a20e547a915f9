"""ASGI application of a worker: routes, and a guard that checks host and token, counts, times and logs requests."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.manifest import bundle_folder, fingerprint
from torchrec_ext.retrieval.scorer import (
    EmbedRequest,
    RecommendRequest,
    RequestError,
    Scorer,
    ScoreRequest,
)
from torchrec_ext.retrieval.search import ScoreError
from torchrec_ext.retrieval.server.describe import bundle_page, openapi
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.retrieval.server.telemetry import (
    Metrics,
    log,
    where,
)
from torchrec_ext.retrieval.store import Store

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_RAW_HEADERS = [
    (name.lower().encode(), value.encode()) for name, value in _HEADERS.items()
]
_GONE = 499  # nginx's status for a client that left, for the metrics; never sent
_LONGEST = 500  # characters of a message
# Set once a worker was ready: from then on a failed start is tried again.
SERVING = "TORCHREC_EXT_SERVING"
_STARTUP_FAILURE = 3  # uvicorn's: it ends the server


class Refusal(Exception):  # noqa: N818  (an answer to a caller is not an error of ours)
    """The answer to a refused request.

    Args:
        status: HTTP status.
        code: one word for programs.
        message: problem and remedy, for people.
        field: wrong field of the request, or None.
        headers: further headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message[:_LONGEST]}}
        if field is not None:
            self.body["error"]["field"] = field
        self.headers = dict(headers or {})


# What each path asks, and the scorer's method that answers.
_ASKED: Mapping[str, tuple[type[msgspec.Struct], Callable[[Scorer, Any], Any]]] = {
    "/v1/recommend": (RecommendRequest, Scorer.recommend),
    "/v1/score": (ScoreRequest, Scorer.score),
    "/v1/embed": (EmbedRequest, Scorer.embed),
}
_DECODERS = {path: msgspec.json.Decoder(kind) for path, (kind, _) in _ASKED.items()}
# A name of a field is the caller's text.
_PLACE = re.compile(r"^(.*?) - at `\$\.?(.*)`$", re.DOTALL)


class Served:
    """State of a worker: the live bundle, which it replaces by another one behind the pointer, metrics and log.

    Args:
        settings: settings of the server.

    Raises:
        ValueError: the bundle or the store is refused.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.refused = False
        # Taken before loading, to notice a pointer that moves during the load.
        self._seen = self._pointed()
        self.scorer = self._loaded()
        log("ready", bundle=self.scorer.digest[:12])

    def _pointed(self) -> list[tuple[object, ...]]:
        """Returns marks of the bundle and the store behind the pointers now."""
        folders = (self.settings.bundle, self.settings.vectors)
        return [fingerprint(folder) for folder in folders if folder is not None]

    def _loaded(self) -> Scorer:
        folder = bundle_folder(self.settings.bundle)
        bundle = Bundle.load(folder, threads=self.settings.threads)
        vectors = self.settings.vectors
        scorer = Scorer(bundle, None if vectors is None else Store.open(vectors))
        created = str(bundle.manifest.certificate["created"])
        moment = datetime.strptime(created, "%Y-%m-%dT%H:%M:%S%z")
        self.metrics.created.set(moment.timestamp())
        return scorer

    async def watch(self) -> None:
        """Looks for another bundle or store until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.settings.watch)
            await loop.run_in_executor(None, self._look)

    def _look(self) -> None:
        """Takes the bundle and the store behind the pointers into service if one is another."""
        now = self._pointed()
        if now == self._seen:
            return
        self._seen = now
        try:
            # One assignment, so that a request never mixes two bundles. Requests in
            # progress finish with the previous one.
            self.scorer = self._loaded()
        # Any error of a new bundle leaves the live one serving.
        except Exception as error:
            self.refused = True
            self.metrics.swaps.labels("refused").inc()
            # A bundle's error names files, and no caller's data.
            is_ours = isinstance(error, ValueError)
            reason = str(error) if is_ours else type(error).__name__
            log("bundle_refused", reason=reason)
        else:
            self.refused = False
            self.metrics.swaps.labels("loaded").inc()
            log("bundle_loaded", bundle=self.scorer.digest[:12])

    def bears_token(self, authorization: str) -> bool:
        """Returns whether a header ``Authorization`` has the token, or none is needed."""
        token = self.settings.token
        if token is None:
            return True
        expected = f"Bearer {token}".encode()
        return hmac.compare_digest(authorization.encode(), expected)

    async def answer(self, request: Request) -> Response:
        """Answers a request by the live bundle."""
        scorer = self.scorer
        path = request.scope["path"]
        content = await self._content(request)
        try:
            wanted = _DECODERS[path].decode(content)
            _check_limits(wanted, self.settings)
            answer = _ASKED[path][1](scorer, wanted)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise _invalid(error.__cause__) from None
            found = _PLACE.match(str(error))
            message, field = found.groups() if found else (str(error), "")
            raise _invalid(RequestError(field, message)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(
                400,
                "not_json",
                f"the body is not JSON ({str(error)[:100]}); send an object",
            ) from None
        except RequestError as error:
            raise _invalid(error) from None
        except ScoreError as error:
            log("score_refused", bundle=scorer.digest[:12])
            raise Refusal(500, "bundle", str(error)) from None
        if getattr(answer, "unknown_user", False):
            self.metrics.cold.inc()
        if source := getattr(answer, "vector", None):
            self.metrics.vectors.labels(source).inc()
        return _json(answer)

    async def _content(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Refusal(
                415,
                "not_json",
                "the content type must be application/json; send the header `Content-Type: application/json`",
            )
        most = self.settings.max_body
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise Refusal(
                    413,
                    "over_limit",
                    f"the body is longer than {most} bytes, which is the limit; send fewer ids, in several requests",
                )
        return bytes(body)

    async def describe_bundle(self, request: Request) -> Response:
        """Describes the live bundle for people and the page."""
        return _json(bundle_page(self.scorer.bundle, self.settings))

    async def healthz(self, request: Request) -> Response:
        """Reports a running process."""
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Reports readiness, the live bundle, and whether a newer one was refused; the log says why."""
        return _json({"bundle": self.scorer.digest, "refused": self.refused})

    async def figures(self, request: Request) -> Response:
        """Returns the metrics of all workers."""
        # In a thread, because it reads the files of all workers, and requests should
        # not wait for that.
        loop = asyncio.get_running_loop()
        page = await loop.run_in_executor(None, self.metrics.page)
        return Response(page, headers={"Content-Type": self.metrics.content_type})

    async def description(self, request: Request) -> Response:
        """Returns the OpenAPI description for the live bundle."""
        routes = {
            path: (kind, get_type_hints(method)["return"], method.__doc__ or "")
            for path, (kind, method) in _ASKED.items()
        }
        return _json(openapi(self.scorer.bundle, routes, self.settings))


def _check_limits(wanted: Any, settings: ServerConfig) -> None:
    """Refuses a request beyond a limit, by RequestError with the field."""
    lists = dict.fromkeys(("candidates", "items"), settings.max_candidates)
    for name, most in {**lists, "rows": settings.max_rows, "k": settings.max_k}.items():
        value = getattr(wanted, name, None) or ()
        size = value if isinstance(value, int) else len(value)
        if size > most:
            what = f"{size}: the limit is {most}; ask for less, in several requests"
            raise RequestError(name, what)


def _invalid(error: RequestError) -> Refusal:
    message = str(error) if error.field else str(error).removeprefix(": ")
    return Refusal(422, "invalid", message, field=error.field or None)


def _json(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def application(served: Served) -> ASGIApp:
    """Returns the ASGI application of a worker."""
    routes: list[BaseRoute] = [
        Mount("/static", StaticFiles(packages=[(str(__package__), "static")]))
    ]
    routes += [Route(path, served.answer, methods=["POST"]) for path in _ASKED]
    # Read once, when the worker starts.
    content = (files(__package__) / "static" / "index.html").read_bytes()

    async def page(request: Request) -> Response:
        return HTMLResponse(content)

    gets = {
        "/": page,
        "/v1/bundle": served.describe_bundle,
        "/healthz": served.healthz,
        "/readyz": served.readyz,
        "/metrics": served.figures,
        "/openapi.json": served.description,
    }
    routes += [
        Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(served.watch()),
            asyncio.create_task(_end_with_parent(os.getppid())),
        ]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, served, frozenset([*_ASKED, *gets]))


async def _end_with_parent(parent: int) -> None:
    """Ends this worker when its parent is gone: one that was killed by force ends none, and the port stays taken."""
    while os.getppid() == parent:
        await asyncio.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def create() -> ASGIApp:
    """Returns the application of a worker, by the settings in the environment; ends the process if it cannot serve."""
    settings = ServerConfig.from_environment()
    try:
        return application(Served(settings))
    except Exception as error:
        # Whatever it is, the parent would start workers that fail for ever.
        if not isinstance(error, ValueError | OSError):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        # At once: a parent that pings a process while it ends waits for its patience to
        # end. A worker that replaces one which served is started again.
        os._exit(1 if os.environ.get(SERVING) else _STARTUP_FAILURE)


class Guard:
    """ASGI middleware: admits requests, turns errors into answers, counts, times and logs.

    Args:
        app: application that answers.
        served: state of the worker.
        routes: known paths; all others are counted and logged as "other", so that no log has a caller's text.
    """

    def __init__(self, app: Starlette, served: Served, routes: frozenset[str]) -> None:
        self._app = app
        # The router itself, without Starlette's own answers to errors.
        self._router = app.router
        self._served = served
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_RAW_HEADERS]
            await send(message)

        try:
            self._admit(scope["path"], Headers(scope=scope))
            scope["app"] = self._app
            await self._router(scope, receive, send_counted)
        except ClientDisconnect:
            status = _GONE
        except Exception as error:
            if status:  # the answer has begun, so no other can be sent
                raise
            refusal = self._refusal(error)
            response = _json(
                refusal.body, status=refusal.status, headers=refusal.headers
            )
            await response(scope, receive, send_counted)
        finally:
            seconds = time.perf_counter() - start
            self._note(scope["path"], status, seconds)

    def _admit(self, path: str, headers: Headers) -> None:
        """Refuses requests under another host's name, or with a wrong token."""
        host = headers.get("host", "")
        with suppress(ValueError):  # brackets without an address
            host = urlsplit(f"//{host}").hostname or host
        if not any(fnmatchcase(host, each) for each in self._served.settings.hosts):
            raise Refusal(
                400,
                "host",
                f"the header Host names {host[:60]!r}; ask by an allowed name, or allow it by --allowed-hosts",
            )
        needs_token = path.startswith("/v1/") or path == "/metrics"
        authorization = headers.get("authorization", "")
        if needs_token and not self._served.bears_token(authorization):
            words = "the token is wrong" if authorization else "there is no token"
            message = f"{words}; send the header `Authorization: Bearer TOKEN`"
            raise Refusal(
                401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"}
            )

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):
            detail = f"{error.detail}; see /openapi.json"
            return Refusal(error.status_code, "http", detail, headers=error.headers)
        log("error", **where(error))
        return Refusal(
            500,
            "internal",
            "an error of the server, which its log names; the request is not at fault",
        )

    def _note(self, path: str, status: int, seconds: float) -> None:
        served = self._served
        route = path if path in self._routes else "other"
        served.metrics.requests.labels(route, status).inc()
        served.metrics.seconds.labels(route).observe(seconds)
        if served.settings.log == "requests":
            ms = round(seconds * 1e3, 2)
            log("request", route=route, status=status, ms=ms)
