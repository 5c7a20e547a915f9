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

from benchmarks.readme_output import block, shown

README = Path(__file__).resolve().parents[2] / "README.md"


def programs() -> dict[str, str]:
    """Returns the README's programs by the file name in their first line."""
    programs = re.findall(r"```python\n(# (\S+\.py):.*?)```", README.read_text(), re.DOTALL)
    return {name: program for program, name in programs}


@pytest.mark.launch
def test_the_program_in_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text(programs()["my_train.py"])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "my_train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "user_id  1,000,000 x 32  122.07" in done.stdout
    assert re.search(r"^loss 0\.\d{4}$", done.stdout, re.MULTILINE)


@pytest.mark.launch
def test_the_program_that_streams_files_trains(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {f"c{number}": pa.array(random.integers(0, 1000, 5000)) for number in range(3)}
    columns |= {f"d{number}": pa.array(random.random(5000, dtype=np.float32)) for number in range(2)}
    columns["history"] = pa.array([[1, 2], []] * 2500, pa.list_(pa.int64()))
    columns["label"] = pa.array((random.random(5000) < 0.3).astype(np.float32))
    (tmp_path / "clicks").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "clicks" / "part-0.parquet", row_group_size=2000)
    (tmp_path / "my_stream.py").write_text(programs()["my_stream.py"])
    done = subprocess.run(
        [sys.executable, "my_stream.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 1, step 2 of 2: loss 0." in done.stdout


RUN = """data: ml-100k, 98,114 training rows
licence: MovieLens 100K (c) GroupLens, University of Minnesota: research use only, \
no redistribution without permission, no more
epoch 1, step 1 of 9: loss 0.4
epoch 1, step 2 of 9: loss 0.4
epoch 1, step 3 of 9: loss 0.4
epoch 2, step 4 of 9: loss 0.4
epoch 2, step 5 of 9: loss 0.4
epoch 3, step 9 of 9: loss 0.4
epoch 3, step 9 of 9: auc 0.8

user 7 liked before: One Film; Another Film
3 recommendations (the held-out item was: Film, A (again)):
  1. One Film  (2.24)
  2. Film (1995)  (-1.98)   <- the held-out item
 10. Another Film  (1.20)
"""


@pytest.mark.unit
def test_the_sample_output_is_what_the_script_makes_of_one_run() -> None:
    made = shown(RUN)
    assert made == shown(made)
    assert "Film" not in made
    assert [line for line in made.splitlines() if line.startswith(("epoch", "."))][4:] == [
        "epoch 2, step 5 of 9: loss 0.4",
        "...",
        "epoch 3, step 9 of 9: auc 0.8",
    ]
    assert made.endswith("was: ...):\n  1. ...  (2.24)\n  2. ...  (-1.98)\n  ...\n")
    sample = block(README.read_text())
    assert sample == shown(sample)
    patterns = [
        r"data: ml-100k, ",
        r"ranks: 2 on cpu",
        r"item_id  +1,683 x 32 ",
        r"epoch 1, step ",
        r"\.\.\.$",
        r"epoch 10, step .*: auc ",
    ]
    patterns += [
        r"hr@10 +\S+ +\S+ +\S+x$",
        r"trained in ",
        r"  1\. \.\.\.  \(",
        r"run folder: (\S+) ",
        r"bundle: (\S+)/bundle ",
    ]
    matches = [re.search(f"^{line}", sample, re.MULTILINE) for line in patterns]
    assert all(matches), [line for line, match in zip(patterns, matches, strict=True) if not match]
    assert matches[-1][1] == matches[-2][1], "of one run"
