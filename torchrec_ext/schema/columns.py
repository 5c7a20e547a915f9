"""BatchColumns: which columns a batch has, in which of its tensors and in which order, derived from the tables that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from typing_extensions import Self

from torchrec_ext.schema.arrays import columns_of
from torchrec_ext.schema.checks import DataError
from torchrec_ext.schema.features import Joint, Keys, SparseFeature, features_of, joints, merged, unique

OutOfRange = Literal["error", "oov"]


@dataclass(frozen=True, kw_only=True)
class BatchColumns:
    """The columns of a batch, in the order in which :class:`TowerBatch` holds them.

    Args:
        sparse: the features, F of them.
        dense: the names of the columns of the one dense matrix, Fd of them; ``profile[3]`` is the fourth number of the array column
            ``profile``, where the data have no column of that very name.
        shared: which of these columns are in the batch's shared part, see :class:`SharedRows`.
        joint: the keys of ``batch.joint``, for tables that read shared and other features.
        weighted: the keys of ``batch.weighted``, for tables that pool by weights.
        tasks: the columns with the labels of further tasks, of ``batch.targets``.
        label_range: smallest and largest label, 0 to 1 as binary cross entropy asks; None for any finite label.
        out_of_range: what a negative or too large id does. ``error`` raises :class:`DataError`; ``oov`` maps it to the feature's
            ``oov_id``. Decided here, before any sharding: TorchRec's own answer depends on the sharding type (a row-wise table
            trains the row of another id, see FACTS).
        query: the column with the user of each row of a training batch, for ``batch.users``, and
        candidate: the column with its item, for ``batch.items``. A model that compares rows names them.
    """

    sparse: tuple[SparseFeature, ...]
    dense: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    joint: tuple[Joint, ...] = ()
    weighted: tuple[Joint, ...] = ()
    tasks: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = (0.0, 1.0)
    out_of_range: OutOfRange = "error"
    query: str | None = None
    candidate: str | None = None

    def __post_init__(self) -> None:
        if self.out_of_range not in get_args(OutOfRange):
            raise ValueError(f"out_of_range={self.out_of_range!r}: must be one of {', '.join(get_args(OutOfRange))}")
        names = [feature.name for feature in self.sparse] + list(self.dense) + list(self.weight_columns)
        unknown = sorted(self.shared - set(names))
        if unknown:
            raise ValueError(f"shared names {unknown}, which are not columns; the columns are {names}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"columns {twice} appear twice in the schema; a column is a sparse feature, a dense column or weights")

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
        weights: Mapping[str, str] | None = None,
    ) -> Self:
        """The schema that a set of TorchRec tables asks for: features in order of first appearance.

        Args:
            tables: EmbeddingBagConfigs or EmbeddingConfigs; a feature may be read by several, and a table be named several times,
                if its configs agree in all but their features.
            dense: names of the dense columns.
            shared: names of the columns in the batch's shared part.
            label_range: see :class:`BatchSchema`.
            out_of_range: see :class:`BatchSchema`.
            oov_ids: out-of-vocabulary row by feature name; row 0 where not given.
            weights: by feature name the column with a weight for each of its ids.
        """
        tables, shared, weights = merged(tables), frozenset(shared), weights or {}
        joint = joints(tables, shared, weights)
        return cls(
            sparse=features_of(tables, shared, oov_ids or {}, weights),
            dense=tuple(dense),
            shared=shared | {weights[name] for name in shared if name in weights},
            joint=unique(joint.plain),
            weighted=unique(joint.weighted),
            label_range=label_range,
            out_of_range=out_of_range,
        )

    @property
    def keys(self) -> list[str]:
        """The names of the sparse features, in order; a KeyedJaggedTensor holds some of them."""
        return [feature.name for feature in self.sparse]

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """The columns with a weight for each id of a feature."""
        return tuple(feature.weights for feature in self.sparse if feature.weights)

    @cached_property
    def row_keys(self) -> Keys:
        """Of ``batch.sparse``."""
        return self._keys([feature for feature in self.sparse if feature.keyed and feature.name not in self.shared])

    @cached_property
    def shared_keys(self) -> Keys:
        """Of ``batch.shared.sparse``."""
        return self._keys([feature for feature in self.sparse if feature.keyed and feature.name in self.shared])

    @cached_property
    def joint_keys(self) -> Keys:
        """Of ``batch.joint``."""
        return self._halves(self.joint)

    @cached_property
    def weighted_keys(self) -> Keys:
        """Of ``batch.weighted``."""
        return self._halves(self.weighted)

    def _halves(self, keys: Sequence[Joint]) -> Keys:
        """Without shared columns a batch has no shared rows, so that every key is the half of the batch's rows."""
        halves = [name for key in keys for name in (key if self.shared else key[1:])]
        return Keys(tuple(key.key for key in keys), tuple(self.feature(name) if name else None for name in halves))

    @staticmethod
    def _keys(features: Sequence[SparseFeature]) -> Keys:
        return Keys(tuple(feature.name for feature in features), tuple(features))

    @cached_property
    def row_dense(self) -> tuple[str, ...]:
        """The columns of ``batch.dense``."""
        return tuple(name for name in self.dense if name not in self.shared)

    @cached_property
    def shared_dense(self) -> tuple[str, ...]:
        """The columns of ``batch.shared.dense``."""
        return tuple(name for name in self.dense if name in self.shared)

    @cached_property
    def _by_name(self) -> dict[str, SparseFeature]:
        return {feature.name: feature for feature in self.sparse}

    @property
    def identities(self) -> tuple[str, ...]:
        """The columns of ``batch.users`` and ``batch.items``."""
        return tuple(name for name in (self.query, self.candidate) if name)

    def feature(self, name: str) -> SparseFeature | None:
        """The sparse feature of that name, if there is one."""
        return self._by_name.get(name)

    def missing(self, name: str, columns: Iterable[str]) -> DataError:
        """What to raise where ``columns`` lack a column of the schema."""
        needed = [*self.keys, *columns_of(self.dense), *self.weight_columns]
        had = sorted(columns_of(columns))
        return DataError(f"column '{columns_of([name])[0]}' is missing; the batch has {had}, the schema needs {needed}")
