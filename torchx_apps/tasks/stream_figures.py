"""Figures of a stream by the age of the model: each event is predicted before it is trained, and by older bundles.

Age 0 is the training step's own forward; the others are the bundles that servers answer with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrec_ext.data.columns import Array
from torchrec_ext.data.loader.events import ITEM, USER, EventLoader, EventRows
from torchrec_ext.drawing.figures import BLUE, RED, figure_with_panels, save_figure
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.train.config import Record
from torchrec_ext.train.report.progress import records_of

# Events that each bundle predicts at a publication, the last ones before it.
_PREDICTED = 500
_NAMES = {"log_loss": "log loss", "hit_rate": "hit rate"}


class _Predicted(NamedTuple):
    """Events with their candidates, and the logits that the model gave them before it was trained on them."""

    rows: EventRows
    logits: Array


class Predictions:
    """Collects the predictions that training makes of each batch before it is trained on it.

    Args:
        loader: loader of the events.
        calibrated: whether logits are log-odds, as a log loss assumes.

    Attributes:
        recent: the last events with their logits.
        time: time of the last step, on the monotonic clock.
    """

    def __init__(self, loader: EventLoader, *, calibrated: bool) -> None:
        self.calibrated = calibrated
        self.recent: list[_Predicted] = []
        self.time = self._since = time.monotonic()
        self._loader = loader
        self._events = 0
        self._sums: dict[str, list[float]] = {}

    @property
    def events(self) -> int:
        """Number of events so far."""
        return self._loader.events

    def see(self, output: Any) -> None:
        """Takes the output of a step; see :class:`torchrec_ext.train.loop.StepObserver`."""
        rows = self._loader.last
        assert rows is not None, "the step had a batch"
        # A copy: a captured step writes the next logits into the same memory.
        predicted = _Predicted(
            rows, output.logits.detach().cpu().numpy().reshape(rows.items.shape).copy()
        )
        self.time = time.monotonic()
        self._events += len(rows.users)
        for name, value in figures_of(predicted, calibrated=self.calibrated).items():
            self._sums.setdefault(name, []).append(value * len(rows.users))
        self.recent.append(predicted)
        while sum(len(each.logits) for each in self.recent[1:]) >= _PREDICTED:
            del self.recent[0]

    def figures(self) -> Record:
        """Returns the figures of the steps since the last call."""
        now = time.monotonic()
        figures: Record = {
            "events": self.events,
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


def figures_of(predicted: _Predicted, *, calibrated: bool) -> dict[str, float]:
    """Returns the log loss of predictions if they are calibrated, and the share of events ranked first of all drawn."""
    rows, logits = predicted
    figures = {}
    if calibrated:
        losses = np.logaddexp(0, logits) - rows.labels * logits
        figures["log_loss"] = float((losses * rows.weights).sum() / rows.weights.sum())
    if logits.shape[1] > 1:
        # A candidate without weight is the event's own item, which was drawn too.
        others = np.where(rows.weights > 0, logits, -np.inf)[:, 1:].max(axis=1)
        figures["hit_rate"] = float((logits[:, 0] > others).mean())
    return figures


class Ages:
    """Has the last few bundles predict events that came after them.

    Args:
        predictions: the predictions of training.
        keep: number of bundles.
    """

    def __init__(self, predictions: Predictions, keep: int) -> None:
        self._predictions = predictions
        self._keep = keep
        self._bundles: list[tuple[Bundle, int, float]] = []

    def add(self, bundle: Bundle) -> None:
        """Adds a bundle of the model as it is now; it is asked about later events alone."""
        # The newest first: its place in the list is the number of its age.
        self._bundles = [
            (bundle, self._predictions.events, time.monotonic()),
            *self._bundles,
        ][: self._keep]
        self._predictions.recent.clear()

    def records(self, step: int) -> Iterator[Record]:
        """Yields a record of kind ``age`` for training, of age 0, and for each bundle, on the same events."""
        predictions = self._predictions
        if not self._bundles or not predictions.recent:
            return
        columns = zip(*(each.rows for each in predictions.recent), strict=True)
        rows = EventRows(*(np.concatenate(column)[-_PREDICTED:] for column in columns))
        logits = np.concatenate([each.logits for each in predictions.recent])[
            -_PREDICTED:
        ]
        ages = [(logits, predictions.events, predictions.time)]
        ages += [
            (_logits(bundle, rows), events, since)
            for bundle, events, since in self._bundles
        ]
        for number, (logits, events, since) in enumerate(ages):
            figures = figures_of(
                _Predicted(rows, logits), calibrated=predictions.calibrated
            )
            age = {
                "bundle": number,
                "age_s": predictions.time - since,
                "age_events": predictions.events - events,
            }
            yield {"kind": "age", "epoch": 1, "step": step, **age, **figures}


def _logits(bundle: Bundle, rows: EventRows) -> Array:
    """Returns the logits (B, W) that a server gives."""
    queries = bundle.query.embed({USER: rows.users.tolist()})
    count = rows.items.shape[1]
    candidates = bundle.candidate.embed({ITEM: rows.items.reshape(-1).tolist()})
    logits = [
        bundle.pairs(query, candidates[place * count : (place + 1) * count])
        for place, query in enumerate(queries)
    ]
    return np.stack(logits)


def draw_stream(records: Sequence[Record], path: Path) -> str:
    """Draws a figure over the events and by the age of the model, and returns the conclusion, the picture's title."""
    trained = records_of(records, "train")
    name = next((name for name in _NAMES if trained and name in trained[-1]), "loss")
    label = _NAMES.get(name, name)
    points = _by_age(records_of(records, "age"), name)
    conclusion = f"{label} of events before they are trained"
    if trained:
        conclusion += f": {trained[-1][name]:.4f} at the end"
    if points:
        older = ", ".join(
            f"{value:.4f} by a bundle {seconds:.3g} s old"
            for seconds, value in points[1:]
        )
        conclusion = f"{label} of the same events: {points[0][1]:.4f} by the model in training, {older}"
    figure, (over_events, over_ages) = figure_with_panels(2, (11, 4))
    over_events.plot(
        [record["events"] for record in trained],
        [record[name] for record in trained],
        color=BLUE,
    )
    over_events.set(xlabel="events", ylabel=f"{label}, before training")
    over_ages.plot(
        [age for age, _ in points],
        [value for _, value in points],
        color=RED,
        marker="o",
    )
    over_ages.set(
        xlabel="age of the model, seconds", ylabel=f"{label}, of the same events"
    )
    figure.suptitle(conclusion, fontsize="medium", wrap=True)
    save_figure(figure, path)
    return conclusion


def _by_age(ages: Sequence[Record], name: str) -> list[tuple[float, float]]:
    """Returns the mean age in seconds and the mean figure of training and of each bundle, on the same events."""
    oldest = max((record["bundle"] for record in ages if name in record), default=-1)
    # Publications with fewer bundles are left out, because not every age has their
    # events.
    steps = {record["step"] for record in ages if record["bundle"] == oldest}
    points = []
    for bundle in range(oldest + 1):
        group = [
            record
            for record in ages
            if record["bundle"] == bundle and record["step"] in steps
        ]
        points.append((_mean(group, "age_s"), _mean(group, name)))
    return points


def _mean(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))
