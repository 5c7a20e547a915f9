"""Writes what the documents say of code and of measured figures: `python tools/docs.py [--check]`.

docs/settings.md lists every key of every recipe, docs/benchmarks.md every row of benchmarks/results, and docs/reference
every flag and every exported name. The tables between `<!-- NAME: by tools/docs.py -->` and `<!-- /NAME -->` in the
README and docs are made from results too. `--check` writes nothing and fails where a page is not what it would be.
"""

import argparse
import ast
import dataclasses
import importlib.util
import itertools
import json
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_ext.stack import TRIPLES
from torchx_apps.config import RecipeOptions, RunOptions, field_hint, is_group
from torchx_apps.embed import EmbedOptions
from torchx_apps.export import ExportOptions
from torchx_apps.recipes import RECIPES
from torchx_apps.serve import ServeOptions
from torchx_apps.train_stream import StreamOptions

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api"
RESULTS = ROOT / "benchmarks" / "results"
GPU = RESULTS / "gpu" / "tests.json"  # outcomes of tests on a GPU, by benchmarks/gpu.py
# those on devices that do not exist, by tools/simulated.py
SIMULATED = RESULTS / "simulated"
# written by hand: by file of results and row, what limits the row
LIMITS = ROOT / "benchmarks" / "limits.json"
MADE = "<!-- written by tools/docs.py; do not edit -->\n\n"

# The README's rows: benchmark, row, and what is compared.
MEASURED = (
    (
        "adopt",
        "ncf-full, against fused Adam",
        "Contextual NCF, 12.45 M parameters: a user's script with fused Adam, against `adopt`",
    ),
    (
        "adopt",
        "ncf-small, against fused Adam",
        "the same with 75 thousand parameters",
    ),
    (
        "loader",
        "row-wise",
        "rows of a click log, shuffled: torch's DataLoader over a Dataset, against `ChunkLoader`",
    ),
    (
        "hybrid",
        "sync every step",
        "NeuMF: a plain PyTorch loop with fused Adam, against two ranks that meet in every step",
    ),
    (
        "serving",
        "score 500 of 1,000,000, against the whole network",
        "a request for 500 of 1 M items: the whole network, against stored rows",
    ),
)


