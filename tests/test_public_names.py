"""The names that each subpackage exports are the documented import paths: there, documented, and unambiguous."""

import importlib
from pathlib import Path

import pytest

SUBPACKAGES = ("data", "modules", "models", "distributed", "train", "networks", "retrieval", "adopt", "diagnose")
PACKAGES = ["torchrec_ext", *(f"torchrec_ext.{name}" for name in SUBPACKAGES)]


@pytest.mark.unit
@pytest.mark.parametrize("package", PACKAGES)
def test_no_export_shares_its_name_with_a_submodule(package: str) -> None:
    """Such a name is the function or the module, whichever was imported last."""
    module = importlib.import_module(package)
    folder = Path(str(module.__file__)).parent
    submodules = {path.stem for path in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
    assert not submodules & set(module.__all__)


@pytest.mark.unit
@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_there_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert len(module.__all__) >= 5
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
        assert getattr(module, name).__doc__, name


@pytest.mark.unit
def test_a_name_is_the_same_thing_wherever_it_is_exported() -> None:
    modules = [importlib.import_module(package) for package in PACKAGES]
    first = {name: getattr(module, name) for module in reversed(modules) for name in module.__all__}
    assert all(getattr(module, name) is first[name] for module in modules for name in module.__all__)
    # What a user of TorchRec needs in the program of the README stands at the top.
    assert len(modules[0].__all__) == 15


@pytest.mark.unit
def test_an_unknown_name_answers_with_the_known_ones() -> None:
    import torchrec_ext

    with pytest.raises(AttributeError, match=r"no attribute 'Towers'; it has Bundle, ChunkLoader, .*TowerModel"):
        _ = torchrec_ext.Towers
