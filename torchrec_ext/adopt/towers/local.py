"""LocalTowers: this rank's part of a step by the user's own code, between the exchanges with the other ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from torchrec_ext.adopt.checks import ForwardWatch
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.towers.exchange import (
    OutputExchange,
    OutputHeader,
    zeros_for_none,
)
from torchrec_ext.adopt.towers.split import TowerSplit, fingerprint
from torchrec_ext.distributed.optim.errors import GradientNotFiniteError


class LocalTowers:
    """This rank's towers, and the loss of its rows.

    Args:
        split: what each rank runs of the model.

    Attributes:
        exchange: exchanges with the other ranks.
        is_writing: whether this step has begun to write weights.
        seconds: seconds of the last step by phase: ``towers``, ``top`` and ``exchange``.
    """

    def __init__(self, split: TowerSplit) -> None:
        self.split = split
        self.exchange = OutputExchange(split)
        self.is_writing = False
        self.seconds: dict[str, float] = {}
        self._is_due = False
        self._has_failed = False

    def begin(self, *, is_due: bool) -> None:
        """Begins a step; ``is_due`` says whether this rank finds that a capture is due."""
        self.exchange.begin(self.exchange.step + 1)
        self.is_writing = False
        self._is_due = is_due

    def header(self, batch: Sequence[Any]) -> OutputHeader:
        """Returns the head of the exchange of outputs of a batch, which must be like the example."""
        if self._has_failed:
            raise CannotAdopt(
                "an earlier step failed on this rank alone, and its weights are behind: start anew"
            )
        leaves, spec = tree_flatten(tuple(batch))
        rows = self.split.rows_of(leaves, spec, self.exchange.step)
        # Ranks of which some train and others evaluate have different fingerprints too.
        print_ = fingerprint(leaves) + self.split.model.training
        return OutputHeader(
            rows=float(rows), fingerprint=print_, due=float(self._is_due)
        )

    def before_writing(self, loss: float) -> None:
        """Raises if the loss of the whole batch is not finite; otherwise notes that weights are written next."""
        if not math.isfinite(loss):
            step = self.exchange.step
            raise GradientNotFiniteError(
                f"the loss of step {step} is {loss}; no weight was changed", step=step
            )
        self.is_writing = True

    def fail(self) -> None:
        """Notes that the other ranks make a step without this one."""
        self._has_failed = True

    def arguments(self, batch: Sequence[Any], rows: int) -> list[tuple[Any, Any]]:
        """Returns the positional and the keyword arguments of each of this rank's towers for a whole batch."""
        towers = self.split.local
        computed = self.split.loss.read_inputs(
            batch, rows, [tower for tower in towers if tower.computed]
        )
        leaves = tree_leaves(tuple(batch))
        return [
            tower.arguments_of(leaves, computed.get(tower.path)) for tower in towers
        ]

    def share_of(self, batch: Sequence[Any], rows: int) -> tuple[Any, ...]:
        """Returns the batch of this rank's rows."""
        share = self.exchange.layout.share(rows)
        return tree_map_only(Tensor, lambda leaf: leaf[share], tuple(batch))  # type: ignore[no-any-return]

    def gradients(
        self, batch: Sequence[Any], watch: ForwardWatch | None = None
    ) -> tuple[Tensor, Any]:
        """Gives this rank's parameters the gradients of the whole batch's loss; returns the loss, and aux. Collective.

        Args:
            batch: the whole batch.
            watch: surrounds what runs of the user's forward.
        """
        clock = _Clock(self.seconds)
        exchange = self.exchange
        layout = exchange.layout
        top = self.split.top
        problem: Exception | None = None
        header = OutputHeader()
        rows = 0
        outputs = list[Tensor]()
        try:
            header = self.header(batch)
            rows = int(header.rows)
            clock("exchange")
            with watch or nullcontext():
                for tower, arguments in zip(
                    self.split.local, self.arguments(batch, rows), strict=True
                ):
                    outputs += tower.run(arguments, rows)
            clock("towers")
        except Exception as error:
            # The others wait for this rank's outputs, so that it sends none and says
            # so.
            problem = error
            outputs = []
            header = header._replace(failed=1.0)
        received = layout.received(
            self.exchange_outputs(outputs, header, problem), rows
        )
        clock("exchange")
        weight = layout.weight(rows)
        loss = torch.zeros((), device=self.split.runtime.device)
        aux = None
        try:
            with watch or nullcontext():
                share, spec = tree_flatten(self.share_of(batch, rows))
                loss, aux = self.split.loss.with_outputs(share, spec, received)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            self._refuse_outside_reads()
        except Exception as error:
            problem = error
        clock("top")
        gradients: list[Tensor | None] = [parameter.grad for parameter in top]
        weighed = loss.detach() * weight
        if problem is not None:
            # A rank that failed sends zeros with a flag, because the others wait for
            # its gradients.
            gradients = [None] * len(top)
            weighed = torch.zeros_like(loss)
        total = layout.total(weighed, gradients, failed=problem is not None)
        returned = zeros_for_none([leaf.grad for leaf in received], received)
        arrived = exchange.exchange_gradients(layout.returning(returned, total), rows)
        # A large total is summed while the towers' backward runs.
        begun = None if layout.small else exchange.sum_begun(total)
        of_outputs, summed = layout.arrived(arrived, rows)
        clock("exchange")
        try:
            # An output of frozen weights has no backward.
            pairs = [
                pair
                for pair in zip(outputs, of_outputs, strict=True)
                if pair[0].requires_grad
            ]
            if pairs:
                tensors, gradients_of_tensors = zip(*pairs, strict=True)
                torch.autograd.backward(tensors, gradients_of_tensors)
        except BaseException:
            # The others have all that they need of this rank, and make the step.
            self.fail()
            raise
        clock("towers")
        if summed is None:
            summed = exchange.sum_ended(begun)
        _, failed, *used = layout.numbers(summed)
        if failed:
            exchange.raise_together(problem)
        for parameter, ranks, gradient in zip(
            top, used, layout.split_total(summed), strict=True
        ):
            # One without a gradient on any rank has none in one process, which
            # optimizers tell from zero.
            parameter.grad = gradient if ranks else None
        clock("exchange")
        return summed[0].to(loss.dtype), tree_map_only(Tensor, Tensor.detach, aux)

    def _refuse_outside_reads(self) -> None:
        for tower in self.split.towers:
            for name, parameter in tower.module.named_parameters():
                if parameter.grad is not None:
                    raise CannotAdopt(
                        f"parameter '{tower.path}.{name}' is read outside of its tower (a penalty on weights?): "
                        "use the optimizer's weight_decay, or leave this tower out of towers="
                    )

    def exchange_outputs(
        self, outputs: list[Tensor], header: OutputHeader, problem: Exception | None
    ) -> Tensor:
        """Sends the outputs (B, ...) of this rank's towers, and returns what has arrived. Collective.

        Sizes must be known to both ends of an exchange before it, so each share of rows is padded to that of the
        greatest batch so far. If a batch is greater, a first exchange without outputs says so.
        """
        layout = self.exchange.layout
        head = layout.header(header)
        rows = int(header.rows)
        if not layout.fits(rows):
            self.exchange.exchange_outputs(layout.outgoing(head, [], rows), problem)
            layout.grow(rows)
        pieces = layout.outgoing(head, outputs, rows)
        return self.exchange.exchange_outputs(pieces, problem)


class _Clock:
    """Adds the seconds since it was last called to a phase.

    Args:
        phases: seconds by phase, cleared.
    """

    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        self._since = time.perf_counter()
        phases.clear()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._since
        self._since = now
