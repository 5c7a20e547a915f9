"""What a device, files and torch.compile did meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch.profiler import ProfilerActivity, profile


def device_use(spans: Collection[tuple[float, float]]) -> float:
    """Returns the share of the time between the first and the last span inside of spans; 0 for none.

    Example:
        >>> device_use([(0.0, 2.0), (1.0, 3.0), (7.0, 8.0)])
        0.5
    """
    if not spans:
        return 0.0
    first = min(spans)[0]
    busy = 0.0
    reached = first
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - first) if reached > first else 0.0


def device_spans(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Returns the spans of a call's kernels and copies on CUDA devices, in microseconds, by torch.profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        # Kernels run after the call has returned.
        torch.cuda.synchronize()
    spans = []
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
    return spans


def compiled_graphs() -> int:
    """Returns how many graphs torch.compile has made."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def bytes_read() -> int | None:
    """Returns the bytes that this thread has read from files; None if the system does not count them."""
    try:
        with open("/proc/thread-self/io") as stream:
            before = dict(line.split(": ") for line in stream)
    except (OSError, ValueError):
        return None
    return int(before["rchar"])
