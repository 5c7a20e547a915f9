"""TrainConfig: how a run is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from torchrec_ext.train.amp import Amp
from torchrec_ext.train.early_stop import EarlyStop
from torchrec_ext.train.schedule import Schedule
from torchrec_ext.train.steps import Compile
from torchrec_ext.train.threads import Threads


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Args:
        epochs: passes over the data.
        log_every: steps between two records of loss and throughput, besides one at each epoch's end; a record is the only place
            where the loop waits for the device.
        eval_every: epochs between two evaluations; the last epoch is always evaluated.
        seed: of the dense layers, the tables and dropout; added to the loader's, of the order of samples and the negatives.
        tables_schedule: how the tables' learning rates change over the run.
        dense_schedule: how the dense layers' do.
        early_stop: after which evaluations the run ends before its last epoch, and with which weights.
        on_nan: what a loss or gradient that is NaN or infinite on some rank does: ``stop`` the run, or ``skip`` the step on all
            ranks, which then moves nothing; a record of kind ``left_out`` says why.
        check_gradients: look at each step's gradients before they reach a sharded table, see :class:`GradientGate`: ``on``, ``off``
            or ``auto``, which is on where it costs no wait for the device: on the CPU, and with ``on_nan=skip``. Where it is off, a
            gradient that is no number is found after sharded tables were moved by it. A captured step is not looked at.
        hang_s: seconds without a step after which a rank writes its stacks and ends the job; more than the slowest step takes.
            Where not given 100 times the slowest of the last steps, from 25 s to 240 s. 0 for never: collectives then fail after
            five minutes.
        trace_steps: steps, after the first five, that the timeline of all ranks shows; 0 for none.
        compile: capture the whole step, forward to optimizers, as one compiled graph (CPU) or CUDA graph, on a rank that no other
            waits for: ``auto`` where the rest of the run is long enough to pay for it and the model allows it, ``off``, or
            ``require``: an error where it is not possible. The result is the same to rounding; see :class:`Steps`.
        amp: ``bf16`` computes the dense layers in bfloat16; tables, weights and optimizer state stay what they are. ``fp16`` in
            float16, for devices without the other, with its loss scaled; see :class:`LossScaling`.
        threads: ``auto`` measures on the first steps, for two seconds, how many compute threads a process should have, and pins it
            to its share of the cores; ``given`` keeps those that it was started with.
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
