"""terminal(): where a job draws a line that moves, on its own terminal or on that of the `torchx run` that started it.

`torchx run` sends the output of a job to files and copies their lines to its terminal, so the job itself sees no
terminal on stderr. The launcher therefore names its terminal in a variable, and rank 0 draws there; the files get
plain lines, of which the launcher leaves out those that the moving line shows already.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any

TERMINAL = "TORCHREC_EXT_TERMINAL"
ERASE = "\r\x1b[K"  # removes the line that the cursor is on
_MOVING = re.compile(
    r"epoch \d+, step \d+(?: of \d+)?: loss |\w+: [\w ]+, [\d,]+ of [\d,]+ (?:bytes|items)$"
)


class _Terminal(io.TextIOBase):
    """A terminal of another process. Its owner may stop it or close it, and the job must go on."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode())
        return len(text)


def terminal() -> Any:
    """Returns the text file of the terminal to draw on; None if there is none."""
    if sys.stderr.isatty():
        return sys.stderr
    try:
        # It must not become the terminal that this process gets signals from, nor make
        # it wait.
        descriptor = os.open(
            os.environ.get(TERMINAL, ""), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        )
    except OSError:
        return None
    return _Terminal(descriptor)


def print_to_pipe(text: str) -> None:
    """Prints a text; a reader that has closed the pipe, as `| head` does, ends nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would raise again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_on_this_terminal() -> None:
    """Names the terminal of this process to the jobs that it starts, unless its output goes elsewhere."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            os.environ[TERMINAL] = os.ttyname(sys.stderr.fileno())


def step_line(epoch: int, step: int, total: int | None, figures: str) -> str:
    """Returns the plain line of a record; the total is None if nobody knows it.

    Example:
        >>> step_line(1, 50, 960, "loss 0.3768"), step_line(1, 50, None, "loss 0.3768")
        ('epoch 1, step 50 of 960: loss 0.3768', 'epoch 1, step 50: loss 0.3768')
    """
    of_total = "" if total is None else f" of {total}"
    return f"epoch {epoch}, step {step}{of_total}: {figures}"


def is_moving(line: str) -> bool:
    """Whether a moving line shows the same as a plain line: how far a training or a stage is.

    Example:
        >>> is_moving("epoch 1, step 50 of 960: loss 0.3768"), is_moving("export: tables, 3,000 of 9,000 bytes")
        (True, True)
        >>> is_moving("epoch 1, step 96 of 960: auc 0.8138, hr@10 0.1760")
        False
    """
    return _MOVING.match(line.rstrip("\n")) is not None
