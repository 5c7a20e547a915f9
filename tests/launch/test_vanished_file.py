"""A data file that vanishes during a run ends the job with its name, on every rank."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.launch.jobs import Job, gone
from torchrec_ext.data.planted import planted_context

pytestmark = [pytest.mark.launch, pytest.mark.slow]
FILES = 8


def write_rows(folder: Path) -> None:
    folder.mkdir()
    train = planted_context().splits["train"]
    table = pa.table(train)
    for number, rows in enumerate(np.array_split(np.arange(len(table)), FILES)):
        path = folder / f"part-{number}.parquet"
        pq.write_table(table.take(rows), path, row_group_size=1000)


def test_a_file_that_vanishes_is_named_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("vanishing_recipe.py"), tmp_path)
    write_rows(tmp_path / "rows")
    file, away = tmp_path / "rows" / "part-5.parquet", tmp_path / "part-5.parquet"
    settings = ("checkpoint.steps=20", "loader.buffer_rows=4000")
    recipe = ("--recipe", "vanishing_recipe.py:job")
    with Job(tmp_path / "run", *recipe, settings=settings) as job:
        job.until(lambda: len(job.steps()) > 1)
        left = job.descendants()
        file.rename(away)
        assert job.end(120) == 1, job.output
        vanished = "rows/part-5.parquet: cannot be read"
        lines = job.output.splitlines()
        last = next(line for line in lines if vanished in line)
        assert last.endswith("go on with the same --run_dir"), last
        assert gone(left, 30)
        saved = max(job.steps())
    away.rename(file)
    with Job(
        tmp_path / "run",
        *recipe,
        settings=(*settings, "train.epochs=4"),
    ) as job:
        assert job.end() == 0, job.output
        assert (
            f"resuming from {tmp_path}/run/checkpoints/step-{saved:010d}" in job.output
        )
