"""Serve a bundle: `torchx run rec.serve.http --bundle PATH`, or `python -m torchx_apps.serve BUNDLE`.

BUNDLE is a bundle's folder or that of a run which ended with one, a symbolic link to it, or a text file with its path.
Point the link or the file at another bundle, and that one is served from then on, without a lost request; SIGHUP makes
the server look at once. SIGTERM or Ctrl-C lets it finish what it has begun.
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
from torchx_apps.cli.redis_address import add_password_file, with_password

if TYPE_CHECKING:
    from torchrec_ext.retrieval.server.settings import ServerConfig

_TOKEN = "TORCHREC_EXT_TOKEN"
_SHOWN = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends it.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when a signal ended it and all requests were answered, 1 when some were not, or when it could not begin.
    """
    options = _parser().parse_args(argv)
    try:
        return _serve(options)
    # An address in use is an OSError.
    except (ValueError, OSError) as error:
        hand_over(str(error))
        return 1


def _serve(options: argparse.Namespace) -> int:
    try:
        from torchrec_ext.retrieval.server.certificate import Target, certify, choices
        from torchrec_ext.retrieval.server.supervisor import Supervisor, listen, say
        from torchrec_ext.retrieval.server.telemetry import Log
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}: pip install 'torchrec-ext[serve]'"
        ) from None
    settings = _settings(options)
    refusal = too_many(settings.workers, name="workers")
    if refusal:
        raise ValueError(refusal)
    if options.p99 is not None or options.qps is not None:
        if options.p99 is None or options.qps is None:
            raise ValueError(
                "--p99 and --qps: give both, such as --p99 5ms --qps 300, or none"
            )
        target = Target.parse(options.p99, options.qps)
        stages = [options.stage] if options.stage else ["exact", "dot"]
        bundles = [settings.bundle, *(bundle.absolute() for bundle in options.also)]
        cores = len(os.sched_getaffinity(0))
        # A choice with more workers than memory has room for is not measured.
        fitting = [
            each
            for each in choices(settings, bundles, stages, cores)
            if not too_many(each.workers)
        ]
        settings = certify(fitting, target, say, _requests(options.requests))
    elif options.also or options.requests:
        raise ValueError(
            "--also and --requests: these choose a bundle by --p99 and --qps; give both, or leave them out"
        )
    listening = listen(options.host, options.port)
    host = node_name(options.host)
    # An address of IPv6 has colons itself.
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    workers = f"{settings.workers} workers" if settings.workers > 1 else "1 worker"

    def announce(digest: str) -> None:
        say(
            f"serving bundle {digest[:_SHOWN]} at {url}/ with {workers}; Ctrl-C or SIGTERM ends it"
        )

    return Supervisor(settings, listening, Log()).run(announce)


def _settings(options: argparse.Namespace) -> ServerConfig:
    from torchrec_ext.retrieval.server.settings import Limits, ServerConfig

    limits = Limits(
        body_bytes=options.max_body,
        k=options.max_k,
        candidates=options.max_candidates,
        queue=options.queue,
        time_ms=options.time_ms,
        header_bytes=options.max_header,
        connections=options.max_connections,
    )
    return ServerConfig(
        bundle=options.bundle.absolute(),
        workers=options.workers,
        threads=options.threads,
        limits=limits,
        retrieve=options.retrieve,
        stage=options.stage or "exact",
        compile=options.compile,
        max_batch=options.max_batch,
        max_wait_ms=options.max_wait_ms,
        token=_token(options.token_file),
        allowed_hosts=_hosts(options.allowed_hosts, options.host),
        vectors=None if options.vectors is None else options.vectors.absolute(),
        redis=with_password(options.redis, options.redis_password_file),
        watch_s=options.watch,
        linger_s=options.linger,
        drain_s=options.drain,
        hang_s=options.hang,
        start_s=options.start,
        log_requests=options.log == "requests",
    )


def _requests(file: Path | None) -> list[bytes]:
    """Reads bodies of requests, one a line."""
    from torchrec_ext.retrieval.server.load import http_request

    if file is None:
        return []
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--requests {file}: it cannot be read ({error})") from None
    if not lines:
        raise ValueError(
            f"--requests {file}: it is empty; write a JSON body of /v1/recommend on each line"
        )
    return [http_request("POST", "/v1/recommend", line) for line in lines]


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
            "--threads": (1, "threads of torch in each process"),
        }
    )
    certificate = "serve by the first choice of bundle, --stage and --workers that was measured to hold this"
    parser.add_argument(
        "--p99",
        help=f"99th percentile of a request's time, such as 5ms: {certificate}, or end with 1",
    )
    parser.add_argument(
        "--qps", type=float, help="requests a second at which --p99 must hold"
    )
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        help="with --p99: another bundle of the model, such as of --store fp16 or --index hnsw, to choose from",
    )
    parser.add_argument(
        "--requests",
        type=Path,
        help="with --p99: file with a JSON body of /v1/recommend a line; else the bundle's users",
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
    parser.add_argument(
        "--redis",
        help="address of a Redis with users' vectors, of rec.embed --redis (redis://host:6379/0)",
    )
    add_password_file(parser)
    parser.add_argument(
        "--retrieve",
        type=int,
        default=100,
        help="items that the first stage hands to the top NN",
    )
    stages = "how it finds them: by the top NN itself over the whole catalogue, or by a product of the towers' outputs"
    parser.add_argument(
        "--stage",
        choices=["exact", "dot", "cosine"],
        help=f"{stages}; exact by default",
    )
    parser.add_argument(
        "--compile",
        choices=["auto", "off"],
        default="off",
        help="the top NN; pays for many candidates a request",
    )
    linger = "seconds after SIGTERM in which it still answers, while /readyz says 503 and connections are closed"
    parser.add_numbers(
        {
            "--max-k": (1_000, "limit: items of an answer"),
            "--max-candidates": (10_000, "limit: ids in each list of a request"),
            "--max-body": (2**20, "limit: bytes of a request"),
            "--max-header": (2**15, "limit: bytes of a request's address and headers"),
            "--max-connections": (
                1_000,
                "limit: connections of a worker; one without a request makes room",
            ),
            "--queue": (256, "limit: requests that may wait in a worker"),
            "--time-ms": (2_000.0, "limit: milliseconds from request to answer"),
            "--max-batch": (32, "requests that a worker answers together"),
            "--max-wait-ms": (0.0, "how long a request waits for company"),
            "--watch": (1.0, "seconds between two looks for another bundle"),
            "--linger": (0.0, linger),
            "--drain": (1.0, "seconds for which new requests get 503 before it ends"),
            "--hang": (30.0, "seconds in silence after which a worker is replaced"),
            "--start": (600.0, "seconds to begin in, after which a worker is replaced"),
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
