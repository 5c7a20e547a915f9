"""Stack: K networks of one shape that train by one step, batched by torch.func.vmap.

The step is :func:`~torchrec_ext.capture.step.trained`. A weight of all members is one tensor (K, ...) with a learning
rate for each, (K, 1, ...). Tables are moved whole, so that stacks are for small ones.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Adam, Optimizer
from torch.overrides import TorchFunctionMode

from torchrec_ext.adopt.checks import STATES, update_rules
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import bad_id, changed_between_calls, untraceable
from torchrec_ext.adopt.reads import is_plain, look_up, look_up_arguments
from torchrec_ext.capture.compiled import TRACERS, compiled
from torchrec_ext.capture.memory import Clock
from torchrec_ext.capture.policy import MOST_GRAPHS
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.networks.one_form import (
    Form,
    check_networks,
    difference,
    form,
    line,
    named_tensors,
)

Loss = Callable[..., Tensor]


@dataclass
class _Clock(Clock):
    """A clock of members; those that are not ``live``, (K, 1, ...), keep values and state, whatever their gradient."""

    live: Tensor

    def stepped(
        self,
        values: Tensor,
        grad: Tensor,
        state: list[Tensor],
        choice: Choice,
    ) -> list[Tensor]:
        """See :meth:`Clock.stepped`."""
        new = super().stepped(values, grad, state, choice)
        pairs = zip(new, [values, *state], strict=True)
        return [torch.where(self.live, now, before) for now, before in pairs]


class Stack:
    """K networks of one shape that train by one step, each with a learning rate of its own.

    All members train on the same batch, and each operation is one for all of them. Dropout drops other units in each
    member. The first step is compiled; batches of another shape than its own are trained on op by op. A number that the
    loss reads from Python is compiled in: give one that changes as a tensor of the batch, or from its fifth value on
    all steps are made op by op. Each step moves all rows of all tables: train networks with large ones in one
    ``nn.ModuleList``, by :func:`adopt`.

    Args:
        networks: K networks that are equal but for the values of weights and buffers; they keep these until
            :meth:`unstack`. Modes and settings are those of now.
        loss: function of a network and a batch of tensors, which returns the loss, (), as a network alone has it. It
            may call the network, and read its weights and settings.
        rates: (K,) learning rates, which are kept in float32; a member with 0 is not trained.
        optimizer: Adam, AdamW, Adagrad or SGD of torch.
        compile: whether the step is compiled; if not, it is made op by op.
        settings: the optimizer's other settings.

    Attributes:
        networks: the networks.

    Raises:
        ValueError: the networks differ, share a weight, have none to train, or have a module or hook that a stack
            would not train as the network alone; there are not K rates of 0 or more; the optimizer or a setting has no
            such step.

    Example:
        >>> networks = [nn.Linear(3, 1) for _ in range(2)]
        >>> stacked = Stack(networks, lambda network, x: network(x).square().mean(), [0.1, 0.2], compile=False)
        >>> stacked.step(torch.ones(4, 3)).shape
        torch.Size([2])
        >>> stacked.unstack() == networks
        True
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        loss: Loss,
        rates: Sequence[float],
        optimizer: type[Optimizer] = Adam,
        *,
        compile: bool = True,  # noqa: A002
        **settings: Any,
    ) -> None:
        networks = list(networks)
        check_networks(networks)
        numbers = _checked(rates, len(networks))
        self.networks = networks
        first = networks[0]
        moved = [each for each in first.parameters() if each.requires_grad]
        made = optimizer(moved, lr=1.0, **settings)  # type: ignore[call-arg]
        rules = update_rules(first, [made])
        device = moved[0].device
        self._count = torch.zeros((), device=device)
        self._rates = numbers.to(device)
        self._member = _Member(_without_values(first), loss)
        fill = float(made.defaults.get("initial_accumulator_value", 0.0))
        own = [named_tensors(network) for network in networks]
        # Of all members, (K, ...): values, and the state and the rule of those that are trained.
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, list[Tensor]] = {}
        self._choices: dict[str, Choice] = {}
        for name in own[0]:
            values = torch.stack([each[name].detach() for each in own])
            self._values[name] = values
            if name in rules:
                self._choices[name] = rules[name][3]
                kinds = STATES[self._choices[name].kind]
                self._states[name] = [torch.full_like(values, fill) for _ in kinds]
                values.requires_grad_()
        self._step = self._made()
        memory = [each for _, each in self._tensors()]
        self._compiled = compiled(self._step, memory=memory) if compile else None
        self._shapes: list[Any] = []
        self._is_checked = False
        # Number of a batch's tensor, rows and name of each look-up, if all ids are the batch's.
        self._given: list[tuple[int, int, str]] | None = None

    def step(self, *batch: Tensor) -> Tensor:
        """Trains all members on a batch, and returns (K,) losses.

        Raises:
            IndexError: an id is outside of its table; nothing was written. A GPU's ids are looked at in the first step.
            ValueError: the loss has no such step or is of another network, or forward writes what the next step would
                read; the message names it.
        """
        shapes = []
        for number, each in enumerate(batch):
            if not isinstance(each, Tensor):
                raise ValueError(
                    f"tensor {number} of the batch is a {type(each).__name__}: must be a tensor; give those of a dict "
                    "one by one, and an array or a number by torch.as_tensor()"
                )
            shapes.append((each.shape, each.dtype))
        self._check(batch)
        self._shapes = self._shapes or shapes
        if self._compiled is not None and self._compiled.traces > MOST_GRAPHS:
            # Each takes up to a minute, and Dynamo keeps them all.
            warnings.warn(
                f"the stack's steps are no longer compiled: {changed_between_calls()}",
                stacklevel=2,
            )
            self._compiled = None
        run: Callable[..., Any] = self._step
        if self._compiled is not None and shapes == self._shapes:
            run = self._compiled
        try:
            losses: Tensor = run(*batch)
        except Exception as error:
            if not type(error).__module__.startswith(TRACERS):
                raise
            raise untraceable(error) from None
        return losses

    def set_rates(self, rates: Sequence[float]) -> None:
        """Sets the (K,) learning rates, from the next step on.

        A member with 0 has stopped: its weights and state stay as they are, bit by bit, also if its loss is NaN, and
        nothing is compiled anew.

        Raises:
            ValueError: there are not K rates of 0 or more.
        """
        self._rates.copy_(_checked(rates, len(self.networks)))

    @torch.no_grad()
    def unstack(self) -> list[nn.Module]:
        """Writes weights and buffers into the networks, and returns these; the training may go on."""
        for number, network in enumerate(self.networks):
            for name, each in named_tensors(network).items():
                value = self._values[name][number]
                # An expanded buffer cannot be written, and seldom needs to be.
                if not each.equal(value):
                    each.copy_(value)
        return self.networks

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that a training needs to go on, for :meth:`load_state_dict`."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from a state of a stack of the same networks and optimizer.

        Raises:
            ValueError: it is of another stack, or has a rate that is none; nothing was written.
        """
        own = dict(self._tensors())
        here, there = ({k: each.shape for k, each in of.items()} for of in (own, state))
        if here != there:
            raise ValueError(
                "this is a state of another stack: give one of the same networks and optimizer"
            )
        # Population-based training writes rates into a state.
        _checked(state["rates"], len(self.networks))
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("step", self._count), ("rates", self._rates))
        # Frozen ones and buffers too: those of networks that are made anew may be drawn otherwise.
        for name, values in self._values.items():
            yield name, values
            for number, each in enumerate(self._states.get(name, [])):
                yield f"{name}/{number}", each

    def _check(self, batch: Sequence[Tensor]) -> None:
        """Refuses, by a forward of the first member, what vmap would compute without a word.

        Raises:
            IndexError: naming the table and the id.
            ValueError: naming what the loss is, what it does not read, or what forward writes.
        """
        # A GPU would be waited for in each step.
        if self._is_checked and self._count.is_cuda:
            return
        if self._given is not None:
            for number, rows, name in self._given:
                _check_range(batch[number], rows, name)
            return
        is_first = not self._is_checked
        values = {name: each[0].detach() for name, each in self._values.items()}
        if is_first:
            before = form(self._member.network)
            for name in values:
                trains = name in self._states
                values[name] = values[name].clone().requires_grad_(trains)
        reads = _Reads({id(value): name for name, value in values.items()})
        written = dict(values)
        with torch.set_grad_enabled(is_first), reads:
            loss = self._member.with_values(written, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                found = f"of shape {tuple(loss.shape)}"
            raise ValueError(f"the loss is {found}, must be a tensor (): take its mean")
        if is_first:
            self._check_writes(before, values, written)
            _check_reads(loss, [values[name] for name in self._states])
            self._is_checked = True
        numbers = {id(each): number for number, each in enumerate(batch)}
        if all(id(ids) in numbers for ids, _, _ in reads.look_ups):
            self._given = [
                (numbers[id(ids)], rows, name) for ids, rows, name in reads.look_ups
            ]

    def _check_writes(
        self,
        before: Form,
        values: Mapping[str, Tensor],
        written: Mapping[str, Tensor],
    ) -> None:
        """Refuses a forward that keeps state for the next step, because a stack would lose it.

        Args:
            before: form of the first network before its forward.
            values: what its weights and buffers were given as.
            written: what they are after it.
        """
        for name, now in written.items():
            given = values[name]
            was = self._values[name][0]
            is_written = now is not given or now._version
            if is_written or not torch.allclose(now, was, 0, 0, equal_nan=True):
                rest = (
                    " is written by forward, which a stack would lose: compute it from the batch, or train the "
                    "networks in one nn.ModuleList, by adopt"
                )
                raise ValueError(line(name, rest))
        path = difference(before, form(self._member.network))
        if path:
            rest = " is written by forward: make it in __init__, return it, or give it to the step"
            raise ValueError(line(path, rest))

    def _made(self) -> Callable[..., Any]:
        """Returns the step as a function of a batch, which reads nothing of this object."""
        member = self._member
        count, rates = self._count, self._rates
        values, states, choices = self._values, self._states, self._choices

        def one(values: dict[str, Tensor], *batch: Tensor) -> Tensor:
            with _Reads():
                return member.with_values(values, batch)  # type: ignore[no-any-return]

        def forward(_: Any, *batch: Tensor) -> tuple[Tensor, Tensor]:
            shared = [None] * len(batch)
            losses = vmap(one, (0, *shared), randomness="different")(values, *batch)
            return losses.sum(), losses.detach()

        def step(*batch: Tensor) -> Tensor:
            parts = []
            for name, state in states.items():
                wide = [len(rates)] + [1] * (values[name].dim() - 1)
                live = (rates != 0).view(wide)
                clock = _Clock(count, rates.view(wide), live)
                parts.append(StepPart(values[name], state, choices[name], clock))
            _, losses = trained(forward, batch, parts, count)
            return losses  # type: ignore[no-any-return]

        return step


class _Member(nn.Module):
    """A network and its loss as one module, so that the loss may read of the network whatever it has."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network = network
        self._loss = loss
        first = {id(each): name for name, each in named_tensors(network).items()}
        # All places of a weight, with the name of its first. A module of two names has each of its places once:
        # functional_call, which would write it twice, could not take it back.
        self._places = {
            f"network.{path}.{name}".replace("..", "."): first[id(tensor)]
            for path, module in network.named_modules()
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        }

    def forward(self, *batch: Tensor) -> Any:
        """Returns the loss."""
        return self._loss(self.network, *batch)

    def with_values(self, values: dict[str, Tensor], batch: Sequence[Tensor]) -> Any:
        """Returns the loss with values of the network's weights and buffers, of which it may write others."""
        given = {place: values[name] for place, name in self._places.items()}
        after = dict(given)
        loss = functional_call(self, after, tuple(batch), tie_weights=False)
        for place, name in self._places.items():
            if after[place] is not given[place]:
                values[name] = after[place]
        return loss


