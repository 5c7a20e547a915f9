"""StepTrace: torch.profiler over some steps of training, on every rank at once, gathered into a Timeline."""

from __future__ import annotations

import json
import socket
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.spans import TOWER
from torchrec_ext.train.timeline import RankTrace, Timeline

SKIP = 5  # steps before it: the pipeline fills, buffers are made
MOST = 100
_ROUNDS = 10


class StepTrace:
    """Profiles ``steps`` steps after the first few, on all ranks: to profile one of two that exchange is a deadlock.

    Args:
        model: its towers are the modules of its ``towers``, or, where it has none, its children.
        runtime: this process's place in the job.
        steps: how many.
        done: called on rank 0 with the timeline.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, steps: int, done: Callable[[Timeline], None] | None = None) -> None:
        self._model, self._runtime, self._done = model, runtime, done
        self._first, self._last, self._seen = SKIP, SKIP + steps, 0
        self._handles: list[Any] = []
        self._clock = (0.0, 0.0)
        self._profile: Any = None

    def step(self) -> dict[str, float] | None:
        """After each step; once, after the last one that is traced, the overlap figures, the same on every rank."""
        self._seen += 1
        if self._seen == self._first:
            self._start()
        return self._stop() if self._seen == self._last else None

    def _start(self) -> None:
        self._clock = clock_ahead(self._runtime)
        self._handles = [handle for name, tower in towers(self._model) for handle in _named_in_trace(name, tower)]
        on_gpu = self._runtime.device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        dist.barrier()
        self._profile.start()

    def _stop(self) -> dict[str, float]:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        self._profile.stop()
        for handle in self._handles:
            handle.remove()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            own = (socket.gethostname(), *self._clock, zlib.compress(path.read_bytes(), 1))
        self._profile = None
        gathered: list[Any] = [None] * self._runtime.world_size
        dist.gather_object(own, gathered if self._runtime.is_main else None)
        figures: list[Any] = [None]
        if self._runtime.is_main:
            timeline = Timeline(
                [
                    RankTrace(host=host, ahead_us=ahead, error_us=error, trace=json.loads(zlib.decompress(packed)))
                    for host, ahead, error, packed in gathered
                ]
            )
            figures = [timeline.figures()]
            if self._done is not None:
                self._done(timeline)
        dist.broadcast_object_list(figures, device=self._runtime.device)
        return figures[0]  # type: ignore[no-any-return]


def check_fits(traced: int, steps: int) -> None:
    """Refuses to trace more steps than a run has after the first few, or than rank 0 can hold of all ranks.

    Raises:
        ValueError: it is so.
    """
    if traced > MOST:
        raise ValueError(
            f"train.trace_steps={traced}: must be {MOST} or fewer; each takes about half a MB of the timeline per rank"
        )
    if traced and SKIP + traced > steps:
        remedy = f"trace {steps - SKIP} or fewer" if steps > SKIP else "train for longer"
        raise ValueError(
            f"train.trace_steps={traced}: the run has {steps} steps, of which the first {SKIP} are not traced; {remedy}"
        )


def towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose spans a timeline shows, by name."""
    whole = get_unwrapped_module(model)
    return list(getattr(whole, "towers", whole).named_children())


def _named_in_trace(name: str, tower: nn.Module) -> list[Any]:
    """Hooks by which each forward of the tower is a span of its own."""
    opened: list[Any] = []

    def enter(*_: Any) -> None:
        opened.append(record_function(TOWER + name))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return [tower.register_forward_pre_hook(enter), tower.register_forward_hook(leave, always_call=True)]


def clock_ahead(runtime: Runtime) -> tuple[float, float]:
    """Microseconds by which this rank's clock is ahead of rank 0's, and by how much that may be wrong.

    Each rank in turn answers rank 0 with its time, which is taken to have been in the middle between question and answer; of
    several rounds the fastest counts, and half its length is the error. What is within the error counts as 0, since the ranks of a
    host have one clock.
    """
    best = [(0.0, 0.0)]
    for other in range(1, runtime.world_size):
        if runtime.is_main:
            best.append(min((_asked(other, runtime.device) for _ in range(_ROUNDS)), key=lambda found: found[1]))
        elif runtime.rank == other:
            for _ in range(_ROUNDS):
                _answer(runtime.device)
    told: list[Any] = [best]
    dist.broadcast_object_list(told, device=runtime.device)
    ahead, error = told[0][runtime.rank]
    return (ahead if abs(ahead) > error else 0.0), error


def _asked(other: int, device: torch.device) -> tuple[float, float]:
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    start = time.time_ns()
    dist.send(stamp, other)
    dist.recv(stamp, other)
    theirs = int(stamp)
    stop = time.time_ns()
    return (theirs - (start + stop) / 2) / 1e3, (stop - start) / 2e3


def _answer(device: torch.device) -> None:
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(stamp, 0)
    int(stamp)  # on a GPU: until it has come
    stamp.fill_(time.time_ns())
    dist.send(stamp, 0)
