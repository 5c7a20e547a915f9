"""Figures of a stream: each event is predicted by the training step's own forward, before it is trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
        # Events since this process began or the last record, and those with the ones
        # before a resume.
        self._seen = 0
        self._events = 0
        self._sums: dict[str, float] = {}

    def see(self, output: Any) -> None:
        """Takes the output of a step; see :class:`torchrec_ext.train.loop.StepObserver`."""
        rows = self._loader.last
        assert rows is not None, "the step had a batch"
        logits = output.logits.detach().cpu().numpy().reshape(rows.items.shape)
        self._seen += len(rows.users)
        self._events += len(rows.users)
        for name, value in figures_of(
            rows, logits, calibrated=self._calibrated
        ).items():
            self._sums[name] = self._sums.get(name, 0.0) + value * len(rows.users)

    def figures(self) -> Record:
        """Returns the figures of the steps since the last call."""
        now = time.monotonic()
        figures: Record = {
            "events": self._loader.events,
            "events_per_s": self._seen / max(now - self._since, 1e-9),
        }
        for name, total in self._sums.items():
            figures[name] = total / max(self._events, 1)
        if not np.isnan(self._loader.newest):
            figures["behind_s"] = time.time() - self._loader.newest
        self._since = now
        self._seen = 0
        self._events = 0
        self._sums = {}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums since the last record, for a checkpoint."""
        return {"events": self._events, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the sums of :meth:`state_dict`; the rate is that of this process."""
        self._events = state["events"]
        self._sums = dict(state["sums"])


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
