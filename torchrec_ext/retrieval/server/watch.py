"""Watch: follows the pointer to a bundle, and loads a new one beside the live one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.manifest import bundle_folder, fingerprint


class Watch:
    """Loads the bundle behind a pointer whenever it is another one.

    Args:
        pointer: see :func:`~torchrec_ext.retrieval.manifest.bundle_folder`.
        every_s: seconds between two looks.
        threads: threads of a bundle's graphs.
        swap: takes a new bundle into service.
        refuse: takes the reason of a bundle that was refused.

    Attributes:
        seen: fingerprint of the bundle that was loaded or refused last.
    """

    def __init__(
        self,
        pointer: Path,
        every_s: float,
        threads: int,
        swap: Callable[[Bundle], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        self._pointer = pointer
        self._every_s = every_s
        self._threads = threads
        self._swap = swap
        self._refuse = refuse
        # Taken before loading, to notice a pointer that moves during the load.
        self.seen = fingerprint(pointer)

    def load(self) -> Bundle:
        """Loads the bundle behind the pointer, with its audit.

        Raises:
            ValueError: there is none, or it is refused.
        """
        return Bundle.load(bundle_folder(self._pointer), threads=self._threads)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._every_s)
            await loop.run_in_executor(None, self.look)

    def look(self) -> None:
        """Takes the bundle behind the pointer into service if it is another one."""
        now = fingerprint(self._pointer)
        if now == self.seen:
            return
        self.seen = now
        try:
            self._swap(self.load())
        # Any error of a new bundle leaves the live one serving.
        except Exception as error:
            self._refuse(error)
