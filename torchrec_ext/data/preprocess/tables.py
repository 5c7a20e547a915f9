"""A source as a table of an engine, its columns in the types that steps see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.column_types import is_list, working_type
from torchrec_ext.data.preprocess.engines import ROW, Engine
from torchrec_ext.data.preprocess.sources import Files, Source, blaming, raw_types, scan
from torchrec_ext.data.preprocess.step import Table


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source in an engine.

    Args:
        table: the columns that were asked for, in working types, and ``__row__`` where rows have an order.
        raw: by column, its raw type.
        where: the files, for messages.
        files: None for a table.
    """

    table: Table
    raw: Mapping[str, str]
    where: str
    files: Files | None

    @property
    def rows(self) -> int | None:
        """How many, where it is known without reading."""
        return self.files.rows if self.files else None

    def blaming(self) -> AbstractContextManager[None]:
        """Names the damaged file when the engine stumbles."""
        return blaming(self.files.files) if self.files else nullcontext()


def open_source(source: Source, columns: Sequence[str], engine: Engine) -> Opened:
    """Opens files, or takes a table.

    Raises:
        DataError: a file or a column is missing, damaged or of a wrong type.
    """
    if hasattr(source, "schema") and hasattr(source, "mutate"):
        files, where, table = None, "the table", source
        schema = dict(zip(source.columns, source.schema().to_pyarrow().types, strict=True))
    else:
        files = scan(source)
        where, schema, table = files.where, dict(files.schema), None
    raw = raw_types(where, schema, columns)
    if table is None:
        assert files is not None
        table = engine.read(files)
    kept = {ROW: table[ROW]} if ROW in table.columns else {}
    return Opened(
        table=table.select(**{name: _working(table[name], raw[name]) for name in columns}, **kept),
        raw=raw,
        where=where,
        files=files,
    )


def _working(column: Any, raw: str) -> Any:
    """The column in the type that steps see; a null list becomes an empty one."""
    import ibis

    if is_list(raw):
        dtype = f"array<{working_type(raw)[5:-1]}>"
        return ibis.coalesce(column.cast(dtype), ibis.literal([], type=dtype))
    if raw.startswith("timestamp"):
        return column
    return column.cast(working_type(raw))
