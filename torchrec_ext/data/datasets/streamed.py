"""StreamedData: the folder that rec.data.preprocess writes, of any size, read a row group at a time.

labelled_rows_of(), interactions_of(): the same rows in memory, for the recipes that keep theirs there.

planted_folder(), planted_log_folder(): such a folder with generated rows whose right answer is known.
"""

from __future__ import annotations

import json
import multiprocessing.util
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import (
    Array,
    Chunk,
    Column,
    Int64,
    Windows,
    concatenate_rows,
)
from torchrec_ext.data.datasets.catalog import (
    FOLDER_VARIABLE,
    DatasetUnavailable,
    data_folder,
)
from torchrec_ext.data.datasets.config import NAMES, PARTS, PLANTED, StreamConfig
from torchrec_ext.data.datasets.features import (
    TowerColumns,
    columns_by_tower,
    owned_columns,
    vocabulary_of,
)
from torchrec_ext.data.datasets.folder import PREPROCESSOR
from torchrec_ext.data.datasets.interactions import InteractionData, Pairs
from torchrec_ext.data.datasets.labelled import (
    LabelledData,
    planted_context,
    without_context,
)
from torchrec_ext.data.datasets.synthetic import best_prediction, planted_log
from torchrec_ext.data.files.arrow import Kind, as_arrow
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    History,
    Vocabulary,
)
from torchrec_ext.data.preprocess.fitted import DIGEST
from torchrec_ext.data.preprocess.history import GAPS
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

