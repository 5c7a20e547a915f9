"""What torch.compile did in this process."""

from __future__ import annotations

import sys

import torchrec_ext.needs_torch  # noqa: F401


def compiled_graphs() -> int:
    """Returns how many graphs torch.compile has made."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
