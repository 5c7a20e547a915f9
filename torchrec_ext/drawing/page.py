"""page(): one self-contained HTML file of cards with text, tables and pictures, for phones and desks, light and dark.

Pictures are SVG, written here, so a page needs no network, no script and no plotting library. Words are placed next to
bars, not inside of them, because bars get narrower with the screen and words do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

_STYLE = """
:root { color-scheme: light dark;
  --ink: #16202e; --muted: #536174; --ground: #f3f5f9; --card: #ffffff; --line: #d8dee8; --bad: #b3261e;
  --c0: #1f5fd0; --c1: #b3541e; --c2: #11693a; --c3: #7a3fb0; --c4: #9a7400; --c5: #a3286a; --c6: #0b7285;
  --c7: #7b8794; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e8edf5; --muted: #a3b0c2; --ground: #10151d; --card: #19212c; --line: #303b4a; --bad: #ffb4ab;
  --c0: #82adff; --c1: #ffab70; --c2: #7fd6a3; --c3: #c9a2ff; --c4: #e6c84f; --c5: #ff9ccb; --c6: #6fd6e4;
  --c7: #8b98a8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { margin: .2rem 0; font-size: 1.4rem; line-height: 1.25; }
h2 { margin: 0 0 .6rem; font-size: 1.08rem; line-height: 1.3; }
p { margin: .2rem 0 .6rem; }
.muted, .name, .value, figcaption { color: var(--muted); }
.warning { color: var(--bad); }
.conclusion { font-size: 1.15rem; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem;
  margin-top: 1rem;
  grid-auto-flow: dense; }
.card { min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: .8rem;
  padding: 1rem 1.1rem; }
.wide { grid-column: 1 / -1; }
figure { margin: 0 0 .6rem; }
figcaption { font-size: .86rem; }
svg { display: block; width: 100%; }
.chart { max-width: 34rem; }
.chart text { fill: var(--muted); font: 11px system-ui, sans-serif; }
.chart .axis { stroke: var(--line); stroke-width: 1; }
.row { display: grid; grid-template-columns: minmax(0, 7.5rem) minmax(0, 1fr) minmax(0, 6.5rem); gap: .6rem;
  align-items: center;
  font-size: .86rem; line-height: 1.25; margin: .3rem 0; font-variant-numeric: tabular-nums; }
.row svg { height: 1.3rem; background: var(--ground); border-radius: .2rem; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .5rem 0 0; padding: 0; list-style: none;
  font-size: .86rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: .15rem;
  vertical-align: -.08rem; }
.badge { font-size: .8rem; font-weight: 600; border: 1px solid currentColor; border-radius: 1rem;
  padding: 0 .55rem; white-space: nowrap; }
pre { overflow-x: auto; margin: .3rem 0 .6rem; font-size: .82rem; background: var(--ground); padding: .6rem .8rem;
  border-radius: .5rem;
  overflow-wrap: normal; }
.command { white-space: pre-wrap; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { overflow-wrap: break-word; text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); }
ul, ol { margin: .2rem 0 .6rem; padding-left: 1.3rem; }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""
_COLOURS = 8  # --c0 to --c7 of the style
_MOST_POINTS = 400  # more than a chart has pixels to tell apart
_HUGE = 1e30  # larger values would overflow the scale, and flatten everything else
_CHART_WIDTH, _CHART_HEIGHT, _LEFT, _BOTTOM = 360, 180, 46, 34  # of a chart, with the room of its axes


def page(title: str, summary: str, cards: Iterable[str]) -> str:
    """Renders a complete HTML page.

    Args:
        title: title, as plain text.
        summary: HTML under the title.
        cards: cards, see :func:`card`.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>\n{summary}</header>\n"
        f'<main class="cards">\n{"".join(cards)}</main>\n</body>\n</html>\n'
    )


def card(title: str, *content: str, wide: bool = False) -> str:
    """Renders a card of a page.

    Args:
        title: heading, as HTML.
        content: HTML.
        wide: whether it takes the full width of the page.
    """
    return f'<section class="card{" wide" if wide else ""}"><h2>{title}</h2>{"".join(content)}</section>\n'


def paragraph(text: str, kind: str = "") -> str:
    """Renders plain text as a paragraph of a kind: ``muted``, ``warning`` or ``conclusion``."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def text_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a table of plain texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Bar(NamedTuple):
    """A bar of a lane, from ``start`` to ``end``; ``pale`` if it is uncertain."""

    name: str
    start: float
    end: float
    pale: bool = False


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A row of bars.

    Args:
        name: words on its left.
        spans: bars, on the common scale of all lanes of a picture.
        value: words on its right.
    """

    name: str
    spans: Sequence[Bar]
    value: str = ""


def stacked(name: str, parts: Mapping[str, float], value: str = "") -> Lane:
    """Stacks bars, given by name and length, into one lane.

    Example:
        >>> stacked("rank 0", {"user": 2.0, "item": 1.0}).spans[1]
        Bar(name='item', start=2.0, end=3.0, pale=False)
    """
    spans = []
    start = 0.0
    for part, length in parts.items():
        spans.append(Bar(part, start, start + length))
        start += length
    return Lane(name=name, spans=spans, value=value)


def lanes(rows: Sequence[Lane], caption: str = "") -> str:
    """Draws lanes on one scale, with a legend of the colours.

    A span inside of another is drawn over it, at a smaller height.

    Args:
        rows: lanes.
        caption: what the picture shows and its unit, as plain text.
    """
    end = max((span.end for row in rows for span in row.spans if math.isfinite(span.end)), default=0.0) or 1.0
    names = list(dict.fromkeys(span.name for row in rows for span in row.spans))
    colours = {name: f"var(--c{number % _COLOURS})" for number, name in enumerate(names)}
    row_elements = [
        f'<div class="row"><span class="name">{escape(row.name)}</span>'
        f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{escape(_aria_label(row))}">'
        f"{''.join(_bars(row.spans, end, colours))}</svg>"
        f'<span class="value">{escape(row.value)}</span></div>'
        for row in rows
    ]
    legend_items = "".join(f'<li><i style="background: {colours[name]}"></i>{escape(name)}</li>' for name in names)
    return f'<figure>{"".join(row_elements)}<ul class="key">{legend_items}</ul>{_caption(caption)}</figure>'


def _aria_label(row: Lane) -> str:
    return f"{row.name}: " + ", ".join(dict.fromkeys(span.name for span in row.spans[:8]))


def _bars(spans: Sequence[Bar], end: float, colours: Mapping[str, str]) -> Iterable[str]:
    drawn_bars: list[Bar] = []
    for span in sorted(spans, key=lambda other: other.start - other.end):
        if not (math.isfinite(span.start) and span.end > span.start):
            continue
        is_nested = any(other.start <= span.start and span.end <= other.end for other in drawn_bars)
        top, height = (5, 10) if is_nested else (1, 18)
        x, width = 1000 * span.start / end, 1000 * (span.end - span.start) / end
        yield (
            f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.6):.2f}" height="{height}" fill="{colours[span.name]}"'
            f"{' opacity=' + chr(34) + '0.35' + chr(34) if span.pale else ''}><title>{escape(span.name)}</title></rect>"
        )
        if not span.pale:
            drawn_bars.append(span)


def gains(rows: Sequence[tuple[str, tuple[float, float] | None, float | None]], caption: str = "") -> str:
    """Draws speed-ups on one logarithmic scale: the expected interval as a bar, the measured value as a line.

    Args:
        rows: name, expected interval and measured value; None for a missing one.
        caption: what the picture shows, as plain text.
    """
    values = []
    for _, gain, ratio in rows:
        values += [value for value in (*(gain or ()), ratio) if value and math.isfinite(value)]
    # The scale always includes "as fast as now" with some room, so that small gains do not look large.
    low, high = min([0.8, *values]), max([1.25, *values])

    def position(value: float) -> float:
        return 1000 * math.log(min(max(value, low), high) / low) / math.log(high / low)

    row_elements = []
    for name, gain, ratio in rows:
        shapes = ""
        if gain is not None:
            start, end = position(gain[0]), position(gain[1])
            shapes = f'<rect x="{start:.2f}" y="4" width="{max(end - start, 4):.2f}" height="12" fill="var(--c0)"/>'
        shapes += f'<rect x="{position(1):.2f}" y="0" width="3" height="20" fill="var(--muted)"/>'
        if ratio is not None:
            x = min(position(ratio), 992)  # the line is 8 wide, and must stay inside of 1,000
            shapes += f'<rect x="{x:.2f}" y="0" width="8" height="20" fill="var(--c1)"><title>measured</title></rect>'
        text = "not known"
        if gain is not None:
            text = f"{_short_number(gain[0])} to {_short_number(gain[1])}x"
        if ratio is not None:
            text += f", was {_short_number(ratio)}x"
        row_elements.append(
            f'<div class="row"><span class="name">{escape(name)}</span>'
            f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{escape(name)}: {text}">'
            f'{shapes}</svg><span class="value">{text}</span></div>'
        )
    legend_items = '<li><i style="background: var(--c0)"></i>expected</li>'
    legend_items += '<li><i style="background: var(--muted)"></i>as fast as now</li>'
    if any(ratio is not None for _, _, ratio in rows):
        legend_items += '<li><i style="background: var(--c1)"></i>measured afterwards</li>'
    return f'<figure>{"".join(row_elements)}<ul class="key">{legend_items}</ul>{_caption(caption)}</figure>'


class Curve(NamedTuple):
    """A line of a chart through points (x, y): ``marked`` draws the points too, ``dashed`` is for a reference."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    marked: bool = False


def chart(curves: Sequence[Curve], *, x: str, log: bool = False, caption: str = "") -> str:
    """Draws a chart of curves; points that are not finite are left out.

    Args:
        curves: lines.
        x: what the horizontal axis shows.
        log: whether both axes are logarithmic; points must be above 0.
        caption: what the chart shows, as plain text.
    """
    drawable_curves = [
        curve._replace(points=_thin_out([p for p in curve.points if _drawable(p, log)])) for curve in curves
    ]
    points = [point for curve in drawable_curves for point in curve.points]
    if not points:
        return f"<figure>{_caption(caption or 'no figures')}</figure>"
    left, right = _range([point[0] for point in points], log)
    low, high = _range([point[1] for point in points], log)

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        return (
            _LEFT + (_CHART_WIDTH - _LEFT - 8) * _fraction(point[0], left, right, log),
            _CHART_HEIGHT - _BOTTOM - (_CHART_HEIGHT - _BOTTOM - 10) * _fraction(point[1], low, high, log),
        )

    elements = []
    for value, label in _with_labels(_ticks(low, high, log)):
        _, y = to_pixels((left, value))
        elements.append(f'<line class="axis" x1="{_LEFT}" x2="{_CHART_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in _with_labels(_ticks(left, right, log)):
        x_pixel, _ = to_pixels((value, low))
        elements.append(
            f'<text x="{x_pixel:.1f}" y="{_CHART_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{label}</text>'
        )
    elements.append(
        f'<text x="{(_LEFT + _CHART_WIDTH) / 2}" y="{_CHART_HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>'
    )
    for number, curve in enumerate(drawable_curves):
        elements += _curve(curve, [to_pixels(point) for point in curve.points], f"var(--c{number % _COLOURS})")
    svg = f'<svg class="chart" viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT}" role="img" aria-label="{escape(caption)}">'
    legend_items = "".join(
        f'<li><i style="background: var(--c{number % _COLOURS})"></i>{escape(curve.name)}</li>'
        for number, curve in enumerate(drawable_curves)
        if curve.name
    )
    legend = f'<ul class="key">{legend_items}</ul>' if legend_items else ""
    return f"<figure>{svg}{''.join(elements)}</svg>{legend}{_caption(caption)}</figure>"


def _curve(curve: Curve, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    marked = curve.marked or len(points) == 1
    elements = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points if marked]
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        elements.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
    return elements


def _caption(text: str) -> str:
    return f"<figcaption>{escape(text)}</figcaption>" if text else ""


def _drawable(point: tuple[float, float], log: bool) -> bool:
    return all(abs(value) < _HUGE and (value > 1 / _HUGE or not log) for value in point)


def _thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Replaces neighbouring points by their mean, down to the number a screen can show."""
    points_per_mean = -(-len(points) // _MOST_POINTS)
    if points_per_mean <= 1:
        return list(points)
    blocks = [points[start : start + points_per_mean] for start in range(0, len(points), points_per_mean)]
    means = []
    for block in blocks:
        x = sum(point[0] for point in block) / len(block)
        y = sum(point[1] for point in block) / len(block)
        means.append((x, y))
    return means


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return (low, high) if high > low else (low / 2, 2 * high)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        # Half of the smallest float is 0, so tiny values get a range around 0 instead.
        margin = abs(low) / 2 if abs(low) > 1e-9 else 0.5
        return low - margin, high + margin
    return low, high


def _fraction(value: float, low: float, high: float, log: bool) -> float:
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Picks some round numbers in a range.

    Example:
        >>> _ticks(0.31, 0.69, False), _ticks(3, 20_000, True)
        ([0.4, 0.5, 0.6], [10, 100, 1000, 10000])
    """
    if log:
        # The margins keep a power of ten at an end of the range, in spite of rounding.
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        ticks = [10**power for power in range(first, last + 1)]
        return ticks[:: -(-len(ticks) // 5)] if len(ticks) > 1 else [low, high]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    digits = 1 - math.floor(math.log10(step))
    last = math.floor(high / step + 1e-9)
    return [round(number * step, digits) for number in range(first, last + 1)]


def _with_labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Labels ticks, with enough digits to distinguish neighbours.

    Example:
        >>> _with_labels([0.9985, 0.999, 0.9995]), _with_labels([10_000, 20_000])
        ([(0.9985, '0.9985'), (0.999, '0.9990'), (0.9995, '0.9995')], [(10000, '10k'), (20000, '20k')])
    """
    step = min((later - earlier for earlier, later in itertools.pairwise(ticks)), default=1.0)
    digits = math.ceil(-math.log10(step) - 1e-6)
    fixed_point = 0 < digits < 9 and max(map(abs, ticks)) < 10_000
    labels = [f"{value:.{digits}f}" if fixed_point else _short_number(value) for value in ticks]
    return list(zip(ticks, labels, strict=True))


def _short_number(value: float) -> str:
    """Formats a number in few characters.

    Example:
        >>> [_short_number(value) for value in (0.6, 12_500, 3e6, 1.05, 2.5e9)]
        ['0.6', '12.5k', '3M', '1.05', '2.5G']
    """
    # From 10,000 on, not from 1,000: four digits read as easily as 1.23k.
    for least, size, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{name}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
