"""The training loop of an unchanged script: found where an optimizer steps, and handed over as a step and its batches.

The script runs until an optimizer has made some steps. The ``for`` loop around that call is read from the script's
source. Its body becomes a function of a batch that runs in a copy of the loop's variables, so that the frame of the
script is left alone. What cannot be taken so is refused in one line.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from torchrec_ext.observe.user_lines import owner_of

# Steps of an optimizer after which the loop is taken: what a script makes in its first
# step is there then.
_STEPS = 4
# Names in the loop's function that no script has.
_BATCH = "_batch_of_why_slow"
_LOOP = "_loop_of_why_slow"
_BATCHES = "_batches_of_why_slow"
_NUMBERS = "_numbers_of_why_slow"
# A step that was called from here is an adopted one.
_ADOPT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "adopt", "")


class Loop(NamedTuple):
    """A training loop: a function of a batch, its batches, and its line in the script."""

    step: Callable[[Any], None]
    batches: Iterable[Any]
    line: str


class _Again:
    """Batches of a loop with a new iterable in each epoch."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class _DoneError(BaseException):
    """Ends the script after its loop was diagnosed; no ``except Exception`` of the script stops it."""


def run_script(
    path: str, args: Sequence[str], diagnose: Callable[[Loop], None]
) -> None:
    """Runs a script until its optimizer has made some steps, and diagnoses the loop around them; then ends the script.

    Args:
        path: path of the script.
        args: arguments of the script.
        diagnose: called once, in the middle of the script's step.

    Raises:
        ValueError: there is no such file, it makes too few steps, or its loop cannot be taken.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; name a Python script that trains")
    steps = 0
    is_diagnosed = False
    error: Exception | None = None

    def count_steps_of_diagnosis(*_: object) -> None:
        nonlocal steps, is_diagnosed, error
        if is_diagnosing.locked():
            # The diagnosis makes steps of its own.
            return
        steps += 1
        if steps == _STEPS:
            with is_diagnosing:
                try:
                    diagnose(find_loop(sys._getframe(1)))
                except Exception as caught:
                    # Kept for the caller: the script's own `except` must not have it.
                    error = caught
            is_diagnosed = True
        if is_diagnosed:
            # Again in each further step, if a bare `except` of the script stopped it.
            raise _DoneError

    is_diagnosing = threading.Lock()
    handle = register_optimizer_step_pre_hook(count_steps_of_diagnosis)
    argv = sys.argv
    folder = os.path.dirname(os.path.abspath(path))
    sys.argv = [path, *args]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(path, run_name="__main__")
    except _DoneError:
        pass
    finally:
        handle.remove()
        sys.argv = argv
        sys.path.remove(folder)
    if error is not None:
        raise error
    if not is_diagnosed:
        raise ValueError(
            f"{path}: it ended after {steps} optimizer steps, and {_STEPS} are needed to see its loop"
        )


def find_loop(frame: FrameType | None) -> Loop:
    """Returns the innermost loop over batches in the user's code around a frame; else one over numbers.

    Raises:
        ValueError: there is none, or it cannot be taken.
    """
    over_numbers: Loop | None = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ADOPT):
            raise ValueError(
                "the script's step is adopted, and experiments need the eager one; diagnose before adopt, and measure "
                "what it gained by diagnosis.realised(step)"
            )
        if owner_of(frame.f_code.co_filename) == "user":
            for node in _loops_around(frame):
                loop = _taken(node, frame)
                if not isinstance(loop.batches, range):
                    return loop
                over_numbers = over_numbers or loop
        frame = frame.f_back
    if over_numbers is None:
        raise ValueError(
            "no `for` loop of the script is around its optimizer's step; call "
            "why_slow.step(train_step, batches) in the script"
        )
    return over_numbers


def _loops_around(frame: FrameType) -> list[ast.For]:
    """Returns the loops around the line of a frame in its own code, the innermost first."""
    source = Path(frame.f_code.co_filename).read_text()
    line = frame.f_lineno
    first = frame.f_code.co_firstlineno
    loops = []
    for node in ast.walk(ast.parse(source)):
        # A loop that begins before the function calls it, and is found in another
        # frame.
        if isinstance(node, ast.For) and first <= node.lineno <= line <= (
            node.end_lineno or node.lineno
        ):
            loops.append(node)
    return sorted(loops, key=lambda node: -node.lineno)


def _taken(node: ast.For, frame: FrameType) -> Loop:
    file = frame.f_code.co_filename
    line = f"{os.path.basename(file)}:{node.lineno}"
    # A copy, so that the script's own frame is left alone.
    variables = {**frame.f_globals, **frame.f_locals}
    source, numbered = _unwrapped(node.iter, variables)
    # The loop's own `enumerate` has counted so far.
    variables[_NUMBERS] = itertools.count(_STEPS + 1)
    # Private names, as in self.__step(), are those of the class, which Python 3.10 does not say.
    owner = f".{getattr(frame.f_code, 'co_qualname', '')}".split(".")[-2]
    if not owner.isidentifier():
        owner = "_"
    module = _functions(node, source, numbered, owner)
    made: dict[str, Any] = {}
    leaves = "which cannot be taken out of it; call a function from the loop"
    try:
        exec(compile(module, file, "exec"), variables, made)
    except SyntaxError as error:
        raise ValueError(f"{line}: {error.msg} in the loop's body, {leaves}") from None
    make, step = (vars(made[owner])[name] for name in (_BATCHES, _LOOP))
    if inspect.isgeneratorfunction(step):
        raise ValueError(f"{line}: the loop's body has `yield`, {leaves}")
    batches = make()
    is_name = isinstance(source, ast.Name | ast.Attribute)
    if not isinstance(batches, DataLoader | list | tuple | range) and not (
        is_name and isinstance(batches, Iterator)
    ):
        # A call such as `make_batches()` is made anew for each epoch, as the script
        # does; a named iterator goes on.
        batches = _Again(make)
    step.__code__ = step.__code__.replace(co_name="loop")
    # It takes a batch whole, also one of a single entry.
    step.__signature__ = inspect.Signature()
    return Loop(step, batches, line)


def _unwrapped(iterable: ast.expr, variables: dict[str, Any]) -> tuple[ast.expr, bool]:
    """Returns the iterable inside of ``enumerate`` and tqdm, and whether batches come with a number."""
    numbered = False
    while (
        isinstance(iterable, ast.Call)
        and iterable.args
        and isinstance(iterable.func, ast.Name | ast.Attribute)
    ):
        function = eval(
            compile(ast.Expression(iterable.func), "<loop>", "eval"), variables
        )
        if function is builtins.enumerate and not numbered:
            numbered = True
        elif not str(getattr(function, "__module__", "")).startswith("tqdm"):
            break
        iterable = iterable.args[0]
    return iterable, numbered


def _functions(
    node: ast.For, source: ast.expr, numbered: bool, owner: str
) -> ast.Module:
    """Returns a class of ``def batches(): return SOURCE`` and ``def loop(batch): for TARGET in (batch,): BODY``.

    Variables of the loop are global, so that they live on. A ``return`` in the body, as at the end of a training, ends
    this step alone, as ``break`` does.
    """
    stored: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            stored.add(each.id)
        elif (
            isinstance(each, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler)
            and each.name
        ):
            stored.add(each.name)
    entry = f"(next({_NUMBERS}), {_BATCH})" if numbered else _BATCH
    # A loop over one batch, because the body may have `break` and `continue`.
    module = ast.parse(
        f"class {owner}:\n def {_BATCHES}(): return 0\n def {_LOOP}({_BATCH}):\n  for _ in ({entry},): pass"
    )
    holder: Any = module.body[0]
    batches, function = holder.body
    batches.body[0].value = source
    loop = function.body[0]
    loop.target = node.target
    loop.body = node.body
    if stored:
        function.body.insert(0, ast.Global(sorted(stored)))
    return ast.fix_missing_locations(module)
