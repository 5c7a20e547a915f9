"""Prepared: a prepared folder, the only form of data that a recipe reads, of any size.

open_prepared(): opens a folder; set_folder(): finds it by its path or its name.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.config import PARTS, PLANTED, DataConfig, Form, Roles
from torchrec_ext.data.features import owned_columns
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.known import keys_of, known_keys, known_path
from torchrec_ext.data.prepare import (
    PREPROCESSOR,
    RAW_ITEMS,
    RAW_POPULARITY,
    SESSION,
    SUMMARY,
    VERSION,
    Evaluation,
)
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.data.preprocess.fitted import DIGEST
from torchrec_ext.data.splits import Pairs
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

_KINDS: dict[str, tuple[Kind, ...]] = {
    "int64": ("int",),
    "list<int64>": ("ints",),
    "float32": ("float",),
}
# Kinds of labels and weights.
_NUMBERS: tuple[Kind, ...] = ("int", "float", "bool")
# Values of a split that is held in memory: 512 MiB.
WHOLE_VALUES = 2**26
# What a row of a list column counts for: nobody knows its length before it is read.
_LIST_VALUES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Preprocessed rows on disk, split for training and evaluation.

    With the items of the catalogue, and who took which.

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

    def chunks(self, split: str, names: Sequence[str]) -> Iterator[Chunk]:
        """Yields the columns ``names`` of a split in the files' order: parts of row groups, or all of few rows."""
        rows = self.stored(split)
        if isinstance(rows, Chunk) and rows and {*names} <= {*rows}:
            yield rows.select(list(names))
            return
        source = self.splits[split]
        for group in source.groups:
            # In parts, because a row group may be larger than the memory.
            yield from source.parts(group, list(names), 0, 1 << 16)

    def stored(
        self, split: str, more: Sequence[str | None] = ()
    ) -> Chunk | ParquetSource:
        """Returns a split's columns in memory where they are few enough, to be shuffled as a whole; else its files.

        Args:
            split: name of the split.
            more: further columns to hold, such as a weight that a setting names; those that the files lack are left
                to whoever reads them.
        """
        source = self.splits[split]
        roles = self.roles
        others = (roles.label, *roles.tasks, roles.weight, self.evaluation.candidates)
        outputs = self.preprocessor.outputs
        others += tuple(name for name in more if name in outputs)
        names = list(
            dict.fromkeys(filter(None, (*self.features, *self.dense, *others)))
        )
        lists = sum(outputs[name].startswith("list") for name in names)
        values = len(names) + (_LIST_VALUES - 1) * lists
        # Negatives are drawn for rows in memory alone.
        if self.form == "labels" and source.num_rows * values > WHOLE_VALUES:
            return source
        key = (split, *names)
        if key not in self._held:
            chunks = [source.read(group, names) for group in source.groups]
            self._held[key] = concatenate_rows(chunks, names)
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[str, ...], Chunk]:
        """What is held in memory, by split and columns, each read once."""
        return {}

    def training_rows(self, more: Sequence[str | None] = ()) -> Chunk | ParquetSource:
        """Returns the training rows as a loader takes them: pairs and sessions in memory; see :meth:`stored`."""
        if self.form == "labels":
            return self.stored("train", more)
        return self.rows("train")

    def rows(self, split: str) -> Chunk:
        """Returns a split's rows in memory; no rows if the folder has no such split.

        Of pairs these are the positives; those for training have a known user and item.

        Raises:
            DataError: no training row is a positive.
        """
        if split not in self.splits:
            # No rows, with the columns that rows have.
            return self.rows("train").slice(0, 0)
        rows = self.stored(split)
        if not isinstance(rows, Chunk):
            chunks = [rows.read(group, list(rows.columns)) for group in rows.groups]
            return concatenate_rows(chunks, rows.columns)
        if self.form != "pairs":
            return rows
        key = (split, "positives")
        if key not in self._held:
            self._held[key] = self._positives(split, rows)
        return self._held[key]

    def _positives(self, split: str, rows: Chunk) -> Chunk:
        positive = np.ones(rows.num_rows, dtype=bool)
        if self.roles.label:
            positive = rows[self.roles.label].values > 0
        known = positive.copy()
        if split == "train":
            for role in (self.roles.user, self.roles.item):
                known &= rows[str(role)].values > 0
        count = int(known.sum())
        every = int(positive.sum())
        if split == "train" and not count:
            raise DataError(
                f"{self.folder}: no training row is a positive: with label 1, and a known user and item"
            )
        if count < every:
            warnings.warn(
                f"{self.folder}: {every - count:,} of {every:,} positives for training have an unknown user or "
                "item, and are left out; a lower min_count of the preprocessing knows more of them",
                stacklevel=2,
            )
        return rows if count == rows.num_rows else rows.take(np.flatnonzero(known))

    def clicked(self, split: str, *names: str) -> Iterator[Chunk]:
        """Yields columns of a split's rows with a label above 0, or of all of them if the rows have no labels."""
        label = self.roles.label
        if not label:
            yield from self.chunks(split, names)
            return
        for chunk in self.chunks(split, [*names, label]):
            yield chunk.take(np.flatnonzero(chunk[label].values > 0))

    @property
    def positives(self) -> dict[str, tuple[float, float]]:
        """The weight of each split's rows as positives, and of all of them, by split; see :attr:`task_positives`.

        Raises:
            DataError: all rows of a split have weight 0.
        """
        label = self.roles.label
        sums = {}
        for split, source in self.splits.items():
            total = float(self.labels[split]["total"])
            every = total
            if label:
                every = float(self.labels[split]["positives"][label]["of_all"])
            if not total > 0:
                raise DataError(
                    f"{source.files[0].name}: column '{self.roles.weight}' is 0 in all {source.num_rows:,} rows of "
                    f"split '{split}'; give each row that counts a weight above 0"
                )
            sums[split] = every, total
        return sums

    @property
    def task_positives(self) -> dict[str, dict[str, float]]:
        """The weight of the positives of each task, by split and by task, the label being the first."""
        return {
            split: {
                name: float(sums["of_all"])
                for name, sums in self.labels[split]["positives"].items()
            }
            for split in self.splits
        }

    def share(self, split: str) -> float:
        """Returns the weighted share of positives among the rows of a split, never quite 0 or 1."""
        return positive_share(*self.positives[split])

    def taken(self, *splits: str, users: Int64 | None = None) -> Pairs:
        """Returns the users (P,) and items (P,) of the positives of some splits, all by default: sorted, each once.

        Of a session all items are the user's. The unknown user and the unknown item are left out.

        Args:
            splits: names of splits; those that the folder lacks have no rows.
            users: users whose items are asked for; all by default.

        Raises:
            ValueError: the preprocessing names no user or no item.
        """
        self._role("user")
        width = self.vocab[self._role("item")]
        keys = [
            known_keys(known_path(self.folder, split, sessions=self.form == "sessions"))
            for split in splits or PARTS
            if split in self.splits
        ]
        none = np.zeros(0, np.int64)
        return Pairs(*np.divmod(keys_of(keys or [none], width, users), width))

    def taken_in_order(self, *splits: str) -> Pairs:
        """Returns the pairs of :meth:`taken` in the order of the rows, which are read; a pair may be there twice."""
        user = self._role("user")
        item = self._role("item")
        before = [SESSION] if self.form == "sessions" else []
        pieces = [np.zeros((2, 0), np.int64)]
        for split in filter(self.splits.__contains__, splits):
            for rows in self.clicked(split, user, item, *before):
                owners = rows[user].values
                items = rows[item].values
                if before:
                    sequences = with_next(rows[SESSION], items)
                    owners = owners[sequences.owners]
                    items = sequences.values
                known = (owners > 0) & (items > 0)
                pieces.append(np.stack([owners[known], items[known]]))
        return Pairs(*np.concatenate(pieces, axis=1))

    def seen(self, users: Int64, *splits: str) -> Column:
        """Returns the items that each of ``users`` (B,) has taken in some splits: a ragged column, each item once."""
        owners, items = self.taken(*splits, users=users)
        return Column.grouped(items, owners, 1 + int(users.max(initial=0))).take(users)

    @property
    def item_key(self) -> str | None:
        """Name of the column of the items, or None."""
        return self.roles.item

    @cached_property
    def popularity(self) -> Int64:
        """The number of positive training rows of each row of the items' table, (V,); of sessions, of users.

        Raises:
            ValueError: the preprocessing names no item.
            DataError: the folder has no counts.
        """
        item = self._role("item")
        if self.form == "sessions":
            return np.bincount(self.taken("train").items, minlength=self.vocab[item])
        # Arrow's memory is read-only.
        counts: Int64 = (
            pq.read_table(self.folder / RAW_POPULARITY)["count"].to_numpy().copy()
        )
        return counts

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue: those that training has."""
        return len(self.item_ids)

    @property
    def item_ids(self) -> Int64:
        """The catalogue: the rows of the items' table that training reads, (I,), ascending."""
        return self._catalogue[0]

    @property
    def items(self) -> Chunk:
        """The columns of the items, by row of their table, (V,); rows of no item hold those of some item."""
        return self._catalogue[1]

    @cached_property
    def _catalogue(self) -> tuple[Int64, Chunk]:
        """The items as they were in their last training row.

        Raises:
            ValueError: the preprocessing names no item.
            DataError: no training row has a known item, or the folder has no raw items.
        """
        item = self._role("item")
        features, dense = self.towers["item"]
        names = list(dict.fromkeys([item, *features, *dense]))
        steps = self.preprocessor.only(names)
        raw = pq.read_table(self.folder / RAW_ITEMS)
        rows = steps.online(
            {name: raw[name].combine_chunks() for name in steps.request_columns}
        )
        last = np.full(self.vocab[item], -1)
        # numpy keeps the last value that is assigned to an index.
        last[rows[item].values] = np.arange(rows.num_rows)
        item_rows: Int64 = 1 + np.flatnonzero(last[1:] >= 0)
        if not len(item_rows):
            raise DataError(
                f"{self.folder}: column '{item}' is 0, the unknown item, in all training rows; lower min_count of its "
                "Categorify"
            )
        ids = np.arange(self.vocab[item])
        nearest = item_rows[np.minimum(item_rows.searchsorted(ids), len(item_rows) - 1)]
        table = rows.select(names).take(last[nearest])
        return item_rows, table.with_columns({item: Column(ids)})

    def drawable(self) -> int:
        """Returns the number of items, whose ids are 1 to this number: negatives are drawn from these.

        Raises:
            DataError: some id in between is no item's.
        """
        item = self._role("item")
        missing = self.vocab[item] - 1 - self.num_items
        if missing:
            raise DataError(
                f"{self.folder}: {missing:,} rows of '{item}' are no item's: its ids are hashed, or the first split is "
                "not the training rows; take Categorify for the item, or --recipe stream"
            )
        return self.num_items

    @cached_property
    def titles(self) -> list[str]:
        """The text of each row of the items' table, for display."""
        item = self._role("item")
        values = self.values_of(item)
        texts: dict[Any, str | None] = {}
        raw = pq.read_table(self.folder / RAW_ITEMS)
        (key,) = self.preprocessor.only([item]).request_columns
        if "title" in raw.column_names and key != "title":
            columns = (raw[key], raw["title"])
            texts = dict(zip(*(each.to_pylist() for each in columns), strict=True))
        return ["an unknown item"] + [
            texts.get(value) or f"item {value}" for value in values[1:].tolist()
        ]


