"""Mixed precision: dense layers compute in bfloat16, weights, tables, sums over bags and the loss stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

Amp = Literal["off", "bf16"]
Context = Callable[[], AbstractContextManager[Any]]


def forward_context(amp: Amp, device: torch.device) -> Context:
    """What a training forward runs in; bfloat16 has float32's range, so its gradients need no loss scaling.

    Args:
        amp: ``off`` or ``bf16``.
        device: of the model.
    """
    if amp == "off":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)
