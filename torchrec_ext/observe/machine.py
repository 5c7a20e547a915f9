"""What torch.compile did, and what was read from files."""

from __future__ import annotations

import sys

import torchrec_ext.needs_torch  # noqa: F401


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
