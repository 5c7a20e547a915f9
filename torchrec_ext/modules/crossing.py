"""Interactions whose layers multiply: DCN V2, factorisation machine and DeepFM, from TorchRec's own modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules import deepfm
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet

from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.layers import Activation, Normalization, mlp
from torchrec_ext.modules.pairs import cross_product, equal_width, over_pairs, query_and_candidate
from torchrec_ext.modules.recorded import Recorded


class DeepCross(Recorded, nn.Module):
    """Deep & Cross Network V2 in its stacked form: the concatenation x, layers x * (W x_l + b) + x_l, an MLP (Wang et al. 2021).

    Args:
        widths: D of each tower, in order.
        hidden: widths of the MLP's hidden layers; without any, the crossing layers feed one linear layer.
        layers: crossing layers; each raises by one the degree of the products it can form.
        low_rank: rank of each W; full where not given. A quarter of the concatenation's width is usual for wide ones.
        activation: between the layers of the MLP.
        normalization: before each activation.
        dropout: after each activation.
    """

    def __init__(
        self,
        widths: Sequence[int],
        hidden: Sequence[int] = (64,),
        *,
        layers: int = 2,
        low_rank: int | None = None,
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = sum(query_and_candidate("DeepCross", widths))
        if layers < 1:
            raise ValueError(f"layers={layers}: must be 1 or more; without crossing layers it is TopMLP")
        if low_rank is not None and not 1 <= low_rank <= self.width:
            raise ValueError(f"low_rank={low_rank}: must be 1 to {self.width}, the width of {len(widths)} outputs side by side")
        self.cross = CrossNet(self.width, layers) if low_rank is None else LowRankCrossNet(self.width, layers, low_rank)
        self.mlp = mlp(self.width, [*hidden, 1], activation=activation, normalization=normalization, dropout=dropout)

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the logit, (1,)."""
        return [self.mlp[-1].bias]  # type: ignore[list-item]

    def forward(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D) with a D of its own; ``weights`` (B,), see :class:`BatchNorm`."""
        return self.mlp(self.cross(torch.cat(outputs, dim=1)), weights).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D1), all towers but the last concatenated, with every candidate (N, D2).

        Every layer multiplies the two sides, so nothing can be computed once per row; memory is bounded.
        """
        return over_pairs(query, candidates, self._pairs, self.width)

    def _pairs(self, query: Tensor, candidate: Tensor) -> Tensor:
        pairs = cross_product(query, candidate)
        return self.forward([pairs.flatten(0, 1)]).view(pairs.shape[:2])


class FactorizationMachine(Recorded, nn.Module):
    """A bias, a linear term, and the dot products of all pairs of towers (Rendle 2010): sum over i < j of <x_i, x_j>.

    TorchRec's module, given the (B, T x D) concatenation, multiplies every number with every other, those of one tower and of
    different columns too; given one column of all towers at a time it is the published machine.

    Args:
        widths: D of each tower, in order; all must be equal.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.width = equal_width("FactorizationMachine", widths, remedy="TopMLP or DeepCross, which take any")
        self.first_order = nn.Linear(sum(widths), 1)
        self.second_order = deepfm.FactorizationMachine()

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the logit, (1,)."""
        return [self.first_order.bias]

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D)."""
        return self.first_order(torch.cat(outputs, dim=1)).squeeze(1) + self._products(outputs)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, (T - 1) x D), all towers but the last concatenated, with every candidate (N, D)."""
        left, right = torch.split(self.first_order.weight[0], [query.shape[1], candidates.shape[1]])
        outputs = list(torch.split(query, self.width, dim=1))
        alone = query @ left + self._products(outputs) + self.first_order.bias
        return alone[:, None] + candidates @ right + torch.stack(outputs).sum(0) @ candidates.T

    def _products(self, outputs: list[Tensor]) -> Tensor:
        columns = torch.stack(outputs, dim=2)  # (B, D, T)
        products = self.second_order([columns.flatten(0, 1)])  # (B x D, 1)
        return products.view(columns.shape[:2]).sum(dim=1)  # type: ignore[no-any-return]


class DeepFM(Recorded, nn.Module):
    """A factorisation machine and a deep half over the same outputs, added (Guo et al. 2017).

    TorchRec's ``DeepFM`` is the deep half alone: a concatenation and a module of one's choice, which :class:`TopMLP` is too.

    Args:
        widths: D of each tower, in order; all must be equal.
        hidden: widths of the deep half's hidden layers.
        activation: over the concatenation and between the layers of the deep half.
        normalization: before each activation.
        dropout: after each activation.
        activate_input: of the deep half, see :class:`TopMLP`.
    """

    def __init__(
        self,
        widths: Sequence[int],
        hidden: Sequence[int] = (64,),
        *,
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
        activate_input: bool = True,
    ) -> None:
        super().__init__()
        self.machine = FactorizationMachine(widths)
        self.deep = TopMLP(
            widths, hidden, activation=activation, normalization=normalization, dropout=dropout, activate_input=activate_input
        )

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the machine's logit, (1,), to which the deep half's is added."""
        return self.machine.last_biases

    def forward(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D); ``weights`` (B,), see :class:`BatchNorm`."""
        return self.machine(outputs) + self.deep(outputs, weights)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, (T - 1) x D), all towers but the last concatenated, with every candidate (N, D)."""
        return self.machine.score_all(query, candidates) + self.deep.score_all(query, candidates)
