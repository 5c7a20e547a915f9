from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.data.stream_sets import (
    loader_of,
    parquet,
    row_numbers,
    schema_of,
    table_of,
)
from tests.files import read_parquet
from torchrec_ext.data.files import sources
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
NAMES = ["user_id", "history", "item_id", "row", "weight", "label"]


def write(path: Path, table: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table if isinstance(table, pa.Table) else pa.table(table), path, **options
    )
    return path


def rows(source: ParquetSource, name: str = "row") -> list[Any]:
    return [
        value
        for group in source.groups
        for value in source.read(group, [name])[name].values.tolist()
    ]


@pytest.mark.parametrize(
    ("start", "size"),
    [(0, 16), (5, 16), (16, 16), (31, 7), (99, 100), (0, 1_000), (40, 1)],
)
def test_the_parts_of_a_group_are_its_rows_from_any_row_on(
    tmp_path: Path, start: int, size: int
) -> None:
    source = parquet(tmp_path, [7, 100])
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
    (log / "day=3").rename(log / f"day={2**64}")
    assert ParquetSource(log).type_of("day") == pa.string()


def test_addresses_are_read_by_arrows_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = parquet(tmp_path / "day=1", [5, 6])
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

    class Stores:
        """Arrow's stores, one of which is here: its address is s3://."""

        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            return store, uri.removeprefix("s3://")

    monkeypatch.setattr(sources.fs, "FileSystem", Stores)
    source = ParquetSource("s3://.")
    assert rows(source) == rows(local)
    assert rows(source, "day") == [1] * 11
    assert source.groups[0].name.startswith("s3://./day=1")
    assert sorted(
        row for batch in loader_of(source) for row in row_numbers(batch)
    ) == list(range(11))


def test_files_of_other_endings_are_counted_and_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet.gz", "day=1/c.csv", "_SUCCESS", "_old/d.csv"):
        write(tmp_path / name, table_of(3))
    with pytest.warns(UserWarning, match=r"files left out: 2, such as b\.parquet\.gz"):
        source = ParquetSource(tmp_path)
    assert source.num_rows == 3


BAD: list[tuple[str, Any, str]] = [
    ("none", None, "no such file"),
    ("folder", Path.mkdir, "has no file that ends in"),
    ("empty", lambda path: path.write_bytes(b""), "cannot be read as"),
    ("no rows", lambda path: write(path, table_of(0)), "zero rows"),
    ("cut", lambda path: cut(write(path, table_of(50)), 20), "cannot be read as"),
    ("text", lambda path: path.write_text("user,item\n"), "cannot be read as"),
    ("page", lambda path: damaged(path), "row group 1 cannot be read"),
]


@pytest.mark.parametrize(
    ("fault", "make", "told"), BAD, ids=[fault for fault, *_ in BAD]
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, fault: str, make: Any, told: str
) -> None:
    path = tmp_path / "a.parquet"
    if make is not None:
        make(path)
    with pytest.raises(DataError, match=rf"a\.parquet.*{told}"):
        read_parquet(path)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def damaged(path: Path) -> None:
    """Writes three row groups with checksums, and flips a bit in a page of the second."""
    options = {"compression": "none", "use_dictionary": False}
    write(
        path, table_of(3_000), row_group_size=1_000, write_page_checksum=True, **options
    )
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(3)
    content[column.data_page_offset + 400] ^= 1
    path.write_bytes(content)


def test_no_file_and_no_address_are_named() -> None:
    for path, told in (
        ([], "no file was given"),
        ("nosuch*.parquet", "no such file"),
        ("nosuch://bucket/a", "cannot be read"),
    ):
        with pytest.raises(DataError, match=told):
            ParquetSource(path)


@pytest.mark.parametrize(
    ("ahead", "change", "told"),
    [
        (0, "is gone", " cannot be read"),
        (2, "is gone", " cannot be read"),
        (0, "has other rows", "was written to after it was opened; .* begin anew"),
    ],
)
def test_a_file_that_changes_in_mid_epoch_is_named_at_once(
    tmp_path: Path, ahead: int, change: str, told: str
) -> None:
    source = parquet(tmp_path, [16] * 12)
    options = {"read_ahead": ahead, "lanes": 1, "buffer_rows": 16}
    loader = loader_of(source, **options)
    loader.depth = ahead
    iterator = iter(loader)
    next(iterator)
    path = Path(source.files[-1].path)
    if change == "is gone":
        path.unlink()
    else:
        write(path, pq.read_table(path), row_group_size=16)
    with pytest.raises(DataError, match=rf"part-0\.parquet.*{told}"):
        list(iterator)


