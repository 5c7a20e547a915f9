"""Networks by leaves: a trained model as columns, and one forward from what tables have for them to logits.

TowerNetwork is a TowerModel or NextItemModel, sharded or not; OwnNetwork any other module whose forward takes columns.
Both are split, and answer with the trained model's logits, on every rank.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_ext.data.columns import Chunk, Column, with_elements
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.preprocess.columns import is_list_column, raw_type
from torchrec_ext.distributed.tables import (
    collections,
    table_configs,
    tables_of,
)
from torchrec_ext.models.session import CANDIDATES, SESSION, NextItemModel
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.session_tower import SessionSteps
from torchrec_ext.modules.tower import Padded
from torchrec_ext.retrieval.columns import ModelColumn
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.split import GraphSplit
from torchrec_ext.retrieval.trace import Leaf, LookingUp, look_up
from torchrec_ext.schema.array_columns import source_columns, widths_of
from torchrec_ext.schema.validation import listed

_DENSE = "dense_features"  # DLRM's own name of its argument


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What an export was told about the model's columns.

    Args:
        types: raw type of each of the model's columns.
        oov_ids: out-of-vocabulary row of each column.
        vocab: names of columns whose row 0 is for unknown values, because a preprocessor made their ids.
        longest: most entries of the lists that a preprocessor cuts, by column.
        rows: rows of a table that the bundle holds, by table.
    """

    types: Mapping[str, str]
    oov_ids: Mapping[str, int] = field(default_factory=dict)
    vocab: frozenset[str] = frozenset()
    longest: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def is_list(self, column: str) -> bool:
        """Returns whether a column has a list in each row."""
        if column not in self.types:
            raise BundleError(
                f"column '{column}': the model reads it, and neither queries nor catalogue.features have it; they have "
                f"{listed(sorted(self.types))}"
            )
        return self.types[column].startswith("list<")


def _columns_of(
    inputs: Sequence[Leaf],
    leaves: Sequence[Leaf],
    given: Given,
    sizes: Mapping[str, int],
    oov: int | None,
    paddings: Mapping[str, int | None],
) -> dict[str, dict[str, ModelColumn]]:
    """Returns the columns behind leaves by side and name; ``oov`` is the row of unknown ids where none is given."""
    columns: dict[str, dict[str, ModelColumn]] = {"query": {}, "candidate": {}}
    lengths = {leaf.column: leaf.shape[0] for leaf in inputs if leaf.shape}
    steps = {leaf.column for leaf in inputs if leaf.kind == "lengths"}
    by_column: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_column.setdefault(leaf.column, []).append(leaf)
    for name, of_column in by_column.items():
        column = ModelColumn(type=given.types[name])
        tables = [sizes[leaf.table] for leaf in of_column if leaf.table]
        if tables:
            row = given.oov_ids.get(name, 0 if name in given.vocab else oov)
            # Ids must be rows of each table that they look up.
            column = replace(column, rows=min(tables), oov=row)
        if name in steps:
            longest = [leaf.shape[0] for leaf in of_column if leaf.kind == "rows"]
            column = replace(column, longest=longest[0] if longest else None)
        elif lengths.get(name):
            fill = _fill_of(name, of_column, given, paddings)
            column = replace(column, longest=lengths[name], exact=True, fill=fill)
        side = "candidate" if of_column[0].candidate else "query"
        columns[side][name] = column
    _check_oov(given, {**columns["query"], **columns["candidate"]})
    return columns


def _fill_of(
    name: str,
    of_column: Sequence[Leaf],
    given: Given,
    paddings: Mapping[str, int | None],
) -> int | None:
    """Returns the row that fills a column's shorter lists up: its tables' ``padding_idx``, or row 0 of a step's ids.

    None leaves lists of one length as they are: no step made them, or several rows or none would fill them.
    """
    if name not in given.vocab and name not in given.longest:
        return None
    rows = {paddings.get(leaf.table) for leaf in of_column}
    fills = [row for row in rows if row is not None]
    if not fills and name in given.vocab:
        return 0
    if len(fills) != 1 and name in given.longest:
        raise BundleError(
            f"column '{name}': its lists are shorter than {given.longest[name]}, and {len(fills)} rows may have filled "
            "them up in training; give their tables one padding_idx"
        )
    return fills[0] if len(fills) == 1 else None


def _check_oov(given: Given, columns: Mapping[str, ModelColumn]) -> None:
    """Refuses a row of unknown ids that would have no effect, or is no row."""
    rows = {name: column.rows for name, column in columns.items() if column.rows}
    for name, row in given.oov_ids.items():
        if not 0 <= row < rows.get(name, 0):
            tables = listed(f"{each} ({size})" for each, size in sorted(rows.items()))
            raise BundleError(
                f"oov_ids: '{name}': {row} must be a row of a table that its values look up as they are; rows: {tables}"
            )


