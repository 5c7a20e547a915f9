"""The triple: a mix is found from metadata alone, told in words, and repaired by the line that is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_ext import stack
from torchrec_ext.stack import Installed

HEALTHY = {
    "torch": "2.13.0+cpu",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchrec": "1.8.0",
    "tensordict": "0.15.3",
    "torchmetrics": "1.0.3",
    "tqdm": "4.70.1",
    "pyre-extensions": "0.0.32",
}
HEALTHY_CUDA = {
    **{k: v for k, v in HEALTHY.items() if k != "fbgemm-gpu-cpu"},
    "torch": "2.13.0",
    "fbgemm-gpu": "1.8.0",
}


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHREC_EXT_VARIANT", raising=False)
    monkeypatch.delenv("TORCHREC_EXT_UNCHECKED", raising=False)


def environment(
    build: stack.Variant | None = "cpu", **changes: str | None
) -> Installed:
    """A healthy environment of that build with some versions changed (None: not installed); `_` stands for `-`."""
    versions: dict[str, str | None] = dict(HEALTHY_CUDA if build == "cuda" else HEALTHY)
    versions |= {name.replace("_", "-"): version for name, version in changes.items()}
    return Installed(
        versions={name: version for name, version in versions.items() if version},
        torch_build=build,
    )


@pytest.mark.unit
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_pinned_triple_is_healthy(variant: stack.Variant) -> None:
    assert stack.problems(environment(variant), variant) == ()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("found", "variant", "what", "saw", "repair"),
    [
        (
            environment(torch="2.12.1+cpu"),
            "cpu",
            "torch",
            "2.12.1+cpu (CPU build)",
            "py -m torchrec_ext.doctor --install",
        ),
        (
            environment(torchrec=None),
            "cpu",
            "torchrec",
            "nothing",
            "py -m pip install --no-deps torchrec==1.8.0",
        ),
        (
            environment(torchrec="1.6.0"),
            "cpu",
            "torchrec",
            "1.6.0",
            "py -m pip install --no-deps torchrec==1.8.0",
        ),
        (
            environment(fbgemm_gpu_cpu=None),
            "cpu",
            "fbgemm-gpu-cpu",
            "nothing",
            "py -m pip install fbgemm-gpu-cpu==1.8.0",
        ),
        (
            environment(fbgemm_gpu_cpu="1.6.0"),
            "cpu",
            "fbgemm-gpu-cpu",
            "1.6.0",
            "py -m pip install fbgemm-gpu-cpu==1.8.0",
        ),
        (
            environment(torchmetrics="1.8.0"),
            "cpu",
            "torchmetrics",
            "1.8.0",
            "py -m pip install torchmetrics==1.0.3",
        ),
        (
            environment(tensordict=None),
            "cpu",
            "tensordict",
            "nothing",
            "py -m pip install tensordict",
        ),
        (
            environment(fbgemm_gpu="1.8.0"),
            "cpu",
            "fbgemm-gpu-cpu",
            "fbgemm-gpu 1.8.0 laid over fbgemm-gpu-cpu 1.8.0",
            "py -m pip uninstall -y fbgemm-gpu && py -m pip install --force-reinstall --no-deps fbgemm-gpu-cpu==1.8.0",
        ),
        (
            environment("cuda", fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0"),
            "cuda",
            "fbgemm-gpu",
            "fbgemm-gpu-cpu 1.8.0",
            "py -m pip uninstall -y fbgemm-gpu-cpu && py -m pip install --force-reinstall --no-deps fbgemm-gpu==1.8.0",
        ),
        (
            environment(tqdm=stack.UNREADABLE),
            "cpu",
            "tqdm",
            "unreadable metadata",
            "py -m pip install --force-reinstall tqdm",
        ),
    ],
)
def test_each_mismatch_has_one_repair_line(
    found: Installed, variant: stack.Variant, what: str, saw: str, repair: str
) -> None:
    (problem,) = stack.problems(found, variant, python="py")
    assert (problem.what, problem.found, problem.repair) == (what, saw, repair)


@pytest.mark.unit
def test_cuda_torch_with_cpu_fbgemm_is_right_without_a_gpu_and_wrong_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That torch runs on a CPU too. With a GPU it would put tables there, for which this fbgemm has no kernel."""
    found = Installed(versions=HEALTHY | {"torch": "2.13.0"}, torch_build="cuda")
    assert stack.problems(found, stack.wanted_variant(found, machine="cpu")) == ()
    (problem,) = stack.problems(found, stack.wanted_variant(found, machine="cuda"))
    assert (problem.what, problem.expected) == ("fbgemm-gpu", "1.8.0 alone")
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "cpu")
    (problem,) = stack.problems(
        found, stack.wanted_variant(found, machine="cpu"), python="py"
    )
    assert (problem.found, problem.expected) == (
        "2.13.0 (CUDA build)",
        "2.13.0 (CPU build)",
    )
    assert (
        problem.repair == "TORCHREC_EXT_VARIANT=cpu py -m torchrec_ext.doctor --install"
    )


