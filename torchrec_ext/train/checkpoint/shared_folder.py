"""check_shared(): a folder that cannot be written, or that only one of several hosts sees, is refused before the first step."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from torchrec_ext.train.checkpoint.storage import CheckpointError, is_url

_LATE_S = 30.0  # for which a client of NFS may go on believing that a folder it once looked for is not there


def check_shared(folder: str, rank: int, gathered: Callable[[Any], list[Any]]) -> None:
    """Refuses a folder in which not every rank sees what rank 0 writes; all ranks call it together.

    Each host would keep the parts of a checkpoint that its own ranks write, and no one could load it.

    Args:
        folder: a path, which each rank takes from its own working folder, or an address that fsspec opens.
        rank: of this process.
        gathered: from this rank's value, of what JSON holds, to those of all ranks in rank order.

    Raises:
        CheckpointError: on every rank alike, naming ranks, hosts and remedy.
    """
    files, root = url_to_fs(folder if is_url(folder) else str(Path(folder).absolute()))
    name, wrong = gathered(_write(files, root) if rank == 0 else None)[0]
    if wrong:
        raise CheckpointError(f"folder '{folder}' cannot be written: {wrong}")
    seen = gathered((rank == 0 or _appears(files, f"{root}/{name}"), socket.gethostname()))
    if rank == 0:
        files.rm(f"{root}/{name}")
    blind = [f"rank {number} on {host}" for number, (sees, host) in enumerate(seen) if not sees]
    if blind:
        more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
        raise CheckpointError(
            f"folder '{folder}': {blind[0]}{more} cannot see what rank 0 on {seen[0][1]} writes there, and what the ranks save "
            "could never be loaded; give a folder that all hosts share, by an absolute path, with --run_dir (checkpoints also with "
            "checkpoint.folder, to an address such as s3://bucket/runs)"
        )


def _write(files: AbstractFileSystem, root: str) -> tuple[str, str]:
    """The name of a new file, which no rank can have looked for before, and what went wrong."""
    name = f".shared-{secrets.token_hex(8)}"
    try:
        files.makedirs(root, exist_ok=True)
        with files.open(f"{root}/{name}", "wb") as stream:
            stream.write(b"seen by all ranks?\n")
    except OSError as error:
        return name, str(error.strerror or error)
    except Exception as error:  # of an address each driver has its own: no such bucket, no right, no network, only to be read
        return name, f"{type(error).__name__}({error}); check the address, its rights and the network"
    return name, ""


def _appears(files: AbstractFileSystem, path: str) -> bool:
    end = time.monotonic() + _LATE_S
    while True:
        files.invalidate_cache()
        if files.exists(path):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
