"""StalePeers: what the members of a stack predicted some steps ago, for codistillation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchrec_ext.batch import TowerBatch
from torchrec_ext.networks.skeleton import StackError, part_of, tensors_of
from torchrec_ext.networks.stack import Stack
from torchrec_ext.networks.tracing import Inputs, trace_logits


@dataclass(frozen=True, kw_only=True)
class Codistillation:
    """Members learn from each other's slightly old predictions (Anil et al. 2018, algorithm 1).

    Args:
        weight: of the term beside the loss of the labels; 0 for none.
        burn_in: steps without it, in which the members become worth learning from.
        every: steps between two copies of all members; a copy costs the memory of the stack once more, and each step with peers one
            more forward.
    """

    weight: float = 0.0
    burn_in: int = 1000
    every: int = 100

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight={self.weight}: must be a number of 0 or more; 1 is usual")
        if self.burn_in < 0:
            raise ValueError(f"burn_in={self.burn_in}: must be 0 steps or more")
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 step or more")


class StalePeers:
    """A stack as it was, whose members predict for each other.

    Args:
        stack: of two members or more that read one batch.
        config: how often it is copied.

    Raises:
        StackError: a stack of one member.
    """

    def __init__(self, stack: Stack, config: Codistillation) -> None:
        if len(stack.members) < 2:
            raise StackError(f"codistillation with the one member {stack.members}: it learns from peers; stack two or more")
        self._stack, self._config = stack, config
        self._dense: list[Tensor] = []
        self._tables: dict[str, list[Tensor]] = {}
        self._graphs: dict[tuple[object, ...], GraphModule] = {}
        members = len(stack.members)
        self._others = torch.tensor([[peer for peer in range(members) if peer != member] for member in range(members)])

    @torch.no_grad()
    def copy(self) -> None:
        """Takes the members as they are now."""
        self._dense = [value.detach().clone() for value in self._stack.dense.values()]
        self._tables = {
            path: [own.weight(table).detach().clone() for table in own.tables] for path, own in self._stack.tables.items()
        }

    def logits(self, batches: Sequence[TowerBatch], step: int) -> Tensor | None:
        """(K, K - 1, B) of each member's peers for its rows; None before the burn-in is over.

        Args:
            batches: one and the same for each member.
            step: counted from 0 over the run.

        Raises:
            StackError: members with batches of their own.
        """
        if any(batch is not batches[0] for batch in batches):
            raise StackError(
                "codistillation between members that read different rows: peers predict for the same rows; let all read one loader "
                "(the same loader settings and seed)"
            )
        if step < self._config.burn_in or self._stack.skeleton is None:
            return None
        if not self._dense or (step - self._config.burn_in) % self._config.every == 0:
            self.copy()
        stale = self._predict(batches)
        return stale[self._others.to(stale.device)]

    @torch.no_grad()
    def _predict(self, batches: Sequence[TowerBatch]) -> Tensor:
        skeleton = self._stack.skeleton
        assert skeleton is not None, "logits() returns before the first step"
        pooled = []
        for path, tables in self._stack.tables.items():
            reads = skeleton.tables[path].reads
            pooled.append(tables.look_up([part_of(batch, reads) for batch in batches], self._tables[path]))
        inputs = Inputs(self._dense, list(self._stack.tables), pooled, tensors_of(batches[0]), [], [], True)
        key = inputs.shapes()
        if key not in self._graphs:
            self._graphs[key] = trace_logits(skeleton, inputs)
        return self._graphs[key](*inputs.flat())  # type: ignore[no-any-return]
