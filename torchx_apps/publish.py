"""Write the weights of a checkpoint to a safetensors file: `python -m torchx_apps.publish RUN --out model.safetensors`.

RUN is a run folder, a folder of checkpoints or one checkpoint, by path or address. The tensors have the names of the
unsharded model's state dict, whatever plan and ranks it was trained with; one block of 32 MiB is in memory at a time.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from torchx_apps.cli.command_line import FlagParser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the file is written, 1 when not.
    """
    parser = FlagParser(
        prog="python -m torchx_apps.publish", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "run", help="a run folder, a folder of checkpoints, or a checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("model.safetensors"), help="the file to write"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|STEP",
        help="the best by train.early_stop.metric, the last, or that of a step; the best where one is marked, else the "
        "last",
    )
    options = parser.parse_args(argv)
    from tqdm import tqdm

    from torchrec_ext.distributed.runtime import Runtime
    from torchrec_ext.train.checkpoint.folder import CheckpointRanks
    from torchrec_ext.train.checkpoint.vectors import publish_weights
    from torchx_apps.cli.errors import describe_error
    from torchx_apps.jobs.resuming import checkpoint_to_export

    # torch.distributed.checkpoint warns whoever reads in a single process, even where
    # that was asked for.
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled, unavailable or uninitialized",
        category=UserWarning,
    )
    try:
        path, which = checkpoint_to_export(
            options.run, options.checkpoint, CheckpointRanks(Runtime())
        )
        with tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
            shapes = publish_weights(path, options.out, progress=bar.update)
    except Exception as error:
        print(describe_error(error), file=sys.stderr)
        return 1
    print(
        f"{options.out}: {len(shapes)} tensors of {path} ({which} checkpoint), {options.out.stat().st_size:,} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
