"""How much memory this host, or the container that a process runs in, can still give."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes of memory that this host, or the container that this process runs in, can still give."""
    limits = [_line("/proc/meminfo", "MemAvailable:") * 1024 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        cache = _line("/sys/fs/cgroup/memory.stat", "inactive_file")  # given back when memory is short
        limits.append(max(limit - used + cache, 0))
    return min(limits)


def _line(path: str, name: str) -> int:
    """The number in the line of a file that begins with ``name``; 0 where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _number(path: str) -> int | None:
    """The number in a file of the control group; None where there is no such file, or no limit."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
