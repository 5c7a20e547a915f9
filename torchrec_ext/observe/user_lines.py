"""Which line of the user's code: of a call, of an error, of a sampled stack, and of a module.

user_line(), raising_line(): the innermost call that is neither torch's nor this package's, now or in an exception.

lines_of(): the lines of a sampled stack, told apart by whose code a file is.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn

_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[1]}/"
_OPTIMIZERS = f"{_TORCH}optim"
_AUTOGRAD = f"{_TORCH}autograd"
# A job's own code may be measured too: only what measures is no user of a step.
_MEASURING = (f"{_PACKAGE}diagnose/", f"{_PACKAGE}observe/")
# A step's stack ends below these, which call it: else a program that calls why_slow
# would be the step's own line.
_CALLERS = (f"{_PACKAGE}diagnose/loop.py",)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
UNKNOWN = "a line that torch does not name"
_PLACE = 64  # characters of a place with its text
_LEAST_TEXT = 24  # characters of the text beside a long path


def user_line() -> str:
    """Returns ``file:line`` of the innermost call outside of torch and this package."""
    frame = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return UNKNOWN if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str:
    """Returns ``file:line`` of the innermost user's line in an exception's traceback.

    Where there is none, as in a job on this package's models, the innermost line of the package's own.
    """
    line = UNKNOWN
    of_package = UNKNOWN
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users_file(frame.filename):
            line = f"{frame.filename}:{frame.lineno}"
        elif frame.filename.startswith(_PACKAGE):
            of_package = f"{frame.filename}:{frame.lineno}"
    return of_package if line == UNKNOWN else line


def with_text(place: str) -> str:
    """Returns ``file:line (text)`` of a place ``file:line``, short enough for a message of 200 characters.

    A library's file is named from its package on, beside a long text by its folder alone, and then the text is cut.
    """
    file, _, number = place.rpartition(":")
    if not number.isdigit():
        return place
    text = linecache.getline(file, int(number)).strip()
    place = re.sub(r".*/(site|dist)-packages/", "", place)
    if len(place) + len(text) > _PLACE and place.count("/") > 2:
        place = ".../" + "/".join(place.split("/")[-2:])
    room = max(_PLACE - len(place), _LEAST_TEXT)
    if len(text) > room:
        text = f"{text[: room - 3]}..."
    return f"{place} ({text})" if text else place


def module_line(model: nn.Module, path: str) -> str:
    """Names a submodule or parameter by its path, with its line in the user's class if that is known."""
    parent, _, name = path.rpartition(".")
    while parent and type(model.get_submodule(parent)).__module__.startswith("torch."):
        parent, _, name = parent.rpartition(".")
    try:
        kind = type(model.get_submodule(parent))
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return f"'{path}'"
    if kind.__module__.startswith(("torch.", "torchrec.")):
        return f"'{path}'"
    pattern = re.compile(rf"self\.{re.escape(name)}\b")
    # The line of the class itself, if it sets the attribute by another name.
    offset = next(
        (index for index, line in enumerate(lines) if pattern.search(line)), 0
    )
    return f"'{path}' ({file}:{first + offset})"


@functools.cache
def owner_of(file: str) -> str:
    """Returns whose code a file is: ``hidden``, ``library`` or ``user``, or torch's ``autograd`` or ``optimizer``.

    Schedulers of the rate lie in torch's folder of optimizers, and count as these.
    """
    # Both are torch's own folders, so they are asked for before torch itself.
    if file.startswith(_OPTIMIZERS):
        return "optimizer"
    if file.startswith(_AUTOGRAD):
        return "autograd"
    if file.startswith((_TORCH, *_MEASURING, "<")):
        return "hidden"
    if "site-packages" in file or "dist-packages" in file:
        return "library"
    return "hidden" if file.startswith(_STANDARD_LIBRARY) else "user"


def is_users_file(file: str) -> bool:
    """Whether a file is neither torch's, nor of Python's own library, nor this package's."""
    is_of_somebody = owner_of(file) in ("library", "user")
    return is_of_somebody and not file.startswith(_PACKAGE)


class SampledLine(NamedTuple):
    """A line of code, such as ``train.py:31 in step``, and its text."""

    name: str
    text: str = ""


Stack = Sequence[tuple[CodeType, int]]  # code and line of the innermost call first


def stack_of(frame: FrameType | None) -> Stack:
    """Returns the calls of a step down to a frame; of those on one line, the outermost."""
    stack: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        code = frame.f_code
        # None where a call begins or ends
        number = frame.f_lineno or code.co_firstlineno
        # A generator on its caller's line would be a second row of the same text.
        if (
            stack
            and stack[-1][1] == number
            and stack[-1][0].co_filename == code.co_filename
        ):
            stack.pop()
        stack.append((code, number))
        frame = frame.f_back
    return stack


def lines_of(stack: Stack) -> tuple[str, SampledLine]:
    """Returns the innermost line outside of torch, and the user's own line; ``backward``, ``optimizer`` below these."""
    line = ""
    for code, number in stack:
        owner = owner_of(code.co_filename)
        if owner == "optimizer":
            return line or "optimizer", SampledLine("optimizer")
        if owner == "autograd" and code.co_name in ("backward", "grad"):
            return line or "backward", SampledLine("backward")
        name = f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}"
        if owner in ("library", "user") and not line:
            line = name
        if owner == "user":
            return line, SampledLine(
                name, linecache.getline(code.co_filename, number).strip()[:100]
            )
    return line or "step", SampledLine(line or "step")


def described(error: BaseException) -> str:
    """Returns an error's kind, its first line, and where it was raised, see :func:`raising_line`."""
    text = f"{type(error).__name__}: {first_line(error)[:300]}"
    line = raising_line(error)
    return text if line == UNKNOWN else f"{text} ({os.path.basename(line)})"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text; torch's texts may be a page long."""
    return next(iter(str(error).strip().splitlines()), "")
