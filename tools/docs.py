"""Writes what the documents say of code and of measured figures: `python tools/docs.py [--check]`.

docs/benchmarks.md lists every row of benchmarks/results, and docs/reference every flag and every exported name. The
tables between `<!-- NAME: by tools/docs.py -->` and `<!-- /NAME -->` in the README and docs are made from results too.
`--check` writes nothing and fails where a page is not what it would be.
"""

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_ext.retrieval.server.settings import ServerConfig
from torchx_apps.config import RecipeOptions, RunOptions, StreamOptions
from torchx_apps.embed import EmbedOptions
from torchx_apps.export import ExportOptions

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api"
RESULTS = ROOT / "benchmarks" / "results"
MADE = "<!-- written by tools/docs.py; do not edit -->\n\n"

# The README's rows, and what is compared.
MEASURED = {
    "ncf-full, against fused Adam": "Contextual NCF, 12.45 M parameters: a user's script with fused Adam, "
    "against `adopt`",
    "ncf-small, against fused Adam": "the same with 75 thousand parameters",
    "row-wise": "rows of a click log, shuffled: torch's DataLoader over a Dataset, against `ChunkLoader`",
    "sync every step": "NeuMF: a plain PyTorch loop with fused Adam, against two ranks that meet in every step",
    "score 500 of 1,000,000, against the whole network": "a request for 500 of 1 M items: the whole network, "
    "against stored rows",
}


def _results() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The runs of benchmarks by name, and the rows."""
    result = json.loads((RESULTS / "all.json").read_text())
    return result["runs"], result["rows"]


def benchmarks_page() -> str:
    """Every measured row, by program, with both sides."""
    runs, rows = _results()
    lines = [
        "# Benchmarks: every measured row",
        "",
        "`make bench` runs each program alone on an idle machine, and writes these rows. A program",
        "measures its baseline and ours in turns. `ratio` says how many times better ours is: the median of the",
        "turns, with the least and the greatest of any. A row without a baseline has the range of its own",
        "figure. `ceiling` is the greatest ratio possible there, for example that of two processes that never",
        "talk. [Runs](#runs) has commits and machines. [Report 0.1](report-0.1.md) has rows that are no longer",
        "measured.",
        "",
    ]
    numbers = {name: number for number, name in enumerate(runs, 1)}
    for program in dict.fromkeys(row["program"] for row in rows):
        script = ROOT / "benchmarks" / f"{program}.py"
        docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
        summary = docstring.split("\n\n")[0].replace("\n", " ")
        head = (
            "row",
            "baseline",
            "ours",
            "unit",
            "ratio",
            "ceiling",
            "run",
            "what limits it",
        )
        lines += [
            f"## {program}",
            "",
            f"{summary} `.venv/bin/python benchmarks/{program}.py`",
            "",
        ]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in rows:
            if row["program"] == program:
                cells = [*_cells(row), str(numbers[row["run"]]), row.get("limit") or ""]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Runs", ""]
    for name, number in numbers.items():
        lines.append(f"{number}. {_about(runs[name])}")
    lines += [
        "",
        "## Quality",
        "",
        "What the [recipes](recipes.md) reach. `.venv/bin/python benchmarks/quality.py` trains each row by the",
        "command that a user types. Nothing is chosen on a test set.",
        "",
        *quality_table(),
        "",
    ]
    return MADE + "\n".join(lines)


def _about(run: Mapping[str, Any]) -> str:
    """Commit, date and machine of a run."""
    versions = [f"{package} {version}" for package, version in run["versions"].items()]
    told = [f"commit {run['commit']}", run["date"], run["on"], *versions]
    told += [f"{figure:g} {unit}" for unit, figure in run.get("machine", {}).items()]
    return ", ".join(told) + "."


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio = "" if row["ratio"] is None else f"{_figure(row['ratio'])}x"
    spread = f"{ratio} ({_figure(row['low'])} to {_figure(row['high'])})".strip()
    sides = [_figure(row["baseline"]), _figure(row["ours"]), row["unit"]]
    return [row["name"], *sides, spread, _figure(row["ceiling"])]


def _figure(value: float | None) -> str:
    """Returns a figure with three or four digits, or nothing.

    Example:
        >>> _figure(937202.0), _figure(0.07834), _figure(16.82), _figure(None)
        ('937,202', '0.0783', '16.82', '')
    """
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value >= 1 else f"{value:.3g}"


def measured_table() -> Iterator[str]:
    """The README's rows, both sides; a row that has not been measured is left out."""
    rows = {row["name"]: row for row in _results()[1]}
    yield "| | baseline | ours | ratio |"
    yield "|---|---|---|---|"
    for name, text in MEASURED.items():
        if name in rows:
            baseline, ours, ratio, ceiling = _sides(rows[name])
            most = (
                f" (two of the baseline that never talk: {ceiling})" if ceiling else ""
            )
            yield f"| {text}{most} | {baseline} | {ours} | {ratio} |"


