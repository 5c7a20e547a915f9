"""A preprocessing run: fits on the first split, transforms all, and counts what a training asks for."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate
from tqdm import tqdm

from torchrec_ext.data.features import owned_columns
from torchrec_ext.data.files.sources import DataFile, find_files
from torchrec_ext.data.prepare import (
    RAW_ITEMS,
    RAW_POPULARITY,
    RAW_REQUESTS,
    RAW_USERS,
    SUMMARY,
    Counts,
    Roles,
)
from torchrec_ext.data.preprocess import (
    FittedPreprocessor,
    History,
    Step,
    Vocabulary,
)
from torchrec_ext.data.preprocess.columns import CellError, short_text
from torchrec_ext.data.preprocess.fitted import requests_sql
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.data.preprocess.rows import (
    ROW,
    Connection,
    Opened,
    connected,
    named,
    open_source,
    table,
    telling,
)
from torchrec_ext.data.preprocess.step import quoted
from torchrec_ext.schema import DataError
from torchx_apps.config import is_group
from torchx_apps.jobs.tracking import tracked
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob
from torchx_apps.tasks.export_data import AUDITED

# Users and their latest events are held in memory, some 500 bytes each.
NAMED = 2_000_000


def summarize(prepared: Prepare, con: Connection) -> dict[str, float]:
    """Prints DuckDB's summary of the raw columns; returns the share of rows with null, by column."""
    source = prepared.first_source
    opened = open_source(source, prepared.preprocessor.raw_columns, con)
    columns = ", ".join(map(quoted, opened.raw))
    shown = table(
        con,
        "SELECT column_name, column_type, min, max, approx_unique, null_percentage "
        f"FROM (SUMMARIZE SELECT {columns} FROM {opened.view})",
    )
    rows = shown.to_pylist()
    for row in rows:
        for name in ("min", "max"):
            row[name] = str(row[name])[:24]
    print(f"\n{tabulate(rows, headers='keys', disable_numparse=True)}\n", flush=True)
    return {row["column_name"]: float(row["null_percentage"]) / 100 for row in rows}


class _Rule(NamedTuple):
    """A condition of values that would train silently; with a remedy they are refused, else counted."""

    name: str
    condition: str
    remedy: str


def check_rows(prepared: Prepare, con: Connection) -> None:
    """Reads the rows of each split once for values that would train silently, and counts doubtful texts.

    Raises:
        DataError: a label is not from 0 to 1, an id of the users or items is empty or holds a NUL byte, or a text of a
            relation holds a line break.
    """
    labels = [name for name in (prepared.label, *prepared.tasks) if name]
    for split, source in prepared.splits.items():
        columns = [*prepared.preprocessor.raw_columns, *labels]
        opened = open_source(source, list(dict.fromkeys(columns)), con)
        figures = []
        rules = _rules(prepared, opened, labels)
        for rule in rules:
            only = f"FILTER (WHERE {rule.condition})"
            figures.append(f"count(*) {only}, min({ROW}) {only}")
        numbered = f"(SELECT *, row_number() OVER () - 1 AS {ROW} FROM {opened.view})"
        sql = f"SELECT {', '.join([*figures, 'count(*)'])} FROM {numbered}"
        (found,) = con.sql(sql).fetchall()
        for rule, count, first in zip(rules, found[::2], found[1::2], strict=False):
            if count and rule.remedy:
                where, row = opened.place(first)
                named = (
                    f"SELECT {quoted(rule.name)} FROM {numbered} WHERE {ROW} = {first}"
                )
                ((value,),) = con.sql(named).fetchall()
                text = f"{short_text(value)[:40]}, in {count:,} rows: {rule.remedy}"
                raise CellError(rule.name, row, text, where)
            if count:
                print(
                    f"note: {split}: column '{rule.name}': {count:,} values are empty or hold a NUL byte, and are "
                    "values like others; NULL is unknown",
                    flush=True,
                )


def _rules(prepared: Prepare, rows: Opened, labels: Sequence[str]) -> list[_Rule]:
    rules = []
    for name in labels:
        bad = f"CAST({quoted(name)} AS DOUBLE) NOT BETWEEN 0 AND 1"
        remedy = f"a label is from 0 to 1, such as CAST(rating >= 4 AS FLOAT) AS {quoted(name)}"
        rules.append(_Rule(name, bad, remedy))
    ids = _raw_ids(prepared, rows)
    for name, kind in rows.raw.items():
        if kind != "string":
            continue
        column = quoted(name)
        remedy = ""
        if name in ids:
            remedy = f"an id without a name, or with a NUL byte; write NULL if it is missing: nullif({name}, '')"
        empty = f"{column} = '' OR contains({column}, chr(0))"
        rules.append(_Rule(name, empty, remedy))
        # Parquet has no quotes.
        if rows.files is None:
            remedy = "a line break, as of a quote without its end; read a CSV by read_csv of data.preprocess"
            rules.append(_Rule(name, f"contains({column}, chr(10))", remedy))
    return rules


