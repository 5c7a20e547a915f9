from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.data.stream_sets import (
    arrow,
    loader_of,
    parquet,
    row_numbers,
    schema_of,
    table_of,
)
from torchrec_ext.data.files import find
from torchrec_ext.data.files import sources as file_source
from torchrec_ext.data.files.sources import ArrowSource, FileSource, ParquetSource
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
MAKERS: list[Callable[[Path, Sequence[int]], FileSource]] = [parquet, arrow]
NAMES = ["user_id", "history", "item_id", "row", "weight", "label"]


def write(path: Path, table: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table if isinstance(table, pa.Table) else pa.table(table), path, **options
    )
    return path


def rows(source: FileSource, name: str = "row") -> list[Any]:
    return [
        value
        for group in source.groups
        for value in source.read(group, [name])[name].values.tolist()
    ]


@pytest.mark.parametrize("make", MAKERS)
def test_groups_are_known_from_metadata_and_read_one_by_one(
    tmp_path: Path, make: Any
) -> None:
    source = make(tmp_path, [4, 0, 7])
    assert [group.rows for group in source.groups] == [4, 7]
    assert source.num_rows == 11
    chunk = source.read(source.groups[1], NAMES)
    assert list(chunk) == NAMES
    assert chunk["row"].values.tolist() == list(range(4, 11))
    assert chunk["history"].lengths.tolist() == [number % 4 for number in range(4, 11)]
    assert not chunk["row"].values.flags.owndata


@pytest.mark.parametrize(
    ("start", "size"),
    [(0, 16), (5, 16), (16, 16), (31, 7), (99, 100), (0, 1_000), (40, 1)],
)
@pytest.mark.parametrize("make", MAKERS)
def test_the_parts_of_a_group_are_its_rows_from_any_row_on(
    tmp_path: Path, make: Any, start: int, size: int
) -> None:
    source = make(tmp_path, [7, 100])
    group = source.groups[1]
    whole = source.read(group, NAMES)
    parts = list(source.parts(group, NAMES, start, size))
    ends = np.cumsum([start, *(part.num_rows for part in parts)])[1:]
    assert ends[-1] == 100
    assert all(end % size == 0 for end in ends[:-1])
    for name in NAMES:
        expected = whole[name].slice(start, 100)
        joined = [
            row.tolist()
            for part in parts
            for row in map(part[name].row, range(part.num_rows))
        ]
        assert joined == [row.tolist() for row in map(expected.row, range(100 - start))]


def test_parts_hold_a_fraction_of_the_row_group(tmp_path: Path) -> None:
    rows = 1_000_000
    columns = {f"d{at}": np.random.default_rng(at).random(rows) for at in range(4)}
    path: Any = write(tmp_path / "a.parquet", columns, row_group_size=rows)
    source = ParquetSource(path)
    before, most, total = pa.total_allocated_bytes(), 0, 0.0
    for part in source.parts(source.groups[0], list(columns), 300_000, 10_000):
        most = max(most, pa.total_allocated_bytes() - before)
        total += part["d3"].values.sum()
    assert total == pytest.approx(columns["d3"][300_000:].sum())
    assert most < 8 * 4 * rows / 2


@pytest.mark.parametrize("make", MAKERS)
def test_a_row_group_of_which_a_part_cannot_be_read_by_itself_is_told(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_source, "HEAVY", 1000)
    source = make(tmp_path, [7, 400])
    if make is arrow:  # compressed, it is not mapped
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(
            tmp_path / "rows.arrow", table_of(0).schema, options=options
        ) as writer:
            writer.write_table(table_of(400))
        source = ArrowSource(tmp_path)
    remedy = (
        r"pq\.write_table\(table, path, row_group_size=8\)"
        if make is parquet
        else r"table, max_chunksize=8\), or local files"
    )
    with pytest.warns(
        UserWarning,
        match=rf"row group \d: 400 rows, of which 8 at a time are read, but .* MB .* held; .*{remedy}",
    ):
        next(source.parts(source.groups[-1], NAMES, 0, 8))


