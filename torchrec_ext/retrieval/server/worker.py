"""One worker: a process with its own interpreter, answering on the socket shared by all workers.

The supervisor imports this file without torch, so torch and Starlette are imported inside functions. Watcher follows
the pointer to the bundle: it loads a new one next to the live one and replaces it. A broken bundle is reported.
"""

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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchrec_ext.retrieval.bundle.manifest import BUNDLE_MANIFEST
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.sealed import yield_to_others

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer

READY = "ready"
FAILED = "failed"
ALIVE = "alive"
SERVING = "serving"
# A thread may hold the interpreter lock for this long. Python's default of 5 ms would
# delay a request that arrives during another one.
_SWITCH_S = 5e-4
_OWN_FILES = (
    256  # open files of a worker: two bundles during a swap, Redis, metrics and logs
)
_BEATS = 10  # heartbeats per hang_s


def run_worker(
    settings: ServerConfig,
    listening: socket.socket,
    parent: Connection,
    last_good: Sequence[Path] = (),
) -> None:
    """Loads the bundle, reports the result to the parent, and answers until SIGTERM.

    The process ends with 0, or with 1 if it cannot begin. SIGHUP checks for another bundle at once. A terminal sends
    SIGINT to all processes; it is left to the parent.

    Args:
        settings: settings of the server.
        listening: socket shared by all workers.
        parent: pipe to the supervisor.
        last_good: folders of the bundle most recently served by another worker, the first of which loads; this one
            begins with it, and then watches ``settings.bundle`` like every worker. Empty for the first workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Until the server installs its own handler, SIGTERM simply ends the process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    failure: str | None = None
    with _heartbeats(parent, settings.hang_s / _BEATS):
        try:
            queued, watch = _prepare(settings, last_good)
        except Exception as error:
            failure = str(error)
            # ValueError and OSError have messages for users; for other errors the class
            # says more than the message.
            if not isinstance(error, ValueError | OSError):
                failure = f"{type(error).__name__}: {failure}"
        else:
            queued.log_bundle()
    if failure is not None:
        parent.send((FAILED, failure))
        sys.exit(1)
    watch.start()
    try:
        _server(queued, parent).run([listening])
    finally:
        watch.end()
    queued.close()


@contextlib.contextmanager
def _heartbeats(parent: Connection, every_s: float) -> Iterator[None]:
    """Sends heartbeats from a thread until the event loop takes over; a stopped process sends none."""
    ending = threading.Event()

    def beat() -> None:
        while not ending.wait(every_s):
            with contextlib.suppress(OSError):  # the parent has gone
                parent.send((ALIVE, ""))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()  # two threads must not use the pipe at once


def _prepare(
    settings: ServerConfig, last_good: Sequence[Path]
) -> tuple[QueuedScorer, Any]:
    import torch
    import uvicorn  # noqa: F401  import it before the garbage collector freezes all modules

    # TorchRec's import logs warnings for its developers.
    logging.getLogger("torch").setLevel(logging.ERROR)

    import torchrec_ext.retrieval.server.application  # noqa: F401
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.scorer.user_vectors import user_vectors
    from torchrec_ext.retrieval.server.queued_scorer import QueuedScorer
    from torchrec_ext.retrieval.server.telemetry import resident_bytes

    # Imported modules never become garbage, but searching them takes the collector 0.2
    # s, in which no request is answered. It still searches later objects, such as
    # bundles.
    gc.collect()
    gc.freeze()
    allow_files(settings.limits.connections)
    torch.set_num_threads(settings.threads)
    sys.setswitchinterval(_SWITCH_S)
    # An orphan gets another parent.
    first_parent = os.getppid()
    watcher: Watcher

    def tick() -> None:
        queued.metrics.memory.set(resident_bytes())
        queued.metrics.waiting.set(queued.waiting())
        if os.getppid() != first_parent:  # the supervisor was killed
            os.kill(os.getpid(), signal.SIGTERM)

    def open_queue(pointer: Path) -> tuple[QueuedScorer, Identity]:
        # Taken before loading, to notice a pointer that moves during the load.
        loaded_identity = identity(pointer)
        bundle = Bundle.load(bundle_folder(pointer))
        key: str | None = None
        if bundle.users is not None:
            key = bundle.users.key
        vectors = user_vectors(
            settings.vectors, settings.redis, bundle.query_digest, key=key
        )
        return QueuedScorer(settings, bundle, vectors=vectors), loaded_identity

    def open_first() -> tuple[QueuedScorer, Identity]:
        for folder in last_good:
            # It may have been removed or changed meanwhile.
            with contextlib.suppress(ValueError, OSError):
                return open_queue(folder)
        return open_queue(settings.bundle)

    queued, loaded_identity = open_first()
    watcher = Watcher(
        settings.bundle,
        Bundle.load,
        queued.swap,
        queued.refuse,
        tick,
        settings.watch_s,
        loaded_identity,
    )
    signal.signal(signal.SIGHUP, lambda *_: watcher.look())
    return queued, watcher


def allow_files(connections: int) -> None:
    """Raises this process's limit of open files to fit a number of connections.

    Raises:
        ValueError: the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = connections + _OWN_FILES
    if hard != resource.RLIM_INFINITY and required_files > hard:
        raise ValueError(
            f"--max-connections {connections}: a process here may open {hard} files, {_OWN_FILES} of which a worker "
            f"keeps for itself; give {max(1, hard - _OWN_FILES)} or fewer, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < required_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (required_files, hard))


def _server(queued: QueuedScorer, parent: Connection) -> Any:
    import uvicorn

    settings = queued.settings

    class DrainingServer(uvicorn.Server):
        """uvicorn's server, extended to drain before it ends and to end with status 0."""

        _ending_since: float | None = None
        _beat = 0.0
        _served: Bundle | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._tell_served()
            parent.send((READY, queued.scorer.bundle.manifest.digest))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self._ending_since is None:
                self._ending_since = time.monotonic()
                queued.lingering = True
                queued.draining = settings.linger_s == 0
                queued.log(
                    "draining", in_flight=queued.in_flight, linger_s=settings.linger_s
                )

        async def on_tick(self, counter: int) -> bool:
            self._send_heartbeat()
            self._tell_served()
            if self._ending_since is not None:
                passed = time.monotonic() - self._ending_since - settings.linger_s
                queued.draining = passed >= 0
                is_drained = passed >= settings.drain_s and not queued.in_flight
                self.should_exit = is_drained or passed >= settings.drain_limit_s
            return bool(await super().on_tick(counter))

        def _tell_served(self) -> None:
            """Tells the supervisor the live bundle, so that a replacement of this worker starts with it."""
            bundle = queued.scorer.bundle
            # Not by its folder, which may be overwritten by the next bundle.
            if bundle is not self._served:
                self._served = bundle
                with contextlib.suppress(OSError):
                    # the parent has gone, which the watcher notices
                    parent.send((SERVING, str(bundle.folder)))

        def _send_heartbeat(self) -> None:
            """Sends a heartbeat, but not while a batch hangs; the supervisor replaces a silent worker."""
            now = time.monotonic()
            if (
                now - self._beat >= settings.hang_s / _BEATS
                and queued.busy_s() < settings.hang_s
            ):
                self._beat = now
                with contextlib.suppress(OSError):
                    # the parent has gone, which the watcher notices
                    parent.send((ALIVE, ""))

    return DrainingServer(uvicorn_config(queued))


def uvicorn_config(queued: QueuedScorer) -> Any:
    """Returns uvicorn's configuration for a worker."""
    import uvicorn

    from torchrec_ext.retrieval.server.application import application
    from torchrec_ext.retrieval.server.connections import Connections

    return uvicorn.Config(
        application(queued),
        http=Connections(
            queued.settings.limits, lambda why: queued.metrics.closed.labels(why).inc()
        ).protocol(),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",  # otherwise every malformed HTTP request writes a line
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(queued.settings.drain_limit_s)),
    )


