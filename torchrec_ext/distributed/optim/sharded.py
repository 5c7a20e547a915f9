"""ShardedAdam: Adam for sharded tables where FBGEMM has no kernel for it, on top of its SGD kernel, which every device has.

Weight decay of sharded tables, whose optimizer runs inside the backward: only the rows that get a gradient shrink.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.optim.config import Choice, move_rows, rows_with_gradient
from torchrec_ext.distributed.tables import collections


def decay_sharded_rows(model: nn.Module, choices: Mapping[str, Choice]) -> None:
    """Makes each backward multiply the rows that get a gradient by 1 - learning rate x weight decay, before the kernel's update.

    FBGEMM's own decay is another rule for each optimizer, is missing for adagrad and sgd, and shrinks every row of the
    batch, those of padding too, of which there is more the more ranks there are.

    Args:
        model: sharded.
        choices: the optimizer of each of these tables, by name.
    """
    for _, collection in collections(model):
        for module in kernels_of(collection):
            decays = [
                choices[table.name].weight_decay if table.name in choices else 0.0
                for table in module.config.embedding_tables
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
        self,
        kernel: SplitTableBatchedEmbeddingBagsCodegen,
        _: tuple[Any, ...],
        inputs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        if "batch_size_per_feature_per_rank" in inputs:
            raise ValueError(
                "tables_weight_decay is not known for features of different batch sizes; set it to 0 for their tables"
            )
        if output.requires_grad and len(inputs["indices"]):
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._shrink(kernel, inputs["indices"], inputs["offsets"], grad)
            )

    @torch.no_grad()
    def _shrink(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, grad: Tensor
    ) -> None:
        lr, tables = kernel.get_learning_rate(), kernel.split_embedding_weights()
        rows_of = _rows_with_gradient(kernel, indices, offsets, grad)
        for table, decay, rows in zip(tables, self._decays, rows_of, strict=True):
            # Equal rows write equal values, so there is no need to look for them. `data`, because the backward that
            # follows holds the weights as saved for it and would refuse a change: it only writes them.
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
    owners = [
        [rows for rows, own in zip(by_feature, features, strict=True) if own == table] for table in range(len(tables))
    ]
    return [torch.cat(rows) for rows in owners]


_MOMENTS = ("exp_avg", "exp_avg_sq")


class RowGradients:
    """The gradient of one kernel's tables, row by row, after each backward.

    The kernel runs SGD at a rate of 1. Just before its backward the rows of the batch are put aside and set to 0, so
    that what the kernel leaves in them is minus their gradient, to the last bit; :meth:`take` reads it and puts the
    rows back.
    """

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._kernel = kernel
        self._tables: list[Tensor] = [table.data for table in kernel.split_embedding_weights()]
        self._aside = [torch.zeros(len(table), dtype=torch.bool, device=table.device) for table in self._tables]
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._tables]
        kernel.register_forward_pre_hook(self._before_forward)
        kernel.register_forward_hook(self._after_forward, with_kwargs=True)

    def _before_forward(self, *_: Any) -> None:
        if any(self._kept):
            raise RuntimeError(
                "a backward was not followed by a step of the optimizer, which puts the rows of its tables back"
            )
        self._kernel.set_learning_rate(1.0)

    def _after_forward(
        self,
        kernel: SplitTableBatchedEmbeddingBagsCodegen,
        _: tuple[Any, ...],
        inputs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        if output.requires_grad and len(inputs["indices"]):
            output.register_hook(lambda _: self._put_aside(inputs["indices"], inputs["offsets"]))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _put_aside(self, indices: Tensor, offsets: Tensor) -> None:
        self._kernel.set_learning_rate(1.0)  # again: a loop may set gradients to zero, and with them the rate, since
        features = self._kernel.feature_table_map
        ends = offsets[:: (len(offsets) - 1) // len(features)].tolist()
        for number, (table, aside, kept) in enumerate(zip(self._tables, self._aside, self._kept, strict=True)):
            own = [indices[ends[f] : ends[f + 1]] for f, owner in enumerate(features) if owner == number]
            rows = torch.unique(torch.cat(own))
            rows = rows[~aside[rows]]  # those of another look-up of this step are aside already
            aside[rows] = True
            kept.append((rows, table[rows]))
            table.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def take(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(n,) the rows and (n, D) their gradient, of each table."""
        for number, (table, aside) in enumerate(zip(self._tables, self._aside, strict=True)):
            kept, self._kept[number] = self._kept[number], []
            rows = (
                torch.cat([rows for rows, _ in kept])
                if kept
                else torch.empty(0, dtype=torch.int64, device=table.device)
            )
            gradient = -table[rows]
            for own, values in kept:
                table[own] = values
            aside[rows] = False
            yield rows, gradient


