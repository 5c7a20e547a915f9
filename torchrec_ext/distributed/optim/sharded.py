"""ShardedAdam: Adam for sharded tables where FBGEMM has no kernel for it, on top of its SGD kernel.

decay_sharded_rows(): weight decay of sharded tables, whose optimizer runs inside the backward; only the rows that get
a gradient shrink.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.optim.kinds import (
    adam_denominator,
    move_rows,
    rows_with_gradient,
)
from torchrec_ext.distributed.sharders import ShardedBags, ShardedSequences
from torchrec_ext.distributed.tables import collections, kernels_by_table


def decay_sharded_rows(model: nn.Module, choices: Mapping[str, Choice]) -> None:
    """Makes each backward multiply rows with a gradient by 1 - learning rate x weight decay, before their update.

    FBGEMM's own decay follows another rule for each optimizer, is missing for adagrad and sgd, and shrinks every row of
    the batch, padding's rows too, which grow in number with the ranks.

    Args:
        model: sharded model.
        choices: optimizer of each table to decay, by name.
    """
    for _, collection in collections(model):
        for module in kernels_of(collection):
            decays = []
            for table in module.config.embedding_tables:
                decay = 0.0
                if table.name in choices:
                    decay = choices[table.name].weight_decay
                decays.append(decay)
            if any(decays):
                module.emb_module.register_forward_hook(
                    _Decay(decays), with_kwargs=True
                )


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
                collection.before_backward = functools.partial(self._check, fused[0])

    def begin(self) -> None:
        """Forgets the backward before, whose gradients have been used or dropped."""
        self._backwards.clear()

    def _check(self, table: str, _: Tensor) -> None:
        # One backward may pass a collection several times, for as many look-ups.
        backward = torch._C._current_graph_task_id()
        if self._backwards.setdefault(table, backward) != backward:
            raise ValueError(
                f"table '{table}': a second backward before optimizer.step(), and its optimizer runs in the backward, "
                f"so gradients cannot accumulate; {REMEDY}"
            )


REMEDY = "use larger batches, or plan.sharding=data_parallel"


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


class _Decay:
    """Forward hook to decay the rows of one kernel, with several tables one after the other.

    Args:
        decays: weight decay of each table, in the kernel's order.
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
                lambda grad: self._shrink(
                    kernel, inputs["indices"], inputs["offsets"], grad
                )
            )

    @torch.no_grad()
    def _shrink(
        self,
        kernel: SplitTableBatchedEmbeddingBagsCodegen,
        indices: Tensor,
        offsets: Tensor,
        grad: Tensor,
    ) -> None:
        # Asked in each backward, because a schedule changes it.
        lr = kernel.get_learning_rate()
        tables = kernel.split_embedding_weights()
        rows_by_table = _rows_with_gradient(kernel, indices, offsets, grad)
        for table, decay, rows in zip(tables, self._decays, rows_by_table, strict=True):
            # Repeated rows write equal values, so they need not be removed. `data`: the
            # backward that follows holds the weights as saved tensors and would refuse
            # a change, though it only writes to them.
            table.data.index_copy_(0, rows, table[rows] * (1 - lr * decay))


