"""SmallTables: small tables in place of large ones, for an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchrec_ext.observe.state_copy import StateCopy


class SmallTables:
    """Tables of a few rows in place of large ones, while this context is open: ids are taken modulo their number.

    The step then runs as if an optimizer moved only the rows that are read. The user's parameters and their state are
    not touched: others stand in their place in modules and optimizers.

    Args:
        state: knows all modules and optimizers.
        tables: modules of tables, with the ids that a step reads of each.
        rows_for_each: rows of a small table for each id that a step reads.
    """

    def __init__(self, state: StateCopy, tables: Sequence[tuple[Any, int]], rows_for_each: int) -> None:
        self._state, self._tables, self._modules = state, tables, [module for module, _ in tables]
        self._small: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self._rows_for_each = rows_for_each
        self._stack = ExitStack()

    def __enter__(self) -> SmallTables:
        if not self._small:
            self._make()
        with ExitStack() as stack:
            for root in self._state.modules:
                for module in root.modules():
                    for name, parameter in module._parameters.items():
                        if parameter is not None and id(parameter) in self._small:
                            module._parameters[name] = self._small[id(parameter)][1]
                            stack.callback(module._parameters.__setitem__, name, parameter)
            for module in self._modules:
                stack.callback(module.register_forward_pre_hook(_modulo).remove)
            for optimizer in self._state.optimizers:
                self._swap(optimizer, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _make(self) -> None:
        for module, reads in self._tables:
            weight = module.weight
            rows = min(len(weight), max(1 + (module.padding_idx or 0), self._rows_for_each * reads))
            if id(weight) in self._small:
                rows = max(rows, len(self._small[id(weight)][1]))
            self._small[id(weight)] = weight, nn.Parameter(weight.detach()[:rows].clone())

    def _swap(self, optimizer: Optimizer, stack: ExitStack) -> None:
        for group in optimizer.param_groups:
            params = group["params"]
            for index, parameter in enumerate(params):
                if id(parameter) not in self._small:
                    continue
                small = self._small[id(parameter)][1]
                key = id(optimizer), id(parameter)
                if key not in self._states:
                    self._states[key] = {
                        name: _first_rows(value, parameter, small)
                        for name, value in optimizer.state.get(parameter, {}).items()
                    }
                if self._states[key]:
                    optimizer.state[small] = self._states[key]
                params[index] = small
                stack.callback(optimizer.state.pop, small, None)
                stack.callback(params.__setitem__, index, parameter)


def _first_rows(value: Any, parameter: Tensor, small: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value[: len(small)] if value.shape[:1] == parameter.shape[:1] else value).clone()


def _modulo(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] % len(module.weight), *args[1:])
