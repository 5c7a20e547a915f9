"""Settings of the server, and its limits for callers."""

from __future__ import annotations

import ipaddress
import json
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN = "TORCHREC_EXT_TOKEN"
# The settings of a server, for its workers.
_SETTINGS = "TORCHREC_EXT_SERVE"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server; a request beyond a limit gets 413 or 422, the limit and a remedy.

    Args:
        bundle: a bundle's or a run's folder, a link to it, or a text file with its path. If it leads to another bundle,
            the server loads that one next to the live one and then replaces it.
        host: address to listen on; 0.0.0.0 for every one of this machine.
        port: 0 for any that is free.
        workers: processes. Each has its own interpreter; all map the same files.
        threads: threads of ONNX Runtime in each process.
        allowed_hosts: valid names in the header Host, with or without a port: names, addresses, *.example.com, or * for
            all; by default this machine's own on a loopback host, else *. This refuses foreign web pages in a browser
            on this machine, because they reach a loopback address under the page's own name.
        token_file: file with the token that callers must bear; else $TORCHREC_EXT_TOKEN, else none.
        vectors: folder of a store with users' vectors, of torchx_apps.embed --tower query.
        max_k: limit, items of an answer.
        max_candidates: limit, ids in each list of a request.
        max_rows: limit, rows of one request to embed.
        max_body: limit, bytes of a request.
        limit_concurrency: limit, connections and requests of a worker, beyond which it answers 503.
        watch: seconds between two looks for another bundle.
        log: JSON lines on standard error.

    Raises:
        ValueError: a number out of range.
    """

    bundle: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    allowed_hosts: tuple[str, ...] = ()
    token_file: Path | None = None
    vectors: Path | None = None
    max_k: int = 1_000
    max_candidates: int = 10_000
    max_rows: int = 256
    max_body: int = 2**20
    limit_concurrency: int | None = None
    watch: float = 1.0
    log: Literal["requests", "events"] = "requests"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Valid names in the header Host."""
        if self.allowed_hosts:
            # As the host of an address is compared.
            return tuple(each.strip("[]").lower() for each in self.allowed_hosts)
        is_loopback = self.host == "localhost"
        with suppress(ValueError):  # the text is a name, not an address
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        return (*LOOPBACK, self.host) if is_loopback else ("*",)

    @cached_property
    def token(self) -> str | None:
        """Token required from callers, or None; from a file or the environment, as others can read a command line.

        Raises:
            ValueError: the file cannot be read, or the token is empty.
        """
        token = os.environ.get(_TOKEN)
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"--token-file {self.token_file}: it cannot be read ({error}); write the token into it, as one line"
                ) from None
        if token is not None and not token.strip():
            raise ValueError(
                "the token is empty, so anybody would bear it; write one of 32 random characters or more, or give none"
            )
        return token

    @property
    def is_private(self) -> bool:
        """Whether callers need a token or must be on this machine (all allowed hosts are loopback names)."""
        return self.token is not None or set(self.hosts) <= set(LOOPBACK)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.name != "port" and value < 1:
                raise ValueError(f"{field.name}={value}: must be 1 or more")
        if not self.watch > 0:
            raise ValueError(f"watch={self.watch}: must be greater than 0")

    def to_environment(self) -> None:
        """Puts the settings into this process's environment, which its workers inherit."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        os.environ[_SETTINGS] = json.dumps(values, default=str)

    @classmethod
    def from_environment(cls) -> ServerConfig:
        """Returns the settings that :meth:`to_environment` left."""
        values = json.loads(os.environ[_SETTINGS])
        for name in ("bundle", "token_file", "vectors"):
            if values[name] is not None:
                values[name] = Path(values[name])
        return cls(**values)
