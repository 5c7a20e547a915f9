"""RowEncoder: encodes raw columns into vectors by the query towers or the candidate tower of a bundle.

PlainTower serves single requests: it looks up the tables column by column, without the KeyedJaggedTensor of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.layers import Layers
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.architecture import (
    Int8Table,
    fill_dense,
    map_tables,
    read_tensors,
    rebuild,
    table_paths,
)
from torchrec_ext.retrieval.bundle.manifest import BundleError, read_json
from torchrec_ext.retrieval.bundle.program import ProgramTower
from torchrec_ext.retrieval.bundle.request_columns import Columns, Read, Rows
from torchrec_ext.schema import DataError, Jagged, SparseFeature
from torchrec_ext.sealed import json_digest

_OF_NUMPY = (torch.float32, torch.float16, torch.int8)
_BEGIN = torch.zeros(1, dtype=torch.int64)  # offsets of one bag of all values


class PlainTower:
    """Computes a :class:`Tower` in evaluation, for one row in at most a third of the time.

    TorchRec's collections pack the ids of all features, look them up and split the result again. This pays for a batch;
    here tables are read one by one. For one row, linear layers and ReLU run in numpy, because its calls cost less than
    torch's. The result equals the row of a batch within rounding. Check columns beforehand: every id must be a row of
    its table.

    Args:
        tower: tower with its weights; :func:`is_plain` must be true for it.
    """

    def __init__(self, tower: Tower) -> None:
        bags: Any = {} if tower.embeddings is None else tower.embeddings.embedding_bags
        self._tables: list[tuple[str, Any, str]] = []
        for table in tower.bags:
            for name in table.feature_names:
                self._tables.append(
                    (name, bags[table.name], table.pooling.value.lower())
                )
        self._dense = tower.dense
        self._compress = tower.compress
        self._mlp = tower.mlp
        self._layers: list[_Layer] | None = None
        self._arrays: list[tuple[NDArray[Any], _Floats | None]] = []
        # numpy has no bfloat16.
        if tower.compress is None and all(
            table.weight.dtype in _OF_NUMPY for _, table, _ in self._tables
        ):
            self._layers = _numpy_layers(tower.mlp)
        if self._layers is not None:
            self._arrays = [_arrays(table) for _, table, _ in self._tables]

    def __call__(
        self, sparse: Mapping[str, Jagged], dense: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns (B, D) outputs of B rows, from columns as for ``BatchSchema.assemble``."""
        if self._layers is not None and self._is_single_row(sparse, dense):
            return torch.from_numpy(self._row(sparse, dense, self._layers)[None])
        inputs = []
        for name, table, mode in self._tables:
            inputs.append(_look_up(table, sparse[name], mode).float())
        inputs += [dense[name][:, None] for name in self._dense]
        rows = torch.cat(inputs, dim=1)
        if self._compress is not None:
            rows = self._compress(rows)
        return self._mlp(rows)  # type: ignore[no-any-return]

    def _is_single_row(
        self, sparse: Mapping[str, Jagged], dense: Mapping[str, Tensor]
    ) -> bool:
        # All columns have as many rows, so any of them tells.
        if not self._tables:
            return len(dense[self._dense[0]]) == 1
        bags = sparse[self._tables[0][0]]
        if bags.lengths is None:
            return len(bags.values) == 1
        return len(bags.lengths) == 1

    def _row(
        self,
        sparse: Mapping[str, Jagged],
        dense: Mapping[str, Tensor],
        layers: Sequence[_Layer],
    ) -> _Floats:
        """Returns the (D,) output of one row."""
        inputs: list[_Floats] = []
        for (name, _, mode), (rows, scales) in zip(
            self._tables, self._arrays, strict=True
        ):
            bags = sparse[name]
            ids = bags.values.numpy()
            if bags.lengths is None:  # a bag of one is its row
                values = rows[ids[0]]
                if scales is not None:
                    values = values * scales[ids[0]]
                inputs.append(values)
                continue
            bag_rows = rows.take(ids, axis=0)
            if scales is not None:
                bag_rows = bag_rows * scales[ids, None]
            pooled = np.add.reduce(bag_rows, axis=0, dtype=np.float32)
            # The mean of an empty bag is zero, as in torch.
            if mode == "mean" and len(ids):
                pooled = pooled / np.float32(len(ids))
            # Half precision is rounded once, as in torch.
            inputs.append(pooled.astype(bag_rows.dtype, copy=False))
        row: _Floats = np.concatenate(
            [*inputs, *(dense[name].numpy() for name in self._dense)], dtype=np.float32
        )
        for layer in layers:
            row = layer(row)
        return row