SUMMARY = "summary.json"
# Some training rows as a request has them.
RAW_REQUESTS = "raw/requests.parquet"
# A row for each item, its columns as in the log.
RAW_ITEMS = "raw/items.parquet"
# A row for each user: the user's columns and latest events as a request has them.
RAW_USERS = "raw/users.parquet"
_KINDS: dict[str, tuple[Kind, ...]] = {
    "int64": ("int",),
    "list<int64>": ("ints",),
    "float32": ("float",),
}
# Kinds of labels and weights.
_NUMBERS: tuple[Kind, ...] = ("int", "float", "bool")
# Rows of a row group of generated data: a small set still has several groups.
_GROUP_ROWS = 8_192


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The special columns of preprocessed rows, beside their features.

    Args:
        label: column of the labels, 0 to 1; empty if every row is a positive.
        tasks: further columns of labels, of tasks that are learned together with the label.
        weight: column of a weight for each row, or None.
        user: column of the users' ids, or None.
        item: column of the items' ids, or None.
        user_features: further columns that are the user's, beside those whose names begin with ``user_``.
        item_features: further columns that are the item's, beside those whose names begin with ``item_``.
    """

    label: str
    tasks: Sequence[str] = ()
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


class _LabelSums(NamedTuple):
    """Sums of weights over a split, for the label and each task: of positives, and of those with label 1; of all rows.

    ``every`` (T,), ``clicked`` (T,), ``total``.
    """

    every: list[float]
    clicked: list[float]
    total: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedData:
    """Preprocessed rows on disk, split for training and evaluation.

    Args:
        name: name by which the set was loaded.
        splits: files of each split: ``train``, ``test`` and, if there is one, ``validation``.
        preprocessor: the preprocessing that made the rows; a request's rows go through it.
        roles: columns of label, weight, user and item.
        folder: the folder with the rows.
        ranked: greatest number of held-out rows for which the catalogue is ranked.
        best: figures of the best possible prediction, if known (generated data).
        temporary: a temporary folder that lives as long as the data, or None.
    """

    name: str
    splits: Mapping[str, ParquetSource]
    preprocessor: FittedPreprocessor
    roles: Roles
    folder: Path
    ranked: int = 0
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
            if name not in (self.roles.label, self.roles.weight)
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
    def towers(self) -> TowerColumns:
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
        return columns_by_tower(
            ("user", "context", "item"), self.features, self.dense, owners
        )

    def chunks(self, split: str, names: Sequence[str]) -> Iterator[Chunk]:
        """Yields the columns ``names`` of a split, a part of a row group at a time, in the order of the files."""
        source = self.splits[split]
        for group in source.groups:
            # In parts, because a row group may be larger than the memory.
            yield from source.parts(group, list(names), 0, 1 << 16)

    def clicked(self, *names: str) -> Iterator[Chunk]:
        """Yields columns of the training rows with a label above 0, or of all of them if the rows have no labels."""
        label = self.roles.label
        if not label:
            yield from self.chunks("train", names)
            return
        for chunk in self.chunks("train", [*names, label]):
            yield chunk.take(np.flatnonzero(chunk[label].values > 0))

    @cached_property
    def positives(self) -> dict[str, tuple[float, float]]:
        """The weight of each split's rows as positives, and of all of them, by split; reads the labels of all rows.

        Raises:
            DataError: all rows of a split have weight 0.
        """
        return {
            split: (sums.every[0], sums.total)
            for split, sums in self._label_sums.items()
        }

    @property
    def task_positives(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The weight of the positives of each task, among all rows and among the rows with label 1.

        By split and by task, the label being the first; see :attr:`positives`.
        """
        names = [self.roles.label, *self.roles.tasks]
        positives = {}
        for split, sums in self._label_sums.items():
            pairs = zip(sums.every, sums.clicked, strict=True)
            positives[split] = dict(zip(names, pairs, strict=True))
        return positives

    @cached_property
    def _label_sums(self) -> dict[str, _LabelSums]:
        """The weights of positives and of all rows, by split; reads the labels of all rows."""
        names = [self.roles.label, *self.roles.tasks]
        weight = self.roles.weight
        columns = [*names, weight] if weight else names
        sums = {}
        for split, source in self.splits.items():
            every = np.zeros(len(names))
            clicked = np.zeros(len(names))
            total = 0.0
            for chunk in self.chunks(split, columns):
                labels = np.stack(
                    [chunk[name].values.astype(np.float64) for name in names]
                )
                weights = np.ones(chunk.num_rows)
                if weight:
                    weights = chunk[weight].values.astype(np.float64)
                every += (labels * weights).sum(1)
                clicked += (labels * labels[0] * weights).sum(1)
                total += float(weights.sum())
            if not total > 0:
                raise DataError(
                    f"{source.files[0].name}: column '{weight}' is 0 in all {source.num_rows:,} rows of split "
                    f"'{split}'; give each row that counts a weight above 0"
                )
            sums[split] = _LabelSums(every.tolist(), clicked.tolist(), total)
        return sums

    def share(self, split: str) -> float:
        """Returns the weighted share of positives among the rows of a split, never quite 0 or 1."""
        return positive_share(*self.positives[split])

    @property
    def item_key(self) -> str | None:
        """Name of the column of the items, or None."""
        return self.roles.item

    @cached_property
    def popularity(self) -> Int64:
        """The number of training rows with a label above 0 of each row of the items' table, (V,); reads all of them.

        Raises:
            ValueError: the preprocessing names no item.
        """
        item = self._item()
        counts = np.zeros(self.vocab[item], np.int64)
        for rows in self.clicked(item):
            counts += np.bincount(rows[item].values, minlength=len(counts))
        return counts

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue: those that a training row has."""
        return len(self.items[0])

    def _item(self) -> str:
        if self.roles.item is None:
            raise ValueError(
                f"set '{self.name}': its preprocessing names no item column"
            )
        return self.roles.item

    @cached_property
    def items(self) -> tuple[Int64, Chunk]:
        """The catalogue: the rows of the items that training read, (I,), and by row of the item's table its columns.

        An item's columns are those of its last training row; rows of no item hold those of some item. The item's column
        of all training rows is read, and its other columns a second time.

        Raises:
            ValueError: the preprocessing names no item.
            DataError: no training row has a known item, or an id is no row of its table.
        """
        item = self._item()
        last = self._last_rows(item)
        item_rows: Int64 = 1 + np.flatnonzero(last[1:] >= 0)
        if not len(item_rows):
            raise DataError(
                f"{self.folder}: column '{item}' is 0, the unknown item, in all training rows; lower min_count of its "
                "Categorify"
            )
        rows = np.sort(last[item_rows])
        pieces = []
        start = 0
        features, dense = self.towers["item"]
        names = list(dict.fromkeys([item, *features, *dense]))
        for chunk in self.chunks("train", names):
            low, high = rows.searchsorted([start, start + chunk.num_rows])
            piece = chunk.take(rows[low:high] - start)
            # By value, since windows would keep all lists of the chunk in memory.
            pieces.append(
                {
                    name: Column(piece[name].values, piece[name].offsets)
                    for name in names
                }
            )
            start += chunk.num_rows
        table = concatenate_rows(pieces, names)
        ids = np.arange(self.vocab[item])
        nearest = item_rows[np.minimum(item_rows.searchsorted(ids), len(item_rows) - 1)]
        return item_rows, table.take(rows.searchsorted(last[nearest])).with_columns(
            {item: Column(ids)}
        )

    def _last_rows(self, name: str) -> Int64:
        """Returns the number of the last training row of each id of a column, (V,); -1 for an id without one."""
        last = np.full(self.vocab[name], -1)
        start = 0
        for chunk in self.chunks("train", [name]):
            ids = chunk[name].values
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(last):
                raise DataError(
                    f"{self.folder}: column '{name}' has ids of {ids.min()} to {ids.max()}, and its vocabulary rows 0 "
                    f"to {len(last) - 1}: the rows and the preprocessor are of two runs; preprocess the log again"
                )
            # numpy keeps the last value that is assigned to an index, so each id gets
            # its last row.
            last[ids] = np.arange(start, start + len(ids))
            start += len(ids)
        return last


def positive_share(positive: float, total: float) -> float:
    """Returns the share of ``positive`` in ``total``, never quite 0 or 1."""
    # Half a row: a share of 0 or 1 would have an infinite log loss and log-odds.
    least = 0.5 / (total + 1)
    return min(max(positive / total if total else 0.0, least), 1 - least)


def _places(name: str, root: str | None) -> list[Path]:
    """Returns the folders that a name may mean: in ``root`` if given, else its own path, or in the default root."""
    inside = data_folder(name, root)
    if root or inside is None:
        return [inside or Path(name)]
    return [Path(name), inside]


def prepared_folder(name: str, root: str | None) -> Path | None:
    """Finds a folder of preprocessed rows by name, in ``root`` or else a path; None if there is none.

    Files train.parquet or inter.parquet beside the rows are a set of their own, which is read instead.
    """
    # A known set is read by its own loader, whatever folder of this name lies where the
    # command runs.
    if name in (*NAMES, "frappe"):
        return None
    for folder in _places(name, root):
        if not (folder / "train").is_dir():
            continue
        if (
            not (folder / "train.parquet").exists()
            and not (folder / "inter.parquet").exists()
        ):
            return folder
    return None


def load_streamed(
    config: StreamConfig,
    *,
    labels: bool = True,
    generate: Callable[..., dict[str, float]] | None = None,
) -> StreamedData:
    """Opens the preprocessed rows named by ``config``; only metadata are read.

    Args:
        config: settings that name the folder.
        labels: the rows must have labels.
        generate: function that writes generated rows into an empty folder and returns the best possible figures;
            :func:`planted_folder` by default.

    Raises:
        DatasetUnavailable: the folder is not on this machine.
        DataError: the folder is not one that rec.data.preprocess wrote, or its files contradict it.
    """
    if config.name == PLANTED:
        # Removed with the data, which keep it, or when the process ends.
        temporary_folder = tempfile.TemporaryDirectory(prefix="torchrec_ext-planted-")
        # Processes that multiprocessing starts end without `atexit`, by which the folder
        # would be removed.
        multiprocessing.util.Finalize(
            temporary_folder, _remove, (temporary_folder.name,), exitpriority=0
        )
        folder = Path(temporary_folder.name)
        write = generate or planted_folder
        best = write(folder, seed=config.seed)
        return _open(folder, config, labels, best=best, temporary=temporary_folder)
    places = _places(config.name, config.folder)
    found = next(filter(Path.is_dir, places), None)
    if found is None:
        place = f"and neither data.folder nor {FOLDER_VARIABLE} has it"
        if config.folder:
            place = str(places[0])
        raise DatasetUnavailable(
            f"data.name={config.name}: there is no such folder, {place}; write one from your log by `torchx run "
            f"rec.data.preprocess --recipe ... -- --out {places[-1]}`, or use generated rows: data.name={PLANTED}"
        )
    return _open(found, config, labels)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _open(
    folder: Path, config: StreamConfig, labels: bool, **details: Any
) -> StreamedData:
    path = folder / SUMMARY
    if not path.is_file() or not (folder / PREPROCESSOR).is_dir():
        missing = SUMMARY if not path.is_file() else f"{PREPROCESSOR}/"
        raise DataError(
            f"{folder}: has no {missing}, so rec.data.preprocess did not write it; give the folder that its --out "
            "names, or preprocess these files first"
        )
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(
            f"{path}: is damaged ({error}); preprocess the log again"
        ) from None
    preprocessor = FittedPreprocessor.load(folder / PREPROCESSOR)
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise DataError(
                f"{folder}: has no split '{split}' (it has {', '.join(summary['rows'])}); name the splits of the "
                "preprocessing recipe train, test and, for early stopping, validation"
            )
    roles = _roles(folder, summary, preprocessor, labels)
    for name, kind in preprocessor.outputs.items():
        if kind == "list<float32>" and name not in preprocessor.keep:
            raise DataError(
                f"{folder}: column '{name}' is {kind}, of which no tower can be made; pool it to numbers, or bucket "
                "it to ids, in the preprocessing recipe"
            )
    return StreamedData(
        name=config.name,
        splits={
            split: ParquetSource(folder / split)
            for split in PARTS
            if (folder / split).is_dir()
        },
        preprocessor=preprocessor,
        roles=roles,
        folder=folder,
        ranked=config.ranked,
        **details,
    )


def _roles(
    folder: Path,
    summary: Mapping[str, Any],
    preprocessor: FittedPreprocessor,
    labels: bool,
) -> Roles:
    """Reads the columns' roles from the summary; an older one has none, and its label is the column ``label``."""
    saved_roles = summary.get("roles", {})
    roles = {**saved_roles, "label": saved_roles.get("label") or "label"}
    for name in saved_roles.get("tasks", ()):
        if name not in preprocessor.keep:
            raise DataError(
                f"{folder}: task '{name}' is no column of its rows, which keep {listed(preprocessor.keep)}; set "
                "Prepared.tasks and Preprocessor(keep=[...]), and preprocess the log again"
            )
    if roles["label"] not in preprocessor.outputs:
        if labels:
            raise DataError(
                f"{folder}: its rows have no label: the preprocessing recipe names none that it keeps (it keeps "
                f"{listed(preprocessor.keep) or 'nothing'}); set Prepared.label and Preprocessor(keep=[...])"
            )
        roles["label"] = ""
    return Roles(**roles)


