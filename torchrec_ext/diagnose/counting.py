"""Counted: the ops of a step by the user's lines that make them, its matrix products, the ids that tables read.

Yardsticks of this machine: what its products would take alone, and the rates of a large product and of a large copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchrec_ext.diagnose.facts import TableFacts
from torchrec_ext.train.report.trace import length, union

_SYNCS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal")
_PRODUCTS = set(flop_registry)
_HEAVY = 0.15  # of a level's seconds, from which on a module is a sub-network
_LARGE = 1e7  # floating-point operations from which on a product's rate is the machine's


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the aten ops of a step by the user's line that makes them, its products, and the ids that tables read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self.lines: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.products: Counter[Product] = Counter()
        self.tables: dict[int, tuple[TableFacts, Any]] = {}
        self._module = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        line = users_line()
        self.ops += 1
        self.lines[line] += 1
        packet = func._overloadpacket
        if packet.__name__ in _SYNCS and line not in ("backward", "optimizer"):
            self.syncs[line] += 1
        if packet in _PRODUCTS and all(not isinstance(each, Tensor) or each.is_floating_point() for each in args[:2]):
            shapes = tuple((tuple(each.shape), each.dtype) for each in args if isinstance(each, Tensor))
            rest = tuple(None if isinstance(each, Tensor) else _hashable(each) for each in args)
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            transposed = tuple(each.dim() == 2 and each.stride(0) == 1 for each in args if isinstance(each, Tensor))
            self.products[
                Product(func, shapes, rest, transposed, flops, "" if line == "backward" else self._module)
            ] += 1
        return result

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Notes meanwhile how many ids each table is read by, and which module runs."""
        with ExitStack() as stack:
            for root in modules:
                for path, module in root.named_modules():
                    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                        handle = module.register_forward_pre_hook(self._reader(path or type(module).__name__))
                        stack.callback(handle.remove)
                    elif not list(module.children()):
                        stack.callback(module.register_forward_pre_hook(self._entering(path)).remove)
            yield

    def _reader(self, path: str) -> Callable[[Any, Any], None]:
        def read(module: Any, args: Any) -> None:
            if not args or not isinstance(args[0], Tensor):
                return
            before = self.tables.get(id(module))
            count = args[0].numel() + (before[0].read if before else 0)
            facts = TableFacts(name=path, rows=module.weight.shape[0], dim=module.weight.shape[1], read=count)
            self.tables[id(module)] = facts, module

        return read

    def _entering(self, path: str) -> Callable[[Any, Any], None]:
        return lambda module, args: setattr(self, "_module", path)


class Product(NamedTuple):
    """A matrix product of a step: shapes and dtypes of its tensors, and what else it is called with."""

    func: Any
    shapes: tuple[Any, ...]
    rest: tuple[Any, ...]
    transposed: tuple[bool, ...]
    flops: int
    module: str


class Products(NamedTuple):
    """Seconds and floating-point operations of all products of a step.

    ``rate``: operations a second of the fastest large one; ``layers``: shares of the forward's by module.
    """

    seconds: float = 0.0
    flops: float = 0.0
    rate: float = 0.0
    layers: tuple[tuple[str, float], ...] = ()


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def time_products(counted: Counter[Product], price: float) -> Products:
    """Times each shape of product alone, the best of many, without the price of a call."""
    seconds, flops, rate = 0.0, 0.0, 0.0
    layers: Counter[str] = Counter()
    timed: dict[Any, float] = {}
    for product, count in counted.items():
        key = product[:4]
        if key not in timed:
            timed[key] = _best(_made(product), price)
        seconds += count * timed[key]
        flops += count * product.flops
        if product.flops > _LARGE:
            rate = max(rate, product.flops / timed[key])
        if product.module:
            layers[product.module] += count * product.flops
    whole = sum(layers.values())
    shares = tuple((name, share / whole) for name, share in layers.most_common(5)) if whole else ()
    return Products(seconds, flops, rate, shares)


def _made(product: Product) -> Callable[[], Any]:
    tensors = iter(
        torch.randn(shape, dtype=dtype) if not turned else torch.randn(shape[::-1], dtype=dtype).t()
        for (shape, dtype), turned in zip(product.shapes, product.transposed, strict=True)
    )
    args = [next(tensors) if each is None else each for each in product.rest]
    return lambda: product.func(*args)


def _best(call: Callable[[], Any], price: float) -> float:
    with torch.no_grad():
        call()
        best, end = float("inf"), time.perf_counter() + 0.1
        for _ in range(200):
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() > end:
                break
    return max(best - 0.5 * price, 0.1 * best)


