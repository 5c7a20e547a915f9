"""GraphSplit: cuts a network into a query half, a candidate half and what runs for each pair, by following each column.

What depends on columns of the queries alone is computed once for a query. What depends on columns of the catalogue
alone is stored. The item's half of the first layer is applied before a row is stored.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Node
from torch.fx.node import map_arg

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.trace import (
    BOTH,
    CANDIDATE,
    QUERY,
    TABLES,
    Leaf,
    Trace,
    aten,
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


# Stands for infinity in a vector, which must be finite: beyond any number of a mask.
_INFINITY = 2.0**40
_TRIED = 4  # queries to find out by whether slopes are the query itself


class Part(nn.Module):
    """A part of the graph: from ``inputs``, in order, to one tensor.

    Args:
        split: the whole graph.
        results: the values that it computes.
        given: values that it begins with, or their leaves.

    Attributes:
        inputs: names of the inputs.
        examples: an example of each input.
        dynamic: the axes of any length of each input.
        weights: path in the whole network of each buffer, by its name.
        width: columns of the output; 0 for logits.
        leaves: how to fill the inputs; none of ``pairs``.
    """

    def __init__(
        self, split: GraphSplit, results: Sequence[Node], given: Sequence[Node]
    ) -> None:
        super().__init__()
        self.weights: dict[str, str] = {}
        self.leaves: list[Leaf] = []
        self.width = sum(map(_width, results))
        self._results = list(results)
        self._leaf_nodes: list[Node] = []
        self._weights: dict[Node, str] = {}
        self._nodes: list[Node] = []
        trace = split.trace
        begun = {*given, *trace.weights, *split.leaves}
        sized = aten.sym_size.int
        for node in trace.behind(
            results, lambda node: node in begun or node.target is sized
        ):
            if node in trace.weights:
                path = trace.weights[node]
                name = self._weights[node] = f"weight_{len(self.weights)}"
                self.weights[name] = path
                self.register_buffer(name, trace.numbers[path].detach().contiguous())
            elif node in given:
                continue
            elif node in split.leaves:
                self._leaf_nodes.append(node)
                self.leaves.append(split.leaves[node])
            else:
                self._nodes.append(node)
        self.inputs = [leaf.input for leaf in self.leaves]
        self.examples = tuple(leaf.example() for leaf in self.leaves)
        # Each side has a number of rows of its own.
        side = "candidate" if any(leaf.candidate for leaf in self.leaves) else "query"
        many = Dim(f"{side}_rows", min=2)
        self.dynamic: tuple[Any, ...] = tuple(leaf.axes(many) for leaf in self.leaves)

    def run(
        self, values: dict[Node, Any], rows: Any, single: Sequence[Node] = ()
    ) -> list[Tensor]:
        """Computes the results from ``values``, and adds to them; those in ``single`` have one row for all ``rows``."""
        for node, name in self._weights.items():
            values[node] = getattr(self, name)
        for node in self._nodes:
            if node.target is aten.sym_size.int:
                of: Any = node.args[0]
                axis: Any = node.args[1]
                many = of in single or of not in values
                values[node] = rows if many else values[of].shape[axis]
                continue
            found = {each: values[each] for each in node.all_input_nodes}
            for each in found:
                # Another input has all rows, and these functions take one row beside them.
                if each in single and node.target not in _BROADCAST:
                    found[each] = values[each].expand(rows, *values[each].shape[1:])
            function: Any = node.target
            arguments = map_arg(node.args, found.__getitem__)
            options = map_arg(node.kwargs, found.__getitem__)
            values[node] = function(*arguments, **options)
        return [values[node] for node in self._results]


class _Half(Part):
    """The values of one side, flattened side by side: (B, W).

    Args:
        split: the whole graph.
        results: the values.
        factor: number to multiply them with.
        ones: whether a column of ones follows, for the products' constant.
    """

    def __init__(
        self,
        split: GraphSplit,
        results: Sequence[Node],
        *,
        factor: float = 1.0,
        ones: bool = False,
    ) -> None:
        super().__init__(split, results, [])
        self._masks = split.masks
        self._factor = factor
        self._ones = ones
        self.width += ones

    def forward(self, *leaves: Tensor) -> Tensor:
        given = dict(zip(self._leaf_nodes, leaves, strict=True))
        results = self.run(given, leaves[0].shape[0])
        # In a shape of its own: an input cannot be an output.
        matrices = []
        for node, value in zip(self._results, results, strict=True):
            matrix = value.to(torch.float32).reshape(-1, _width(node))
            if node in self._masks:
                matrix = matrix.clamp(-_INFINITY, _INFINITY)
            matrices.append(matrix)
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)
        if self._factor != 1:
            matrix = matrix * self._factor
        if self._ones:
            matrix = torch.cat([matrix, torch.ones_like(matrix[:, :1])], 1)
        return matrix


class _Pairs(Part):
    """The logits (N,) of a query (1, Wq) and rows (N, Wc)."""

    def __init__(
        self, split: GraphSplit, query: Sequence[Node], candidate: Sequence[Node]
    ) -> None:
        super().__init__(split, [split.result], [*query, *candidate])
        self._query = query
        self._candidate = candidate
        self._masks = split.masks
        self._set_inputs(sum(map(_width, query)), sum(map(_width, candidate)))

    def _set_inputs(self, query: int, rows: int) -> None:
        self.width = 0
        self.leaves = []
        self.inputs = ["query", "rows"]
        self.examples = (torch.randn(1, query), torch.randn(3, rows))
        self.dynamic = ({}, {0: Dim("rows", min=2)})

    def forward(self, query: Tensor, rows: Tensor) -> Tensor:
        return self.logits(query, rows, self._query)

    def logits(
        self, query: Tensor, rows: Tensor, single: Sequence[Node] = ()
    ) -> Tensor:
        """Returns (N,) logits of queries (N, Wq), or of one for all rows if its values are ``single``."""
        nodes = [*self._query, *self._candidate]
        pieces = _pieces_of(query, self._query) + _pieces_of(rows, self._candidate)
        values = dict(zip(nodes, pieces, strict=True))
        for node in self._masks:
            infinite = values[node].abs() >= _INFINITY
            # Times infinity, so that it keeps its sign.
            values[node] = values[node] * torch.where(infinite, torch.inf, 1.0)
        (logits,) = self.run(values, rows.shape[0], single)
        return logits.reshape(-1)


class _Slopes(nn.Module):
    """A query's slope along each of the candidate's numbers, and its constant: (B, W).

    The logits are linear in the candidate's numbers: they are the logit of zeros, and the change of it with each number
    alone.
    """

    def __init__(self, half: Part, pairs: _Pairs) -> None:
        super().__init__()
        self.side = half
        self.pairs = pairs
        self.leaves, self.inputs = half.leaves, half.inputs
        self.examples, self.dynamic = half.examples, half.dynamic
        numbers = pairs.examples[1].shape[1]
        self.width = numbers + 1
        directions = torch.cat([torch.zeros(1, numbers), torch.eye(numbers)])
        self.register_buffer("directions", directions)

    def forward(self, *leaves: Tensor) -> Tensor:
        return self.of_query(self.side(*leaves))

    def of_query(self, query: Tensor) -> Tensor:
        """Returns (B, W) of the query's values (B, Wq)."""
        size = query.shape[0]
        several = query[:, None].expand(-1, self.width, -1).flatten(0, 1)
        rows = self.directions.repeat(size, 1)  # type: ignore[operator]
        logits = self.pairs.logits(several, rows).reshape(-1, self.width)
        constant = logits[:, :1]
        return torch.cat([logits[:, 1:] - constant, constant], 1)

    def factor(self) -> float | None:
        """Returns s if the slopes are s times the query's values, and the constant is 0; else None.

        It is tried, with random numbers. No weight may be part of it, since a renewal changes weights.
        """
        if self.pairs.weights:
            return None
        draw = torch.Generator().manual_seed(0)
        tried = torch.randn(_TRIED, self.pairs.examples[0].shape[1], generator=draw)
        with torch.no_grad():
            found = self.of_query(tried)
        slopes = found[:, :-1]
        if slopes.shape != tried.shape or bool(found[:, -1].any()):
            return None
        factor = float((slopes / tried).median())
        return factor if torch.allclose(slopes, factor * tried, rtol=1e-5) else None


