"""Dense layers: the MLP of towers and interactions, activations by name, and batch normalisation over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_ext.modules.config import Activation as Activation
from torchrec_ext.modules.config import Normalization as Normalization
from torchrec_ext.modules.softmax import gather_rows
from torchrec_ext.schema.validation import check_choice

_ROW_WEIGHTS: ContextVar[Tensor | None] = ContextVar("row_weights", default=None)


@contextmanager
def row_weights(weights: Tensor | None) -> Iterator[None]:
    """Has each :class:`BatchNorm` that runs inside weight its rows by ``weights`` (B,); None weights all alike.

    A context, as torch's autocast is, so that no network has to pass them on to its layers.
    """
    token = _ROW_WEIGHTS.set(weights)
    try:
        yield
    finally:
        _ROW_WEIGHTS.reset(token)


def normalises(module: nn.Module) -> bool:
    """Returns whether a tower or an interaction normalises over its batch."""
    return any(isinstance(layer, BatchNorm) for layer in module.modules())


class BatchNorm(nn.BatchNorm1d):
    """Normalises over the rows of all ranks, on the CPU too; ``nn.SyncBatchNorm`` needs a GPU.

    TorchRec's data parallelism does not broadcast buffers: with statistics of its own rows, each rank would evaluate
    and save another model. In training every rank must call it, as it must call a look-up; in evaluation ranks exchange
    nothing.

    Mean and variance are weighted by the rows' weights, of which only ratios matter; padding, whose weight is 0, is
    normalised but not counted. The running variance is multiplied by n / (n - 1), as in torch, where n is the effective
    number of rows ``sum(w) ** 2 / sum(w ** 2)`` (Kish 1965): for weights of 0 and 1 the number of ones.

    Attributes:
        process_group: ranks whose rows are one batch; all ranks where None.
    """

    process_group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- nn.BatchNorm1d's own name
        """Returns (B, D) from (B, D); training weights the rows as :func:`row_weights` says, by default all by 1."""
        weights = _ROW_WEIGHTS.get()
        alone = (
            not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        )
        if not self.training or (weights is None and alone):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._weighted(
                input.to(torch.promote_types(input.dtype, torch.float32)), weights
            ).to(input.dtype)

    def _weighted(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        shares = (
            rows.new_ones(len(rows)) if weights is None else weights.detach().to(rows)
        )
        weight_sums = torch.stack([shares.sum(), shares.square().sum()])
        # A sum as a product with a vector saves a pass over the rows, forward and
        # backward, beside product and sum. Sums and counts go over the ranks together,
        # in one exchange.
        sums = self._over_ranks(torch.cat([shares @ rows, weight_sums]))
        total, squares = sums[-2:].detach()
        # A batch whose weights are all 0 has no moments and does not move the running
        # ones.
        counts = total > 0
        total = torch.where(counts, total, 1.0)
        mean = sums[:-2] / total
        centred = rows - mean
        variance = self._over_ranks(shares @ centred.square()) / total
        independent = total.square() / torch.where(counts, squares, 1.0)
        unbiased = (
            variance.detach()
            * independent
            / (independent - 1).clamp(min=torch.finfo(rows.dtype).eps)
        )
        self._remember(
            mean.detach(),
            torch.where(independent > 1, unbiased, variance.detach()),
            counts,
        )
        return torch.addcmul(
            self.bias, centred, torch.rsqrt(variance + self.eps) * self.weight
        )

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks of ``values`` (D,), (D,), with a gradient to each rank's."""
        return gather_rows(values[None], self.process_group).sum(0)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, counts: Tensor) -> None:
        # 0 for a batch without weight: a branch would wait for a GPU.
        rate = counts * self.momentum  # type: ignore[operator]
        self.num_batches_tracked.add_(counts)  # type: ignore[union-attr]
        self.running_mean.lerp_(mean.to(self.running_mean), rate.to(self.running_mean))  # type: ignore[union-attr]
        self.running_var.lerp_(variance.to(self.running_var), rate.to(self.running_var))  # type: ignore[union-attr]


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
}


def activation_layer(name: Activation) -> nn.Module:
    """Makes an activation by name.

    Raises:
        ValueError: another name.
    """
    check_choice("activation", name, _ACTIVATIONS)
    return _ACTIVATIONS[name]()


def mlp(
    in_features: int,
    widths: Sequence[int],
    *,
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Makes linear layers with normalisation, activation and dropout between them, and none after the last.

    Args:
        in_features: width of the input.
        widths: width of each layer's output, in order.
        activation: activation after each hidden layer.
        normalization: layer before each activation: ``layer`` (Ba et al. 2016), ``batch`` (over the rows of all ranks
            without padding, see :class:`BatchNorm`) or ``none``.
        dropout: share of values set to 0 after each activation.

    Raises:
        ValueError: a width below 1, or a wrong name.

    Example:
        >>> [type(layer).__name__ for layer in mlp(8, [4, 2], normalization="layer")]
        ['Linear', 'LayerNorm', 'ReLU', 'Linear']
    """
    if not widths or min(widths) < 1:
        raise ValueError(
            f"widths={list(widths)}: an MLP needs at least one layer and every width 1 or more"
        )
    check_choice("normalization", normalization, get_args(Normalization))
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
    hidden = [in_features, *widths[:-1]]
    layers: list[nn.Module] = []
    for before, width in pairwise(hidden):
        # Batch normalisation subtracts the mean, and a bias with it.
        layers.append(nn.Linear(before, width, bias=normalization != "batch"))
        if normalization == "layer":
            layers.append(nn.LayerNorm(width))
        elif normalization == "batch":
            layers.append(BatchNorm(width))
        layers.append(activation_layer(activation))
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(hidden[-1], widths[-1]))
