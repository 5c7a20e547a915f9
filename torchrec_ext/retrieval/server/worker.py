"""One worker: a process with an interpreter of its own that answers on a socket which all workers share."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchrec_ext.retrieval.server.settings import Settings

if TYPE_CHECKING:
    from torchrec_ext.retrieval.server.service import Service

READY, FAILED, ALIVE = "ready", "failed", "alive"
# How long one thread may keep the others from running Python; by default 5 ms, which a request that arrives would wait for the
# Python of the one before it.
_SWITCH_S = 5e-4
_OWN_FILES = 256  # of a worker: two bundles while one takes the other's place, Redis, metrics and logs
_BEATS = 10  # signs of life in the time after which a worker counts as hanging


def run_worker(settings: Settings, listening: socket.socket, parent: Connection) -> None:
    """Loads the bundle, says so to the parent, and answers until SIGTERM; ends the process with 0, or with 1 where it cannot begin.

    SIGHUP looks for another bundle at once. SIGINT is the parent's affair: a terminal sends it to all.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server takes it over
    failed: str | None = None
    with _signs_of_life(parent, settings.hang_s / _BEATS):
        try:
            service, watch = _prepared(settings)
        except Exception as error:
            failed = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        else:
            service.tell_bundle()
    if failed is not None:
        parent.send((FAILED, failed))
        sys.exit(1)
    watch.start()
    try:
        _server(service, parent).run([listening])
    finally:
        watch.end()
    service.close()


@contextlib.contextmanager
def _signs_of_life(parent: Connection, every_s: float) -> Iterator[None]:
    """By a thread, until the loop that answers gives them: a process that was stopped gives none."""
    ending = threading.Event()

    def beat() -> None:
        while not ending.wait(every_s):
            with contextlib.suppress(OSError):  # the parent has gone
                parent.send((ALIVE, ""))

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ending.set()
        beating.join()  # since the pipe is not for two threads at a time


def _prepared(settings: Settings) -> tuple[Service, Any]:
    import torch
    import uvicorn  # noqa: F401  before the collector is told what stays

    logging.getLogger("torch").setLevel(logging.ERROR)  # what it tells its own developers when TorchRec is imported

    import torchrec_ext.retrieval.server.application  # noqa: F401
    from torchrec_ext.retrieval.bundle import Bundle
    from torchrec_ext.retrieval.server.service import Service
    from torchrec_ext.retrieval.server.telemetry import resident_bytes
    from torchrec_ext.retrieval.server.watching import Watcher, bundle_folder, identity
    from torchrec_ext.retrieval.vectors import user_vectors

    # What is imported stays. To look through it for garbage takes the collector 0.2 s, in which no request is answered; of bundles,
    # which come and go, it looks through what is made from here on.
    gc.collect()
    gc.freeze()
    allow_files(settings.limits.connections)
    torch.set_num_threads(settings.threads)
    sys.setswitchinterval(_SWITCH_S)
    born_of = os.getppid()
    watcher: Watcher

    def tick() -> None:
        service.metrics.memory.set(resident_bytes())
        service.metrics.waiting.set(service.waiting())
        if os.getppid() != born_of:  # killed, so that it could not say goodbye
            os.kill(os.getpid(), signal.SIGTERM)

    served = identity(settings.bundle)  # before loading, so that a pointer that moves on meanwhile is seen
    bundle = Bundle.load(bundle_folder(settings.bundle))
    service = Service(settings, bundle, vectors=user_vectors(settings.vectors, settings.redis, bundle.query_digest))
    watcher = Watcher(settings.bundle, Bundle.load, service.serve, service.refuse, tick, settings.watch_s, served)
    signal.signal(signal.SIGHUP, lambda *_: watcher.look())
    return service, watcher


def allow_files(connections: int) -> None:
    """Lets this process open so many connections and its own files.

    Raises:
        ValueError: its hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OWN_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"--max-connections {connections}: a process here may open {hard} files, {_OWN_FILES} of which a worker keeps for "
            f"itself; give {max(1, hard - _OWN_FILES)} or fewer, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _server(service: Service, parent: Connection) -> Any:
    import uvicorn

    settings = service.settings

    class Server(uvicorn.Server):
        """Drains before it ends, and ends with 0."""

        _told: float | None = None
        _beat = 0.0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            parent.send((READY, service.scorer.bundle.manifest.digest))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self._told is None:
                self._told = time.monotonic()
                service.draining = True
                service.log("draining", in_flight=service.in_flight)

        async def on_tick(self, counter: int) -> bool:
            self._tell_alive()
            if self._told is not None:
                passed = time.monotonic() - self._told
                done = passed >= settings.drain_s and not service.in_flight
                self.should_exit = done or passed >= settings.drain_limit_s
            return bool(await super().on_tick(counter))

        def _tell_alive(self) -> None:
            """From the loop that answers, and not while a batch hangs: who hears nothing of it replaces this process."""
            now = time.monotonic()
            if now - self._beat >= settings.hang_s / _BEATS and service.busy_s() < settings.hang_s:
                self._beat = now
                with contextlib.suppress(OSError):  # the parent has gone, which the watcher notices
                    parent.send((ALIVE, ""))

    return Server(uvicorn_config(service))


def uvicorn_config(service: Service) -> Any:
    """How uvicorn runs a service."""
    import uvicorn

    from torchrec_ext.retrieval.server.application import application
    from torchrec_ext.retrieval.server.connections import Connections

    return uvicorn.Config(
        application(service),
        http=Connections(service.settings.limits, lambda why: service.metrics.closed.labels(why).inc()).protocol(),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",  # or each request that is no HTTP writes a line
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(service.settings.drain_limit_s)),
    )
