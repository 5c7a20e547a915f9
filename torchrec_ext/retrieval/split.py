"""GraphSplit: cuts a network into a query half, a candidate half and what runs for each pair, by following each column.

torch.export records forward as a graph of torch's operators. What depends on columns of the queries alone is computed
once for a query; what depends on columns of the catalogue alone is stored. Linear layers and element-wise functions are
moved through concatenations first, so that the item's half of the first layer is applied before a row is stored.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torchrec
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.schema.validation import listed

aten = torch.ops.aten
NEITHER, QUERY, CANDIDATE, BOTH = range(4)
TABLES = {QUERY: "queries", CANDIDATE: "catalogue.features"}
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
_BROADCAST = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor}
_SHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
}
# Functions that are linear in all of their tensors together.
_LINEAR = _SHAPES | {
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.neg.default,
    aten.cat.default,
    aten.stack.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
}
# Functions that are linear in each of their tensors, the others held.
_BILINEAR = {
    aten.mul.Tensor,
    aten.bmm.default,
    aten.mm.default,
    aten.matmul.default,
}
# Functions that are linear in their first tensor.
_FIRST = {aten.div.Tensor, aten.linear.default}


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

    def as_json(self) -> dict[str, Any]:
        """Returns the manifest's entry."""
        values: dict[str, Any] = {
            "input": self.name,
            "kind": self.kind,
            "column": self.column,
        }
        if self.kind == "column":
            values["dtype"] = self.dtype
        if self.kind in ("rows", "pooled"):
            values["table"] = self.table
        if self.kind == "pooled":
            values["pooling"] = self.pooling
        if self.kind != "lengths":
            values["shape"] = list(self.shape)
        return values

    def example(self, rows: int = 3, longest: int = 5) -> Tensor:
        """Returns an input to trace with; no axis is 0 or 1, which torch.export would fix."""
        sizes = [longest if size is None else size for size in self.shape]
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.kind == "lengths":
            return torch.ones(rows, dtype=torch.int64)
        if dtype == torch.float32:
            draw = torch.Generator().manual_seed(0)
            return torch.randn(rows, *sizes, generator=draw)
        return torch.zeros(rows, *sizes, dtype=dtype)

    def axes(self, rows: Any) -> dict[int, Any]:
        """Returns the axes of any length, for ``dynamic_shapes``; lists of one column are equally long."""
        axes = {0: rows}
        for place, size in enumerate(self.shape, 1):
            if size is None:
                axes[place] = Dim(
                    f"longest_{re.sub(r'[^0-9a-zA-Z]', '_', self.column)}"
                )
        return axes


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A part of the graph as a module of its own.

    Args:
        module: from ``inputs``, in order, to one tensor.
        inputs: names of the inputs.
        examples: an example of each input.
        dynamic: the axes of any length of each input.
        constants: name of each buffer, with the node of the whole graph that computes it.
        fixed: buffers that no weight changes.
        width: columns of the output; 0 for logits.
        leaves: how to fill the inputs; none of ``pairs``.
    """

    module: fx.GraphModule
    inputs: list[str]
    examples: tuple[Tensor, ...]
    dynamic: tuple[Any, ...]
    constants: dict[str, Node]
    fixed: dict[str, Tensor]
    width: int
    leaves: list[Leaf] = field(default_factory=list)


class GraphSplit:
    """A network in three parts, together equal to its forward.

    Args:
        model: module in evaluation whose forward takes a dict of leaves by name and returns logits (B,) or (B, 1).
        leaves: its inputs.
        examples: values to trace with, by name; by default small ones.

    Attributes:
        query: part from the query's leaves to (B, Wq).
        candidate: part from the candidate's leaves to stored rows (B, Wc).
        pairs: part from ``query`` (1, Wq) and ``rows`` (N, Wc) to logits (N,).
        product: whether the logits are the products of queries and rows.
        tables: path of the weight of each table that is looked up outside the graphs.

    Raises:
        BundleError: forward cannot be traced or cut; the message names the line and the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[Leaf],
        examples: Mapping[str, Tensor] | None = None,
    ) -> None:
        values = {
            leaf.name: (examples or {}).get(leaf.name, leaf.example())
            for leaf in leaves
        }
        program = _trace(model, leaves, values)
        self.graph = program.graph
        signature = program.graph_signature
        self._paths: dict[Node, str] = {}
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
                    self._paths[node] = paths[node.name]
                else:
                    self.leaves[node] = next(inputs)
        self._own_values = {**program.state_dict, **program.constants}
        self.tables: dict[str, str] = {}
        self._check_result()
        self._look_ups()
        self._rewrite()
        self._sides = self._follow()
        self._constant = self._constants()
        self._check_sides()
        self.pairwise = self._behind([self.result], lambda node: self._side(node) == 3)
        self.frontier = self._crossing()
        self._other = self._not_linear()
        self.product = self._other is None
        self._build()

    @property
    def result(self) -> Node:
        """The logits."""
        result: Any = self.graph.output_node().args[0]
        return result[0]  # type: ignore[no-any-return]

    @property
    def why_no_product(self) -> str:
        """The function that keeps logits from being products, with its line; empty if they are products."""
        if self._other is None:
            return ""
        return f"{self._other.target}{line_of(self._other)}"

    def numbers(self, weights: Mapping[str, Tensor]) -> dict[Node, Tensor]:
        """Computes every constant of the graph from weights by path."""
        values: dict[Node, Tensor] = {}
        for node in self.graph.nodes:
            if node not in self._constant:
                continue
            if node.op == "placeholder":
                path = self._paths[node]
                value = weights.get(path)
                if value is None:
                    value = self._own_values[path]
                values[node] = value.detach()
            else:
                arguments = map_arg(node.args, values.__getitem__)
                options = map_arg(node.kwargs, values.__getitem__)
                function: Any = node.target
                values[node] = function(*arguments, **options)
        return values

    def _side(self, node: Node) -> int:
        return self._sides.get(node, NEITHER)

    def _follow(self) -> dict[Node, int]:
        """Returns for each node the sides that its value depends on; the number of rows is of neither."""
        sides: dict[Node, int] = {}
        for node in self.graph.nodes:
            leaf = self.leaves.get(node)
            if leaf is not None:
                sides[node] = CANDIDATE if leaf.candidate else QUERY
            elif node.op == "placeholder" or _is_size(node):
                sides[node] = NEITHER
            else:
                sides[node] = NEITHER
                for each in node.all_input_nodes:
                    sides[node] |= sides[each]
        return sides

    def _constants(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.graph.nodes:
            if node in self._paths or (
                node.op == "call_function"
                and isinstance(node.meta.get("val"), Tensor)
                and all(each in found for each in node.all_input_nodes)
            ):
                found.add(node)
        return found

    def _behind(
        self, results: Iterable[Node], enters: Callable[[Node], bool]
    ) -> list[Node]:
        """Returns the nodes behind ``results``, through nodes that ``enters`` admits, in the order of the graph."""
        queue = list(results)
        nodes = set()
        while queue:
            node = queue.pop()
            if node not in nodes and enters(node):
                nodes.add(node)
                queue.extend(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in nodes]

    # Checks

    def _check_result(self) -> None:
        result: Any = self.graph.output_node().args[0]
        several = isinstance(result, list | tuple) and len(result) != 1
        shape: tuple[Any, ...] = ()
        first = result[0]
        if isinstance(first, Node) and isinstance(first.meta.get("val"), Tensor):
            shape = tuple(first.meta["val"].shape)
        # The number of rows is symbolic, so a plain int is not one logit for each row.
        fits = shape != () and not isinstance(shape[0], int) and shape[1:] in ((), (1,))
        if several or not fits:
            answer: Any = "several values" if several else shape or "no tensor"
            raise BundleError(
                f"model: forward returns {answer}, must be logits (B,) or (B, 1), one for each row; wrap it in a "
                "module whose forward returns those"
            )

    def _check_sides(self) -> None:
        side = self._side(self.result)
        for missing in (QUERY, CANDIDATE):
            if not side & missing:
                others = sorted(
                    {
                        leaf.column
                        for leaf in self.leaves.values()
                        if leaf.candidate != (missing == CANDIDATE)
                    }
                )
                raise BundleError(
                    f"model: forward's logits depend on no column of {TABLES[missing]}, but on {listed(others)} alone; "
                    "there is nothing to rank by"
                )

    def _columns(self, node: Node) -> str:
        behind = self._behind([node], lambda _: True)
        names = {self.leaves[each].column for each in behind if each in self.leaves}
        return listed(f"'{name}'" for name in sorted(names))

    def _of_ids(self, node: Node) -> bool:
        """Whether a value is computed from ids, which a row of float32 cannot hold; a mask of them is none."""
        if node.meta["val"].dtype == torch.bool:
            return False
        leaves = [self.leaves.get(each) for each in self._behind([node], _is_whole)]
        return any(leaf is not None and leaf.kind == "column" for leaf in leaves)

    def _crossing(self) -> list[Node]:
        """Returns the values of one side that the pairwise nodes read, the query's first."""
        crossing: dict[Node, None] = {}
        for node in self.pairwise:
            for each in node.all_input_nodes:
                if self._side(each) in (QUERY, CANDIDATE):
                    crossing[each] = None
        ordered = []
        for side in (QUERY, CANDIDATE):
            ordered += [node for node in crossing if self._side(node) == side]
        for node in ordered:
            self._check_crossing(node)
        return ordered

    def _check_crossing(self, node: Node) -> None:
        value = node.meta["val"]
        candidates = [node, *node.users, *self.pairwise]
        line = next(filter(None, map(line_of, candidates)), "")
        table = "catalogue" if self._side(node) == CANDIDATE else "queries"
        columns = self._columns(node)
        batched = isinstance(value, Tensor) and value.dim()
        if not batched or isinstance(value.shape[0], int):
            raise BundleError(
                f"model: forward{line} combines {columns} of the {table} over all rows of the batch, as an in-batch "
                "softmax does; return the logit of each row, and leave the rest to the loss"
            )
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise BundleError(
                f"model: forward{line}: a value of {columns} has shape {tuple(value.shape)}, must be (B, ...) of fixed "
                "width where both sides meet; pool the list first"
            )
        if not value.is_floating_point() and self._of_ids(node):
            raise BundleError(
                f"model: forward{line} combines ids of {columns} with the other side's columns, so there is no vector "
                "to store; look them up first, each by an nn.Embedding"
            )

    # Rewriting

    def _look_ups(self) -> None:
        """Makes look-ups of plain columns leaves, so that their tables stay outside the graphs."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and _is_nothing(node):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
            elif node.target in (aten.view.default, aten._unsafe_view.default):
                # Without copies that only made a tensor contiguous.
                node.target = aten.reshape.default
        found: dict[tuple[Node, Node], Node] = {}
        for node in list(self.graph.nodes):
            if node.target is not aten.embedding.default:
                continue
            ids: Any
            weight: Any
            weight, ids = node.args[:2]
            leaf = self.leaves.get(ids)
            if leaf is None or weight not in self._paths:
                continue
            if weight.meta["val"].dtype != torch.float32:
                continue
            if (weight, ids) in found:
                node.replace_all_uses_with(found[weight, ids])
                continue
            found[weight, ids] = node
            path = self._paths[weight]
            table = path.removeprefix("model.").removesuffix(".weight")
            self.tables[table] = path
            self.leaves[node] = Leaf(
                name=f"{leaf.column}@{table}",
                kind="rows",
                column=leaf.column,
                candidate=leaf.candidate,
                shape=(*leaf.shape, weight.meta["val"].shape[1]),
                table=table,
            )

    def _rewrite(self) -> None:
        changed = True
        while changed:
            changed = False
            self._sides = self._follow()
            for node in list(self.graph.nodes):
                if node.op != "call_function" or self._side(node) != BOTH:
                    continue
                with self.graph.inserting_before(node):
                    new = self._moved(node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    self.graph.erase_node(node)
                    changed = True
                    break
        self.graph.eliminate_dead_code()

    def _call(self, like: Node, target: Any, *arguments: Any, **options: Any) -> Node:
        """Adds a node, whose value has the shape that torch gives it."""
        node = self.graph.call_function(target, arguments, options)
        values = map_arg(arguments, lambda each: each.meta["val"])
        node.meta = {"val": target(*values, **options)}
        if "stack_trace" in like.meta:
            node.meta["stack_trace"] = like.meta["stack_trace"]
        self._sides[node] = NEITHER
        for each in node.all_input_nodes:
            self._sides[node] |= self._side(each)
        return node  # type: ignore[no-any-return]

    def _moved(self, node: Any) -> Node | None:
        """Returns a node of equal value whose parts are of one side; None if there is none."""
        if node.target is aten.cat.default:
            return self._flattened(node)
        if node.target is operator.getitem:
            return self._of_split(node)
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, Node) or source.target is not aten.cat.default:
            return None
        dim = _dim(source)
        if dim == 0:
            return None
        if node.target is aten.slice.Tensor:
            return self._sliced(node, source, dim)
        if not all(_moves(user, source) for user in source.users):
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

    def _flattened(self, node: Any) -> Node | None:
        dim = _dim(node)
        pieces: list[Any] = []
        for piece in _pieces(node):
            inner = piece.target is aten.cat.default and self._side(piece) == BOTH
            if inner and _dim(piece) == dim:
                pieces += piece.args[0]
            else:
                pieces.append(piece)
        if len(pieces) == len(node.args[0]):
            return None
        return self._call(node, aten.cat.default, pieces, dim)

    def _of_split(self, node: Any) -> Node | None:
        """Takes a piece of a split concatenation from what was concatenated."""
        split, index = node.args
        if not isinstance(split, Node) or split.target not in (
            aten.split.Tensor,
            aten.split_with_sizes.default,
        ):
            return None
        source: Any = split.args[0]
        if source.target is not aten.cat.default:
            return None
        dim = split.args[2] if len(split.args) > 2 else 0
        dim = dim % source.meta["val"].dim()
        if dim != _dim(source) or dim == 0:
            return None
        sizes = [value.shape[dim] for value in split.meta["val"]]
        start = sum(sizes[:index])
        return self._range(node, source, dim, start, start + sizes[index])

    def _sliced(self, node: Any, source: Any, dim: int) -> Node | None:
        given: list[Any] = list(node.args)
        given += [0, 0, None, 1][len(given) - 1 :]
        _, axis, start, stop, step = given
        value = source.meta["val"]
        if axis % value.dim() != dim or step != 1:
            return None
        start, stop, _ = slice(start, stop).indices(value.shape[dim])
        return self._range(node, source, dim, start, stop)

    def _range(
        self, node: Any, source: Any, dim: int, start: int, stop: int
    ) -> Node | None:
        pieces = []
        place = 0
        for piece in _pieces(source):
            size = piece.meta["val"].shape[dim]
            if not isinstance(size, int):
                return None
            first = max(start - place, 0)
            last = min(stop - place, size)
            if first < last:
                if last - first < size:
                    piece = self._call(node, aten.slice.Tensor, piece, dim, first, last)
                pieces.append(piece)
            place += size
        if len(pieces) == 1:
            return pieces[0]  # type: ignore[no-any-return]
        return self._call(node, aten.cat.default, pieces, dim)

    def _linear(self, node: Any, source: Any) -> Node | None:
        """Applies a linear layer to the query's, the candidate's and the other pieces, and adds the results."""
        weight, *bias = node.args[1:]
        if self._side(weight) != NEITHER:
            return None
        groups: dict[int, list[tuple[Node, Node]]] = {}
        start = 0
        for piece in _pieces(source):
            stop = start + piece.meta["val"].shape[-1]
            columns = self._call(node, aten.slice.Tensor, weight, 1, start, stop)
            groups.setdefault(self._side(piece), []).append((piece, columns))
            start = stop
        if len(groups) == 1:
            return None
        total: Node | None = None
        for side in (NEITHER, QUERY, CANDIDATE, BOTH):
            pieces = groups.get(side)
            if not pieces:
                continue
            inputs = [piece for piece, _ in pieces]
            parts = [part for _, part in pieces]
            value, part = inputs[0], parts[0]
            if len(pieces) > 1:
                value = self._call(node, aten.cat.default, inputs, -1)
                part = self._call(node, aten.cat.default, parts, 1)
            product = self._call(node, aten.linear.default, value, part, *bias)
            bias = []
            if total is not None:
                product = self._call(node, aten.add.Tensor, total, product)
            total = product
        return total

    # Products

    def _not_linear(self) -> Node | None:
        """Returns the first function for pairs that is not linear in the candidate's values; None if all are."""
        for node in self.pairwise:
            moving = [
                place
                for place, each in enumerate(node.args)
                if _any_node(each, lambda one: bool(self._side(one) & CANDIDATE))
            ]
            linear = node.target in _LINEAR
            linear = linear or (node.target in _BILINEAR and len(moving) == 1)
            linear = linear or (node.target in _FIRST and moving == [0])
            if node.target is aten._to_copy.default:
                linear = node.meta["val"].is_floating_point()
            if not linear or node.meta.get("val") is None:
                return node
        return None

    def _factor(self) -> float | None:
        """Returns s if the logits are s times the dot product of one vector of each side, else None."""
        nodes = [node for node in self.pairwise if node.target not in _SHAPES]
        if len(self.frontier) != 2 or len(nodes) < 2:
            return None
        query, candidate = self.frontier
        product: Any
        total: Any
        product, total, *others = nodes
        is_dot = (
            product.target is aten.mul.Tensor
            and set(product.args) == {query, candidate}
            and query.meta["val"].dim() == candidate.meta["val"].dim() == 2
            and query.meta["val"].shape[1] == candidate.meta["val"].shape[1]
            and total.target is aten.sum.dim_IntList
            and total.args[0] is product
            and list(total.args[1]) in ([1], [-1])
        )
        if not is_dot:
            return None
        factor = 1.0
        for node in others:
            number = node.args[1] if len(node.args) > 1 else None
            if not isinstance(number, int | float):
                return None
            if node.target is aten.mul.Tensor:
                factor *= number
            elif node.target is aten.div.Tensor:
                factor /= number
            else:
                return None
        return factor

    # Parts

    def _build(self) -> None:
        query = [node for node in self.frontier if self._side(node) == QUERY]
        candidate = [node for node in self.frontier if self._side(node) == CANDIDATE]
        if not self.product:
            self.query = self._half(query)
            self.candidate = self._half(candidate)
            self.pairs = self._pairs(query, candidate)
            return
        factor = self._factor()
        if factor is not None:
            self.query = self._half(query, factor=factor)
            self.candidate = self._half(candidate)
        else:
            self.query = self._slopes(query, candidate)
            self.candidate = self._half(candidate, ones=True)
        self.pairs = _products(self.query.width)

    def _half(
        self, results: Sequence[Node], *, factor: float = 1.0, ones: bool = False
    ) -> Part:
        """Returns the part that computes values of one side, flattened side by side."""
        builder = _Builder(self, self._leaves_behind(results))
        builder.add(results)
        matrix = builder.matrix(results)
        width = sum(map(_width, results))
        if factor != 1:
            matrix = builder.graph.call_function(aten.mul.Tensor, (matrix, factor))
        if ones:
            # The products' constant, which does not depend on the candidate.
            one = builder.graph.call_function(aten.slice.Tensor, (matrix, 1, 0, 1))
            one = builder.graph.call_function(aten.ones_like.default, (one,))
            matrix = builder.graph.call_function(aten.cat.default, ([matrix, one], 1))
            width += 1
        return builder.part(matrix, width)

    def _leaves_behind(self, results: Sequence[Node]) -> list[Node]:
        behind: set[Node] = set()
        queue = list(results)
        while queue:
            node = queue.pop()
            if node in behind or node in self._constant or _is_size(node):
                continue
            behind.add(node)
            if node not in self.leaves:
                queue.extend(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in behind & set(self.leaves)]

    def _pairs(self, query: Sequence[Node], candidate: Sequence[Node]) -> Part:
        builder = _Builder(self, [])
        matrices = []
        for name, nodes in (("query", query), ("rows", candidate)):
            matrices.append(builder.graph.placeholder(name))
            builder.cut(matrices[-1], nodes)
        rows = matrices[1]
        builder.rows = builder.graph.call_function(aten.sym_size.int, (rows, 0))
        builder.single = set(query)
        builder.add([self.result])
        logits = builder.graph.call_function(
            aten.reshape.default, (builder.env[self.result], [-1])
        )
        widths = [sum(map(_width, nodes)) for nodes in (query, candidate)]
        many = Dim("rows", min=2)
        return builder.part(
            logits,
            0,
            inputs=["query", "rows"],
            examples=(torch.randn(1, widths[0]), torch.randn(3, widths[1])),
            dynamic=({}, {0: many}),
        )

    def _slopes(self, query: Sequence[Node], candidate: Sequence[Node]) -> Part:
        """Returns the part that computes a query's slope along each of the candidate's numbers, and its constant.

        The logits are linear in the candidate's numbers: they are the logit of zeros, and the change of it with each
        number alone.
        """
        width = sum(map(_width, candidate))
        builder = _Builder(self, self._leaves_behind(query))
        builder.add(query)
        graph = builder.graph
        directions = torch.cat([torch.zeros(1, width), torch.eye(width)])
        start = 0
        for node in candidate:
            part = directions[:, start : start + _width(node)]
            start += _width(node)
            tail = node.meta["val"].shape[1:]
            builder.env[node] = builder.repeated(
                builder.buffer(part.reshape(1, width + 1, *tail)), width + 1, tail
            )
        for node in query:
            tail = node.meta["val"].shape[1:]
            one = graph.call_function(aten.unsqueeze.default, (builder.env[node], 1))
            builder.env[node] = builder.repeated(one, width + 1, tail)
        size = graph.call_function(operator.mul, (builder.rows, width + 1))
        builder.rows = size
        builder.add([self.result])
        logits = graph.call_function(
            aten.reshape.default, (builder.env[self.result], [-1, width + 1])
        )
        constant = graph.call_function(aten.slice.Tensor, (logits, 1, 0, 1))
        others = graph.call_function(aten.slice.Tensor, (logits, 1, 1, width + 1))
        slopes = graph.call_function(aten.sub.Tensor, (others, constant))
        return builder.part(
            graph.call_function(aten.cat.default, ([slopes, constant], 1)), width + 1
        )


class _Builder:
    """Copies nodes of a whole graph into a graph of their own."""

    def __init__(self, split: GraphSplit, leaves: Sequence[Node]) -> None:
        self.split = split
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.env: dict[Node, Node] = {}
        self.constants: dict[str, Node] = {}
        self.fixed: dict[str, Tensor] = {}
        self.leaves = list(leaves)
        self.single: set[Node] = set()  # values of one row for all rows
        self._values = split.numbers({})
        self._inputs: list[Node] = []
        for node in self.leaves:
            new = self.graph.placeholder(f"leaf_{len(self._inputs)}")
            self.env[node] = new
            self._inputs.append(new)
        self.rows: Node | None = None
        if self._inputs:
            self.rows = self.graph.call_function(
                aten.sym_size.int, (self._inputs[0], 0)
            )

    def buffer(self, value: Tensor) -> Node:
        """Adds a constant that no weight changes."""
        name = f"fixed_{len(self.fixed)}"
        self.fixed[name] = value.contiguous()
        self.root.register_buffer(name, self.fixed[name])
        return self.graph.get_attr(name)

    def cut(self, matrix: Node, nodes: Sequence[Node]) -> None:
        """Cuts a matrix into the values that were flattened to it."""
        start = 0
        for node in nodes:
            value = node.meta["val"]
            stop = start + _width(node)
            piece = matrix
            if len(nodes) > 1:
                piece = self.graph.call_function(
                    aten.slice.Tensor, (matrix, 1, start, stop)
                )
            start = stop
            if value.dim() != 2:
                shape = [-1, *value.shape[1:]]
                piece = self.graph.call_function(aten.reshape.default, (piece, shape))
            if value.dtype == torch.bool:
                piece = self.graph.call_function(aten.gt.Scalar, (piece, 0.5))
            elif value.dtype != torch.float32:
                piece = self.graph.call_function(
                    aten._to_copy.default, (piece,), {"dtype": value.dtype}
                )
            self.env[node] = piece

    def matrix(self, nodes: Sequence[Node]) -> Node:
        """Returns values side by side, (B, sum of widths)."""
        pieces = []
        for node in nodes:
            piece = self.env[node]
            value = node.meta["val"]
            if value.dtype != torch.float32:
                piece = self.graph.call_function(
                    aten._to_copy.default, (piece,), {"dtype": torch.float32}
                )
            # Also where it changes nothing: an input cannot be an output.
            if value.dim() != 2 or node in self.leaves:
                piece = self.graph.call_function(
                    aten.reshape.default, (piece, [-1, _width(node)])
                )
            pieces.append(piece)
        if len(pieces) == 1:
            return pieces[0]
        return self.graph.call_function(aten.cat.default, (pieces, 1))

    def repeated(self, value: Node, times: int, tail: Sequence[int]) -> Node:
        """Returns (B x times, tail) of (B or 1, times or 1, tail)."""
        shape = [self.rows, times, *tail]
        expanded = self.graph.call_function(aten.expand.default, (value, shape))
        return self.graph.call_function(aten.reshape.default, (expanded, [-1, *tail]))

    def add(self, results: Sequence[Node]) -> None:
        """Copies whatever computes ``results`` from what is there already."""
        split = self.split
        needed = set()
        queue = list(results)
        while queue:
            node = queue.pop()
            if node in needed or node in self.env:
                continue
            needed.add(node)
            if node not in split._constant and node.target is not aten.sym_size.int:
                queue.extend(node.all_input_nodes)
        for node in split.graph.nodes:
            if node not in needed:
                continue
            if node in split._constant:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = node
                self.root.register_buffer(
                    name, self._values[node].detach().contiguous()
                )
                self.env[node] = self.graph.get_attr(name)
            elif node.target is aten.sym_size.int:
                self.env[node] = self._size(node)
            else:
                self.env[node] = self.graph.node_copy(node, self._argument(node))

    def _argument(self, node: Node) -> Callable[[Node], Node]:
        """Returns how to read each argument of ``node``: a single row is repeated, unless it is broadcast."""
        tensors = [
            each
            for each in node.all_input_nodes
            if isinstance(each.meta.get("val"), Tensor)
        ]
        others = [
            each
            for each in tensors
            if each not in self.single and self.split._side(each) != NEITHER
        ]
        dims = [each.meta["val"].dim() for each in tensors]
        broadcast = node.target in _BROADCAST and others and len(set(dims)) == 1

        def argument(each: Node) -> Node:
            if each not in self.single or broadcast:
                return self.env[each]
            tail = each.meta["val"].shape[1:]
            return self.graph.call_function(
                aten.expand.default, (self.env[each], [self.rows, *tail])
            )

        return argument

    def _size(self, node: Node) -> Node:
        """Returns the number of rows, or the longest list of a leaf."""
        symbol = node.meta["val"].node.expr
        for leaf, new in zip(self.leaves, self._inputs, strict=True):
            shape = leaf.meta["val"].shape
            for axis, size in enumerate(shape):
                if axis and not isinstance(size, int) and size.node.expr == symbol:
                    return self.graph.call_function(aten.sym_size.int, (new, axis))
        assert self.rows is not None
        return self.rows

    def part(
        self,
        result: Node,
        width: int,
        *,
        inputs: list[str] | None = None,
        examples: tuple[Tensor, ...] = (),
        dynamic: tuple[Any, ...] = (),
    ) -> Part:
        """Returns the part that computes ``result``."""
        self.graph.output(result)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        leaves = [self.split.leaves[node] for node in self.leaves]
        many = Dim("rows", min=2)
        return Part(
            module=fx.GraphModule(self.root, self.graph).eval(),
            inputs=inputs or [leaf.name for leaf in leaves],
            examples=examples or tuple(leaf.example() for leaf in leaves),
            dynamic=dynamic or tuple(leaf.axes(many) for leaf in leaves),
            constants=self.constants,
            fixed=self.fixed,
            width=width,
            leaves=leaves,
        )


def _products(width: int) -> Part:
    """Returns the pairs of a product: the rows times the query."""
    graph = fx.Graph()
    query, rows = graph.placeholder("query"), graph.placeholder("rows")
    turned = graph.call_function(aten.permute.default, (query, [1, 0]))
    products = graph.call_function(aten.mm.default, (rows, turned))
    graph.output(graph.call_function(aten.reshape.default, (products, [-1])))
    return Part(
        module=fx.GraphModule(nn.Module(), graph).eval(),
        inputs=["query", "rows"],
        examples=(torch.randn(1, width), torch.randn(3, width)),
        dynamic=({}, {0: Dim("rows", min=2)}),
        constants={},
        fixed={},
        width=0,
    )


def _trace(
    model: nn.Module, leaves: Sequence[Leaf], values: Mapping[str, Tensor]
) -> ExportedProgram:
    size = Dim("rows", min=2)
    shapes = {leaf.name: leaf.axes(size) for leaf in leaves}
    name = type(getattr(model, "model", model)).__name__
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # Warnings about torch.export's own code and a GRU's flattened weights.
            warnings.simplefilter("ignore")
            program: ExportedProgram = torch.export.export(
                model, (dict(values),), dynamic_shapes=(shapes,), strict=False
            ).run_decompositions({})
            return program
    except BundleError:
        raise
    except Exception as error:  # torch.export raises forward's errors, and errors of many classes of its own
        rows = len(next(iter(values.values())))
        if f"constant ({rows})" in str(error):
            raise BundleError(
                f"model: forward of {name} fixes the number of rows to {rows}; read sizes as x.shape[0] instead of "
                "len(x), and -1 instead of a number where tensors are viewed or expanded"
            ) from None
        raise BundleError(
            f"model: forward of {name} cannot be traced{_line_in(str(error))}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:60]}; `if` on values, .item() and boolean masks become torch.where or "
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


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_whole(node: Node) -> bool:
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


def _width(node: Node) -> int:
    return int(torch.Size(node.meta["val"].shape[1:]).numel())


def _any_node(argument: Any, holds: Callable[[Node], bool]) -> bool:
    found: list[bool] = []
    map_arg(argument, lambda node: found.append(holds(node)))
    return any(found)
