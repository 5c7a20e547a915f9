"""Tower: the embeddings of one sub-network and the dense layers over them; Towers: all towers of a model, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.layers import Activation as Activation
from torchrec_ext.modules.layers import Normalization as Normalization
from torchrec_ext.modules.layers import activation_layer as activation_layer
from torchrec_ext.modules.layers import mlp as mlp
from torchrec_ext.modules.layers import normalises, row_weights
from torchrec_ext.schema.array_columns import dense_names


class Padded:
    """The bags of a feature padded to one length, as a graph without jagged operators reads them.

    Args:
        values: (B, L, D) embeddings; those beyond a bag's length may be any numbers.
        lengths: (B,) int64 lengths of the bags.
    """

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values = values
        self._lengths = lengths

    def values(self) -> Tensor:
        """Returns (B, L, D)."""
        return self._values

    def lengths(self) -> Tensor:
        """Returns (B,)."""
        return self._lengths

    def mask(self) -> Tensor:
        """Returns (B, L) bool, False for padding."""
        places = torch.arange(self._values.shape[1], device=self._values.device)
        return places < self._lengths[:, None]


class RowPooling(nn.Module):
    """Pools bags from rows looked up one by one, for a table that another tower reads as a sequence.

    It has no tables, so that TorchRec's pipelines do not trace into it and it may read lengths.
    """

    def forward(self, bags: Tensor | JaggedTensor, pooling: PoolingType) -> Tensor:
        """Returns (B, D) from bags of rows, (sum of lengths, D) in all, with zeros for an empty bag.

        A Tensor is pooled already and returned as it is.
        """
        if isinstance(bags, Tensor):
            return bags
        values = bags.values()
        lengths = bags.lengths().long()
        # With output_size torch need not wait for the device to learn how many values
        # there are.
        rows = torch.repeat_interleave(
            torch.arange(len(lengths), device=lengths.device),
            lengths,
            output_size=len(values),
        )
        pooled = values.new_zeros(len(lengths), values.shape[1])
        pooled = pooled.index_add(0, rows, values)
        if pooling == PoolingType.MEAN:
            pooled = pooled / lengths.clamp(min=1)[:, None]
        return pooled  # type: ignore[no-any-return]


# Embeddings of tables by ``feature@table``: pooled bags (B, width), or bags of rows (sum of
# lengths, width), or these padded.
Vectors = Mapping[str, Tensor | JaggedTensor | Padded]


class Tower(nn.Module):
    """One sub-network: embeddings and dense columns side by side, then an MLP.

    A tower names its tables, and the model holds them and looks them up for all towers, see
    :class:`torchrec_ext.modules.look_ups.LookUps`. So a plan decides where their rows are.

    Args:
        tables: TorchRec EmbeddingBagConfigs, which pool their bags by sum or mean. A table of ``data_type`` FP16 or
            BF16 is stored in that type and read in the type of the dense columns. Towers of one model that give configs
            of one name share that table.
        mlp_widths: widths of the MLP's layers; the last is D, the width of the tower's output. Without any, the output
            is the concatenation: pooled bags, then dense columns.
        dense: names of the Fd dense columns that the tower reads; or the number of values that each has in a row, as
            in ``{"age": 1, "profile": 60}``, if ``profile`` is an array column: see :func:`dense_names`.
        activation: activation between the layers of the MLP.
        normalization: layer before each activation: ``layer``, ``batch`` or ``none``.
        dropout: share of values set to 0 after each activation.

    Raises:
        ValueError: neither tables nor dense columns, a table with the name of a method of ModuleDict (``items``), one
            that does not pool, or a wrong MLP.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        mlp_widths: Sequence[int],
        *,
        dense: Sequence[str] | Mapping[str, int] = (),
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dense = dense_names(dense)
        if not tables and not self.dense:
            raise ValueError(
                "tables=[] and dense=(): a Tower needs a table or a dense column"
            )
        check_tables(tables)
        self.tables = list(tables)
        self._poolings: list[tuple[str, PoolingType]] = []
        width = len(self.dense)
        for table in tables:
            if not isinstance(table, EmbeddingBagConfig):
                raise ValueError(
                    f"table '{table.name}': a {type(table).__name__}, which does not pool; give an EmbeddingBagConfig"
                )
            self._poolings += [(key, table.pooling) for key in keys_of([table])]
            width += table.embedding_dim * len(table.feature_names)
        self.pooling = RowPooling()
        self.out_features = mlp_widths[-1] if mlp_widths else width
        self.mlp: nn.Module = nn.Identity()
        if mlp_widths:
            self.mlp = mlp(
                width,
                mlp_widths,
                activation=activation,
                normalization=normalization,
                dropout=dropout,
            )

    def forward(self, vectors: Vectors, dense: Tensor) -> Tensor:
        """Returns (B, D) of the embeddings of its tables and its dense columns (B, Fd)."""
        blocks = []
        for key, pooling in self._poolings:
            block = vectors[key]
            # A call that does nothing is left out, because this runs in every step.
            if not isinstance(block, Tensor):
                block = self.pooling(block, pooling)
            # A table may be stored in 16 bits.
            blocks.append(block.to(dense.dtype))
        if self.dense:
            blocks.append(dense)
        return self.combine(blocks)

    def combine(self, blocks: Sequence[Tensor]) -> Tensor:
        """Returns (B, D) of one or more blocks of columns: pooled bags, then dense columns; (B, width) each."""
        return self.mlp(beside(blocks))  # type: ignore[no-any-return]


