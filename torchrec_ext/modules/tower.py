"""Tower: the embeddings of one sub-network and the dense layers over them; Towers: all towers of a model, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.modules.layers import Activation as Activation
from torchrec_ext.modules.layers import Layers, Recorded, reads_lengths, weighs_rows
from torchrec_ext.modules.layers import Normalization as Normalization
from torchrec_ext.modules.layers import activation_layer as activation_layer
from torchrec_ext.modules.layers import mlp as mlp
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


class AttentionPooling(nn.Module):
    """Pools a bag to a weighted mean; the weights are the softmax over the bag of ``v . tanh(W e + b)``.

    This is the additive attention of Bahdanau et al. (2015) with a learned query, as news encoders pool words (Wu et
    al. 2019, NRMS).

    Args:
        width: D of the embeddings e.
        hidden: width of the scoring layer; by default D.
    """

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(width, hidden or width),
            nn.Tanh(),
            nn.Linear(hidden or width, 1, bias=False),
        )

    def forward(self, bags: JaggedTensor | Padded) -> Tensor:
        """Returns (B, D) from bags of embeddings, (sum of lengths, D) in all; an empty bag gives zeros."""
        if isinstance(bags, Padded):
            return self._padded(bags)
        values = bags.values().to(self.score[0].weight.dtype)
        rows = _rows(bags)
        size = len(bags.lengths())
        scores = self.score(values).squeeze(1)
        # A softmax does not depend on the number that is subtracted, so the peaks need
        # no gradient.
        peaks = scores.new_full((size,), -torch.inf).scatter_reduce(
            0, rows, scores.detach(), "amax"
        )
        weights = torch.exp(scores - peaks[rows])
        # Totals are 1 or more but for empty bags.
        totals = scores.new_zeros(size).index_add(0, rows, weights).clamp(min=1)
        pooled = values.new_zeros(size, values.shape[1]).index_add(
            0, rows, values * weights[:, None]
        )
        return pooled / totals[:, None]  # type: ignore[no-any-return]

    def _padded(self, bags: Padded) -> Tensor:
        first: Any = self.score[0]
        values = bags.values().to(first.weight.dtype)
        scores = self.score(values).squeeze(2)
        # Any finite number does for padding: its weight is 0 below.
        scores = torch.where(bags.mask(), scores, torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)) * bags.mask()
        totals = weights.sum(dim=1).clamp(min=1)
        return (values * weights[:, :, None]).sum(dim=1) / totals[:, None]


class BagAttention(nn.Module):
    """Pools each feature of an EmbeddingCollection by an :class:`AttentionPooling` of its own.

    It has no tables, so that TorchRec's pipelines do not trace into it and it may read lengths.

    Args:
        names: keys of the collection's output, in order.
        width: D of the collection's tables.
    """

    def __init__(self, names: Sequence[str], width: int) -> None:
        super().__init__()
        self._names = list(names)
        self.pools = nn.ModuleList(AttentionPooling(width) for _ in names)

    def forward(self, sequences: Mapping[str, JaggedTensor | Padded]) -> Tensor:
        """Returns (B, features x D) from the embeddings of each feature's bags."""
        return torch.cat(
            [
                pool(sequences[name])
                for name, pool in zip(self._names, self.pools, strict=True)
            ],
            dim=1,
        )


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
        pooled = values.new_zeros(len(lengths), values.shape[1]).index_add(
            0, _rows(bags), values
        )
        if pooling == PoolingType.MEAN:
            pooled = pooled / lengths.clamp(min=1)[:, None]
        return pooled  # type: ignore[no-any-return]


def _rows(bags: JaggedTensor) -> Tensor:
    """Returns the row of each value, (sum of lengths,)."""
    lengths = bags.lengths().long()
    # With output_size torch need not wait for the device to learn how many values there
    # are.
    size = len(bags.values())
    return torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=size
    )


