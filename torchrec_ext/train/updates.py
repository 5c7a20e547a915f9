"""One optimizer step as a pure function of values, gradient and state: for whole parameters, and for some rows of a table alike.

The rules are those of torch.optim, of FBGEMM's kernels and of :class:`RowAdam`; see :class:`OptimizerConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_ext.distributed.choices import Choice

# (values, gradient, state, steps made with this one, learning rate, choice) -> (values, state), all (n, ...) of the same rows.
Update = Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor, Choice], tuple[Tensor, list[Tensor]]]


def _adam(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice
) -> tuple[Tensor, list[Tensor]]:
    (beta1, beta2), (first, second) = choice.betas, state
    first = first + (grad - first) * (1 - beta1)
    second = second * beta2 + grad * grad * (1 - beta2)
    size, scale = lr / debiased(beta1, step), 1 / debiased(beta2, step).sqrt()
    return values - size * first / (second.sqrt() * scale + choice.eps), [first, second]


def debiased(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step: by a subtraction float32 would keep four digits of it in the first steps, as beta is nearly 1.

    By 1 - e^x = -tanh(x / 2) (1 + e^x): inductor computes what has an exp once per step, but an expm1 again for every few weights.
    """
    if not beta:
        return torch.ones_like(step)
    power = step * math.log(beta)
    return -torch.tanh(power / 2) * (1 + torch.exp(power))


def _lazy_adam(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice
) -> tuple[Tensor, list[Tensor]]:
    moved, moments = _adam(values, grad, state, step, lr, choice)
    live = touched(grad)
    return torch.where(live, moved, values), [torch.where(live, new, old) for new, old in zip(moments, state, strict=True)]


def _adagrad(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice
) -> tuple[Tensor, list[Tensor]]:
    (total,) = state
    total = total + grad * grad
    return values - lr * grad / (total.sqrt() + choice.eps), [total]


def _row_wise_adagrad(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice
) -> tuple[Tensor, list[Tensor]]:
    (total,) = state
    total = total + (grad * grad).mean(dim=1).view(total.shape)
    return values - lr * grad / (total.sqrt().view(-1, 1) + choice.eps), [total]


def _sgd(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice
) -> tuple[Tensor, list[Tensor]]:
    return values - lr * grad, []


UPDATES: dict[str, Update] = {
    "adam": _adam,
    "lazy_adam": _lazy_adam,
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "sgd": _sgd,
}


def touched(grad: Tensor) -> Tensor:
    """(n, 1) whether a row of a table has a gradient."""
    return grad.ne(0).any(dim=1, keepdim=True)


def stepped(
    values: Tensor, grad: Tensor, state: list[Tensor], step: Tensor, lr: Tensor, choice: Choice, *, table: bool
) -> tuple[Tensor, list[Tensor]]:
    """Weight decay, then the rule, its gradient with that of ``l2``. Of a table only rows that have a gradient decay.

    Args:
        values: (n, ...) of a parameter or of rows of a table.
        grad: its gradient.
        state: of the same rows, in the order of :data:`UPDATES`' rules.
        step: () float32, steps made with this one.
        lr: () learning rate.
        choice: the rule and its numbers.
        table: whether these are rows of a table.
    """
    if choice.weight_decay:
        decayed = values * (1 - lr * choice.weight_decay)
        values = torch.where(touched(grad), decayed, values) if table else decayed
    if choice.l2:
        grad = grad + choice.l2 * values
    return UPDATES[choice.kind](values, grad, state, step, lr, choice)
