"""Supervisor: binds the socket, keeps workers alive, forwards signals, ends after they have drained. No torch."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from torchrec_ext.retrieval.server.last_good import LastGood
from torchrec_ext.retrieval.server.settings import ServerConfig
from torchrec_ext.retrieval.server.worker import FAILED, READY, SERVING, run_worker

# a fork would copy locks held by other threads
_SPAWN = multiprocessing.get_context("spawn")
_TICK_S = 0.2
_LONGEST_PAUSE_S = 30.0
_STARTING_S = 2.0  # seconds for a worker that is not ready yet to end on SIGTERM
_CUT_OFF = (
    "a file of the bundle was cut off while it was served (SIGBUS); put it right, and from now on write bundles to new "
    "folders and point the server there"
)
_REASONS = {
    errno.EADDRINUSE: "it is in use",
    errno.EACCES: "only root may use it",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def listen(host: str, port: int) -> socket.socket:
    """Opens the socket shared by all workers; port 0 takes a free port.

    Raises:
        ValueError: the port is in use or may not be used, or there is no such address here.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        raise ValueError(
            f"--host {host} --port {port}: {reason}; give another, or --port 0 for any that is free"
        ) from None


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    digest: str = ""
    failure: str = ""
    start_time: float = field(default_factory=time.monotonic)
    # time of the last heartbeat
    last_heartbeat: float = field(default_factory=time.monotonic)
    hung: bool = False  # whether the supervisor killed it for hanging
    restart_time: float | None = None  # start time of its successor, after its end


