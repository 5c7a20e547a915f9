"""Counted: the ops of a step by the user's lines, and the look-ups of its tables.

torch.profiler names a line by a private setting alone, and shows neither ids nor sizes of tables, so a dispatch mode
counts.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchrec_ext.diagnose.findings import TableFacts
from torchrec_ext.observe.ops import tensors_in, waits_for_device
from torchrec_ext.observe.reached import named_modules
from torchrec_ext.observe.user_lines import SampledLine, lines_of, stack_of

_TO_PYTHON = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "masked_select",
    "equal",
)
_PRODUCTS = set(flop_registry)
_FEEDING = 10  # ops of a line that feed a value which it brings to Python, at most
_COUNTING_S = 1.0  # seconds of counted steps after which none is counted again


@dataclasses.dataclass
class OpsOfLine:
    """The ops of a line in a step, seconds inside of them, and those that bring values to Python."""

    ops: int = 0
    seconds: float = 0.0
    syncs: int = 0

    @property
    def feeding(self) -> int:
        """The ops that bring values to Python, with the ops of the same line before them."""
        return min(self.ops, (1 + _FEEDING) * self.syncs)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts and times the aten ops of a step by the user's lines, its products, and the look-ups of its tables.

    Attributes:
        ops: number of ops.
        seconds: seconds inside of all ops.
        product_s: seconds inside of matrix products.
        lines: number of ops by the line that makes them, a library's too.
        by_line: ops and seconds by the user's own line.
        syncs: ops that bring a value to Python, on a GPU all that wait for it, by the user's own line.
        reads: ids that a step looks up, by module of a table.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self.seconds = 0.0
        self.product_s = 0.0
        self.lines: Counter[str] = Counter()
        self.by_line: dict[SampledLine, OpsOfLine] = {}
        self.syncs: Counter[str] = Counter()
        self.reads: Counter[nn.Module] = Counter()
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Not the wall clock: others on the machine would make an op longer than the step.
        start = time.thread_time()
        result = func(*args, **kwargs)
        seconds = time.thread_time() - start
        line, users_line = lines_of(stack_of(sys._getframe(1)))
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
        packet = func._overloadpacket
        of_torch = line in ("backward", "optimizer")
        # The mode sees ops of both devices, and a model may have parts on the CPU.
        tensors = tensors_in((args, result))
        if any(each.is_cuda for each in tensors):
            waits = waits_for_device(func, args, kwargs)
        else:
            # What Python reads in backward and optimizer is not for the user to change.
            waits = packet.__name__ in _TO_PYTHON and not of_torch
        if waits:
            self.syncs[users_line.name] += 1
            ops_of_line.syncs += 1
        inputs = [each for each in args if isinstance(each, Tensor)]
        if packet in _PRODUCTS and all(
            each.is_floating_point() and each.layout == torch.strided for each in inputs
        ):
            self.product_s += seconds
        return result

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Notes the look-ups of tables meanwhile."""

        def read(module: nn.Module, args: Any, kwargs: Any) -> None:
            # TorchRec names them.
            ids = args[0] if args else kwargs.get("input")
            if isinstance(ids, Tensor):
                self.reads[module] += ids.numel()

        with ExitStack() as stack:
            # A set: two roots may hold one module, whose ids count once.
            tables = {
                module
                for _, module in named_modules(modules)
                if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            }
            for module in tables:
                hook = module.register_forward_pre_hook(read, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def tables(self, modules: Sequence[nn.Module]) -> list[tuple[TableFacts, Any]]:
        """Returns the tables that were read, with their modules."""
        paths = {id(module): path for path, module in named_modules(modules)}
        found: list[tuple[TableFacts, Any]] = []
        for module, read in self.reads.items():
            table: Any = module
            rows, dim = table.weight.shape
            name = paths.get(id(module)) or type(module).__name__
            found.append((TableFacts(name=name, rows=rows, dim=dim, read=read), module))
        return found


def count_ops(call: Callable[[], object], modules: Sequence[nn.Module]) -> Counted:
    """Counts and times the ops of a training step; of three calls, if there is time, those of the fastest."""
    counts: list[Counted] = []
    while len(counts) < 3 and sum(each.seconds for each in counts) < _COUNTING_S:
        counted = Counted()
        with counted.watching(modules), counted:
            call()
        counts.append(counted)
    return min(counts, key=lambda each: each.seconds)
