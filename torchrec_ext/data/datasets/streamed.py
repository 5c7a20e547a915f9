"""StreamedData: the folder that rec.data.preprocess writes, of any size, read a row group at a time.

planted_folder(): such a folder with generated rows whose right answer is known.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk, Column, Int64, concatenate
from torchrec_ext.data.datasets.catalog import FOLDER_VARIABLE, DatasetUnavailable, data_folder
from torchrec_ext.data.datasets.config import PLANTED, StreamConfig
from torchrec_ext.data.datasets.folder import PREPROCESSOR
from torchrec_ext.data.datasets.labelled import planted_context
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Vocabulary
from torchrec_ext.schema import DataError

SUMMARY = "summary.json"
RAW_REQUESTS = "raw/requests.parquet"  # some training rows as a request has them
RAW_ITEMS = "raw/items.parquet"  # a row for each item, its columns as in the log
_SPLITS = ("train", "validation", "test")
_KINDS: dict[str, tuple[Kind, ...]] = {"int64": ("int",), "list<int64>": ("ints",), "float32": ("float",)}
_GROUP_ROWS = 8_192  # rows of a row group of generated data


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The columns of preprocessed rows that are more than features.

    Args:
        label: column of the labels, 0 to 1.
        weight: column of a weight for each row, or None.
        user: column of the users' ids, or None.
        item: column of the items' ids, or None.
        user_features: further columns that are the user's, beside those whose names begin with ``user_``.
        item_features: further columns that are the item's, beside those whose names begin with ``item_``.
    """

    label: str
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedData:
    """Preprocessed rows on disk, split for training and evaluation.

    Args:
        name: name by which the set was loaded.
        splits: files of each split: ``train``, ``test`` and, where there is one, ``validation``.
        preprocessor: the preprocessing that made the rows; a request's rows go through it.
        roles: columns of label, weight, user and item.
        folder: the folder with the rows.
        ranked: greatest number of held-out rows for which the catalogue is ranked.
        best: figures of the best possible prediction where they are known (generated data).
        licence: what the publisher asks of users, or None.
        kept: a temporary folder that lives as long as the data, or None.
    """

    name: str
    splits: Mapping[str, ParquetSource]
    preprocessor: FittedPreprocessor
    roles: Roles
    folder: Path
    ranked: int = 0
    best: Mapping[str, float] = field(default_factory=dict)
    licence: str | None = None
    kept: Any = None

    def __post_init__(self) -> None:
        for source in self.splits.values():
            source.require({name: _KINDS[self.preprocessor.outputs[name]] for name in (*self.features, *self.dense)})

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Number of rows of each feature's table, whose row 0 is the unknown value."""
        return self.preprocessor.vocab

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of ids."""
        return tuple(name for name in self.vocab if name not in (self.roles.label, self.roles.weight))

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of the columns of numbers."""
        return tuple(name for name in self.preprocessor.dense if name not in (self.roles.label, self.roles.weight))

    @cached_property
    def towers(self) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Names of the features and of the dense columns of each usual tower: the item's is the last."""
        names: dict[str, tuple[list[str], list[str]]] = {"user": ([], []), "context": ([], []), "item": ([], [])}
        for index, columns in enumerate((self.features, self.dense)):
            for name in columns:
                names[self._owner(name)][index].append(name)
        return {tower: (features, dense) for tower, (features, dense) in names.items() if features or dense}

    def _owner(self, name: str) -> str:
        roles = self.roles
        for tower, names in (
            ("user", (roles.user, *roles.user_features)),
            ("item", (roles.item, *roles.item_features)),
        ):
            if name in names or name.startswith(f"{tower}_"):
                return tower
        return "context"

    def sample(self, rows: int) -> Chunk:
        """Returns the columns of ids of the first ``rows`` training rows, or of fewer."""
        source = self.splits["train"]
        return next(source.parts(source.groups[0], list(self.features), 0, min(rows, source.groups[0].rows)))

    def chunks(self, split: str, names: Sequence[str]) -> Iterator[Chunk]:
        """Yields the columns ``names`` of a split, a part of a row group at a time, in the order of the files."""
        source = self.splits[split]
        for group in source.groups:
            yield from source.parts(group, list(names), 0, 1 << 16)

    @cached_property
    def positives(self) -> dict[str, tuple[float, float]]:
        """The weight of each split's rows as positives, and of all of them, by split; reads the labels of all rows.

        Raises:
            DataError: all rows of a split have weight 0.
        """
        names = [name for name in (self.roles.label, self.roles.weight) if name]
        sums = {}
        for split, source in self.splits.items():
            totals = np.zeros(2)
            for chunk in self.chunks(split, names):
                labels = chunk[self.roles.label].values.astype(np.float64)
                weights = chunk[self.roles.weight].values.astype(np.float64) if self.roles.weight else 1.0
                totals += (labels * weights).sum(), (np.ones_like(labels) * weights).sum()
            if not totals[1] > 0:
                raise DataError(
                    f"{source.files[0].name}: column '{self.roles.weight}' is 0 in all {source.num_rows:,} rows of "
                    f"split '{split}'; give each row that counts a weight above 0"
                )
            sums[split] = (float(totals[0]), float(totals[1]))
        return sums

    def share(self, split: str) -> float:
        """Returns the weighted share of positives among the rows of a split, never quite 0 or 1."""
        positive, total = self.positives[split]
        least = 0.5 / (total + 1)
        return min(max(positive / total, least), 1 - least)

    @cached_property
    def items(self) -> tuple[Int64, Chunk]:
        """The catalogue: the rows of the items that training read, (I,), and by row of the item's table its columns.

        An item's columns are those of its last training row; rows of no item hold those of some item. The item's column
        of all training rows is read, and its other columns a second time.

        Raises:
            ValueError: the preprocessing names no item.
            DataError: no training row has a known item, or an id is no row of its table.
        """
        item = self.roles.item
        if item is None:
            raise ValueError(f"set '{self.name}': its preprocessing names no item column")
        last = self._last_rows(item)
        known: Int64 = 1 + np.flatnonzero(last[1:] >= 0)
        if not len(known):
            raise DataError(
                f"{self.folder}: column '{item}' is 0, the unknown item, in all training rows; lower min_count of its "
                "Categorify"
            )
        rows, pieces, start = np.sort(last[known]), [], 0
        features, dense = self.towers["item"]
        names = list(dict.fromkeys([item, *features, *dense]))
        for chunk in self.chunks("train", names):
            low, high = rows.searchsorted([start, start + chunk.num_rows])
            piece = chunk.take(rows[low:high] - start)
            # By value, since windows would keep all lists of the chunk in memory.
            pieces.append({name: Column(piece[name].values, piece[name].offsets) for name in names})
            start += chunk.num_rows
        table = Chunk({name: concatenate([piece[name] for piece in pieces]) for name in names})
        ids = np.arange(self.vocab[item])
        nearest = known[np.minimum(known.searchsorted(ids), len(known) - 1)]
        return known, table.take(rows.searchsorted(last[nearest])).with_columns({item: Column(ids)})

    def _last_rows(self, name: str) -> Int64:
        """Returns the number of the last training row of each id of a column, (V,); -1 where there is none."""
        last, start = np.full(self.vocab[name], -1), 0
        for chunk in self.chunks("train", [name]):
            ids = chunk[name].values
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(last):
                raise DataError(
                    f"{self.folder}: column '{name}' has ids of {ids.min()} to {ids.max()}, and its vocabulary rows 0 "
                    f"to {len(last) - 1}: the rows and the preprocessor are of two runs; preprocess the log again"
                )
            last[ids] = np.arange(start, start + len(ids))  # of an id that is there twice the last row stays
            start += len(ids)
        return last


