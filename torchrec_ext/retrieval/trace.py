"""Trace: forward as a graph of torch's operators, rewritten so that as much as possible depends on one side alone.

torch.export records forward. Look-ups of plain columns become leaves, so that their tables stay outside. Linear layers
and element-wise functions are moved through concatenations.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torchrec
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from torchrec_ext.retrieval.manifest import BundleError

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
_MAX = 2  # torch's number of an EmbeddingBag's mode
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
        length: ids of each bag in training; None for any number.
        padding: row of the table that fills shorter bags up, and is not pooled; None if there is none.
    """

    name: str
    kind: Literal["column", "rows", "pooled", "lengths"]
    column: str
    candidate: bool
    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    table: str = ""
    pooling: str = ""
    length: int | None = None
    padding: int | None = None

    @property
    def input(self) -> str:
        """Name of the graph's input; no other value of any graph has it."""
        return f"{'candidate' if self.candidate else 'query'}.{self.name}"

    def as_json(self) -> dict[str, Any]:
        """Returns the manifest's entry."""
        values = {**vars(self), "input": self.input, "shape": list(self.shape)}
        left_out = {"name", "candidate"}
        # No entry for None, so that the digests of networks without bags of their own stay.
        left_out |= {key for key in values if values[key] is None}
        return {key: values[key] for key in values if key not in left_out}

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


