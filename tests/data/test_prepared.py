"""Where the rows of a prepared set come from: the folder that is named, or a temporary one that does not stay."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contracts import leave_group, run_ranks
from torchrec_ext.data import prepared
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.planted import planted_log_set
from torchrec_ext.data.prepare import write_set
from torchrec_ext.data.prepared import (
    FOLDER_VARIABLE,
    Prepared,
)
from torchrec_ext.data.sets import load_set
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import DataError


@pytest.mark.unit
def test_a_folder_that_is_named_is_read_whatever_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("films", "data/films", "default/films"):
        (tmp_path / place).mkdir(parents=True)
        write_set(tmp_path / place, planted_log_set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, "default")
    for root, expected in (("data", "data/films"), (None, "films")):
        data = load_set(DataConfig(name="films", folder=root), "labels")
        assert data.folder == Path(expected)
    monkeypatch.chdir(tmp_path / "data" / "films")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "default"))
    data = load_set(DataConfig(name="films"), "labels")
    assert data.folder == tmp_path / "default" / "films"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no such folder, empty/films; put"):
        load_set(DataConfig(name="films", folder="empty"), "labels")
    # A folder without rows is no set, and one as it stands is found by its path, too.
    (tmp_path / "other" / "films").mkdir(parents=True)
    plays = {"user": [1, 1, 1], "item": [1, 2, 3], "time": [1, 2, 3]}
    pq.write_table(pa.table(plays), tmp_path / "other" / "inter.parquet")
    monkeypatch.chdir(tmp_path / "other")
    assert load_set(DataConfig(name="films"), "labels").folder == data.folder
    assert load_set(DataConfig(name=".")).splits["train"].num_rows == 1


KEPT: list[Prepared] = []
SMALL = DataConfig(users=50, items=60)


def generated(runtime: Runtime) -> str:
    """Rows that the process still has when it ends, as in a cycle."""
    leave_group(runtime)
    KEPT.append(load_set(SMALL))
    assert KEPT[0].folder.is_dir()
    return str(KEPT[0].folder)


def test_generated_rows_go_with_their_data_and_with_their_process() -> None:
    (folder,) = run_ranks(generated, 1)
    assert not Path(folder).exists()
    data = load_set(SMALL)
    folder = data.folder
    assert folder.is_dir()
    del data
    gc.collect()
    assert not folder.exists()


@pytest.mark.unit
def test_few_rows_are_read_once_and_shuffled_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path, planted_log_set())
    read: list[int] = []
    source = prepared.ParquetSource.read

    def counted(*arguments: Any) -> Any:
        read.append(1)
        return source(*arguments)

    monkeypatch.setattr(prepared.ParquetSource, "read", counted)
    data = load_set(DataConfig(name=str(tmp_path)), "labels")
    rows = data.stored("train")
    assert isinstance(rows, Chunk)
    assert rows.num_rows == data.splits["train"].num_rows
    assert data.popularity.sum() == rows["click"].values.sum()
    assert len(data.item_ids) == data.num_items
    assert 0 < data.share("train") < 1
    assert len(read) == 1, (
        "the training rows, for the loader; what else is asked was counted once"
    )
    monkeypatch.setattr(prepared, "HELD_VALUES", 100)
    large = load_set(DataConfig(name=str(tmp_path)), "labels")
    assert large.stored("train") is large.splits["train"]
    assert large.share("train") == data.share("train")