def users_line() -> str:
    """Returns the line of the user's from which the caller was called; ``backward`` or ``optimizer`` below these."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _EXPERIMENTS:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return "optimizer"
        if file.startswith(_AUTOGRAD) and frame.f_code.co_name in ("backward", "grad"):
            return "backward"
        if not file.startswith(_NOT_THE_USERS) and not file.startswith("<"):
            return f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "step"


@contextmanager
def seconds_at(lines: Collection[str], clock: Callable[[], float] = time.perf_counter) -> Iterator[list[float]]:
    """Adds up the seconds that this thread spends at lines, as :func:`users_line` names them.

    Yields:
        A list, whose one entry is these seconds.

    Raises:
        RuntimeError: a debugger traces this thread already.
    """
    if sys.gettrace() is not None:
        raise RuntimeError("a debugger or a coverage tool traces the lines of this thread; run without it")
    numbers: dict[tuple[str, str], set[int]] = {}
    for line in lines:
        file_line, _, function = line.partition(" in ")
        file, _, number = file_line.rpartition(":")
        numbers.setdefault((file, function), set()).add(int(number) if number.isdigit() else 0)
    spent = [0.0]
    by_code: dict[Any, set[int]] = {}

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in by_code:
            by_code[code] = numbers.get((os.path.basename(code.co_filename), code.co_name), set())
        return _at_lines(by_code[code], spent, clock) if by_code[code] else None

    sys.settrace(entered)
    try:
        yield spent
    finally:
        sys.settrace(None)


def _at_lines(numbers: Collection[int], spent: list[float], clock: Callable[[], float]) -> Callable[..., Any]:
    began: float | None = None

    def moved(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal began
        if began is not None:
            spent[0] += clock() - began
        began = clock() if event == "line" and frame.f_lineno in numbers else None
        return moved

    return moved


class Forwards:
    """The forwards of a step's modules: their seconds, and which of them reads what another one returned.

    Args:
        roots: modules of the step.
        clock: clock of this thread.
    """

    def __init__(self, roots: Sequence[nn.Module], clock: Callable[[], float]) -> None:
        self._roots, self._clock = roots, clock
        self._seconds: dict[nn.Module, list[float]] = {}
        self._read: dict[nn.Module, list[Any]] = {}
        self._returned: dict[nn.Module, set[Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches one step."""
        with ExitStack() as stack:
            for module in {each: None for root in self._roots for each in root.modules()}:
                if next(module.parameters(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._read[module] = list(functions_of((args, kwargs)))
        self._seconds.setdefault(module, []).append(-self._clock())

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._seconds[module][-1] += self._clock()
        self._returned[module] = set(functions_of(result))

    def apart(self) -> dict[str, float]:
        """Returns the seconds of sub-networks of some weight that do not read each other, by path; empty for none."""
        numbers = [f"[{number}]" if len(self._roots) > 1 else "" for number in range(len(self._roots))]
        level = [(f"{type(root).__name__}{number}", root) for number, root in zip(numbers, self._roots, strict=True)]
        while True:
            level = [each for path, module in level for each in self._called(path, module)]
            spent = {module: self._seconds[module][0] for _, module in level}
            heavy = [(path, module) for path, module in level if spent[module] >= _HEAVY * sum(spent.values())]
            if len(heavy) != 1:
                break
            ((path, module),) = heavy
            level = [(f"{path}.{name}", child) for name, child in module.named_children()]
            if not level:
                return {}
        chosen: list[tuple[str, nn.Module]] = []
        for path, module in sorted(heavy, key=lambda each: -spent[each[1]]):
            if self._returned[module] and not any(
                self._reads(module, other) or self._reads(other, module) for _, other in chosen
            ):
                chosen.append((path, module))
        return {path: spent[module] for path, module in chosen} if len(chosen) > 1 else {}

    def _called(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yields a module that a step calls once; of a list that holds modules, and is not called, those."""
        calls = len(self._seconds.get(module, ()))
        if calls == 1:
            yield path, module
        elif calls == 0:
            for name, child in module.named_children():
                yield from self._called(f"{path}.{name}", child)

    def _reads(self, module: nn.Module, other: nn.Module) -> bool:
        wanted, waiting = self._returned[other], list(self._read[module])
        seen = set(waiting)
        while waiting:
            function = waiting.pop()
            if function in wanted:
                return True
            new = {each for each, _ in function.next_functions if each is not None} - seen
            seen |= new
            waiting += new
        return False


def functions_of(value: Any) -> Iterator[Any]:
    """Yields the autograd functions that made the tensors in a value, also in dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.grad_fn is not None:
                yield leaf.grad_fn
        elif dataclasses.is_dataclass(leaf):
            yield from functions_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def device_use(spans: Collection[tuple[float, float]]) -> float:
    """Returns the share of the time from the first span to the last in which one of them ran; 0 for none.

    Example:
        >>> device_use([(0.0, 2.0), (1.0, 3.0), (7.0, 8.0)])
        0.5
    """
    if not spans:
        return 0.0
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return length(union(spans)) / whole if whole else 0.0


def device_spans(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Returns the spans of kernels and copies that a call runs on CUDA devices, in microseconds, by torch.profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def count_ops(call: Callable[[], object], modules: Sequence[nn.Module]) -> Counted:
    """Counts the ops of a call that trains on a batch."""
    counted = Counted()
    with counted.watching(modules), counted:
        call()
    return counted


_EXPERIMENTS = os.path.join(os.path.dirname(__file__), "experiments.py")
_OPTIMIZERS, _AUTOGRAD = (os.path.join(os.path.dirname(torch.__file__), name) for name in ("optim", "autograd"))
_NOT_THE_USERS = (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(contextlib.__file__))


def described(error: BaseException) -> str:
    """Returns an error's kind, its first line, and the user's line that raised it."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    text = next(iter(str(error).splitlines()), "")
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:300]}{where}"


def compiled_graphs() -> int:
    """Returns how many graphs torch.compile has made."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def bytes_read() -> int | None:
    """Returns how many bytes this thread has read from files; None where the system does not say."""
    try:
        with open("/proc/thread-self/io") as stream:
            before = dict(line.split(": ") for line in stream)
    except (OSError, ValueError):
        return None
    return int(before["rchar"])


def roofline() -> tuple[float, float]:
    """Returns floating-point operations of a large product, and bytes of a large copy, a second, on today's threads."""
    size, many = 768, 2**24
    left, source = torch.randn(size, size), torch.ones(many)
    target = torch.empty(many)
    product = _best(lambda: left @ left, 0.0)
    copied = _best(lambda: target.copy_(source), 0.0)
    return 2 * size**3 / product, 2 * 4 * many / copied
