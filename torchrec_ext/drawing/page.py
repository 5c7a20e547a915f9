"""page(): one self-contained HTML file of cards with text, tables and pictures, for phones and desks, light and dark.

A page needs no network, no script and no plotting library: bars are HTML, and charts are SVG, written here. Words are
placed next to bars, not inside of them, because bars get narrower with the screen and words do not.
"""

from __future__ import annotations

import itertools
import math
import statistics
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
.chart { max-width: 34rem; overflow: visible; }
.chart text { fill: var(--muted); font: 11px system-ui, sans-serif; }
.chart .axis { stroke: var(--line); stroke-width: 1; }
.row { display: grid; grid-template-columns: minmax(0, 7.5rem) minmax(0, 1fr) minmax(0, 6.5rem); gap: .6rem;
  align-items: center;
  font-size: .86rem; line-height: 1.25; margin: .3rem 0; font-variant-numeric: tabular-nums; }
.lane { position: relative; height: 1.3rem; background: var(--ground); border-radius: .2rem; }
.lane i { position: absolute; top: 5%; bottom: 5%; min-width: 1px; }
.lane .inner { top: 25%; bottom: 25%; }
.lane .pale { opacity: .35; }
.lane .mark { top: 0; bottom: 0; min-width: 3px; }
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
# of a chart, with the room of its axes
_CHART_WIDTH, _CHART_HEIGHT, _LEFT, _BOTTOM = (360, 180, 46, 34)


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
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{title}</h2>{"".join(content)}</section>\n'


def paragraph(text: str, kind: str = "") -> str:
    """Renders plain text as a paragraph of a kind: ``muted``, ``warning`` or ``conclusion``."""
    if kind:
        kind = f" class={kind}"
    return f"<p{kind}>{escape(text)}</p>"


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
    spans = list(itertools.chain.from_iterable(row.spans for row in rows))
    # A scale of some length, so that lanes without a span can be drawn too.
    end = (
        max((span.end for span in spans if math.isfinite(span.end)), default=0.0) or 1.0
    )
    # One colour for a name in all lanes.
    names = dict.fromkeys(span.name for span in spans)
    colours = {
        name: f"var(--c{number % _COLOURS})" for number, name in enumerate(names)
    }
    elements = ""
    for row in rows:
        label = ", ".join(dict.fromkeys(span.name for span in row.spans[:8]))
        elements += _row(row.name, _bars(row.spans, end, colours), label, row.value)
    return _figure(elements, colours, caption)


def _bars(spans: Sequence[Bar], end: float, colours: Mapping[str, str]) -> str:
    elements = ""
    outer_bars: list[Bar] = []
    # The longest first, so that a span inside of another comes after it and is drawn
    # over it.
    for span in sorted(spans, key=lambda other: other.start - other.end):
        if not (math.isfinite(span.start) and span.end > span.start):
            continue
        kind = "pale"
        if not span.pale:
            is_nested = any(
                outer.start <= span.start and span.end <= outer.end
                for outer in outer_bars
            )
            kind = "inner" if is_nested else "outer"
            outer_bars.append(span)
        elements += _bar(
            kind,
            100 * span.start / end,
            100 * span.end / end,
            colours[span.name],
            span.name,
        )
    return elements


def gains(rows: Sequence[tuple[str, tuple[float, float] | None]]) -> str:
    """Draws expected speed-ups as bars on one logarithmic scale, with a mark at "as fast as now".

    Args:
        rows: name and expected interval, or None for an unknown one.
    """
    # The scale always includes "as fast as now" with some room, so that small gains do
    # not look large.
    low = 0.8
    high = 1.25
    for value in itertools.chain.from_iterable(gain or () for _, gain in rows):
        # 0 and infinity have no place on a logarithmic scale: such bars end at its
        # ends.
        if value and math.isfinite(value):
            low = min(low, value)
            high = max(high, value)

    def percent(value: float) -> float:
        return 100 * _fraction(min(max(value, low), high), low, high, log=True)

    colours = {"expected": "var(--c0)", "as fast as now": "var(--muted)"}
    elements = ""
    for name, gain in rows:
        bars = _bar("mark", percent(1), percent(1), colours["as fast as now"])
        text = "not known"
        if gain is not None:
            bars = (
                _bar("outer", percent(gain[0]), percent(gain[1]), colours["expected"])
                + bars
            )
            text = f"{_short_number(gain[0])} to {_short_number(gain[1])}x"
        elements += _row(name, bars, text, text)
    return _figure(elements, colours, "")


def _bar(kind: str, start: float, end: float, colour: str, title: str = "") -> str:
    """Renders a bar; ``start`` and ``end`` are percents of the lane's width."""
    place = f"left: {start:.3f}%; width: {end - start:.3f}%; background: {colour}"
    return f'<i class="{kind}" style="{place}" title="{escape(title)}"></i>'


