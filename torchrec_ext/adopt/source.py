"""AdoptedSource: a user's model, loss and batches as what a captured step is made of.

looked_up_tables(): the tables of a model: weights that nn.Embedding and nn.EmbeddingBag objects alone hold.

GivenBatch, DrawnBatch: a batch that the user's loop made, and one that is made of :class:`Rows` inside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import (
    SCALARS,
    ForwardObserver,
    PythonState,
    loss_and_output,
    module_line,
    user_line,
)
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows import Rows
from torchrec_ext.train.step.captured import Reader, StepInputs, StepSource, depends_on_values
from torchrec_ext.train.step.lowering import CannotCaptureError
from torchrec_ext.train.step.memory import StepMemory

Loss = Callable[..., Any]
Table = nn.Embedding | nn.EmbeddingBag


def looked_up_tables(model: nn.Module) -> dict[str, list[Table]]:
    """Returns the weights that nn.Embedding and nn.EmbeddingBag objects alone hold, by name, with these objects."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), []).append(module)
    return {
        name: holders[id(parameter)]  # type: ignore[misc]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and all(_is_table(module) for module in holders[id(parameter)])
    }


def _is_table(module: nn.Module) -> bool:
    return type(module) in (nn.Embedding, nn.EmbeddingBag) and "forward" not in vars(module)


@contextmanager
def _forwards(
    tables: Mapping[str, Sequence[Table]], make: Callable[[str, Table], Callable[..., Tensor]]
) -> Iterator[None]:
    """Has table objects call other functions in place of forward, and restores them."""
    modules = [(name, module) for name, of_one in tables.items() for module in of_one]
    try:
        for name, module in modules:
            vars(module)["forward"] = make(name, module)
        yield
    finally:
        for _, module in modules:
            vars(module).pop("forward", None)


def watched_look_ups(tables: Mapping[str, Sequence[Table]], observer: ForwardObserver) -> AbstractContextManager[None]:
    """Has table objects tell the observer when they read."""

    def make(name: str, module: Table) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            observer.inside = True
            try:
                return type(module).forward(module, *args, **kwargs)  # type: ignore[arg-type]
            finally:
                observer.inside = False

        return forward

    return _forwards(tables, make)


def unusable(output: Any, inputs: Sequence[Tensor]) -> Iterator[str]:
    """Yields what of a batch, and of an output beside the loss, a captured step cannot give."""
    if any(tensor.requires_grad for tensor in inputs):
        yield "a tensor of the batch requires a gradient, which a captured step does not give; detach it"
    for leaf in pytree.tree_leaves(output):
        if leaf is not None and not isinstance(leaf, Tensor):
            yield (
                f"the loss function returns a {type(leaf).__name__} beside the loss, which a captured step would not "
                "compute again; return tensors, in tuples, lists and dicts"
            )


def random_state(device: torch.device) -> Tensor:
    """Returns the state of torch's random numbers on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets what :func:`random_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class ForwardWatch(AbstractContextManager[None]):
    """Surrounds the forward of one eager step, or each of its pieces, and notes what has no captured form.

    Args:
        model: the user's model, without gradients.
        loss: the user's function from a batch to the loss.
        args: the batch.

    Attributes:
        tables: tables that are looked up.
        state: Python values that the forward can read.
        observer: what the forward's torch calls show.
        problems: what stands in the way of a captured step, in words.
        random: whether the forward draws random numbers.
    """

    def __init__(self, model: nn.Module, loss: Loss, args: Any) -> None:
        parameters = dict(model.named_parameters())
        inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self.tables, self.state = looked_up_tables(model), PythonState(model, loss)
        self.observer = ForwardObserver(model, inputs, {id(parameters[name]): name for name in self.tables})
        self.problems: list[str] = []
        self.random = False
        self._parameters, self._written = list(parameters.values()), [*parameters.values(), *inputs]
        self._device = self._written[0].device
        self._inside = ExitStack()

    def __enter__(self) -> None:
        self._python, self._drawn = self.state.snapshot(), random_state(self._device)
        self._versions = [tensor._version for tensor in self._written]
        self._inside.enter_context(self.observer)
        self._inside.enter_context(watched_look_ups(self.tables, self.observer))

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._inside.close()
        if kind is None:
            self.problems += self._seen()

    def _seen(self) -> Iterator[str]:
        self.random = self.random or not torch.equal(self._drawn, random_state(self._device))
        if self.observer.problem:
            yield self.observer.problem
        if self.state.scaler:
            yield (
                f"the loss is scaled by a GradScaler ({self.state.scaler}); return the loss itself, and compute in 16 "
                "bits by autocast=lambda: torch.autocast('cpu', torch.bfloat16)"
            )
        if changed := self.state.difference(self._python):
            yield (
                f"forward changes {changed}, which a captured step would do once; make it a buffer that is written in "
                "place, or change it outside of the step"
            )
        if any(parameter.grad is not None for parameter in self._parameters):
            yield "the loss function calls backward(); return the loss, and leave it to the step"
        if [tensor._version for tensor in self._written] != self._versions:
            yield (
                "the loss function writes into a weight or into the batch; leave steps to the optimizer, and write "
                "into a copy"
            )


class GroupSettings(Mapping[str, Any]):
    """A group of an optimizer's settings by its index: load_state_dict puts other dicts in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self._optimizer, self._index = optimizer, index

    def __getitem__(self, name: str) -> Any:
        return self._optimizer.param_groups[self._index][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.param_groups[self._index])

    def __len__(self) -> int:
        return len(self._optimizer.param_groups[self._index])


