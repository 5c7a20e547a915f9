"""write_folder(): steps, splits and roles -> a prepared folder, the only form of data that training reads.

write_set(): a RawSet, rows as files have them with the role of each column, -> such a folder.

Steps follow a column's type: text and whole numbers become ids, fractions numbers, times their hour or weekday.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.config import Roles
from torchrec_ext.data.features import RawColumns, owned_columns
from torchrec_ext.data.known import known_path, write_known
from torchrec_ext.data.preprocess import (
    Categorify,
    FillMissing,
    FittedPreprocessor,
    History,
    Lists,
    Normalize,
    Preprocessor,
    Step,
    TimeFeatures,
    Vocabulary,
)
from torchrec_ext.data.preprocess.fitted import requests_sql, unknown_shares
from torchrec_ext.data.preprocess.history import event_columns
from torchrec_ext.data.preprocess.numeric import rounded
from torchrec_ext.data.preprocess.rows import (
    ROW,
    Connection,
    Opened,
    Source,
    connected,
    named,
    open_source,
    table,
    view_of,
)
from torchrec_ext.data.preprocess.step import quoted
from torchrec_ext.data.preprocess.times import Feature
from torchrec_ext.schema import DataError

# The folder that `rec.data.preprocess` writes next to the rows.
PREPROCESSOR = "preprocessor"
SUMMARY = "summary.json"
# 2: sums of labels, popularity and known pairs beside the rows.
VERSION = 2
# Some training rows as a request has them.
RAW_REQUESTS = "raw/requests.parquet"
# A row for each item, its columns as in the log.
RAW_ITEMS = "raw/items.parquet"
# A row for each user: the user's columns and latest events as a request has them.
RAW_USERS = "raw/users.parquet"
# The number of positive training rows of each row of the items' table.
RAW_POPULARITY = "raw/popularity.parquet"
# Column of the items before a row's item, in a set of sessions.
SESSION = "session"
# Column of the items' texts for display.
TITLE = "title"
# Requests that are kept for an export, which compares its answers with the live model.
AUDITED = 1_000
# Users and their latest events are held in memory, some 500 bytes each.
NAMED = 2_000_000
_DAY = 86_400_000_000
OF_TIMES: tuple[Feature, ...] = ("hour", "weekday")
OF_DATES: tuple[Feature, ...] = ("weekday", "month")
# Numbers above this are no seconds since 1970 of a date before the year 5000.
_MILLISECONDS = (10**11, 10**14)

_Figure = Literal["hr", "recall", "ndcg", "mrr"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The rule of a ranking, the same for the model and for what stands beside it.

    Ranked are the items of the training rows. A held-out item that is not among them counts as missed.

    Args:
        at: cut-offs K of the ranking.
        figures: figures to compute, of ``hr``, ``recall``, ``ndcg`` and ``mrr``.
        by: ``row``: each held-out row is a question of its own; ``user``: all held-out items of a user are the answers
            to one, but each row of a user without training rows is a question of its own.
        keep_seen: rank the items that the user has taken before, too. Otherwise they are masked, and a held-out item
            among them, a repeat, counts as missed.
        candidates: column of the held-out rows with item ids: each row's item is ranked among its own and nothing
            else; None for the whole catalogue.
    """

    at: tuple[int, ...] = (10,)
    figures: tuple[_Figure, ...] = ("hr", "ndcg")
    by: Literal["row", "user"] = "row"
    keep_seen: bool = False
    candidates: str | None = None