def _rows_with_gradient(
    kernel: SplitTableBatchedEmbeddingBagsCodegen,
    indices: Tensor,
    offsets: Tensor,
    grad: Tensor,
) -> list[Tensor]:
    """Returns the rows of each table with a gradient; rows may repeat.

    Args:
        kernel: kernel of F features, each of which reads one table.
        indices: rows of all bags, feature by feature.
        offsets: (F B + 1,) start of each bag in ``indices``.
        grad: gradient of the output, (B, sum of D) for pooled bags, (len(indices), D) for a row per id.
    """
    lengths = offsets.diff()
    features = kernel.feature_table_map
    tables = kernel.embedding_specs
    if kernel.pooling_mode == PoolingMode.NONE:
        live = grad.ne(0).any(dim=1)
    else:
        widths = [tables[table][1] for table in features]
        bags = torch.cat(
            [columns.ne(0).any(dim=1) for columns in torch.split(grad, widths, dim=1)]
        )
        live = bags.repeat_interleave(lengths)
    # Every feature has B bags, so its ids begin at each B-th offset.
    ends = offsets[:: len(lengths) // len(features)].tolist()
    by_table: list[list[Tensor]] = [[] for _ in tables]
    for table, (start, end) in zip(features, itertools.pairwise(ends), strict=True):
        by_table[table].append(indices[start:end][live[start:end]])
    return [torch.cat(rows) for rows in by_table]


_MOMENTS = ("exp_avg", "exp_avg_sq")


class RowGradients:
    """Reads the gradient of one kernel's tables, row by row, after each backward.

    The kernel runs SGD at a rate of 1. Just before its backward the rows of the batch are put aside and set to 0, so
    that the kernel leaves minus their gradient in them, to the last bit; :meth:`take` reads it and restores the rows.

    Args:
        kernel: FBGEMM's kernel, with SGD as its optimizer.
        names: its tables.
    """

    def __init__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, names: list[str]
    ) -> None:
        self._kernel = kernel
        self._names = names
        self._tables: list[Tensor] = [
            table.data for table in kernel.split_embedding_weights()
        ]
        self._aside = [
            torch.zeros(len(table), dtype=torch.bool, device=table.device)
            for table in self._tables
        ]
        self._saved_rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._tables]
        kernel.register_forward_pre_hook(self._before_forward)
        kernel.register_forward_hook(self._after_forward, with_kwargs=True)

    def _before_forward(self, *_: Any) -> None:
        # Until a step puts the rows back, the tables hold gradients in their place.
        if any(self._saved_rows):
            table = self._names[0]
            raise ValueError(
                f"table '{table}': a backward was not followed by optimizer.step(), which puts its rows back, so "
                f"gradients cannot accumulate; {REMEDY}"
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
            output.register_hook(
                lambda _: self._put_aside(inputs["indices"], inputs["offsets"])
            )  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _put_aside(self, indices: Tensor, offsets: Tensor) -> None:
        # Set again, because zero_grad may have handed the kernel another rate since.
        self._kernel.set_learning_rate(1.0)
        features = self._kernel.feature_table_map
        ends = offsets[:: (len(offsets) - 1) // len(features)].tolist()
        for number, (table, aside, saved) in enumerate(
            zip(self._tables, self._aside, self._saved_rows, strict=True)
        ):
            rows_read = [
                indices[ends[f] : ends[f + 1]]
                for f, owner in enumerate(features)
                if owner == number
            ]
            rows = torch.unique(torch.cat(rows_read))
            # Another look-up of this step may have put rows aside already; they are 0
            # now, so do not save them again.
            rows = rows[~aside[rows]]
            aside[rows] = True
            saved.append((rows, table[rows]))
            table.index_fill_(0, rows, 0.0)

    @torch.no_grad()
    def take(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (n,) rows and (n, D) their gradient for each table, and restores the rows."""
        for number, (table, aside) in enumerate(
            zip(self._tables, self._aside, strict=True)
        ):
            saved = self._saved_rows[number]
            self._saved_rows[number] = []
            rows = torch.empty(0, dtype=torch.int64, device=table.device)
            if saved:
                rows = torch.cat([rows_of_lookup for rows_of_lookup, _ in saved])
            gradient = -table[rows]
            for saved_rows, values in saved:
                table[saved_rows] = values
            aside[rows] = False
            yield rows, gradient


class ShardedAdam(KeyedOptimizer):
    """Adam or lazy Adam for the tables of one kernel; every rank updates its own shards.

    Its state consists of ShardedTensors with the layout of the weights. Its learning rate is that of the kernel's fused
    optimizer.

    Args:
        path: path of the collection in the model.
        module: TorchRec's module around the kernel.
        choices: optimizer of each table, by name.
    """

    def __init__(
        self,
        path: str,
        module: BatchedFusedEmbedding | BatchedFusedEmbeddingBag,
        choices: Mapping[str, Choice],
    ) -> None:
        self._gradients = RowGradients(
            module.emb_module, [table.name for table in module.config.embedding_tables]
        )
        self._rates = module.fused_optimizer.param_groups[0]
        self._row_gradients: list[tuple[Tensor, Tensor]] = []
        self._shards = []
        moments_by_table: dict[str, list[dict[str, Tensor]]] = {}
        steps: dict[str, Tensor] = {}
        weights = module.emb_module.split_embedding_weights()
        specs = module.emb_module.embedding_specs
        # A kernel has several shards of a table whose columns are split: they share a
        # count of steps.
        for config, table, (_, _, location, _) in zip(
            module.config.embedding_tables, weights, specs, strict=True
        ):
            name = config.name
            moments = {
                moment: _zeros_beside(table.data, location) for moment in _MOMENTS
            }
            moments_by_table.setdefault(name, []).append(moments)
            steps.setdefault(name, torch.zeros(()))
            self._shards.append(
                _AdamShard(choices[name], table.data, moments, steps[name])
            )
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        for key, weight in module.fused_optimizer.params.items():
            name = key.split(".")[-2]
            params[f"{path}.{key}".lstrip(".")] = weight
            state[weight] = {"step": steps[name]}
            for moment in _MOMENTS:
                state[weight][moment] = _like(
                    weight, [shard[moment] for shard in moments_by_table[name]]
                )
        super().__init__(params, state, [])

    def take(self) -> None:
        """Restores the tables to their values before the backward, and keeps their gradient for the step."""
        self._row_gradients = list(self._gradients.take())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: :meth:`step` drops the gradient that it used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates this rank's shards; rows of the batch without a gradient, as padding's, count as outside it."""
        # Shards of one table share a step count, which must grow once.
        for steps in {id(shard.steps): shard.steps for shard in self._shards}.values():
            steps += 1
        for shard, (rows, gradient) in zip(
            self._shards, self._row_gradients, strict=True
        ):
            live = rows_with_gradient(gradient)
            shard.update(rows[live], gradient[live], self._rates["lr"])
        self._row_gradients = []


class _AdamShard(NamedTuple):
    """A shard, its moments and the step count of its table."""

    choice: Choice
    table: Tensor
    moments: dict[str, Tensor]
    steps: Tensor

    def update(self, rows: Tensor, gradient: Tensor, lr: float) -> None:
        """Steps by the ``gradient`` (U, D) of the distinct ``rows`` (U,); dense Adam updates all other rows too."""
        choice = self.choice
        if choice.weight_decay:
            self.table.index_copy_(
                0, rows, self.table[rows] * (1 - lr * choice.weight_decay)
            )
        if choice.kind == "lazy_adam":
            state = {"step": self.steps, **self.moments}
            move_rows(
                self.table,
                rows,
                gradient,
                state,
                lr=lr,
                betas=choice.betas,
                eps=choice.eps,
            )
            return
        beta1, beta2 = choice.betas
        first = self.moments["exp_avg"]
        second = self.moments["exp_avg_sq"]
        # The penalty gives all rows a gradient; without it, those outside the batch
        # only have their moments decay.
        if choice.l2:
            whole = (self.table * choice.l2).index_add_(0, rows, gradient)
            first.lerp_(whole, 1 - beta1)
            second.mul_(beta2).addcmul_(whole, whole, value=1 - beta2)
        else:
            first.mul_(beta1).index_add_(0, rows, gradient, alpha=1 - beta1)
            second.mul_(beta2).index_add_(0, rows, gradient.square(), alpha=1 - beta2)
        steps = float(self.steps)
        denominator = adam_denominator(second, steps, beta2, choice.eps)
        self.table.addcdiv_(first, denominator, value=-lr / (1 - beta1**steps))


def _zeros_beside(table: Tensor, location: EmbeddingLocation) -> Tensor:
    """Returns zeros of the shape of a table, on the GPU only if its rows are there."""
    if location != EmbeddingLocation.MANAGED:
        return torch.zeros_like(table)
    # A table is in host memory because the GPU has no room for it, let alone for two
    # moments of its size.
    in_host_memory = torch.ops.fbgemm.new_unified_tensor(table, table.shape, False)
    return torch.zeros(table.shape, device=table.device, out=in_host_memory)


def _like(weight: ShardedTensor, shards: list[Tensor]) -> ShardedTensor:
    local = [
        Shard(tensor, shard.metadata)
        for tensor, shard in zip(shards, weight.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, weight.metadata(), process_group=weight._process_group
    )


def sharded_adams(model: nn.Module, choices: Mapping[str, Choice]) -> list[ShardedAdam]:
    """Builds a :class:`ShardedAdam` for each kernel with tables of adam or lazy_adam without an FBGEMM kernel.

    Args:
        model: sharded model whose tables with these optimizers were declared by :meth:`Choice.emulated`.
        choices: optimizer of each of these tables, by name.
    """
    optimizers = []
    for path, collection in collections(model):
        for module in kernels_of(collection):
            names = {table.name for table in module.config.embedding_tables}
            # TorchRec puts tables with one optimizer into a kernel, so all or none of
            # them are here.
            if not names.isdisjoint(choices):
                optimizers.append(ShardedAdam(path, module, choices))
    return optimizers
