"""What ruff and import-linter cannot say: private names of launchers, short messages, exports."""

import ast
import functools
import importlib
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[1]
PACKAGES = [
    "torchrec_ext",
    *(f"torchrec_ext.{path.parent.name}" for path in ROOT.glob("torchrec_ext/*/*.pyi")),
]


@functools.cache
def trees() -> dict[Path, ast.Module]:
    paths = [
        path
        for top in ("torchrec_ext", "torchx_apps", "components")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}


def test_no_private_name_of_torchx_or_torchrun_is_imported() -> None:
    """TorchX 0.7 and its nightly both do."""
    launchers = ("torchx", "torch.distributed.run", "torch.distributed.elastic")
    private = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                launchers
            ):
                names = [*node.module.split("."), *(each.name for each in node.names)]  # type: ignore[union-attr]
                private += [(path, name) for name in names if name.startswith("_")]
    assert private == []


def length(node: ast.AST) -> int:
    """Length of a literal text, in which a value in braces counts as 8."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return len(node.value)
    if isinstance(node, ast.JoinedStr):
        return sum(length(each) or 8 for each in node.values)
    if isinstance(node, ast.BinOp):
        return length(node.left) + length(node.right)
    return 0


def test_an_error_has_at_most_200_characters() -> None:
    too_long = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and max(map(length, ast.walk(node))) > 200
    ]
    assert too_long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_there_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__ or not isinstance(value, type | types.FunctionType), name
