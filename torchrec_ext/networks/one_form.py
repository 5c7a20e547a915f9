"""What the networks of a stack have in common: everything but the values of their weights and buffers."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.adopt.checks import check_model

_LONGEST = 200


# What is equal in two networks of one form, by path from the network.
Form = Mapping[str, Any]


def check_networks(networks: Sequence[nn.Module]) -> None:
    """Refuses networks of different forms, or with parts that no stack trains like the network alone.

    Raises:
        ValueError: naming the first difference, or the module.
    """
    # Of one alone nothing would tell a weight that it holds by a second name.
    if len(networks) < 2:
        raise ValueError(f"{len(networks)} networks: a stack has two or more")
    first: Form = {}
    for number, network in enumerate(networks):
        check_model(network)
        for path, module in network.named_modules():
            if isinstance(module, nn.RNNBase):
                kind = type(module).__name__
                rest = f" is {kind}, of which torch.func.vmap has no batched form: write a loop over nn.{kind}Cell"
                raise ValueError(line(path or "the network", rest))
        this = form(network)
        first = first or this
        path = difference(first, this)
        if path:
            rest = (
                f" of network {number} is not that of network 0: a stack needs networks that are equal but for their "
                "weights; train others in one ModuleList"
            )
            raise ValueError(line(path, rest))
    weights = [id(weight) for each in networks for weight in each.parameters()]
    if len(set(weights)) < len(weights):
        raise ValueError(
            "two networks share a weight: that is one network; train them as one module"
        )


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Returns weights and buffers by name."""
    return dict((*network.named_parameters(), *network.named_buffers()))


def form(network: nn.Module) -> Form:
    """Returns what a network is made of but for the values of its weights and buffers."""
    places = {id(module): f"module {path}" for path, module in network.named_modules()}
    places |= {id(each): name for name, each in named_tensors(network).items()}
    parts: dict[str, Any] = {}
    for path, module in network.named_modules():
        parts[path or "the network"] = type(module)
        for name, value in vars(module).items():
            below = f"{path}.{name}".lstrip(".")
            if name in ("_parameters", "_buffers"):
                for own, each in value.items():
                    # One with two names is at the place of its first.
                    what = (_shape(each), places[id(each)]) if each is not None else ()
                    parts[f"{path}.{own}".lstrip(".")] = what
            elif "_hooks" in name and isinstance(value, OrderedDict):
                # Their keys are numbers that torch has counted up.
                parts[below] = [_pickled(each, places) for each in value.values()]
            else:
                parts[below] = _pickled(value, places)
    return parts


def difference(one: Form, other: Form) -> str:
    """Returns the first path at which two forms differ; empty if they are equal."""
    for path in {**one, **other}:
        if one.get(path) != other.get(path):
            return path
    return ""


def line(path: str, rest: str) -> str:
    """Returns a message of at most 200 characters; the end of a path says most."""
    room = max(_LONGEST - len(rest), 4)
    return (path if len(path) <= room else f"...{path[3 - room :]}") + rest


class _Pickler(pickle.Pickler):
    """Pickles a value, of a module its place in the network, and of what is no data its identity."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, str]) -> None:
        super().__init__(file)
        # Without a memo, by which strings that are equal and not the same would differ.
        self.fast = True
        self._places = places

    def persistent_id(self, value: Any) -> Any:
        """Returns what stands for a value; None if it is pickled."""
        if isinstance(value, nn.Module | FunctionType | type):
            return self._places.get(id(value), id(value))
        if isinstance(value, MethodType):
            # Pickled, it is its name alone.
            return "method", value.__func__, value.__self__
        if isinstance(value, set | frozenset):
            # Equal ones may be in another order, as a copy is.
            return type(value), sorted(_pickled(each, self._places) for each in value)
        if isinstance(value, Tensor):
            if id(value) in self._places:
                raise ValueError("a weight by a second name, which no step would train")
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return _shape(value), numbers.numpy().tobytes()
        return None


def _pickled(value: Any, places: Mapping[int, str]) -> Any:
    """Returns a value as bytes; its identity if it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, places).dump(value)
    except Exception:
        # Any class may refuse in its own way.
        return id(value)
    return file.getvalue()


def _shape(tensor: Tensor) -> str:
    trains = tensor.requires_grad
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device} {trains}"
