"""Settings of the server, and its limits for callers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Host names of a loopback address.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for callers; a request beyond one gets the status below, the limit's name and value, and a remedy.

    Args:
        body_bytes: bytes of a request's body; 413.
        k: items of an answer; 422.
        candidates: ids in each list of a request, and items from the index for the top NN; 422.
        rows: rows of one request to embed; 422.
        queue: waiting requests in a worker; 429. A request is also refused with 429 if its search, top NN or towers,
            together with the requests before it, take longer than ``time_ms``; with 413 if it alone takes longer.
        time_ms: milliseconds from a request's head to its answer; 408 if its body is late, otherwise 503.
        header_bytes: bytes of a request's address and headers; 431.
        header_ms: milliseconds for a connection's first byte, for the rest of a request's head, and for the client to
            read an answer; then the connection is closed.
        connections: connections of a worker; see :class:`~torchrec_ext.retrieval.server.connections.Connections`.

    Raises:
        ValueError: a limit below 1.
    """

    body_bytes: int = 2**20
    k: int = 1_000
    candidates: int = 10_000
    rows: int = 256
    queue: int = 256
    time_ms: float = 2_000.0
    header_bytes: int = 2**15
    header_ms: float = 10_000.0
    connections: int = 1_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # Written so, because NaN is below nothing.
            if not value >= 1:
                raise ValueError(f"limit {name}={value}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    Args:
        bundle: folder of a bundle or of a run that ended with one, a symbolic link to it, or a text file with its path.
            The server checks it every ``watch_s``. If it leads to another bundle, the server loads that one next to the
            live one and then replaces it.
        workers: number of processes, 1 or more. Each has its own interpreter; all map the same files.
        threads: torch's threads in a worker.
        limits: limits of callers.
        retrieve: number of items from the first stage for the top NN, unless the request sets it.
        stage: first stage; see :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer`.
        compile: whether the top NN is compiled; see :class:`~torchrec_ext.retrieval.scorer.scorer.Scorer`.
        max_batch: most requests in one batch of a worker.
        max_wait_ms: milliseconds that a request waits for others; see
            :class:`~torchrec_ext.retrieval.scorer.batching.MicroBatcher`.
        token: token required from callers, or None; not empty.
        allowed_hosts: valid values of the Host header, with or without a port: names, addresses, ``*.example.com``, or
            ``*`` for all. This refuses foreign web pages in a browser on this machine, because they reach a loopback
            address under the page's own name.
        vectors: folder of a store with users' vectors, written by ``rec.embed --tower query``, or None.
        redis: address of a Redis with users' vectors, such as ``redis://host:6379/0``, or None.
        watch_s: seconds between two checks of ``bundle``.
        linger_s: seconds after SIGTERM in which a worker still answers everything, while ``/readyz`` says 503 and each
            answer closes its connection. A load balancer may then remove the server some seconds late without losing
            requests.
        drain_s: seconds after ``linger_s`` in which an ending worker answers new requests with 503, so that a load
            balancer notices.
        drain_limit_s: seconds after ``linger_s`` until a worker ends, even with requests in flight.
        hang_s: seconds without a heartbeat of a worker, or with the same batch, until it is replaced. It must be more
            than ``limits.time_ms``.
        start_s: seconds for a worker to load the bundle and become ready; then it is replaced.
        log_requests: log a line for each request, not only for events.

    Raises:
        ValueError: a number out of range, or an empty token.
    """

    bundle: Path
    workers: int = 1
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    retrieve: int = 100
    stage: Literal["exact", "dot", "cosine"] = "exact"
    compile: Literal["auto", "off"] = "off"
    max_batch: int = 32
    max_wait_ms: float = 0.0
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ("*",)
    vectors: Path | None = None
    redis: str | None = field(default=None, repr=False)
    watch_s: float = 1.0
    linger_s: float = 0.0
    drain_s: float = 1.0
    drain_limit_s: float = 30.0
    hang_s: float = 30.0
    start_s: float = 600.0
    log_requests: bool = True

    @property
    def is_private(self) -> bool:
        """Whether callers need a token or must be on this machine (all allowed hosts are loopback names)."""
        return self.token is not None or set(self.allowed_hosts) <= set(LOOPBACK)

    def __post_init__(self) -> None:
        least = {
            "workers": 1,
            "threads": 1,
            "retrieve": 1,
            "max_batch": 1,
            "max_wait_ms": 0,
            "linger_s": 0,
            "drain_s": 0,
            "drain_limit_s": 0,
        }
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name}={getattr(self, name)}: must be {low} or more")
        for name in ("watch_s", "hang_s", "start_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be greater than 0"
                )
        for name in self.allowed_hosts:
            if not name or (name != "*" and "*" in name.removeprefix("*.")):
                raise ValueError(
                    f"allowed_hosts: {name!r}; must be a name or an address without a port, *.example.com, or *"
                )
        time_ms = self.limits.time_ms
        if time_ms >= 1e3 * self.hang_s:
            raise ValueError(
                f"hang_s={self.hang_s:g}: must be more than the {time_ms / 1e3:g} s of time_ms={time_ms:g}, or a "
                "worker is replaced that would have answered in time; give a greater --hang, or a smaller --time-ms"
            )
        if self.token is not None and not self.token.strip():
            raise ValueError(
                "the token is empty, so anybody would bear it; write one of 32 random characters or more, or give none"
            )
