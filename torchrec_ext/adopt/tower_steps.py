"""LocalStep: one rank's part of the steps of towers apart, eager or captured, between the same exchanges.

TowersSource: the rank's towers, and its rows of the rest, as what a captured step is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from torchrec_ext.adopt.checks import module_line
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.exchange import HEADER, OutputExchange, squared_norm
from torchrec_ext.adopt.source import AdoptedSource, AnyBatch, ForwardWatch, Table, looked_up_tables
from torchrec_ext.adopt.step import AdoptedStep, StepEngine
from torchrec_ext.adopt.subnetworks import batch_rows
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Compile
from torchrec_ext.train.step.captured import CapturedStep, RareShapeError, Run, StepInputs, unaliased
from torchrec_ext.train.step.choose import PATIENCE
from torchrec_ext.train.step.memory import StepMemory
from torchrec_ext.train.step.parts import split_at

TOTAL = 2  # index, among the results of a step, of what is summed over the ranks; before it the loss and the outputs


class TowerStep(Protocol):
    """A rank's towers and its rows of the rest, as :class:`TowersApart` gives them to its steps.

    Attributes:
        runtime: this process's rank and device.
        exchange: exchanges with the other ranks.
        top: parameters outside of the towers that optimizers move.
    """

    runtime: Runtime
    exchange: OutputExchange
    top: list[nn.Parameter]

    def run_towers(self, batch: Sequence[Any], leaves: list[Any], rows: int) -> list[Tensor]:
        """Returns the leaves of the outputs of this rank's towers, (B, ...) each."""

    def run_top(self, leaves: list[Any], spec: Any, rows: int, received: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Returns the loss of this rank's rows, and aux, on the outputs of all towers."""

    def eager(self, batch: Sequence[Any], watch: ForwardWatch | None) -> tuple[Tensor, Any]:
        """Makes this rank's part of a step by the user's own code."""

    def header(self, batch: Sequence[Any]) -> tuple[list[float], int]:
        """Returns the head of the exchange of outputs, and B, of a batch that is like the example."""

    def before_writing(self, loss: float) -> None:
        """Raises where the loss is not finite; otherwise takes notice that weights are written next."""

    def fail(self) -> None:
        """Takes notice that this rank alone has not made the step."""


class EndOfStepError(Exception):
    """A captured step that all ranks have ended alike, or in which this rank has failed; its cause says why."""


class LocalStep(AdoptedStep):
    """One rank's part of a step, made by the user's own code or captured.

    Args:
        apart: what the rank knows of the step.
        model: the user's model.
        optimizers: the user's optimizers.
        loss: the user's function from a batch to the loss.
        elsewhere: parameters and buffers of other ranks' towers, by name.
        clip_norm: limit of the norm of all ranks' gradients; 0 for none.
        compile_: see :func:`adopt_towers`.
        verify: see :func:`adopt_towers`.
    """

    def __init__(
        self,
        apart: TowerStep,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: Callable[..., Any],
        elsewhere: Mapping[str, Tensor],
        *,
        clip_norm: float,
        compile_: Compile,
        verify: int,
    ) -> None:
        self._apart, self._absent = apart, frozenset(elsewhere)
        top, parameters = set(map(id, apart.top)), dict(model.named_parameters())
        reason = "outside of the towers, where its gradient is summed over the ranks"
        self._as_layers = {name: reason for name in looked_up_tables(model) if id(parameters[name]) in top}
        super().__init__(
            model,
            optimizers,
            loss,
            rows=None,
            clip_norm=clip_norm,
            autocast=nullcontext,
            compile_=compile_,
            verify=verify,
            patience=PATIENCE,
        )
        if not self._why and self._device.type != "cpu":
            self._stay_eager(CannotAdopt(f"towers on {self._device} have no captured form yet"))

    @property
    def capture_is_due(self) -> bool:
        """Whether eager steps of this rank have taken as long as a capture does."""
        return not self._why and self._captured is None and len(self._eager_seconds) >= 2 and super()._pays()

    def _pays(self) -> bool:
        # All ranks capture before the same step, so that none waits for another's compiler.
        return self._compile == "require" or self._apart.exchange.due

    def _executor(self) -> StepEngine:
        return _InParts(self._device)

    def _eager(self, batch: AnyBatch, watch: Any = None) -> tuple[Tensor, Any]:
        return self._apart.eager(batch.args(), watch)

    def _source_of(
        self,
        memory: StepMemory,
        tables: Mapping[str, list[Table]],
        not_tables: Mapping[str, str],
        outside: list[Tensor],
    ) -> AdoptedSource:
        source = TowersSource(self._apart, self._model, memory, tables, not_tables, outside, self._clip_norm)
        assert isinstance(self._engine, _InParts)
        self._engine.source = source
        return source

    def _run(self, captured: CapturedStep, given: StepInputs, batch: AnyBatch, before: Any) -> tuple[Tensor, Any]:
        source = self._adopted_source
        assert isinstance(source, TowersSource)
        if self._stale_grads:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            self._stale_grads = False
        made = source.memory.steps_made
        try:
            source.header, _ = self._apart.header(batch.args())
            tensors = source.with_header(given)
            _, (_, aux) = captured(tensors)
        except Exception as error:
            source.memory.take_back(made)
            raise EndOfStepError from error
        return source.whole_loss, aux

    def _verified(self, given: StepInputs, batch: AnyBatch, before: Any, result: Any) -> tuple[Tensor, Any]:
        self._apart.exchange.read_again()
        eager = super()._verified(given, batch, before, result)
        if not self._why and (difference := self._apart.exchange.difference):
            self._stay_eager(
                CannotAdopt(f"a captured step differs from the eager one on the same batch in {difference}")
            )
        return eager

    def _look(self, loss: Tensor, *, written: bool) -> None:
        """Looks at nothing: before a weight is written all ranks look at the loss of the whole batch."""

    def _say(self, text: str) -> None:
        if self._apart.runtime.is_main:
            print(f"adopt_towers: {text}", flush=True)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            print(f"adopt_towers: rank {self._apart.runtime.rank}: {text}", flush=True)


class TowersSource(AdoptedSource):
    """A rank's towers, and its rows of the rest, as the :class:`StepSource` of a captured step.

    What has arrived from other ranks is an input of the step, and what is sent is a result, see :attr:`cuts`.

    Args:
        apart: what the rank knows of the step.
        model: the user's model.
        memory: parameters that this rank moves.
        tables: objects that look up in tables, by the name of the table.
        not_tables: why a table is moved as a dense layer, by its name.
        outside: tensors that the forward reads and that are neither the model's nor the batch's.
        clip_norm: limit of the norm of all ranks' gradients; 0 for none.

    Attributes:
        cuts: indices of the results of a step at which ranks meet.
        header: the numbers of the next step's exchange of outputs.
        whole_loss: loss of the whole batch of the last step, ().
    """

    whole_loss: Tensor
    header: list[float]

    def __init__(
        self,
        apart: TowerStep,
        model: nn.Module,
        memory: StepMemory,
        tables: Mapping[str, Sequence[Table]],
        not_tables: Mapping[str, str],
        outside: Sequence[Tensor],
        clip_norm: float,
    ) -> None:
        super().__init__(model, self._local_loss, memory, tables, not_tables, outside, clip_norm)
        self._apart, self._exchange = apart, apart.exchange
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._top = [names[id(parameter)] for parameter in apart.top]
        moved = {each.name for each in memory.moved}
        self._used = [name in moved for name in self._top]
        late = bool(clip_norm) or not self._exchange.small
        self.cuts = (1, TOTAL + 1, TOTAL + 2) if late else (1, TOTAL + 1)
        self._rows, self._begun = 0, None

    def inputs(self, item: Any) -> StepInputs:
        """Returns the tensors of a batch, and behind them the header and what stands for what will arrive.

        Raises:
            RareShapeError: the exchange has no room for the batch yet; an eager step makes it.
            CannotCaptureError: see :meth:`AdoptedSource.inputs`.
        """
        given = super().inputs(item)
        if isinstance(item, StepInputs):
            return given
        if not self._exchange.fits(given.rows):
            raise RareShapeError("a batch of more rows than any before")
        count, make = len(given.tensors), given.make
        beside = [self._exchange.header([0.0] * HEADER), *self._exchange.blanks(given.rows, late=len(self.cuts) > 2)]

        def made(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
            self._head, *self._arrived = tensors[count:]
            return make(resident, tensors[:count])

        key = (given.key, self._exchange.capacity)
        return dataclasses.replace(given, key=key, tensors=[*given.tensors, *beside], make=made)

    def with_header(self, given: StepInputs) -> StepInputs:
        """Returns the inputs of the next step, with its header."""
        tensors = list(given.tensors)
        tensors[-len(self.cuts) - 1] = self._exchange.header(self.header)
        self._rows = given.rows
        return dataclasses.replace(given, tensors=tensors)

    def _local_loss(self, *batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss of this rank's rows, and aux."""
        leaves, spec = tree_flatten(tuple(batch))
        self._rows = rows = batch_rows(leaves)
        self._outputs = self._apart.run_towers(batch, leaves, rows)
        self._sent = [torch.cat(self._exchange.outgoing(self._head, self._outputs, rows))]
        self._received = self._exchange.received(self._arrived[0], rows)
        self._weight = self._exchange.weight(rows)
        return self._apart.run_top(leaves, spec, rows, self._received)

    def forward(self, tensors: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss of this rank's rows, (), and as the output what is sent, and aux."""
        loss, aux = super().forward(tensors, batch)
        return loss, (self._sent, aux)

    def gradients(self, loss: Tensor, leaves: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor | None]]:
        """Returns the gradients of the whole batch's loss, by the names of the parameters."""
        names = [name for name, of_one in leaves.items() for _ in of_one]
        flat = [leaf for of_one in leaves.values() for leaf in of_one]
        loss = loss * self._weight
        first = torch.autograd.grad(loss, [*self._received, *flat], allow_unused=True)
        for name, grad in zip(names, first[len(self._received) :], strict=True):
            if grad is not None and name not in self._top:
                raise CannotAdopt(f"{module_line(self._called.model, name)} is read outside of its tower")
        of_top = dict(zip(names, first[len(self._received) :], strict=True))
        total = self._exchange.total(loss, [of_top.get(name) for name in self._top])
        pairs = zip(self._received, first, strict=False)
        returned = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
        self._sent += [total, torch.cat(self._exchange.returning(returned, total))]
        gradients, summed = self._exchange.arrived(self._arrived[1], self._rows)
        needed = [pair for pair in zip(self._outputs, gradients, strict=True) if pair[0].requires_grad]
        second: Sequence[Tensor | None] = [None] * len(flat)
        if needed and flat:
            outputs = [output for output, _ in needed]
            second = torch.autograd.grad(outputs, flat, [grad for _, grad in needed], allow_unused=True)
        if len(self.cuts) > 2:
            moved = [grad for name, grad in zip(names, second, strict=True) if grad is not None]
            self._sent.append(squared_norm(moved, self._exchange) if self.clip_norm else self._exchange.zero())
            self._norm, beside = self._arrived[2][:1], self._arrived[2][1:]
            summed = beside if summed is None else summed
        assert summed is not None
        of_top.update(zip(self._top, self._exchange.split_total(summed), strict=True))
        by_leaf = iter([of_top[name] if name in self._top else grad for name, grad in zip(names, second, strict=True)])
        return {name: [next(by_leaf) for _ in of_one] for name, of_one in leaves.items()}

    def squared_norm(self, grads: Mapping[str, list[Tensor]]) -> Tensor:
        """Returns the sum of the squares, (), of all ranks' gradients."""
        top = {name: of_one for name, of_one in grads.items() if name in self._top}
        return self._norm.squeeze(0) + (super().squared_norm(top) if top else 0.0)

    def meet(self, cut: int, sent: Tensor, total: Tensor) -> Tensor:
        """Exchanges what a step has computed up to a cut, and returns what has arrived. Collective.

        Args:
            cut: 0 after the towers' forward, 1 after the loss, 2 after the towers' backward.
            sent: result at the cut.
            total: what is summed over the ranks, from cut 1 on.
        """
        if cut == 0:
            return self._exchange.exchange_outputs([sent])
        if cut == 1:
            flat = self._exchange.exchange_gradients([sent], self._rows)
            if self._exchange.small:
                self._look_at(self._exchange.small_total(flat, self._rows), total)
            else:
                self._begun = self._exchange.sum_begun(total)
            return flat
        if not self._exchange.small:
            total = self._exchange.sum_ended(self._begun)
            self._look_at(total, total)
        norm = self._exchange.sum_of(sent) if self.clip_norm else sent
        return norm if self._exchange.small else torch.cat([norm.to(total.dtype), total])

    def fail(self, cut: int, error: Exception) -> None:
        """Tells the other ranks that this one cannot go on, so that all raise alike. Collective."""
        if cut == 0 and not self._exchange.met:
            head = self._exchange.header([*self.header[:3], 1.0, *self.header[4:]])
            self._exchange.exchange_outputs(self._exchange.outgoing(head, [], self._rows), error)
        elif cut == 1:
            self._exchange.give_up(self._rows)
            self._exchange.raise_together(error)
        else:
            self._apart.fail()
        raise error

    def _look_at(self, head: Tensor, total: Tensor) -> None:
        """Looks at the sum of the ranks' losses before a weight is written."""
        loss, failed, *used = self._exchange.numbers(head)
        if failed:
            self._exchange.raise_together(None)
        self._apart.before_writing(loss)
        self.whole_loss = head[0].clone()
        for name, ranks, expected in zip(self._top, used, self._used, strict=True):
            if bool(ranks) != expected:
                self._apart.fail()
                raise CannotAdopt(
                    f"{module_line(self._called.model, name)} has a gradient in some steps and none in others, which a "
                    "captured step of towers does not follow: give compile='off'"
                )


class _InParts(StepEngine):
    """Compiles a step in the parts between which ranks meet.

    Attributes:
        source: the step's source, known once an eager step was watched.
    """

    source: TowersSource

    def __call__(self, step: Callable[..., list[Tensor]], memory: list[Tensor], inputs: list[Tensor]) -> Run:
        """Captures the step."""
        source, given = self.source, len(memory) + len(inputs)
        graph, _ = self.trace(step, [*memory, *inputs])
        pieces, results = split_at(graph, source.cuts)
        fast = [self.compile(piece.graph, unaliased(piece.examples)) for piece in pieces]
        count = 1 + max([given, *(number for piece in pieces for number in piece.outputs)])
        first_arrived = given - len(source.cuts)

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            values: list[Any] = [*memory, *inputs, *[None] * (count - given)]

            def result(index: int) -> Tensor:
                return values[results[index]]  # type: ignore[no-any-return,index]

            for number, piece in enumerate(pieces):
                call = piece.graph if self.plain else fast[number]
                try:
                    with torch.no_grad():
                        outputs = call(*[values[index] for index in piece.inputs])
                except Exception as error:
                    source.fail(number, error)
                for index, value in zip(piece.outputs, outputs, strict=True):
                    values[index] = value
                if number < len(source.cuts):
                    sent = result(source.cuts[number])
                    total = result(TOTAL) if number else sent
                    values[first_arrived + number] = source.meet(number, sent, total)
            return [values[index] if index is not None else None for index in results]  # type: ignore[misc]

        return run
