"""Counted: the ops of a step by the user's lines, with the seconds inside of them; its products; the ids that it reads.

Samples: the seconds of a training loop by the user's lines, whatever they do.

Yardsticks of this machine: the rates of a large product and of a large copy.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchrec_ext.observe.counts import AllItems, TableFacts, WholeTableOp
from torchrec_ext.observe.intervals import length, union
from torchrec_ext.observe.user_lines import SampledLine, Stack, lines_of, owner_of, stack_of

_SYNCS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal")
_LOOK_UPS = ("embedding", "_embedding_bag", "index", "index_select", "gather")
_LOOK_UP_BACKWARDS = ("embedding_dense_backward", "_embedding_bag_dense_backward", "_index_put_impl_", "new_zeros")
_SOFTMAX = ("_log_softmax", "_softmax", "logsumexp")
_PRODUCTS = set(flop_registry)
_HEAVY = 0.15  # of a level's seconds, from which on a module is a sub-network
_LARGE_SIZE = 2_048  # entries from which on a dimension may be a table's or a catalogue's
_FEW = 1_024  # numbers on which an op does no work worth mention
_WHOLE = 5  # a step reads few rows of a table that has so many times as many
_SAMPLE_EVERY_S = 3e-3
_BATCHES = str(Path(__file__).parents[1] / "diagnose" / "batches.py")
_COUNTING_S = 1.0  # seconds of counted steps after which none is counted again
_LARGE = 1e7  # floating-point operations from which on a product's rate is the machine's


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts and times the aten ops of a step by the user's lines, its products, and the ids that tables read.

    Attributes:
        ops: number of ops.
        bare: number of these that autograd does not record, without those of backward.
        seconds: seconds inside of all ops.
        work: seconds inside of ops on many numbers, beyond what an op on few numbers takes.
        lines: number of ops by the line that makes them, a library's too.
        own: ops and seconds by the user's own line.
        kinds: seconds by name of the op.
        syncs: ops that bring a value to Python, by the user's own line; ``by_line`` has those that only feed these too.
        products: matrix products.
        tables: embedding modules that were read.
        looked_up: ids by number of rows of the tensor in which they are looked up.
        by_rows: seconds by number of rows and line, of ops of the user's lines on a floating tensor of so many rows.
        by_size: seconds by size, of ops on a tensor that has a large dimension of this size.
        softmax: sizes over which a softmax is taken, with the line.
        mixed: numbers of rows that a sparse product mixes, so that each row needs the others.
        double: seconds in ops of 64-bit floats by line.
        modes: names of autograd's debugging modes that were on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = self.bare = 0
        self.seconds = self.work = 0.0
        self._few: list[float] = []  # seconds of each op on few numbers
        self._many: list[float] = []
        self._flow = Flow()
        self._line_of_op: list[OpsOfLine] = []
        self._read_by_python: list[int] = []  # numbers of ops
        self.lines: Counter[str] = Counter()
        self.by_line: dict[SampledLine, OpsOfLine] = {}
        self.kinds: defaultdict[str, float] = defaultdict(float)
        self.syncs: Counter[str] = Counter()
        self.products: dict[Product, list[float]] = {}
        self.tables: dict[int, tuple[TableFacts, Any]] = {}
        self.looked_up: Counter[int] = Counter()
        self.by_rows: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.by_size: defaultdict[int, float] = defaultdict(float)
        self.softmax: dict[int, str] = {}
        self.mixed: set[int] = set()
        self.double: defaultdict[str, float] = defaultdict(float)
        self.modes: set[str] = set()
        self._module = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        stack = stack_of(sys._getframe(1))
        line, users_line = lines_of(stack)
        self.ops += 1
        self.seconds += seconds
        self.lines[line] += 1
        ops_of_line = self.by_line.setdefault(users_line, OpsOfLine())
        ops_of_line.ops += 1
        ops_of_line.seconds += seconds
        self._line_of_op.append(ops_of_line)
        number = self._flow.note(func, (args, kwargs), result)
        packet = func._overloadpacket
        self.kinds[packet.__name__] += seconds
        if packet.__name__ in _SYNCS and line not in ("backward", "optimizer"):
            self.syncs[users_line.name] += 1
            self._read_by_python.append(number)
        tensors = [each for each in args if isinstance(each, Tensor)]
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        self.bare += not recorded and line != "backward"
        if packet in _PRODUCTS and all(each.is_floating_point() and each.layout == torch.strided for each in tensors):
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            shapes = tuple((tuple(each.shape), each.dtype, each.stride()) for each in tensors)
            product = Product(packet.__name__, shapes, flops, "" if line == "backward" else self._module)
            self.products.setdefault(product, []).append(seconds)
        if torch.is_anomaly_enabled():
            self.modes.add("anomaly mode")
        if torch.autograd._profiler_enabled():
            self.modes.add("a profiler")
        in_optimizer = any(owner_of(code.co_filename) == "optimizer" for code, _ in stack)  # the user's own class too
        self._note_sizes(packet, args, result, seconds, "optimizer" if in_optimizer else users_line.name)
        return result

    def _note_sizes(self, packet: Any, args: Any, result: Any, seconds: float, line: str) -> None:
        """Notes what the sizes and the dtype of an op's tensors say of it."""
        tensors = _tensors_in((args, result))
        name = packet.__name__
        most = max((each.numel() for each in tensors), default=0)
        (self._many if most > _FEW else self._few).append(seconds)
        if name in _LOOK_UPS:
            ids = args[1] if isinstance(args[1], Tensor) else args[-1]
            count = max((each.numel() for each in pytree.tree_leaves(ids) if isinstance(each, Tensor)), default=0)
            if args[0].dim() > 1 and args[0].is_floating_point() and count:
                self.looked_up[len(args[0])] += count
        else:
            rows = {len(each) for each in tensors if each.dim() > 1 and each.is_floating_point()}
            rows = {count for count in rows if count >= _LARGE_SIZE}
            if any(each.layout != torch.strided for each in tensors):
                self.mixed |= rows if "mm" in name else set()  # a sparse gradient mixes nothing
            elif rows and packet not in _PRODUCTS and name not in _LOOK_UP_BACKWARDS and line != "optimizer":
                for count in rows:
                    self.by_rows[count, line] += seconds
        if name in _SOFTMAX and tensors[0].dim():
            dimension = args[1][0] if isinstance(args[1], list) else args[1]
            self.softmax.setdefault(tensors[0].shape[dimension], line)
        for size in {size for each in tensors for size in each.shape if size >= _LARGE_SIZE}:
            self.by_size[size] += seconds
        if any(each.dtype == torch.float64 and each.numel() > 1 for each in tensors):
            self.double[line] += seconds

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Notes meanwhile how many ids each table is read by, which module runs, and what backward begins with."""
        with ExitStack() as stack:
            stack.enter_context(calls_of_autograd(self._flow.needed_by))
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

    def sum_up(self) -> None:
        """Adds up the work of ops, without the price that an op on few numbers has too, and ops that feed Python."""
        for number in self._flow.feeding(self._read_by_python):
            self._line_of_op[number].feeding += 1
        price = statistics.median(self._few) if self._few else min(self._many, default=0.0)
        self.work = sum(max(0.0, seconds - price) for seconds in self._many)

    def scale_to(self, step: float) -> None:
        """Makes the seconds of all ops no longer than a step takes: ops were timed once, while others may have run."""
        factor = min(1.0, step / self.seconds) if self.seconds else 1.0
        self.seconds *= factor
        self.work *= factor
        sums: list[dict[Any, float]] = [self.kinds, self.by_rows, self.by_size, self.double]
        for held in sums:
            for key in held:
                held[key] *= factor
        for ops in self.by_line.values():
            ops.seconds *= factor
        for times in self.products.values():
            times[:] = [seconds * factor for seconds in times]

    def whole_tables(self, tables: Collection[int]) -> Iterator[WholeTableOp]:
        """Yields lines that work on all rows of a table of which few are looked up; ``tables`` are numbers of rows."""
        for (rows, line), seconds in self.by_rows.items():
            read = self.looked_up[rows]
            few = rows in tables and rows not in self.mixed and 0 < _WHOLE * read < rows
            if few and line not in ("backward", "optimizer"):
                backward = self.by_rows.get((rows, "backward"), 0.0)
                yield WholeTableOp(line=line, rows=rows, read=read, seconds=seconds, backward_s=backward)

    def all_items(self) -> Iterator[AllItems]:
        """Yields softmaxes over so many items that these take time."""
        for size, line in self.softmax.items():
            if size >= _LARGE_SIZE:
                yield AllItems(line=line, items=size, seconds=self.by_size[size])


class Product(NamedTuple):
    """A matrix product of a step: shapes, dtypes and strides of its tensors."""

    name: str
    shapes: tuple[Any, ...]
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


def sum_products(products: Mapping[Product, Sequence[float]]) -> Products:
    """Adds up the products of a step as they were timed in it."""
    seconds, flops, rate = 0.0, 0.0, 0.0
    layers: Counter[str] = Counter()
    for product, times in products.items():
        seconds += sum(times)
        flops += len(times) * product.flops
        if product.flops > _LARGE:
            rate = max(rate, product.flops / min(times))
        if product.module:
            layers[product.module] += len(times) * product.flops
    whole = sum(layers.values())
    shares = tuple((name, share / whole) for name, share in layers.most_common(5)) if whole else ()
    return Products(seconds, flops, rate, shares)


def best_seconds(call: Callable[[], Any]) -> float:
    """Returns the least seconds of a call, of as many as a tenth of a second holds."""
    call()
    best, end = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@dataclasses.dataclass
class OpsOfLine:
    """Ops that a line makes in a step, the seconds inside of them, and those that only feed values to Python."""

    ops: int = 0
    seconds: float = 0.0
    feeding: int = 0


class Flow:
    """Which ops of a step read what other ops of it wrote.

    An op has its number. A tensor is told by its Python object and its storage together, since both are used again.
    One that no op was seen to return, as autograd's saved ones, stands for all that was written to its storage.
    """

    def __init__(self) -> None:
        self._readers: list[set[int]] = []  # by op
        self._needed: set[int] = set()  # ops whose results are read by more than ops
        self._returned: dict[int, tuple[int, int]] = {}  # storage and op by id of a tensor
        self._writers: dict[int, list[int]] = {}  # ops by storage

    def note(self, func: Any, given: Any, result: Any) -> int:
        """Notes an op, and returns its number."""
        number = len(self._readers)
        self._readers.append(set())
        read, made = _tensors_in(given), _tensors_in(result)
        for tensor in read:
            for writer in self._writers_of(tensor):
                self._readers[writer].add(number)
        objects, storages = {id(tensor) for tensor in read}, {_storage_of(tensor) for tensor in read}
        writes = func._schema.is_mutable
        if writes and not made:
            self._needed.add(number)
        for tensor in made:
            storage = _storage_of(tensor)
            if writes and id(tensor) in objects:
                if storage not in self._writers:  # of a parameter, or of a sum over steps
                    self._needed.add(number)
                self._writers.setdefault(storage, []).append(number)
            elif storage not in storages:
                self._writers[storage] = [number]
            self._returned[id(tensor)] = storage, number
        return number

    def _writers_of(self, tensor: Tensor) -> list[int]:
        storage, number = self._returned.get(id(tensor), (0, 0))
        return [number] if storage == _storage_of(tensor) else self._writers.get(_storage_of(tensor), [])

    def needed_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that also notes that it needs the tensors which it takes."""

        def call(*args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors_in((args, kwargs)):
                self._needed.update(self._writers_of(tensor))
            return function(*args, **kwargs)

        return call

    def feeding(self, last: Collection[int]) -> set[int]:
        """Returns these ops, and all those whose results nothing but these and each other reads."""
        made = set(last)
        for number in reversed(range(len(self._readers))):
            readers = self._readers[number]
            if readers and readers <= made and number not in self._needed:
                made.add(number)
        return made


def _tensors_in(value: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _storage_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # it has none, as a sparse one and that of a function transform
        return id(tensor)


@contextmanager
def calls_of_autograd(changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces what starts a backward by functions that are made of it."""
    with ExitStack() as stack:
        for name in ("backward", "grad"):
            function = getattr(torch.autograd, name)
            setattr(torch.autograd, name, changed(function))
            stack.callback(setattr, torch.autograd, name, function)
        yield


def _part_and_line(stack: Stack) -> tuple[str, SampledLine]:
    taken = any(code.co_filename == _BATCHES and code.co_name == "take" for code, _ in stack)
    return "data" if taken else "step", lines_of(stack)[1]


class Samples:
    """Seconds of this thread by line, which another thread looks up again and again while the context is open.

    Python hands over from one thread to the next where a call has ended. A short switch interval makes that the line
    that took the time, and not a later one.

    Garbage collections are no time of the line at which they begin.

    Attributes:
        seconds: seconds by part (``data`` or ``step``) and line.
        saved: files that ``torch.save`` was seen to write.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, SampledLine], float] = defaultdict(float)
        self.saved: set[str] = set()
        self._stacks: defaultdict[Stack, float] = defaultdict(float)
        self._collected: defaultdict[Stack, float] = defaultdict(float)
        self._began = 0.0
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Samples:
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        gc.callbacks.append(self._collect)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        gc.callbacks.remove(self._collect)
        sys.setswitchinterval(self._switch_interval)
        for stack, seconds in self._stacks.items():
            self.seconds[_part_and_line(stack)] += seconds
        for stack, seconds in self._collected.items():
            part, line = _part_and_line(stack)
            seconds = min(seconds, self.seconds[part, line])
            self.seconds[part, line] -= seconds
            self.seconds[part, SampledLine("garbage")] += seconds

    def _collect(self, phase: str, _: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collected[tuple(stack_of(sys._getframe(1)))] += time.perf_counter() - self._began

    def _sample(self) -> None:
        generator = random.Random(0)  # a step of a regular length is not always met at the same line
        due = time.perf_counter()
        while not self._stop.wait(due - time.perf_counter()):  # little is done here, since the loop waits for it
            frame = sys._current_frames().get(self._thread)
            now, past = time.perf_counter(), due
            while due <= now:  # moments are set beforehand: a call that holds Python has all that fall into it
                due += generator.uniform(0.2, 1.8) * _SAMPLE_EVERY_S
            self._stacks[tuple(stack_of(frame))] += due - past
            while frame is not None and frame.f_code is not torch.save.__code__:
                frame = frame.f_back
            if frame is not None and isinstance(frame.f_locals.get("f"), str | os.PathLike):
                self.saved.add(os.fspath(frame.f_locals["f"]))


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
    """Counts and times the ops of a call that trains on a batch; of three calls, if there is time, the fastest one."""
    counts: list[Counted] = []
    while len(counts) < 3 and sum(each.seconds for each in counts) < _COUNTING_S:
        counted = Counted()
        with counted.watching(modules), counted:
            call()
        counted.sum_up()
        counts.append(counted)
    return min(counts, key=lambda each: each.seconds)


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
    product = best_seconds(lambda: left @ left)
    copied = best_seconds(lambda: target.copy_(source))
    return 2 * size**3 / product, 2 * 4 * many / copied
