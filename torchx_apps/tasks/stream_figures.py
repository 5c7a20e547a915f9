"""Figures of a stream: each event is predicted by the training step's own forward, before it is trained."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from torchrec_ext.data.columns import Array
from torchrec_ext.data.loader.events import EventLoader, EventRows
from torchrec_ext.train.config import Record


class Predictions:
    """Collects the predictions that training makes of each batch before it is trained on it.

    Args:
        loader: loader of the events.
        calibrated: whether logits are log-odds, as a log loss assumes.
    """

    def __init__(self, loader: EventLoader, *, calibrated: bool) -> None:
        self._calibrated = calibrated
        self._since = time.monotonic()
        self._loader = loader
        self._events = 0
        self._sums: dict[str, list[float]] = {}

    def see(self, output: Any) -> None:
        """Takes the output of a step; see :class:`torchrec_ext.train.loop.StepObserver`."""
        rows = self._loader.last
        assert rows is not None, "the step had a batch"
        logits = output.logits.detach().cpu().numpy().reshape(rows.items.shape)
        self._events += len(rows.users)
        for name, value in figures_of(
            rows, logits, calibrated=self._calibrated
        ).items():
            self._sums.setdefault(name, []).append(value * len(rows.users))

    def figures(self) -> Record:
        """Returns the figures of the steps since the last call."""
        now = time.monotonic()
        figures: Record = {
            "events": self._loader.events,
            "events_per_s": self._events / max(now - self._since, 1e-9),
        }
        for name, sums in self._sums.items():
            figures[name] = sum(sums) / max(self._events, 1)
        if not np.isnan(self._loader.newest):
            figures["behind_s"] = time.time() - self._loader.newest
        self._since = now
        self._events = 0
        self._sums = {}
        return figures


def figures_of(rows: EventRows, logits: Array, *, calibrated: bool) -> dict[str, float]:
    """Returns the log loss of predictions if they are calibrated, and the share of events ranked first of all drawn."""
    figures = {}
    if calibrated:
        losses = np.logaddexp(0, logits) - rows.labels * logits
        figures["log_loss"] = float((losses * rows.weights).sum() / rows.weights.sum())
    if logits.shape[1] > 1:
        # A candidate without weight is the event's own item, which was drawn too.
        others = np.where(rows.weights > 0, logits, -np.inf)[:, 1:].max(axis=1)
        figures["hit_rate"] = float((logits[:, 0] > others).mean())
    return figures
