"""Serve a bundle: `torchx run rec.serve.http --bundle PATH`, or `python -m torchx_apps.serve BUNDLE`.

BUNDLE is a bundle's folder or that of a run which ended with one, a symbolic link to it, or a text file with its path.
Point the link or the file at another bundle, and that one is served from then on, without a lost request. SIGHUP
replaces the workers one by one. SIGTERM or Ctrl-C lets it finish what it has begun.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchx_apps.cli.command_line import FlagParser
from torchx_apps.cli.process import hand_over, too_many

if TYPE_CHECKING:
    from torchrec_ext.retrieval.server.settings import ServerConfig

_TOKEN = "TORCHREC_EXT_TOKEN"


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends it.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when a signal ended it, 1 when it could not begin.
    """
    options = _parser().parse_args(argv)
    try:
        return _serve(options)
    # An address in use is an OSError.
    except (ValueError, OSError) as error:
        hand_over(str(error))
        return 1


def _serve(options: argparse.Namespace) -> int:
    from torchrec_ext.retrieval.server.run import listen, serve

    settings = _settings(options)
    refusal = too_many(settings.workers, name="workers")
    if refusal:
        raise ValueError(refusal)
    listening = listen(options.host, options.port)
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


def _settings(options: argparse.Namespace) -> ServerConfig:
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


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="python -m torchx_apps.serve", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "bundle",
        type=Path,
        help="a bundle's or a run's folder, a link to it, or a text file with its path",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for every one of this machine",
    )
    parser.add_numbers(
        {
            "--port": (8000, "0 for any that is free"),
            "--workers": (1, "processes"),
            "--threads": (1, "threads of ONNX Runtime in each process"),
        }
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token that callers must bear; else ${_TOKEN}, else none",
    )
    hosts = "what the header Host may name, by commas: names, addresses, *.example.com, or * for all; by default this"
    parser.add_argument(
        "--allowed-hosts", help=f"{hosts} machine's own on a loopback --host, else *"
    )
    parser.add_argument(
        "--vectors",
        type=Path,
        help="folder of a store with users' vectors, of rec.embed --tower query",
    )
    parser.add_numbers(
        {
            "--max-k": (1_000, "limit: items of an answer"),
            "--max-candidates": (10_000, "limit: ids in each list of a request"),
            "--max-body": (2**20, "limit: bytes of a request"),
            "--limit-concurrency": (
                0,
                "limit: connections and requests of a worker, beyond which it answers 503; 0 for none",
            ),
            "--watch": (1.0, "seconds between two looks for another bundle"),
        }
    )
    parser.add_argument(
        "--log",
        choices=["requests", "events"],
        default="requests",
        help="JSON lines on standard error",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
