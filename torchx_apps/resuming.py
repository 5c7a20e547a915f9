"""Where a run begins: anew, or at a checkpoint that --resume names or finds; and a signal that asks it to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.reading import damage, newest_good
from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url
from torchrec_ext.train.checkpoint.together import Together

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


def resume_from(resume: str, checkpointer: Checkpointer) -> str | None:
    """The checkpoint to begin from, the same on every rank; None to begin anew.

    Args:
        resume: ``never``; ``auto`` for the last good one of this run's folder; or a path or address, see :func:`find_checkpoint`.
        checkpointer: of this run.

    Raises:
        CheckpointError: there is none at ``resume``, or it is damaged.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return find_checkpoint("--resume ", resume, checkpointer.together)
    path = checkpointer.last_good()
    if checkpointer.together.rank == 0:
        print(f"resuming from {path}" if path else "no checkpoint to resume from: the run begins anew", flush=True)
    return path


def find_checkpoint(flag: str, place: str, together: Together) -> str:
    """The last good checkpoint at a place.

    Args:
        flag: how the user named the place, for messages.
        place: the path or address of a checkpoint, of a folder of checkpoints, or of a run folder.
        together: all ranks call it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    for root in (place, f"{place.rstrip('/')}/{CHECKPOINTS}"):
        if (path := newest_good(CheckpointFolder(root), together)) is not None:
            return path
    wrong = damage(place, together)
    if wrong is not None:
        raise CheckpointError(f"{flag}{place}: {wrong}; give a run folder, or a checkpoint in one")
    return place if is_url(place) else str(Path(place).absolute())


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
