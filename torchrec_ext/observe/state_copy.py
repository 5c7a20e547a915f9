"""StateCopy: everything that a training step may change, copied, and put back bit for bit into the same objects.

What is reached from a step function, its model, optimizer and loader, through closures, the globals that it names,
methods, attributes and containers:

* modules: parameters and buffers, which objects they are and what they hold; ``.grad``, the same object or none;
  ``requires_grad``; ``training``; plain attributes such as counters, lists of numbers and tensors; modules in plain
  lists too, where TorchRec keeps the kernels of sharded tables, whose optimizers run inside the backward;
* optimizers: ``state`` with the identity of its tensors, and its absence; ``param_groups``; plain attributes;
* other objects of the user, schedulers, gradient scalers, datasets, samplers, loaders: attributes;
* tensors, numpy arrays, lists, deques, dicts and sets that hang on any of these, of any length;
* generators of torch, numpy and ``random``, the global ones and those that hang on any of these objects;
* the closure and the globals of the step function; the number of compute threads.

What is not put back: files and sockets; other processes; data of classes and Python modules, slots, environment
variables; large arrays of a loader; what an object of a library keeps
for itself, as an open cursor. :attr:`StateCopy.notes` names what was seen of these, and :meth:`StateCopy.changed_data`
large arrays that were changed.
"""

from __future__ import annotations

import io
import types
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from itertools import chain, islice
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
    copy_mapping,
    copy_tensor,
    refill,
)
from torchrec_ext.observe.reached import (
    GENERATORS,
    MOST_FOLLOWED,
    content_of,
    every_module,
    globals_of,
    is_followed,
    is_library,
    own_values,
    reachable_from,
)

