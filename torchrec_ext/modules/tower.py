"""Tower: the embeddings of one sub-network and the dense layers over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.modules.layers import Activation as Activation
from torchrec_ext.modules.layers import Normalization as Normalization
from torchrec_ext.modules.layers import activation_layer as activation_layer
from torchrec_ext.modules.layers import mlp as mlp
from torchrec_ext.modules.pooling import BagAttention


class Tower(nn.Module):
    """One sub-network: tables looked up together, concatenated with dense columns, then an MLP.

    TorchRec's ``EmbeddingTower`` is embeddings plus an interaction pinned to one host; this tower is neither sharded nor placed: it
    declares its collections, and where their rows and its dense layers run is decided later by a plan.

    Args:
        tables: TorchRec configs, whose names must be unique over all towers of a model. An EmbeddingBagConfig pools its bags by sum
            or mean, as it says; the bags of an EmbeddingConfig are pooled by attention, see :class:`AttentionPooling`. A table of
            ``data_type`` FP16 or BF16 is stored so and read in the type of the dense columns.
        mlp_widths: widths of the MLP; the last is D, the width of the tower's output. Without any, the output is the concatenation:
            pooled bags, then bags under attention, then dense columns.
        dense: names of the dense columns that the tower reads, Fd of them.
        activation: between the layers of the MLP.
        normalization: before each activation: ``layer``, ``batch`` or ``none``.
        dropout: after each activation.
        residual: add the input of each hidden layer that is as wide as its output.
        device: of the tables; ``meta`` declares them without memory, and ``hybrid_parallel`` allocates the shards.

    Raises:
        ValueError: a tower without tables, tables under attention of unequal width, or a wrong MLP.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        mlp_widths: Sequence[int],
        *,
        dense: Sequence[str] = (),
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
        residual: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a Tower needs at least one table; a network of dense columns alone is a plain nn.Module")
        self.dense = tuple(dense)
        self.tables = list(tables)
        bags = [table for table in tables if isinstance(table, EmbeddingBagConfig)]
        lists = [table for table in tables if isinstance(table, EmbeddingConfig)]
        device = device or torch.device("cpu")
        self.embeddings = EmbeddingBagCollection(tables=bags, device=device) if bags else None
        self.sequences = EmbeddingCollection(tables=_of_one_width(lists), device=device) if lists else None
        # A sharded collection returns its columns grouped by sharding type, so they are picked by name.
        self._columns = [name for names in get_embedding_names_by_table(bags) for name in names]
        listed = [name for names in get_embedding_names_by_table(lists) for name in names]
        self.attention = BagAttention(listed, lists[0].embedding_dim) if lists else None
        width = sum(table.embedding_dim * table.num_features() for table in tables) + len(self.dense)
        self.out_features = mlp_widths[-1] if mlp_widths else width
        self.mlp: nn.Module = nn.Identity()
        if mlp_widths:
            self.mlp = mlp(
                width,
                mlp_widths,
                activation=activation,
                normalization=normalization,
                dropout=dropout,
                residual=residual,
            )

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """(B, D) from the batch's whole KeyedJaggedTensor and this tower's dense columns (B, Fd)."""
        parts = []
        if self.embeddings is not None:
            embedded = self.embeddings(sparse).to_dict()
            parts += [embedded[name].to(dense.dtype) for name in self._columns]
        if self.sequences is not None and self.attention is not None:
            parts.append(self.attention(self.sequences(sparse)))
        return self.mlp(torch.cat([*parts, dense], dim=1))  # type: ignore[no-any-return]


def _of_one_width(tables: list[EmbeddingConfig]) -> list[EmbeddingConfig]:
    """TorchRec's EmbeddingCollection holds tables of one width."""
    other = next((table for table in tables if table.embedding_dim != tables[0].embedding_dim), None)
    if other is not None:
        raise ValueError(
            f"tables '{tables[0].name}' (D = {tables[0].embedding_dim}) and '{other.name}' (D = {other.embedding_dim}) are pooled "
            "by attention, and TorchRec's EmbeddingCollection holds tables of one width; give both one embedding_dim"
        )
    return tables
