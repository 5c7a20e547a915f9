"""Ends a node that can no longer reach the others, where torchrun would wait on a dead connection.

torchrun's agent polls the store of the first node by calls that no timeout ends. Where the network between them is cut,
nobody closes the connection, and the agent of another node hangs in such a call although its own ranks have long given
up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_POLL_S = 2.0
_CONNECT_S = 5.0
AFTER_S = 10.0


class LinkWatch:
    """Says when a node is lost: it has had ranks, has none now, and has not reached the others for a while.

    A node is not lost before its first ranks, since nodes start minutes apart, nor while it has ranks, which end by
    their own timeouts.

    Args:
        ranks: returns the number of processes that this node runs.
        reaches: returns whether the other nodes can be reached.
        after_s: seconds without reaching the others after which the node is lost.
    """

    def __init__(
        self,
        ranks: Callable[[], int],
        reaches: Callable[[], bool],
        after_s: float = AFTER_S,
    ) -> None:
        self._ranks = ranks
        self._reaches = reaches
        self._after_s = after_s
        self._had_ranks = False
        self._since: float | None = None

    def lost(self, now: float) -> bool:
        """Whether the node is lost at ``now``, in seconds of any clock; asked every few seconds."""
        running = self._ranks() > 0
        self._had_ranks = self._had_ranks or running
        if running or not self._had_ranks or self._reaches():
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._after_s


def end_when_lost(endpoint: str, end: Callable[[str], None]) -> None:
    """Starts a thread to call ``end`` with a message when this node is lost.

    Args:
        endpoint: HOST:PORT where the nodes meet.
        end: ends the process.
    """
    host, _, port = endpoint.rpartition(":")
    watch = LinkWatch(
        lambda: children_of(os.getpid()), lambda: _connects(host, int(port))
    )

    def run() -> None:
        while not watch.lost(time.monotonic()):
            time.sleep(_POLL_S)
        end(
            f"this node has no rank left and cannot reach {endpoint}, where the nodes meet: that host or the network "
            "in between is gone; start the job again with --resume auto when it is back"
        )

    threading.Thread(target=run, daemon=True, name="link-watch").start()


def children_of(parent: int, processes: Path = Path("/proc")) -> int:
    """Returns the number of a process's running child processes; 0 if that cannot be seen."""
    count = 0
    for stat in processes.glob("[0-9]*/stat"):
        # The process has ended meanwhile.
        with suppress(OSError, ValueError):
            state, parent_id = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent_id) == parent and state not in ("Z", "X"):
                count += 1
    return count


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
