"""with_hashed_dropout(): a compiled step's dropout masks by hashes, which a compiler vectorizes.

bernoulli_(): those of a traced step, which are torch's own.

Inductor draws the mask of a dropout number by number on a CPU: three masks of 2,048 x 256 took 24 of the 34 ms of a
compiled step, by hashes they take 6. A hash is of a weight's place and of two random keys, inside the kernel that reads
the mask. The keys of each step come from torch's generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.nn import functional as F

_BITS = 24  # of a hash that are compared with the probability, as many as float32 has


def with_hashed_dropout(graph: GraphModule) -> GraphModule:
    """Returns a copy of a graph of Dynamo's with :func:`hashed_dropout`, or the graph itself if it has no dropout."""
    if not any(node.target is F.dropout for node in graph.graph.nodes):
        return graph
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        if node.target is F.dropout:
            node.target = hashed_dropout
    return GraphModule(graph, copied)


def bernoulli_(tensor: Tensor, p: float = 0.5) -> Tensor:
    """Draws in place, by torch's own numbers.

    Inductor may read what ``Tensor.bernoulli_`` draws before it is drawn: of dropout behind batch normalisation, by
    torch 2.13 on a CPU. What an operator returns, it waits for.
    """
    return tensor.copy_(_bernoulli(tensor, p))


@torch.library.custom_op(
    "torchrec_ext::bernoulli",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _bernoulli(like: Tensor, p: float) -> Tensor:
    return torch.empty_like(like).bernoulli_(p)


_bernoulli.register_fake(lambda like, _: torch.empty_like(like))


def hashed_dropout(
    input: Tensor,  # noqa: A002 -- the names of F.dropout
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Computes F.dropout, with a mask by hashes."""
    if not training or p in (0.0, 1.0):
        return F.dropout(input, p, training, inplace)
    mask = hashed_mask(input.shape, 1 - p, input.device)
    factor = mask.to(input.dtype) / (1 - p)
    return input.mul_(factor) if inplace else input * factor


def hashed_mask(shape: torch.Size, probability: float, device: torch.device) -> Tensor:
    """Draws a mask that is true with a probability, at each place by itself.

    Args:
        shape: shape of the mask, of less than 2^31 places.
        probability: probability of a true.
        device: device of the mask.
    """
    first_key, second_key = torch.randint(1 << 31, (2,), device=device).int().unbind()
    places = torch.arange(shape.numel(), dtype=torch.int32, device=device).view(shape)
    # With one key, steps whose keys differ in their low bits alone would have the same
    # numbers at other places.
    numbers = _mixed(_mixed(places ^ first_key) ^ second_key)
    return (numbers & ((1 << _BITS) - 1)) < round(probability * (1 << _BITS))


def _mixed(numbers: Tensor) -> Tensor:
    """Returns a hash of each int32: the lowbias32 of Chris Wellons, in which each bit depends on all."""
    numbers = (numbers ^ _shifted(numbers, 16)) * 0x7FEB352D
    numbers = (numbers ^ _shifted(numbers, 15)) * (0x846CA68B - (1 << 32))
    return numbers ^ _shifted(numbers, 16)


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Shifts the bits of each int32 to the right, and fills in zeros."""
    return (numbers >> count) & ((1 << (32 - count)) - 1)
