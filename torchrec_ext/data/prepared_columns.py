"""PreparedColumns: the columns of a prepared folder, their tables and their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Array
from torchrec_ext.data.config import Form, Roles
from torchrec_ext.data.features import owned_columns
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.prepare import (
    PREPROCESSOR,
    SESSION,
    Evaluation,
)
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.data.preprocess.fitted import DIGEST
from torchrec_ext.schema import DataError

_KINDS: dict[str, tuple[Kind, ...]] = {
    "int64": ("int",),
    "list<int64>": ("ints",),
    "float32": ("float",),
}
# Kinds of labels and weights.
_NUMBERS: tuple[Kind, ...] = ("int", "float", "bool")


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedColumns:
    """The columns of preprocessed rows on disk, split for training and evaluation.

    Args:
        name: name by which the set was loaded.
        splits: files of each split: ``train``, ``test`` and, if there is one, ``validation``.
        preprocessor: the preprocessing that made the rows; a request's rows go through it.
        roles: columns of label, weight, user and item.
        folder: the folder with the rows.
        labels: sums of weights by split, from the summary: of all rows, and of the positives of each label.
        form: what is read of the rows: ``pairs`` are those with label 1, or all of them without labels.
        ranked: greatest number of held-out rows for which the catalogue is ranked, if the rows have labels.
        evaluation: rule of a ranking of held-out positives.
        left_out: why a column of the files is not read, by its name.
        notes: what a reader should know of the rows, one line each.
        best: figures of the best possible prediction, if known (generated data).
        temporary: a temporary folder that lives as long as the data, or None.
    """

    name: str
    splits: Mapping[str, ParquetSource]
    preprocessor: FittedPreprocessor
    roles: Roles
    folder: Path
    labels: Mapping[str, Any]
    form: Form = "labels"
    ranked: int = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    best: Mapping[str, float] = field(default_factory=dict)
    temporary: Any = None

    def __post_init__(self) -> None:
        kinds = {
            name: _KINDS[self.preprocessor.outputs[name]]
            for name in (*self.features, *self.dense)
        }
        numbers = (self.roles.label, *self.roles.tasks, self.roles.weight)
        for source in self.splits.values():
            source.require(kinds)
            source.require({name: _NUMBERS for name in numbers if name})
        if self.form == "pairs":
            self._check_pairs()
        if self.form == "sessions" and (
            SESSION not in self.tables
            or self.tables[SESSION] != self.tables.get(str(self.roles.item))
        ):
            raise DataError(
                f"data.name={self.name}: its rows have no column '{SESSION}' with the ids of the items before a row's "
                "item; take --recipe stream, or a folder with the log itself"
            )

    def _check_pairs(self) -> None:
        """Refuses rows that cannot be ranked, and roles that recipes of pairs do not read."""
        roles = self.roles
        if roles.user is None or roles.item is None:
            raise DataError(
                f"{self.folder}: this recipe ranks, and its preprocessing names no user or no item; set "
                "Prepare(user=..., item=...), or take --recipe stream"
            )
        for role, expected in (("user", "user_id"), ("item", "item_id")):
            name = getattr(roles, role)
            if name != expected:
                raise DataError(
                    f"{self.folder}: the {role}'s column is '{name}', and this recipe reads '{expected}'; write "
                    f"output='{expected}' to its step in the preprocessing recipe, or take --recipe stream"
                )
        if roles.weight:
            raise DataError(
                f"{self.folder}: its rows have weights, '{roles.weight}', which this recipe does not read; leave "
                "Prepare.weight out, or take --recipe stream"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the preprocessor: with another one the ids stand for other values."""
        return (self.folder / PREPROCESSOR / DIGEST).read_text().strip()

    @property
    def id_values(self) -> dict[str, pa.Array]:
        """The values of each vocabulary, in the order of their ids from 1 on, by its first column."""
        return self.preprocessor.id_values

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Number of rows of each feature's table; row 0 is the unknown value."""
        return self.preprocessor.vocab

    @property
    def tables(self) -> Mapping[str, str]:
        """The table of each feature, by feature: columns of one vocabulary, such as item and history, share one."""
        return self.preprocessor.vocabularies

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ids."""
        return tuple(
            name
            for name in self.vocab
            if name
            not in (self.roles.label, self.roles.weight, self.evaluation.candidates)
        )

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of the columns of numbers."""
        return tuple(
            name
            for name in self.preprocessor.dense
            if name not in (self.roles.label, self.roles.weight)
        )

    @cached_property
    def towers(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Names of the features and of the dense columns of each usual tower: the item's is the last."""
        roles = self.roles
        columns = (*self.features, *self.dense)
        owners = dict.fromkeys(
            owned_columns("item", columns, (roles.item, *roles.item_features)), "item"
        )
        # The user's come last: a column that both could have is the user's.
        owners |= dict.fromkeys(
            owned_columns("user", columns, (roles.user, *roles.user_features)), "user"
        )
        towers: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
        for tower in ("user", "context", "item"):
            mine = [name for name in columns if owners.get(name, "context") == tower]
            features = tuple(name for name in mine if name in self.features)
            dense = tuple(name for name in mine if name in self.dense)
            if mine:
                towers[tower] = features, dense
        return towers

    def describe_columns(self) -> list[str]:
        """Returns lines that say what each column is: ids, a number, or left out and why."""
        lines = []
        ids = {}
        for name in self.features:
            table = self.tables[name]
            same = "" if table == name else f" as {table}"
            ids[name] = f"{name}{same or f' ({self.vocab[name] - 1:,})'}"
        for tower, (features, dense) in self.towers.items():
            kinds = []
            if features:
                kinds.append(f"ids {', '.join(ids[name] for name in features)}")
            if dense:
                kinds.append(f"numbers {', '.join(dense)}")
            lines.append(f"  {tower:8} {'; '.join(kinds)}")
        for name, reason in self.left_out.items():
            lines.append(f"  left out {name}: {reason}")
        lines += [f"  note: {note}" for note in self.notes]
        return lines

    def values_of(self, name: str) -> Array:
        """Returns :meth:`raw_values` as objects, (V,)."""
        return np.array(self.raw_values(name).to_pylist(), object)

    def raw_values(self, name: str) -> pa.Array:
        """Returns (V,) the log's value of each row of a column's table, or a bucket's number; null for row 0."""
        values = self.id_values.get(self.tables[name])
        if values is None:
            values = pa.array(np.arange(1, self.vocab[name]))
        rest = self.vocab[name] - 1 - len(values)
        nobody = (pa.nulls(1, values.type), pa.nulls(rest, values.type))
        return pa.concat_arrays([nobody[0], values, nobody[1]])

    def same_ids(self, name: str) -> list[str]:
        """Returns the features that share a column's table."""
        table = self.tables.get(name)
        return [other for other in self.features if self.tables[other] == table]

    def _role(self, role: str) -> str:
        name: str | None = getattr(self.roles, role)
        if name is None:
            raise ValueError(
                f"set '{self.name}': its preprocessing names no {role} column"
            )
        return name
