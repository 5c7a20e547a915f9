"""A preprocessing run: fits on the first split, transforms all, and reports on the columns."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate
from tqdm import tqdm

from torchrec_ext.data.datasets.features import owned_columns
from torchrec_ext.data.datasets.streamed import (
    RAW_ITEMS,
    RAW_REQUESTS,
    RAW_USERS,
    SUMMARY,
    Roles,
)
from torchrec_ext.data.files.find import DataFile, find_files
from torchrec_ext.data.preprocess import FittedPreprocessor, History, Vocabulary
from torchrec_ext.data.preprocess.columns import (
    NUMBERS,
    TIMES,
    Types,
    is_list_column,
    working_type,
)
from torchrec_ext.data.preprocess.engines import (
    ROW,
    Engine,
    connected,
    count_rows,
    exact,
    floor_div,
    number,
)
from torchrec_ext.data.preprocess.files import Source, scan
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.data.preprocess.tables import open_source
from torchrec_ext.data.preprocess.times import second_of
from torchrec_ext.drawing.figures import (
    BLUE,
    figure_with_panels,
    require_matplotlib,
    save_figure,
)
from torchrec_ext.retrieval.columns import steps_for_columns
from torchrec_ext.schema import DataError
from torchx_apps.config import is_group
from torchx_apps.jobs.tracking import tracked
from torchx_apps.recipes.preprocess import Prepared, PreprocessJob
from torchx_apps.tasks.export_data import AUDITED

# Users and their latest events are held in memory, some 500 bytes each.
NAMED = 2_000_000
Shares = dict[str, float]


class Rate(NamedTuple):
    """The mean label of one day, and its rows."""

    day: datetime.date
    mean: float
    rows: int


def missing_shares(source: Source, columns: Sequence[str], engine: Engine) -> Shares:
    """Returns the share of rows per raw column with null, NaN, an infinite value or an empty list."""
    opened = open_source(source, columns, engine)
    table = opened.table

    def missing(name: str) -> Any:
        column = table[name]
        raw = opened.raw[name]
        if is_list_column(raw):
            return column.length() == 0
        if raw.startswith("float"):
            return column.isnull() | ~engine.is_finite(column)
        return column.isnull()

    # By number, since a column's name may be no identifier.
    shares = {
        f"_{index}": missing(name).cast("float64").mean()
        for index, name in enumerate(columns)
    }
    row = engine.collect(table.aggregate(**shares)).to_pylist()[0]
    return dict(zip(columns, row.values(), strict=True))


def unknown_shares(folder: Path, fitted: FittedPreprocessor, engine: Engine) -> Shares:
    """Returns the share of zeros per id column; in a list column of its elements."""
    table = engine.read(scan(folder))
    shares = {}
    for name in fitted.vocab:
        column = table[name]
        if is_list_column(fitted.outputs[name]):
            column = column.unnest()
        values = table.select(id=column)
        share = values.aggregate(share=(values.id == 0).cast("float64").mean())
        # The mean of no rows is null.
        shares[name] = engine.collect(share)["share"][0].as_py() or 0.0
    return shares


def label_rates(
    source: Source, label: str | None, time: str | None, engine: Engine
) -> list[Rate]:
    """Returns the mean label of each day in UTC; nothing without a label or a time.

    Raises:
        DataError: a column is missing, the label is not a number, or the time is not a time.
    """
    if not label or not time:
        return []
    opened = open_source(source, [label, time], engine)
    types = Types(
        opened.where, {name: working_type(kind) for name, kind in opened.raw.items()}
    )
    picture = "the picture of the label by day"
    types.need(picture, label, NUMBERS, "give a number as Prepared.label, or none")
    kind = types.need(
        picture, time, TIMES | {"int64"}, "give a time as Prepared.time, or none"
    )
    second = second_of(opened.table[time], kind)
    table = opened.table.mutate(
        second=second, label=number(opened.table[label], types[label], engine)
    )
    complete = table.filter(table.second.notnull() & table.label.notnull())
    days = complete.select("label", day=floor_div(complete.second, 86_400))
    rates = (
        days.group_by("day")
        .aggregate(mean=days.label.mean(), rows=days.count())
        .order_by("day")
    )
    epoch = datetime.date(1970, 1, 1)
    return [
        Rate(epoch + datetime.timedelta(days=row["day"]), row["mean"], row["rows"])
        for row in engine.collect(rates).to_pylist()
    ]


def table_text(
    fitted: FittedPreprocessor, missing: Shares, unknown: Mapping[str, Shares]
) -> str:
    """Returns a table with a line for each column of the result."""
    lines = []
    for name, kind in fitted.outputs.items():
        rows = f"{fitted.vocab[name]:,}" if name in fitted.vocab else ""
        shares = [
            f"{of[name]:.2%}" if name in of else ""
            for of in (missing, *unknown.values())
        ]
        lines.append([name, kind, rows, *shares])
    headers = [
        "column",
        "type",
        "table rows",
        "missing before",
        *(f"unknown in {split}" for split in unknown),
    ]
    return str(tabulate(lines, headers=headers, disable_numparse=True))


def draw_statistics(
    path: Path, fitted: FittedPreprocessor, missing: Shares, rates: Sequence[Rate]
) -> None:
    """Draws id frequencies, missing values and, if available, the label's mean by day, from left to right."""
    panels = 2 + bool(rates)
    figure, axes = figure_with_panels(panels, (5.5 * panels, 4.2))
    _draw_frequencies(axes[0], fitted)
    _draw_missing(axes[1], missing)
    if rates:
        _draw_rates(axes[2], rates)
    save_figure(figure, path)


