"""BatchSchema: the columns of a batch, derived from the tables that read them; columns -> one TowerBatch, checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar, get_args

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import Self

from torchrec_ext.batch import (
    Jagged,
    KeyedIds,
    KeyLayout,
    Keys,
    TowerBatch,
    concatenated,
    pack,
)
from torchrec_ext.schema.array_columns import source_columns, widths_of
from torchrec_ext.schema.checks import (
    ExpectedRows,
    array_of,
    bags_of,
    between,
    check_ids,
    check_index,
    check_repeats,
    finite,
    finite_matrix,
    row_numbers,
    side_by_side,
    total_of,
)
from torchrec_ext.schema.features import (
    Joint,
    SparseFeature,
    features_of,
    joints,
    merged,
)
from torchrec_ext.schema.validation import DataError, OutOfRange, check_choice, listed


class RowNumbers(NamedTuple):
    """Numbers that tell the rows of an epoch apart, the same on any number of ranks: (B,) and, of shared rows, (Q,)."""

    rows: Tensor
    shared: Tensor


IdReplacement = Callable[[Mapping[str, Jagged], RowNumbers], Mapping[str, Jagged]]


@dataclass(eq=False)
class IdHook:
    """Where a loader's ids are replaced: in the columns of each batch, before it is laid out.

    Args:
        replace: function from the bags of all features by name, of the batch's rows or of its shared rows, and the
            numbers of these rows, to bags with other ids for some of the features; None replaces none.
    """

    replace: IdReplacement | None = None


@dataclass(frozen=True, kw_only=True)
class BatchColumns:
    """The columns of a batch, in the order of :class:`TowerBatch`.

    Args:
        sparse: the features, F of them.
        dense: the names of the columns of the one dense matrix, Fd of them; ``profile[3]`` is the fourth number of the
            array column ``profile``, if the data have no column of that very name.
        shared: names of those of these columns that are in the batch's shared part, see :class:`SharedRows`.
        joint: the keys of ``batch.joint``, for tables that read shared and other features.
        tasks: the columns with the labels of further tasks, which become ``batch.targets``.
        label_range: smallest and largest label, 0 to 1 as binary cross entropy asks; None for any finite label.
        out_of_range: the treatment of a negative or too large id. ``error`` raises :class:`DataError`; ``oov`` maps
            the id to the feature's ``oov_id``. Decided here, before any sharding: TorchRec's own answer depends on the
            sharding type (a row-wise table trains the row of another id, see FACTS).
        query: the column with the user of each row of a training batch, for ``batch.users``. Needed by models that
            compare rows.
        candidate: the column with the item of each row of a training batch, for ``batch.items``. Needed likewise.
        catalogue: whether a training batch ends with all items as candidates, spread over the ranks.
        hook: where the ids of a batch are replaced; None if they never are.
    """

    sparse: tuple[SparseFeature, ...]
    dense: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    joint: tuple[Joint, ...] = ()
    tasks: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = (0.0, 1.0)
    out_of_range: OutOfRange = "error"
    query: str | None = None
    candidate: str | None = None
    catalogue: bool = False
    hook: IdHook | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("out_of_range", self.out_of_range, get_args(OutOfRange))
        names = [*self.keys, *self.dense]
        unknown = sorted(self.shared - set(names))
        if unknown:
            raise ValueError(
                f"shared names {unknown}, which are not columns; the columns are {names}"
            )
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(
                f"columns {twice} appear twice in the schema; a column is a sparse feature or a dense column"
            )

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
    ) -> Self:
        """Builds the schema for a set of TorchRec tables: features in order of first appearance.

        Args:
            tables: EmbeddingBagConfigs or EmbeddingConfigs; a feature may be read by several, and a table be named
                several times, if its configs agree in all but their features.
            dense: names of the dense columns.
            shared: names of the columns in the batch's shared part.
            label_range: see :class:`BatchSchema`.
            out_of_range: see :class:`BatchSchema`.
            oov_ids: out-of-vocabulary row by feature name; row 0 by default.
        """
        tables = merged(tables)
        shared = frozenset(shared)
        joint = joints(tables, shared)
        return cls(
            sparse=features_of(tables, shared, oov_ids or {}),
            dense=tuple(dense),
            shared=shared,
            joint=tuple(dict.fromkeys(chain.from_iterable(joint.values()))),
            label_range=label_range,
            out_of_range=out_of_range,
        )

    @property
    def keys(self) -> list[str]:
        """The names of the sparse features, in order; a KeyedJaggedTensor holds some of them."""
        return [feature.name for feature in self.sparse]

    @cached_property
    def layout(self) -> KeyLayout:
        """The features of each KeyedJaggedTensor of a batch, in order."""
        keyed = [feature.name for feature in self.sparse if feature.keyed]
        rows = tuple(name for name in keyed if name not in self.shared)
        shared = tuple(name for name in keyed if name in self.shared)
        return KeyLayout(
            rows=Keys(rows, rows),
            shared=Keys(shared, shared) if self.shared else None,
            joint=self._halves(),
        )

    def _halves(self) -> Keys | None:
        """Returns the keys of ``batch.joint``; None without any."""
        if not self.joint:
            return None
        keys = tuple(joint.key for joint in self.joint)
        return Keys(keys, tuple(chain.from_iterable(self.joint)))

    @cached_property
    def row_dense(self) -> tuple[str, ...]:
        """Names of the columns of ``batch.dense``, in order."""
        return tuple(name for name in self.dense if name not in self.shared)

    @cached_property
    def shared_dense(self) -> tuple[str, ...]:
        """Names of the columns of ``batch.shared.dense``, in order."""
        return tuple(name for name in self.dense if name in self.shared)

    @cached_property
    def _by_name(self) -> dict[str, SparseFeature]:
        return {feature.name: feature for feature in self.sparse}

    @property
    def identities(self) -> tuple[str, ...]:
        """Names of the columns of ``batch.users`` and ``batch.items``."""
        return tuple(name for name in (self.query, self.candidate) if name)

    def feature(self, name: str) -> SparseFeature | None:
        """Returns the sparse feature called ``name``, or None."""
        return self._by_name.get(name)

    @property
    def dynamic(self) -> list[str]:
        """Names of the sparse features whose ids are any 64-bit numbers."""
        return [feature.name for feature in self.sparse if feature.dynamic]

    def with_dynamic(self, names: Iterable[str]) -> Self:
        """Returns the schema with any 64-bit ids in the features ``names``, and in those that share a table with them.

        Raises:
            ValueError: a name is no sparse feature.
        """
        tables: set[str] = set()
        for name in names:
            feature = self.feature(name)
            if feature is None:
                raise ValueError(
                    f"'{name}' is no sparse feature; the features are {listed(self.keys)}"
                )
            tables.update(feature.tables)
        features = []
        for feature in self.sparse:
            # A table has one map of ids for all of its features.
            features.append(
                replace(
                    feature,
                    dynamic=feature.dynamic or not tables.isdisjoint(feature.tables),
                )
            )
        return replace(self, sparse=tuple(features))

    def with_hook(self, function: IdReplacement | None = None) -> tuple[Self, IdHook]:
        """Returns the schema with a hook of its own, and the hook, which replaces ids by ``function``."""
        hook = IdHook(function)
        return replace(self, hook=hook), hook

    @property
    def replaces(self) -> IdReplacement | None:
        """The function that replaces ids; None if there is none."""
        return None if self.hook is None else self.hook.replace

    def missing(self, name: str, columns: Iterable[str]) -> DataError:
        """Returns the error to raise if ``columns`` lack column ``name`` of the schema."""
        schema_columns = [*self.keys, *source_columns(self.dense)]
        batch_columns = sorted(source_columns(columns))
        return DataError(
            f"column '{source_columns([name])[0]}' is missing; the batch has {batch_columns}, the schema "
            f"needs {schema_columns}"
        )


_Column = TypeVar("_Column")


class Dense(NamedTuple):
    """Dense columns side by side in the schema's order, float32: ``rows`` (B, Fd), and ``shared`` (Q, Fd)."""

    rows: Tensor
    shared: Tensor


