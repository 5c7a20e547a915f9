"""Dynamic: how the ids of a table come and go.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from torchrec_ext.schema.validation import check_choice, check_least

Evict = Literal["lfu", "lru"]
# An index value has 32 bits, of which one is the sign.
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """How the ids of a table come and go.

    Args:
        capacity: rows of the table; row 0 is that of all ids without a row.
        admit_after: sightings in training before an id gets a row; from 2 on, row 0 learns from every first sight.
        evict: which ids make room: ``lfu``, those not seen for a half-life, and then those with the fewest sightings of
            late, or ``lru``, those not seen for longest.
        half_life: look-ups for each row of the table in which sightings count half under ``lfu``: with 16 and 1,000
            rows, every 16,000 look-ups. Infinity counts all alike, and keeps what was popular once.
        ttl: steps after which an id that was not seen loses its row in any case; 0 for never.

    Raises:
        ValueError: a setting out of its range.
    """

    capacity: int
    admit_after: int = 1
    evict: Evict = "lfu"
    half_life: float = 16.0
    ttl: int = 0

    def __post_init__(self) -> None:
        for name, least in (("capacity", 2), ("admit_after", 1), ("ttl", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r}: must be a whole number")
            check_least(name, int(value), least)
        check_choice("evict", self.evict, get_args(Evict))
        if self.capacity > _MOST_ROWS:
            raise ValueError(
                f"capacity={self.capacity}: must be at most {_MOST_ROWS:,} rows"
            )
        if not self.half_life > 0:
            raise ValueError(
                f"half_life={self.half_life}: must be above 0; inf forgets nothing"
            )

    @property
    def most_candidates(self) -> int:
        """Number of ids that are counted before their admission; beyond it, those not seen lately are forgotten."""
        return 0 if self.admit_after == 1 else self.capacity


class IdsChangedError(ValueError):
    """The ids of a checkpoint do not fit the tables of a job."""
