"""adopt_towers(): sub-networks of a user's own module at the same time, each on a rank of its own.

TowersApart: the step in place of the user's ``zero_grad``, loss, ``backward`` and ``step``.

In a step every rank is given the same batch of B rows. It runs its own towers on all of them; one exchange brings each
rank the outputs of all towers for its share of the rows; the user's own loss function runs on that share, with the
towers' ``forward`` returning the finished outputs; one exchange takes the gradients of the outputs back. The loss and
the gradients of everything outside of the towers, weighed by the rows of each share, are summed over the ranks beside
the towers' backward. So weights are those of one process that makes the step alone, but for rounding.

A rank that raises in a step says so in the exchange that the others wait for, and all raise.

Between the exchanges a rank's part is captured where it can be: traced as one function, see :class:`CapturedStep`, cut
at the exchanges and compiled. Ranks need not be alike in that: what they exchange is the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from torchrec_ext.adopt.captures import Captures
from torchrec_ext.adopt.checks import ForwardWatch
from torchrec_ext.adopt.errors import CannotAdopt, EndOfStepError
from torchrec_ext.adopt.step import AdoptedStep
from torchrec_ext.adopt.towers.exchange import SETTLE, STEP, OutputExchange, raise_together, squared_norm
from torchrec_ext.adopt.towers.steps import TowerRankStep, TowersTrace
from torchrec_ext.adopt.towers.subnetworks import (
    UserLoss,
    batch_rows,
    changed_attribute,
    nothing_moves,
    outer_buffers,
    python_attributes,
    subnetworks,
)
from torchrec_ext.capture.policy import PATIENCE, Compile
from torchrec_ext.distributed.optim.hybrid import GradientNotFiniteError
from torchrec_ext.distributed.runtime import Runtime, calm_gloo

ROUNDS = 3  # of measuring, when the towers are taken apart
_SAMPLE = 4  # rows of a batch whose values ranks compare in every step


class _Guard:
    """Refuses to show weights that another rank has trained since their last broadcast.

    A hook of modules and optimizers. A copy of a model has a guard of its own, which knows of no training.
    """

    of_adopt = True  # a hook that a captured step may leave out

    def __init__(self, text: str) -> None:
        self.text = text
        self.stale = False

    def __call__(self, *_: Any) -> None:
        if self.stale:
            raise CannotAdopt(self.text)

    def __reduce__(self) -> tuple[type[_Guard], tuple[str]]:
        self()
        return type(self), (self.text,)


def adopt_towers(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[..., Any],
    runtime: Runtime,
    towers: Mapping[str, int],
    example: Sequence[Any],
    *,
    clip_norm: float = 0.0,
    compile: Compile = "auto",  # noqa: A002
    verify: int = 3,
) -> TowersApart:
    """Runs sub-networks of the user's own module at the same time, each on a rank of its own. Collective.

    The module, its forward, the optimizer and the loss function stay the user's. Before it returns, the step is made
    on ``example`` without moving a weight, its gradients are compared with plain ones, and rank 0 prints what a step
    takes on each rank beside one process.

    Args:
        model: the user's module, with equal weights on all ranks.
        optimizer: the user's optimizer, or several.
        loss: the user's function from a batch to its loss, (), a mean over the rows; or to the loss and anything else.
            It calls the model.
        runtime: this process's rank and device.
        towers: rank of each sub-network by the path of its module, such as ``{"user": 0, "item": 1}``. Ranks may have
            several, or none: everything outside of the towers runs on all ranks, each with its share of the rows.
        example: a batch of B rows, the same on all ranks: tensors with B rows, also in tuples, lists or dicts.
        clip_norm: limit of the norm of all ranks' gradients, as of torch.nn.utils.clip_grad_norm_; 0 for none.
        compile: ``auto`` captures each rank's part once eager steps have taken as long as a capture does, and says why
            where it cannot; ``require`` captures the third step, or raises; ``off`` leaves all steps eager.
        verify: number of captured steps that are compared with the eager ones on the same batch and weights.

    Returns:
        The step, called as ``loss, aux = step(*batch)`` with the same whole batch on every rank.

    Raises:
        CannotAdopt: a tower, the loss or the ranks do not allow it; the message names what and the remedy. All ranks
            raise alike.
    """
    step = TowersApart(
        model, optimizer, loss, runtime, towers, example, clip_norm=clip_norm, compile_=compile, verify=verify
    )
    if runtime.is_main:
        print(step.describe(), flush=True)
    return step


class TowersApart:
    """Makes training steps in which each rank runs its own towers; made by :func:`adopt_towers`, see there."""

    exchange: OutputExchange

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Callable[..., Any],
        runtime: Runtime,
        towers: Mapping[str, int],
        example: Sequence[Any],
        *,
        clip_norm: float = 0.0,
        compile_: Compile = "auto",
        verify: int = 3,
    ) -> None:
        self._model = model
        self.runtime = runtime
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._steps = 0
        self._failed = False
        self._phases = dict[str, float]()
        self._clip_norm = clip_norm
        self._is_writing = False  # whether this step has begun to write weights
        with nothing_moves(model, self._optimizers, runtime.device):
            self._together(lambda: self._inspect(loss, towers, example))
            self._refuse_different_ranks(example)
            self._measured = self._measure(example)
        self._together(lambda: self._begin_steps(loss, clip_norm, compile_, verify))
        calm_gloo()
        others = [tower for tower in self._towers if tower not in self.local]
        self._guard = _Guard(
            f"rank {runtime.rank} has old weights of "
            f"{' and '.join(f'{tower.path!r} (trained on rank {tower.rank})' for tower in others)}: call step.settle() "
            "on all ranks after the last step, before one of them evaluates or saves"
        )
        for tower in others:
            tower.module.register_forward_pre_hook(self._guard)
            tower.module.register_state_dict_pre_hook(self._guard)  # type: ignore[no-untyped-call]
        for each in self._optimizers if others else ():
            each.register_state_dict_pre_hook(self._guard)

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """Makes one step of the user's training. Collective.

        Args:
            batch: the whole batch, the same on every rank, of the kind of ``example``.

        Returns:
            The loss of the whole batch, (), and what the loss function returned beside it for this rank's rows, see
            :meth:`share`; None where it returns the loss alone.

        Raises:
            CannotAdopt: ranks have different batches, or a batch that is not like the example.
            GradientNotFiniteError: the loss is not a number; no weight was changed.
        """
        self._steps += 1
        self.exchange.begin(self._steps)
        self._is_writing = False
        stale, self._guard.stale = self._guard.stale, False  # the stand-ins are called as the towers are
        try:
            return self._local(*batch)
        except Exception as error:
            problem = error.__cause__ if isinstance(error, EndOfStepError) else error
            assert isinstance(problem, Exception)
            if not self.exchange.met:
                self._exchange_outputs([], [STEP, 0.0, 0.0, 1.0, 0.0], problem)
            raise problem from problem.__cause__
        finally:
            self._guard.stale = stale or self._is_writing

    def _begin_steps(self, loss: Callable[..., Any], clip_norm: float, compile_: Compile, verify: int) -> None:
        if not (isinstance(clip_norm, int | float) and math.isfinite(clip_norm) and clip_norm >= 0):
            raise CannotAdopt(f"clip_norm={clip_norm!r}: must be a number of 0 or more")
        if compile_ not in ("auto", "off", "require"):
            raise CannotAdopt(f"compile={compile_!r}: must be 'auto', 'off' or 'require'")
        if not isinstance(verify, int) or verify < 0:
            raise CannotAdopt(f"verify={verify!r}: must be a number of steps, 0 or more")
        rank_step = TowerRankStep(
            self, self._model, self._optimizers, loss, clip_norm=float(clip_norm), compile_=compile_
        )

        def trace(captures: Captures, selects: bool) -> TowersTrace:
            return TowersTrace(captures, self, loss, selects=selects)

        self._local = AdoptedStep(rank_step, trace, rows=None, compile_=compile_, verify=verify, patience=PATIENCE)

    def eager(self, batch: Sequence[Any], watch: ForwardWatch | None) -> tuple[Tensor, Any]:
        """Makes this rank's share of a step by the user's own code; ``watch`` surrounds what runs of the forward."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss, aux = self._gradients(batch, watch)
        self.before_writing(float(loss))
        if self._clip_norm:
            self._clip()
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        except BaseException:
            self.fail()
            raise
        return loss, aux

    def header(self, batch: Sequence[Any]) -> tuple[list[float], int]:
        """Returns the head of the exchange of outputs, and B, of a batch, which must be like the example."""
        leaves, spec = tree_flatten(tuple(batch))
        rows = self._check(leaves, spec)
        print_ = _fingerprint(leaves) + self._model.training
        return [STEP, float(rows), print_, 0.0, float(self._local.capture_is_due) if self._steps else 0.0], rows

    def before_writing(self, loss: float) -> None:
        """Raises if the loss of the whole batch is not finite; otherwise notes that weights are written next."""
        if not math.isfinite(loss):
            raise GradientNotFiniteError(
                f"the loss of step {self._steps} is {loss}; no weight was changed", step=self._steps
            )
        self._is_writing = True

    def fail(self) -> None:
        """Notes that the other ranks make a step without this one."""
        self._failed = True

    def _clip(self) -> None:
        """Limits the norm of all ranks' gradients. Collective."""
        top = set(map(id, self.top))
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        of_towers = squared_norm([p.grad for p in parameters if id(p) not in top], self.exchange)
        of_top = squared_norm([p.grad for p in parameters if id(p) in top], self.exchange)
        norm = (self.exchange.sum_of(of_towers) + of_top).sqrt().squeeze(0)
        factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad.mul_(factor)

    def share(self, rows: int) -> slice:
        """Returns the rows of the loss function on this rank, of a batch of ``rows``."""
        return self.exchange.shares(rows)[self.runtime.rank]

    def settle(self) -> None:
        """Broadcasts every tower's weights, buffers and optimizer state from its rank. Collective.

        Call it on all ranks before one of them evaluates or saves. Until then the towers of other ranks refuse to run
        and to give out a ``state_dict``, and so does the optimizer.
        """
        self.exchange.begin(self._steps)
        self._exchange_outputs([], [SETTLE, 0.0, 0.0, 0.0, 0.0], None)
        self._local.settle()
        for tower in self._towers:
            for tensor in (*tower.module.parameters(), *tower.module.buffers()):
                self._broadcast(tensor.data, tower.rank)
            for optimizer in self._optimizers:
                self._broadcast_state(optimizer, list(tower.module.parameters()), tower.rank)
        self._guard.stale = False

    def describe(self) -> str:
        """Describes the time of a step on each rank, compared with one process."""
        whole, step_ms, phases = self._measured
        loads = [each["towers"] for each in phases]
        exchange = min(each["exchange"] for each in phases)
        slowest = loads.index(max(loads))
        least = min((load for load in loads if load > 0), default=1.0)
        ratio = " : ".join(f"{load / least:.2f}" for load in loads)
        lines = [
            f"adopt_towers: {step_ms:.2f} ms a step on {len(phases)} rank(s), {whole:.2f} ms in one process, without "
            f"the optimizer: {whole / step_ms:.2f}x at {self._rows} rows"
        ]
        for rank, each in enumerate(phases):
            names = ", ".join(tower.path for tower in self._towers if tower.rank == rank) or "no tower"
            lines.append(f"  rank {rank}: {names} {each['towers']:.2f} ms, its rows of the rest {each['top']:.2f} ms")
        lines.append(f"  exchange {exchange:.2f} ms, {exchange / step_ms:.0%} of a step")
        if len(phases) > 1:
            lines.append(f"  the ranks' towers are as {ratio}: a step is as long as that of rank {slowest}")
        computed = [tower.path for tower in self._towers if tower.computed]
        if computed:
            lines.append(
                f"  {', '.join(computed)}: read what forward computes from the batch, so forward runs up to there on "
                "the whole batch first"
            )
        if self._random:
            lines.append("  the loss draws random numbers: each rank draws its own, not those of one process")
        if len(phases) > 1 and whole < step_ms:
            lines.append("  slower than one process: the exchange costs more than the towers save; try larger batches")
        return "\n".join(lines)

    def _gradients(self, batch: Sequence[Any], watch: ForwardWatch | None = None) -> tuple[Tensor, Any]:
        """Gives this rank's parameters the gradients of the whole batch's loss; returns the loss, and aux."""
        clock = _Clock(self._phases)
        exchange = self.exchange
        problem: Exception | None = None
        leaves, spec = tree_flatten(tuple(batch))
        header = [STEP, 0.0, 0.0, 0.0, 0.0]
        rows = 0
        outputs = list[Tensor]()
        try:
            header, rows = self.header(batch)
            clock("exchange")
            with watch or nullcontext():
                outputs = self.run_towers(batch, leaves, rows)
            clock("towers")
        except Exception as error:
            problem, header[3], outputs = error, 1.0, []
        received = exchange.received(self._exchange_outputs(outputs, header, problem), rows)
        clock("exchange")
        weight = exchange.weight(rows)
        loss = torch.zeros((), device=self.runtime.device)
        aux = None
        try:
            with watch or nullcontext():
                loss, aux = self.run_top(leaves, spec, rows, received)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            self._refuse_outside_reads()
        except Exception as error:
            problem = error
        clock("top")
        gradients = [None if problem else parameter.grad for parameter in self.top]
        share = torch.zeros_like(loss) if problem else loss.detach() * weight
        total = exchange.total(share, gradients, failed=problem is not None)
        returned = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in received]
        arrived = exchange.exchange_gradients(exchange.returning(returned, total), rows)
        begun = None if exchange.small else exchange.sum_begun(total)
        of_outputs, summed = exchange.arrived(arrived, rows)
        clock("exchange")
        try:
            pairs = [pair for pair in zip(outputs, of_outputs, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        except BaseException:
            self.fail()
            raise
        clock("towers")
        whole = self._take_total(exchange.sum_ended(begun) if summed is None else summed, problem)
        clock("exchange")
        return whole.to(loss.dtype), tree_map_only(Tensor, Tensor.detach, aux)

    def _check(self, leaves: list[Any], spec: Any) -> int:
        """Returns the rows of a batch, which must be like the example."""
        if self._failed:
            raise CannotAdopt("an earlier step failed on this rank alone, and its weights are behind: start anew")
        if spec != self._spec:
            shapes = (" ".join(str(each).split()) for each in (spec, self._spec))
            raise CannotAdopt(f"step {self._steps}: the batch has the structure {', the example had '.join(shapes)}")
        for index, (leaf, kind) in enumerate(zip(leaves, self._kinds, strict=True)):
            if _kind(leaf) != kind:
                raise CannotAdopt(
                    f"step {self._steps}: leaf {index} of the batch is {_kind(leaf)}, but was {kind} in the example; "
                    "all batches must be of one kind"
                )
        return batch_rows(leaves)

    def run_towers(self, batch: Sequence[Any], leaves: list[Any], rows: int) -> list[Tensor]:
        """Returns the leaves of the outputs of this rank's towers, (B, ...) each."""
        computed = self.loss.read_inputs(batch, rows, [tower for tower in self.local if tower.computed])
        return [leaf for tower in self.local for leaf in tower.run(leaves, computed.get(tower.path), rows)]

    def tower_calls(self, batch: Sequence[Any], rows: int) -> list[tuple[nn.Module, Any, Any]]:
        """Returns this rank's towers, each with its positional and keyword arguments for a whole batch."""
        computed = self.loss.read_inputs(batch, rows, [tower for tower in self.local if tower.computed])
        leaves = tree_leaves(tuple(batch))
        return [(tower.module, *tower.arguments_of(leaves, computed.get(tower.path))) for tower in self.local]

    def share_of(self, batch: Sequence[Any], rows: int) -> tuple[Any, ...]:
        """Returns the batch of this rank's rows."""
        share = self.share(rows)
        return tree_map_only(Tensor, lambda leaf: leaf[share], tuple(batch))  # type: ignore[no-any-return]

    def run_top(self, leaves: list[Any], spec: Any, rows: int, received: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Returns the loss of this rank's rows, and aux, on the outputs of all towers."""
        share = self.share(rows)
        local = [leaf[share] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self.loss.with_outputs(local, spec, received)

    def _refuse_outside_reads(self) -> None:
        for tower in self._towers:
            for name, parameter in tower.module.named_parameters():
                if parameter.grad is not None:
                    raise CannotAdopt(
                        f"parameter '{tower.path}.{name}' is read outside of its tower, where ranks have old values (a "
                        "penalty on weights?): use the optimizer's weight_decay, or leave this tower out of towers="
                    )

    def _exchange_outputs(self, outputs: list[Tensor], header: list[float], problem: Exception | None) -> Tensor:
        """Sends the outputs (B, ...) of this rank's towers, and returns what has arrived. Collective.

        Sizes must be known to both ends of an exchange before it, so each share of rows is padded to that of the
        greatest batch so far.
        """
        exchange = self.exchange
        rows = int(header[1])
        own_outputs = outputs if exchange.fits(rows) else []
        flat = exchange.exchange_outputs(exchange.outgoing(exchange.header(header), own_outputs, rows), problem)
        if exchange.fits(rows):
            return flat
        exchange.grow(rows)
        return self._exchange_outputs(outputs, header, problem)

    def _take_total(self, total: Tensor, problem: Exception | None) -> Tensor:
        """Gives the parameters outside of the towers the sum of their gradients; returns the whole batch's loss."""
        _, failed, *used = self.exchange.numbers(total)
        if failed:
            self.exchange.raise_together(problem)
        for parameter, ranks, gradient in zip(self.top, used, self.exchange.split_total(total), strict=True):
            parameter.grad = gradient if ranks else None
        return total[0]

    def _together(self, check: Callable[[], None]) -> None:
        """Runs a check of this rank alone; where it fails on any rank, raises on all. Collective."""
        problem = None
        try:
            check()
        except Exception as error:
            problem = error
        raise_together(problem, self.runtime.world_size, self._steps)

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        message = tensor.to(self.runtime.device).contiguous()
        dist.broadcast(message, src=rank)
        if message is not tensor:
            tensor.copy_(message)

    def _broadcast_state(self, optimizer: Optimizer, parameters: list[nn.Parameter], rank: int) -> None:
        """Broadcasts the state that an optimizer has of some parameters."""
        kinds: list[Any] = [[]]
        for parameter in parameters:
            state = optimizer.state.get(parameter, {}).items()
            kinds[0].append({k: (v.shape, v.dtype, v.device.type) if isinstance(v, Tensor) else [v] for k, v in state})
        dist.broadcast_object_list(kinds, src=rank, device=self.runtime.device)
        for parameter, state in zip(parameters, kinds[0], strict=True):
            if self.runtime.rank != rank:
                optimizer.state.pop(parameter, None)
            for key, kind in state.items():
                if isinstance(kind, list):
                    optimizer.state[parameter][key] = kind[0]
                    continue
                if self.runtime.rank != rank:
                    device = "cpu" if kind[2] == "cpu" else parameter.device
                    optimizer.state[parameter][key] = torch.empty(kind[0], dtype=kind[1], device=device)
                self._broadcast(optimizer.state[parameter][key], rank)

    def _inspect(self, function: Callable[..., Any], towers: Mapping[str, int], example: Sequence[Any]) -> None:
        """Observes the towers' inputs and outputs, and refuses a model that cannot be split. No other rank takes part.

        Raises:
            CannotAdopt: see :func:`adopt_towers`.
        """
        self._refuse_kinds()
        self._towers = subnetworks(self._model, towers, self.runtime.world_size)
        self.local = [tower for tower in self._towers if tower.rank == self.runtime.rank]
        self.loss = UserLoss(function, self._towers)
        inside = {id(parameter) for tower in self._towers for parameter in tower.module.parameters()}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.top: list[nn.Parameter] = [
            value for value in parameters if id(value) not in inside and value.requires_grad
        ]
        leaves, self._spec = tree_flatten(tuple(example))
        self._rows = batch_rows(leaves)
        self._kinds = [_kind(leaf) for leaf in leaves]
        if self._rows < 4:
            raise CannotAdopt(f"the example has {self._rows} row(s): give a real batch, of 4 rows or more")
        self._random = self._draws_at_random(example)
        if self._random:
            self._model.eval()  # until the user's mode is restored
            if self._draws_at_random(example):
                raise CannotAdopt(
                    "the loss draws random numbers in eval mode too, so that it cannot be compared with one process: "
                    "draw them in the loader"
                )
        outputs = self.loss.observe(leaves, self._spec, self._rows)
        dtypes = sorted({str(output.dtype) for output in outputs})
        if len(dtypes) > 1:
            raise CannotAdopt(f"the towers return {' and '.join(dtypes)}, which travel together: return one dtype")
        self.exchange = OutputExchange(self.runtime, self._towers, self.top, outputs[0].dtype, self._rows)
        self.loss.refuse_sums(leaves, self._spec, outputs, self._rows)

    def _refuse_kinds(self) -> None:
        device = next((parameter.device for parameter in self._model.parameters()), self.runtime.device)
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            raise CannotAdopt("the model is a DistributedDataParallel, which sums all gradients: give its model.module")
        if device.type != self.runtime.device.type:
            raise CannotAdopt(
                f"the model is on {device}, but this rank's device is {self.runtime.device}: call "
                "model.to(runtime.device) before the optimizer is made"
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in self._optimizers):
            raise CannotAdopt("the optimizer is LBFGS, which calls the loss several times in a step: take another")

    def _draws_at_random(self, example: Sequence[Any]) -> bool:
        """Runs the loss twice, and returns whether it depends on a seed; refuses what a forward changes."""
        state = python_attributes(self._model)
        buffers = outer_buffers(self._model, self._towers)
        losses = []
        for seed in (0, 1):
            for set_seed in (torch.manual_seed, random.seed, np.random.seed):
                set_seed(seed)
            with torch.no_grad():
                losses.append(float(self.loss(*example)[0]))
        if not all(map(math.isfinite, losses)):
            raise CannotAdopt(f"the loss of the example is {losses[0]}: give a batch whose loss is finite")
        changed = changed_attribute(state, python_attributes(self._model))
        if changed is not None:
            raise CannotAdopt(
                f"forward sets the attribute '{changed}', of which ranks would have different values: make it a buffer "
                "of its tower, or keep it outside of the model"
            )
        for name, value in outer_buffers(self._model, self._towers).items():
            if not torch.equal(value, buffers[name]):
                raise CannotAdopt(
                    f"forward changes the buffer '{name}' outside of the towers, by each rank's rows alone: move it "
                    "into a tower"
                )
        return losses[0] != losses[1]

    def _refuse_different_ranks(self, example: Sequence[Any]) -> None:
        """Refuses ranks with different models, optimizers, towers or examples. Collective."""
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        facts = [("towers", str({tower.path: tower.rank for tower in self._towers}))]
        facts += [("the number of parameters and buffers", str(len(tensors)))]
        facts += [(f"the shape of '{name}'", f"{tuple(value.shape)} {value.dtype}") for name, value in tensors.items()]
        facts += [(f"requires_grad of '{name}'", str(value.requires_grad)) for name, value in tensors.items()]
        facts += [(f"the values of '{name}'", _digest(value)) for name, value in tensors.items()]
        for optimizer in self._optimizers:
            counts = [len(group["params"]) for group in optimizer.param_groups]
            facts.append(("the optimizer", f"{type(optimizer).__name__} of {counts} parameters"))
            for number, group in enumerate(optimizer.param_groups):
                facts += [(f"{k} of parameter group {number}", str(v)) for k, v in group.items() if k != "params"]
        values = _fingerprint(tree_flatten(tuple(example))[0])
        facts.append(("the example", f"{self._rows} rows, {self._kinds}, values {values!r}"))
        facts.append(("the mode", f"training={self._model.training}"))
        every: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(every, facts)
        for rank, others in enumerate(every):
            for (name, value), (other_name, other) in itertools.zip_longest(every[0], others, fillvalue=("", "none")):
                if (name, value) != (other_name, other):
                    raise CannotAdopt(
                        f"ranks 0 and {rank} differ in {name or other_name}: {value} and {other}; all ranks need the "
                        "same: call torch.manual_seed with one seed before the model is made, or load one checkpoint"
                    )

    def _measure(self, example: Sequence[Any]) -> tuple[float, float, list[dict[str, float]]]:
        """Compares the gradients of a step with plain ones. Collective.

        Returns:
            Milliseconds of a plain step, of this step, and of its phases by rank.
        """
        parameters = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        gradients: dict[str, Tensor | None] = {}

        def plain() -> float:
            start = time.perf_counter()
            self.loss(*example)[0].backward()  # type: ignore[no-untyped-call]
            return (time.perf_counter() - start) * 1e3

        def keep() -> None:
            plain()
            top = {id(parameter) for parameter in self.top}
            for name, parameter in parameters.items():
                if parameter.grad is not None and parameter.grad.is_sparse and id(parameter) in top:
                    raise CannotAdopt(
                        f"parameter '{name}' outside of the towers has a sparse gradient: give its table sparse=False, "
                        "or move it into a tower"
                    )
                gradients[name] = parameter.grad

        self._forget()
        self._together(keep)
        self._forget()
        self._gradients(example)
        self._together(lambda: self._refuse_differences(parameters, gradients))
        whole = []
        step_ms = []
        phases = []
        for _ in range(ROUNDS):
            self._forget()
            dist.barrier()
            whole.append(plain())
            self._forget()
            dist.barrier()
            start = time.perf_counter()
            self._gradients(example)
            step_ms.append((time.perf_counter() - start) * 1e3)
            phases.append(dict(self._phases))
        medians = {name: statistics.median(each[name] for each in phases) * 1e3 for name in phases[0]}
        every: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(every, (statistics.median(whole), statistics.median(step_ms), medians))
        return min(each[0] for each in every), max(each[1] for each in every), [each[2] for each in every]

    def _forget(self) -> None:
        for parameter in (*self._model.parameters(), *self.top):
            parameter.grad = None

    def _refuse_differences(self, parameters: Mapping[str, Tensor], plain: Mapping[str, Tensor | None]) -> None:
        """Refuses gradients of this rank's parameters that are not those of one process."""
        local = {id(value) for tower in self.local for value in tower.module.parameters()} | set(map(id, self.top))
        greatest = max((float(_dense(each).abs().max()) for each in plain.values() if each is not None), default=0.0)
        for name, parameter in parameters.items():
            if id(parameter) not in local:
                continue
            ours = _dense(parameter.grad)
            theirs = _dense(plain[name])
            rounding = torch.finfo(self.exchange.dtype).eps  # of outputs, which are in 16 bits under autocast
            share = max(torch.finfo(parameter.dtype).eps ** 0.5, 8 * rounding)
            allowed = share * (float(theirs.abs().max()) + greatest / 10)
            alike = (parameter.grad is None) == (plain[name] is None)
            if not alike or bool(((ours - theirs).abs() > allowed).any()):
                raise CannotAdopt(
                    f"the gradient of '{name}' is not that of one process: something between the towers and the loss "
                    "mixes rows, or reads what each rank has alone; leave its sub-network out of towers="
                )


def _dense(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(1)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _kind(leaf: Any) -> str:
    return f"{leaf.dim()}-d {leaf.dtype} on {leaf.device.type}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _fingerprint(leaves: Sequence[Any]) -> float:
    """Returns a number that tells batches apart by a few of their rows, and by their order."""
    total = 0.0
    for index, leaf in enumerate(leaves, 1):
        if isinstance(leaf, Tensor):
            few = leaf.detach()[:: max(1, len(leaf) // _SAMPLE)].reshape(-1).double()
            ramp = torch.arange(1, len(few) + 1, dtype=torch.float64, device=few.device)
            total += index * float(torch.nan_to_num(few, 0.0, 1.0, -1.0) @ ramp)
    return total


def _digest(tensor: Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


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
