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
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

MOST_FOLLOWED = (
    1_000  # entries above which a container is data, and its entries are not followed
)
GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
_DEPTH = 6  # attributes and closures that are followed from a root; those of modules do not count
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)
CONTAINERS = (dict, list, set, deque)
_TRAINING = (
    nn.Module,
    Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    Dataset,
    DataLoader,
    Sampler,
)
# the standard library's plain objects
_RECORDS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    property,
    classmethod,
    staticmethod,
)


def reachable_from(
    *roots: Any, values: Callable[[Any], Iterator[Any]] | None = None
) -> Iterator[Any]:
    """Yields each object behind the roots once, but for tuples and plain values.

    Args:
        roots: where to begin.
        values: returns the values of an object that are followed; all by default.
    """
    visited: set[int] = set()
    waiting = deque((root, 0) for root in roots)
    while waiting:
        each, depth = waiting.popleft()
        if id(each) in visited or depth > _DEPTH or isinstance(each, _PLAIN):
            continue
        visited.add(id(each))
        if not isinstance(each, tuple):
            yield each
        depth += not isinstance(each, (*CONTAINERS, tuple, nn.Module))
        for value in (values or _all_values)(each):
            waiting.append((value, depth))


def own_values(each: Any) -> Iterator[Any]:
    """Yields the values of an object itself: not those of its class, nor those that its methods name."""
    if isinstance(each, (*CONTAINERS, tuple)):
        if len(each) <= MOST_FOLLOWED:
            yield from each.values() if isinstance(each, dict) else list(each)
    elif isinstance(each, DistributedDataParallel):
        yield each.module
    elif is_followed(each):
        yield from list(vars(each).values())
        # However many there are.
        if isinstance(each, nn.Module):
            yield from each.children()
        elif isinstance(each, Optimizer):
            yield from list(each.state.values())


def _all_values(each: Any) -> Iterator[Any]:
    if isinstance(each, types.FunctionType):
        if not is_library(each.__module__):
            yield from map(content_of, each.__closure__ or ())
            yield from each.__defaults__ or ()
            yield from (each.__kwdefaults__ or {}).values()
            yield from globals_of(each).values()
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, classmethod | staticmethod):
        yield each.__func__
    elif isinstance(each, property):
        yield each.fget
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, types.ModuleType):
        if _is_users(each.__name__):
            for name, value in vars(each).items():
                if not name.startswith("__") and not isinstance(value, _CODE):
                    yield value
    elif isinstance(each, type):
        if _is_users(each.__module__):
            yield from vars(each).values()
            yield from each.__bases__
    else:
        yield from own_values(each)
        yield type(each)


def is_followed(each: Any) -> bool:
    """Whether an object's attributes are followed: the user's, and of libraries those that take part in training."""
    if isinstance(each, (*_CODE, Tensor, *GENERATORS)) or hasattr(each, "__next__"):
        return False
    return hasattr(each, "__dict__") and (
        not is_library(type(each).__module__)
        or isinstance(each, (*_TRAINING, *_RECORDS))
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


def _is_users(name: str) -> bool:
    """Whether a Python module is the user's own, and not this package's either."""
    return not is_library(name) and not name.startswith("torchrec_ext")
