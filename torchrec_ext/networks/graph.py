"""trace(): forward and backward of K members as one graph of kernels, by vmap over a skeleton.

rewrite(): replaces the many kernels over whole matrices that vmap and autograd produce by few.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_ext.networks.skeleton import Skeleton, batch_from_tensors

_aten = torch.ops.aten


def rewrite(graph: GraphModule) -> GraphModule:
    """Rewrites ``graph`` in place for fewer kernels with the same results, and returns it.

    Columns are no longer joined and split again. The gradient of a split is a concatenation, not a sum of zero-padded
    matrices. Rows are selected, and their gradients added, row by row, not number by number. A bias is added inside the
    product. Every node keeps the ``val`` of its meta, with its shape.
    """
    # Each takes what those before it leave: only a slice of the whole is a no-op, and
    # only slices have gradients that are concatenated.
    for change in (
        _slice_split,
        _remove_no_ops,
        _concatenate_gradients,
        _slice_concatenation,
        _remove_no_ops,
        _select_rows,
        _add_rows,
        _fuse_bias,
        _outer_product,
    ):
        for node in list(graph.graph.nodes):
            if node.op == "call_function":
                change(node)
        graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _axis(node: Any, index: int) -> Any:
    """Returns the axis of a split or concatenation, its argument number ``index``; left out, it is 0."""
    if len(node.args) > index:
        return node.args[index]
    return 0


def _shape(node: Any) -> list[int]:
    return list(node.meta["val"].shape)


def _replace(node: Any, target: Any, *args: Any) -> None:
    """Replaces ``node`` by ``target(*args)``."""
    with node.graph.inserting_before(node):
        new_node = node.graph.call_function(target, args)
    new_node.meta = dict(node.meta)
    node.replace_all_uses_with(new_node)


def _insert(before: Node, target: Any, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        new_node = before.graph.call_function(target, args)
    # On fake tensors, for the shape alone.
    values = []
    for arg in args:
        if isinstance(arg, Node):
            arg = arg.meta["val"]
        values.append(arg)
    new_node.meta["val"] = target(*values)
    return new_node


def _remove_no_ops(node: Any) -> None:
    """Removes views of the same shape, aliases, and factors of 1."""
    views = (
        _aten.view.default,
        _aten.expand.default,
        _aten._unsafe_view.default,
        _aten.slice.Tensor,
    )
    is_alias = node.target in (_aten.alias.default, _aten.detach.default)
    is_full_view = node.target in views and _shape(node) == _shape(node.args[0])
    is_factor_of_one = node.target is _aten.mul.Scalar and node.args[1] == 1
    if is_alias or is_full_view or is_factor_of_one:
        node.replace_all_uses_with(node.args[0])
    elif node.target is _aten.transpose.int:
        # Two transpositions of the same axes.
        inner: Any = node.args[0]
        if (
            inner.op == "call_function"
            and inner.target is _aten.transpose.int
            and inner.args[1:] == node.args[1:]
        ):
            node.replace_all_uses_with(inner.args[0])


def _slice_split(node: Any) -> None:
    """Replaces a piece of a split by a slice."""
    if (
        node.target is not operator.getitem
        or node.args[0].target is not _aten.split_with_sizes.default
    ):
        return
    source, sizes = node.args[0].args[:2]
    dim = _axis(node.args[0], 2)
    start = sum(sizes[: node.args[1]])
    stop = start + sizes[node.args[1]]
    _replace(node, _aten.slice.Tensor, source, dim % len(_shape(source)), start, stop)


def _concatenate_gradients(node: Any) -> None:
    """Replaces the sum of the padded gradients of all pieces of a matrix by their concatenation."""
    if node.target is not _aten.add.Tensor:
        return
    leaves: list[Any] = list(_leaves(node))
    if len(leaves) < 2 or any(
        leaf.target is not _aten.slice_backward.default for leaf in leaves
    ):
        return
    # slice_backward(gradient, sizes, dim, start, end, step): zeros of `sizes` but for
    # the piece.
    sizes, dim = leaves[0].args[1:3]
    if any(leaf.args[1:3] != (sizes, dim) or leaf.args[5] != 1 for leaf in leaves):
        return
    leaves.sort(key=lambda leaf: leaf.args[3])
    starts = [leaf.args[3] for leaf in leaves]
    ends = [min(leaf.args[4], sizes[dim]) for leaf in leaves]
    # The pieces must cover the matrix, without a gap and without an overlap.
    if starts == [0, *ends[:-1]] and ends[-1] == sizes[dim]:
        _replace(node, _aten.cat.default, [leaf.args[0] for leaf in leaves], dim)


def _leaves(node: Any) -> Iterable[Node]:
    if (
        node.op == "call_function"
        and node.target is _aten.add.Tensor
        and not node.kwargs
    ):
        for term in node.args[:2]:
            if isinstance(term, Node):
                yield from _leaves(term)
    else:
        yield node


def _slice_concatenation(node: Any) -> None:
    """Replaces columns cut from a concatenation by their source, and leaves out parts of width 0."""
    if node.target is _aten.cat.default:
        dim = _axis(node, 1)
        parts = [piece for piece in node.args[0] if _shape(piece)[dim]]
        if len(parts) == 1:
            node.replace_all_uses_with(parts[0])
        elif len(parts) < len(node.args[0]):
            node.args = (parts, dim)
        return
    if node.target is not _aten.slice.Tensor:
        return
    source: Any = node.args[0]
    if source.op != "call_function" or source.target is not _aten.cat.default:
        return
    # slice(source, dim, start, stop, step); without a step it is 1.
    dim, start, stop = node.args[1:4]
    if len(node.args) > 4 or _axis(source, 1) != dim:
        return
    stop = min(stop, _shape(source)[dim])
    offset = 0
    pieces = []
    for piece in source.args[0]:
        width = _shape(piece)[dim]
        # The slice lies inside one piece: it is a slice of this piece.
        if width and start >= offset and stop <= offset + width:
            _replace(
                node, _aten.slice.Tensor, piece, dim, start - offset, stop - offset
            )
            return
        if width and start <= offset and offset + width <= stop:
            pieces.append(piece)
        offset += width
    # The slice is a row of whole pieces: it is their concatenation.
    if pieces and sum(_shape(piece)[dim] for piece in pieces) == stop - start:
        _replace(node, _aten.cat.default, pieces, dim)


def _index_per_member(indices: Any) -> Any:
    """Returns the index of ``[arange over members, index]`` or ``[None, index]``, else None."""
    if len(indices) != 2 or not isinstance(indices[1], Node):
        return None
    first, index = indices
    axes = len(_shape(index))
    # One index for all members, as of a batch that they share.
    if first is None and axes == 1:
        return index
    if (
        first is None
        or first.op != "call_function"
        or first.target is not _aten.unsqueeze.default
    ):
        return None
    counts_members = first.args[0].target is _aten.arange.default
    if counts_members and axes == 2:
        return index
    return None


def _index_in_flat_rows(before: Node, indices: Any, rows: int) -> Node:
    """Returns (K x B,), each member's index shifted to its own ``rows``; all users share one node."""
    members, index = indices
    by_rows: dict[int, Node] = index.meta.setdefault("moved", {})
    if rows not in by_rows:
        sums = _insert(
            before,
            _aten.add.Tensor,
            _insert(before, _aten.mul.Tensor, members, rows),
            index,
        )
        by_rows[rows] = _insert(before, _aten.view.default, sums, [-1])
    return by_rows[rows]


