"""How a process of a job begins and ends: within memory, with its parent, with one message and an exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence

from torchrec_ext.drawing.terminal import print_to_pipe
from torchx_apps.cli.errors import describe_error, would_come_again, write_reply
from torchx_apps.cli.sigterm import ending_the_block

# Exit code of a rank, and of the agent, whose user has made a mistake: schedulers need
# not start such a job again.
MISTAKE = 200
# Variable with a file that the agent makes beside that exit code: of several nodes srun
# returns the code of any.
MISTAKE_FILE = "TORCHREC_EXT_MISTAKE_FILE"
_PR_SET_PDEATHSIG = 1
# Private memory of a rank that has imported torch and torchrec, before it has data or a
# model (measured: 265 MiB).
_RANK_BYTES = 256 << 20


def exit_code(
    app: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None
) -> int:
    """Runs an app, as a rank of torchrun or by itself, and turns whatever happens into an exit code and one message.

    Args:
        app: function that takes the flags and returns an exit code.
        argv: the flags; the command line when None.

    Returns:
        The app's exit code, 1 after an error, 130 after Ctrl-C; 200 where a rank of torchrun meets a wrong value, which
        another attempt would meet too. SIGTERM ends the process with 143.
    """
    try:
        with ending_the_block():
            return (
                _as_a_rank(app, argv)
                if "TORCHELASTIC_RUN_ID" in os.environ
                else app(argv)
            )
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except Exception as error:
        # The agent prints a rank's error; printed here too, it would appear once per
        # rank. An app that TorchX starts by itself has no agent, and writes its reply
        # itself.
        if not (
            "TORCHELASTIC_RUN_ID" in os.environ
            and os.environ.get("TORCHELASTIC_ERROR_FILE")
        ):
            hand_over(describe_error(error))
        return (
            MISTAKE
            if "TORCHELASTIC_RUN_ID" in os.environ and would_come_again(error)
            else 1
        )


def _as_a_rank(
    app: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None
) -> int:
    # Before torch is imported, which takes seconds. A rank that is started by hand may
    # outlive its shell.
    die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import record

    from torchx_apps.cli.rank_errors import RankErrorHandler

    return record(app, RankErrorHandler())(argv) or 0


def hand_over(error: str) -> None:
    """Writes the error to the scheduler's reply file, or to the console if there is none."""
    if not write_reply(error.splitlines()[-1], error):
        print(error, file=sys.stderr, flush=True)


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


def too_many(processes: int, memory: int | None = None, *, name: str = "ranks") -> str:
    """Refuses more processes than this machine's memory has room for: returns the message, or nothing if they fit.

    Without this check -j 1x99999 starts as many interpreters, and the machine answers nobody for minutes.

    Args:
        processes: number of processes that would be started here, each of which imports torch.
        memory: bytes of memory; by default that of this machine, or of this process's container.
        name: what the message calls them.

    Example:
        >>> too_many(99_999, memory=24 << 30)[:83]
        '99999 ranks on one machine: they need 25,000 GiB before they read any data, and it '
        >>> too_many(2, memory=24 << 30)
        ''
    """
    memory = _memory() if memory is None else memory
    if processes * _RANK_BYTES <= memory:
        return ""
    required = processes * _RANK_BYTES / 2**30
    available = memory / 2**30
    return (
        f"{processes} {name} on one machine: they need {required:,.0f} GiB before they read any data, and it has "
        f"{available:,.0f} GiB, enough for {memory // _RANK_BYTES}; start fewer"
    )


def _memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # A container has a limit of its own.
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(physical, int(file.read()))
    except (OSError, ValueError):
        # There is no limit, or it is "max".
        return physical
