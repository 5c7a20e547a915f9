"""What pip builds from this tree holds all of it: the library, its components and its apps."""

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = {"torchrec_ext": "torchrec_ext", "components": "torchrec_ext/components", "torchx_apps": "torchx_apps"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes into the source tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), ".", cwd=tree)
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.mark.launch
def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    """Fails when a new subpackage is not named under [tool.setuptools] packages."""
    here = {
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in SHIPPED.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == here
    stubs = {f"torchrec_ext/{path.relative_to(ROOT / 'torchrec_ext')}" for path in ROOT.glob("torchrec_ext/**/*.pyi")}
    assert len(stubs) > 5
    assert {"torchrec_ext/py.typed", *stubs} <= set(wheel.namelist())  # read at run time too, see torchrec_ext.exports
    assert not [name for name in wheel.namelist() if name.startswith(("components/", "tests/", "benchmarks/"))]


@pytest.mark.launch
def test_the_wheel_registers_our_components_beside_torchxs_own(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["torchx.components"]) == {"rec": "torchrec_ext.components", "_torchx": "torchx.components"}


@pytest.mark.launch
def test_the_wheels_metadata_leaves_the_triple_to_the_doctor(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    required = [line.split()[1] for line in wheel.read(name).decode().splitlines() if line.startswith("Requires-Dist:")]
    plain = [
        line
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Requires-Dist:") and "extra" not in line
    ]
    assert not [line for line in plain if "torchrec" in line or "fbgemm" in line or " torch=" in line]
    assert {"torch==2.13.0;", "torchrec==1.8.0;", "fbgemm-gpu==1.8.0;"} <= set(required)


@pytest.mark.launch
def test_the_source_distribution_holds_what_the_wheel_is_built_from(tree: Path, tmp_path: Path) -> None:
    run("-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})", cwd=tree)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "components/train.py",
        "torchx_apps/train.py",
        "torchrec_ext/stack.py",
        "pyproject.toml",
        "LICENSE",
    } <= names
