"""LabelledData: rows with a label and the context of the event: Frappe, a folder like it, or generated rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.datasets.catalog import DatasetUnavailable, data_folder
from torchrec_ext.data.datasets.config import PARTS, PLANTED
from torchrec_ext.data.datasets.config import LabelledConfig as LabelledConfig
from torchrec_ext.data.datasets.features import (
    MISSING_TIME,
    RawColumns,
    RowContext,
    SideFeatures,
    TowerColumns,
    check_described,
    columns_by_tower,
    owned_columns,
    raw_column,
    raw_ids,
    read_ids,
    same_types,
    side_features,
    spelled,
)
from torchrec_ext.data.datasets.folder import PREPROCESSOR
from torchrec_ext.data.datasets.synthetic import best_prediction
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.data.files.parquet import read_columns
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

_FILES = {
    "train": ("train.parquet", "train_resampled.parquet"),
    "validation": ("validation.parquet",),
    "test": ("test.parquet",),
}
_NAMES = {"user": "user_id", "item": "item_id"}
_RESERVED = ("label", *_NAMES, *_NAMES.values())
FRAPPE_LICENCE = (
    "Frappe: research use only, no redistribution without permission, no commercial use. Cite: L. Baltrunas, K. "
    "Church, A. Karatzoglou and N. Oliver (2015), Frappe: Understanding the Usage and Perception of Mobile App "
    "Recommendations In-The-Wild."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledData:
    """Rows with a label, split for training and evaluation.

    Args:
        name: name by which the set was loaded.
        train: rows with ``user_id`` and ``item_id``, if the set has them, the context and ``label``, 0 or 1.
        validation: held-out rows with the same columns.
        test: held-out rows with the same columns.
        vocab: number of rows that the table of each sparse column needs.
        context: names of the sparse columns that are neither the user's nor the item's.
        dense: names of the dense columns.
        user_features: names of the columns that describe the user.
        item_features: names of the columns that describe the item: the catalogue has them, and no request gives them.
        licence: terms of the publisher for users, or None.
        best: figures of the best possible prediction, if known (generated data).
        words: mapping of the files' values to ids and numbers, but for the columns whose ids are 0 to N - 1.
        oov_ids: maps a sparse column to the row of missing and of untrained ids. By default row 0 of the columns that
            ``words`` makes, and the last row of the others.
        prepared: the StreamedData that the rows were read from, with its preprocessor; or None.
    """

    name: str
    train: Chunk
    validation: Chunk
    test: Chunk
    vocab: Mapping[str, int]
    context: tuple[str, ...]
    dense: tuple[str, ...] = ()
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()
    licence: str | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    words: RowContext = field(default_factory=RowContext)
    oov_ids: Mapping[str, int] = field(default_factory=dict)
    prepared: Any = None

    def __post_init__(self) -> None:
        rows = {name: size - 1 for name, size in self.vocab.items()}
        rows |= dict.fromkeys(self.words.vocab, 0)
        object.__setattr__(self, "oov_ids", {**rows, **self.oov_ids})

    @property
    def id_values(self) -> dict[str, Any]:
        """The values behind each column's ids, in the order of the ids; no entry if values are the ids."""
        source = self.words.steps if self.prepared is None else self.prepared
        return dict(source.id_values)

    @property
    def item_key(self) -> str | None:
        """Name of the column of the items, or None."""
        return "item_id" if "item_id" in self.vocab else None

    @property
    def popularity(self) -> Int64:
        """The number of training rows with a label above 0 of each row of the items' table, (V,)."""
        clicked = self.train["item_id"].values[self.train["label"].values > 0]
        return np.bincount(clicked, minlength=self.vocab["item_id"]).astype(np.int64)

    @property
    def tables(self) -> Mapping[str, str]:
        """The table of each sparse column, by column: preprocessed columns of one vocabulary share one."""
        if self.prepared is not None:
            return dict(self.prepared.tables)
        return {name: name for name in self.features}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the sparse columns."""
        if self.prepared is not None:
            return tuple(self.prepared.features)
        names = (
            *_NAMES.values(),
            *self.user_features,
            *self.item_features,
            *self.context,
        )
        return tuple(name for name in names if name in self.vocab)

    @property
    def towers(self) -> TowerColumns:
        """Names of the sparse and of the dense columns of each usual tower."""
        if self.prepared is not None:
            return dict(self.prepared.towers)
        owners = dict.fromkeys(("user_id", *self.user_features), "user")
        owners |= dict.fromkeys(("item_id", *self.item_features), "item")
        towers = columns_by_tower(
            ("user", "item", "context"), self.features, self.dense, owners
        )
        return towers or {"context": ((), ())}

    def described(self, key: str, rows: Int64) -> Chunk:
        """Returns the features of the users or items in ``rows`` (N,) of a table, from their last training rows.

        A row without a training row has unknown values and zeros. What is made of a time has the time beside it.

        Args:
            key: ``user_id`` or ``item_id``: the rows are of its table, and it is the first column of the result.
            rows: rows of that table.
        """
        names = self.user_features if key == "user_id" else self.item_features
        last = np.full(self.vocab[key], -1)
        # numpy keeps the last value that is assigned to an index, so each id gets its
        # last row.
        last[self.train[key].values] = np.arange(self.train.num_rows)
        is_trained = last[rows] >= 0
        last_rows = self.train.take(np.maximum(last[rows], 0))
        fillers = {**self.oov_ids, **dict.fromkeys(self.words.times, MISSING_TIME)}
        columns = {key: Column(rows)}
        for name in dict.fromkeys((*names, *self.words.sources(names))):
            columns[name] = _fill_outside(
                last_rows[name], is_trained, fillers.get(name, 0)
            )
        return Chunk(columns)

    def trained(self, name: str) -> Int64:
        """Returns the rows of a sparse column's table with an id of a training row, in ascending order."""
        rows = np.unique(self.train[name].values)
        trained_rows: Int64 = rows[rows != self.oov_ids[name]]
        return trained_rows

    def ids(self, name: str, rows: Int64) -> Array:
        """Returns (N,) the files' ids of ``rows`` (N,) of a sparse column's table; none may be the unknown row."""
        if name not in self.words.vocabularies:
            return rows
        ids: Array = self.words.vocabularies[name].values.to_numpy(zero_copy_only=False)
        return ids[rows - 1]