def _select_rows(node: Any) -> None:
    if node.target is not _aten.index.Tensor:
        return
    index = _index_per_member(node.args[1])
    if index is None:
        return
    source: Any = node.args[0]
    if len(_shape(index)) == 1:
        _replace(node, _aten.index_select.default, source, 1, index)
        return
    members, rows, *rest = _shape(source)
    flat = _insert(node, _aten.reshape.default, source, [members * rows, *rest])
    picked = _insert(
        node,
        _aten.index_select.default,
        flat,
        0,
        _index_in_flat_rows(node, node.args[1], rows),
    )
    _replace(node, _aten.view.default, picked, _shape(node))


def _add_rows(node: Any) -> None:
    # Without the fourth argument the values replace the rows and are not added.
    if node.target is not _aten.index_put.default or len(node.args) < 4:
        return
    index = _index_per_member(node.args[1])
    if index is None:
        return
    zeros: Any = node.args[0]
    values: Any = node.args[2]
    if zeros.target not in (_aten.new_zeros.default, _aten.zeros.default):
        return
    if len(_shape(index)) == 1:
        _replace(node, _aten.index_add.default, zeros, 1, index, values)
        return
    members, rows, *rest = _shape(node)
    flat = _insert(node, _aten.view.default, zeros, [members * rows, *rest])
    gradients = _insert(node, _aten.reshape.default, values, [-1, *rest])
    added = _insert(
        node,
        _aten.index_add_.default,
        flat,
        0,
        _index_in_flat_rows(node, node.args[1], rows),
        gradients,
    )
    _replace(node, _aten.view.default, added, _shape(node))


