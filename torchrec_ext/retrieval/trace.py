"""Trace: forward as a graph of torch's operators, rewritten so that as much as possible depends on one side alone.

torch.export records forward. Look-ups of plain columns become leaves, so that their tables stay outside. Linear layers
and element-wise functions are moved through concatenations.

Axis letters: B rows, L list length, D embedding dim.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.nn.functional as F
import torchrec
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from torchrec_ext.retrieval.manifest import BundleError

aten = torch.ops.aten
NEITHER, QUERY, CANDIDATE, BOTH = range(4)
TABLES = {QUERY: "queries", CANDIDATE: "catalogue.features"}
# A number that no layer has by chance: a forward that fixes it is told so.
TRACED_ROWS = 61
_LONGEST = 5
_LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent) for module in (torch, torchrec)
)
_OWN = str(Path(__file__).parents[1])
_NOTHING = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.dropout.default,
    aten.lift_fresh_copy.default,
}
_ELEMENTWISE = {
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.mish.default,
    aten.softplus.default,
    aten.hardtanh.default,
    aten.hardswish.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.neg.default,
    aten.abs.default,
    aten.exp.default,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
}


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """An input of a network, and how it is filled from the model's columns; see the manifest's ``leaves``.

    Args:
        name: name of the input.
        kind: ``column``, its values; ``rows``, the table's row of each id; ``pooled``, a bag of ids; ``lengths`` of a
            list.
        column: name of the model's column.
        candidate: whether the column is the catalogue's.
        shape: axes after B; None for the longest list of the batch.
        dtype: ``float32``, ``int64`` or ``bool``.
        table: name of the table.
        pooling: ``sum`` or ``mean``.
    """

    name: str
    kind: Literal["column", "rows", "pooled", "lengths"]
    column: str
    candidate: bool
    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    table: str = ""
    pooling: str = ""

    @property
    def input(self) -> str:
        """Name of the graph's input; no other value of any graph has it."""
        return f"{'candidate' if self.candidate else 'query'}.{self.name}"

    def example(self) -> Tensor:
        """Returns an input to trace with; no axis is 0 or 1, which torch.export would fix."""
        shape = [TRACED_ROWS, *(size or _LONGEST for size in self.shape)]
        if self.kind == "lengths":
            return torch.ones(shape, dtype=torch.int64)
        if self.dtype == "float32":
            return torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return torch.zeros(shape, dtype=getattr(torch, self.dtype))

    def axes(self, rows: Any) -> dict[int, Any]:
        """Returns the axes of any length, for ``dynamic_shapes``; lists of one column are equally long."""
        axes = {0: rows}
        for place, size in enumerate(self.shape, 1):
            if size is None:
                axes[place] = Dim(
                    f"longest_{re.sub(r'[^0-9a-zA-Z]', '_', self.column)}"
                )
        return axes


_library: Any = torch.library
_OPERATORS = _library.Library("torchrec_ext", "FRAGMENT")
_OPERATORS.define("look_up(Tensor ids, str table, int width, str pooling) -> Tensor")


def _shape_of_look_up(ids: Tensor, table: str, width: int, pooling: str) -> Tensor:
    shape = ids.shape[:1] if pooling else ids.shape
    return ids.new_empty((*shape, width), dtype=torch.float32)


_library.register_fake("torchrec_ext::look_up", _shape_of_look_up, lib=_OPERATORS)


def look_up(ids: Tensor, table: str, width: int, pooling: str = "") -> Tensor:
    """Stands in a trace for what a table has for a column; it becomes a leaf.

    Args:
        ids: values of a column, (B,) or (B, L).
        table: name of the table.
        width: D of the table.
        pooling: ``sum`` or ``mean`` of the bags (B, L); else the row of each id.

    Returns:
        (B, D), or (B, L, D) of lists that are not pooled.
    """
    return torch.ops.torchrec_ext.look_up(ids, table, width, pooling)  # type: ignore[no-any-return]


