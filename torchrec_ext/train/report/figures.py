"""One look for the pictures that runs and apps draw: panels side by side, with a light grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

BLUE, RED = "#1f5f99", "#b3541e"


def figure_with_panels(
    count: int, size: tuple[float, float], *, grid: Literal["both", "x", "y"] = "both"
) -> tuple[Any, Any]:
    """Returns an empty figure and its ``count`` panels, side by side: matplotlib's ``Figure`` and ``Axes``.

    Args:
        count: number of panels.
        size: width and height of the figure in inches.
        grid: axis whose grid lines are drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.grid(alpha=0.25, axis=grid)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as PNG."""
    figure.savefig(path, dpi=120)