def test_files_folders_and_patterns_name_the_same_rows(tmp_path: Path) -> None:
    parquet(tmp_path, [3, 4, 5, 6], files=2)
    write(tmp_path / "_temporary" / "part.parquet", table_of(9))
    (tmp_path / "_SUCCESS").write_text("")
    expected = [float(number) for number in range(18)]
    for paths in (
        tmp_path,
        str(tmp_path / "*.parquet"),
        sorted(tmp_path.glob("*.parquet")),
    ):
        assert rows(ParquetSource(paths)) == expected


def test_hive_partitions_are_columns(tmp_path: Path) -> None:
    for day in (1, 2):
        for country in ("de", "ch%20"):
            write(
                tmp_path / f"day={day}" / f"country={country}" / "a.parquet",
                table_of(2, day),
            )
    source = ParquetSource(tmp_path)
    assert rows(source, "day") == [1, 1, 1, 1, 2, 2, 2, 2]
    assert rows(source, "country")[:4] == ["ch ", "ch ", "de", "de"]
    assert source.require({"day": ["int"]}) == {"day": "int"}
    with pytest.raises(DataError, match="column 'country' is string, must be int"):
        source.require({"country": ["int"]})
    write(tmp_path / "day=3" / "a.parquet", table_of(2))
    with pytest.raises(
        DataError,
        match=r"a\.parquet: has the hive partitions day, .* has country, day; give",
    ):
        ParquetSource(tmp_path)


def test_folders_above_the_named_one_are_no_partitions(tmp_path: Path) -> None:
    log = tmp_path / "label=1" / "log"
    write(log / "day=3" / "a.parquet", pa.table({"label": [0, 1, 0, 0]}))
    for path in (log, f"{log}/*/*.parquet", f"file://{log}"):
        source = ParquetSource(path)
        assert (rows(source, "label"), rows(source, "day")) == (
            [0, 1, 0, 0],
            [3, 3, 3, 3],
        )
    assert rows(ParquetSource(log / "day=3"), "label") == [0, 1, 0, 0]
    for path in (tmp_path, f"{tmp_path}/*/log"):
        with pytest.raises(
            DataError,
            match=r"a\.parquet: column 'label' is in the file and .* label=1; rename the folder",
        ):
            ParquetSource(path)


def test_rows_behind_links_are_read(tmp_path: Path) -> None:
    write(tmp_path / "log" / "a.parquet", table_of(2))
    write(tmp_path / "elsewhere" / "b" / "b.parquet", table_of(2, 2))
    write(tmp_path / "c", table_of(2, 4))
    (tmp_path / "log" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "log" / "linked.parquet").symlink_to(tmp_path / "c")
    expected = [0.0, 1.0, 4.0, 5.0, 2.0, 3.0]
    assert sorted(rows(ParquetSource(tmp_path / "log"))) == sorted(expected)
    assert sorted(rows(ParquetSource(f"{tmp_path}/log/**"))) == sorted(expected)


@pytest.mark.parametrize("pattern", ["", "/*", "/**"])
def test_a_link_to_rows_that_are_read_anyway_is_named(
    tmp_path: Path, pattern: str
) -> None:
    write(tmp_path / "log" / "day=1" / "a.parquet", table_of(2))
    (tmp_path / "log" / "latest").symlink_to("day=1")
    with pytest.raises(DataError, match=r"the same file as .*rows would count twice"):
        ParquetSource(f"{tmp_path}/log{pattern}")
    (tmp_path / "log" / "latest").rename(tmp_path / "log" / "_latest")
    assert rows(ParquetSource(f"{tmp_path}/log{pattern}")) == [0.0, 1.0]


