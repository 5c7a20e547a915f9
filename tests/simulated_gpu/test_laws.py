"""Laws of the CUDA paths, on a simulated GPU, in processes of their own.

site/device.cpp says how it works. What it cannot say: how fast anything is, whether kernels of two streams overlap,
what NCCL does when ranks disagree, how CUDA's kernels round, fragmentation of memory, UVM, MPS, and traces.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpu import build

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow(minutes=2),
    pytest.mark.skipif(bool(build.missing()), reason=build.missing()),
]
LAWS = Path(__file__).parent / "laws"

# Tests marked gpu that a simulated GPU cannot pass.
NEEDS_A_REAL_GPU = {
    "tests/distributed/test_laws.py::test_rows_off_the_gpu_train_as_those_on_it[fused_uvm_caching]": "FBGEMM's cache",
    "tests/train/checkpoint/test_plans.py::test_kernels_of_a_gpu_load_each_other[fused_uvm_caching]": "FBGEMM's cache",
    "tests/apps/test_gpu_jobs.py::test_a_job_trains_exports_and_goes_on[two_tower, UVM]": "FBGEMM's cache",
}


def check(*words: str) -> str:
    """Runs pytest in a process with two simulated GPUs, and returns its last line."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=short",
        *words,
    ]
    done = subprocess.run(
        command,
        cwd=build.ROOT,
        env=build.environment(gpus=2),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "law", ["graphs", "order", "waits", "losses", "adopted", "kernels"]
)
def test_the_law_holds(law: str) -> None:
    if law == "kernels":
        # Without it all of the law's tests would be skipped, and this one pass.
        pytest.importorskip("triton")
    check(str(LAWS / f"{law}.py"))


def test_two_simulated_gpus_train_as_two_cpu_ranks() -> None:
    check(str(LAWS / "ranks.py"))


def test_two_ranks_of_a_host_with_one_gpu_train_on_its_cpu(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc_per_node=2", "-m", "torchx_apps.train"]
    flags = ["--recipe=two_tower", f"--run_dir={tmp_path}", "--data.name=planted"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            *flags,
            "--train.epochs=1",
        ],
        cwd=build.ROOT,
        env=build.environment(gpus=1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ranks: 2 on cpu over gloo" in done.stdout
    warning = "2 processes on this host and 1 GPU(s): they run on the CPU"
    assert done.stderr.count(warning) == 1


def test_the_tests_marked_gpu_pass() -> None:
    files = [
        str(file.relative_to(build.ROOT))
        for file in sorted((build.ROOT / "tests").rglob("test_*.py"))
        if re.search(
            r"mark\.gpu|def test_.*\bdevice\b|^    .*\bdevice: torch\.device",
            file.read_text(),
            re.MULTILINE,
        )
    ]
    left_out = [f"--deselect={test}" for test in NEEDS_A_REAL_GPU]
    last = check(*files, "-m", "gpu or (gpu and slow)", *left_out)
    assert int(re.search(r"(\d+) passed", last)[1]) >= 65, last