class Trace:
    """The graph of a forward from leaves to logits (B,) or (B, 1).

    Args:
        model: module in evaluation whose forward takes a dict of leaves by name.
        leaves: its inputs.
        examples: values to trace with, by name; by default small ones.

    Attributes:
        graph: the rewritten graph.
        leaves: inputs and look-ups of plain columns, by node.
        tables: path of the weight of each table that is looked up outside the graph.
        constant: nodes that only weights decide.

    Raises:
        BundleError: forward cannot be traced; the message names the line and the remedy.
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
        self._sides: dict[Node, int] = {}
        self._check_result()
        self._look_ups()
        self._rewrite()
        self._sides = self._follow()
        self.constant = self._constants()

    @property
    def result(self) -> Node:
        """The logits."""
        result: Any = self.graph.output_node().args[0]
        return result[0]  # type: ignore[no-any-return]

    def numbers(self, weights: Mapping[str, Tensor]) -> dict[Node, Tensor]:
        """Computes every constant of the graph from weights by path."""
        values: dict[Node, Tensor] = {}
        for node in self.graph.nodes:
            if node not in self.constant:
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

    def side(self, node: Node) -> int:
        """Returns which columns a value depends on: the query's, the candidate's, both or neither."""
        return self._sides.get(node, NEITHER)

    def _follow(self) -> dict[Node, int]:
        """Returns for each node the sides that its value depends on; the number of rows is of neither."""
        sides: dict[Node, int] = {}
        for node in self.graph.nodes:
            leaf = self.leaves.get(node)
            if leaf is not None:
                sides[node] = CANDIDATE if leaf.candidate else QUERY
            elif node.op == "placeholder" or is_size(node):
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

    def behind(
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
        """Makes look-ups of plain columns leaves, so that their tables stay outside the graphs."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and _is_nothing(node):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
            elif node.target in (aten.view.default, aten._unsafe_view.default):
                # Without copies that only made a tensor contiguous.
                node.target = aten.reshape.default
        for node in list(self.graph.nodes):
            if "embedding_bag" in str(node.target):
                self._replace_bag(node)
        found: dict[tuple[Node, Node], Node] = {}
        for node in list(self.graph.nodes):
            if node.target is not aten.embedding.default:
                continue
            ids: Any
            weight: Any
            weight, ids = node.args[:2]
            leaf = self.leaves.get(ids)
            is_table = weight in self._paths
            if not is_table or weight.meta["val"].dtype != torch.float32:
                leaf = None
            if leaf is None:
                self._refuse_negative(node, ids)
                continue
            if (weight, ids) in found:
                node.replace_all_uses_with(found[weight, ids])
                continue
            found[weight, ids] = node
            table = self._table(weight)
            self.leaves[node] = Leaf(
                name=f"{leaf.column}@{table}",
                kind="rows",
                column=leaf.column,
                candidate=leaf.candidate,
                shape=(*leaf.shape, weight.meta["val"].shape[1]),
                table=table,
            )

    def _refuse_negative(self, node: Any, ids: Any) -> None:
        """Makes negative ids in a graph too large, since ONNX's look-up would count them from the last row."""
        behind = self.behind([ids], lambda _: True)
        if self.leaves.keys().isdisjoint(behind):
            return
        with self.graph.inserting_before(node):
            wrong = self._call(node, aten.lt.Scalar, ids, 0)
            most = torch.iinfo(ids.meta["val"].dtype).max
            checked = self._call(node, aten.masked_fill.Scalar, ids, wrong, most)
        node.update_arg(1, checked)

    def _replace_bag(self, node: Any) -> None:
        """Makes a bag of a plain column a leaf; of other ids, pools the rows that an embedding looks up.

        ONNX's own form of a bag is a loop over a sequence, on which ONNX Runtime ends the process.
        """
        weight, flat, offsets, _, mode, _, weights, _, padding = node.args
        # What torch makes of ids (B, L); any other offsets are the caller's own.
        is_matrix = (
            flat.target is aten.reshape.default
            and offsets.target is aten.arange.start_step
            and (0, *flat.args[0].meta["val"].shape[1:]) == offsets.args[::2]
        )
        if not is_matrix or mode == _MAX:
            raise BundleError(
                f"model: forward{line_of(node)}: an EmbeddingBag with {'mode=max' if is_matrix else 'offsets'} cannot "
                "be exported; give it ids (B, L) without offsets, mode sum or mean, or pool an nn.Embedding"
            )
        (pooled,) = node.users  # the sums, not the other results
        ids = flat.args[0]
        leaf = self.leaves.get(ids)
        is_table = weight in self._paths and weight.meta["val"].dtype == torch.float32
        if leaf is not None and is_table and weights is None:
            table = self._table(weight)
            pooling = "mean" if mode else "sum"
            bag = dataclasses.replace(
                leaf,
                name=f"{pooling} of {leaf.column}@{table} without {padding}",
                kind="pooled",
                shape=(weight.meta["val"].shape[1],),
                dtype="float32",
                table=table,
                pooling=pooling,
                length=leaf.shape[0],
                padding=padding,
            )
            for node, known in self.leaves.items():
                if known == bag:
                    pooled.replace_all_uses_with(node)
                    return
            self.leaves[pooled] = bag
            return
        with self.graph.inserting_before(node):
            new = self._pooled(node, weight, ids, weights, padding, mean=bool(mode))
        pooled.replace_all_uses_with(new)

    def _pooled(
        self,
        like: Node,
        weight: Any,
        ids: Any,
        weights: Any,
        padding: Any,
        *,
        mean: bool,
    ) -> Node:
        """Adds nodes for the sums or means of rows of a table, by ids (B, L); ``weights`` is of (B x L) or None."""
        rows = self._call(like, aten.embedding.default, weight, ids)
        if weights is None and padding is None:
            pool = aten.mean.dim if mean else aten.sum.dim_IntList
            return self._call(like, pool, rows, [1])
        if weights is not None:
            size = ids.meta["val"].shape[1]
            shares = self._call(like, aten.reshape.default, weights, [-1, size])
        if padding is not None:
            stays = self._call(like, aten.ne.Scalar, ids, padding)
            stays = self._call(like, aten._to_copy.default, stays, dtype=torch.float32)
            if weights is not None:
                stays = self._call(like, aten.mul.Tensor, shares, stays)
            shares = stays
        column = self._call(like, aten.unsqueeze.default, shares, 2)
        rows = self._call(like, aten.mul.Tensor, rows, column)
        total = self._call(like, aten.sum.dim_IntList, rows, [1])
        if not mean:
            return total
        count = self._call(like, aten.sum.dim_IntList, shares, [1], True)
        count = self._call(like, aten.clamp_min.default, count, 1)
        return self._call(like, aten.div.Tensor, total, count)

    def _table(self, weight: Node) -> str:
        """Notes a table that is looked up outside of the graphs, and returns its name."""
        path = self._paths[weight]
        table = path.removeprefix("model.").removesuffix(".weight")
        self.tables[table] = path
        return table

    def _rewrite(self) -> None:
        changed = True
        while changed:
            changed = False
            self._sides = self._follow()
            for node in list(self.graph.nodes):
                if node.op != "call_function" or self.side(node) != BOTH:
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
            self._sides[node] |= self.side(each)
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
        """Applies a linear layer to the query's, the candidate's and the other pieces, and adds the results."""
        weight, *bias = node.args[1:]
        if self.side(weight) != NEITHER:
            return None
        groups: dict[int, list[tuple[Node, Node]]] = {}
        start = 0
        for piece in _pieces(source):
            stop = start + piece.meta["val"].shape[-1]
            columns = self._call(node, aten.slice.Tensor, weight, 1, start, stop)
            groups.setdefault(self.side(piece), []).append((piece, columns))
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
