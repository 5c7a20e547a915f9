"""StateCopy: everything that a training step may change, copied, and put back bit for bit into the same objects.

What :func:`~torchrec_ext.observe.reached.reachable_from` reaches from a step function, its model, optimizer and loader:

* attributes of modules, optimizers, schedulers, gradient scalers, datasets, samplers, loaders, and of all objects of
  the user; which objects they are, so that parameters, gradients and state stay the same tensors, or none;
* the entries of dicts, lists, sets and deques, of any length; numbers in tensors and numpy arrays;
* generators of torch, numpy and ``random``, the global ones and those that hang on any of these objects;
* the closure and the globals of the step function; the number of compute threads.

What is not put back: files and sockets; other processes; slots, environment variables; large arrays of a loader; what
an object of a library keeps for itself, as an open cursor. :attr:`StateCopy.notes` names what was seen of these, and
:meth:`StateCopy.changed_data` large arrays that were changed.
"""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchrec_ext.distributed.runtime import available_memory
from torchrec_ext.observe.put_back import (
    PutBack,
    copy_attributes,
    copy_container,
    copy_function,
    copy_generator,
    copy_global_generators,
    copy_tensor,
    refill,
)
from torchrec_ext.observe.reached import (
    CONTAINERS,
    GENERATORS,
    is_followed,
    is_library,
    own_values,
    reachable_from,
)

# bytes of a loader's array or tensor above which it is watched and not copied
_LARGE = 2**26
_WATCHED = 4_096  # entries of such an array that are compared
_OF_DDP = ("training", "require_forward_param_sync", "require_backward_grad_sync")


