"""print_to_pipe(): prints to a reader that may be gone."""

from __future__ import annotations

import os
import sys


def print_to_pipe(text: str) -> None:
    """Prints a text; a reader that has closed the pipe, as `| head` does, ends nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would raise again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
