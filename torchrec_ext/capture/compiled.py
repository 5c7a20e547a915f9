"""compiled(): torch.compile of a step, with the guards that Dynamo keeps of all Python that it has read.

CompiledCall: a function that Dynamo traces on its first call and guards on all others.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import InternalTorchDynamoError

from torchrec_ext.capture import executors
from torchrec_ext.capture.errors import CannotCaptureError

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Any]]]

_NO_LIMIT = 1 << 20  # of Dynamo's own, which logs a page whenever it is met
_NUMBERS = itertools.count()
# Modules of torch's whose errors say that a call cannot be traced; Dynamo lets those of sizes through as they are.
TRACERS = ("torch._dynamo", "torch._subclasses", "torch.fx.experimental")
# What a capture keeps: its parts, and the rows that it makes batches of, but for a function of the user's among these.
_OWN = re.compile(
    r"parts\b|forward\.__closure__\[\d+\]\.cell_contents\.(?!__)(?!.*\b_make\b)"
)
SKIPPED = re.compile(r"the function `(\w+)` in file `([^`]+)`")


def compiled(
    step: Callable[..., Any],
    memory: Sequence[Tensor] = (),
) -> CompiledCall:
    """Returns a step that inductor has compiled; on a GPU it is one CUDA graph.

    Args:
        step: function of a batch that calls :func:`~torchrec_ext.capture.step.trained`; what it reads besides stands in
            cells of its own.
        memory: what stays at its address from step to step, for a GPU; all else is copied into the graph in each.
    """
    stays = set(map(id, memory))

    def backend(
        graph: fx.GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        real = real_inputs(graph, examples)
        graph = without_gradients(graph)
        if not any(each.is_cuda for each in memory):
            return executors.compile_graph(graph, examples)
        of_batch = [at for at, each in enumerate(real) if id(each) not in stays]
        return replayed(graph, real, of_batch, ())

    return CompiledCall(step, backend)


def replayed(
    module: fx.GraphModule,
    examples: Sequence[Tensor],
    of_batch: Sequence[int],
    outer: Sequence[int],
) -> Callable[..., Sequence[Any]]:
    """Returns a graph's ops as CUDA graphs, one for each place of what may move between calls.

    Args:
        module: the graph.
        examples: its inputs.
        of_batch: indices of the inputs that are copied into the CUDA graph in each call.
        outer: indices of the others that may be elsewhere in a later call.
    """
    rest = [index for index in range(len(examples)) if index not in of_batch]
    order = [*rest, *of_batch]
    graphs: dict[tuple[int, ...], executors.Run] = {}

    def in_place(tensors: Sequence[Tensor]) -> list[Tensor]:
        inputs = dict(zip(order, tensors, strict=True))
        return [inputs[index] for index in range(len(inputs))]

    def step(*tensors: Tensor) -> list[Any]:
        # A parameter that an eager backward has passed keeps a node of autograd on that
        # backward's stream, which a capture refuses: another leaf of its memory has none.
        inputs = [
            each.detach().requires_grad_() if each.requires_grad else each
            for each in in_place(tensors)
        ]
        with torch.enable_grad():
            return list(module(*inputs))

    def fuse(_: list[Tensor]) -> Callable[..., list[Any]]:
        fused = executors.compile_graph(module, examples)
        return lambda *tensors: list(fused(*in_place(tensors)))

    def run(*tensors: Tensor) -> Sequence[Any]:
        addresses = tuple(tensors[index].data_ptr() for index in outer)
        inputs = [tensors[index] for index in of_batch]
        if addresses not in graphs:
            graphs[addresses] = executors.cuda_graph(
                step, [tensors[index] for index in rest], inputs, fuse
            )
        return graphs[addresses](inputs)

    return run


def without_gradients(graph: fx.GraphModule) -> fx.GraphModule:
    """Detaches the outputs of a graph of Dynamo's: what a user's forward keeps (``self.scores = ...``) is among them.

    AOTAutograd would make a second graph for a gradient behind them.
    """
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        results = []
        for node in output.args[0]:  # type: ignore[union-attr]
            if isinstance(node, fx.Node) and node.op != "placeholder":
                value = node.meta.get("example_value")
                if isinstance(value, Tensor) and value.is_floating_point():
                    detached = graph.graph.call_method("detach", (node,))
                    detached.meta = dict(node.meta)
                    node = detached
            results.append(node)
        output.args = (tuple(results),)
    graph.recompile()
    return graph


def real_inputs(graph: fx.GraphModule, examples: Sequence[Tensor]) -> list[Any]:
    """Returns the caller's own tensors behind the inputs of a graph."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = []
    for node, example in zip(placeholders, examples, strict=True):
        source = node.meta.get("grapharg")
        inputs.append(example if source is None else source.example)
    return inputs


