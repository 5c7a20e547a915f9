"""BatchNorm: statistics over the rows of all ranks that count, so that a model learns the same on any number of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.modules.in_batch import gather_rows


class BatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` whose batch is the global one, of all ranks, on the CPU too (``nn.SyncBatchNorm`` asks for a GPU).

    TorchRec's data parallelism does not broadcast buffers: with statistics of its own rows each rank would evaluate, and save,
    another model. In training every rank must call it, as it must call a look-up; in evaluation there is no exchange.

    Mean and variance are weighted by the rows' weights: padding, of weight 0, is normalised and not counted. Only ratios of weights
    matter. The running variance is multiplied by n / (n - 1), as torch does, where n is the number of rows that say as much as the
    weighted ones, ``sum(w) ** 2 / sum(w ** 2)`` (Kish 1965): for weights of 0 and 1 the number of those with 1.

    Attributes:
        process_group: the ranks whose rows are one batch, as of ``nn.SyncBatchNorm``; all where None.
    """

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor, weights: Tensor | None = None) -> Tensor:  # noqa: A002 -- nn.BatchNorm1d's own name
        """(B, D) to (B, D); in training the moments are those of the rows by ``weights`` (B,), all 1 where not given."""
        alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if not self.training or (weights is None and alone):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._weighted(input.to(torch.promote_types(input.dtype, torch.float32)), weights).to(input.dtype)

    def _weighted(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        # Sums by products with a vector: a pass less over the rows than a product and a sum, forward and backward.
        shares = rows.new_ones(len(rows)) if weights is None else weights.detach().to(rows)
        sums = self._over_ranks(torch.cat([shares @ rows, torch.stack([shares.sum(), shares.square().sum()])]))
        total, squares = sums[-2:].detach()
        # A batch of which nothing counts has neither moments nor a say in the running ones.
        some = total > 0
        total = torch.where(some, total, 1.0)
        mean = sums[:-2] / total
        centred = rows - mean
        variance = self._over_ranks(shares @ centred.square()) / total
        independent = total.square() / torch.where(some, squares, 1.0)
        unbiased = variance.detach() * independent / (independent - 1).clamp(min=torch.finfo(rows.dtype).eps)
        self._remember(mean.detach(), torch.where(independent > 1, unbiased, variance.detach()), some)
        return torch.addcmul(self.bias, centred, torch.rsqrt(variance + self.eps) * self.weight)

    def _over_ranks(self, own: Tensor) -> Tensor:
        """(D,) the sum over ranks of (D,), with a gradient to each."""
        return gather_rows(own[None], self.process_group).sum(0)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, some: Tensor) -> None:
        rate = some * self.momentum  # type: ignore[operator]
        self.num_batches_tracked.add_(some)  # type: ignore[union-attr]
        self.running_mean.lerp_(mean.to(self.running_mean), rate.to(self.running_mean))  # type: ignore[union-attr]
        self.running_var.lerp_(variance.to(self.running_var), rate.to(self.running_var))  # type: ignore[union-attr]
