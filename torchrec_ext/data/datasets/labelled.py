"""LabelledData: rows with a label and the context of the event: Frappe, a folder like it, or generated rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.datasets.catalog import DatasetUnavailable, data_folder
from torchrec_ext.data.datasets.config import LABELLED_LAYOUT
from torchrec_ext.data.datasets.config import LabelledConfig as LabelledConfig
from torchrec_ext.data.datasets.features import RowContext, check_finite, vocabulary_of
from torchrec_ext.data.datasets.folder import PREPROCESSOR
from torchrec_ext.data.files.arrow import as_int64
from torchrec_ext.data.files.parquet import read_parquet
from torchrec_ext.schema import DataError

PARTS = ("train", "validation", "test")
_FILES = {
    "train": ("train.parquet", "train_resampled.parquet"),
    "validation": ("validation.parquet",),
    "test": ("test.parquet",),
}
_NAMES = {"user": "user_id", "item": "item_id"}
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
        train: rows with ``user_id``, ``item_id``, the context and ``label``, 0 or 1.
        validation: held-out rows with the same columns.
        test: held-out rows with the same columns.
        vocab: number of rows that the table of each sparse column needs.
        context: names of the sparse columns beside user and item.
        dense: names of the dense columns, all of them context.
        licence: what the publisher asks of users, or None.
        best: figures of the best possible prediction where they are known (generated data).
        words: scales of the dense columns, and the row of each id in columns whose ids are not 0 to N - 1.
        oov_ids: maps a sparse column to the row of ids that no training row has; where not given row 0 of the columns
            that ``words`` maps, and the last row of the others.
    """

    name: str
    train: Chunk
    validation: Chunk
    test: Chunk
    vocab: Mapping[str, int]
    context: tuple[str, ...]
    dense: tuple[str, ...] = ()
    licence: str | None = None
    best: Mapping[str, float]
    words: RowContext = field(default_factory=RowContext)
    oov_ids: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {name: 0 if name in self.words.vocabularies else size - 1 for name, size in self.vocab.items()}
        object.__setattr__(self, "oov_ids", {**rows, **self.oov_ids})

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the sparse columns."""
        return ("user_id", "item_id", *self.context)

    @property
    def towers(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Names of the sparse and of the dense columns of each usual tower."""
        towers: dict[str, tuple[Sequence[str], Sequence[str]]] = {
            "user": (("user_id",), ()),
            "item": (("item_id",), ()),
        }
        return {**towers, "context": (self.context, self.dense)} if self.context else towers

    def sample(self, rows: int) -> Chunk:
        """Returns ``rows`` training rows, evenly spread over all, or all where there are fewer."""
        count = self.train.num_rows
        return self.train.take(np.linspace(0, count - 1, min(rows, count)).astype(np.int64))

    def trained(self, name: str) -> Int64:
        """Returns the rows of a sparse column's table that stand for an id of a training row, in ascending order."""
        rows = np.unique(self.train[name].values)
        known: Int64 = rows[rows != self.oov_ids[name]]
        return known

    def ids(self, name: str, rows: Int64) -> Int64:
        """Returns (N,) the files' ids of ``rows`` (N,) of a sparse column's table; none may be the unknown row."""
        if name not in self.words.vocabularies:
            return rows
        ids: Int64 = np.asarray(self.words.vocabularies[name].values, np.int64)
        return ids[rows - 1]


def load_labelled(config: LabelledConfig) -> LabelledData:
    """Loads the rows that ``config`` names.

    Raises:
        DatasetUnavailable: the files are not on this machine.
        DataError: a file or a column is missing or damaged, a label is neither 0 nor 1, or an id is below 0.
    """
    data = planted_context(seed=config.seed) if config.name == "planted" else _from_folder(config)
    return data if config.context else _without_context(data)


def planted_context(*, rows: int = 60_000, users: int = 300, items: int = 200, seed: int = 0) -> LabelledData:
    """Generates clicks whose log-odds are a user's taste for an item's kind, moved by the hour; the weekday is noise.

    The answer: no score can order the rows better than the log-odds themselves, whose AUC and log loss on the test rows
    are in ``best``.

    Args:
        rows: number of rows of all parts together, eight tenths for training and one for each other part.
        users: number of users, ids from 0.
        items: number of items, ids from 0.
        seed: seed of the generator.
    """
    rng = np.random.default_rng([seed, rows, users, items])
    columns = {"user_id": users, "item_id": items, "hour": 24, "weekday": 7}
    ids = {name: rng.integers(size, size=rows) for name, size in columns.items()}
    taste, kind = rng.normal(size=(users, 4)), rng.normal(size=(items, 4))
    evening = rng.normal(size=items)  # how much more an item is wanted at night than at noon
    logits = (taste[ids["user_id"]] * kind[ids["item_id"]]).sum(1)
    logits += 2 * evening[ids["item_id"]] * np.cos(2 * np.pi * ids["hour"] / 24) - 1
    chance = 1 / (1 + np.exp(-logits))
    label = (rng.random(rows) < chance).astype(np.float32)
    everything = Chunk({name: Column(values) for name, values in ids.items()} | {"label": Column(label)})
    tenth = rows // 10
    test = slice(rows - tenth, rows)
    train, unknown = everything.slice(0, rows - 2 * tenth), columns  # the row after those of the ids
    return LabelledData(
        name="planted",
        train=train,
        validation=_untrained_unknown(everything.slice(rows - 2 * tenth, rows - tenth), train, unknown),
        test=_untrained_unknown(everything.slice(rows - tenth, rows), train, unknown),
        vocab={name: size + 1 for name, size in columns.items()},
        context=("hour", "weekday"),
        best={
            "auc": _auc(logits[test], label[test]),
            "log_loss": float(-np.log(np.where(label[test] > 0, chance[test], 1 - chance[test])).mean()),
        },
    )


