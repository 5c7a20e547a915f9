"""Private names of torch and TorchRec: each that the code uses stands in the table, and each there is real."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import private_names
from tests.private_names import PRIVATE_NAMES, PrivateNames
from tests.test_layering import parsed

ROOT = Path(__file__).parents[1]
OTHERS = ("torch", "torchrec", "torchx", "fsspec", "fbgemm_gpu")
# Private by their underscore alone: public in the standard library's documentation, or
# of Python itself.
PYTHONS = {
    "_replace",
    "_asdict",
    "_fields",
    "_getframe",
    "_current_frames",
    "_exit",
    "_parameters_",
    "_make",
}


def trees() -> list[tuple[Path, ast.Module]]:
    paths = [
        path
        for top in ("torchrec_ext", "torchx_apps", "components")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    return [(path, parsed(path.read_text())) for path in paths]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names that this package defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.arg):
            yield node.arg


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name that is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in OTHERS
        ):
            yield from ((node.lineno, part) for part in node.module.split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_every_private_name_that_is_used_stands_in_the_table() -> None:
    listed = {name for private in PRIVATE_NAMES for name in private.names}
    listed |= {
        part.partition(".")[0]
        for private in PRIVATE_NAMES
        for part in private.file.split("/")
    }
    known = listed | PYTHONS | {name for _, tree in trees() for name in defined(tree)}
    unlisted = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees()
        for line, name in used(tree)
        if is_private(name) and name not in known
    ]
    assert unlisted == []


def test_every_private_name_in_the_table_is_there_and_used() -> None:
    assert list(private_names.missing()) == []
    text = " ".join(
        path.read_text() for path, _ in trees() if path.name != "private_names.py"
    )
    assert [
        name for private in PRIVATE_NAMES for name in private.names if name not in text
    ] == []
    assert (
        max(
            Counter(
                (private.file, name)
                for private in PRIVATE_NAMES
                for name in private.names
            ).values()
        )
        == 1
    )
    assert all(private.reason for private in PRIVATE_NAMES)


# Launching is theirs: no private name of TorchX, and of torchrun no module at all.
TORCHRUN = ("torch.distributed.run.", "torch.distributed.elastic.")
LAUNCHING = ("torchx/", "torch/distributed/run", "torch/distributed/elastic/")


def test_nothing_of_a_launcher_is_private_or_replaced() -> None:
    assert [
        private.file for private in PRIVATE_NAMES if private.file.startswith(LAUNCHING)
    ] == []
    uses = []
    for path, tree in trees():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [f"{alias.name}." for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                private = any(map(is_private, name.split(".")))
                if name.startswith(TORCHRUN) or (
                    private and name.startswith("torchx.")
                ):
                    uses.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert uses == []


@pytest.mark.unit
def test_a_name_that_a_release_has_dropped_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = PrivateNames(
        "torch/nn/modules/module.py", ("_parameters", "_dropped_in_3_0"), "a test"
    )
    moved = PrivateNames("torch/nn/moved_in_3_0.py", ("_parameters",), "a test")
    absent = PrivateNames(
        "no_such_package/file.py",
        ("_name",),
        "packages that are not installed lack nothing",
    )
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (gone, moved, absent))
    assert list(private_names.missing()) == [
        ("torch/nn/modules/module.py", "_dropped_in_3_0"),
        ("torch/nn/moved_in_3_0.py", "_parameters"),
    ]
