"""NetworksConfig: how the members of a job of several networks are trained. This module imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torchrec_ext.networks.config import Codistillation


@dataclass(frozen=True, kw_only=True)
class NetworksConfig:
    """Says how the members of a job are trained.

    Args:
        stack: ``auto``: members of one shape on one rank are stacked, others trained in turn; ``require``: members that
            cannot be stacked are refused; ``never``: all in turn.
        codistillation: how stacked members learn from each other.
        weights: write each stacked member's state dict into its folder as ``weights.pt``.
        resume: ``auto``: members that have ended stay as they are, and the others go on where all of a stack were last
            saved; ``never``: all start from the beginning.
    """

    stack: str = "auto"
    codistillation: Codistillation = dataclasses.field(default_factory=Codistillation)
    weights: bool = False
    resume: str = "never"

    def __post_init__(self) -> None:
        if self.resume not in ("auto", "never"):
            raise ValueError(
                f"--resume {self.resume}: several networks go on in their own folder; give --resume auto, with "
                "--run-dir"
            )
        if self.stack not in ("auto", "require", "never"):
            raise ValueError(f"--stack {self.stack}: must be auto, require or never")
        if self.stack == "never" and self.codistillation.weight:
            raise ValueError(
                "--codistill with --stack never: peers predict for each other inside a stack; use --stack auto"
            )
