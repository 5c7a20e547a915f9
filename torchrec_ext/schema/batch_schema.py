"""BatchSchema: the columns of a batch, derived from the tables that read them; columns -> one TowerBatch, checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, get_args

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import Self

from torchrec_ext.batch import (
    Jagged,
    KeyLayout,
    TowerBatch,
    pack,
)
from torchrec_ext.schema.array_columns import element_of, source_columns, widths_of
from torchrec_ext.schema.checks import (
    checked_bags,
    numbers_of,
    of_shape,
    total_of,
)
from torchrec_ext.schema.features import (
    SparseFeature,
    features_of,
    merge_tables,
)
from torchrec_ext.schema.validation import DataError, OutOfRange, check_choice, listed

_Column = TypeVar("_Column")


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
class BatchSchema:
    """The columns of a batch, in the order of :class:`TowerBatch`, and the one place to check and pack them.

    Args:
        sparse: the features, F of them.
        dense: the names of the columns of the one dense matrix, Fd of them; ``profile[3]`` is the fourth number of the
            array column ``profile``, if the data have no column of that very name.
        shared: names of those of these columns that are in the batch's shared part, see :class:`SharedRows`.
        tasks: the columns with the labels of further tasks, which become ``batch.targets``.
        label_range: smallest and largest label, 0 to 1 as binary cross entropy asks; None for any finite label.
        out_of_range: the treatment of a negative or too large id. ``error`` raises :class:`DataError`; ``oov`` maps
            the id to the feature's ``oov_id``. Decided here, before any sharding: TorchRec's own answer depends on the
            sharding type (a row-wise table trains the row of another id, see FACTS).
        candidate: the column with the item of each row of a training batch, for ``batch.items``. Needed by models that
            compare rows.
        catalogue: whether a training batch ends with all items as candidates, spread over the ranks.
        hook: where the ids of a batch are replaced; None if they never are.
    """

    sparse: tuple[SparseFeature, ...]
    dense: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = (0.0, 1.0)
    out_of_range: OutOfRange = "error"
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
        if isinstance(dense, str):
            raise ValueError(f"dense={dense!r}: give a list of names, [{dense!r}]")
        tables = merge_tables(tables)
        shared = frozenset(shared)
        return cls(
            sparse=features_of(tables, oov_ids or {}),
            dense=tuple(dense),
            shared=shared,
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
        rows = tuple(name for name in self.keys if name not in self.shared)
        shared = tuple(name for name in self.keys if name in self.shared)
        return KeyLayout(rows, shared if self.shared else None)

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

    def assemble(
        self,
        sparse: Mapping[str, Jagged],
        dense: Mapping[str, Tensor] | None = None,
        *,
        labels: Tensor,
        weights: Tensor | None = None,
        total_weight: float | None = None,
        targets: Tensor | None = None,
    ) -> TowerBatch:
        """Checks the columns and packs them into one batch, whose row i has shared row i.

        Args:
            sparse: a :class:`Jagged` of B rows for each sparse feature; further entries are ignored.
            dense: a (B,) column for each dense name, (B, W) for an array column; further entries are ignored.
            labels: (B,).
            weights: (B,), 0 for padding; ones by default.
            total_weight: the sum of the weights over all ranks divided by R, by which the loss divides; the sum of
                ``weights`` by default.
            targets: (B, T - 1) the labels of the schema's ``tasks``; required if it has such.

        Raises:
            DataError: a column is missing, has another length or type, or holds an invalid value.
        """
        dense = dense or {}
        size = labels.numel()
        places = torch.arange(size)
        bags = {}
        for feature in self.sparse:
            column = self._column(sparse, feature.name)
            bags[feature.name] = checked_bags(
                feature, column, size, replace=self.out_of_range == "oov"
            )
        items = None
        if self.replaces is not None:
            # The item that was sampled, whatever is looked up for it.
            if self.candidate in bags:
                items = _first_ids(bags[self.candidate], size)
            bags |= self.replaces(bags, RowNumbers(places, places))
        if weights is None:
            weights = torch.ones(size)
        weights = numbers_of("weight", weights, size, (0.0, math.inf))
        return pack(
            self.layout,
            bags,
            dense=self._matrix(dense, self.row_dense, size),
            labels=numbers_of("label", labels, size, self.label_range),
            weights=weights,
            total_weight=total_of(weights, total_weight),
            targets=self._targets(targets, size),
            items=items,
            shared_dense=self._matrix(dense, self.shared_dense, size),
            index=places,
        )

    def _targets(self, targets: Tensor | None, size: int) -> Tensor | None:
        # Labels of tasks that the model lacks are ignored, as further columns are.
        if not self.tasks:
            return None
        shape = (size, len(self.tasks))
        if targets is None or targets.shape != shape:
            found = None if targets is None else tuple(targets.shape)
            raise DataError(
                f"targets of shape {found}: must be (B, tasks) = {shape}, the labels of {list(self.tasks)}"
            )
        columns = zip(self.tasks, targets.unbind(dim=1), strict=True)
        return torch.stack(
            [
                numbers_of(name, column, size, self.label_range)
                for name, column in columns
            ],
            dim=1,
        )

    def _matrix(
        self, dense: Mapping[str, Tensor], names: Sequence[str], size: int
    ) -> Tensor:
        """Returns (size, names) float32 of columns, and of elements of array columns."""
        if not names:
            return torch.empty(size, 0)
        widths = widths_of(names, dense)
        columns = []
        for name in names:
            element = element_of(name)
            # A column of that very name is the user's own.
            if element is None or name in dense:
                columns.append(of_shape(name, self._column(dense, name), (size,)))
                continue
            array = self._column(dense, element.column)
            shape = (size, widths[element.column])
            columns.append(of_shape(element.column, array, shape)[:, element.position])
        matrix = torch.stack(columns, dim=1)
        # One pass finds whether any value is bad: one NaN poisons all weights of all
        # ranks in one step.
        if not torch.isfinite(matrix).all():
            for name, column in zip(names, matrix.unbind(dim=1), strict=True):
                numbers_of(name, column, size)
        return matrix

    def check(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Checks a KeyedJaggedTensor built elsewhere, as in ``batch.sparse = schema.check(batch.sparse)``.

        The tensor must have all shared features, all others, or both. What is returned has their keys alone, in the
        order of the schema: a sharded collection reads each batch by the places of the first one's keys.

        Returns:
            A tensor of these keys, with ``out_of_range="oov"`` with the out-of-vocabulary row for invalid ids.
        """
        try:
            columns = features.to_dict()
        except (RuntimeError, IndexError) as error:
            raise DataError(
                f"the KeyedJaggedTensor cannot be split by its keys ({str(error)[:60]}); give each key a length for "
                "each of one row or more, which add up to its ids"
            ) from None
        kinds = filter(None, self.layout)
        if not any(set(kind) <= columns.keys() for kind in kinds):
            missing = [name for name in self.keys if name not in columns]
            raise DataError(
                f"the KeyedJaggedTensor lacks {missing}; it has the keys {features.keys()}"
            )
        names = [name for name in self.keys if name in columns]
        bags = []
        for name in names:
            column = columns[name]
            bags.append(
                checked_bags(
                    self._by_name[name],
                    Jagged(column.values(), column.lengths()),
                    features.stride(),
                    replace=self.out_of_range == "oov",
                )
            )
        weights = None
        if features.weights_or_none() is not None:
            weights = torch.cat([columns[name].weights() for name in names])
            if not torch.isfinite(weights).all():
                raise DataError(
                    f"weights of {listed(names)}: one is not finite; fill or drop it where it is made"
                )
        return KeyedJaggedTensor(
            keys=names,
            values=torch.cat([each.values for each in bags]),
            weights=weights,
            lengths=torch.cat([columns[name].lengths() for name in names]),
        )

    def _column(self, columns: Mapping[str, _Column], name: str) -> _Column:
        if name not in columns:
            found = sorted(source_columns(columns))
            needed = [*self.keys, *source_columns(self.dense)]
            raise DataError(
                f"column '{source_columns([name])[0]}' is missing; the batch has {found}, the schema needs {needed}"
            )
        return columns[name]


def _first_ids(bags: Jagged, size: int) -> Tensor:
    """Returns (size,) the first id of each bag, 0 for an empty one."""
    if bags.lengths is None:
        return bags.values
    lengths = bags.lengths.long()
    ids = bags.values.new_zeros(size)
    is_full = lengths > 0
    ids[is_full] = bags.values[(lengths.cumsum(0) - lengths)[is_full]]
    return ids
