"""Weight decay of sharded tables, whose optimizer runs inside the backward: only the rows that get a gradient shrink."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.distributed.tables import collections


def decay_sharded_rows(model: nn.Module, choices: Mapping[str, Choice]) -> None:
    """Makes each backward multiply the rows that get a gradient by 1 - learning rate x weight decay, before the kernel's update.

    FBGEMM's own decay is another rule for each optimizer, is missing for adagrad and sgd, and shrinks every row of the batch, those
    of padding too, of which there is more the more ranks there are.

    Args:
        model: sharded.
        choices: the optimizer of each of these tables, by name.
    """
    for _, collection in collections(model):
        for module in kernels_of(collection):
            decays = [
                choices[table.name].weight_decay if table.name in choices else 0.0 for table in module.config.embedding_tables
            ]
            if any(decays):
                module.emb_module.register_forward_hook(_Decay(decays), with_kwargs=True)


def kernels_of(collection: nn.Module) -> Iterator[BatchedFusedEmbedding | BatchedFusedEmbeddingBag]:
    """The modules around the kernels of a sharded collection, which keeps them in a plain list, where modules() does not look."""
    for lookup in getattr(collection, "_lookups", ()):
        for module in lookup.modules():
            if isinstance(module, (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)):
                yield module


class _Decay:
    """A forward hook on one kernel, which holds several tables one after the other.

    Args:
        decays: of each table.
    """

    def __init__(self, decays: list[float]) -> None:
        self._decays = decays

    def __call__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, _: tuple[Any, ...], inputs: dict[str, Tensor], output: Tensor
    ) -> None:
        if "batch_size_per_feature_per_rank" in inputs:
            raise ValueError("tables_weight_decay is not known for features of different batch sizes; set it to 0 for their tables")
        if output.requires_grad and len(inputs["indices"]):
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._shrink(kernel, inputs["indices"], inputs["offsets"], grad)
            )

    @torch.no_grad()
    def _shrink(self, kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, grad: Tensor) -> None:
        lr, tables = kernel.get_learning_rate(), kernel.split_embedding_weights()
        rows_of = _rows_with_gradient(kernel, indices, offsets, grad)
        for table, decay, rows in zip(tables, self._decays, rows_of, strict=True):
            # Equal rows write equal values, so there is no need to look for them. `data`, because the backward that follows holds
            # the weights as saved for it and would refuse a change: it only writes them.
            table.data.index_copy_(0, rows, table[rows] * (1 - lr * decay))


def _rows_with_gradient(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, grad: Tensor
) -> list[Tensor]:
    """The rows of each table that get a gradient, with repetitions.

    Args:
        kernel: of T features, each of which reads one table.
        indices: rows of all bags, feature by feature.
        offsets: (T B + 1,) where each bag begins.
        grad: of the output, (B, sum of D) for pooled bags, (len(indices), D) for a row per id.
    """
    lengths, features, tables = offsets.diff(), kernel.feature_table_map, kernel.embedding_specs
    if kernel.pooling_mode == PoolingMode.NONE:
        live = grad.ne(0).any(dim=1)
    else:
        widths = [tables[table][1] for table in features]
        bags = torch.cat([part.ne(0).any(dim=1) for part in torch.split(grad, widths, dim=1)])
        live = bags.repeat_interleave(lengths)
    ends = offsets[:: len(lengths) // len(features)].tolist()
    by_feature = [indices[start:end][live[start:end]] for start, end in itertools.pairwise(ends)]
    owners = [[rows for rows, own in zip(by_feature, features, strict=True) if own == table] for table in range(len(tables))]
    return [torch.cat(rows) for rows in owners]
