"""What the networks of a stack have in common: everything but the values of their weights and buffers.

check_networks(): refuses networks of which a stack would train another one, before the first step.

differences(): compares all that a copy of a network would copy.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from torchrec_ext.adopt.checks import (
    GLOBAL_HOOKS,
    fault_of_module,
    has_gradient_hook,
)

_LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), type, Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, BuiltinFunctionType, ModuleType),
)
# What they write while they run would be lost in the copy that vmap works on.
_WRITE_BUFFERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OTHERS = "a stack needs one shape; train others in one ModuleList"
_REGISTER = "register it (register_buffer, nn.ModuleList)"
_METHOD = "make it a method of the class"
_LONGEST = 200


class Difference(NamedTuple):
    """What is not alike in two networks, by its path: both values in a few words, and the remedy."""

    path: str
    first: str
    other: str
    remedy: str = _OTHERS


def check_networks(networks: Sequence[nn.Module]) -> None:
    """Refuses networks that are not of one form.

    Raises:
        ValueError: naming the first difference, or a module that a stack cannot have.
    """
    if len(networks) < 2:
        raise ValueError(f"{len(networks)} networks: a stack has two or more")
    for number, network in enumerate(networks):
        if not isinstance(network, nn.Module):
            raise ValueError(
                f"networks[{number}] is {_short(network)}: must be a module"
            )
        _check_network(network)
    first, *others = networks
    if not any(each.requires_grad for each in first.parameters()):
        raise ValueError(f"{type(first).__name__} has no weight to train")
    for number, other in enumerate(others, 1):
        for path, here, there, remedy in differences(first, other):
            rest = (
                f" is {there} in network {number}, {here} in network 0: {remedy}"
                if here != there
                else f" is another {here} in network {number} than in network 0: {remedy}"
            )
            raise ValueError(line(path or "the network", rest))
    parameters = [weight for network in networks for weight in network.parameters()]
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError(
            "two networks share a weight: that is one network; train them as one module"
        )


def line(path: str, rest: str) -> str:
    """Returns a message of at most 200 characters; the end of a path says most."""
    room = max(_LONGEST - len(rest), 4)
    return (path if len(path) <= room else f"...{path[3 - room :]}") + rest


def _check_network(network: nn.Module) -> None:
    """Refuses a module or weight that no stack trains as the network alone.

    Raises:
        ValueError: naming it.
    """
    if any(GLOBAL_HOOKS):
        raise ValueError(
            "torch has a hook on all modules, whose Python a stack would not run; remove it"
        )
    for path, module in network.named_modules():
        fault = _fault(module)
        if fault:
            raise ValueError(line(path or "the network", f" {fault}"))
    for path, weight in network.named_parameters():
        if is_lazy(weight):
            raise ValueError(line(path, " has no shape yet: call each network once"))
        if has_gradient_hook(weight):
            raise ValueError(
                line(
                    path,
                    " has a hook on its gradient, whose Python a stack would not run; remove it, and write what it "
                    "does into the loss",
                )
            )


def _fault(module: nn.Module) -> str:
    """Names why a stack cannot have a module; empty if it can."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        cell = f"nn.{module.mode.partition('_')[0]}Cell"
        return f"is {kind}, of which torch.func.vmap has no batched form: write a loop over {cell}"
    if (
        isinstance(module, _WRITE_BUFFERS)
        and module.track_running_stats
        and module.running_mean is not None
    ):
        return (
            f"is a {kind}, whose running statistics a stack would lose: use LayerNorm, or "
            "track_running_stats=False"
        )
    return fault_of_module(module)


def differences(first: nn.Module, other: nn.Module) -> Iterator[Difference]:
    """Yields what is not alike in two networks, but for the values of weights and buffers."""
    return _Comparison(first, other).of("", first, other)