def _draw_frequencies(axis: Any, fitted: FittedPreprocessor) -> None:
    vocabularies = [
        (step.writes[0], state)
        for step, state in fitted.pairs
        if isinstance(state, Vocabulary)
    ]
    biggest = sorted(vocabularies, key=lambda pair: len(pair[1]), reverse=True)[:8]
    for name, vocabulary in biggest:
        counts = vocabulary.counts.to_numpy()
        # A thousand points draw the same line as a million. geomspace() refuses 0 as
        # its end.
        ranks = np.unique(np.geomspace(1, max(1, len(counts)), 1000).astype(np.int64))[
            : len(counts)
        ]
        axis.plot(ranks, counts[ranks - 1], label=name, linewidth=1.2)
    title = (
        "id frequency, the 8 largest vocabularies"
        if len(vocabularies) > 8
        else "id frequency"
    )
    axis.set(
        title=title,
        xlabel="id (by frequency)",
        ylabel="training rows",
        xscale="log",
        yscale="log",
    )
    if biggest:
        axis.legend(frameon=False, fontsize="small")
    else:
        axis.text(
            0.5,
            0.5,
            "no vocabulary was fitted",
            ha="center",
            va="center",
            transform=axis.transAxes,
        )


def _draw_missing(axis: Any, missing: Shares) -> None:
    most = sorted((share * 100, name) for name, share in missing.items() if share)[-25:]
    axis.set(title="missing before preprocessing", xlabel="% of training rows")
    if not most:
        axis.text(
            0.5,
            0.5,
            f"none, in {len(missing)} columns",
            ha="center",
            va="center",
            transform=axis.transAxes,
        )
        axis.set(xticks=[], yticks=[], xlabel="")
        axis.spines[:].set_visible(False)
        return
    bars = axis.barh(
        [name for _, name in most], [share for share, _ in most], color=BLUE
    )
    axis.bar_label(bars, fmt="%.3g %%", padding=3, fontsize="small")
    axis.margins(x=0.15)
    rest = len(missing) - len(most)
    if rest:
        text = f"{rest} more, with fewer or none"
        axis.text(
            0.98,
            0.02,
            text,
            ha="right",
            transform=axis.transAxes,
            fontsize="small",
            color="0.4",
        )


