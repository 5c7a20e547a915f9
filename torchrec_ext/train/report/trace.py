"""StepTrace: torch.profiler over some steps of training, a Chrome trace of each rank."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import (
    ProfilerActivity,
    profile,
    schedule,
    tensorboard_trace_handler,
)

from torchrec_ext.distributed.runtime import Runtime

# Steps before the traced ones: the first ones compile, and settle caches.
SKIP = 5
# A step is about half a MB of a trace.
MOST = 100


class StepTrace:
    """Profiles ``steps`` steps after the first few, and writes ``rank-R.TIME.pt.trace.json.gz`` into a folder.

    Chrome's tracing and Perfetto open the file. Holistic Trace Analysis compares those of all ranks.

    Args:
        runtime: rank and device of this process.
        steps: number of steps to profile.
        folder: the folder; made if it is not there.

    Attributes:
        folder: the folder.
    """

    def __init__(self, runtime: Runtime, steps: int, folder: Path) -> None:
        activities = [ProfilerActivity.CPU]
        if runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.folder = folder
        self._left = SKIP + steps
        self._profile = profile(
            activities=activities,
            # The step before the first one warms the profiler up.
            schedule=schedule(
                skip_first=SKIP - 1, wait=0, warmup=1, active=steps, repeat=1
            ),
            on_trace_ready=tensorboard_trace_handler(
                str(folder), f"rank-{runtime.rank}", use_gzip=True
            ),
        )
        self._profile.start()

    def step(self) -> bool:
        """Counts a step; returns whether it was the last one of the trace, which is then written."""
        if not self._left:
            return False
        self._left -= 1
        self._profile.step()
        if not self._left:
            self._profile.stop()
        return not self._left

    def close(self) -> None:
        """Ends the profile of a run that ends before its last traced step."""
        if self._left:
            self._left = 0
            self._profile.stop()


def check_fits(traced: int, steps: int) -> None:
    """Checks the number of steps to trace.

    Raises:
        ValueError: a run has fewer steps after the first few, or a trace of so many is too large to open.
    """
    if traced > MOST:
        raise ValueError(
            f"train.trace_steps={traced}: must be {MOST} or fewer; each takes about half a MB of a rank's trace"
        )
    if traced and SKIP + traced > steps:
        remedy = "train for longer"
        if steps > SKIP:
            remedy = f"trace {steps - SKIP} or fewer"
        raise ValueError(
            f"train.trace_steps={traced}: the run has {steps} steps, of which the first {SKIP} are not traced; {remedy}"
        )
