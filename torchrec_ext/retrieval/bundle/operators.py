"""Operators: the operators allowed in a program, each safe for tensors of any shape and any values.

Most of torch's operators check the shapes of their arguments. This file checks the others before they run, and limits
the length of results that are lists.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
_SIZES = {
    "size_add": operator.add,
    "size_sub": operator.sub,
    "size_mul": operator.mul,
    "size_div": operator.floordiv,
}


def _operators() -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {"item": operator.getitem, **_SIZES}
    for name in _ATEN.split():
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if function is not None:  # a release of torch may lack one
            functions[name] = function
    return functions


OPERATORS: Mapping[str, Callable[..., Any]] = _operators()
# Options for a tensor's device and memory; no program has them.
PLACES = ("device", "layout", "pin_memory", "memory_format")
_MOST_PIECES = (
    4096  # most tensors returned by one operator, and most steps of a recurrent one
)
_LARGEST_SIZE = 2**48
_GATES = {"lstm.input": 4, "gru.input": 3, "rnn_relu.input": 1, "rnn_tanh.input": 1}


def run_operator(
    name: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Checks and runs an operator of :data:`OPERATORS`.

    Raises:
        ValueError: the arguments would make the operator read foreign memory, or return too long a list.
        Exception: any error of the operator itself.
    """
    check = _CHECKS.get(name)
    if check is not None:
        check(name, *arguments, **options)
    result = OPERATORS[name](*arguments, **options)
    if name.startswith("embedding_bag."):
        # The other results are for gradients, and may be uninitialised.
        return result[:1]
    return result


def _check_size(name: str, *sizes: Any) -> None:
    for size in sizes:
        if type(size) is not int or abs(size) > _LARGEST_SIZE:
            raise ValueError(
                f"{type(size).__name__} {str(size)[:40]} is not a size; must be at most {_LARGEST_SIZE:,}"
            )


def _check_unbind(name: str, values: Tensor, dim: int = 0) -> None:
    _check_pieces(name, values, 1, dim)


def _check_pieces(
    name: str, values: Tensor, size: int | Sequence[int], dim: int = 0
) -> None:
    if isinstance(size, Sequence):
        pieces = len(size)
    elif name == "chunk.default":
        pieces = size
    else:
        pieces = values.shape[dim] // max(1, size)
    if pieces > _MOST_PIECES:
        raise ValueError(
            f"{pieces:,} pieces of {tuple(values.shape)}; must be at most {_MOST_PIECES:,}"
        )


def _check_batch_norm(
    name: str,
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *_: Any,
) -> None:
    channels = values.shape[1]
    for what, each in (
        ("weight", weight),
        ("bias", bias),
        ("running mean", mean),
        ("running variance", var),
    ):
        if each is not None and (
            tuple(each.shape) != (channels,) or each.dtype != values.dtype
        ):
            raise ValueError(
                f"{what} is {tuple(each.shape)} {each.dtype}, must be ({channels},) {values.dtype}, one a channel"
            )


def _check_recurrent(
    name: str,
    values: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    """Refuses wrong shapes, because the operator reads beyond the end of a short weight."""
    if values.dim() != 3:
        raise ValueError(
            f"the sequence is {tuple(values.shape)}, must have 3 dimensions"
        )
    steps, rows, inputs = values.shape
    if batch_first:
        rows, steps, inputs = values.shape
    directions = 2 if bidirectional else 1
    states = [state] if isinstance(state, Tensor) else list(state)
    if not 0 < steps <= _MOST_PIECES:
        raise ValueError(
            f"a sequence of {steps:,} steps; must be 1 to {_MOST_PIECES:,}"
        )
    # An LSTM has a cell state too.
    expected_states = 2 if name == "lstm.input" else 1
    if len(states) != expected_states:
        raise ValueError(f"{len(states)} states for {name}")
    width = states[0].shape[-1] if states[0].dim() else 0
    gates = _GATES[name] * width
    layer_shapes: list[tuple[int, ...]] = [(gates, 0), (gates, width)]
    if biased:
        layer_shapes += [(gates,), (gates,)]
    expected: list[tuple[int, ...]] = [(layers * directions, rows, width)] * len(states)
    if len(weights) != layers * directions * len(layer_shapes):
        raise ValueError(
            f"{len(weights)} weights, must be {layers * directions * len(layer_shapes)} for {layers} layers"
        )
    for _ in range(layers):
        expected += [(gates, inputs), *layer_shapes[1:]] * directions
        # Every further layer reads both directions of the one below it.
        inputs = width * directions
    for each, shape in zip([*states, *weights], expected, strict=True):
        if tuple(each.shape) != shape or each.dtype != values.dtype:
            raise ValueError(
                f"a weight or state is {tuple(each.shape)} {each.dtype}, must be {shape} {values.dtype}"
            )


def _check_bags(
    name: str,
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last: bool = False,
    *_: Any,
) -> None:
    """Refuses bags with an end before their begin or beyond the ids, because the operator would read beyond the ids."""
    if table.dim() != 2 or ids.dim() != 1 or offsets.dim() != 1 or not len(offsets):
        shapes = [tuple(each.shape) for each in (table, ids, offsets)]
        raise ValueError(
            f"table, ids and offsets are {shapes}, must be (N, D), (V,) and (B,) with B of 1 or more"
        )
    if not {ids.dtype, offsets.dtype} <= {torch.int64, torch.int32}:
        raise ValueError(
            f"ids are {ids.dtype} and offsets {offsets.dtype}, must be whole numbers"
        )
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"{tuple(weights.shape)} weights for {tuple(ids.shape)} ids")
    if offsets.is_meta:
        return
    ends = torch.cat([offsets, offsets.new_tensor([len(ids)])])
    if int(offsets[0]) != 0 or bool((ends[1:] < ends[:-1]).any()):
        raise ValueError(
            f"the offsets of bags must rise from 0 to at most {len(ids)}, the number of ids"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise IndexError(
            f"ids {int(ids.min())} to {int(ids.max())} of a table of {len(table)} rows"
        )


_CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(_SIZES, _check_size),
    **dict.fromkeys(
        ("split.Tensor", "split_with_sizes.default", "chunk.default"), _check_pieces
    ),
    "unbind.int": _check_unbind,
    **dict.fromkeys(_GATES, _check_recurrent),
    **dict.fromkeys(
        ("embedding_bag.default", "embedding_bag.padding_idx"), _check_bags
    ),
    "_native_batch_norm_legit_no_training.default": _check_batch_norm,
}
