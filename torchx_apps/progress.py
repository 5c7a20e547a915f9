"""Progress: how far a stage of work is: a bar on a terminal, elsewhere a line every ten seconds; of rank 0 alone."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from torchrec_ext.distributed.runtime import Runtime

_EVERY_S = 10.0


class Progress:
    """Called with a stage, what is done of it and how much there is.

    Args:
        runtime: of this rank.
        app: what the lines begin with.
        bytes_of: stages that count bytes; the others count items.
    """

    def __init__(self, runtime: Runtime, app: str, *, bytes_of: tuple[str, ...] = ()) -> None:
        self._speaks, self._app, self._bytes_of = runtime.is_main, app, bytes_of
        self._on_terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._stage = ""
        self._next = time.monotonic() + _EVERY_S

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Tells, if it is time."""
        if not self._speaks:
            return
        if self._on_terminal:
            self._draw(stage, done, total)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            print(f"{self._app}: {stage}, {done:,} of {total:,} {'bytes' if stage in self._bytes_of else 'items'}", flush=True)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.__exit__()
            unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if stage in self._bytes_of else {"unit": " items"}
            self._bar, self._stage = tqdm(total=total, desc=stage, leave=False, **unit), stage
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
