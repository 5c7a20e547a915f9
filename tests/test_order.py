"""The order in which workers take files: those first whose tests of this run take longest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SLOW_ALONE = """
import pytest

@pytest.mark.slow(minutes=9)
def test_slow() -> None: ...

@pytest.mark.unit
def test_quick() -> None: ...
"""
TESTS = "def test_one() -> None: ...\n\ndef test_two() -> None: ...\n"


def test_minutes_of_tests_that_are_left_out_order_no_file(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  unit\n  gpu\n")
    (tmp_path / "test_a.py").write_text(SLOW_ALONE)
    (tmp_path / "test_b.py").write_text(TESTS)
    orders = {}
    for chosen in ("not slow", ""):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", chosen]
        command += ["-p", "no:xdist", "-p", "no:cacheprovider"]
        told = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTEST_XDIST_WORKER": "gw0"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        tests = [line for line in told.splitlines() if "::" in line]
        orders[chosen] = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    assert orders == {
        "not slow": ["test_b.py", "test_a.py"],
        "": ["test_a.py", "test_b.py"],
    }
