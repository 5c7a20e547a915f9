"""reachable_from(): what a step function leads to: its modules, optimizers, generators, data, and their owners.

It goes through closures, the globals that a function names, methods, attributes and containers, and stops at
objects of libraries, except those that take part in training.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

_MOST_FOLLOWED = (
    1_000  # entries above which a container is data, and its entries are not followed
)
GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
_DEPTH = 6  # attributes and closures that are followed from a root; those of modules do not count
CONTAINERS = (dict, list, set, deque)
_FOLLOWED_OF_LIBRARIES = (
    nn.Module,
    Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    Dataset,
    DataLoader,
    Sampler,
    types.SimpleNamespace,
    argparse.Namespace,
)
_NOT_FOLLOWED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    Tensor,
    *GENERATORS,
)


def reachable_from(*roots: Any) -> Iterator[Any]:
    """Yields each object behind the roots once, but for tuples and plain values."""
    visited: set[int] = set()
    waiting = deque((root, 0) for root in roots)
    while waiting:
        each, depth = waiting.popleft()
        is_plain = each is None or isinstance(each, int | float | str | bytes)
        if is_plain or id(each) in visited or depth > _DEPTH:
            continue
        visited.add(id(each))
        if not isinstance(each, tuple):
            yield each
        depth += not isinstance(each, (*CONTAINERS, tuple, nn.Module))
        waiting.extend((value, depth) for value in _values(each))


def _values(each: Any) -> Iterator[Any]:
    if isinstance(each, (*CONTAINERS, tuple)):
        if len(each) <= _MOST_FOLLOWED:
            yield from each.values() if isinstance(each, dict) else list(each)
    elif isinstance(each, types.FunctionType):
        if not is_library(each.__module__):
            yield from map(content_of, each.__closure__ or ())
            yield from each.__defaults__ or ()
            yield from (each.__kwdefaults__ or {}).values()
            yield from globals_of(each).values()
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, type | types.ModuleType):
        # What the methods of a class name, such as generators; none of this package does.
        module = getattr(each, "__module__", each.__name__)
        if not is_library(module) and not module.startswith("torchrec_ext"):
            yield from vars(each).values()
            yield from getattr(each, "__bases__", ())
    elif is_followed(each):
        yield from (*vars(each).values(), type(each))


def is_followed(each: Any) -> bool:
    """Whether an object's attributes are followed: the user's, and of libraries those that take part in training."""
    if isinstance(each, _NOT_FOLLOWED) or hasattr(each, "__next__"):
        return False
    return hasattr(each, "__dict__") and (
        not is_library(type(each).__module__)
        or isinstance(each, _FOLLOWED_OF_LIBRARIES)
    )


def named_modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of several roots, with their paths."""
    for root in roots:
        yield from root.named_modules()


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals named in a function; none of a library's wrapper around a user's function."""
    variables = function.__globals__
    # By the globals' module, because functools.wraps gives a wrapper the module of the
    # user's function.
    if is_library(variables.get("__name__", "")):
        return {}
    return {
        name: variables[name] for name in _names(function.__code__) if name in variables
    }


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function and its nested ones."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def content_of(cell: types.CellType) -> Any:
    """Returns the content of a closure's cell; None if it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.cache
def is_library(name: str) -> bool:
    """Whether a Python module is installed, and not the user's own."""
    if name == "__main__" or name.startswith("torchrec_ext"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    folders = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
    # A module that is built in has no file.
    return file is None or any(folder in file for folder in folders)
