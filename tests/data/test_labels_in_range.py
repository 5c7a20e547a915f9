"""Labels and weights that no loss can take are named where they are read: in files, in memory, and for a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.stream_sets import schema_of, table_of
from tests.files import read_parquet
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def sources(folder: Path, name: str, value: float) -> list[tuple[Any, str | None]]:
    """Twelve rows with one bad value in the sixth: as a file and in memory, also for a device."""
    table = table_of(12)
    numbers = pa.array([1.0] * 5 + [value] + [1.0] * 6, pa.float32())
    table = table.set_column(table.column_names.index(name), name, numbers)
    other = table.column_names.index("label")
    table = table.set_column(other, "label", table["label"].cast(pa.float32()))
    pq.write_table(table, folder / "rows.parquet")
    rows = read_parquet(folder)
    file = ParquetSource(folder)
    return [(file, None), (file, "cpu"), (rows, "cpu"), (rows, None)]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "label",
            5.0,
            r"column 'label'.*value 5 in row 5|column 'label', row 5: value 5 must be from 0 to 1; for other labels",
        ),
        (
            "weight",
            -2.0,
            r"column 'weight'.*value -2 in row 5|column 'weight', row 5: value -2 must be from 0 to inf",
        ),
    ],
)
@pytest.mark.parametrize("task", [False, True])
def test_a_value_out_of_range_is_named(
    tmp_path: Path, name: str, value: float, text: str, task: bool
) -> None:
    """Also where the column holds the labels of a further task."""
    schema = schema_of()
    config = {"label": "label", "weight": "weight"}
    if task and name == "label":
        schema = dataclasses.replace(schema, tasks=("label",))
        config = {"weight": "weight"}
    options = LoaderConfig(
        batch_size=12, negatives=0, read_ahead=0, shuffle=False, **config
    )  # type: ignore[arg-type]
    for rows, device in sources(tmp_path, name, value):
        on = dataclasses.replace(options, device=device)
        with pytest.raises(DataError, match=text) as caught:
            list(ChunkLoader(rows, schema, config=on))
        assert isinstance(rows, ParquetSource) == ("rows.parquet" in str(caught.value))