def _fuse_bias(node: Any) -> None:
    if node.target is not _aten.add.Tensor or node.kwargs:
        return
    bias, product = node.args[:2]
    if not isinstance(bias, Node) or not isinstance(product, Node):
        return
    # A product that others read as well would be computed twice.
    is_own_product = product.target is _aten.bmm.default and len(product.users) == 1
    if (
        is_own_product
        and bias.target is _aten.view.default
        and len(_shape(bias)) == 3
        and _shape(bias)[1] == 1
    ):
        _replace(node, _aten.baddbmm.default, bias, *product.args)


def _outer_product(node: Any) -> None:
    """Replaces a matrix product over an axis of one element by an elementwise one."""
    if node.target is _aten.bmm.default and _shape(node.args[0])[2] == 1:
        _replace(node, _aten.mul.Tensor, *node.args)


class Inputs(NamedTuple):
    """The input tensors of a step of K members, member after member in the first axis.

    Args:
        dense: dense weights, in the order of the skeleton's.
        paths: paths of the collections.
        pooled: pooled bags of each collection.
        fields: tensors of the batches by name; without the first axis if ``shared``.
        noise: noise of each dropout layer; empty if no member has dropout.
        peers: logits of stale peers, (K, P, B), and weight of codistillation, (K,); empty without peers.
        shared: whether all members read one batch.
    """

    dense: list[Tensor]
    paths: list[str]
    pooled: list[list[Tensor]]
    fields: dict[str, Tensor]
    noise: list[Tensor]
    peers: list[Tensor]
    shared: bool

    def flat(self) -> list[Tensor]:
        """Returns all tensors, in order."""
        return [*self.dense, *chain.from_iterable(self.pooled), *self.rest()]

    def rest(self) -> list[Tensor]:
        """Returns all tensors but weights and look-ups."""
        return [*self.fields.values(), *self.noise, *self.peers]

    def rows(self) -> Tensor:
        """Returns each member's number of rows with a weight, (K,) int64."""
        return weighted_rows(self.fields, len(self.dense[0]))

    def shapes(self) -> tuple[object, ...]:
        """Returns the shapes a graph is traced for."""
        fields = [(name, value.shape) for name, value in self.fields.items()]
        return (
            self.shared,
            *fields,
            bool(self.noise),
            *(tensor.shape for tensor in self.peers),
        )


def weighted_rows(fields: Mapping[str, Tensor], members: int) -> Tensor:
    """Counts the rows of each of K members with a weight above 0, (K,) int64."""
    return (fields["weights"] > 0).sum(dim=-1).expand(members)


