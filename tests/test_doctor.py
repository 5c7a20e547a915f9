"""The doctor: healthy is 0, each mismatch is 1 with its repair line, and no user's mistake ends in a traceback."""

import json
import re
import subprocess
import sys

import pytest

from tests.test_stack import environment
from torchrec_ext import doctor, stack
from torchrec_ext import doctor as install


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHREC_EXT_VARIANT", raising=False)
    monkeypatch.setattr(stack, "gpu_nodes", list)
    monkeypatch.setattr(stack, "interpreter", lambda: "py")


def finds(monkeypatch: pytest.MonkeyPatch, found: stack.Installed) -> None:
    monkeypatch.setattr(stack, "installed", lambda: found)


def imports_as(
    monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "", status: int = 0
) -> None:
    done = subprocess.CompletedProcess([], status, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: done)


GOOD = '{"seconds": 3.5, "answer": [8.0, 10.0], "threads": 1, "gpus": [], "no_shared_memory": ""}'


@pytest.mark.unit
def test_healthy_is_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, environment())
    imports_as(monkeypatch, f"a warning of torch\n{GOOD}\n")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "healthy"
    assert "torch            2.13.0+cpu  (expected 2.13.0)" in out
    assert "3.5 s" in out
    assert "shared memory    ready" in out
    imports_as(
        monkeypatch, GOOD.replace('memory": "', 'memory": "its library is not built')
    )
    assert doctor.main([]) == 0
    assert "shared memory    its library is not built\n" in capsys.readouterr().out


@pytest.mark.unit
def test_a_mismatch_is_one_and_names_its_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, environment(torchrec="1.6.0"))
    assert doctor.main(["--no-import"]) == 1
    out = capsys.readouterr().out
    assert (
        "WRONG torchrec: found 1.6.0, expected 1.8.0\n    repair: py -m pip install --no-deps torchrec==1.8.0\n"
        in out
    )
    assert out.endswith("not healthy: 1 to repair\n")


@pytest.mark.unit
def test_json_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, environment(fbgemm_gpu="1.8.0"))
    assert doctor.main(["--json", "--no-import"]) == 1
    seen = json.loads(capsys.readouterr().out)
    assert (seen["healthy"], seen["variant"]) == (False, "cpu")
    assert [problem["what"] for problem in seen["problems"]] == ["fbgemm-gpu-cpu"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "says"),
    [
        (
            "",
            "Traceback\nImportError: libtorch_cuda.so: cannot open\n",
            1,
            "ImportError: libtorch_cuda.so: cannot open (status 1)",
        ),
        ("", "", -6, "nothing on stderr (signal 6)"),
        (
            GOOD.replace("10.0", "0.0"),
            "",
            0,
            "a lookup gave [8.0, 0.0] instead of [8.0, 10.0]",
        ),
    ],
)
def test_an_import_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, status: int, says: str
) -> None:
    imports_as(monkeypatch, stdout, stderr, status)
    problem = doctor.probe("cpu")
    assert isinstance(problem, stack.Problem)
    assert says in problem.found
    assert (
        problem.repair
        == "py -m pip uninstall -y torch fbgemm-gpu-cpu torchrec && py -m torchrec_ext.doctor --install"
    )


@pytest.mark.unit
def test_a_private_name_that_a_release_has_dropped_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, environment("cpu"))
    monkeypatch.setattr(
        doctor.private_names,
        "missing",
        lambda: iter([("torchrec/optim/keyed.py", "_optims")]),
    )
    (problem,) = doctor.diagnose(really_import=False).problems
    assert problem.found == "1 are gone, first _optims (torchrec/optim/keyed.py)"
    assert problem.repair == "py -m torchrec_ext.doctor --install"


@pytest.mark.unit
def test_a_gpu_that_is_left_idle_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, environment("cpu"))
    monkeypatch.setattr(stack, "gpu_nodes", lambda: ["/dev/nvidia0", "/dev/nvidia1"])
    seen = doctor.diagnose(really_import=False)
    assert seen.healthy
    assert seen.notes == (
        "an NVIDIA GPU is in sight, but the CPU builds are used; to change that: TORCHREC_EXT_VARIANT=cuda py -m "
        "torchrec_ext.doctor --install",
    )


