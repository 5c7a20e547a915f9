"""FittedPreprocessor: what a preprocessor became after fitting; for files, for requests, and on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.preprocess.cells import Cells, read_cells
from torchrec_ext.data.preprocess.column_types import TIMES, Types, element, missing_column, working_type
from torchrec_ext.data.preprocess.expressions import FLOAT32_MAX
from torchrec_ext.data.preprocess.sources import Source
from torchrec_ext.data.preprocess.step import State, Step
from torchrec_ext.data.preprocess.writing import Progress
from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedPreprocessor:
    """Steps with what they were fitted with.

    Args:
        steps: in order.
        keep: columns that are handed on.
        raw: the raw types of the columns that fitting saw.
        states: of each step.
    """

    steps: tuple[Step, ...]
    keep: tuple[str, ...]
    raw: Mapping[str, str]
    states: tuple[State, ...]

    @cached_property
    def types(self) -> list[Types]:
        """The working types before each step, and after the last."""
        return stages(self.steps, "the preprocessor", self.raw)

    @cached_property
    def outputs(self) -> dict[str, str]:
        """The columns of the result and their types: ids are ``int64`` or ``list<int64>``, numbers ``float32``."""
        written = dict.fromkeys(name for step in self.steps for name in step.writes)
        kept = {name: "int64" if self.raw[name] in {*TIMES, "bool"} else self.raw[name] for name in self.keep}
        return {name: self.types[-1][name].replace("float64", "float32") for name in written} | kept

    @cached_property
    def vocab(self) -> dict[str, int]:
        """By id column, the rows that its embedding table needs; row 0 is the unknown."""
        sizes: dict[str, int] = {}
        for step, state in zip(self.steps, self.states, strict=True):
            for name in step.writes:
                sizes.pop(name, None)
            sizes.update(step.vocab(state))
        return sizes

    @property
    def dense(self) -> tuple[str, ...]:
        """The number columns of the result, without those that are kept."""
        return tuple(name for name, kind in self.outputs.items() if kind == "float32" and name not in self.keep)

    @cached_property
    def request_columns(self) -> dict[str, str]:
        """The columns that a request must have, and their raw types."""
        needed: dict[str, str] = {}
        written: set[str] = set()
        for step in self.steps:
            needed |= {name: kind for name, kind in step.request_types(self.raw).items() if name not in written}
            written |= set(step.writes)
        return needed

    def transform(
        self,
        source: Source,
        out: str | Path,
        *,
        events: Source | None = None,
        order_by: Sequence[str] = (),
        engine: Any = "duckdb",
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Writes the rows of a source as parquet, ``out/part-*.parquet``, which ``read_parquet`` and the loader take.

        DuckDB keeps the order of the files' rows; Spark and tables promise none, unless ``order_by`` asks for one.

        Args:
            source: see :meth:`Preprocessor.fit`.
            out: a folder, which is there whole or not at all.
            events: the rows that histories are made of; ``source`` where not given.
            order_by: columns of the source by which to sort.
            engine: see :func:`~torchrec_ext.data.preprocess.engines.connected`.
            overwrite: replace what is in ``out``.
            progress: is called with the number of rows written so far.

        Returns:
            The number of rows.

        Raises:
            DataError: a row has no value where one is needed, a list is too long, a file is damaged, the disk is full.
        """
        from torchrec_ext.data.preprocess.offline import transform

        return transform(
            self, source, Path(out), events=events, order_by=order_by, engine=engine, overwrite=overwrite, progress=progress
        )

    def online(self, rows: Mapping[str, Sequence[Any]]) -> Chunk:
        """A request's rows, value for value as :meth:`transform` would write them.

        Args:
            rows: (B,) values by column, None for null; see ``request_columns``. Further columns are left aside.

        Raises:
            DataError: a column is missing, has a value of another type, or a result has no value.
        """
        cells: dict[str, Cells] = {}
        for name, kind in self.request_columns.items():
            if name not in rows:
                raise missing_column("the request", name, rows.keys())
            cells[name] = read_cells(name, rows[name], kind)
        kept = {name: read_cells(name, rows[name], self.raw[name]) for name in self.keep if name in rows}
        _check_sizes({**cells, **kept})
        for step, types, state in zip(self.steps, self.types, self.states, strict=False):
            cells.update(step.online(cells, types, state))
        for name in self.keep:
            cells.pop(name, None)
        cells.update({name: _seconds(found, self.raw[name]) for name, found in kept.items()})
        return Chunk(
            {name: _finished(name, cells[name], kind, self).column() for name, kind in self.outputs.items() if name in cells}
        )

    def remedies(self) -> dict[str, str]:
        """By column of the result, what helps against a row without a value."""
        numbers = {name: f"put FillMissing(column='{name}', ...) before it" for step in self.steps for name in step.writes}
        kept = "it is kept as it is: fill it where it is written, or do not keep it"
        return numbers | dict.fromkeys(self.keep, kept)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes JSON and parquet; see :mod:`torchrec_ext.data.preprocess.saving`."""
        from torchrec_ext.data.preprocess.saving import save

        save(self, Path(folder), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> FittedPreprocessor:
        """Reads what :meth:`save` wrote.

        Raises:
            DataError: a file is missing or damaged, or of a version or a step that this package does not know.
        """
        from torchrec_ext.data.preprocess.saving import load

        return load(Path(folder))


def stages(steps: Sequence[Step], where: str, raw: Mapping[str, str]) -> list[Types]:
    """The working types before each step, and after the last.

    Raises:
        DataError: a step cannot take a column's type.
    """
    found = [Types(where, {name: working_type(kind) for name, kind in raw.items()})]
    for step in steps:
        found.append(found[-1].with_columns(step.types(found[-1])))
    return found


def _check_sizes(cells: Mapping[str, Cells]) -> None:
    sizes = {name: len(found.values if found.lengths is None else found.lengths) for name, found in cells.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"the request's columns have different numbers of rows, {sizes}; send one entry per row in each")


def _seconds(cells: Cells, raw: str) -> Cells:
    if raw not in TIMES:
        return cells
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[raw[10:-1]]
    return cells.with_values(cells.values // per_second, cells.valid)


def _finished(name: str, cells: Cells, kind: str, fitted: FittedPreprocessor) -> Cells:
    """The values in the result's type, all of them there."""
    values, valid = cells.values, cells.valid
    if element(kind) in ("float32", "float64"):
        limit = FLOAT32_MAX if element(kind) == "float32" else np.inf
        with np.errstate(invalid="ignore"):
            valid = valid & np.isfinite(values) & (np.abs(values) <= limit)
        if element(kind) == "float32":
            values = np.where(valid, values, 0.0).astype(np.float32)
    if not valid.all():
        place = int((~valid).argmax())
        row = place if cells.lengths is None else int(np.cumsum(cells.lengths).searchsorted(place, side="right"))
        raise DataError(
            f"column '{name}', row {row}: the result is missing: null, NaN or beyond float32; send a value, or have it "
            f"filled by the preprocessor: {fitted.remedies().get(name, 'fill it before')}"
        )
    return Cells(values=values, valid=valid, lengths=cells.lengths)
