"""A step that is cut into parts computes and writes what the whole one does."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_ext.capture.parts import StepPart, split_at


def step(
    weight: Tensor, count: Tensor, rows: Tensor, given: Tensor
) -> list[Tensor | None]:
    """Reads views of a weight before and after cuts, and writes into it and a counter."""
    count.add_(1)
    first, second = weight.t().split(2, 1)
    leaf = first.detach().requires_grad_()
    with torch.enable_grad():
        outputs = torch.tanh(rows @ leaf) * count
    sent = outputs.detach()
    middle = (given + sent @ second.t()[:, :2]).sum(0)
    (grad,) = torch.autograd.grad(outputs, leaf, given)
    weight[:2].sub_(grad.t() * middle[0])
    count.mul_(2)
    return [sent, middle, None, count, weight.t()[0], rows]


def in_parts(
    parts: Sequence[StepPart], results: Sequence[int | None], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    values = dict(enumerate(tensors))
    for piece in parts:
        assert all(
            tuple(e.shape) == values[i].shape
            for e, i in zip(piece.examples, piece.inputs, strict=True)
        )
        outputs = piece.graph(*[values[index] for index in piece.inputs])
        values.update(zip(piece.outputs, outputs, strict=True))
    return [None if index is None else values[index] for index in results]


def test_parts_compute_and_write_what_the_whole_step_does() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(4, 3), torch.ones(()), torch.randn(5, 3), torch.randn(5, 2)]
    graph = make_fx(step, tracing_mode="fake")(*[tensor.clone() for tensor in tensors])
    whole = [tensor.clone() for tensor in tensors]
    cut = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        expected = step(*whole)
        parts, results = split_at(graph, [0, 1])
        actual = in_parts(parts, results, cut)
    assert len(parts) == 3
    # A later part reads the weight itself, no view of it that was taken before.
    assert 0 in parts[1].inputs
    # sent and what its gradient needs; middle; a column
    assert [len(piece.outputs) for piece in parts] == [2, 1, 1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)