_Floats = NDArray[np.float32]
_Layer = Callable[[_Floats], _Floats]


def _arrays(table: nn.Module) -> tuple[NDArray[Any], _Floats | None]:
    """Returns a table's rows, and their scales if it is int8."""
    weight: Any = table.weight
    rows = weight.detach().numpy()
    if isinstance(table, Int8Table):
        return rows, table.scales.numpy()
    return rows, None


def _numpy_layers(network: nn.Module) -> list[_Layer] | None:
    """Returns a tower's layers as numpy functions of one row; None if any is neither linear, ReLU nor an identity."""
    if type(network) is not Layers:
        return None
    functions = []
    for layer in network:
        function = _numpy_layer(layer)
        if function is None:
            return None
        functions.append(function)
    return functions


def _numpy_layer(layer: nn.Module) -> _Layer | None:
    if (
        type(layer) is nn.Linear
        and layer.weight.dtype == torch.float32
        and layer.bias is not None
    ):
        weight: _Floats = layer.weight.detach().numpy()
        bias: _Floats = layer.bias.detach().numpy()
        return lambda row: weight.dot(row) + bias
    if type(layer) is nn.ReLU:
        return lambda row: np.maximum(row, 0)
    if type(layer) in (nn.Dropout, nn.Identity):  # identities in evaluation
        return lambda row: row
    return None


def is_plain(tower: nn.Module) -> bool:
    """Returns whether a tower is a :class:`Tower` without attention pooling, weighted bags or shared tables."""
    return type(tower) is Tower and not (
        tower.lists or tower.weights or tower.released_tables
    )


def _look_up(table: nn.Module, bags: Jagged, mode: str) -> Tensor:
    """Returns (B, D) pooled rows."""
    weight: Any = table.weight
    if isinstance(table, Int8Table):
        weight = table.rows(bags.values)
        bags = Jagged(torch.arange(len(bags.values)), bags.lengths)
    if bags.lengths is None:  # a bag of one is its row
        return embedding(bags.values, weight)
    if len(bags.lengths) == 1:
        return embedding_bag(bags.values, weight, _BEGIN, mode=mode)
    offsets = torch.cat([bags.lengths.new_zeros(1), bags.lengths.cumsum(0)]).long()
    return embedding_bag(
        bags.values, weight, offsets, mode=mode, include_last_offset=True
    )


ARCHITECTURE = "architecture.json"
INTERACTION = "interaction.safetensors"
PREPROCESSOR_FILE = "preprocessor"


