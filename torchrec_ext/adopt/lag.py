"""Lag: weights and optimizer state whose rows a captured step updates later, and how a read updates them first.

Row by row, a step updates the rows that it reads and leaves the others for later. Until these are updated, the tensors
belong to a class whose every use by torch updates them first, so that nobody can forget it. A tensor owns its
:class:`Lag`, and the lag holds its tensors weakly: a model that is dropped takes everything with it.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.capture.memory import StepMemory
from torchrec_ext.observe.ops import tensors_in
from torchrec_ext.observe.user_lines import user_line, with_text

_LIVE: weakref.WeakSet[Lag] = weakref.WeakSet()


class Lag:
    """The tensors of one captured step whose rows may be behind.

    Args:
        memory: the step's memory.
        tables: parameters that are updated row by row, by name.
        others: optimizer state of these, and counts of steps.

    Attributes:
        active: whether the tensors are behind.
        seconds: time that updating all rows has taken so far, in seconds.
        count: number of times that all rows were updated.
    """

    def __init__(
        self,
        memory: StepMemory,
        tables: dict[str, nn.Parameter],
        others: Sequence[Tensor],
    ) -> None:
        self.active = False
        self.seconds = 0.0
        self.count = 0
        self._last_look = 0.0
        self._reader = ""
        self._memory = memory
        self._lock = threading.RLock()
        self._names = {id(parameter): name for name, parameter in tables.items()}
        self._tables = [weakref.ref(parameter) for parameter in tables.values()]
        self._tensors: list[weakref.ref[Tensor]] = [
            weakref.ref(each) for each in (*tables.values(), *others)
        ]
        self._storages = [_storage(parameter) for parameter in tables.values()]
        _LIVE.add(self)

    def begin(self) -> None:
        """Marks the tensors, so that the next read updates them first.

        Memory that somebody else holds too (a kept ``.data``, a numpy array) is read by no call of torch's that could
        be seen: with such a holder all rows are updated at once.
        """
        if self.active:
            return
        # After each step again: somebody may have taken hold of a table since.
        if self.holder():
            self._update()
            return
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                tensor.__dict__["_lag"] = self
                tensor.__class__ = (
                    _LaggingParameter
                    if isinstance(tensor, nn.Parameter)
                    else _LaggingTensor
                )
        self.active = True

    def holder(self) -> str:
        """Names a table with a second holder of its memory; empty if there is none."""
        for reference, storage in zip(self._tables, self._storages, strict=True):
            parameter = reference()
            if parameter is None:
                continue
            # The parameter itself, and the memories of all steps over it.
            known_users = 1 + sum(storage in lag._storages for lag in _LIVE)
            if _users_of(parameter) > known_users:
                return self._names[id(parameter)]
        return ""

    def settle(self) -> None:
        """Updates all rows, so that weights and state are as after eager steps."""
        # Two threads may read at the same time.
        with self._lock:
            if not self.active:
                return
            self._reader = with_text(user_line())
            self._update()
            self.release()

    def since_last_look(self) -> float:
        """Returns the seconds of updates of all rows since it was last called."""
        before = self._last_look
        self._last_look = self.seconds
        return self.seconds - before

    def cause(self) -> str:
        """Names who has had all rows updated: a second holder of a table's memory, or a line of the user's."""
        name = self.holder()
        if name:
            return f"the memory of '{name}' is held by a kept .data, state_dict or numpy array"
        return self._reader

    def release(self) -> None:
        """Makes the tensors plain ones again, after all rows were updated."""
        if not self.active:
            return
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = (
                    nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
                )
                tensor.__dict__.pop("_lag", None)
        self.active = False

    def _update(self) -> None:
        start = time.perf_counter()
        self._memory.settle()
        self.seconds += time.perf_counter() - start
        self.count += 1

    def mark(self, *, is_marked: bool) -> None:
        """Marks the tables, or makes them plain parameters for a while, if their rows are behind."""
        if not self.active:
            return
        for reference in self._tables:
            parameter = reference()
            if parameter is not None:
                parameter.__class__ = _LaggingParameter if is_marked else nn.Parameter


def catch_up(tree: Any) -> None:
    """Updates the rows of all tensors of a tree that are behind."""
    for tensor in tensors_in(tree):
        if isinstance(tensor, _LaggingTensor | _LaggingParameter):
            tensor.__dict__["_lag"].settle()


def _storage(tensor: Tensor) -> int:
    # This is no use of its values, before which its rows would be updated.
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _users_of(tensor: Tensor) -> int:
    """Returns how many tensors share the memory of one, with itself."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        # Less this storage itself.
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _caught_up_first(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Updates the rows that are behind, and then calls ``func``; the ``__torch_function__`` of marked tensors."""
    catch_up((args, kwargs))
    return func(*args, **(kwargs or {}))


class _LaggingTensor(Tensor):
    """A tensor of an optimizer's state that is behind until somebody looks at it; then it is a plain tensor again."""

    __torch_function__: Any = classmethod(_caught_up_first)

    def __deepcopy__(self, memo: Any) -> Any:
        catch_up(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        catch_up(self)
        return self.__reduce_ex__(protocol)


class _LaggingParameter(nn.Parameter):
    """A weight that is behind until somebody looks at it; then it is a plain parameter again."""

    __torch_function__: Any = classmethod(_caught_up_first)
    __deepcopy__ = _LaggingTensor.__deepcopy__
    __reduce_ex__ = _LaggingTensor.__reduce_ex__
