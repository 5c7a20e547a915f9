"""Serve a bundle: `torchx run rec.serve.http --bundle PATH`, or `python -m torchx_apps.serve BUNDLE`.

BUNDLE is a bundle's folder or that of a run which ended with one, a symbolic link to it, or a text file with its path.
Point the link or the file at another bundle, and that one is served from then on, without a lost request. SIGHUP
replaces the workers one by one. SIGTERM or Ctrl-C lets it finish what it has begun.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from torchrec_ext.retrieval.server.settings import ServerConfig
from torchx_apps.config import parse_options
from torchx_apps.process import exit_code


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServerConfig):
    """Serves a bundle over HTTP."""

    bundle: Positional[Path]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal ends it.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when a signal ended it, 1 when it could not begin.
    """
    return exit_code(_serve, argv)


def _serve(argv: Sequence[str] | None) -> int:
    options = parse_options(ServeOptions, "torchx_apps.serve", argv)
    from torchrec_ext.retrieval.server.run import listen, serve

    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        # The address is in use, or is none of this machine's.
        raise ValueError(str(error)) from None
    # This node's name if it listens on all addresses.
    everywhere = options.host in ("0.0.0.0", "::")
    host = socket.gethostname() if everywhere else options.host
    # An address of IPv6 has colons itself.
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    workers = f"{options.workers} workers" if options.workers > 1 else "1 worker"

    def announce() -> None:
        print(
            f"serving {options.bundle} at {url}/ with {workers}; Ctrl-C or SIGTERM ends it",
            flush=True,
        )

    try:
        return 0 if serve(options, listening, announce) else 1
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}: pip install 'torchrec-ext[serve]'"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
