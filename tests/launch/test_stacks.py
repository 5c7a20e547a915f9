"""Every other triple passes the tests of what depends on it most, in the environment that `make` keeps for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_ext import stack

CLONE = Path(__file__).resolve().parents[2]
# The triple itself, TorchRec's classes whose private parts ours use, checkpoints across
# plans, a user's own loop.
TESTS = (
    "tests/test_stack.py",
    "tests/test_doctor.py",
    "tests/distributed",
    "tests/train/checkpoint/test_plans.py",
    "tests/train/test_guards.py",
    "tests/launch/test_docs.py",
)
GIB = 2**30


def others() -> list[str]:
    """The names of the triples that this environment does not have."""
    here = stack.installed_triple(stack.installed(), "cpu")
    return [name for name, triple in stack.TRIPLES.items() if triple != here]


def reason_against(name: str) -> str:
    """Why its environment cannot be made here; empty if it exists or can be made."""
    if (CLONE / f".venv-{name}" / ".ready").exists():
        return ""
    if shutil.disk_usage(CLONE).free < 12 * GIB:
        return "its environment can take 8 GB, and the disk has less than 12 GiB free"
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    torch = stack.TRIPLES[name].torch
    return "" if torch in listed.stdout else f"pip finds no torch {torch}"


@pytest.mark.slow(minutes=12)
@pytest.mark.launch
@pytest.mark.parametrize("name", others())
def test_another_triple_passes_the_same_tests(name: str) -> None:
    if reason := reason_against(name):
        pytest.skip(reason)
    # Of a `make` that runs this test, neither its variables nor its environment.
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV")
    }
    command = [
        "make",
        "test",
        f"STACK={name}",
        "WORKERS=1",
        f"PYTEST_ARGS=-q {' '.join(TESTS)}",
    ]
    done = subprocess.run(
        command, cwd=CLONE, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
