"""TrainConfig: settings of the training loop. Schedule: the learning rate by step.

EarlyStop: the condition for an end before the last epoch, and the choice of the best evaluation.

EvaluationConfig: the ranking figures of an evaluation, by name, and its baselines.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from torchrec_ext.capture.policy import Compile
from torchrec_ext.schema.validation import check_choice, check_least

Amp = Literal["off", "bf16", "fp16"]
Figure = Literal["hr", "recall", "precision", "ndcg", "mrr", "map"]
Baseline = Literal["popularity", "ease"]
ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate, by step.

    The rate rises linearly over ``warmup`` steps to the optimizer's learning rate, then follows ``kind``:
    ``constant``; ``linear`` or ``cosine`` down to 0 at the last step.

    Args:
        kind: form of the part after the warm-up.
        warmup: steps of the warm-up; the first has 1 / warmup of the rate.
    """

    kind: ScheduleKind = "constant"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(ScheduleKind))
        check_least("warmup", self.warmup, 0)

    @property
    def changes(self) -> bool:
        """Whether the factor differs from 1 in some step."""
        return self.kind != "constant" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """Returns the factor of a step.

        Args:
            step: number of the step, counted from 0.
            steps: number of steps of the run.

        Example:
            >>> [round(Schedule(kind="linear", warmup=2).factor(step, 6), 2) for step in range(6)]
            [0.5, 1.0, 1.0, 0.67, 0.33, 0.0]
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        steps_after_warmup = step - self.warmup
        # At least 1, for a run of one step after its warm-up.
        decay_steps = max(steps - 1 - self.warmup, 1)
        progress = min(steps_after_warmup / decay_steps, 1.0)
        if self.kind == "linear":
            return 1 - progress
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1.0


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a run once its figure stops improving.

    Args:
        metric: name of an evaluated figure, such as ``auc``; empty for no early stop.
        mode: whether the figure should rise (``max``) or fall (``min``).
        patience: number of evaluations without a better figure before the run ends.
        restore: end the run, early or not, with the weights of its best evaluation: these are tested, exported and
            served. If False, end with the weights of its last step.
    """

    metric: str = ""
    mode: Literal["max", "min"] = "max"
    patience: int = 3
    restore: bool = True

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("max", "min"))
        check_least("patience", self.patience)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of an evaluation.

    Args:
        metrics: ranking figures with the length of the list, as ``recall@20,ndcg@20``: ``hr``, ``recall``,
            ``precision``, ``ndcg``, ``mrr`` or ``map``, see :func:`query_figures`; by default the recipe's own.
        baselines: rankings to compare the model with, as ``popularity,ease``, fitted on its training rows and
            ranked by its rules: ``popularity``, always included; ``ease``, which predicts a user's items from the
            other items of that user (Steck 2019). By default all that take less than about ten seconds.
        ease_l2: penalty of EASE, above 0: 200 to 1,000 in the paper, which takes 500 for MovieLens 20M.

    Example:
        >>> EvaluationConfig(metrics=("recall@20", "ndcg@10")).figures
        [('recall', 20), ('ndcg', 10)]
    """

    metrics: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    ease_l2: float = 500.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ease_l2) and self.ease_l2 > 0):
            raise ValueError(f"ease_l2={self.ease_l2}: must be a number above 0")
        # Reading the figures checks their names.
        assert len(self.figures) == len(self.metrics)
        unknown = [name for name in self.baselines if name not in get_args(Baseline)]
        if unknown:
            raise ValueError(
                f"baselines: {', '.join(unknown)}: must be of {', '.join(get_args(Baseline))}"
            )

    @property
    def figures(self) -> list[tuple[Figure, int]]:
        """The figures, each with the length k of its list.

        Raises:
            ValueError: a name is unknown, or its number is not 1 or more.
        """
        figures: list[tuple[Figure, int]] = []
        for text in self.metrics:
            name, _, k = text.strip().partition("@")
            if name not in get_args(Figure) or not k.isdecimal() or int(k) < 1:
                raise ValueError(
                    f"metrics: '{text}' must be a figure and a number of items shown, such as recall@20; figures are "
                    f"{', '.join(get_args(Figure))} (RecBole's Hit is hr)"
                )
            figures.append((cast(Figure, name), int(k)))
        return figures


# Figures and messages by name, as written to metrics.jsonl.
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the training loop.

    Args:
        epochs: passes over the data.
        log_every: steps between two records of loss and throughput, in addition to one at each epoch's end. Only a
            record makes the loop wait for the device.
        eval_every: epochs between two evaluations; the last epoch is always evaluated.
        seed: seed of the dense layers, the tables and dropout; added to the loader's, for the order of samples and the
            negatives.
        schedule: how the learning rates of tables and dense layers change over the run.
        early_stop: when the run ends before its last epoch, and with which weights.
        hang_s: seconds after which a collective that another rank does not join fails, and so ends the job. A rank
            writes the stacks of its threads if a step takes half as long; more than the slowest step takes.
        compile: capture the whole step, forward to optimizers, as one compiled graph (CPU) or CUDA graph, on a rank
            that no other waits for; members of a stack of networks together. ``auto`` captures if the model allows it
            and the rest of the run is long enough to pay for it, ``off`` never captures, ``require`` ends with an error
            if it is not possible. The result is the same to rounding, but several dropouts may draw in another order;
            see :class:`Steps`. A module's Python numbers are read once: what you change while it trains, such as a
            temperature, belongs in a buffer.
        amp: ``bf16`` computes the dense layers in bfloat16; tables, weights and optimizer state stay float32. ``fp16``
            computes them in float16, for devices without bfloat16, with a scaled loss; see :class:`LossScaling`.
    """

    epochs: int = 10
    log_every: int = 50
    eval_every: int = 1
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    hang_s: float = 300.0
    compile: Compile = "auto"
    amp: Amp = "off"

    def __post_init__(self) -> None:
        check_least("epochs", self.epochs)
        check_least("log_every", self.log_every)
        check_least("eval_every", self.eval_every)
        if not self.hang_s > 0:
            raise ValueError(f"hang_s={self.hang_s}: must be more than 0 seconds")
        check_choice("compile", self.compile, get_args(Compile))
        check_choice("amp", self.amp, get_args(Amp))