def _all_rows(data: StreamedData, split: str) -> Chunk:
    """Reads all rows of a split: ids, numbers and labels; no rows if the folder has no such split."""
    names = [*data.features, *data.dense]
    if data.roles.label:
        names.append(data.roles.label)
    if split not in data.splits:
        # No rows, with the columns that rows have.
        return _all_rows(data, "train").slice(0, 0)
    return concatenate_rows(list(data.chunks(split, names)), names)


def labelled_rows_of(data: StreamedData, *, context: bool = True) -> LabelledData:
    """Reads preprocessed rows with labels into memory.

    Args:
        data: rows on disk, with any columns; user and item, if there are such, are ``user_id`` and ``item_id``.
        context: see :class:`LabelledConfig`.

    Raises:
        DataError: user or item have another name, a label is neither 0 nor 1, or the rows have weights.
    """
    _check_names(data)
    chunks = {split: _all_rows(data, split) for split in PARTS}
    for split, rows in chunks.items():
        labels = rows[data.roles.label].values
        wrong = ~np.isin(labels, (0, 1))
        if wrong.any():
            raise DataError(
                f"{data.folder}: column '{data.roles.label}', row {int(wrong.argmax())} of {split}: "
                f"{labels[wrong][0]}; must be 0 or 1 in a recipe that keeps its rows in memory: take --recipe stream"
            )
        chunks[split] = rows.with_columns({"label": Column(labels.astype(np.float32))})
    described = {}
    for tower in ("user", "item"):
        features, dense = data.towers.get(tower, ((), ()))
        described[tower] = tuple(
            name for name in (*features, *dense) if name != getattr(data.roles, tower)
        )
    labelled = LabelledData(
        name=data.name,
        train=chunks["train"],
        validation=chunks["validation"],
        test=chunks["test"],
        vocab={name: data.vocab[name] for name in data.features},
        context=tuple(data.towers.get("context", ((), ()))[0]),
        dense=data.dense,
        user_features=described["user"],
        item_features=described["item"],
        # Where LabelledData would take the last row: a preprocessor's unknown value has
        # id 0.
        oov_ids=dict.fromkeys(data.features, 0),
        prepared=data,
    )
    return labelled if context else without_context(labelled)


