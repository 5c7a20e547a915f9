"""bst(): will this user take this item next? A session tower with the item in its sequence, then one logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig

from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.modules.tower import Activation, Tower, activation_layer, mlp


def bst(
    tables: Sequence[EmbeddingConfig],
    *,
    session: Sequence[str],
    target: Sequence[str],
    others: Mapping[str, Tower] | None = None,
    top_widths: Sequence[int] = (),
    activation: Activation = "relu",
    dropout: float = 0.0,
    **tower: Any,
) -> TowerModel:
    """Behaviour Sequence Transformer (Chen et al. 2019): session and target -> transformer -> MLP -> logit, trained on clicks.

    Args:
        tables: of the features of the steps, of one width; the items' reads both the session and the target.
        session: features of the earlier steps.
        target: features of the target.
        others: towers beside the session, such as the user's profile and the context, whose outputs are concatenated with its own.
        top_widths: hidden widths over that concatenation; none where not given, so that the logit is linear in it.
        activation: of all MLPs.
        dropout: likewise.
        tower: further arguments of :class:`SessionTower`, whose defaults are the paper's: one layer, 8 heads, MLP 1024-512-256.

    Example:
        >>> items = EmbeddingConfig(
        ...     name="item_id", embedding_dim=64, num_embeddings=300_000_000, feature_names=["history", "item_id"]
        ... )
        >>> model = bst([items], session=["history"], target=["item_id"], device=torch.device("meta"))
        >>> model.schema().keys
        ['history', 'item_id']
    """
    first = SessionTower(tables, session=session, target=target, activation=activation, dropout=dropout, **tower)
    rest = dict(others or {})
    if "session" in rest:
        raise ValueError("others names a tower 'session', which is the name of the session's own; choose another")
    width = first.out_features + sum(other.out_features for other in rest.values())
    logit = _Logit(width, top_widths, activation, dropout)
    return TowerModel({"session": first, **rest}, logit)  # type: ignore[dict-item]


class _Logit(nn.Module):
    """TopMLP over one tower or more."""

    def __init__(self, width: int, hidden: Sequence[int], activation: Activation, dropout: float) -> None:
        super().__init__()
        self.activation = activation_layer(activation)
        self.mlp = mlp(width, [*hidden, 1], activation=activation, dropout=dropout)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.mlp(self.activation(torch.cat(outputs, dim=1))).squeeze(1)  # type: ignore[no-any-return]