Embedded = TypeVar("Embedded")
# Embeddings of tables outside a tower, by ``feature@table``: pooled bags (B, width), or
# bags of rows (sum of lengths, width), or these padded.
LookedUp = Mapping[str, Tensor | JaggedTensor | Padded]


class Tower(Recorded, nn.Module):
    """One sub-network: tables looked up together, concatenated with dense columns, then an MLP.

    TorchRec's ``EmbeddingTower`` is embeddings plus an interaction pinned to one host. This tower declares its
    collections, and a plan decides later where their rows are.

    Args:
        tables: TorchRec configs. An EmbeddingBagConfig pools its bags by sum or mean, as it says; the bags of an
            EmbeddingConfig are pooled by attention, see :class:`AttentionPooling`. A table of ``data_type`` FP16 or
            BF16 is stored in that type and read in the type of the dense columns. Towers of one model that give configs
            of one name share that table.
        mlp_widths: widths of the MLP's layers; the last is D, the width of the tower's output. Without any, the output
            is the concatenation: pooled bags, then bags under attention, then dense columns.
        dense: names of the Fd dense columns that the tower reads; or the number of values that each has in a row, as
            in ``{"age": 1, "profile": 60}``, where ``profile`` is an array column: see :func:`dense_names`.
        weights: names of the columns with a weight for each id, by feature, such as how long ago each item of a history
            was: the bag is the sum of weight x row. The feature's tables are EmbeddingBagConfigs pooled by sum, which a
            TowerModel looks up; their other features have weights of 1.
        activation: activation between the layers of the MLP.
        normalization: layer before each activation: ``layer``, ``batch`` or ``none``.
        dropout: share of values set to 0 after each activation.
        residual: whether to add the input of each hidden layer that is as wide as its output.
        device: device of the tables; ``meta`` declares them without memory, and ``hybrid_parallel`` allocates shards.

    Raises:
        ValueError: neither tables nor dense columns, a table with the name of a method of ModuleDict (``items``),
            tables under attention of unequal width, or a wrong MLP.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        mlp_widths: Sequence[int],
        *,
        dense: Sequence[str] | Mapping[str, int] = (),
        weights: Mapping[str, str] | None = None,
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
        residual: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dense = dense_names(dense)
        if not tables and not self.dense:
            raise ValueError(
                "tables=[] and dense=(): a Tower needs a table or a dense column"
            )
        check_tables(tables)
        self.tables = list(tables)
        self.bags = bags = [
            table for table in tables if isinstance(table, EmbeddingBagConfig)
        ]
        self.lists = lists = [
            table for table in tables if isinstance(table, EmbeddingConfig)
        ]
        device = device or torch.device("cpu")
        self.weights = dict(weights or {})
        _check_weighted(tables, self.weights)
        self.device = device
        other = next(
            (table for table in lists if table.embedding_dim != lists[0].embedding_dim),
            None,
        )
        if other is not None:
            raise ValueError(
                f"tables '{lists[0].name}' (D = {lists[0].embedding_dim}) and '{other.name}' (D = "
                f"{other.embedding_dim}) are pooled by attention, and TorchRec's EmbeddingCollection holds tables of "
                "one width; give both one embedding_dim"
            )
        self._declare(bags, lists)
        self._poolings: list[tuple[str, PoolingType]] = []
        for table in bags:
            self._poolings += [(key, table.pooling) for key in _keys([table])]
        self.attention = (
            BagAttention(_keys(lists), lists[0].embedding_dim) if lists else None
        )
        self.pooling = RowPooling()
        widths: list[int] = []
        for table in (*bags, *lists):
            widths += [table.embedding_dim] * len(table.feature_names)
        width = sum(widths) + len(self.dense)
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

    def release_tables(self, names: Collection[str]) -> None:
        """Gives up the tables ``names``; :meth:`forward` is then given their embeddings."""
        bags = [table for table in self.bags if table.name not in names]
        lists = [table for table in self.lists if table.name not in names]
        self._declare(bags, lists)

    def _declare(
        self, bags: list[EmbeddingBagConfig], lists: list[EmbeddingConfig]
    ) -> None:
        # A table that pools by weights is the model's to look up, see SharedTables.
        self._own_bags = [
            table for table in bags if set(self.weights).isdisjoint(table.feature_names)
        ]
        self._own_lists = lists
        # Computed once: at a small network's step, the Python work of each look-up is
        # measurable.
        self._own_names = _names(self._own_bags)
        self.embeddings: EmbeddingBagCollection | None = None
        self.sequences: EmbeddingCollection | None = None
        try:
            if self._own_bags:
                self.embeddings = EmbeddingBagCollection(
                    tables=self._own_bags, device=self.device
                )
            if lists:
                self.sequences = EmbeddingCollection(tables=lists, device=self.device)
        except RuntimeError as error:
            # torch's allocators name bytes, but no table.
            raise _too_large(self.tables, error) from error

    def forward(
        self,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        looked_up: LookedUp | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Returns (B, D).

        Args:
            sparse: the batch's whole KeyedJaggedTensor, stride B.
            dense: (B, Fd), this tower's dense columns.
            looked_up: embeddings of released tables.
            weights: (B,) weight of each row for batch normalisation; by default all 1.
        """
        # A table may be stored in 16 bits.
        blocks = [
            embedded.to(dense.dtype)
            for embedded in self._pooled(sparse, looked_up or {})
        ]
        if self.attention is not None:
            listed = dict(looked_up or {})
            if self.sequences is not None:
                listed |= by_table(self._own_lists, self.sequences(sparse))
            blocks.append(self.attention(listed))
        if self.dense:
            blocks.append(dense)
        return self.combine(blocks, weights)

    def combine(
        self, blocks: Sequence[Tensor], weights: Tensor | None = None
    ) -> Tensor:
        """Returns (B, D) of the blocks of columns: pooled bags, bags under attention, dense columns; (B, width) each.

        Args:
            blocks: at least one block.
            weights: (B,) weight of each row for batch normalisation; by default all 1.
        """
        side_by_side = beside(blocks)
        # Without layers the MLP is an Identity, which takes no weights.
        if isinstance(self.mlp, Layers):
            return self.mlp(side_by_side, weights)  # type: ignore[no-any-return]
        return self.mlp(side_by_side)  # type: ignore[no-any-return]

    def _pooled(self, sparse: KeyedJaggedTensor, looked_up: LookedUp) -> list[Tensor]:
        """Returns the pooled bags, in the order of the tables and their features."""
        embedded = dict(looked_up)
        if self.embeddings is not None:
            pooled = self.embeddings(sparse).to_dict()
            embedded |= {key: pooled[name] for key, name in self._own_names.items()}
        blocks = []
        for key, pooling in self._poolings:
            block = embedded[key]
            # A call that does nothing is left out, because this runs in every step.
            blocks.append(
                block if isinstance(block, Tensor) else self.pooling(block, pooling)
            )
        return blocks