Identity = tuple[object, ...]
_LONGEST_POINTER = 4096
_OF_A_RUN = "bundle"  # folder name of a run's bundle, from torchx_apps.jobs.training


def bundle_folder(pointer: Path) -> Path:
    """Returns the bundle's folder for a folder, a link to one, a text file with its path, or a run's folder.

    Raises:
        ValueError: ``pointer`` leads to no folder.
    """
    target = pointer
    if pointer.is_file():
        with pointer.open("rb") as file:
            text = file.read(_LONGEST_POINTER).decode(errors="replace").strip()
        if text:
            target = pointer.parent / text
    # Unlike Path.is_dir(), returns False for an invalid name.
    if not os.path.isdir(target):
        what = f"it names {str(target)[:200]!r}, which is not a folder"
        if target == pointer:
            what = "there is no such file or folder"
        raise ValueError(
            f"bundle {str(pointer)!r}: {what}; give a bundle's folder, a link to one, or a text file with its path"
        )
    of_a_run = target / _OF_A_RUN
    # Resolved, so that a link that moves later does not change the open bundle's
    # folder.
    if (
        not (target / BUNDLE_MANIFEST).exists()
        and (of_a_run / BUNDLE_MANIFEST).is_file()
    ):
        return of_a_run.resolve()
    return target.resolve()


