"""The rings under the sanitizers of addresses, undefined behaviour and threads: ranks are threads of a C++ program.

A thread sanitizer cannot watch Python's own threads, nor memory that processes share, so the program is C++ alone.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from torchrec_ext.distributed.shared_memory.library import SOURCES

COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.slow(minutes=1)
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_sanitizer_finds_a_fault_in_the_rings(
    sanitizers: str, tmp_path: Path
) -> None:
    program = tmp_path / "ring_check"
    source = Path(__file__).with_name("ring_check.cpp")
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        f"-I{SOURCES[0].parent}",
        f"-fsanitize={sanitizers}",
    ]
    command = [
        str(COMPILER),
        *flags,
        "-fno-sanitize-recover=all",
        str(source),
        "-o",
        str(program),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no -fsanitize={sanitizers}")
    assert built.returncode == 0, built.stderr
    for ranks in (2, 3):
        done = subprocess.run(
            [program, str(ranks), "15"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode, done.stdout) == (0, "right\n"), (
            done.stdout + done.stderr[:3000]
        )