def _raw_ids(prepared: Prepare, rows: Opened) -> set[str]:
    """Returns the raw columns of the users' and the items' ids."""
    steps: list[tuple[Step, Any]] = [(step, {}) for step in prepared.preprocessor.steps]
    unfitted = FittedPreprocessor.of(steps, rows.raw)
    ids: set[str] = set()
    for name in filter(None, (prepared.user, prepared.item)):
        ids.update(unfitted.only([name]).request_columns)
    return ids


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
        files = _source_files(out, prepared)
        missing = summarize(prepared, con)
        check_rows(prepared, con)
        fitted = _fit(prepared, con)
        fitted.save(staging / "preprocessor")
        counts = {
            split: _transform(prepared, fitted, split, staging, con)
            for split in prepared.splits
        }
        write_raw_rows(prepared, fitted, staging, con)
        first = next(iter(counts.values()))
        if len(first.popularity):
            pq.write_table(
                pa.table({"count": first.popularity}), staging / RAW_POPULARITY
            )
        # The passes above must have read the same rows.
        if (now := _source_files(out, prepared)) != files:
            changed = next(
                (file for file in files if file not in now), (*files, *now)[0]
            )
            raise DataError(
                f"{changed.name}: files changed, came into the log or left it while it was read; start anew, and let "
                "new data come into a folder of their own"
            )
        summary = {
            "recipe": job.name,
            "config": config,
            "rows": {split: each.rows for split, each in counts.items()},
            "roles": _roles(prepared),
            "columns": fitted.outputs,
            "vocab": fitted.vocab,
            "dense": list(fitted.dense),
            "missing": missing,
            "unknown": {split: each.unknown for split, each in counts.items()},
            "labels": {split: each.labels for split, each in counts.items()},
        }
        (staging / SUMMARY).write_text(
            json.dumps(summary, indent=2, default=str) + "\n"
        )
        figures |= {
            name: summary[name] for name in ("rows", "vocab", "missing", "unknown")
        }
        figures["seconds"] = time.monotonic() - begun
    for split, each in counts.items():
        _print_unknown(split, each)
    rows = sum(each.rows for each in counts.values())
    seconds = time.monotonic() - begun
    print(f"{rows:,} rows in {seconds:.1f} s; written to {out}", flush=True)
    lacking = [name for name in ("train", "test") if name not in prepared.splits]
    if lacking:
        print(
            f"note: recipes that train need a split named {' and '.join(lacking)}; a loop of your own does not",
            flush=True,
        )
    return out


def _print_unknown(split: str, counts: Counts) -> None:
    shares = [f"{name} {share:.2%}" for name, share in counts.unknown.items() if share]
    text = ", ".join(shares) or "none"
    print(f"{split}: {counts.rows:,} rows; unknown ids: {text}", flush=True)


def _source_files(out: Path, prepared: Prepare) -> list[DataFile]:
    """Returns the files of all sources; refuses an output folder with a source in it, since it may be replaced."""
    files = []
    for source in (*prepared.splits.values(), prepared.events):
        # A relation has no files.
        if source is not None and not hasattr(source, "create_view"):
            files += find_files(source)
    keep_sources(out, files)
    return files


def _fit(prepared: Prepare, con: Connection) -> FittedPreprocessor:
    first, source = next(iter(prepared.splits.items()))
    with tqdm(
        total=len(prepared.preprocessor.steps),
        desc=f"fit on {first}",
        unit="step",
        dynamic_ncols=True,
    ) as bar:
        # `begin` is called at the beginning of a step, so the first call completes
        # none.
        steps_done = -1

        def begin(step: str) -> None:
            nonlocal steps_done
            steps_done += 1
            bar.set_postfix_str(step, refresh=False)
            bar.update(steps_done - bar.n)

        fitted = prepared.preprocessor.fit(
            source, con=con, events=prepared.events, progress=begin
        )
        bar.set_postfix_str("", refresh=False)
        bar.update(bar.total - bar.n)
    return fitted


def _transform(
    prepared: Prepare,
    fitted: FittedPreprocessor,
    split: str,
    folder: Path,
    con: Connection,
) -> Counts:
    counts = Counts(fitted, Roles(**_roles(prepared)), folder, split)
    with tqdm(
        desc=f"transform {split}", unit=" rows", unit_scale=True, dynamic_ncols=True
    ) as bar:

        def watch(batch: pa.RecordBatch) -> None:
            counts.add(batch)
            bar.update(batch.num_rows)

        fitted.transform(
            prepared.splits[split],
            folder / split,
            events=prepared.events,
            con=con,
            watch=watch,
        )
        counts.close()
    return counts


