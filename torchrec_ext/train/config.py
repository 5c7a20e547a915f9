"""TrainConfig: how a run is trained.

Schedule: how learning rates change over a run, by torch's own LambdaLR, the tables' inside their kernels included.

EarlyStop: when a run may end before its last epoch, and which of its evaluations was the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.guards.amp import Amp
from torchrec_ext.train.step.choose import Compile, Threads

Kind = Literal["constant", "linear", "cosine", "inverse_sqrt", "step"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate, by step.

    The rate rises in equal parts over ``warmup`` steps to the optimizer's learning rate, then follows
    ``kind``: ``constant``; ``linear`` or ``cosine`` down to ``floor`` at the last step; ``inverse_sqrt``, sqrt(warmup /
    step) (Vaswani et al. 2017); ``step``, times ``gamma`` every ``every`` steps.

    Args:
        kind: form of the part after the warm-up.
        warmup: steps of the warm-up; the first has 1 / warmup of the rate.
        floor: factor at the last step of ``linear`` and ``cosine``, 0 to 1.
        every: steps between two drops of ``step``.
        gamma: factor of each drop of ``step``, 0 to 1.
    """

    kind: Kind = "constant"
    warmup: int = 0
    floor: float = 0.0
    every: int = 0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(get_args(Kind))}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must be 0 steps or more")
        for name in ("floor", "gamma"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be between 0 and 1")
        if self.kind == "step" and self.every < 1:
            raise ValueError(
                f"every={self.every}: the kind step needs the number of steps between two drops, 1 or more"
            )

    @property
    def changes(self) -> bool:
        """Whether the factor is anything but 1 throughout."""
        return self.kind != "constant" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """Returns the factor of a step.

        Args:
            step: number of the step, counted from 0.
            steps: number of steps of the whole run.

        Example:
            >>> [round(Schedule(kind="linear", warmup=2).factor(step, 6), 2) for step in range(6)]
            [0.5, 1.0, 1.0, 0.67, 0.33, 0.0]
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        after, last = step - self.warmup, max(steps - 1 - self.warmup, 1)
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(self.warmup, 1) / max(step + 1, 1))
        if self.kind == "step":
            return self.gamma ** (after // self.every)
        done = min(after / last, 1.0)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.kind]
        return self.floor + (1 - self.floor) * left


def scheduler(optimizer: KeyedOptimizer, tables: Schedule, dense: Schedule, steps: int) -> LambdaLR:
    """Builds the scheduler of all learning rates of a run, to be stepped after each step; it sets the first rates.

    TorchRec's WarmupOptimizer would give all groups one rate and keep its position outside of the state of a combined
    optimizer.

    Args:
        optimizer: optimizer from :func:`hybrid_parallel`; every group of another optimizer follows ``dense``.
        tables: schedule of all tables; kernels take the new rate when gradients are set to zero.
        dense: schedule of the dense layers.
        steps: number of steps of the whole run.

    Raises:
        ValueError: a warm-up is longer than the run.
    """
    for name, schedule in (("tables_schedule", tables), ("dense_schedule", dense)):
        if schedule.warmup >= steps and schedule.changes:
            raise ValueError(
                f"{name}: warmup={schedule.warmup} steps, but the run has {steps}; a warm-up must end before the run"
            )
    of_tables = {id(group) for group in optimizer.table_groups} if isinstance(optimizer, HybridOptimizer) else set()
    schedules = [tables if id(group) in of_tables else dense for group in optimizer.param_groups]
    return LambdaLR(optimizer, [partial(schedule.factor, steps=steps) for schedule in schedules])


def rates(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """Returns the learning rates of the first group of tables and of dense layers, as a record shows them."""
    if not isinstance(optimizer, HybridOptimizer):
        return {"dense_lr": optimizer.param_groups[0]["lr"]}
    groups = {"tables_lr": optimizer.table_groups, "dense_lr": optimizer.dense_groups}
    return {name: group[0]["lr"] for name, group in groups.items() if group}


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a run whose figure no longer gets better.

    Args:
        metric: name of an evaluated figure, such as ``auc``; empty for no early stop.
        mode: whether the figure should rise (``max``) or fall (``min``).
        patience: evaluations without a better figure after which the run ends.
        min_delta: least difference from the best figure that counts as better.
        restore: end the run, early or not, with the weights of its best evaluation, which are then tested, exported and
            served; else with those of its last step.
    """

    metric: str = ""
    mode: Literal["max", "min"] = "max"
    patience: int = 3
    min_delta: float = 0.0
    restore: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Literal["max", "min"]):
            raise ValueError(f"mode={self.mode!r}: must be max or min")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience}: must be 1 evaluation or more")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"min_delta={self.min_delta}: must be a number of 0 or more")


