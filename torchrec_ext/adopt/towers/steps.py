"""TowerRankStep: one rank's part of the steps of towers, eager or captured, between the same exchanges.

TowersSource: the rank's towers, and its rows of the rest, for captured steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from torchrec_ext.adopt.captures import Captures, weakly
from torchrec_ext.adopt.checks import ForwardWatch, optimized_parameters
from torchrec_ext.adopt.errors import CannotAdopt, EndOfStepError
from torchrec_ext.adopt.graph import ForwardGraph, TracedCall, traced_forward
from torchrec_ext.adopt.source import (
    AdoptedSource,
    AnyBatch,
    CapturedUpdate,
    GivenBatch,
    GraphCall,
)
from torchrec_ext.adopt.towers.exchange import (
    OutputHeader,
    squared_norm,
    zeros_for_none,
)
from torchrec_ext.adopt.towers.local import LocalTowers
from torchrec_ext.adopt.user_step import RankStep
from torchrec_ext.capture.captured import CapturedStep, RareShapeError, StepInputs
from torchrec_ext.capture.executors import Run, StepEngine, unaliased
from torchrec_ext.capture.memory import StepMemory
from torchrec_ext.capture.parts import split_at
from torchrec_ext.capture.policy import Compile
from torchrec_ext.observe.user_lines import module_line

TOTAL = 2  # index, among the results of a step, of what is summed over the ranks; before it the loss and the outputs


class _TowerCall(NamedTuple):
    """One call of the two graphs of a step.

    Args:
        towers: call of the graph of this rank's towers; None if it has none.
        places: index among the outputs of that graph of each leaf of the towers' outputs.
        top: call of the graph of the loss.
        first_received: the first leaf of the loss's batch that is a tower's output.
        header: head of the exchange of outputs.
    """

    towers: GraphCall | None
    places: tuple[int, ...]
    top: GraphCall
    first_received: int
    header: OutputHeader

    @property
    def calls(self) -> list[GraphCall]:
        """The calls of both graphs, or of the loss's alone."""
        return [self.top] if self.towers is None else [self.towers, self.top]

    def outer(self) -> list[Tensor]:
        """Returns all inputs except the batch's and updated parameters."""
        return list(itertools.chain.from_iterable(call.outer() for call in self.calls))


