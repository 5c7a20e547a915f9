"""The names that each subpackage exports are the documented import paths: there, documented, and unambiguous."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SUBPACKAGES = (
    "data",
    "modules",
    "models",
    "distributed",
    "train",
    "networks",
    "retrieval",
    "adopt",
    "diagnose",
)
PACKAGES = ["torchrec_ext", *(f"torchrec_ext.{name}" for name in SUBPACKAGES)]
FIRST = ("import torchrec_ext.adopt", "from torchrec_ext.adopt import Rows", "pass")


@pytest.mark.unit
@pytest.mark.parametrize("package", PACKAGES)
def test_no_export_shares_its_name_with_a_submodule(package: str) -> None:
    """Such a name is the function or the module, whichever was imported last; unless the module can be called."""
    module = importlib.import_module(package)
    folder = Path(str(module.__file__)).parent
    submodules = {path.stem for path in folder.glob("*.py")} | {
        p.parent.name for p in folder.glob("*/__init__.py")
    }
    both = submodules & set(module.__all__)
    assert [
        name
        for name in both
        if not callable(importlib.import_module(f"{package}.{name}"))
    ] == []


@pytest.mark.unit
@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_there_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__name__.rpartition(".")[2] == name
        assert getattr(module, name).__doc__, name


@pytest.mark.unit
def test_a_name_is_the_same_thing_wherever_it_is_exported() -> None:
    modules = [importlib.import_module(package) for package in PACKAGES]

    def exported(module: ModuleType, name: str) -> object:
        value = getattr(module, name)
        return getattr(value, name) if isinstance(value, ModuleType) else value

    first = {
        name: exported(module, name)
        for module in reversed(modules)
        for name in module.__all__
    }
    assert all(
        exported(module, name) is first[name]
        for module in modules
        for name in module.__all__
    )
    # What the README's programs and calls need stands at the top.
    assert len(modules[0].__all__) == 20


@pytest.mark.launch
def test_the_names_that_a_reader_guesses_are_at_the_top() -> None:
    """``adopt`` is a subpackage too, so the order of imports must not change what the name stands for."""
    order = "from torchrec_ext import adopt, why_slow, LocalSGD, export\n"
    order += "from torchrec_ext.adopt import CannotAdopt, adopt as function\nimport torchrec_ext.adopt as package\n"
    order += "assert adopt is package and package.adopt is function and all(map(callable, (why_slow, export)))\n"
    order += "try:\n    adopt(1, 2, 3)\nexcept CannotAdopt as error:\n    print(error, flush=True)\n"
    programs = [f"{first}\n{order}" for first in FIRST]
    # Each in a fork of one process that has imported what is not ours, which takes most
    # of the time.
    forks = f"import os, torchrec\nfor program in {programs!r}:\n"
    forks += "    if not os.fork():\n        exec(program)\n        os._exit(0)\n    assert not os.wait()[1]\n"
    done = subprocess.run(
        [sys.executable, "-c", forks], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "model is a int; give an nn.Module, several in an nn.ModuleList"
    ] * len(FIRST), done.stderr


@pytest.mark.unit
def test_an_unknown_name_answers_with_the_known_ones() -> None:
    import torchrec_ext

    with pytest.raises(
        AttributeError,
        match=r"no attribute 'Towers'; it has Bundle, ChunkLoader, .*TowerModel",
    ):
        _ = torchrec_ext.Towers
