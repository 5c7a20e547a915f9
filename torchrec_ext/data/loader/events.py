"""EventLoader: makes batches of the events of a log that grows, each once and in order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrec_ext.batch import ENDLESS, Jagged, TowerBatch
from torchrec_ext.data.columns import Chunk, Float32, Int64, concatenate_rows
from torchrec_ext.data.files import event_log
from torchrec_ext.data.files.event_log import NO_EVENTS, EventLog
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.data.loader.batch import Answers, RowColumns, assemble
from torchrec_ext.schema import BatchSchema, RowNumbers

# Seconds between two looks at a log without new events.
_POLL_S = 0.05
# Features of a batch.
USER, ITEM = "user_id", "item_id"


class EventRows(NamedTuple):
    """B events with their drawn negatives, W candidates each, the event's own item first.

    Attributes:
        users: (B,) ids.
        items: (B, W) ids.
        labels: (B, W) labels, 0 for drawn items.
        weights: (B, W) weights, 0 for a drawn item that is the event's own.
        log_q: (B, W) log-probability with which an item is drawn.
    """

    users: Int64
    items: Int64
    labels: Float32
    weights: Float32
    log_q: Float32

    @classmethod
    def drawn(cls, events: Chunk, negatives: int, seed: Sequence[int]) -> EventRows:
        """Draws negatives from the items of the events, each event's as likely as another's."""
        count = events.num_rows
        own = events[event_log.ITEM].values
        _, places, sizes = np.unique(own, return_inverse=True, return_counts=True)
        log_q = np.log(sizes / count).astype(np.float32)[places]
        # A generator of its own for each batch, so that a resumed run draws the same.
        draws = np.random.default_rng(seed).integers(count, size=(count, negatives))
        rows = np.concatenate([np.arange(count)[:, None], draws], axis=1)
        items = own[rows]
        labels = np.zeros(items.shape, np.float32)
        labels[:, 0] = events[event_log.LABEL].values
        weights = np.ones(items.shape, np.float32)
        weights[:, 1:] = items[:, 1:] != items[:, :1]
        return cls(events[event_log.USER].values, items, labels, weights, log_q[rows])


class EventLoader:
    """Yields batches of raw ids as long as the log grows; its length is ``ENDLESS`` until it has ended.

    Args:
        config: the log, when its events make a batch, and when the run ends.
        schema: schema of the batches, of the features ``user_id`` and ``item_id``.
        batch_size: number of events of a full batch.
        negatives: items drawn for each event from the others of its batch; 0 for events with labels, or for a softmax
            over the batch.
        seed: seed of the negatives.
        stop: whether the run is to end; events that fill no batch are then left to the next run.
        waiting: called between two looks at a log without new events; it may be replaced.

    Attributes:
        events: number of events so far.
        hook: where :class:`DynamicIdLoader` replaces the ids of the batches.
        last: the last batch, before ids become rows.
        newest: time of the last event, NaN for a log without times.
    """

    def __init__(
        self,
        config: EventsConfig,
        schema: BatchSchema,
        *,
        batch_size: int,
        negatives: int = 0,
        seed: int = 0,
        stop: Callable[[], bool] = lambda: False,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = EventLog(config)
        self._schema, self.hook = schema.with_hook()
        self._config = config
        self._batch_size = batch_size
        self._negatives = negatives
        self._seed = seed
        self._stop = stop
        self.waiting = waiting
        self.events = 0
        self.last: EventRows | None = None
        self.newest = math.nan
        self._batches = 0
        self._is_over = False
        # The log itself is ahead while a batch is not full.
        self._position = self._log.position
        # State of the log in a checkpoint, until it is opened there.
        self._saved: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return self._batches if self._is_over else ENDLESS

    def __iter__(self) -> Iterator[TowerBatch]:
        # Not in load_state_dict(): the error of a changed log is the run's, not that of
        # its checkpoint.
        self._log.load_state_dict(self._log_state())
        self._saved = None
        self._position = self._log.position
        while (events := self._next()).num_rows:
            self._position = self._log.position
            self.events += events.num_rows
            self.newest = float(events[event_log.TIME].values[-1])
            self.last = EventRows.drawn(
                events, self._negatives, (self._seed, self._batches)
            )
            self._batches += 1
            yield self._batch(self.last)
        self._is_over = True

    def _next(self) -> Chunk:
        """Waits for the events of a batch; returns none at the end."""
        config = self._config
        most = self._batch_size
        if config.events:
            most = min(most, config.events - self.events)
        events = NO_EVENTS
        begin = last = time.monotonic()
        while events.num_rows < most and not self._is_over:
            more = self._log.read(most - events.num_rows)
            now = time.monotonic()
            if more.num_rows:
                last = now
                # A batch waits from its first event on, not from the look at an empty
                # log.
                if not events.num_rows:
                    begin = now
                events = concatenate_rows([events, more], more)
            elif events.num_rows and config.batch_s and now - begin >= config.batch_s:
                break
            elif config.until_idle_s and now - last >= config.until_idle_s:
                # What is there makes the last batch.
                self._is_over = True
            else:
                self.waiting()
                time.sleep(_POLL_S)
            if self._stop():
                return NO_EVENTS
        return events

    def _batch(self, rows: EventRows) -> TowerBatch:
        count, width = rows.items.shape
        places = torch.arange(count).repeat_interleave(width)
        users = torch.from_numpy(rows.users)
        every = {
            USER: Jagged(users[places]),
            ITEM: Jagged(torch.from_numpy(rows.items.reshape(-1))),
        }
        weights = torch.from_numpy(rows.weights.reshape(-1))
        return assemble(
            self._schema,
            RowColumns(every, {}),
            Answers(torch.from_numpy(rows.labels.reshape(-1)), weights),
            total_weight=weights.sum(),
            numbers=RowNumbers(torch.arange(count * width), torch.arange(count)),
            shared=RowColumns({USER: Jagged(users)}, {}),
            index=places,
            shared_size=count,
            log_q=torch.from_numpy(rows.log_q.reshape(-1)),
        )

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: a log is read once."""

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the log's position after the last batch.

        Raises:
            ValueError: ``step`` is not the number of batches so far, because the loader has run ahead.
        """
        if step not in (None, self._batches):
            raise ValueError(
                f"step={step}: the log is at batch {self._batches}; save when no batch is under way"
            )
        return {
            "log": self._log_state(),
            "events": self.events,
            "batches": self._batches,
        }

    def _log_state(self) -> Mapping[str, Any]:
        return self._saved or self._log.state_dict(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of :meth:`state_dict`."""
        self._saved = state["log"]
        self.events = state["events"]
        self._batches = state["batches"]
