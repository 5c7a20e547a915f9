"""Where a run begins: anew, or at a checkpoint that --resume names or finds; and a signal that asks it to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url

CHECKPOINTS, LAUNCH = "checkpoints", "launch"


def newest_run(recipe: str, runs: Path = Path("runs"), *, launch: str | None = None) -> Path | None:
    """The run folder that ``--resume auto`` goes on in where no ``--run-dir`` names one.

    Args:
        recipe: the newest of its run folders with checkpoints.
        runs: where they are.
        launch: only that of this launch, see :func:`launch_id`: what a rank that was started again goes on in.
    """
    found = [folder.parent for folder in runs.glob(f"{recipe}-*/{CHECKPOINTS}") if CheckpointFolder(str(folder)).steps()]
    if launch is not None:
        found = [folder for folder in found if (folder / LAUNCH).is_file() and (folder / LAUNCH).read_text().strip() == launch]
    return max(found, key=lambda folder: folder.name, default=None)


def launch_id() -> str:
    """What all attempts of one launch have in common and no other launch has; empty without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether torchrun has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def resume_from(resume: str, checkpointer: Checkpointer, runtime: Runtime) -> str | None:
    """The checkpoint to begin from, the same on every rank; None to begin anew.

    Args:
        resume: ``never``; ``auto`` for the last good one of this run's folder; or the path or address of a checkpoint, of a folder
            of checkpoints, or of a run folder.
        checkpointer: of this run.
        runtime: this process's place in the job.

    Raises:
        CheckpointError: there is none at ``resume``, or it is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        path = checkpointer.last_good()
        if runtime.is_main:
            print(f"resuming from {path}" if path else "no checkpoint to resume from: the run begins anew", flush=True)
        return path
    for place in (resume, f"{resume.rstrip('/')}/{CHECKPOINTS}"):
        folder = CheckpointFolder(place)
        for step in folder.steps():
            path = folder.path(step)
            if (damage := checkpointer.damage(path)) is None:
                return path
            if runtime.is_main:
                print(f"checkpoint step {step}: {damage}; the one before it is used")
    damage = checkpointer.damage(resume)
    if damage is not None:
        raise CheckpointError(f"--resume {resume}: {damage}; give a run folder, a checkpoint in one, or auto")
    return resume if is_url(resume) else str(Path(resume).absolute())


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come, which schedulers send some seconds before they kill; a second one ends the process at once.

    The ranks answer together after a step, save, and end with the exit code of a job that the signal stopped.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)
