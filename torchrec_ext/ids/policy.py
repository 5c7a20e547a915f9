"""Dynamic: how the ids of a table come and go.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Evict = Literal["lfu", "lru"]
# An index value has 32 bits, of which one is a candidate's mark and one the sign.
_MOST_ROWS = 2**31 - 1
MOST_SIGHTINGS = 2**28


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """How the ids of a table come and go.

    Args:
        capacity: rows of the table; row 0 is that of all ids without a row.
        admit_after: sightings in training before an id gets a row; from 2 on, row 0 learns from every first sight.
        evict: which ids make room: ``lfu``, those with the fewest sightings of late, and those that came often and
            have been silent for longer than that explains, or ``lru``, those not seen for longest.
        half_life: look-ups for each row of the table in which sightings count half under ``lfu``: with 16 and 1,000
            rows, every 16,000 look-ups. Infinity counts all alike, and keeps what was popular once.
        ttl: steps after which an id that was not seen loses its row in any case; 0 for never.
        share: share of the rows that an eviction frees: few at a time, but not one by one.
        candidates: ids that may be counted before their admission; beyond it, those not seen lately are forgotten. By
            default as many as rows.

    Raises:
        ValueError: a setting out of its range.
    """

    capacity: int
    admit_after: int = 1
    evict: Evict = "lfu"
    half_life: float = 16.0
    ttl: int = 0
    share: float = 1 / 64
    candidates: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.capacity <= _MOST_ROWS:
            raise ValueError(
                f"capacity={self.capacity:,}: must be from 2 to {_MOST_ROWS:,} rows, of which row 0 is that of unknown "
                "ids"
            )
        if not 1 <= self.admit_after <= MOST_SIGHTINGS:
            raise ValueError(
                f"admit_after={self.admit_after:,}: must be from 1 to {MOST_SIGHTINGS:,} sightings"
            )
        if self.evict not in get_args(Evict):
            raise ValueError(
                f"evict={self.evict!r}: must be one of {', '.join(get_args(Evict))}"
            )
        if not self.half_life > 0:
            raise ValueError(
                f"half_life={self.half_life}: must be above 0 look-ups for each row; inf forgets nothing"
            )
        if self.ttl < 0:
            raise ValueError(
                f"ttl={self.ttl}: must be 0 or more steps; 0 evicts no id for its age"
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: must be above 0 and at most 1")
        if self.candidates is not None and self.candidates < 0:
            raise ValueError(f"candidates={self.candidates}: must be 0 or more ids")

    @property
    def most_candidates(self) -> int:
        """Number of ids that are counted before their admission."""
        if self.admit_after == 1:
            return 0
        return self.capacity if self.candidates is None else self.candidates


class IdsChangedError(ValueError):
    """The ids of a checkpoint do not fit the tables of a job."""