@dataclass(frozen=True)
class Architecture:
    """Content of ``architecture.json``.

    Args:
        towers: description of each tower by name, the candidate's last.
        interaction: description of the interaction.
        metric: ``dot``, ``cosine`` or ``top_nn``.
        tables: file of each table by the table's name.
        oov_ids: out-of-vocabulary row of each feature; -1 for none, so that unknown ids are refused.
        types: raw type of each raw column.
        unseen: rows of a feature's table that training never read, by feature. Requests read the feature's
            out-of-vocabulary row instead. Older bundles have none.
    """

    towers: Mapping[str, Any]
    interaction: Any
    metric: str
    tables: Mapping[str, str]
    oov_ids: Mapping[str, int]
    types: Mapping[str, str]
    unseen: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def query(self) -> list[str]:
        """Names of the query towers: all but the last."""
        return list(self.towers)[:-1]

    @property
    def candidate(self) -> str:
        """Name of the candidate tower, the last."""
        return list(self.towers)[-1]

    def dense_file(self, tower: str) -> str:
        """Returns the path of a tower's dense weights."""
        return f"towers/{list(self.towers).index(tower):03}.safetensors"

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values: the towers as a list, because their order matters; ``unseen`` only if not empty."""
        values = {**vars(self), "towers": list(map(list, self.towers.items()))}
        if not self.unseen:
            del values["unseen"]
        return values

    @classmethod
    def open(cls, folder: Path) -> Architecture:
        """Reads the architecture of a bundle's folder.

        Raises:
            BundleError: the file is damaged.
        """
        values = read_json(folder / ARCHITECTURE)
        try:
            # The types are checked here, once, because the file may come from anybody
            # and later code relies on them.
            towers = {
                str(name): description for name, description in values.pop("towers")
            }
            architecture = cls(towers=towers, **values)
            fits = len(towers) >= 2
            for name in ("tables", "oov_ids", "types", "unseen"):
                fits = fits and isinstance(getattr(architecture, name), dict)
            for rows in architecture.unseen.values():
                fits = fits and set(map(type, rows)) <= {int}
        except (TypeError, ValueError, KeyError, AttributeError):
            fits = False
        if not fits:
            raise BundleError(
                f"{folder / ARCHITECTURE}: does not describe two towers or more; export the bundle again"
            )
        return architecture


class RowEncoder:
    """Encodes raw rows into vectors by one or more towers.

    Args:
        model: model of these towers, in evaluation, with their weights.
        columns: reader of raw rows into the model's columns.
        types: types of the model's columns; a list column may come from one raw text.
    """

    def __init__(
        self, model: TowerModel, columns: Columns, types: Mapping[str, str]
    ) -> None:
        self.model = model
        self.columns = columns
        self._types = types
        towers: Any = model.towers.values()
        self.width = sum(int(tower.out_features) for tower in towers)
        self._plain: list[PlainTower] | None = None
        if all(map(is_plain, towers)):
            self._plain = [PlainTower(tower) for tower in towers]

    @property
    def request_columns(self) -> dict[str, str]:
        """Types of the required raw columns, by name."""
        return self.columns.request_columns

    @property
    def list_widths(self) -> dict[str, int]:
        """Lengths of the lists in columns whose lists have one length, by name."""
        widths = dict(self.columns.widths)
        for tower in self.model.towers.values():
            if isinstance(tower, ProgramTower):
                widths |= tower.list_widths
        return widths

    def read(self, rows: Rows) -> Read:
        """See :meth:`Columns.read`."""
        return self.columns.read(rows)

    def embed(self, rows: Rows) -> Tensor:
        """Returns the towers' concatenated (B, D) outputs for B raw rows."""
        return self.vectors(self.read(rows))

    def vectors(self, rows: Read) -> Tensor:
        """Returns the towers' concatenated (B, D) outputs from parsed rows."""
        outputs = self.outputs(rows)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=1)

    @torch.no_grad()
    def outputs(self, rows: Read) -> list[Tensor]:
        """Returns each tower's (B, D) float32 outputs."""
        if self._plain is None:
            return [output.float() for output in self.model.outputs(self.batch(rows))]
        return [tower(rows.sparse, rows.dense) for tower in self._plain]

    def batch(self, rows: Read) -> TowerBatch:
        """Assembles parsed rows into a batch."""
        return self.columns.schema.assemble(
            rows.sparse, rows.dense, labels=torch.zeros(rows.size)
        )

    def listed(self, feature: SparseFeature) -> bool:
        """Returns whether a row has a list of this feature's ids instead of a single id."""
        return (
            self._types.get(feature.name, "").startswith("list")
            or feature.weights is not None
        )

    def unknown(self) -> Tensor:
        """Returns (D,) outputs of an entirely unknown row: out-of-vocabulary ids, empty lists, zeros.

        Raises:
            DataError: a column of ids has no out-of-vocabulary row.
        """
        towers: Any = self.model.towers.values()
        without_row = "the model has no row for unknown ids; leave this one out"
        if self.columns.strict:
            name = min(self.columns.strict)
            raise DataError(
                f"column '{name}': {without_row}, or export the model with oov_ids={{'{name}': ROW}}"
            )
        for tower in towers:
            if isinstance(tower, ProgramTower) and tower.computed_ids:
                raise DataError(f"column '{min(tower.computed_ids)}': {without_row}")
        sparse = {}
        for feature in self.columns.schema.sparse:
            bag = Jagged(torch.tensor([feature.oov_id]), None, None)
            if self.listed(feature):
                # A feature with weights is always a list.
                weights = torch.zeros(0) if feature.weights is not None else None
                bag = Jagged(
                    torch.zeros(0, dtype=torch.int64),
                    torch.zeros(1, dtype=torch.int32),
                    weights,
                )
            sparse[feature.name] = bag
        dense = {name: torch.zeros(1) for name in self.columns.schema.dense}
        return self.vectors(Read(sparse, dense, {}, 1))[0]


def towers_of(
    architecture: Architecture,
    names: Sequence[str],
    also: Sequence[type[nn.Module]] = (),
) -> TowerModel:
    """Returns the towers ``names`` as a model on the meta device."""
    towers: dict[str, Any] = {
        name: rebuild(architecture.towers[name], also=also) for name in names
    }
    return TowerModel(towers, nn.Identity()).eval().requires_grad_(False)


