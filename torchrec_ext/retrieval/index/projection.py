"""Projections: an interaction's layers for the candidate alone, applied beforehand and stored.

Layers for the query alone, with context that is constant in a request, run once per request. The remaining layers run
for each pair.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from torchrec_ext.models.ncf import NCFHead
from torchrec_ext.modules.interaction import (
    Cosine,
    DotProduct,
    FactorizationMachine,
    GeneralizedMF,
    Reordered,
    TopMLP,
)


class Projection(nn.Module):
    """Splits an interaction into query, candidate and pair; together they equal its ``forward`` within 1e-6.

    This base class leaves everything to the pair. It works for any interaction with ``score_all`` or ``forward``.

    Args:
        interaction: module to copy, with its weights, into evaluation mode.
        width: D2, the output width of the candidate tower.

    Attributes:
        query_width: Hq, the width of :meth:`query`'s result; None if a pair's layers cannot be compiled.
        query_inputs: D1, the width of :meth:`query`'s input; None if ``query_width`` is None.
        width: width of the stored rows, the results of :meth:`candidates`.
        projected: whether these rows differ from the tower's output.
        linear: whether :meth:`score` is a dot product with :meth:`query`'s first ``width`` numbers plus its last one.
            If so, the greatest scores can be searched as products.
    """

    interaction: Any
    linear = False
    projected = False

    def __init__(self, interaction: nn.Module, width: int) -> None:
        super().__init__()
        self.interaction = copy.deepcopy(interaction).eval().requires_grad_(False)
        self.width = width
        self.query_width: int | None = None
        self.query_inputs: int | None = None
        if self.linear:
            self.query_width = width + 1
            self.query_inputs = width

    def query(self, query: Tensor) -> Tensor:
        """Returns (..., Hq) from the concatenated outputs (..., D1) of all towers but the last."""
        return query

    def query_of_one(self, query: Tensor) -> Tensor:
        """Computes :meth:`query` for one query (D1,), equal within rounding and faster if a shortcut exists."""
        return self.query(query)

    def candidates(self, candidates: Tensor) -> Tensor:
        """Returns (N, width) rows to store from the candidate tower's outputs (N, D2)."""
        return candidates

    def unfolded(self) -> Projection | None:
        """Returns the projection of wider rows that take less arithmetic to score; None if there is none.

        Its :meth:`candidates` takes the rows that this one stores, and its scores equal this one's to the last bit.
        """
        return None

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (N,) logits of a query (Hq,) from :meth:`query` with candidates (N, width) from :meth:`candidates`.

        Several queries, each with N candidates, give (B, N) from (B, Hq) and (B, N, width).
        """
        if query.dim() > 1:
            return torch.stack(
                [
                    self.score(each, rows)
                    for each, rows in zip(query, candidates, strict=True)
                ]
            )
        if hasattr(self.interaction, "score_all"):
            return self.interaction.score_all(query[None], candidates)[0]  # type: ignore[no-any-return]
        return self.interaction([query.expand(len(candidates), -1), candidates])  # type: ignore[no-any-return]

    def score_in_place(
        self, query: Tensor, candidates: Tensor, buffer: Tensor | None = None
    ) -> Tensor:
        """Computes :meth:`score` for one query (Hq,), equal to the last bit.

        May overwrite ``buffer``, of the shape of ``candidates``; without one, ``candidates``.
        """
        return self.score(query, candidates)


class _Linear(Projection):
    """Interactions linear in the candidate: a query consists of weights and, last, a constant."""

    linear = True

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        return (candidates @ query[..., :-1, None]).squeeze(-1) + query[..., -1:]


class _Dot(_Linear):
    def query(self, query: Tensor) -> Tensor:
        return _with_constant(query, query.new_zeros(()))


class _Cosine(_Linear):
    """Candidates are stored normalised."""

    projected = True

    def query(self, query: Tensor) -> Tensor:
        return _with_constant(
            normalize(query, dim=-1) / self.interaction.temperature, query.new_zeros(())
        )

    def candidates(self, candidates: Tensor) -> Tensor:
        return normalize(candidates, dim=-1)


class _GMF(_Linear):
    def query(self, query: Tensor) -> Tensor:
        layer: nn.Linear = self.interaction.linear
        return _with_constant(query * layer.weight[0], layer.bias[0])


class _FM(_Linear):
    """The linear term and the products among query towers form the constant; the rest is linear in the candidate."""

    def __init__(self, interaction: nn.Module, width: int) -> None:
        super().__init__(interaction, width)
        self.query_inputs = self.interaction.first_order.in_features - width

    def query(self, query: Tensor) -> Tensor:
        machine = self.interaction
        width = self.width
        weight: Tensor = machine.first_order.weight[0]
        towers = query.view(*query.shape[:-1], -1, width)
        # The sum of all pairs' products is half of the squared sum less the sum of
        # squares.
        total = towers.sum(dim=-2)
        products = (total.square() - towers.square().sum(dim=-2)).sum(dim=-1) / 2
        alone = query @ weight[:-width] + products + machine.first_order.bias[0]
        return torch.cat([weight[-width:] + total, alone[..., None]], dim=-1)


class _TopMLP(Projection):
    """The first layer is linear over the concatenation, so its halves are applied to query and candidate separately.

    If the layer is wider than the candidate tower's output, the plain output is stored and its half is applied when
    scoring. Normalisation after the first layer sees the sum of both halves, as in training.
    """

    def __init__(self, interaction: nn.Module, width: int) -> None:
        super().__init__(interaction, width)
        layers = self.interaction.mlp
        first: nn.Linear = layers[0]
        query_half, candidate_half = torch.split(
            first.weight, [first.in_features - width, width], dim=1
        )
        self.left = query_half.contiguous()
        self.right = candidate_half.contiguous()
        self.bias = first.bias
        self.rest = layers[1:-1]
        self.last: Any = None
        self._weight: Any = None
        if len(layers) > 1:
            self.last = layers[-1]
            self._weight = self.last.weight[0]
        self.projected = first.out_features <= width
        self.width = min(first.out_features, width)
        self.query_width = first.out_features
        self.query_inputs = first.in_features - width
        # For score_in_place(): plain attributes, because a module's attribute look-up
        # is slow.
        self._layers = tuple(self.rest)
        self._by_numpy = type(self.interaction.activation) in (nn.ReLU, nn.Identity)

    def query(self, query: Tensor) -> Tensor:
        return linear(self.interaction.activation(query), self.left, self.bias)

    def query_of_one(self, query: Tensor) -> Tensor:
        """See :meth:`Projection.query_of_one`: numpy's calls cost less than torch's."""
        if not self._by_numpy:
            return self.query(query)
        row = query.numpy()
        if type(self.interaction.activation) is nn.ReLU:
            row = np.maximum(row, 0)
        half = self.left.numpy().dot(row)
        if self.bias is not None:  # a normalised layer has none
            half += self.bias.numpy()
        return torch.from_numpy(half)

    def candidates(self, candidates: Tensor) -> Tensor:
        if self.projected:
            return self._half(candidates)
        return candidates

    def unfolded(self) -> Projection | None:
        if self.projected:
            return None
        wider = copy.copy(self)
        wider.projected = True
        wider.width = self.left.shape[0]
        return wider

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        if not self.projected:
            candidates = self._half(candidates)
        hidden = query[..., None, :] + candidates
        if self.last is None:
            return hidden[..., 0]
        hidden = self.rest(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
        # The last layer has one column: written as a sum, the compiler fuses it, and
        # uncompiled it is no slower.
        return (hidden * self.last.weight[0]).sum(dim=-1) + self.last.bias  # type: ignore[no-any-return]

    def score_in_place(
        self, query: Tensor, candidates: Tensor, buffer: Tensor | None = None
    ) -> Tensor:
        """See :meth:`Projection.score_in_place`: in-place layers avoid allocating, and mapping, fresh memory."""
        if not self.projected or self.last is None:
            return self.score(query, candidates)
        hidden = torch.add(
            candidates, query, out=candidates if buffer is None else buffer
        )
        for layer in self._layers:
            hidden = hidden.relu_() if type(layer) is nn.ReLU else layer(hidden)
        return hidden.mul_(self._weight).sum(dim=-1).add_(self.last.bias)

    def _half(self, candidates: Tensor) -> Tensor:
        return linear(self.interaction.activation(candidates), self.right)


class _NCF(Projection):
    """The towers already apply their columns of the MLP's first layer; the GMF half's weights go to the query."""

    def __init__(self, interaction: nn.Module, width: int) -> None:
        super().__init__(interaction, width)
        weight = self.interaction.predict.weight[0]
        self.gmf_dim: int = self.interaction.gmf_dim
        self.query_width = self.query_inputs = width
        self.shallow = weight[: self.gmf_dim].clone()
        self.deep = weight[self.gmf_dim :].clone()

    def query(self, query: Tensor) -> Tensor:
        return torch.cat(
            [query[..., : self.gmf_dim] * self.shallow, query[..., self.gmf_dim :]],
            dim=-1,
        )

    def score(self, query: Tensor, candidates: Tensor) -> Tensor:
        gmf = self.gmf_dim
        products = (candidates[..., :gmf] @ query[..., :gmf, None]).squeeze(-1)
        first = query[..., None, gmf:] + candidates[..., gmf:]
        deep = self.interaction.rest(first.flatten(0, -2)) @ self.deep
        return products + deep.view(first.shape[:-1]) + self.interaction.predict.bias  # type: ignore[no-any-return]


_KINDS: dict[type[nn.Module], type[Projection]] = {
    DotProduct: _Dot,
    Cosine: _Cosine,
    GeneralizedMF: _GMF,
    FactorizationMachine: _FM,
    TopMLP: _TopMLP,
    NCFHead: _NCF,
}


def projection(interaction: nn.Module, width: int) -> Projection:
    """Returns the projection of an interaction; it stores the narrower of candidate output and half layer.

    Args:
        interaction: interaction of a trained model; its weights are copied. Interactions of other classes than ours,
            and those whose layers multiply query and candidate, are left to the pair.
        width: D2, the candidate tower's ``out_features``; the candidate tower is the interaction's last.

    Example:
        >>> split = projection(TopMLP([64, 64, 32], hidden=(16,)), 32)  # user, context, item
        >>> split.width, split.query(torch.zeros(128)).shape
        (16, torch.Size([16]))
    """
    if isinstance(interaction, Reordered) and type(interaction.interaction) is TopMLP:
        interaction = _in_order(interaction)
    return _KINDS.get(type(interaction), Projection)(interaction, width)


def _in_order(interaction: Reordered) -> TopMLP:
    """Unwraps a reordered top NN by permuting the columns of its first layer."""
    top: TopMLP = copy.deepcopy(interaction.interaction)  # type: ignore[assignment]
    first: nn.Linear = top.mlp[0]  # type: ignore[assignment]
    columns = torch.split(
        first.weight.data,
        [interaction.widths[tower] for tower in interaction.order],
        dim=1,
    )
    first.weight.data = torch.cat(
        [columns[interaction.order.index(tower)] for tower in range(len(columns))],
        dim=1,
    )
    # The query's towers are one input, side by side as an encoder gives them.
    top.widths = [sum(interaction.widths[:-1]), interaction.widths[-1]]
    return top


def _with_constant(weights: Tensor, constant: Tensor) -> Tensor:
    return torch.cat([weights, constant.expand(*weights.shape[:-1], 1)], dim=-1)