def _from_folder(config: LabelledConfig) -> LabelledData:
    folder = data_folder(config.name, config.folder)
    files = {part: _file(folder, part) for part in PARTS}
    if missing := [part for part, file in files.items() if file is None]:
        raise DatasetUnavailable(
            f"set '{config.name}' is not on this machine: no rows for {', '.join(missing)} in "
            f"{folder or 'any folder: set TORCHREC_EXT_DATA or data.folder'}; put {LABELLED_LAYOUT} there, or use "
            "generated data: data.name=planted"
        )
    chunks = {part: _read(file) for part, file in files.items() if file is not None}
    sparse = [name for name in chunks["train"] if chunks["train"][name].values.dtype == np.int64]
    dense = tuple(name for name in chunks["train"] if name not in sparse and name != "label")
    sizes = {name: _size([chunk[name].values for chunk in chunks.values()]) for name in sparse}
    # A preprocessor writes 0 for a user or an item that it does not know.
    placeholder = _NAMES.values() if folder is not None and (folder / PREPROCESSOR).is_dir() else ()
    sizes |= dict.fromkeys(placeholder, 0)
    known = {name: np.unique(chunks["train"][name].values) for name in sparse if not sizes[name]}
    known |= {name: known[name][known[name] > 0] for name in placeholder}
    words = RowContext(
        vocabularies={name: vocabulary_of(ids) for name, ids in known.items()},
        scales={name: _scale(chunks["train"][name].values) for name in dense},
    )
    made = {part: chunk.with_columns(words.transform(chunk)) for part, chunk in chunks.items()}
    sized = {name: size for name, size in sizes.items() if size}
    made = {part: _untrained_unknown(chunk, made["train"], sized) for part, chunk in made.items()}
    return LabelledData(
        name=config.name,
        train=made["train"],
        validation=made["validation"],
        test=made["test"],
        vocab={name: sized[name] + 1 if name in sized else words.vocab[name] for name in sparse},
        context=tuple(name for name in sparse if name not in _NAMES.values()),
        dense=dense,
        licence=FRAPPE_LICENCE if config.name == "frappe" else None,
        best={},
        words=words,
    )


def _size(parts: list[Array]) -> int:
    """Returns N where the ids of all parts together are 0 to N - 1, else 0."""
    ids = np.unique(np.concatenate(parts))
    return len(ids) if ids[0] == 0 and ids[-1] == len(ids) - 1 else 0


def _untrained_unknown(rows: Chunk, train: Chunk, unknown: Mapping[str, int]) -> Chunk:
    """Returns ``rows`` in which ids that no training row has are replaced by the column's row in ``unknown``."""
    columns = {}
    for name, row in unknown.items():
        ids = rows[name].values
        columns[name] = Column(np.where(np.isin(ids, train[name].values), ids, row))
    return rows.with_columns(columns)


def _file(folder: Path | None, part: str) -> Path | None:
    return next((folder / name for name in _FILES[part] if (folder / name).exists()), None) if folder else None


def _read(path: Path) -> Chunk:
    """Reads ids as int64, the label and dense columns as float32."""
    chunk = read_parquet(path)
    for name in ("label", "user", "item"):
        if name not in chunk and _NAMES.get(name) not in chunk:
            raise DataError(
                f"{path}: column '{name}' is missing, the file has {list(chunk)}; the layout is {LABELLED_LAYOUT}"
            )
    made: dict[str, Array] = {}
    for name, column in chunk.items():
        kind = column.values.dtype.kind
        if column.ragged or kind not in "iufb":
            raise DataError(f"{path}: column '{name}' is {column!r}; must be one number per row: map text to ids first")
        check_finite(path, name, column.values)
        whole = kind != "f" and name != "label"
        made[_NAMES.get(name, name)] = as_int64(str(path), name, column) if whole else column.values.astype(np.float32)
        if whole and made[_NAMES.get(name, name)].min() < 0:
            row = int(column.values.argmin())
            raise DataError(f"{path}: column '{name}', row {row}: id {column.values[row]}; must be 0 or more")
    wrong = ~np.isin(made["label"], (0, 1))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"{path}: column 'label', row {row}: {made['label'][row]}; must be 0 or 1")
    return Chunk({name: Column(values) for name, values in made.items()})


def _scale(values: Array) -> tuple[float, float]:
    """Returns the mean and standard deviation of the training rows, which are scaled to 0 and 1."""
    exact = values.astype(np.float64)
    return float(exact.mean()), float(exact.std()) or 1.0


def _without_context(data: LabelledData) -> LabelledData:
    names = (*data.context, *data.dense)

    def cleared(chunk: Chunk) -> Chunk:
        return chunk.with_columns({name: Column(np.zeros_like(chunk[name].values)) for name in names})

    return dataclasses.replace(
        data, train=cleared(data.train), validation=cleared(data.validation), test=cleared(data.test), best={}
    )


def _auc(scores: Array, labels: Array) -> float:
    """Computes the area under the ROC curve of scores that do not tie."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = labels.sum()
    return float((ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))
