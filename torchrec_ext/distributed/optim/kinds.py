"""RowAdam: FBGEMM's Adam family for tables that every rank holds whole, as a torch optimizer.

FUSED, UNFUSED and KINDS: the classes that stand for an optimizer's name.
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
        row_wise: whether a row has one second moment, the mean over its columns (FBGEMM's partial row-wise Adam).
        trust_ratio: whether each row's update is scaled by |row| / |update|, where neither is 0 (LAMB, You et al. 2020,
            a row being a layer).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        row_wise: bool = False,
        trust_ratio: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "row_wise": row_wise,
                "trust_ratio": trust_ratio,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows with a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    state = self.state[table]
                    # A group has further entries, such as the weight decay that
                    # HybridOptimizer applies itself.
                    rule = {name: group[name] for name in self.defaults}
                    _start(state, table, rule["row_wise"])
                    rows = rows_with_gradient(table.grad)
                    move_rows(table, rows, table.grad[rows], state, **rule)


def _start(state: dict[str, Any], table: Tensor, row_wise: bool) -> None:
    if not state:
        shape = table.shape
        if row_wise:
            shape = torch.Size([len(table), 1])
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros(
            table.shape, dtype=table.dtype, device=table.device
        )
        state["exp_avg_sq"] = torch.zeros(shape, dtype=table.dtype, device=table.device)
    state["step"] += 1


def move_rows(
    table: Tensor,
    rows: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    row_wise: bool = False,
    trust_ratio: bool = False,
) -> None:
    """Makes one step of :class:`RowAdam` for some rows of a table, in place.

    Args:
        table: (rows, D) table, changed in place.
        rows: (n,) distinct row numbers.
        grad: (n, D) gradient of these rows.
        state: ``step``, which counts this step already, and the moments ``exp_avg`` and ``exp_avg_sq``, changed in
            place.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: number added to the root of the second moment.
        row_wise: see :class:`RowAdam`.
        trust_ratio: see :class:`RowAdam`.
    """
    steps = float(state["step"])
    beta1, beta2 = betas
    square = grad.square()
    if row_wise:
        square = square.mean(1, keepdim=True)
    first = state["exp_avg"][rows].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"][rows].lerp_(square, 1 - beta2)
    state["exp_avg"][rows] = first
    state["exp_avg_sq"][rows] = second
    update = first / (1 - beta1**steps) / adam_denominator(second, steps, beta2, eps)
    if trust_ratio:
        weight_norm = table[rows].norm(dim=1, keepdim=True)
        update_norm = update.norm(dim=1, keepdim=True)
        update *= torch.where(
            (weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0
        )
    table.index_add_(0, rows, update, alpha=-lr)


def adam_denominator(second: Tensor, steps: float, beta2: float, eps: float) -> Tensor:
    """The root of Adam's second moment, corrected for its first ``steps``, plus ``eps``; a new tensor."""
    corrected: Tensor = second / (1 - beta2**steps)
    return corrected.sqrt_().add_(eps)


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
    "partial_row_wise_adam": placeholders.PartialRowWiseAdam,
    "lamb": placeholders.LAMB,
}
UNFUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "lazy_adam": RowAdam,
    "partial_row_wise_adam": RowAdam,
    "lamb": RowAdam,
}
# Adam in a backward updates only the rows of the batch, as FBGEMM's does.
KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    placeholders.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    placeholders.Adagrad: "adagrad",
    RowWiseAdagrad: "row_wise_adagrad",
    torch.optim.Adam: "lazy_adam",
    placeholders.Adam: "lazy_adam",
    placeholders.PartialRowWiseAdam: "partial_row_wise_adam",
    placeholders.LAMB: "lamb",
}
