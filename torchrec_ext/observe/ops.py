"""Counted: the ops of a step by the user's lines and by the sizes of their tensors; its products and its tables."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchrec_ext.observe.counts import AllItems, TableFacts, WholeTableOp
from torchrec_ext.observe.lookups import count_lookups
from torchrec_ext.observe.reached import named_modules
from torchrec_ext.observe.user_lines import SampledLine, lines_of, owner_of, stack_of

_TO_PYTHON = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "masked_select",
    "equal",
)
_LOOK_UPS = ("embedding", "_embedding_bag", "index", "index_select", "gather")
_LOOK_UP_BACKWARDS = (
    "embedding_dense_backward",
    "_embedding_bag_dense_backward",
    "_index_put_impl_",
    "new_zeros",
)
_SOFTMAX = ("_log_softmax", "_softmax", "logsumexp")
_PRODUCTS = set(flop_registry)
_LARGE_SIZE = (
    2_048  # entries from which on a dimension may be a table's or a catalogue's
)
_FEW = 1_024  # numbers on which an op does no work worth mention
_WHOLE = 5  # a step reads few rows of a table that has so many times as many
_COUNTING_S = 1.0  # seconds of counted steps after which none is counted again
_LARGE = (
    1e7  # floating-point operations from which on a product's rate is the machine's
)


def waits_for_device(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> bool:
    """Returns whether the host waits for a GPU at an op: it reads values, or the size of the result depends on them."""
    kwargs = kwargs or {}
    if torch.Tag.data_dependent_output in func.tags:
        return True
    name = func.name().partition(".")[0]
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        # Of these, only an index by a mask depends on values.
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    devices = [each.device.type for each in tensors_in(args)]
    # copy_ takes it by position
    non_blocking = kwargs.get("non_blocking") or args[-1] is True
    if (
        name in ("aten::_to_copy", "aten::copy_")
        and devices[-1] == "cuda"
        and not non_blocking
    ):
        # The copy's target comes first, or is not among the arguments.
        target = kwargs.get("device") if len(devices) == 1 else devices[0]
        return target is not None and torch.device(target).type == "cpu"
    return (
        torch.Tag.dynamic_output_shape in func.tags
        and kwargs.get("output_size") is None
    )


@dataclasses.dataclass
class OpsOfLine:
    """The ops of a line in a step.

    Attributes:
        ops: number of ops.
        seconds: seconds inside of them.
        feeding: number of ops that only feed values to Python.
    """

    ops: int = 0
    seconds: float = 0.0
    feeding: int = 0


class Sizes:
    """Ops by the sizes and the dtypes of their tensors.

    Attributes:
        looked_up: ids by number of rows of the tensor in which they are looked up.
        by_rows: seconds by number of rows and line, of ops of the user's lines on a floating tensor of so many rows.
        by_size: seconds by size, of ops on a tensor that has a large dimension of this size.
        softmax: sizes over which a softmax is taken, with the line.
        mixed: numbers of rows that a sparse product mixes, so that each row needs the others.
        double: seconds in ops of 64-bit floats by line.
        few: seconds of each op on few numbers.
        many: seconds of each other op.
    """

    def __init__(self) -> None:
        self.looked_up: Counter[int] = Counter()
        self.by_rows: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.by_size: defaultdict[int, float] = defaultdict(float)
        self.softmax: dict[int, str] = {}
        self.mixed: set[int] = set()
        self.double: defaultdict[str, float] = defaultdict(float)
        self.few: list[float] = []
        self.many: list[float] = []

    def add(
        self,
        packet: Any,
        args: Any,
        tensors: Sequence[Tensor],
        seconds: float,
        line: str,
    ) -> None:
        """Adds an op of a line; ``tensors`` are those of its arguments and results."""
        name = packet.__name__
        most = max((each.numel() for each in tensors), default=0)
        times = self.many if most > _FEW else self.few
        times.append(seconds)
        if name in _LOOK_UPS:
            ids = args[1] if isinstance(args[1], Tensor) else args[-1]
            count = max((each.numel() for each in tensors_in(ids)), default=0)
            if args[0].dim() > 1 and args[0].is_floating_point() and count:
                self.looked_up[len(args[0])] += count
        else:
            rows = set()
            for each in tensors:
                if (
                    each.dim() > 1
                    and each.is_floating_point()
                    and len(each) >= _LARGE_SIZE
                ):
                    rows.add(len(each))
            if any(each.layout != torch.strided for each in tensors):
                # A sparse gradient mixes nothing, only a sparse product does.
                if "mm" in name:
                    self.mixed |= rows
            elif (
                packet not in _PRODUCTS
                and name not in _LOOK_UP_BACKWARDS
                and line != "optimizer"
            ):
                for count in rows:
                    self.by_rows[count, line] += seconds
        if name in _SOFTMAX and tensors[0].dim():
            # logsumexp takes a list of dimensions.
            dimension = args[1][0] if isinstance(args[1], list) else args[1]
            self.softmax.setdefault(tensors[0].shape[dimension], line)
        # A set, because an op counts once for a size that several of its tensors have.
        for size in set(chain.from_iterable(each.shape for each in tensors)):
            if size >= _LARGE_SIZE:
                self.by_size[size] += seconds
        # A single number, such as a Python float, makes no op a 64-bit one.
        if any(each.dtype == torch.float64 and each.numel() > 1 for each in tensors):
            self.double[line] += seconds

    def work(self) -> float:
        """Returns the seconds of ops on many numbers, less the price of an op on few numbers."""
        # An op on few numbers does no work: its seconds are Python and dispatch, which
        # every op has.
        price = min(self.many, default=0.0)
        if self.few:
            price = statistics.median(self.few)
        return sum(max(0.0, seconds - price) for seconds in self.many)

    def whole_tables(self, tables: Collection[int]) -> Iterator[WholeTableOp]:
        """Yields the lines with ops on all rows of a table, of which few are looked up.

        Args:
            tables: numbers of rows of the tables.
        """
        for (rows, line), seconds in self.by_rows.items():
            count = self.looked_up[rows]
            few = (
                rows in tables and rows not in self.mixed and 0 < _WHOLE * count < rows
            )
            if few and line not in ("backward", "optimizer"):
                backward = self.by_rows.get((rows, "backward"), 0.0)
                yield WholeTableOp(
                    line=line,
                    rows=rows,
                    read=count,
                    seconds=seconds,
                    backward_s=backward,
                )

    def all_items(self) -> Iterator[AllItems]:
        """Yields the softmaxes over many items."""
        for size, line in self.softmax.items():
            if size >= _LARGE_SIZE:
                yield AllItems(line=line, items=size, seconds=self.by_size[size])


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts and times the aten ops of a step by the user's lines, its products, and the look-ups of its tables.

    Attributes:
        ops: number of ops.
        bare: number of these that autograd does not record, without those of backward.
        seconds: seconds inside of all ops.
        work: seconds inside of ops on many numbers, beyond what an op on few numbers takes.
        lines: number of ops by the line that makes them, a library's too.
        by_line: ops and seconds by the user's own line.
        kinds: seconds by name of the op.
        sizes: ops by the sizes of their tensors.
        syncs: ops that bring a value to Python, on a GPU all that wait for it, by the user's own line; ``by_line`` has
            those that only feed these too.
        syncs_of_loss: those of ``syncs`` before the backward pass.
        products: seconds of each call by matrix product.
        tables: facts and modules of the tables that were read.
        modes: names of autograd's debugging modes that were on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self.bare = 0
        self.seconds = 0.0
        self.work = 0.0
        self.lines: Counter[str] = Counter()
        self.by_line: dict[SampledLine, OpsOfLine] = {}
        self.kinds: defaultdict[str, float] = defaultdict(float)
        self.sizes = Sizes()
        self.syncs: Counter[str] = Counter()
        self.syncs_of_loss: Counter[str] = Counter()
        self.products: dict[Product, list[float]] = {}
        self.tables: dict[Any, tuple[TableFacts, Any]] = {}
        self.modes: set[str] = set()
        self._flow = Flow()
        self._line_of_op: list[OpsOfLine] = []
        self._sync_ops: list[int] = []
        self._module = ""
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        stack = stack_of(sys._getframe(1))
        line, users_line = lines_of(stack)
        if line == "step" and threading.get_ident() != self._thread:
            # Autograd runs the backward of a GPU's ops in a thread of its own, which
            # has no lines of Python.
            line, users_line = "backward", SampledLine("backward")
        self.ops += 1
        self.seconds += seconds
        self.lines[line] += 1
        ops_of_line = self.by_line.setdefault(users_line, OpsOfLine())
        ops_of_line.ops += 1
        ops_of_line.seconds += seconds
        self._line_of_op.append(ops_of_line)
        number = self._flow.add(func, (args, kwargs), result)
        packet = func._overloadpacket
        self.kinds[packet.__name__] += seconds
        # The mode sees ops of both devices, and a model may have parts on the CPU.
        op_tensors = tensors_in((args, result))
        if any(each.is_cuda for each in op_tensors):
            waits = waits_for_device(func, args, kwargs)
        else:
            # Backward and optimizer belong to torch: what Python reads there is not for
            # the user to change.
            waits = packet.__name__ in _TO_PYTHON and line not in (
                "backward",
                "optimizer",
            )
        if waits:
            self.syncs[users_line.name] += 1
            # A value that is read after the backward pass is none that the loss needs.
            if "backward" not in self.lines:
                self.syncs_of_loss[users_line.name] += 1
            self._sync_ops.append(number)
        tensors = [each for each in args if isinstance(each, Tensor)]
        is_recorded = torch.is_grad_enabled() and any(
            each.requires_grad for each in tensors
        )
        self.bare += not is_recorded and line != "backward"
        if packet in _PRODUCTS and all(
            each.is_floating_point() and each.layout == torch.strided
            for each in tensors
        ):
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            shapes = tuple(
                (tuple(each.shape), each.dtype, each.stride()) for each in tensors
            )
            product = Product(
                packet.__name__,
                shapes,
                flops,
                "" if line == "backward" else self._module,
            )
            self.products.setdefault(product, []).append(seconds)
        if torch.is_anomaly_enabled():
            self.modes.add("anomaly mode")
        if torch.autograd._profiler_enabled():
            self.modes.add("a profiler")
        line_of_sizes = users_line.name
        # The step of a user's own optimizer too: torch's wrapper around it is in the
        # stack.
        if any(owner_of(code.co_filename) == "optimizer" for code, _ in stack):
            line_of_sizes = "optimizer"
        self.sizes.add(packet, args, op_tensors, seconds, line_of_sizes)
        return result

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Notes the look-ups of tables, the running module and the starts of backward meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(calls_of_autograd(self._flow.using))
            self.tables = stack.enter_context(count_lookups(modules))
            for path, module in named_modules(modules):
                if not isinstance(module, nn.Embedding | nn.EmbeddingBag) and not list(
                    module.children()
                ):
                    stack.callback(
                        module.register_forward_pre_hook(self._entering(path)).remove
                    )
            yield

    def _entering(self, path: str) -> Callable[[Any, Any], None]:
        return lambda module, args: setattr(self, "_module", path)

    def sum_up(self) -> None:
        """Sums up the work of ops, and counts the ops behind values for Python alone."""
        for number in self._flow.feeding(self._sync_ops):
            self._line_of_op[number].feeding += 1
        self.work = self.sizes.work()

    def scale_to(self, step: float) -> None:
        """Makes the seconds of all ops no longer than a step takes: ops were timed once, while others may have run."""
        factor = min(1.0, step / self.seconds) if self.seconds else 1.0
        self.seconds *= factor
        self.work *= factor
        sums: list[dict[Any, float]] = [
            self.kinds,
            self.sizes.by_rows,
            self.sizes.by_size,
            self.sizes.double,
        ]
        for seconds_by_key in sums:
            for key in seconds_by_key:
                seconds_by_key[key] *= factor
        for ops in self.by_line.values():
            ops.seconds *= factor
        for times in self.products.values():
            times[:] = [seconds * factor for seconds in times]


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
    seconds = 0.0
    flops = 0.0
    rate = 0.0
    layers: Counter[str] = Counter()
    for product, times in products.items():
        seconds += sum(times)
        flops += len(times) * product.flops
        if product.flops > _LARGE:
            rate = max(rate, product.flops / min(times))
        if product.module:
            layers[product.module] += len(times) * product.flops
    whole = sum(layers.values())
    shares: list[tuple[str, float]] = []
    # Products of empty tensors have no operations.
    if whole:
        shares = [(name, share / whole) for name, share in layers.most_common(5)]
    return Products(seconds, flops, rate, tuple(shares))


class Flow:
    """The flow of results from op to op in a step.

    Ops are numbered in their order. A tensor is recognised by its Python object and its storage together, since Python
    and torch use each of them again. A tensor that no op was seen to return, such as one that autograd has saved,
    counts as the result of every op that wrote to its storage.
    """

    def __init__(self) -> None:
        self._readers: list[set[int]] = []  # by op
        self._used: set[int] = set()  # ops whose results are read by more than ops
        self._results: dict[
            int, tuple[int, int]
        ] = {}  # storage and op by id of a tensor
        self._writers: dict[int, list[int]] = {}  # ops by storage

    def add(self, func: Any, arguments: Any, result: Any) -> int:
        """Adds an op, and returns its number."""
        number = len(self._readers)
        self._readers.append(set())
        inputs = tensors_in(arguments)
        outputs = tensors_in(result)
        for tensor in inputs:
            for writer in self._writers_of(tensor):
                self._readers[writer].add(number)
        objects = {id(tensor) for tensor in inputs}
        storages = {_storage_of(tensor) for tensor in inputs}
        writes = func._schema.is_mutable
        if writes and not outputs:
            self._used.add(number)
        for tensor in outputs:
            storage = _storage_of(tensor)
            if writes and id(tensor) in objects:
                # It writes into a parameter, or into a sum over steps, which outlives
                # the step.
                if storage not in self._writers:
                    self._used.add(number)
                self._writers.setdefault(storage, []).append(number)
            # A view of an input is written by the writers of that.
            elif storage not in storages:
                self._writers[storage] = [number]
            self._results[id(tensor)] = storage, number
        return number

    def _writers_of(self, tensor: Tensor) -> list[int]:
        storage = _storage_of(tensor)
        storage_of_result, number = self._results.get(id(tensor), (0, 0))
        # Python uses the id of a dead tensor again, so its storage must be the same
        # too.
        if storage_of_result == storage:
            return [number]
        return self._writers.get(storage, [])

    def using(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that also notes its tensors as used outside of ops."""

        def call(*args: Any, **kwargs: Any) -> Any:
            for tensor in tensors_in((args, kwargs)):
                self._used.update(self._writers_of(tensor))
            return function(*args, **kwargs)

        return call

    def feeding(self, last: Collection[int]) -> set[int]:
        """Returns these ops, and all ops whose results only they and each other read."""
        ops = set(last)
        for number in reversed(range(len(self._readers))):
            readers = self._readers[number]
            if readers and readers <= ops and number not in self._used:
                ops.add(number)
        return ops


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _storage_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        # it has none, as a sparse one and that of a function transform
        return id(tensor)


@contextmanager
def calls_of_autograd(
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Wraps torch.autograd.backward and grad meanwhile."""
    with ExitStack() as stack:
        for name in ("backward", "grad"):
            function = getattr(torch.autograd, name)
            setattr(torch.autograd, name, wrapper(function))
            stack.callback(setattr, torch.autograd, name, function)
        yield


def count_ops(call: Callable[[], object], modules: Sequence[nn.Module]) -> Counted:
    """Counts and times the ops of a training step; of three calls, if there is time, those of the fastest."""
    counts: list[Counted] = []
    while len(counts) < 3 and sum(each.seconds for each in counts) < _COUNTING_S:
        counted = Counted()
        with counted.watching(modules), counted:
            call()
        counted.sum_up()
        counts.append(counted)
    return min(counts, key=lambda each: each.seconds)
