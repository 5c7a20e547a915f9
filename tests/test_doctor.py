"""The doctor: healthy is 0, each mismatch is 1 with the line that mends it, and no mistake ends in a traceback."""

import subprocess
import sys

import pytest

from tests.test_stack import environment
from torchrec_ext import doctor, stack

NOTHING = stack.Installed(versions={})
REST = "tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
FBGEMM_GOES = "uninstall --yes fbgemm-gpu fbgemm-gpu-cpu"


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHREC_EXT_VARIANT", raising=False)
    monkeypatch.setattr(stack, "gpu_nodes", list)


def for_a_cpu(packages: str) -> str:
    """A CPU build is taken from where pip looks, or from where uv knows them; the registry's torch never is."""
    uv = f"install uv && {sys.executable} -m uv pip install {packages}"
    return f"install {packages} || {{ {uv} --torch-backend cpu; }}"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("found", "variant", "name", "steps"),
    [
        (environment(), "cpu", "2.13", []),
        (
            NOTHING,
            "cpu",
            "2.13",
            [
                for_a_cpu(f"torch==2.13.0+cpu fbgemm-gpu-cpu==1.8.0 {REST}"),
                "install --no-deps torchrec==1.8.0",
            ],
        ),
        (
            NOTHING,
            "cuda",
            "2.14",
            [
                f"install torch==2.14.1 fbgemm-gpu==1.9.0 {REST}",
                "install --no-deps torchrec==1.9.2",
            ],
        ),
        # What fits stays.
        (
            environment(torchrec=None),
            "cpu",
            "2.13",
            ["install --no-deps torchrec==1.8.0"],
        ),
        # Neither build of fbgemm is whole beside the other.
        (
            environment(fbgemm_gpu="1.8.0"),
            "cpu",
            "2.13",
            [FBGEMM_GOES, for_a_cpu("fbgemm-gpu-cpu==1.8.0")],
        ),
        # A CPU build fits the pin of the CUDA build, so it goes first.
        (
            environment(),
            "cuda",
            "2.13",
            [
                "uninstall --yes fbgemm-gpu-cpu torch",
                "install torch==2.13.0 fbgemm-gpu==1.8.0",
            ],
        ),
    ],
)
def test_the_line_mends_what_is_wrong_and_leaves_the_rest(
    found: stack.Installed, variant: stack.Variant, name: str, steps: list[str]
) -> None:
    line = doctor.repair(found, variant, stack.TRIPLES[name])
    assert line.replace(f"{sys.executable} -m pip ", "") == " && ".join(steps)


@pytest.mark.unit
@pytest.mark.parametrize("torch", ["2.15.0", "2.9.1"])
def test_a_torch_without_fbgemm_is_one_line_and_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    found = stack.Installed(versions={"torch": torch}, torch_build="cuda")
    monkeypatch.setattr(stack, "installed", lambda: found)
    with pytest.raises(SystemExit, match=rf"torch {torch} is .* --stack 2\.13$") as end:
        doctor.main(["--install"])
    assert len(str(end.value).replace(sys.executable, "")) <= 200


@pytest.mark.unit
def test_a_mismatch_and_an_import_that_fails_end_with_1_and_a_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack, "installed", lambda: environment(torchrec="1.6.0"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "\nWRONG torchrec: found 1.6.0, expected 1.8.0\n" in out
    assert out.endswith("-m pip install --no-deps torchrec==1.8.0\n")
    monkeypatch.setattr(stack, "installed", environment)
    done = subprocess.CompletedProcess([], -6, "", "ImportError: cannot open\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: done)
    assert doctor.main([]) == 1
    wrong, repair = capsys.readouterr().out.splitlines()[-2:]
    assert wrong == "WRONG import: ImportError: cannot open (status -6)"
    assert "uninstall" in repair
    assert repair.endswith(" --install --stack 2.13")


@pytest.mark.unit
def test_a_line_that_fails_and_a_wrong_variant_end_with_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match="PIP_FIND_LINKS") as end:
        doctor.run("exit 3")
    assert len(str(end.value)) <= 200
    doctor.run("")
    monkeypatch.setenv("TORCHREC_EXT_VARIANT", "rocm")
    with pytest.raises(SystemExit, match="doctor: TORCHREC_EXT_VARIANT='rocm'"):
        doctor.main([])


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