def _draw_rates(axis: Any, rates: Sequence[Rate]) -> None:
    """Draws the mean with Wilson's interval of two standard errors, since days of few rows swing."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    days = [rate.day for rate in rates]
    mean = np.array([rate.mean for rate in rates], dtype=np.float64)
    rows = np.array([rate.rows for rate in rates], dtype=np.float64)
    volume = axis.twinx()
    volume.bar(days, rows, width=0.9, color="0.88")
    volume.set_ylabel("rows", color="0.45")
    volume.tick_params(colors="0.45")
    volume.spines[["top"]].set_visible(False)
    axis.set_zorder(volume.get_zorder() + 1)
    axis.patch.set_visible(False)
    if ((mean >= 0) & (mean <= 1)).all():
        middle = (mean + 2 / rows) / (1 + 4 / rows)
        half = 2 * np.sqrt(mean * (1 - mean) / rows + 1 / rows**2) / (1 + 4 / rows)
        axis.fill_between(
            days, middle - half, middle + half, color=BLUE, alpha=0.2, linewidth=0
        )
    axis.plot(
        days, mean, color=BLUE, linewidth=1.2, marker="." if len(days) < 40 else None
    )
    locator = AutoDateLocator(maxticks=8)  # type: ignore[no-untyped-call]
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axis.set(title="label by day (UTC); grey: rows", ylabel="mean label")
    axis.set_ylim(min(0.0, float(mean.min())), None)


def run_preprocess(job: PreprocessJob) -> Path:
    """Writes ``out/<split>/*.parquet``, ``out/preprocessor/``, ``out/summary.json`` and ``out/preprocess.png``.

    The folder appears when all of it is written. What can fail without reading all rows fails first.

    Returns:
        The folder's path.

    Raises:
        DataError: the data cannot be preprocessed so; the message says what to do.
    """
    out = Path(job.out or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    begun = time.monotonic()
    # Missing packages are named before the log is read.
    if job.pictures:
        require_matplotlib("--pictures false")
    config = dataclasses.asdict(job.config) if is_group(job.config) else None
    settings = {
        "engine": job.engine,
        "threads": job.threads,
        "memory": job.memory,
        "config": config or {},
    }
    with (
        tracked(out, {"recipe": job.name, **settings}, folder="data") as figures,
        whole_folder(out, overwrite=job.overwrite, mark=SUMMARY) as staging,
        connected(job.engine, threads=job.threads, memory=job.memory) as engine,
    ):
        prepared = job.build(job.config, engine)
        files = _source_files(out, prepared)
        rates = []
        if job.pictures:
            rates = label_rates(
                prepared.first_source, prepared.label, prepared.time, engine
            )
        missing = missing_shares(
            prepared.first_source, prepared.preprocessor.raw_columns, engine
        )
        fitted = _fit(prepared, engine)
        fitted.save(staging / "preprocessor")
        rows = {
            split: _transform(prepared, fitted, split, staging, engine)
            for split in prepared.splits
        }
        unknown = {
            split: unknown_shares(staging / split, fitted, engine) for split in rows
        }
        write_raw_rows(prepared, fitted, staging, engine)
        # The passes above must have read the same rows.
        if _source_files(out, prepared) != files:
            for file in files:
                file.check_unchanged()
            raise DataError(
                f"{files[0].name}: files came into the log, or left it, while it was read; start anew, "
                "and let new data come into a folder of their own"
            )
        summary = {
            "recipe": job.name,
            "config": config,
            "engine": engine.name,
            "rows": rows,
            "roles": _roles(prepared),
            "columns": fitted.outputs,
            "vocab": fitted.vocab,
            "dense": list(fitted.dense),
            "missing": missing,
            "unknown": unknown,
        }
        (staging / SUMMARY).write_text(
            json.dumps(summary, indent=2, default=str) + "\n"
        )
        if job.pictures:
            draw_statistics(staging / "preprocess.png", fitted, missing, rates)
        figures |= {
            name: summary[name] for name in ("rows", "vocab", "missing", "unknown")
        }
        figures["seconds"] = time.monotonic() - begun
    seconds = time.monotonic() - begun
    print(f"\n{table_text(fitted, missing, unknown)}\n")
    print(
        f"{sum(rows.values()):,} rows in {seconds:.1f} s with {engine.name}; written to {out}",
        flush=True,
    )
    lacking = [name for name in ("train", "test") if name not in prepared.splits]
    if lacking:
        print(
            f"note: recipes that train need a split named {' and '.join(lacking)}; a loop of your own does not",
            flush=True,
        )
    return out


def _source_files(out: Path, prepared: Prepared) -> list[DataFile]:
    """Returns the files of all sources; refuses an output folder with a source in it, since it may be replaced."""
    files = []
    for source in (*prepared.splits.values(), prepared.events):
        # A table of the engine has a schema, and no files.
        if source is not None and not hasattr(source, "schema"):
            files += find_files(source, (".parquet", ".pq"))
    keep_sources(out, files)
    return files


def _fit(prepared: Prepared, engine: Engine) -> FittedPreprocessor:
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
            source, engine=engine, events=prepared.events, progress=begin
        )
        bar.set_postfix_str("", refresh=False)
        bar.update(bar.total - bar.n)
    return fitted


def _transform(
    prepared: Prepared,
    fitted: FittedPreprocessor,
    split: str,
    folder: Path,
    engine: Engine,
) -> int:
    with tqdm(
        desc=f"transform {split}", unit=" rows", unit_scale=True, dynamic_ncols=True
    ) as bar:

        def written(rows: int) -> None:
            bar.update(rows - bar.n)

        rows = fitted.transform(
            prepared.splits[split],
            folder / split,
            events=prepared.events,
            engine=engine,
            progress=written,
        )
        # Spark reports no progress, so show the rows at once.
        written(rows)
    return rows


def write_raw_rows(
    prepared: Prepared, fitted: FittedPreprocessor, folder: Path, engine: Engine
) -> None:
    """Writes rows as they stand in the log, for the bundle of the recipe ``stream``: some requests, items and users.

    A request has the columns of a training row, and the user's latest events where the result has histories. The rows
    are spread evenly over the training rows, whose first ones in a log have hardly any event before them; they are any
    where the engine does not know their order (Spark, reading files). An item has the columns of its last training row.
    """
    source = prepared.first_source
    histories = [step for step in fitted.steps if isinstance(step, History)]
    list_columns: list[str] = []
    event_keys: list[str] = []
    for step in histories:
        list_columns += step.sent
        event_keys += [step.user, step.time]
    names = [name for name in fitted.request_columns if name not in list_columns]
    opened = open_source(source, list(dict.fromkeys([*names, *event_keys])), engine)
    (folder / RAW_REQUESTS).parent.mkdir()
    rows = engine.collect(_spread(opened.table, engine).limit(AUDITED))
    # A join may change the order of the rows, so each has its number.
    requests = engine.register(
        rows.append_column("__request__", pa.array(range(len(rows)), pa.int64()))
    )
    for step in histories:
        requests = _with_latest_events(requests, "__request__", step, prepared, engine)
    lists = engine.collect(requests.order_by("__request__"))
    columns = {name: rows[name] for name in names} | {
        name: lists[name] for name in list_columns
    }
    pq.write_table(pa.table(columns), folder / RAW_REQUESTS)
    if prepared.user is not None:
        _write_users(prepared, prepared.user, fitted, folder / RAW_USERS, engine)
    if prepared.item is None:
        return
    (key,) = steps_for_columns(fitted, [prepared.item]).request_columns
    item_columns = owned_columns("item", fitted.outputs, prepared.item_features)
    raw = [
        name
        for name in steps_for_columns(fitted, item_columns).request_columns
        if name != key
    ]
    items = _last_of_each(source, key, raw, engine)
    pq.write_table(engine.collect(items.order_by(key)), folder / RAW_ITEMS)


def _last_of_each(
    source: Source, key: str, columns: Sequence[str], engine: Engine
) -> Any:
    """Returns a table with a row for each value of ``key``, with its last values of ``columns``."""
    opened = open_source(source, [key, *columns], engine)
    table = opened.table.filter(opened.table[key].notnull())
    if not columns:
        return table.select(key).distinct()
    if ROW in table.columns:
        last = {name: table[name].argmax(table[ROW]) for name in columns}
    else:
        # The engine does not know the order of the rows, so any row will do.
        last = {name: table[name].arbitrary() for name in columns}
    return table.group_by(key).aggregate(**last)


def _write_users(
    prepared: Prepared,
    user: str,
    fitted: FittedPreprocessor,
    path: Path,
    engine: Engine,
) -> None:
    """Writes the users of the training rows with their request columns; nothing if they are hashed."""
    if not isinstance(fitted.state_of(user), Vocabulary):
        return
    (key,) = steps_for_columns(fitted, [user]).request_columns
    user_steps = steps_for_columns(
        fitted, owned_columns("user", fitted.outputs, prepared.user_features)
    )
    histories = [step for step in user_steps.steps if isinstance(step, History)]
    # A request gives the time, and the events come from the log: the last row has no
    # part in either.
    not_last = {key}
    for step in histories:
        not_last |= {step.time, *step.sent}
    columns = [name for name in user_steps.request_columns if name not in not_last]
    users = _last_of_each(prepared.first_source, key, columns, engine)
    count = count_rows(users, engine)
    if count > NAMED:
        print(
            f"{count:,} users are more than the {NAMED:,} that a bundle knows by id: its requests are whole rows",
            flush=True,
        )
        return
    for step in histories:
        # A history of other users' events does not belong to the user.
        if step.user == key:
            users = _with_latest_events(users, key, step, prepared, engine)
    pq.write_table(engine.collect(users.order_by(key)), path)


def _with_latest_events(
    rows: Any, key: str, step: History, prepared: Prepared, engine: Engine
) -> Any:
    """Adds the latest events of each row's user, oldest first, as in a request; earlier ones, if rows have a time."""
    import ibis

    # A history is sorted by these columns, in this order.
    names = (step.time, step.item, *step.also)
    events = _events(
        step,
        prepared.first_source if prepared.events is None else prepared.events,
        engine,
    )
    if step.time in rows.columns:
        moments = rows.select(
            __key__=rows[key], __user__=rows[step.user], __time__=rows[step.time]
        )
        is_earlier = [
            events[step.user] == moments["__user__"],
            events[step.time] < moments["__time__"],
        ]
        events = events.inner_join(moments, is_earlier)
    else:
        events = events.mutate(__key__=events[step.user])
    newest_to_oldest = [events[name].desc() for name in names]
    latest_first = ibis.window(group_by=events["__key__"], order_by=newest_to_oldest)
    events = events.mutate(__number__=ibis.row_number().over(latest_first))
    events = events.filter(events["__number__"] < step.length)
    each = ibis.struct({f"_{index}": events[name] for index, name in enumerate(names)})
    # Sorting structs, since Spark cannot collect in an order.
    lists = events.group_by("__key__").aggregate(__events__=each.collect())
    lists = lists.select("__key__", __events__=lists["__events__"].sort())

    def listed(name: str) -> Any:
        field = f"_{names.index(name)}"
        return lists["__events__"].map(lambda event: event[field])

    histories = {
        histories: listed(name)
        for histories, name in zip(step.sent, step.columns, strict=True)
    }
    lists = lists.select("__key__", **histories)
    joined = rows.left_join(lists, rows[key] == lists["__key__"]).drop("__key__")
    none = {name: ibis.literal([], type=joined[name].type()) for name in histories}
    return joined.mutate(
        {name: ibis.coalesce(joined[name], none[name]) for name in histories}
    )


def _events(step: History, source: Source, engine: Engine) -> Any:
    """Returns the events for a history: without nulls, and filtered by ``where``."""
    opened = open_source(source, list(dict.fromkeys(step.event_reads)), engine)
    table = opened.table
    if step.where:
        kind = working_type(opened.raw[step.where])
        table = table.filter(
            number(table[step.where], str(kind), engine) >= exact(step.at_least)
        )
    return table.filter(*(table[name].notnull() for name in (step.user, *step.columns)))


def _spread(table: Any, engine: Engine) -> Any:
    """Returns every n-th row of a table, AUDITED at most, in order; all rows of a table without row numbers."""
    if ROW not in table.columns:
        return table
    every = max(1, -(-count_rows(table, engine) // AUDITED))
    return table.filter(table[ROW] % every == 0).order_by(ROW)


def _roles(prepared: Prepared) -> dict[str, Any]:
    """Returns the result's columns with a role beyond features; see :class:`Roles`."""
    roles = {
        field.name: getattr(prepared, field.name) for field in dataclasses.fields(Roles)
    }
    # A label that the preprocessor does not keep is only drawn.
    if prepared.label not in prepared.preprocessor.keep:
        roles["label"] = None
    return roles
