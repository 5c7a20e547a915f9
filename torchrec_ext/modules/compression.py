"""CompressingLayer: a layer that narrows a tower's bags before they leave its ranks.

It is the tower module of Disaggregated Multi-Tower (Luo et al., MLSys 2024): features meet inside their tower, and
D x (c F + p) numbers a row cross hosts instead of F x N.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet

from torchrec_ext.modules.config import Compression as Compression


class CompressingLayer(nn.Module):
    """Narrows concatenated bags and dense columns to the output of a tower.

    A linear layer that keeps the number of columns starts as the identity, others with orthogonal rows, so that
    products of vectors are kept as far as that many columns allow.

    Args:
        widths: N of each bag, in order; all must be equal where there are vectors per feature.
        dense: Fd, the number of dense columns.
        config: settings of the output.

    Raises:
        ValueError: no bag, or bags of different widths.
    """

    def __init__(self, widths: Sequence[int], dense: int, config: Compression) -> None:
        super().__init__()
        if not widths:
            raise ValueError("widths=[]: there is nothing to compress without bags")
        if config.per_feature and len(set(widths)) > 1:
            raise ValueError(
                f"compress: per_feature={config.per_feature} with bags {list(widths)} wide: one layer "
                "reads every bag; give the tables one embedding_dim, or take per_feature=0"
            )
        self.config = config
        self.features = len(widths)
        self.dense = dense
        self.bags = sum(widths)
        whole = self.bags + dense
        self.cross = CrossNet(whole, config.layers) if config.kind == "cross" else None
        self.each: nn.Linear | None = None
        self.all: nn.Linear | None = None
        if config.per_feature:
            self.each = nn.Linear(
                widths[0], config.per_feature * config.dim, bias=False
            )
        if config.flat:
            self.all = nn.Linear(whole, config.flat * config.dim)
        # After both are made: another order would draw other numbers.
        for layer in (self.each, self.all):
            if layer is not None:
                _start(layer)
        self.out_features = config.out_features(self.features, dense)

    def forward(self, side_by_side: Tensor) -> Tensor:
        """Returns (B, D (c F + p)) from (B, F N + Fd): vectors of each bag, then flat ones or dense columns."""
        if self.cross is not None:
            side_by_side = self.cross(side_by_side)
        bags, dense = torch.split(side_by_side, [self.bags, self.dense], dim=1)
        # An exporter would take len() as a constant.
        rows = bags.shape[0]
        blocks = []
        if self.each is not None:
            blocks.append(
                self.each(bags.reshape(rows * self.features, -1)).view(rows, -1)
            )
        # Without flat vectors the dense columns leave the tower as they are.
        blocks.append(dense if self.all is None else self.all(side_by_side))
        return torch.cat(blocks, dim=1)


def _start(layer: nn.Linear) -> None:
    if layer.in_features == layer.out_features:
        nn.init.eye_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
