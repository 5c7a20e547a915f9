"""Writes a log, a file a second: users and items arrive and fade, and users take what they like.

    python examples/stream_clicks.py FOLDER [--events 100000] [--rate 1000] [--users 2000] [--items 1000] [--clicks]

A file holds the events of a second, and is renamed when it is whole. Without --rate all events are one file. A user
likes the items near to him or her on a circle; each item and user is there for a while and leaves for good, and ids are
random 64-bit numbers. With --clicks an event is an item that was shown, with a label `clicked`; else it is an item that
was taken. A second call goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np


def events(
    users: int, items: int, *, first: int, clicks: bool, lives: int = 200
) -> Iterator[dict[str, object]]:
    """Yields events from number ``first`` on; ``lives`` events for each one present replace all users and items."""
    number = first
    while True:
        # A generator of its own for each event, so that a second call goes on with the
        # same world.
        random = np.random.default_rng([7, number])
        age_of_user, age_of_item, taste, luck = random.random(4)
        # The youngest are the most active and the most popular ones.
        user = number // lives + users - 1 - int(age_of_user**2 * users)
        item = number // (2 * lives) + items - 1 - int(age_of_item**2 * items)
        # The golden ratio spreads places evenly over the circle.
        place, nearest = user * 0.6180339887 % 1, item * 0.7548776662 % 1
        distance = abs((place - nearest + 0.5) % 1 - 0.5)
        chance = 0.9 * np.exp(-((distance / 0.12) ** 2)) + 0.02
        number += 1
        if not clicks and taste > chance:
            continue
        event: dict[str, object] = {
            "user_id": id_of(user, 1),
            "item_id": id_of(item, 2),
            "time": round(time.time(), 3),
        }
        if clicks:
            event["clicked"] = int(luck < chance)
        yield event | {"number": number}


def id_of(number: int, kind: int) -> int:
    """Returns the random 64-bit id of a user or an item."""
    return int(np.random.default_rng([kind, number]).integers(-(2**63) + 1, 2**63 - 1))


def last_file(folder: Path) -> tuple[int, int]:
    """Returns the number of the last file, and that of its last event; -1 and 0 if there is none."""
    numbers = [
        int(path.stem.removeprefix("events-")) for path in folder.glob("events-*.jsonl")
    ]
    if not numbers:
        return -1, 0
    number = max(numbers)
    lines = (folder / f"events-{number}.jsonl").read_text().splitlines()
    return number, int(json.loads(lines[-1])["number"])


def write(folder: Path, number: int, lines: Sequence[str]) -> None:
    """Writes a file under a hidden name, and renames it: readers see it when it is whole."""
    path = folder / "_events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.rename(folder / f"events-{number}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="events a second; 0 writes all at once"
    )
    parser.add_argument(
        "--users", type=int, default=2_000, help="users who are there at a time"
    )
    parser.add_argument(
        "--items", type=int, default=1_000, help="items that are there at a time"
    )
    parser.add_argument(
        "--clicks",
        action="store_true",
        help="shown items with a label, instead of taken ones",
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    number, first = last_file(options.folder)
    source = events(options.users, options.items, first=first, clicks=options.clicks)
    a_file = max(1, int(options.rate)) if options.rate else options.events
    begin = time.time()
    for start in range(0, options.events, a_file):
        count = min(a_file, options.events - start)
        lines = []
        for event in islice(source, count):
            lines.append(json.dumps(event))
        if options.rate:
            time.sleep(max(0.0, begin + (start + count) / options.rate - time.time()))
        number += 1
        write(options.folder, number, lines)


if __name__ == "__main__":
    main()
