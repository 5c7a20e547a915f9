"""Networks by leaves: a trained model as columns, tables, and one forward from looked-up rows to logits.

TowerNetwork is a TowerModel or NextItemModel, sharded or not; OwnNetwork any other module whose forward takes columns.
Both answer with the trained model's logits on every rank, and are split on the first.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.batch import Jagged, skip_fx_notice
from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.distributed.tables import (
    COLLECTIONS,
    collections,
    table_configs,
    tables_of,
)
from torchrec_ext.models.session import CANDIDATES, SESSION, NextItemModel
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.session_tower import SessionSteps
from torchrec_ext.modules.tower import Padded
from torchrec_ext.retrieval.catalogue import even_rows
from torchrec_ext.retrieval.columns import ModelColumn, Values, latest
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.split import GraphSplit
from torchrec_ext.retrieval.trace import Leaf
from torchrec_ext.schema.array_columns import source_columns, widths_of
from torchrec_ext.schema.validation import did_you_mean, listed

EXAMPLE_ROWS = 64  # rows of an own module's traced example, from both tables evenly
_DENSE = "dense_features"  # DLRM's own name of its argument


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What an export was told about the model's columns.

    Args:
        types: raw type of each of the model's columns.
        candidates: names of the columns that the catalogue has.
        oov_ids: out-of-vocabulary row of each column.
        vocab: names of columns whose row 0 is for unknown values, because a preprocessor made their ids.
        rows: rows of a table that the bundle holds, by table.
    """

    types: Mapping[str, str]
    candidates: frozenset[str] = frozenset()
    oov_ids: Mapping[str, int] = field(default_factory=dict)
    vocab: frozenset[str] = frozenset()
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def is_list(self, column: str) -> bool:
        """Returns whether a column has a list in each row."""
        if column not in self.types:
            raise BundleError(
                f"column '{column}': the model reads it, and neither queries nor catalogue.features have it; they have "
                f"{listed(sorted(self.types))}"
            )
        return self.types[column].startswith("list<")


def _leaves_of(
    table: BaseEmbeddingConfig, column: str, candidate: bool, shape: tuple[Any, ...]
) -> list[Leaf]:
    """Returns the leaves of a feature of an embedding table; ``shape`` is that of its ids in a row: (), or (L,)."""
    leaf = Leaf(
        name=f"{column}@{table.name}",
        kind="rows",
        column=column,
        candidate=candidate,
        shape=(*shape, table.embedding_dim),
        table=table.name,
    )
    if not shape:
        return [leaf]
    if isinstance(table, EmbeddingBagConfig):
        pooling = "mean" if table.pooling == PoolingType.MEAN else "sum"
        return [
            dataclasses.replace(
                leaf, kind="pooled", shape=(table.embedding_dim,), pooling=pooling
            )
        ]
    lengths = Leaf(
        name=f"lengths of {column}",
        kind="lengths",
        column=column,
        candidate=candidate,
        dtype="int64",
    )
    return [leaf, lengths]


def _columns_of(
    leaves: Sequence[Leaf], given: Given, sizes: Mapping[str, int], oov: int | None
) -> dict[str, dict[str, ModelColumn]]:
    """Returns the columns behind leaves by side and name; ``oov`` is the row of unknown ids where none is given."""
    columns: dict[str, dict[str, ModelColumn]] = {"query": {}, "candidate": {}}
    padded = {leaf.column for leaf in leaves if leaf.kind == "lengths"}
    for leaf in leaves:
        of_side = columns["candidate" if leaf.candidate else "query"]
        name = leaf.column
        given.is_list(name)
        column = of_side.get(name, ModelColumn(type=given.types[name]))
        if leaf.table:
            # Ids must be rows of each table that they look up.
            rows = min(sizes[leaf.table], column.rows or sizes[leaf.table])
            row = given.oov_ids.get(name, 0 if name in given.vocab else oov)
            known = row is not None and row >= 0
            column = dataclasses.replace(column, rows=rows, oov=row if known else None)
            if leaf.kind == "rows" and name in padded:
                column = dataclasses.replace(column, padded=True, longest=leaf.shape[0])
        of_side[name] = column
    _check_oov(given, {**columns["query"], **columns["candidate"]})
    return columns