def positive_share(positive: float, total: float) -> float:
    """Returns the share of ``positive`` in ``total``, never quite 0 or 1."""
    # Half a row: a share of 0 or 1 would have an infinite log loss and log-odds.
    least = 0.5 / (total + 1)
    return min(max(positive / total if total else 0.0, least), 1 - least)


def with_next(before: Column, items: Int64) -> Column:
    """Returns the items of each row of ``before``, and the row's of ``items`` (B,) after them."""
    owners = np.concatenate([before.owners, np.arange(len(items))])
    return Column.grouped(np.concatenate([before.values, items]), owners, len(items))


# The folder of sets where no other is named.
FOLDER_VARIABLE = "TORCHREC_EXT_DATA"


def data_folder(name: str, folder: str | None) -> Path | None:
    """Returns the path of the set in ``folder``, else in ``$TORCHREC_EXT_DATA``; None if neither is given."""
    root = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(root) / name if root else None


def set_folder(name: str, root: str | None) -> Path:
    """Returns the folder of a set: in ``root`` if given, else its own path, or in ``$TORCHREC_EXT_DATA``.

    Raises:
        DataError: there is no such folder.
    """
    inside = data_folder(name, root)
    places = [inside or Path(name)] if root or inside is None else [Path(name), inside]
    found = [folder for folder in places if folder.is_dir()]
    if not found:
        place = f"nor is it in data.folder or {FOLDER_VARIABLE}"
        if root:
            place = str(places[0])
        raise DataError(
            f"data.name={name}: there is no such folder, {place}; put files there as in docs/recipes.md, or use "
            f"generated rows: data.name={PLANTED}"
        )
    # Some other folder of that name may lie where the command runs.
    return next((f for f in found if is_prepared(f) or _files_in(f)), found[0])


