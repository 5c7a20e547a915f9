"""Stack: K networks of one shape that train by one step, whose layers are batched by torch.func.vmap.

The step is :func:`~torchrec_ext.capture.step.trained`. A layer of all members is one tensor (K, ...) with a learning
rate for each, (K, 1, ...). The tables of all members are one matrix (K x V, D), and member k reads row ``id + k V``.

Axis letters: K members, B rows of a batch, V rows of a table, n ids of a look-up.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Adam, Optimizer
from torch.overrides import TorchFunctionMode

from torchrec_ext.adopt.checks import STATES, update_rules
from torchrec_ext.adopt.graph import untraceable
from torchrec_ext.adopt.reads import look_up, look_up_arguments
from torchrec_ext.capture.compiled import TRACERS, compiled
from torchrec_ext.capture.memory import Clock, RowTable
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.capture.update_rules import (
    SLIDES,
    RowClock,
    caught_up,
    decay_of,
    lags,
    row_clock,
    without_closed_form,
)
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.row_rule import row_by_row

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
_BLOCK_ROWS = 1 << 14  # rows of a table to update at once


class Stack:
    """K networks of one shape that train by one step, each with a learning rate of its own.

    Layers of all members are batched operations. All members read the same ids, each from rows of its own. Dropout
    drops other units in each member. The first step is compiled; batches of another shape than its own are trained on
    op by op.

    Args:
        networks: K networks with the same layers; they may differ in weights, and keep these until :meth:`unstack`.
        loss: function of a network and a batch of tensors, which returns the loss, (), as a network alone has it.
        rates: (K,) learning rates.
        optimizer: Adam, AdamW, Adagrad or SGD of torch.
        compile: whether the step is compiled; if not, it is made op by op.
        settings: the optimizer's other settings.

    Attributes:
        networks: the networks.

    Raises:
        ValueError: the networks differ, share a weight, or have a module whose running statistics would be lost; there
            are not K rates; the optimizer or a setting has no such step.

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
        _check(networks)
        if len(rates) != len(networks):
            raise ValueError(
                f"{len(rates)} rates for {len(networks)} members: give one for each"
            )
        self.networks = list(networks)
        self._loss = loss
        self._is_compiled = compile
        first = networks[0]
        device = next(first.parameters()).device
        self._count = torch.zeros((), device=device)
        self._rates = torch.tensor(list(rates), device=device)
        self._factor = torch.ones((), device=device)
        self._unsettled = 0
        tables = {
            f"{path}.weight"
            for path, module in first.named_modules()
            if isinstance(module, _TABLES) and module.weight.requires_grad
        }
        self._base = _base(first, tables)
        moved = [each for each in first.parameters() if each.requires_grad]
        rules = update_rules(first, [optimizer(moved, lr=1.0, **settings)])  # type: ignore[call-arg]
        fill = float(settings.get("initial_accumulator_value", 0.0))
        own = [
            dict((*network.named_parameters(), *network.named_buffers()))
            for network in networks
        ]
        self._fixed: dict[str, Tensor] = {}
        self._weights: dict[str, _Weight] = {}
        for name in own[0]:
            values = torch.stack([each[name].detach() for each in own])
            if name not in rules:
                self._fixed[name] = values
                continue
            choice = rules[name][3]
            state = [torch.full_like(values, fill) for _ in STATES[choice.kind]]
            self._weights[name] = _Weight(
                values.requires_grad_(), state, choice, is_table=name in tables
            )
        self._step: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None
        self._shapes: list[Any] = []
        self._given: list[tuple[int, str]] = []
        self._computes_ids = False

    def step(self, *batch: Tensor) -> Tensor:
        """Trains all members on a batch, and returns (K,) losses.

        Raises:
            IndexError: an id is outside of its table; nothing was written.
            ValueError: the loss has no such step; the message has the line.
        """
        if self._step is None:
            self._begin(batch)
        self._check_ids(batch)
        if self._unsettled >= SLIDES - 1:
            self.settle()
        self._unsettled += 1
        assert self._step is not None
        run = self._step
        if self._compiled is not None and self._shapes == _shapes_of(batch):
            run = self._compiled
        try:
            losses, _ = run(*batch)
        except Exception as error:
            if not type(error).__module__.startswith(TRACERS):
                raise
            raise untraceable(error) from None
        return losses  # type: ignore[no-any-return]

    def schedule(self, factor: float) -> None:
        """Sets the factor of all rates, from the next step on."""
        self._factor.fill_(factor)

    def stop(self, member: int) -> None:
        """Ends the training of one member: its weights stay as they are, bit by bit, and the others go on.

        Its rate becomes 0, and nothing is compiled anew.
        """
        # Rows that are behind owe steps of the rate before.
        self.settle()
        self._rates[member] = 0.0

    @torch.no_grad()
    def settle(self) -> None:
        """Updates the rows that no step has read lately."""
        now = self._count.int()
        for weight in self._weights.values():
            clock = weight.rows
            if clock is None or not self._unsettled:
                continue
            rates = self._rates.repeat_interleave(weight.values.shape[1])
            if lags(weight.choice):
                for start in range(0, len(clock.since), _BLOCK_ROWS):
                    block = slice(start, start + _BLOCK_ROWS)
                    rows, *state = [each[block] for each in weight.flat()]
                    up, *new = caught_up(
                        rows, state, clock.since[block], now, clock, weight.choice
                    )
                    rows += rates[block, None] * (up - rows)
                    torch._foreach_copy_(state, new)
            clock.restart(int(now))
        self._unsettled = 0

    @torch.no_grad()
    def unstack(self) -> list[nn.Module]:
        """Writes the weights into the networks, and returns these; the training may go on."""
        self.settle()
        for number, network in enumerate(self.networks):
            for name, parameter in network.named_parameters():
                if name in self._weights:
                    parameter.copy_(self._weights[name].values[number])
        return self.networks

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that a training needs to go on, for :meth:`load_state_dict`."""
        self.settle()
        return {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from a state of a stack of the same networks and optimizer.

        Raises:
            KeyError: it is of another stack.
        """
        for name, tensor in self._tensors():
            tensor.copy_(state[name])
        for weight in self._weights.values():
            if weight.rows is not None:
                weight.rows.restart(int(self._count))
        self._unsettled = 0

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (
            ("step", self._count),
            ("rates", self._rates),
            ("factor", self._factor),
        )
        for name, weight in self._weights.items():
            yield name, weight.values
            for number, each in enumerate(weight.state):
                yield f"{name}/{number}", each

    # --- the step

    def _begin(self, batch: Sequence[Tensor]) -> None:
        """Chooses how tables are moved, and makes the step."""
        with torch.no_grad():
            look_ups = self._look_ups(batch)
            self._refuse_other_ids(batch, look_ups)
        leaves = {id(each): number for number, each in enumerate(batch)}
        counts = Counter[str]()
        for each in look_ups:
            counts[each.table] += each.flat.numel()
            if id(each.ids) in leaves:
                self._given.append((leaves[id(each.ids)], each.table))
            else:
                self._computes_ids = True
        device = self._count.device
        for name, count in counts.items():
            weight = self._weights[name]
            members, rows, columns = weight.values.shape
            # Decay would need sums of its own for each rate.
            is_late = not (
                without_closed_form(weight.choice) or decay_of(weight.choice)
            )
            if is_late and row_by_row(rows, count, columns, device.type):
                weight.values.requires_grad_(False)
                weight.rows = row_clock(
                    members * rows, int(self._count), weight.choice, device
                )
        self._step = self._made()
        if self._is_compiled:
            self._shapes = _shapes_of(batch)
            self._compiled = compiled(self._step)

    def _look_ups(self, batch: Sequence[Tensor]) -> list[_LookUp]:
        """Returns the look-ups of a forward; a first member's, with rows of zeros."""
        layers = {name: values[0] for name, values in self._layers().items()}
        reads = _Reads(self._tables(), None)
        with reads:
            self._loss(_network(self._base, layers), *batch)
        return reads.look_ups

    def _layers(self) -> dict[str, Tensor]:
        """Returns the values (K, ...) of all that is no table."""
        values = dict(self._fixed)
        for name, weight in self._weights.items():
            if not weight.is_table:
                values[name] = weight.values
        return values

    def _tables(self) -> dict[str, Tensor]:
        return {
            name: self._base.get_parameter(name)
            for name, weight in self._weights.items()
            if weight.is_table
        }

    def _refuse_other_ids(
        self, batch: Sequence[Tensor], look_ups: Sequence[_LookUp]
    ) -> None:
        """Refuses ids that differ between members: they are read before any member's layers run."""
        tables = self._tables()
        rows = []
        for each in look_ups:
            width = tables[each.table].shape[1]
            members = len(self.networks)
            rows.append(self._count.new_zeros(members, each.flat.numel(), width))
        differs: list[str] = []

        def one(layers: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
            reads = _Reads(tables, rows)
            with reads:
                loss = self._loss(_network(self._base, layers), *batch)
            for before, now in zip(look_ups, reads.look_ups, strict=True):
                try:
                    is_same = torch.equal(before.flat, now.flat)
                except RuntimeError:  # vmap: each member has others
                    is_same = False
                if not is_same:
                    differs.append(before.table)
            return loss

        vmap(one, randomness="different")(self._layers(), rows)
        if differs:
            raise ValueError(
                f"the ids of '{differs[0]}' depend on weights, rows or random numbers, and a stack reads the same ids "
                "for all members: compute them in the loader"
            )

    @torch.no_grad()
    def _check_ids(self, batch: Sequence[Tensor]) -> None:
        """Refuses ids outside of their tables: a member would read the rows of another."""
        given = [(table, batch[number]) for number, table in self._given]
        if self._computes_ids:
            given = [(each.table, each.ids) for each in self._look_ups(batch)]
        for table, ids in given:
            rows = self._weights[table].values.shape[1]
            if not ids.numel():
                continue
            least, most = torch.aminmax(ids)
            for number in (int(least), int(most)):
                if not 0 <= number < rows:
                    raise IndexError(
                        f"'{table}' has no row {number}: ids must be 0 to {rows - 1}; nothing was written by this step"
                    )

    def _made(self) -> Callable[..., Any]:
        """Returns the step as a function of a batch, which reads nothing of this object."""
        loss, base, members = self._loss, self._base, len(self.networks)
        count, rates, factor = self._count, self._rates, self._factor
        zero = torch.zeros((), device=count.device, requires_grad=True)
        fixed, tables = self._fixed, self._tables()
        names = list(self._weights)
        weights = list(self._weights.values())

        def make(part: StepPart) -> RowTable:
            assert part.rows is not None
            return _StackedRows(
                part.weight,
                part.state,
                part.rows,
                part.choice,
                part.clock,
                zero,
                rates=rates,
                size=part.weight.shape[0] // members,
            )

        def forward(
            late: Sequence[RowTable | None], *batch: Tensor
        ) -> tuple[Tensor, Tensor]:
            layers = dict(fixed)
            first = {name: values[0] for name, values in fixed.items()}
            by_name = {}
            for name, weight, table in zip(names, weights, late, strict=True):
                by_name[name] = weight.values, table
                if not weight.is_table:
                    layers[name] = weight.values
                    first[name] = weight.values[0]
            reads = _Reads(tables, None)
            with torch.no_grad(), reads:
                loss(_network(base, first), *batch)
            rows = []
            for each in reads.look_ups:
                values, table = by_name[each.table]
                size, width = values.shape[1:]
                shifts = torch.arange(members, device=each.flat.device)[:, None] * size
                # Out of range for all members too.
                places = torch.where(
                    each.flat >= size, members * size, each.flat + shifts
                ).reshape(-1)
                found = (
                    F.embedding(places, values.reshape(-1, width))
                    if table is None
                    else table.read(places)
                )
                rows.append(found.view(members, -1, width))

            def one(layers: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
                with _Reads(tables, rows):
                    return loss(_network(base, layers), *batch)

            losses = vmap(one, randomness="different")(layers, rows)
            return losses.sum(), losses.detach()

        def step(*batch: Tensor) -> tuple[Tensor, Any]:
            parts = []
            for weight in weights:
                if weight.rows is None:
                    wide = [members] + [1] * (weight.values.dim() - 1)
                    clock = Clock(count, (rates * factor).view(wide))
                    parts.append(
                        StepPart(weight.values, weight.state, weight.choice, clock)
                    )
                else:
                    values, *state = weight.flat()
                    clock = Clock(count, factor)
                    parts.append(
                        StepPart(values, state, weight.choice, clock, weight.rows)
                    )
            _, losses = trained(forward, batch, parts, count, make=make)
            return losses, None

        return step


@dataclass(eq=False)
class _Weight:
    """A weight of all members.

    Args:
        values: (K, ...).
        state: the optimizer's state, (K, ...) each.
        choice: the update rule and its numbers.
        is_table: whether rows of it are looked up.
        rows: the clock of the rows (K x V,), if only those that are read are updated.
    """

    values: Tensor
    state: list[Tensor]
    choice: Choice
    is_table: bool
    rows: RowClock | None = None

    def flat(self) -> list[Tensor]:
        """Returns values and state as matrices (K x V, D)."""
        width = self.values.shape[-1]
        return [each.detach().view(-1, width) for each in (self.values, *self.state)]


@dataclass
class _StackedRows(RowTable):
    """The tables of all members below each other, (K x V, D); the rate of its clock is a factor of theirs.

    Args:
        rates: (K,) rates without the factor.
        size: V, rows of a member's table.
    """

    rates: Tensor | None = None
    size: int = 1

    def _own(self, ids: Tensor) -> Tensor:
        """Returns the rate of each row, (n, 1)."""
        assert self.rates is not None
        return self.rates.index_select(0, ids // self.size)[:, None]

    def current(self, ids: Tensor) -> list[Tensor]:
        """Returns rows and state: what a row has slid is proportional to its rate."""
        rows = self.weight.index_select(0, ids)
        up, *state = super().current(ids)
        return [rows + self._own(ids) * (up - rows), *state]

    def stepped(
        self, ids: Tensor, rows: Tensor, grad: Tensor, state: list[Tensor]
    ) -> list[Tensor]:
        """Returns rows and state after this step."""
        clock = Clock(self.clock.step, self._own(ids) * self.clock.lr)
        return clock.stepped(rows, grad, state, self.choice, table=True)


class _LookUp(NamedTuple):
    """A look-up: name of the weight, its ids, and the ids (n,) of the rows that are read."""

    table: str
    ids: Tensor
    flat: Tensor


class _Reads(TorchFunctionMode):
    """Notes the look-ups of a forward, and answers each with given rows, (n, D), or with zeros.

    Args:
        tables: stand-ins of the weights, by name.
        rows: rows in the order of the look-ups; None for zeros.
    """

    def __init__(
        self, tables: Mapping[str, Tensor], rows: Sequence[Tensor] | None
    ) -> None:
        super().__init__()
        self.look_ups: list[_LookUp] = []
        self._tables = tables
        self.rows = rows

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, but for a look-up."""
        kwargs = kwargs or {}
        if func is F.embedding or func is F.embedding_bag:
            named = look_up_arguments(func, args, kwargs)
            for name, weight in self._tables.items():
                if named["weight"] is weight:
                    reader = _Reader(self, name, named["input"], weight)
                    is_bag = func is F.embedding_bag
                    return look_up(reader, named, named["input"], is_bag)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            for each in args:
                for name, weight in self._tables.items():
                    if each is weight:
                        raise ValueError(
                            f"'{name}' is read as a matrix, of which a stack has the rows that are looked up alone: "
                            "train such networks in one ModuleList, by adopt"
                        )
        return result


@dataclass
class _Reader:
    """Reads one look-up's rows."""

    reads: _Reads
    table: str
    ids: Tensor
    weight: Tensor

    def read(self, ids: Tensor) -> Tensor:
        """Returns rows (n, D) for the ids (n,)."""
        number = len(self.reads.look_ups)
        self.reads.look_ups.append(_LookUp(self.table, self.ids, ids))
        if self.reads.rows is None:
            return self.weight.new_zeros(len(ids), self.weight.shape[1])
        return self.reads.rows[number]


def _network(base: nn.Module, values: Mapping[str, Tensor]) -> Callable[..., Any]:
    """Returns a member as a function, with the values of its layers."""

    def network(*inputs: Any, **options: Any) -> Any:
        return functional_call(base, dict(values), inputs, options)

    return network


def _shapes_of(batch: Sequence[Tensor]) -> list[Any]:
    return [(each.shape, each.dtype) for each in batch]


def _base(first: nn.Module, tables: Collection[str]) -> nn.Module:
    """Returns a network without weights: stand-ins in their place, which take no memory."""
    memo: dict[int, Any] = {}
    for name, parameter in first.named_parameters():
        # Of a table the shape and the device are read.
        values = torch.empty_like(parameter, device="meta")
        if name in tables:
            values = parameter.detach().new_zeros(1, 1).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    return copy.deepcopy(first, memo)


def _check(networks: Sequence[nn.Module]) -> None:
    """Refuses networks that are not of one shape.

    Raises:
        ValueError: naming the first difference.
    """
    if len(networks) < 2:
        raise ValueError(f"{len(networks)} networks: a stack has two or more")
    first, *others = networks
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
