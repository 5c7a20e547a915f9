"""How tower outputs become one logit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_ext.modules.tower import Activation, activation_layer, mlp


class DotProduct(nn.Module):
    """The dot product of a query tower's and a candidate tower's output.

    Args:
        widths: D of each tower, in order; both must be equal.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        if len(widths) != 2 or widths[0] != widths[1]:
            raise ValueError(
                f"DotProduct needs two towers of equal width, got {_shapes(widths)}; "
                "give both towers the same last width, or use TopMLP, which takes any"
            )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs [(B, D), (B, D)]."""
        return (outputs[0] * outputs[1]).sum(dim=1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D) with every candidate (N, D)."""
        return query @ candidates.T


class TopMLP(nn.Module):
    """The network on top (YouTube's shape): the towers' outputs concatenated, an activation, an MLP, one logit.

    Args:
        widths: D of each tower, in order.
        hidden: widths of the hidden layers.
        activation: over the concatenation, whose towers end in a linear layer, and between the layers.
        dropout: after each activation.
    """

    def __init__(
        self, widths: Sequence[int], hidden: Sequence[int] = (64,), *, activation: Activation = "relu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.mlp = mlp(sum(widths), [*hidden, 1], activation=activation, dropout=dropout)
        self.activation = activation_layer(activation)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D) with a D of its own."""
        return self.mlp(self.activation(torch.cat(outputs, dim=1))).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D1) with every candidate (N, D2).

        The first layer is linear over the concatenation, so each half is applied once per row and not once per pair.
        """
        first: nn.Linear = self.mlp[0]  # type: ignore[assignment]
        left, right = torch.split(first.weight, self._two_widths(), dim=1)
        query, candidates = self.activation(query), self.activation(candidates)
        hidden = (query @ left.T + first.bias)[:, None, :] + (candidates @ right.T)[None, :, :]
        return self.mlp[1:](hidden).squeeze(2)  # type: ignore[no-any-return]

    def _two_widths(self) -> list[int]:
        if len(self.widths) != 2:
            raise ValueError(f"score_all pairs a query tower with a candidate tower; this model has {len(self.widths)} towers")
        return list(self.widths)


def _shapes(widths: Sequence[int]) -> str:
    return ", ".join(f"(B, {width})" for width in widths)