def trace(skeleton: Skeleton, inputs: Inputs) -> GraphModule:
    """Traces ``inputs.flat()`` to loss (K,), logits (K, B), and the gradient of each dense weight and pooled bag."""
    graph = make_fx(_step(skeleton, inputs), tracing_mode="fake")(*inputs.flat())
    graph.graph.eliminate_dead_code()
    return rewrite(graph)


def trace_logits(skeleton: Skeleton, inputs: Inputs) -> GraphModule:
    """Traces ``inputs.flat()`` to the logits (K, B) in evaluation."""
    skeleton.learner.eval()
    try:
        each = vmap(_loss(skeleton, inputs), in_dims=_over_members(inputs))

        def logits(*tensors: Tensor) -> Tensor:
            return each(*_parts(inputs, tensors))[1]

        graph = make_fx(logits, tracing_mode="fake")(*inputs.flat())
    finally:
        skeleton.learner.train()
    graph.graph.eliminate_dead_code()
    return rewrite(graph)


def leave_out_constants(graph: GraphModule, names: Sequence[str]) -> list[str]:
    """Removes the outputs, after the first, without any input of the graph; returns the names of the others."""
    output = graph.graph.output_node()
    outputs: Any = output.args[0]
    first, *values = outputs
    reading: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or not reading.isdisjoint(node.all_input_nodes):
            reading.add(node)
    # Nodes are in order, so those before it have been looked at.
    variable_outputs = {
        name: value
        for name, value in zip(names, values, strict=True)
        if value in reading
    }
    output.args = ([first, *variable_outputs.values()],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return list(variable_outputs)


_Loss = Callable[
    [list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
    tuple[Tensor, Tensor],
]


def _loss(skeleton: Skeleton, inputs: Inputs) -> _Loss:
    """Returns a function from one member's parts of ``inputs`` to loss and logits."""
    counts = [len(bags) for bags in inputs.pooled]

    def loss(
        weights: list[Tensor],
        pooled: list[Tensor],
        fields: list[Tensor],
        noise: list[Tensor],
        peers: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        rest = iter(pooled)
        by_path = {}
        for path, count in zip(inputs.paths, counts, strict=True):
            by_path[path] = list(islice(rest, count))
        with skeleton.holding(by_path, noise) as learner:
            batch = batch_from_tensors(dict(zip(inputs.fields, fields, strict=True)))
            parameters = dict(zip(skeleton.parameters, weights, strict=True))
            return functional_call(learner, parameters, (batch, *peers))  # type: ignore[no-any-return]

    return loss


def _over_members(inputs: Inputs) -> tuple[int | None, ...]:
    """Returns the axis of the members in each part of the inputs, in the order of :func:`_parts`."""
    axis_of_fields: int | None = 0
    # vmap passes a batch that all members read as it is, without a copy for each.
    if inputs.shared:
        axis_of_fields = None
    return (0, 0, axis_of_fields, 0, 0)


def _parts(inputs: Inputs, tensors: tuple[Tensor, ...]) -> list[list[Tensor]]:
    pooled_count = sum(map(len, inputs.pooled))
    # In the order of Inputs.flat().
    counts = [
        len(inputs.dense),
        pooled_count,
        len(inputs.fields),
        len(inputs.noise),
        len(inputs.peers),
    ]
    rest = iter(tensors)
    return [list(islice(rest, count)) for count in counts]


def _step(skeleton: Skeleton, inputs: Inputs) -> Callable[..., list[Tensor]]:
    each = vmap(
        grad_and_value(_loss(skeleton, inputs), argnums=(0, 1), has_aux=True),
        in_dims=_over_members(inputs),
    )

    def step(*tensors: Tensor) -> list[Tensor]:
        (of_weights, of_pooled), (loss, logits) = each(*_parts(inputs, tensors))
        return [loss, logits, *of_weights, *of_pooled]

    return step
