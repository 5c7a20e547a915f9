"""FusedAdam: a step of an optimizer that is Adam throughout, in one kernel for each of its settings.

torch.optim, TorchRec's wrappers around it and HybridOptimizer are six calls deep with a profiler's mark at each, at 1,280 rows of a
small network a quarter of its step. This writes into the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer


class _Group(NamedTuple):
    """Settings, and what they move: ``places`` among the parameters."""

    settings: dict[str, Any]
    places: list[int]
    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class FusedAdam:
    """Moves ``parameters`` as ``optimizer`` would.

    Args:
        optimizer: after its first step, which makes its state; one that :meth:`fits`.
        parameters: all that it moves.
        weights: their memory.
    """

    def __init__(self, optimizer: HybridOptimizer, parameters: Sequence[nn.Parameter], weights: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        place, state = {id(parameter): at for at, parameter in enumerate(parameters)}, optimizer.state
        self._groups = []
        for group in optimizer.param_groups:
            own = [state[parameter] for parameter in group["params"]]
            places = [place[id(parameter)] for parameter in group["params"]]
            parts = [[part[name] for part in own] for name in ("exp_avg", "exp_avg_sq", "step")]
            self._groups.append(_Group(group, places, [weights[at].detach() for at in places], *parts))

    @staticmethod
    def fits(optimizer: HybridOptimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it is Adam throughout, without a limit of the norm or weight decay, and has moved them all."""
        choices, state = [*optimizer.of_tables.values(), *optimizer.of_layers.values()], optimizer.state
        plain = all(choice.kind == "adam" and not choice.weight_decay for choice in choices)
        return plain and not optimizer.clip_norm and all(state.get(parameter) for parameter in parameters)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None]) -> bool:
        """One step by the gradients of the parameters; False, and nothing moved, where one is missing or not finite."""
        found = [grad for grad in grads if grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)))
        if len(found) < len(grads) or not torch.isfinite(norm):
            return False
        self._optimizer.gradient_norm = norm
        for settings, places, weights, first, second, steps in self._groups:
            beta1, beta2 = settings["betas"]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                *(weights, [found[at] for at in places], first, second, [], steps),
                lr=settings["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                amsgrad=False,
                maximize=False,
            )
        for call in self._optimizer.after_step:
            call()
        return True
