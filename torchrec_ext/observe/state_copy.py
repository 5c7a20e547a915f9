"""StateCopy: everything that a training step may change, copied, and put back bit for bit into the same objects.

What :func:`~torchrec_ext.observe.reached.reachable_from` reaches from a step function, its model, optimizer and loader:

* attributes of modules, optimizers, schedulers, gradient scalers, datasets, samplers, loaders, and of all objects of
  the user; which objects they are, so that parameters, gradients and state stay the same tensors, or none;
* the entries of dicts, lists, sets and deques, of any length; numbers in tensors and numpy arrays;
* generators of torch, numpy and ``random``, the global ones and those that hang on any of these objects;
* the closure and the globals of the step function; the number of compute threads.

What is not put back: files and sockets; other processes; iterators; slots, environment variables; what an object of a
library keeps for itself, as an open cursor; arrays that are too large, of which :attr:`StateCopy.notes` says so.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchrec_ext.distributed.runtime import available_memory
from torchrec_ext.observe.reached import (
    CONTAINERS,
    GENERATORS,
    content_of,
    globals_of,
    is_followed,
    is_library,
    reachable_from,
)

PutBack = Callable[[], object]
# bytes of a loader's array or tensor above which it is not copied
_LARGE = 2**26


class StateCopy:
    """A copy of what a step may change.

    Args:
        roots: objects from which the rest is reached.
        loader: what batches come from. It may be in the middle of an epoch, so :meth:`restore_step` leaves alone what
            only it reaches.

    Attributes:
        modules: modules that are not inside another one, in the order in which they were reached; those in plain lists,
            where TorchRec keeps the kernels of sharded tables, are of these.
        optimizers: optimizers.
        notes: what cannot be put back, one sentence each.
        bytes: bytes that the copies of tensors and arrays take.

    Raises:
        ValueError: there is no memory for the copies.
    """

    def __init__(self, *roots: Any, loader: Any = None) -> None:
        self.notes: list[str] = []
        self.bytes = 0
        self._keeps_states = False
        of_step = list(reachable_from(*roots))
        known = set(map(id, of_step))
        of_loader = [each for each in reachable_from(loader) if id(each) not in known]
        # Held, so that no id is used twice.
        self._reached = [*of_step, *of_loader]
        modules = [each for each in self._reached if isinstance(each, nn.Module)]
        inner: set[int] = set()
        for module in modules:
            inner.update(id(child) for child in module.modules() if child is not module)
        self.modules = [module for module in modules if id(module) not in inner]
        self.optimizers = [
            each for each in self._reached if isinstance(each, Optimizer)
        ]
        self._free = available_memory()
        self._copied: set[int] = set()  # ids of objects, addresses of storages
        # First what a training moves: it must fit, and holds whole storages of which other objects hold views.
        self._of_step = self._copies(list(self._trained()), math.inf)
        self._of_step += self._copies(of_step, self._free)
        self._of_loader = self._copies(of_loader, _LARGE)
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        self._of_step += [*copies_of_global_generators(), threads]

    def _trained(self) -> Iterator[Tensor]:
        """Yields the tensors of modules and of optimizers."""
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor))

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

    def _copies(self, objects: list[Any], most: float) -> list[PutBack]:
        """Copies objects themselves, tensors and arrays of up to ``most`` bytes; what hangs on them is reached too."""
        return [
            put_back
            for each in objects
            if self._is_new(id(each))
            for put_back in self._copy(each, most)
        ]

    def _is_new(self, key: int) -> bool:
        """Whether an id or an address is not copied yet; it counts as copied from now on."""
        is_new = key not in self._copied
        self._copied.add(key)
        return is_new

    def _copy(self, each: Any, most: float) -> Iterator[PutBack]:
        if isinstance(each, Tensor):
            # TorchRec's sharded ones are views of tensors that its modules hold.
            if not hasattr(each, "local_shards"):
                yield from self._tensor(each, most)
        elif isinstance(each, np.ndarray):
            if each.flags.writeable and self._fits(each.nbytes, most):
                yield partial(np.copyto, each, each.copy())
        elif isinstance(each, CONTAINERS):
            yield _copy_of_container(each)
        elif isinstance(each, GENERATORS):
            yield _copy_of_generator(each)
        elif isinstance(each, types.FunctionType):
            if not is_library(each.__module__):
                yield partial(each.__globals__.update, globals_of(each))
                for cell in each.__closure__ or ():
                    value = content_of(cell)
                    if value is not None:
                        yield partial(setattr, cell, "cell_contents", value)
        # What DDP notes is about its reducer, which stays: undone, the next step may end
        # in an assert.
        elif is_followed(each) and not isinstance(each, DistributedDataParallel):
            if isinstance(each, Optimizer):
                self._is_new(id(each.state))
                yield partial(self._put_back_states, each, dict(each.state))
            yield _copy_of_container(vars(each))
            if type(each).__name__.startswith("SSDTableBatchedEmbedding"):
                self.notes.append(
                    "rows of tables on an SSD (key_value) are not put back: no tensor holds them"
                )

    def _put_back_states(self, optimizer: Optimizer, states: dict[Any, Any]) -> None:
        refilled = dict(states)
        if self._keeps_states:
            for parameter, state in optimizer.state.items():
                if parameter not in states and all(
                    isinstance(value, Tensor) for value in state.values()
                ):
                    refilled[parameter] = state
                    for value in state.values():
                        value.zero_()
        _refill(optimizer.state, refilled)

    def _tensor(self, tensor: Tensor, most: float) -> Iterator[PutBack]:
        """Copies a tensor's flags and gradient, and the storage of its numbers, of which there may be other views."""
        if tensor.layout != torch.strided:
            self.notes.append(f"a tensor of layout {tensor.layout} is not put back")
            return
        if tensor.is_leaf:
            yield partial(setattr, tensor, "grad", tensor.grad)
            yield partial(tensor.requires_grad_, tensor.requires_grad)
            if tensor.grad is not None:
                yield from self._copies([tensor.grad], most)
        local: Any = tensor.detach()
        # A DTensor has no storage of its own.
        if hasattr(local, "to_local"):
            local = local.to_local()
        address = _address(local)
        if not address or not self._is_new(address):
            return
        storage = local.untyped_storage()
        if self._fits(storage.nbytes(), most):
            numbers = torch.empty(0, dtype=torch.uint8, device=local.device)
            numbers.set_(storage)
            yield partial(numbers.copy_, numbers.clone())

    def _fits(self, size: int, most: float) -> bool:
        """Returns whether data of so many bytes is copied, and counts it; what a training moves must be."""
        is_trained = most == math.inf
        share = 0.8 if is_trained else 0.5
        fits = size <= most and self.bytes + size <= share * self._free
        if not fits and is_trained:
            raise ValueError(
                f"why_slow: weights and optimizer state are copied, to be put back, and {self._free / 2**30:,.1f} GiB "
                f"that are free hold no copy of them; diagnose with smaller tables"
            )
        if fits:
            self.bytes += size
        else:
            self.notes.append(
                f"an array of {size / 2**20:,.0f} MiB is not copied; what a step writes into it stays"
            )
        return fits


