"""What preprocessing tells a person: a table of the columns; pictures of id frequencies, missing values, the label by day."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from torchrec_ext.data.preprocess import FittedPreprocessor, Vocabulary
from torchrec_ext.data.preprocess.column_types import is_list
from torchrec_ext.data.preprocess.engines import Engine
from torchrec_ext.data.preprocess.expressions import floor_div
from torchrec_ext.data.preprocess.sources import Source, scan
from torchrec_ext.data.preprocess.tables import open_source
from torchrec_ext.schema import DataError

Shares = dict[str, float]


def missing_shares(source: Source, columns: Sequence[str], engine: Engine) -> Shares:
    """By raw column, the share of rows that are null, NaN, infinite or an empty list."""
    opened = open_source(source, columns, engine)
    table = opened.table

    def missing(name: str) -> Any:
        column, raw = table[name], opened.raw[name]
        if is_list(raw):
            return column.length() == 0
        return column.isnull() | ~engine.is_finite(column) if raw.startswith("float") else column.isnull()

    shares = {f"_{at}": missing(name).cast("float64").mean() for at, name in enumerate(columns)}
    row = engine.collect(table.aggregate(**shares)).to_pylist()[0]
    return dict(zip(columns, row.values(), strict=True))


def unknown_shares(folder: Path, fitted: FittedPreprocessor, engine: Engine) -> Shares:
    """By id column, the share of ids that are 0; in a list column the share of its elements."""
    table = engine.read(scan(folder))
    found = {}
    for name in fitted.vocab:
        column = table[name]
        values = table.select(id=column.unnest() if is_list(fitted.outputs[name]) else column)
        share = engine.collect(values.aggregate(share=(values.id == 0).cast("float64").mean()))["share"][0].as_py()
        found[name] = 0.0 if share is None else share
    return found


def label_rates(source: Source, label: str | None, time: str | None, engine: Engine) -> list[tuple[datetime.date, float, int]]:
    """(day in UTC, mean label, rows), where the source has both columns."""
    if not label or not time:
        return []
    table = open_source(source, [label, time], engine).table
    days = table.filter(table[time].notnull()).select(day=floor_div(table[time], 86_400), label=table[label].cast("float64"))
    rates = days.group_by("day").aggregate(rate=days.label.mean(), rows=days.count()).order_by("day")
    first = datetime.date(1970, 1, 1)
    return [(first + datetime.timedelta(days=row["day"]), row["rate"], row["rows"]) for row in engine.collect(rates).to_pylist()]


def table_text(fitted: FittedPreprocessor, missing: Shares, unknown: Mapping[str, Shares]) -> str:
    """One line per column of the result."""
    lines = []
    for name, kind in fitted.outputs.items():
        size = f"{fitted.vocab[name]:,}" if name in fitted.vocab else ""
        shares = [f"{found[name]:.2%}" if name in found else "" for found in unknown.values()]
        lines.append([name, kind, size, f"{missing[name]:.2%}" if name in missing else "", *shares])
    headers = ["column", "type", "table rows", "missing before", *(f"unknown in {split}" for split in unknown)]
    return str(tabulate(lines, headers=headers, disable_numparse=True))


def draw(path: Path, fitted: FittedPreprocessor, missing: Shares, rates: Sequence[tuple[datetime.date, float, int]]) -> None:
    """Id frequencies on the left, missing values, and the label's rate by day where it is known.

    Raises:
        DataError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("pictures need matplotlib: pip install 'torchrec-ext[report]', or --set pictures=false") from None
    figure = Figure(figsize=(5.5 * (2 + bool(rates)), 4.2), layout="constrained")
    axes = figure.subplots(1, 2 + bool(rates), squeeze=False)[0]
    _draw_frequencies(axes[0], fitted)
    names = sorted(missing, key=lambda name: missing[name])[-25:]
    axes[1].barh(names, [missing[name] * 100 for name in names], color="#1f5f99")
    axes[1].set(title="missing before preprocessing", xlabel="% of training rows", xlim=(0, None if any(missing.values()) else 1))
    if rates:
        axes[2].plot([day for day, _, _ in rates], [rate for _, rate, _ in rates], color="#1f5f99", linewidth=1)
        axes[2].set(title="mean label by day (UTC)", ylim=(0, None))
        axes[2].tick_params(axis="x", rotation=30)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw_frequencies(axis: Any, fitted: FittedPreprocessor) -> None:
    vocabularies = [
        (step.writes[0], state) for step, state in zip(fitted.steps, fitted.states, strict=True) if isinstance(state, Vocabulary)
    ]
    biggest = sorted(vocabularies, key=lambda pair: len(pair[1]), reverse=True)[:8]
    for name, vocabulary in biggest:
        counts = vocabulary.counts.to_numpy()
        # A thousand points draw the line of a million.
        places = np.unique(np.geomspace(1, len(counts), 1000).astype(np.int64)) if len(counts) else np.array([], dtype=np.int64)
        axis.plot(places, counts[places - 1], label=name, linewidth=1.2)
    axis.set(
        title="id frequency, the largest vocabularies",
        xlabel="id (by frequency)",
        ylabel="training rows",
        xscale="log",
        yscale="log",
    )
    if biggest:
        axis.legend(frameon=False, fontsize="small")