@pytest.mark.parametrize("make", MAKERS)
def test_addresses_are_read_by_arrows_file_systems(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make(tmp_path / "day=1", [5, 6])
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

    class Stores:
        """Arrow's stores, one of which is here: its address is s3://."""

        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            return store, uri.removeprefix("s3://")

    monkeypatch.setattr(find.fs, "FileSystem", Stores)
    for paths in ("s3://.", "s3://day=*/*"):
        source = type(local)(paths)
        assert rows(source) == rows(local)
        assert rows(source, "day") == [1] * 11
        assert source.groups[0].name.startswith("s3://./day=1")
    assert sorted(
        row for batch in loader_of(source) for row in row_numbers(batch)
    ) == list(range(11))


def test_an_unreadable_address_is_named() -> None:
    with pytest.raises(
        DataError,
        match=r"nosuch://bucket/a: cannot be read \(.*nosuch.*check path, rights and network",
    ):
        ParquetSource("nosuch://bucket/a")


def test_files_of_other_endings_are_counted_and_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet.gz", "day=1/c.csv", "_SUCCESS", "_old/d.csv"):
        write(tmp_path / name, table_of(3))
    with pytest.warns(UserWarning, match=r"files left out: 2, such as b\.parquet\.gz"):
        source = ParquetSource(tmp_path)
    assert source.num_rows == 3


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet: no such file; check the path"):
        ParquetSource(tmp_path / "none.parquet")
    with pytest.raises(
        DataError, match=r"the folder has no file that ends in \.parquet or"
    ):
        ParquetSource(tmp_path)
    with pytest.raises(DataError, match="no file was given"):
        ParquetSource([])
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet: is empty \(0 bytes\)"):
        ParquetSource(tmp_path)
    write(tmp_path / "a.parquet", table_of(0))
    with pytest.raises(DataError, match=r"a\.parquet: zero rows, as in all 1 files"):
        ParquetSource(tmp_path)


@pytest.mark.parametrize("make", MAKERS)
def test_a_cut_file_is_named(tmp_path: Path, make: Any) -> None:
    path = Path(make(tmp_path, [50]).files[0].path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DataError,
        match=rf"{path.name}: starts as .*, but its footer is missing or damaged .*cut short",
    ):
        type(make(tmp_path / "other", [1]))(path)
    path.write_text("user,item\n")
    with pytest.raises(
        DataError,
        match=rf"{path.name}: is not (parquet|Arrow IPC); copy or write it again",
    ):
        type(make(tmp_path / "other", [1]))(path)


@pytest.mark.parametrize(
    "sizes", [[16] * 12, [192]], ids=["row groups", "parts of one"]
)
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_a_file_that_vanishes_is_cut_or_grows_in_mid_epoch_is_named_at_once(
    tmp_path: Path, make: Any, ahead: int, sizes: list[int]
) -> None:
    for fault, message in (
        (Path.unlink, "vanished while it was in use"),
        (cut, "changed while it was in use, .* bytes became"),
        (grow, "changed while it was in use, .* bytes became"),
    ):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        source = make(tmp_path / "set", sizes)
        if make is arrow:
            source = ArrowSource(tmp_path / "set", memory_map=fault is Path.unlink)
        iterator = iter(
            loader_of(source, prefetch=ahead, read_ahead=ahead, lanes=1, buffer_rows=16)
        )
        next(iterator)
        path = Path(source.files[-1].path)
        fault(path)
        with pytest.raises(DataError, match=rf"{path.name}: the file {message}"):
            list(iterator)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def test_a_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        table_of(3_000),
        row_group_size=1_000,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = bytearray(path.read_bytes())
    content[
        pq.ParquetFile(path).metadata.row_group(1).column(3).data_page_offset + 400
    ] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DataError,
        match=r"a\.parquet: row group 1, column '\w+' cannot be read: the file is damaged or cut",
    ):
        list(
            loader_of(ParquetSource(path), schema=schema_of(), read_ahead=1, prefetch=1)
        )


@pytest.mark.parametrize(
    ("name", "dtype"), [("bag", pa.list_(pa.int64())), ("text", pa.string())]
)
def test_a_flipped_offset_of_an_arrow_file_is_found(
    tmp_path: Path, name: str, dtype: pa.DataType
) -> None:
    values = [[7] * 3, [7], [7, 7]] if name == "bag" else ["aaa", "b", "cc"]
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([(name, dtype)])) as writer:
        writer.write_table(pa.table({name: pa.array(values, dtype)}))
    content = bytearray((tmp_path / "a.arrow").read_bytes())
    place = content.index(np.array([0, 3, 4, 6], np.int32).tobytes())
    for at, bit in (
        (4, 1 << 6),
        (7, 1 << 7),
        (12, 1 << 6),
    ):
        # beyond the values, negative, as many values too many
        damaged = content.copy()
        damaged[place + at] ^= bit
        (tmp_path / "b.arrow").write_bytes(damaged)
        source = ArrowSource(tmp_path / "b.arrow")
        with pytest.raises(
            DataError,
            match=rf"b\.arrow: row group 0, column '{name}' cannot be read: the file is damaged or cut",
        ):
            source.read(source.groups[0], [name])