class Supervisor:
    """Starts and replaces the workers of one server.

    Args:
        settings: settings of the server.
        listening: socket from :func:`listen`.
        log: receives events; see :class:`~torchrec_ext.retrieval.server.telemetry.Log`.
    """

    def __init__(
        self, settings: ServerConfig, listening: socket.socket, log: Callable[..., None]
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._log = log
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._pause_s = 0.0
        self._last_good = LastGood(log)

    def run(self, ready: Callable[[str], None]) -> int:
        """Runs the workers until SIGTERM or SIGINT.

        Args:
            ready: called once, with the digest of the bundle, when all workers answer.

        Returns:
            0 if every worker drained and ended without an error, otherwise 1.

        Raises:
            ValueError: a worker could not begin, with the reason: a refused bundle, a missing package.
        """
        # Handlers only note the signal: the loops act on it at a safe point.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signals.append(number))
        shared = tempfile.mkdtemp(prefix="torchrec_ext-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared
        try:
            self._workers = [self._start() for _ in range(self._settings.workers)]
            if self._wait_until_ready():
                ready(self._workers[0].digest)
                self._keep_alive()
            return self._end()
        finally:
            for worker in self._workers:
                worker.process.kill()
            self._last_good.close()
            shutil.rmtree(shared, ignore_errors=True)

    def _start(self) -> _Worker:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(
            target=run_worker,
            args=(self._settings, self._listening, theirs, self._last_good.folders),
        )
        process.start()
        theirs.close()  # otherwise the end of the worker would not end the pipe
        return _Worker(process, ours)

    def _wait_until_ready(self) -> bool:
        """Waits until all workers are ready and replaces hanging ones; returns False if a signal comes first."""
        while not all(worker.digest for worker in self._workers):
            if self._should_end():
                return False
            for index, worker in enumerate(self._workers):
                # Check before reading: an ended worker's last messages are still in the
                # pipe.
                ended = not worker.process.is_alive()
                self._hear(worker)
                self._end_if_hanging(worker)
                if worker.hung:
                    self._replace(index, worker)
                elif worker.failure or ended:
                    raise ValueError(
                        worker.failure
                        or f"a worker ended with status {worker.process.exitcode} before it could answer"
                    )
        return True

    def _hear(self, worker: _Worker, patience_s: float = _TICK_S) -> None:
        """Reads a worker's messages: ready, failed, heartbeat, and its served bundle."""
        # Only a worker that is still starting is waited for.
        if worker.digest or worker.failure:
            patience_s = 0.0
        try:
            while worker.pipe.poll(patience_s):
                patience_s = 0.0
                kind, text = worker.pipe.recv()
                worker.last_heartbeat = time.monotonic()
                if kind == SERVING:
                    self._last_good.keep(Path(text))
                elif kind == READY:
                    worker.digest = text
                elif kind == FAILED:
                    worker.failure = text
        # Its end of the pipe is closed, so the process is about to end.
        except (EOFError, OSError):
            worker.process.join(1.0)

    def _alive(self) -> list[int]:
        """Returns the sentinels of the living workers' processes, to wait for."""
        return [
            worker.process.sentinel
            for worker in self._workers
            if worker.process.is_alive()
        ]

    def _keep_alive(self) -> None:
        """Replaces ended workers until a signal: at once after a long life, otherwise after growing pauses."""
        while not self._should_end():
            alive = self._alive()
            if alive:
                wait(alive, timeout=_TICK_S)
            else:
                time.sleep(_TICK_S)
            for index, worker in enumerate(self._workers):
                self._hear(worker, 0.0)
                self._end_if_hanging(worker)
                if not worker.process.is_alive():
                    self._replace(index, worker)

    def _end_if_hanging(self, worker: _Worker) -> None:
        """Kills a hanging worker by SIGKILL, because it handles no other signal."""
        now = time.monotonic()
        silent_s = now - worker.last_heartbeat
        starting = not worker.digest
        # A worker sends heartbeats while it loads, so a load that never ends needs a
        # limit of its own.
        starts_too_long = starting and now - worker.start_time > self._settings.start_s
        hangs = silent_s > self._settings.hang_s or starts_too_long
        if hangs and worker.process.is_alive():
            self._log(
                "worker_hangs",
                worker=worker.process.pid,
                silent_s=round(silent_s, 1),
                starting=starting,
            )
            worker.process.kill()
            worker.process.join()
            worker.hung = True

    def _replace(self, index: int, worker: _Worker) -> None:
        # Not before run() has set the folder of the metrics, which prometheus_client
        # reads when it is imported.
        from torchrec_ext.retrieval.server.telemetry import forget_worker

        now = time.monotonic()
        if worker.restart_time is None:
            # Pauses of 1, 2, 4 and up to 30 s: a bundle that ends every worker must not
            # keep the machine busy.
            self._pause_s = min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S)
            if now - worker.start_time > _LONGEST_PAUSE_S:
                self._pause_s = 0.0
            worker.restart_time = now + self._pause_s
            status = worker.process.exitcode
            why: str | None = worker.failure or None
            if status == -signal.SIGBUS:
                why = why or _CUT_OFF
            self._log("worker_ended", worker=worker.process.pid, status=status, why=why)
            forget_worker(worker.process.pid or 0)
        if now >= worker.restart_time:
            worker.pipe.close()
            self._workers[index] = self._start()

    def _should_end(self) -> bool:
        while signal.SIGHUP in self._signals:
            self._signals.remove(signal.SIGHUP)
            self._send_signal(signal.SIGHUP)
        return bool(self._signals)

    def _send_signal(self, number: int) -> None:
        for worker in self._workers:
            # SIGHUP would end a worker that is not ready yet.
            takes_it = worker.digest or number != signal.SIGHUP
            if worker.process.is_alive() and takes_it:
                os.kill(worker.process.pid or 0, number)

    def _end(self) -> int:
        """Lets the workers drain; kills them at a second signal."""
        signal_count = len(self._signals)
        self._send_signal(signal.SIGTERM)
        start = time.monotonic()
        # 10 s more than the workers' own limit, so that only a worker beyond it is
        # killed.
        end = start + self._settings.linger_s + self._settings.drain_limit_s + 10
        while alive := self._alive():
            if time.monotonic() > end or len(self._signals) > signal_count:
                self._log("killed", workers=len(alive))
                return 1
            for worker in self._workers:
                self._hear(worker, 0.0)
                self._end_if_hanging(worker)
                # It is not ready, so no request is lost.
                if not worker.digest and time.monotonic() > start + _STARTING_S:
                    worker.process.kill()
            wait(alive, timeout=_TICK_S)
        statuses = []
        for worker in self._workers:
            # Others did not serve at the end: never ready, or ended before and logged
            # then.
            if worker.digest and worker.restart_time is None:
                statuses.append(worker.process.exitcode)
        self._log("ended", statuses=statuses)
        return int(any(statuses))


def say(line: str) -> None:
    """Prints a line to standard output, at once."""
    print(line, file=sys.stdout, flush=True)
