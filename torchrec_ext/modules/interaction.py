"""Interactions: modules that turn the towers' outputs into one logit; INTERACTIONS names them.

Every interaction computes the logits of given rows (``forward``) and those of every query with every candidate
(``score_all``). A query is the output of all towers but the last, concatenated; a candidate is the output of the last.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from torchrec.modules import deepfm
from torchrec.modules.crossnet import CrossNet

from torchrec_ext.modules.config import Interaction as Interaction
from torchrec_ext.modules.layers import (
    Activation,
    Normalization,
    activation_layer,
    mlp,
)
from torchrec_ext.schema.validation import check_choice

# Floats of a block of pairs on a CPU: half a MiB, a core's share of the second-level
# cache.
HIDDEN_FLOATS = 2**17
# On a GPU half a GiB, to score many pairs at once.
HIDDEN_FLOATS_GPU = 2**27


def over_pairs(
    queries: Tensor,
    candidates: Tensor,
    score: Callable[[Tensor, Tensor], Tensor],
    width: int,
) -> Tensor:
    """Returns (B, N) scores of every query with every candidate, a block of pairs at a time.

    Blocks stay in the cache, which is several times as fast as all pairs at once.

    Args:
        queries: (B, D1) vectors.
        candidates: (N, D2) vectors.
        score: function from (b, 1, D1) and (1, n, D2) to scores (b, n).
        width: floats that ``score`` needs for one pair.
    """
    floats = HIDDEN_FLOATS if queries.device.type == "cpu" else HIDDEN_FLOATS_GPU
    pairs = max(1, floats // max(1, width))
    # Few candidates leave room for several queries at once.
    query_rows = max(1, pairs // max(1, len(candidates)))
    blocks = torch.split(candidates, pairs)
    scores = []
    for rows in torch.split(queries, query_rows):
        of_rows = [score(rows[:, None], block[None]) for block in blocks]
        scores.append(torch.cat(of_rows, dim=1))
    return torch.cat(scores)


def equal_width(
    interaction: str, widths: Sequence[int], *, towers: int | None = None
) -> int:
    """Returns D, the common width of all towers.

    Args:
        interaction: class name for the message.
        widths: width of each tower's output.
        towers: number of towers that the interaction takes; None for two or more.

    Raises:
        ValueError: towers of different widths, or not as many as ``towers``.
    """
    wrong_number = len(widths) < 2 or towers not in (None, len(widths))
    if wrong_number or len(set(widths)) > 1:
        raise ValueError(
            f"{interaction} over towers of widths {list(widths)}: needs {towers or '2 or more'} of one width; give "
            "them one last width, or use TopMLP, which takes any"
        )
    return widths[0]


class InteractionLayer(nn.Module):
    """Base of the interactions. Attributes state the abilities of a class, so that no caller compares names.

    A class that sets ``self.widths`` to the width of each tower only has to write ``forward``.

    Attributes:
        towers: number of towers that it takes; None for any number, of which some classes ask to be two or more and
            equally wide.
        metric: measure by which an index finds the candidates with the greatest logits, ``dot`` or ``cosine`` of the
            query's and the candidate's vector; None where only the interaction itself can rank them.
        temperature: number by which it has already divided its logits; None if it divides by none.
    """

    towers: ClassVar[int | None] = None
    metric: ClassVar[Literal["dot", "cosine"] | None] = None
    temperature: float | None = None
    widths: list[int]

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias (1,) of each layer with one output, those of the logits last; none without such a layer."""
        return [
            layer.bias
            for layer in self.modules()
            if isinstance(layer, nn.Linear) and layer.out_features == 1
        ]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (B, N) logits of every query (B, D1) with every candidate (N, D2).

        This one applies ``forward`` to all pairs, a block at a time, so that memory is bounded: right for layers that
        multiply query and candidate, of which nothing can be computed once per row.
        """
        return over_pairs(query, candidates, self._pairs, sum(self.widths))

    def _pairs(self, query: Tensor, candidate: Tensor) -> Tensor:
        # (b, n, D1 + D2): each of the queries (b, 1, D1) beside each of the candidates
        # (1, n, D2).
        pair_shape = (query.shape[0], candidate.shape[1], -1)
        pairs = torch.cat(
            [query.expand(pair_shape), candidate.expand(pair_shape)], dim=2
        )
        outputs = list(torch.split(pairs.flatten(0, 1), self.widths, dim=1))
        return self.forward(outputs).view(pairs.shape[:2])  # type: ignore[no-any-return]


class DotProduct(InteractionLayer):
    """The logit is the dot product of a query tower's and a candidate tower's output.

    Args:
        widths: D of each tower, in order; both must be equal.
    """

    towers = 2
    metric = "dot"

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        equal_width("DotProduct", widths, towers=self.towers)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs [(B, D), (B, D)]."""
        return (outputs[0] * outputs[1]).sum(dim=1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (B, N) logits of every query (B, D) with every candidate (N, D)."""
        return query @ candidates.T


class Cosine(InteractionLayer):
    """The logit is the cosine of the angle between the two towers' outputs, divided by a temperature.

    Args:
        widths: D of each tower, in order; both must be equal.
        temperature: greater than 0; logits lie between -1 / temperature and 1 / temperature.
    """

    towers = 2
    metric = "cosine"
    temperature: float

    def __init__(self, widths: Sequence[int], *, temperature: float = 0.1) -> None:
        super().__init__()
        equal_width("Cosine", widths, towers=self.towers)
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature}: must be greater than 0; 0.05 to 0.2 is usual"
            )
        self.temperature = temperature

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs [(B, D), (B, D)]; a zero vector has the logit 0 with all."""
        return (normalize(outputs[0]) * normalize(outputs[1])).sum(
            dim=1
        ) / self.temperature

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (B, N) logits of every query (B, D) with every candidate (N, D)."""
        return normalize(query) @ normalize(candidates).T / self.temperature


class GeneralizedMF(InteractionLayer):
    """Generalised matrix factorisation: a weighted dot product and a bias (He et al. 2017, equation 9).

    Args:
        widths: D of each tower, in order; both must be equal.
    """

    towers = 2

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        width = equal_width("GeneralizedMF", widths, towers=self.towers)
        self.linear = nn.Linear(width, 1)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs [(B, D), (B, D)]."""
        return self.linear(outputs[0] * outputs[1]).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (B, N) logits of every query (B, D) with every candidate (N, D)."""
        # Weights go to the queries: once for each of them, and not for each pair.
        return (query * self.linear.weight) @ candidates.T + self.linear.bias


class TopMLP(InteractionLayer):
    """The top NN (Covington et al. 2016): the towers' outputs concatenated, an activation, an MLP, one logit.

    Args:
        widths: D of each tower, in order.
        hidden: widths of the hidden layers.
        activation: activation over the concatenation, where towers end in a linear layer, and between the layers.
        normalization: normalisation before each activation between the layers.
        dropout: share of values set to 0 after each activation.
        activate_input: whether to activate the concatenation. False for towers without layers, whose embeddings would
            lose their negative half.
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
        self.widths = [sum(widths[:-1]), widths[-1]]
        self.mlp = mlp(
            sum(widths),
            [*hidden, 1],
            activation=activation,
            normalization=normalization,
            dropout=dropout,
        )
        self.activation = (
            activation_layer(activation) if activate_input else nn.Identity()
        )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs, (B, D) of any D each."""
        return self.mlp(self.activation(torch.cat(outputs, dim=1))).squeeze(1)  # type: ignore[no-any-return]

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """See :meth:`InteractionLayer.score_all`.

        The first layer is linear over the concatenation, so its two halves are applied once per row and not once per
        pair; the other layers run over blocks of pairs.
        """
        first: nn.Linear = self.mlp[0]  # type: ignore[assignment]
        query_weight, candidate_weight = torch.split(first.weight, self.widths, dim=1)
        # The bias is added once, on the query's side.
        queries = linear(self.activation(query), query_weight, first.bias)
        halves = linear(self.activation(candidates), candidate_weight)
        return over_pairs(queries, halves, self._rest, first.out_features)

    def _rest(self, query: Tensor, candidate: Tensor) -> Tensor:
        """Returns (b, n) logits from the two halves of the first layer, (b, 1, H) and (1, n, H)."""
        hidden = query + candidate
        # Batch normalisation takes two dimensions: rows and columns.
        return self.mlp[1:](hidden.flatten(0, 1)).view(hidden.shape[:2])  # type: ignore[no-any-return]


class DeepCross(InteractionLayer):
    """Deep & Cross Network V2, stacked: crossing layers over the concatenation x, then an MLP (Wang et al. 2021).

    A crossing layer is x_l -> x * (W x_l + b) + x_l.

    Args:
        widths: D of each tower, in order.
        hidden: widths of the MLP's hidden layers; without any, the crossing layers feed one linear layer.
        layers: number of crossing layers; each raises the degree of the products that can be formed by one.
        activation: activation between the layers of the MLP.
        normalization: normalisation before each activation.
        dropout: share of values set to 0 after each activation.
    """

    def __init__(
        self,
        widths: Sequence[int],
        hidden: Sequence[int] = (64,),
        *,
        layers: int = 2,
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = sum(widths)
        if layers < 1:
            raise ValueError(
                f"layers={layers}: must be 1 or more; without crossing layers it is TopMLP"
            )
        self.widths = list(widths)
        self.cross = CrossNet(width, layers)
        self.mlp = mlp(
            width,
            [*hidden, 1],
            activation=activation,
            normalization=normalization,
            dropout=dropout,
        )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs, (B, D) of any D each."""
        return self.mlp(self.cross(torch.cat(outputs, dim=1))).squeeze(1)  # type: ignore[no-any-return]


class FactorizationMachine(InteractionLayer):
    """Adds a bias, a linear term, and the dot products of all pairs of towers (Rendle 2010).

    TorchRec's module is given one column of all towers at a time, which makes it the published machine. Given the
    (B, T x D) concatenation it would multiply every number with every other, within a tower and across columns too.

    Args:
        widths: D of each tower, in order; all must be equal.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        equal_width("FactorizationMachine", widths)
        self.widths = list(widths)
        self.first_order = nn.Linear(sum(widths), 1)
        self.second_order = deepfm.FactorizationMachine()

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs, each (B, D)."""
        columns = torch.stack(outputs, dim=2)  # (B, D, T)
        products = self.second_order([columns.flatten(0, 1)])  # (B x D, 1)
        first = self.first_order(torch.cat(outputs, dim=1)).squeeze(1)
        return first + products.view(columns.shape[:2]).sum(dim=1)  # type: ignore[no-any-return]


INTERACTIONS: dict[str, type[InteractionLayer]] = {
    "top_nn": TopMLP,
    "dot": DotProduct,
    "cosine": Cosine,
    "gmf": GeneralizedMF,
    "dcn": DeepCross,
    "fm": FactorizationMachine,
}


def interaction_layer(
    name: Interaction,
    widths: Sequence[int],
    hidden: Sequence[int] = (64,),
    *,
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
    activate_input: bool = True,
    temperature: float | None = None,
) -> InteractionLayer:
    """Makes an interaction by name over towers of ``widths``; drops settings unknown to its class.

    Args:
        name: ``top_nn``, :class:`TopMLP`; ``dot``, :class:`DotProduct`; ``cosine``, :class:`Cosine`; ``gmf``,
            :class:`GeneralizedMF`; ``dcn``, :class:`DeepCross`; ``fm``, :class:`FactorizationMachine`.
        widths: D of each tower, in order.
        hidden: widths of the hidden layers of ``top_nn`` and ``dcn``; the others have none.
        activation: layer between the hidden layers.
        normalization: layer before each activation.
        dropout: share of values set to 0 after each activation.
        activate_input: whether ``top_nn`` begins with an activation; not over towers without layers.
        temperature: divisor of the logits of ``cosine``; by default its own.

    Raises:
        ValueError: another name, or widths that do not fit.
    """
    check_choice("interaction", name, INTERACTIONS)
    kind = INTERACTIONS[name]
    settings: dict[str, Any] = {
        "hidden": hidden,
        "activation": activation,
        "normalization": normalization,
        "dropout": dropout,
        "activate_input": activate_input,
    }
    if temperature is not None:
        settings["temperature"] = temperature
    # A recipe has one set of settings for all interactions, and a dot product has no
    # hidden layers.
    parameters = inspect.signature(kind.__init__).parameters
    return kind(
        widths, **{key: value for key, value in settings.items() if key in parameters}
    )