def beside(blocks: Sequence[Tensor]) -> Tensor:
    """Returns blocks (B, width) side by side; a single one as it is, since concatenating it would copy it."""
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)


def keys_of(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """Returns ``feature@table`` of each feature of the tables, in order."""
    keys: list[str] = []
    for table in tables:
        keys += [f"{feature}@{table.name}" for feature in table.feature_names]
    return keys


def check_tables(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Refuses tables early if TorchRec would fail at them later.

    Raises:
        ValueError: a table without columns, or with a name that a module cannot have.
    """
    for table in tables:
        if table.embedding_dim < 1:
            raise ValueError(
                f"table '{table.name}': embedding_dim={table.embedding_dim}, must be 1 or more"
            )
    clashes = [table.name for table in tables if hasattr(nn.ModuleDict, table.name)]
    if clashes:
        raise ValueError(
            f"table '{clashes[0]}': TorchRec keeps tables in a torch ModuleDict, where this name is taken; add a suffix"
        )


class Reads(NamedTuple):
    """The input of a tower from a batch.

    Attributes:
        shared: whether it reads the batch's shared rows rather than its rows.
        dense: columns of their dense matrix.
        normalises: whether it normalises over the rows, and so needs their weights.
    """

    shared: bool
    dense: slice
    normalises: bool = False


class Towers(nn.ModuleDict):
    """Calls all towers of a model at once.

    It has no tables, so that TorchRec's pipelines do not trace into it and it may branch.

    Args:
        towers: modules by name; each has ``tables``, ``dense`` and ``out_features``, as :class:`Tower`.
        shared: names of the towers that read the batch's shared rows, see :class:`torchrec_ext.batch.SharedRows`.

    Raises:
        ValueError: an unknown name in ``shared``, a dense column of two towers, or a feature of a shared and of another
            tower.
    """

    def __init__(
        self, towers: Mapping[str, Tower], *, shared: Collection[str] = ()
    ) -> None:
        super().__init__(towers)
        unknown = sorted(set(shared) - set(towers))
        if unknown:
            raise ValueError(
                f"shared names {unknown}, which are not towers; the towers are {list(towers)}"
            )
        self.reads: dict[str, Reads] = {}
        # Dense columns of shared towers and of the others are two matrices of a batch.
        ends = {False: 0, True: 0}
        for name, tower in towers.items():
            is_shared = name in shared
            start = ends[is_shared]
            stop = start + len(tower.dense)
            ends[is_shared] = stop
            self.reads[name] = Reads(
                is_shared,
                slice(start, stop),
                normalises(tower),
            )
        _check_columns(self)

    def columns(self, *, shared: bool) -> list[str]:
        """Returns the features and dense columns of the shared towers, or of the others."""
        towers: list[Tower] = [
            self[name]  # type: ignore[misc]
            for name, reads in self.reads.items()
            if reads.shared == shared
        ]
        names: list[str] = []
        for tower in towers:
            for table in tower.tables:
                names += table.feature_names
        for tower in towers:
            names += tower.dense
        return names

    def forward(
        self,
        vectors: Vectors,
        batch: TowerBatch,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the output of each tower by name: (B, D), or (Q, D) of a shared tower.

        Args:
            vectors: embeddings of the towers' tables.
            batch: the rows.
            names: towers to run; by default all.
        """
        outputs = {}
        for name in self.reads if names is None else names:
            reads = self.reads[name]
            dense = (
                batch.dense
                if batch.shared is None or not reads.shared
                else batch.shared.dense
            )
            weights = None
            if reads.normalises:
                weights = batch.shared_weights if reads.shared else batch.weights
            with row_weights(weights):
                outputs[name] = self[name](vectors, dense[:, reads.dense])
        return outputs


def _check_columns(towers: Towers) -> None:
    dense = [name for tower in towers.values() for name in tower.dense]  # type: ignore[union-attr]
    twice = sorted({name for name in dense if dense.count(name) > 1})
    if twice:
        raise ValueError(
            f"dense columns {twice} are read by more than one tower; give each tower a column of its own name"
        )
    both = sorted(set(towers.columns(shared=False)) & set(towers.columns(shared=True)))
    if both:
        raise ValueError(
            f"features {both} are read by a shared tower and by another; share both towers, or give each its own"
        )
