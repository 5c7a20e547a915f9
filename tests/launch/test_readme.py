"""The README's programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def programs() -> dict[str, str]:
    """By the file name in its first line."""
    found = re.findall(r"```python\n(# (\S+\.py):.*?)```", README.read_text(), re.DOTALL)
    return {name: program for program, name in found}


@pytest.mark.launch
def test_the_program_in_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text(programs()["my_train.py"])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "my_train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "user_id  1,000,000 x 32  122.07" in done.stdout
    assert re.search(r"^loss 0\.\d{4}$", done.stdout, re.MULTILINE)


@pytest.mark.launch
def test_the_program_that_streams_files_trains(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {f"c{at}": pa.array(random.integers(0, 1000, 5000)) for at in range(3)}
    columns |= {f"d{at}": pa.array(random.random(5000, dtype=np.float32)) for at in range(2)}
    columns["history"] = pa.array([[1, 2], []] * 2500, pa.list_(pa.int64()))
    columns["label"] = pa.array((random.random(5000) < 0.3).astype(np.float32))
    (tmp_path / "clicks").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "clicks" / "part-0.parquet", row_group_size=2000)
    (tmp_path / "my_stream.py").write_text(programs()["my_stream.py"])
    done = subprocess.run([sys.executable, "my_stream.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 1, step 2 of 2: loss 0." in done.stdout