class LookingUp(TorchFunctionMode):
    """Makes embeddings of columns look-ups, and keeps all others in forms that ONNX Runtime computes as torch does.

    Args:
        model: module whose forward runs in the block; the path of a weight, without ``.weight``, is its table's name.
        columns: the columns that forward is given.
    """

    def __init__(self, model: nn.Module, columns: Iterable[Tensor]) -> None:
        weights = model.named_parameters()
        self._tables = {
            id(each): path.removesuffix(".weight") for path, each in weights
        }
        self._columns = {id(each) for each in columns}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return self._rows(*args, **kwargs)
        if func is F.embedding_bag:
            return self._bags(*args, **kwargs)
        return func(*args, **kwargs)

    def _table(self, ids: Tensor, weight: Tensor) -> str | None:
        """Returns the table that a column looks up, or None; one in half precision stays in the graph."""
        looked_up = id(ids) in self._columns and weight.dtype == torch.float32
        return self._tables.get(id(weight)) if looked_up else None

    def _rows(
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        *_: Any,
        **others: Any,
    ) -> Tensor:
        table = self._table(ids, weight)
        if table is not None:
            rows = look_up(ids, table, weight.shape[1])
        else:
            # Too large instead of negative: ONNX would count those from the last row.
            most = torch.iinfo(ids.dtype).max
            rows = F.embedding(ids.masked_fill(ids < 0, most), weight)
        if max_norm is None:
            return rows
        # torch writes the shorter rows into the table, but only those that it reads.
        norms = rows.norm(norm_type, -1, keepdim=True)
        return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)

    def _bags(
        self,
        ids: Tensor,
        weight: Tensor,
        *_: Any,
        mode: str,
        per_sample_weights: Tensor | None,
        padding_idx: int | None,
        **others: Any,
    ) -> Tensor:
        """Returns the sums or means of the rows of a table by ids (B, L)."""
        if ids.dim() != 2 or mode == "max" or per_sample_weights is not None:
            place = _line_in("".join(traceback.format_stack()))
            raise BundleError(
                f"model: forward{place}: an EmbeddingBag takes ids (B, L), by mode sum or mean, without offsets or "
                "weights; pool an nn.Embedding for others"
            )
        rows = self._rows(ids, weight, **others)
        there = torch.ones_like(ids) if padding_idx is None else ids != padding_idx
        share = there.to(rows.dtype)[:, :, None]
        total = (rows * share).sum(1)
        return total / share.sum(1).clamp(min=1) if mode == "mean" else total