def load_labelled(config: LabelledConfig) -> LabelledData:
    """Loads the rows named by ``config``.

    Raises:
        DatasetUnavailable: the files are not on this machine.
        DataError: a file or a column is missing or damaged, a label is neither 0 nor 1, or a column is of one type in
            one file and of another one in another.
    """
    data = (
        planted_context(seed=config.seed)
        if config.name == PLANTED
        else _from_folder(config)
    )
    return data if config.context else without_context(data)


def planted_context(*, rows: int = 60_000, seed: int = 0) -> LabelledData:
    """Generates clicks with log-odds from a user's taste and an item's kind, moved by the hour, not by the weekday.

    The column ``weight``, 1 or 2 by the weekday, is read if ``loader.weight`` names it.

    The answer: no score can order the rows better than the log-odds themselves, whose AUC and log loss on the test rows
    are in ``best``.

    Args:
        rows: number of rows of all parts together, eight tenths for training and one for each other part.
        seed: seed of the generator.
    """
    users = 300
    items = 200
    rng = np.random.default_rng([seed, rows, users, items])
    # Ids are 0 to size - 1, so the row after them is free for the unknown.
    sizes = {"user_id": users, "item_id": items, "hour": 24, "weekday": 7}
    ids = {name: rng.integers(size, size=rows) for name, size in sizes.items()}
    taste = rng.normal(size=(users, 4))
    kind = rng.normal(size=(items, 4))
    # How much more an item is wanted at night than at noon.
    evening = rng.normal(size=items)
    logits = (taste[ids["user_id"]] * kind[ids["item_id"]]).sum(1)
    logits += 2 * evening[ids["item_id"]] * np.cos(2 * np.pi * ids["hour"] / 24) - 1
    chance = 1 / (1 + np.exp(-logits))
    label = (rng.random(rows) < chance).astype(np.float32)
    numbers = {"label": label, "weight": (1 + ids["weekday"] % 2).astype(np.float32)}
    everything = Chunk(
        {name: Column(values) for name, values in (ids | numbers).items()}
    )
    tenth = rows // 10
    test = slice(rows - tenth, rows)
    train = everything.slice(0, rows - 2 * tenth)
    return LabelledData(
        name=PLANTED,
        train=train,
        validation=_untrained_unknown(
            everything.slice(rows - 2 * tenth, rows - tenth), train, sizes
        ),
        test=_untrained_unknown(everything.slice(rows - tenth, rows), train, sizes),
        vocab={name: size + 1 for name, size in sizes.items()},
        context=("hour", "weekday"),
        best=best_prediction(logits[test], chance[test], label[test]),
    )