class ShardedAdam(KeyedOptimizer):
    """Adam or lazy Adam for the tables of one kernel; every rank moves its own shards.

    Its state is made of ShardedTensors with the layout of the weights. Its learning rate is that of the kernel's fused
    optimizer.

    Args:
        path: of the collection.
        module: TorchRec's module around the kernel.
        choices: the optimizer of each table, by name.
    """

    def __init__(
        self, path: str, module: BatchedFusedEmbedding | BatchedFusedEmbeddingBag, choices: Mapping[str, Choice]
    ) -> None:
        self._gradients = RowGradients(module.emb_module)
        self._rates = module.fused_optimizer.param_groups[0]
        self._taken: list[tuple[Tensor, Tensor]] = []
        names = [table.name for table in module.config.embedding_tables]
        tables = [table.data for table in module.emb_module.split_embedding_weights()]
        moments = [{name: torch.zeros_like(table) for name in _MOMENTS} for table in tables]
        state: dict[Any, dict[str, Any]] = {}
        steps = {}
        for key, weight in module.fused_optimizer.params.items():
            name = key.split(".")[-2]
            own = [moments[number] for number, table in enumerate(names) if table == name]
            steps[name] = torch.zeros(())
            state[weight] = {
                "step": steps[name],
                **{moment: _like(weight, [m[moment] for m in own]) for moment in _MOMENTS},
            }
        own_parts = zip(names, tables, moments, strict=True)
        self._shards = [_Moved(choices[name], table, moment, steps[name]) for name, table, moment in own_parts]
        prefix = f"{path}." if path else ""
        super().__init__({f"{prefix}{key}": weight for key, weight in module.fused_optimizer.params.items()}, state, [])

    def take(self) -> None:
        """Puts the tables back to what they were before the backward, and keeps their gradient for the step."""
        self._taken = list(self._gradients.take())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a gradient is taken once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Moves this rank's shards; rows of the batch without a gradient, such as padding's, are as those outside of it."""
        for steps in {id(shard.steps): shard.steps for shard in self._shards}.values():
            steps += 1
        for shard, (rows, gradient) in zip(self._shards, self._taken, strict=True):
            live = rows_with_gradient(gradient)
            shard.move(rows[live], gradient[live], self._rates["lr"])
        self._taken = []


class _Moved(NamedTuple):
    """A shard, its moments and the steps that its table has made."""

    choice: Choice
    table: Tensor
    moments: dict[str, Tensor]
    steps: Tensor

    def move(self, rows: Tensor, gradient: Tensor, lr: float) -> None:
        """One step: ``rows`` (U,), each once, by their ``gradient`` (U, D); dense Adam moves all other rows too."""
        choice = self.choice
        if choice.weight_decay:
            self.table.index_copy_(0, rows, self.table[rows] * (1 - lr * choice.weight_decay))
        if choice.kind == "lazy_adam":
            move_rows(
                self.table,
                rows,
                gradient,
                {"step": self.steps, **self.moments},
                lr=lr,
                betas=choice.betas,
                eps=choice.eps,
            )
            return
        (beta1, beta2), first, second = choice.betas, self.moments["exp_avg"], self.moments["exp_avg_sq"]
        if choice.l2:
            whole = (self.table * choice.l2).index_add_(0, rows, gradient)
            first.lerp_(whole, 1 - beta1)
            second.mul_(beta2).addcmul_(whole, whole, value=1 - beta2)
        else:
            first.mul_(beta1).index_add_(0, rows, gradient, alpha=1 - beta1)
            second.mul_(beta2).index_add_(0, rows, gradient.square(), alpha=1 - beta2)
        scale = 1 - beta2 ** float(self.steps)
        self.table.addcdiv_(
            first, (second / scale).sqrt_().add_(choice.eps), value=-lr / (1 - beta1 ** float(self.steps))
        )


def _like(weight: ShardedTensor, shards: list[Tensor]) -> ShardedTensor:
    local = [Shard(tensor, shard.metadata) for tensor, shard in zip(shards, weight.local_shards(), strict=True)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, weight.metadata(), process_group=weight._process_group
    )


def sharded_adams(model: nn.Module, choices: Mapping[str, Choice]) -> list[ShardedAdam]:
    """One for each kernel that holds tables of the optimizers adam and lazy_adam without a kernel of their own.

    Args:
        model: sharded, with the tables of these optimizers declared by :meth:`Choice.emulated`.
        choices: the optimizer of each of these tables, by name.
    """
    made = []
    for path, collection in collections(model):
        for module in kernels_of(collection):
            names = [table.name for table in module.config.embedding_tables]
            if any(name in choices for name in names):
                made.append(ShardedAdam(path, module, choices))
    return made
