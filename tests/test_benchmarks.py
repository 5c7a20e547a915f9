"""Each benchmark runs at small sizes, and prints rows of different names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_ext.stack import gpu_nodes

ROOT = Path(__file__).parents[1]
NOT_PROGRAMS = {"all", "harness", "plain_ncf", "plain_rows", "quality", "sets"}
PROGRAMS = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - NOT_PROGRAMS
)
EXTRAS = {"serving": "uvicorn", "stream": "uvicorn", "chain": "duckdb"}


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_runs_at_small_sizes(program: str) -> None:
    pytest.importorskip(EXTRAS.get(program, "json"), reason="needs an extra")
    command = [sys.executable, f"benchmarks/{program}.py", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows
    assert len({row["name"] for row in rows}) == len(rows)


@pytest.mark.launch
def test_make_gpu_without_a_gpu_installs_nothing(tmp_path: Path) -> None:
    if gpu_nodes():
        pytest.skip("this machine has a GPU")
    (tmp_path / "torchrec_ext").mkdir()
    for name in ("Makefile", "pyproject.toml", "torchrec_ext/stack.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "torchrec_ext" / "__init__.py").write_text("")
    # Of a `make test` around this test, neither its flags nor its variables.
    clean = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "gpu"], cwd=tmp_path, env=clean, capture_output=True, check=False
    )
    assert done.returncode == 2, "make's own, of a recipe that ended with 1"
    assert not (tmp_path / ".venv").exists()
