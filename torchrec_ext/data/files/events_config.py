"""EventsConfig: the columns of a log's events, when they make a batch, and when a run over the log ends.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """A log that grows: a folder into which whole files of JSON lines, .jsonl or .ndjson, are renamed.

    Args:
        name: name of the log, for reports.
        folder: folder of the files, which are read in the order of their names, each as a whole.
        user: column with the id of the user, a whole number of 64 bits.
        item: column with the id of the item, likewise.
        label: column with a label from 0 to 1, such as a click; empty if each event is a positive.
        time: column with the seconds since 1970, by which the age of events is known; empty for none.
        batch_s: seconds that an event waits at most for others of its batch; 0 waits until the batch is full. Then the
            batches depend on the log alone, and a run that was killed ends as if it had not been.
        until_idle_s: seconds without a new event after which the run ends; 0 follows the log for ever.
        events: number of events, with those before a resume, after which the run ends; 0 for no such end.
    """

    name: str = "events"
    folder: str = ""
    user: str = "user_id"
    item: str = "item_id"
    label: str = ""
    time: str = ""
    batch_s: float = 0.0
    until_idle_s: float = 0.0
    events: int = 0

    def __post_init__(self) -> None:
        names = [self.user, self.item, *filter(None, (self.label, self.time))]
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(
                f"data.user={self.user!r}, data.item={self.item!r}, data.label={self.label!r}, "
                f"data.time={self.time!r}: name the columns of both ids, and each column once"
            )
        for name in ("batch_s", "until_idle_s", "events"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"data.{name}={getattr(self, name)}: must be 0 or more"
                )
