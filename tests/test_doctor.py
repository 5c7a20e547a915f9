"""The doctor: healthy is 0, each mismatch is 1 with the line that mends it, and no mistake ends in a traceback."""

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.test_stack import environment
from torchrec_ext import doctor, stack


class Commands:
    """Stands in for `doctor.run`: keeps every command, and fails those that a given pattern finds."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.seen: list[str] = []

    def __call__(self, what: str, command: Sequence[str]) -> None:
        line = " ".join(command).replace(sys.executable, "py")
        for noise in (
            "--disable-pip-version-check --no-input ",
            "--quiet --no-compile ",
        ):
            line = line.replace(noise, "")
        self.seen.append(line.removeprefix("py -m pip install "))
        for word in self.failing:
            if re.search(word, line):
                raise doctor.InstallError(f"{what}: no answer")


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHREC_EXT_VARIANT", raising=False)
    monkeypatch.setattr(stack, "gpu_nodes", list)
    monkeypatch.setattr(stack, "interpreter", lambda: "py")
    monkeypatch.setattr("shutil.which", lambda name: name)


def installs(
    monkeypatch: pytest.MonkeyPatch, found: stack.Installed, *failing: str
) -> Commands:
    fake = Commands(*failing)
    monkeypatch.setattr(doctor, "run", fake)
    monkeypatch.setattr(stack, "installed", lambda: found)
    return fake


NOTHING = stack.Installed(versions={})
REST = "tensordict torchmetrics==1.0.3 tqdm pyre-extensions"


@pytest.mark.unit
def test_a_cpu_gets_a_cpu_build_from_pytorchs_own_index_if_pip_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = installs(monkeypatch, NOTHING, r"\+cpu$")
    doctor.install("cpu")
    assert fake.seen == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
        f"torch==2.13.0 fbgemm-gpu-cpu==1.8.0 {REST}",
        "--no-deps torchrec==1.8.0",
    ]


@pytest.mark.unit
def test_without_a_cpu_build_the_registrys_torch_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = installs(monkeypatch, NOTHING, r"\+cpu")
    with pytest.raises(doctor.InstallError, match="PIP_FIND_LINKS") as error:
        doctor.install("cpu", stack.triple_by_name("2.14"))
    assert len(str(error.value)) <= 260
    assert "no CPU build of torch==2.14.1" in str(error.value)
    assert "fbgemm" not in " ".join(fake.seen)


@pytest.mark.unit
def test_an_environment_keeps_its_triple_and_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = installs(monkeypatch, environment(torchrec=None))
    assert doctor.main(["--install", "--no-import", "--editable", ".[dev]"]) == 1
    assert fake.seen == ["--no-deps torchrec==1.8.0", "--editable .[dev]"]
    fake = installs(monkeypatch, environment("cuda", fbgemm_gpu_cpu="1.8.0"))
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "cpu")
    doctor.install("cpu")
    assert fake.seen == [
        "torch==2.13.0+cpu",
        "py -m pip uninstall --quiet --yes fbgemm-gpu-cpu fbgemm-gpu",
        "torch==2.13.0 fbgemm-gpu-cpu==1.8.0",
    ]
    fake = installs(monkeypatch, environment())
    doctor.install("cuda")
    assert fake.seen[0].endswith("uninstall --quiet --yes fbgemm-gpu-cpu torch")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "found", "says"),
    [
        (
            ["--stack", "2.15"],
            environment(),
            "there is no fbgemm for torch 2.15",
        ),
        (
            ["--install"],
            stack.Installed(versions={"torch": "2.15.0"}, torch_build="cuda"),
            "torch 2.15.0 is installed, and there is no fbgemm for it",
        ),
    ],
)
def test_a_torch_without_fbgemm_is_one_line_and_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    found: stack.Installed,
    says: str,
) -> None:
    fake = installs(monkeypatch, found)
    assert doctor.main(flags) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert says in last
    assert len(last) <= 200
    assert fake.seen == []


@pytest.mark.unit
def test_a_mismatch_and_an_import_that_fails_end_with_1_and_a_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack, "installed", lambda: environment(torchrec="1.6.0"))
    monkeypatch.setattr(stack, "gpu_nodes", lambda: ["/dev/nvidia0"])
    assert doctor.main(["--no-import"]) == 1
    out = capsys.readouterr().out
    assert "WRONG torchrec" in out.splitlines()[-2]
    assert out.splitlines()[-1] == "repair: py -m torchrec_ext.doctor --install"
    assert "TORCHREC_EXT_VARIANT=cuda" in out, "the GPU is left idle"
    monkeypatch.setattr(stack, "installed", environment)
    done = subprocess.CompletedProcess([], -6, "", "ImportError: cannot open\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: done)
    assert doctor.main([]) == 1
    assert "WRONG import: ImportError" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.unit
def test_a_failed_command_is_named_by_its_line_with_the_error() -> None:
    code = "import sys; sys.exit('WARNING: a\\nERROR: No space left on device\\nhint')"
    with pytest.raises(doctor.InstallError, match=r"ERROR: No space left on device$"):
        doctor.run("a step", [sys.executable, "-c", code])


@pytest.mark.launch
def test_here_and_now_it_is_healthy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_ext.doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nhealthy\n")
