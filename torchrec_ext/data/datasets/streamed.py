"""StreamedData: a prepared folder of any size, read a row group at a time.

interactions_of(): its positives in memory, for the recipes that draw negatives.
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

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.datasets.catalog import (
    FOLDER_VARIABLE,
    DatasetUnavailable,
    data_folder,
)
from torchrec_ext.data.datasets.config import CHECKERBOARD, PARTS, PLANTED, DataConfig
from torchrec_ext.data.datasets.features import (
    TowerColumns,
    columns_by_tower,
    owned_columns,
)
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.prepare import PREPROCESSOR as PREPROCESSOR
from torchrec_ext.data.datasets.prepare import RAW_ITEMS as RAW_ITEMS
from torchrec_ext.data.datasets.prepare import RAW_REQUESTS as RAW_REQUESTS
from torchrec_ext.data.datasets.prepare import RAW_USERS as RAW_USERS
from torchrec_ext.data.datasets.prepare import SUMMARY as SUMMARY
from torchrec_ext.data.datasets.prepare import Evaluation
from torchrec_ext.data.datasets.prepare import Roles as Roles
from torchrec_ext.data.datasets.splits import Pairs
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess import FittedPreprocessor, Vocabulary
from torchrec_ext.data.preprocess.fitted import DIGEST
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

# Values of a split that is held in memory: 512 MiB.
WHOLE_VALUES = 2**26
# What a row of a list column counts for: nobody knows its length before it is read.
_LIST_VALUES = 32
_KINDS: dict[str, tuple[Kind, ...]] = {
    "int64": ("int",),
    "list<int64>": ("ints",),
    "float32": ("float",),
}
# Kinds of labels and weights.
_NUMBERS: tuple[Kind, ...] = ("int", "float", "bool")


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
        evaluation: rule of a ranking of held-out positives.
        left_out: why a column of the files is not read, by its name.
        notes: what a reader should know of the rows, one line each.
        licence: terms of the publisher for users, or None.
        best: figures of the best possible prediction, if known (generated data).
        temporary: a temporary folder that lives as long as the data, or None.
    """

    name: str
    splits: Mapping[str, ParquetSource]
    preprocessor: FittedPreprocessor
    roles: Roles
    folder: Path
    ranked: int = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    licence: str | None = None
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
        """Yields the columns ``names`` of a split in the files' order: parts of row groups, or all of few rows."""
        rows = self.rows(split)
        if isinstance(rows, Chunk) and rows and {*names} <= {*rows}:
            yield rows.select(list(names))
            return
        source = self.splits[split]
        for group in source.groups:
            # In parts, because a row group may be larger than the memory.
            yield from source.parts(group, list(names), 0, 1 << 16)

    def rows(
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
        if source.num_rows * values > WHOLE_VALUES:
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
    # Rows are generated, whatever folder of this name lies where the command runs.
    if name in (PLANTED, CHECKERBOARD):
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
    config: DataConfig,
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
        # Imported here: it makes folders for this module to read.
        from torchrec_ext.data.datasets import synthetic

        temporary = temporary_folder()
        folder = Path(temporary.name)
        write = generate or synthetic.planted_folder
        best = write(folder, seed=config.seed)
        return open_prepared(
            folder, config, labels=labels, best=best, temporary=temporary
        )
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
    return open_prepared(found, config, labels=labels)


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
    folder: Path, config: DataConfig, *, labels: bool = True, **details: Any
) -> StreamedData:
    """Opens a prepared folder; only metadata are read.

    Args:
        folder: the folder.
        config: settings with the name of the set.
        labels: the rows must have labels.
        details: fields of :class:`StreamedData` in place of those of the folder.

    Raises:
        DataError: the folder is not one that rec.data.preprocess wrote, or its files contradict it.
    """
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
        **(_details(summary) | details),
    )


def _details(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a set tells of itself beside its columns; rec.data.preprocess writes nothing of it."""
    names = ("left_out", "notes", "licence", "best")
    details = {name: summary[name] for name in names if name in summary}
    if rule := summary.get("evaluation"):
        lists = {name: tuple(rule[name]) for name in ("at", "figures")}
        details["evaluation"] = Evaluation(**{**rule, **lists})
    return details


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
    names += filter(None, (data.roles.label, data.evaluation.candidates))
    if split not in data.splits:
        # No rows, with the columns that rows have.
        return _all_rows(data, "train").slice(0, 0)
    return concatenate_rows(list(data.chunks(split, names)), names)


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
    item_ids = _values_of(data.preprocessor, "item_id", items.num_rows)
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
        item_ids=item_ids,
        outside=1,
        titles=_titles(data, item_ids),
        licence=data.licence,
        best=data.best,
        evaluation=data.evaluation,
        prepared=data,
    )


def _titles(data: StreamedData, item_ids: Array | None) -> list[str] | None:
    """Returns the text of each row of the items' table; None if the set has no texts."""
    path = data.folder / RAW_ITEMS
    if item_ids is None or not path.exists():
        return None
    table = pq.read_table(path)
    if not {"title", str(data.roles.item)} <= {*table.column_names}:
        return None
    columns = (table[str(data.roles.item)], table["title"])
    texts = dict(zip(*(column.to_pylist() for column in columns), strict=True))
    return [texts.get(item) or f"item {item}" for item in item_ids.tolist()]


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
