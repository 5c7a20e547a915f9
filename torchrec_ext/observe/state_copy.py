"""StateCopy: everything that a training step may change, copied, and put back bit for bit into the same objects.

SmallTables: small tables in place of large ones, for an experiment. FilesWritten: the files that a step writes.

What is reached from a step function, its model, optimizer and loader, through closures, the globals that it names,
methods, attributes, slots and containers:

* modules: parameters and buffers, which objects they are and what they hold; ``.grad``, the same object or none;
  ``requires_grad``; ``training``; plain attributes such as counters, lists of numbers and tensors; modules in plain
  lists too, where TorchRec keeps the kernels of sharded tables, whose optimizers run inside the backward;
* optimizers: ``state`` with the identity of its tensors, and its absence; ``param_groups``; plain attributes;
* other objects of the user, schedulers, gradient scalers, datasets, samplers, loaders: attributes and slots;
* classes and Python modules of the user: the data that hangs on them, such as counters;
* tensors, numpy arrays, lists, deques, dicts and sets that hang on any of these, of any length;
* generators of torch, numpy and ``random``, the global ones and those that hang on any of these objects;
* the closure and the globals of the step function; the number of compute threads; environment variables.

What is not put back: files and sockets; other processes; large arrays of a loader; what an object of a library keeps
for itself, as an open cursor. :attr:`StateCopy.notes` names what was seen of these, and :meth:`StateCopy.changed_data`
large arrays that were changed.
"""

from __future__ import annotations

import argparse
import array
import functools
import io
import os
import random
import sys
import sysconfig
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from torchrec_ext.distributed.runtime import available_memory

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 6  # attributes, closures and containers that are followed from a root
_MANY = 1_000  # entries above which a container is data: it is copied, and its entries are not followed
_LARGE = 2**26  # bytes of a loader's array or tensor above which it is watched and not copied
_WATCHED = 4_096  # entries of such an array that are compared
_TRAINING = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, Dataset, DataLoader, Sampler)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_RECORDS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # the standard library's plain objects
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, classmethod, staticmethod)
_OF_DDP = ("training", "require_forward_param_sync", "require_backward_grad_sync")
_Restore = Callable[[], None]