class TowerRankStep(RankStep):
    """One rank's part of a step: its towers, and its rows of the rest.

    Args:
        local: this rank's towers.
        clip_norm: limit of the norm of all ranks' gradients; 0 for none.
        compile_: see :func:`adopt_towers`.
    """

    def __init__(
        self, local: LocalTowers, *, clip_norm: float, compile_: Compile
    ) -> None:
        split = local.split
        super().__init__(split.model, split.optimizers, split.loss.function)
        self._local = local
        self._clip_norm = clip_norm
        self._compile = compile_
        self.clips_tables = bool(clip_norm)
        top = set(map(id, split.top))
        reason = "outside of the towers, where its gradient is summed over the ranks"
        self.dense_tables = {
            name: reason
            for name, parameter in self.model.named_parameters()
            if id(parameter) in top
        }

    def check(self) -> None:
        """Raises CannotCaptureError if the step has no captured form, such as towers on a GPU."""
        super().check()
        if self.device.type != "cpu":
            raise CannotAdopt(f"towers on {self.device} have no captured form yet")

    def eager(
        self, batch: AnyBatch, watch: ForwardWatch | None = None
    ) -> tuple[Tensor, Any]:
        """Makes this rank's part by the user's own code. Collective."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss, aux = self._local.gradients(batch.args(), watch)
        self._local.before_writing(float(loss))
        if self._clip_norm:
            self._clip()
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except BaseException:
            # The other ranks write the update of this step, which this one has not.
            self._local.fail()
            raise
        return loss, aux

    def _clip(self) -> None:
        """Limits the norm of all ranks' gradients. Collective."""
        exchange = self._local.exchange
        top = set(map(id, self._local.split.top))
        of_towers: list[Any] = []
        of_top: list[Any] = []
        for parameter in optimized_parameters(self.optimizers):
            if parameter.grad is not None:
                gradients = of_top if id(parameter) in top else of_towers
                gradients.append(parameter.grad)
        # Only towers differ by rank: gradients outside of them are sums over the ranks
        # already.
        squares = exchange.sum_of(squared_norm(of_towers, self.device))
        norm = (squares + squared_norm(of_top, self.device)).sqrt().squeeze(0)
        # As torch.nn.utils.clip_grad_norm_ does.
        factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in of_towers + of_top:
            gradient.mul_(factor)

    def repeated(self, batch: AnyBatch) -> tuple[tuple[Tensor, Any], str]:
        """Makes the eager step on the captured one's received messages; names a message that differs."""
        self._local.exchange.read_again()
        return self.eager(batch), self._local.exchange.difference

    def look(self, loss: Tensor, *, has_updated: bool) -> None:
        """Looks at nothing: before a weight is written all ranks look at the loss of the whole batch."""

    def captures_now(self, *, is_due: bool) -> bool:
        """Whether all ranks capture before this step, because none should wait for another's compiler."""
        return self._compile == "require" or self._local.exchange.due

    def source(self, memory: StepMemory) -> AdoptedSource:
        """Returns the rank's part of the model for captured steps."""
        return TowersSource(self._local, memory, self._clip_norm)

    def engine(self, source: AdoptedSource) -> StepEngine:
        """Returns an executor that meets the other ranks between parts of the step."""
        assert isinstance(source, TowersSource)
        return _InParts(self.device, source)

    def say(self, text: str) -> None:
        """Prints a line on rank 0."""
        if self._local.split.runtime.is_main:
            print(f"adopt_towers: {text}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line on any rank, because ranks may differ in it."""
        print(
            f"adopt_towers: rank {self._local.split.runtime.rank}: {text}", flush=True
        )


class TowersTrace:
    """Makes a captured step of a batch through two graphs: this rank's towers, and the loss on its rows.

    Args:
        captures: the captured steps.
        local: this rank's towers.
        selects: whether the forward selects by masks.
    """

    def __init__(
        self, captures: Captures, local: LocalTowers, *, selects: bool
    ) -> None:
        self._captures = captures
        self._local = local
        self._towers = TracedCall(_outputs_of, weakly(self._take_towers))
        self._top = traced_forward(
            local.split.loss.function, weakly(self._take_top), masks=selects
        )
        self._tower_graphs: dict[int, ForwardGraph] = {}
        self._top_graphs: dict[int, tuple[ForwardGraph, int]] = {}
        self._received: dict[
            int, list[Tensor]
        ] = {}  # stand-ins for the outputs of all towers, by the batch's rows
        self._updates: dict[
            tuple[int, ...], CapturedUpdate
        ] = {}  # by the numbers of both graphs

    def __call__(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Trains on one batch; returns the loss of the whole batch, and this rank's output. Collective."""
        local = self._local
        layout = local.exchange.layout
        args = batch.args()
        self._header = local.header(args)
        rows = int(self._header.rows)
        if not layout.fits(rows):
            raise RareShapeError("a batch of more rows than any before")
        # Dynamo guards on the same stand-ins in each step; the captured one reads what
        # arrives in their place.
        if rows not in self._received:
            blanks = layout.blanks(rows, late=False)
            self._received[rows] = layout.received(blanks[0], rows)
        received = self._received[rows]
        towers = [tower.module for tower in local.split.local]
        share = local.share_of(args, rows)
        self._tower_call: GraphCall | None = None
        self._places: tuple[int, ...] = ()
        if towers:
            arguments = local.arguments(args, rows)
            self._batch = GivenBatch(tuple(arguments))
            outputs = self._captures.call_traced(self._towers, towers, arguments)
            # Dynamo orders a graph's outputs as it likes: where the towers return each
            # blank shows which it is.
            ids = list(map(id, self._blanks))
            self._places = tuple(
                ids.index(id(output)) for output in tree_leaves(outputs)
            )
        self._batch = GivenBatch((*share, *received))
        with local.split.loss.standing_in(received):
            _, output = self._captures.call_traced(self._top, *share)
        return self._whole_loss, output

    def _take_towers(
        self, module: GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        graph = self._captures.graph(module, examples, self._batch)
        self._tower_graphs[graph.number] = graph
        return weakly(self._call_towers, graph.number)

    def _call_towers(self, number: int, *tensors: Tensor) -> Sequence[Any]:
        graph = self._tower_graphs[number]
        self._tower_call = self._captures.call(graph, self._batch, tensors)
        # Stand for the outputs until the step is made; Dynamo puts them where the
        # towers return them.
        self._blanks = [
            torch.empty(output.shape, dtype=output.dtype) for output in graph.outputs
        ]
        return self._blanks

    def _take_top(
        self, module: GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        received = self._received[int(self._header.rows)]
        share = self._batch.args()[: -len(received)]
        with torch._guards.tracing(None), torch.no_grad(), torch.random.fork_rng():
            leaves, spec = tree_flatten(share)
            # refuses towers that are called in another way
            self._local.split.loss.with_outputs(leaves, spec, received)
        count = len(leaves)
        graph = self._captures.graph(
            module, examples, self._batch, range(count, count + len(received))
        )
        self._top_graphs[graph.number] = graph, count
        return weakly(self._call_top, graph.number)

    def _call_top(self, number: int, *tensors: Tensor) -> Sequence[Any]:
        graph, count = self._top_graphs[number]
        top = self._captures.call(graph, self._batch, tensors)
        call = _TowerCall(self._tower_call, self._places, top, count, self._header)
        graphs = [each.graph for each in call.calls]
        numbers = tuple(each.number for each in graphs)
        if numbers not in self._updates:
            self._captures.settle()
            self._updates[numbers] = self._captures.update_of(graphs)
        update = self._updates[numbers]
        outputs = self._captures.run(update, call)
        assert isinstance(update.source, TowersSource)
        self._whole_loss = update.source.whole_loss
        return outputs


def _pieces(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Splits tensors into pieces of the given counts, and the rest."""
    rest = iter(tensors)
    pieces = [list(itertools.islice(rest, count)) for count in counts]
    return [*pieces, list(rest)]


def _outputs_of(towers: Sequence[nn.Module], arguments: Sequence[Any]) -> list[Any]:
    pairs = zip(towers, arguments)  # noqa: B905 - Dynamo traces it
    return [tower(*positional, **keywords) for tower, (positional, keywords) in pairs]


class TowersSource(AdoptedSource):
    """A rank's towers, and its rows of the rest, as the :class:`StepSource` of a captured step.

    What has arrived from other ranks is an input of the step, and what is sent is a result, see :attr:`cuts`.

    Args:
        local: this rank's towers.
        memory: parameters that this rank moves.
        clip_norm: limit of the norm of all ranks' gradients; 0 for none.

    Attributes:
        cuts: indices of the results of a step at which ranks meet.
        whole_loss: loss of the whole batch of the last step, ().
    """

    whole_loss: Tensor

    def __init__(
        self, local: LocalTowers, memory: StepMemory, clip_norm: float
    ) -> None:
        super().__init__(local.split.model, memory, clip_norm)
        self._local = local
        self._exchange = local.exchange
        self._layout = local.exchange.layout
        names = {
            id(parameter): name
            for name, parameter in local.split.model.named_parameters()
        }
        self._top = [names[id(parameter)] for parameter in local.split.top]
        updated = {each.name for each in memory.parameters}
        self._used = [name in updated for name in self._top]
        # The norm and a large total come after the towers' backward, by a third
        # exchange.
        late = bool(clip_norm) or not self._layout.small
        self.cuts = (1, TOTAL + 1, TOTAL + 2) if late else (1, TOTAL + 1)
        self._rows = 0
        self._begun = None
        self._header = OutputHeader()

    def inputs(self, item: Any) -> StepInputs:
        """Returns the tensors of a call, then the header, then blanks for the messages of other ranks.

        Raises:
            CannotCaptureError: see :meth:`AdoptedSource.inputs`.
        """
        if isinstance(item, StepInputs):
            return item
        inputs: list[StepInputs] = []
        tensors: list[Tensor] = []
        for call in item.calls:
            inputs.append(super().inputs(call))
            tensors += inputs[-1].tensors
        counts = [len(each.tensors) for each in inputs]
        self._header = item.header
        rows = int(item.header.rows)
        tensors.append(self._layout.header(item.header))
        tensors += self._layout.blanks(rows, late=len(self.cuts) > 2)

        def make(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
            *values, (self._head, *self._arrived) = _pieces(tensors, counts)
            values_of_graphs = [
                each.make((), piece) for each, piece in zip(inputs, values, strict=True)
            ]
            towers = values_of_graphs[0] if item.towers else None
            return towers, item.places, values_of_graphs[-1], item.first_received, rows

        # The capacity is the size of what is sent.
        key = (tuple(each.key for each in inputs), item.places, self._layout.capacity)
        return StepInputs(key, key, rows, tensors, make)

    def train(self, step: CapturedStep, inputs: StepInputs) -> tuple[Tensor, Any]:
        """Makes a captured step; returns the loss of the whole batch, (), and the outputs of this rank's graph.

        Raises:
            EndOfStepError: all ranks have ended the step, or this one failed.
        """
        self._rows = inputs.rows
        steps_made = self.memory.steps_made
        try:
            _, (_, outputs) = step(inputs)
        except Exception as error:
            # It ended before it wrote anything but the count, or this rank has failed
            # for good.
            self.memory.take_back(steps_made)
            raise EndOfStepError from error
        return self.whole_loss, outputs

    def forward(self, tensors: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss of this rank's rows, (), and as the output what is sent, and the outputs of the graph."""
        towers, places, top, first, rows = batch
        outputs: list[Tensor] = []
        if towers is not None:
            _, outputs = super().run(tensors, towers)
        self._rows = rows
        self._outputs = [outputs[index] for index in places]
        self._messages = [
            torch.cat(self._layout.outgoing(self._head, self._outputs, rows))
        ]
        self._received = self._layout.received(self._arrived[0], rows)
        self._weight = self._layout.weight(rows)
        inputs_of_top = dict(top.tensors)
        for index, leaf in top.graph.of_batch.items():
            if leaf >= first:
                inputs_of_top[index] = self._received[leaf - first]
        loss, aux = super().run(tensors, top._replace(tensors=inputs_of_top))
        return loss, (self._messages, tree_map_only(Tensor, Tensor.detach, aux))

    def gradients(
        self, loss: Tensor, leaves: Mapping[str, list[Tensor]]
    ) -> dict[str, list[Tensor | None]]:
        """Returns the gradients of the whole batch's loss, by the names of the parameters."""
        names = []
        flat = []
        for name, of_one in leaves.items():
            names += [name] * len(of_one)
            flat += of_one
        loss = loss * self._weight
        grads = torch.autograd.grad(loss, [*self._received, *flat], allow_unused=True)
        of_received = grads[: len(self._received)]
        of_top: dict[str, Tensor | None] = dict.fromkeys(self._top)
        for name, grad in zip(names, grads[len(self._received) :], strict=True):
            if name in of_top:
                of_top[name] = grad
            elif grad is not None:
                raise CannotAdopt(
                    f"{module_line(self._model, name)} is read outside of its tower"
                )
        total = self._layout.total(loss, list(of_top.values()))
        returned = zeros_for_none(of_received, self._received)
        self._messages += [total, torch.cat(self._layout.returning(returned, total))]
        gradients, summed = self._layout.arrived(self._arrived[1], self._rows)
        outputs = []
        grads_of_outputs = []
        for output, grad in zip(self._outputs, gradients, strict=True):
            if output.requires_grad:
                outputs.append(output)
                grads_of_outputs.append(grad)
        of_towers: Sequence[Tensor | None] = [None] * len(flat)
        if outputs and flat:
            of_towers = torch.autograd.grad(
                outputs, flat, grads_of_outputs, allow_unused=True
            )
        if len(self.cuts) > 2:
            limited: list[Tensor] = []
            if self.clip_norm:
                limited += [grad for grad in of_towers if grad is not None]
            self._messages.append(squared_norm(limited, self._layout.device))
            # The sum of the norms, and behind it a large total.
            self._norm = self._arrived[2][:1]
            if summed is None:
                summed = self._arrived[2][1:]
        assert summed is not None
        of_top.update(zip(self._top, self._layout.split_total(summed), strict=True))
        result: dict[str, list[Tensor | None]] = {name: [] for name in leaves}
        for name, of_tower in zip(names, of_towers, strict=True):
            result[name].append(of_top.get(name, of_tower))
        return result

    def squared_norm(self, grads: Mapping[str, list[Tensor]]) -> Tensor:
        """Returns the sum of the squares, (), of all ranks' gradients."""
        # The norm that has arrived is that of all towers.
        norm = self._norm.squeeze(0)
        top = {name: of_one for name, of_one in grads.items() if name in self._top}
        return norm + (super().squared_norm(top) if top else 0.0)

    def meet(self, cut: int, message: Tensor, total: Tensor) -> Tensor:
        """Exchanges the results of a step at a cut, and returns the received message. Collective.

        Args:
            cut: 0 after the towers' forward, 1 after the loss, 2 after the towers' backward.
            message: result at the cut.
            total: what is summed over the ranks, from cut 1 on.
        """
        if cut == 0:
            return self._exchange.exchange_outputs([message])
        if cut == 1:
            flat = self._exchange.exchange_gradients([message], self._rows)
            if self._layout.small:
                self._look_at(self._layout.small_total(flat, self._rows), total)
            else:
                self._begun = self._exchange.sum_begun(total)
            return flat
        if not self._layout.small:
            total = self._exchange.sum_ended(self._begun)
            self._look_at(total, total)
        norm = self._exchange.sum_of(message) if self.clip_norm else message
        if self._layout.small:
            return norm
        return torch.cat([norm.to(total.dtype), total])

    def fail(self, cut: int, error: Exception) -> None:
        """Signals a failure to the other ranks, so that all raise alike. Collective."""
        # The others wait for this rank's outputs or gradients; after these they make
        # the step without it.
        if cut == 0 and not self._exchange.met:
            head = self._layout.header(self._header._replace(failed=1.0))
            self._exchange.exchange_outputs(
                self._layout.outgoing(head, [], self._rows), error
            )
        elif cut == 1:
            self._exchange.give_up(self._rows)
            self._exchange.raise_together(error)
        else:
            self._local.fail()
        raise error

    def _look_at(self, head: Tensor, total: Tensor) -> None:
        """Looks at the sum of the ranks' losses before a weight is written."""
        loss, failed, *used = self._layout.numbers(head)
        if failed:
            self._exchange.raise_together(None)
        self._local.before_writing(loss)
        self.whole_loss = head[0].clone()
        # Which parameters a step updates is fixed by its capture.
        for name, ranks, expected in zip(self._top, used, self._used, strict=True):
            if bool(ranks) != expected:
                self._local.fail()
                raise CannotAdopt(
                    f"{module_line(self._model, name)} has a gradient in some steps and none in others, which a "
                    "captured step of towers does not follow: give compile='off'"
                )


class _InParts(StepEngine):
    """Compiles a step in the parts between which ranks meet.

    Args:
        device: the rank's device.
        source: the step's source.
    """

    def __init__(self, device: torch.device, source: TowersSource) -> None:
        super().__init__(device)
        self.source = source

    def __call__(
        self,
        step: Callable[..., list[Tensor]],
        memory: list[Tensor],
        inputs: list[Tensor],
    ) -> Run:
        """Captures the step."""
        source = self.source
        input_count = len(memory) + len(inputs)
        graph, _ = self.trace(step, [*memory, *inputs])
        pieces, results = split_at(graph, source.cuts)
        compiled = [
            self.compile(piece.graph, unaliased(piece.examples)) for piece in pieces
        ]
        # Room for the inputs and for what the pieces give to one another, by its
        # number.
        count = 1 + max(
            input_count,
            *itertools.chain.from_iterable(piece.outputs for piece in pieces),
        )
        # What arrives takes the place of the last inputs, which are blank.
        first_arrived = input_count - len(source.cuts)

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            values: list[Any] = [*memory, *inputs, *[None] * (count - input_count)]

            def result(index: int) -> Tensor:
                return values[results[index]]  # type: ignore[no-any-return,index]

            for number, piece in enumerate(pieces):
                call = piece.graph if self.plain else compiled[number]
                try:
                    with torch.no_grad():
                        outputs = call(*[values[index] for index in piece.inputs])
                except Exception as error:
                    source.fail(number, error)
                for index, value in zip(piece.outputs, outputs, strict=True):
                    values[index] = value
                if number < len(source.cuts):
                    message = result(source.cuts[number])
                    total = result(TOTAL) if number else message
                    values[first_arrived + number] = source.meet(number, message, total)
            return [values[index] if index is not None else None for index in results]  # type: ignore[misc]

        return run
