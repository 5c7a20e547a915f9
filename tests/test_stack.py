"""The triple: a mix is found from metadata alone, told in one line, and mended by the line that is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_ext import stack
from torchrec_ext.stack import TRIPLES, Installed

HEALTHY = {
    "torch": "2.13.0+cpu",
    "fbgemm-gpu-cpu": "1.8.0",
    "tensordict": "0.15.3",
    "torchmetrics": "1.0.3",
    "tqdm": "4.70.1",
    "pyre-extensions": "0.0.32",
    "torchrec": "1.8.0",
}
TRIPLE = TRIPLES["2.13"]


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHREC_EXT_VARIANT", "TORCHREC_EXT_UNCHECKED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stack, "gpu_nodes", list)


def environment(
    build: stack.Variant | None = "cpu", **changes: str | None
) -> Installed:
    """A healthy environment of that build with some versions changed (None: not installed); `_` stands for `-`."""
    versions: dict[str, str | None] = dict(HEALTHY)
    if build == "cuda":
        versions |= {"torch": "2.13.0", "fbgemm-gpu": versions.pop("fbgemm-gpu-cpu")}
    versions |= {name.replace("_", "-"): version for name, version in changes.items()}
    return Installed(
        versions={name: version for name, version in versions.items() if version},
        torch_build=build,
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("found", "variant", "names"),
    [
        (environment(), "cpu", []),
        (environment("cuda"), "cuda", []),
        (environment(torch="2.12.1+cpu"), "cpu", ["torch"]),
        (
            environment(torchrec="1.6.0", tensordict=None),
            "cpu",
            ["tensordict", "torchrec"],
        ),
        (environment(fbgemm_gpu_cpu=None), "cpu", ["fbgemm-gpu-cpu"]),
        (environment(fbgemm_gpu="1.8.0"), "cpu", ["fbgemm-gpu-cpu"]),
        (
            environment("cuda", fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0"),
            "cuda",
            ["fbgemm-gpu"],
        ),
        (
            Installed(versions={"torch": "2.15.0"}, torch_build="cuda"),
            "cpu",
            list(HEALTHY),
        ),
    ],
)
def test_each_mismatch_is_named(
    found: Installed, variant: stack.Variant, names: list[str]
) -> None:
    triple = stack.installed_triple(found, variant)
    assert list(stack.mismatches(found, variant, triple)) == names
    problem = stack.torchrec_problem(found, variant)
    assert (problem is None) == (not names)
    assert problem is None or len(problem) <= 200


@pytest.mark.unit
@pytest.mark.parametrize("triple", TRIPLES.values(), ids=list(TRIPLES))
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_every_triple_fits_itself_and_no_other(
    triple: stack.Triple, variant: stack.Variant
) -> None:
    versions = {
        name: version or "1.0"
        for name, version in stack.requirements(variant, triple).items()
    }
    found = Installed(versions=versions, torch_build=variant)
    assert stack.installed_triple(found, variant) == triple
    for other in TRIPLES.values():
        wrong = stack.mismatches(found, variant, other).keys() - {"iopath"}
        assert len(wrong) == (0 if other == triple else 3)


@pytest.mark.unit
def test_cuda_torch_with_cpu_fbgemm_is_right_without_a_gpu_and_wrong_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That torch runs on a CPU too. With a GPU it would put tables there, for which this fbgemm has no kernel."""
    found = Installed(versions=HEALTHY | {"torch": "2.13.0"}, torch_build="cuda")
    assert stack.mismatches(found, stack.wanted_variant(found), TRIPLE) == {}
    monkeypatch.setattr(stack, "gpu_nodes", lambda: ["/dev/nvidia0"])
    assert stack.wanted_variant(found) == "cuda"
    assert list(stack.mismatches(found, "cuda", TRIPLE)) == ["fbgemm-gpu"]
    assert stack.torchrec_problem(found, "cpu") == (
        "torch: found 2.13.0 for cuda, not cpu, expected 2.13.0+cpu: "
        f"{sys.executable} -m torchrec_ext.doctor --install"
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "2.13"),
        ({"torch": "2.14.1"}, "2.14"),
        ({"torch": "2.12.1"}, "2.14"),  # the variant's
    ],
)
def test_an_environment_has_the_triple_of_its_torch(
    changes: dict[str, str | None], name: str
) -> None:
    found = stack.installed_triple(environment(**changes), "cuda")
    assert found == TRIPLES[name]


@pytest.mark.unit
def test_a_pair_that_agrees_is_left_alone_on_any_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for machine, nodes in (("cpu", []), ("cuda", ["/dev/nvidia0"])):
        monkeypatch.setattr(stack, "gpu_nodes", lambda nodes=nodes: nodes)
        assert stack.wanted_variant(environment("cuda")) == "cuda"
        assert stack.wanted_variant(environment("cpu")) == "cpu"
        assert stack.wanted_variant(Installed(versions={})) == machine
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "rocm")
    with pytest.raises(ValueError, match=r"TORCHREC_EXT_VARIANT='rocm'.*cpu or cuda"):
        stack.wanted_variant(environment("cpu"))


@pytest.mark.unit
def test_gpus_are_counted_by_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for name in ("nvidia3", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    names = [Path(node).name for node in stack.gpu_nodes(tmp_path)]
    assert names == ["nvidia0", "nvidia3"]
    assert stack.gpu_nodes(tmp_path / "none") == []


def in_fresh_interpreter(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCHREC_EXT")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean | env,
        check=False,
    )


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A folder that, on the path, makes fbgemm-gpu look laid over fbgemm-gpu-cpu beside a torch of another minor."""
    for name, version in {
        "torch": "2.12.0+cpu",
        "fbgemm_gpu": "1.8.0",
        "fbgemm_gpu_cpu": "1.8.0",
        "torchrec": "1.8.0",
    }.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return str(tmp_path)


@pytest.mark.launch
def test_importing_the_package_loads_no_torch() -> None:
    done = in_fresh_interpreter(
        "import sys, torchrec_ext; dir(torchrec_ext)\n"
        "print([m for m in ('torch', 'torchrec', 'numpy', 'importlib.metadata') if m in sys.modules])"
    )
    assert done.stdout == "[]\n"


@pytest.mark.launch
@pytest.mark.parametrize(
    "code",
    [
        "from torchrec_ext import Tower",
        "from torchrec_ext.needs_torch import and_torchrec",
    ],
)
def test_a_mixed_triple_says_so_and_loads_no_torch(mixed: str, code: str) -> None:
    done = in_fresh_interpreter(
        f"import sys\ntry:\n    {code}\nexcept ImportError as e:\n    print(e, 'torch' in sys.modules)",
        PYTHONPATH=mixed,
        TORCHREC_EXT_VARIANT="cpu",
    )
    assert done.stdout.startswith(
        "torch: found 2.12.0+cpu, expected 2.13.0+cpu and 1 more: "
    )
    assert done.stdout.endswith(" -m torchrec_ext.doctor --install False\n")


@pytest.mark.launch
def test_a_mixed_triple_is_no_matter_to_what_needs_torch_alone(mixed: str) -> None:
    done = in_fresh_interpreter("import torchrec_ext.adopt", PYTHONPATH=mixed)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.10.0", False),
        ("2.11.0+cu130", True),
        ("2.14.1", True),
        ("2.15.0", False),
        ("no version", False),
        (None, False),
    ],
)
def test_torch_alone_has_a_range_of_versions(version: str | None, fits: bool) -> None:
    assert (stack.torch_problem(version) is None) == fits
