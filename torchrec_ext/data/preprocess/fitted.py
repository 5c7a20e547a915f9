"""FittedPreprocessor: a preprocessor after fitting; for files, for requests, and on disk.

A fitted preprocessor on disk: ``preprocessor.json`` and a parquet file for each vocabulary. No pickle: loading runs no
code.

The JSON holds the version of this format, the steps by name with their fields and fitted states, the raw types
of the columns, and the SHA-256 of every vocabulary; ``preprocessor.sha256`` holds that of the JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.files.arrow import one_piece, value_type
from torchrec_ext.data.preprocess.categorical import (
    Categorify,
    Cross,
    HashBucket,
    Vocabulary,
)
from torchrec_ext.data.preprocess.columns import (
    INT64,
    TIME_TYPES,
    CellError,
    Cells,
    Columns,
    Types,
    all_true,
    arrow_type,
    is_list_column,
    missing_column,
    raw_type,
    read_cells,
    working_type,
)
from torchrec_ext.data.preprocess.files import write_files
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.data.preprocess.history import History, event_columns
from torchrec_ext.data.preprocess.lists import Lists
from torchrec_ext.data.preprocess.numeric import (
    Bucketize,
    FillMissing,
    LogClip,
    Normalize,
)
from torchrec_ext.data.preprocess.rows import (
    ROW,
    Connection,
    Opened,
    Source,
    batches,
    connected,
    open_rows,
    telling,
)
from torchrec_ext.data.preprocess.step import Step, StepState, quoted
from torchrec_ext.data.preprocess.times import TimeFeatures, per_second
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed
from torchrec_ext.sealed import existing_folder, json_digest, measure_file


@dataclass(frozen=True, eq=False)
class FittedPreprocessor:
    """A preprocessor's steps and fitted states, for files and for requests.

    Args:
        pairs: the steps with their states, in order.
        raw: raw types of the columns that fitting saw.
        keep: names of columns that are handed on as they are.
    """

    pairs: Sequence[tuple[Step, StepState]]
    raw: Mapping[str, str]
    keep: Sequence[str] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return tuple(step for step, _ in self.pairs)

    def state_of(self, name: str) -> StepState | None:
        """Returns the state of the last step that writes a column; None if no step does."""
        return next(
            (state for step, state in reversed(self.pairs) if name in step.writes), None
        )

    def by_value(self) -> FittedPreprocessor:
        """Returns these steps with ids in the order of the values, and not of their counts."""
        pairs = [
            (step, state.by_value() if isinstance(state, Vocabulary) else state)
            for step, state in self.pairs
        ]
        return dataclasses.replace(self, pairs=pairs)

    def only(self, names: Collection[str]) -> FittedPreprocessor:
        """Returns the steps behind the columns ``names`` alone, so that a request needs fewer columns."""
        # Backwards: a later step decides which columns an earlier step must write.
        needed = set(names)
        pairs: list[tuple[Step, StepState]] = []
        for step, state in reversed(self.pairs):
            if needed.isdisjoint(step.writes):
                continue
            narrowed = _narrow_step(step, needed)
            needed |= set(narrowed.reads)
            pairs.insert(0, (narrowed, state))
        keep = [name for name in self.keep if name in names]
        return FittedPreprocessor(pairs, self.raw, keep)

    def keeping_unknown(self) -> FittedPreprocessor:
        """Returns these steps with id 0 for the elements that ``Categorify.skip`` leaves out of lists."""
        pairs = [
            (dataclasses.replace(step, skip=()), state)
            if isinstance(step, Categorify)
            else (step, state)
            for step, state in self.pairs
        ]
        return dataclasses.replace(self, pairs=pairs)

    @cached_property
    def types(self) -> list[Types]:
        """The types before each step, and after the last."""
        return stages(self.steps, "the preprocessor", self.raw)

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Types of the result's columns by name: ids are ``int64`` or ``list<int64>``, numbers ``float32``."""
        return {field.name: str(raw_type(field.type)) for field in self.schema}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Number of rows of each id column's embedding table; row 0 is for unknown values."""
        sizes: dict[str, int] = {}
        for step, state in self.pairs:
            # The ids of an earlier step under this name are replaced.
            for name in step.writes:
                sizes.pop(name, None)
            sizes.update(step.vocab(state))
        return sizes

    @cached_property
    def vocabularies(self) -> dict[str, str]:
        """The name of each id column's vocabulary: its first column's name.

        Columns of one vocabulary have the same ids for the same values, so that one embedding table does for all.
        """
        first_columns: dict[int | str, str] = {}
        names = {}
        for name in self.vocab:
            state = self.state_of(name)
            key = id(state) if isinstance(state, Vocabulary) else name
            names[name] = first_columns.setdefault(key, name)
        return names

    @property
    def id_values(self) -> dict[str, pa.Array]:
        """The values of each vocabulary, in the order of their ids from 1 on, by its first column."""
        return {
            step.writes[0]: state.values
            for step, state in self.pairs
            if isinstance(state, Vocabulary)
        }

    @cached_property
    def origins(self) -> dict[str, str]:
        """SHA-256 of the steps behind each written column, with their fields and states, by column.

        If the digest differs, values have another meaning, for example because of another number of buckets, or mean.
        The values of a vocabulary are not part of it, see ``id_values``.
        """
        digests: dict[str, str] = {}
        for step, state in self.pairs:
            inputs = {name: digests.get(name, "") for name in step.reads}
            origin = json_digest([type(step).__name__, inputs, step.meaning(state)])
            digests |= dict.fromkeys(step.writes, origin)
        return digests

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Names of the files' required columns."""
        return tuple(self.raw)

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of the number columns of the result, without those of ``keep``."""
        return tuple(
            name
            for name, kind in self.outputs.items()
            if kind == "float32" and name not in self.keep
        )

    @cached_property
    def request_columns(self) -> dict[str, str]:
        """Raw types of a request's required columns, by name."""
        columns: dict[str, str] = {}
        step_columns: set[str] = set()
        for step in self.steps:
            # A column that an earlier step writes need not be sent.
            for name, kind in step.request_types(self.raw).items():
                if name not in step_columns:
                    columns[name] = kind
            step_columns.update(step.writes)
        return columns

    @cached_property
    def schema(self) -> pa.Schema:
        """The result's columns in Arrow."""
        columns = {}
        for step in self.steps:
            for name in step.writes:
                columns[name] = _as_float32(self.types[-1][name])
        for name in self.keep:
            dtype = arrow_type(self.raw[name])
            # Times become seconds.
            is_whole = dtype in TIME_TYPES or pa.types.is_boolean(dtype)
            columns[name] = INT64 if is_whole else dtype
        return pa.schema(columns.items())

    def transform(
        self,
        source: Source,
        out: str | Path,
        *,
        events: Source | None = None,
        con: Connection = None,
        overwrite: bool = False,
    ) -> int:
        """Writes the rows of a source as parquet, ``out/part-*.parquet``, for the loader.

        The rows keep the order of the files, or of the relation.

        Args:
            source: see :meth:`Preprocessor.fit`.
            out: folder to write, which is there whole or not at all.
            events: rows to make histories of; ``source`` by default.
            con: connection of DuckDB; a new one by default.
            overwrite: replace what is in ``out``.

        Returns:
            The number of rows.

        Raises:
            DataError: a row lacks a value, a list is too long, a file is damaged or the disk is
                full.
        """
        out = Path(out)
        with (
            whole_folder(out, overwrite=overwrite, mark="part-*.parquet") as staging,
            connected(con) as opened,
        ):
            data, past = open_rows(
                source, events, list(self.raw), event_columns(self.steps), opened
            )
            data.check_types(self.raw, "in fitting")
            # The folder `out` is replaced at the end: no file in it may be a source.
            for opened_rows in (data, past):
                for files in opened_rows.files:
                    keep_sources(out, files.files)
            sql = requests_sql(self, data, past)
            rows = 0

            def made() -> Iterator[pa.RecordBatch]:
                nonlocal rows
                for batch in _ahead(self.batch, batches(opened, sql)):
                    rows += batch.num_rows
                    yield batch

            with past.blaming(), data.blaming(), telling():
                try:
                    write_files(staging, self.schema, made())
                except CellError as error:
                    where, row = data.place(rows + error.row)
                    raise CellError(error.column, row, error.rule, where) from None
            if not rows:
                raise DataError(f"{data.where}: no rows; give a split at least one")
        return rows

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Transforms batches of rows as requests have them, into those of ``schema``, as Spark's ``mapInArrow`` asks.

        Raises:
            DataError: see :meth:`online`; also if a column of ``keep`` is missing.
        """
        return map(self.batch, batches)

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Transforms one batch, see :meth:`batches`."""
        names = batch.schema.names
        for name in self.keep:
            if name not in names:
                raise missing_column("the batch", name, names)
        made = self._results({name: batch.column(name) for name in names})
        arrays = [made[field.name].array(field.type) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def online(self, rows: Mapping[str, Sequence[Any]]) -> Chunk:
        """Transforms a request's rows, or those of a batch of a file.

        Args:
            rows: (B,) values by column, None for null; see ``request_columns``. Further columns are ignored.

        Raises:
            DataError: a column is missing, has a value of another type, or a result has no value.
        """
        made = self._results(rows)
        return Chunk({name: cells.column() for name, cells in made.items()})

    def _results(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, Cells]:
        """Transforms rows into columns of ``schema``; those of ``keep`` may be missing, such as the label."""
        columns = {}
        for name, kind in self.request_columns.items():
            if name not in rows:
                raise missing_column("the request", name, rows.keys())
            columns[name] = read_cells(name, rows[name], kind)
        # A step may read or replace a column of `keep`; the result has it as it was
        # sent.
        kept = {}
        for name in self.keep:
            if name in rows:
                kept[name] = _in_seconds(read_cells(name, rows[name], self.raw[name]))
        read = {**columns, **kept}
        if len({cells.rows for cells in read.values()}) > 1:
            sizes = {name: cells.rows for name, cells in read.items()}
            raise DataError(
                f"the request's columns have different numbers of rows, {sizes}; send one entry per row in each"
            )
        columns = {**self.apply(columns), **kept}
        return {
            name: self._checked(name, dtype, most, columns[name])
            for name, dtype, most in self._limits
            if name in kept or name not in self.keep
        }

    @cached_property
    def _limits(self) -> list[tuple[str, Any, float]]:
        """The result's columns, numpy's type of those of floats, and the greatest number of that type."""
        limits: list[tuple[str, Any, float]] = []
        for field in self.schema:
            dtype = value_type(field.type)
            if pa.types.is_floating(dtype):
                # Not to_pandas_dtype(), for which pyarrow 25 and older need pandas.
                dtype = np.dtype(f"f{dtype.bit_width // 8}")
                limits.append((field.name, dtype, float(np.finfo(dtype).max)))
            else:
                limits.append((field.name, None, 0.0))
        return limits

    def apply(self, columns: Columns) -> Columns:
        """Returns the columns of some rows with what the steps write."""
        columns = dict(columns)
        # A number beyond float64 is infinite, which counts as missing.
        with np.errstate(over="ignore"):
            for step, state in self.pairs:
                columns |= step.apply(columns, state)
        return columns

    def _checked(self, name: str, dtype: Any, most: float, cells: Cells) -> Cells:
        """Returns a result, floats in their type; raises a CellError if a value is missing."""
        values = cells.values
        if dtype is not None:
            # What is beyond float32 would become infinite.
            is_there = np.abs(values) <= most
        elif cells.valid is None:
            return cells
        else:
            is_there = cells.valid
        if all_true(is_there):
            if dtype is not None:
                values = values.astype(dtype, copy=False)
            return Cells(values, None, cells.offsets, cells.texts)
        index = int((~is_there).argmax())
        row = index if cells.offsets is None else cells.column().row_of(index)
        rule = (
            "the result is missing, NaN or beyond float32; fill it where it is written, or by "
            f"FillMissing(column='{name}', ...) or LogClip"
        )
        raise CellError(name, row, rule)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes JSON and parquet; see :mod:`torchrec_ext.data.preprocess.fitted`. The folder is whole or not there.

        Raises:
            DataError: it is there already, or cannot be written; a step is not one of this package.
        """
        folder = Path(folder)
        for step in self.steps:
            if STEPS.get(type(step).__name__) is not type(step):
                raise DataError(
                    f"{folder}: step {step} is not one of this package and could not be loaded; known are "
                    f"{listed(STEPS)}"
                )
        with whole_folder(folder, overwrite=overwrite, mark=_MAIN) as staging:
            main = {
                "version": STATE_VERSION,
                "keep": list(self.keep),
                "columns": dict(self.raw),
                "steps": [
                    _save_step(number, step, state, staging)
                    for number, (step, state) in enumerate(self.pairs)
                ],
            }
            text = json.dumps(main, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
            (staging / _MAIN).write_text(text)
            (staging / DIGEST).write_text(_digest(text) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> FittedPreprocessor:
        """Reads a folder of :meth:`save`.

        Raises:
            DataError: a file is missing or damaged, or of a version or a step that this package does not know.
        """
        folder = existing_folder(Path(folder))
        try:
            text = (folder / _MAIN).read_text()
            if _digest(text) != (folder / DIGEST).read_text().strip():
                raise DataError(
                    f"{folder / _MAIN}: does not fit {DIGEST}: it was changed or damaged; copy the folder anew"
                )
            return _from_json(folder, json.loads(text))
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename}: no such file; name the whole folder that FittedPreprocessor.save wrote"
            ) from None
        # The disk's, or of what somebody wrote by hand.
        except Exception as error:
            kind = type(error).__name__
            raise DataError(
                f"{folder / _MAIN}: cannot be read ({kind}: {error}); copy the folder again, or fit anew"
            ) from None


def unknown_shares(
    fitted: FittedPreprocessor, rows: str, con: Connection
) -> dict[str, float]:
    """Returns the share of zeros by column of ids, in a list column of its elements; 0 of none.

    Args:
        fitted: steps with the columns.
        rows: result of the steps, in SQL.
        con: connection of DuckDB.
    """
    shares = {}
    for name in fitted.vocab:
        column = quoted(name)
        if is_list_column(fitted.outputs[name]):
            column = f"unnest({column})"
        ids = f"(SELECT {column} AS id FROM {rows})"
        ((share,),) = con.sql(f"SELECT avg((id = 0)::INT) FROM {ids}").fetchall()
        shares[name] = share or 0.0
    return shares


def unknown_line(split: str, rows: int, shares: Mapping[str, float]) -> str:
    """Returns the line about the rows of a split.

    Example:
        >>> unknown_line("test", 1000, {"user": 0.75, "item": 0.0})
        'test: 1,000 rows; unknown ids: user 75.00%'
    """
    texts = [f"{name} {share:.2%}" for name, share in shares.items() if share]
    return f"{split}: {rows:,} rows; unknown ids: {', '.join(texts) or 'none'}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _narrow_step(step: Step, needed_columns: Collection[str]) -> Step:
    """Narrows a step with one vocabulary for several columns to the needed ones."""
    if not isinstance(step, Categorify):
        return step
    also = tuple(name for name in step.also if name in needed_columns)
    column = step.column
    output = step.output
    if (output or column) not in needed_columns:
        column, *rest = also
        output = None
        also = tuple(rest)
    skip = tuple(name for name in step.skip if name in (column, *also))
    return dataclasses.replace(step, column=column, output=output, also=also, skip=skip)


def _ahead(
    function: Callable[[pa.RecordBatch], pa.RecordBatch],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yields the results in the order of the batches, computed by as many threads as there are cores, four at most."""
    threads = min(4, len(os.sched_getaffinity(0)))
    pending: deque[Future[pa.RecordBatch]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for batch in batches:
            pending.append(pool.submit(function, batch))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def stages(steps: Sequence[Step], where: str, raw: Mapping[str, str]) -> list[Types]:
    """Returns the types before each step, and after the last.

    Raises:
        DataError: a step cannot take a column's type.
    """
    types: list[Types] = [
        {name: working_type(arrow_type(kind)) for name, kind in raw.items()}
    ]
    for step in steps:
        try:
            types.append({**types[-1], **step.types(types[-1])})
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    return types


def _as_float32(dtype: pa.DataType) -> pa.DataType:
    """Returns the type of a result: numbers have 32 bits."""
    if pa.types.is_list(dtype):
        return pa.list_(_as_float32(dtype.value_type))
    return pa.float32() if pa.types.is_float64(dtype) else dtype


def _in_seconds(cells: Cells) -> Cells:
    """Returns times as seconds since 1970; other columns as they are."""
    if cells.unit is None:
        return cells
    return cells._replace(values=cells.values // per_second(cells.unit), unit=None)


def requests_sql(
    fitted: FittedPreprocessor,
    data: Opened,
    past: Opened,
    where: str = "",
) -> str:
    """Returns SQL for rows as a request has them: raw columns, and the events that each history needs.

    Args:
        fitted: steps; their states are not needed.
        data: the rows.
        past: the events.
        where: condition for the rows, which may use their number ``__row__``.
    """
    histories = [step for step in fitted.steps if isinstance(step, History)]
    sent = {name for step in histories for name in step.sent}
    names = [name for name in fitted.request_columns if name not in sent]
    names = list(dict.fromkeys([*names, *fitted.keep]))
    inner = list(names)
    for step in histories:
        inner += [step.user, step.time]
    columns = ", ".join(quoted(name) for name in dict.fromkeys(inner))
    if not (histories or where):
        return f"SELECT {columns or '1 AS one'} FROM {data.view}"
    rows = f"(SELECT {columns}, row_number() OVER () - 1 AS {ROW} FROM {data.view})"
    if where:
        rows = f"(SELECT * FROM {rows} WHERE {where})"
    for step in histories:
        rows = f"({step.sql(rows, past.view)})"
    columns = ", ".join(quoted(name) for name in [*names, *sorted(sent)])
    return f"SELECT {columns} FROM {rows} ORDER BY {ROW}"


# 1: zones as tables of numbers, steps for Ibis.
STATE_VERSION = 3
STEPS: Mapping[str, type[Step]] = {
    step.__name__: step
    for step in (
        Bucketize,
        Categorify,
        Cross,
        FillMissing,
        HashBucket,
        History,
        Lists,
        LogClip,
        Normalize,
        TimeFeatures,
    )
}
_MAIN = "preprocessor.json"
DIGEST = "preprocessor.sha256"


def _from_json(folder: Path, main: Any) -> FittedPreprocessor:
    if main.get("version") != STATE_VERSION:
        raise DataError(
            f"{folder / _MAIN}: format version {main.get('version')!r}, this package reads {STATE_VERSION}; preprocess "
            "the log again"
        )
    pairs = [_load_step(folder, entry) for entry in main["steps"]]
    return FittedPreprocessor(pairs, dict(main["columns"]), main["keep"])


def _save_step(
    number: int, step: Step, state: StepState, folder: Path
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "step": type(step).__name__,
        "fields": dataclasses.asdict(step),  # type: ignore[call-overload]
    }
    if not isinstance(state, Vocabulary):
        return {**entry, "state": state}
    name = f"vocabulary-{number:03}.parquet"
    table = pa.table({"value": state.values})
    # Values are distinct, so a dictionary of them would take longer and save nothing.
    pq.write_table(table, folder / name, write_page_checksum=True, use_dictionary=False)
    return {
        **entry,
        "vocabulary": name,
        "sha256": measure_file(folder / name)["sha256"],
    }


def _load_step(folder: Path, entry: Mapping[str, Any]) -> tuple[Step, StepState]:
    # JSON has no tuples.
    fields = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in entry["fields"].items()
    }
    step = STEPS[entry["step"]](**fields)
    if "vocabulary" not in entry:
        return step, entry["state"]
    # The name alone: a path in the file cannot lead out of the folder.
    path = folder / Path(entry["vocabulary"]).name
    if measure_file(path)["sha256"] != entry["sha256"]:
        raise DataError(
            f"{path}: does not have the SHA-256 in {_MAIN}: it was changed or damaged; copy it again"
        )
    with pq.ParquetFile(path) as file:
        values = file.read(["value"])["value"]
    return step, Vocabulary(one_piece(values))