def write_raw_rows(
    prepared: Prepare, fitted: FittedPreprocessor, folder: Path, con: Connection
) -> None:
    """Writes rows as they stand in the log, for the bundle of the recipe ``stream``: some requests, items and users.

    A request has the columns of a training row, and the user's latest events where the result has histories. The rows
    are spread evenly over the training rows, whose first ones in a log have hardly any event before them. An item has
    the columns of its last training row, and the column ``title`` if there is one.
    """
    histories = [step for step in fitted.steps if isinstance(step, History)]
    keys: list[str] = []
    for step in histories:
        keys += [step.user, step.time]
    columns = [name for name in fitted.request_columns if name in fitted.raw]
    rows = open_source(prepared.first_source, [*columns, *keys], con)
    events = rows
    if prepared.events is not None and histories:
        events = open_source(prepared.events, fitted.event_reads, con)
    count = table(con, f"SELECT count(*) AS n FROM {rows.view}")["n"][0].as_py()
    every = max(1, -(-count // AUDITED))
    (folder / RAW_REQUESTS).parent.mkdir()
    asked = dataclasses.replace(fitted, keep=())
    sql = requests_sql(asked, rows, events, where=f"{ROW} % {every} = 0")
    pq.write_table(table(con, sql), folder / RAW_REQUESTS)
    if prepared.user is not None:
        _write_users(prepared, prepared.user, fitted, folder / RAW_USERS, con)
    if prepared.item is None:
        return
    (key,) = fitted.only([prepared.item]).request_columns
    item_columns = owned_columns("item", fitted.outputs, prepared.item_features)
    raw = [name for name in fitted.only(item_columns).request_columns if name != key]
    opened = open_source(prepared.first_source, [key, *raw], con)
    # Shown with recommendations.
    if "title" in con.sql(f"SELECT * FROM {opened.view} LIMIT 0").columns:
        raw = list(dict.fromkeys([*raw, "title"]))
    sql = f"{_last_of_each(opened, key, raw)} ORDER BY {quoted(key)}"
    pq.write_table(table(con, sql), folder / RAW_ITEMS)


def _last_of_each(rows: Opened, key: str, columns: Sequence[str]) -> str:
    """Returns SQL for a row for each value of ``key``, with its last row's values of ``columns``."""
    names = ", ".join(map(quoted, [key, *columns]))
    # The last row's values, also where one of them is null.
    last = ", ".join(
        f"arg_max_null({quoted(name)}, {ROW}) AS {quoted(name)}" for name in columns
    )
    return (
        f"SELECT {', '.join([quoted(key), *([last] if last else [])])} "
        f"FROM (SELECT {names}, row_number() OVER () AS {ROW} FROM {rows.view}) "
        f"WHERE {quoted(key)} IS NOT NULL GROUP BY {quoted(key)}"
    )


def _write_users(
    prepared: Prepare,
    user: str,
    fitted: FittedPreprocessor,
    path: Path,
    con: Connection,
) -> None:
    """Writes the users of the training rows with their request columns; nothing if they are hashed."""
    if not isinstance(fitted.state_of(user), Vocabulary):
        return
    (key,) = fitted.only([user]).request_columns
    user_steps = fitted.only(owned_columns("user", fitted.outputs, _of_user(prepared)))
    histories = [step for step in user_steps.steps if isinstance(step, History)]
    # The events come from the log, not from the last row, and so does the time.
    not_last = {key}
    for step in histories:
        not_last |= {step.time, *step.sent}
    columns = [name for name in user_steps.request_columns if name not in not_last]
    opened = open_source(prepared.first_source, [key, *columns], con)
    users = table(con, _last_of_each(opened, key, columns))
    if len(users) > NAMED:
        print(
            f"{len(users):,} users are more than the {NAMED:,} that a bundle knows by id: its requests are whole rows",
            flush=True,
        )
        return
    view = named(con, users)
    others = [step for step in fitted.steps if not isinstance(step, History)]
    read_by_others = {name for step in others for name in step.reads}
    for step in histories:
        # A history of other users' events does not belong to the user.
        if step.user == key:
            log = prepared.first_source if prepared.events is None else prepared.events
            events = open_source(log, step.event_reads, con)
            view = f"({step.latest_sql(view, events.view)})"
            # Where only histories read the time, a user known by id alone is asked at
            # the log's end. An hour of the day must come with the request.
            if step.time not in read_by_others:
                view = (
                    f"({step.end_time_sql(view, events.view, fitted.raw[step.time])})"
                )
                read_by_others.add(step.time)
    sql = f"SELECT * FROM {view} ORDER BY {quoted(key)}"
    pq.write_table(table(con, sql), path)


def _of_user(prepared: Prepare) -> tuple[str, ...]:
    """Returns the user's columns beside ``user_...``: those that were named, and each history of the user."""
    keys: list[str] = []
    for step in prepared.preprocessor.steps:
        if prepared.user in step.writes:
            keys += step.reads
    names = [*prepared.user_features]
    for step in prepared.preprocessor.steps:
        if isinstance(step, History) and step.user in keys:
            names += step.writes
    return tuple(
        name for name in dict.fromkeys(names) if name not in prepared.item_features
    )


def _roles(prepared: Prepare) -> dict[str, Any]:
    """Returns the result's columns with a role beyond features; see :class:`Roles`."""
    roles = {
        field.name: getattr(prepared, field.name) for field in dataclasses.fields(Roles)
    }
    roles["user_features"] = _of_user(prepared)
    # A label that the preprocessor does not keep is only drawn.
    if prepared.label not in prepared.preprocessor.keep:
        roles["label"] = ""
    return roles
