"""Programs: a user's module as a list of torch's operators, in a form for bundles.

A program contains only operators of :data:`~torchrec_ext.retrieval.bundle.operators.OPERATORS`. None of them reads a
file, runs code or writes in place. Before a program runs on a new number of rows, it runs on the meta device, without
memory. That run yields every shape, and refuses a program that does not fit its weights or would take too much.
``retrieval/bundle/traced.py`` writes programs.

A node is ``[operator, arguments, keyword arguments]``. Its text arguments are references: ``#3`` the result of node 3,
``@user`` an input, ``$top/0/weight`` a weight, ``&items/weight`` a table, ``rows`` B, the number of rows. Or they are
values without a JSON form: ``=mean`` a text, ``dtype.float32``, ``inf``, ``-inf`` and ``nan``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.tower import check_tables
from torchrec_ext.retrieval.bundle.operators import OPERATORS, PLACES, run_operator
from torchrec_ext.schema.validation import listed

_DTYPES = {
    f"dtype.{name}": getattr(torch, name)
    for name in ("float32", "float64", "int64", "int32", "bool")
}
_NUMBERS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
# limit of the numbers of all columns, because each has a name in the schema
_WIDEST_ROW = 2**18
# a batch carries columns without a table as float32, exact for whole numbers below this
EXACT_IDS = 2**24

Node = Sequence[Any]
Shape = tuple[torch.dtype, tuple[int, ...]]

MOST_BYTES = 2**31  # limit for the values of all nodes; more rows run in several blocks
# Cost in operations: 1 per flop, 32 per element read or written, 2^17 per call. A core
# does about 2^34 per second.
_OPERATIONS = 2**34
_OPERATIONS_OF_A_ROW = 2**31
_OF_AN_ELEMENT, _OF_A_CALL = 2**5, 2**17
_TRIAL_ROWS = (1, 3, 64)  # numbers of rows for the dry runs in the constructor


class _Cost(NamedTuple):
    bytes: int
    operations: int


class Program:
    """Runs nodes one after the other.

    Args:
        nodes: nodes in their order.
        inputs: dtype and shape of a row of each input, by reference.
        constants: dtype and shape of each weight and table, by reference.
        results: references of the results, each with B rows.

    Raises:
        ValueError: a forbidden operator, a dangling reference, mismatched shapes, or too much memory or time.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Mapping[str, Shape],
        constants: Mapping[str, Shape],
        results: Sequence[str],
    ) -> None:
        self._inputs = dict(inputs)
        self._constants = _on_meta(constants)
        self._results = list(results)
        self._steps: list[tuple[str, str, list[Any], dict[str, Any]]] = []
        self._blocks: dict[int, list[int]] = {}
        existing = {"rows", *inputs, *constants, *_DTYPES, *_NUMBERS}
        for number, (name, arguments, options) in enumerate(nodes):
            if name not in OPERATORS:
                raise ValueError(f"operator {name!r} is not one that a bundle may name")
            if not options.keys().isdisjoint(PLACES):
                raise ValueError(
                    f"operator {name!r}: no program says where its values are; leave out {PLACES}"
                )
            texts = list(_texts([*arguments, *options.values()]))
            tables = [text for text in texts if text[:1] == "&"]
            # At run time a table is a module, not a tensor, so only a look-up can read
            # it.
            if tables and (
                name != "embedding.default" or tables != list(arguments)[:1]
            ):
                raise ValueError(
                    f"operator {name!r} reads a whole table; only embedding.default reads tables"
                )
            _check_references(texts, existing)
            self._steps.append((f"#{number}", name, list(arguments), dict(options)))
            existing.add(f"#{number}")
        _check_references(self._results, existing)
        # Other sizes than 1 too: a program may fit one row, and no others.
        for rows in _TRIAL_ROWS:
            self.blocks(rows)

    @property
    def result_width(self) -> int:
        """Number of values in one row of all results."""
        _, results = self._dry_run(1)
        return _count(results)

    def __call__(self, values: Mapping[str, Any]) -> list[Any]:
        """Computes the results from inputs, weights, tables and ``rows``, given by reference.

        Raises:
            ValueError: an operator failed; the message names it and its reason, the cause is its own error.
        """
        blocks = self.blocks(values["rows"])
        if len(blocks) == 1:
            return self._run(values)
        parts = []
        start = 0
        for rows in blocks:
            inputs = {name: values[name][start : start + rows] for name in self._inputs}
            parts.append(self._run({**values, **inputs, "rows": rows}))
            start += rows
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def blocks(self, rows: int) -> list[int]:
        """Splits a number of rows into blocks of at most :data:`MOST_BYTES` each; returns their sizes.

        Raises:
            ValueError: the program does not fit its weights, or takes too much memory or time.
        """
        # Requests repeat the same numbers of rows, so each number gets only one dry
        # run.
        if rows not in self._blocks:
            blocks, operations = self._split(rows)
            if operations > _OPERATIONS + rows * _OPERATIONS_OF_A_ROW:
                raise ValueError(
                    f"the program takes {operations:.2g} operations for {rows} rows; make it smaller"
                )
            self._blocks[rows] = blocks
        return self._blocks[rows]

    def _split(self, rows: int) -> tuple[list[int], int]:
        cost, _ = self._dry_run(rows)
        if cost.bytes <= MOST_BYTES:
            return [rows], cost.operations
        if rows <= 1:
            raise ValueError(
                f"the program takes more than {MOST_BYTES:,} bytes or {_OPERATIONS:,} operations for one row; "
                "make it smaller"
            )
        # Memory need not grow in proportion to the rows, so each half is measured
        # again.
        first, first_operations = self._split(rows // 2)
        second, second_operations = self._split(rows - rows // 2)
        return first + second, first_operations + second_operations

    def _dry_run(self, rows: int) -> tuple[_Cost, list[Tensor]]:
        """Runs on the meta device; returns the cost (more than the limits if the count stopped early) and results."""
        limit = _OPERATIONS + rows * _OPERATIONS_OF_A_ROW
        counter = _Counter(limit)
        # Inference mode would hide an operator's parts from the counter.
        with torch.inference_mode(False), torch.no_grad():
            inputs = _on_meta(self._inputs, rows)
            try:
                with counter:
                    results = self._run(
                        {**inputs, **self._constants, "rows": rows}, meta=True
                    )
            except _TooMuchError:
                return _Cost(2 * MOST_BYTES, limit), []
        for reference, result in zip(self._results, results, strict=True):
            shape: Any = type(result).__name__
            if isinstance(result, Tensor):
                shape = tuple(result.shape)
            if isinstance(shape, str) or shape[:1] != (rows,):
                raise ValueError(
                    f"result {reference} of {rows} rows is {shape}, must have as many rows"
                )
        return _Cost(counter.bytes, counter.operations), results

    def _run(self, values: Mapping[str, Any], *, meta: bool = False) -> list[Any]:
        values = dict(values)
        for reference, name, arguments, options in self._steps:
            positional = [_value(argument, values) for argument in arguments]
            keyword = {key: _value(option, values) for key, option in options.items()}
            # Otherwise it would be made on the CPU, in memory.
            if meta and _takes_device(name):
                keyword["device"] = "meta"
            try:
                if positional and isinstance(positional[0], nn.Module):
                    values[reference] = _look_up(positional[0], positional[1])
                else:
                    values[reference] = run_operator(name, positional, keyword)
            # It ends a dry run, and is no error of the node.
            except _TooMuchError:
                raise
            except Exception as error:
                # an untrusted program can make torch raise anything
                reason = next(
                    iter(str(error).strip().splitlines()), type(error).__name__
                )
                raise ValueError(
                    f"node {reference} ({name}): {reason[:120]}"
                ) from error
        return [values[result] for result in self._results]


def _on_meta(shapes: Mapping[str, Shape], *rows: int) -> dict[str, Tensor]:
    """Returns tensors without memory, with a leading dimension of ``rows`` if given."""
    return {
        name: torch.empty((*rows, *size), dtype=dtype, device="meta")
        for name, (dtype, size) in shapes.items()
    }


class _TooMuchError(Exception):
    """A program is beyond a limit; stops the count."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes and operations inside its context; raises beyond the limits."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit
        self.bytes = self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        self.operations += _OF_A_CALL
        # A view has no memory of its own, and reads nothing.
        if not function.is_view:
            packet = function.overloadpacket
            outputs = _tensors(result)
            elements = _count(outputs)
            # A pooling operator reads its whole window for each element of the result.
            if packet in _POOLS:
                elements *= torch.Size(args[1]).numel()
            # A look-up reads only the rows it returns, not the whole table.
            if packet not in _LOOK_UPS:
                elements = max(elements, _count(_tensors((args, options))))
            self.bytes += sum(each.nbytes for each in outputs)
            self.operations += elements * _OF_AN_ELEMENT
            if packet in flop_registry:
                self.operations += int(
                    flop_registry[packet](*args, **options, out_val=result)
                )
        if self.bytes > MOST_BYTES or self.operations > self._limit:
            raise _TooMuchError
        return result


_LOOK_UPS = (
    torch.ops.aten.embedding,
    torch.ops.aten._embedding_bag,
    torch.ops.aten.index_select,
    torch.ops.aten.index,
)
_POOLS = (
    torch.ops.aten.max_pool1d_with_indices,
    torch.ops.aten.max_pool2d_with_indices,
)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _takes_device(name: str) -> bool:
    schema = getattr(OPERATORS[name], "_schema", None)
    return schema is not None and any(
        argument.name == "device" for argument in schema.arguments
    )


def _texts(argument: Any) -> Iterator[str]:
    """Yields every text in nested lists."""
    if isinstance(argument, str):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _texts(each)


def _look_up(table: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(table, "rows"):  # an Int8Table
        return table.rows(ids.flatten()).view(*ids.shape, -1)  # type: ignore[no-any-return, operator]
    return embedding(ids, table.weight)  # type: ignore[arg-type]


def _check_references(texts: Sequence[str], existing: Collection[str]) -> None:
    for text in texts:
        if text[:1] != "=" and text not in existing:
            raise ValueError(f"{text!r} refers to nothing that was computed before")


def _value(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, list | tuple):
        return [_value(each, values) for each in argument]
    if not isinstance(argument, str):
        return argument
    if argument in values:
        return values[argument]
    if argument[:1] == "=":
        return argument[1:]
    return _DTYPES.get(argument, _NUMBERS.get(argument))


class _Weights(nn.Module):
    """Holds weights as buffers, because their names are invalid for parameters; they are never trained again."""

    def __init__(self, weights: Mapping[str, Sequence[Any]]) -> None:
        super().__init__()
        for name, (dtype, *size) in weights.items():
            self.register_buffer(
                name, torch.empty(size, dtype=_DTYPES[f"dtype.{dtype}"])
            )

    def by_reference(self) -> dict[str, Tensor]:
        return {
            f"${name}": value
            for name, value in self._buffers.items()
            if value is not None
        }


class ProgramTower(Recorded, nn.Module):
    """Runs the program of a user's query tower or candidate tower.

    Args:
        tables: tables for columns of ids; the columns are their features.
        columns: dtype (``int64`` or ``float32``) and shape of a row of each column, such as ``["float32", 60]``.
        weights: dtype and shape of each weight outside of tables.
        nodes: nodes of the program.
        outputs: references of the values, (B, ...) each, to concatenate as the output.
        out_features: D.

    Attributes:
        computed_ids: columns of whole numbers that no table reads unchanged.
        list_widths: lengths of the lists in list columns, by name.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        columns: Mapping[str, Sequence[Any]],
        weights: Mapping[str, Sequence[Any]],
        nodes: Sequence[Node],
        outputs: Sequence[str],
        out_features: int,
    ) -> None:
        super().__init__()
        check_tables(tables)
        _check_columns(columns)
        self.tables = list(tables)
        self.out_features = out_features
        self._columns = {
            name: (dtype, tuple(size)) for name, (dtype, *size) in columns.items()
        }
        self._ids: set[str] = set()
        self.kept = _Weights(weights)
        constants = _shapes("$", weights)
        for table in tables:
            self._ids |= set(table.feature_names)
            shape = (table.num_embeddings, table.embedding_dim)
            constants[f"&{table.name}"] = (data_type_to_dtype(table.data_type), shape)
        self.list_widths: dict[str, int] = {}
        self.computed_ids: list[str] = []
        dense: list[str] = []
        for name, (dtype, size) in self._columns.items():
            if size:
                self.list_widths[name] = size[0]
            if name in self._ids:
                continue
            if dtype == "int64":
                self.computed_ids.append(name)
            # A batch has a column for each number of a list.
            if size:
                dense += [f"{name}[{index}]" for index in range(size[0])]
            else:
                dense.append(name)
        self.dense = tuple(dense)
        self.embeddings = EmbeddingBagCollection(tables=self.tables) if tables else None
        self._program = Program(nodes, _shapes("@", columns), constants, outputs)
        if self._program.result_width != out_features:
            raise ValueError(
                f"out_features={out_features}: the outputs are {self._program.result_width} wide"
            )

    def columns_of(self, sparse: KeyedJaggedTensor, dense: Tensor) -> dict[str, Tensor]:
        """Returns each column, (B,) or (B, W), from a batch's ids and this tower's dense columns (B, Fd).

        Raises:
            ValueError: a list of another length than W, or a whole number beyond float32's exact range.
        """
        columns = {}
        start = 0
        for name, (dtype, size) in self._columns.items():
            if name in self._ids:
                columns[name] = _ids_of(
                    name, sparse[name].values(), sparse[name].lengths(), size
                )
                continue
            width = math.prod(size)
            block = dense[:, start : start + width].reshape(-1, *size)
            start += width
            if dtype == "int64":
                if block.numel() and float(block.abs().max()) >= EXACT_IDS:
                    raise ValueError(
                        f"column '{name}': whole numbers must be below {EXACT_IDS:,}; map them to fewer"
                    )
                block = block.long()
            columns[name] = block
        return columns

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Returns (B, D); see :meth:`columns_of` for arguments and errors."""
        columns = self.columns_of(sparse, dense)
        values: dict[str, Any] = {
            f"@{name}": column for name, column in columns.items()
        }
        values |= self.kept.by_reference()
        if self.embeddings is not None:
            values |= {
                f"&{name}": table
                for name, table in self.embeddings.embedding_bags.items()
            }
        try:
            results = self._program({**values, "rows": len(dense)})
        except ValueError as error:
            # Columns are checked before, so only an id that the program computes can be
            # beyond its table.
            if not isinstance(error.__cause__, IndexError):
                raise
            id_columns = listed(
                f"'{name}'"
                for name, (dtype, _) in self._columns.items()
                if dtype == "int64"
            )
            raise ValueError(
                f"columns {id_columns}: an id made of them is no row of its table ({error})"
            ) from None
        return torch.cat(
            [result.reshape(len(dense), -1).float() for result in results], dim=1
        )


def _shapes(mark: str, sizes: Mapping[str, Sequence[Any]]) -> dict[str, Shape]:
    """Returns dtype and shape of each weight or column by reference: ``mark`` and its name."""
    shapes: dict[str, Shape] = {}
    for name, (dtype, *size) in sizes.items():
        shapes[mark + name] = (_DTYPES[f"dtype.{dtype}"], tuple(size))
    return shapes


def _check_columns(columns: Mapping[str, Sequence[Any]]) -> None:
    total = 0
    for name, (dtype, *size) in columns.items():
        is_shape = len(size) <= 1 and all(type(width) is int for width in size)
        if dtype not in ("int64", "float32") or not is_shape:
            raise ValueError(
                f"column '{name}': {[dtype, *size]} is not int64 or float32, and a width or none"
            )
        width = math.prod(size)
        total += max(1, width)
        if width < 0 or total > _WIDEST_ROW:
            raise ValueError(
                f"column '{name}': width {width:,}; a row may have 0 to {_WIDEST_ROW:,} numbers in all"
            )


def _ids_of(name: str, ids: Tensor, lengths: Tensor, size: Sequence[int]) -> Tensor:
    width = math.prod(size)
    wrong = (lengths != width).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"column '{name}', row {row}: {int(lengths[row])} ids, must be {width}; send as many, padded as in training"
        )
    return ids.view(-1, *size)


class ProgramTop(InteractionLayer):
    """Runs the program of a user's interaction over the outputs of two towers.

    Args:
        widths: width of each tower's output.
        inputs: index of the tower and shape of a row of each input, in the order of the tower's columns.
        weights: dtype and shape of each weight.
        nodes: nodes of the program; its inputs are ``@0``, ``@1`` and so on.
        output: reference of the (B,) logits.
    """

    towers = 2

    def __init__(
        self,
        widths: Sequence[int],
        inputs: Sequence[Sequence[int]],
        weights: Mapping[str, Sequence[Any]],
        nodes: Sequence[Node],
        output: str,
    ) -> None:
        super().__init__()
        self.widths = list(widths)
        self._inputs = [(tower, tuple(size)) for tower, *size in inputs]
        self.kept = _Weights(weights)
        for tower, width in enumerate(self.widths):
            numbers = sum(
                math.prod(size) for index, size in self._inputs if index == tower
            )
            if not 0 <= numbers <= width:
                raise ValueError(
                    f"inputs: {numbers} numbers of tower {tower}, which gives {width}"
                )
        shapes = {
            f"@{index}": (torch.float32, size)
            for index, (_, size) in enumerate(self._inputs)
        }
        self._program = Program(nodes, shapes, _shapes("$", weights), [output])
        if self._program.result_width != 1:
            raise ValueError(
                f"output: {self._program.result_width} numbers a row, must be one logit"
            )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs [(B, D1), (B, D2)]."""
        rows = len(outputs[0])
        starts = [0, 0]  # of each tower's next input
        values: dict[str, Any] = {**self.kept.by_reference(), "rows": rows}
        for index, (tower, size) in enumerate(self._inputs):
            width = math.prod(size)
            block = outputs[tower][:, starts[tower] : starts[tower] + width]
            values[f"@{index}"] = block.reshape(rows, *size)
            starts[tower] += width
        return self._program(values)[0].reshape(rows)  # type: ignore[no-any-return]
