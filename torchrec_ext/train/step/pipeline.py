"""make_pipeline(): builds the TorchRec train pipeline for the steps of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import TowerBatch


def _has_sharded_modules(model: nn.Module) -> bool:
    return any(isinstance(module, ShardedModule) for module in model.modules())


def make_pipeline(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    device: torch.device,
    *,
    forward: Callable[[TowerBatch], tuple[Tensor, Any]] | None = None,
) -> TrainPipelineSparseDist[TowerBatch, Any]:
    """Builds TorchRec's pipeline, to overlap copy, input dist and forward of three successive batches.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        device: device of the model.
        forward: called instead of the model.
    """
    return _Pipeline(
        model,
        optimizer,
        device,
        # The last batches of an epoch are trained too, not only those with a next one
        # in the pipeline.
        execute_all_batches=True,
        custom_model_fwd=forward,
    )


class _Pipeline(TrainPipelineSparseDist[TowerBatch, Any]):
    """TrainPipelineSparseDist whose model need not have tables."""

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        """Rewrites the model only if there is an input dist to start early, because TorchRec searches every layer."""
        if _has_sharded_modules(self._model):
            super()._pipeline_model(*args, **kwargs)
