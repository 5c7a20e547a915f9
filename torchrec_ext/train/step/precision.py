"""Mixed precision: dense layers compute in 16 bits; weights, tables, sums over bags and the loss stay float32.

LossScaling: scales the loss for float16, whose range is too small for the gradients of most losses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.train.config import Amp

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Context = Callable[[], AbstractContextManager[Any]]


def forward_context(amp: Amp, device: torch.device) -> Context:
    """Returns the context of a training forward.

    bfloat16 has float32's range, so its gradients need no loss scaling; those of float16 do, see :class:`LossScaling`.

    Args:
        amp: ``off``, ``bf16`` or ``fp16``.
        device: device of the model.
    """
    if amp == "off":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=_TYPES[amp])


Forward = Callable[[TowerBatch], tuple[Tensor, Any]]


class LossScaling:
    """torch's GradScaler around a HybridOptimizer: scales the loss, and divides the gradients before the update.

    If gradients overflow, the step updates nothing and the factor is halved; 2,000 steps without overflow double it.
    If gradients are the mean of all ranks, all ranks see the same overflow. A resumed run begins with the first factor
    again.

    Args:
        optimizer: optimizer from :func:`hybrid_parallel`.
        device: device of the model.
        first: the first factor.

    Raises:
        ValueError: a kernel updates some table inside the backward, before the gradient is divided.
    """

    def __init__(
        self,
        optimizer: HybridOptimizer,
        device: torch.device,
        *,
        first: float = 65536.0,
    ) -> None:
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type, init_scale=first)
        replicated = {id(table) for table in optimizer.replicated_tables}
        keys = [
            key for key, table in optimizer.params.items() if id(table) in replicated
        ]
        for name in optimizer.table_choices:
            # The kernels of a sharded table update it inside the backward, before the
            # gradient is divided.
            if not any(f".{name}." in key for key in keys):
                raise ValueError(
                    f"train.amp=fp16: table '{name}' is sharded, so its backward moves it by scaled "
                    "gradients; set train.amp=bf16, or plan.sharding=data_parallel"
                )

    @property
    def factor(self) -> float:
        """The factor of the next loss; reading it waits for the device."""
        return float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, (), times the factor."""
        return self._scaler.scale(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, as :meth:`torch.optim.Optimizer.zero_grad`."""
        self._optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Divides the gradients by the factor and steps the optimizer, unless a gradient has overflowed."""
        self._scaler.step(self._optimizer)
        self._scaler.update()


def training_forward(
    model: nn.Module, context: Context, scaling: LossScaling | None
) -> Forward:
    """Returns a model's forward for a pipeline: in its precision, with its loss scaled."""

    def forward(batch: TowerBatch) -> tuple[Tensor, Any]:
        with context():
            loss, output = model(batch)
        return loss if scaling is None else scaling.scale(loss), output

    return forward
