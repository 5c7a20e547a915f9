"""Who may import whom: DESIGN's table, held by reading every import statement, also those inside functions."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("torchrec_ext", "torchx_apps", "components")
TORCHREC = {"torchrec", "fbgemm_gpu", "tensordict", "torchmetrics"}
TORCH = {"torch", *TORCHREC}

# A unit is a module or subpackage of torchrec_ext, or one of the two folders beside it.
# Each may import itself and what stands here; "modules.tower" is one module of a unit.
# All of torchrec_ext and torchx_apps may import `needs_torch` and `exports`.
BASE = {"schema", "batch", "tensor_file", "sealed"}
SET_UP = {"stack", "needs_torch", "exports", "probe", "doctor", "private_names"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "stack": set(),
    "needs_torch": {"stack"},
    "exports": {"needs_torch"},
    "probe": {"distributed.shared_memory"},
    "private_names": set(),
    "doctor": {"stack", "private_names"},
    "schema": BASE,
    "batch": BASE,
    "tensor_file": set(),
    "sealed": set(),
    # `capture.executors` compiles look-ups.
    "ids": {"batch", "capture.executors", "capture.errors"},
    "data": BASE | {"ids"},
    "modules": BASE,
    "models": BASE | {"modules"},
    # Settings of `distributed` and `train` are checked by the two checks that all
    # settings have; they import no torch.
    "distributed": {
        "batch",
        "modules.tower",
        "schema.validation",
        "ids",
    },
    "observe": {"distributed"},
    "terminal": set(),
    "capture": {"distributed", "batch", "observe"},
    "train": {
        "distributed",
        "batch",
        "tensor_file",
        "sealed",
        "capture",
        "observe",
        "terminal",
        "ids",
    }
    | {"schema.validation"},
    "networks": set(),
    # `distributed.tables` says which rows of a sharded model a rank holds, for the
    # export alone; `distributed.runtime` how much memory the host or the container has
    # left, for a store that is read into it.
    "retrieval": BASE
    | {
        "modules",
        "models",
        "data.preprocess",
        "distributed.tables",
        "distributed.runtime",
    },
    "adopt": {"batch", "data.negatives", "distributed", "capture", "observe", "ids"},
    "diagnose": {"adopt", "observe", "terminal"},
    "torchx_apps": BASE
    | {
        "data",
        "modules",
        "models",
        "distributed",
        "capture",
        "observe",
        "terminal",
        "train",
        "networks",
    }
    | {"retrieval", "adopt", "diagnose", "stack", "ids"},
    "components": set(),
}

# The rooms of torchx_apps from the ground up: each may import itself and those before
# it. The mains, which are the modules beside them, may import every room.
APP_ROOMS = ("tasks", "recipes", "jobs", "networks")
# Modules below all rooms, beside the mains.
APP_GROUND = ("config", "process")


# Four tests of two files read every module's tree, and parsing all takes two seconds.
parsed = functools.cache(ast.parse)


@functools.cache
def sources() -> dict[str, str]:
    """Every module of ours by its name; a package goes by the name of its folder."""
    found = {}
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (
                path.read_text()
            )
    return found


def imported(
    module: str, source: str, *, is_package: bool
) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, `from a import b` as a.b."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) - node.level + 1]
                if node.level
                else []
            )
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def unit_of(module: str) -> str | None:
    """The unit of a dotted name: data.loader.ChunkLoader -> data; None for the package itself and for others' code."""
    top, *rest = (
        module.removeprefix("torchrec_ext.components").lstrip(".").split(".")
        if module
        else [""]
    )
    if module.startswith("torchrec_ext.components"):
        return "components"
    if top == "torchrec_ext":
        return rest[0] if rest else None
    return top if top in OURS else None


def app_floor(module: str) -> int:
    """The place of a module of torchx_apps in APP_ROOMS; the mains stand above all rooms."""
    room = module.split(".")[1] if "." in module else ""
    if room in APP_GROUND:
        return -1
    return APP_ROOMS.index(room) if room in APP_ROOMS else len(APP_ROOMS)


