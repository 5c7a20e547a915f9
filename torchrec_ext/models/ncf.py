"""ContextualNCF: generalised matrix factorisation (GMF) beside an MLP that also reads the context (He et al. 2017)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.models.tower_model import Loss, TowerModel
from torchrec_ext.modules.interaction import InteractionLayer, over_pairs
from torchrec_ext.modules.layers import Activation, activation_layer
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Tower, beside


class ContextualNCF(TowerModel):
    """NeuMF with context: a GMF half and an MLP half, with embeddings of their own, under one prediction layer.

    The MLP half reads the user's and the item's embedding, the context and, where given, features of the item; without
    context and features it is the paper's NeuMF. It is a TowerModel of the towers ``user`` (with the context) and
    ``item``. Each applies its columns of the MLP's first layer, which is linear, so that with ``shared=("user",)`` user
    and context are computed once for 1 + N candidates, and a catalogue is ranked with both towers computed once per
    row.

    Initial values are the paper's: normal for embeddings of the ids, Xavier uniform for the MLP, LeCun uniform for the
    prediction layer, 0 for biases. TorchRec's uniform in +-1 / sqrt(rows) would make the products of a small table many
    times larger.

    Args:
        users: rows of the two user tables.
        items: rows of the two item tables.
        gmf_dim: columns of the GMF half's tables.
        mlp_dim: columns of the MLP half's id tables.
        mlp_widths: widths of the MLP's layers, each followed by the activation.
        context_tables: tables of categorical context, with initial values by their ``init_fn``.
        context_dense: names of the dense context columns.
        item_tables: tables of categorical features of the item.
        item_dense: names of the item's dense columns.
        embedding_std: standard deviation of the id tables' initial values.
        activation: activation after each layer of the MLP.
        dropout: share of values set to 0 after each activation.
        loss: function from (logits, batch) to the loss, ().
        shared: towers that run once for the rows that share their input, usually ``("user",)``.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: a width below 1, two tables of one name.

    Example:
        >>> hours = EmbeddingBagConfig(name="hour", feature_names=["hour"], num_embeddings=25, embedding_dim=4)
        >>> model = ContextualNCF(654, 1_127, context_tables=[hours], context_dense=["is_weekend"])
        >>> model.schema().keys, model.schema().dense
        (['user_id', 'hour', 'item_id'], ('is_weekend',))
    """

    def __init__(
        self,
        users: int,
        items: int,
        *,
        gmf_dim: int = 8,
        mlp_dim: int = 32,
        mlp_widths: Sequence[int] = (32, 16, 8),
        context_tables: Sequence[EmbeddingBagConfig] = (),
        context_dense: Sequence[str] = (),
        item_tables: Sequence[EmbeddingBagConfig] = (),
        item_dense: Sequence[str] = (),
        embedding_std: float = 0.01,
        activation: Activation = "relu",
        dropout: float = 0.0,
        loss: Loss = bce,
        shared: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        if not mlp_widths or min(mlp_widths) < 1:
            raise ValueError(
                f"mlp_widths={list(mlp_widths)}: the MLP half needs at least one layer and every width 1 or more"
            )
        ids = partial(
            _id_tables, widths={"gmf": gmf_dim, "mlp": mlp_dim}, std=embedding_std
        )
        first = mlp_widths[0]
        user = NCFTower(
            [*ids("user_id", users), *context_tables],
            gmf_dim,
            first,
            dense=context_dense,
        )
        # The two halves are one layer, so one of them adds its bias.
        item = NCFTower(
            [*ids("item_id", items), *item_tables],
            gmf_dim,
            first,
            bias=False,
            dense=item_dense,
        )
        # The two halves are one layer over both inputs, so both are drawn with the
        # bounds of that layer.
        layers: list[Any] = [user.mlp[0], item.mlp[0]]
        inputs = sum(layer.in_features for layer in layers)
        bound = math.sqrt(6 / (inputs + first))
        for layer in layers:
            nn.init.uniform_(layer.weight, -bound, bound)
        head = NCFHead(gmf_dim, mlp_widths, activation=activation, dropout=dropout)
        super().__init__(
            {"user": user, "item": item}, head, loss=loss, shared=shared, device=device
        )


class NCFTower(Tower):
    """The user's or the item's tower of NeuMF: its GMF embedding beside its half of the MLP's first layer, (B, G + H).

    Args:
        tables: the GMF half's table, then those that feed the MLP half, as the dense columns do.
        gmf_dim: G, columns of the first table.
        hidden: H, width of the MLP's first layer.
        bias: whether this tower adds the first layer's bias.
        dense: names of dense columns.
    """

    mlp: nn.Sequential

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        gmf_dim: int,
        hidden: int,
        *,
        bias: bool = True,
        dense: Sequence[str] = (),
    ) -> None:
        super().__init__(tables, (), dense=dense)
        linear = nn.Linear(self.out_features - gmf_dim, hidden, bias=bias)
        if bias:
            nn.init.zeros_(linear.bias)
        self.mlp = nn.Sequential(OrderedDict(linear=linear))
        self.out_features = gmf_dim + hidden

    def combine(self, blocks: Sequence[Tensor]) -> Tensor:
        """Returns (B, G + H) of the blocks of columns, of which the first is the GMF half's embedding."""
        # Not concatenated and split again, which took a tenth of an eager step.
        gmf, *others = blocks
        return torch.cat([gmf, self.mlp(beside(others))], dim=1)


