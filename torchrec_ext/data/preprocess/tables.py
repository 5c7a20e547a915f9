"""open_source(): opens files or a table as a table of an engine, its columns in working types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.columns import TIMES, is_list_column, working_type
from torchrec_ext.data.preprocess.engines import ROW, Engine
from torchrec_ext.data.preprocess.files import Files, Source, raw_types, scan
from torchrec_ext.data.preprocess.step import Table
from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source opened by an engine.

    Args:
        table: the requested columns, in working types, and ``__row__`` if rows have an order.
        raw: raw type of each column.
        where: name of the files, for messages.
        files: files that were opened; None for a table.
    """

    table: Table
    raw: Mapping[str, str]
    where: str
    files: Files | None

    def check_types(self, expected_types: Mapping[str, str], elsewhere: str) -> None:
        """Refuses a column with another type than it has elsewhere.

        Raises:
            DataError: the types differ; the message names column, types and remedy.
        """
        for name, kind in expected_types.items():
            if self.raw[name] != kind:
                raise DataError(
                    f"{self.where}: column '{name}' is {self.raw[name]}, {elsewhere} it is {kind}; write it with that "
                    "type"
                )

    @property
    def rows(self) -> int | None:
        """Number of rows, if known without reading."""
        return self.files.rows if self.files else None

    def blaming(self) -> AbstractContextManager[None]:
        """Names the damaged file when the engine fails on it."""
        # A table has no files that could be read again.
        return self.files.blaming() if self.files else nullcontext()


def open_sources(
    source: Source,
    events: Source | None,
    columns: Sequence[str],
    event_columns: Sequence[str],
    engine: Engine,
) -> tuple[Opened, Opened]:
    """Opens the rows, and the events behind histories: the same rows if no others are given or needed.

    Raises:
        DataError: see :func:`open_source`; or an event's column has another type than the row's.
    """
    data = open_source(source, columns, engine)
    if events is None or not event_columns:
        return data, data
    past = open_source(events, event_columns, engine)
    past.check_types(
        {name: data.raw[name] for name in event_columns}, f"in {data.where}"
    )
    return data, past


def open_source(source: Source, columns: Sequence[str], engine: Engine) -> Opened:
    """Opens files, or takes a table.

    Raises:
        DataError: a file or a column is missing, damaged or of a wrong type.
    """
    if hasattr(source, "schema") and hasattr(source, "mutate"):
        if not engine.owns(source):
            raise DataError(
                f"the table is of another connection than the engine {engine.name}; make it with the "
                "engine's own, as in engine.ibis.read_csv(...), or give files"
            )
        files = None
        where = "the table"
        table = source
        schema = dict(
            zip(source.columns, source.schema().to_pyarrow().types, strict=True)
        )
    else:
        files = scan(source)
        where = files.where
        schema = dict(files.schema)
        table = None
    # Types are checked from the footers, before an engine opens anything.
    raw = raw_types(where, schema, columns)
    if table is None:
        assert files is not None
        table = engine.read(files)
    expressions = {name: _working(table[name], raw[name]) for name in columns}
    if ROW in table.columns:
        expressions[ROW] = table[ROW]
    return Opened(table=table.select(**expressions), raw=raw, where=where, files=files)


def _working(column: Any, raw: str) -> Any:
    """Casts a column to its working type; a null list becomes an empty one."""
    import ibis

    if is_list_column(raw):
        dtype = working_type(raw).replace("list", "array")
        return ibis.coalesce(column.cast(dtype), ibis.literal([], type=dtype))
    # Times keep their unit, which steps take from the type.
    if raw in TIMES:
        return column
    return column.cast(working_type(raw))
