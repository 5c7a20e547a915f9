"""A page as headless Chromium shows it: its elements' places on a screen of some width, and its picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium or Chrome on the PATH"
)
PHONE, DESK = 390, 1100  # pixels

# The page in a frame, since a window is never narrower than 500 pixels.
_FRAME = """<!doctype html><body style="margin: 0"><iframe id="page" width="{width}" height="{height}"
style="border: 0" srcdoc="{page}"></iframe><pre id="seen"></pre><script>
document.getElementById("page").onload = (event) => {{
  const inside = event.target.contentDocument, box = (each) => each.getBoundingClientRect();
  const bars = [...inside.querySelectorAll(".row .lane i")].map((bar) => (
    {{row: bar.closest(".row").firstChild.textContent, name: bar.title, width: box(bar).width}}));
  document.getElementById("seen").textContent = JSON.stringify({{
    overflow: inside.documentElement.scrollWidth - {width}, text: inside.body.innerText, bars,
    outside: [...inside.querySelectorAll("main *")].filter((each) => !each.closest("pre, .table, defs"))
      .filter((each) => box(each).right > {width} + 1).length,
    cut_tables: [...inside.querySelectorAll(".table")].filter((each) => each.scrollWidth > each.clientWidth + 1).length,
    pictures: [...inside.querySelectorAll("svg, .lane")]
      .filter((each) => box(each).width > 50 && box(each).height > 5).length,
    ground: getComputedStyle(inside.body).backgroundColor}});
}};
</script></body>"""


@dataclass(frozen=True)
class Shown:
    """What a browser shows of a page.

    Args:
        text: the text that can be read.
        overflow: pixels that the page is wider than the screen.
        outside: number of elements that reach beyond it.
        pictures: number of pictures with an area.
        cut_tables: number of tables that must be scrolled to be read.
        bars: each bar's row, name and width in pixels.
        ground: colour behind the page.
    """

    text: str
    overflow: int
    outside: int
    pictures: int
    cut_tables: int
    bars: list[dict[str, Any]]
    ground: str

    def width(self, row: str, name: str) -> float:
        """The width of a bar, which must be there."""
        (width,) = [
            bar["width"]
            for bar in self.bars
            if (bar["row"], bar["name"]) == (row, name)
        ]
        return float(width)


def shown(page: str, folder: Path, *, width: int = PHONE, dark: bool = False) -> Shown:
    """What Chromium shows of a page on a screen of some width; no script of its own may fail, nothing be loaded."""
    frame = folder / "frame.html"
    frame.write_text(_FRAME.format(width=width, height=4_000, page=escape(page)))
    done = _chromium(folder, "--dump-dom", *_scheme(dark), f"file://{frame}")
    assert "CONSOLE" not in done.stderr, done.stderr
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen, done.stdout[-2_000:]
    return Shown(**json.loads(unescape(seen[1])))


def colours(
    page: str,
    folder: Path,
    *,
    width: int = 500,
    height: int = 2_000,
    dark: bool = False,
) -> dict[str, int]:
    """The colours of a page's picture as #rrggbb, with their numbers of pixels."""
    from matplotlib.image import imread

    file, picture = folder / "page.html", folder / "page.png"
    file.write_text(page)
    _chromium(
        folder, f"--screenshot={picture}", f"--window-size={width},{height}", *_scheme(dark), "--hide-scrollbars",
        f"file://{file}",
    )  # fmt: skip
    pixels = (imread(picture)[..., :3] * 255).round().astype(np.uint32)
    values, counts = np.unique(
        pixels @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32), return_counts=True
    )
    return {
        f"#{int(value):06x}": int(count)
        for value, count in zip(values, counts, strict=True)
    }


def _scheme(dark: bool) -> list[str]:
    return (
        ["--blink-settings=preferredColorScheme=0"]
        if dark
        else ["--blink-settings=preferredColorScheme=1"]
    )


def _chromium(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    base = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    # No name is resolved: a page that asks for anything outside of itself fails, and
    # says so on the console.
    base += [
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    done = subprocess.run(
        [str(CHROMIUM), *base, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
