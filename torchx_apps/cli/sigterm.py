"""What SIGTERM does to a process of a job. Needs no torch, whose import takes seconds in which the signal may come.

Where Slurm stops a job, each process receives the signal from the step and once more from srun, and a rank of torchrun
also from its agent, all within milliseconds. In a container a process may be process 1, for which there are no default
handlers: it ignores a signal that it does not handle.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torchx_apps.cli.link_watch import children_of

SAME_S = 5.0
ENDED = 128 + signal.SIGTERM


def once(
    first: Callable[[], None], later: Callable[[], None]
) -> Callable[[int, FrameType | None], None]:
    """Returns a signal handler that treats all signals within five seconds as one.

    Args:
        first: called at the first signal.
        later: called at each signal that comes five seconds after the first or later.

    Example:
        >>> handle = once(lambda: print("first"), lambda: print("later"))
        >>> handle(signal.SIGTERM, None)
        first
        >>> handle(signal.SIGTERM, None)
    """
    since: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since
        now = time.monotonic()
        if since is None:
            since = now
            first()
        elif now - since >= SAME_S:
            later()

    return handle


@contextmanager
def ending_the_block() -> Iterator[None]:
    """Makes SIGTERM end the block like Ctrl-C, to remove unfinished files, and then the process with 143.

    A rank beside others keeps the default handler where it has one: it may wait in a collective, and Python handles no
    signal before that returns. Python handles signals in the first thread alone; in another one the block changes
    nothing.
    """
    if threading.current_thread() is not threading.main_thread() or (
        "RANK" in os.environ and os.getpid() != 1
    ):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(ENDED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def at_hangup_too() -> None:
    """Makes SIGHUP, sent when a terminal closes, act like SIGTERM here; under nohup it stays ignored."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(
            signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM)
        )


def end_where_no_child_runs() -> None:
    """Makes SIGTERM end this process at once with 143 as long as it has no child, whatever it waits for.

    A handler in Python runs only when the current call of the first thread returns, which takes over a minute where a
    node's agent asks for a host that does not answer. Here a thread waits for the signal instead; the interpreter
    writes each signal that has a Python handler to a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1)[0] not in (
            signal.SIGTERM,
            signal.SIGHUP,
        ) or children_of(os.getpid()):
            pass
        print(
            "stopped by SIGTERM before any rank was started",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ENDED)

    # On other systems children cannot be counted.
    if sys.platform == "linux":
        threading.Thread(target=watch, daemon=True, name="sigterm-watch").start()


def end_now() -> None:
    """Ends this process like an unhandled SIGTERM; process 1 ignores that and exits with 143."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(ENDED)
