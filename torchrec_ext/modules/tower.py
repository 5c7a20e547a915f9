"""Tower: the embeddings of one sub-network and the dense layers over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Activation = Literal["relu", "gelu", "silu", "tanh"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def activation_layer(name: Activation) -> nn.Module:
    """The activation of that name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r}: must be one of {', '.join(get_args(Activation))}")
    return _ACTIVATIONS[name]()


def mlp(in_features: int, widths: Sequence[int], *, activation: Activation = "relu", dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with an activation between them and none after the last, so that its output may be of either sign.

    Example:
        >>> mlp(8, [4, 2])(torch.zeros(3, 8)).shape
        torch.Size([3, 2])
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"widths={list(widths)}: an MLP needs at least one layer and every width 1 or more")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
    activation_layer(activation)
    layers: list[nn.Module] = []
    for before, width in zip([in_features, *widths], widths, strict=False):
        if layers:
            layers.append(activation_layer(activation))
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(before, width))
    return nn.Sequential(*layers)


class Tower(nn.Module):
    """One sub-network: tables looked up together, concatenated with dense columns, then an MLP.

    TorchRec's ``EmbeddingTower`` is embeddings plus an interaction pinned to one host; this tower is neither sharded nor placed: it
    declares an EmbeddingBagCollection, and where its rows and its dense layers run is decided later by a plan.

    Args:
        tables: TorchRec EmbeddingBagConfigs; their names must be unique over all towers of a model.
        mlp_widths: widths of the MLP; the last is D, the width of the tower's output.
        dense: names of the dense columns that the tower reads, Fd of them.
        activation: between the layers of the MLP.
        dropout: after each activation.
        device: of the tables; ``meta`` declares them without memory, and ``hybrid_parallel`` allocates the shards.

    Raises:
        ValueError: the tower reads nothing.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        mlp_widths: Sequence[int],
        *,
        dense: Sequence[str] = (),
        activation: Activation = "relu",
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a Tower needs at least one table; a network of dense columns alone is a plain nn.Module")
        self.dense = tuple(dense)
        self.out_features = mlp_widths[-1] if mlp_widths else 0
        self.tables = list(tables)
        self.embeddings = EmbeddingBagCollection(tables=self.tables, device=device or torch.device("cpu"))
        # A sharded collection returns its columns grouped by sharding type, so they are picked by name.
        self._columns: list[str] = [name for names in get_embedding_names_by_table(self.tables) for name in names]
        width = sum(table.embedding_dim * table.num_features() for table in tables)
        self.mlp = mlp(width + len(self.dense), mlp_widths, activation=activation, dropout=dropout)

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """(B, D) from the batch's whole KeyedJaggedTensor and this tower's dense columns (B, Fd)."""
        embedded = self.embeddings(sparse).to_dict()
        return self.mlp(torch.cat([embedded[name] for name in self._columns] + [dense], dim=1))  # type: ignore[no-any-return]