def test_missing_mistyped_and_differing_columns_are_refused_before_the_first_row_is_read(
    tmp_path: Path,
) -> None:
    table = table_of(4)
    write(tmp_path / "a.parquet", table)
    write(
        tmp_path / "b.parquet",
        table.rename_columns(["user_id", "history", "item", "row", "weight", "label"]),
    )
    with pytest.raises(
        DataError, match=r"b\.parquet: column 'item_id' is missing, .*a\.parquet has it"
    ):
        loader_of(ParquetSource(tmp_path))
    with pytest.raises(
        DataError,
        match=r"b\.parquet: column 'item_id' is missing, the file has .*; did you mean 'item'\?",
    ):
        loader_of(ParquetSource(tmp_path / "b.parquet"))
    write(
        tmp_path / "b.parquet",
        table.set_column(2, "item_id", table["item_id"].cast(pa.int64())),
    )
    with pytest.raises(
        DataError,
        match=r"b\.parquet: column 'item_id' is int64, in .*a\.parquet it is int32; give files with",
    ):
        loader_of(ParquetSource(tmp_path))
    write(
        tmp_path / "b.parquet",
        table.set_column(2, "item_id", table["item_id"].cast(pa.float64())),
    )
    with pytest.raises(
        DataError,
        match=r"b\.parquet: column 'item_id' is double, must be int or ints; convert it",
    ):
        loader_of(ParquetSource(tmp_path / "b.parquet"))
    with pytest.raises(
        DataError,
        match=r"a\.parquet: column 'history' is list.*, must be float or int or bool",
    ):
        loader_of(ParquetSource(tmp_path / "a.parquet"), weight="history")


def test_nulls_are_refused_by_row_or_filled(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": [1, None, 3],
            "history": pa.array([[1, None], None, [2]], pa.list_(pa.int64())),
            "day": pa.array([1.0, None, None]),
        }
    )
    path = write(tmp_path / "k=1" / "a.parquet", table)
    (tmp_path / "k=__HIVE_DEFAULT_PARTITION__").mkdir()
    shutil.copy(path, tmp_path / "k=__HIVE_DEFAULT_PARTITION__" / "a.parquet")
    source = ParquetSource(tmp_path)
    for name, row, count in (("user_id", 1, 1), ("history", 1, 1), ("day", 1, 2)):
        with pytest.raises(
            DataError,
            match=rf"a\.parquet: row group 0, column '{name}', row {row}: value is null \({count} nulls",
        ):
            source.read(source.groups[0], [name])
    filled = ParquetSource(
        tmp_path, fill={"user_id": 7, "history": 9, "day": 0.5, "k": 4}
    )
    chunk = filled.read(filled.groups[1], ["user_id", "history", "day"])
    assert chunk["user_id"].values.tolist() == [1, 7, 3]
    assert (chunk["history"].values.tolist(), chunk["history"].lengths.tolist()) == (
        [1, 9, 2],
        [2, 0, 1],
    )
    assert chunk["day"].values.tolist() == [1.0, 0.5, 0.5]
    assert sorted(rows(filled, "k")) == [1, 1, 1, 4, 4, 4]
    only = ParquetSource(
        write(
            tmp_path / "b.parquet",
            {"history": pa.array([[1], [2, None]], pa.list_(pa.int64()))},
        )
    )
    with pytest.raises(DataError, match=r"column 'history', row 1: value is null"):
        only.read(only.groups[0], ["history"])