def _from_folder(config: LabelledConfig) -> LabelledData:
    folder = data_folder(config.name, config.folder)
    files = _files(folder) if folder else {}
    missing = [part for part in PARTS if part not in files]
    if folder is None or missing:
        raise DatasetUnavailable(
            f"set '{config.name}' is not on this machine: no rows for {', '.join(missing)} in "
            f"{folder or 'any folder: set TORCHREC_EXT_DATA or data.folder'}; put files as in docs/recipes.md there, "
            "or set data.name=planted"
        )
    raw = dict(
        zip(
            PARTS,
            same_types({file: _read(file) for file in files.values()}),
            strict=True,
        )
    )
    descriptions = _descriptions(folder, files["train"], raw["train"])
    # Before the vocabularies are fitted: what users.parquet and items.parquet say is
    # read from there alone.
    raw = {
        part: _without_described(files[part], columns, descriptions)
        for part, columns in raw.items()
    }
    sizes, words = _words(raw, is_preprocessed=(folder / PREPROCESSOR).is_dir())
    chunks = {part: _numbered(columns, sizes, words) for part, columns in raw.items()}
    sparse = [
        name
        for name in words.derived(raw["train"])
        if name in sizes or name in words.vocab
    ]
    owned = {
        owner: _columns_of_owner(config, raw["train"], words, owner) for owner in _NAMES
    }
    for key, about in descriptions.items():
        if clash := sorted(set(chunks["train"]) & set(about.features.columns)):
            raise DataError(
                f"{about.path}: '{clash[0]}' is there, and is a column made of dates, too; rename a column"
            )
        for part, rows in chunks.items():
            chunks[part] = rows.with_columns(
                about.features.columns.take(about.rows_of(raw[part][key]))
            )
        words = words.joined(about.words)
        owned[about.name] = (*owned[about.name], *about.words.names)
        sparse += about.words.vocab
    # Of ids 0 to N - 1 row N is the unknown one. Hours, weekdays and months all have a
    # row, trained or not.
    unknown = dict(sizes)
    for columns_of_times in words.times.values():
        unknown |= dict.fromkeys(columns_of_times, 0)
    chunks = {
        part: _untrained_unknown(rows, chunks["train"], unknown)
        for part, rows in chunks.items()
    }
    vocab = {name: size + 1 for name, size in sizes.items()} | words.vocab
    owned_names = {*_NAMES.values(), *owned["user"], *owned["item"]}
    return LabelledData(
        name=config.name,
        train=chunks["train"],
        validation=chunks["validation"],
        test=chunks["test"],
        vocab={name: vocab[name] for name in sparse},
        context=tuple(name for name in sparse if name not in owned_names),
        dense=tuple(words.scales),
        user_features=owned["user"],
        item_features=owned["item"],
        licence=FRAPPE_LICENCE if config.name == "frappe" else None,
        words=words,
    )


class _Descriptions(NamedTuple):
    """The content of users.parquet or items.parquet: ``ids`` (M,), and ``table``, their M rows of raw values."""

    name: str
    path: Path
    ids: pa.Array
    table: RawColumns
    features: SideFeatures

    @property
    def words(self) -> RowContext:
        """How values of the file become ids and numbers."""
        return self.features.words

    def rows_of(self, ids: pa.Array) -> Int64:
        """Returns (B,) the row of each id, counted from 1; 0 for a null and for an id outside the file."""
        rows: Int64 = (
            pc.index_in(ids, self.ids).fill_null(-1).to_numpy().astype(np.int64) + 1
        )
        return rows


def _descriptions(
    folder: Path, train: Path, rows: RawColumns
) -> dict[str, _Descriptions]:
    """Reads users.parquet and items.parquet if they exist; returns them by ``user_id`` and ``item_id``.

    Args:
        folder: folder of the files.
        train: file of the training rows, for messages.
        rows: raw columns of the training rows.
    """
    descriptions: dict[str, _Descriptions] = {}
    for name, key in _NAMES.items():
        path = folder / f"{name}s.parquet"
        if not path.exists():
            continue
        if key not in rows:
            raise DataError(
                f"{path}: describes {name}s, and {train.name} has no column '{name}' (it has {listed(rows)}); write "
                "the ids there, or leave this file out"
            )
        words = spelled(path, {key: (key, name)})
        ids = read_ids(path, words, "describes nothing")
        check_described(path, words[key], ids[key].to_numpy(zero_copy_only=False))
        _, ids = same_types({train: {key: rows[key]}, path: ids})
        file = read_columns(path)
        other_names: set[str] = set()
        for about in descriptions.values():
            other_names.update(about.features.columns)
        table: dict[str, pa.Array] = {}
        for word in file.column_names:
            if word == words[key]:
                continue
            short = word.replace(".", "_")
            if short in other_names:
                # Users and items both have it, and a batch has one column of a name.
                short = f"{name}_{short}"
            if short in _RESERVED:
                raise DataError(
                    f"{path}: column '{short}' has a meaning of its own in the rows; rename it here"
                )
            if short in table:
                raise DataError(
                    f"{path}: two columns are '{short}', of which one is written '{word}'; rename one"
                )
            table[short] = raw_column(path, word, file.column(word))
        # Row 0 is for the ids that the file does not have.
        features = side_features(np.arange(1, len(file) + 1), table, len(file) + 1)
        # A file of ids alone, or of names and titles, describes nothing.
        if features.words.names:
            descriptions[key] = _Descriptions(name, path, ids[key], table, features)
    return descriptions


