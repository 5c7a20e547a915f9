"""StepExecutor: runs a captured step by torch's inductor on a CPU, as one CUDA graph on a GPU, or op by op.

On a GPU inductor fuses the kernels of the graph where Triton is installed. No real GPU has run that yet.

keep_freed_memory(): makes the process keep the memory that a step frees.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_ext.capture import policy
from torchrec_ext.capture.dropout import bernoulli_, with_hashed_dropout
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.observe.ops import tensors_in, waits_for_device
from torchrec_ext.observe.state_copy import copied, random_state, set_random_state
from torchrec_ext.observe.user_lines import first_line, raising_line, with_text

# The C++ wrapper saves the Python between kernels, half of a step at 1,280 rows; a CUDA
# graph has none. Size checks are off because callers check shapes themselves.
_INDUCTOR = {
    "cpu": {"cpp_wrapper": True, "size_asserts": False},
    "cuda": {
        "triton.cudagraphs": False,
        # On the step's own tensors in its first run: not on copies of all tables.
        "triton.autotune_at_compile_time": False,
        "size_asserts": False,
    },
}

COMBINES = (True, False)
"""Ways to try on a GPU: whether kernels that do not depend on each other are one, as inductor's experimental
combo_kernels make them. An adopted NCF has 32 kernels then, and 41 without."""

_Step = Callable[..., list[Tensor]]
Run = Callable[[Sequence[Tensor]], list[Tensor]]


class StepExecutor(Protocol):
    """Turns a step, a function of tensors, into a faster one."""

    def __call__(self, step: _Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
        """Returns a function for running the step on other inputs of the same shapes.

        Args:
            step: function of ``memory`` and ``inputs``; it writes into ``memory``.
            memory: tensors with fixed addresses.
            inputs: example of the tensors that change from call to call.

        Raises:
            CannotCaptureError: the step depends on values.
        """


def as_it_is(step: _Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Runs the step op by op: a :class:`StepExecutor` for tests and comparisons."""

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return step(*memory, *inputs)

    return run


