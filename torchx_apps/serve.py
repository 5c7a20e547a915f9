"""Serve a bundle: `torchx run rec.serve.http --bundle PATH`, or `python -m torchx_apps.serve BUNDLE`.

BUNDLE is a bundle's folder or that of a run which ended with one, a symbolic link to it, or a text file with its path.
Point the link or the file at another bundle, and that one is served from then on, without a lost request. SIGHUP
replaces the workers one by one. SIGTERM or Ctrl-C lets it finish what it has begun.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from torchx_apps.config import parse_options
from torchx_apps.process import exit_code

if TYPE_CHECKING:
    from torchrec_ext.retrieval.server.settings import ServerConfig

_TOKEN = "TORCHREC_EXT_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serves a bundle over HTTP.

    Args:
        bundle: a bundle's or a run's folder, a link to it, or a text file with its path.
        host: address to listen on; 0.0.0.0 for every one of this machine.
        port: 0 for any that is free.
        workers: processes.
        threads: threads of ONNX Runtime in each process.
        token_file: file with the token that callers must bear; else $TORCHREC_EXT_TOKEN, else none.
        allowed_hosts: valid names in the header Host, by commas, as names, addresses, *.example.com, or * for all; by
            default this machine's own on a loopback host, else *.
        vectors: folder of a store with users' vectors, of torchx_apps.embed --tower query.
        max_k: limit, items of an answer.
        max_candidates: limit, ids in each list of a request.
        max_body: limit, bytes of a request.
        limit_concurrency: limit, connections and requests of a worker, beyond which it answers 503; 0 for none.
        watch: seconds between two looks for another bundle.
        log: JSON lines on standard error.
    """

    bundle: Positional[Path]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    token_file: Path | None = None
    allowed_hosts: str | None = None
    vectors: Path | None = None
    max_k: int = 1_000
    max_candidates: int = 10_000
    max_body: int = 2**20
    limit_concurrency: int = 0
    watch: float = 1.0
    log: Literal["requests", "events"] = "requests"


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends it.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when a signal ended it, 1 when it could not begin.
    """
    return exit_code(_serve, argv)


def _serve(argv: Sequence[str] | None) -> int:
    options = parse_options(
        ServeOptions, "torchx_apps.serve", sys.argv[1:] if argv is None else argv
    )
    from torchrec_ext.retrieval.server.run import listen, serve

    settings = _settings(options)
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        # The address is in use, or is none of this machine's.
        raise ValueError(str(error)) from None
    host = node_name(options.host)
    # An address of IPv6 has colons itself.
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    workers = f"{settings.workers} workers" if settings.workers > 1 else "1 worker"

    def announce() -> None:
        print(
            f"serving {options.bundle} at {url}/ with {workers}; Ctrl-C or SIGTERM ends it",
            flush=True,
        )

    try:
        return 0 if serve(settings, listening, announce) else 1
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}: pip install 'torchrec-ext[serve]'"
        ) from None


def _settings(options: ServeOptions) -> ServerConfig:
    from torchrec_ext.retrieval.server.settings import Limits, ServerConfig

    limits = Limits(
        body_bytes=options.max_body,
        k=options.max_k,
        candidates=options.max_candidates,
    )
    return ServerConfig(
        bundle=options.bundle.absolute(),
        workers=options.workers,
        threads=options.threads,
        limits=limits,
        token=_token(options.token_file),
        allowed_hosts=_hosts(options.allowed_hosts, options.host),
        vectors=None if options.vectors is None else options.vectors.absolute(),
        watch_s=options.watch,
        # 0 stands for none.
        limit_concurrency=options.limit_concurrency or None,
        log_requests=options.log == "requests",
    )


def _token(file: Path | None) -> str | None:
    """Reads the token from a file or the environment; every user of the machine could read it on the command line."""
    if file is None:
        return os.environ.get(_TOKEN)
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--token-file {file}: it cannot be read ({error}); write the token into it, as one line"
        ) from None


def _hosts(requested: str | None, listening: str) -> tuple[str, ...]:
    """Returns the given hosts; else this machine's names on a loopback address, against DNS rebinding, or *."""
    if requested is not None:
        return tuple(name.strip() for name in requested.split(","))
    from torchrec_ext.retrieval.server.settings import LOOPBACK

    if listening == "localhost" or _is_loopback(listening):
        return tuple(dict.fromkeys((*LOOPBACK, listening)))
    return ("*",)


def node_name(host: str) -> str:
    """Returns the host for others to reach the service by: this node's name if it listens on all addresses.

    Example:
        >>> node_name("127.0.0.1"), node_name("0.0.0.0") == node_name("::") == socket.gethostname()
        ('127.0.0.1', True)
    """
    try:
        return (
            socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
        )
    except ValueError:
        # The text is a name, not an address.
        return host


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        # The text is a name, not an address.
        return False


if __name__ == "__main__":
    sys.exit(main())
