"""Time zones as numbers: when the offset from UTC changes, from 1970 to 2100.

Engines differ in which zones they know and in whose edition; a table that is saved with the preprocessor gives files and requests
the same hour, also after a government has changed its mind between fitting and serving.
"""

from __future__ import annotations

import datetime
import difflib
import zoneinfo
from functools import lru_cache

_FIRST, _LAST = 1970, 2100
_DAY = 86_400


@lru_cache
def offsets_of(zone: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Seconds since 1970 at which the offset changes, and the offsets in seconds: one more, the first one holds before.

    Raises:
        ValueError: there is no such zone.

    Example:
        >>> offsets_of("UTC")
        ((), (0,))
        >>> starts, offsets = offsets_of("Europe/Berlin")
        >>> offsets[:3], datetime.datetime.fromtimestamp(starts[0], datetime.timezone.utc).isoformat()
        ((3600, 7200, 3600), '1980-04-06T01:00:00+00:00')
    """
    try:
        found = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = difflib.get_close_matches(zone, zoneinfo.available_timezones(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "write a name such as UTC or Europe/Berlin (pip install tzdata has them)"
        raise ValueError(f"zone={zone!r}: there is no such time zone; {hint}") from None
    begin = int(datetime.datetime(_FIRST, 1, 1, tzinfo=datetime.timezone.utc).timestamp())
    end = int(datetime.datetime(_LAST, 1, 1, tzinfo=datetime.timezone.utc).timestamp())
    starts: list[int] = []
    offsets = [_offset(found, begin)]
    for day in range(begin, end, _DAY):
        after = _offset(found, day + _DAY)
        if after != offsets[-1]:
            starts.append(_change(found, day, day + _DAY))
            offsets.append(after)
    return tuple(starts), tuple(offsets)


def _offset(zone: zoneinfo.ZoneInfo, second: int) -> int:
    offset = datetime.datetime.fromtimestamp(second, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _change(zone: zoneinfo.ZoneInfo, low: int, high: int) -> int:
    """The first second with the offset of ``high``."""
    after = _offset(zone, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _offset(zone, middle) == after else (middle, high)
    return high