class NCFHead(InteractionLayer):
    """The interaction of NeuMF: the product of the GMF halves and the rest of the MLP under the prediction layer.

    Args:
        gmf_dim: G, columns of each tower's GMF half.
        mlp_widths: widths of the MLP's layers; the towers have computed the first one, H wide.
        activation: activation after each layer.
        dropout: share of values set to 0 after each activation.
    """

    towers = 2

    def __init__(
        self,
        gmf_dim: int,
        mlp_widths: Sequence[int],
        *,
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.gmf_dim = gmf_dim
        layers: list[nn.Module] = [activation_layer(activation), nn.Dropout(dropout)]
        for before, width in pairwise(mlp_widths):
            linear = nn.Linear(before, width)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers += [linear, activation_layer(activation), nn.Dropout(dropout)]
        self.rest = nn.Sequential(*layers)
        self.width = max(mlp_widths)
        self.predict = nn.Linear(gmf_dim + mlp_widths[-1], 1)
        # LeCun uniform.
        bound = math.sqrt(3 / self.predict.in_features)
        nn.init.uniform_(self.predict.weight, -bound, bound)
        nn.init.zeros_(self.predict.bias)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the two towers' outputs, each (B, G + H)."""
        (user, first_user), (item, first_item) = map(self._halves, outputs)
        return self.predict(  # type: ignore[no-any-return]
            torch.cat([user * item, self.rest(first_user + first_item)], dim=1)
        ).squeeze(1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns (B, N) logits of every query (B, G + H) with every candidate (N, G + H)."""
        return over_pairs(query, candidates, self._score_pairs, self.width)

    def _score_pairs(self, query: Tensor, candidate: Tensor) -> Tensor:
        user, first_user = self._halves(query)
        item, first_item = self._halves(candidate)
        weight = self.predict.weight[0]
        first = first_user + first_item  # (b, n, H)
        deep = self.rest(first.flatten(0, 1)) @ weight[self.gmf_dim :]
        products = (user[:, 0] * weight[: self.gmf_dim]) @ item[0].T
        return products + deep.view(first.shape[:2]) + self.predict.bias  # type: ignore[no-any-return]

    def _halves(self, output: Tensor) -> tuple[Tensor, ...]:
        # The backward of a split is one kernel, that of two slices is two.
        return torch.split(
            output, [self.gmf_dim, output.shape[-1] - self.gmf_dim], dim=-1
        )


def _id_tables(
    feature: str, rows: int, *, widths: dict[str, int], std: float
) -> list[EmbeddingBagConfig]:
    tables = []
    for half, width in widths.items():
        table = EmbeddingBagConfig(
            name=f"{feature}_{half}",
            feature_names=[feature],
            num_embeddings=rows,
            embedding_dim=width,
            init_fn=partial(nn.init.normal_, std=std),
        )
        tables.append(table)
    return tables