def _check_names(data: StreamedData) -> None:
    """Refuses names and weights not supported by recipes with rows in memory."""
    for role, expected_name in (("user", "user_id"), ("item", "item_id")):
        name = getattr(data.roles, role)
        if name not in (None, expected_name):
            raise DataError(
                f"{data.folder}: the {role}'s column is '{name}', and this recipe reads '{expected_name}'; write "
                f"output='{expected_name}' to its step in the preprocessing recipe, or take --recipe stream"
            )
    if data.roles.weight:
        raise DataError(
            f"{data.folder}: its rows have weights, '{data.roles.weight}', which this recipe does not read; leave "
            "Prepared.weight out, or take --recipe stream"
        )


def interactions_of(data: StreamedData) -> InteractionData:
    """Reads the positives among preprocessed rows into memory: those with label 1, or all if there are no labels.

    A row keeps the columns that the preprocessing made of it, such as its history. Training rows of an unknown user or
    item are left out with a warning; a held-out item that is unknown counts as missed. Each held-out row is a question
    of its own.

    Raises:
        DataError: the preprocessing names no user or no item, an item has no training row, or no row is a positive.
    """
    roles = data.roles
    if roles.user is None or roles.item is None:
        raise DataError(
            f"{data.folder}: this recipe ranks, and its preprocessing names no user or no item; set "
            "Prepared(user=..., item=...), or take --recipe stream"
        )
    _check_names(data)
    rows = {split: _positives(data, split) for split in PARTS}
    item_rows, table = data.items
    if len(item_rows) < table.num_rows - 1:
        raise DataError(
            f"{data.folder}: {table.num_rows - 1 - len(item_rows):,} rows of '{roles.item}' are no item's: its ids are "
            "hashed, or the first split is not the training rows; take Categorify for the item, or --recipe "
            "stream"
        )
    positives = rows["train"]
    is_known = (positives["user_id"].values > 0) & (positives["item_id"].values > 0)
    training_rows = positives.take(np.flatnonzero(is_known))
    if left_out := positives.num_rows - training_rows.num_rows:
        warnings.warn(
            f"{data.folder}: {left_out:,} of {positives.num_rows:,} positives for training have an unknown user or "
            "item, and are left out; a lower min_count of the preprocessing knows more of them",
            stacklevel=2,
        )
    if not training_rows.num_rows:
        raise DataError(
            f"{data.folder}: no training row is a positive: with label 1, and a known user and item"
        )
    outside = len(item_rows) + 1
    for split in ("validation", "test"):
        ids = rows[split]["item_id"].values
        # An unknown item becomes one outside the catalogue, so that a model cannot find
        # it.
        rows[split] = rows[split].with_columns(
            {"item_id": Column(np.where(ids > 0, ids, outside))}
        )
    # The row outside has the columns of row 0, the unknown item.
    items = concatenate_rows([table, table.take(np.zeros(1, np.int64))], table)
    pairs = Pairs(training_rows["user_id"].values, training_rows["item_id"].values)
    vocab: dict[str, int] = {}
    for features, _ in data.towers.values():
        vocab |= {name: data.vocab[name] for name in features}
    return InteractionData(
        name=data.name,
        train=training_rows,
        validation=rows["validation"],
        test=rows["test"],
        items=items,
        vocab=vocab,
        dense=data.dense,
        known=pairs,
        liked=Column.grouped(pairs.items, pairs.users, data.vocab["user_id"]),
        user_ids=_values_of(data.preprocessor, "user_id", data.vocab["user_id"]),
        item_ids=_values_of(data.preprocessor, "item_id", items.num_rows),
        outside=1,
        prepared=data,
    )