def complaint(module: str, name: str) -> str | None:
    """Why a module may not import a name, or None when it may."""
    unit = unit_of(module)
    top = name.split(".")[0]
    if unit is None:  # the package itself, which the doctor imports
        alone = (
            top in ("torchrec_ext", *sys.stdlib_module_names)
            or module != "torchrec_ext"
        )
        return (
            None
            if alone
            else "torchrec_ext must work where nothing is installed: standard library only"
        )
    if unit == "components":
        alone = top in ("torchx", "typing") or name.startswith(
            (
                "torchrec_ext.components.",
                "torchx_apps.config.refuse_mistakes",
                "torchx_apps.networks.members.",
            )
        )
        return None if alone else "a component imports torchx and typing only"
    if unit in SET_UP - {"probe"} and top not in (
        "torchrec_ext",
        *sys.stdlib_module_names,
    ):
        return f"{unit} must work where nothing is installed: standard library only"
    if top not in OURS:
        return None
    target = unit_of(name)
    if target == unit == "torchx_apps":
        own_floor = app_floor(module)
        below = APP_ROOMS[: own_floor + 1]
        return (
            None
            if app_floor(name) <= own_floor
            else f"this room of torchx_apps may import {', '.join(below)}"
        )
    allowed = MAY_IMPORT.get(unit)
    if allowed is None:
        return f"{unit} stands in no layer: add it to MAY_IMPORT and to the table in CONTRIBUTING.md"
    if target == unit or (target in ("needs_torch", "exports") and unit not in SET_UP):
        return None
    inner = name.removeprefix("torchrec_ext.")
    if any(f"{inner}.".startswith(f"{entry}.") for entry in allowed):
        return None
    return f"{unit} may import {', '.join(sorted(allowed)) or 'nothing of ours'}"


def violations(modules: Mapping[str, str]) -> list[str]:
    """One line for each import against the table."""
    found = []
    for module, source in modules.items():
        is_package = (
            any(other.startswith(f"{module}.") for other in modules) or module in OURS
        )
        for line, name in imported(module, source, is_package=is_package):
            if why := complaint(module, name):
                found.append(f"{module}:{line} imports {name}: {why}")
    return found


def unguarded(modules: Mapping[str, str]) -> list[str]:
    """Modules of the library that import torch before anything checked the stack."""
    found = []
    for module, source in modules.items():
        unit = unit_of(module)
        if not module.startswith("torchrec_ext.") or unit in {*SET_UP, "components"}:
            continue
        # Packages of numpy alone, such as data.preprocess, stand beside those of torch.
        parts = module.split(".")
        packages = [".".join(parts[:depth]) for depth in range(2, len(parts))]
        if any(
            any(map(is_guard, top_level(modules.get(package, ""))))
            for package in packages
        ):
            continue
        names = top_level(source)
        torch_at = [i for i, name in enumerate(names) if name.split(".")[0] in TORCH]
        if torch_at and not any(map(is_guard, names[: torch_at[0]])):
            found.append(module)
    return found


def is_guard(name: str) -> bool:
    """Whether importing this name checks torch."""
    return name.startswith("torchrec_ext.needs_torch")


def unguarded_torchrec(modules: Mapping[str, str]) -> list[str]:
    """Modules of the library that import TorchRec before anything checked that it is there and fits."""
    guard = "torchrec_ext.needs_torch.and_torchrec"
    found = []
    for module, source in modules.items():
        unit = unit_of(module)
        if not module.startswith("torchrec_ext.") or unit in {*SET_UP, "components"}:
            continue
        names = top_level(source)
        at = [i for i, name in enumerate(names) if name.split(".")[0] in TORCHREC]
        parts = module.split(".")
        packages = [".".join(parts[:end]) for end in range(2, len(parts))]
        checked = any(guard in top_level(modules.get(name, "")) for name in packages)
        if at and not checked and guard not in names[: at[0]]:
            found.append(module)
    return found


