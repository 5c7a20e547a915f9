"""Writes the pages of docs that are made from code and from measured figures: `python tools/docs.py [--check]`.

docs/settings.md lists every key of every recipe, docs/benchmarks.md every row of benchmarks/results. `--check` writes
nothing and fails where a page is not what it would be.
"""

import argparse
import ast
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchx_apps.cli.command_line import SettingKey, setting_keys
from torchx_apps.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MADE = "<!-- written by tools/docs.py; do not edit -->\n\n"


def benchmarks_page() -> str:
    """Every measured row, by benchmark, with both sides."""
    lines = [
        "# Benchmarks: every measured row",
        "",
        "Each script runs its baseline and ours in turns on the machine where it is called, and prints these rows as",
        "JSON on its last line. `ratio` is how many times better ours is; where the unit says that lower is better,",
        "and where `asked` says at most, it is ours over the baseline. `asked` is what was asked of it, `ceiling` the",
        "ratio of processes that never talk or of arithmetic alone. A miss stands here as it was measured.",
        "",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict):
            lines += _benchmark(path.stem, result)
    lines += [
        "## Quality",
        "",
        "What the recipes reach stands in [recipes](recipes.md#what-they-reach), by `benchmarks/quality.py`.",
        "",
    ]
    return MADE + "\n".join(lines)


def _benchmark(name: str, result: Mapping[str, Any]) -> list[str]:
    script = ROOT / "benchmarks" / f"{name}.py"
    summary = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return [
        f"## {name}",
        "",
        f"{summary} `.venv/bin/python benchmarks/{name}.py`; {result['cores']} cores, {versions}.",
        "",
        "| row | baseline | ours | unit | ratio | asked | ceiling |",
        "|---|---|---|---|---|---|---|",
        *(_row(row) for row in result["rows"]),
        "",
    ]


def _row(row: Mapping[str, Any]) -> str:
    cells = [row["name"], *(_figure(row[key]) for key in ("baseline", "ours")), row["unit"]]
    return "| " + " | ".join([*cells, *(_figure(row[key]) for key in ("ratio", "required", "ceiling"))]) + " |"


def _figure(value: object) -> str:
    """Returns a figure with four digits, as it is where it is text, or nothing.

    Example:
        >>> _figure(937202), _figure(0.07834), _figure(16.82), _figure(None)
        ('937,202', '0.0783', '16.82', '')
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or (isinstance(value, float) and value >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}" if not isinstance(value, float) or value >= 1 else f"{value:.3g}"


def settings_page() -> str:
    """Every key of every recipe: those of all recipes once, then what each recipe has beside them or sets otherwise."""
    recipes = {name: {key.path: key for key in setting_keys(recipe())} for name, recipe in RECIPES.items()}
    first = next(iter(recipes.values()))
    shared = [
        key
        for key in first.values()
        if key.path not in _PYTHON
        and all((other := keys.get(key.path)) and other.meaning == key.meaning for keys in recipes.values())
    ]
    lines = [
        "# Settings: every key of every recipe",
        "",
        "`--set KEY=VALUE` changes one, and may be repeated. `.venv/bin/torchx run rec.train.hybrid --recipe NAME --",
        "--dry-run` prints those of one recipe, the most used first, with the values it would run with.",
    ]
    for section, keys in itertools.groupby(shared, lambda key: key.section):
        lines += ["", f"## {section}", "", *_table((key, _default(key.path, recipes)) for key in keys)]
    for name, keys in recipes.items():
        own = [
            key for key in keys.values() if key not in shared and key.path not in {*_PYTHON, *(k.path for k in shared)}
        ]
        changed = [key for key in shared if _default(key.path, recipes) == _BY_RECIPE]
        lines += ["", f"## Recipe {name}", "", *_table((key, key.value) for key in own)]
        lines += [
            "",
            "Its defaults of keys above: " + ", ".join(f"`{k.path}={keys[k.path].value}`" for k in changed) + ".",
        ]
    return MADE + "\n".join(lines) + "\n"


_PYTHON = ("name", "build", "task")  # of a Job in Python; --set does not take them
_BY_RECIPE = "by recipe"


def _default(path: str, recipes: Mapping[str, Mapping[str, SettingKey]]) -> str:
    values = {keys[path].value for keys in recipes.values()}
    return values.pop() if len(values) == 1 else _BY_RECIPE


def _table(rows: Iterable[tuple[SettingKey, str]]) -> list[str]:
    lines = ["| key | default | type | what it sets |", "|---|---|---|---|"]
    for key, value in rows:
        cells = (f"`{key.path}`", value if value == _BY_RECIPE else f"`{value}`", key.type, key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


PAGES = {"benchmarks.md": benchmarks_page, "settings.md": settings_page}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(
        prog="docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    args = parser.parse_args(argv)
    stale = [name for name, page in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != page()]
    if args.check:
        for name in stale:
            print(f"docs/{name} is out of date: python tools/docs.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(PAGES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
