"""TableRows: one table inside one captured step: what was read of it, and how that is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.train.catch_up import caught_up, slide_on
from torchrec_ext.train.updates import stepped


@dataclass
class Clock:
    """() float32 ``step``, steps made with this one, and () ``lr`` of a parameter."""

    step: Tensor
    lr: Tensor


@dataclass
class WholeTable:
    """A table that is moved as a whole.

    Args:
        weight: (rows, D), and
        state: of all rows, both written.
        choice: its rule.
        clock: of this step.
    """

    weight: Tensor
    state: list[Tensor]
    choice: Choice
    clock: Clock
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = self.weight.detach().requires_grad_()

    def read(self, ids: Tensor) -> Tensor:
        """(n, D) rows of the ids (n,)."""
        return embedding(ids, self.leaf)

    def leaves(self) -> list[Tensor]:
        """What to take the gradient of."""
        return [self.leaf]

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Writes the step; ``grads`` are those of :meth:`leaves`."""
        if grads[0] is None:
            return
        new = stepped(self.weight, grads[0], self.state, self.clock.step, self.clock.lr, self.choice, table=True)
        _write([self.weight, *self.state], [new[0], *new[1]])


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


@dataclass
class RowTable:
    """A table of which only the rows are moved that a step reads.

    Args:
        weight: (rows, D), and
        state: of all rows, both written where they are read.
        since: (rows,) int32, the last step that each row has made.
        place: (rows,) int32, of any value before and after a step: where among a step's look-ups each row stands.
        slides: (K,) of Adam: how far rows without a gradient slide, see :mod:`catch_up`, and
        powers: (W,) from :func:`reach`.
        choice: its rule.
        clock: of this step.
    """

    weight: Tensor
    state: list[Tensor]
    since: Tensor
    place: Tensor
    slides: Tensor
    powers: Tensor
    choice: Choice
    clock: Clock
    _reads: list[tuple[Tensor, Tensor, list[Tensor]]] = field(default_factory=list)

    def read(self, ids: Tensor) -> Tensor:
        """(n, D) rows of the ids (n,), as they are after the step before."""
        rows = self.weight.index_select(0, ids)
        state = [part.index_select(0, ids) for part in self.state]
        if self.choice.kind == "adam":
            since, before = self.since.index_select(0, ids), (self.clock.step - 1).int()
            numbers: Any = {"betas": self.choice.betas, "eps": self.choice.eps}
            rows, *state = caught_up(rows, state[0], state[1], since, before, self.slides, **numbers)
        leaf = rows.detach().requires_grad_()
        self._reads.append((ids, leaf, state))
        return leaf

    def leaves(self) -> list[Tensor]:
        """What to take the gradient of, one for each read."""
        return [leaf for _, leaf, _ in self._reads]

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Writes the step; ``grads`` are those of :meth:`leaves`."""
        if self.choice.kind == "adam":  # all rows have been read by now
            slide_on(self.slides, self.powers, self.clock.step, self.clock.lr, self.choice.betas)
        if not self._reads:
            return
        ids = torch.cat([ids for ids, _, _ in self._reads])
        rows = torch.cat([leaf.detach() for _, leaf, _ in self._reads])
        state = [torch.cat(parts) for parts in zip(*(own for _, _, own in self._reads), strict=True)]
        own = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, self.leaves(), strict=True)]
        grad = self._summed(ids, torch.cat(own))
        new = stepped(rows, grad, state, self.clock.step, self.clock.lr, self.choice, table=True)
        # A row that was read twice is written twice, with the same values.
        for target, value in zip([self.weight, *self.state], [new[0], *new[1]], strict=True):
            target.index_put_((ids,), value)
        if self.choice.kind == "adam":
            self.since.index_put_((ids,), self.clock.step.int().expand(len(ids)))

    def _summed(self, ids: Tensor, grads: Tensor) -> Tensor:
        """(n, D) the sum of the gradients of all look-ups of a row, at each of them.

        Without sorting, and without a number of rows that is known only then: each look-up writes its number at its row, one of
        them stays, and that is where all of the row are added up.
        """
        self.place.index_put_((ids,), torch.arange(len(ids), dtype=torch.int32, device=ids.device))
        leader = self.place.index_select(0, ids).long()
        return torch.zeros_like(grads).index_add(0, leader, grads).index_select(0, leader)


TableRows = WholeTable | RowTable
