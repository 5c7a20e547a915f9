"""hashed_dropout(): replaces the random masks of a traced step by hashes, which a compiler vectorizes.

torch draws the mask of a dropout number by number on a CPU that is not Intel's: 8 ns each, so the three masks of
RecBole's DeepFM took 5 of the 12 ms of a compiled step. A hash of a weight's place and of two random keys takes a
tenth of that, inside the kernel that reads the mask. The keys of each step come from torch's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

_DRAW = torch.ops.aten.bernoulli_.float
_BITS = 24  # of a hash that are compared with the probability, as many as float32 has


def hashed_dropout(graph: GraphModule, examples: Sequence[Tensor]) -> GraphModule:
    """Returns the graph with hashes in place of Bernoulli numbers, or the graph itself if it draws none.

    Args:
        graph: traced step.
        examples: tensors of the shapes of its inputs.
    """
    if not any(node.target is _DRAW for node in graph.graph.nodes):
        return graph
    return make_fx(_HashedMasks(graph).run, tracing_mode="fake")(*examples)


class _HashedMasks(fx.Interpreter):
    """Runs a graph with hashes in place of Bernoulli numbers."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an op, unless it draws a mask."""
        if target is not _DRAW or kwargs.get("generator") is not None:
            return super().call_function(target, args, kwargs)
        mask = args[0]
        # torch's default is left out of a trace
        probability = args[1] if len(args) > 1 else 0.5
        return mask.copy_(hashed_mask(mask.shape, probability, mask.device))


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
