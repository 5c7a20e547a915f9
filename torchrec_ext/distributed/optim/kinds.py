"""RowAdam: FBGEMM's Adam for tables that every rank holds whole, as a torch optimizer.

FUSED, UNFUSED: the classes that stand for an optimizer's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor
from torchrec import optim as placeholders
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


class RowAdam(torch.optim.Optimizer):
    """Adam for (rows, D) tables: updates only rows with a gradient, and leaves the moments of the others.

    The bias correction counts steps, not a row's own updates, as FBGEMM's fused kernels and TensorFlow Addons' LazyAdam
    do. With a gradient in every row it equals torch.optim.Adam; where rows are rare it learns differently.

    Args:
        params: tables, (rows, D) each.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: number added to the root of the second moment.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows with a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    state = self.state[table]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["exp_avg"] = torch.zeros_like(table)
                        state["exp_avg_sq"] = torch.zeros_like(table)
                    state["step"] += 1
                    _move_rows(table, table.grad, state, group)


def _move_rows(
    table: Tensor, grads: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    steps = float(state["step"])
    beta1, beta2 = group["betas"]
    rows = rows_with_gradient(grads)
    grad = grads[rows]
    first = state["exp_avg"][rows].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"][rows].lerp_(grad.square(), 1 - beta2)
    state["exp_avg"][rows] = first
    state["exp_avg_sq"][rows] = second
    denominator = (second / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    update = first / (1 - beta1**steps) / denominator
    table.index_add_(0, rows, update, alpha=-group["lr"])


def rows_with_gradient(grad: Tensor) -> Tensor:
    """Returns (n,) the indices of rows of a (rows, D) gradient with a nonzero value."""
    return grad.ne(0).any(dim=1).nonzero().squeeze(1)


# TorchRec derives the kernel from the class, and the planner the bytes of state; the
# Adam classes here are never run.
FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
    "adam": placeholders.Adam,
    "lazy_adam": placeholders.Adam,
}
UNFUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "lazy_adam": RowAdam,
}