class Trace:
    """The graph of a forward from leaves to logits (B,) or (B, 1).

    Args:
        model: module in evaluation whose forward takes a dict of leaves by name.
        leaves: its inputs: columns, and lengths of lists.

    Attributes:
        graph: the rewritten graph.
        leaves: inputs and look-ups, by node.
        weights: paths of the weights, buffers and constants, by node.
        numbers: these by path.

    Raises:
        BundleError: forward cannot be traced; the message names the line and the remedy.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[Leaf]) -> None:
        program = _trace(model, leaves)
        self.graph = program.graph
        signature = program.graph_signature
        self.weights: dict[Node, str] = {}
        self.numbers = {**program.state_dict, **program.constants}
        self.leaves: dict[Node, Leaf] = {}
        paths = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        inputs = iter(leaves)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if node.name in paths:
                    self.weights[node] = paths[node.name]
                else:
                    self.leaves[node] = next(inputs)
        self._check_result()
        self._look_ups()
        self._sides: dict[Node, int] = {}
        for node in self.graph.nodes:
            self._note(node)
        self._rewrite()

    @property
    def result(self) -> Node:
        """The logits."""
        result: Any = self.graph.output_node().args[0]
        return result[0]  # type: ignore[no-any-return]

    def side(self, node: Node) -> int:
        """Returns which columns a value depends on: the query's, the candidate's, both or neither."""
        return self._sides.get(node, NEITHER)

    def _note(self, node: Node) -> None:
        """Notes the sides that a value depends on; a number of rows is of neither side."""
        leaf = self.leaves.get(node)
        side = NEITHER
        if leaf is not None:
            side = CANDIDATE if leaf.candidate else QUERY
        elif not is_size(node):
            for each in node.all_input_nodes:
                side |= self.side(each)
        self._sides[node] = side

    def behind(
        self, results: Iterable[Node], stops: Callable[[Node], bool]
    ) -> list[Node]:
        """Returns the nodes behind ``results``, as far as those where it ``stops``, in the order of the graph."""
        queue = list(results)
        nodes = set()
        while queue:
            node = queue.pop()
            if node not in nodes:
                nodes.add(node)
                if not stops(node):
                    queue.extend(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in nodes]

    def _check_result(self) -> None:
        results: Any = self.graph.output_node().args[0]
        several = isinstance(results, list | tuple) and len(results) != 1
        value = getattr(results[0], "meta", {}).get("val")
        shape: tuple[Any, ...] = tuple(getattr(value, "shape", ()))
        # The number of rows is symbolic, so a plain int is not one logit for each row.
        fits = shape != () and not isinstance(shape[0], int) and shape[1:] in ((), (1,))
        if several or not fits:
            answer: Any = "several values" if several else shape or "no tensor"
            raise BundleError(
                f"model: forward returns {answer}, must be logits (B,) or (B, 1), one for each row; wrap it in a "
                "module whose forward returns those"
            )

    def _look_ups(self) -> None:
        """Makes look-ups leaves, each once, and removes what only copies."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and _is_nothing(node):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
            elif node.target in (aten.view.default, aten._unsafe_view.default):
                # Without copies that only made a tensor contiguous.
                node.target = aten.reshape.default
        found: dict[Leaf, Node] = {}
        for node in list(self.graph.nodes):
            if node.target is not torch.ops.torchrec_ext.look_up.default:
                continue
            ids, table, _, pooling = node.args
            column = self.leaves[ids]
            name = f"{column.column}@{table}"
            if pooling:
                name = f"{pooling} of {name}"
            leaf = replace(
                column,
                name=name,
                kind="pooled" if pooling else "rows",
                shape=tuple(node.meta["val"].shape[1:]),
                dtype="float32",
                table=table,
                pooling=pooling,
            )
            if leaf in found:
                node.replace_all_uses_with(found[leaf])
                continue
            found[leaf] = node
            self.leaves[node] = leaf

    def _rewrite(self) -> None:
        changed = True
        while changed:
            changed = False
            for node in list(self.graph.nodes):
                if node.op != "call_function" or self.side(node) != BOTH:
                    continue
                with self.graph.inserting_before(node):
                    new = self._moved(node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    self.graph.erase_node(node)
                    changed = True
        self.graph.eliminate_dead_code()

    def _call(self, like: Node, target: Any, *arguments: Any, **options: Any) -> Node:
        """Adds a node; its value has the shape of torch's own."""
        node = self.graph.call_function(target, arguments, options)
        values = map_arg(arguments, lambda each: each.meta["val"])
        node.meta = {"val": target(*values, **options)}
        if "stack_trace" in like.meta:
            node.meta["stack_trace"] = like.meta["stack_trace"]
        self._note(node)
        return node  # type: ignore[no-any-return]

    def _moved(self, node: Any) -> Node | None:
        """Returns a node of equal value whose parts are of one side; None if there is none."""
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, Node) or source.target is not aten.cat.default:
            return None
        dim = _dim(source)
        if dim == 0 or not all(_moves(user, source) for user in source.users):
            return None
        if node.target in _ELEMENTWISE:
            pieces = [
                self._call(node, node.target, piece, *node.args[1:], **node.kwargs)
                for piece in _pieces(source)
            ]
            return self._call(node, aten.cat.default, pieces, dim)
        if node.target is aten.linear.default and dim == source.meta["val"].dim() - 1:
            return self._linear(node, source)
        return None

    def _linear(self, node: Any, source: Any) -> Node | None:
        """Applies a linear layer to each piece, and adds the results of each side, and then these."""
        weight, *bias = node.args[1:]
        pieces = _pieces(source)
        sides = {self.side(piece) for piece in pieces}
        if self.side(weight) != NEITHER or len(sides) == 1:
            return None
        sums: dict[int, Node] = {}
        start = 0
        for piece in pieces:
            stop = start + piece.meta["val"].shape[-1]
            columns = self._call(node, aten.slice.Tensor, weight, 1, start, stop)
            product = self._call(node, aten.linear.default, piece, columns, *bias)
            start, bias, side = stop, [], self.side(piece)
            if side in sums:
                product = self._call(node, aten.add.Tensor, sums[side], product)
            sums[side] = product
        total, *others = [sums[side] for side in sorted(sides)]
        for other in others:
            total = self._call(node, aten.add.Tensor, total, other)
        return total


