"""Prepared: a prepared folder, the only form of data that a recipe reads, of any size.

open_prepared(): opens a folder; set_folder(): finds it by its path or its name.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.data.config import PARTS, PLANTED, DataConfig, Form, Roles
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
from torchrec_ext.data.prepared_rows import PreparedRows
from torchrec_ext.data.prepared_rows import positive_share as positive_share
from torchrec_ext.data.preprocess import FittedPreprocessor
from torchrec_ext.data.splits import Pairs
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed


class Prepared(PreparedRows):
    """Preprocessed rows on disk, split for training and evaluation.

    With the items of the catalogue, and who took which. For the arguments see :class:`PreparedColumns`.
    """

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
