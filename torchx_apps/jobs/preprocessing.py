"""A preprocessing run: fits on the first split, transforms all, and counts what a training asks for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrec_ext.data.config import Roles
from torchrec_ext.data.features import owned_columns
from torchrec_ext.data.files.sources import find_files
from torchrec_ext.data.prepare import SUMMARY, write_folder
from torchrec_ext.data.preprocess import Cross, History, Preprocessor
from torchrec_ext.data.preprocess.columns import (
    INT64,
    CellError,
    Types,
    short_text,
)
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor, stages, unknown_line
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.data.preprocess.rows import (
    ROW,
    Connection,
    Opened,
    connected,
    open_source,
    telling,
)
from torchrec_ext.data.preprocess.step import finite, quoted
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed
from torchx_apps.config import is_group
from torchx_apps.jobs.tracking import tracked
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob


def summarize(prepared: Prepare, con: Connection) -> None:
    """Prints DuckDB's summary of the raw columns."""
    source = prepared.first_source
    opened = open_source(source, prepared.preprocessor.raw_columns, con)
    columns = ", ".join(map(quoted, opened.raw))
    names = "column_name, column_type, min, max, approx_unique, null_percentage"
    con.sql(
        f"SELECT {names} FROM (SUMMARIZE SELECT {columns} FROM {opened.view})"
    ).show(max_rows=len(opened.raw), max_width=120)


# Rows of items beyond the first of each, below which a column may follow them by chance.
_REPEATS = 1_000


def item_notes(
    prepared: Prepare, fitted: FittedPreprocessor, roles: Roles, con: Connection
) -> list[str]:
    """Returns a line for each column of a doubtful owner: context that tells the item, or an item's that changes."""
    if roles.item is None:
        return []
    (key,) = fitted.only([roles.item]).request_columns
    names = [name for name in fitted.request_columns if name in fitted.raw]
    rows = open_source(prepared.first_source, list(dict.fromkeys([key, *names])), con)
    ends = ["count(*) AS n"]
    kinds = []
    for number, name in enumerate(names):
        low, high = f"low_{number}", f"high_{number}"
        ends.append(f"min({quoted(name)}) AS {low}, max({quoted(name)}) AS {high}")
        # With one value in all rows a column tells nothing.
        kinds.append(
            f"CASE WHEN bool_or({low} < {high}) THEN 'changes' WHEN min({low}) < max({high}) THEN 'follows' END"
        )
    items = f"SELECT {', '.join(ends)} FROM {rows.view} GROUP BY {quoted(key)}"
    sql = f"SELECT {', '.join(kinds)} FROM ({items}) HAVING sum(n - 1) >= {_REPEATS}"
    kind_of: dict[str, str] = {}
    for found in con.sql(sql).fetchall():
        kind_of = dict(zip(names, found, strict=True))
    of_items = owned_columns("item", fitted.outputs, (roles.item, *roles.item_features))
    of_users = owned_columns("user", fitted.outputs, (roles.user, *roles.user_features))
    notes = []
    for name in fitted.outputs:
        column_of = {
            kind_of.get(column): column
            for column in fitted.only([name]).request_columns
        }
        if name in of_users:
            continue
        if name not in of_items and "follows" in column_of:
            notes.append(
                f"context column '{name}' reads '{column_of['follows']}', which the item decides: a ranking sees the "
                "answer in it, and a request must send it; name it in Prepare(item_features=), or leave it out"
            )
        elif name in of_items and "changes" in column_of:
            notes.append(
                f"column '{name}' of the item differs among its rows: a bundle scores the item by that of its last "
                "training row; if it is known with a request, make it context"
            )
    return notes


class _Rule(NamedTuple):
    """A condition of values that would train silently."""

    name: str
    condition: str
    remedy: str


def check_rows(prepared: Prepare, con: Connection) -> None:
    """Reads the rows of each split once for values that would train silently.

    Raises:
        DataError: a label is not from 0 to 1, an id of the users or items is empty or holds a NUL byte, or a text of a
            relation holds a line break; or the user or the item is no id.
    """
    labels = [name for name in (prepared.label, *prepared.tasks) if name]
    raw_columns = prepared.preprocessor.raw_columns
    names = list(dict.fromkeys([*raw_columns, *labels]))
    types: Mapping[str, str] = getattr(prepared.preprocessor, "raw", {})
    for split, source in prepared.splits.items():
        try:
            opened = open_source(source, names, con)
            opened.check_types(types, "in training")
            for name in labels:
                if opened.raw[name] not in ("bool", "int64", "float32", "float64"):
                    raise DataError(
                        f"{opened.where}: column '{name}' is {opened.raw[name]}, and a label is a number from 0 to 1, "
                        f"such as CAST(rating >= 4 AS FLOAT) AS {quoted(name)}"
                    )
        except DataError as error:
            raise DataError(f"split '{split}': {error}") from None
        types = types or {name: opened.raw[name] for name in raw_columns}
        _check_roles(prepared, stages(prepared.preprocessor.steps, opened.where, types))
        figures = []
        rules = _rules(prepared, opened, labels)
        for rule in rules:
            only = f"FILTER (WHERE {rule.condition})"
            figures.append(f"count(*) {only}, min({ROW}) {only}")
        numbered = f"(SELECT *, row_number() OVER () - 1 AS {ROW} FROM {opened.view})"
        sql = f"SELECT {', '.join([*figures, 'count(*)'])} FROM {numbered}"
        (found,) = con.sql(sql).fetchall()
        if not found[-1]:
            raise DataError(f"split '{split}' has no rows; give it at least one")
        for rule, count, first in zip(rules, found[::2], found[1::2], strict=False):
            if count:
                where, row = opened.place(first)
                named = (
                    f"SELECT {quoted(rule.name)} FROM {numbered} WHERE {ROW} = {first}"
                )
                ((value,),) = con.sql(named).fetchall()
                text = f"{short_text(value)[:40]}, in {count:,} rows: {rule.remedy}"
                raise CellError(rule.name, row, text, where)