class _Products(_Pairs):
    """The pairs of a product: the rows times the query."""

    def __init__(self, split: GraphSplit, width: int) -> None:
        Part.__init__(self, split, [], [])
        self._set_inputs(width, width)

    def forward(self, query: Tensor, rows: Tensor) -> Tensor:
        return (rows @ query.T).reshape(-1)


def _pieces_of(matrix: Tensor, nodes: Sequence[Node]) -> list[Tensor]:
    """Cuts a matrix into the values that were flattened to it."""
    parts: Sequence[Tensor] = [matrix]
    if len(nodes) > 1:
        parts = torch.split(matrix, list(map(_width, nodes)), 1)
    pieces = []
    for node, piece in zip(nodes, parts, strict=True):
        value = node.meta["val"]
        if value.dim() != 2:
            piece = piece.reshape(-1, *value.shape[1:])
        if value.dtype == torch.bool:
            piece = piece > 0.5
        pieces.append(piece.to(value.dtype))
    return pieces


class GraphSplit:
    """A network in three parts, together equal to its forward.

    Args:
        model: module in evaluation whose forward takes a dict of leaves by name and returns logits (B,) or (B, 1).
        leaves: its inputs.

    Attributes:
        inputs: the leaves of ``model``.
        query: part from the query's leaves to (B, Wq).
        candidate: part from the candidate's leaves to stored rows (B, Wc).
        pairs: part from ``query`` (1, Wq) and ``rows`` (N, Wc) to logits (N,).
        product: whether the logits are the products of queries and rows.

    Raises:
        BundleError: forward cannot be traced or cut; the message names the line and the remedy.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[Leaf]) -> None:
        self.inputs = leaves
        self.trace = trace = Trace(model, leaves)
        self.graph = trace.graph
        self.leaves = trace.leaves
        self.side = trace.side
        self.result = trace.result
        self._check_sides()
        behind = trace.behind([self.result], lambda node: self.side(node) != BOTH)
        self.pairwise = [node for node in behind if self.side(node) == BOTH]
        self.frontier = self._crossing()
        self.masks = self._masks()
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
        side = self.side(self.result)
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
        behind = self.trace.behind([node], lambda _: False)
        names = {self.leaves[each].column for each in behind if each in self.leaves}
        return listed(f"'{name}'" for name in sorted(names))

    def _of_ids(self, node: Node) -> bool:
        """Whether a value is computed from ids, which a row of float32 cannot hold; a mask of them is none."""
        if node.meta["val"].dtype == torch.bool:
            return False
        behind = self.trace.behind([node], lambda each: not is_whole(each))
        leaves = [self.leaves[each] for each in behind if each in self.leaves]
        return any(leaf.kind == "column" and leaf.dtype == "int64" for leaf in leaves)

    def _crossing(self) -> list[Node]:
        """Returns the values of one side that the pairwise nodes read, the query's first."""
        crossing: dict[Node, None] = {}
        for node in self.pairwise:
            for each in node.all_input_nodes:
                if self.side(each) in (QUERY, CANDIDATE):
                    crossing[each] = None
        ordered = sorted(crossing, key=self.side)
        for node in ordered:
            self._check_crossing(node)
        return ordered

    def _check_crossing(self, node: Node) -> None:
        value = node.meta["val"]
        candidates = [node, *node.users, *self.pairwise]
        line = next(filter(None, map(line_of, candidates)), "")
        table = "catalogue" if self.side(node) == CANDIDATE else "queries"
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

    def _masks(self) -> list[Node]:
        """Returns the crossing values that may hold a constant infinity, as a mask of attention does."""
        infinite = {
            node
            for node, path in self.trace.weights.items()
            if bool(self.trace.numbers[path].isinf().any())
        }
        for node in self.graph.nodes:
            if any(isinstance(each, float) and math.isinf(each) for each in node.args):
                infinite.add(node)
        masks = []
        for node in self.frontier:
            behind = self.trace.behind([node], lambda _: False)
            if node.meta["val"].is_floating_point() and not infinite.isdisjoint(behind):
                masks.append(node)
        return masks

    # Products

    def _not_linear(self) -> Node | None:
        """Returns the first function for pairs that is not linear in the candidate's values; None if all are."""
        for node in self.pairwise:
            moving = [
                place
                for place, each in enumerate(node.args)
                if isinstance(each, Node) and self.side(each) & CANDIDATE
            ]
            linear = node.target in _LINEAR
            linear = linear or (node.target in _BILINEAR and len(moving) == 1)
            linear = linear or (node.target in _FIRST and moving == [0])
            if node.target is aten._to_copy.default:
                linear = node.meta["val"].is_floating_point()
            if not linear or node.meta.get("val") is None:
                return node
        return None

    # Parts

    def _build(self) -> None:
        query = [node for node in self.frontier if self.side(node) == QUERY]
        candidate = [node for node in self.frontier if self.side(node) == CANDIDATE]
        self.query: Part | _Slopes = _Half(self, query)
        self.candidate: Part = _Half(self, candidate)
        pairs = _Pairs(self, query, candidate)
        self.pairs: Part = pairs
        if not self.product:
            return
        slopes = _Slopes(self.query, pairs)
        factor = slopes.factor()
        if factor is not None:
            self.query = _Half(self, query, factor=factor)
        else:
            self.query = slopes
            self.candidate = _Half(self, candidate, ones=True)
        self.pairs = _Products(self, self.query.width)


def _width(node: Node) -> int:
    return int(torch.Size(node.meta["val"].shape[1:]).numel())