def benchmarks_page() -> str:
    """Every measured row, by benchmark, with both sides."""
    lines = [
        "# Benchmarks: every measured row",
        "",
        "`make bench` runs every script alone on an idle machine, in rounds, and writes these rows. Each script",
        "measures its baseline and ours in turns. `ratio` is how many times better ours is, the median of the",
        "rounds, with the least and the greatest of any turn; a row without a baseline has the range of its own",
        "figure. `ceiling` is the greatest ratio possible there, for example that of two processes that never",
        "talk. A row marked with what it depends on (disk, memory, cores) is another one on another machine: the",
        "machine's own yardsticks stand beside each benchmark. The last column says what limits a row, if that is",
        "known.",
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
    stem = name.removesuffix("-studies")
    script = ROOT / "benchmarks" / f"{stem}.py"
    limits = json.loads(LIMITS.read_text()).get(name, {})
    summary = (
        (ast.get_docstring(ast.parse(script.read_text())) or "")
        .split("\n\n")[0]
        .replace("\n", " ")
    )
    versions = ", ".join(
        f"{package} {version}" for package, version in result["versions"].items()
    )
    yardsticks = ", ".join(
        f"{middle:g} {unit}" for unit, (_, middle, _) in result["machine"].items()
    )
    return [
        f"## {name}",
        "",
        f"{summary} `.venv/bin/python benchmarks/{stem}.py{' --studies' * (stem != name)}`",
        "",
        f"Commit {result['commit']}, {result['date']}, {result['rounds']} rounds; {versions}.",
        f"The machine: {result['cpu']}; {yardsticks}.",
        "",
        "| row | baseline | ours | unit | ratio | ceiling | depends on | what limits it |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(row, limits.get(row["name"], "")) for row in result["rows"]),
        "",
    ]


def _row(row: Mapping[str, Any], limit: str) -> str:
    ratio = "" if row["ratio"] is None else f"{_figure(row['ratio'])}x"
    cells = [row["name"], _figure(row["baseline"]), _figure(row["ours"]), row["unit"]]
    cells += [
        f"{ratio} ({_figure(row['low'])} to {_figure(row['high'])})".strip(),
        _figure(row["ceiling"]),
    ]
    return "| " + " | ".join([*cells, row["machine"] or "", limit]) + " |"


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


def _results(benchmark: str) -> dict[str, Mapping[str, Any]]:
    """Rows of a benchmark by name; none where it has not been measured."""
    path = RESULTS / f"{benchmark}.json"
    return (
        {row["name"]: row for row in json.loads(path.read_text())["rows"]}
        if path.exists()
        else {}
    )


def measured_table() -> Iterator[str]:
    """The README's rows, both sides; a row that has not been measured is left out."""
    yield "| | baseline | ours | ratio |"
    yield "|---|---|---|---|"
    for benchmark, name, text in MEASURED:
        row = _results(benchmark).get(name)
        if row is None:
            continue
        sides = " | ".join(
            f"{_figure(row[key])} {row['unit'].split(',')[0]}"
            for key in ("baseline", "ours")
        )
        ceiling = f" (ceiling {row['ceiling']:.2f}x)" if row["ceiling"] else ""
        yield f"| {text}{ceiling} | {sides} | {row['ratio']:.3g}x |"


def sync_table() -> Iterator[str]:
    """How often ranks average against speed."""
    rows = [row for name, row in _results("hybrid").items() if name.startswith("sync ")]
    yield "| ranks average | samples/s | against one process | share of the ceiling |"
    yield "|---|---|---|---|"
    for row in rows:
        share = row["ratio"] / row["ceiling"]
        yield f"| {row['name'].removeprefix('sync ')} | {_figure(row['ours'])} | {row['ratio']:.2f}x | {share:.2f} |"


def rows_table(benchmark: str, prefix: str) -> Iterator[str]:
    """Rows of a benchmark whose names begin with ``prefix``."""
    yield "| | baseline | ours | ratio | ceiling |"
    yield "|---|---|---|---|---|"
    for name, row in _results(benchmark).items():
        if name.startswith(prefix) and row["ratio"] is not None:
            unit = row["unit"].split(",")[0]
            sides = " | ".join(
                f"{_figure(row[key])} {unit}" for key in ("baseline", "ours")
            )
            ceiling = f"{row['ceiling']:.2f}x" if row["ceiling"] else ""
            yield f"| {name} | {sides} | {row['ratio']:.3g}x | {ceiling} |"


def quality_table() -> Iterator[str]:
    """What the recipes reach, beside the best published figure."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import quality

    runs = quality.Results(RESULTS / "quality.json").runs()
    yield "| recipe | measured | best published | reached | beside it | seeds, minutes, commit |"
    yield "|---|---|---|---|---|---|"
    for name, row in json.loads(quality.SPEC.read_text()).items():
        # A run that was made before the row's settings changed is another row's.
        asked = {run: set(how["set"]) for run, how in row.get("runs", {}).items()}
        kept = [
            run
            for run in runs
            if run["id"] == name and asked.get(run["run"], set()) <= set(run["set"])
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
        f"{name.replace('_', ' ')} {value:.4f}".rstrip("0").replace(" 0.", " .")
        for name, value in figures.items()
        if value
    )
    return ", ".join(texts)


def mixed_table() -> Iterator[str]:
    """What the loader and 16 bits gain for each recipe, alone and together, and the figure in 32 and in 16 bits."""
    rows = _results("mixed_precision-studies")
    yield "| recipe | thread | bf16 | both | 32 bits | bf16 |"
    yield "|---|---|---|---|---|---|"
    for recipe in dict.fromkeys(name.split(",")[0] for name in rows):
        alone, bits, both = (
            rows[f"{recipe}, {what}"] for what in ("loader", "bf16", "bf16 and loader")
        )
        ((name, figures),) = bits["quality"].items()
        gains = " | ".join(f"{row['ratio']:.2f}x" for row in (alone, bits, both))
        yield f"| `{recipe}` | {gains} | {name} {figures[0]:.4f} | {figures[1]:.4f} |"


class Part(NamedTuple):
    """A part of the package in the table of devices.

    Args:
        text: what the part does.
        tests: regular expression in the names of its tests.
        gain: file of results/gpu and row with what the part gains on a GPU.
        cpu: whether a CPU has the part too, where every test of it runs.
    """

    text: str
    tests: str
    gain: tuple[str, str] = ("", "")
    cpu: bool = True


_ALL = Part(
    "all tests marked `gpu`", r"^(?!.*(test_simulated_ranks|simulated_gpu\.laws))"
)
_NCCL = Part(
    "NCCL between GPUs, a second GPU",
    r"nccl|on_another_device_than_the_current_one|laws\.ranks",
    cpu=False,
)
PARTS = (
    _ALL,
    _NCCL,
    Part(
        "captured steps as CUDA graphs, `train.compile`: equal; no step waits for the device",
        r"capture\.test_captured|capture\.test_memory|laws\.(graphs|waits)",
        ("gpu", "captured steps"),
    ),
    Part(
        "`adopt`: equal; its gain is against fused Adam",
        r"adopt\.test_gpu|laws\.adopted",
        ("gpu_adopt", "adopted small, 1,280 rows, against fused Adam (cuda)"),
    ),
    Part(
        "rows as tensors on the device, `loader.device=cuda`: equal; pays with captured steps",
        "test_resident|test_joint|device_negatives|a_set_on_a_device",
        ("gpu", "resident data"),
    ),
    Part("jobs of the recipes from data to bundle, and gone on with", "test_gpu_jobs"),
    Part(
        "dynamic ids: equal; the map stays on the host",
        r"ids\.test_gpu",
        ("gpu", "dynamic ids, captured"),
    ),
    Part(
        "tables in UVM and its cache, `plan.kernel`: train as those on the GPU",
        "rows_off_the_gpu",
        cpu=False,
    ),
    Part("fp16 with a scaled loss, `train.amp=fp16`", "test_loss_scaling"),
    Part(
        "512 ranks: memory and messages are those of the plan",
        r"plan\.test_simulated_ranks",
        cpu=False,
    ),
)


def devices_table() -> Iterator[str]:
    """Where each part has been tested: on a CPU, on a GPU and on simulated devices."""
    gpu, simulated = _gpu_tests()
    yield "| part | CPU | run on a GPU | simulated |"
    yield "|---|---|---|---|"
    for part in PARTS:
        cells = [
            "tested" if part.cpu else "",
            _outcome(gpu, part.tests),
            _outcome(simulated, part.tests),
        ]
        row = _results(f"gpu/{part.gain[0]}").get(part.gain[1])
        if row is not None:
            cells[1] += f"; {row['ratio']:.2g}x"
        yield f"| {part.text} | {' | '.join(cells)} |"


def devices_line() -> Iterator[str]:
    """What ran on which device with which versions, in one sentence."""
    gpu, _ = _gpu_tests()
    result = json.loads(GPU.read_text())
    versions = " and ".join(
        f"{package} {version}" for package, version in result["versions"].items()
    )
    others = [each.torch for each in reversed(TRIPLES)]
    tried = " and ".join(
        each for each in others if each not in result["versions"].values()
    )
    device = result["device"].partition(" 80GB")[0]
    yield (
        f"Tests marked `gpu`: {_outcome(gpu, _ALL.tests)} on one {device} with {versions}; torch {tried}, which "
        "sharded tables need, and NCCL between GPUs have not run on a GPU yet."
    )


def _gpu_tests() -> tuple[dict[str, str], dict[str, str]]:
    """Outcomes of tests on a GPU and on simulated devices, by name; none where they have not run."""
    simulated: dict[str, str] = {}
    for path in sorted(SIMULATED.glob("*.json")):
        simulated |= json.loads(path.read_text())["tests"]
    return json.loads(GPU.read_text())["tests"], simulated


def devices_sources() -> Iterator[str]:
    """The device, date and versions of each result in the table of devices."""
    for path in (GPU, *sorted(SIMULATED.glob("*.json"))):
        yield f"- `{path.relative_to(ROOT)}`: {_about(json.loads(path.read_text()))}"


def _about(result: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{package} {version}" for package, version in result["versions"].items()
    )
    return f"{result['device']}, {result['date']}, {versions}"


def _outcome(tests: Mapping[str, str], pattern: str) -> str:
    """Says how many of the tests with a name like ``pattern`` passed.

    Example:
        >>> _outcome({"a.b": "passed", "a.c": "passed", "a.d": "skipped"}, "a"), _outcome({"a.d": "skipped"}, "a")
        ('2 passed', 'not run')
        >>> _outcome({"a.b": "passed", "a.c": "failure"}, "")
        '1 passed, 1 failed'
    """
    outcomes = [outcome for name, outcome in tests.items() if re.search(pattern, name)]
    passed = outcomes.count("passed")
    failed = len(outcomes) - passed - outcomes.count("skipped")
    counts = ((passed, "passed"), (failed, "failed"))
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "not run"


TABLES = {
    "measured": measured_table,
    "sync": sync_table,
    "quality": quality_table,
    "mixed": mixed_table,
    "devices": devices_table,
    "devices-line": devices_line,
    "devices-sources": devices_sources,
}


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


class SettingKey(NamedTuple):
    """A key of a recipe.

    Args:
        path: dotted path, such as ``loader.batch_size``.
        section: the group that the key belongs to; ``job`` for keys of the job itself.
        type: type of the value, as a reader writes it.
        value: the value, as Python writes it.
        meaning: first paragraph of what the value sets, as plain text.
    """

    path: str
    section: str
    type: str
    value: str
    meaning: str


def setting_keys(config: Any) -> list[SettingKey]:
    """Returns every key of a config, by section; those of no group are the last.

    Example:
        >>> [key.path for key in setting_keys(RECIPES["two_tower"]())][:2]
        ['model.embedding_dim', 'model.tower_widths']
    """
    keys = list(_keys(config, ""))
    return sorted(keys, key=lambda key: key.section == "job")


def _keys(config: Any, prefix: str) -> Iterator[SettingKey]:
    meanings = _documented(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_group(value):
            yield from _keys(value, f"{prefix}{field.name}.")
        elif field.init:
            yield SettingKey(
                path=f"{prefix}{field.name}",
                section=prefix.partition(".")[0] or "job",
                type=_type_name(field_hint(config, field.name)),
                value=str(getattr(value, "__qualname__", repr(value))),
                meaning=_short(meanings.get(field.name, "")),
            )


def _short(text: str) -> str:
    """Returns the first sentences of a text, as far as they fit a cell of a table; `--help` has the others."""
    kept = ""
    for sentence in re.split(r"(?<=[.;]) ", text):
        if kept and len(kept) + len(sentence) > 160:
            return kept.rstrip(";") + " ..."
        kept = f"{kept} {sentence}".strip()
    return kept


def _type_name(hint: object) -> str:
    """Returns an annotation as a reader writes it."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(hint))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(hint))


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


def settings_page() -> str:
    """Every key of every recipe: those of all recipes once, then what each recipe has beside them or sets otherwise."""
    recipes = {
        name: {key.path: key for key in setting_keys(recipe())}
        for name, recipe in RECIPES.items()
    }
    first = next(iter(recipes.values()))
    shared = [
        key
        for key in first.values()
        if key.path not in _PYTHON
        and all(
            (other := keys.get(key.path)) and other.meaning == key.meaning
            for keys in recipes.values()
        )
    ]
    lines = [
        "# Settings: every key of every recipe",
        "",
        "`--KEY VALUE` changes one: `torchx run -s local_cwd rec.train.hybrid --recipe NAME -- --train.epochs 5`.",
        "Behind `--`, `--help` prints those of one recipe in full, and `--dry_run` a file for `--settings`.",
    ]
    for section, keys in itertools.groupby(shared, lambda key: key.section):
        lines += [
            "",
            f"## {section}",
            "",
            *_table((key, _default(key.path, recipes)) for key in keys),
        ]
    for name, keys in recipes.items():
        own = [
            key
            for key in keys.values()
            if key not in shared
            and key.path not in {*_PYTHON, *(k.path for k in shared)}
        ]
        changed = [key for key in shared if _default(key.path, recipes) == _BY_RECIPE]
        lines += ["", f"## Recipe {name}", "", *_table((key, key.value) for key in own)]
        lines += [
            "",
            "Its defaults of keys above: "
            + ", ".join(f"`{k.path}={keys[k.path].value}`" for k in changed)
            + ".",
        ]
    return MADE + "\n".join(lines) + "\n"


_PYTHON = ("name", "build", "task")  # of a Job in Python
_BY_RECIPE = "by recipe"


def _default(path: str, recipes: Mapping[str, Mapping[str, SettingKey]]) -> str:
    values = {keys[path].value for keys in recipes.values()}
    return values.pop() if len(values) == 1 else _BY_RECIPE


def _table(rows: Iterable[tuple[SettingKey, str]]) -> list[str]:
    lines = ["| key | default | type | what it sets |", "|---|---|---|---|"]
    for key, value in rows:
        cells = (
            f"`{key.path}`",
            value if value == _BY_RECIPE else f"`{value}`",
            key.type,
            key.meaning,
        )
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return lines


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
    "j",
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
    "rec.serve.http": ServeOptions,
}


def cli_page() -> str:
    """Every component with its flags, read from its source, and the flags of the server."""
    lines = [
        "# Command line",
        "",
        "`torchx run -s SCHEDULER COMPONENT FLAGS -- FLAGS OF THE APP` starts a job. `COMPONENT --help` prints the",
        "first lists, `COMPONENT -- --help` the second, and `torchx builtins` the components. Behind `--`, each",
        "[setting](../settings.md) of a recipe is a flag too.",
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
                    f"| `--{flag}` | {defaults[flag]} | {_cell(meanings[flag])} |"
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
    lines += [
        f"| `{'-' if flag in ('j', 'h') else '--'}{flag}` | {_cell(text)} |"
        for flag, text in places.items()
    ]
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
    yield DOCS / "settings.md", settings_page()
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
