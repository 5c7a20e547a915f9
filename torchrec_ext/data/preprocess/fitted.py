"""FittedPreprocessor: a preprocessor after fitting; for files, for requests, and on disk.

A fitted preprocessor over files: expressions put together, checked, run and written.

A fitted preprocessor on disk: ``preprocessor.json`` and a parquet file for each vocabulary. No pickle: loading runs no
code.

The JSON holds the version of this format, the steps by name with their fields and fitted states, the raw types
of the columns, and the SHA-256 of every vocabulary; ``preprocessor.sha256`` holds that of the JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.preprocess.categorical import (
    Categorify,
    Cross,
    HashBucket,
    Vocabulary,
)
from torchrec_ext.data.preprocess.columns import (
    TIMES,
    Cells,
    Types,
    element,
    missing_column,
    read_cells,
    short_text,
    working_type,
)
from torchrec_ext.data.preprocess.engines import (
    FLOAT32_MAX,
    ROW,
    Engine,
    as_float32,
    connected,
)
from torchrec_ext.data.preprocess.files import Progress, Sink, Source
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.data.preprocess.history import History
from torchrec_ext.data.preprocess.lists import Lists
from torchrec_ext.data.preprocess.numeric import (
    Bucketize,
    FillMissing,
    LogClip,
    Normalize,
)
from torchrec_ext.data.preprocess.step import Chain, Step, StepState, Table
from torchrec_ext.data.preprocess.tables import Opened, open_sources
from torchrec_ext.data.preprocess.times import TimeFeatures, per_second, whole_seconds
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import did_you_mean, listed
from torchrec_ext.sealed import existing_folder, json_digest, measure_file


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedPreprocessor:
    """A preprocessor's steps and fitted states, for files and for requests.

    Args:
        steps: steps, in order.
        keep: names of columns that are handed on as they are.
        raw: raw types of the columns that fitting saw.
        states: state of each step.
    """

    steps: tuple[Step, ...]
    keep: tuple[str, ...]
    raw: Mapping[str, str]
    states: tuple[StepState, ...]

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Step, StepState]],
        raw: Mapping[str, str],
        keep: Sequence[str] = (),
    ) -> FittedPreprocessor:
        """Builds the preprocessor of steps with their states; see the class for the other arguments."""
        return cls(
            steps=tuple(step for step, _ in pairs),
            keep=tuple(keep),
            raw=raw,
            states=tuple(state for _, state in pairs),
        )

    @cached_property
    def pairs(self) -> list[tuple[Step, StepState]]:
        """The steps with their states, in order."""
        return list(zip(self.steps, self.states, strict=True))

    def state_of(self, name: str) -> StepState | None:
        """Returns the state of the last step that writes a column; None if no step does."""
        return next(
            (state for step, state in reversed(self.pairs) if name in step.writes), None
        )

    @cached_property
    def types(self) -> list[Types]:
        """The working types before each step, and after the last."""
        return stages(self.steps, "the preprocessor", self.raw)

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Types of the result's columns by name: ids are ``int64`` or ``list<int64>``, numbers ``float32``."""
        outputs = {}
        for step in self.steps:
            for name in step.writes:
                outputs[name] = self.types[-1][name].replace("float64", "float32")
        for name in self.keep:
            raw = self.raw[name]
            # Times become seconds.
            outputs[name] = "int64" if raw in TIMES or raw == "bool" else raw
        return outputs

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
        writers: dict[str, int | str] = {}
        for number, (step, state) in enumerate(self.pairs):
            # By number at first: a later step may replace the column that would name
            # it.
            for name in step.writes:
                writers[name] = number if isinstance(state, Vocabulary) else name
        first_columns: dict[int | str, str] = {}
        return {
            name: first_columns.setdefault(writers[name], name) for name in self.vocab
        }

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

        If the digest differs, values have another meaning, for example because of another salt, mean or boundary. The
        values of a vocabulary are not part of it, see ``id_values``.
        """
        digests: dict[str, str] = {}
        for step, state in self.pairs:
            inputs = {name: digests.get(name, "") for name in step.reads}
            origin = json_digest([type(step).__name__, inputs, step.meaning(state)])
            digests |= dict.fromkeys(step.writes, origin)
        return digests

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
        """Writes the rows of a source as parquet, ``out/part-*.parquet``, for ``read_parquet`` and the loader.

        DuckDB keeps the order of the files' rows; Spark and tables promise none, unless ``order_by`` asks for one.

        Args:
            source: see :meth:`Preprocessor.fit`.
            out: folder to write, which is there whole or not at all.
            events: rows to make histories of; ``source`` by default.
            order_by: columns of the source by which to sort.
            engine: see :func:`~torchrec_ext.data.preprocess.engines.connected`.
            overwrite: replace what is in ``out``.
            progress: function that is called with the number of rows written so far.

        Returns:
            The number of rows.

        Raises:
            DataError: a row lacks a value, a list is too long, a file is damaged or the disk is
                full.
        """
        out = Path(out)
        with (
            whole_folder(out, overwrite=overwrite, mark="part-*.parquet") as staging,
            connected(engine) as opened,
        ):
            columns = list(dict.fromkeys([*self.raw, *order_by]))
            event_columns = list(
                dict.fromkeys(name for step in self.steps for name in step.event_reads)
            )
            data, past = open_sources(source, events, columns, event_columns, opened)
            data.check_types(self.raw, "in fitting")
            # The folder `out` is replaced at the end: no file in it may be a source.
            for opened_source in (data, past):
                if opened_source.files:
                    keep_sources(out, opened_source.files.files)
            sink = Sink(staging, self.outputs, self.remedies(), progress)
            with past.blaming(), data.blaming():
                table = _apply_steps(self, data, past.table, opened)
                table = _sorted(table, data, order_by)
                rows = opened.write(table.select(*self.outputs), sink)
            # Executors of a cluster that write to disks of their own leave nothing
            # here.
            if data.rows not in (None, rows):
                raise DataError(
                    f"{out}: got {rows:,} of the {data.rows:,} rows of {data.where}; where several machines write, "
                    "choose a folder that all of them and this one share"
                )
            return rows

    def online(self, rows: Mapping[str, Sequence[Any]]) -> Chunk:
        """Transforms a request's rows, value for value as :meth:`transform` would write them.

        Args:
            rows: (B,) values by column, None for null; see ``request_columns``. Further columns are ignored.

        Raises:
            DataError: a column is missing, has a value of another type, or a result has no value.
        """
        cells: dict[str, Cells] = {}
        for name, kind in self.request_columns.items():
            if name not in rows:
                raise missing_column("the request", name, rows.keys())
            cells[name] = read_cells(name, rows[name], kind)
        kept_cells = {
            name: _kept_cells(name, rows[name], self.raw[name])
            for name in self.keep
            if name in rows
        }
        _check_sizes({**cells, **kept_cells})
        for (step, state), types in zip(self.pairs, self.types, strict=False):
            cells.update(step.online(cells, types, state))
        # A step may read or replace a column of `keep`; the result has it as it was
        # sent.
        for name in self.keep:
            cells.pop(name, None)
        cells |= kept_cells
        columns = {}
        # Columns of `keep` may be missing, such as the label.
        for name, kind in self.outputs.items():
            if name in cells:
                columns[name] = _result_cells(name, cells[name], kind, self).column()
        return Chunk(columns)

    def remedies(self) -> dict[str, str]:
        """Returns the remedy for a missing value, by column of the result."""
        remedies = {
            name: f"put FillMissing(column='{name}', ...) before it"
            for name in self.outputs
        }
        kept_remedy = (
            "it is kept as it is: fill it where it is written, or do not keep it"
        )
        return remedies | dict.fromkeys(self.keep, kept_remedy)

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
            steps = [
                _save_step(number, *pair, staging)
                for number, pair in enumerate(self.pairs)
            ]
            main = {
                "version": VERSION,
                "keep": list(self.keep),
                "columns": dict(self.raw),
                "steps": steps,
            }
            text = json.dumps(main, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
            (staging / _MAIN).write_text(text)
            (staging / DIGEST).write_text(
                hashlib.sha256(text.encode()).hexdigest() + "\n"
            )

    @classmethod
    def load(cls, folder: str | Path) -> FittedPreprocessor:
        """Reads a folder of :meth:`save`.

        Raises:
            DataError: a file is missing or damaged, or of a version or a step that this package does not know.
        """
        folder = existing_folder(Path(folder))
        text = _main_text(folder)
        try:
            return _from_json(folder, json.loads(text))
        except DataError:
            raise
        # The digests fit, so somebody wrote it by hand.
        except Exception as error:
            kind = type(error).__name__
            raise DataError(
                f"{folder / _MAIN}: is not that of a preprocessor ({kind}: {error}); save it again"
            ) from None


def stages(steps: Sequence[Step], where: str, raw: Mapping[str, str]) -> list[Types]:
    """Returns the working types before each step, and after the last.

    Raises:
        DataError: a step cannot take a column's type.
    """
    types = [Types(where, {name: working_type(kind) for name, kind in raw.items()})]
    for step in steps:
        types.append(types[-1].with_columns(step.types(types[-1])))
    return types


def _check_sizes(cells: Mapping[str, Cells]) -> None:
    sizes = {}
    for name, column in cells.items():
        # One value a row, but for lists.
        sizes[name] = len(column.values if column.lengths is None else column.lengths)
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the request's columns have different numbers of rows, {sizes}; send one entry per row in each"
        )


def _kept_cells(name: str, values: Sequence[Any], raw: str) -> Cells:
    """Reads the values of a column of ``keep``; times become seconds."""
    column = read_cells(name, values, raw)
    if raw in TIMES:
        return column.with_values(column.values // per_second(raw), column.valid)
    return column


def _result_cells(
    name: str, cells: Cells, kind: str, fitted: FittedPreprocessor
) -> Cells:
    """Casts values to the result's type; raises a DataError if one is missing."""
    values = cells.values
    valid = cells.valid
    # What is beyond float32 is checked before the cast, which would make it infinite.
    if element(kind) in ("float32", "float64"):
        with np.errstate(invalid="ignore"):
            valid = valid & np.isfinite(values)
            if element(kind) == "float32":
                valid &= np.abs(values) <= FLOAT32_MAX
                values = np.where(valid, values, 0.0).astype(np.float32)
    if not valid.all():
        index = int((~valid).argmax())
        row = cells.column().row_of(index)
        raise DataError(
            f"column '{name}', row {row}: the result is missing: null, NaN or beyond float32; send a value, or have it "
            f"filled by the preprocessor: {fitted.remedies().get(name, 'fill it before')}"
        )
    return Cells(values=values, valid=valid, lengths=cells.lengths)