@pytest.mark.unit
def test_cpu_torch_with_cuda_fbgemm_is_found_on_either_machine() -> None:
    found = environment(fbgemm_gpu_cpu=None, fbgemm_gpu="1.8.0")
    assert [
        p.what
        for p in stack.problems(found, stack.wanted_variant(found, machine="cpu"))
    ] == ["fbgemm-gpu-cpu"]
    assert [
        p.what
        for p in stack.problems(found, stack.wanted_variant(found, machine="cuda"))
    ] == ["torch"]


@pytest.mark.unit
def test_no_repair_line_lets_pip_choose_a_torch() -> None:
    """Without torch in place, tensordict and torchmetrics would pull the registry's CUDA build."""
    problems = stack.problems(Installed(versions={}), "cpu", python="py")
    assert [p.what for p in problems] == list(HEALTHY)
    by_doctor = {
        p.what for p in problems if p.repair == "py -m torchrec_ext.doctor --install"
    }
    # The doctor chooses the triple, so that no line names a version of another one.
    assert by_doctor == {
        "torch",
        "fbgemm-gpu-cpu",
        "torchrec",
        "tensordict",
        "torchmetrics",
    }
    without_torch = stack.problems(
        environment(torch=None, tensordict=None, torchrec=None), "cpu", python="py"
    )
    assert [p.repair for p in without_torch] == [
        "py -m torchrec_ext.doctor --install",
        "py -m pip install --no-deps torchrec==1.8.0",
        "py -m torchrec_ext.doctor --install",
    ]


NEWEST = {"torch": "2.14.1", "fbgemm_gpu_cpu": "1.9.0", "torchrec": "1.9.2"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "2.13"),
        (NEWEST, "2.14"),
        ({"torch": "2.14.1"}, "2.13"),  # two of three
        ({"torch": "2.14.1", "torchrec": None}, "2.14"),  # torch, if in doubt
        ({"torchrec": "1.9.2", "fbgemm_gpu_cpu": None}, "2.13"),
        ({"torch": "2.14.0", "torchrec": None, "fbgemm_gpu_cpu": None}, "2.14"),
        ({"torch": "2.12.1", "torchrec": None, "fbgemm_gpu_cpu": None}, None),
    ],
)
def test_an_environment_has_the_triple_of_most_of_its_parts(
    changes: dict[str, str | None], name: str | None
) -> None:
    found = stack.installed_triple(environment(**changes))
    assert (found and found.name) == name


@pytest.mark.unit
@pytest.mark.parametrize("triple", stack.TRIPLES, ids=lambda triple: triple.name)
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_every_triple_is_healthy_by_itself_and_found_beside_another(
    triple: stack.Triple, variant: stack.Variant
) -> None:
    versions = {
        need.name: need.version or "1.0" for need in stack.requirements(variant, triple)
    }
    found = Installed(versions=versions, torch_build=variant)
    assert (
        stack.problems(found, variant)
        == stack.problems(found, variant, named=triple)
        == ()
    )
    for other in set(stack.TRIPLES) - {triple}:
        wrong = stack.problems(found, variant, python="py", named=other)
        assert len(wrong) == 3
        assert (
            wrong[0].repair
            == f"py -m torchrec_ext.doctor --install --stack {other.name}"
        )


