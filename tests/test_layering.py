"""Who may import whom: DESIGN's table, held by reading every import statement, also those inside functions."""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("torchrec_ext", "torchx_apps", "components")
TORCH = {"torch", "torchrec", "fbgemm_gpu", "tensordict", "torchmetrics"}

# A unit is a module or subpackage of torchrec_ext, or one of the two folders beside it. Each may import itself and what
# stands here; "modules.tower" is one module of a unit. All of
# torchrec_ext and torchx_apps may import `needs_torch` and `exports`.
BASE = {"schema", "batch", "tensor_file", "sealed"}
SET_UP = {"stack", "needs_torch", "exports", "probe", "doctor"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "stack": set(),
    "needs_torch": {"stack"},
    "exports": {"needs_torch"},
    "probe": set(),
    "doctor": {"stack"},
    "schema": BASE,
    "batch": BASE,
    "tensor_file": set(),
    "sealed": set(),
    "data": BASE,
    "modules": BASE,
    "models": BASE | {"modules"},
    "distributed": {"batch", "modules.tower", "modules.shared_tables"},
    "train": {"distributed", "batch", "tensor_file", "sealed"},
    "networks": {"train", "distributed", "modules", "batch"},
    # `distributed.tables` says which rows of a sharded model a rank holds, for the export alone.
    "retrieval": BASE | {"modules", "models", "data.preprocess", "distributed.tables"},
    "torchx_apps": BASE | {"data", "modules", "models", "distributed", "train", "networks", "retrieval", "stack"},
    "components": set(),
}


def sources() -> dict[str, str]:
    """Every module of ours by its name; a package goes by the name of its folder."""
    found = {}
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported(module: str, source: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, `from a import b` as a.b."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def unit_of(module: str) -> str | None:
    """The unit of a dotted name: data.loader.ChunkLoader -> data; None for the package itself and for others' code."""
    top, *rest = module.removeprefix("torchrec_ext.components").lstrip(".").split(".") if module else [""]
    if module.startswith("torchrec_ext.components"):
        return "components"
    if top == "torchrec_ext":
        return rest[0] if rest else None
    return top if top in OURS else None


def complaint(module: str, name: str) -> str | None:
    """Why a module may not import a name, or None when it may."""
    unit = unit_of(module)
    top = name.split(".")[0]
    if unit is None:  # the package itself, which the doctor imports
        alone = top in ("torchrec_ext", *sys.stdlib_module_names) or module != "torchrec_ext"
        return None if alone else "torchrec_ext must work where nothing is installed: standard library only"
    if unit == "components":
        return None if top in ("torchx", "typing") else "a component imports torchx and typing only"
    if unit in SET_UP - {"probe"} and top not in ("torchrec_ext", *sys.stdlib_module_names):
        return f"{unit} must work where nothing is installed: standard library only"
    if top not in OURS:
        return None
    target = unit_of(name)
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
        is_package = any(other.startswith(f"{module}.") for other in modules) or module in OURS
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
        package = f"torchrec_ext.{unit}"
        if package != module and "torchrec_ext.needs_torch" in top_level(modules.get(package, "")):
            continue
        names = top_level(source)
        torch_at = [i for i, name in enumerate(names) if name.split(".")[0] in TORCH]
        if torch_at and "torchrec_ext.needs_torch" not in names[: torch_at[0]]:
            found.append(module)
    return found


def top_level(source: str) -> list[str]:
    """The dotted names imported when a module is imported, in order."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.unit
def test_every_import_follows_the_table() -> None:
    assert violations(sources()) == []


@pytest.mark.unit
def test_whatever_imports_torch_checks_the_stack_first() -> None:
    """Add `import torchrec_ext.needs_torch` as the first import of the module or of its package's __init__."""
    assert unguarded(sources()) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("module", "statement", "why"),
    [
        (
            "torchrec_ext.train.loop",
            "from torchrec_ext.models.tower_model import TowerModel",
            "train may import batch, distr",
        ),
        ("torchrec_ext.train.loop", "def f():\n    import torchrec_ext.data.loader.loader", "train may import"),
        (
            "torchrec_ext.data.loader.loader",
            "from torchrec_ext import modules",
            "data may import batch, schema, sealed, tensor_file",
        ),
        ("torchrec_ext.data.loader.loader", "from ...modules import tower", "data may import"),
        ("torchrec_ext.retrieval.bundle.bundle", "from torchrec_ext.train.loop import train", "retrieval may import"),
        (
            "torchrec_ext.retrieval.bundle.bundle",
            "from torchrec_ext.data.loader.loader import ChunkLoader",
            "data.preprocess, distributed.tables",
        ),
        ("torchrec_ext.distributed.plan.planner", "import torchrec_ext.modules.losses", "modules.tower"),
        ("torchrec_ext.modules.tower", "from torchrec_ext import Tower", "modules may import"),
        ("torchrec_ext.batch", "import torchx_apps.train", "batch may import"),
        ("torchrec_ext.doctor", "import torch", "standard library only"),
        ("torchrec_ext", "import lazy_loader", "standard library only"),
        ("components.train", "import os", "torchx and typing only"),
        ("components.train", "from torchrec_ext import stack", "torchx and typing only"),
        ("torchx_apps.train", "from components.train import hybrid", "torchx_apps may import"),
        ("torchx_apps.train", "import torchrec_ext.components.train", "torchx_apps may import"),
    ],
)
def test_the_checker_finds_a_made_up_violation(module: str, statement: str, why: str) -> None:
    (line,) = violations({module: f'"""A module."""\n{statement}\n'})
    assert line.startswith(f"{module}:")
    assert why in line


@pytest.mark.unit
@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("torchrec_ext.distributed.plan.planner", "from torchrec_ext.modules.tower import Tower"),
        ("torchrec_ext.models.tower_model", "from torchrec_ext.modules import losses"),
        ("torchrec_ext.modules.losses", "from . import interaction"),
        ("torchrec_ext.batch", "import torchrec_ext.needs_torch"),
        ("torchrec_ext.retrieval.bundle.bundle", "from torchrec_ext.data.preprocess.fitted import FittedPreprocessor"),
        ("torchrec_ext", "from torchrec_ext.models.tower_model import TowerModel"),
        ("components.train", "from torchx.components import dist"),
    ],
)
def test_the_checker_lets_the_rest_pass(module: str, statement: str) -> None:
    assert violations({module: statement}) == []


@pytest.mark.unit
def test_the_checker_finds_torch_before_the_check() -> None:
    guard, torch = "import torchrec_ext.needs_torch\n", "import torch\n"
    assert unguarded({"torchrec_ext.batch": torch + guard}) == ["torchrec_ext.batch"]
    assert unguarded({"torchrec_ext.batch": guard + torch}) == []
    assert unguarded({"torchrec_ext.data": guard, "torchrec_ext.data.loader.loader": torch}) == []
    assert unguarded({"torchrec_ext.data": "", "torchrec_ext.data.loader.loader": torch}) == [
        "torchrec_ext.data.loader.loader"
    ]