class StateCopy:
    """A copy of what a step may change.

    Args:
        roots: objects from which the rest is reached.
        loader: what batches come from. It may be in the middle of an epoch, so :meth:`restore_step` leaves it alone.

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
        self._of_step: list[PutBack] = []
        self._of_loader: list[PutBack] = []
        self._keeps_states = False
        self._watched: list[tuple[str, Callable[[], bool]]] = []
        # Held, so that no id is used twice.
        self._reached = list(reachable_from(*roots, loader))
        of_loader = set(map(id, reachable_from(loader, values=own_values)))
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
        needed = list(self._trained())
        self._check_memory(needed)
        for tensor in needed:
            self._of_step += self._tensor(tensor)
        for each in self._reached:
            in_loader = id(each) in of_loader
            put_backs = self._of_loader if in_loader else self._of_step
            put_backs += self._copies(each, in_loader=in_loader)
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        self._of_step += [copy_global_generators(), threads]

    def _trained(self) -> Iterator[Tensor]:
        """Yields the tensors of modules and of optimizers."""
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor))

    def _check_memory(self, tensors: list[Tensor]) -> None:
        # By address, because tables are views of one storage, which is copied once.
        sizes = {}
        for tensor in tensors:
            for each in _shards(tensor):
                if each.device.type == "cpu" and each.layout == torch.strided:
                    sizes[_address(each)] = each.untyped_storage().nbytes()
        size = sum(sizes.values())
        if size > 0.8 * self._free:
            raise ValueError(
                f"why_slow: a copy of weights and optimizer state, which are put back afterwards, takes "
                f"{size / 2**30:,.1f} GiB, and {self._free / 2**30:,.1f} are free; diagnose with smaller tables"
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
        """Returns a sentence for each large array with changes, which are not put back."""
        sentences = []
        for name, is_changed in self._watched:
            if is_changed():
                sentences.append(f"{name} was changed in place and is not put back")
        return sentences

    def _is_new(self, key: int) -> bool:
        """Whether an id or an address is not copied yet; it counts as copied from now on."""
        is_new = key not in self._copied
        self._copied.add(key)
        return is_new

    def _copies(self, each: Any, *, in_loader: bool) -> Iterator[PutBack]:
        """Copies an object itself; what hangs on it is reached too."""
        if isinstance(each, Tensor):
            size = each.size().numel() * each.dtype.itemsize
            if each.requires_grad or self._fits(size, in_loader=in_loader):
                yield from self._tensor(each)
            elif self._is_new(id(each)):
                self._watch(f"a tensor {tuple(each.shape)}", lambda: each._version)
        elif not self._is_new(id(each)):
            return
        elif isinstance(each, np.ndarray):
            if each.flags.writeable:
                yield from self._array(each, in_loader=in_loader)
        elif isinstance(each, CONTAINERS):
            yield copy_container(each)
        elif isinstance(each, GENERATORS):
            yield copy_generator(each)
        elif isinstance(each, types.FunctionType):
            if not is_library(each.__module__):
                yield from copy_function(each)
        elif isinstance(each, DistributedDataParallel):
            # All else that it notes is about its reducer, which stays: undone, the next
            # step may end in an assert.
            flags = {name: getattr(each, name) for name in _OF_DDP}
            yield partial(vars(each).update, flags)
        elif is_followed(each):
            if isinstance(each, Optimizer):
                self._is_new(id(each.state))
                yield partial(self._put_back_states, each, dict(each.state))
            yield copy_attributes(vars(each))
            if type(each).__name__.startswith("SSDTableBatchedEmbedding"):
                self.notes.append(
                    "rows of tables on an SSD (key_value) are not put back: no tensor holds them"
                )
        elif isinstance(each, io.IOBase):
            name = getattr(each, "name", type(each).__name__)
            self.notes.append(f"a file ({name}) is read or written for real")
        elif hasattr(each, "__next__"):
            name = type(each).__name__
            self.notes.append(
                f"an iterator ({name}) that the step or the loader holds is not rewound"
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
        refill(optimizer.state, refilled)

    def _array(self, array: Any, *, in_loader: bool) -> Iterator[PutBack]:
        if self._fits(array.nbytes, in_loader=in_loader):
            self.bytes += array.nbytes
            yield partial(np.copyto, array, array.copy())
        else:
            step = max(1, array.size // _WATCHED)
            self._watch(f"an array {array.shape}", lambda: array.flat[::step].tobytes())

    def _tensor(self, tensor: Tensor) -> Iterator[PutBack]:
        """Copies a tensor's flags and gradient, and the storage of its numbers, of which there may be other views."""
        shards = _shards(tensor)
        if len(shards) != 1 or shards[0] is not tensor:
            # TorchRec's, of which this rank holds some.
            for shard in shards:
                yield from self._tensor(shard)
        elif tensor.is_sparse or tensor.layout != torch.strided:
            self.notes.append(f"a tensor of layout {tensor.layout} is not put back")
        elif self._is_new(id(tensor)):
            yield copy_tensor(tensor)
            address = _address(tensor)
            if address and self._is_new(address):
                numbers = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                numbers.set_(tensor.untyped_storage())
                self.bytes += len(numbers)
                yield partial(numbers.copy_, numbers.clone())
            if tensor.is_leaf and tensor.grad is not None:
                yield from self._tensor(tensor.grad)

    def _fits(self, size: int, *, in_loader: bool) -> bool:
        """Returns whether data of so many bytes is copied: a loader's large data seldom changes."""
        return self.bytes + size <= 0.5 * self._free and not (
            in_loader and size > _LARGE
        )

    def _watch(self, name: str, look: Callable[[], Any]) -> None:
        before = look()
        self._watched.append((name, lambda: look() != before))


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has no memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a FakeTensor, as those in the graph of a captured step
        return 0


def _shards(tensor: Any) -> list[Tensor]:
    """Returns this rank's tensors of a ShardedTensor or DTensor; any other tensor itself."""
    if hasattr(tensor, "local_shards"):
        shards: Any = (
            tensor.local_shards()
            if callable(tensor.local_shards)
            else tensor.local_shards
        )
        return [getattr(each, "tensor", each) for each in shards]
    if hasattr(tensor, "to_local"):
        # A DTensor, whose local tensor may hold several shards.
        return _shards(tensor.to_local())
    return [tensor]


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