class StateCopy:
    """A copy of what a step may change.

    Args:
        roots: objects from which the rest is reached.
        loader: what batches come from. It may be in the middle of an epoch, so :meth:`restore_step` leaves it alone.

    Attributes:
        modules: modules that are not inside another one, in the order in which they were reached.
        optimizers: optimizers.
        notes: what cannot be put back, one sentence each.
        bytes: bytes that the copies of tensors take.

    Raises:
        ValueError: there is no memory for the copies.
    """

    def __init__(self, *roots: Any, loader: Any = None) -> None:
        self.notes: list[str] = []
        self.bytes = 0
        self._restores: list[_Restore] = []
        self._of_loader: list[_Restore] = []
        self._of_step = self._restores
        self._keeps_states = False
        self._watched: list[tuple[str, Callable[[], bool]]] = []
        self._copied: set[int] = set()
        self._whole: set[int] = set()  # addresses of storages that are copied from end to end
        self._keep: list[Any] = []  # so that no id is used twice
        reached = list(_reach((*roots, loader)))
        of_loader = {id(each) for each in _reach((loader,), _held_by)}
        modules = [each for each in reached if isinstance(each, nn.Module)]
        inner = {id(child) for module in modules for child in every_module(module) if child is not module}
        self.modules = [module for module in modules if id(module) not in inner]
        self.optimizers = [each for each in reached if isinstance(each, Optimizer)]
        self._free = available_memory()
        self._check_memory()
        for each in sorted(reached, key=lambda each: not isinstance(each, nn.Module)):  # storages before views of them
            self._restores = self._of_loader if id(each) in of_loader else self._of_step
            self._copy(each)
        self._restores = self._of_step
        self._random()
        threads = torch.get_num_threads()
        environment = dict(os.environ)
        self._restores += [lambda: torch.set_num_threads(threads), lambda: _put_back_environment(environment)]

    def _check_memory(self) -> None:
        tensors = [tensor for root in self.modules for module in every_module(root) for tensor in _held(module)]
        tensors += [
            value for optimizer in self.optimizers for held in optimizer.state.values() for value in held.values()
        ]
        local = [shard for each in tensors if isinstance(each, Tensor) for shard in _shards(each)]
        host = {_address(each): each for each in local if each.device.type == "cpu" and each.layout == torch.strided}
        needed, free = sum(each.untyped_storage().nbytes() for each in host.values()), self._free
        if needed > 0.8 * free:
            raise ValueError(
                f"why_slow: a copy of weights and optimizer state, which are put back afterwards, takes "
                f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free; diagnose with smaller tables"
            )

    def restore(self) -> None:
        """Puts everything back; it may be called several times."""
        with torch.no_grad():
            for put_back in (*self._of_step, *self._of_loader):
                put_back()

    def restore_step(self) -> None:
        """Puts back what a step changes, between two experiments.

        Optimizer state that was not there stays, as zeros, so that the next step need not make it.
        """
        self._keeps_states = True
        with torch.no_grad():
            for put_back in self._of_step:
                put_back()
        self._keeps_states = False

    def changed_data(self) -> list[str]:
        """Returns a sentence for each large array that was seen to change, and is not put back."""
        return [f"{name} was changed in place and is not put back" for name, changed in self._watched if changed()]

    def _copy(self, each: Any) -> None:
        if isinstance(each, nn.Module):
            modules = list(every_module(each))
            for module in reversed(modules):  # TorchRec's kernels first: the tables that it shows are views of theirs
                self._module(module)
        elif isinstance(each, Optimizer):
            self._optimizer(each)
        elif isinstance(each, _GENERATORS):
            self._generator(each)
        elif isinstance(each, types.FunctionType):
            if not _is_library(each.__module__):
                self._function(each)
        elif isinstance(each, Tensor | np.ndarray):
            self._value(each)
        elif isinstance(each, type | types.ModuleType):
            self._once(each, lambda: self._variables(each))
        elif _followed(each):
            self._once(each, lambda: self._object(each))
        elif isinstance(each, io.IOBase):
            self.notes.append(f"a file ({getattr(each, 'name', type(each).__name__)}) is read or written for real")
        elif hasattr(each, "__next__"):
            self.notes.append(f"an iterator ({type(each).__name__}) that the step or the loader holds is not rewound")

    def _once(self, each: Any, copy: Callable[[], None]) -> None:
        if id(each) not in self._copied:
            self._copied.add(id(each))
            self._keep.append(each)
            copy()

    def _module(self, module: nn.Module) -> None:
        def copy() -> None:
            for held in (module._parameters, module._buffers, module._modules):
                self._mapping(held)
            for tensor in _held(module):
                self._tensor(tensor)
            if type(module).__name__.startswith("SSDTableBatchedEmbedding"):
                self.notes.append("rows of tables on an SSD (key_value) are not put back: no tensor holds them")
            if isinstance(module, DistributedDataParallel):  # all else that it notes is about its reducer, which stays
                kept = {name: getattr(module, name) for name in _OF_DDP}
                self._restores.append(lambda: vars(module).update(kept))
            else:
                self._attributes(vars(module), leave=("_parameters", "_buffers", "_modules"))

        self._once(module, copy)

    def _optimizer(self, optimizer: Optimizer) -> None:
        def copy() -> None:
            states = dict(optimizer.state)
            self._restores.append(lambda: self._put_back_states(optimizer, states))
            for state in states.values():
                self._mapping(state)
                for value in state.values():
                    if isinstance(value, Tensor):
                        self._tensor(value)
            for group in optimizer.param_groups:
                self._mapping(group)
                for parameter in group["params"]:
                    self._tensor(parameter)
            self._attributes(vars(optimizer), leave=("state", "param_groups"))

        self._once(optimizer, copy)

    def _put_back_states(self, optimizer: Optimizer, states: dict[Any, Any]) -> None:
        kept = {}
        for parameter, state in optimizer.state.items() if self._keeps_states else ():
            if parameter not in states and all(isinstance(value, Tensor) for value in state.values()):
                kept[parameter] = state
                for value in state.values():
                    value.zero_()
        _refill(optimizer.state, {**states, **kept})

    def _tensor(self, tensor: Tensor) -> None:
        def copy() -> None:
            grad, needs = tensor.grad if tensor.is_leaf else None, tensor.requires_grad
            kept = None if _address(tensor) in self._whole or _unwritable(tensor) else tensor.detach().clone()
            if kept is not None:
                size = tensor.numel() * tensor.element_size()
                self.bytes += size
                if tensor.is_contiguous() and size == tensor.untyped_storage().nbytes():
                    self._whole.add(_address(tensor))

            def put_back() -> None:
                if kept is not None:
                    tensor.detach().copy_(kept)
                if tensor.is_leaf:
                    tensor.requires_grad_(needs)
                    tensor.grad = grad

            self._restores.append(put_back)
            if grad is not None:
                self._tensor(grad)

        shards = _shards(tensor)
        if len(shards) != 1 or shards[0] is not tensor:  # TorchRec's, of which this rank holds some
            for shard in shards:
                self._tensor(shard)
        elif not tensor.is_sparse and tensor.layout == torch.strided:
            self._once(tensor, copy)
        else:
            self.notes.append(f"a tensor of layout {tensor.layout} is not put back")

    def _mapping(self, mapping: MutableMapping[Any, Any]) -> None:
        values = dict(mapping)
        self._restores.append(lambda: _refill(mapping, values))
        for value in values.values() if len(values) <= _MANY else ():
            self._value(value)

    def _attributes(self, attributes: dict[str, Any], leave: tuple[str, ...] = ()) -> None:
        names = set(attributes)
        values = {name: value for name, value in attributes.items() if name not in leave}

        def put_back() -> None:
            for name in set(attributes) - names:
                del attributes[name]
            attributes.update(values)

        self._restores.append(put_back)
        for value in values.values():
            self._value(value)

    def _object(self, each: Any) -> None:
        """Copies the attributes and slots of an object."""
        if hasattr(each, "__dict__"):
            self._attributes(vars(each))
        slots = _slots(each)
        self._restores.append(lambda: _put_back_slots(each, slots))
        for value in slots.values():
            self._value(value)

    def _variables(self, owner: Any) -> None:
        """Copies the data that hangs on a class or a Python module."""
        values = _data_of(owner)

        def put_back() -> None:
            for name in set(_data_of(owner)) - set(values):
                delattr(owner, name)
            for name, value in values.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)

        self._restores.append(put_back)
        for value in values.values():
            self._value(value)

    def _value(self, value: Any) -> None:
        """Copies what a value holds, if it is data."""
        if isinstance(value, Tensor):
            if value.requires_grad or self._fits(value.size().numel() * value.dtype.itemsize):
                self._tensor(value)
            else:
                self._once(value, lambda: self._watch(f"a tensor {tuple(value.shape)}", lambda: value._version))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._once(value, lambda: self._array(value))
        elif isinstance(value, dict | list | set | deque | array.array | bytearray):
            self._once(value, lambda: self._container(value))
        elif isinstance(value, tuple) and len(value) <= _MANY:
            for each in value:
                self._value(each)

    def _fits(self, size: int) -> bool:
        """Returns whether data of so many bytes is copied: a loader's large data seldom changes."""
        of_loader = self._restores is self._of_loader
        return self.bytes + size <= 0.5 * self._free and not (of_loader and size > _LARGE)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if not self._fits(value.nbytes):
            step = max(1, value.size // _WATCHED)
            self._watch(f"an array {value.shape}", lambda: value.flat[::step].tobytes())
            return
        kept = value.copy()
        self.bytes += value.nbytes
        self._restores.append(lambda: np.copyto(value, kept))

    def _watch(self, name: str, look: Callable[[], Any]) -> None:
        before = look()
        self._watched.append((name, lambda: look() != before))

    def _container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._mapping(value)
            return
        values = value[:] if isinstance(value, array.array | bytearray) else list(value)

        def put_back() -> None:
            if isinstance(value, set | deque):
                value.clear()
            if isinstance(value, set):
                value.update(values)
            elif isinstance(value, deque):
                value.extend(values)
            else:
                value[:] = values

        self._restores.append(put_back)
        for each in values if isinstance(value, list | deque) and len(value) <= _MANY else ():
            self._value(each)

    def _function(self, function: types.FunctionType) -> None:
        def copy() -> None:
            for cell in function.__closure__ or ():
                if (value := _content(cell)) is not None:
                    self._restores.append(functools.partial(setattr, cell, "cell_contents", value))
            named = _globals_of(function)
            self._restores.append(lambda: _put_back_globals(function, named))
            for value in (*named.values(), *map(_content, function.__closure__ or ())):
                self._value(value)

        self._once(function, copy)

    def _generator(self, generator: Any) -> None:
        def copy() -> None:
            if isinstance(generator, torch.Generator):
                state = generator.get_state()
                self._restores.append(lambda: _discard(generator.set_state(state)))
            elif isinstance(generator, np.random.Generator):
                held = generator.bit_generator
                kept = held.state
                self._restores.append(lambda: setattr(held, "state", kept))
            elif isinstance(generator, np.random.RandomState):
                legacy = generator.get_state()
                self._restores.append(lambda: generator.set_state(legacy))
            else:
                plain = generator.getstate()
                self._restores.append(lambda: generator.setstate(plain))

        self._once(generator, copy)

    def _random(self) -> None:
        """Copies the global generators."""
        cpu, numbers, plain = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._restores += [
            lambda: torch.set_rng_state(cpu),
            lambda: np.random.set_state(numbers),
            lambda: random.setstate(plain),
        ]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices = torch.cuda.get_rng_state_all()
            self._restores.append(lambda: torch.cuda.set_rng_state_all(devices))


def every_module(root: nn.Module) -> Iterator[nn.Module]:
    """Yields a module, those inside of it, and those in plain lists of theirs, which modules() does not visit."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        for module in waiting.pop().modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield module
            lists = [each for each in vars(module).values() if isinstance(each, list) and len(each) <= _MANY]
            waiting += [child for each in lists for child in each if isinstance(child, nn.Module)]


def _held(module: nn.Module) -> list[Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; that of the tensor itself where it has none, or one of no bytes."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:  # a FakeTensor, as those in the graph of a captured step
        return id(tensor)


def _shards(tensor: Any) -> list[Tensor]:
    """Returns the tensors of this rank that a ShardedTensor or DTensor is made of; any other tensor itself."""
    if hasattr(tensor, "local_shards"):
        shards: Any = tensor.local_shards() if callable(tensor.local_shards) else tensor.local_shards
        return [getattr(each, "tensor", each) for each in shards]
    return _shards(tensor.to_local()) if hasattr(tensor, "to_local") else [tensor]


def _refill(mapping: MutableMapping[Any, Any], values: dict[Any, Any]) -> None:
    """Makes a mapping hold what it held, without making its entries anew where they are right."""
    if [id(key) for key in mapping] != [id(key) for key in values]:
        mapping.clear()
    for key, value in values.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value


def _put_back_environment(values: dict[str, str]) -> None:
    if os.environ != values:
        os.environ.update(values)
        for name in set(os.environ) - set(values):
            del os.environ[name]


def _discard(_: object) -> None:
    pass


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that a function and those inside it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _reach(roots: tuple[Any, ...], children: Callable[[Any], Iterator[Any]] | None = None) -> Iterator[Any]:
    """Yields the modules, optimizers, generators, functions, tensors and other objects that roots lead to, once."""
    seen: set[int] = set()
    waiting = deque((root, 0) for root in roots)
    while waiting:
        each, depth = waiting.popleft()
        if id(each) in seen or depth > _DEPTH or isinstance(each, _PLAIN):
            continue
        seen.add(id(each))
        if not isinstance(each, dict | list | tuple | set | deque):
            yield each
        waiting.extend((child, depth + 1) for child in (children or _children)(each))


def _held_by(each: Any) -> Iterator[Any]:
    """Yields what hangs on an object itself, and not on its class or on what its methods name."""
    if isinstance(each, dict):
        yield from each.values() if len(each) <= _MANY else ()
    elif isinstance(each, list | tuple | set | deque):
        yield from each if len(each) <= _MANY else ()
    elif isinstance(each, _CODE):
        return
    elif _followed(each):
        yield from getattr(each, "__dict__", {}).values()
        yield from _slots(each).values()


def _children(each: Any) -> Iterator[Any]:
    if isinstance(each, types.FunctionType):
        if _is_library(each.__module__):
            return
        yield from map(_content, each.__closure__ or ())
        yield from each.__defaults__ or ()
        yield from (each.__kwdefaults__ or {}).values()
        yield from _globals_of(each).values()
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, classmethod | staticmethod):
        yield each.__func__
    elif isinstance(each, property):
        yield each.fget
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, types.ModuleType):
        yield from _data_of(each).values()
    elif isinstance(each, type):
        if _is_users(each.__module__):
            yield from vars(each).values()
            yield from each.__bases__
    else:
        yield from _held_by(each)
        yield type(each)


def _followed(each: Any) -> bool:
    """Whether an object's attributes are followed: the user's, and of libraries those that take part in training."""
    if isinstance(each, (*_CODE, Tensor, *_GENERATORS)) or hasattr(each, "__next__"):
        return False
    has_attributes = hasattr(each, "__dict__") or hasattr(type(each), "__slots__")
    return has_attributes and (not _is_library(type(each).__module__) or isinstance(each, (*_TRAINING, *_RECORDS)))


def _unwritable(tensor: Tensor) -> bool:
    """Returns whether torch writes nothing into a tensor in place: one of inference mode, or one that is expanded."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return expanded or tensor.is_inference()


def _slots(each: Any) -> dict[str, Any]:
    """Returns the slots of an object of the user that hold something."""
    names = [
        name
        for kind in type(each).__mro__
        if not _is_library(kind.__module__)
        for name in _as_tuple(vars(kind).get("__slots__", ()))
    ]
    return {
        name: getattr(each, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(each, name)
    }


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _put_back_slots(each: Any, values: dict[str, Any]) -> None:
    for name in set(_slots(each)) - set(values):
        object.__delattr__(each, name)
    for name, value in values.items():
        object.__setattr__(each, name, value)


def _data_of(owner: Any) -> dict[str, Any]:
    """Returns the variables of a class or a Python module that are data; empty for those of a library."""
    if not _is_users(owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__):
        return {}
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("__") and not isinstance(value, _CODE) and not hasattr(type(value), "__get__")
    }


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function names; none of a library's wrapper around a user's function."""
    variables = function.__globals__
    if _is_library(variables.get("__name__", "")):
        return {}
    return {name: variables[name] for name in _names(function.__code__) if name in variables}


def _put_back_globals(function: types.FunctionType, values: dict[str, Any]) -> None:
    for name in set(_globals_of(function)) - set(values):
        del function.__globals__[name]
    function.__globals__.update(values)


@functools.cache
def _is_library(name: str) -> bool:
    """Whether a module is installed, and not the user's own."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name == "__main__" or name.startswith("torchrec_ext"):
        return False
    return file is None or any(
        folder in file for folder in ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
    )


def _is_users(name: str) -> bool:
    """Whether a module is the user's own, and not this package's either."""
    return not _is_library(name) and not name.startswith("torchrec_ext")


def random_state(device: torch.device) -> Tensor:
    """Returns the state of torch's random numbers on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets what :func:`random_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