class EarlyStopWatch:
    """Follows the evaluations of one run; every rank has one, and rank 0's figures decide for all.

    Args:
        config: the figure to watch, and the patience.
        runtime: rank and device of this process.
    """

    def __init__(self, config: EarlyStop, runtime: Runtime) -> None:
        self._config, self._runtime = config, runtime
        self._since = 0
        self.best: dict[str, Any] | None = None

    def see(self, record: Mapping[str, Any]) -> bool:
        """Takes an evaluation; returns whether it is the best so far, False where nothing is watched.

        Raises:
            ValueError: the evaluation has no such figure, or the figure is not a number, on every rank alike.
        """
        name = self._config.metric
        if not name:
            return False
        if not isinstance(record.get(name), float):
            figures = ", ".join(key for key, value in record.items() if isinstance(value, float))
            raise ValueError(
                f"train.early_stop.metric={name!r}: an evaluation has no such figure; it has {figures or 'none'}"
            )
        value = self._agreed(record[name])
        if math.isnan(value):
            raise ValueError(
                f"train.early_stop.metric={name!r}: the figure is nan at step {record['step']}, so nothing can be "
                "compared"
            )
        better = self.best is None or self._gain(value) > self._config.min_delta
        self._since = 0 if better else self._since + 1
        if better:
            self.best = {"best": value, "best_epoch": record["epoch"], "best_step": record["step"]}
        return better

    def state_dict(self) -> dict[str, Any]:
        """Returns what it has seen, as JSON can hold it."""
        return {"since": self._since, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self._since, self.best = int(state["since"]), state["best"]

    def stops(self) -> dict[str, Any] | None:
        """Returns the record of the end where the run should end now, else None."""
        if self.best is None or self._since < self._config.patience:
            return None
        name, best, epoch = self._config.metric, self.best["best"], self.best["best_epoch"]
        message = f"stopped early: no {name} better than {best:.4f}, of epoch {epoch}, in {self._since} evaluation(s)"
        return {"kind": "stop", "metric": name, **self.best, "message": message}

    def better_than(self, step: int) -> dict[str, Any] | None:
        """Returns the best evaluation where a run that ends at ``step`` should go back to it, else None."""
        if not (self._config.metric and self._config.restore) or self.best is None or self.best["best_step"] == step:
            return None
        return self.best

    def told(self, best: Mapping[str, Any]) -> str:
        """Returns how a message names the best evaluation."""
        return f"epoch {best['best_epoch']} ({self._config.metric} {best['best']:.4f})"

    def _gain(self, value: float) -> float:
        before = self.best["best"] if self.best else value
        return float(value - before if self._config.mode == "max" else before - value)

    def _agreed(self, value: float) -> float:
        if self._runtime.world_size == 1:
            return value
        agreed = torch.tensor(value, dtype=torch.float64, device=self._runtime.device)
        dist.broadcast(agreed, src=0)
        return float(agreed)


Record = dict[str, Any]  # figures and messages by name, as metrics.jsonl has them


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the training loop.

    Args:
        epochs: passes over the data.
        log_every: steps between two records of loss and throughput, besides one at each epoch's end; a record is the
            only place where the loop waits for the device.
        eval_every: epochs between two evaluations; the last epoch is always evaluated.
        seed: seed of the dense layers, the tables and dropout; added to the loader's, for the order of samples and the
            negatives.
        tables_schedule: how the tables' learning rates change over the run.
        dense_schedule: how the dense layers' learning rates change over the run.
        early_stop: evaluations after which the run ends before its last epoch, and the weights it ends with.
        on_nan: what a loss or gradient that is NaN or infinite on some rank does: ``stop`` the run, or ``skip`` the
            step on all ranks, which then moves nothing; a record of kind ``left_out`` says why.
        check_gradients: check each step's gradients before they reach a sharded table, see :class:`GradientGate`:
            ``on``, ``off`` or ``auto``, which is on where it costs no wait for the device: on the CPU, and with
            ``on_nan=skip``. Where it is off, a gradient that is not finite is found after it has moved sharded tables.
            Captured steps are not checked.
        hang_s: seconds without a step after which a rank writes its stacks and ends the job; more than the slowest step
            takes. If not given, 100 times the slowest of the last steps, from 25 s to 240 s. 0 for never: collectives
            then fail after five minutes.
        trace_steps: steps, after the first five, that the timeline of all ranks shows; 0 for none.
        compile: capture the whole step, forward to optimizers, as one compiled graph (CPU) or CUDA graph, on a rank
            that no other waits for; members of a stack of networks together. ``auto`` captures where the rest of the
            run is long enough to pay for it and the model allows it, ``off`` never, ``require`` ends with an error
            where it is not possible. The result is the same to rounding; see :class:`Steps`.
        amp: ``bf16`` computes the dense layers in bfloat16; tables, weights and optimizer state stay float32. ``fp16``
            computes them in float16, for devices without bfloat16, with a scaled loss; see :class:`LossScaling`.
        threads: ``auto`` measures on the first steps, for two seconds, how many compute threads a process should have,
            and pins it to its share of the cores; ``given`` keeps those that it was started with.
    """

    epochs: int = 10
    log_every: int = 50
    eval_every: int = 1
    seed: int = 0
    tables_schedule: Schedule = field(default_factory=Schedule)
    dense_schedule: Schedule = field(default_factory=Schedule)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    on_nan: Literal["stop", "skip"] = "stop"
    check_gradients: Literal["auto", "on", "off"] = "auto"
    hang_s: float | None = None
    trace_steps: int = 0
    compile: Compile = "auto"
    amp: Amp = "off"
    threads: Threads = "given"

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.hang_s is not None and not self.hang_s >= 0:
            raise ValueError(f"hang_s={self.hang_s}: must be 0 seconds or more")
        if self.trace_steps < 0:
            raise ValueError(f"trace_steps={self.trace_steps}: must be 0 or more")
        checked = ("compile", get_args(Compile)), ("amp", get_args(Amp)), ("on_nan", ("stop", "skip"))
        for name, choices in (*checked, ("check_gradients", ("auto", "on", "off"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
