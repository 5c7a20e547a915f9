"""EarlyStopWatch: follows the evaluations of a run, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.train.config import EarlyStop


class EarlyStopWatch:
    """Follows the evaluations of one run; every rank has one, and rank 0's figures decide for all.

    Args:
        config: the figure to watch, and the patience.
        runtime: rank and device of this process.
    """

    def __init__(self, config: EarlyStop, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._without_gain = 0
        self.best: dict[str, Any] | None = None

    def see(self, record: Mapping[str, Any]) -> bool:
        """Takes an evaluation; returns whether it is the best so far, False if nothing is watched.

        Raises:
            ValueError: the evaluation has no such figure, or the figure is not a number, on every rank alike.
        """
        name = self._config.metric
        if not name:
            return False
        if not isinstance(record.get(name), float):
            figures = ", ".join(
                key for key, value in record.items() if isinstance(value, float)
            )
            raise ValueError(
                f"train.early_stop.metric={name!r}: an evaluation has no such figure; it has {figures or 'none'}"
            )
        # Figures may differ between ranks by rounding, and ranks that decide
        # differently would deadlock.
        value = gather_objects(record[name], self._runtime.world_size)[0]
        if math.isnan(value):
            raise ValueError(
                f"train.early_stop.metric={name!r}: the figure is nan at step {record['step']}, so nothing can be "
                "compared"
            )
        better = True
        if self.best is not None:
            gain = float(value - self.best["best"])
            if self._config.mode == "min":
                gain = -gain
            better = gain > 0
        if better:
            self._without_gain = 0
            self.best = {
                "best": value,
                "best_epoch": record["epoch"],
                "best_step": record["step"],
            }
        else:
            self._without_gain += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, ready for JSON."""
        # Checkpoints hold these keys.
        return {"since": self._without_gain, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`."""
        self._without_gain = int(state["since"])
        self.best = state["best"]

    def stops(self) -> dict[str, Any] | None:
        """Returns the record of an early stop if the run should end now, else None."""
        if self.best is None or self._without_gain < self._config.patience:
            return None
        name = self._config.metric
        best = self.best["best"]
        epoch = self.best["best_epoch"]
        message = (
            f"stopped early: no {name} better than {best:.4f}, of epoch {epoch}, in "
            f"{self._without_gain} evaluation(s)"
        )
        return {"kind": "stop", "metric": name, **self.best, "message": message}

    def better_than(self, step: int) -> dict[str, Any] | None:
        """Returns the best evaluation if a run ending at ``step`` should go back to it, else None."""
        if not (self._config.metric and self._config.restore):
            return None
        if self.best is None or self.best["best_step"] == step:
            return None
        return self.best

    def told(self, best: Mapping[str, Any]) -> str:
        """Returns the name of the best evaluation for messages."""
        return f"epoch {best['best_epoch']} ({self._config.metric} {best['best']:.4f})"
