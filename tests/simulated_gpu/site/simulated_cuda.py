"""The Python half of the simulated device: what ``torch.cuda``, FBGEMM and NCCL need beside the library.

``torch.cuda`` itself stays torch's own code. It finds the functions and base classes that a CUDA build has in
``torch._C``, because they are put there just before it is imported. The library is loaded before torch, which looks for
CUDA's hooks once.
"""

import ctypes
import functools
import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

INVOKERS = "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_"
MEMORY = 64 << 30
_CODE = ("/torchrec_ext/", "/torchx_apps/", "/tests/")
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_library: Any = None


def install() -> None:
    """Has the device put into torch when this process imports it, if its environment names the compiled device."""
    if "SIMULATED_GPU_LIBRARY" in os.environ:
        sys.meta_path.insert(0, _Imports())


class _Imports(importlib.abc.MetaPathFinder):
    """Acts just before or just after some modules are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """Returns None, so that Python finds the module itself, except for modules to change after their import."""
        if name == "torch":
            _load()
        if name == "torch.cuda":
            _provide(sys.modules["torch._C"])
        change = _CHANGES.get(name) or (_on_host if name.startswith(INVOKERS) else None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change(module))
        return spec


def _load() -> None:
    global _library
    _library = ctypes.CDLL(os.environ["SIMULATED_GPU_LIBRARY"])
    _library.simulated_bytes.restype = ctypes.c_size_t
    _library.simulated_forget.argtypes = [ctypes.c_int64]
    _library.simulated_begin(int(os.environ.get("SIMULATED_GPUS", "1")))


# ---------------------------------------------------------------- what happened


@contextmanager
def observed() -> Iterator[list[tuple[str, str, str]]]:
    """Collects what the device tells: its kind, what it was, and the innermost line of the project's code.

    Kinds: ``sync`` and ``event``, the host waits for a stream or for an event; ``pageable``, a copy to the device whose
    memory is not pinned; ``unordered``, two streams use one memory without an order.
    """
    events: list[tuple[str, str, str]] = []
    listener = _LISTENER(
        lambda kind, what: events.append((kind.decode(), what.decode(), _line()))
    )
    _library.simulated_listen(listener)
    try:
        yield events
    finally:
        _library.simulated_listen(None)


def _line() -> str:
    frame: Any = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _CODE) and "simulated_cuda" not in file:
            folder = next(part for part in _CODE if part in file)
            return f"{file[file.rindex(folder) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"  # which C++ runs in threads of its own


# ---------------------------------------------------------------- torch._C


def _ops() -> Any:
    return sys.modules["torch"].ops.simulated


class _Graph:
    """Base class of ``torch.cuda.CUDAGraph``."""

    _numbers = itertools.count(1)

    def __new__(cls, keep_graph: bool = False) -> "_Graph":
        graph = super().__new__(cls)
        graph.number = next(cls._numbers)
        weakref.finalize(graph, _library.simulated_forget, graph.number)
        return graph

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global"
    ) -> None:
        _ops().capture_begin(self.number, capture_error_mode)

    def capture_end(self) -> None:
        _ops().capture_end(self.number)

    def replay(self) -> None:
        _ops().replay(self.number)

    def reset(self) -> None:
        _library.simulated_forget(self.number)

    def pool(self) -> tuple[int, int]:
        return (0, self.number)


def _provide(c: Any) -> None:
    """Gives ``torch._C`` what ``torch.cuda`` takes from it in a CUDA build."""

    class Stream(c.Stream):
        def __new__(cls, priority: int = 0, **numbers: int) -> Any:
            numbers = numbers or {
                "device": c.device("cuda", c._accelerator_getDeviceIndex())
            }
            return super().__new__(cls, **numbers)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(c.Event):
        def __new__(cls, enable_timing: bool = False, **_: bool) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def current_stream(device: int) -> tuple[int, int, int]:
        stream = c._accelerator_getStream(device)
        return stream.stream_id, stream.device_index, stream.device_type

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        c._accelerator_setDeviceIndex(device_index)
        c._accelerator_setStream(
            c.Stream(
                stream_id=stream_id, device_index=device_index, device_type=device_type
            )
        )

    def init() -> None:
        torch = sys.modules["torch"]
        torch.cuda.default_generators = tuple(
            map(torch.ops.simulated.default_generator, range(count()))
        )
        torch.cuda._get_device_properties = lambda device: properties

    def count() -> int:
        return int(os.environ.get("SIMULATED_GPUS", "1"))

    def stats(device: int) -> dict[str, Any]:
        used = {
            "current": _library.simulated_bytes(0),
            "peak": _library.simulated_bytes(1),
        }
        return {
            name: {"all": used}
            for name in ("allocated_bytes", "reserved_bytes", "active_bytes")
        }

    properties = SimpleNamespace(
        name="Simulated GPU",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        is_integrated=0,
        gcnArchName="",
        uuid="0",
    )

    cudart = ModuleType("cudart")
    cudart.cudaMemGetInfo = lambda device: (
        MEMORY - _library.simulated_bytes(0),
        MEMORY,
    )

    def nothing(*_: Any) -> None:
        """Does nothing: there is no cache to empty, and no time to pass."""

    functions: dict[str, Any] = {
        "_CudaStreamBase": Stream,
        "_CudaEventBase": Event,
        "_CUDAGraph": _Graph,
        "_CudaDeviceProperties": SimpleNamespace,
        "_cudart": cudart,
        "_has_cuda": True,
        "_cuda_init": init,
        "_cuda_getDeviceCount": count,
        "_cuda_getDevice": c._accelerator_getDeviceIndex,
        "_cuda_setDevice": c._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": c._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": c._accelerator_maybeExchangeDevice,
        "_cuda_synchronize": lambda: c._accelerator_synchronizeDevice(
            c._accelerator_getDeviceIndex()
        ),
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getCurrentRawStream": lambda device: current_stream(device)[0],
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_setStream": set_stream,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: bool(
            _library.simulated_is_capturing()
        ),
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": lambda device: _library.simulated_reset_peak(),
        "_cuda_set_sync_debug_mode": lambda mode: _library.simulated_sync_debug_mode(
            mode
        ),
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_nccl_version": lambda: 22809,
        "_nccl_version_suffix": lambda: b"",
        **dict.fromkeys(
            (
                "_cuda_emptyCache",
                "_host_emptyCache",
                "_cuda_sleep",
                "_cuda_ipc_collect",
            ),
            nothing,
        ),
    }
    for name, function in functions.items():
        setattr(c, name, function)


# -------------------------------------------------------------- torch and its libraries


def _storages(torch: Any) -> None:
    """Lets storages be made on the device: in C++ only a CUDA build does."""
    new = torch.UntypedStorage.__new__

    def on_device(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new(
                cls, *args, **options, **({} if device is None else {"device": device})
            )
        return torch.empty(
            args[0] if args else 0, dtype=torch.uint8, device=device
        ).untyped_storage()

    def cuda(storage: Any, device: Any = None, **_: Any) -> Any:
        storage = (
            storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
        )
        values = torch.empty(0, dtype=torch.uint8).set_(storage)
        return values.to("cuda" if device is None else device).untyped_storage()

    torch.UntypedStorage.__new__, torch.UntypedStorage.cuda = on_device, cuda


def _nccl(c10d: Any) -> None:
    """Makes NCCL of gloo; the device's own kernels give it the tensors' host memory, and refuse tensors of the host."""

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):
        class Options(SimpleNamespace):
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    c10d.__all__.append("ProcessGroupNCCL")
    # DDP times its steps by a class of the CUDA build.
    sys.modules["torch._C._distributed_c10d"].Logger.set_runtime_stats_and_log = (
        lambda logger: None
    )


def _profiler(profiler: Any) -> None:
    """Has a profiler of CUDA record the CPU alone: torch would write an error with its stack for each operator."""
    states = profiler.ProfilerState.__members__
    profiler.ProfilerState = SimpleNamespace(
        **{**states, "KINETO_GPU_FALLBACK": states["KINETO"]}
    )


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch": _storages,
    "torch.autograd.profiler": _profiler,
    "torch.distributed.distributed_c10d": _nccl,
}


def _on_host(module: Any) -> None:
    """Has a fused table on the device looked up by FBGEMM's CPU kernels, with their own backward and optimizer."""
    import torch
    from fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args import (
        CommonArgs,
        Momentum,
    )

    if not hasattr(module, "invoke"):
        return
    invoke = module.invoke

    def host(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.ops.simulated.as_host(value.detach())
        if not hasattr(value, "_asdict"):
            return value
        fields = {name: host(field) for name, field in value._asdict().items()}
        # The CPU's kernels take the rows of one memory, wherever they are.
        if isinstance(value, CommonArgs):
            fields["host_weights"] = one_of(
                fields["dev_weights"], fields["uvm_weights"]
            )
        if isinstance(value, Momentum):
            fields["host"] = one_of(fields["dev"], fields["uvm"])
        return type(value)(**fields)

    def one_of(*tensors: Any) -> Any:
        tables = [tensor for tensor in tensors if tensor.numel()]
        assert len(tables) < 2, (
            "the simulated GPU has no group of tables both on the device and in host memory"
        )
        return tables[0] if tables else tensors[0]

    def looked_up(*args: Any, **options: Any) -> Any:
        common = next(
            value
            for value in (*args, *options.values())
            if isinstance(value, CommonArgs)
        )
        if not common.indices.is_cuda:
            return invoke(*args, **options)

        def on_host(placeholder: Any) -> Any:
            values = [host(value) for value in (*args, *options.values())]
            values = [
                v._replace(placeholder_autograd_tensor=placeholder)
                if isinstance(v, CommonArgs)
                else v
                for v in values
            ]
            return invoke(
                *values[: len(args)],
                **dict(zip(options, values[len(args) :], strict=True)),
            )

        tables = [
            table for table in (common.dev_weights, common.uvm_weights) if table.numel()
        ]
        return lookup_class().apply(
            common.placeholder_autograd_tensor,
            on_host,
            [*tables, common.indices, common.offsets],
        )

    module.invoke = looked_up


@functools.cache
def lookup_class() -> Any:
    """Returns the autograd function of a look-up; made late, since this module is imported before torch."""
    import torch

    ops = torch.ops.simulated

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Any, on_host: Any, reads: Any) -> Any:
            assert not torch.cuda.is_current_stream_capturing(), (
                "the simulated GPU captures no fused tables"
            )
            ctx.leaf, ctx.reads = ops.as_host(leaf.detach()).requires_grad_(), reads
            with torch.enable_grad():
                ctx.output = on_host(ctx.leaf)
            output = ops.as_device(ctx.output.detach())
            ops.note("fbgemm::lookup", reads, [output])
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            # A fused table, whose leaf is a placeholder, is updated by its backward.
            updated = [] if ctx.leaf.numel() else ctx.reads[:1]
            ops.note("fbgemm::lookup_backward", [gradient, *ctx.reads], updated)
            (of_leaf,) = torch.autograd.grad(
                ctx.output, ctx.leaf, ops.as_host(gradient), allow_unused=True
            )
            return None if of_leaf is None else ops.as_device(of_leaf), None, None

    return Lookup


def _dense_tables(fbgemm_gpu: Any) -> None:
    """Looks dense tables up on the host too: their CPU kernel has its own backward inside."""
    import torch

    lookup = torch.ops.fbgemm.dense_embedding_codegen_lookup_function
    library = torch.library.Library("fbgemm", "IMPL")

    def looked_up(weights: Any, *rest: Any, **options: Any) -> Any:
        def host(value: Any) -> Any:
            return (
                torch.ops.simulated.as_host(value.detach())
                if isinstance(value, torch.Tensor)
                else value
            )

        def on_host(leaf: Any) -> Any:
            return lookup(
                leaf,
                *map(host, rest),
                **{name: host(value) for name, value in options.items()},
            )

        return lookup_class().apply(weights, on_host, [weights])

    library.impl("dense_embedding_codegen_lookup_function", looked_up, "AutogradCUDA")
    fbgemm_gpu._simulated = library  # which would be unregistered if it were freed


_CHANGES["fbgemm_gpu"] = _dense_tables