class CompiledCall:
    """A function that Dynamo traces on its first call and guards on all others.

    Where a graph's guards hold, its code is called at once: torch.compile's own way there takes 40 us longer. Of the
    :class:`StepPart` list ``parts`` in its closure weights alone are guarded, because a user may have them too: the
    rest is the capture's own, 600 of the 1,300 guards of a step of four tables.

    Args:
        function: function of positional arguments.
        backend: takes a graph and examples of its inputs, and returns what is called in place of the graph.

    Attributes:
        traces: number of calls for which no graph's guards held.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
    ) -> None:
        # Dynamo keeps what it has traced by code object: each caller has one of its
        # own.
        code = function.__code__.replace(co_name=f"step_{next(_NUMBERS)}")
        self._function = FunctionType(
            code, function.__globals__, code.co_name, None, function.__closure__
        )
        self._backend = backend
        self.traces = 0
        self._compile({"guard_filter_fn": _can_change})
        cells = zip(code.co_freevars, self._function.__closure__ or (), strict=True)
        self._closure = {name: cell.cell_contents for name, cell in cells}
        self._calls: dict[CodeType, Callable[..., Any]] = {}
        # Made once: a patch takes 4 us, and to make one 20.
        self._settings = torch._dynamo.config.patch(
            skip_nnmodule_hook_guards=False,
            allow_rnn=True,
            recompile_limit=_NO_LIMIT,
            trace_autograd_ops=True,
            # By these torch 2.11 leaves out guards of layers that are frozen and of defaults.
            use_recursive_dict_tags_for_guards=False,
            skip_tensor_guards_with_matching_dict_tags=False,
            skip_guards_on_constant_func_defaults=False,
        )

    def _compile(self, options: dict[str, Any]) -> None:
        self._filters = bool(options)
        self._compiled = torch.compile(
            self._function,
            backend=self._backend,
            fullgraph=True,
            dynamic=False,
            options=options,
        )

    def holds(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Returns the code of a graph whose guards hold; None if there is none."""
        values = self._values(args)
        for entry in _debug_get_cache_entry_list(self._function.__code__):
            if entry.guard_manager.check(values):
                return self._call_of(entry.code)
        return None

    def __call__(self, *args: Any) -> Any:
        """Calls the graph whose guards hold, or has Dynamo trace one.

        Raises:
            CannotCaptureError: that of the backend; other errors are Dynamo's, see :data:`TRACERS`.
        """
        code = self.holds(args)
        if code is not None:
            return code(*args)
        self.traces += 1
        try:
            # Anomaly detection reads every gradient's values, which a trace does not
            # have.
            anomaly = (
                torch.autograd.set_detect_anomaly(False)
                if torch.is_anomaly_enabled()
                else nullcontext()
            )
            with self._settings, anomaly, warnings.catch_warnings():
                # A page about what it cannot trace, which an error says in a line.
                warnings.filterwarnings("ignore", module=r"torch\._dynamo")
                return self._compiled(*args)
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, CannotCaptureError):
                raise inner from None
            # A filter has all guards made twice, which fails for arrays of numpy.
            if self._filters and isinstance(error, InternalTorchDynamoError):
                self._compile({})
                return self(*args)
            raise

    def _values(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the function's arguments by name, and what surrounds it, as guards read them."""
        code = self._function.__code__
        values = dict(zip(code.co_varnames, args[: code.co_argcount], strict=False))
        if code.co_flags & inspect.CO_VARARGS:
            values[code.co_varnames[code.co_argcount]] = args[code.co_argcount :]
        return values | self._closure

    def _call_of(self, code: CodeType) -> Callable[..., Any]:
        if code not in self._calls:
            function = self._function
            self._calls[code] = FunctionType(
                code, function.__globals__, code.co_name, None, function.__closure__
            )
        return self._calls[code]


def _can_change(guards: Sequence[Any]) -> list[bool]:
    """Says of each of Dynamo's guards whether what it compares can change between steps."""
    return [
        guard.is_global or not _OWN.match(guard.name) or guard.name.endswith(".weight")
        for guard in guards
    ]