# 26 steps took Ibis and DuckDB 2.8 s to plan in one piece, 2.2 s in stages of 8, 5.4 s
# in stages of 1.
_STEPS_PER_STAGE = 8


def _apply_steps(
    fitted: FittedPreprocessor, data: Opened, events: Table, engine: Engine
) -> Table:
    chain = Chain(
        steps=fitted.steps,
        types=fitted.types,
        states=fitted.states,
        engine=engine,
        table=data.table,
        events=events,
    )
    # A step may replace a column in place that `keep` or `order_by` need as it was.
    raw = {f"__raw_{name}__": data.table[name] for name in data.raw}
    table = data.table.mutate(**raw)
    for number, step in enumerate(fitted.steps):
        for predicate, column, rule in step.problems(table, fitted.types[number]):
            _check_rows(data, table, predicate, column, rule, engine)
        table = chain.apply(number, table)
        if number % _STEPS_PER_STAGE == _STEPS_PER_STAGE - 1:
            table = engine.stage(table)
    results = {}
    for name, kind in fitted.outputs.items():
        column = table[name]
        if name in fitted.keep:
            column = table[f"__raw_{name}__"]
            if fitted.raw[name] in TIMES:
                column = whole_seconds(column)
        if kind == "float32":
            column = as_float32(column, engine)
        elif kind == "list<float32>" and name not in fitted.keep:
            column = column.map(lambda value: as_float32(value, engine))
        results[name] = column
    if ROW in table.columns:
        results[ROW] = table[ROW]
    return table.select(**results, **{name: table[name] for name in raw})


