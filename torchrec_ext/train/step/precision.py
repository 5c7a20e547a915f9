"""Mixed precision: dense layers compute in bfloat16; weights, tables, sums over bags and the loss stay float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.train.config import Amp

Context = Callable[[], AbstractContextManager[Any]]
Forward = Callable[[TowerBatch], tuple[Tensor, Any]]


def forward_context(amp: Amp, device: torch.device) -> Context:
    """Returns the context of a training forward.

    bfloat16 has float32's range, so that its gradients need no scaled loss.

    Args:
        amp: ``off`` or ``bf16``.
        device: device of the model.
    """
    if amp == "off":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def training_forward(model: nn.Module, context: Context) -> Forward:
    """Returns a model's forward in its precision, for a pipeline."""

    def forward(batch: TowerBatch) -> tuple[Tensor, Any]:
        with context():
            return model(batch)  # type: ignore[no-any-return]

    return forward
