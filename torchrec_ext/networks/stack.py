"""Stack: K networks of one shape that train by one step, batched by torch.func.vmap.

The step is :func:`~torchrec_ext.capture.step.trained`. A weight of all members is one tensor (K, ...) with a learning
rate for each, (K, 1, ...). Tables are moved whole, so that stacks are for small ones.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Adam, Optimizer
from torch.overrides import TorchFunctionMode

from torchrec_ext.adopt.checks import STATES, update_rules
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import bad_id, untraceable, values_needed
from torchrec_ext.adopt.reads import look_up, look_up_arguments
from torchrec_ext.capture.compiled import TRACERS, compiled
from torchrec_ext.capture.memory import Clock
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.observe.user_lines import raising_line

Loss = Callable[..., Tensor]

_PLAIN = (bool, int, float, str, tuple, type(None))
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# What they write while they run would be lost in the copy that vmap works on.
_WRITE_BUFFERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


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
        *,
        table: bool,
    ) -> list[Tensor]:
        """See :meth:`Clock.stepped`."""
        new = super().stepped(values, grad, state, choice, table=table)
        pairs = zip(new, [values, *state], strict=True)
        return [torch.where(self.live, now, before) for now, before in pairs]


class Stack:
    """K networks of one shape that train by one step, each with a learning rate of its own.

    All members train on the same batch, and each operation is one for all of them. Dropout drops other units in each
    member. The first step is compiled; batches of another shape than its own are trained on op by op. Each step moves
    all rows of all tables: train networks with large ones in one ``nn.ModuleList``, by :func:`adopt`.

    Args:
        networks: K networks with the same layers; they may differ in weights, and keep these until :meth:`unstack`.
        loss: function of a network and a batch of tensors, which returns the loss, (), as a network alone has it.
        rates: (K,) learning rates; a member with 0 is not trained.
        optimizer: Adam, AdamW, Adagrad or SGD of torch.
        compile: whether the step is compiled; if not, it is made op by op.
        settings: the optimizer's other settings.

    Attributes:
        networks: the networks.

    Raises:
        ValueError: the networks differ, share a weight, have none to train, or have a module whose running statistics
            would be lost; there are not K rates of 0 or more; the optimizer or a setting has no such step.

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
        _check(networks)
        if not isinstance(rates, Sequence | Tensor) or len(rates) != len(networks):
            count = f"rates={rates!r}"
            if isinstance(rates, Sequence | Tensor):
                count = f"{len(rates)} rates"
            raise ValueError(f"{count} for {len(networks)} members: give one for each")
        for number, rate in enumerate(rates):
            _check_rate(f"rates[{number}]", float(rate))
        if "lr" in settings or not inspect.isclass(optimizer):
            raise ValueError(
                "optimizer: give the class, such as torch.optim.Adam, and learning rates as rates="
            )
        self.networks = networks
        self._loss = loss
        first = networks[0]
        device = next(first.parameters()).device
        self._count = torch.zeros((), device=device)
        self._rates = torch.tensor(list(rates), device=device)
        self._factor = torch.ones((), device=device)
        # The network without weights, which each member calls with its own.
        self._base = copy.deepcopy(first).to("meta")
        moved = [each for each in first.parameters() if each.requires_grad]
        rules = update_rules(first, [optimizer(moved, lr=1.0, **settings)])  # type: ignore[call-arg]
        fill = float(settings.get("initial_accumulator_value", 0.0))
        own = [
            dict((*network.named_parameters(), *network.named_buffers()))
            for network in networks
        ]
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
        memory = [self._count, self._rates, self._factor, *self._values.values()]
        memory += [each for state in self._states.values() for each in state]
        self._compiled = compiled(self._step, memory=memory) if compile else None
        self._shapes: list[Any] = []
        # Number of a batch's tensor, rows and name of each look-up, if all ids are the batch's.
        self._given: list[tuple[int, int, str]] | None = None

    def step(self, *batch: Tensor) -> Tensor:
        """Trains all members on a batch, and returns (K,) losses.

        Raises:
            IndexError: an id is outside of its table; nothing was written.
            ValueError: the batch has other than tensors, or the loss has no such step; the message has the line.
        """
        for number, each in enumerate(batch):
            if not isinstance(each, Tensor):
                raise ValueError(
                    f"step(): argument {number} is a {type(each).__name__}, must be a tensor"
                )
        self._check_first(batch)
        shapes = [(each.shape, each.dtype) for each in batch]
        self._shapes = self._shapes or shapes
        run: Callable[..., Any] = self._step
        if self._compiled is not None and shapes == self._shapes:
            run = self._compiled
        try:
            losses: Tensor = run(*batch)
        except Exception as error:
            # Made op by op, vmap itself refuses what needs values.
            if str(error).startswith("vmap:"):
                raise CannotAdopt(values_needed(raising_line(error))) from None
            if not type(error).__module__.startswith(TRACERS):
                raise
            raise untraceable(error) from None
        return losses

    def schedule(self, factor: float) -> None:
        """Sets the factor of all rates, from the next step on.

        Raises:
            ValueError: it is negative or not finite.
        """
        _check_rate("factor", factor)
        self._factor.fill_(factor)

    def stop(self, member: int) -> None:
        """Ends the training of one member: its weights stay as they are, bit by bit, and the others go on.

        Its rate becomes 0, and nothing is compiled anew. So it is with a member whose loss is NaN.
        """
        self._rates[member] = 0.0

    @torch.no_grad()
    def unstack(self) -> list[nn.Module]:
        """Writes the weights into the networks, and returns these; the training may go on."""
        for number, network in enumerate(self.networks):
            for name, parameter in network.named_parameters():
                parameter.copy_(self._values[name][number])
        return self.networks

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that a training needs to go on, for :meth:`load_state_dict`."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from a state of a stack of the same networks and optimizer.

        Raises:
            ValueError: it is of another stack; nothing was written.
        """
        own = dict(self._tensors())
        for name in [*own, *state]:
            here, there = (
                str(tuple(each[name].shape)) if name in each else "not there"
                for each in (own, state)
            )
            if here != there:
                raise ValueError(
                    f"'{name}' is {there} in the state and {here} in the stack: give a state of the same networks "
                    "and optimizer"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (
            ("step", self._count),
            ("rates", self._rates),
            ("factor", self._factor),
        )
        for name, states in self._states.items():
            yield name, self._values[name]
            for number, each in enumerate(states):
                yield f"{name}/{number}", each

    @torch.no_grad()
    def _check_first(self, batch: Sequence[Tensor]) -> None:
        """Refuses, by a forward of the first member, ids outside of their tables and a loss that is not one number.

        vmap would read another member's rows, and add up a loss of each row.

        Raises:
            IndexError: naming the table and the id.
            ValueError: naming what the loss is.
        """
        if self._given is not None:
            for number, rows, name in self._given:
                _check_range(batch[number], rows, name)
            return
        values = {name: values[0] for name, values in self._values.items()}
        reads = _Reads({id(value): name for name, value in values.items()})
        with reads:
            value = self._loss(_network(self._base, values), *batch)
        if not isinstance(value, Tensor) or value.dim():
            found = type(value).__name__
            if isinstance(value, Tensor):
                found = f"of shape {tuple(value.shape)}"
            raise ValueError(f"the loss is {found}, must be a tensor (): take its mean")
        numbers = {id(each): number for number, each in enumerate(batch)}
        if all(id(ids) in numbers for ids, _, _ in reads.look_ups):
            self._given = [
                (numbers[id(ids)], rows, name) for ids, rows, name in reads.look_ups
            ]

    def _made(self) -> Callable[..., Any]:
        """Returns the step as a function of a batch, which reads nothing of this object."""
        loss, base = self._loss, self._base
        count, rates, factor = self._count, self._rates, self._factor
        values, states, choices = self._values, self._states, self._choices

        def one(values: dict[str, Tensor], *batch: Tensor) -> Tensor:
            with _Reads():
                return loss(_network(base, values), *batch)

        def forward(_: Any, *batch: Tensor) -> tuple[Tensor, Tensor]:
            shared = [None] * len(batch)
            losses = vmap(one, (0, *shared), randomness="different")(values, *batch)
            return losses.sum(), losses.detach()

        def step(*batch: Tensor) -> Tensor:
            parts = []
            for name, state in states.items():
                wide = [len(rates)] + [1] * (values[name].dim() - 1)
                live = (rates != 0).view(wide)
                clock = _Clock(count, (rates * factor).view(wide), live)
                parts.append(StepPart(values[name], state, choices[name], clock))
            _, losses = trained(forward, batch, parts, count)
            return losses  # type: ignore[no-any-return]

        return step


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
        if ids.is_floating_point():
            # Refused by torch.
            return func(*args, **kwargs)
        weight = named["weight"]
        if self._names is not None:
            name = self._names.get(id(weight), "a table")
            _check_range(ids, len(weight), name)
            self.look_ups.append((ids, len(weight), name))
        return look_up(_Rows(weight), named, ids, func is F.embedding_bag)


class _Rows(NamedTuple):
    """A table of all members inside vmap."""

    weight: Tensor

    def read(self, ids: Tensor) -> Tensor:
        """Returns rows (n, D) for the ids (n,)."""
        # F.embedding would turn (K, V, D) into (V, K x D) and back in each step.
        return self.weight.index_select(0, ids)


def _check_rate(name: str, rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"{name}={rate:g}: must be a finite number of 0 or more")


def _check_range(ids: Tensor, rows: int, table: str) -> None:
    bad = bad_id(ids, rows, table)
    if bad:
        raise IndexError(bad)


def _network(base: nn.Module, values: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Returns a member as a function, with its values."""

    def network(*inputs: Any, **options: Any) -> Any:
        return functional_call(base, dict(values), inputs, options)

    return network


