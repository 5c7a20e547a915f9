"""Which columns a batch has, derived from the tables that will read them, and the one place where ids are checked.

Axis letters, one legend for the whole package: B batch, F features, L bag length, D embedding dim, T towers, N negatives or
candidates, K retrieved, R ranks, S session length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, get_args

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch

OutOfRange = Literal["error", "oov"]
_Column = TypeVar("_Column")


class DataError(ValueError):
    """Input that breaks a rule: the message names the feature, the table, the value, the row and the remedy."""


class Jagged(NamedTuple):
    """One sparse feature of a batch: ``values`` (sum of lengths,) and ``lengths`` (B,); ``lengths=None`` is one id per row."""

    values: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """A key of the batch's KeyedJaggedTensor and the rows that its ids may name.

    Args:
        name: the key.
        tables: every table that looks this feature up.
        num_embeddings: rows of the smallest of these tables; valid ids are ``0 <= id < num_embeddings``.
        oov_id: the row that ``out_of_range="oov"`` sends invalid ids to.
    """

    name: str
    tables: tuple[str, ...]
    num_embeddings: int
    oov_id: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.oov_id < self.num_embeddings:
            raise ValueError(
                f"feature '{self.name}': oov_id={self.oov_id} is not a row of table {self.readers}; "
                f"choose a row from 0 to {self.num_embeddings - 1}"
            )

    @property
    def readers(self) -> str:
        """Its tables as a message names them."""
        return ", ".join(f"'{table}'" for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class BatchSchema:
    """The columns of a batch, in the order in which :class:`TowerBatch` holds them.

    Args:
        sparse: the keys of the one KeyedJaggedTensor, F of them.
        dense: the names of the columns of the one dense matrix, Fd of them.
        shared: which of these columns are in the batch's shared part, see :class:`SharedRows`.
        label_range: smallest and largest label, 0 to 1 as binary cross entropy asks; None for any finite label.
        out_of_range: what a negative or too large id does. ``error`` raises :class:`DataError`; ``oov`` maps it to the feature's
            ``oov_id``. Decided here, before any sharding: TorchRec's own answer depends on the sharding type (a row-wise table
            trains the row of another id, see FACTS).
    """

    sparse: tuple[SparseFeature, ...]
    dense: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    label_range: tuple[float, float] | None = (0.0, 1.0)
    out_of_range: OutOfRange = "error"
    _by_name: dict[str, SparseFeature] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.out_of_range not in get_args(OutOfRange):
            raise ValueError(f"out_of_range={self.out_of_range!r}: must be one of {', '.join(get_args(OutOfRange))}")
        names = [feature.name for feature in self.sparse] + list(self.dense)
        unknown = sorted(self.shared - set(names))
        if unknown:
            raise ValueError(f"shared names {unknown}, which are not columns; the columns are {names}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"columns {twice} appear twice in the schema; a column is one sparse feature or one dense column")
        object.__setattr__(self, "_by_name", {feature.name: feature for feature in self.sparse})

    @classmethod
    def from_tables(
        cls,
        tables: Iterable[BaseEmbeddingConfig],
        *,
        dense: Sequence[str] = (),
        shared: Iterable[str] = (),
        label_range: tuple[float, float] | None = (0.0, 1.0),
        out_of_range: OutOfRange = "error",
        oov_ids: Mapping[str, int] | None = None,
    ) -> BatchSchema:
        """The schema that a set of TorchRec tables asks for: features in order of first appearance.

        Args:
            tables: EmbeddingBagConfigs or EmbeddingConfigs; a feature may be read by several.
            dense: names of the dense columns.
            shared: names of the columns in the batch's shared part.
            label_range: see :class:`BatchSchema`.
            out_of_range: see :class:`BatchSchema`.
            oov_ids: out-of-vocabulary row by feature name; row 0 where not given.
        """
        readers: dict[str, list[BaseEmbeddingConfig]] = {}
        for table in tables:
            for feature in table.feature_names:
                readers.setdefault(feature, []).append(table)
        oov_ids = oov_ids or {}
        unknown = sorted(set(oov_ids) - set(readers))
        if unknown:
            raise ValueError(f"oov_ids names {unknown}, which no table reads; the features are {sorted(readers)}")
        return cls(
            sparse=tuple(
                SparseFeature(
                    name=name,
                    tables=tuple(table.name for table in found),
                    num_embeddings=min(table.num_embeddings for table in found),
                    oov_id=oov_ids.get(name, 0),
                )
                for name, found in readers.items()
            ),
            dense=tuple(dense),
            shared=frozenset(shared),
            label_range=label_range,
            out_of_range=out_of_range,
        )

    @property
    def keys(self) -> list[str]:
        """The names of the sparse features, in order; a KeyedJaggedTensor holds the shared or the other ones."""
        return [feature.name for feature in self.sparse]

    def feature(self, name: str) -> SparseFeature | None:
        """The sparse feature of that name, if there is one."""
        return self._by_name.get(name)

    def assemble(
        self,
        sparse: Mapping[str, Jagged],
        dense: Mapping[str, Tensor] | None = None,
        *,
        labels: Tensor,
        weights: Tensor | None = None,
        total_weight: float | None = None,
        log_q: Tensor | None = None,
        rows: Tensor | None = None,
        index: Tensor | None = None,
        shared_rows: Tensor | None = None,
    ) -> TowerBatch:
        """Checks the columns and packs them into one batch.

        Args:
            sparse: a :class:`Jagged` for each sparse feature, of B rows or, where it is shared, Q; further entries are ignored.
            dense: a (B,) or (Q,) column for each dense name; further entries are ignored.
            labels: (B,).
            weights: (B,), 0 for padding; ones where not given.
            total_weight: the sum of the weights over all ranks divided by R, by which the loss divides; this rank's own sum where
                not given.
            log_q: (B,) log-probability with which the candidate was sampled.
            rows: (B,) numbers by which an error message names a row; the place in the batch where not given.
            index: (B,) the shared row of each row; where not given, Q is B and each row has its own.
            shared_rows: (Q,) numbers by which an error message names a shared row; must be given with ``index``.

        Raises:
            DataError: a column is missing, has another length or type, or holds an invalid value.
        """
        own = _Rows(labels.numel(), "B", rows)
        dense = dense or {}
        weights = _between("weight", torch.ones(own.size) if weights is None else weights, own, (0.0, math.inf))
        total = float(weights.sum()) if total_weight is None else float(total_weight)
        if own.size and not total > 0:
            raise DataError(f"total_weight={total}: must be greater than 0, since the loss divides by it; give some row a weight")
        return TowerBatch(
            sparse=self._keyed(sparse, own, shared=False),
            dense=self._matrix(dense, own, shared=False),
            labels=_between("label", labels, own, self.label_range),
            weights=weights,
            total_weight=torch.tensor(total),
            log_q=None if log_q is None else _finite("log_q", log_q, own),
            shared=self._shared_part(sparse, dense, own, index, shared_rows) if self.shared else None,
        )

    def _shared_part(
        self,
        sparse: Mapping[str, Jagged],
        dense: Mapping[str, Tensor],
        own: _Rows,
        index: Tensor | None,
        shared_rows: Tensor | None,
    ) -> SharedRows:
        if index is None:
            index, rows = torch.arange(own.size), own
        elif shared_rows is None:
            raise ValueError("index without shared_rows: give the number of each of the Q shared rows too")
        else:
            rows = _Rows(len(shared_rows), "Q", shared_rows)
        if index.shape != (own.size,) or (own.size and not 0 <= int(index.min()) <= int(index.max()) < rows.size):
            raise DataError(f"index of shape {tuple(index.shape)}: must be (B,) = ({own.size},), places from 0 to {rows.size - 1}")
        return SharedRows(sparse=self._keyed(sparse, rows, shared=True), dense=self._matrix(dense, rows, shared=True), index=index)

    def _keyed(self, sparse: Mapping[str, Jagged], rows: _Rows, *, shared: bool) -> KeyedJaggedTensor:
        features = [feature for feature in self.sparse if (feature.name in self.shared) == shared]
        jagged = [self._checked(feature, self._column(sparse, feature.name), rows) for feature in features]
        return KeyedJaggedTensor(
            keys=[feature.name for feature in features],
            values=torch.cat([values for values, _ in jagged]) if jagged else torch.empty(0, dtype=torch.int64),
            lengths=torch.cat([lengths for _, lengths in jagged]) if jagged else torch.empty(0, dtype=torch.int32),
            stride=rows.size,
        )

    def _matrix(self, dense: Mapping[str, Tensor], rows: _Rows, *, shared: bool) -> Tensor:
        names = [name for name in self.dense if (name in self.shared) == shared]
        columns = [_finite(name, self._column(dense, name), rows) for name in names]
        return torch.stack(columns, dim=1) if columns else torch.empty(rows.size, 0)

    def check(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same checks for a KeyedJaggedTensor of your own, as in ``batch.sparse = schema.check(batch.sparse)``.

        It must have all shared features, all others, or both.

        Returns:
            ``features`` itself, or with ``out_of_range="oov"`` a new one in which invalid ids are the out-of-vocabulary row.
        """
        parts = features.to_dict()
        missing = {name for name in self.keys if name not in parts}
        parts_of_schema = (set(self.keys) & self.shared, set(self.keys) - self.shared)
        if missing and (missing == set(self.keys) or missing not in parts_of_schema):
            lacking = [name for name in self.keys if name in missing]
            raise DataError(f"the KeyedJaggedTensor lacks {lacking}; it has the keys {features.keys()}")
        keys: list[str] = features.keys()
        rows = _Rows(features.stride(), "B", None)
        values = []
        for name in keys:
            jagged = Jagged(parts[name].values(), parts[name].lengths())
            feature = self._by_name.get(name)
            values.append(self._checked(feature, jagged, rows)[0] if feature else jagged.values)
        if self.out_of_range == "error":
            return features
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(values),
            lengths=features.lengths(),
            weights=features.weights_or_none(),
        )

    def _column(self, columns: Mapping[str, _Column], name: str) -> _Column:
        if name not in columns:
            raise DataError(
                f"column '{name}' is missing; the batch has {sorted(columns)}, the schema needs {self.keys + list(self.dense)}"
            )
        return columns[name]

    def _checked(self, feature: SparseFeature, column: Jagged, rows: _Rows) -> tuple[Tensor, Tensor]:
        """(values int64, lengths int32) of one feature: one dtype on every rank, since two dtypes abort the process group."""
        _check_types(feature.name, column)
        values, lengths = column
        if lengths is None:
            lengths = torch.ones(values.numel(), dtype=torch.int32)
        _check_lengths(feature.name, values, lengths, rows)
        values = values.long()
        if values.numel():
            low, high = torch.aminmax(values)
            if int(low) < 0 or int(high) >= feature.num_embeddings:
                values = self._out_of_range(feature, values, lengths, rows)
        return values, lengths.int()

    def _out_of_range(self, feature: SparseFeature, values: Tensor, lengths: Tensor, rows: _Rows) -> Tensor:
        bad = (values < 0) | (values >= feature.num_embeddings)
        if self.out_of_range == "oov":
            return torch.where(bad, feature.oov_id, values)
        first = int(bad.nonzero()[0])
        row = int(torch.searchsorted(lengths.long().cumsum(0), first, right=True))
        raise DataError(
            f"feature '{feature.name}': id {int(values[first])} in {rows.name(row)} is outside table {feature.readers} "
            f"(valid ids: 0 to {feature.num_embeddings - 1}; {int(bad.sum())} such ids in this batch); "
            f"enlarge num_embeddings, fix the data, or set out_of_range='oov' to use row {feature.oov_id} for them"
        )