def identity(pointer: Path) -> Identity:
    """Fingerprints the bundle behind ``pointer`` by its files' inodes, sizes and times; never raises."""
    try:
        folder = bundle_folder(pointer)
        entries = []
        for parent, folders, names in os.walk(folder):
            # In place: os.walk() goes on in this order.
            folders.sort()
            for name in sorted(names):
                status = os.stat(os.path.join(parent, name))
                entries.append(
                    (parent, name, status.st_ino, status.st_size, status.st_mtime_ns)
                )
        return (str(folder), *entries)
    except (OSError, ValueError) as error:
        return (type(error).__name__,)


class Watcher(threading.Thread):
    """Checks ``pointer`` every ``every_s`` seconds, and at once after :meth:`look`.

    A change takes effect when the next check finds the same state, so that a half-written bundle is not loaded.

    Args:
        pointer: see :func:`bundle_folder`.
        load: loads the bundle of a folder; raises to refuse the folder.
        swap: takes a loaded bundle; raises to refuse it.
        refuse: called with the reason if a bundle is refused.
        tick: called at every check; its OSErrors are ignored.
        every_s: seconds between two checks.
        loaded: :func:`identity` of the live bundle, taken before it was loaded; by default the current one.
    """

    def __init__(
        self,
        pointer: Path,
        load: Callable[[Path], Bundle],
        swap: Callable[[Bundle], None],
        refuse: Callable[[str], None],
        tick: Callable[[], None],
        every_s: float,
        loaded: Identity | None = None,
    ) -> None:
        super().__init__(name="bundle-watcher", daemon=True)
        self._pointer = pointer
        self._every_s = every_s
        self._tick = tick
        self._load = load
        self._swap = swap
        self._refuse = refuse
        self._wake = threading.Event()
        self._ending = False
        self._last_identity = identity(pointer) if loaded is None else loaded

    def look(self) -> None:
        """Checks now, and retries a bundle that was refused before."""
        # No bundle has it, so the check finds a change.
        self._last_identity = ()
        self._wake.set()

    def end(self) -> None:
        """Ends the thread."""
        self._ending = True
        self._wake.set()

    def run(self) -> None:
        """Checks until :meth:`end`."""
        # Loading a bundle takes a core for a second; requests come first.
        yield_to_others()
        before = self._last_identity
        while True:
            self._wake.wait(self._every_s)
            at_once = self._wake.is_set()
            # Cleared before the check, so that a look() during it is not lost.
            self._wake.clear()
            if self._ending:
                return
            with contextlib.suppress(OSError):
                # such as too many open files for a moment
                self._tick()
            now = identity(self._pointer)
            if now != self._last_identity and (now == before or at_once):
                self._last_identity = now
                self._act()
            before = now

    def _act(self) -> None:
        try:
            self._swap(self._load(bundle_folder(self._pointer)))
        except Exception as error:
            reason = str(error)
            # ValueErrors have messages for users.
            if not isinstance(error, ValueError):
                reason = f"{type(error).__name__}: {reason}"
            self._refuse(reason)
