"""Which of TorchRec's train pipelines runs a step; none of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.sync import refuse_placed_towers
from torchrec_ext.distributed.sync_config import SyncConfig
from torchrec_ext.train.semi_sync import semi_sync_pipeline


def make_pipeline(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    device: torch.device,
    *,
    forward: Callable[[TowerBatch], tuple[Tensor, Any]] | None = None,
    sync: SyncConfig | None = None,
    before_tables: Callable[[], None] = lambda: None,
) -> TrainPipelineSparseDist[TowerBatch, Any]:
    """TorchRec's pipeline that overlaps copy, input dist and forward of three successive batches.

    Args:
        model: from :func:`hybrid_parallel`.
        optimizer: likewise.
        device: of the model.
        forward: calls the model in its place, such as :class:`FiniteLoss`.
        sync: its mode ``semi_sync`` takes TrainPipelineSemiSync, where there are tables to look up ahead; every other one is the
            same pipeline. Copies of tables are averaged at its interval.
        before_tables: called in each step when the loss's backward has come to its end, such as that of :class:`FiniteLoss`.

    Raises:
        ValueError: ``sync`` does not fit the model.
    """
    sync = sync or SyncConfig()
    tables = any(isinstance(module, ShardedModule) for module in model.modules())
    if sync.stash_gradients and not tables:
        raise ValueError(
            f"sync.stash_gradients: {type(model).__name__} has no table, whose look-up would overlap; leave it out, or take "
            "sync.mode=every_step"
        )
    if sync.mode == "semi_sync" and tables:
        refuse_placed_towers(model, sync)
        return semi_sync_pipeline(model, optimizer, device, sync, forward, before_tables)
    return GatedPipeline(
        before_tables,
        model,
        optimizer,
        device,
        execute_all_batches=True,
        custom_model_fwd=forward,
        dmp_collection_sync_interval_batches=sync.tables_every,
    )


class GatedPipeline(TrainPipelineSparseDist[TowerBatch, Any]):
    """TorchRec's, with something to do between the backward of the dense layers and that of the tables; also without tables.

    Args:
        before_tables: called after the loss's backward, which a :class:`GradientGate` may have ended before the tables.
        positional: of TorchRec's.
        named: likewise.
    """

    def __init__(self, before_tables: Callable[[], None], *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._before_tables = before_tables

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing where there is no input dist to begin early: TorchRec would trace through every layer in search of one."""
        if any(isinstance(module, ShardedModule) for module in self._model.modules()):
            super()._pipeline_model(*args, **kwargs)

    def _backward(self, losses: Tensor) -> None:
        super()._backward(losses)
        self._before_tables()


def unpipelined(pipeline: TrainPipelineSparseDist[TowerBatch, Any], model: nn.Module) -> list[str]:
    """Paths of sharded modules whose input dist the pipeline does not overlap; known after the first step.

    TorchRec says nothing when it cannot follow a module's input by ``getattr`` from the batch. The tables of towers that have ranks
    of their own belong to the towers, one module whose input dist is that of all.
    """
    pipelined = {id(module) for module in pipeline._pipelined_modules}
    sharded = {path: module for path, module in model.named_modules() if isinstance(module, ShardedModule)}
    outermost = [path for path in sharded if not any(path.startswith(f"{other}.") for other in sharded)]
    return [path for path in outermost if id(sharded[path]) not in pipelined]
