"""What the process does with memory that a step gives back."""

from __future__ import annotations

import ctypes
import platform

# glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes; of the second no more than 32 MB is taken.
_SETTINGS = {-1: 256 << 20, -3: 32 << 20}


def keep_freed_memory() -> bool:
    """Has glibc keep up to 256 MB of freed memory for the next step; whether it does.

    A stack's matrices are megabytes, which glibc hands back to the system when a step frees them: the next step then faults in each
    page anew (1,100 of them in a step of 8 Contextual NCF networks, a tenth of its time). For the whole process; with another C
    library, or another allocator such as jemalloc, nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    taken = [libc.mallopt(setting, value) for setting, value in _SETTINGS.items()]
    return all(taken)
