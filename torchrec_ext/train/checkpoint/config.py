"""CheckpointConfig: when and where a run is saved.

StartConfig: the weights of another run to begin with; it may have had fewer rows, tables or layers.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    epochs: int = 1
    steps: int = 0
    keep: int = 3
    folder: str = ""

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

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return bool(self.epochs or self.steps)


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Starts a new run with the weights and optimizer state of a checkpoint; all other state is new.

    Args:
        path: run folder, folder of checkpoints or checkpoint; empty to begin with newly drawn weights.
        partial: whether the model may differ from the checkpoint's. A table's new rows begin as its row for unseen ids.
            New tables and layers begin as drawn, and those that the model lacks are left out; each is named. A table
            with fewer rows, or another optimizer, is refused in any case.
    """

    path: str = ""
    partial: bool = False