class _Comparison:
    def __init__(self, first: nn.Module, other: nn.Module) -> None:
        pairs = zip(first.modules(), other.modules(), strict=False)
        self._partners = {id(one): id(two) for one, two in pairs}
        self._tensors = {
            id(tensor)
            for network in (first, other)
            for tensor in (*network.parameters(), *network.buffers())
        }
        # Of weights and buffers: with which one another name of it was compared.
        self._weights: dict[int, int] = {}
        # The objects are kept, so that no other has their id.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def of(
        self, path: str, one: Any, other: Any, *, in_function: bool = False
    ) -> Iterator[Difference]:
        """Yields the differences of two values.

        Args:
            path: of the first, from the network.
            one: a value of the first network.
            other: that of the other.
            in_function: whether a function holds them, which no copy of a network copies.
        """
        if one is other:
            return
        if in_function and isinstance(one, nn.Module):
            held = f"function that holds a {type(one).__name__}"
            yield Difference(path, held, held, _METHOD)
            return
        pair = id(one), id(other)
        if pair in self._seen:
            return
        self._seen[pair] = one, other
        if _kind(one) is not _kind(other):
            yield Difference(path, _short(one), _short(other))
        elif isinstance(one, nn.Module):
            yield from self._of_modules(path, one, other)
        elif isinstance(one, Tensor):
            yield from self._of_tensors(path, one, other)
        elif isinstance(one, _LEAVES):
            # NaN is not equal to itself.
            if one != other and repr(one) != repr(other):
                yield Difference(path, _short(one), _short(other))
        else:
            yield from self._of_objects(path, one, other, in_function)

    def _of_objects(
        self, path: str, one: Any, other: Any, in_function: bool
    ) -> Iterator[Difference]:
        """Compares what objects are made of; those that cannot be taken apart must be equal."""
        parts = _parts(one)
        others = _parts(other)
        if parts is None or others is None:
            if one != other:
                yield Difference(path, _short(one), _short(other))
            return
        if list(parts) != list(others):
            yield Difference(path, _short(one), _short(other))
            return
        inside = in_function or isinstance(one, FunctionType)
        for name, part in parts.items():
            below = f"{path}{name}" if name.startswith(".") else path
            for found in self.of(below, part, others[name], in_function=inside):
                # What an object is made from, beside its attributes and elements, has no name.
                if below == path:
                    found = Difference(path, _short(one), _short(other))
                yield found

    def _of_modules(
        self, path: str, one: nn.Module, other: nn.Module
    ) -> Iterator[Difference]:
        is_registered = id(one) in self._partners
        if is_registered and self._partners[id(one)] != id(other):
            yield Difference(path, _short(one), _short(other))
            return
        mine = vars(one)
        theirs = vars(other)
        # Settings first, because they say why shapes differ.
        names = sorted({**mine, **theirs}, key=_REGISTERED.__contains__)
        for name in names:
            below = f"{path}.{name}".lstrip(".")
            if name not in mine or name not in theirs:
                here, there = (
                    _short(each[name]) if name in each else "not there"
                    for each in (mine, theirs)
                )
                yield Difference(below, here, there)
            elif "_hooks" in name and isinstance(mine[name], dict):
                # Their keys are numbers that torch has counted up.
                hooks, others = (list(each[name].values()) for each in (mine, theirs))
                if len(hooks) != len(others):
                    counts = f"{len(hooks)} hooks", f"{len(others)} hooks"
                    yield Difference(below, *counts)
                yield from self.of(below, hooks, others)
            elif name not in _REGISTERED:
                yield from self.of(below, mine[name], theirs[name])
            else:
                yield from self._of_registered(
                    path, mine[name], theirs[name], is_registered
                )

    def _of_registered(
        self,
        path: str,
        mine: Mapping[str, Any],
        theirs: Mapping[str, Any],
        is_registered: bool,
    ) -> Iterator[Difference]:
        """Compares weights, buffers or modules; the values of those of a stack's networks may differ."""
        for name in {**mine, **theirs}:
            below = f"{path}.{name}".lstrip(".")
            here, there = (each.get(name, "not there") for each in (mine, theirs))
            if not (
                is_registered and isinstance(here, Tensor) and isinstance(there, Tensor)
            ):
                yield from self.of(below, here, there)
                continue
            forms = _form(here), _form(there)
            if forms[0] != forms[1]:
                yield Difference(below, *forms)
            pairs = ((here, there), (there, here))
            for a, b in pairs:
                if self._weights.setdefault(id(a), id(b)) != id(b):
                    yield Difference(below, "tied", "tied to another")
        if list(mine) != list(theirs):
            yield Difference(path, str([*mine]), str([*theirs]))

    def _of_tensors(
        self, path: str, one: Tensor, other: Tensor
    ) -> Iterator[Difference]:
        if id(one) in self._tensors or id(other) in self._tensors:
            name = "weight by a second name"
            yield Difference(path, name, name, "read it by its own")
        elif _form(one) != _form(other):
            yield Difference(path, _form(one), _form(other), _REGISTER)
        elif not same_values(one, other):
            yield Difference(path, _short(one), _short(other), _REGISTER)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal; NaN is equal to NaN."""
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    equal: Tensor = (one == other) | ((one != one) & (other != other))
    return bool(equal.all())


def _kind(value: Any) -> type:
    """Returns the class of a value; that of a parametrized module is made for it alone."""
    kind = type(value)
    if isinstance(value, nn.Module) and is_parametrized(value):
        return kind.__bases__[0]
    return kind


def _parts(value: Any) -> dict[str, Any] | None:
    """Returns what a value is made of, elements by ``.name``; None if that is unknown."""
    parts: dict[str, Any]
    if isinstance(value, FunctionType):
        parts = {"code": value.__code__, "defaults": value.__defaults__}
        parts |= {"by name": value.__kwdefaults__, "attributes": vars(value)}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return parts | {f".{name}": _content(cell) for name, cell in cells}
    if isinstance(value, MethodType):
        return {"function": value.__func__, ".__self__": value.__self__}
    if isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        parts = {f".{name}": each for name, each in pairs}
        return parts | {"attributes": getattr(value, "__dict__", None)}
    if isinstance(value, set | frozenset):
        return None
    try:
        # As copy.deepcopy takes an object apart.
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:
        # Any class may refuse in its own way.
        return None
    parts = {}
    for number, part in enumerate(reduced if isinstance(reduced, tuple) else [reduced]):
        if isinstance(part, Iterator):
            part = list(part)
        if number == 2 and isinstance(part, dict):
            parts |= {f".{name}": each for name, each in part.items()}
        else:
            parts[f"part {number}"] = part
    return parts


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not filled yet.
        return None


def _form(tensor: Tensor) -> str:
    frozen = (
        ", frozen"
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        else ""
    )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device}{frozen}"


def _short(value: Any) -> str:
    """Returns a value in at most 40 characters."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"tensor {_form(value)}"
    if isinstance(value, FunctionType | MethodType):
        return f"function {value.__name__}"
    if isinstance(value, str) and value == "not there":
        return value
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