def is_prepared(folder: Path) -> bool:
    """Says whether a folder has preprocessed rows; files of a set of its own beside them are read instead."""
    return (folder / "train").is_dir() and not _files_in(folder)


def _files_in(folder: Path) -> bool:
    """Says whether a folder has the files of a set as it stands."""
    return any((folder / f"{name}.parquet").exists() for name in ("train", "inter"))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder that is removed with this object, or when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="torchrec_ext-planted-")
    # Processes that multiprocessing starts end without `atexit`, by which the folder
    # would be removed.
    multiprocessing.util.Finalize(folder, _remove, (folder.name,), exitpriority=0)
    return folder


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def open_prepared(
    folder: Path, config: DataConfig, form: Form = "labels", **details: Any
) -> Prepared:
    """Opens a prepared folder; only metadata are read.

    Args:
        folder: the folder.
        config: settings with the name of the set.
        form: what is read of the rows.
        details: fields of :class:`Prepared` in place of those of the folder.

    Raises:
        DataError: the folder is not one that rec.data.preprocess wrote, or its files contradict it.
    """
    path = folder / SUMMARY
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"{folder}: has no {SUMMARY}, so rec.data.preprocess did not write it; give the folder that its --out "
            "names, or preprocess these files first"
        ) from None
    except ValueError as error:
        raise DataError(
            f"{path}: is damaged ({error}); preprocess the log again"
        ) from None
    if summary.get("version") != VERSION:
        raise DataError(
            f"{path}: is of version {summary.get('version')}, must be {VERSION}; preprocess the log again"
        )
    preprocessor = FittedPreprocessor.load(folder / PREPROCESSOR)
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise DataError(
                f"{folder}: has no split '{split}' (it has {', '.join(summary['rows'])}); name the splits of the "
                "preprocessing recipe train, test and, for early stopping, validation"
            )
    roles = Roles(**summary["roles"])
    if form == "labels" and not roles.label:
        raise DataError(
            f"{folder}: its rows have no label: the preprocessing recipe names none that it keeps (it keeps "
            f"{listed(preprocessor.keep) or 'nothing'}); set Prepare.label and Preprocessor(keep=[...])"
        )
    for name, kind in preprocessor.outputs.items():
        if kind == "list<float32>" and name not in preprocessor.keep:
            raise DataError(
                f"{folder}: column '{name}' is {kind}, of which no tower can be made; pool it to numbers, or bucket "
                "it to ids, in the preprocessing recipe"
            )
    return Prepared(
        name=config.name,
        splits={
            split: ParquetSource(folder / split)
            for split in PARTS
            if (folder / split).is_dir()
        },
        preprocessor=preprocessor,
        roles=roles,
        folder=folder,
        labels=summary["labels"],
        form=form,
        ranked=config.ranked,
        **(_details(summary) | details),
    )


def _details(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a set tells of itself beside its columns; rec.data.preprocess writes nothing of it."""
    names = ("left_out", "notes", "best")
    details = {name: summary[name] for name in names if name in summary}
    if rule := summary.get("evaluation"):
        lists = {name: tuple(rule[name]) for name in ("at", "figures")}
        details["evaluation"] = Evaluation(**{**rule, **lists})
    return details
