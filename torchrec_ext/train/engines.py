"""Engines: what runs a captured step: torch's inductor on a CPU, a CUDA graph on a GPU, or nothing but torch itself."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrec_ext.train.lowering import CannotCaptureError

# At 1,280 rows half of a step was Python between kernels. Whoever calls looks at shapes.
_INDUCTOR = {"cpp_wrapper": True, "size_asserts": False}

Step = Callable[..., list[Tensor]]
Run = Callable[[Sequence[Tensor]], list[Tensor]]


class Engine(Protocol):
    """Takes the step and the tensors it was made for."""

    def __call__(self, step: Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
        """What runs the step on other inputs of the same shapes.

        Args:
            step: a function of all tensors, which writes into those of ``memory``.
            memory: stays where it is.
            inputs: an example of what changes from call to call.

        Raises:
            CannotCaptureError: the step does something that depends on values.
        """


def as_it_is(step: Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Runs the step op by op: an :class:`Engine` for tests, and for finding out what another one gains."""

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return step(*memory, *inputs)

    return run


def inductor(step: Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Compiles the step for the CPU; inductor keeps what it compiled, see :func:`compile_cache`."""
    # Tables lie side by side in one storage. Inductor would take a write to one for a write to all, and copy them in every step.
    apart: list[Any] = [torch.empty_strided(part.shape, part.stride(), dtype=part.dtype) for part in (*memory, *inputs)]
    graph = traced(step, apart)
    try:
        with torch.no_grad():
            compiled = torch._inductor.standalone_compile(
                graph, apart, dynamic_shapes="from_example_inputs", options={"config_patches": _INDUCTOR}
            )
    except Exception as error:  # whatever inductor and the compiler below it meet
        raise CannotCaptureError(f"inductor: {type(error).__name__}: {first_line(error)}") from error

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return compiled(*memory, *inputs)  # type: ignore[no-any-return]

    return run


def traced(step: Step, tensors: list[Tensor]) -> torch.fx.GraphModule:
    """The ops of the step, run once on tensors without values.

    Raises:
        CannotCaptureError: an op needs values, or other ranks; the message names it.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        graph = make_fx(step, tracing_mode="fake")(*tensors)
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        op = getattr(error, "func", "aten._local_scalar_dense")  # float(), if and .item() of a tensor
        raise CannotCaptureError(f"{op} at {line_of(error)} depends on values that a step computes") from None
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "").endswith(("c10d", "c10d_functional")):
            raise CannotCaptureError(
                f"ranks meet in every step ({node.target}), as in batch normalisation or a softmax over the candidates of all "
                "ranks; launch one rank (-j 1x1)"
            )
    return graph


def first_line(error: BaseException) -> str:
    """Of an error's text, which with torch may be a page."""
    return next(iter(str(error).strip().splitlines()), "")


def line_of(error: BaseException) -> str:
    """The last line outside of torch that led to an error, as FILE:LINE and its code."""
    torch_folder = os.path.dirname(torch.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((torch_folder, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


def cuda_graph(step: Step, memory: list[Tensor], inputs: list[Tensor]) -> Run:
    """Captures the step as one CUDA graph, which is launched as a whole; inputs are copied into buffers of its own."""
    static, before = [part.clone() for part in inputs], [part.clone() for part in memory]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.no_grad():
            with torch.cuda.stream(side):  # torch asks for a few runs before a capture, on a stream that is not the default one
                for _ in range(3):
                    step(*memory, *static)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                outputs = step(*memory, *static)
    except RuntimeError as error:
        raise CannotCaptureError(f"{line_of(error)} waits for the device: {first_line(error)}") from None
    finally:
        for part, value in zip(memory, before, strict=True):
            part.copy_(value)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        for part, value in zip(static, inputs, strict=True):
            part.copy_(value, non_blocking=True)
        graph.replay()
        return [part.clone() for part in outputs]  # the next step writes over them

    return run


def engine_for(device: torch.device) -> tuple[Engine, str]:
    """The engine of a device, and what a user should know while it works.

    Raises:
        CannotCaptureError: no C++ compiler, or nowhere to keep what it compiles.
    """
    if device.type == "cuda":
        return cuda_graph, "capturing the training step as a CUDA graph"
    from torch._inductor.cpp_builder import get_cpp_compiler

    folder = compile_cache()
    try:
        compiler = get_cpp_compiler()
    except Exception:  # inductor has an error of its own for it, and a missing program others
        compiler = ""
    if not shutil.which(compiler):
        raise CannotCaptureError("there is no C++ compiler; install g++ or clang, or name one in CXX")
    return inductor, f"compiling the training step (kept in {folder} for later runs)"


def compile_cache() -> str:
    """The folder where inductor keeps what it compiled.

    Raises:
        CannotCaptureError: it cannot be written.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = cache_dir()
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise CannotCaptureError(
            f"the compile cache '{folder or tempfile.gettempdir()}' cannot be written ({error.strerror or error}); name another "
            "folder in TORCHINDUCTOR_CACHE_DIR"
        ) from None
