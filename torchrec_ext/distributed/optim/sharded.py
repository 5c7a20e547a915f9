"""The optimizers that run inside the backward of sharded tables: their kernels, caches, and one backward per step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_ext.distributed.sharders import ShardedBags, ShardedSequences
from torchrec_ext.distributed.tables import collections, kernels_by_table


class OneBackward:
    """Refuses a second backward before the optimizer's step, for tables whose optimizer runs in the backward.

    Dense layers would accumulate gradients; these tables would move in each backward.

    Args:
        model: sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._backwards: dict[str, int] = {}
        for _, collection in collections(model):
            fused = [
                name
                for name, kernel in kernels_by_table(collection).items()
                if kernel != EmbeddingComputeKernel.DENSE.value
            ]
            # By the plan, not by this rank's kernels: all ranks refuse alike.
            if fused and isinstance(collection, ShardedBags | ShardedSequences):
                remedy = "use larger batches"
                # Rows that are read one by one cannot be whole on each rank of CPUs.
                if isinstance(collection, ShardedBags):
                    remedy += ", or plan.sharding=data_parallel"
                check = functools.partial(self._check, fused[0], remedy)
                collection.before_backward = check

    def begin(self) -> None:
        """Forgets the backward before, whose gradients have been used or dropped."""
        self._backwards.clear()

    def _check(self, table: str, remedy: str, _: Tensor) -> None:
        # One backward may pass a collection several times, for as many look-ups.
        backward = torch._C._current_graph_task_id()
        if self._backwards.setdefault(table, backward) != backward:
            raise ValueError(
                f"table '{table}': a second backward before optimizer.step(), and its optimizer runs in the backward, "
                f"so gradients cannot accumulate; {remedy}"
            )


def read_past_caches(model: nn.Module) -> None:
    """Lets every reader and writer of a sharded collection's tables see the rows of the training.

    FBGEMM keeps newer rows of a fused_uvm_caching table in a cache on the GPU. TorchRec writes them back before a
    ``state_dict``; here the cache is emptied then too, so that rows written into the tables are what training reads.
    """
    for _, collection in collections(model):
        if "fused_uvm_caching" in kernels_by_table(collection).values():
            # Hooks run in order: TorchRec's own, which writes the rows back, is there
            # already.
            collection.register_state_dict_pre_hook(_empty_caches)  # type: ignore[no-untyped-call]


def _empty_caches(collection: nn.Module, *_: Any) -> None:
    for module in kernels_of(collection):
        module.emb_module.reset_cache_states()


def kernels_of(
    collection: nn.Module,
) -> Iterator[BatchedFusedEmbedding | BatchedFusedEmbeddingBag]:
    """Yields the modules around the kernels of a sharded collection; modules() does not visit them."""
    for lookup in getattr(collection, "_lookups", ()):
        for module in lookup.modules():
            if isinstance(module, (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)):
                yield module
