"""StartConfig: a new run that begins with the weights of another, which may have had fewer rows, tables or layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.train.checkpoint.matching import Change
from torchrec_ext.train.checkpoint.restoring import load
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.together import Together


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The checkpoint whose weights and optimizer state a new run begins with; place, records and random states are new.

    Args:
        path: of a run folder, a folder of checkpoints or a checkpoint; empty to begin with weights drawn anew.
        allow: how the model may differ from what was saved. ``more_rows``: a table's rows beyond those saved begin as its row for
            ids never seen. ``new_tables``, ``new_layers``: these begin as drawn. ``fewer_tables``, ``fewer_layers``: these are left
            behind. Any difference that is not allowed is refused, and named.
    """

    path: str = ""
    allow: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        unknown = [change for change in self.allow if change not in get_args(Change)]
        if unknown:
            raise ValueError(f"allow: {', '.join(unknown)}: must be of {', '.join(get_args(Change))}")


def begin_with(
    path: str, model: nn.Module, optimizer: KeyedOptimizer, together: Together, config: StartConfig, cold: Mapping[str, int]
) -> str:
    """Loads the checkpoint at ``path`` and says what of it was matched.

    Args:
        path: of a checkpoint without damage.
        model: from :func:`hybrid_parallel`.
        optimizer: likewise.
        together: all ranks call it.
        config: how the model may differ.
        cold: by table, the row that stands for ids never seen.
    """
    saved, found = load(path, model_state(model, optimizer), together, allow=config.allow, cold=cold)
    grown = [f"table '{name}' had {rows:,} rows, the others begin as row {cold.get(name, 0)}" for name, rows in found.grown.items()]
    others = [line for line in found.said if not any(line.startswith(f"tables.{name}.") for name in found.grown)]
    return "\n".join([f"begun with the weights of {path}, after {saved['step']:,} steps", *grown, *others])
