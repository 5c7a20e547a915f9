"""CheckpointConfig: when a run is saved, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Changed = Literal["refuse", "next_epoch"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, and where.

    A checkpoint is written while the training goes on, and any plan on any number of ranks can load it.

    Args:
        epochs: epochs between two checkpoints, each before the epoch's evaluation, which a resumed run makes if it was cut short;
            the last epoch is always saved. 0 for none.
        steps: steps between two checkpoints besides these; 0 for none.
        keep: how many of the newest stay, beside that of the best evaluation (see ``train.early_stop.metric``).
        folder: a path, or an address that fsspec opens, such as ``s3://bucket/runs/a``; on several hosts one that all of them see.
            ``checkpoints`` in the run folder where empty.
        changed: what a resume does where data, batch size or another setting of the stream of samples is not what it was:
            ``refuse``, since the remaining samples of the epoch would not be those that are missing, or begin the ``next_epoch``.
    """

    epochs: int = 1
    steps: int = 0
    keep: int = 3
    folder: str = ""
    changed: Changed = "refuse"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be 0 or more; 0 saves none by it")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: must be 1 or more; epochs=0 and steps=0 save none at all")
        if self.changed not in get_args(Changed):
            raise ValueError(f"changed={self.changed!r}: must be one of {', '.join(get_args(Changed))}")

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return bool(self.epochs or self.steps)