def beside(blocks: Sequence[Tensor]) -> Tensor:
    """Returns blocks (B, width) side by side; a single one as it is, since concatenating it would copy it."""
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)


def _too_large(tables: Sequence[BaseEmbeddingConfig], error: RuntimeError) -> Exception:
    """Returns an error about the largest table, or ``error`` itself if memory is not its cause."""
    if not any(
        words in str(error)
        for words in ("allocate memory", "out of memory", "overflowed")
    ):
        return error
    table = max(tables, key=lambda table: table.num_embeddings * table.embedding_dim)
    size = 4 * table.num_embeddings * table.embedding_dim
    return ValueError(
        f"table '{table.name}', num_embeddings={table.num_embeddings:,}: {size / 1e9:,.1f} GB of weights do not fit "
        'here; map ids to rows by rec.data.preprocess, or shard with device="meta"'
    )


def _keys(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    keys: list[str] = []
    for table in tables:
        keys += [f"{feature}@{table.name}" for feature in table.feature_names]
    return keys


def by_table(
    tables: Sequence[BaseEmbeddingConfig], embedded: Mapping[str, Embedded]
) -> dict[str, Embedded]:
    """Returns the output of a collection of ``tables`` by ``feature@table``.

    TorchRec appends the table's name only to features of several tables. A sharded collection groups its output by
    sharding type, so entries are picked by name.
    """
    return {key: embedded[name] for key, name in _names(tables).items()}


def _names(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, str]:
    """Returns the name in the output of a collection of ``tables`` of each ``feature@table``."""
    names = chain.from_iterable(get_embedding_names_by_table(list(tables)))
    return dict(zip(_keys(tables), names, strict=True))


def _check_weighted(
    tables: Sequence[BaseEmbeddingConfig], weights: Mapping[str, str]
) -> None:
    for feature, column in weights.items():
        readers = [table for table in tables if feature in table.feature_names]
        if not readers:
            raise ValueError(
                f"weights: {feature}={column}: the tower reads no feature '{feature}'; name one of its tables' features"
            )
        for table in readers:
            # FBGEMM wrongly trains a table that pools by mean if its ids have weights.
            pooling = getattr(table, "pooling", None)
            if pooling != PoolingType.SUM:
                way = pooling.name if pooling else "attention"
                raise ValueError(
                    f"weights: {feature}={column}: table '{table.name}' pools it by {way}, must be SUM; for a mean "
                    "give weights that add up to 1"
                )


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
        weights: whether it takes the rows' weights.
        lengths: whether it takes the lengths of the rows' bags.
    """

    shared: bool
    dense: slice
    weights: bool = False
    lengths: bool = False


class Towers(nn.ModuleDict):
    """Calls all towers of a model at once.

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
                weighs_rows(tower),
                reads_lengths(tower) and not is_shared,
            )
        _check_columns(self)

    def weigh_rows(self, *, shared: bool) -> bool:
        """Returns whether one of the shared towers, or one of the others, takes the weights of its rows."""
        return any(
            reads.weights and reads.shared == shared for reads in self.reads.values()
        )

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
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        shared_sparse: KeyedJaggedTensor | None = None,
        shared_dense: Tensor | None = None,
        *,
        looked_up: LookedUp | None = None,
        names: Sequence[str] | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
        host_lengths: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the output of each tower by name: (B, D), or (Q, D) of a shared tower.

        Args:
            sparse: KeyedJaggedTensor of the batch's rows, stride B.
            dense: (B, Fd) dense columns of the batch's rows.
            shared_sparse: KeyedJaggedTensor of the shared rows, stride Q; None if no shared tower is called.
            shared_dense: (Q, Fd) dense columns of the shared rows; None if no shared tower is called.
            looked_up: embeddings of tables that towers have released, see :meth:`Tower.forward`.
            names: towers to run; by default all.
            weights: (B,) weights of the rows for batch normalisation; by default all 1.
            shared_weights: (Q,) weights of the shared rows for batch normalisation; by default all 1.
            host_lengths: see :class:`torchrec_ext.batch.TowerBatch`.
        """
        outputs = {}
        for name in self.reads if names is None else names:
            shared, tower_columns, weighs, reads_host_lengths = self.reads[name]
            rows, columns = (shared_sparse, shared_dense) if shared else (sparse, dense)
            # Only what a tower takes: one of the user's own may know none of these
            # arguments.
            options: dict[str, Any] = {}
            if looked_up and hasattr(self[name], "release_tables"):
                options["looked_up"] = looked_up
            if weighs:
                options["weights"] = shared_weights if shared else weights
            if reads_host_lengths:
                options["host_lengths"] = host_lengths
            outputs[name] = self[name](rows, columns[:, tower_columns], **options)  # type: ignore[index]
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
