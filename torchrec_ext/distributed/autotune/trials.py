"""Trials: runs whole steps of a sample of the model under several plans, in turn."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from typing_extensions import Self

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.sample import Sample, Stopwatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.measurements import Measurements
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import codecs_of

_WARM_UP = 2  # steps that fill the pipeline


class StepRunner(Protocol):
    """Makes training steps, as TorchRec's pipelines do."""

    def progress(self, dataloader_iter: Iterator[TowerBatch]) -> object:
        """Makes one step on the next batch."""

    def detach(self) -> object:
        """Gives the model its own forwards back."""


Steps = Callable[[DistributedModelParallel, HybridOptimizer, Runtime], StepRunner]


def plain_steps(model: DistributedModelParallel, optimizer: HybridOptimizer, runtime: Runtime) -> StepRunner:
    """Returns TorchRec's pipeline without any checks, for a training loop of one's own."""
    pipeline: StepRunner = TrainPipelineSparseDist(model, optimizer, runtime.device, execute_all_batches=True)
    return pipeline


class Trials:
    """Sharded samples that are ready to step; their memory is free again after the ``with``.

    Args:
        runtime: this process's rank and device.
        optimizer: optimizers of tables and dense layers.
        steps: makes what runs the steps of a sharded sample, as the training will; the same on every rank.
    """

    def __init__(self, runtime: Runtime, optimizer: OptimizerConfig, steps: Steps = plain_steps) -> None:
        self._runtime, self._optimizer, self._make = runtime, optimizer, steps
        self._watch = Stopwatch(runtime)
        self._pipelines: list[StepRunner] = []
        self._steps: dict[PlanConfig, Callable[[], object]] = {}

    def add(self, sample: Sample, config: PlanConfig, measured: Measurements | None = None) -> None:
        """Shards ``sample`` by the plan that ``config`` asks for, and fills its pipeline. Collective.

        Args:
            sample: sample of the model.
            config: plan settings, under which :meth:`ms` finds the trial.
            measured: measurements for the planner's cost model.

        Raises:
            ValueError: there is no such plan.
        """
        model = copy.deepcopy(sample.model)
        plan = plan_sharding(
            model, self._runtime, config, optimizer=self._optimizer, batch_size=len(sample.batch), measured=measured
        )
        sharded, optimizer = hybrid_parallel(
            model, self._runtime, plan=plan, optimizer=self._optimizer, codecs=codecs_of(config)
        )
        pipeline = self._make(sharded, optimizer, self._runtime)
        endless = itertools.cycle(sample.batches)
        sharded.train()
        for _ in range(_WARM_UP):
            pipeline.progress(endless)
        self._pipelines.append(pipeline)
        self._steps[config] = lambda: pipeline.progress(endless)

    def ms(self, configs: Sequence[PlanConfig], seconds: float) -> list[float]:
        """Returns the ms of a step under each config, in about ``seconds`` for each, equal on all ranks. Collective."""
        return self._watch.in_turn([self._steps[config] for config in configs], seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.clear()
        while self._pipelines:
            self._pipelines.pop().detach()
        gc.collect()  # frees the tables, which are in reference cycles
