"""CheckpointConfig: when a run is saved, and where.

StartConfig: a new run that begins with the weights of another, which may have had fewer rows, tables or layers.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Changed = Literal["refuse", "next_epoch"]
Change = Literal["more_rows", "new_tables", "fewer_tables", "new_layers", "fewer_layers"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Says when a run is saved, and in which folder.

    A checkpoint is written while the training goes on, and any plan on any number of ranks can load it.

    Args:
        epochs: epochs between two checkpoints, each before the epoch's evaluation, which a resumed run makes if it was
            cut short; the last epoch is always saved. 0 for none.
        steps: steps between two checkpoints besides these; 0 for none.
        keep: how many of the newest stay, beside that of the best evaluation (see ``train.early_stop.metric``).
        folder: a path, or an address that fsspec opens, such as ``s3://bucket/runs/a``; on several hosts one that all
            of them see. ``checkpoints`` in the run folder where empty.
        changed: what a resume does where data, batch size or another setting of the stream of samples has changed:
            ``refuse``, since the remaining samples of the epoch would not be those that are missing, or begin the
            ``next_epoch``.
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


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The checkpoint whose weights and optimizer state a new run begins with; all other state is new.

    Args:
        path: run folder, folder of checkpoints or checkpoint; empty to begin with newly drawn weights.
        allow: differences between the model and the checkpoint that are allowed. ``more_rows``: a table's rows beyond
            those saved begin as its row for ids never seen. ``new_tables``, ``new_layers``: these begin as drawn.
            ``fewer_tables``, ``fewer_layers``: these are left out. Any other difference is refused, and named.
    """

    path: str = ""
    allow: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        unknown = [change for change in self.allow if change not in get_args(Change)]
        if unknown:
            raise ValueError(f"allow: {', '.join(unknown)}: must be of {', '.join(get_args(Change))}")