def _row(name: str, bars: str, label: str, value: str) -> str:
    """Renders a lane between its name and its value; ``label`` tells its bars to screen readers."""
    return (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f'<div class="lane" role="img" aria-label="{escape(f"{name}: {label}")}">{bars}</div>'
        f'<span class="value">{escape(value)}</span></div>'
    )


def _figure(picture: str, colours: Mapping[str, str], caption: str) -> str:
    """Renders a picture, a legend of its colours by name, and a caption."""
    legend = ""
    for name, colour in colours.items():
        legend += f'<li><i style="background: {colour}"></i>{escape(name)}</li>'
    if legend:
        legend = f'<ul class="key">{legend}</ul>'
    if caption:
        caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<figure>{picture}{legend}{caption}</figure>"


class Curve(NamedTuple):
    """A line of a chart through points (x, y): ``marked`` draws the points too, ``dashed`` is for a reference."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    marked: bool = False


def chart(
    curves: Sequence[Curve], *, x: str, log: bool = False, caption: str = ""
) -> str:
    """Draws a chart of curves; points that are not finite are left out.

    Args:
        curves: lines.
        x: what the horizontal axis shows.
        log: whether both axes are logarithmic; points must be above 0.
        caption: what the chart shows, as plain text.
    """
    drawable_curves = []
    points: list[tuple[float, float]] = []
    for curve in curves:
        drawable_points = _thin_out(
            [point for point in curve.points if _drawable(point, log)]
        )
        drawable_curves.append(curve._replace(points=drawable_points))
        points += drawable_points
    if not points:
        return _figure("", {}, caption or "no figures")
    xs, ys = zip(*points, strict=True)
    left, right = _range(xs, log)
    low, high = _range(ys, log)
    plot_width = _CHART_WIDTH - _LEFT - 8
    plot_height = _CHART_HEIGHT - _BOTTOM - 10

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        across = _fraction(point[0], left, right, log)
        up = _fraction(point[1], low, high, log)
        return _LEFT + plot_width * across, _CHART_HEIGHT - _BOTTOM - plot_height * up

    elements = ""
    for value, label in _with_labels(_ticks(low, high, log)):
        _, y = to_pixels((left, value))
        elements += f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + plot_width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        elements += _text(_LEFT - 5, y + 4, label, "end")
    for value, label in _with_labels(_ticks(left, right, log)):
        x_pixel, _ = to_pixels((value, low))
        elements += _text(x_pixel, _CHART_HEIGHT - _BOTTOM + 15, label)
    elements += _text((_LEFT + _CHART_WIDTH) / 2, _CHART_HEIGHT - 4, escape(x))
    colours = {}
    for number, curve in enumerate(drawable_curves):
        colour = f"var(--c{number % _COLOURS})"
        elements += _curve(curve, [to_pixels(point) for point in curve.points], colour)
        if curve.name:
            colours[curve.name] = colour
    size = f"0 0 {_CHART_WIDTH} {_CHART_HEIGHT}"
    svg = f'<svg class="chart" viewBox="{size}" role="img" aria-label="{escape(caption)}">{elements}</svg>'
    return _figure(svg, colours, caption)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve(curve: Curve, points: Sequence[tuple[float, float]], colour: str) -> str:
    elements = ""
    # A single point has no line, so it is drawn even if the curve is not marked.
    if curve.marked or len(points) == 1:
        for x, y in points:
            elements += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = "5 4" if curve.dashed else "none"
    style = (
        f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
    )
    return f'{elements}<polyline points="{path}" {style}/>'


def _drawable(point: tuple[float, float], log: bool) -> bool:
    return all(abs(value) < _HUGE and (value > 1 / _HUGE or not log) for value in point)


def _thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Replaces neighbouring points by their mean, down to the number a screen can show."""
    points_per_mean = math.ceil(len(points) / _MOST_POINTS)
    if points_per_mean <= 1:
        return list(points)
    means = []
    for start in range(0, len(points), points_per_mean):
        xs, ys = zip(*points[start : start + points_per_mean], strict=True)
        means.append((statistics.fmean(xs), statistics.fmean(ys)))
    return means


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    # A range of one value would have no length to divide by.
    if log and high == low:
        return low / 2, 2 * high
    if not log and high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
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
        if len(ticks) < 2:
            # Less than a power of ten: its ends are no round numbers, but say how wide
            # it is.
            return [low, high]
        # Five labels fit.
        return ticks[:: math.ceil(len(ticks) / 5)]
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
    step = min(
        (later - earlier for earlier, later in itertools.pairwise(ticks)), default=1.0
    )
    digits = math.ceil(-math.log10(step) - 1e-6)
    fixed_point = 0 < digits < 9 and max(map(abs, ticks)) < 10_000
    labels = [
        f"{value:.{digits}f}" if fixed_point else _short_number(value)
        for value in ticks
    ]
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
