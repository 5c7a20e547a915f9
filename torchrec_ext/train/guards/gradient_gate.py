"""GradientGate: no backward updates a row of a sharded table before all ranks know that every gradient is finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_ext.distributed.optim.errors import first_few
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.distributed.tables import collections


class GradientGate:
    """Cuts the backward between looked-up vectors and dense layers, and checks the gradients in between.

    Kernels update the rows of a sharded table while the backward runs, and the exchange carries a bad gradient of one
    rank to rows of all. The first half of the backward ends at the vectors. By then the gradients of the dense layers
    have been averaged, and nothing has been updated. The ranks agree by one small all-reduce, in which
    :class:`FiniteLoss` compares the loss and the gradients together. Then the second half runs, through the exchange
    into the kernels.

    It costs a sum over the vectors' gradient, and the averaging of the layers' gradients no longer overlaps with the
    tables' backward. The norm of the layers' gradients is taken here instead of in the optimizer's step. The row
    ``gradient-gate`` of ``benchmarks/checkpoint.py`` measures it.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        runtime: rank and device of this process.
    """

    def __init__(
        self, model: nn.Module, optimizer: HybridOptimizer, runtime: Runtime
    ) -> None:
        self._optimizer = optimizer
        self._runtime = runtime
        self._collections = {
            path: collection
            for path, collection in collections(model)
            if _sharded(collection)
        }
        # Each cut: its path, the vectors, and the detached copy that the dense layers
        # read.
        self._cuts: list[tuple[str, Tensor, Tensor]] = []
        self._bad: tuple[list[str], list[str]] = [], []

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Lets the backward of each forward in this context end at the gate."""
        self._cuts = []
        hooks = [
            module.register_forward_hook(self._hook_for(path))
            for path, module in self._collections.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def refuses(self) -> bool:
        """Checks this rank's gradients after the first half of the backward; returns whether one is not finite."""
        # A collection of sequences has several vectors under one path.
        paths: dict[str, None] = {}
        for path, _, dense_input in self._cuts:
            if dense_input.grad is not None and not _finite(dense_input.grad):
                paths[path] = None
        self._bad = list(paths), self._optimizer.bad_gradients()
        return any(self._bad)

    def explain(self) -> str:
        """Names the refused gradients of all ranks, in the same text on every rank; all ranks call it."""
        self.drop()
        ranks = gather_objects(self._bad, self._runtime.world_size)
        # One text about all ranks; empty if nothing is wrong.
        messages = []
        vectors_by_rank, layers_by_rank = zip(*ranks, strict=True)
        for prefix, names_by_rank in (
            ("vectors of ", vectors_by_rank),
            ("", layers_by_rank),
        ):
            names = list(dict.fromkeys(chain.from_iterable(names_by_rank)))
            if not names:
                continue
            bad_ranks = [str(rank) for rank, bad in enumerate(names_by_rank) if bad]
            on_ranks = ""
            if len(bad_ranks) < len(ranks):
                on_ranks = f" on rank {', '.join(bad_ranks)}"
            messages.append(
                f"the gradient of {prefix}{first_few(names)} is not finite{on_ranks}"
            )
        # Layers first: their bad gradient is nearer to the loss, and the vectors'
        # usually follows from it.
        return "; ".join(reversed(messages))

    def drop(self) -> None:
        """Discards the second half of the backward, so that no table is updated."""
        self._cuts = []

    def open(self) -> None:
        """Runs the second half of the backward; all ranks call it if none refuses."""
        cuts = self._cuts
        self._cuts = []
        outputs = []
        gradients = []
        for _, vectors, dense_input in cuts:
            # Vectors that no dense layer has read have no gradient.
            if dense_input.grad is not None:
                outputs.append(vectors)
                gradients.append(dense_input.grad)
        torch.autograd.backward(outputs, gradients)

    def _hook_for(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            assert isinstance(output, LazyAwaitable)
            # The vectors are there only when the exchange has ended, so the cut waits
            # for that.
            output.callbacks.append(lambda output_now: self._cut(path, output_now))

        return hook

    def _cut(self, path: str, output: Any) -> Any:
        parts = [output]
        # A collection of sequences returns a dictionary by feature.
        if isinstance(output, dict):
            parts = list(output.values())
        for embeddings in parts:
            assert isinstance(embeddings, (JaggedTensor, KeyedTensor))
            vectors = embeddings.values()
            if vectors.requires_grad:
                # This is the same cut as in TorchRec's semi-sync pipeline.
                embeddings._values = vectors.detach().requires_grad_()
                self._cuts.append((path, vectors, embeddings._values))
        return output


def gate_for(
    model: nn.Module, optimizer: HybridOptimizer, runtime: Runtime, *, always: bool
) -> GradientGate | None:
    """Returns a gate if a kernel updates some table on some rank, else None; all ranks call it.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        runtime: rank and device of this process.
        always: return a gate even if no kernel updates a table; without a gate the optimizer raises an error at a bad
            gradient.
    """
    gate = GradientGate(model, optimizer, runtime)
    gate_needed = torch.tensor(
        float(always or bool(gate._collections)), device=runtime.device
    )
    # With placed towers, ranks hold different collections, and all must decide alike.
    dist.all_reduce(gate_needed, dist.ReduceOp.MAX)
    if gate_needed:
        return gate
    return None


def _sharded(collection: nn.Module) -> bool:
    return any(
        isinstance(weight, (ShardedTensor, DTensor))
        for weight in collection.state_dict().values()
    )


def _finite(gradient: Tensor) -> bool:
    """Checks the sum first, in one pass: a finite sum has only finite parts, any other may have overflowed."""
    return bool(torch.isfinite(gradient.sum())) or bool(torch.isfinite(gradient).all())