class _Reads(TorchFunctionMode):
    """Looks rows up by ops that vmap and inductor know.

    Args:
        names: name of each weight by its id, to check that ids are in its table; None without a check.

    Attributes:
        look_ups: ids, rows of the table and its name, of each look-up that was checked.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self._names = names
        self.look_ups: list[tuple[Tensor, int, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, but for a look-up."""
        kwargs = kwargs or {}
        if func is not F.embedding and func is not F.embedding_bag:
            return func(*args, **kwargs)
        named = look_up_arguments(func, args, kwargs)
        ids = named["input"]
        if not is_plain(named):
            raise CannotAdopt(
                f"{func.__name__} with max_norm, scale_grad_by_freq or mode='max' is not in a stack: leave it out, or "
                "limit and divide what is read"
            )
        weight = named["weight"]
        if self._names is not None:
            name = self._names.get(id(weight), "a table")
            _check_range(ids, len(weight), name)
            self.look_ups.append((ids, len(weight), name))
        # F.embedding would turn (K, V, D) into (V, K x D) and back in each step.
        read = partial(weight.index_select, 0)
        return look_up(read, named, ids, func is F.embedding_bag)


def _without_values(module: nn.Module) -> nn.Module:
    """Returns a copy with weights and buffers on the meta device; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for each in named_tensors(module).values():
        meta = each.detach().to("meta")
        if isinstance(each, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=each.requires_grad)
        memo[id(each)] = meta
    return copy.deepcopy(module, memo)


def _checked(rates: Any, count: int) -> Tensor:
    """Returns learning rates as a tensor."""
    try:
        numbers = torch.as_tensor(rates, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        # Refused below.
        numbers = torch.empty(0)
    if numbers.shape != (count,) or not ((numbers >= 0) & numbers.isfinite()).all():
        raise ValueError(
            f"rates={rates!r:.60}: must be {count} finite numbers of 0 or more"
        )
    return numbers


def _check_reads(loss: Tensor, weights: Sequence[Tensor]) -> None:
    """Refuses a loss of another network, as one from a closure."""
    found: Sequence[Tensor | None] = []
    if loss.requires_grad:
        found = torch.autograd.grad(loss, weights, allow_unused=True)
    if all(each is None for each in found):
        raise ValueError(
            "the loss does not depend on a weight of the network that it is given: read that network, and no other"
        )


def _check_range(ids: Tensor, rows: int, table: str) -> None:
    bad = bad_id(ids, rows, table)
    if bad:
        raise IndexError(bad)
