"""Draws the pictures of docs/concepts: `python tools/pictures.py [--eager MS MS MS --captured MS]`.

Each is an SVG of boxes and arrows on white, which is readable in light and dark. The one of graph capture is drawn to
scale from two measured times, which docs/concepts/capture.md prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, RED, GREY = "#1f5f99", "#b3541e", "#5b6470"
TABLE, LAYER, PLAIN = "#dbe8f4", "#f6e3d7", "#eef0f2"
COLOURS = (PLAIN, PLAIN, LAYER)
# Milliseconds of a step, as docs/concepts/capture.md prints them.
EAGER_MS, CAPTURED_MS = (1.02, 1.78, 15.15), 0.41


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    fill: str = PLAIN,
    edge: str = GREY,
) -> str:
    """Returns a rectangle with its text in the middle, a line for each line of ``text``."""
    lines = text.split("\n")
    first = y + height / 2 - 8 * (len(lines) - 1) + 5
    words = [
        f'<text x="{x + width / 2}" y="{first + 16 * number}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{edge}"/>'
    return "\n".join([shape, *words])


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns an arrow from one place to another."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{GREY}" marker-end="url(#head)"/>'


def words(
    x: float, y: float, text: str, *, weight: str = "normal", anchor: str = "start"
) -> str:
    """Returns one line of text."""
    return f'<text x="{x}" y="{y}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'


def picture(name: str, width: float, height: float, title: str, *parts: str) -> None:
    """Writes a picture."""
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    head += f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13"',
        f'  font-family="system-ui, sans-serif" fill="#1c2128"><title>{escape(title)}</title><defs>{head}</defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *parts,
        "</svg>",
    ]
    (PICTURES / f"{name}.svg").write_text("\n".join(lines) + "\n")


def parallelism() -> None:
    """Data, model and hybrid parallel on two ranks."""
    parts = []
    ways = (
        (
            "data parallel",
            ("whole tables", "whole tables"),
            ("layers", "layers"),
            ("rows 1-2", "rows 3-4"),
            "gradients",
        ),
        (
            "model parallel",
            ("tables A", "tables B"),
            ("layers 1", "layers 2"),
            ("all rows", "all rows"),
            "outputs",
        ),
        (
            "hybrid parallel",
            ("tables A", "tables B"),
            ("layers", "layers"),
            ("rows 1-2", "rows 3-4"),
            "vectors, gradients",
        ),
    )
    for column, (name, tables, layers, rows, exchange) in enumerate(ways):
        left = 12 + 248 * column
        parts.append(words(left + 112, 22, name, weight="bold", anchor="middle"))
        for rank in range(2):
            x = left + 116 * rank
            parts.append(box(x, 36, 108, 26, f"rank {rank}: {rows[rank]}"))
            parts.append(arrow(x + 54, 62, x + 54, 76))
            parts.append(box(x, 78, 108, 40, tables[rank], TABLE, BLUE))
            parts.append(arrow(x + 54, 118, x + 54, 138))
            parts.append(box(x, 140, 108, 30, layers[rank], LAYER, RED))
        parts.append(
            words(left + 112, 192, f"they exchange {exchange}", anchor="middle")
        )
    picture("parallelism", 750, 206, "Data, model and hybrid parallel", *parts)


def tower() -> None:
    """Two towers under a top network."""
    parts = []
    names = (
        ("user tower", "user_id, zip, age", "vector (B, D)"),
        ("item tower", "item_id", "vector (B, D), stored"),
    )
    for side, (name, columns, output) in enumerate(names):
        x = 20 + 290 * side
        parts += [
            words(x + 120, 20, name, weight="bold", anchor="middle"),
            box(x, 30, 240, 28, f"columns: {columns}"),
            arrow(x + 120, 58, x + 120, 74),
            box(x, 76, 240, 30, "tables", TABLE, BLUE),
            arrow(x + 120, 106, x + 120, 122),
            box(x, 124, 240, 30, "layers", LAYER, RED),
            arrow(x + 120, 154, 285 - 40 + 80 * side, 190),
            words(
                x + 120 + (-110 if side == 0 else 110),
                176,
                output,
                anchor="start" if side == 0 else "end",
            ),
        ]
    parts += [
        box(165, 192, 240, 30, "top NN", LAYER, RED),
        arrow(285, 222, 285, 238),
        box(225, 240, 120, 28, "logit"),
    ]
    picture("tower", 570, 280, "Two towers and a top network", *parts)


def capture(phases: Sequence[float], captured: float) -> None:
    """An eager step and a captured one, to scale.

    Args:
        phases: milliseconds of forward, backward and optimizer of an eager step.
        captured: milliseconds of a captured step.
    """
    eager = sum(phases)
    scale = 560 / eager
    parts = [words(12, 22, f"eager: {eager:.1f} ms a step", weight="bold")]
    x = 12.0
    for name, milliseconds, fill in zip(
        ("forward", "backward", "Adam, over all rows"), phases, COLOURS, strict=True
    ):
        width = milliseconds * scale
        parts.append(box(x, 32, width, 34, name if width > 60 else "", fill))
        x += width
    parts.append(words(12, 84, "forward, backward"))
    parts.append(words(12, 116, f"captured: {captured:.2f} ms a step", weight="bold"))
    parts.append(box(12, 126, captured * scale, 34, "", TABLE, BLUE))
    parts.append(
        words(
            24 + captured * scale, 148, "one function, and rows that nobody read wait"
        )
    )
    picture("capture", 590, 172, "An eager step and a captured one", *parts)


def bundle() -> None:
    """From a training to an answer."""
    parts = [
        box(10, 50, 110, 60, "trained model\n(checkpoint)", LAYER, RED),
        arrow(120, 80, 158, 80),
        words(139, 70, "export", anchor="middle"),
        box(160, 10, 190, 140, "", PLAIN),
        words(255, 28, "bundle", weight="bold", anchor="middle"),
        box(172, 36, 166, 24, "user tower, top NN", LAYER, RED),
        box(172, 64, 166, 24, "item vectors, index", TABLE, BLUE),
        box(172, 92, 166, 24, "preprocessor"),
        box(172, 120, 166, 24, "audit, SHA-256"),
        arrow(350, 80, 388, 80),
        box(390, 50, 110, 60, "server\nor Scorer"),
        arrow(500, 80, 538, 80),
        box(540, 50, 110, 60, "items, scores"),
        words(445, 136, "a request: a raw row", anchor="middle"),
        arrow(445, 124, 445, 112),
    ]
    picture("bundle", 660, 160, "From a training to an answer", *parts)


def main() -> None:
    """Draws all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--eager",
        type=float,
        nargs=3,
        default=EAGER_MS,
        help="ms of forward, backward, optimizer",
    )
    parser.add_argument(
        "--captured", type=float, default=CAPTURED_MS, help="ms of a captured step"
    )
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    parallelism()
    tower()
    capture(options.eager, options.captured)
    bundle()


if __name__ == "__main__":
    main()