@pytest.mark.unit
def test_one_rank_for_each_gpu_and_the_cores_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, environment("cuda"))
    monkeypatch.setattr(stack, "gpu_nodes", lambda: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(16)))
    seen = doctor.diagnose(really_import=False)
    assert (seen.variant, seen.ranks, seen.threads, seen.healthy) == (
        "cuda",
        2,
        8,
        True,
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("version", "count"), [((3, 9), 1), ((3, 10), 0), ((3, 13), 0), ((3, 14), 1)]
)
def test_pythons_that_the_stack_has_wheels_for(
    version: tuple[int, int], count: int
) -> None:
    assert len(doctor._python_problem(version)) == count


@pytest.mark.unit
def test_a_wrong_variable_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "gpu")
    assert doctor.main([]) == 1
    assert capsys.readouterr().err.startswith(
        "doctor: TORCHREC_EXT_VARIANT='gpu': it must be cpu or cuda"
    )


class Commands:
    """Stands in for `install.run_quietly`: keeps every command, and fails those that hold a given word.

    ``builds`` are the CPU builds of torch that pip lists.
    """

    def __init__(self, failing: dict[str, str], builds: str) -> None:
        self.failing, self.builds = failing, builds
        self.seen: list[str] = []

    def __call__(self, command: list[str], env: dict[str, str] | None = None) -> str:
        line = " ".join(command).replace(sys.executable, "py")
        self.seen.append(line)
        for word, says in self.failing.items():
            if word in line:
                raise install.CommandError(says)
        return f"torch (2.15.0)\nAvailable versions: 2.15.0, {self.builds}, 2.13.0, 2.12.0+cpu\n"

    @property
    def installs(self) -> list[str]:
        """What each install was asked for, without pip's flags."""
        words = (
            "py -m pip --disable-pip-version-check --no-input install --quiet --no-compile ",
            "",
        )
        return [line.replace(*words) for line in self.seen if " install " in line]


def commands(
    monkeypatch: pytest.MonkeyPatch, builds: str = "2.13.0+cpu", **failing: str
) -> Commands:
    fake = Commands(
        {word.replace("_", "+"): says for word, says in failing.items()}, builds
    )
    monkeypatch.setattr(install, "run_quietly", fake)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return fake


REST = "fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
NEW_REST = REST.replace("1.8.0", "1.9.0")
NO_BUILD = "2.14.1"


def quiet(_line: str) -> None:
    """Takes the steps and says nothing."""


@pytest.mark.unit
def test_cpu_torch_where_pip_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    fake = commands(monkeypatch)
    install.install("cpu", ".[dev]", quiet)
    assert fake.installs == [
        f"torch==2.13.0+cpu {REST} --editable .[dev]",
        "--no-deps torchrec==1.8.0",
    ]


@pytest.mark.unit
def test_a_new_environment_gets_the_newest_triple_with_a_cpu_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    fake = commands(monkeypatch, builds="2.13.0+cpu, 2.14.1+cpu")
    install.install("cpu", None, quiet)
    assert fake.installs == [
        f"torch==2.14.1+cpu {NEW_REST}",
        "--no-deps torchrec==1.9.2",
    ]


@pytest.mark.unit
def test_an_environment_keeps_its_triple_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, environment(torchrec=None))
    fake = commands(monkeypatch, builds="2.13.0+cpu, 2.14.1+cpu")
    install.install("cpu", None, quiet)
    install.install("cpu", None, quiet, stack.triple_by_name("2.14"))
    assert [line.split()[0] for line in fake.installs[::2]] == [
        "torch==2.13.0",
        "torch==2.14.1+cpu",
    ]
    assert fake.installs[1::2] == [
        "--no-deps torchrec==1.8.0",
        "--no-deps torchrec==1.9.2",
    ]


@pytest.mark.unit
def test_a_named_triple_without_a_cpu_build_gets_the_cuda_build_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    monkeypatch.setattr("shutil.which", lambda _name: "uv")
    fake, steps = commands(monkeypatch, backend="dns error"), []
    install.install("cpu", None, steps.append, stack.triple_by_name("2.14"))
    assert fake.installs[1:] == [
        f"torch==2.14.1 {NEW_REST}",
        "--no-deps torchrec==1.9.2",
    ]
    assert (
        "  no CPU build of torch 2.14.1 to be had: taking the CUDA build, 5 GB, which runs on a CPU too"
        in steps
    )
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "cpu")
    with pytest.raises(install.InstallError, match=r"no CPU build of torch 2\.14\.1"):
        install.install("cpu", None, quiet, stack.triple_by_name("2.14"))


