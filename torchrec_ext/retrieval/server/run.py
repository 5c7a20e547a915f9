"""serve(): listens on an address, and runs workers by uvicorn until a signal ends it.

SIGHUP replaces the workers one by one, each after its replacement is ready. SIGTERM and SIGINT end the server when the
requests in progress are answered.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable

from torchrec_ext.retrieval.manifest import bundle_folder
from torchrec_ext.retrieval.server.settings import ServerConfig

# Seconds for the replacement of a worker to load its bundle, and for a worker to answer
# its parent.
_PATIENCE_S = 60
_BACKLOG = 2048
_METRICS = "PROMETHEUS_MULTIPROC_DIR"
# Of app.py, which this process need not import.
_APP = "torchrec_ext.retrieval.server.app:create"
_SERVING = "TORCHREC_EXT_SERVING"


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any that is free.

    Raises:
        OSError: the address is in use, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"--host {host} --port {port}: cannot listen ({error}); take another port, or 0 for any "
            "that is free"
        ) from None


def serve(
    settings: ServerConfig, listening: socket.socket, announce: Callable[[], None]
) -> bool:
    """Serves until a signal ends it.

    Args:
        settings: settings of the server.
        listening: see :func:`listen`.
        announce: called when the first worker answers.

    Returns:
        Whether any worker was ready; if not, its own line has said why.

    Raises:
        ValueError: the pointer leads to no bundle.
    """
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    bundle_folder(settings.bundle)
    _ = settings.token  # refused here, in one line
    settings.to_environment()
    os.environ.pop(_SERVING, None)
    ready = threading.Event()

    def wait() -> None:
        _wait_for_an_answer(listening)
        os.environ[_SERVING] = "1"
        ready.set()
        announce()

    with tempfile.TemporaryDirectory(prefix="torchrec_ext-") as metrics:
        os.environ.setdefault(_METRICS, metrics)
        config = uvicorn.Config(
            _APP,
            factory=True,
            workers=settings.workers,
            limit_concurrency=settings.limit_concurrency,
            access_log=False,
            log_level="warning",
            ws="none",
            server_header=False,
            backlog=_BACKLOG,
            timeout_worker_healthcheck=_PATIENCE_S,
        )
        threading.Thread(target=wait, daemon=True).start()
        Multiprocess(config, sockets=[listening]).run()
    return ready.is_set()


def _wait_for_an_answer(listening: socket.socket) -> None:
    """Waits until a worker answers, however long it loads."""
    host, port = listening.getsockname()[:2]
    # Of an address for all, its own loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
            connection.request("GET", "/healthz")
            # Any status: the host need not be an allowed one.
            connection.getresponse().read()
            connection.close()
            return
        time.sleep(0.05)
