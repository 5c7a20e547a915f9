"""GraphSplit: cuts a network into a query half, a candidate half and what runs for each pair, by following each column.

What depends on columns of the queries alone is computed once for a query. What depends on columns of the catalogue
alone is stored. The item's half of the first layer is applied before a row is stored.
"""

from __future__ import annotations

import math
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
# Functions by which a product of query and row may be written: polynomials, and quotients, so that random numbers tell
# whether they are one.
_ALGEBRA = {
    *_BROADCAST,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.sum.dim_IntList,
    aten.neg.default,
    aten.bmm.default,
    aten.mm.default,
    aten.matmul.default,
}
# Stands for infinity in a vector, which must be finite: beyond any number of a mask.
_INFINITY = 2.0**40
_TRIED = 4  # pairs of random numbers that tell a product


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
    """

    def __init__(
        self,
        split: GraphSplit,
        results: Sequence[Node],
        *,
        factor: float = 1.0,
    ) -> None:
        super().__init__(split, results, [])
        self._masks = split.masks
        self._factor = factor

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
        nodes = [*self._query, *self._candidate]
        pieces = _pieces_of(query, self._query) + _pieces_of(rows, self._candidate)
        values = dict(zip(nodes, pieces, strict=True))
        for node in self._masks:
            infinite = values[node].abs() >= _INFINITY
            # Times infinity, so that it keeps its sign.
            values[node] = values[node] * torch.where(infinite, torch.inf, 1.0)
        (logits,) = self.run(values, rows.shape[0], self._query)
        return logits.reshape(-1)


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
        self._build()

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

    # Parts

    def _build(self) -> None:
        query = [node for node in self.frontier if self.side(node) == QUERY]
        candidate = [node for node in self.frontier if self.side(node) == CANDIDATE]
        self.query: Part = _Half(self, query)
        self.candidate: Part = _Half(self, candidate)
        pairs = _Pairs(self, query, candidate)
        self.pairs: Part = pairs
        factor = self._factor(pairs)
        self.product = factor is not None
        if factor is not None:
            self.query = _Half(self, query, factor=factor)
            self.pairs = _Products(self, self.query.width)

    @torch.no_grad()
    def _factor(self, pairs: _Pairs) -> float | None:
        """Returns s if the logits are s times the product of query and row; else None.

        It is tried, with random numbers. No weight may be part of it, since a renewal changes weights.
        """
        targets = {node.target for node in self.pairwise}
        width = self.query.width
        if pairs.weights or width != self.candidate.width or targets - _ALGEBRA:
            return None
        draw = torch.Generator().manual_seed(0)
        # One number of both alone gives the factor to the last digit. Small and large
        # numbers tell a constant and a higher power from a product.
        first = torch.eye(1, width)
        sizes = torch.logspace(-2, 2, _TRIED)[:, None]
        queries, rows = (
            torch.cat([first, sizes * torch.randn(_TRIED, width, generator=draw)])
            for _ in range(2)
        )
        logits = torch.stack([pairs(query[None], rows) for query in queries])
        factor = float(logits[0, 0])
        norms = torch.outer(queries.norm(dim=1), rows.norm(dim=1))
        errors = (logits - factor * queries @ rows.T).abs()
        is_product = bool((errors <= 1e-5 * abs(factor) * norms).all())
        return factor if is_product else None


def _width(node: Node) -> int:
    return int(torch.Size(node.meta["val"].shape[1:]).numel())
