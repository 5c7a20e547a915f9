"""Settings of the server, and its limits for callers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Host names of a loopback address.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN = "TORCHREC_EXT_TOKEN"
# The settings of a server, for its workers.
_SETTINGS = "TORCHREC_EXT_SERVE"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for callers; a request beyond one gets 422 or 413, the limit and a remedy.

    Args:
        body_bytes: bytes of a request's body; 413.
        k: items of an answer.
        candidates: ids in each list of a request.
        rows: rows of one request to embed.

    Raises:
        ValueError: a limit below 1.
    """

    body_bytes: int = 2**20
    k: int = 1_000
    candidates: int = 10_000
    rows: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
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
        threads: threads of ONNX Runtime for a call.
        limits: limits of callers.
        token: token required from callers, or None; not empty.
        allowed_hosts: valid values of the Host header, with or without a port: names, addresses, ``*.example.com``, or
            ``*`` for all. This refuses foreign web pages in a browser on this machine, because they reach a loopback
            address under the page's own name.
        vectors: folder of a store with users' vectors, written by ``torchx_apps.embed --tower query``, or None.
        watch_s: seconds between two checks of ``bundle``.
        limit_concurrency: connections and requests of a worker beyond which it answers 503, or None.
        log_requests: log a line for each request, not only for events.

    Raises:
        ValueError: a number out of range, a wrong host, or an empty token.
    """

    bundle: Path
    workers: int = 1
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ("*",)
    vectors: Path | None = None
    watch_s: float = 1.0
    limit_concurrency: int | None = None
    log_requests: bool = True

    @property
    def is_private(self) -> bool:
        """Whether callers need a token or must be on this machine (all allowed hosts are loopback names)."""
        return self.token is not None or set(self.allowed_hosts) <= set(LOOPBACK)

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "limit_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        if not self.watch_s > 0:
            raise ValueError(f"watch_s={self.watch_s}: must be greater than 0")
        for name in self.allowed_hosts:
            if not name or (name != "*" and "*" in name.removeprefix("*.")):
                raise ValueError(
                    f"allowed_hosts: {name!r}; must be a name or an address without a port, *.example.com, or *"
                )
        if self.token is not None and not self.token.strip():
            raise ValueError(
                "the token is empty, so anybody would bear it; write one of 32 random characters or more, or give none"
            )

    def to_environment(self) -> None:
        """Puts the settings into this process's environment, which its workers inherit."""
        values = asdict(self)
        token = values.pop("token")
        os.environ.pop(TOKEN, None)
        if token is not None:
            os.environ[TOKEN] = token
        os.environ[_SETTINGS] = json.dumps(values, default=str)

    @classmethod
    def from_environment(cls) -> ServerConfig:
        """Returns the settings that :meth:`to_environment` left."""
        values: dict[str, Any] = json.loads(os.environ[_SETTINGS])
        values["bundle"] = Path(values["bundle"])
        if values["vectors"] is not None:
            values["vectors"] = Path(values["vectors"])
        values["limits"] = Limits(**values["limits"])
        values["allowed_hosts"] = tuple(values["allowed_hosts"])
        return cls(token=os.environ.get(TOKEN), **values)
