"""EarlyStop: when a run may end before its last epoch, and which of its evaluations was the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from torchrec_ext.distributed.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a run whose figure no longer gets better.

    Args:
        metric: name of an evaluated figure, such as ``auc``; empty for no early stop.
        mode: whether the figure should rise (``max``) or fall (``min``).
        patience: evaluations without a better figure after which the run ends.
        min_delta: by how much a figure must be better than the best to count.
        restore: end the run, early or not, with the weights of its best evaluation, which are then tested, exported and served;
            else with those of its last step.
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
        config: what to watch.
        runtime: this process's place in the job.
    """

    def __init__(self, config: EarlyStop, runtime: Runtime) -> None:
        self._config, self._runtime = config, runtime
        self._since = 0
        self.best: dict[str, Any] | None = None

    def see(self, record: Mapping[str, Any]) -> bool:
        """Whether this evaluation is the best so far; False where nothing is watched.

        Raises:
            ValueError: the evaluation has no such figure, or it is not a number, on every rank alike.
        """
        name = self._config.metric
        if not name:
            return False
        if not isinstance(record.get(name), float):
            figures = ", ".join(key for key, value in record.items() if isinstance(value, float))
            raise ValueError(f"train.early_stop.metric={name!r}: an evaluation has no such figure; it has {figures or 'none'}")
        value = self._agreed(record[name])
        if math.isnan(value):
            raise ValueError(
                f"train.early_stop.metric={name!r}: the figure is nan at step {record['step']}, so nothing can be compared"
            )
        better = self.best is None or self._gain(value) > self._config.min_delta
        self._since = 0 if better else self._since + 1
        if better:
            self.best = {"best": value, "best_epoch": record["epoch"], "best_step": record["step"]}
        return better

    def state_dict(self) -> dict[str, Any]:
        """What it has seen, as JSON holds it."""
        return {"since": self._since, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As if it had seen what another one has."""
        self._since, self.best = int(state["since"]), state["best"]

    def stops(self) -> dict[str, Any] | None:
        """What a record says of the end, where the run should end now."""
        if self.best is None or self._since < self._config.patience:
            return None
        name, best, epoch = self._config.metric, self.best["best"], self.best["best_epoch"]
        message = f"stopped early: no {name} better than {best:.4f}, of epoch {epoch}, in {self._since} evaluation(s)"
        return {"kind": "stop", "metric": name, **self.best, "message": message}

    def better_than(self, step: int) -> dict[str, Any] | None:
        """The best evaluation, where a run that ends at ``step`` should go back to it."""
        if not (self._config.metric and self._config.restore) or self.best is None or self.best["best_step"] == step:
            return None
        return self.best

    def told(self, best: Mapping[str, Any]) -> str:
        """How a message names the best evaluation."""
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