def _check_roles(prepared: Prepare, types: Sequence[Types]) -> None:
    """Refuses a user and an item that are no ids, and an item of several columns."""
    for role, name in (("user", prepared.user), ("item", prepared.item)):
        if name and types[-1][name] != INT64:
            raise DataError(
                f"Prepare.{role}: '{name}' is {types[-1][name]}, and each row has one id there; name an output of "
                "Categorify, of a column without lists"
            )
    for step in prepared.preprocessor.steps:
        if isinstance(step, Cross) and prepared.item in step.writes:
            raise DataError(
                f"Prepare.item: '{prepared.item}' is made of {listed(step.columns)}, and a catalogue names items by "
                "one column; make one of them in SQL, such as brand || '/' || model"
            )


def _rules(prepared: Prepare, rows: Opened, labels: Sequence[str]) -> list[_Rule]:
    rules = []
    for name in labels:
        value = f"CAST({quoted(name)} AS DOUBLE)"
        bad = f"({value} IS NULL OR {value} NOT BETWEEN 0 AND 1 OR NOT {finite(value)})"
        remedy = f"a label is from 0 to 1, such as CAST(rating >= 4 AS FLOAT) AS {quoted(name)}"
        rules.append(_Rule(name, bad, remedy))
    ids = _read_for(prepared, prepared.user, prepared.item)
    for name, kind in rows.raw.items():
        if kind != "string":
            continue
        column = quoted(name)
        if name in ids:
            remedy = f"an id without a name, or with a NUL byte; write NULL if it is missing: nullif({name}, '')"
            empty = f"{column} = '' OR contains({column}, chr(0))"
            rules.append(_Rule(name, empty, remedy))
        # Parquet has no quotes.
        if rows.source is None:
            remedy = "a line break, as of a quote without its end; read a CSV by read_csv of data.preprocess, "
            remedy += f"or replace({name}, chr(10), ' ')"
            rules.append(_Rule(name, f"contains({column}, chr(10))", remedy))
    return rules


def _read_for(prepared: Prepare, *names: str | None) -> set[str]:
    """Returns the columns of which the steps make the columns ``names``."""
    read: set[str] = set()
    for step in prepared.preprocessor.steps:
        if not {*names}.isdisjoint(step.writes):
            read.update(step.reads)
    return read


def run_preprocess(job: PreprocessJob) -> Path:
    """Writes ``out/<split>/*.parquet``, ``out/raw``, ``out/preprocessor/`` and ``out/summary.json``.

    The folder appears when all of it is written. What can fail without reading all rows fails first.

    Returns:
        The folder's path.

    Raises:
        DataError: the data cannot be preprocessed so; the message says what to do.
    """
    out = Path(job.out or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    begun = time.monotonic()
    config = dataclasses.asdict(job.config) if is_group(job.config) else None
    settings = {
        "threads": job.threads,
        "memory": job.memory,
        "config": config or {},
    }
    with (
        tracked(out, {"recipe": job.name, **settings}, folder="data") as figures,
        whole_folder(out, overwrite=job.overwrite, mark=SUMMARY) as staging,
        connected(threads=job.threads, memory=job.memory) as con,
        telling(),
    ):
        prepared = job.build(job.config, con)
        _keep_sources(out, prepared)
        check_rows(prepared, con)
        summarize(prepared, con)
        fitted = prepared.preprocessor
        if isinstance(fitted, Preprocessor):
            fitted = fitted.fit(
                prepared.first_source,
                con=con,
                events=prepared.events,
                progress=lambda step: print(f"fit {step}", flush=True),
            )
        roles = _roles(prepared)
        notes = item_notes(prepared, fitted, roles, con)
        for note in notes:
            print(f"note: {note}", flush=True)
        print(f"transform {', '.join(prepared.splits)}", flush=True)
        counts = write_folder(
            staging,
            fitted,
            prepared.splits,
            roles,
            con,
            events=prepared.events,
            details={"recipe": job.name, "config": config, "notes": notes},
        )
        figures |= {
            "rows": {split: each.rows for split, each in counts.items()},
            "vocab": fitted.vocab,
            "unknown": {split: each.unknown for split, each in counts.items()},
        }
        figures["seconds"] = time.monotonic() - begun
    for split, each in counts.items():
        print(unknown_line(split, each.rows, each.unknown), flush=True)
    rows = sum(each.rows for each in counts.values())
    seconds = time.monotonic() - begun
    print(f"{rows:,} rows in {seconds:.1f} s; written to {out}", flush=True)
    return out


def _keep_sources(out: Path, prepared: Prepare) -> None:
    """Refuses an output folder with a source in it, since it may be replaced."""
    for source in (*prepared.splits.values(), prepared.events):
        # A relation has no files.
        if source is not None and not hasattr(source, "create_view"):
            keep_sources(out, find_files(source))


def _roles(prepared: Prepare) -> Roles:
    """Returns the roles of the result's columns: each history of the user is the user's, too."""
    fields = {
        field.name: getattr(prepared, field.name) for field in dataclasses.fields(Roles)
    }
    keys = _read_for(prepared, prepared.user)
    names = [*prepared.user_features]
    for step in prepared.preprocessor.steps:
        if isinstance(step, History) and step.user in keys:
            names += step.writes
    fields["user_features"] = [
        name for name in dict.fromkeys(names) if name not in prepared.item_features
    ]
    return Roles(**fields)