def _check_rows(
    data: Opened, table: Table, predicate: Any, column: str, rule: str, engine: Engine
) -> None:
    """Raises a DataError for a row refused by a step."""
    bad = table.filter(predicate)
    has_order = ROW in table.columns
    # The first such row, whatever the engine's threads find first.
    first = bad.select(column, ROW).order_by([ROW]) if has_order else bad.select(column)
    rows = engine.collect(first.limit(1)).to_pylist()
    if not rows:
        return
    # The column holds the file's index times 2**40 and the row in the file.
    row = f", row {rows[0][ROW] % 2**40}" if has_order else ""
    raise DataError(
        f"{data.where}: column '{column}'{row}: {short_text(rows[0][column])}: {rule}"
    )


def _sorted(table: Table, data: Opened, order_by: Sequence[str]) -> Table:
    """Sorts rows by columns of the source, and ties by the order of the files if the engine knows it."""
    order = []
    for name in order_by:
        if name not in data.raw:
            raise missing_column(data.where, name, data.raw.keys())
        order.append(f"__raw_{name}__")
    if ROW in table.columns:
        order.append(ROW)
    return table.order_by(order) if order else table


VERSION = 1
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
_CODECS = ("SNAPPY", "UNCOMPRESSED")
_ENCODINGS = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
# Bytes in memory for each byte of a vocabulary's file; 3 to 5 are usual.
_MAX_EXPANSION = 64
# Further bytes in memory for any file, however small.
_ALLOWANCE = 2**24
_MAIN = "preprocessor.json"
DIGEST = "preprocessor.sha256"


def _from_json(folder: Path, main: Any) -> FittedPreprocessor:
    if main.get("version") != VERSION:
        raise DataError(
            f"{folder / _MAIN}: format version {main.get('version')!r}, this package reads {VERSION}; fit it again, or "
            "install the version of torchrec_ext that wrote it"
        )
    pairs = [_load_step(folder, entry) for entry in main["steps"]]
    return FittedPreprocessor.of(pairs, dict(main["columns"]), main["keep"])


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
    table = pa.table({"value": state.values, "count": state.counts})
    # Values are distinct, so a dictionary of them would take longer and save nothing.
    pq.write_table(
        table, folder / name, write_page_checksum=True, use_dictionary=["count"]
    )
    return {
        **entry,
        "vocabulary": name,
        "rows": len(table),
        "sha256": measure_file(folder / name)["sha256"],
    }