@pytest.mark.parametrize(
    ("column", "values", "where"),
    [
        (
            "item",
            [1, 2, 3, 4],
            r"b\.parquet: column 'item_id' is missing, the file has",
        ),
        (
            "item_id",
            pa.array([1, 2, 3, 4], pa.float64()),
            r"b\.parquet: column 'item_id' is double, in .*a\.parquet",
        ),
    ],
)
def test_files_of_other_columns_are_refused_before_the_first_row_is_read(
    tmp_path: Path, column: str, values: Any, where: str
) -> None:
    write(tmp_path / "a.parquet", table_of(4))
    other = (
        table_of(4).drop_columns(["item_id"]).append_column(column, pa.array(values))
    )
    write(tmp_path / "b.parquet", other)
    with pytest.raises(DataError, match=where):
        loader_of(ParquetSource(tmp_path))


def test_whole_numbers_of_any_width_are_one_column(tmp_path: Path) -> None:
    for name, dtype in (("a", pa.int16()), ("b", pa.int64())):
        ids = pa.array([1, 2, 3, 4], dtype)
        table = table_of(4).drop_columns(["item_id"]).append_column("item_id", ids)
        write(tmp_path / f"{name}.parquet", table)
    batches = list(loader_of(ParquetSource(tmp_path), shuffle=False))
    ids = [batch.sparse["item_id"].values().tolist() for batch in batches]
    assert np.concatenate(ids).tolist() == [1, 2, 3, 4] * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("userid", "int"), ("user_id", "string"), ("history", "float")),
        *(("when", "int"), ("hash", "int")),
    ],
)
def test_a_column_of_another_kind_is_named(
    tmp_path: Path, name: str, kind: Any
) -> None:
    when = pa.array([0, 1], pa.timestamp("s"))
    table = table_of(2).append_column("when", when)
    table = table.append_column("hash", pa.array([0, 1], pa.uint64()))
    path = write(tmp_path / "a.parquet", table)
    with pytest.raises(DataError, match=rf"a\.parquet: column '{name}' is"):
        ParquetSource(path).require({name: [kind]})


def test_nulls_are_refused_by_row(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": [1, None, 3],
            "history": pa.array([[1, None], None, [2]], pa.list_(pa.int64())),
            "bag": pa.array([[1], [2, None], []], pa.list_(pa.int64())),
            "day": pa.array([1.0, None, None]),
        }
    )
    write(tmp_path / "k=__HIVE_DEFAULT_PARTITION__" / "a.parquet", table)
    source = ParquetSource(tmp_path)
    with pytest.raises(DataError, match="column 'k', row 0: value is null"):
        source.read(source.groups[0], ["k"])
    for name in table.column_names:
        with pytest.raises(
            DataError,
            match=rf"a\.parquet: row group 0, column '{name}', row 1: value is null",
        ):
            source.read(source.groups[0], [name])


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (
            "user_id",
            pa.array([0, 1, 15, 16, 2]),
            r"row group 1, row 0, column 'user_id': id 15 is outside table 'user_id' "
            r"\(0 to 14; 2 such ids\); set num_embeddings=",
        ),
        (
            "user_id",
            pa.array([0, 3_000_000_000, 2, 3, 4]),
            "row group 0, row 1, column 'user_id': id 3000000000 is outside .*; map ids"
            r" to rows by rec\.data\.preprocess",
        ),
        (
            "row",
            pa.array([0.0, 1.0, np.nan, 3.0, np.inf], pa.float32()),
            "row group 1, column 'row', row 0: value nan is not finite",
        ),
    ],
)
def test_a_bad_value_is_named_by_file_row_group_and_row_or_mapped(
    tmp_path: Path, column: str, values: pa.Array, message: str, ahead: int
) -> None:
    table = table_of(5)
    table = table.set_column(table.column_names.index(column), column, values)
    path = write(tmp_path / "a.parquet", table, row_group_size=2)
    options = {"read_ahead": ahead, "shuffle": False}
    source = ParquetSource(path)
    with pytest.raises(DataError, match=rf"a\.parquet: {message}"):
        list(loader_of(source, schema=schema_of(users=15), **options))
    if column == "user_id":
        schema = schema_of(users=15, out_of_range="oov")
        (batch,) = loader_of(source, schema=schema, **options)
        users = [user if user < 15 else 0 for user in values.to_pylist()]
        assert batch.sparse["user_id"].values().tolist() == users