class Network:
    """A trained model by its columns.

    Args:
        given: what is known of its columns.
        inputs: leaves of the columns that its forward takes, and the lengths of lists.
        module: makes the module that :class:`GraphSplit` cuts.
        sizes: rows of its tables, by name.
        known: an earlier cut of this model, or None.
        oov: row of unknown ids where none is given; None for none.
        paddings: ``padding_idx`` of each table that has one.

    Attributes:
        names: names of the towers of each side.
        calibrated: whether the loss makes a logit the log-odds of a positive label.
        model: the trained module, without wrappers.
        split: the network in parts.
        tables: names of the tables that are looked up.
        columns: the columns that it reads, by side and name.
    """

    names: Mapping[str, Sequence[str]] = {
        "query": ["query"],
        "candidate": ["candidate"],
    }
    calibrated = False
    model: Any

    def __init__(
        self,
        given: Given,
        inputs: Sequence[Leaf],
        module: Callable[[], nn.Module],
        sizes: Mapping[str, int],
        known: GraphSplit | None,
        oov: int | None = None,
        paddings: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        if known is None or known.inputs != inputs:
            known = GraphSplit(module().eval(), inputs)
        self.split = known
        leaves = [*known.query.leaves, *known.candidate.leaves]
        self.tables = {leaf.table for leaf in leaves if leaf.table}
        held = {table: len(rows) for table, rows in given.rows.items()}
        self.columns = _columns_of(
            inputs, leaves, given, {**sizes, **held}, oov, paddings
        )

    def logits(self, columns: Chunk) -> Tensor:
        """Returns (B,) logits of the trained model for B rows of all columns. Collective if it is sharded."""
        raise NotImplementedError


class TowerNetwork(Network):
    """A trained TowerModel or NextItemModel.

    Args:
        model: result of ``hybrid_parallel``, in any DistributedModelParallel, or unsharded; its last tower is the
            candidates'.
        given: what is known of its columns.
        known: see :class:`Network`.

    Raises:
        BundleError: it has no tower for candidates alone, or reads a column on both sides.
    """

    def __init__(
        self,
        model: TowerModel | NextItemModel,
        given: Given,
        known: GraphSplit | None,
    ) -> None:
        self.model = model
        self._given = given
        reads: dict[str, _Reads] = {}
        if isinstance(model, NextItemModel):
            longest = model.network.encoder.max_length
            reads[SESSION] = _Reads([(model.table, SESSION)], longest=longest)
            reads["item"] = _Reads([(model.table, CANDIDATES)])
        else:
            reads = {name: _reads_of(tower) for name, tower in model.towers.items()}
        names = list(reads)
        if len(names) < 2:
            raise BundleError(
                f"model: has the tower {names[0]} alone; serving needs one of the query and one of the candidates"
            )
        *queries, candidate = names
        self.names = {"query": queries, "candidate": [candidate]}
        self.calibrated = (
            isinstance(model, TowerModel)
            and model.calibrated
            and model.loss.function is bce
        )
        leaves: list[Leaf] = []
        for name, each in reads.items():
            leaves += _inputs_of(each, name == candidate, given)
        of_items = {leaf.column for leaf in leaves if leaf.candidate}
        both = sorted({leaf.column for leaf in leaves if not leaf.candidate} & of_items)
        if both:
            raise BundleError(
                f"column '{both[0]}': tower '{candidate}' and {listed(queries)} read it, so no item's row can be "
                "stored; give it to one side"
            )
        # Several towers may read a column.
        inputs = list({leaf.name: leaf for leaf in leaves}.values())
        sizes = {table.name: table.num_embeddings for table in tables_of(model)}
        super().__init__(given, inputs, self._by_leaves, sizes, known, oov=0)

    def _by_leaves(self) -> nn.Module:
        if isinstance(self.model, NextItemModel):
            return _NextItemByLeaves(self.model)
        return _TowersByLeaves(self.model, self._given)

    @torch.no_grad()
    def logits(self, columns: Chunk) -> Tensor:
        """See :meth:`Network.logits`."""
        schema = replace(self.model.schema(), tasks=())
        given = with_elements(columns, schema.dense)
        # Columns that a tower takes and does not read are not asked for.
        unread = Column(np.zeros(columns.num_rows, np.int64))
        rows = {name: given.get(name, unread) for name in (*schema.keys, *schema.dense)}
        for feature in schema.sparse:
            column = rows[feature.name]
            if isinstance(self.model, NextItemModel) and column.ragged:
                # The other models take the latest steps by themselves.
                column = column.last(self.model.network.encoder.max_length)
            held = self._given.rows.get(feature.tables[0])
            if held is not None:
                column = Column(held.numpy()[column.values], column.offsets)
            rows[feature.name] = column
        batch = BatchBuilder(schema, Chunk({})).user_batch(Chunk(rows))
        batch = batch.to(_device(self.model))
        if not isinstance(self.model, NextItemModel):
            return self.model.logits(batch).float().cpu()  # type: ignore[no-any-return]
        outputs = [self.model.embed(name, batch) for name in (SESSION, "item")]
        return self.model.interaction(outputs).float().cpu()  # type: ignore[no-any-return]


class _Reads(NamedTuple):
    """What a tower reads: features with their tables, dense columns, and the most ids of a list that is not pooled."""

    features: Sequence[tuple[BaseEmbeddingConfig, str]]
    dense: Sequence[str] = ()
    longest: int | None = None


def _reads_of(tower: Any) -> _Reads:
    features: list[tuple[BaseEmbeddingConfig, str]] = []
    for table in tower.tables:
        features += [(table, feature) for feature in table.feature_names]
    longest = tower.max_length if isinstance(tower, SessionSteps) else None
    return _Reads(features, tower.dense, longest)


def _inputs_of(reads: _Reads, candidate: bool, given: Given) -> Iterator[Leaf]:
    """Yields the leaves of a tower's columns, and of the lengths of lists without pooling."""
    for table, name in reads.features:
        column = Leaf(
            name=name, kind="column", column=name, candidate=candidate, dtype="int64"
        )
        if not given.is_list(name):
            yield column
        elif isinstance(table, EmbeddingBagConfig):
            yield replace(column, shape=(None,))
        else:
            yield replace(column, name=_steps(name), shape=(reads.longest,))
            yield replace(column, name=_lengths(name), kind="lengths")
    widths = widths_of(reads.dense, given.types.keys())
    for name in source_columns(reads.dense, given.types.keys()):
        given.is_list(name)
        shape = (widths[name],) if name in widths else ()
        yield Leaf(
            name=name, kind="column", column=name, candidate=candidate, shape=shape
        )


def _steps(column: str) -> str:
    return f"steps of {column}"


def _lengths(column: str) -> str:
    return f"lengths of {column}"


class _TowersByLeaves(nn.Module):
    """The towers and the interaction of a TowerModel over leaves."""

    def __init__(self, model: TowerModel, given: Given) -> None:
        super().__init__()
        parts = {"towers": model.towers, "interaction": model.interaction}
        self.model = copy.deepcopy(nn.ModuleDict(parts)).cpu()
        self._given = given

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = []
        for tower in self.model["towers"].values():  # type: ignore[operator]
            looked_up: dict[str, Any] = {}
            reads = _reads_of(tower)
            for table, feature in reads.features:
                found: Any
                if isinstance(table, EmbeddingBagConfig):
                    found = _looked_up(table, leaves[feature])
                else:
                    found = _padded(table, feature, leaves)
                looked_up[f"{feature}@{table.name}"] = found
            rows = next(iter(leaves.values()))
            dense = _beside(tower.dense, leaves, self._given.types, rows)
            outputs.append(tower(looked_up, dense))
        return self.model["interaction"](outputs)  # type: ignore[no-any-return]


class _NextItemByLeaves(nn.Module):
    """A NextItemModel over leaves."""

    def __init__(self, model: NextItemModel) -> None:
        super().__init__()
        parts = {"network": model.network, "interaction": model.interaction}
        self.model = copy.deepcopy(nn.ModuleDict(parts)).cpu()
        self._table = model.table

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        items = _padded(self._table, SESSION, leaves)
        session = self.model["network"].last_padded(items.values(), items.lengths())  # type: ignore[operator]
        candidates = _looked_up(self._table, leaves[CANDIDATES])
        return self.model["interaction"]([session, candidates])  # type: ignore[no-any-return]


def _looked_up(table: BaseEmbeddingConfig, ids: Tensor) -> Tensor:
    """Returns what a table of TorchRec has for a column: rows, or pooled lists of any length."""
    pooling = ""
    if isinstance(table, EmbeddingBagConfig) and ids.dim() == 2:
        pooling = table.pooling.name.lower()
    return look_up(ids, table.name, table.embedding_dim, pooling)


def _padded(
    table: BaseEmbeddingConfig, feature: str, leaves: Mapping[str, Tensor]
) -> Padded:
    """Returns lists (B, L, D) with their lengths, or one row each (B, D) as a list."""
    steps = leaves.get(_steps(feature))
    if steps is None:
        rows = _looked_up(table, leaves[feature])[:, None]
        return Padded(rows, torch.ones_like(leaves[feature]))
    return Padded(_looked_up(table, steps), leaves[_lengths(feature)])


def _beside(
    names: Sequence[str],
    leaves: Mapping[str, Tensor],
    types: Mapping[str, str],
    rows: Tensor,
) -> Tensor:
    """Returns (B, Fd) dense columns side by side, where an array column has a name for each element."""
    size = rows.shape[0]
    matrices = [rows.new_zeros((size, 0), dtype=torch.float32)]
    there: list[str] = []
    widths = widths_of(names, types.keys())
    for column in source_columns(names, types.keys()):
        matrices.append(leaves[column].reshape(size, -1))
        elements = [f"{column}[{index}]" for index in range(widths.get(column, 0))]
        there += elements or [column]
    matrix = torch.cat(matrices[1:] or matrices, dim=1)
    places = [there.index(name) for name in names]
    return matrix if there == list(names) else matrix[:, places]


class _NoKeys:
    """Stands for the ids of a batch, which leaves look up."""

    def keys(self) -> list[str]:
        return []


class _LeafCollection(nn.Module):
    """Stands for an embedding collection, sharded or not: it looks up the columns of its features.

    Args:
        configs: its tables.

    Attributes:
        columns: the columns of forward.
    """

    def __init__(self, configs: Sequence[BaseEmbeddingConfig]) -> None:
        super().__init__()
        self.configs = list(configs)
        self.columns: Mapping[str, Tensor] = {}

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        return self.configs

    def forward(self, features: Any) -> Any:
        pairs: list[tuple[BaseEmbeddingConfig, str]] = []
        for config in self.configs:
            pairs += [(config, feature) for feature in config.feature_names]
        if not isinstance(self.configs[0], EmbeddingBagConfig):
            raise BundleError(
                f"model: table '{self.configs[0].name}' is of an EmbeddingCollection; look its ids up by nn.Embedding"
            )
        found = [_looked_up(config, self.columns[name]) for config, name in pairs]
        # TorchRec appends the table's name to features of several tables.
        names = [*chain.from_iterable(get_embedding_names_by_table(self.configs))]
        widths = [config.embedding_dim for config, _ in pairs]
        return KeyedTensor(names, widths, torch.cat(found, 1))


def _without_tables(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose collections stand for leaves; weights on the CPU are shared."""
    memo: dict[int, Any] = {}
    for value in (*module.parameters(), *module.buffers()):
        if value.device.type == "cpu":
            memo[id(value)] = value
    for _, collection in collections(module):
        memo[id(collection)] = _LeafCollection(table_configs(collection))
    return copy.deepcopy(module, memo)


class OwnNetwork(Network):
    """A module of the user's own, or a DLRM of TorchRec, whose forward takes columns.

    Args:
        model: module with a forward from columns by name; or a DLRM or DLRMTrain.
        queries: rows of raw columns of the queries.
        catalogue: rows of raw columns of the candidates.
        given: what is known of the columns.
        known: see :class:`Network`.
    """

    def __init__(
        self,
        model: nn.Module,
        queries: pa.Table,
        catalogue: pa.Table,
        given: Given,
        known: GraphSplit | None,
    ) -> None:
        # Brings lagging rows of an adopted step up to date, or raises with a remedy.
        model.state_dict()
        self.model = get_unwrapped_module(model)
        if isinstance(self.model, DLRMTrain):
            self.model = self.model.model
        both = sorted(set(queries.column_names) & set(catalogue.column_names))
        if both:
            raise BundleError(
                f"columns {both}: are columns of queries and of the catalogue; rename or drop them in one"
            )
        configs = tables_of(self.model)
        self._features = list(
            dict.fromkeys(name for each in configs for name in each.feature_names)
        )
        raw = {
            name: table[name]
            for table in (queries, catalogue)
            for name in table.column_names
        }
        inputs = []
        for name in self._inputs(list(raw)):
            # A DLRM pools lists of any length.
            is_dlrm = isinstance(self.model, DLRM)
            pools = is_dlrm and name != _DENSE
            dtype, shape = _kind_of(name, raw[name], given, any_length=pools)
            # A network of numbers takes whole ones too.
            if is_dlrm and not pools:
                dtype = "float32"
            inputs.append(
                Leaf(
                    name=name,
                    kind="column",
                    column=name,
                    candidate=name in catalogue.column_names,
                    shape=shape,
                    dtype=dtype,
                )
            )
        sizes = {
            path.removesuffix(".weight"): len(weight)
            for path, weight in self.model.named_parameters()
            if weight.dim() == 2
        }
        sizes |= {config.name: config.num_embeddings for config in configs}
        paddings = {
            path: module.padding_idx
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        super().__init__(
            given, inputs, self._by_leaves, sizes, known, paddings=paddings
        )

    def _by_leaves(self) -> nn.Module:
        return _OwnByLeaves(_without_tables(self.model).cpu())

    def _inputs(self, names: Sequence[str]) -> list[str]:
        """Returns the columns that forward takes."""
        if isinstance(self.model, DLRM):
            required = taken = [_DENSE, *self._features]
        else:
            parameters = dict(inspect.signature(self.model.forward).parameters)
            # A forward that was replaced by a plain function has it.
            parameters.pop("self", None)
            taken = list(parameters)
            required = [
                name
                for name, each in parameters.items()
                if each.default is each.empty
                and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            ]
        missing = [name for name in required if name not in names]
        if missing:
            raise BundleError(
                f"model: forward of {type(self.model).__name__} takes {listed(missing)}, which is no column; the "
                f"columns are {listed(names)}; name them as the arguments"
            )
        return [name for name in taken if name in names]

    @torch.no_grad()
    def logits(self, columns: Chunk) -> Tensor:
        """See :meth:`Network.logits`."""
        device = _device(self.model)
        if isinstance(self.model, DLRM):
            keys = [name for name in columns if name in self._features]
            ids = np.concatenate([columns[name].values for name in keys])
            lengths = np.concatenate([columns[name].lengths for name in keys])
            keyed = KeyedJaggedTensor(
                keys,
                torch.from_numpy(ids.astype(np.int64)),
                lengths=torch.from_numpy(lengths.astype(np.int32)),
            )
            dense = _matrix(columns[_DENSE]).to(device)
            return self.model(dense, keyed.to(device)).reshape(-1).float().cpu()  # type: ignore[no-any-return]
        values = {}
        for leaf in self.split.inputs:
            column = columns.get(leaf.name)
            if column is None:
                # Columns that forward takes and does not read are not asked for.
                shape: Any = (columns.num_rows, *leaf.shape)
                column = Column(np.zeros(shape))
            values[leaf.name] = _matrix(column, leaf.dtype).to(device)
        try:
            logits = self.model(**values)
        except IndexError as error:
            raise BundleError(
                f"model: forward raises '{error}': an id that it computes is no row of its table; give queries and a "
                "catalogue whose ids the tables have"
            ) from None
        return logits.reshape(-1).float().cpu()  # type: ignore[no-any-return]


class _OwnByLeaves(nn.Module):
    """A user's module over a dict of columns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        for module in self.model.modules():
            if isinstance(module, _LeafCollection):
                module.columns = leaves
        if isinstance(self.model, DLRM):
            return self.model(leaves[_DENSE], _NoKeys())  # type: ignore[no-any-return]
        with LookingUp(self.model, leaves.values()):
            return self.model(**leaves)  # type: ignore[no-any-return]


def _kind_of(
    name: str, column: pa.ChunkedArray, given: Given, *, any_length: bool
) -> tuple[str, tuple[int | None, ...]]:
    """Returns the type of an own module's column, and the shape of its rows: (), or the length that all lists have."""
    kind = raw_type(column.type) or ""
    numbers = ("int64", "float32", "float64", "bool")
    if kind.removeprefix("list<").removesuffix(">") not in numbers:
        raise BundleError(
            f"column '{name}': {column.type}; an own module reads whole numbers, numbers or lists of them"
        )
    dtype = "int64" if "int64" in kind else "float32"
    if not is_list_column(kind):
        return dtype, ()
    if any_length:
        return dtype, (None,)
    if name in given.longest:
        return dtype, (given.longest[name],)
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1 or lengths[0] is None:
        raise BundleError(
            f"column '{name}': lists of different lengths, or rows without a value; pad lists as in training, or fit "
            "Lists(max_length=L) before"
        )
    return dtype, (lengths[0],)


def _matrix(column: Column, dtype: str = "float32") -> Tensor:
    """Returns (B,) or (B, W) numbers; lists of one length."""
    values = torch.from_numpy(np.array(column.values, dtype))
    return values.view(len(column), -1) if column.ragged else values


def _device(model: nn.Module) -> torch.device:
    return next((value.device for value in model.parameters()), torch.device("cpu"))