def _sides(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Baseline, ours, ratio and ceiling with their units."""
    unit = row["unit"].split(",")[0]
    ceiling = f"{row['ceiling']:.2f}x" if row["ceiling"] else ""
    baseline, ours = (f"{_figure(row[side])} {unit}" for side in ("baseline", "ours"))
    return baseline, ours, f"{row['ratio']:.3g}x", ceiling


def rows_table(program: str, prefix: str) -> Iterator[str]:
    """Rows of a program whose names begin with ``prefix``."""
    yield "| | baseline | ours | ratio | ceiling |"
    yield "|---|---|---|---|---|"
    for row in _results()[1]:
        is_ours = row["program"] == program and row["name"].startswith(prefix)
        if is_ours and row["ratio"] is not None:
            yield f"| {row['name']} | {' | '.join(_sides(row))} |"


def quality_table() -> Iterator[str]:
    """What the recipes reach, beside the best published figure."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import quality

    runs = quality.runs_of(quality.RESULTS)
    yield "| recipe | measured | best published | reached | beside it | seeds, minutes, commit |"
    yield "|---|---|---|---|---|---|"
    for name, row in json.loads(quality.SPEC.read_text()).items():
        # A run that was made before the row's settings changed is another row's.
        asked = {run: set(how["set"]) for run, how in row.get("runs", {}).items()}
        data = {run: how.get("data") for run, how in row.get("runs", {}).items()}
        kept = [
            run
            for run in runs
            if run["id"] == name
            and asked.get(run["run"], set()) <= set(run["set"])
            and data.get(run["run"]) == run.get("data")
        ]
        if not kept or asked.keys() - {run["run"] for run in kept}:
            continue
        by_run = {
            run: [one for one in kept if one["run"] == run]
            for run in {one["run"]: None for one in kept}
        }
        recipes = " and ".join(
            f"`{recipe}`" for recipe in {one["recipe"]: None for one in kept} if recipe
        )
        commits = " ".join({one["commit"]: None for one in kept})
        cells = [recipes, row["what"], _quality(row.get("reach_for", {}))]
        beside = quality.beside_of(by_run, row["required"])
        minutes = sum(one["seconds"] for one in kept) / 60
        cells += [_quality(quality.figures(row, by_run))]
        cells += [
            "; ".join(
                f"{baseline}: {_quality(figures)}"
                for baseline, figures in beside.items()
            )
        ]
        cells += [f"{len(kept) // len(by_run)}, {minutes:.0f}, {commits}"]
        yield "| " + " | ".join(cells) + " |"


def _quality(figures: Mapping[str, float]) -> str:
    texts = (
        f"{name.replace('_', ' ')} {value:.4f}".rstrip("0").replace(
            " 0.", " ." if value >= 5e-5 else " 0"
        )
        for name, value in figures.items()
        if value
    )
    return ", ".join(texts)


TABLES = {"measured": measured_table, "quality": quality_table}


def with_tables(text: str) -> str:
    """A page with its generated tables as they would be now."""

    def made(match: re.Match[str]) -> str:
        name = match[1]
        lines = TABLES[name]() if name in TABLES else rows_table(*name.split("/"))
        return (
            f"<!-- {name}: by tools/docs.py -->\n"
            + "\n".join(lines)
            + f"\n<!-- /{name} -->"
        )

    return re.sub(
        r"<!-- ([\w/-]+): by tools/docs\.py -->\n.*?<!-- /\1 -->",
        made,
        text,
        flags=re.DOTALL,
    )


def _documented(kind: type) -> dict[str, str]:
    """Returns what a dataclass's docstring and those of its bases say of each field, as plain text."""
    # Comes with tyro, which makes --help of the same text.
    from docstring_parser import parse

    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for documented in parse(base.__doc__ or "").params:
            text = " ".join((documented.description or "").split())
            plain = re.sub(r":[a-z]+:`[~!]?(?:[\w.]*\.)?(\w+)`", r"\1", text)
            meanings[documented.arg_name] = plain.replace("``", "")
    return meanings


class Export(NamedTuple):
    """A name that a package exports.

    Args:
        name: the name.
        summary: first paragraph of its docstring.
        directive: Sphinx' directive that describes it.
    """

    name: str
    summary: str
    directive: str


def exports(package: str) -> list[Export]:
    """Returns the names of a package's ``__init__.pyi``, read without importing it.

    Example:
        >>> [each.name for each in exports("torchrec_ext.networks")]
        ['Stack']
    """
    modules: dict[str, str] = {}
    for node in _tree(package, "__init__.pyi").body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name(
                f"{'.' * node.level}{node.module}", package
            )
            modules |= {alias.name: module for alias in node.names}
    return [_export(name, modules[name]) for name in sorted(modules)]


def _tree(module: str, file: str = "") -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / file if file else path.with_suffix(".py")).read_text())