def _trace(model: nn.Module, leaves: Sequence[Leaf]) -> ExportedProgram:
    size = Dim("rows", min=2)
    shapes = {leaf.name: leaf.axes(size) for leaf in leaves}
    values = {leaf.name: leaf.example() for leaf in leaves}
    name = type(getattr(model, "model", model)).__name__
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # Warnings about torch.export's own code and a GRU's flattened weights.
            warnings.simplefilter("ignore")
            program: ExportedProgram = torch.export.export(
                model, (values,), dynamic_shapes=(shapes,), strict=False
            ).run_decompositions({})
            return program
    except BundleError:
        raise
    except Exception as error:  # torch.export raises forward's errors, and errors of many classes of its own
        text = str(error)
        if f"constant ({TRACED_ROWS})" in text:
            raise BundleError(
                f"model: forward of {name} fixes the number of rows to {TRACED_ROWS}; read sizes as x.shape[0] "
                "instead of len(x), and -1 instead of a number where tensors are viewed or expanded"
            ) from None
        frames = "".join(traceback.format_tb(error.__traceback__))
        raise BundleError(
            f"model: forward of {name} cannot be traced{_line_in(text) or _line_in(frames)}: {type(error).__name__}: "
            f"{' '.join(text.split())[:60]}; `if` on values, .item() and boolean masks become torch.where or "
            "sums with weights of 0 and 1"
        ) from None


def _line_in(text: str | None) -> str:
    """Returns ", FILE:LINE" of the innermost stack line outside of torch and this package, or an empty string."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', text or "")
    for path, line in reversed(lines):
        if not path.startswith((*_LIBRARIES, _OWN, "<")):
            return f", {path}:{line}"
    return ""


def line_of(node: Node) -> str:
    """Returns ", FILE:LINE" of the user's call that made a node, or an empty string."""
    return _line_in(node.meta.get("stack_trace"))


def is_size(node: Node) -> bool:
    """Returns whether a value is a number of rows or the like."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def is_whole(node: Node) -> bool:
    """Returns whether a value holds whole numbers."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.int64


def _is_nothing(node: Node) -> bool:
    """Whether a node returns its input."""
    if node.target is aten._to_copy.default:
        source: Any = node.args[0]
        return bool(source.meta["val"].dtype == node.meta["val"].dtype)
    return node.target in _NOTHING


def _moves(user: Any, source: Any) -> bool:
    """Whether a user of a concatenation can be moved before it."""
    if user.args[0] is not source:
        return False
    alone = len(user.all_input_nodes) == 1
    return user.target is aten.linear.default or (user.target in _ELEMENTWISE and alone)


def _dim(cat: Any) -> int:
    dim: Any = cat.args[1] if len(cat.args) > 1 else 0
    return dim % cat.meta["val"].dim()  # type: ignore[no-any-return]


def _pieces(cat: Any) -> list[Any]:
    return list(cat.args[0])
