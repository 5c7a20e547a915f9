"""killed_everywhere() kills a function, in its own process, before each change that it makes to the file system."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.contracts import _CONTEXT

# As Python's audit events call them, before they happen; the last is the look-up of a C
# function such as renameat2.
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "ctypes.dlsym")


def _until(last: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    left = last

    def kill(event: str, _: Any) -> None:
        nonlocal left
        if event in _CHANGES:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    function(*args)


def killed_everywhere(
    function: Callable[..., Any], *args: Any, changes: int = 50
) -> Iterator[bool]:
    """Kills ``function(*args)`` before its first change, then before its second one, until it comes to its end.

    Args:
        function: of a module, for a process imports it.
        args: to call it with; the caller puts the folder back before it asks for the next one.
        changes: more than these are an error.

    Yields:
        Whether it came to its end, with which the last one ends.
    """
    for last in range(changes):
        process = _CONTEXT.Process(
            target=_until, args=(last, function, args), daemon=True
        )
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        yield process.exitcode == 0
        if process.exitcode == 0:
            return
    raise AssertionError(f"no end after {changes} changes")