def raw_request_columns(
    architecture: Architecture,
    model: TowerModel,
    preprocessor: FittedPreprocessor | None,
) -> Columns:
    """Returns the reader of raw rows into the columns of ``model``."""
    keys = model.schema().keys
    oov_ids: dict[str, int] = {}
    strict = []
    for name, row in architecture.oov_ids.items():
        if name in keys and row < 0:
            strict.append(name)
        elif name in keys:
            oov_ids[name] = row
    return Columns(
        model.schema(oov_ids=oov_ids),
        architecture.types,
        preprocessor,
        architecture.unseen,
        strict,
    )


def open_encoder(
    folder: Path,
    architecture: Architecture,
    names: Sequence[str],
    preprocessor: FittedPreprocessor | None,
    also: Sequence[type[nn.Module]] = (),
) -> RowEncoder:
    """Returns the towers ``names`` with their weights; tables are memory-mapped and shared by all processes.

    Raises:
        BundleError: files and architecture do not fit together.
    """
    try:
        model = towers_of(architecture, names, also)
        columns = raw_request_columns(architecture, model, preprocessor)
    except BundleError as error:
        raise BundleError(f"{folder / ARCHITECTURE}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise BundleError(
            f"{folder / ARCHITECTURE}: towers {list(names)}: {error}; export the bundle again"
        ) from None
    # Tables first: only their weights are real then, and fill_dense() must find all
    # others.
    map_tables(folder, model, architecture.tables)
    dense: dict[str, Tensor] = {}
    for name in names:
        for key, value in read_tensors(folder / architecture.dense_file(name)).items():
            dense[f"towers.{name}.{key}"] = value
    fill_dense(folder, model, dense, table_paths(model))
    types = architecture.types if preprocessor is None else preprocessor.outputs
    return RowEncoder(model, columns, types)


def open_interaction(
    folder: Path, architecture: Architecture, also: Sequence[type[nn.Module]] = ()
) -> nn.Module:
    """Returns the interaction with its weights.

    Raises:
        BundleError: file and architecture do not fit together.
    """
    try:
        interaction = (
            rebuild(architecture.interaction, also=also).eval().requires_grad_(False)
        )
    except BundleError as error:
        raise BundleError(f"{folder / ARCHITECTURE}: {error}") from None
    fill_dense(
        folder / INTERACTION, interaction, read_tensors(folder / INTERACTION), []
    )
    return interaction


def open_preprocessor(folder: Path) -> FittedPreprocessor | None:
    """Returns the preprocessor of the bundle, or None."""
    if (folder / PREPROCESSOR_FILE).is_dir():
        return FittedPreprocessor.load(folder / PREPROCESSOR_FILE)
    return None


def tower_digest(
    architecture: Architecture,
    names: Sequence[str],
    files: Mapping[str, Mapping[str, Any]],
) -> str:
    """Digests everything behind these towers' vectors: weights, architecture and preprocessing.

    Args:
        architecture: architecture of the bundle.
        names: names of the towers.
        files: the manifest's entry of each file, by path.
    """
    read_tables: set[str] = set()
    for name in names:
        read_tables |= set(named_tables(architecture.towers[name]))
    table_names = sorted(read_tables)
    paths = [architecture.tables[name] for name in table_names]
    paths += map(architecture.dense_file, names)
    paths += [
        path for path in sorted(files) if path.startswith(f"{PREPROCESSOR_FILE}/")
    ]
    digests = [files[path]["sha256"] for path in paths]
    descriptions = {name: architecture.towers[name] for name in names}
    # Only if not empty, so that bundles from before this field keep their digests.
    unseen = [dict(architecture.unseen)] if architecture.unseen else []
    return json_digest(
        [
            descriptions,
            dict(architecture.oov_ids),
            dict(architecture.types),
            table_names,
            digests,
            *unseen,
        ],
        compact=True,
    )


def projection_digest(
    architecture: Architecture, files: Mapping[str, Mapping[str, Any]]
) -> str:
    """Digests everything behind a candidate's projected row: its tower and the interaction."""
    tower = tower_digest(architecture, [architecture.candidate], files)
    return json_digest(
        [tower, architecture.interaction, files[INTERACTION]["sha256"]], compact=True
    )


def named_tables(description: Mapping[str, Any]) -> list[str]:
    """Returns the names of a described tower's tables."""
    return [table["arguments"]["name"] for table in description["arguments"]["tables"]]
