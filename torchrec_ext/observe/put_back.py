"""Copies of single objects: each function copies one, and returns what puts it back into the same object."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.observe.reached import content_of, globals_of

PutBack = Callable[[], object]


def copy_mapping(mapping: MutableMapping[Any, Any]) -> PutBack:
    """Copies a mapping's entries and their order."""
    return partial(refill, mapping, dict(mapping))


def refill(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> None:
    """Puts entries into a mapping in their order, and leaves right ones alone."""
    # An optimizer and state_dict() go through a mapping in its order, so the order is
    # put back too.
    if [id(key) for key in mapping] != [id(key) for key in values]:
        mapping.clear()
    for key, value in values.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value


def copy_container(container: Any) -> PutBack:
    """Copies the entries of a dict, list, set or deque."""
    if isinstance(container, dict):
        return copy_mapping(container)
    values = list(container)

    def put_back() -> None:
        if isinstance(container, set):
            container.clear()
            container.update(values)
        elif isinstance(container, deque):
            container.clear()
            container.extend(values)
        else:
            container[:] = values

    return put_back


def copy_attributes(attributes: dict[str, Any]) -> PutBack:
    """Copies an object's ``__dict__``."""
    return _copy_names(
        partial(dict, attributes), attributes.__setitem__, attributes.__delitem__
    )


def copy_function(function: types.FunctionType) -> list[PutBack]:
    """Copies the closure of a function and the named globals."""
    variables = function.__globals__
    copies = [
        _copy_names(
            partial(globals_of, function), variables.__setitem__, variables.__delitem__
        )
    ]
    for cell in function.__closure__ or ():
        value = content_of(cell)
        if value is not None:
            copies.append(partial(setattr, cell, "cell_contents", value))
    return copies


def _copy_names(
    present: Callable[[], dict[str, Any]],
    store: Callable[[str, Any], object],
    delete: Callable[[str], object],
) -> PutBack:
    """Copies the values of ``present()`` by name; new names are deleted when they are put back."""
    values = present()

    def put_back() -> None:
        current = present()
        for name in set(current) - set(values):
            delete(name)
        for name, value in values.items():
            if name not in current or current[name] is not value:
                store(name, value)

    return put_back


def copy_tensor(tensor: Tensor) -> PutBack:
    """Copies a tensor's flags and its reference to a gradient; its numbers stay."""
    grad = tensor.grad if tensor.is_leaf else None
    requires_grad = tensor.requires_grad

    def put_back() -> None:
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad

    return put_back


def copy_generator(generator: Any) -> PutBack:
    """Copies the state of a generator of torch, numpy or ``random``."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def copy_global_generators() -> PutBack:
    """Copies the state of the global generators of torch, numpy and ``random``."""
    copies: list[PutBack] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(np.random.set_state, np.random.get_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        copies.append(
            partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        )

    def put_back_all() -> None:
        for put_back in copies:
            put_back()

    return put_back_all
