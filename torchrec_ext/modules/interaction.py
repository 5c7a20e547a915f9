"""How tower outputs become one logit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from torchrec_ext.modules.layers import Activation, Normalization, activation_layer, mlp, weighs_rows
from torchrec_ext.modules.pairs import cross_product, equal_width, over_pairs, query_and_candidate
from torchrec_ext.modules.recorded import Recorded


class DotProduct(Recorded, nn.Module):
    """The dot product of a query tower's and a candidate tower's output.

    Args:
        widths: D of each tower, in order; both must be equal.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        equal_width("DotProduct", widths, towers=2, remedy="TopMLP, which takes any")

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs [(B, D), (B, D)]."""
        return (outputs[0] * outputs[1]).sum(dim=1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D) with every candidate (N, D)."""
        return query @ candidates.T


class Cosine(Recorded, nn.Module):
    """The cosine of the angle between a query tower's and a candidate tower's output, divided by a temperature.

    Args:
        widths: D of each tower, in order; both must be equal.
        temperature: greater than 0; logits lie between -1 / temperature and 1 / temperature.
    """

    def __init__(self, widths: Sequence[int], *, temperature: float = 0.1) -> None:
        super().__init__()
        equal_width("Cosine", widths, towers=2, remedy="TopMLP, which takes any")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: must be greater than 0; 0.05 to 0.2 is usual")
        self.temperature = temperature

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs [(B, D), (B, D)]; a zero vector has the logit 0 with all."""
        return (normalize(outputs[0]) * normalize(outputs[1])).sum(dim=1) / self.temperature

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D) with every candidate (N, D)."""
        return normalize(query) @ normalize(candidates).T / self.temperature


class GeneralizedMF(Recorded, nn.Module):
    """Generalised matrix factorisation: a weighted dot product and a bias (He et al. 2017, equation 9).

    Args:
        widths: D of each tower, in order; both must be equal.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(equal_width("GeneralizedMF", widths, towers=2, remedy="TopMLP, which takes any"), 1)

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the logit, (1,)."""
        return [self.linear.bias]

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """(B,) logits from the towers' outputs [(B, D), (B, D)]."""
        return self.linear(outputs[0] * outputs[1]).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D) with every candidate (N, D)."""
        return (query * self.linear.weight) @ candidates.T + self.linear.bias


class TopMLP(Recorded, nn.Module):
    """The network on top (YouTube's shape): the towers' outputs concatenated, an activation, an MLP, one logit.

    Args:
        widths: D of each tower, in order.
        hidden: widths of the hidden layers.
        activation: over the concatenation, where towers end in a linear layer, and between the layers.
        normalization: before each activation between the layers.
        dropout: after each activation.
        activate_input: False for towers without layers: half of what an embedding says would be cut off.
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
        self.widths = list(query_and_candidate("TopMLP", widths))
        self.mlp = mlp(sum(widths), [*hidden, 1], activation=activation, normalization=normalization, dropout=dropout)
        self.activation = activation_layer(activation) if activate_input else nn.Identity()

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the logit, (1,)."""
        return [self.mlp[-1].bias]  # type: ignore[list-item]

    def forward(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D) with a D of its own; ``weights`` (B,), see :class:`BatchNorm`."""
        return self.mlp(self.activation(torch.cat(outputs, dim=1)), weights).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D1), all towers but the last concatenated, with every candidate (N, D2).

        The first layer is linear over the concatenation, so each half is applied once per row and not once per pair; the others
        run over blocks of pairs.
        """
        first: nn.Linear = self.mlp[0]  # type: ignore[assignment]
        left, right = torch.split(first.weight, self.widths, dim=1)
        queries = linear(self.activation(query), left, first.bias)
        return over_pairs(queries, linear(self.activation(candidates), right), self._rest, first.out_features)

    def _rest(self, query: Tensor, candidate: Tensor) -> Tensor:
        """(b, n) from the two halves of the first layer, (b, 1, H) and (1, n, H)."""
        hidden = query + candidate
        return self.mlp[1:](hidden.flatten(0, 1)).view(hidden.shape[:2])  # type: ignore[no-any-return]


class Reordered(Recorded, nn.Module):
    """An interaction whose inputs come in another order, such as with the candidate last, which was trained in the middle.

    Args:
        interaction: over outputs in its own order.
        order: the place among what comes of each input of ``interaction``.
        widths: D of each output, in the order in which they come.

    Raises:
        ValueError: an order that does not name each place once.

    Example:
        >>> outputs = [torch.ones(2, 4), torch.zeros(2, 4)]
        >>> top = TopMLP([4, 4])
        >>> bool(torch.equal(Reordered(top, [1, 0], [4, 4])(outputs), top(outputs[::-1])))
        True
    """

    def __init__(self, interaction: nn.Module, order: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        if sorted(order) != list(range(len(widths))):
            raise ValueError(f"order={list(order)}: must name each of the {len(widths)} outputs once, by its place from 0")
        self.interaction, self.order, self.widths = interaction, list(order), list(widths)

    def forward(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """(B,) logits from the towers' outputs, each (B, D) with a D of its own; ``weights`` (B,), see :class:`BatchNorm`."""
        reordered = [outputs[place] for place in self.order]
        return self.interaction(reordered, weights) if weighs_rows(self.interaction) else self.interaction(reordered)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits of every query (B, D1), all towers but the last concatenated, with every candidate (N, D2)."""
        return over_pairs(query, candidates, self._pairs, sum(self.widths))

    def _pairs(self, query: Tensor, candidate: Tensor) -> Tensor:
        pairs = cross_product(query, candidate)
        return self.forward(list(torch.split(pairs.flatten(0, 1), self.widths, dim=1))).view(pairs.shape[:2])