def load_streamed(config: StreamConfig) -> StreamedData:
    """Opens the preprocessed rows that ``config`` names; only metadata are read.

    Raises:
        DatasetUnavailable: the folder is not on this machine.
        DataError: the folder is not one that rec.data.preprocess wrote, or its files contradict it.
    """
    if config.name == PLANTED:
        kept = tempfile.TemporaryDirectory(prefix="torchrec_ext-planted-")
        best = planted_folder(Path(kept.name), seed=config.seed)
        return _open(Path(kept.name), config, best=best, kept=kept)
    folder = Path(config.name)
    if not folder.is_dir():
        folder = data_folder(config.name, config.folder) or folder
    if not folder.is_dir():
        looked = f"nor in {folder}" if config.folder else f"and neither data.folder nor {FOLDER_VARIABLE} has it"
        raise DatasetUnavailable(
            f"data.name={config.name}: there is no such folder, {looked}; write one from your log by `torchx run "
            f"rec.data.preprocess --recipe ... --out {config.name}`, or use generated rows: data.name={PLANTED}"
        )
    return _open(folder, config)


def _open(folder: Path, config: StreamConfig, **details: Any) -> StreamedData:
    summary, preprocessor = _summary(folder), FittedPreprocessor.load(folder / PREPROCESSOR)
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise DataError(
                f"{folder}: has no split '{split}' (it has {', '.join(summary['rows'])}); name the splits of the "
                "preprocessing recipe train, test and, for early stopping, validation"
            )
    splits = [split for split in _SPLITS if (folder / split).is_dir()]
    roles = _roles(folder, summary, preprocessor)
    for name, kind in preprocessor.outputs.items():
        if kind == "list<float32>" and name not in preprocessor.keep:
            raise DataError(
                f"{folder}: column '{name}' is {kind}, of which no tower can be made; pool it to numbers, or bucket "
                "it to ids, in the preprocessing recipe"
            )
    return StreamedData(
        name=config.name,
        splits={split: ParquetSource(folder / split) for split in splits},
        preprocessor=preprocessor,
        roles=roles,
        folder=folder,
        ranked=config.ranked,
        **details,
    )


