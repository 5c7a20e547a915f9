"""Subnetwork: a module within a user's model, and what a run of the user's own loss shows of it.

python_attributes(), changed_attribute(): which attributes of a model's modules a forward sets.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torchrec_ext.adopt.checks import optimized_parameters, tensor_leaves
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.observe.put_back import copy_global_generators
from torchrec_ext.observe.user_lines import user_line


def python_attributes(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a model's modules that are neither parameters nor buffers, by path.

    :func:`changed_attribute` compares them to refuse a forward by name. StateCopy puts attributes back without names.
    """
    module_attributes = {*vars(nn.Module()), "forward"}
    attributes: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in module_attributes:
                continue
            # A container that grows is seen by its length: its entries are not copied.
            is_container = isinstance(value, list | dict | set)
            attributes[f"{path}.{name}".lstrip(".")] = (
                (value, len(value)) if is_container else value
            )
    return attributes


def changed_attribute(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> str | None:
    """Returns the path of a changed attribute, such as ``user.calls``; None if there is none."""
    for name in {**before, **after}:
        if not _same(before.get(name), after.get(name)):
            return name
    return None


def _same(before: Any, after: Any) -> bool:
    if (
        isinstance(before, tuple)
        and isinstance(after, tuple)
        and len(before) == len(after)
    ):
        return all(_same(*pair) for pair in zip(before, after, strict=True))
    if isinstance(before, int | float | str | bytes) and type(before) is type(after):
        return bool(before == after)
    return before is after


_Forward = Callable[..., Any]


@dataclass(frozen=True)
class _Leaf:
    """The index of a tensor among the leaves of a batch."""

    index: int


@dataclass(eq=False)
class Subnetwork:
    """A module of a user's model that runs on one rank, as observed on the example.

    Attributes:
        path: path of the module.
        module: the user's module.
        rank: rank that runs it.
        lines: lines of the user's code that called it.
        arguments: leaves of its arguments: the index of a leaf of the batch, or the value itself.
        inputs: structure of its arguments.
        computed: whether it reads tensors that the user's code computes from the batch.
        shapes: shape of each leaf of its output, without the rows.
        outputs: structure of its output.
    """

    path: str
    module: nn.Module
    rank: int
    lines: list[str] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    inputs: TreeSpec | None = None
    computed: bool = False
    shapes: list[torch.Size] = field(default_factory=list)
    outputs: TreeSpec | None = None

    @property
    def width(self) -> int:
        """Numbers of its output for one row."""
        return sum(shape.numel() for shape in self.shapes)

    def arguments_of(
        self, leaves: Sequence[Any], computed: Sequence[Any] | None
    ) -> tuple[Any, Any]:
        """Returns the positional and the keyword arguments for a whole batch.

        Args:
            leaves: leaves of the batch.
            computed: leaves of the arguments, if the user's code computes some of them.
        """
        arguments = list(computed or self.arguments)
        for index, argument in enumerate(arguments):
            if isinstance(argument, _Leaf):
                arguments[index] = leaves[argument.index]
        return tree_unflatten(arguments, self.inputs)  # type: ignore[arg-type,no-any-return]

    def run(self, arguments: tuple[Any, Any], rows: int) -> list[Tensor]:
        """Runs the module on a whole batch of B = ``rows``; returns the leaves of the output, (B, ...) each.

        Raises:
            CannotAdopt: the output is not like that on the example.
        """
        positional, keywords = arguments
        output, spec = tree_flatten(self.module(*positional, **keywords))
        shapes = [leaf.shape[1:] for leaf in output]
        if (shapes, spec) != (self.shapes, self.outputs) or any(
            len(leaf) != rows for leaf in output
        ):
            raise CannotAdopt(
                f"tower '{self.path}' returned {[tuple(leaf.shape) for leaf in output]} for {rows} rows, but "
                f"{[('rows', *shape) for shape in self.shapes]} on the example; its outputs must keep their shapes"
            )
        return output


def subnetworks(
    model: nn.Module, ranks: Mapping[str, int], world_size: int
) -> list[Subnetwork]:
    """Returns the modules at the given paths; refuses those that cannot run on a rank of their own.

    Args:
        model: the user's model.
        ranks: rank of each by its path.
        world_size: R, the number of ranks.

    Raises:
        CannotAdopt: a path, a rank, a hook, a tensor that modules of two ranks hold, or batch normalisation outside.
    """
    if not ranks:
        raise CannotAdopt(
            "towers={}: name a sub-network and its rank, as in {'user': 0, 'item': 1}"
        )
    towers = []
    # A module at two paths may be named by either.
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, rank in ranks.items():
        if path not in modules or not path:
            names = ", ".join(name for name in modules if name and "." not in name)
            raise CannotAdopt(
                f"towers: the model has no module '{path}'; it has {names}, and what is in them"
            )
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise CannotAdopt(
                f"towers: '{path}' is on rank {rank!r}, but the job has ranks 0 to {world_size - 1}"
            )
        for outer in ranks:
            if path.startswith(f"{outer}."):
                raise CannotAdopt(
                    f"towers: '{path}' is within '{outer}': name one of them"
                )
        module = modules[path]
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            raise CannotAdopt(
                f"tower '{path}' has hooks, which would run on every rank: put them on a module in it"
            )
        towers.append(Subnetwork(path, module, rank))
    _refuse_shared(modules, towers)
    return towers


def _refuse_shared(
    modules: Mapping[str, nn.Module], towers: Sequence[Subnetwork]
) -> None:
    readers: dict[int, tuple[str, int | None]] = {}
    for path, module in modules.items():
        rank = None  # of what is outside of the towers
        for tower in towers:
            if f"{path}.".startswith(f"{tower.path}."):
                rank = tower.rank
        if rank is None and isinstance(module, _BatchNorm):
            raise CannotAdopt(
                f"'{path}' is a {type(module).__name__} outside of the towers, where each rank would normalise its own "
                "rows: move it into a tower, or take LayerNorm"
            )
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            full = f"{path}.{name}".lstrip(".")
            first, other = readers.setdefault(id(tensor), (full, rank))
            if other != rank:
                raise CannotAdopt(
                    f"'{first}' and '{full}' are one tensor, but not of one rank: put the towers that share it on the "
                    "same rank, or leave them out of towers="
                )


def outer_buffers(model: nn.Module, towers: Sequence[Subnetwork]) -> dict[str, Tensor]:
    """Returns copies of the buffers that are in no tower, by name."""
    inside = tuple(f"{tower.path}." for tower in towers)
    return {
        name: value.clone()
        for name, value in model.named_buffers()
        if not name.startswith(inside)
    }


def batch_rows(leaves: Sequence[Any]) -> int:
    """Returns B, which the first dimension of every tensor of a batch must be."""
    first = next(tensor_leaves(leaves), None)
    if first is None:
        raise CannotAdopt(
            "the batch has no tensor: give tensors with one row for each row of the batch"
        )
    rows = len(first) if first.dim() else 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (
            leaf.dim() == 0 or len(leaf) != rows or rows == 0
        ):
            raise CannotAdopt(
                f"leaf {index} of the batch has the shape {tuple(leaf.shape)}, the first has {rows} rows: every "
                "tensor of a batch has one row for each row; keep others in the model, as buffers"
            )
    return rows


@contextlib.contextmanager
def standing(forwards: Mapping[nn.Module, _Forward]) -> Iterator[None]:
    """Has each module run another ``forward``, whoever holds the module."""
    # In the instance, because its class may have others.
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward_before in before.items():
            if forward_before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward_before


# No Exception, because the user's code may catch all of them.
class _InputsRead(BaseException):
    """Ends the user's forward once it has computed what some towers read."""


class UserLoss:
    """A user's loss function of a batch, run with its towers observed, or with others standing for them.

    Args:
        function: the user's, which takes a batch, calls the model and returns the loss, or (loss, anything else).
        towers: sub-networks of the model.
    """

    def __init__(
        self, function: Callable[..., Any], towers: Sequence[Subnetwork]
    ) -> None:
        self.function = function
        self._towers = towers
        self._finished: dict[str, list[Tensor]] = {}
        self._stand_ins: dict[nn.Module, _Forward] = {}

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss and aux of a batch, as the user computes them."""
        # The loss, (), and what the user's function returned beside it.
        result = self.function(*batch)
        loss, aux = (
            result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        )
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            what = (
                f"a tensor {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise CannotAdopt(
                f"the loss function returns {what}, must be the loss, (), or (loss, anything else)"
            )
        return loss, aux

    def _called_as(self, forward: _Forward) -> AbstractContextManager[None]:
        """Has each tower call a function of the tower and its arguments."""
        forwards = {}
        for tower in self._towers:
            forwards[tower.module] = functools.partial(forward, tower)
        return standing(forwards)

    def observe(self, leaves: Sequence[Any], spec: TreeSpec, rows: int) -> list[Tensor]:
        """Runs the loss once and writes down what each tower reads and returns.

        Args:
            leaves: leaves of the batch.
            spec: structure of the batch.
            rows: B, the rows of the batch.

        Returns:
            Leaves of the outputs of all towers, (B, ...) each.

        Raises:
            CannotAdopt: a tower is not called once, reads what the model computes, or returns what has no rows.
        """
        outputs: dict[str, list[Tensor]] = {}
        numbers = {
            id(leaf): index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        }

        runs = {tower.path: tower.module.forward for tower in self._towers}

        def observed(tower: Subnetwork, *positional: Any, **keywords: Any) -> Any:
            tower.lines.append(user_line())
            arguments, tower.inputs = tree_flatten((positional, keywords))
            tensors = list(tensor_leaves(arguments))
            if any(tensor.requires_grad for tensor in tensors):
                raise _reads_computed(tower)
            tower.arguments = [
                _Leaf(numbers[id(a)]) if id(a) in numbers else a for a in arguments
            ]
            tower.computed = any(id(tensor) not in numbers for tensor in tensors)
            device = tensors[0].device.type if tensors else "cpu"
            # Towers run before the loss, and outside of its contexts.
            if torch.is_autocast_enabled(device):
                raise CannotAdopt(
                    f"{tower.lines[-1]}: tower '{tower.path}' is called under torch.autocast, which does not "
                    "reach its rank: enter autocast within the tower's forward, and around the rest"
                )
            result = runs[tower.path](*positional, **keywords)
            outputs[tower.path], tower.outputs = tree_flatten(result)
            return result

        with self._called_as(observed):
            self(*tree_unflatten(leaves, spec))
        in_order = []
        for tower in self._towers:
            _refuse_calls(tower)
            output = outputs[tower.path]
            _refuse_outputs(tower, output, rows)
            tower.shapes = [leaf.shape[1:] for leaf in output]
            in_order += [leaf.detach() for leaf in output]
        self._refuse_dependent(leaves, spec, rows)
        return in_order

    def _refuse_dependent(
        self, leaves: Sequence[Any], spec: TreeSpec, rows: int
    ) -> None:
        """Refuses a tower that reads other values if the towers before it return zeros."""
        computed = [tower for tower in self._towers if tower.computed]
        inputs = self.read_inputs(tree_unflatten(leaves, spec), rows, computed)
        for tower in computed:
            for value, expected in zip(
                inputs.get(tower.path, ()), tower.arguments, strict=False
            ):
                if isinstance(expected, Tensor) and not torch.equal(value, expected):
                    raise _reads_computed(tower)
            # They are of the example alone: each batch has its own, see read_inputs().
            tower.arguments = [
                None if isinstance(each, Tensor) else each for each in tower.arguments
            ]

    @torch.no_grad()
    def read_inputs(
        self, batch: Sequence[Any], rows: int, towers: Sequence[Subnetwork]
    ) -> dict[str, list[Any]]:
        """Runs the user's forward up to where ``towers`` have their arguments; returns the leaves of these by path."""
        inputs: dict[str, list[Any]] = {}
        if not towers:
            return inputs
        device = next((leaf.device for leaf in tensor_leaves(batch)), None)

        def reading(tower: Subnetwork, *positional: Any, **keywords: Any) -> Any:
            inputs[tower.path] = tree_flatten((positional, keywords))[0]
            if all(each.path in inputs for each in towers):
                raise _InputsRead
            # This tower is not asked for: what is read may not depend on it, see
            # _refuse_dependent().
            zeros = [torch.zeros(rows, *shape, device=device) for shape in tower.shapes]
            return tree_unflatten(zeros, tower.outputs)  # type: ignore[arg-type]

        with self._called_as(reading), contextlib.suppress(_InputsRead):
            self.function(*batch)
        return inputs

    def with_outputs(
        self, leaves: Sequence[Any], spec: TreeSpec, outputs: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        """Returns the loss and aux of some rows, from finished outputs of the towers.

        Args:
            leaves: leaves of a batch of these rows.
            spec: structure of the batch.
            outputs: leaves of the outputs of all towers for these rows.

        Raises:
            CannotAdopt: the user's code calls a tower otherwise than on the example.
        """
        finished = self._by_tower(outputs)
        calls = dict.fromkeys(finished, 0)

        def returning(tower: Subnetwork, *positional: Any, **keywords: Any) -> Any:
            calls[tower.path] += 1
            arguments = tree_flatten((positional, keywords))[0]
            for argument, expected in zip(arguments, tower.arguments, strict=False):
                if (
                    isinstance(expected, _Leaf)
                    and argument is not leaves[expected.index]
                ):
                    raise CannotAdopt(
                        f"{user_line()}: tower '{tower.path}' reads another tensor than on the example, where "
                        f"it was leaf {expected.index} of the batch"
                    )
            return tree_unflatten(finished[tower.path], tower.outputs)  # type: ignore[arg-type]

        with self._called_as(returning):
            result = self(*tree_unflatten(leaves, spec))
        # One that is not called, or twice, would get wrong gradients without a word.
        for path, count in calls.items():
            if count != 1:
                raise CannotAdopt(
                    f"tower '{path}' was called {count} times, and once on the example"
                )
        return result

    def standing_in(self, outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Makes each tower return finished outputs, by functions that stay the same.

        Args:
            outputs: leaves of the outputs of all towers.
        """
        # In place, because the functions hold this dict, and Dynamo would trace others
        # anew.
        self._finished.update(self._by_tower(outputs))
        for tower in self._towers:
            self._stand_ins.setdefault(tower.module, self._stand_in(tower))
        return standing(self._stand_ins)

    def _by_tower(self, outputs: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Returns the leaves of each tower's output, of those of all towers, by its path."""
        leaves = iter(outputs)
        return {
            tower.path: list(itertools.islice(leaves, len(tower.shapes)))
            for tower in self._towers
        }

    def _stand_in(self, tower: Subnetwork) -> _Forward:
        finished = self._finished
        path = tower.path
        spec = tower.outputs

        def forward(*positional: Any, **keywords: Any) -> Any:
            return tree_unflatten(finished[path], spec)  # type: ignore[arg-type]

        return forward

    @torch.no_grad()
    def refuse_sums(
        self,
        leaves: Sequence[Any],
        spec: TreeSpec,
        outputs: Sequence[Tensor],
        rows: int,
    ) -> None:
        """Refuses a loss that is not the mean over rows, by losses of two pieces of rows and of both together.

        Raises:
            CannotAdopt: the loss of both is not the mean of the pieces' losses, weighed by their rows.
        """
        generator = torch.Generator().manual_seed(0)
        # Of different sizes, so that a mean of both losses without weights is seen too.
        splits = [(torch.arange(rows // 3), torch.arange(rows // 3, rows))]
        for _ in range(8):  # of few rows each, in which weights that differ by row show
            four = torch.randperm(rows, generator=generator)[:4]
            splits.append((four[:2], four[2:]))

        def loss_of(index: Tensor) -> float:
            index = index.to(outputs[0].device)
            rows_of_batch = [
                leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            loss, _ = self.with_outputs(
                rows_of_batch, spec, [output[index] for output in outputs]
            )
            return float(loss)

        for first, second in splits:
            both = loss_of(torch.cat([first, second]))
            first_loss = loss_of(first)
            second_loss = loss_of(second)
            mean = (first_loss * len(first) + second_loss * len(second)) / (
                len(first) + len(second)
            )
            allowed = 1e-5 * max(abs(both), abs(first_loss), abs(second_loss)) + 1e-7
            if abs(both - mean) > allowed:
                many = f"{len(first)} and {len(second)} rows"
                if abs(both - first_loss - second_loss) <= allowed:
                    raise CannotAdopt(
                        f"the loss is a sum over rows: of {many} it is {first_loss:.6g} and {second_loss:.6g}, of both "
                        f"together {both:.6g}, must be their mean: divide it by the rows (reduction='mean')"
                    )
                raise CannotAdopt(
                    f"the loss is not a mean over rows: {many} give {first_loss:.6g} and {second_loss:.6g}, "
                    f"both together {both:.6g}, must be {mean:.6g}; one that compares or weights rows needs "
                    "all on one rank"
                )


def _reads_computed(tower: Subnetwork) -> CannotAdopt:
    return CannotAdopt(
        f"{tower.lines[0]}: tower '{tower.path}' reads what forward computes with parameters, "
        "another tower or at random: move that into the tower, or name the module around both"
    )


def _refuse_calls(tower: Subnetwork) -> None:
    if not tower.lines:
        raise CannotAdopt(
            f"tower '{tower.path}' is not called by the loss function: towers are modules that forward calls as a "
            f"whole, as self.{tower.path}(x)"
        )
    if len(tower.lines) > 1:
        raise CannotAdopt(
            f"tower '{tower.path}' is called {len(tower.lines)} times ({', '.join(tower.lines)}): call it once with "
            "all rows, or leave it out of towers="
        )


def _refuse_outputs(tower: Subnetwork, leaves: Sequence[Any], rows: int) -> None:
    for leaf in leaves or [None]:
        if (
            not isinstance(leaf, Tensor)
            or not leaf.is_floating_point()
            or leaf.dim() == 0
            or len(leaf) != rows
        ):
            what = (
                f"{tuple(leaf.shape)} {leaf.dtype}"
                if isinstance(leaf, Tensor)
                else f"a {type(leaf).__name__}"
            )
            raise CannotAdopt(
                f"{tower.lines[0]}: tower '{tower.path}' returns {what}, must be a float tensor ({rows}, ...) with a "
                "row for each row of the batch, or a tuple or dict of them"
            )


@contextlib.contextmanager
def nothing_moves(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Puts back the model's buffers, gradients and modes and the random generators after the block.

    StateCopy would also copy the weights. A tower's tables may be large, and nothing in the block changes them.
    """
    # Optimizers may move parameters of other modules too. A parameter is hashed by its
    # identity.
    parameters = {*model.parameters(), *optimized_parameters(optimizers)}
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    put_back_generators = copy_global_generators()
    try:
        yield
    finally:
        put_back_generators()
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
