"""RowAdam: FBGEMM's Adam family for tables that every rank holds whole, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class RowAdam(torch.optim.Optimizer):
    """Adam that touches only the rows (of a (rows, D) table) that have a gradient; moments of the others stand still.

    The bias correction counts steps, not a row's own updates, as FBGEMM's fused kernels and TensorFlow Addons' LazyAdam do. With a
    gradient in every row it is torch.optim.Adam. It is another optimizer than Adam where rows are rare.

    Args:
        params: tables.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        row_wise: one second moment per row, the mean over its columns (FBGEMM's partial row-wise Adam).
        trust_ratio: scale each row's update by |row| / |update|, where neither is 0 (LAMB, You et al. 2020, a row being a layer).
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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "row_wise": row_wise, "trust_ratio": trust_ratio})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    state, rule = self.state[table], {name: group[name] for name in self.defaults}
                    _start(state, table, rule["row_wise"])
                    rows = touched(table.grad)
                    move_rows(table, rows, table.grad[rows], state, **rule)


def _start(state: dict[str, Any], table: Tensor, row_wise: bool) -> None:
    if not state:
        shape = (len(table), 1) if row_wise else table.shape
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
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
    """One step of :class:`RowAdam` for the ``rows`` (n,) of a table, of which none twice.

    Args:
        table: (rows, D), changed, and
        rows: (n,) places in it, with
        grad: (n, D) their gradient.
        state: ``step``, which counts this step already, and the moments ``exp_avg`` and ``exp_avg_sq``, changed.
        lr: see :class:`RowAdam`, as for the others.
        betas: see there.
        eps: see there.
        row_wise: see there.
        trust_ratio: see there.
    """
    steps, (beta1, beta2) = float(state["step"]), betas
    square = grad.square().mean(1, keepdim=True) if row_wise else grad.square()
    first = state["exp_avg"][rows].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"][rows].lerp_(square, 1 - beta2)
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
    update = first / (1 - beta1**steps) / ((second / (1 - beta2**steps)).sqrt() + eps)
    if trust_ratio:
        weight_norm, update_norm = table[rows].norm(dim=1, keepdim=True), update.norm(dim=1, keepdim=True)
        update *= torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
    table.index_add_(0, rows, update, alpha=-lr)


def touched(grad: Tensor) -> Tensor:
    """(n,) the rows of a table that have a gradient."""
    return grad.ne(0).any(dim=1).nonzero().squeeze(1)