@dataclass(frozen=True, kw_only=True)
class RawSet:
    """Rows of a set as files and requests have them.

    Args:
        name: name of the set.
        splits: raw columns of each split, ``train`` first; the same columns in all of them.
        roles: roles of the columns.
        shared: further columns with the values of a column, by that column, such as ``{"item_id": ("history",)}``.
        lengths: greatest number of values in a row of a column of lists, the last ones; a request may have more.
        kept: columns that are handed on as they are, such as the label.
        left_out: why a column of the files is not read, by its name.
        notes: what a reader should know of the rows, one line each.
        evaluation: rule of the ranking.
        best: figures of the best possible prediction, if known (generated data).
        steps: steps of the columns; by their types if empty.
        events: rows to make histories of; each split's own by default.
    """

    name: str
    splits: Mapping[str, RawColumns]
    roles: Roles
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    evaluation: Evaluation = field(default_factory=Evaluation)
    best: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    events: RawColumns | None = None


def steps_of(raw: RawSet) -> list[Step]:
    """Returns a step for each column, by its type: ids come first, numbers next.

    Raises:
        DataError: all values of a column are missing, or two columns would have one name.
    """
    others = set(itertools.chain.from_iterable(raw.shared.values()))
    ids: list[Step] = [
        Lists(column=name, max_length=length) for name, length in raw.lengths.items()
    ]
    numbers: list[Step] = []
    times: list[Step] = []
    for name, column in raw.splits["train"].items():
        is_shown = name == TITLE and raw.roles.item is not None
        if name in raw.kept or name in others or is_shown:
            continue
        if column.null_count == len(column):
            raise DataError(
                f"set '{raw.name}': column '{name}': all {len(column):,} values of training are missing; leave it out, "
                "or mend the ids that join it"
            )
        if pa.types.is_floating(column.type):
            numbers.append(Normalize(column=name))
            # By the mean, which is 0 now; in a request a number may be missing even where none
            # of the rows lacks it.
            numbers.append(FillMissing(column=name, value=0.0))
        elif pa.types.is_timestamp(column.type):
            # Where every time is midnight, its hour says nothing.
            times_of_day = column.drop_null().cast(pa.int64()).to_numpy() % _DAY
            features = OF_TIMES if times_of_day.any() else OF_DATES
            times.append(TimeFeatures(column=name, features=features))
        else:
            also = tuple(raw.shared.get(name, ()))
            # No row of a session that trains has an unknown item.
            skip = tuple(other for other in also if other in raw.lengths)
            ids.append(Categorify(column=name, also=also, skip=skip))
    steps = [*ids, *numbers, *times]
    writes: set[str] = set()
    for step in steps:
        again = writes.intersection(step.writes) - set(step.reads)
        if again:
            raise DataError(
                f"column '{min(again)}' is there, and is made of the dates in '{step.reads[0]}' too; leave one of them "
                "out, or rename it"
            )
        writes.update(step.writes)
    return steps


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a split of a prepared folder; no reader has to count its rows again.

    Args:
        rows: number of rows.
        unknown: share of zeros per id column; in a list column of its elements.
        labels: weight of all rows, ``total``, and of the positives of each label.
        popularity: number of positives of each row of the items' table; none without items.
    """

    rows: int
    unknown: Mapping[str, float]
    labels: Mapping[str, Any]
    popularity: Int64


def count_split(
    fitted: FittedPreprocessor,
    roles: Roles,
    folder: Path,
    split: str,
    con: Connection,
) -> Counts:
    """Counts the rows of a split that is written, and writes its pairs of users and items."""
    rows = view_of(folder / split, con)
    weight = f"CAST({quoted(roles.weight)} AS DOUBLE)" if roles.weight else "1.0"
    kept = [name for name in (roles.label, *roles.tasks) if name in fitted.keep]
    labels = [f"CAST({quoted(name)} AS DOUBLE)" for name in kept]
    figures = ["count(*)", f"sum({weight})"]
    figures += [f"sum({label} * {weight})" for label in labels]
    (found,) = con.sql(f"SELECT {', '.join(figures)} FROM {rows}").fetchall()
    count, total, *sums = found
    width = fitted.vocab.get(roles.item or "", 0)
    popularity = np.zeros(width, np.int64)
    if roles.item and width:
        positive = f"FROM {rows} WHERE {labels[0] if labels else 1.0} > 0"
        item = quoted(roles.item)
        items = table(con, f"SELECT {item} AS i, count(*) AS n {positive} GROUP BY ALL")
        popularity[items["i"].to_numpy()] = items["n"].to_numpy()
        if roles.user in fitted.vocab:
            user = quoted(str(roles.user))
            pairs = f"SELECT {user} AS u, {item} AS i {positive}"
            write_known(known_path(folder, split), con, pairs, width)
            if fitted.vocabularies.get(SESSION) == fitted.vocabularies[roles.item]:
                pairs += f" UNION ALL SELECT {user}, unnest({SESSION}) {positive}"
                path = known_path(folder, split, sessions=True)
                write_known(path, con, pairs, width)
    return Counts(
        rows=count,
        unknown=unknown_shares(fitted, rows, con),
        labels={
            "total": rounded(total),
            "positives": {
                name: {"of_all": rounded(every)}
                for name, every in zip(kept, sums, strict=True)
            },
        },
        popularity=popularity,
    )


def write_set(folder: Path, raw: RawSet) -> None:
    """Writes a set as rec.data.preprocess would; ``folder`` is empty, or is created.

    Raises:
        DataError: a column cannot be prepared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = raw.steps or steps_of(raw)
    with connected() as con:
        names = {
            split: named(con, pa.table(dict(columns)))
            for split, columns in raw.splits.items()
            if len(next(iter(columns.values())))
        }
        # Values of lists are counted too, but a candidate is nothing that is trained.
        parts = [f"FROM {names['train']}"]
        for name, lists in raw.shared.items():
            for other in lists:
                if other != raw.evaluation.candidates:
                    values = f"unnest({quoted(other)}) AS {quoted(name)}"
                    parts.append(f"SELECT {values} FROM {names['train']}")
        rows = con.sql(" UNION ALL BY NAME ".join(parts))
        events = None
        if raw.events is not None:
            events = con.sql(f"FROM {named(con, pa.table(dict(raw.events)))}")
        preprocessor = Preprocessor(steps, keep=raw.kept)
        fitted = preprocessor.fit(rows, con=con, events=events).by_value()
        written = {name: step.writes for step in steps for name in step.reads}
        roles = dataclasses.replace(
            raw.roles,
            user_features=_derived(raw.roles.user_features, written),
            item_features=_derived(raw.roles.item_features, written),
        )
        write_folder(
            folder,
            fitted,
            {split: con.sql(f"FROM {name}") for split, name in names.items()},
            roles,
            con,
            events=events,
            details={
                "recipe": raw.name,
                "evaluation": dataclasses.asdict(raw.evaluation),
                "left_out": dict(raw.left_out),
                "notes": [*raw.notes, *_doubts(raw, fitted)],
                "best": dict(raw.best),
            },
        )