def top_level(source: str) -> list[str]:
    """The dotted names imported when a module is imported, in order."""
    names = []
    for node in parsed(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_import_follows_the_table() -> None:
    assert violations(sources()) == []


def test_every_folder_of_torchx_apps_is_a_room() -> None:
    folders = {
        path.parent.name for path in (ROOT / "torchx_apps").glob("*/__init__.py")
    }
    assert folders == set(APP_ROOMS)


def test_whatever_imports_torch_checks_the_stack_first() -> None:
    """Add `import torchrec_ext.needs_torch` as the first import of the module or of its package's __init__."""
    assert unguarded(sources()) == []


def test_whatever_imports_torchrec_checks_it_first() -> None:
    """Add `from torchrec_ext.needs_torch import and_torchrec` above it, or to the package's __init__."""
    assert unguarded_torchrec(sources()) == []


@pytest.mark.parametrize(
    ("module", "statement", "why"),
    [
        (
            "torchrec_ext.train.loop",
            "from torchrec_ext.models.tower_model import TowerModel",
            "train may import batch, capture",
        ),
        (
            "torchrec_ext.train.loop",
            "def f():\n    import torchrec_ext.data.loader.loader",
            "train may import",
        ),
        (
            "torchrec_ext.data.loader.loader",
            "from torchrec_ext import modules",
            "data may import batch, ids, schema, sealed, tensor_file",
        ),
        (
            "torchrec_ext.data.loader.loader",
            "from ...modules import tower",
            "data may import",
        ),
        (
            "torchrec_ext.retrieval.bundle",
            "from torchrec_ext.train.loop import train",
            "retrieval may import",
        ),
        (
            "torchrec_ext.retrieval.bundle",
            "from torchrec_ext.data.loader.loader import ChunkLoader",
            "data.preprocess, distributed.runtime",
        ),
        (
            "torchrec_ext.distributed.plan.planner",
            "import torchrec_ext.modules.losses",
            "modules.tower",
        ),
        (
            "torchrec_ext.modules.tower",
            "from torchrec_ext import Tower",
            "modules may import",
        ),
        ("torchrec_ext.batch", "import torchx_apps.train", "batch may import"),
        ("torchrec_ext.doctor", "import torch", "standard library only"),
        ("torchrec_ext", "import lazy_loader", "standard library only"),
        ("components.train", "import os", "torchx and typing only"),
        (
            "components.train",
            "from torchrec_ext import stack",
            "torchx and typing only",
        ),
        (
            "torchx_apps.train",
            "from components.train import hybrid",
            "torchx_apps may import",
        ),
        (
            "torchx_apps.train",
            "import torchrec_ext.components.train",
            "torchx_apps may import",
        ),
        (
            "torchx_apps.config",
            "from torchx_apps.tasks.job import Job",
            "this room of torchx_apps may import",
        ),
        (
            "torchx_apps.jobs.training",
            "from torchx_apps import train",
            "may import tasks, recipes, jobs",
        ),
    ],
)
def test_the_checker_finds_a_made_up_violation(
    module: str, statement: str, why: str
) -> None:
    (line,) = violations({module: f'"""A module."""\n{statement}\n'})
    assert line.startswith(f"{module}:")
    assert why in line


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        (
            "torchrec_ext.distributed.plan.planner",
            "from torchrec_ext.modules.tower import Tower",
        ),
        ("torchrec_ext.models.tower_model", "from torchrec_ext.modules import losses"),
        ("torchrec_ext.modules.losses", "from . import interaction"),
        ("torchrec_ext.batch", "import torchrec_ext.needs_torch"),
        (
            "torchrec_ext.retrieval.bundle",
            "from torchrec_ext.data.preprocess.fitted import FittedPreprocessor",
        ),
        ("torchrec_ext", "from torchrec_ext.models.tower_model import TowerModel"),
        ("components.train", "from torchx.components import dist"),
        ("torchx_apps.jobs.training", "from torchx_apps.tasks.job import Job"),
        ("torchx_apps.train", "from torchx_apps import recipes"),
    ],
)
def test_the_checker_lets_the_rest_pass(module: str, statement: str) -> None:
    assert violations({module: statement}) == []


def test_the_checker_finds_torch_before_the_check() -> None:
    guard, torch = "import torchrec_ext.needs_torch\n", "import torch\n"
    also = "from torchrec_ext.needs_torch import and_torchrec\n"
    torchrec = "from torchrec import KeyedJaggedTensor\n"
    assert unguarded({"torchrec_ext.batch": also + torch}) == []
    assert unguarded_torchrec({"torchrec_ext.batch": guard + torchrec}) == [
        "torchrec_ext.batch"
    ]
    assert unguarded_torchrec({"torchrec_ext.batch": also + torchrec}) == []
    assert (
        unguarded_torchrec(
            {"torchrec_ext.train": also, "torchrec_ext.train.step.plain": torchrec}
        )
        == []
    )
    assert unguarded({"torchrec_ext.batch": torch + guard}) == ["torchrec_ext.batch"]
    assert unguarded({"torchrec_ext.batch": guard + torch}) == []
    assert (
        unguarded(
            {"torchrec_ext.data": guard, "torchrec_ext.data.loader.loader": torch}
        )
        == []
    )
    assert unguarded(
        {"torchrec_ext.data": "", "torchrec_ext.data.loader.loader": torch}
    ) == ["torchrec_ext.data.loader.loader"]


