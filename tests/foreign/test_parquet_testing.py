"""The damaged files of apache/parquet-testing: refused by name, or read as DuckDB reads them; never a crash or a hang.

They are not in this repository: clone github.com/apache/parquet-testing, and name that folder in
TORCHREC_EXT_PARQUET_TESTING.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")
pytestmark = [pytest.mark.slow, pytest.mark.launch]
ROOT = Path(os.environ.get("TORCHREC_EXT_PARQUET_TESTING", ""))
LIMIT_S = 120  # of a process that imports torch on a busy machine; no file takes a second of it
# Files that are named damaged and are sound: what was wrong is the reader that stumbled
# over them.
SOUND = {
    "ARROW-GH-43605.parquet": "a dictionary of one value, whose indices take 0 bits each"
}


def files(*patterns: str) -> list[Any]:
    """The files below ROOT, or one case that says what is missing."""
    if "TORCHREC_EXT_PARQUET_TESTING" not in os.environ:
        skip = pytest.mark.skip(
            reason="needs a clone of apache/parquet-testing in $TORCHREC_EXT_PARQUET_TESTING"
        )
        return [pytest.param(None, marks=skip, id="apache/parquet-testing")]
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert paths, (
        f"{ROOT} has none of {patterns}; is it a clone of apache/parquet-testing?"
    )
    return [pytest.param(path, id=path.name) for path in paths]


def probed(path: Path) -> list[dict[str, Any]]:
    """What became of each column, by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.foreign.parquet_probe", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_refusals(path: Path, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["how"] != "raised", result
        assert result["how"] != "refused" or str(path) in result["told"], (
            f"the file is not named: {result}"
        )


@pytest.mark.parametrize("path", files("bad_data/*.parquet", "data/*corrupt*.parquet"))
def test_a_damaged_file_is_refused_by_name_or_read_right(path: Path) -> None:
    results = probed(path)
    check_refusals(path, results)
    assert any(result["how"] == "refused" for result in results) or path.name in SOUND
    for result in results:
        # DuckDB has nothing to compare with (None) where it refuses a file for another
        # of its columns.
        assert result.get("right") is not False, (
            f"read, and not as DuckDB reads it: {result}"
        )