def _load_step(folder: Path, entry: Mapping[str, Any]) -> tuple[Step, StepState]:
    name = entry["step"]
    if name not in STEPS:
        hint = did_you_mean(
            name, STEPS, "install the version of torchrec_ext that wrote it"
        )
        raise DataError(
            f"{folder / _MAIN}: there is no step {name!r}, known are {listed(STEPS)}; {hint}"
        )
    fields = dict(entry["fields"])
    # JSON has no tuples.
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    try:
        step = STEPS[name](**fields)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{folder / _MAIN}: step {name}: {error}; fit it again"
        ) from error
    if "vocabulary" in entry:
        return step, _vocabulary(folder, entry)
    return step, entry["state"]


def _vocabulary(folder: Path, entry: Mapping[str, Any]) -> Vocabulary:
    # The name alone: a path in the file cannot lead out of the folder.
    path = folder / Path(entry["vocabulary"]).name
    if not path.exists():
        raise DataError(
            f"{path}: no such file, {_MAIN} names it; copy the whole folder"
        )
    if measure_file(path)["sha256"] != entry["sha256"]:
        raise DataError(
            f"{path}: does not have the SHA-256 in {_MAIN}: it was changed or damaged; copy it again"
        )
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_size(path, file.metadata, entry["rows"])
        table = file.read().combine_chunks()
    # combine_chunks() has made one chunk of each column; of an empty one there is none
    # to take.
    if not len(table):
        return Vocabulary(
            table["value"].combine_chunks(), table["count"].combine_chunks()
        )
    return Vocabulary(table["value"].chunk(0), table["count"].chunk(0))


def _check_size(path: Path, footer: pq.FileMetaData, rows: int) -> None:
    """Refuses a file, before it is unpacked, if it would take far more memory than it has bytes.

    Distinct values, as in a vocabulary, take about as much memory as the file has bytes. A few repeated values, a codec
    or an encoding other than those of :func:`_save_step` may take thousands of times as much.
    """
    columns = []
    for group in range(footer.num_row_groups):
        columns += [
            footer.row_group(group).column(index) for index in range(footer.num_columns)
        ]
    is_own_format = all(
        column.compression in _CODECS and _ENCODINGS.issuperset(column.encodings)
        for column in columns
    )
    size = path.stat().st_size
    limit = _MAX_EXPANSION * size + _ALLOWANCE
    # 16 bytes a row: a count of int64, and a value of int64 or the offset of a text.
    packed = (
        sum(column.total_uncompressed_size for column in columns) + footer.num_rows * 16
    )
    if (
        footer.num_rows != rows
        or not is_own_format
        or packed > limit
        or _unpacked_texts(path, footer, limit) > limit
    ):
        raise DataError(
            f"{path}: {footer.num_rows:,} rows in {size:,} bytes, which unpack to more than the {limit:,} that are "
            f"read, or are not the {rows:,} in {_MAIN}: it is no vocabulary of this package; fit the preprocessor again"
        )


def _unpacked_texts(path: Path, footer: pq.FileMetaData, limit: int) -> int:
    """Returns an upper bound of the bytes of column ``value``, with a dictionary's text counted once per row."""
    with pq.ParquetFile(path, read_dictionary=["value"]) as file:
        if not pa.types.is_dictionary(file.schema_arrow.field("value").type):
            return 0
        longest = 0
        for group in range(footer.num_row_groups):
            for batch in file.iter_batches(
                1, row_groups=[group], columns=["value"], use_threads=False
            ):
                longest = max(
                    longest,
                    pc.max(pc.binary_length(batch.column(0).dictionary)).as_py() or 0,
                )
                break  # the first row has all of its group's dictionary
        if longest * footer.num_rows <= limit:
            return int(longest * footer.num_rows)
        total = 0
        for chunk in file.read(columns=["value"], use_threads=False)["value"].chunks:
            total += (
                pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py()
                or 0
            )
        return int(total)


def _main_text(folder: Path) -> str:
    """Returns the text of the main file, checked by its digest."""
    text = _text(folder / _MAIN)
    if hashlib.sha256(text.encode()).hexdigest() != _text(folder / DIGEST).strip():
        raise DataError(
            f"{folder / _MAIN}: does not fit {DIGEST}: it was changed or damaged; save it again, or copy the "
            "folder anew"
        )
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; name the folder that FittedPreprocessor.save wrote"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); copy the folder again"
        ) from error
