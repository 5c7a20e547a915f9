"""make_pipeline(): builds the TorchRec train pipeline for the steps of a model.

semi_sync_pipeline(): TorchRec's TrainPipelineSemiSync, also on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import (
    EmbeddingTrainPipelineContext,
    TrainPipelineContext,
)
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.train_pipeline.utils import _start_embedding_lookup
from torchrec.distributed.types import LazyNoWait, ShardedModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.plan.tower_plan import table_shardings
from torchrec_ext.distributed.sync import SyncConfig, refuse_placed_towers


class ForwardOnCpu(EmbeddingPipelinedForward):
    """Stand-in for a collection in the pipeline, without CUDA streams."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the embeddings of the look-up a step ago."""
        self._context.module_contexts.pop(self._name)
        embeddings = self._context.embedding_a2a_requests.pop(self._name).wait()
        if isinstance(embeddings, KeyedTensor):
            # End the loss's backward here; the pipeline passes the gradient to the
            # tables afterwards.
            values = embeddings.values()
            embeddings._values = values.detach().requires_grad_()
            self._context.embedding_tensors.append([values])
            self._context.embedding_features.append([list(embeddings.keys())])
            self._context.detached_embedding_tensors.append([embeddings._values])
        else:
            self.detach_embeddings(embeddings, None)
        return LazyNoWait(embeddings)


class GatedSemiSync(TrainPipelineSemiSync[TowerBatch, Any]):
    """TrainPipelineSemiSync with a callback between the backward of the dense layers and that of the tables.

    Args:
        before_tables: called after the loss's backward, which ends before the tables.
        positional: arguments of TorchRec's pipeline.
        keywords: keyword arguments of TorchRec's pipeline.
    """

    def __init__(
        self, before_tables: Callable[[], None], *positional: Any, **keywords: Any
    ) -> None:
        super().__init__(*positional, **keywords)
        self._before_tables = before_tables

    def embedding_backward(self, context: EmbeddingTrainPipelineContext) -> None:
        """Runs the tables' half of the backward."""
        self._before_tables()
        super().embedding_backward(context)


class SemiSyncOnCpu(GatedSemiSync):
    """GatedSemiSync without CUDA streams and events."""

    _pipelined_forward_type = ForwardOnCpu

    def _mlp_forward(
        self, batch: TowerBatch, context: TrainPipelineContext
    ) -> tuple[Tensor, Any]:
        return self._model_fwd(batch)  # type: ignore[no-any-return]

    def start_embedding_lookup(
        self, batch: TowerBatch | None, context: EmbeddingTrainPipelineContext
    ) -> None:
        """Looks the rows of ``batch`` up and starts their exchange."""
        if batch is None:
            return
        for module in self._pipelined_modules:
            _start_embedding_lookup(module, context, None, None, self._stream_context)


def _has_sharded_modules(model: nn.Module) -> bool:
    return any(isinstance(module, ShardedModule) for module in model.modules())


def _replicated_tables(model: nn.Module) -> list[str]:
    if not isinstance(model, DistributedModelParallel):
        return []
    shardings = table_shardings(model.plan)
    return [
        name
        for name, sharding in shardings.items()
        if sharding.sharding_type == "data_parallel"
    ]


def make_pipeline(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    device: torch.device,
    *,
    forward: Callable[[TowerBatch], tuple[Tensor, Any]] | None = None,
    sync: SyncConfig | None = None,
    before_tables: Callable[[], None] = lambda: None,
) -> TrainPipelineSparseDist[TowerBatch, Any]:
    """Builds TorchRec's pipeline, to overlap copy, input dist and forward of three successive batches.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        device: device of the model.
        forward: called instead of the model, such as :class:`FiniteLoss`.
        sync: how ranks are kept equal: ``semi_sync`` uses TrainPipelineSemiSync if there are tables to look up ahead;
            all other modes use one pipeline. Copies of tables are averaged at its interval.
        before_tables: called in each step when the loss's backward has ended, such as that of :class:`FiniteLoss`.

    Raises:
        ValueError: ``sync`` does not fit the model.
    """
    sync = sync or SyncConfig()
    has_tables = _has_sharded_modules(model)
    if sync.stash_gradients and not has_tables:
        raise ValueError(
            f"sync.stash_gradients: {type(model).__name__} has no table, whose look-up would overlap; leave it out, or "
            "take sync.mode=every_step"
        )
    make: Callable[..., TrainPipelineSparseDist[TowerBatch, Any]] = GatedPipeline
    options: dict[str, Any] = {}
    if sync.looks_ahead and has_tables:
        refuse_placed_towers(model, sync)
        # TorchRec's semi-sync pipeline looks up the rows of batch B + 1 before the
        # update by batch B.
        replicated = _replicated_tables(model)
        if replicated:
            raise ValueError(
                f"sync.mode={sync.mode}: table(s) {', '.join(replicated)} are data_parallel, whose next "
                "batch cannot be looked up ahead; set plan.sharding=table_wise, or another sync.mode"
            )
        is_emulated = isinstance(
            optimizer, CombinedOptimizer
        ) and "sharded_adam" in dict(optimizer.optimizers)
        if sync.stash_gradients and is_emulated:
            raise ValueError(
                "sync.stash_gradients: no kernel runs this device's adam, so its first step cannot be "
                "left out; set optimizer.tables=adagrad, or sync.stash_gradients=false"
            )
        make = GatedSemiSync
        if device.type == "cpu":
            make = SemiSyncOnCpu
        options = {
            "start_batch": sync.together,
            "stash_gradients": sync.stash_gradients,
        }
    return make(
        before_tables,
        model,
        optimizer,
        device,
        # The last batches of an epoch are trained too, not only those with a next one
        # in the pipeline.
        execute_all_batches=True,
        custom_model_fwd=forward,
        dmp_collection_sync_interval_batches=sync.tables_every,
        **options,
    )


class GatedPipeline(TrainPipelineSparseDist[TowerBatch, Any]):
    """TrainPipelineSparseDist with a callback between the dense layers' and the tables' backward; tables are optional.

    Args:
        before_tables: called after the loss's backward, which a :class:`GradientGate` may have ended before the tables.
        positional: arguments of TorchRec's pipeline.
        keywords: keyword arguments of TorchRec's pipeline.
    """

    def __init__(
        self, before_tables: Callable[[], None], *positional: Any, **keywords: Any
    ) -> None:
        super().__init__(*positional, **keywords)
        self._before_tables = before_tables

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        """Rewrites the model only if there is an input dist to start early, because TorchRec searches every layer."""
        if _has_sharded_modules(self._model):
            super()._pipeline_model(*args, **kwargs)

    def _backward(self, losses: Tensor) -> None:
        super()._backward(losses)
        self._before_tables()


def unpipelined(
    pipeline: TrainPipelineSparseDist[TowerBatch, Any], model: nn.Module
) -> list[str]:
    """Returns paths of sharded modules without overlap of their input dist; available after the first step.

    TorchRec is silent if it cannot follow a module's input by ``getattr`` from the batch. The tables of towers with
    ranks of their own belong to the towers, one module with a common input dist.
    """
    pipelined = set(map(id, pipeline._pipelined_modules))
    paths = []
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        # A module inside of another sharded module has its input dist in that one.
        if not isinstance(module, ShardedModule) or path.startswith(inside):
            continue
        inside += (f"{path}.",)
        if id(module) not in pipelined:
            paths.append(path)
    return paths
