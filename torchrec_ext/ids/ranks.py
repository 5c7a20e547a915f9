"""IdRanks: the ranks that share dynamic ids. gather_rows(): rows of all ranks, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def host_group() -> dist.ProcessGroup | None:
    """Makes a group of all ranks for tensors in the host's memory; returns None if the job's takes them. Collective."""
    # NCCL moves no tensors of the host.
    if _are_several() and dist.get_backend() == "nccl":
        return dist.new_group(backend="gloo")  # type: ignore[no-any-return]
    return None


def _are_several() -> bool:
    is_job = dist.is_available() and dist.is_initialized()
    return is_job and dist.get_world_size() > 1


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenates the rows (n_r, ...) of all ranks of ``group``; their numbers n_r may differ. Collective."""
    count = torch.tensor([len(rows)], device=rows.device)
    counts = count.new_zeros(dist.get_world_size(group))
    dist.all_gather_into_tensor(counts, count, group=group)
    # all_gather needs equal shapes.
    padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
    padded[: len(rows)] = rows
    pieces = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(pieces, padded, group=group)
    sized = zip(pieces, counts.tolist(), strict=True)
    return torch.cat([piece[:size] for piece, size in sized])


class IdRanks:
    """The ranks of the job; its methods are collective, over gloo, also where the job has NCCL.

    Attributes:
        several: whether there are two or more.
        is_first: whether this is the first of them.
    """

    def __init__(self) -> None:
        self._group = host_group()
        self.several = _are_several()
        self.is_first = not self.several or dist.get_rank() == 0

    def reduced(self, numbers: Tensor, op: str = "SUM") -> Tensor:
        """Returns ``numbers``, in place their sum over the ranks, or by ``MAX`` the greatest of them."""
        if self.several:
            on_host = numbers.cpu()
            dist.all_reduce(on_host, getattr(dist.ReduceOp, op), group=self._group)
            numbers.copy_(on_host)
        return numbers

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the (n, 3) int64 rows of all ranks, one rank after the other; n may differ."""
        if not self.several:
            return rows
        return gather_rows(rows.cpu(), self._group).to(rows.device)