def test_a_list_of_any_layout_is_read_and_one_that_is_too_long_is_named(
    tmp_path: Path,
) -> None:
    lists = [[1, 2], [3, 4], [5, 6]]
    for dtype in (
        pa.list_(pa.int32(), 2),
        pa.large_list(pa.int64()),
        pa.list_(pa.int16()),
    ):
        with pa.ipc.new_file(
            tmp_path / "a.arrow", pa.schema([("bag", dtype)])
        ) as writer:
            writer.write_table(pa.table({"bag": pa.array(lists, dtype)}).slice(1))
        source = ArrowSource(tmp_path / "a.arrow")
        chunk = source.read(source.groups[0], ["bag"])
        assert [chunk["bag"].row(at).tolist() for at in range(2)] == lists[1:]
    path = parquet(tmp_path / "p", [8, 8]).files[0].path
    with pytest.raises(
        DataError,
        match=r"row group 0, column 'history', row 3: a list of 3 values \(2 of the 8 rows .* max_length=2\)",
    ):
        list(loader_of(ParquetSource(path, max_length={"history": 2})))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_bad_value_is_named_by_file_row_group_and_row_or_mapped(
    tmp_path: Path, ahead: int
) -> None:
    source = parquet(tmp_path, [30, 30])
    schema = schema_of(users=15)
    with pytest.raises(
        DataError,
        match=r"part-0\.parquet: row group 1, row 15, column 'user_id': id 15 is outside table 'user_id' "
        r"\(0 to 14; 5 such ids\); fix the data, set num_embeddings=",
    ):
        list(
            loader_of(
                source, schema=schema, prefetch=ahead, read_ahead=ahead, shuffle=False
            )
        )
    mapped = loader_of(
        source, schema=schema_of(users=15, out_of_range="oov"), shuffle=False
    )
    users = [
        user for batch in mapped for user in batch.sparse["user_id"].values().tolist()
    ]
    assert users == [row // 3 if row < 45 else 0 for row in range(60)]
    hashed = pa.table(
        {
            "user_id": [1, 3_000_000_000],
            "history": [[1], [1]],
            "item_id": [1, 2],
            "row": [1.0, 2.0],
        }
    )
    path = write(tmp_path / "hashed.parquet", hashed)
    with pytest.raises(
        DataError,
        match=r"hashed\.parquet: row group 0, row 1, column 'user_id': id 3000000000 is outside .*; "
        r"fix the data, map ids to rows by rec\.data\.preprocess",
    ):
        list(loader_of(ParquetSource(path), schema=schema))
    unsigned = hashed.set_column(0, "user_id", pa.array([3, 2**63 + 5], pa.uint64()))
    path = write(tmp_path / "unsigned.parquet", unsigned)
    with pytest.raises(
        DataError,
        match=r"group 0, column 'user_id', row 1: 9223372036854775813 is beyond int64 .*; write ids as int64",
    ):
        list(loader_of(ParquetSource(path), schema=schema))
    mapped = loader_of(
        ParquetSource(path),
        schema=schema_of(users=15, out_of_range="oov"),
        shuffle=False,
    )
    assert next(iter(mapped)).sparse["user_id"].values().tolist() == [3, 0]
    table = table_of(5).set_column(
        3, "row", pa.array([0.0, 1.0, np.nan, 3.0, np.inf], pa.float32())
    )
    path = write(tmp_path / "b.parquet", table)
    with pytest.raises(
        DataError,
        match=r"b\.parquet: row group 0, column 'row', row 2: value nan is not finite",
    ):
        list(loader_of(ParquetSource(path)))


@pytest.mark.unit
def test_a_column_that_a_later_file_alone_has_is_named(tmp_path: Path) -> None:
    first, second = {"user": [1, 2]}, {"user": [3], "brand": [7]}
    for number, columns in enumerate((first, second)):
        pq.write_table(pa.table(columns), tmp_path / f"part-{number}.parquet")
    with pytest.warns(
        UserWarning,
        match=r"part-1\.parquet: column 'brand' is in 1 of 2 files, so it cannot be read \(1 such columns\); write it",
    ):
        source = ParquetSource(tmp_path)
    with pytest.raises(
        DataError,
        match=r"part-0\.parquet: column 'brand' is missing, .*part-1\.parquet",
    ):
        source.require({"brand": ("int",)})
