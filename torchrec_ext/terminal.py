"""terminal(): the terminal on which a job draws a moving line; step_line(): the plain line of a record."""

from __future__ import annotations

import os
import sys
from typing import Any


def terminal() -> Any:
    """Returns stderr if it is a terminal, else None."""
    return sys.stderr if sys.stderr.isatty() else None


def print_to_pipe(text: str) -> None:
    """Prints a text; a reader that has closed the pipe, as `| head` does, ends nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would raise again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def step_line(epoch: int, step: int, total: int | None, figures: str) -> str:
    """Returns the plain line of a record; the total is None if nobody knows it.

    Example:
        >>> step_line(1, 50, 960, "loss 0.3768"), step_line(1, 50, None, "loss 0.3768")
        ('epoch 1, step 50 of 960: loss 0.3768', 'epoch 1, step 50: loss 0.3768')
    """
    of_total = "" if total is None else f" of {total}"
    return f"epoch {epoch}, step {step}{of_total}: {figures}"
