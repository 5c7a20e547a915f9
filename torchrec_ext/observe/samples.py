"""Samples: the seconds of a training loop by the user's lines, whatever they do."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.observe.user_lines import SampledLine, Stack, lines_of, stack_of

_SAMPLE_EVERY_S = 3e-3
_BATCHES = str(Path(__file__).parents[1] / "diagnose" / "batches.py")


def _part_and_line(stack: Stack) -> tuple[str, SampledLine]:
    of_data = any(
        code.co_filename == _BATCHES and code.co_name == "take" for code, _ in stack
    )
    return "data" if of_data else "step", lines_of(stack)[1]


class Samples:
    """Seconds of this thread by line, sampled by another thread while the context is open.

    Python hands over from one thread to the next when a call has ended. A short switch interval makes that the line
    that took the time, and not a later one.

    There is no garbage collection meanwhile: it is no work of the line at which it begins.

    Attributes:
        seconds: seconds by part (``data`` or ``step``) and line.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, SampledLine], float] = defaultdict(float)
        self._stacks: defaultdict[Stack, float] = defaultdict(float)
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Samples:
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self._collects = gc.isenabled()
        gc.disable()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        if self._collects:
            gc.enable()
        sys.setswitchinterval(self._switch_interval)
        for stack, seconds in self._stacks.items():
            self.seconds[_part_and_line(stack)] += seconds

    def _sample(self) -> None:
        # Random distances, or a step of a regular length would always be met at the
        # same line.
        generator = random.Random(0)
        due = time.perf_counter()
        # Little is done here, since the loop waits for it.
        while not self._stop.wait(due - time.perf_counter()):
            frame = sys._current_frames().get(self._thread)
            now = time.perf_counter()
            past = due
            # Moments are set beforehand: a call that holds Python has all that fall
            # into it.
            while due <= now:
                due += generator.uniform(0.2, 1.8) * _SAMPLE_EVERY_S
            self._stacks[tuple(stack_of(frame))] += due - past
