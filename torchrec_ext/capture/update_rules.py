"""Optimizer steps as pure functions of values, gradient and state, for whole parameters and for rows of a table.

The rules are those of torch.optim, of FBGEMM's kernels and of :class:`RowAdam`; see :class:`OptimizerConfig`. Captured
steps and compiled stacks of networks use them.

caught_up(): updates rows only when they are next read, in closed form, with the result of dense Adam.

Dense Adam also updates a row without a gradient: its moments decay, and it slides on along the first. Over the k steps
after step s, with first moment m and second moment v of step s, and with the learning rate lr(t) of step t, the row
moves by

    sum over j = 1..k of  lr(s+j) x (b1^j m / (1 - b1^(s+j))) / (sqrt(b2^j v / (1 - b2^(s+j))) + eps)

This is m / (sqrt(v) + eps') x S(s) if all these steps have the same eps', and S depends only on steps and rates:
S(s) = sum over j = 1..k of w(j), w(j) = r^j lr(s+j) sqrt(1 - b2^(s+j)) / (1 - b1^(s+j)), r = b1 / sqrt(b2).
Step j has eps x e(j), e(j) = sqrt(1 - b2^(s+j)) / b2^(j/2). eps' is their mean weighted by w. What their spread around
it adds, to second order, is the factor 1 + V u^2: u = eps' / (sqrt(v) + eps'), and V is the variance of e by its
squared mean. :func:`slide_on` stores S and the sums of w e and w e^2 for each step s that may be a row's last one. A
step adds to those of the last :func:`reach` steps, because r^j vanishes for earlier ones.

So a step touches only the rows it reads, and ends where dense Adam does, under any schedule. The result differs by
rounding, and in the first ten steps by eps if the second moment is near its square.

If every row also decays by d(t) = 1 - lr(t) x decay in step t (AdamW, or SGD with l2), a row of step s is multiplied by
the product of d(s+1) .. d(t), and S(s) by d(t) in each step. :func:`decay_on` stores sums of log d. Beyond the reach, S
stays as of step s + W; the rest of its product is applied when a row is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.distributed.optim.config import Choice

# (values, gradient, state, steps made with this one, learning rate, choice) -> (values,
# state), all (n, ...) of the same rows.
Update = Callable[
    [Tensor, Tensor, list[Tensor], Tensor, Tensor, Choice], tuple[Tensor, list[Tensor]]
]


def _adam(
    values: Tensor,
    grad: Tensor,
    state: list[Tensor],
    step: Tensor,
    lr: Tensor,
    choice: Choice,
) -> tuple[Tensor, list[Tensor]]:
    (beta1, beta2) = choice.betas
    (first, second) = state
    # As torch's lerp_ does, so that both round alike.
    first = first + (grad - first) * (1 - beta1)
    second = second * beta2 + grad * grad * (1 - beta2)
    size = lr / debiased(beta1, step)
    scale = 1 / debiased(beta2, step).sqrt()
    updated = values - size * first / (second.sqrt() * scale + choice.eps)
    if choice.kind == "adam":
        return updated, [first, second]
    # A lazy one moves nothing of a row without a gradient.
    moves = grad.ne(0).any(dim=1, keepdim=True)
    moments = map(torch.where, [moves, moves], [first, second], state)
    return torch.where(moves, updated, values), [*moments]


def debiased(beta: float, step: Tensor) -> Tensor:
    """Returns 1 - beta^step; a subtraction in float32 would keep four digits of it in the first steps.

    It is computed by 1 - e^x = -tanh(x / 2) (1 + e^x): inductor computes an exp once per step, but an expm1 again for
    every few weights.
    """
    if not beta:
        return torch.ones_like(step)
    power = step * math.log(beta)
    return -torch.tanh(power / 2) * (1 + torch.exp(power))


def _adagrad(
    values: Tensor,
    grad: Tensor,
    state: list[Tensor],
    step: Tensor,
    lr: Tensor,
    choice: Choice,
) -> tuple[Tensor, list[Tensor]]:
    (total,) = state
    squares = grad * grad
    if choice.kind == "adagrad":
        total = total + squares
        root = total.sqrt()
    else:
        total = total + squares.mean(dim=1).view(total.shape)
        root = total.sqrt().view(-1, 1)
    return values - lr * grad / (root + choice.eps), [total]


def _sgd(
    values: Tensor,
    grad: Tensor,
    state: list[Tensor],
    step: Tensor,
    lr: Tensor,
    choice: Choice,
) -> tuple[Tensor, list[Tensor]]:
    return values - lr * grad, []


UPDATES: dict[str, Update] = {
    "adam": _adam,
    "lazy_adam": _adam,
    "adagrad": _adagrad,
    "row_wise_adagrad": _adagrad,
    "sgd": _sgd,
}


def stepped(
    values: Tensor,
    grad: Tensor,
    state: list[Tensor],
    step: Tensor,
    lr: Tensor,
    choice: Choice,
) -> tuple[Tensor, list[Tensor]]:
    """Returns values and state after a step: weight decay, then the rule for the gradient plus that of ``l2``.

    Args:
        values: values of a parameter or rows of a table, (n, ...).
        grad: gradient of the values.
        state: optimizer state of the values, in the order of the rule in :data:`UPDATES`.
        step: number of steps with this one, () float32.
        lr: learning rate, ().
        choice: the rule and its numbers.
    """
    if choice.weight_decay:
        values = values * (1 - lr * choice.weight_decay)
    if choice.l2:
        grad = grad + choice.l2 * values
    return UPDATES[choice.kind](values, grad, state, step, lr, choice)


# steps to store: before any further step, every row must be brought up to date
SLIDES = 1 << 18
_ROUNDING = 2.0**-25  # of float32: a smaller share of 1 is lost


_MOST_EPS = 0.1  # with a larger one two moments of eps would change a row too much


def without_closed_form(choice: Choice) -> str:
    """Explains why unread rows cannot be updated later in closed form; empty if they can.

    Adam's sum over skipped steps converges within a few thousand if b1 is below .999 sqrt(b2), and b2 is not 0.
    """
    beta1, beta2 = choice.betas
    if choice.kind == "adam":
        if beta2 <= 0 or beta1 >= 0.999 * math.sqrt(beta2):
            return f"betas=({beta1:g}, {beta2:g})"
        if choice.eps > _MOST_EPS:
            return f"eps={choice.eps:g}"
    if choice.l2 and choice.kind != "sgd":
        return "L2 draws at each row in each step; AdamW's decay does not"
    return ""


def reach(betas: tuple[float, float]) -> Tensor:
    """Returns r^j, r^j / b2^(j/2) and r^j / b2^j for j = 1 .. W, (W, 3) float32; later r^j vanish beside the first.

    Example:
        >>> reach((0.5, 0.25 / 0.36))[:2]
        tensor([[0.6000, 0.7200, 0.8640],
                [0.3600, 0.5184, 0.7465]])
        >>> len(reach((0.9, 0.999)))
        166
    """
    (beta1, beta2) = betas
    ratio, count = beta1 / math.sqrt(beta2), 1
    if ratio:
        count = max(math.ceil(math.log(_ROUNDING) / math.log(ratio)), 1)
    ratios = [ratio, beta1 / beta2, beta1 / beta2**1.5]
    return torch.tensor([[each**j for each in ratios] for j in range(1, count + 1)])


def decay_of(choice: Choice) -> float:
    """Returns the decay per step of all rows of a table, as a factor of the rate; 0 if unread rows do not decay."""
    if choice.kind == "sgd" and choice.l2:
        return choice.l2
    return choice.weight_decay


def decay_on(decays: Tensor, step: Tensor, lr: Tensor | float, decay: float) -> None:
    """Stores in ``decays``, (K,) float64, the sum of log(1 - lr x decay) up to ``step``, () float32."""
    now = step.long()
    sum_before = decays.index_select(0, (now - 1).remainder(len(decays)).view(1))
    factor = 1 - torch.as_tensor(lr, dtype=torch.float64, device=decays.device) * decay
    decays.index_put_((now.remainder(len(decays)).view(1),), sum_before + factor.log())


def slide_on(
    slides: Tensor,
    powers: Tensor,
    step: Tensor,
    lr: Tensor | float,
    betas: tuple[float, float],
    decay: float = 0.0,
) -> None:
    """Adds to sums over steps the movement of rows without a gradient in ``step``.

    Args:
        slides: sums of w, w e and w e^2 of step s at s modulo K, (K, 3), written; K is greater than W.
        powers: (W, 3), from :func:`reach`.
        step: number of the finished step, () float32.
        lr: learning rate of the step.
        betas: decay of the moments.
        decay: see :func:`decay_of`.
    """
    root = debiased(betas[1], step).sqrt()
    step_size = lr * root / debiased(betas[0], step)
    now = step.long()
    this_step = now.remainder(len(slides)).view(1)
    # The step before now has waited for r^1, the one before it for r^2.
    earlier_steps = (
        now - 1 - torch.arange(len(powers), device=slides.device)
    ).remainder(len(slides))
    earlier = slides.index_select(0, earlier_steps)
    if decay:
        earlier = earlier * (1 - lr * decay)
    sizes = torch.stack([step_size, step_size * root, step_size * root * root])
    slides.index_put_((earlier_steps,), earlier + powers * sizes)
    slides.index_put_((this_step,), slides.new_zeros(1))


class RowClock(NamedTuple):
    """The state of deferred updates of a table: how far each row is behind.

    Args:
        since: last step of each row, (rows,) int32.
        leader: index of each row among a step's look-ups, (rows,) int32; any values before and after a step.
        slides: movement of Adam's rows without a gradient, (K, 3), see :func:`slide_on`; of other optimizers (1, 3).
        powers: the tensor (W, 3) from :func:`reach`; of other optimizers (1, 3).
        decays: sums of logarithms, (K,) float64, see :func:`decay_on`; (1,) if no row decays.
    """

    since: Tensor
    leader: Tensor
    slides: Tensor
    powers: Tensor
    decays: Tensor

    def restart(self, step: int) -> None:
        """Marks every row as up to date after ``step``."""
        self.since.fill_(step)
        for sums in (self.slides, self.decays):
            sums[step % len(sums)] = 0.0


def row_clock(rows: int, step: int, choice: Choice, device: torch.device) -> RowClock:
    """Returns the clock of a table with all rows at ``step``."""
    is_adam = choice.kind == "adam"
    decays = bool(decay_of(choice))

    # A sum that is not used is a tensor too, so that the clocks of all tables have the
    # same inputs.
    slides = torch.zeros(SLIDES if is_adam else 1, 3, device=device)
    logs = SLIDES if decays else 1
    since = torch.zeros(rows, dtype=torch.int32, device=device)
    clock = RowClock(
        since=since,
        leader=torch.zeros_like(since),
        slides=slides,
        powers=(reach(choice.betas) if is_adam else torch.zeros(1, 3)).to(device),
        decays=torch.zeros(logs, dtype=torch.float64, device=device),
    )
    clock.restart(step)
    return clock


def lags(choice: Choice) -> bool:
    """Whether rows without a gradient change too, so that their update is deferred until a read."""
    return choice.kind == "adam" or bool(decay_of(choice))


def caught_up(
    rows: Tensor,
    state: Sequence[Tensor],
    since: Tensor,
    step: Tensor,
    clock: RowClock,
    choice: Choice,
) -> list[Tensor]:
    """Returns rows and state of a dense optimizer after ``step``, without a gradient since ``since``.

    Args:
        rows: rows of a table, (n, D).
        state: optimizer state of the rows after step ``since``, (n, D) each.
        since: last step of each row, (n,) int32.
        step: number of the last step, () int32, less than K after each ``since``.
        clock: the table's clock, up to ``step``.
        choice: the optimizer, see :func:`lags`.

    Returns:
        Rows and state, each (n, D); unchanged if ``since`` is ``step``.
    """
    decays = bool(decay_of(choice))
    decay_product: Tensor | float = 1.0
    if decays:
        decay_product = _log_of_steps(clock.decays, since, step).exp()
    updated = [rows * decay_product, *state]
    if choice.kind != "adam":
        return updated
    (beta1, beta2) = choice.betas
    (first_moment, second_moment) = state
    skipped = (step - since).to(rows.dtype)[:, None]
    # 0^0 is 1, of which there is no logarithm.
    decay1 = (
        torch.exp(skipped * math.log(beta1))
        if beta1 > 0
        else (skipped == 0).to(rows.dtype)
    )
    decay2 = torch.exp(skipped * math.log(beta2))
    sums = clock.slides.index_select(0, since.remainder(len(clock.slides)))
    slide, first_sum, second_sum = sums[:, :, None].unbind(1)
    # Of rows that skipped nothing the sums are 0, and any eps will do.
    moved = slide > 0
    mean = torch.where(moved, first_sum / slide, 1.0)
    variance = torch.where(moved, second_sum / slide, 1.0) / mean.square() - 1
    if decays:
        reached = torch.minimum(since + len(clock.powers), step)
        slide = slide * _log_of_steps(clock.decays, reached, step).exp()
    eps = choice.eps * mean
    # A row that never had a gradient has moments of 0. If eps is 0 too, that would be 0
    # / 0.
    inverse = torch.where(first_moment == 0, 0.0, 1 / (second_moment.sqrt() + eps))
    share = eps * inverse
    direction = first_moment * inverse * (1 + variance * share * share)
    return [
        updated[0] - slide * direction,
        first_moment * decay1,
        second_moment * decay2,
    ]


def _log_of_steps(sums: Tensor, since: Tensor, step: Tensor) -> Tensor:
    """Returns the sums of the logarithms of steps after ``since`` (n,) up to ``step``, (n, 1) float32."""
    sum_at_step = sums.index_select(0, step.long().remainder(len(sums)).view(1))
    # float32 from here: inductor computes what follows again for each number of a row,
    # which takes long in float64.
    return (sum_at_step - sums.index_select(0, since.remainder(len(sums)))).float()[
        :, None
    ]
