"""Rows of a table whose Adam moves them when they are next read, in closed form, by what dense Adam would have done meanwhile.

Dense Adam also moves a row that gets no gradient: its moments decay, and it slides on along the first. Over the k steps after step
s, with first moment m and second moment v of step s, the row moves by

    lr x sum over j = 1..k of  (b1^j m / (1 - b1^(s+j))) / (sqrt(b2^j v / (1 - b2^(s+j))) + eps)

which, eps taken as it counts at the first of these steps, is lr x m / (sqrt(v) + eps') x S(s, k), where S depends on steps alone:
S(s, k) = tail(s) - r^k tail(s + k), r = b1 / sqrt(b2), tail(s) = sum over j >= 1 of r^j sqrt(1 - b2^(s+j)) / (1 - b1^(s+j)).

So a step needs to touch only the rows it reads, and ends where dense Adam does. The result differs by rounding, by eps where the
second moment is near its square, and where the learning rate changes: skipped steps are taken at the rate of the step that catches
up.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_ROUNDING = 2.0**-25  # of float32: a smaller share of 1 is nothing
_LONGEST = 1 << 22  # steps; beta2 = 0.99999 needs 1.7 million


def has_closed_form(betas: tuple[float, float]) -> bool:
    """Whether the sum over skipped steps converges fast enough to be a table: b1 below sqrt(b2), b2 not 0 nor too near 1."""
    beta1, beta2 = betas
    return beta2 > 0 and beta1 < 0.999 * math.sqrt(beta2) and _steps(beta2) <= _LONGEST


def _steps(beta2: float) -> int:
    """Steps until the bias correction of the second moment is 1 to the last bit."""
    return 1 + math.ceil(math.log(_ROUNDING) / math.log(beta2))


@lru_cache(maxsize=8)
def tails(betas: tuple[float, float]) -> Tensor:
    """(L,) float32, ``tail(s)`` of s = 0 .. L - 1; all later ones are the last.

    Example:
        >>> round(float(tails((0.0, 0.999))[5]), 6)  # without a first moment nothing slides
        0.0
    """
    beta1, beta2 = betas
    ratio = beta1 / math.sqrt(beta2)
    tail = [ratio / (1 - ratio)]
    for step in range(_steps(beta2) - 1, 0, -1):
        corrected = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        tail.append(ratio * (corrected + tail[-1]))
    return torch.tensor(tail[::-1], dtype=torch.float32)


def caught_up(
    rows: Tensor,
    first: Tensor,
    second: Tensor,
    since: Tensor,
    step: Tensor,
    tail: Tensor,
    *,
    lr: Tensor | float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and their moments as dense Adam has them after ``step``, if they got no gradient since ``since``.

    Args:
        rows: (n, D).
        first: (n, D) first moment, of step ``since``, and
        second: (n, D) the second.
        since: (n,) int32, the last step that a row has made.
        step: () int32, not before it.
        tail: from :func:`tails`.
        lr: learning rate.
        betas: decay of the moments.
        eps: see :class:`torch.optim.Adam`.

    Returns:
        (rows, first, second), each (n, D); where ``since`` is ``step`` the same.
    """
    beta1, beta2 = betas
    skipped = (step - since).to(rows.dtype)[:, None]
    decay1 = torch.exp(skipped * math.log(beta1)) if beta1 > 0 else (skipped == 0).to(rows.dtype)
    decay2 = torch.exp(skipped * math.log(beta2))
    ratio = decay1 / decay2.sqrt()
    last = len(tail) - 1
    slide = tail.index_select(0, since.clamp(max=last))[:, None] - ratio * tail.index_select(0, step.clamp(max=last).view(1))
    near = eps * torch.sqrt(1 - torch.exp((since + 1).to(rows.dtype) * math.log(beta2)))[:, None]
    moved = rows - lr * slide * first / (second.sqrt() + near)
    # A row that never had a gradient has moments of 0, and where eps is 0 too that would be 0 / 0.
    return torch.where(first == 0, rows, moved), first * decay1, second * decay2