@dataclass(frozen=True, kw_only=True)
class BatchSchema(BatchColumns):
    """The columns of a batch, see :class:`BatchColumns`, and the one place to check and pack them."""

    def assemble(
        self,
        sparse: Mapping[str, Jagged],
        dense: Mapping[str, Tensor] | Dense | None = None,
        *,
        labels: Tensor,
        weights: Tensor | None = None,
        total_weight: float | None = None,
        log_q: Tensor | None = None,
        targets: Tensor | None = None,
        rows: Tensor | None = None,
        index: Tensor | int | None = None,
        shared_rows: Tensor | None = None,
    ) -> TowerBatch:
        """Checks the columns and packs them into one batch.

        Args:
            sparse: a :class:`Jagged` for each sparse feature, of B rows or, if it is shared, Q; further entries are
                ignored.
            dense: a (B,) or (Q,) column for each dense name, (B, W) or (Q, W) for an array column; further entries are
                ignored; or :class:`Dense`.
            labels: (B,).
            weights: (B,), 0 for padding; ones by default.
            total_weight: the sum of the weights over all ranks divided by R, by which the loss divides; the sum of
                ``weights`` by default.
            log_q: (B,) log-probability with which the candidate was sampled.
            targets: (B, T - 1) the labels of the schema's ``tasks``; required if it has such.
            rows: (B,) numbers by which an error message names the rows; their indices in the batch by default.
            index: (B,) the shared row of each row, or the number of consecutive rows of each shared row. By default Q
                is B and row i has shared row i.
            shared_rows: (Q,) numbers by which an error message names the shared rows; must be given with ``index``.

        Raises:
            DataError: a column is missing, has another length or type, or holds an invalid value.
        """
        row_names, queries = _expected_rows(labels.numel(), rows, index, shared_rows)
        if not isinstance(dense, Dense):
            dense = Dense(
                self._matrix(dense or {}, self.row_dense, row_names),
                self._matrix(dense or {}, self.shared_dense, queries),
            )
        if self.shared and not isinstance(index, Tensor):
            index = torch.from_numpy(np.arange(queries.size).repeat(index or 1))
        columns = {}
        for feature in self.sparse:
            expected = queries if feature.name in self.shared else row_names
            columns[feature.name] = bags_of(
                feature, self._column(sparse, feature.name), expected
            )
        bags = {name: column.bags for name, column in columns.items()}
        items = None
        if self.replaces is not None:
            # The item that was sampled, whatever is looked up for it.
            if self.candidate in bags:
                items = _first_ids(bags[self.candidate], row_names.size)
            numbers = RowNumbers(row_numbers(row_names), row_numbers(queries))
            bags.update(self.replaces(bags, numbers))

        def fill(keys: Keys, sizes: Sequence[int]) -> KeyedIds:
            ids = concatenated(keys, sizes, bags)
            # After concatenation, so that one pass checks the ids of many features.
            check_ids(
                ids.values,
                [columns[name] for name in keys.features if name],
                replace=self.out_of_range == "oov",
            )
            return ids

        row_dense = finite_matrix(self.row_dense, dense.rows, row_names)
        labels = between("label", labels, row_names, self.label_range)
        if weights is None:
            row_weights = torch.ones(row_names.size)
        else:
            row_weights = between("weight", weights, row_names, (0.0, math.inf))
        return pack(
            self.layout,
            fill,
            dense=row_dense,
            labels=labels,
            weights=row_weights,
            total_weight=total_of(weights, total_weight, row_names.size),
            log_q=None if log_q is None else finite("log_q", log_q, row_names),
            targets=self._targets(targets, row_names),
            items=items,
            shared_dense=finite_matrix(self.shared_dense, dense.shared, queries)
            if self.shared
            else None,
            index=index if isinstance(index, Tensor) else None,
        )

    def _targets(self, targets: Tensor | None, rows: ExpectedRows) -> Tensor | None:
        if targets is None and self.tasks:
            raise DataError(
                f"the labels of the tasks {list(self.tasks)} are missing; give targets of shape (B, {len(self.tasks)})"
            )
        # Labels of tasks that the model lacks are ignored, as further columns are.
        if targets is None or not self.tasks:
            return None
        if targets.shape != (rows.size, len(self.tasks)):
            raise DataError(
                f"targets of shape {tuple(targets.shape)}: must be (B, tasks) = ({rows.size}, {len(self.tasks)})"
            )
        for name, column in zip(self.tasks, targets.unbind(dim=1), strict=True):
            between(name, column, rows, self.label_range)
        return targets.float()

    def _matrix(
        self, dense: Mapping[str, Tensor], names: Sequence[str], rows: ExpectedRows
    ) -> Tensor:
        columns = dict(dense)
        for name, width in widths_of(names, dense).items():
            if name in dense:
                array = array_of(name, dense[name], width, rows)
                for index, column in enumerate(array.unbind(dim=1)):
                    # A column of that very name is the user's own, see BatchColumns.
                    columns.setdefault(f"{name}[{index}]", column)
        return side_by_side(
            names, [self._column(columns, name) for name in names], rows
        )

    def check(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Checks a KeyedJaggedTensor built elsewhere, as in ``batch.sparse = schema.check(batch.sparse)``.

        The tensor must have all shared features, all others, or both.

        Returns:
            ``features`` itself, or with ``out_of_range="oov"`` a new one in which invalid ids are the out-of-vocabulary
            row.
        """
        columns = features.to_dict()
        shared_keys = (
            set() if self.layout.shared is None else set(self.layout.shared.keys)
        )
        row_keys = set(self.layout.rows.keys)
        all_keys = shared_keys | row_keys
        missing_keys = all_keys - set(columns)
        # A tensor may lack one kind as a whole, since shared and other features are two
        # tensors of a batch.
        if missing_keys and (
            missing_keys == all_keys or missing_keys not in (shared_keys, row_keys)
        ):
            missing_names = [name for name in self.keys if name in missing_keys]
            raise DataError(
                f"the KeyedJaggedTensor lacks {missing_names}; it has the keys {features.keys()}"
            )
        rows = ExpectedRows(features.stride(), "B")
        replace = self.out_of_range == "oov"
        values = []
        for name in features.keys():  # noqa: SIM118  a KeyedJaggedTensor is no mapping
            ids = columns[name].values()
            feature = self._by_name.get(name)
            # check_ids writes into the values that it replaces, and the caller's tensor
            # must stay as it is.
            if replace:
                ids = ids.clone()
            values.append(ids)
            if feature:
                bags = bags_of(feature, Jagged(ids, columns[name].lengths()), rows)
                check_ids(ids, [bags], replace=replace)
        if not replace:
            return features
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(values),
            lengths=features.lengths(),
        )

    def _column(self, columns: Mapping[str, _Column], name: str) -> _Column:
        if name not in columns:
            raise self.missing(name, columns)
        return columns[name]


def _first_ids(bags: Jagged, size: int) -> Tensor:
    """Returns (size,) the first id of each bag, 0 for an empty one."""
    if bags.lengths is None:
        return bags.values
    lengths = bags.lengths.long()
    ids = bags.values.new_zeros(size)
    starts = lengths.cumsum(0) - lengths
    is_full = lengths > 0
    ids[: len(lengths)][is_full] = bags.values[starts[is_full]]
    return ids


def _expected_rows(
    size: int,
    rows: Tensor | None,
    index: Tensor | int | None,
    shared_rows: Tensor | None,
) -> tuple[ExpectedRows, ExpectedRows]:
    """Returns the B rows and Q shared rows to expect of columns; refuses an invalid index."""
    expected = ExpectedRows(size, "B", rows)
    if index is None:
        return expected, expected
    if shared_rows is None:
        raise ValueError(
            "index without shared_rows: give the number of each of the Q shared rows too"
        )
    queries = ExpectedRows(shared_rows.numel(), "Q", shared_rows)
    if isinstance(index, int):
        check_repeats(index, expected, queries)
    else:
        check_index(index, expected, queries)
    # Rows without numbers of their own are named by their shared rows.
    if rows is None:
        expected = ExpectedRows(size, "B", shared_rows, index)
    return expected, queries