def _without_described(
    path: Path, columns: RawColumns, descriptions: Mapping[str, _Descriptions]
) -> dict[str, pa.Array]:
    """Drops the raw columns repeated in a file of users or items.

    Raises:
        DataError: a row says something else of its user or item than that file.
    """
    row_columns = dict(columns)
    for key, about in descriptions.items():
        file_rows = about.rows_of(columns[key])
        for name in about.words.sources(about.words.names):
            if name not in row_columns:
                continue
            row_values = row_columns.pop(name)
            # Null for an id that the file does not have, and so equal to nothing.
            file_values = about.table[name].take(
                pa.array(file_rows - 1, mask=file_rows == 0)
            )
            wrong = pc.and_(
                row_values.is_valid(),
                pc.invert(_equal(row_values, _plain(file_values))),
            )
            row = wrong.index(True).as_py()
            if row >= 0:
                says = f"says {file_values[row].as_py()}"
                if not file_rows[row]:
                    says = f"does not have that {about.name}"
                raise DataError(
                    f"{path}: column '{name}', row {row}: {row_values[row].as_py()} for {about.name} "
                    f"{columns[key][row].as_py()}, and {about.path.name} {says}; leave the column out of one of the "
                    "files, or rename it in this one where it describes the event"
                )
    return row_columns


def _equal(first: pa.Array, second: pa.Array) -> pa.Array:
    """Compares two arrays value by value: numbers by value, all else in one type only."""
    if _is_number(first) and _is_number(second):
        first = first.cast(pa.float64(), safe=False)
        second = second.cast(pa.float64(), safe=False)
    if first.type != second.type:
        return pa.array(np.zeros(len(first), bool))
    return pc.equal(first, second).fill_null(False)


def _columns_of_owner(
    config: LabelledConfig, rows: RawColumns, words: RowContext, owner: str
) -> tuple[str, ...]:
    """Returns the columns made for the ``owner``, user or item, chosen by their names or the settings."""
    setting_names = [
        name.replace(".", "_") for name in getattr(config, f"{owner}_features")
    ]
    if unknown := [
        name for name in setting_names if name not in rows or name in _RESERVED
    ]:
        article = "an" if owner == "item" else "a"
        raise DataError(
            f"data.{owner}_features={','.join(setting_names)}: the rows of '{config.name}' have no column "
            f"{unknown[0]} that could describe {article} {owner}; they have {listed(rows)}"
        )
    names = [name for name in rows if name not in _RESERVED]
    return words.derived(owned_columns(owner, names, setting_names))


def _fill_outside(column: Column, mask: NDArray[np.bool_], filler: float) -> Column:
    """Replaces the rows outside ``mask`` by ``filler``, or by empty bags."""
    if not column.ragged:
        return Column(np.where(mask, column.values, filler).astype(column.values.dtype))
    starts, stops = column.windows
    return column.windowed(starts, np.where(mask, stops, starts))


def _words(
    raw: Mapping[str, RawColumns], *, is_preprocessed: bool
) -> tuple[dict[str, int], RowContext]:
    """Fits the mapping of all columns but the label to the training rows.

    Args:
        raw: raw columns by part.
        is_preprocessed: a preprocessor wrote the rows: 0 stands for a user or an item that it does not know.

    Returns:
        N of each column whose ids are 0 to N - 1 in all parts together, and the mapping of the other columns.
    """
    sizes: dict[str, int] = {}
    inputs: dict[str, pa.Array] = {}
    for name, column in raw["train"].items():
        inputs[name] = column
        if not pa.types.is_integer(column.type):
            continue
        if is_preprocessed and name in _NAMES.values():
            # Not a value of the vocabulary: 0 in a held-out row becomes the unknown,
            # too.
            inputs[name] = pc.if_else(
                pc.equal(column, 0), pa.scalar(None, column.type), column
            )
            continue
        ids = np.unique(
            np.concatenate(
                [columns[name].drop_null().to_numpy() for columns in raw.values()]
            )
        )
        if len(ids) and ids[0] == 0 and ids[-1] == len(ids) - 1:
            # They are table rows as they are, without a vocabulary.
            sizes[name] = len(ids)
            del inputs[name]
    del inputs["label"]
    filled: set[str] = set()
    for columns in raw.values():
        filled.update(name for name in inputs if columns[name].null_count)
    return sizes, RowContext.fit(inputs, filled=filled)


