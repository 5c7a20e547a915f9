"""Each benchmark runs at small sizes, and prints rows of different names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


ROWS = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from harness import command_line, row

def fails(options):
    raise MemoryError("CUDA out of memory")
    yield

def hangs(options):
    os.fork() or time.sleep(60)
    time.sleep(60)
    yield

def dies(options):
    os.kill(os.getpid(), 9)
    yield

def works(options):
    yield row("works", 1, "s", baseline=2)

rows = [fails, hangs, dies, works]
command_line("", {{each.__name__: each for each in rows}})
"""


@pytest.mark.launch
def test_rows_that_fail_leave_the_others_and_come_last_in_the_next_call(
    tmp_path: Path,
) -> None:
    script, file = tmp_path / "rows.py", tmp_path / "rows.jsonl"
    script.write_text(ROWS.format(benchmarks=str(ROOT / "benchmarks")))
    command = [sys.executable, script, "--out", file, "--limit", "3"]

    def called(*flags: str) -> str:
        done = subprocess.run(
            [*command, *flags], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stderr

    page = called()
    assert "| works | 2.0 s | 1.0 | 2.0x |  |" in page
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = {line["of"]: line.get("failed", "") for line in lines}
    assert told == {
        "fails": "MemoryError: CUDA out of memory",
        "hangs": "not done after 3 s",
        "dies": "exit code -9",
        "works": "",
    }
    for line in lines:
        assert line["versions"]["torch"]
        assert line["commit"]
    again = called("--only", "works", "fails", "--turns", "1")
    assert "| works | 2.0 s | 1.0 | 2.0x |  |" in again, "measured once"
    assert "| fails | failed | | | MemoryError: CUDA out of memory |" in again
    assert len(file.read_text().splitlines()) == 5
    late = called("--only", "dies", "--budget", "0")
    assert "dies: left for the next call, the budget is over" in late
    assert len(file.read_text().splitlines()) == 5