@pytest.mark.unit
def test_a_torch_without_fbgemm_is_replaced_only_by_name() -> None:
    found = Installed(versions={"torch": "2.15.0"}, torch_build="cuda")
    assert stack.newer_torch(found) == "2.15.0"
    assert (
        stack.problems(found, "cpu", python="py")[0].repair
        == "py -m torchrec_ext.doctor --install --stack 2.14"
    )
    for version in ("2.14.9", "2.9.1", stack.UNREADABLE):
        assert stack.newer_torch(environment(torch=version)) is None


@pytest.mark.unit
def test_a_pair_that_agrees_is_left_alone_on_any_machine() -> None:
    for machine in ("cpu", "cuda"):
        assert stack.wanted_variant(environment("cuda"), machine) == "cuda"
        assert stack.wanted_variant(environment("cpu"), machine) == "cpu"
        assert stack.wanted_variant(Installed(versions={}), machine) == machine


@pytest.mark.unit
def test_the_variable_overrules_and_stays_in_the_repair_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "cuda")
    assert stack.wanted_variant(environment("cpu"), "cpu") == "cuda"
    assert (
        stack.doctor_line("py")
        == "TORCHREC_EXT_VARIANT=cuda py -m torchrec_ext.doctor --install"
    )
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "rocm")
    with pytest.raises(
        ValueError,
        match=r"TORCHREC_EXT_VARIANT='rocm': it must be cpu or cuda; unset it",
    ):
        stack.wanted_variant(environment("cpu"), "cpu")


@pytest.mark.unit
def test_gpus_are_counted_by_their_nodes(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert [Path(node).name for node in stack.gpu_nodes(tmp_path)] == [
        "nvidia0",
        "nvidia3",
    ]
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
    assert done.stdout == (
        "found torch 2.12.0+cpu, fbgemm-gpu-cpu 1.8.0, fbgemm-gpu 1.8.0, torchrec 1.8.0; what fits is torch==2.13.0, "
        "fbgemm-gpu-cpu==1.8.0, torchrec==1.8.0: "
        f"TORCHREC_EXT_VARIANT=cpu {stack.interpreter()} -m torchrec_ext.doctor --install False\n"
    )


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
        (stack.UNREADABLE, False),
        (None, False),
    ],
)
def test_torch_alone_has_a_range_of_versions(version: str | None, fits: bool) -> None:
    problem = stack.torch_problem(version)
    assert (problem is None) == fits
    if problem:
        assert problem.endswith('pip install "torch>=2.11,<2.15"')
        assert (version or "no torch") in problem


@pytest.mark.unit
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (environment(), None),
        (
            environment(torchrec=None, fbgemm_gpu_cpu=None),
            'which is not installed: pip install "torchrec-ext[sharded-cpu]"',
        ),
        (
            environment(fbgemm_gpu_cpu=None),
            "fbgemm-gpu-cpu: found nothing, beside torch 2.13.0+cpu must be 1.8.0: "
            "python -m pip install fbgemm-gpu-cpu==1.8.0",
        ),
        (
            environment(torchrec=None),
            "torchrec: found nothing, beside torch 2.13.0+cpu must be 1.8.0: "
            "python -m pip install --no-deps torchrec==1.8.0",
        ),
        (
            environment(torchrec="1.9.2", fbgemm_gpu_cpu="1.9.0"),
            "found torch 2.13.0+cpu, fbgemm-gpu-cpu 1.9.0, torchrec 1.9.2; what fits is torch==2.14.1, "
            "fbgemm-gpu-cpu==1.9.0, torchrec==1.9.2: python -m torchrec_ext.doctor --install",
        ),
        (
            environment(fbgemm_gpu="1.8.0"),
            "beside torch 2.13.0+cpu must be 1.8.0 alone: python -m torchrec_ext.doctor --install",
        ),
    ],
)
def test_what_needs_torchrec_says_in_one_line_what_is_wrong(
    found: Installed, said: str | None
) -> None:
    line = stack.torchrec_problem(found, "cpu")
    assert line == said if said is None else line and line.endswith(said)
    assert len(line or "") <= 200
    assert "\n" not in (line or "")


@pytest.mark.launch
def test_a_stack_built_by_hand_passes_when_asked(mixed: str) -> None:
    done = in_fresh_interpreter(
        "from torchrec_ext.needs_torch import and_torchrec",
        PYTHONPATH=mixed,
        TORCHREC_EXT_UNCHECKED="1",
    )
    assert (done.returncode, done.stderr) == (0, "")
