"""What a run is made of besides model and loader, as its configuration asks; combinations that exclude each other are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync_config import SyncConfig
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.gradient_gate import GradientGate, gate_for
from torchrec_ext.train.loss_scaling import LossScaling


def leave_out(config: TrainConfig, sync: SyncConfig, optimizer: KeyedOptimizer) -> Callable[[], None] | None:
    """What has the optimizer leave out a step, where the run goes on after a loss that is no number."""
    if config.on_nan == "stop":
        return None
    if not isinstance(optimizer, HybridOptimizer) or sync.mode != "every_step" or config.compile == "require":
        raise ValueError(
            f"train.on_nan=skip with sync.mode={sync.mode} and train.compile={config.compile}: a step can be left out only where "
            "ranks agree in every step and none is captured; set sync.mode=every_step and train.compile=auto, or train.on_nan=stop"
        )
    return partial(setattr, optimizer, "leave_out", True)


def scaling(config: TrainConfig, sync: SyncConfig, optimizer: KeyedOptimizer, runtime: Runtime) -> LossScaling | None:
    """The scaling of the loss that float16 needs."""
    if config.amp != "fp16":
        return None
    if sync.mode != "every_step" or config.on_nan == "skip" or not isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"train.amp=fp16 with sync.mode={sync.mode} and train.on_nan={config.on_nan}: a step whose gradients overflow is left "
            "out, on which ranks must agree; set sync.mode=every_step and train.on_nan=stop, or train.amp=bf16"
        )
    return LossScaling(optimizer, runtime.device)


def gate(config: TrainConfig, model: nn.Module, optimizer: KeyedOptimizer, runtime: Runtime) -> GradientGate | None:
    """The gate in front of the tables, where ``check_gradients`` asks for one; all ranks call it."""
    skips = config.on_nan == "skip"
    if not isinstance(optimizer, HybridOptimizer) or config.check_gradients == "off":
        return None
    if config.check_gradients == "auto" and runtime.device.type == "cuda" and not skips:
        return None
    return gate_for(model, optimizer, runtime, always=skips)


def piped(config: TrainConfig, sync: SyncConfig) -> bool:
    """Whether the run has what only the pipeline's steps can do: a timeline, semi-sync, leaving a step out."""
    if config.compile == "require" and sync.mode == "semi_sync":
        raise ValueError("train.compile=require with sync.mode=semi_sync: look-ups a step ahead are the pipeline's; choose one")
    return bool(config.trace_steps) or sync.mode == "semi_sync" or config.on_nan == "skip"


def warn_unpipelined(paths: list[str]) -> None:
    """Says which sharded modules the pipeline does not overlap."""
    if paths:
        print(
            f"not pipelined: {', '.join(paths)}: their input dist does not overlap with the step before; "
            "pass them an attribute of the batch unchanged",
            file=sys.stderr,
        )