def _derived(names: Sequence[str], written: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the columns that are made of raw columns: of a time its hour and weekday."""
    derived: list[str] = []
    for name in names:
        made = written.get(name, (name,))
        derived += [name] if name in made else made
    return derived


def write_folder(
    folder: Path,
    fitted: FittedPreprocessor,
    splits: Mapping[str, Source],
    roles: Roles,
    con: Connection,
    *,
    events: Source | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Counts]:
    """Writes a prepared folder: rows by split, raw rows, the preprocessor, and a summary with what was counted.

    Args:
        folder: an empty folder.
        fitted: the preprocessor.
        splits: files or relations by name of the split, that of training first.
        roles: roles of the columns.
        con: connection of the relations.
        events: rows to make histories of; each split's own by default.
        details: further entries of the summary.

    Returns:
        What was counted of each split.

    Raises:
        DataError: see :meth:`FittedPreprocessor.transform`.
    """
    fitted.save(folder / PREPROCESSOR)
    counts = {}
    for split, source in splits.items():
        fitted.transform(source, folder / split, events=events, con=con)
        counts[split] = count_split(fitted, roles, folder, split, con)
    raw = write_raw_rows(fitted, list(splits.values()), roles, con, events)
    popularity = next(iter(counts.values())).popularity
    if len(popularity):
        raw[RAW_POPULARITY] = pa.table({"count": popularity})
    for name, rows in raw.items():
        (folder / name).parent.mkdir(exist_ok=True)
        pq.write_table(rows, folder / name)
    summary = {
        "version": VERSION,
        **(details or {}),
        "rows": {split: each.rows for split, each in counts.items()},
        "roles": dataclasses.asdict(roles),
        "columns": fitted.outputs,
        "vocab": fitted.vocab,
        "dense": list(fitted.dense),
        "unknown": {split: each.unknown for split, each in counts.items()},
        "labels": {split: each.labels for split, each in counts.items()},
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1, default=str) + "\n")
    return counts


def write_raw_rows(
    fitted: FittedPreprocessor,
    splits: Sequence[Source],
    roles: Roles,
    con: Connection,
    events: Source | None,
) -> dict[str, pa.Table]:
    """Returns rows as they stand in the log, for a bundle: some requests, the items and the users.

    A request has the columns of a training row, and the user's latest events where the result has histories. The rows
    are spread evenly over the training rows, whose first ones in a log have hardly any event before them. An item has
    the columns of its last training row, and the column ``title`` if there is one.
    """
    train = splits[0]
    log = train if events is None else events
    histories = [step for step in fitted.steps if isinstance(step, History)]
    columns = [name for name in fitted.request_columns if name in fitted.raw]
    keys = [name for step in histories for name in (step.user, step.time)]
    rows = open_source(train, [*columns, *keys], con)
    past = open_source(log, event_columns(fitted.steps), con) if histories else rows
    ((count,),) = con.sql(f"SELECT count(*) FROM {rows.view}").fetchall()
    every = max(1, -(-count // AUDITED))
    asked = dataclasses.replace(fitted, keep=())
    sql = requests_sql(asked, rows, past, where=f"{ROW} % {every} = 0")
    tables = {RAW_REQUESTS: table(con, sql)}
    if isinstance(fitted.state_of(roles.user or ""), Vocabulary):
        # A service knows what no training row does: the rows that were held out.
        users = _users(
            fitted, splits, roles, con, splits if events is None else [events]
        )
        if users is not None:
            tables[RAW_USERS] = users
    if roles.item is not None:
        tables[RAW_ITEMS] = _items(fitted, train, roles, con)
    return tables


def _items(
    fitted: FittedPreprocessor, train: Source, roles: Roles, con: Connection
) -> pa.Table:
    """Returns a row for each item; if nothing more is known of it, also for those that a history alone names."""
    item = str(roles.item)
    (key,) = fitted.only([item]).request_columns
    names = owned_columns("item", fitted.outputs, roles.item_features)
    raw = [name for name in fitted.only(names).request_columns if name != key]
    rows = open_source(train, [key, *raw], con)
    # Shown with recommendations.
    if TITLE in con.sql(f"SELECT * FROM {rows.view} LIMIT 0").columns:
        raw = list(dict.fromkeys([*raw, TITLE]))
    state = fitted.state_of(item)
    if not raw and isinstance(state, Vocabulary):
        return pa.table({key: state.values})
    values = {name: quoted(name) for name in raw}
    return table(con, f"{_last_of_each([rows], key, values)} ORDER BY {quoted(key)}")


def _users(
    fitted: FittedPreprocessor,
    splits: Sequence[Source],
    roles: Roles,
    con: Connection,
    logs: Sequence[Source],
) -> pa.Table | None:
    """Returns the users of the training rows with their request columns; None if they are too many.

    Their histories are of the events of all ``logs``.
    """
    (key,) = fitted.only([str(roles.user)]).request_columns
    steps = fitted.only(owned_columns("user", fitted.outputs, roles.user_features))
    histories = [step for step in steps.steps if isinstance(step, History)]
    # The events come from the log, not from the last row, and so does the time.
    not_last = {key}
    for step in histories:
        not_last |= {step.time, *step.sent}
    columns = [name for name in steps.request_columns if name not in not_last]
    values = {name: quoted(name) for name in columns}
    read = [key, *columns]
    if SESSION in steps.outputs and roles.item:
        (session,) = fitted.only([SESSION]).request_columns
        (item,) = fitted.only([roles.item]).request_columns
        # A session ends before its row's item, which is what the user took last.
        if fitted.raw[session] == f"list<{fitted.raw[item]}>":
            values[session] = f"list_append({quoted(session)}, {quoted(item)})"
            read.append(item)
    rows = [open_source(source, read, con) for source in splits]
    users = table(con, _last_of_each(rows, key, values))
    if len(users) > NAMED:
        print(
            f"{len(users):,} users are more than the {NAMED:,} that a bundle knows by id: its requests are whole rows",
            flush=True,
        )
        return None
    view = named(con, users)
    others = [step for step in fitted.steps if not isinstance(step, History)]
    read_by_others = {name for step in others for name in step.reads}
    for step in histories:
        # A history of other users' events does not belong to the user.
        if step.user == key:
            names = ", ".join(map(quoted, step.reads))
            views = [open_source(log, step.reads, con).view for log in logs]
            events = " UNION ALL ".join(f"SELECT {names} FROM {each}" for each in views)
            view = f"({step.latest_sql(view, f'({events})')})"
            # Where only histories read the time, a user known by id alone is asked at
            # the log's end. An hour of the day must come with the request.
            if step.time not in read_by_others:
                kind = fitted.raw[step.time]
                view = f"({step.end_time_sql(view, f'({events})', kind)})"
                read_by_others.add(step.time)
    return table(con, f"SELECT * FROM {view} ORDER BY {quoted(key)}")


def _last_of_each(splits: Sequence[Opened], key: str, values: Mapping[str, str]) -> str:
    """Returns SQL for a row for each value of ``key`` in the first split, with its last row's ``values`` by name."""
    made = [f"{value} AS {quoted(name)}" for name, value in values.items()]
    names = ", ".join([quoted(key), *made])
    # The last row's values, also where one of them is null.
    last = [f"arg_max_null({quoted(name)}, {ROW}) AS {quoted(name)}" for name in values]
    rows = " UNION ALL ".join(f"SELECT {names} FROM {each.view}" for each in splits)
    return (
        f"SELECT {', '.join([quoted(key), *last])} FROM (SELECT *, row_number() OVER () AS {ROW} FROM ({rows})) "
        f"WHERE {quoted(key)} IN (SELECT {quoted(key)} FROM {splits[0].view}) GROUP BY {quoted(key)}"
    )


def _doubts(raw: RawSet, fitted: FittedPreprocessor) -> list[str]:
    """Returns a line for each column with a doubtful type, such as codes read as numbers."""
    lines = []
    low, high = _MILLISECONDS
    for name, values in raw.splits["train"].items():
        if name in fitted.dense:
            # Of none but missing values neither is true.
            if pc.all(pc.equal(values, pc.floor(values))).as_py():
                lines.append(
                    f"column '{name}' is read as a number, and all its values are whole: if they are codes, write them "
                    "as whole numbers (of pandas: astype('Int64'))"
                )
        elif pa.types.is_integer(values.type):
            least, most = pc.min_max(values).as_py().values()
            is_key = name in (raw.roles.user, raw.roles.item)
            if not is_key and least is not None and low <= least and most < high:
                lines.append(
                    f"column '{name}' is read as ids, and its values look like milliseconds since 1970: if they are "
                    "times, write them as timestamps"
                )
    return lines
