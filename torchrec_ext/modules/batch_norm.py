"""BatchNorm: statistics over the rows of all ranks, so that a model learns the same on any number of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.modules.in_batch import gather_rows


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` whose batch is the global one, of all ranks, on the CPU too (``nn.SyncBatchNorm`` asks for a GPU).

    TorchRec's data parallelism does not broadcast buffers: with statistics of its own rows each rank would evaluate, and save,
    another model. In training every rank must call it, as it must call a look-up; in evaluation there is no exchange. Rows of
    weight 0, which pad an epoch's last batch, are in the statistics: ``loader.drop_last`` keeps them out.

    Attributes:
        process_group: the ranks whose rows are one batch, as of ``nn.SyncBatchNorm``; all where None.
    """

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- nn.BatchNorm1d's own name
        """(B, D) to (B, D)."""
        if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        ones = input.new_ones(len(input), 1)
        sums = self._over_ranks(torch.cat([input, ones], dim=1))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = input - mean
        variance = self._over_ranks(centred.square()) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    def _over_ranks(self, rows: Tensor) -> Tensor:
        """(D,) the sum of the rows of all ranks, with a gradient to each."""
        return gather_rows(rows.sum(0, keepdim=True), self.process_group).sum(0)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr, arg-type]
        self.running_var.lerp_(variance, self.momentum)  # type: ignore[union-attr, arg-type]
