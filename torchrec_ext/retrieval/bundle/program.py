"""Programs: what a module of a user's own computes, as a list of torch's operators that a bundle can hold.

A program names operators of :data:`OPERATORS` alone, none of which reads a file, runs code or writes in place, so that
a stranger's bundle can do nothing else. ``retrieval/bundle/traced.py`` writes programs.

A node is ``[operator, arguments, keyword arguments]``. Its text arguments are references: ``#3`` the result of node 3,
``@user`` an input, ``$top/0/weight`` a weight, ``&items/weight`` a table, ``rows`` B, the number of rows; or values
that JSON has not: ``=mean`` a text, ``dtype.float32``, ``inf``, ``-inf`` and ``nan``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.tower import check_tables

_ATEN = """
abs.default add.Scalar add.Tensor addmm.default all.dim amax.default amin.default any.dim arange.default
arange.start arange.start_step argmax.default baddbmm.default bitwise_and.Tensor bitwise_not.default
bitwise_or.Tensor bmm.default cat.default chunk.default clamp.Tensor clamp.default clamp_max.default
clamp_min.default clone.default concat.default constant_pad_nd.default contiguous.default conv1d.default
conv2d.default cos.default cosine_similarity.default cumsum.default detach.default diagonal.default div.Scalar
div.Tensor div.Tensor_mode einsum.default elu.default embedding.default embedding_bag.default
embedding_bag.padding_idx eq.Scalar eq.Tensor exp.default expand.default expand_as.default expm1.default
flatten.using_ints flip.default floor.default floor_divide.default full.default full_like.default gather.default
ge.Scalar ge.Tensor gelu.default glu.default group_norm.default gru.input gt.Scalar gt.Tensor hardsigmoid.default
hardswish.default hardtanh.default index.Tensor index_select.default layer_norm.default le.Scalar le.Tensor
leaky_relu.default lift_fresh_copy.default linalg_vector_norm.default linear.default log.default log1p.default
log_sigmoid.default log_softmax.int logical_and.default logical_not.default logical_or.default logsumexp.default
lstm.input lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor matmul.default max.default max.dim
max_pool1d.default maximum.default mean.default mean.dim min.dim minimum.default mish.default mm.default movedim.int
mul.Scalar mul.Tensor mv.default _native_batch_norm_legit_no_training.default ne.Scalar ne.Tensor neg.default
new_full.default new_ones.default new_zeros.default one_hot.default ones.default ones_like.default pad.default
permute.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu.default prod.dim_int reciprocal.default
relu.default relu6.default remainder.Scalar remainder.Tensor repeat.default repeat_interleave.self_int
reshape.default rms_norm.default rnn_relu.input rnn_tanh.input round.default rsqrt.default rsub.Scalar
scaled_dot_product_attention.default select.int selu.default sigmoid.default sign.default silu.default sin.default
slice.Tensor softmax.int softplus.default split.Tensor split_with_sizes.default sqrt.default square.default
squeeze.default squeeze.dim squeeze.dims stack.default std.correction std.dim sub.Scalar sub.Tensor sum.default
sum.dim_IntList t.default tan.default tanh.default tile.default to.dtype _to_copy.default topk.default transpose.int
tril.default triu.default type_as.default unbind.int unflatten.int unsqueeze.default var.correction var.dim
view.default where.ScalarOther where.ScalarSelf where.self zeros.default zeros_like.default
"""
_SIZES = {"size_add": operator.add, "size_sub": operator.sub, "size_mul": operator.mul, "size_div": operator.floordiv}


def _operators() -> dict[str, Callable[..., Any]]:
    named: dict[str, Callable[..., Any]] = {"item": operator.getitem, **_SIZES}
    for name in _ATEN.split():
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if function is not None:  # a release of torch may lack one
            named[name] = function
    return named


OPERATORS: Mapping[str, Callable[..., Any]] = _operators()
_DTYPES = {f"dtype.{name}": getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool")}
_NUMBERS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
EXACT_IDS = 2**24  # whole numbers below are exact in float32, as which a batch carries columns that no table reads

Node = Sequence[Any]


class Program:
    """Runs nodes one after the other.

    Args:
        nodes: nodes in their order.
        known: references of inputs, weights and tables that nodes may name.
        results: references that :meth:`__call__` returns.

    Raises:
        ValueError: an operator that no bundle may name, or a reference to nothing.
    """

    def __init__(self, nodes: Sequence[Node], known: Sequence[str], results: Sequence[str]) -> None:
        self._results, self._steps = list(results), []
        there = {"rows", *known}
        for number, (name, arguments, options) in enumerate(nodes):
            if name not in OPERATORS:
                raise ValueError(f"operator {name!r} is not one that a bundle may name")
            _check_references([list(arguments), list(options.values())], there)
            self._steps.append((f"#{number}", OPERATORS[name], list(arguments), dict(options)))
            there.add(f"#{number}")
        _check_references(self._results, there)

    def __call__(self, values: Mapping[str, Any]) -> list[Any]:
        """Returns the results, from inputs, weights, tables and ``rows`` by reference."""
        values = dict(values)
        for reference, function, arguments, options in self._steps:
            given = [_value(argument, values) for argument in arguments]
            if given and isinstance(given[0], nn.Module):
                values[reference] = _looked_up(given[0], given[1])
                continue
            named = {name: _value(option, values) for name, option in options.items()}
            values[reference] = function(*given, **named)
        return [values[result] for result in self._results]


def _looked_up(table: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(table, "rows"):  # an Int8Table
        return table.rows(ids.flatten()).view(*ids.shape, -1)  # type: ignore[no-any-return, operator]
    return embedding(ids, table.weight)  # type: ignore[arg-type]


def _check_references(argument: Any, there: set[str]) -> None:
    if isinstance(argument, list | tuple):
        for each in argument:
            _check_references(each, there)
    elif isinstance(argument, str) and argument[:1] != "=" and argument not in {*there, *_DTYPES, *_NUMBERS}:
        raise ValueError(f"{argument!r} refers to nothing that was computed before")


def _value(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, list | tuple):
        return [_value(each, values) for each in argument]
    if not isinstance(argument, str):
        return argument
    if argument in values:
        return values[argument]
    return argument[1:] if argument[:1] == "=" else _DTYPES.get(argument, _NUMBERS.get(argument))


class _Weights(nn.Module):
    """Holds weights under names that a parameter cannot have, as buffers; they are never trained again."""

    def __init__(self, weights: Mapping[str, Sequence[Any]]) -> None:
        super().__init__()
        for name, (dtype, *size) in weights.items():
            self.register_buffer(name, torch.empty(size, dtype=_DTYPES[f"dtype.{dtype}"]))

    def by_reference(self) -> dict[str, Tensor]:
        return {f"${name}": value for name, value in self._buffers.items() if value is not None}


class ProgramTower(Recorded, nn.Module):
    """Computes what a user's module does from columns of the queries alone, or of the candidates alone, by a program.

    Args:
        tables: tables that ids of a column look up, the columns as their features.
        columns: dtype (``int64`` or ``float32``) and shape of a row of each column, such as ``["float32", 60]``.
        weights: dtype and shape of each weight that is in no table.
        nodes: nodes of the program.
        outputs: references of the values, (B, ...) each, that the output concatenates.
        out_features: D.

    Attributes:
        computed_ids: columns of whole numbers that no table reads as they are.
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
        self.tables, self.out_features = list(tables), out_features
        self._columns = {name: (dtype, tuple(size)) for name, (dtype, *size) in columns.items()}
        self._ids = {name for table in tables for name in table.feature_names}
        self.computed_ids = [
            name for name, (dtype, _) in self._columns.items() if dtype == "int64" and name not in self._ids
        ]
        self.dense = tuple(
            element
            for name, (_, size) in self._columns.items()
            if name not in self._ids
            for element in ([f"{name}[{index}]" for index in range(size[0])] if size else [name])
        )
        self.embeddings = EmbeddingBagCollection(tables=self.tables) if tables else None
        self.kept = _Weights(weights)
        known = [f"@{name}" for name in columns] + [f"${name}" for name in weights]
        self._program = Program(nodes, [*known, *(f"&{table.name}" for table in tables)], outputs)

    def columns_of(self, sparse: KeyedJaggedTensor, dense: Tensor) -> dict[str, Tensor]:
        """Returns each column, (B,) or (B, W), from a batch's ids and this tower's dense columns (B, Fd).

        Raises:
            ValueError: a list of another length than W, or a whole number that float32 does not hold exactly.
        """
        columns, start = {}, 0
        for name, (dtype, size) in self._columns.items():
            if name in self._ids:
                columns[name] = _ids_of(name, sparse[name].values(), sparse[name].lengths(), size)
                continue
            width = size[0] if size else 1
            block = dense[:, start : start + width].reshape(-1, *size)
            start += width
            if dtype == "int64":
                if block.numel() and float(block.abs().max()) >= EXACT_IDS:
                    raise ValueError(f"column '{name}': whole numbers must be below {EXACT_IDS:,}; map them to fewer")
                block = block.long()
            columns[name] = block
        return columns

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Returns (B, D); see :meth:`columns_of` for arguments and errors."""
        columns = self.columns_of(sparse, dense)
        tables: dict[str, Any] = {} if self.embeddings is None else dict(self.embeddings.embedding_bags.items())
        values = {f"@{name}": column for name, column in columns.items()} | self.kept.by_reference()
        values |= {f"&{name}": table for name, table in tables.items()}
        try:
            results = self._program({**values, "rows": len(dense)})
        except IndexError as error:
            named = ", ".join(f"'{name}'" for name, (dtype, _) in self._columns.items() if dtype == "int64")
            raise ValueError(f"columns {named}: an id made of them is no row of its table ({error})") from None
        return torch.cat([result.reshape(len(dense), -1).float() for result in results], dim=1)


def _ids_of(name: str, ids: Tensor, lengths: Tensor, size: Sequence[int]) -> Tensor:
    width = size[0] if size else 1
    wrong = (lengths != width).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"column '{name}', row {row}: {int(lengths[row])} ids, must be {width}; send as many, padded as in training"
        )
    return ids.view(-1, *size)


class ProgramTop(InteractionLayer):
    """Computes what a user's module does from queries and candidates together, by a program over two towers' outputs.

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
        known = [f"@{index}" for index in range(len(inputs))] + [f"${name}" for name in weights]
        self._program = Program(nodes, known, [output])

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs [(B, D1), (B, D2)]."""
        rows, starts = len(outputs[0]), [0, 0]
        values: dict[str, Any] = {**self.kept.by_reference(), "rows": rows}
        for index, (tower, size) in enumerate(self._inputs):
            width = torch.Size(size).numel()
            block = outputs[tower][:, starts[tower] : starts[tower] + width]
            values[f"@{index}"] = block.reshape(rows, *size)
            starts[tower] += width
        return self._program(values)[0].reshape(rows)  # type: ignore[no-any-return]
