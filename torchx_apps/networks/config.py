"""NetworksConfig: how the members of a job of several networks are trained. This module imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torchrec_ext.networks.config import Codistillation
from torchx_apps.config import with_settings


@dataclass(frozen=True, kw_only=True)
class NetworksConfig:
    """Says how the members of a job are trained.

    Args:
        stack: ``auto``: members of one shape on one rank are stacked, others trained in turn; ``require``: members that
            cannot be stacked are refused; ``never``: all in turn.
        codistillation: how stacked members learn from each other.
        weights: write each stacked member's state dict into its folder as ``weights.pt``.
        resume: members that have ended stay as they are, and the others go on where all of a stack were last saved.
    """

    stack: str = "auto"
    codistillation: Codistillation = dataclasses.field(default_factory=Codistillation)
    weights: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.stack not in ("auto", "require", "never"):
            raise ValueError(f"--stack {self.stack}: must be auto, require or never")
        if self.stack == "never" and self.codistillation.weight:
            raise ValueError(
                "--codistill with --stack never: peers predict for each other inside a stack; use --stack auto"
            )


def codistillation_of(text: str) -> Codistillation:
    """Returns the settings of ``--codistill KEY=VALUE,...``.

    Raises:
        ValueError: a key is unknown, or a value is out of range.
    """
    try:
        return with_settings(Codistillation(), text.split(",") if text else [])
    except ValueError as error:
        raise ValueError(f"--codistill {text}: {error}") from None
