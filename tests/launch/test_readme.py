"""The README's program runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.launch
def test_the_program_in_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "my_train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "my_train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "user_id  1,000,000 x 32  122.07" in done.stdout
    assert re.search(r"^loss 0\.\d{4}$", done.stdout, re.MULTILINE)