def _check(networks: Sequence[nn.Module]) -> None:
    """Refuses networks that are not of one shape.

    Raises:
        ValueError: naming the first difference.
    """
    if len(networks) < 2:
        raise ValueError(f"{len(networks)} networks: a stack has two or more")
    first, *others = networks
    if not any(each.requires_grad for each in first.parameters()):
        raise ValueError(f"{type(first).__name__} has no weight to train")
    expected = _shapes(first)
    for number, other in enumerate(others, 1):
        found = _shapes(other)
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                here = found.get(name, "not there")
                first_has = expected.get(name, "not there")
                raise ValueError(
                    f"{name} is {here} in network {number}, {first_has} in network 0: a stack needs one shape; "
                    "train others in one ModuleList"
                )
    parameters = [
        parameter for network in networks for parameter in network.parameters()
    ]
    if len(set(map(id, parameters))) < len(parameters):
        raise ValueError(
            "two networks share a weight: that is one network; train them as one module"
        )
    for path, module in first.named_modules():
        if (
            isinstance(module, _WRITE_BUFFERS)
            and module.track_running_stats
            and module.running_mean is not None
        ):
            raise ValueError(
                f"{path} is a {type(module).__name__}, whose running statistics a stack would lose: use LayerNorm, or "
                "track_running_stats=False"
            )
        if isinstance(module, _TABLES) and module.max_norm is not None:
            raise ValueError(
                f"{path} has max_norm={module.max_norm:g}, which rewrites rows in forward: leave it out"
            )


def _shapes(network: nn.Module) -> dict[str, str]:
    """Returns what must be equal in all members, by name: classes, plain attributes, shapes of weights and buffers."""
    found = {}
    for path, module in network.named_modules():
        found[path or "the network"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                found[f"{path}.{name}".lstrip(".")] = repr(value)
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        found[name] = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    return found
