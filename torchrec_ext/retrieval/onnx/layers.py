"""Towers and the top NN as modules that ONNX can hold, and functions to write and open the files.

PaddedTower is a tower with its tables over padded columns: ONNX has no operators for jagged ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import embedding
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.models.ncf import NCFTower
from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.modules.tower import AttentionPooling, Tower
from torchrec_ext.retrieval.bundle.encoder import RowEncoder
from torchrec_ext.retrieval.bundle.request_columns import Read
from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.schema import Jagged, SparseFeature


class ExportError(ValueError):
    """A network cannot be exported, or its ONNX file gives other outputs."""


def pairs_module(
    projection: Projection, query_widths: Sequence[int]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns the layers for pairs, from ``query`` (Hq,) and ``candidates`` (N, width) to (N,), and example inputs.

    Args:
        projection: projection of the interaction. Without one, the query is the towers' outputs side by side.
        query_widths: D of each query tower.
    """
    width = projection.query_width or sum(query_widths)
    score = (
        _Score(projection)
        if projection.query_width
        else _Pairs(projection, query_widths)
    )
    return score.eval(), {
        "query": torch.randn(width),
        "candidates": torch.randn(4, projection.width),
    }


class _Score(nn.Module):
    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        return self.projection.score(query, candidates)


class _Pairs(nn.Module):
    """The whole interaction by ``forward``; ``score_all`` would fix its number of blocks in the file."""

    def __init__(self, projection: Projection, widths: Sequence[int]) -> None:
        super().__init__()
        self.interaction = projection.interaction
        self._widths = list(widths)

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        # The shape, because len() would be traced as a constant.
        rows = query.expand(candidates.shape[0], -1)
        queries = torch.split(rows, self._widths, dim=1)
        return self.interaction([*queries, candidates])  # type: ignore[no-any-return]


def write_onnx(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    dynamic: Any,
    path: Path | str,
    *,
    external: bool = False,
) -> None:
    """Writes a network as ONNX, without comparing outputs.

    Args:
        module: network in evaluation mode.
        examples: inputs by name, in order.
        dynamic: ``dynamic_shapes`` of :func:`torch.export.export`; None for any number of rows (N, D), 2 or more in
            the example, and a fixed length of inputs of one dimension.
        path: path of the file.
        external: write the weights to ``PATH.data``, because an ONNX file holds at most 2 GB.

    Raises:
        ExportError: ONNX lacks a layer.
        ValueError: a package is missing, or the network is in training mode.
    """
    require_onnx()
    if dynamic is None:
        rows = Dim("rows", min=2)
        shapes = []
        for value in examples.values():
            shapes.append({0: rows} if value.dim() > 1 else None)
        dynamic = tuple(shapes)
    if module.training:
        raise ValueError(
            "module: is in training mode, in which dropout and batch statistics act; call module.eval()"
        )
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                module,
                tuple(examples.values()),
                input_names=list(examples),
                output_names=["output"],
                dynamo=True,
                dynamic_shapes=dynamic,
                verbose=False,
            )
            # Nodes hold the stack of their tracing, with local paths: remove it.
            for node in program.model.graph.all_nodes():
                node.metadata_props.clear()
            program.save(str(path), external_data=external)
    except Exception as error:
        cause: BaseException = error
        # Show the root cause: torch's own message begins with advice to its developers.
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = str(cause).strip().partition("\n")[0][:300]
        raise ExportError(
            f"{type(module).__name__} cannot be exported to ONNX: {type(cause).__name__}: {first}"
        ) from error


