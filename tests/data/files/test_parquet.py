from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.files.parquet import read_parquet
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def write(path: Path, table: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(table), path, **options)
    return path


def test_every_kind_of_column_is_read_across_row_groups_and_files(
    tmp_path: Path,
) -> None:
    table = {
        "id": pa.array([1, 2, 3], pa.int32()),
        "age": [0.5, 1.5, 2.5],
        "ok": [True, False, True],
        "name": ["a", "ä", ""],
        "bag": [[1, 2], [], [3]],
    }
    paths = [
        write(tmp_path / f"{part}.parquet", table, row_group_size=2) for part in "ab"
    ]
    chunk = read_parquet(paths)
    assert chunk.num_rows == 6
    assert chunk["id"].values.tolist() == [1, 2, 3] * 2
    assert chunk["name"].values.tolist() == ["a", "ä", ""] * 2
    assert chunk["ok"].values.tolist() == [True, False, True] * 2
    assert chunk["bag"].values.tolist() == [1, 2, 3] * 2
    assert chunk["bag"].lengths.tolist() == [2, 0, 1] * 2
    assert list(read_parquet(paths[0], ["bag", "id"])) == ["bag", "id"]


def test_a_column_in_one_piece_is_a_view_of_arrows_memory(tmp_path: Path) -> None:
    values = read_parquet(write(tmp_path / "a.parquet", {"id": np.arange(1000)}))[
        "id"
    ].values
    assert not values.flags.owndata
    assert not values.flags.writeable


def test_nulls_are_refused_by_row_group_and_row_or_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": [1, 2, 3, None]}, row_group_size=2)
    with pytest.raises(
        DataError,
        match=r"a\.parquet: row group 1, column 'id', row 1: value is null \(1 nulls.*fill=\{'id': \.\.\.\}",
    ):
        read_parquet(path)
    assert read_parquet(path, fill={"id": 0})["id"].values.tolist() == [1, 2, 3, 0]


def test_a_null_inside_a_list_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"bag": [[1], [2, None]]})
    with pytest.raises(
        DataError, match=r"row group 0, column 'bag', row 1: value is null"
    ):
        read_parquet(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet: no such file; check the path"):
        read_parquet(tmp_path / "none.parquet")


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("user,item\n1,2\n")
    with pytest.raises(
        DataError, match=r"a\.parquet: is not parquet; copy or write it again"
    ):
        read_parquet(path)


def test_a_file_cut_at_its_end_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": np.arange(10_000)})
    path.write_bytes(path.read_bytes()[:5_000])
    with pytest.raises(
        DataError,
        match=r"a\.parquet: starts as parquet, but its footer is missing.*5000 bytes.*cut short",
    ):
        read_parquet(path)


def test_a_file_cut_in_the_middle_names_row_group_and_column(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 60, 40_000)
    path = write(
        tmp_path / "a.parquet",
        {"id": np.arange(40_000), "noise": noise},
        row_group_size=10_000,
        compression="zstd",
    )
    content = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(2).column(1)
    hole = column.data_page_offset + 100
    path.write_bytes(content[:hole] + bytes(20_000) + content[hole + 20_000 :])
    with pytest.raises(
        DataError,
        match=r"a\.parquet: row group 2, column 'noise' cannot be read: the file is damaged or cut",
    ):
        read_parquet(path)


def test_a_flipped_bit_is_found_where_pages_have_checksums(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        {"id": np.arange(10_000)},
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="row group 0, column 'id' cannot be read"):
        read_parquet(path)


def test_a_missing_column_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"user_id": [1], "item": [2]})
    with pytest.raises(
        DataError,
        match=r"column 'userid' is missing, the file has \['user_id', 'item'\]; did you mean 'user_id'\?",
    ):
        read_parquet(path, ["userid"])


@pytest.mark.parametrize(
    ("kind", "found"), [("int", "double"), ("string", "double"), ("ints", "double")]
)
def test_a_wrong_type_is_named(tmp_path: Path, kind: Any, found: str) -> None:
    path = write(tmp_path / "a.parquet", {"user_id": [1.0]})
    with pytest.raises(
        DataError, match=rf"column 'user_id' is {found}, must be {kind}; convert it"
    ):
        read_parquet(path, {"user_id": kind})
    assert read_parquet(path, {"user_id": "float"}).num_rows == 1


def test_an_unreadable_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"when": pa.array([0], pa.timestamp("s"))})
    with pytest.raises(
        DataError, match=r"column 'when' is timestamp.*must be int or float"
    ):
        read_parquet(path)


def test_zero_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": np.arange(0)})
    with pytest.raises(DataError, match=r"a\.parquet: zero rows"):
        read_parquet(path)
    with pytest.raises(DataError, match="no file was given"):
        read_parquet([])


def test_files_with_other_types_are_refused(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.parquet", {"id": [1]}),
        write(tmp_path / "b.parquet", {"id": ["x"]}),
    ]
    with pytest.raises(
        DataError,
        match=r"b\.parquet: column 'id' is string, in .*a\.parquet it is int64",
    ):
        read_parquet(paths)
