"""certify(): measures choices of bundle, first stage and workers on this machine, and takes the first that is in time.

Each choice is served by processes of its own on a port of this machine, as it would be to callers, and is asked at the
required rate for some seconds. The client shares the machine with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchrec_ext.retrieval.server.load import Load, answered, ask, http_request
from torchrec_ext.retrieval.server.settings import LOOPBACK, ServerConfig
from torchrec_ext.retrieval.server.supervisor import Supervisor, listen
from torchrec_ext.retrieval.server.telemetry import Log

# a fork would copy locks held by other threads
_SPAWN = multiprocessing.get_context("spawn")
_UNITS_MS = {"ms": 1.0, "s": 1e3}
_REQUESTS = 1_000  # so that ten of them are beyond p99
_SECONDS = (4.0, 30.0)  # the shortest and the longest time to ask a service for
_WARM_S = 1.0
_RECALL = 0.95  # least recall of a first stage that misses items
_HALVINGS = 3  # of the rate, to find one that is reachable


@dataclass(frozen=True, kw_only=True)
class Target:
    """A rate of requests, in requests a second, and the 99th percentile of their time, in milliseconds.

    Raises:
        ValueError: a number that is not above 0.

    Example:
        >>> Target.parse("5ms", 300), Target.parse("1s", 2.5)
        (Target(p99_ms=5.0, rate=300), Target(p99_ms=1000.0, rate=2.5))
        >>> Target.parse("5", 300)
        Traceback (most recent call last):
        ValueError: --p99 '5': must be a time above 0 with its unit, such as 5ms or 0.1s
    """

    p99_ms: float
    rate: float

    @classmethod
    def parse(cls, p99: str, rate: float) -> Target:
        """Returns the target of the flags ``--p99`` and ``--qps``."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s)", p99.strip())
        p99_ms = 0.0
        if match:
            p99_ms = float(match[1]) * _UNITS_MS[match[2]]
        if not p99_ms > 0:
            raise ValueError(
                f"--p99 {p99[:40]!r}: must be a time above 0 with its unit, such as 5ms or 0.1s"
            )
        if not 0 < rate <= 1e6:
            raise ValueError(
                f"--qps {rate:g}: must be requests a second, above 0 and at most a million"
            )
        return cls(p99_ms=p99_ms, rate=rate)


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """A choice of settings with what was measured of it.

    Args:
        settings: the choice.
        load: times and failures of its requests.
        recall: recall at 10 of its first stage; 1 if that misses nothing.
    """

    settings: ServerConfig
    load: Load
    recall: float

    @property
    def name(self) -> str:
        """Bundle, stage and workers of the choice."""
        return _name_of(self.settings)

    def holds(self, target: Target) -> bool:
        """Whether every request was answered, in time, by a first stage that finds the best items."""
        in_time = self.load.percentile(99) <= target.p99_ms
        return in_time and not self.load.failed and self.recall >= _RECALL

    def line(self, target: Target) -> str:
        """Returns a line for people."""
        text = f"  {self.name}: p50 {self.load.percentile(50):.3g} ms, p99 {self.load.percentile(99):.3g} ms"
        if self.load.failed:
            text += f", {len(self.load.failed)} failed"
        if self.recall < 1:
            text += f", finds {self.recall:.0%} of the 10 best"
        if self.holds(target):
            text += "; holds"
        return text


def _name_of(settings: ServerConfig) -> str:
    plural = "s" if settings.workers > 1 else ""
    return f"{settings.workers} worker{plural}, stage {settings.stage}, {settings.bundle.name}"


def choices(
    settings: ServerConfig, bundles: Sequence[Path], stages: Sequence[Any], cores: int
) -> list[ServerConfig]:
    """Returns the settings to measure, first those that change no answer, and few workers first.

    Example:
        >>> found = choices(ServerConfig(bundle=Path("b")), [Path("b"), Path("fp16")], ["exact", "dot"], 2)
        >>> [(each.stage, each.bundle.name, each.workers) for each in found][:3]
        [('exact', 'b', 1), ('exact', 'b', 2), ('exact', 'fp16', 1)]
    """
    # Powers of two, and all cores.
    workers = sorted(
        {min(1 << power, cores) for power in range(cores.bit_length() + 1)}
    )
    candidates = []
    for stage, bundle, count in itertools.product(stages, bundles, workers):
        candidates.append(
            dataclasses.replace(settings, bundle=bundle, stage=stage, workers=count)
        )
    return candidates


