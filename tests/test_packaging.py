"""What pip builds from this tree holds all of it: the library, its components and its apps."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchrec_ext
from torchrec_ext import stack

ROOT = Path(__file__).parents[1]
# Compiled where it is installed, so it is shipped as source.
SHARED_MEMORY = {
    f"torchrec_ext/distributed/shared_memory/{name}"
    for name in ("backend.cpp", "ring.h")
}
SHIPPED = {
    "torchrec_ext": "torchrec_ext",
    "components": "torchrec_ext/components",
    "torchx_apps": "torchx_apps",
}
UNTRACKED = (".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", "build", "runs")


def run(*command: str, cwd: Path) -> str:
    """Runs Python, and returns all that it said."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of a copy of the tree, because building writes into it."""
    folder = tmp_path_factory.mktemp("source")
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*UNTRACKED))
    build = (
        f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    )
    assert "Warning" not in run("-W", "always", "-c", build, cwd=copy)
    # Python 3.10 and the first 3.11 know no filter of a tar file.
    shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
    (unpacked,) = folder.glob("torchrec_ext-*/")
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    """The wheel of the source distribution: what pip builds from either."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", str(source.parent), ".", cwd=source)
    return zipfile.ZipFile(next(source.parent.glob("*.whl")))


@pytest.mark.launch
def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    """Fails when a new subpackage is not named under [tool.setuptools] packages."""
    here = {
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in SHIPPED.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == here
    stubs = {
        f"torchrec_ext/{path.relative_to(ROOT / 'torchrec_ext')}"
        for path in ROOT.glob("torchrec_ext/**/*.pyi")
    }
    assert len(stubs) > 5
    # read at run time too, see torchrec_ext.exports
    assert {"torchrec_ext/py.typed", *stubs} <= set(wheel.namelist())
    assert set(wheel.namelist()) >= SHARED_MEMORY
    assert not [
        name
        for name in wheel.namelist()
        if name.startswith(("components/", "tests/", "benchmarks/"))
    ]


@pytest.mark.launch
def test_the_wheel_registers_our_components_beside_torchxs_own(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["torchx.components"]) == {
        "rec": "torchrec_ext.components",
        "_torchx": "torchx.components",
    }


@pytest.mark.launch
def test_the_version_is_in_one_place(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.split("-")[:2] == [
        "torchrec_ext",
        torchrec_ext.__version__,
    ]
    assert f"## [{torchrec_ext.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def requirements(wheel: zipfile.ZipFile) -> dict[str, set[str]]:
    """Returns the wheel's requirements by extra; those of a plain installation under ''."""
    (name,) = (
        name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")
    )
    found: dict[str, set[str]] = {}
    for line in wheel.read(name).decode().splitlines():
        if line.startswith("Requires-Dist: "):
            requirement, _, condition = line.removeprefix("Requires-Dist: ").partition(
                "; "
            )
            extra = condition.partition('extra == "')[2].rstrip('"')
            found.setdefault(extra, set()).add(requirement)
    return found


@pytest.mark.launch
def test_a_plain_installation_brings_torch_and_nothing_of_torchrec_or_torchx(
    wheel: zipfile.ZipFile,
) -> None:
    found = requirements(wheel)
    assert {re.split(r"[<>=]", name)[0] for name in found[""]} == {
        "numpy",
        "torch",
        "tqdm",
    }
    assert found["launch"] == {"torchx>=0.7", "tyro>=1.0"}


@pytest.mark.launch
def test_the_extras_of_sharded_tables_are_supported_triples(
    wheel: zipfile.ZipFile,
) -> None:
    found = requirements(wheel)
    pins = {
        variant: {
            # A registry has no builds marked +cpu.
            f"{name}=={version}".removesuffix("+cpu")
            for name, version in stack.requirements(variant, triple).items()
            if name not in stack.NEEDS
        }
        for variant, triple in stack.DEFAULTS.items()
    }
    common = {"torchrec-ext[sharded]"}
    assert found["sharded-cuda"] - common == pins["cuda"]
    # Its metadata names the CUDA build of fbgemm, so torchrec has a line of its own.
    torchrec = {pin for pin in pins["cpu"] if pin.startswith("torchrec=")}
    assert found["sharded-cpu"] - common == pins["cpu"] - torchrec
    needs = {
        f"{name}=={version}" if version else name
        for name, version in stack.NEEDS.items()
    }
    assert needs <= found["sharded"] | {"tqdm"}


@pytest.mark.launch
def test_the_source_distribution_has_a_test_suite_that_runs(source: Path) -> None:
    assert {"Makefile", "MANIFEST.in", "CHANGELOG.md", "examples", "docs"} <= {
        path.name for path in source.iterdir()
    }
    tests = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert all((source / path).is_file() for path in tests)
    assert all((source / name).is_file() for name in SHARED_MEMORY)
    said = run("-m", "pytest", "-q", "-m", "unit", "tests/test_stack.py", cwd=source)
    assert re.search(r"\d+ passed", said)