def _summary(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def _export(name: str, module: str) -> Export:
    tree = _tree(module)
    defined = {
        node.name: node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    if name in defined:
        node = defined[name]
        if isinstance(node, ast.FunctionDef):
            return Export(name, _summary(node), f".. autofunction:: {name}")
        return Export(name, _summary(node), f".. autoclass:: {name}\n   :members:")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [
            alias.name for alias in node.names
        ]:
            return _export(name, str(node.module))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            value = ast.unparse(node.value)
            if not isinstance(node.value, ast.Call):
                return Export(
                    name, f"a type: `{value}`", f".. data:: {name}\n\n   ``{value}``"
                )
            # An object that is called, such as `why_slow`: its class is described.
            maker = ast.unparse(node.value.func)
            directive = (
                f".. data:: {name}\n\n"
                f".. autoclass:: {module}.{maker}\n   :members:\n   :special-members: __call__"
            )
            return Export(name, _summary(defined[maker]), directive)
    raise ValueError(f"{module} does not define {name}, which a package exports")


def api_pages() -> Iterator[tuple[Path, str]]:
    """A page for each package with its exported names; a name of several packages is described by a subpackage."""
    packages = [
        f"torchrec_ext.{path.parent.name}"
        for path in sorted(ROOT.glob("torchrec_ext/*/__init__.pyi"))
    ]
    homes: dict[str, str] = {}
    for package in [*packages, "torchrec_ext"]:
        homes |= {
            export.name: package
            for export in exports(package)
            if export.name not in homes
        }
    for package in ["torchrec_ext", *packages]:
        lines = [f"# {package}", "", _summary(_tree(package, "__init__.py")), ""]
        lines += ["| name | what it is | described |", "|---|---|---|"]
        directives: list[str] = []
        for export in exports(package):
            home = homes[export.name]
            link = f"in [{home}]({home.rpartition('.')[2]}.md)"
            if home == package:
                link = "below"
                directives += ["", export.directive]
            summary = (
                re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", export.summary)
                .replace("``", "`")
                .replace("|", "\\|")
            )
            lines.append(f"| `{export.name}` | {summary} | {link} |")
        first = next(
            (each.name for each in exports(package) if homes[each.name] == package), ""
        )
        if first:
            lines += [
                "",
                "Arguments, shapes and errors are below on the site that `make docs` builds. Without it ask Python:",
                f"`.venv/bin/python -c 'import {package} as p; help(p.{first})'`.",
            ]
        lines += [
            "",
            "```{eval-rst}",
            f".. currentmodule:: {package}",
            *directives,
            "```",
        ]
        yield API / f"{package.rpartition('.')[2]}.md", MADE + "\n".join(lines) + "\n"


# Flags that say where and with what a job runs: one list for all components.
_WHERE = (
    "args",
    "threads",
    "max_retries",
    "name",
    "image",
    "h",
    "cpu",
    "gpu",
    "memMB",
    "env",
    "mounts",
)
_WHERE += ("rdzv_port", "metadata", "debug")


# Flags of the apps, by what has them.
_OPTIONS: dict[str, type] = {
    "All with a recipe": RecipeOptions,
    "All that train": RunOptions,
    "rec.train.stream": StreamOptions,
    "rec.serve.export": ExportOptions,
    "rec.serve.embed": EmbedOptions,
    "rec.serve.http": ServerConfig,
}


def cli_page() -> str:
    """Every component with its flags, read from its source, and the flags of the server."""
    lines = [
        "# Command line",
        "",
        "`torchx run -s SCHEDULER COMPONENT FLAGS -- FLAGS OF THE APP` starts a job. `COMPONENT --help` prints the",
        "first lists, `torchx builtins` the components, and `COMPONENT -- --help` the second, with every setting of",
        "the recipe. `--dry_run` prints them as a file for `--settings`.",
    ]
    places: dict[str, str] = {}
    for file in sorted((ROOT / "components").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                group = [] if file.stem == "__init__" else [file.stem]
                meanings = _meanings(node)
                defaults = _defaults(node)
                places |= {
                    flag: meanings[flag]
                    for flag in meanings
                    if flag in _WHERE and flag != "args"
                }
                own = [flag for flag in meanings if flag not in _WHERE]
                lines += [
                    "",
                    f"## {'.'.join(['rec', *group, node.name])}",
                    "",
                    f"{_summary(node)}",
                    "",
                ]
                lines += ["| flag | default | meaning |", "|---|---|---|"]
                lines += [
                    f"| `{_dashed(flag)}` | {defaults[flag]} | {_cell(meanings[flag])} |"
                    for flag in own
                ]
    lines += [
        "",
        "## Where a job runs",
        "",
        "Flags of every component that has them:",
        "",
        "| flag | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{_dashed(flag)}` | {_cell(text)} |" for flag, text in places.items()]
    for title, kind in _OPTIONS.items():
        lines += ["", f"## {title}, behind `--`", ""]
        lines += ["| flag | default | meaning |", "|---|---|---|"]
        meanings = _documented(kind)
        for field in dataclasses.fields(kind):
            # Flags of a base have a list of their own.
            positional = field.default is dataclasses.MISSING
            if positional or field.name not in vars(kind)["__annotations__"]:
                continue
            default = "" if field.default in (None, "", ()) else f"`{field.default}`"
            lines.append(
                f"| `--{field.name}` | {default} | {_cell(meanings[field.name])} |"
            )
    return MADE + "\n".join(lines) + "\n"


def _dashed(flag: str) -> str:
    return f"-{flag}" if len(flag) == 1 else f"--{flag}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def _meanings(node: ast.FunctionDef) -> dict[str, str]:
    """Returns the arguments in a Google docstring with what is said of each."""
    section = (
        (ast.get_docstring(node) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    )
    parts = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(text.split())
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _defaults(node: ast.FunctionDef) -> dict[str, str]:
    values = [None] * (
        len(node.args.args) - len(node.args.defaults)
    ) + node.args.defaults
    pairs = [
        *zip(node.args.args, values, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    defaults = {}
    for argument, value in pairs:
        text = "required" if value is None else ast.unparse(value).strip("'\"")
        defaults[argument.arg] = (
            text if text == "required" else "" if text in ("None", "") else f"`{text}`"
        )
    return defaults


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with generated content, and what it would be."""
    yield DOCS / "benchmarks.md", benchmarks_page()
    yield DOCS / "reference" / "cli.md", cli_page()
    yield from api_pages()
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        if "by tools/docs.py -->" in (text := path.read_text()):
            yield path, with_tables(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(
        prog="docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail where a page is out of date",
    )
    args = parser.parse_args(argv)
    stale = [
        (path, text)
        for path, text in pages()
        if not path.exists() or path.read_text() != text
    ]
    if args.check:
        for path, _ in stale:
            print(
                f"{path.relative_to(ROOT)} is out of date: python tools/docs.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path, text in stale:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