def open_onnx(path: Path | str) -> Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]:
    """Opens an ONNX file on the CPU; returns a function from inputs by name to the output.

    Raises:
        ExportError: ONNX Runtime refuses the file, or an input of a later call.
    """
    import onnxruntime

    def checked(action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return action(*arguments, **options)
        except Exception as error:  # onnxruntime's exceptions have no common class
            raise ExportError(
                f"'{path}': ONNX Runtime refuses it: {str(error).strip()[:300]}"
            ) from error

    session = checked(
        onnxruntime.InferenceSession, str(path), providers=["CPUExecutionProvider"]
    )
    return lambda inputs: checked(session.run, None, dict(inputs))[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's warnings about optional packages and axis names."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def require_onnx() -> None:
    """Raises ValueError if a package of the extra ``onnx`` is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ModuleNotFoundError:
            raise ValueError(
                f"ONNX export needs the package {package}: pip install 'torchrec-ext[onnx]'"
            ) from None


PAD = -1
# PaddedTower can compute these classes, but no sequence encoders or classes of users.
EXPORTABLE = (Tower.__name__, NCFTower.__name__)


@dataclass(frozen=True)
class Input:
    """Name, shape and meaning of a tower's input.

    Args:
        name: name of the column.
        shape: axis letters: B rows, and L with the feature's name for the length of a padded list.
        dtype: ``int64`` or ``float32``.
        meaning: description in words.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    meaning: str


class PaddedTower(nn.Module):
    """Computes a :class:`Tower` in evaluation from one padded tensor per column, not from a KeyedJaggedTensor.

    A feature of one id is (B,). A list is (B, L), with -1 after its ids. Any other id outside of the table takes the
    feature's out-of-vocabulary row, as in a bundle's requests. Tables shared by several towers are copied into each.

    Args:
        encoder: encoder with the tower and its weights.
        name: name of the tower; its class must be in ``EXPORTABLE``.
        replaces_unseen: give unseen ids the out-of-vocabulary row, in a copy of their table. ``Columns.read`` does so
            too.
    """

    def __init__(
        self, encoder: RowEncoder, name: str, *, replaces_unseen: bool = True
    ) -> None:
        super().__init__()
        tower: Any = encoder.model.towers[name]
        self._tables: list[EmbeddingBagConfig] = [*tower.bags, *tower.lists]
        names = {table.name for table in self._tables}
        rows: dict[str, Tensor] = {}
        for table, _, weight in values_by_table(encoder.model):
            if table not in names:
                continue
            rows[table] = weight.detach()
            if replaces_unseen:
                rows[table] = _with_unseen(rows[table], table, encoder)
        self.weights = _parameters(rows.values())
        # By number: a table's name may hold characters that no parameter can be called
        # by.
        self._indices = {table: index for index, table in enumerate(rows)}
        self._weighted: dict[str, str] = tower.weights
        self._dense: list[str] = list(tower.dense)
        self.attention = tower.attention
        self.compress = tower.compress
        self.mlp = tower.mlp
        self.out_features = int(tower.out_features)
        features_by_name = {
            feature.name: feature for feature in encoder.columns.schema.sparse
        }
        self._features: dict[str, SparseFeature] = {}
        for config in self._tables:
            self._features |= {
                name: features_by_name[name] for name in config.feature_names
            }
        self._listed = {
            name: encoder.listed(feature) for name, feature in self._features.items()
        }
        self.inputs = self._inputs()
        self.eval()

    def _inputs(self) -> list[Input]:
        inputs = []
        for number, (name, feature) in enumerate(self._features.items()):
            rows = f"0 to {feature.num_embeddings - 1}; any other is unknown and takes row {feature.oov_id}"
            length = f"L_{name}" if name.isidentifier() else f"L_{number}"
            if not self._listed[name]:
                inputs.append(Input(name, ("B",), "int64", f"row of its table, {rows}"))
                continue
            inputs.append(
                Input(
                    name,
                    ("B", length),
                    "int64",
                    f"rows of its table, {rows}; {PAD} after the last of a list",
                )
            )
            if name in self._weighted:
                inputs.append(
                    Input(
                        self._weighted[name],
                        ("B", length),
                        "float32",
                        f"weight of each {name}; any number at {PAD}",
                    )
                )
        return inputs + [
            Input(column, ("B",), "float32", "a number") for column in self._dense
        ]

    def forward(self, *columns: Tensor) -> Tensor:
        """Returns (B, D) outputs from the columns, in the order of ``inputs``."""
        columns_by_name = dict(
            zip([each.name for each in self.inputs], columns, strict=True)
        )
        # The tower has one pool for each list under attention, in the order of its
        # tables.
        pools: Iterator[Any] = iter(())
        if self.attention is not None:
            pools = iter(self.attention.pools)
        pooled_rows = []
        for table in self._tables:
            weight = self.weights[self._indices[table.name]]
            for name in table.feature_names:
                ids = columns_by_name[name]
                feature = self._features[name]
                # The padding, -1, reads a row too; its values are masked later.
                known_ids = torch.where(
                    (ids < 0) | (ids >= feature.num_embeddings), feature.oov_id, ids
                )
                rows = embedding(known_ids, weight).float()
                if isinstance(table, EmbeddingBagConfig):
                    pooled_rows.append(
                        self._pool(name, table.pooling, rows, columns_by_name)
                    )
                else:
                    pooled_rows.append(
                        _attend(next(pools), *self._bags(name, rows, ids))
                    )
        row = torch.cat(
            [*pooled_rows, *(columns_by_name[name][:, None] for name in self._dense)],
            dim=1,
        )
        if self.compress is not None:
            row = self.compress(row)
        return self.mlp(row)  # type: ignore[no-any-return]

    def _bags(self, name: str, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (B, L, D) rows, and a mask (B, L), False for padding."""
        if self._listed[name]:
            return rows, ids != PAD
        return rows[:, None], torch.ones_like(ids, dtype=torch.bool)[:, None]

    def _pool(
        self,
        name: str,
        pooling: PoolingType,
        rows: Tensor,
        columns_by_name: Mapping[str, Tensor],
    ) -> Tensor:
        if not self._listed[name]:  # a bag of one is its row
            return rows
        is_id = columns_by_name[name] != PAD
        weights = torch.ones_like(rows[..., 0])
        if name in self._weighted:
            weights = columns_by_name[self._weighted[name]]
        pooled = (rows * torch.where(is_id, weights, 0.0)[..., None]).sum(dim=1)
        if pooling == PoolingType.MEAN:
            return pooled / is_id.sum(dim=1).clamp(min=1)[:, None]
        return pooled

    def columns(self, rows: Read) -> dict[str, Tensor]:
        """Converts parsed rows into inputs, with lists padded to the longest."""
        columns: dict[str, Tensor] = {}
        for name, listed in self._listed.items():
            bags = rows.sparse[name]
            if not listed:
                columns[name] = bags.values
                continue
            columns[name] = _pad(bags.values, bags, PAD)
            if name in self._weighted:
                assert bags.weights is not None, (
                    "a feature with weights was read with them"
                )
                columns[self._weighted[name]] = _pad(bags.weights, bags, 0)
        return columns | {name: rows.dense[name] for name in self._dense}

    def row(self, rows: Read) -> list[Tensor]:
        """Converts one parsed row into inputs, each list padded to two ids or more."""
        columns: list[Tensor] = []
        for name, listed in self._listed.items():
            bag = rows.sparse[name]
            values = bag.values
            if listed:
                values = _pad_row(values, PAD)
            columns.append(values)
            if name in self._weighted and bag.weights is not None:
                columns.append(_pad_row(bag.weights, 0))
        return columns + [rows.dense[name] for name in self._dense]

    @property
    def table_names(self) -> list[str]:
        """Names of the tables, in the order of :meth:`take_tables`."""
        return list(self._indices)

    def take_tables(self) -> list[Tensor]:
        """Takes the tables out of the module, for a caller that passes them to ``functional_call``."""
        tables = [weight.detach() for weight in self.weights]
        # Empty ones stay in their places, for the caller's tables.
        self.weights = _parameters([table[:0].clone() for table in tables])
        return tables


def _parameters(tables: Iterable[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(table, requires_grad=False) for table in tables
    )


def shapes_of(inputs: list[Input]) -> tuple[Any, ...]:
    """Returns the ``dynamic_shapes`` of a :class:`PaddedTower`: one dimension per axis letter."""
    letters: dict[str, Any] = {}
    shapes = []
    for each in inputs:
        shapes.append(
            {
                axis: letters.setdefault(letter, Dim(letter, min=2))
                for axis, letter in enumerate(each.shape)
            }
        )
    return (tuple(shapes),)  # one argument: forward's *columns


def example_of(inputs: list[Input]) -> dict[str, Tensor]:
    """Returns inputs to trace with: 3 rows, lists of 2."""
    # At least 2 on every axis, because torch.export fixes axes of size 0 and 1.
    sizes: Mapping[str, int] = {"B": 3}
    examples = {}
    for each in inputs:
        shape = [sizes.get(letter, 2) for letter in each.shape]
        examples[each.name] = torch.zeros(shape, dtype=getattr(torch, each.dtype))
    return examples


def _with_unseen(weight: Tensor, table: str, encoder: RowEncoder) -> Tensor:
    """Replaces a table's unseen rows by the out-of-vocabulary row; returns the rows.

    Raises:
        ValueError: several features read the table, but their unseen ids differ.
    """
    columns = encoder.columns
    features = [feature for feature in columns.schema.sparse if table in feature.tables]
    unseen = [
        columns.unseen.get(feature.name, np.zeros(0, np.int64)) for feature in features
    ]
    if not any(map(len, unseen)):
        return weight
    # The file has one table for all of them, so an unseen row must be unseen by each.
    if not all(np.array_equal(rows, unseen[0]) for rows in unseen):
        raise ValueError(
            f"table '{table}': {len(features)} features read it and have seen different ids; leave the tower out"
        )
    rows = weight.clone()
    rows[torch.from_numpy(unseen[0])] = weight[features[0].oov_id]
    return rows


def _attend(pool: AttentionPooling, rows: Tensor, is_id: Tensor) -> Tensor:
    """Returns (B, D) pooled rows as :class:`AttentionPooling` does, from padded rows (B, L, D)."""
    scores = pool.score(rows).squeeze(-1).masked_fill(~is_id, -torch.inf)
    # A bag without ids has only -inf: exp() gives NaN there, which torch.where()
    # replaces by 0.
    weights = torch.where(
        is_id, torch.exp(scores - scores.amax(dim=1, keepdim=True)), 0.0
    )
    # The greatest weight of a bag is 1, so the sum is below 1 only for an empty bag,
    # which stays 0.
    return (weights[..., None] * rows).sum(dim=1) / weights.sum(dim=1).clamp(min=1)[
        :, None
    ]


def _pad_row(values: Tensor, filler: float) -> Tensor:
    """Returns the values of one bag as (1, L), L at least 2."""
    # torch.export fixes axes of size 0 and 1, so a graph is traced for 2 and more.
    if len(values) < 2:
        values = torch.nn.functional.pad(values, (0, 2 - len(values)), value=filler)
    return values[None]


def _pad(values: Tensor, bags: Jagged, filler: float) -> Tensor:
    """Returns the values of bags padded to (B, L), L the longest and at least 1."""
    assert bags.lengths is not None, "a list was read with its lengths"
    lengths = bags.lengths.long()
    longest = max([1, *lengths.tolist()])
    inside = torch.arange(longest)[None] < lengths[:, None]
    return torch.full(inside.shape, filler, dtype=values.dtype).masked_scatter(
        inside, values
    )
