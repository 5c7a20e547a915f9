"""How a process of a job ends: one message and an exit code for an error, 143 after SIGTERM. Imports no torch."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torchrec_ext.terminal import print_to_pipe

# Signals within these seconds are one: where Slurm stops a job, a rank receives it from
# the step, from srun and from torchrun.
SAME_S = 5.0
STOPPED = 128 + signal.SIGTERM
_OURS = {"torchrec_ext", "torchx_apps"}
_STDLIB = sysconfig.get_path("stdlib")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
)
_PATIENCE_S = 3.0
_PR_SET_PDEATHSIG = 1


def exit_code(
    app: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None
) -> int:
    """Runs an app, as a rank of torchrun or by itself, and turns whatever happens into an exit code and one message.

    Args:
        app: function that takes the flags and returns an exit code.
        argv: the flags; the command line when None.

    Returns:
        The app's exit code, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM, by when a training has saved.
    """
    if _is_rank():
        # A rank would outlive a torchrun that is killed.
        die_with_parent()
        if not faulthandler.is_enabled():
            faulthandler.enable()
    try:
        with ending_the_block():
            return app(argv)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except Exception as error:
        # Without an import of the guards nothing can have raised theirs.
        guards = sys.modules.get("torchrec_ext.train.guards")
        if guards is not None and isinstance(error, guards.RunStoppedError):
            say_once(str(error))
            return STOPPED
        record_error(error)
        return 1


def record_error(error: BaseException) -> None:
    """Writes an error into the file that torchrun reads and prints at its end; by itself, to the console."""
    if lost_a_peer(error):
        # Another rank failed first and this one only noticed. torchrun reports the
        # first rank to *exit*: this pause lets the rank with the cause exit first.
        time.sleep(_PATIENCE_S)
    message = describe_error(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not (_is_rank() and path):
        print(message, file=sys.stderr, flush=True)
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    summary = message.splitlines()[-1]
    # In one move: TorchX reads the file every second, and half a JSON document ends it.
    part = Path(f"{path}.part")
    part.write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))
    part.replace(path)


def _is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def describe_error(error: BaseException) -> str:
    """Returns the text of an error, with a traceback unless it is the user's mistake.

    Example:
        >>> print(describe_error(ValueError("loader.batch_size is 0; it must be at least 1")))
        loader.batch_size is 0; it must be at least 1
    """
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    if is_users_mistake(error) and os.environ.get("LOGLEVEL", "").upper() != "DEBUG":
        # An error without a message would print as an empty line.
        return f"{who}{str(error) or type(error).__name__}"
    trace = "".join(
        traceback.format_exception(type(error), error, error.__traceback__)
    ).rstrip()
    head, _, last = trace.rpartition("\n")
    return f"{head}\n{who}{last}" if head else f"{who}{last}"


def is_users_mistake(error: BaseException) -> bool:
    """Whether the user can correct the error: a ValueError or a missing file, raised by this package or by user code.

    A ValueError from deep inside a library is taken for a bug of this package, and keeps its traceback.
    """
    if not isinstance(error, (ValueError, FileNotFoundError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return True
    module = str(frames[-1].f_globals.get("__name__", ""))
    file = frames[-1].f_code.co_filename
    library = (
        "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)
    )
    return module.split(".")[0] in _OURS or not library


def lost_a_peer(error: BaseException) -> bool:
    """Whether this rank failed only because it lost the connection to another rank.

    Example:
        >>> lost_a_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
        True
        >>> lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    # Without an import of torch.distributed nothing can have raised its error.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _LOST_PEER
    )


def say_once(text: str) -> int:
    """Prints a text on the first rank, and returns the exit code 0."""
    if os.environ.get("RANK", "0") == "0":
        print_to_pipe(text)
    return 0


def die_with_parent() -> None:
    """Asks Linux to kill this process the moment its parent dies; does nothing on other systems.

    Example:
        >>> die_with_parent()
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
        raise SystemExit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def end_now() -> None:
    """Ends this process like an unhandled SIGTERM; process 1 ignores that and exits with 143."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(STOPPED)


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