class _Rows(NamedTuple):
    """The rows that a column must have, and what a message calls them."""

    size: int
    axis: str
    numbers: Tensor | None

    def name(self, row: int) -> str:
        if self.numbers is not None:
            return f"row {int(self.numbers[row])}"
        return f"row {row} of the batch"

    @property
    def shape(self) -> str:
        return f"({self.axis},) = ({self.size},)"


def _check_types(name: str, column: Jagged) -> None:
    if not isinstance(column, Jagged) or not all(isinstance(part, Tensor) for part in column if part is not None):
        raise DataError(f"feature '{name}': a {type(column).__name__}, must be Jagged(values, lengths) of tensors")
    for what, tensor in (("ids", column.values), ("lengths", column.lengths)):
        if tensor is None:
            continue
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise DataError(
                f"feature '{name}': {what} are {str(tensor.dtype).removeprefix('torch.')}, must be integers; "
                "convert them where they are read (a float id would silently become row 0)"
            )
        if tensor.dim() != 1:
            raise DataError(f"feature '{name}': {what} have shape {tuple(tensor.shape)}, must have one dimension; flatten them")


def _check_lengths(name: str, values: Tensor, lengths: Tensor, rows: _Rows) -> None:
    if lengths.numel() != rows.size:
        raise DataError(f"feature '{name}': {lengths.numel()} rows, must be {rows.shape}; give one entry for each row")
    if lengths.numel() and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise DataError(f"feature '{name}': length {int(lengths[row])} in {rows.name(row)}; lengths must be 0 or more")
    total = int(lengths.sum())
    if total != values.numel():
        raise DataError(f"feature '{name}': the lengths add up to {total}, but there are {values.numel()} ids; they must agree")


def _finite(name: str, column: Tensor, rows: _Rows) -> Tensor:
    """The column as float32, every value finite: one NaN poisons the dense weights and all tables of all ranks in one step."""
    if column.shape != (rows.size,):
        raise DataError(f"column '{name}': shape {tuple(column.shape)}, must be {rows.shape}")
    column = column.float()
    finite = torch.isfinite(column)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise DataError(
            f"column '{name}': value {float(column[row])} in {rows.name(row)} is not finite; fill or drop it where it is read"
        )
    return column


def _between(name: str, column: Tensor, rows: _Rows, bounds: tuple[float, float] | None) -> Tensor:
    column = _finite(name, column, rows)
    if bounds is None or not column.numel():
        return column
    bad = (column < bounds[0]) | (column > bounds[1])
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        limits = f"{bounds[0]:g} or more" if math.isinf(bounds[1]) else f"from {bounds[0]:g} to {bounds[1]:g}"
        remedy = "; for other labels make the schema with label_range=None" if name == "label" else ""
        raise DataError(f"column '{name}': value {float(column[row]):g} in {rows.name(row)} must be {limits}{remedy}")
    return column