# What a command line needs before it trains, plans or serves: none of it may import
# torch, nor what reads files.
WITHOUT_TORCH = (
    *(
        "torchrec_ext.schema.validation",
        "torchrec_ext.data.config",
        "torchrec_ext.data.loader.config",
    ),
    "torchrec_ext.modules.config",
    "torchrec_ext.distributed.optim.config",
    "torchrec_ext.distributed.plan.config",
    *("torchrec_ext.distributed.sync_config", "torchrec_ext.retrieval.server.settings"),
    *("torchrec_ext.train.config", "torchrec_ext.train.checkpoint.config"),
    *(
        "torchx_apps.config",
        "torchx_apps.process",
    ),
    "torchx_apps.networks.members",
    *(
        "torchx_apps.recipes",
        "torchx_apps.recipes.by_name",
        "torchx_apps.recipes.preprocess",
    ),
    *(
        "torchx_apps.recipes.saved_job",
        "torchx_apps.tasks.job",
        "torchx_apps.tasks.loading",
    ),
)
HEAVY = (
    "torch",
    "torchrec",
    "fbgemm_gpu",
    "tensordict",
    "numpy",
    "pyarrow",
    "pandas",
    "duckdb",
)
# Imports the modules of argv, then runs each app that a line of stdin names, with its
# flags, in a fork.
OBSERVED = """
import contextlib, importlib, io, json, os, runpy, signal, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    if os.fork():
        if os.wait()[1]:
            print("null", flush=True)
        continue
    signal.alarm(120)
    app, *flags = json.loads(line)
    sys.argv = [app, *flags]
    status, output = 0, io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if app:
                runpy.run_module(app, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = "traceback"
    print(json.dumps([status, output.getvalue(), sorted({name.split(".")[0] for name in sys.modules})]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported WITHOUT_TORCH: one for each command line would do that again, for half a second."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC")
    }
    with subprocess.Popen(
        [sys.executable, "-c", OBSERVED, *WITHOUT_TORCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        yield process


def run_observed(
    process: subprocess.Popen[str], *words: str
) -> tuple[int | str, str, set[str]]:
    """Exit code and output of an app, or of none, and the packages that its process had imported at its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(words), file=process.stdin, flush=True)
    status, output, imported = json.loads(process.stdout.readline())
    return status, output, set(imported)


def test_what_a_command_line_needs_imports_no_torch(
    forking: subprocess.Popen[str],
) -> None:
    _, _, imported = run_observed(forking, "")
    assert "torchx_apps" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("words", "status", "answer"),
    [
        *(
            ([app, "--help"], 0, "usage: ")
            for app in (
                "train",
                "train_networks",
                "compare",
                "export",
                "embed",
                "serve",
            )
        ),
        *(([app, "--help"], 0, "usage: ") for app in ("preprocess", "publish")),
        *(
            ([app, "--no-such-flag"], 1, "--no-such-flag")
            for app in ("train", "train_networks", "preprocess")
        ),
        *(
            ([app, "x", "--no-such-flag"], 1, "--no-such-flag")
            for app in ("embed", "serve", "publish")
        ),
        *(
            ([app, "--list-recipes"], 0, "  ")
            for app in ("train", "train_networks", "preprocess")
        ),
        *(
            (["train", "--recipe", recipe, "--dry-run"], 0, "train.epochs = ")
            for recipe in (
                "contextual_ncf",
                "n_tower",
                "ncf",
                "retrieval",
                "session",
                "stream",
                "two_tower",
            )
        ),
        (["train_networks", "--members", "a", "--dry-run"], 0, "train.epochs = "),
        (["train_networks", "--train.sed", "0"], 1, "did you mean --train.seed"),
        (["compare", "no/such/run"], 1, "neither a run folder nor a folder of such"),
        (["preprocess", "--dry-run"], 0, "config.history_length"),
        (["preprocess", "--config.test_share", "2"], 1, "config.test_share=2"),
        (["export", "no/such/run"], 1, "cannot be read"),
        (["serve", "no/such/bundle", "--max-k", "0"], 1, "limit k=0"),
        (["train", "--recipe", "two_towr"], 1, "did you mean 'two_tower'"),
        (["train", "--nosuch", "1"], 1, "Unrecognized options: --nosuch"),
        (["train", "--model.loss", "bse"], 1, "'bse'"),
        (
            ["train", "--model.loss", "in_batch"],
            1,
            "set model.interaction=dot or cosine",
        ),
        (["train", "--loader.sampling", "hrd"], 1, "'hrd'"),
        (["train", "--loader.shared_negatives", "8"], 1, "set sampling='mixed'"),
        (["train", "--sync.mode", "local_sdg"], 1, "'local_sdg'"),
        (["train", "--sync.outer_lr", "0.5"], 1, "only for mode=local_sgd"),
        (
            ["train", "--optimizer.per_table.a.kind", "sdg"],
            1,
            "per_table.a.kind='sdg'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_is_answered_without_torch(
    words: Sequence[str], status: int, answer: str, forking: subprocess.Popen[str]
) -> None:
    app, *flags = words
    result, output, imported = run_observed(forking, f"torchx_apps.{app}", *flags)
    assert (result, answer in output) == (status, True), output
    assert imported.isdisjoint(HEAVY)
