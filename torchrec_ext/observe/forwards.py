"""Forwards: sub-networks of a step that do not read each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrec_ext.observe.reached import named_modules

_HEAVY = 0.15  # of a level's seconds, from which on a module is a sub-network


class Forwards:
    """The forwards of a step's modules: their seconds, and which of them reads what another one returned.

    Args:
        roots: modules of the step.
        clock: clock of this thread.
    """

    def __init__(self, roots: Sequence[nn.Module], clock: Callable[[], float]) -> None:
        self._roots = roots
        self._clock = clock
        self._seconds: dict[nn.Module, list[float]] = {}
        self._inputs: dict[nn.Module, list[Any]] = {}
        self._outputs: dict[nn.Module, set[Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches one step."""
        with ExitStack() as stack:
            for module in dict.fromkeys(
                module for _, module in named_modules(self._roots)
            ):
                if next(module.parameters(), None) is not None:
                    stack.callback(
                        module.register_forward_pre_hook(
                            self._enter, with_kwargs=True
                        ).remove
                    )
                    stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs[module] = list(functions_of((args, kwargs)))
        self._seconds.setdefault(module, []).append(-self._clock())

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._seconds[module][-1] += self._clock()
        self._outputs[module] = set(functions_of(result))

    def independent(self) -> dict[str, float]:
        """Returns the seconds of heavy, independent sub-networks by path; empty for none."""
        level = [(type(root).__name__, root) for root in self._roots]
        if len(level) > 1:
            # Several modules that no other one holds may be of one class.
            level = [
                (f"{path}[{number}]", root) for number, (path, root) in enumerate(level)
            ]
        while True:
            level = list(
                chain.from_iterable(
                    self._called(path, module) for path, module in level
                )
            )
            spent = {module: self._seconds[module][0] for _, module in level}
            heavy = [
                (path, module)
                for path, module in level
                if spent[module] >= _HEAVY * sum(spent.values())
            ]
            if len(heavy) != 1:
                break
            # One takes nearly all: what is independent of each other is inside of it.
            ((path, module),) = heavy
            level = [
                (f"{path}.{name}", child) for name, child in module.named_children()
            ]
            if not level:
                return {}
        independent: dict[str, nn.Module] = {}
        for path, module in sorted(heavy, key=lambda each: -spent[each[1]]):
            others = independent.values()
            is_dependent = any(
                self._reads(module, other) or self._reads(other, module)
                for other in others
            )
            # A module without outputs in autograd's graph may be read by anything.
            if self._outputs[module] and not is_dependent:
                independent[path] = module
        if len(independent) < 2:
            return {}
        return {path: spent[module] for path, module in independent.items()}

    def _called(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yields a module if a step calls it once; for a list of modules each of its own."""
        calls = len(self._seconds.get(module, ()))
        if calls == 1:
            yield path, module
        elif calls == 0:
            for name, child in module.named_children():
                yield from self._called(f"{path}.{name}", child)

    def _reads(self, module: nn.Module, other: nn.Module) -> bool:
        outputs = self._outputs[other]
        waiting = list(self._inputs[module])
        visited = set(waiting)
        while waiting:
            function = waiting.pop()
            if function in outputs:
                return True
            new = {
                each for each, _ in function.next_functions if each is not None
            } - visited
            visited |= new
            waiting += new
        return False


def functions_of(value: Any) -> Iterator[Any]:
    """Yields the autograd functions of the tensors in a value, also in dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.grad_fn is not None:
                yield leaf.grad_fn
        elif dataclasses.is_dataclass(leaf):
            yield from functions_of(
                [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            )
