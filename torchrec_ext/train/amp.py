"""Mixed precision: dense layers compute in 16 bits, weights, tables, sums over bags and the loss stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

Amp = Literal["off", "bf16", "fp16"]
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Context = Callable[[], AbstractContextManager[Any]]


def forward_context(amp: Amp, device: torch.device) -> Context:
    """What a training forward runs in.

    bfloat16 has float32's range, so its gradients need no loss scaling; those of float16 do, see :class:`LossScaling`.

    Args:
        amp: ``off``, ``bf16`` or ``fp16``.
        device: of the model.
    """
    if amp == "off":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=_TYPES[amp])
