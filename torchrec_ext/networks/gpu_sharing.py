"""gpu_sharing(): whether NVIDIA's Multi-Process Service lets processes on one GPU run at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

# This is the daemon's own default.
_PIPES = "/tmp/nvidia-mps"


def mps_is_running(environ: Mapping[str, str]) -> bool:
    """Whether this process finds the pipe of the MPS control daemon."""
    return (Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or _PIPES) / "control").exists()


def gpu_sharing(
    device: torch.device, processes: int, environ: Mapping[str, str]
) -> str | None:
    """Returns a note for the user if several processes share a GPU; None on the CPU, and if each has its own.

    Without MPS the kernels of two processes never run at the same time: the GPU goes from one to the other. With it
    they do, and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limits the share of the multiprocessors that one process takes.

    Args:
        device: device of this process.
        processes: number of processes that share the device.
        environ: environment of this process.

    Example:
        >>> gpu_sharing(torch.device("cpu"), 2, {})
        >>> gpu_sharing(torch.device("cuda", 0), 2, {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})  # doctest: +ELLIPSIS
        'note: 2 processes share cuda:0 without MPS (looked in CUDA_MPS_PIPE_DIRECTORY=/nowhere): their kernels ...'
    """
    if device.type != "cuda" or processes < 2:
        return None
    where = f"{processes} processes share {device}"
    if not mps_is_running(environ):
        pipes = environ.get("CUDA_MPS_PIPE_DIRECTORY")
        looked = ""
        if pipes:
            looked = f" (looked in CUDA_MPS_PIPE_DIRECTORY={pipes})"
        return (
            f"note: {where} without MPS{looked}: their kernels take turns. Start it with `nvidia-cuda-mps-control -d` "
            "as the user of the job, and stop it with `echo quit | nvidia-cuda-mps-control`"
        )
    share = environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if share is None:
        return (
            f"note: {where} through MPS, each with all multiprocessors; --env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="
            f"{100 // processes} would give each its part"
        )
    return (
        f"note: {where} through MPS, each with at most {share} % of the multiprocessors"
    )