def _positives(data: StreamedData, split: str) -> Chunk:
    rows = _all_rows(data, split)
    label = data.roles.label
    if not label:
        return rows
    return rows.take(np.flatnonzero(rows[label].values > 0))


def _values_of(preprocessor: FittedPreprocessor, name: str, rows: int) -> Array | None:
    """Returns (rows,) the log's value of each row of a column's table; None if a hash made the rows."""
    state = preprocessor.state_of(name)
    if not isinstance(state, Vocabulary):
        return None
    values: Array = state.values.to_numpy(zero_copy_only=False)
    # Before the values stands that of row 0, the unknown; after them that of the row
    # outside the catalogue.
    nobody = np.array([None], object) if values.dtype == object else np.array([-1])
    return np.concatenate([nobody, values, nobody])[:rows]


def planted_folder(
    folder: Path, *, seed: int = 0, rows: int = 60_000
) -> dict[str, float]:
    """Writes the rows of :func:`planted_context` as rec.data.preprocess would, and returns the best possible figures.

    Args:
        folder: an empty folder.
        seed: seed of the generator.
        rows: number of rows of all splits together.
    """
    data = planted_context(rows=rows, seed=seed)
    numbers = ("label", "weight")
    names = [name for name in data.train if name not in numbers]
    pairs = [
        (Categorify(column=name), vocabulary_of(data.trained(name))) for name in names
    ]
    raw = dict.fromkeys(names, "int64") | dict.fromkeys(numbers, "float32")
    fitted = FittedPreprocessor.of(pairs, raw, numbers)
    rows_of = {}
    for split in PARTS:
        chunk: Chunk = getattr(data, split)
        rows_of[split] = {name: chunk[name].values for name in (*names, *numbers)}
    requests = data.train.slice(0, 1_000)
    tables = {
        RAW_REQUESTS: pa.table({name: requests[name].values for name in names}),
        RAW_ITEMS: pa.table({"item_id": data.trained("item_id")}),
        RAW_USERS: pa.table({"user_id": data.trained("user_id")}),
    }
    roles = {"label": "label", "weight": None, "user": "user_id", "item": "item_id"}
    _write_planted(folder, fitted, rows_of, tables, roles)
    return dict(data.best)


