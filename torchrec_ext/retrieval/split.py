"""GraphSplit: cuts a network into a query half, a candidate half and what runs for each pair, by following each column.

What depends on columns of the queries alone is computed once for a query. What depends on columns of the catalogue
alone is stored. The item's half of the first layer is applied before a row is stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx import Node
from torch.fx.node import map_arg

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.trace import (
    BOTH,
    CANDIDATE,
    NEITHER,
    QUERY,
    TABLES,
    Leaf,
    Trace,
    aten,
    is_size,
    is_whole,
    line_of,
)
from torchrec_ext.schema.validation import listed

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
        self._trace = trace = Trace(model, leaves, examples)
        self.graph = trace.graph
        self.leaves = trace.leaves
        self.tables = trace.tables
        self.numbers = trace.numbers
        self._side = trace.side
        self.result = trace.result
        self._check_sides()
        self.pairwise = trace.behind(
            [self.result], lambda node: self._side(node) == BOTH
        )
        self.frontier = self._crossing()
        self._other = self._not_linear()
        self.product = self._other is None
        self._build()

    @property
    def why_no_product(self) -> str:
        """The function that keeps logits from being products, with its line; empty if they are products."""
        if self._other is None:
            return ""
        return f"{self._other.target}{line_of(self._other)}"

    # Checks

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
        behind = self._trace.behind([node], lambda _: True)
        names = {self.leaves[each].column for each in behind if each in self.leaves}
        return listed(f"'{name}'" for name in sorted(names))

    def _of_ids(self, node: Node) -> bool:
        """Whether a value is computed from ids, which a row of float32 cannot hold; a mask of them is none."""
        if node.meta["val"].dtype == torch.bool:
            return False
        leaves = [
            self.leaves.get(each) for each in self._trace.behind([node], is_whole)
        ]
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
            if node in behind or node in self._trace.constant or is_size(node):
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
            if (
                node not in split._trace.constant
                and node.target is not aten.sym_size.int
            ):
                queue.extend(node.all_input_nodes)
        for node in split.graph.nodes:
            if node not in needed:
                continue
            if node in split._trace.constant:
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
        if leaves:
            # Each side has a number of rows of its own.
            side = "candidate" if leaves[0].candidate else "query"
            many = Dim(f"{side}_rows", min=2)
            dynamic = tuple(leaf.axes(many) for leaf in leaves)
        return Part(
            module=fx.GraphModule(self.root, self.graph).eval(),
            inputs=inputs or [leaf.input for leaf in leaves],
            examples=examples or tuple(leaf.example() for leaf in leaves),
            dynamic=dynamic,
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


def _width(node: Node) -> int:
    return int(torch.Size(node.meta["val"].shape[1:]).numel())


def _any_node(argument: Any, holds: Callable[[Node], bool]) -> bool:
    found: list[bool] = []
    map_arg(argument, lambda node: found.append(holds(node)))
    return any(found)