def _copy_of_container(container: Any) -> PutBack:
    """Copies the entries of a dict, list, set or deque, and returns what puts them back."""
    if isinstance(container, dict):
        return partial(_refill, container, dict(container))
    values = list(container)
    add = container.update if isinstance(container, set) else container.extend

    def put_back() -> None:
        # One that did not change may be under iteration.
        if list(map(id, container)) != list(map(id, values)):
            container.clear()
            add(values)

    return put_back


def _refill(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> None:
    """Puts entries into a mapping in their order, and leaves right ones alone."""
    # An optimizer and state_dict() go through a mapping in its order, so the order is
    # put back too.
    if [id(key) for key in mapping] != [id(key) for key in values]:
        mapping.clear()
    for key, value in values.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value


def _copy_of_generator(generator: Any) -> PutBack:
    """Copies the state of a generator of torch, numpy or ``random``."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def copies_of_global_generators() -> list[PutBack]:
    """Copies the state of the global generators of torch, numpy and ``random``; each entry puts one back."""
    copies: list[PutBack] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(np.random.set_state, np.random.get_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = torch.cuda.get_rng_state_all()
        copies.append(partial(torch.cuda.set_rng_state_all, states))
    return copies


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has no memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a FakeTensor, as those in the graph of a captured step
        return 0


def copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns copies of tensors of a device; of a GPU on the host if they fill half of its free memory or more."""
    fits = True
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        fits = sum(tensor.nbytes for tensor in tensors) < free / 2
    return [tensor.clone() if fits else tensor.cpu() for tensor in tensors]


def random_state(device: torch.device) -> Tensor:
    """Returns the state of torch's random numbers on a device."""
    return (
        torch.cuda.get_rng_state(device)
        if device.type == "cuda"
        else torch.get_rng_state()
    )


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets what :func:`random_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