def _write_planted(
    folder: Path,
    fitted: FittedPreprocessor,
    splits: Mapping[str, Mapping[str, Any]],
    raw_tables: Mapping[str, pa.Table],
    roles: Mapping[str, Any],
) -> None:
    """Writes rows as rec.data.preprocess would, made of requests' rows by split, and raw tables by their path."""
    fitted.save(folder / PREPROCESSOR)
    counts = {}
    for split, rows in splits.items():
        columns = fitted.online(rows)
        (folder / split).mkdir()
        table = pa.table({name: as_arrow(column) for name, column in columns.items()})
        path = folder / split / "part-00000.parquet"
        pq.write_table(
            table, path, row_group_size=_GROUP_ROWS, write_page_checksum=True
        )
        counts[split] = len(table)
    (folder / "raw").mkdir()
    for name, table in raw_tables.items():
        pq.write_table(table, folder / name)
    (folder / SUMMARY).write_text(
        json.dumps({"recipe": PLANTED, "rows": counts, "roles": roles}) + "\n"
    )


def planted_log_folder(
    folder: Path, *, seed: int = 0, sessions: bool = True
) -> dict[str, float]:
    """Writes the rows of :func:`planted_log` as the preprocessing recipe taobao would, with one drawn item a click.

    Args:
        folder: an empty folder.
        seed: seed of the generator.
        sessions: whether the latest clicks tell the next one. Otherwise the user alone does, so a model that reads a
            session as a bag can be as good as any.

    Returns:
        The best possible figures of the labels ``click`` and ``conversion`` on the test rows.
    """
    follows, favourite = (0.7, 0.6) if sessions else (0.0, 0.8)
    log = planted_log(
        users=150, items=120, visits=20, follows=follows, favourite=favourite, seed=seed
    )
    length = 10
    columns = log.columns
    size = len(log.bought)
    rng = np.random.default_rng([seed, 1])
    # Two rows for each click: the clicked item, and one that is drawn uniformly.
    clicks = np.arange(size).repeat(2)
    shown_items = columns["item_id"][clicks]
    shown_items[1::2] = rng.integers(1, int(shown_items.max()) + 1, size)
    click = np.tile(np.array([1.0, 0.0]), size)
    # A drawn item that is the clicked one would have both labels, so its row is
    # dropped.
    mask = (click > 0) | (shown_items != columns["item_id"][clicks])
    clicks = clicks[mask]
    shown_items = shown_items[mask]
    click = click[mask]
    categories = int(columns["category_id"].max()) + 1
    rows: dict[str, Any] = {
        "user_id": columns["user_id"][clicks],
        "timestamp": columns["timestamp"][clicks],
        "item_id": shown_items,
        "category_id": shown_items % categories,
        "click": click,
        "conversion": click * log.bought[clicks],
        "weight": 1.0 + shown_items % 2,
    }
    rows |= _past(columns, clicks, length)
    # By time, since the log is in its order.
    cuts = [0, int(0.8 * len(clicks)), int(0.9 * len(clicks)), len(clicks)]
    splits = {}
    for split, start, stop in zip(PARTS, cuts[:-1], cuts[1:], strict=True):
        splits[split] = {name: values[start:stop] for name, values in rows.items()}
    steps = (
        History(
            user="user_id",
            item="item_id",
            time="timestamp",
            length=length,
            also=("category_id",),
            gaps=GAPS,
        ),
        Categorify(column="item_id", also=("history",)),
        Categorify(column="category_id", also=("history_category_id",)),
        Categorify(column="user_id"),
    )
    vocabularies = [
        vocabulary_of(np.unique(splits["train"][step.writes[0]])) for step in steps[1:]
    ]
    labels = ("click", "conversion")
    numbers = (*labels, "weight")
    raw = dict.fromkeys(columns, "int64") | dict.fromkeys(numbers, "float32")
    fitted = FittedPreprocessor(
        steps=steps, keep=numbers, raw=raw, states=({}, *vocabularies)
    )
    names = fitted.request_columns
    # A request lists its candidates separately, so its rows have no item.
    requests = {
        name: splits["train"][name][-1_000:]
        for name in names
        if name not in ("item_id", "category_id")
    }
    training_items = np.unique(splits["train"]["item_id"])
    roles = {
        "label": labels[0],
        "tasks": labels[1:],
        "user": "user_id",
        "item": "item_id",
        "user_features": ["history", "history_category_id", "history_gap"],
        "item_features": ["category_id"],
    }
    users, last = np.unique(columns["user_id"][::-1], return_index=True)
    latest = _past(columns, size - 1 - last, length, itself=1)
    is_training_user = np.isin(users, splits["train"]["user_id"])
    raw_tables = {
        RAW_REQUESTS: pa.table(requests),
        RAW_ITEMS: pa.table(
            {"item_id": training_items, "category_id": training_items % categories}
        ),
        RAW_USERS: pa.table({"user_id": users, **latest}).filter(
            pa.array(is_training_user)
        ),
    }
    _write_planted(folder, fitted, splits, raw_tables, roles)
    test = slice(cuts[2], cuts[3])
    odds = log.odds(clicks[test], shown_items[test])
    click_chance = odds / (1 + odds)
    chances = {
        "click": click_chance,
        "conversion": click_chance * log.buys(shown_items[test]),
    }
    # Those of the click stand under their plain names, too, since the click is the
    # label.
    best = best_prediction(click_chance, click_chance, click[test])
    for name, chance in chances.items():
        for figure, value in best_prediction(chance, chance, rows[name][test]).items():
            best[f"{name}_{figure}"] = value
    return best


def _past(
    columns: Mapping[str, Int64], clicks: Int64, length: int, itself: int = 0
) -> dict[str, pa.Array]:
    """Lists each row's latest earlier clicks as a request does, a few more than are read.

    With ``itself=1`` the row's own click is the last of them.
    """
    users = columns["user_id"]
    # A user's clicks one after the other, in the order of time, and the place of each
    # click among them.
    order = np.argsort(users, kind="stable")
    place = np.argsort(order)[clicks]
    first = users[order].searchsorted(users[clicks])
    past = Column.from_windows(
        order, Windows(np.maximum(first, place - length - 2), place + itself)
    )
    sources = {"items": "item_id", "times": "timestamp", "category_id": "category_id"}
    histories = {}
    for name, column in sources.items():
        histories[f"history_{name}"] = as_arrow(
            Column(columns[column][past.values], past.offsets)
        )
    return histories