def _summary(folder: Path) -> dict[str, Any]:
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
        raise DataError(f"{path}: is damaged ({error}); preprocess the log again") from None
    return summary


def _roles(folder: Path, summary: Mapping[str, Any], preprocessor: FittedPreprocessor) -> Roles:
    """Reads the columns' roles from the summary; an older one has none, and its label is the column ``label``."""
    given = summary.get("roles", {})
    roles = {**given, "label": given.get("label") or "label"}
    if roles["label"] not in preprocessor.outputs:
        raise DataError(
            f"{folder}: its rows have no label: the preprocessing recipe names none that it keeps (it keeps "
            f"{', '.join(preprocessor.keep) or 'nothing'}); set Prepared.label and Preprocessor(keep=[...])"
        )
    return Roles(**roles)


def planted_folder(folder: Path, *, seed: int = 0, rows: int = 60_000) -> dict[str, float]:
    """Writes the rows of :func:`planted_context` as rec.data.preprocess would, and returns the best possible figures.

    Args:
        folder: an empty folder.
        seed: seed of the generator.
        rows: number of rows of all splits together.
    """
    data = planted_context(rows=rows, seed=seed)
    names = [name for name in data.train if name != "label"]
    steps, states = [], []
    for name in names:
        ids = data.trained(name)
        steps.append(Categorify(column=name))
        states.append(Vocabulary(pa.array(ids), pa.array(np.zeros(len(ids), np.int64))))
    raw = dict.fromkeys(names, "int64") | {"label": "float32"}
    fitted = FittedPreprocessor(steps=tuple(steps), keep=("label",), raw=raw, states=tuple(states))
    fitted.save(folder / PREPROCESSOR)
    counts = {}
    for split in _SPLITS:
        chunk: Chunk = getattr(data, split)
        made = fitted.online({name: chunk[name].values.tolist() for name in (*names, "label")})
        (folder / split).mkdir()
        table = pa.table({name: column.values for name, column in made.items()})
        path = folder / split / "part-00000.parquet"
        pq.write_table(table, path, row_group_size=_GROUP_ROWS, write_page_checksum=True)
        counts[split] = len(table)
    (folder / "raw").mkdir()
    requests = data.train.slice(0, 1_000)
    pq.write_table(pa.table({name: requests[name].values for name in names}), folder / RAW_REQUESTS)
    pq.write_table(pa.table({"item_id": data.trained("item_id")}), folder / RAW_ITEMS)
    roles = {"label": "label", "weight": None, "user": "user_id", "item": "item_id"}
    (folder / SUMMARY).write_text(json.dumps({"recipe": PLANTED, "rows": counts, "roles": roles}) + "\n")
    return dict(data.best)