# bytes of a loader's array or tensor above which it is watched and not copied
_LARGE = 2**26
_WATCHED = 4_096  # entries of such an array that are compared
_OF_DDP = ("training", "require_forward_param_sync", "require_backward_grad_sync")
_CONTAINERS = (dict, list, set, deque)


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
        self._of_step: list[PutBack] = []
        self._of_loader: list[PutBack] = []
        self._put_backs = self._of_step  # the list of the two that copies are added to
        self._keeps_states = False
        self._watched: list[tuple[str, Callable[[], bool]]] = []
        self._copied: dict[
            int, Any
        ] = {}  # objects by id, which are held here so that no id is used twice
        # addresses of storages that are copied from end to end
        self._whole: set[int] = set()
        reached = list(reachable_from(*roots, loader))
        of_loader = set(map(id, reachable_from(loader, values=own_values)))
        modules = [each for each in reached if isinstance(each, nn.Module)]
        inner: set[int] = set()
        for module in modules:
            # The first that every_module yields is the module itself.
            inner.update(map(id, islice(every_module(module), 1, None)))
        self.modules = [module for module in modules if id(module) not in inner]
        self.optimizers = [each for each in reached if isinstance(each, Optimizer)]
        self._free = available_memory()
        self._check_memory()
        # Modules first: they have whole storages, of which other objects hold views.
        for each in sorted(reached, key=lambda each: not isinstance(each, nn.Module)):
            self._put_backs = (
                self._of_loader if id(each) in of_loader else self._of_step
            )
            self._copy(each)
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        self._of_step += [copy_global_generators(), threads]

    def _check_memory(self) -> None:
        tensors: list[Any] = []
        for module in chain.from_iterable(map(every_module, self.modules)):
            tensors += _tensors_of(module)
        for state in chain.from_iterable(
            optimizer.state.values() for optimizer in self.optimizers
        ):
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        # By address, because tables are views of one storage, which is copied once.
        sizes = {}
        for each in chain.from_iterable(map(_shards, tensors)):
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

    def _is_new(self, each: Any) -> bool:
        """Whether an object is not copied yet; it counts as copied from now on."""
        is_new = id(each) not in self._copied
        self._copied[id(each)] = each
        return is_new

    # ------------------------------------------------------------------ objects by kind

    def _copy(self, each: Any) -> None:
        if isinstance(each, nn.Module):
            # TorchRec's kernels first: the tables that it shows are views of theirs.
            for module in reversed(list(every_module(each))):
                if self._is_new(module):
                    self._module(module)
        elif isinstance(each, Tensor | np.ndarray):
            self._value(each)
        elif self._is_new(each):
            if isinstance(each, Optimizer):
                self._optimizer(each)
            elif isinstance(each, GENERATORS):
                self._put_backs.append(copy_generator(each))
            elif isinstance(each, types.FunctionType):
                if not is_library(each.__module__):
                    self._put_backs += copy_function(each)
                    self._values(globals_of(each).values())
                    self._values(map(content_of, each.__closure__ or ()))
            elif is_followed(each):
                self._attributes(vars(each))
            elif isinstance(each, io.IOBase):
                self.notes.append(
                    f"a file ({getattr(each, 'name', type(each).__name__)}) is read or written for real"
                )
            elif hasattr(each, "__next__"):
                name = type(each).__name__
                self.notes.append(
                    f"an iterator ({name}) that the step or the loader holds is not rewound"
                )

    def _module(self, module: nn.Module) -> None:
        for mapping in (module._parameters, module._buffers, module._modules):
            self._mapping(mapping)
        for tensor in _tensors_of(module):
            self._tensor(tensor)
        if type(module).__name__.startswith("SSDTableBatchedEmbedding"):
            self.notes.append(
                "rows of tables on an SSD (key_value) are not put back: no tensor holds them"
            )
        if isinstance(module, DistributedDataParallel):
            # All else that it notes is about its reducer, which stays: undone, the next
            # step may end in an assert.
            self._put_backs.append(
                partial(
                    vars(module).update,
                    {name: getattr(module, name) for name in _OF_DDP},
                )
            )
        else:
            self._attributes(
                vars(module), leave=("_parameters", "_buffers", "_modules")
            )

    def _optimizer(self, optimizer: Optimizer) -> None:
        states = dict(optimizer.state)
        self._put_backs.append(lambda: self._put_back_states(optimizer, states))
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

    def _attributes(
        self, attributes: dict[str, Any], leave: tuple[str, ...] = ()
    ) -> None:
        self._put_backs.append(copy_attributes(attributes, leave))
        self._values(value for name, value in attributes.items() if name not in leave)

    def _mapping(self, mapping: MutableMapping[Any, Any]) -> None:
        self._put_backs.append(copy_mapping(mapping))
        if len(mapping) <= MOST_FOLLOWED:
            self._values(mapping.values())

    # ----------------------------------------------------------------------------- data

    def _values(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._value(value)

    def _value(self, value: Any) -> None:
        """Copies the entries of a value, if it is data."""
        if isinstance(value, Tensor):
            if value.requires_grad or self._fits(
                value.size().numel() * value.dtype.itemsize
            ):
                self._tensor(value)
            elif self._is_new(value):
                self._watch(f"a tensor {tuple(value.shape)}", lambda: value._version)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and self._is_new(value):
                if self._fits(value.nbytes):
                    self.bytes += value.nbytes
                    self._put_backs.append(partial(np.copyto, value, value.copy()))
                else:
                    step = max(1, value.size // _WATCHED)
                    self._watch(
                        f"an array {value.shape}", lambda: value.flat[::step].tobytes()
                    )
        elif isinstance(value, _CONTAINERS):
            if self._is_new(value):
                self._put_backs.append(copy_container(value))
                if not isinstance(value, set) and len(value) <= MOST_FOLLOWED:
                    self._values(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple) and len(value) <= MOST_FOLLOWED:
            self._values(value)

    def _tensor(self, tensor: Tensor) -> None:
        shards = _shards(tensor)
        if len(shards) != 1 or shards[0] is not tensor:
            # TorchRec's, of which this rank holds some.
            for shard in shards:
                self._tensor(shard)
        elif tensor.is_sparse or tensor.layout != torch.strided:
            self.notes.append(f"a tensor of layout {tensor.layout} is not put back")
        elif self._is_new(tensor):
            values = None
            if _address(tensor) not in self._whole and not _unwritable(tensor):
                values = tensor.detach().clone()
                self.bytes += tensor.nbytes
                # A storage that is copied from end to end covers all views of it.
                if (
                    tensor.is_contiguous()
                    and tensor.nbytes == tensor.untyped_storage().nbytes()
                ):
                    self._whole.add(_address(tensor))
            self._put_backs.append(copy_tensor(tensor, values))
            if tensor.is_leaf and tensor.grad is not None:
                self._tensor(tensor.grad)

    def _fits(self, size: int) -> bool:
        """Returns whether data of so many bytes is copied: a loader's large data seldom changes."""
        of_loader = self._put_backs is self._of_loader
        return self.bytes + size <= 0.5 * self._free and not (
            of_loader and size > _LARGE
        )

    def _watch(self, name: str, look: Callable[[], Any]) -> None:
        before = look()
        self._watched.append((name, lambda: look() != before))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [
        each
        for each in (*module._parameters.values(), *module._buffers.values())
        if each is not None
    ]


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; of the tensor itself if its storage has none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:  # a FakeTensor, as those in the graph of a captured step
        return id(tensor)


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


def _unwritable(tensor: Tensor) -> bool:
    """Returns whether torch writes nothing into a tensor in place: one of inference mode, or one that is expanded."""
    if tensor.is_inference():
        return True
    return any(
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


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
