"""CheckpointConfig: when and where a run is saved.

StartConfig: the weights of another run to begin with; it may have had fewer rows, tables or layers.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_ext.schema.validation import check_choice

Changed = Literal["refuse", "next_epoch"]
Change = Literal[
    "more_rows",
    "fewer_rows",
    "new_tables",
    "fewer_tables",
    "new_layers",
    "fewer_layers",
]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings for the saving of a run: when, and in which folder.

    A checkpoint is written while the training goes on, and any plan on any number of ranks can load it.

    Args:
        epochs: epochs between two checkpoints. Each is saved before the epoch's evaluation, so that a resumed run can
            repeat an evaluation that was cut short. The last epoch is always saved. 0 for none.
        steps: steps between two further checkpoints; 0 for none.
        keep: number of newest checkpoints to keep, plus that of the best evaluation (see ``train.early_stop.metric``).
        folder: a path, or an address that fsspec opens, such as ``s3://bucket/runs/a``; on several hosts a shared
            one. By default ``checkpoints`` in the run folder.
        changed: reaction of a resume to a change of data, batch size or another setting of the stream of samples:
            ``refuse``, because the rest of the epoch would have other samples than the missing ones, or begin the
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
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be 0 or more; 0 saves none by it"
                )
        if self.keep < 1:
            raise ValueError(
                f"keep={self.keep}: must be 1 or more; epochs=0 and steps=0 save none at all"
            )
        check_choice("changed", self.changed, get_args(Changed))

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return bool(self.epochs or self.steps)


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Starts a new run with the weights and optimizer state of a checkpoint; all other state is new.

    Args:
        path: run folder, folder of checkpoints or checkpoint; empty to begin with newly drawn weights.
        allow: differences to allow between the model and the checkpoint. ``more_rows``: a table's new rows begin as its
            row for unseen ids. ``fewer_rows``: a table with dynamic ids evicts first. ``new_tables``, ``new_layers``:
            these begin as drawn. ``fewer_tables``, ``fewer_layers``: these are left out. Any other difference is
            refused, and named.
    """

    path: str = ""
    allow: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        unknown = [change for change in self.allow if change not in get_args(Change)]
        if unknown:
            raise ValueError(
                f"allow: {', '.join(unknown)}: must be of {', '.join(get_args(Change))}"
            )
