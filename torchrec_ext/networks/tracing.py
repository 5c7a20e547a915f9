"""trace(): forward and backward of K members as one graph of kernels, by vmap over a skeleton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchrec_ext.networks.rewrite import rewrite
from torchrec_ext.networks.skeleton import Skeleton, batch_of


class Inputs(NamedTuple):
    """What a step of K members reads, member after member in the first axis.

    Args:
        dense: weights, in the order of the skeleton's.
        paths: of the collections.
        pooled: the pooled bags of each collection.
        fields: the tensors of the batches by name; without a first axis where ``shared``.
        noise: of each dropout layer; none where no member has any.
        peers: (K, P, B) logits of stale peers and the (K,) weight of codistillation; none without.
        shared: one batch for all.
    """

    dense: list[Tensor]
    paths: list[str]
    pooled: list[list[Tensor]]
    fields: dict[str, Tensor]
    noise: list[Tensor]
    peers: list[Tensor]
    shared: bool

    def flat(self) -> list[Tensor]:
        """All tensors, in order."""
        pooled = [tensor for own in self.pooled for tensor in own]
        return [*self.dense, *pooled, *self.rest()]

    def rest(self) -> list[Tensor]:
        """Those that are neither weights nor look-ups."""
        return [*self.fields.values(), *self.noise, *self.peers]

    def shapes(self) -> tuple[object, ...]:
        """What a graph is made for."""
        fields = [(name, value.shape) for name, value in self.fields.items()]
        return (self.shared, *fields, bool(self.noise), *(tensor.shape for tensor in self.peers))


def trace(skeleton: Skeleton, inputs: Inputs) -> GraphModule:
    """A graph from ``inputs.flat()`` to loss (K,), logits (K, B), and the gradient of each dense weight and pooled bag."""
    graph = make_fx(_step(skeleton, inputs), tracing_mode="fake")(*inputs.flat())
    graph.graph.eliminate_dead_code()
    return rewrite(graph)


def trace_logits(skeleton: Skeleton, inputs: Inputs) -> GraphModule:
    """A graph from ``inputs.flat()`` to the logits (K, B) in evaluation."""
    skeleton.learner.eval()
    try:
        graph = make_fx(_logits(skeleton, inputs), tracing_mode="fake")(*inputs.flat())
    finally:
        skeleton.learner.train()
    graph.graph.eliminate_dead_code()
    return rewrite(graph)


Loss = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]


def _loss(skeleton: Skeleton, inputs: Inputs) -> Loss:
    """Of one member: from its parts of ``inputs`` to loss and logits."""
    counts = [len(own) for own in inputs.pooled]

    def loss(
        weights: list[Tensor], pooled: list[Tensor], own: list[Tensor], noise: list[Tensor], peers: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        rest = iter(pooled)
        by_path = {path: [next(rest) for _ in range(count)] for path, count in zip(inputs.paths, counts, strict=True)}
        with skeleton.holding(by_path, noise) as learner:
            batch = batch_of(dict(zip(inputs.fields, own, strict=True)))
            named = dict(zip(skeleton.parameters, weights, strict=True))
            return functional_call(learner, named, (batch, *peers))  # type: ignore[no-any-return]

    return loss


def _over_members(inputs: Inputs) -> tuple[int | None, ...]:
    return (0, 0, None if inputs.shared else 0, 0, 0)


def _parts(inputs: Inputs, tensors: tuple[Tensor, ...]) -> list[list[Tensor]]:
    counts = [len(inputs.dense), sum(map(len, inputs.pooled)), len(inputs.fields), len(inputs.noise), len(inputs.peers)]
    rest = iter(tensors)
    return [[next(rest) for _ in range(count)] for count in counts]


def _step(skeleton: Skeleton, inputs: Inputs) -> Callable[..., list[Tensor]]:
    each = vmap(grad_and_value(_loss(skeleton, inputs), argnums=(0, 1), has_aux=True), in_dims=_over_members(inputs))

    def step(*tensors: Tensor) -> list[Tensor]:
        (of_weights, of_pooled), (loss, logits) = each(*_parts(inputs, tensors))
        return [loss, logits, *of_weights, *of_pooled]

    return step


def _logits(skeleton: Skeleton, inputs: Inputs) -> Callable[..., Tensor]:
    each = vmap(_loss(skeleton, inputs), in_dims=_over_members(inputs))

    def logits(*tensors: Tensor) -> Tensor:
        return each(*_parts(inputs, tensors))[1]

    return logits