def _numbered(
    columns: RawColumns, sizes: Mapping[str, int], words: RowContext
) -> Chunk:
    """Maps the raw columns of a part; a missing id of a column in ``sizes`` is the row after the last."""
    ids = {
        name: Column(columns[name].fill_null(size).to_numpy())
        for name, size in sizes.items()
    }
    return Chunk(
        {
            **ids,
            **words.transform(columns),
            "label": Column(columns["label"].to_numpy()),
        }
    )


def _untrained_unknown(rows: Chunk, train: Chunk, unknown: Mapping[str, int]) -> Chunk:
    """Replaces ids without a training row by the column's row in ``unknown``."""
    return rows.with_columns(
        {
            name: rows[name].restricted(train[name].values, row)
            for name, row in unknown.items()
        }
    )


def _files(folder: Path) -> dict[str, Path]:
    """Returns the file of each part that has one, in the order of the parts."""
    files = {}
    for part, names in _FILES.items():
        paths = [folder / name for name in names if (folder / name).exists()]
        if paths:
            files[part] = paths[0]
    return files


def _read(path: Path) -> dict[str, pa.Array]:
    """Reads the raw columns under our names; labels and fractions as float32, True and False as 1 and 0."""
    table = read_columns(path)
    if "label" not in table.column_names:
        raise DataError(
            f"{path}: column 'label' is missing, the file has {table.column_names}; add it, as in docs/recipes.md"
        )
    columns: dict[str, pa.Array] = {}
    for name in table.column_names:
        # Tables are named like their columns, and a module's name has no dot.
        role = _NAMES.get(name, name.replace(".", "_"))
        if role in columns:
            raise DataError(
                f"{path}: two columns are '{role}', of which one is written '{name}'; rename one"
            )
        convert = raw_ids if role in _NAMES.values() else raw_column
        column = convert(path, name, table.column(name))
        if is_list_type(column.type):
            raise DataError(
                f"{path}: column '{name}' holds lists; must be one value per row: leave it out"
            )
        columns[role] = _plain(column)
    columns["label"] = _labels(path, columns["label"])
    return columns


def _plain(column: pa.Array) -> pa.Array:
    """Returns a raw column with True and False as 1 and 0, and fractions of 32 bits."""
    if pa.types.is_boolean(column.type):
        return column.cast(pa.int64())
    if pa.types.is_floating(column.type):
        # Rounded to 32 bits, so that a number compares equal in files of 32 and of 64
        # bits.
        return column.cast(pa.float32()).cast(pa.float64())
    return column


def _labels(path: Path, column: pa.Array) -> pa.Array:
    # Of text or times, the first label is wrong already.
    row = 0
    if _is_number(column):
        column = column.cast(pa.float64(), safe=False)
        row = pc.invert(pc.is_in(column, pa.array([0.0, 1.0]))).index(True).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column 'label', row {row}: {column[row].as_py()}; must be 0 or 1"
        )
    return column.cast(pa.float32())


def _is_number(column: pa.Array) -> bool:
    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def without_context(data: LabelledData) -> LabelledData:
    """Returns the rows with the same context in all of them: id 0, 0.0 and no time; users' and items' columns stay."""
    described = (*data.user_features, *data.item_features)
    names = [name for name in (*data.context, *data.dense) if name not in described]
    times = [name for name in data.words.sources(names) if name in data.words.times]

    def cleared(chunk: Chunk) -> Chunk:
        columns = {}
        for name in names:
            columns[name] = Column(
                np.zeros_like(chunk[name].values), chunk[name].offsets
            )
        for name in times:
            columns[name] = Column(np.full_like(chunk[name].values, MISSING_TIME))
        return chunk.with_columns(columns)

    # The best figures are those of a prediction that knows the context.
    return dataclasses.replace(
        data,
        train=cleared(data.train),
        validation=cleared(data.validation),
        test=cleared(data.test),
        best={},
    )
