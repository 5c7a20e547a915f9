"""Trials: runs whole steps of a sample of the model under several plans, in turn, on all ranks at the same time."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from typing_extensions import Self

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.sample import Sample
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime, max_over_ranks
from torchrec_ext.distributed.sharders import codecs_of

# Steps that fill the pipeline.
_WARM_UP = 2
# Seconds of one plan before it is the next one's turn.
_IN_A_ROW_S = 0.1
_ROUNDS = (5, 15)


class StepRunner(Protocol):
    """Makes training steps, as TorchRec's pipelines do."""

    def progress(self, dataloader_iter: Iterator[TowerBatch]) -> object:
        """Makes one step on the next batch."""

    def detach(self) -> object:
        """Gives the model its own forwards back."""


Steps = Callable[[DistributedModelParallel, HybridOptimizer, Runtime], StepRunner]


def plain_steps(
    model: DistributedModelParallel, optimizer: HybridOptimizer, runtime: Runtime
) -> StepRunner:
    """Returns TorchRec's pipeline without any checks, for a training loop of one's own."""
    pipeline: StepRunner = TrainPipelineSparseDist(
        model, optimizer, runtime.device, execute_all_batches=True
    )
    return pipeline


class Trials:
    """Sharded samples that are ready to step; their memory is free again after the ``with``.

    Args:
        runtime: this process's rank and device.
        optimizer: optimizers of tables and dense layers.
        steps: makes what runs the steps of a sharded sample, as the training will; the same on every rank.
    """

    def __init__(
        self, runtime: Runtime, optimizer: OptimizerConfig, steps: Steps = plain_steps
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._make = steps
        self._pipelines: list[StepRunner] = []
        self._steps: dict[PlanConfig, Callable[[], object]] = {}

    def add(self, sample: Sample, config: PlanConfig) -> None:
        """Shards ``sample`` by the plan that ``config`` asks for, and fills its pipeline. Collective.

        Args:
            sample: sample of the model.
            config: plan settings, under which :meth:`ms` finds the trial.

        Raises:
            ValueError: there is no such plan.
        """
        model = copy.deepcopy(sample.model)
        plan = plan_sharding(
            model,
            self._runtime,
            config,
            optimizer=self._optimizer,
            batch_size=len(sample.batch),
        )
        sharded, optimizer = hybrid_parallel(
            model,
            self._runtime,
            plan=plan,
            optimizer=self._optimizer,
            codecs=codecs_of(config),
        )
        pipeline = self._make(sharded, optimizer, self._runtime)
        endless = itertools.cycle(sample.batches)
        sharded.train()
        for _ in range(_WARM_UP):
            pipeline.progress(endless)
        self._pipelines.append(pipeline)
        self._steps[config] = lambda: pipeline.progress(endless)

    def ms(self, configs: Sequence[PlanConfig], seconds: float) -> list[float]:
        """Returns the median of the ms of a step under each config, equal on all ranks. Collective.

        A few steps of each are made in a row, round by round: a machine's speed varies by a fifth within seconds, which
        affects all configs alike this way.

        Args:
            configs: configs of added samples.
            seconds: approximate time to spend on each.
        """
        steps = [self._steps[config] for config in configs]
        in_a_row = []
        round_s = 0.0
        for step in steps:
            # Ranks must make equally many steps, or a collective would wait for ever.
            # So all go by the slowest time.
            step_s = max_over_ranks(self._mean_s(step), self._runtime)
            count = min(max(int(_IN_A_ROW_S / max(step_s, 1e-6)), 1), 8)
            in_a_row.append(count)
            round_s += step_s * count
        # Computed from times that are equal on all ranks, so that all ranks make
        # equally many rounds.
        least, most = _ROUNDS
        rounds = min(max(int(seconds * len(steps) / max(round_s, 1e-6)), least), most)
        samples: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            for step, count, times in zip(steps, in_a_row, samples, strict=True):
                # A rank that begins earlier would wait for the others within its
                # measured time.
                if dist.is_initialized():
                    dist.barrier()
                times.append(self._mean_s(step, count))
        medians = []
        for times in samples:
            # The slowest rank's time is that of the step, and the median forgets rounds
            # that other processes disturbed.
            slowest = [max_over_ranks(seconds, self._runtime) for seconds in times]
            medians.append(1e3 * statistics.median(slowest))
        return medians

    def _mean_s(self, step: Callable[[], object], count: int = 1) -> float:
        """Returns the mean seconds of ``count`` steps."""
        self._wait_for_device()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self._wait_for_device()
        return (time.perf_counter() - start) / count

    def _wait_for_device(self) -> None:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # They hold the pipelines, and with them the tables.
        self._steps.clear()
        while self._pipelines:
            self._pipelines.pop().detach()
        # The tables are in reference cycles, so only the collector frees them.
        gc.collect()