def inductor(step: _Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Compiles the step for the CPU; inductor caches the result, see :func:`compile_cache`."""
    return as_it_is(_compiled_trace(step, [*memory, *inputs]), memory, inputs)


def fused_cuda_graph(step: _Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Captures the step as one CUDA graph of kernels that inductor has fused; see :func:`cuda_graph`."""
    return cuda_graph(step, memory, inputs, partial(_compiled_trace, step))


def stand_ins(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of the same shapes and strides without values, each as if it had its own storage.

    Tables share one storage. Inductor would treat a write to one as a write to all, and copy them in every step.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [
            torch.empty_strided(
                each.shape, each.stride(), dtype=each.dtype, device=each.device
            )
            for each in tensors
        ]


def _compiled(graph: GraphModule, examples: Sequence[Tensor]) -> _Step:
    """Compiles a graph for tensors with the shapes and strides of ``examples``; inductor caches the result.

    Raises:
        CannotCaptureError: inductor, or the compiler below it, rejects the step.
    """
    keep_freed_memory()
    config = _INDUCTOR[examples[0].device.type]
    own = {"unsafe_marked_cacheable_functions": _own_functions(graph)}
    try:
        return torch._inductor.standalone_compile(
            graph,
            list[Any](examples),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": config | own},
        )
    except Exception as error:  # inductor and the compiler below it raise many types
        raise CannotCaptureError(
            f"inductor: {type(error).__name__}: {first_line(error)}"
        ) from error


def _compiled_trace(step: _Step, tensors: Sequence[Tensor]) -> _Step:
    """Compiles a step, traced on tensors without values."""
    examples = stand_ins(tensors)
    graph = traced(step, examples)
    with torch.no_grad():
        return _compiled(graph, examples)


def compile_graph(
    graph: GraphModule, examples: Sequence[Tensor]
) -> Callable[..., Sequence[Any]]:
    """Compiles a graph of Dynamo's; see :func:`~torchrec_ext.capture.compiled.compiled`.

    Its dropout draws other numbers than that of eager steps; on a CPU much faster, see :func:`with_hashed_dropout`.

    Raises:
        CannotCaptureError: inductor, or the compiler below it, rejects the step.
    """
    if examples[0].device.type == "cpu":
        graph = with_hashed_dropout(graph)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # a traced mkldnn LSTM does not run
    try:
        return _compiled(graph, examples)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _own_functions(graph: GraphModule) -> dict[str, str]:
    """Returns this package's functions that a graph calls, each with a digest of its module's source.

    Inductor keeps no graph for later processes that calls a function of which it has no such key.
    """
    keys = {}
    for node in graph.graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("torchrec_ext."):
            source = inspect.getsource(sys.modules[module]).encode()
            name = f"{module}.{node.target.__name__}"
            keys[name] = hashlib.sha256(source).hexdigest()
    return keys


# glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes; glibc accepts at most 32 MB
# for the second.
_SETTINGS = {-1: 256 << 20, -3: 32 << 20}


def keep_freed_memory() -> bool:
    """Makes glibc keep up to 256 MB of freed memory for the next step; returns whether it does.

    Gradients of tables and a stack's matrices are megabytes, which glibc hands back to the system when a step frees
    them: the next step then faults in each page again (1,100 of them in a step of 8 Contextual NCF networks, a tenth of
    its time). The setting is the whole process's; with another C library or allocator, such as jemalloc, nothing
    changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    results = [libc.mallopt(setting, value) for setting, value in _SETTINGS.items()]
    return all(results)


def traced(step: _Step, tensors: list[Tensor]) -> GraphModule:
    """Traces the ops of the step on tensors without values.

    Raises:
        CannotCaptureError: an op needs values, or other ranks; the message names it.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        graph = make_fx(step, tracing_mode="fake")(*tensors)
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    ) as error:
        # float(), if and .item() of a tensor
        op = getattr(error, "func", "aten._local_scalar_dense")
        raise CannotCaptureError(
            f"{op} at {with_text(raising_line(error))} depends on values that a step computes"
        ) from None
    for node in graph.graph.nodes:
        # Inductor keeps no graph for later processes that has an annotation of ``step``
        # as text, and prints a traceback.
        node.type = None
        # Kernels may return other strides than in the trace, for example batch
        # normalisation of a transposed tensor. A view would then fail, a reshape does
        # not.
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        in_place = torch.ops.aten.bernoulli_.float
        if node.target is in_place and tensors[0].device.type == "cpu":
            node.target = bernoulli_
        if depends_on_values(node.meta.get("val")):
            raise CannotCaptureError(
                f"{node.target} depends on values that a step computes, as .item() and boolean masks do; take "
                "torch.where or a sum with weights of 0 and 1"
            )
        if getattr(node.target, "namespace", "").endswith(("c10d", "c10d_functional")):
            raise CannotCaptureError(
                f"ranks meet in every step ({node.target}), as in batch normalisation or a softmax over the candidates "
                "of all ranks; launch one rank (-j 1x1)"
            )
    graph.recompile()  # the targets of some nodes were replaced
    return graph


def depends_on_values(result: Any) -> bool:
    """Whether a traced call returned a number or a tensor size that depends on the values of its inputs."""
    leaves = pytree.tree_leaves(result)
    for tensor in tensors_in(leaves):
        leaves += tensor.shape
    return any(
        isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        for leaf in leaves
    )


def cuda_graph(
    step: _Step,
    memory: list[Tensor],
    inputs: list[Tensor],
    fuse: Callable[[list[Tensor]], _Step] | None = None,
) -> Run:
    """Captures the step as one CUDA graph; copies inputs into the graph's own buffers.

    Args:
        step: see :class:`StepExecutor`.
        memory: see :class:`StepExecutor`.
        inputs: see :class:`StepExecutor`.
        fuse: makes the same step of fewer kernels, for tensors as those given; where it cannot, one warning says why,
            and the graph has torch's own kernels. Without Triton nobody asks it.

    Raises:
        CannotCaptureError: the step waits for the device, or the device has too little memory.
    """
    device = memory[0].device
    generator = torch.cuda.default_generators[device.index]
    with torch.cuda.device(device):
        random = random_state(device)
        spare = generator.clone_state()
        # The runs before a capture train for real, so the memory is put back.
        memory_before = copied(memory, device)
        try:
            static_inputs = [tensor.clone() for tensor in inputs]
            graph, outputs = _captured_graph(step, [*memory, *static_inputs], fuse)
        except torch.OutOfMemoryError as error:
            raise CannotCaptureError(
                f"{device} has too little memory for a CUDA graph: {first_line(error)}"
            ) from None
        except _WaitError as error:
            line = with_text(raising_line(error))
            raise CannotCaptureError(f"{line} waits for the device: {error}") from None
        except RuntimeError as error:
            # Its own state still waits for the end of the capture, and the next dropout
            # would fail.
            generator.graphsafe_set_state(spare)
            # The end of the capture raises an error of its own, after that of the step.
            of_step = (
                error.__context__
                if isinstance(error.__context__, RuntimeError)
                else error
            )
            cause = " waits for the device" if "captur" in str(of_step) else ""
            raise CannotCaptureError(
                f"{with_text(raising_line(of_step))}{cause}: {first_line(of_step)}"
            ) from None
        finally:
            # A step that failed half way may still be writing, on the stream of the capture.
            torch.cuda.synchronize(device)
            # The memory may have a user's own parameters.
            with torch.no_grad():
                for tensor, value in zip(memory, memory_before, strict=True):
                    tensor.copy_(value)
            set_random_state(device, random)

    # One kernel copies all inputs of a dtype.
    places: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(static_inputs):
        places.setdefault(tensor.dtype, []).append(index)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        for alike in places.values():
            targets = [static_inputs[index] for index in alike]
            values = [inputs[index] for index in alike]
            torch._foreach_copy_(targets, values, non_blocking=True)
        graph.replay()
        # Cloned because the next step overwrites them; an output may be None.
        return pytree.tree_map_only(Tensor, Tensor.clone, outputs)  # type: ignore[no-any-return]

    return run


def _captured_graph(
    step: _Step, tensors: list[Tensor], fuse: Callable[[list[Tensor]], _Step] | None
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Runs the step as often as a capture requires, and captures it; returns the graph and its outputs."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        # torch requires a few runs before a capture, on a side stream.
        with torch.cuda.stream(stream):
            # A capture that fails would leave torch's allocator as if it still went on,
            # so waits are found before it.
            with _RefusesWaits():  # type: ignore[no-untyped-call]
                step(*tensors)
            if fuse is not None and policy.HAS_TRITON:
                step = _fused(step, tensors, fuse)
            for _ in range(2):
                step(*tensors)
        torch.cuda.current_stream().wait_stream(stream)
        # cuBLAS keeps a workspace for each stream, whose address goes into the graph.
        # Others free it, as torch.compile does before each graph of its own, and a
        # replay would then write into memory that is no longer there. So the graph gets
        # workspaces in its own memory pool, and none of them stays with the streams.
        torch._C._cuda_clearCublasWorkspaces()
        # By default a call of any other thread, such as a loader's that pins memory,
        # would end the capture. Without a stream of this device torch captures on one
        # that it made for the first capture of the process.
        try:
            with torch.cuda.graph(
                graph, stream=stream, capture_error_mode="thread_local"
            ):
                return graph, step(*tensors)
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def _fused(
    step: _Step, tensors: list[Tensor], fuse: Callable[[list[Tensor]], _Step]
) -> _Step:
    """Returns the step of fewer kernels, or the step itself with a warning."""
    reason = ""
    for combines in COMBINES:
        try:
            with torch._inductor.config.patch(combo_kernels=combines):
                fused = fuse(tensors)
                fused(*tensors)  # the first run compiles and times its kernels
            return fused
        # Inductor, Triton and the driver below it raise many types.
        except Exception as error:
            reason = first_line(error)[:120]
    warnings.warn(
        f"the kernels of the captured step are torch's own, not fused: {reason}",
        stacklevel=2,
    )
    return step


class _WaitError(Exception):
    """An op waits for the device; the message names it."""


class _RefusesWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an op of a step waits for the device.

    Raises:
        _WaitError: the op needs values on the host, or the size of its result depends on values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an op unless it waits."""
        if waits_for_device(func, args, kwargs):
            raise _WaitError(func)
        return func(*args, **(kwargs or {}))


def engine_for(device: torch.device) -> tuple[StepExecutor, str]:
    """Returns the executor of a device, and a progress message for its work.

    Raises:
        CannotCaptureError: there is no C++ compiler, or no writable folder for the compile cache.
    """
    if device.type == "cuda":
        progress = "capturing the training step as a CUDA graph"
        if not policy.HAS_TRITON:
            progress += " of torch's own kernels; pip install triton fuses them"
        return fused_cuda_graph, progress
    from torch._inductor.cpp_builder import get_cpp_compiler

    folder = compile_cache()
    try:
        compiler = get_cpp_compiler()
    except Exception:  # inductor and a missing program raise different errors
        compiler = ""
    if not shutil.which(compiler):
        raise CannotCaptureError(
            "there is no C++ compiler; install g++ or clang, or name one in CXX"
        )
    return inductor, f"compiling the training step (kept in {folder} for later runs)"


def compile_cache() -> str:
    """Returns the folder of inductor's compile cache.

    Raises:
        CannotCaptureError: the folder cannot be written.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise CannotCaptureError(
            f"the compile cache '{folder or tempfile.gettempdir()}' cannot be written ({error.strerror or error}); "
            "name another folder in TORCHINDUCTOR_CACHE_DIR"
        ) from None