@pytest.mark.unit
@pytest.mark.parametrize(
    "flags", [["--install"], ["--install", "--stack", "2.15"], ["--stack", "2.15"]]
)
def test_a_torch_without_fbgemm_is_told_in_one_line(
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finds(
        monkeypatch, stack.Installed(versions={"torch": "2.15.0"}, torch_build="cuda")
    )
    fake = commands(monkeypatch)
    assert doctor.main(flags) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"doctor: (torch 2\.15\.0 is installed, and|--stack 2\.15:) there is no fbgemm for ",
        line,
    )
    assert "2.14" in line
    assert len(line) <= 200
    assert fake.seen == []


@pytest.mark.unit
def test_cpu_torch_by_uv_where_pip_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    monkeypatch.setattr("shutil.which", lambda _name: "uv")
    fake = commands(monkeypatch, builds=NO_BUILD)
    install.install("cpu", None, quiet)
    assert fake.installs == [
        "uv pip install --python py --torch-backend=cpu --no-deps torch==2.14.1",
        f"torch==2.14.1 {NEW_REST}",
        "--no-deps torchrec==1.9.2",
    ]


@pytest.mark.unit
def test_without_either_the_error_says_what_to_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    monkeypatch.setattr("shutil.which", lambda _name: "uv")
    fake = commands(monkeypatch, index="no answer", backend="dns error")
    with pytest.raises(
        install.InstallError,
        match=r"get torch-2\.14\.1\+cpu-cp3\d+-cp3\d+-manylinux_2_28_x86_64\.whl",
    ) as info:
        install.install("cpu", None, quiet)
    assert "pip: no answer\n    uv: dns error" in str(info.value)
    assert "PIP_FIND_LINKS=DIR make demo" in str(info.value)
    # the registry's CUDA build was never asked for
    assert "fbgemm" not in " ".join(fake.installs)


@pytest.mark.unit
def test_another_failure_of_pip_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    commands(monkeypatch, _cpu="No space left on device")
    with pytest.raises(install.InstallError, match=r"^No space left on device$"):
        install.install("cpu", None, quiet)


@pytest.mark.unit
def test_a_missing_network_is_named() -> None:
    output = (
        "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
        "ERROR: No matching distribution found for x\n"
    )
    assert (
        install.reason(output).splitlines()[0] == "No matching distribution found for x"
    )
    assert (
        "did not reach its package index; without a network give it a folder of wheels"
        in install.reason(output)
    )


@pytest.mark.unit
def test_cuda_takes_the_registrys_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    fake = commands(monkeypatch)
    install.install("cuda", None, quiet)
    assert fake.installs == [
        f"torch==2.14.1 {NEW_REST.replace('-cpu', '')}",
        "--no-deps torchrec==1.9.2",
    ]


@pytest.mark.unit
def test_the_other_build_is_taken_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, environment("cuda", fbgemm_gpu_cpu="1.8.0"))
    fake = commands(monkeypatch)
    install.install("cpu", None, quiet)
    assert fake.seen[1].endswith(
        "uninstall --quiet --yes fbgemm-gpu fbgemm-gpu-cpu torch"
    )


@pytest.mark.unit
def test_a_healthy_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, environment())
    fake = commands(monkeypatch)
    install.install("cpu", None, quiet)
    assert fake.installs == []


@pytest.mark.unit
def test_the_library_of_shared_memory_is_built_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = commands(monkeypatch)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    doctor.build_shared_memory(quiet)
    assert fake.seen == ["py -m torchrec_ext.distributed.shared_memory.library"]
    commands(monkeypatch).failing["library"] = "c++ fails: no Python.h"
    with pytest.raises(doctor.InstallError, match=r"no Python\.h"):
        doctor.build_shared_memory(quiet)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(doctor.InstallError, match=r"--with-shared-memory: .*g\+\+"):
        doctor.build_shared_memory(quiet)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("system", "machine", "variant", "says"),
    [
        (
            "Darwin",
            "arm64",
            "cpu",
            "this is Darwin on arm64: fbgemm 1.9.0 has wheels for Linux",
        ),
        (
            "Linux",
            "aarch64",
            "cuda",
            "no CUDA wheel for aarch64: .* TORCHREC_EXT_VARIANT=cpu",
        ),
    ],
)
def test_platforms_without_wheels_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    machine: str,
    variant: stack.Variant,
    says: str,
) -> None:
    finds(monkeypatch, stack.Installed(versions={}))
    fake = commands(monkeypatch)
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(install.InstallError, match=says):
        install.install(variant, None, quiet)
    assert fake.seen == []


@pytest.mark.launch
def test_here_and_now_it_is_healthy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_ext.doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