class _Key(NamedTuple):
    """What a captured step is made for."""

    python: int
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    constants: tuple[Any, ...]
    tree: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{tuple(shape)} {str(kind).removeprefix('torch.')}" for shape, kind in self.shapes)
        return f"{shapes}; state {self.python} of the model's Python values"


class GivenBatch(NamedTuple):
    """A batch that the user's loop made."""

    values: tuple[Any, ...]

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values


class RowsOnDevice:
    """The tensors of :class:`Rows` on a device."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self.names = list(rows.tensors)
        self.tensors = [tensor.to(device) for tensor in rows.tensors.values()]

    def assemble(self, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Any, ...]:
        """Makes a batch of the tensors, and of the indices and draws of a step."""
        draws = parts[1] if len(parts) > 1 else None
        return self.rows.assemble(parts[0], draws, dict(zip(self.names, tensors, strict=True)))


class DrawnBatch(NamedTuple):
    """A batch that is not made yet: indices (B,) of its rows, and what was drawn for them, (B, n) or None."""

    resident: RowsOnDevice
    indices: Tensor
    draws: Tensor | None

    def parts(self) -> list[Tensor]:
        """Returns the tensors of which the batch is made."""
        return [tensor for tensor in (self.indices, self.draws) if tensor is not None]

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        device = self.resident.tensors[0].device
        made = self.resident.assemble(self.resident.tensors, [tensor.to(device) for tensor in self.parts()])
        return pytree.tree_map_only(Tensor, Tensor.contiguous, made)  # type: ignore[no-any-return]


AnyBatch = GivenBatch | DrawnBatch


class _Batch(NamedTuple):
    """A batch for the user's function.

    Args:
        args: its arguments.
        stand_ins: what stands for tensors from outside, by their ids.
        repeats: how often ids repeat each value along their first dimension, by their ids.
    """

    args: tuple[Any, ...]
    stand_ins: dict[int, Tensor]
    repeats: dict[int, int]


class AdoptedSource(StepSource):
    """A user's model as the :class:`StepSource` of a captured step.

    Args:
        model: the user's model.
        loss: the user's function from a batch to the loss.
        memory: parameters that are moved.
        tables: objects that look up in tables, by the name of the table.
        not_tables: why a table is moved as a dense layer, by its name.
        outside: tensors that the forward reads and that are neither the model's nor the batch's.
        clip_norm: limit of the gradients' norm; 0 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        memory: StepMemory,
        tables: Mapping[str, Sequence[Table]],
        not_tables: Mapping[str, str],
        outside: Sequence[Tensor],
        clip_norm: float,
    ) -> None:
        self.reading: Mapping[str, Reader] = {}
        self.memory, self.clip_norm, self.not_tables = memory, clip_norm, not_tables
        self.parameters = dict(model.named_parameters())
        self._model, self._tables, self._outside = model, tables, list(outside)
        self._resident, self._repeats = [tensor.detach() for tensor in outside], dict[int, int]()
        self._repeated = _RepeatedRows((), {})
        self._called = _Called(model, loss)
        self._tensors = {**self.parameters, **dict(model.named_buffers())}
        self._held = [
            (vars(module)[kind], name, tensor)
            for module in model.modules()
            for kind in ("_parameters", "_buffers")
            for name, tensor in vars(module)[kind].items()
        ]
        self._addresses = [(name, p, p.requires_grad, p.data_ptr()) for name, p in self.parameters.items()]

    def changed(self) -> str:
        """Names a parameter that is another, or elsewhere, than when the step was captured; empty where none is."""
        for holder, name, tensor in self._held:
            if holder.get(name) is not tensor:
                return f"'{name}'"
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, requires_grad, address in self._addresses:
                if parameter.requires_grad != requires_grad or parameter.data_ptr() != address:
                    return f"'{name}'"
        return ""

    def inputs(self, item: Any) -> StepInputs:
        """Returns the tensors of a batch; ``item`` is a tuple of it and of the number of the Python state.

        Raises:
            CannotCaptureError: the batch holds something else than tensors and numbers, or tensors elsewhere.
        """
        if isinstance(item, StepInputs):
            return item
        batch, python = item
        if isinstance(batch, DrawnBatch):
            return self._drawn(batch, python)
        plain = all(isinstance(value, Tensor) for value in batch.values)
        leaves, tree = pytree.tree_flatten(batch.values)
        given = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        for leaf in constants:
            if not isinstance(leaf, SCALARS):
                raise CannotCaptureError(f"a batch holds a {type(leaf).__name__}; give tensors, in tuples or dicts")
        for tensor in given:
            if tensor.requires_grad or tensor.device != self.memory.device or tensor.is_sparse:
                raise CannotCaptureError(
                    f"a batch holds a tensor on {tensor.device} with requires_grad={tensor.requires_grad}; give dense "
                    f"ones on {self.memory.device} without a gradient"
                )
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in given)
        key = _Key(python, shapes, tuple((type(leaf), leaf) for leaf in constants), "" if plain else str(tree))
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

        def make(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> _Batch:
            left, others = iter(tensors), iter(constants)
            args = pytree.tree_unflatten([next(left) if tensor else next(others) for tensor in is_tensor], tree)
            return _Batch(tuple(args), self._stand_ins(resident), {})

        rows = len(given[0]) if given and given[0].dim() else 0
        return StepInputs(key, key, rows, given, make, self._resident)

    def _stand_ins(self, resident: Sequence[Tensor]) -> dict[int, Tensor]:
        return {id(real): tensor for real, tensor in zip(self._outside, resident, strict=True)}

    def _drawn(self, batch: DrawnBatch, python: int) -> StepInputs:
        """Returns the inputs of a step that makes its batch inside, where ids that repeat are looked up once."""
        rows, count, parts = batch.resident.rows, len(self._outside), batch.parts()
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in parts)
        key = _Key(python, shapes, (id(rows),), "rows")

        def make(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> _Batch:
            args = batch.resident.assemble(resident[count:], tensors)
            pairs = zip(rows.names, pytree.tree_leaves(args), strict=False)
            repeats = {
                id(leaf): rows.repeats[name]
                for name, leaf in pairs
                if name in rows.repeats and leaf.dim() and len(leaf) == len(tensors[0]) * rows.repeats[name]
            }
            return _Batch(args, self._stand_ins(resident[:count]), repeats)

        return StepInputs(key, key, len(batch.indices), parts, make, [*self._resident, *batch.resident.tensors])

    def forward(self, tensors: dict[str, Tensor], batch: _Batch) -> tuple[Tensor, Any]:
        """Returns the loss, (), and the output, with ``tensors`` in place of the model's."""
        held = {id(self._tensors[name]): tensor for name, tensor in tensors.items()}
        self._repeats = batch.repeats
        with (
            _StandIns({**held, **batch.stand_ins}),
            _RepeatedRows(batch.args, batch.repeats) as self._repeated,
            _forwards(self._tables, self._reader),
        ):
            result = functional_call(
                self._called, {f"model.{name}": tensor for name, tensor in tensors.items()}, batch.args
            )
        loss, output = loss_and_output(result)
        return loss, pytree.tree_map_only(Tensor, Tensor.detach, output)

    def no_gradient(self, names: Sequence[str]) -> None:
        """Refuses a step that would leave alone what eager steps have moved.

        Raises:
            CannotAdopt: there is such a parameter.
        """
        if names:
            raise CannotAdopt(
                f"{module_line(self._model, names[0])} had a gradient in an eager step and has none in the captured "
                "one; let the same parameters take part in every step"
            )

    def _reader(self, name: str, module: Table) -> Callable[..., Tensor]:
        def forward(
            input: Tensor,  # noqa: A002
            offsets: Tensor | None = None,
            per_sample_weights: Tensor | None = None,
        ) -> Tensor:
            alone = per_sample_weights is None and offsets is None
            repeats = self._repeats.get(id(input), 1) if alone else 1
            given = input if repeats == 1 else input.view(-1, repeats, *input.shape[1:])[:, 0]
            # A negative id would be read from the end; this one is out of range.
            ids = torch.where(given < 0, module.num_embeddings, given).reshape(-1).long()
            vectors = self.reading[name].read(ids)
            if module.padding_idx is not None:
                vectors = torch.where((ids == module.padding_idx)[:, None], vectors.detach(), vectors)
            vectors = vectors.reshape([*given.shape, module.embedding_dim])
            if isinstance(module, nn.EmbeddingBag):
                if offsets is None:
                    vectors = _pooled(module, vectors, given, per_sample_weights)
                else:
                    vectors = _pooled_lists(module, vectors, given, offsets, per_sample_weights)
            return vectors if repeats == 1 else self._repeated.repeat(vectors, repeats)

        return forward


class _Columns(NamedTuple):
    """Columns of a matrix (B, n) in which every row of ``rows`` stands ``repeats`` times, one after the other."""

    rows: Tensor
    repeats: int
    version: int  # of ``rows``: whoever writes there in place ends it

    @property
    def saved(self) -> float:
        """Columns for which a layer need not multiply every row."""
        return self.rows.shape[1] * (1 - 1 / self.repeats)


_SAVED = 8.0  # columns: below it a second product costs more than it saves


class _RepeatedRows(TorchFunctionMode):
    """Multiplies rows that stand several times in a batch by a layer's weights once, and repeats the products.

    A matrix of such rows, be it a column of the batch, what is looked up by one, or a concatenation with others, is
    followed as far as the layer that reads it.

    Args:
        batch: arguments of the user's function.
        repeats: how often tensors of the batch repeat each value along their first dimension, by their ids.
    """

    def __init__(self, batch: Any, repeats: Mapping[int, int]) -> None:
        super().__init__()
        # The matrix itself is kept, so that no later tensor gets its id.
        self._known: dict[int, tuple[Tensor, int, list[_Columns]]] = {}
        for leaf in pytree.tree_leaves(batch):
            if id(leaf) in repeats and leaf.dim() == 2 and leaf.is_floating_point():
                count = repeats[id(leaf)]
                self._note(leaf, [self._made_of(leaf.view(-1, count, leaf.shape[1])[:, 0], count)])

    def repeat(self, rows: Tensor, count: int) -> Tensor:
        """Returns a tensor in which every row stands ``count`` times."""
        result = rows.repeat_interleave(count, 0)
        if rows.dim() == 2:
            self._note(result, [self._made_of(rows, count)])
        return result

    @staticmethod
    def _made_of(rows: Tensor, repeats: int = 1) -> _Columns:
        return _Columns(rows, repeats, rows._version)

    def _note(self, matrix: Tensor, columns: list[_Columns]) -> None:
        self._known[id(matrix)] = matrix, matrix._version, columns

    def _columns(self, matrix: Any) -> list[_Columns]:
        """Returns what a matrix consists of; nothing where no row is known to repeat, or somebody has written."""
        known, version, columns = self._known.get(id(matrix), (matrix, 0, []))
        written = columns and (known._version != version or any(c.rows._version != c.version for c in columns))
        return [] if written else columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``, but for a layer on repeated rows."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) > 1 and args[1].dim() == 2:
            columns = self._columns(args[0])
            plain = not torch.is_autocast_enabled(args[0].device.type)  # which rounds each product
            if plain and sum(column.saved for column in columns) >= _SAVED:
                return self._linear(columns, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is torch.cat and args and all(isinstance(each, Tensor) and each.dim() == 2 for each in args[0]):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            pieces = [self._columns(each) for each in args[0]]
            if dim in (1, -1) and any(pieces):
                pairs = zip(args[0], pieces, strict=True)
                self._note(result, [c for each, of_one in pairs for c in of_one or [self._made_of(each)]])
        return result

    def _linear(self, columns: list[_Columns], weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the layer's output (B, m), each repeated row multiplied once; the bias is added once."""
        blocks = torch.split(weight, [column.rows.shape[1] for column in columns], 1)
        total = bias
        for repeats in sorted({column.repeats for column in columns}, reverse=True):
            pairs = [pair for pair in zip(columns, blocks, strict=True) if pair[0].repeats == repeats]
            rows, block = (torch.cat(each, 1) for each in ([c.rows for c, _ in pairs], [b for _, b in pairs]))
            product = torch.nn.functional.linear(rows, block)
            product = product if repeats == 1 else product.repeat_interleave(repeats, 0)
            total = product if total is None else product + total
        assert total is not None
        return total


def _pooled(module: nn.EmbeddingBag, vectors: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the bags (B, D) of the vectors (B, L, D) of the ids (B, L)."""
    if weights is not None:
        vectors = vectors * weights[..., None]
    if module.padding_idx is None:
        return vectors.mean(1) if module.mode == "mean" else vectors.sum(1)
    counts = ids != module.padding_idx
    pooled = (vectors * counts[..., None]).sum(1)
    return pooled / counts.sum(1).clamp(min=1)[:, None] if module.mode == "mean" else pooled


def _pooled_lists(
    module: nn.EmbeddingBag, vectors: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Returns the bags (B, D) of the vectors (N, D) of the ids (N,), where each bag begins at one of the offsets."""

    def bags(rows: Tensor, mode: str, of_each: Tensor | None = None) -> Tensor:
        places = torch.arange(len(rows), device=rows.device)
        starts, last = offsets.long(), module.include_last_offset
        return nn.functional.embedding_bag(
            places, rows, starts, mode=mode, per_sample_weights=of_each, include_last_offset=last
        )

    if module.padding_idx is None:
        return bags(vectors, module.mode, weights)
    counts = (ids != module.padding_idx).to(vectors.dtype)[:, None]
    pooled = bags(vectors * counts, "sum", weights)
    return pooled / bags(counts, "sum").clamp(min=1) if module.mode == "mean" else pooled


class _Called(nn.Module):
    """A module around the user's, so that its parameters are replaced while the user's function runs."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *batch: Any) -> Any:
        """Calls the user's function."""
        return self._loss(*batch)


def _depends_on_values() -> CannotAdopt:
    line = user_line()
    remedy = "in place of .item(), if and boolean masks take torch.where, or a sum with weights of 0 and 1"
    if "torchrec/sparse/jagged_tensor.py" in line:  # which reads how many ids each feature has
        remedy = "make the KeyedJaggedTensor with length_per_key=[...], the numbers of ids of its features"
    return CannotAdopt(f"{line} depends on values that a step computes; {remedy}")


class _StandIns(TorchFunctionMode):
    """Has torch calls take other tensors in place of some, whoever holds them: closures, lists, an RNN's weights."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._traces = any(_is_fake(tensor) for tensor in tensors.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func`` with the other tensors."""
        args, kwargs = pytree.tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
        if not self._traces:
            return func(*args, **kwargs)
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
            raise _depends_on_values() from None
        if depends_on_values(result):
            raise _depends_on_values()
        return result

    def _stand_in(self, tensor: Tensor) -> Tensor:
        other = self._tensors.get(id(tensor))
        if other is None and self._traces and not _is_fake(tensor):
            raise CannotAdopt(
                f"{user_line()} reads a tensor of shape {tuple(tensor.shape)} that it did not read before; give it to "
                "the step, or make it a buffer of the model"
            )
        return tensor if other is None else other


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
