"""What pip builds from this tree holds all of it: the library, its components and its apps."""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
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


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes into the source tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    run(
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        ".",
        cwd=tree,
    )
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


@pytest.mark.launch
def test_the_wheels_metadata_leaves_the_triple_to_the_doctor(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = (
        name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")
    )
    required = [
        line.split()[1]
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Requires-Dist:")
    ]
    plain = [
        line
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Requires-Dist:") and "extra" not in line
    ]
    assert not [
        line
        for line in plain
        if "torchrec" in line or "fbgemm" in line or " torch=" in line
    ]
    pins = [need.pin for need in stack.requirements("cuda", stack.TRIPLES[0])[:3]]
    assert {f"{pin};" for pin in pins} <= set(required), (
        "the extra cuda is the newest triple"
    )


@pytest.mark.launch
def test_the_source_distribution_holds_what_the_wheel_is_built_from(
    tree: Path, tmp_path: Path
) -> None:
    run(
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})",
        cwd=tree,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "components/train.py",
        "torchx_apps/train.py",
        "torchrec_ext/stack.py",
        "pyproject.toml",
        "LICENSE",
        *SHARED_MEMORY,
    } <= names


# What TorchX makes of each component: by the file in the clone, by the module
# elsewhere.
APPDEFS = """
import dataclasses, importlib, json, sys
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component
flags, by_file, folder = json.loads(sys.argv[1]), sys.argv[2] == "file", sys.argv[3]
if not by_file:
    sys.path.insert(0, folder)
apps = {}
for name, words in flags.items():
    module, function = name.rsplit(".", 1)
    if by_file:
        component = get_component(f"{module.replace('.', '/')}.py:{function}").fn
    else:
        imported = importlib.import_module("torchrec_ext." + module)
        assert imported.__file__.startswith(folder), imported.__file__
        component = getattr(imported, function)
    apps[name] = dataclasses.asdict(materialize_appdef(component, words))
print(json.dumps(apps, default=str))
"""
FLAGS = {
    "components.train.hybrid": ["-j", "2x4", "--gpu", "4", "--", "--set=train.seed=1"],
    "components.train.stream": ["--log", "/data/clicks", "--until_idle", "5"],
    "components.train.networks": ["--vary", "train.seed=0,1", "--max_retries", "2"],
    "components.data.preprocess": ["--recipe", "clicks", "--out", "o"],
    "components.serve.export": ["--run", "r"],
    "components.serve.http": ["--bundle", "b", "--workers", "2"],
    "components.diagnose.why_slow": ["--recipe", "ncf"],
    "components.pipeline.all": ["--out", "o"],
    "components.__init__.plan": ["--tables", "ad=300Mx64"],
    "components.__init__.embed": ["--bundle", "b", "--out", "o", "--tower", "query"],
    "components.__init__.evaluate": ["--users", "u", "--items", "i", "--truth", "t"],
}


def appdefs(how: str, folder: Path) -> str:
    # -I: nothing of the current folder, which is the clone.
    words = [
        sys.executable,
        *(["-I"] if how == "module" else []),
        "-c",
        APPDEFS,
        json.dumps(FLAGS),
        how,
        str(folder),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.launch
def test_clone_editable_install_wheel_and_source_distribution_give_the_same_apps(
    wheel: zipfile.ZipFile, tree: Path, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "wheel")
    run(
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})",
        cwd=tree,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (
        path for path in tmp_path.iterdir() if path.is_dir() and path.name != "wheel"
    )
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", str(tmp_path / "built"), ".", cwd=source)
    with zipfile.ZipFile(next((tmp_path / "built").glob("*.whl"))) as built:
        built.extractall(tmp_path / "sdist")
    clone = appdefs("file", ROOT)
    assert set(json.loads(clone)) == set(FLAGS)
    assert appdefs("module", ROOT) == clone, (
        "the editable install, whose modules are the clone's files"
    )
    assert appdefs("module", tmp_path / "wheel") == clone
    assert appdefs("module", tmp_path / "sdist") == clone


@pytest.mark.unit
def test_every_component_is_compared() -> None:
    from torchx.specs.finder import get_components

    listed = {
        name.removeprefix("rec.")
        for name in get_components()
        if name.startswith("rec.")
    }
    assert {
        name.removeprefix("components.").removeprefix("__init__.") for name in FLAGS
    } == listed


# What a distribution of an extra is imported as, if not by its own name. TorchX's
# `kubernetes` brings docker.
IMPORTED_AS = {
    "faiss-cpu": ["faiss"],
    "ibis-framework": ["ibis"],
    "mlflow-skinny": ["mlflow"],
    "prometheus-client": ["prometheus_client"],
    "torchx": ["docker"],
}
INSTALLED_ANYWAY = {"fsspec"}  # TorchX depends on it


def optional_modules() -> list[str]:
    """Returns the modules of all extras, without those that tests always have (`dev`) and the triple (`cuda`)."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    names: list[str] = []
    for line in section.splitlines():
        extra, _, requirements = line.partition(" = ")
        if extra in ("", "cuda", "dev") or line.startswith("#"):
            continue
        for requirement in ast.literal_eval(requirements):
            distribution = re.split(r"[\[<>=]", requirement)[0]
            names += IMPORTED_AS.get(distribution, [distribution])
            # `ibis-framework[duckdb]` needs duckdb, although no requirement names it.
            names += re.findall(r"\[(\w+)\]", requirement)
    return sorted(set(names) - INSTALLED_ANYWAY)


@pytest.mark.slow
@pytest.mark.launch
def test_the_suite_collects_without_any_optional_package() -> None:
    """`make test` on a fresh machine has the default extras alone; a top-level import of another one would end it."""
    modules = optional_modules()
    assert {
        "kubernetes",
        "starlette",
        "matplotlib",
        "duckdb",
        "pyspark",
        "faiss",
        "onnx",
    } <= set(modules)
    # None in sys.modules makes `import` raise ModuleNotFoundError, and find_spec return
    # None.
    program = f"import sys, pytest; sys.modules.update(dict.fromkeys({modules})); sys.exit(pytest.main())"
    environment = {**os.environ, "PYTEST_ADDOPTS": "--collect-only -q -m ''"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert re.search(r"\d{4} tests collected in", done.stdout)
