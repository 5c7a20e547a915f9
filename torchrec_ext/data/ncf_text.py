"""The text files of He et al. 2017: NAME.train.rating, NAME.test.rating and NAME.test.negative -> columns of ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.schema import DataError


def ncf_files(folder: Path) -> tuple[Path, Path, Path] | None:
    """The training, test and negative file, or None where they are not all there."""
    found = sorted(folder.glob("*.test.negative"))
    stem = found[0].name.removesuffix(".test.negative") if found else ""
    files = tuple(folder / f"{stem}{suffix}" for suffix in (".train.rating", ".test.rating", ".test.negative"))
    return (files[0], files[1], files[2]) if found and all(file.exists() for file in files) else None


def read_ncf(files: tuple[Path, Path, Path]) -> tuple[Chunk, Chunk, Chunk]:
    """(train, test, negatives), with ``user_id`` and ``item_id`` or ``negative``.

    A line of ratings is ``user item rating time``, one of negatives ``(user,item) negative negative ...``, each as many; tabs
    between. Of the ratings only user and item are read.

    Raises:
        DataError: a line has another form.
    """
    train, test = (_pairs(file) for file in files[:2])
    return train, test, _negatives(files[2])


def _pairs(file: Path) -> Chunk:
    rows = _numbers(file, [line.split("\t")[:2] for line in _lines(file)], 2)
    return Chunk({"user_id": Column(rows[:, 0]), "item_id": Column(rows[:, 1])})


def _negatives(file: Path) -> Chunk:
    lines = [line.split("\t") for line in _lines(file)]
    users = _numbers(file, [[line[0].strip("()").split(",")[0]] for line in lines], 1)[:, 0]
    items = _numbers(file, [line[1:] for line in lines], len(lines[0]) - 1)
    return Chunk({"user_id": Column(users.repeat(items.shape[1])), "negative": Column(items.reshape(-1))})


def _lines(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: no lines; copy it again")
    return lines


def _numbers(file: Path, rows: list[list[str]], width: int) -> Int64:
    for number, fields in enumerate(rows, start=1):
        if len(fields) != width or not all(field.isdecimal() for field in fields):
            raise DataError(f"{file}: line {number} has {fields[:4]}, must have {width} ids of 0 or more; copy the file again")
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)
