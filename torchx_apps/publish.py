"""Write the weights of a checkpoint to a safetensors file: `python -m torchx_apps.publish RUN --out model.safetensors`.

RUN is a run folder, a folder of checkpoints or one checkpoint, by path or address. The tensors have the names of the
unsharded model's state dict, whatever plan and ranks it was trained with; they need not fit in memory.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from torchx_apps.config import parse_options
from torchx_apps.process import exit_code


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Writes the weights of a checkpoint to a safetensors file.

    Args:
        run: a run folder, a folder of checkpoints, or a checkpoint.
        out: the file to write.
        checkpoint: best (by train.early_stop.metric), last, or a step; best where one is marked, else last.
    """

    run: Positional[str]
    out: Path = Path("model.safetensors")
    checkpoint: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the file is written, 1 when not.
    """
    return exit_code(_publish, argv)


def _publish(argv: Sequence[str] | None) -> int:
    options = parse_options(PublishOptions, "torchx_apps.publish", argv)
    from torchrec_ext.distributed.runtime import Runtime
    from torchrec_ext.train.checkpoint.folder import CheckpointRanks
    from torchrec_ext.train.checkpoint.vectors import publish_weights
    from torchx_apps.jobs.resuming import checkpoint_to_export

    # torch.distributed.checkpoint warns whoever reads in a single process, even where
    # that was asked for.
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled, unavailable or uninitialized",
        category=UserWarning,
    )
    path, which = checkpoint_to_export(
        options.run, options.checkpoint, CheckpointRanks(Runtime())
    )
    shapes = publish_weights(path, options.out)
    print(
        f"{options.out}: {len(shapes)} tensors of {path} ({which} checkpoint), {options.out.stat().st_size:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