def _check_oov(given: Given, columns: Mapping[str, ModelColumn]) -> None:
    """Refuses a row of unknown ids that would have no effect, or is no row."""
    ids = sorted(name for name, column in columns.items() if column.rows is not None)
    for name, row in given.oov_ids.items():
        if name in ids:
            rows = columns[name].rows or 0
            if row < rows:
                continue
            why = f"{row} is no row of its table, which has the rows 0 to {rows - 1}"
        elif name in columns:
            why = "no table is looked up by its values as they are; leave it out, or map unknown ids in forward"
        else:
            others = f"columns of ids are {listed(ids)}"
            why = f"is no column of ids; {did_you_mean(name, ids, others)}"
        raise BundleError(f"oov_ids: '{name}': {why}")


class TowerNetwork:
    """A trained TowerModel or NextItemModel.

    Args:
        model: result of ``hybrid_parallel``, in any DistributedModelParallel, or unsharded.
        candidate: name of the candidate tower; by default the last.
        given: what is known of its columns.

    Attributes:
        names: names of the towers of each side.
        leaves: inputs of its forward.
        columns: the columns that it reads, by side and name.
        calibrated: whether the loss makes a logit the log-odds of a positive label.

    Raises:
        BundleError: it has no tower for candidates alone, or reads a column on both sides.
    """

    def __init__(
        self, model: TowerModel | NextItemModel, candidate: str | None, given: Given
    ) -> None:
        self.model = model
        self._given = given
        names = [SESSION, "item"]
        if not isinstance(model, NextItemModel):
            names = list(model.towers)
        if len(names) < 2:
            raise BundleError(
                f"model: has the tower {names[0]} alone; serving needs one of the query and one of the candidates"
            )
        candidate = candidate or names[-1]
        if candidate not in names:
            raise BundleError(
                f"candidate={candidate!r}: is not a tower of the model; they are {listed(names)}"
            )
        queries = [name for name in names if name != candidate]
        self.names = {"query": queries, "candidate": [candidate]}
        self.calibrated = (
            isinstance(model, TowerModel)
            and model.calibrated
            and all(loss is bce for loss in model.head_losses())
        )
        leaves: list[Leaf] = []
        if isinstance(model, NextItemModel):
            length = model.network.encoder.max_length
            of_items = candidate != SESSION
            leaves += _leaves_of(model.table, SESSION, not of_items, (length,))
            leaves += _leaves_of(model.table, CANDIDATES, of_items, ())
        else:
            self._towers = copy.deepcopy(model.towers).cpu()
            for name, tower in self._towers.items():
                leaves += self._read(tower, name == candidate)
        self.leaves = list({leaf.name: leaf for leaf in leaves}.values())
        self.tables = {leaf.table for leaf in self.leaves if leaf.table}
        sizes = {table.name: table.num_embeddings for table in tables_of(model)}
        sizes |= {table: len(rows) for table, rows in given.rows.items()}
        self.columns = _columns_of(leaves, given, sizes, 0)
        both = sorted(set(self.columns["query"]) & set(self.columns["candidate"]))
        if both:
            raise BundleError(
                f"column '{both[0]}': tower '{candidate}' and {listed(queries)} read it, so no item's row can be "
                "stored; give it to one side"
            )

    def _read(self, tower: Any, candidate: bool) -> Iterator[Leaf]:
        longest = tower.max_length if isinstance(tower, SessionSteps) else None
        for table in tower.tables:
            for feature in table.feature_names:
                shape = (longest,) if self._given.is_list(feature) else ()
                yield from _leaves_of(table, feature, candidate, shape)
        widths = widths_of(tower.dense, self._given.types.keys())
        for name in source_columns(tower.dense, self._given.types.keys()):
            shape = (widths[name],) if name in widths else ()
            yield Leaf(
                name=name, kind="column", column=name, candidate=candidate, shape=shape
            )

    # Logits and parts

    @torch.no_grad()
    def logits(self, columns: Mapping[str, Values], size: int) -> Tensor:
        """Returns (B,) logits of the trained model for B rows of all columns. Collective if it is sharded."""
        schema = dataclasses.replace(self.model.schema(), tasks=())
        sparse = {}
        for feature in schema.sparse:
            name = feature.name
            column = self.columns["query"].get(name) or self.columns["candidate"][name]
            # Of a list the most recent ids: the model reads no further.
            values, lengths = latest(columns[name], column.longest)
            ids = torch.from_numpy(np.array(values, np.int64))
            held = self._given.rows.get(feature.tables[0])
            if held is not None:
                ids = held[ids]
            counts = None
            if lengths is not None:
                counts = torch.from_numpy(lengths.astype(np.int32))
            sparse[name] = Jagged(ids, counts)
        dense = {
            leaf.column: _matrix(columns[leaf.column])
            for leaf in self.leaves
            if leaf.kind == "column"
        }
        batch = schema.assemble(sparse, dense, labels=torch.zeros(size))
        batch = batch.to(_device(self.model))
        if not isinstance(self.model, NextItemModel):
            return self.model.logits(batch).float().cpu()
        outputs = [self.model.embed(name, batch) for name in (SESSION, "item")]
        return self.model.interaction(outputs).float().cpu()  # type: ignore[no-any-return]

    def weights(self, dense: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns weights by their paths in the module of :meth:`split`."""
        return dense

    def split(self, dense: Mapping[str, Tensor]) -> GraphSplit:
        """Returns the model in parts, on the CPU, with dense weights by their names in the unsharded model."""
        interaction = copy.deepcopy(self.model.interaction).cpu()
        module: nn.Module
        if isinstance(self.model, NextItemModel):
            network = copy.deepcopy(self.model.network).cpu()
            module = _NextItemByLeaves(network, interaction)
        else:
            module = _TowersByLeaves(self._towers, interaction, self._given)
        missing, _ = module.load_state_dict(dict(dense), strict=False, assign=True)
        assert not missing, f"no weights of {missing}"
        return GraphSplit(module.eval(), self.leaves)


class _TowersByLeaves(nn.Module):
    """The towers and the interaction of a TowerModel over looked-up leaves."""

    def __init__(
        self, towers: nn.ModuleDict, interaction: nn.Module, given: Given
    ) -> None:
        super().__init__()
        self.towers = towers
        self.interaction = interaction
        self._given = given

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = [self._tower(tower, leaves) for tower in self.towers.values()]
        return self.interaction(outputs)  # type: ignore[no-any-return]

    def _tower(self, tower: Any, leaves: Mapping[str, Tensor]) -> Tensor:
        looked_up: dict[str, Any] = {}
        for table in tower.tables:
            for feature in table.feature_names:
                key = f"{feature}@{table.name}"
                looked_up[key] = _looked_up(table, feature, leaves)
        rows = next(iter(leaves.values()))
        dense = _beside(tower.dense, leaves, self._given.types, rows)
        return tower(looked_up, dense)  # type: ignore[no-any-return]


class _NextItemByLeaves(nn.Module):
    """A NextItemModel over looked-up leaves."""

    def __init__(self, network: Any, interaction: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.interaction = interaction

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        items, lengths, candidates = leaves.values()
        session = self.network.last_padded(items, lengths)
        return self.interaction([session, candidates])  # type: ignore[no-any-return]


class _NoKeys:
    """Stands for the ids of a batch, which the leaves have looked up."""

    def keys(self) -> list[str]:
        return []


class _LeafCollection(nn.Module):
    """Stands for an embedding collection, sharded or not: it returns what the leaves have looked up.

    Args:
        configs: its tables.
    """

    def __init__(self, configs: Sequence[BaseEmbeddingConfig]) -> None:
        super().__init__()
        self.configs = list(configs)
        self.looked_up: Mapping[str, Any] = {}

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        return self.configs

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        return self.configs

    def forward(self, features: Any) -> Any:
        keys: list[tuple[str, BaseEmbeddingConfig]] = []
        for config in self.configs:
            keys += [(feature, config) for feature in config.feature_names]
        counts = [feature for feature, _ in keys]
        # TorchRec appends the table's name to features of several tables.
        named = {
            feature if counts.count(feature) == 1 else f"{feature}@{config.name}": (
                self.looked_up[f"{feature}@{config.name}"]
            )
            for feature, config in keys
        }
        if isinstance(self.configs[0], EmbeddingBagConfig):
            values = [each.float() for each in named.values()]
            widths = [config.embedding_dim for _, config in keys]
            return KeyedTensor(list(named), widths, torch.cat(values, 1))
        return {name: _full_bags(value) for name, value in named.items()}


def _full_bags(rows: Tensor) -> JaggedTensor:
    """Returns lists of one length (B, L, D), or one row each (B, D), as a JaggedTensor."""
    longest = rows.shape[1] if rows.dim() == 3 else 1
    lengths = torch.full((rows.shape[0],), longest)
    return JaggedTensor(values=rows.reshape(-1, rows.shape[-1]), lengths=lengths)


def _looked_up(
    table: BaseEmbeddingConfig, feature: str, leaves: Mapping[str, Tensor]
) -> Any:
    rows = leaves[f"{feature}@{table.name}"]
    if isinstance(table, EmbeddingBagConfig):
        return rows
    if rows.dim() == 2:
        return Padded(rows[:, None], torch.ones_like(rows[:, 0], dtype=torch.int64))
    return Padded(rows, leaves[f"lengths of {feature}"])


def _beside(
    names: Sequence[str],
    leaves: Mapping[str, Tensor],
    types: Mapping[str, str],
    rows: Tensor,
) -> Tensor:
    """Returns (B, Fd) dense columns side by side, an array column as a whole where its elements are in order."""
    blocks = []
    widths = widths_of(names, types.keys())
    by_column = groupby(names, lambda name: source_columns([name], types.keys())[0])
    for column, group in by_column:
        value, elements = leaves[column], list(group)
        if column not in widths:
            value = value[:, None]
        else:
            whole = [f"{column}[{index}]" for index in range(widths[column])]
            if elements != whole:
                value = value[:, [whole.index(name) for name in elements]]
        blocks.append(value)
    if not blocks:
        return rows.new_zeros((rows.shape[0], 0), dtype=torch.float32)
    return torch.cat(blocks, dim=1)


def _without_tables(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose collections stand for leaves; weights on the CPU are shared."""
    memo: dict[int, Any] = {}
    for value in (*module.parameters(), *module.buffers()):
        if value.device.type == "cpu":
            memo[id(value)] = value
    if isinstance(module, COLLECTIONS):
        return _LeafCollection(table_configs(module))
    for _, collection in collections(module):
        memo[id(collection)] = _LeafCollection(table_configs(collection))
    return copy.deepcopy(module, memo)


class OwnNetwork:
    """A module of the user's own, or a DLRM of TorchRec, whose forward takes columns.

    Args:
        model: module with a forward from columns by name, or from one dict of them; or a DLRM or DLRMTrain.
        queries: rows of raw columns of the queries.
        catalogue: rows of raw columns of the candidates.
        given: what is known of the columns.

    Attributes: see :class:`TowerNetwork`.
    """

    calibrated = False

    def __init__(
        self, model: nn.Module, queries: pa.Table, catalogue: pa.Table, given: Given
    ) -> None:
        # Brings lagging rows of an adopted step up to date, or raises with a remedy.
        model.state_dict()
        self.model: Any = get_unwrapped_module(model)
        if isinstance(self.model, DLRMTrain):
            self.model = self.model.model
        self._given = given
        self.names = {"query": ["query"], "candidate": ["candidate"]}
        both = sorted(set(queries.column_names) & set(catalogue.column_names))
        if both:
            raise BundleError(
                f"columns {both}: are columns of queries and of the catalogue; rename them in one"
            )
        configs = tables_of(self.model)
        self._features = {
            feature: [config for config in configs if feature in config.feature_names]
            for config in configs
            for feature in config.feature_names
        }
        tables = {
            **dict.fromkeys(queries.column_names, queries),
            **dict.fromkeys(catalogue.column_names, catalogue),
        }
        self._call, columns = self._inputs(list(tables))
        self._dtypes: dict[str, str] = {}
        leaves: list[Leaf] = []
        examples: dict[str, Tensor] = {}
        for name in columns:
            table = tables[name]
            candidate = name in given.candidates
            for config in self._features.get(name, ()):
                # A bag may have any length, other lists have one.
                shape: tuple[int, ...] = ()
                if given.is_list(name):
                    shape = (0,)
                    if not isinstance(config, EmbeddingBagConfig):
                        shape = tuple(_example(name, table).shape[1:])
                leaves.append(_leaves_of(config, name, candidate, shape)[0])
            values = _example(name, table)
            self._dtypes[name] = str(values.dtype).removeprefix("torch.")
            leaves.append(
                Leaf(
                    name=name,
                    kind="column",
                    column=name,
                    candidate=candidate,
                    shape=tuple(values.shape[1:]),
                    dtype=self._dtypes[name],
                )
            )
            examples[name] = values
        module = _without_tables(self.model).cpu()
        local = _OwnByLeaves(module, self._call, columns, self._features)
        for leaf in leaves:
            examples.setdefault(leaf.name, leaf.example(EXAMPLE_ROWS))
        self._split = split = GraphSplit(local.eval(), leaves, examples)
        self.leaves = [*split.query.leaves, *split.candidate.leaves]
        self.tables = {leaf.table for leaf in self.leaves if leaf.table}
        sizes = {config.name: config.num_embeddings for config in configs}
        state = dict(self.model.named_parameters())
        for name, path in split.tables.items():
            sizes[name] = len(state[path.removeprefix("model.")])
        self.columns = _columns_of(self.leaves, given, sizes, None)

    def _inputs(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Returns the name of forward's dict argument (empty if it takes columns by name), and the columns to give."""
        if isinstance(self.model, DLRM):
            wanted = [_DENSE, *self._features]
            missing = [name for name in wanted if name not in names]
            sides = {name in self._given.candidates for name in wanted}
            if missing or len(sides) < 2:
                raise BundleError(
                    f"model: {type(self.model).__name__} reads {listed(wanted)[:60]}; give each as a column of queries "
                    f"or of catalogue.features, some in both; missing: {listed(missing)[:40] or 'one side'}"
                )
            skip_fx_notice()
            return "", wanted
        parameters = dict(inspect.signature(self.model.forward).parameters)
        # A forward that was replaced by a plain function has it.
        parameters.pop("self", None)
        required = [
            name
            for name, each in parameters.items()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if len(required) == 1 and required[0] not in names:
            types = self._given.types
            return required[0], [name for name in names if _is_numeric(types[name])]
        missing = [name for name in required if name not in names]
        if missing:
            raise BundleError(
                f"model: forward of {type(self.model).__name__} takes {listed(missing)}, which is no column; the "
                f"columns are {listed(names)}; name them as the arguments"
            )
        return "", [name for name in parameters if name in names]

    @torch.no_grad()
    def logits(self, columns: Mapping[str, Values], size: int) -> Tensor:
        """Returns (B,) logits of the trained model for B rows of all columns. Collective if it is sharded."""
        device = _device(self.model)
        if isinstance(self.model, DLRM):
            keys = [name for name in columns if name in self._features]
            ids = np.concatenate([columns[name].values for name in keys])
            ones = np.ones(size, np.int64)
            lengths = [columns[name].lengths for name in keys]
            counts = [ones if each is None else each for each in lengths]
            keyed = KeyedJaggedTensor(
                keys,
                torch.from_numpy(ids.astype(np.int64)),
                lengths=torch.from_numpy(np.concatenate(counts).astype(np.int32)),
            )
            dense = _matrix(columns[_DENSE]).to(device)
            return self.model(dense, keyed.to(device)).reshape(-1).float().cpu()  # type: ignore[no-any-return]
        values = {
            name: _matrix(each, self._dtypes[name]).to(device)
            for name, each in columns.items()
        }
        try:
            logits = _call(self.model, self._call, values)
        except IndexError as error:
            raise BundleError(
                f"model: forward raises '{error}': an id that it computes is no row of its table; give queries and a "
                "catalogue whose ids the tables have"
            ) from None
        return logits.reshape(-1).float().cpu()  # type: ignore[no-any-return]

    def weights(self, dense: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See :meth:`TowerNetwork.weights`."""
        return {f"model.{name}": value for name, value in dense.items()}

    def split(self, dense: Mapping[str, Tensor]) -> GraphSplit:
        """Returns the model in parts."""
        return self._split


class _OwnByLeaves(nn.Module):
    """A user's module over a dict of leaves."""

    def __init__(
        self,
        model: nn.Module,
        call: str,
        columns: Sequence[str],
        features: Mapping[str, Sequence[BaseEmbeddingConfig]],
    ) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._columns = list(columns)
        self._keys = [
            f"{feature}@{config.name}"
            for feature, configs in features.items()
            for config in configs
        ]

    def forward(self, leaves: Mapping[str, Tensor]) -> Tensor:
        looked_up = {key: leaves[key] for key in self._keys if key in leaves}
        for module in self.model.modules():
            if isinstance(module, _LeafCollection):
                module.looked_up = looked_up
        if isinstance(self.model, DLRM):
            return self.model(leaves[_DENSE], _NoKeys())  # type: ignore[no-any-return]
        columns = {name: leaves[name] for name in self._columns}
        return _call(self.model, self._call, columns)  # type: ignore[no-any-return]


def _call(model: nn.Module, call: str, columns: Mapping[str, Tensor]) -> Any:
    return model(dict(columns)) if call else model(**columns)


def _example(name: str, table: pa.Table) -> Tensor:
    """Returns the example's rows of a column, (B,) or (B, W)."""
    column = table[name].take(pa.array(even_rows(len(table), EXAMPLE_ROWS)))
    kind = raw_type(column.type) or ""
    if not _is_numeric(kind):
        raise BundleError(
            f"column '{name}': {column.type}; an own module reads whole numbers, numbers or lists of them"
        )
    dtype = torch.int64 if "int64" in kind else torch.float32
    try:
        return torch.tensor(column.to_pylist(), dtype=dtype)
    except (ValueError, TypeError):
        raise BundleError(
            f"column '{name}': lists of different lengths, or rows without a value; pad lists as in training"
        ) from None


def _is_numeric(kind: str) -> bool:
    return kind.removeprefix("list<").removesuffix(">") in (
        "int64",
        "float32",
        "float64",
        "bool",
    )


def _matrix(column: Values, dtype: str = "float32") -> Tensor:
    """Returns (B,) or (B, W) numbers; lists of one length."""
    values = torch.from_numpy(np.array(column.values, dtype))
    if column.lengths is None:
        return values
    return values.view(len(column.lengths), -1)


def _device(model: nn.Module) -> torch.device:
    return next((value.device for value in model.parameters()), torch.device("cpu"))