def certify(
    candidates: Sequence[ServerConfig],
    target: Target,
    say: Callable[[str], None],
    requests: Sequence[bytes] = (),
) -> ServerConfig:
    """Measures choices until one holds the target.

    Args:
        candidates: choices, in the order of preference.
        target: time and rate to hold.
        say: receives a line for each choice that was measured or cannot be served.
        requests: what to ask; by default for the users of the bundle, ten items each.

    Raises:
        ValueError: no choice holds the target; the message says what is reachable here.
    """
    # An exception ends the measured service too; a signal by itself would leave it
    # behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    cores = len(os.sched_getaffinity(0))
    say(
        f"p99 {target.p99_ms:g} ms at {target.rate:g} requests/s, measured on {cores} cores that the client shares:"
    )
    measured: list[MeasuredChoice] = []
    refused = ""
    for settings in candidates:
        try:
            with _serving(settings) as service:
                load = service.load(requests, target.rate)
                choice = MeasuredChoice(
                    settings=settings, load=load, recall=service.stage_recall()
                )
        except ValueError as error:
            refused = str(error)
            # Such as a bundle of --also whose query tower did not make the --vectors.
            say(f"  {_name_of(settings)}: left out: {refused}")
            continue
        measured.append(choice)
        say(choice.line(target))
        if choice.holds(target):
            return settings
    if not measured:
        raise ValueError(refused)
    good = [each for each in measured if each.recall >= _RECALL] or measured
    best = min(good, key=lambda each: (len(each.load.failed), each.load.percentile(99)))
    reachable = _reachable(best, target, requests)
    within = f"it answers {reachable:.3g}/s in time"
    if not reachable:
        within = f"nor is it in time at {target.rate * 0.5**_HALVINGS:.3g}/s"
    raise ValueError(
        f"--p99 {target.p99_ms:g}ms at --qps {target.rate:g}: not reached here; the best of {len(measured)}, "
        f"{best.name[:60]}, has {best.load.percentile(99):.3g} ms; {within}"
    )


def _reachable(
    best: MeasuredChoice, target: Target, requests: Sequence[bytes]
) -> float:
    """Returns the greatest of the halved rates that the choice answers in time; 0 if it does at none."""
    with _serving(best.settings) as service:
        for halvings in range(1, _HALVINGS + 1):
            rate = target.rate * 0.5**halvings
            if dataclasses.replace(best, load=service.load(requests, rate)).holds(
                target
            ):
                return rate
    return 0.0


@dataclass(frozen=True)
class _Service:
    """A service under measurement: its port, and the file with its log."""

    port: int
    log: Path

    def load(self, requests: Sequence[bytes], rate: float) -> Load:
        """Asks at a rate, for the users of the bundle if there are no requests; a first second is not counted."""
        questions = list(requests) or self.questions()
        warm = ask(self.port, rate, _WARM_S, questions)
        if warm.failed and len(warm.failed) == len(warm.ms):
            raise ValueError(
                f"the service refuses the requests, with status {warm.failed[0]}: see --requests"
            )
        shortest, longest = _SECONDS
        return ask(
            self.port, rate, min(max(shortest, _REQUESTS / rate), longest), questions
        )

    def questions(self) -> list[bytes]:
        """Returns requests for the users of the bundle."""
        with socket.create_connection(
            ("127.0.0.1", self.port), timeout=30
        ) as connection:
            connection.sendall(http_request("GET", "/v1/bundle"))
            facts = json.loads(answered(connection)[1])
        if not facts["sample_users"]:
            raise ValueError(
                "the bundle has no users to ask for: give --requests FILE, a body of /v1/recommend a line"
            )
        bodies = [
            json.dumps({"user": {facts["user_key"]: user}})
            for user in facts["sample_users"]
        ]
        return [http_request("POST", "/v1/recommend", body) for body in bodies]

    def stage_recall(self) -> float:
        """Returns the recall that the worker has measured of its first stage."""
        match = re.search(r'"stage_recall_at_10": ([\d.]+)', self.log.read_text())
        if match is None:  # an exact stage is not measured
            return 1.0
        return float(match[1])


@contextmanager
def _serving(settings: ServerConfig) -> Iterator[_Service]:
    """Serves on a port of this machine, without a token, until the block ends.

    Raises:
        ValueError: the service cannot begin, with its reason.
    """
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    # Under loopback names alone the server is private, and so tells ids of the bundle's
    # users to ask for.
    settings = dataclasses.replace(
        settings, token=None, allowed_hosts=LOOPBACK, log_requests=False, drain_s=0
    )
    parent, child = _SPAWN.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = _SPAWN.Process(target=_run, args=(settings, listening, child, log))
        process.start()
        # Open in the service alone, so that its end closes the pipe and the port.
        child.close()
        listening.close()
        try:
            reason = "the service was not ready in time"
            if parent.poll(settings.start_s):
                reason = parent.recv()
            if reason:
                raise ValueError(reason)
            yield _Service(port, log)
        except EOFError:
            raise ValueError("the service ended before it was ready") from None
        finally:
            process.terminate()
            process.join(60)
            process.kill()


def _run(
    settings: ServerConfig, listening: socket.socket, parent: Connection, log: Path
) -> None:
    """Runs a service; sends an empty text when it is ready, or the reason why it cannot begin."""
    with log.open("w") as file:
        # The workers inherit it: their lines about a measurement are not for the
        # operator.
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        Supervisor(settings, listening, Log()).run(lambda _: parent.send(""))
    except ValueError as error:
        parent.send(str(error))
