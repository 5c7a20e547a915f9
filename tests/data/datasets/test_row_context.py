"""Context beside the pairs: fitted on training rows, the same for a row's negatives, and refused by name if wrong."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.datasets.catalog import DataConfig, load_config
from torchrec_ext.data.datasets.features import RowContext
from torchrec_ext.data.datasets.folder import from_folder
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def folder_of(tmp_path: Path, **changed: Any) -> Path:
    """Two users with four items each, the last of them at 5 in the morning, on a television, for 99."""
    columns: dict[str, Any] = {
        "user_id": [0, 0, 0, 0, 1, 1, 1, 1],
        "item_id": [0, 1, 2, 3, 3, 2, 1, 0],
        "timestamp": [1, 2, 3, 4, 1, 2, 3, 4],
        "hour": [20, 8, 8, 5, 20, 20, 8, 5],
        "device": ["pc", "phone", "pc", "tv", "pc", "pc", "pc", "tv"],
        "price": [1.0, 3.0, 2.0, 99.0, 3.0, 1.0, 2.0, 99.0],
    }
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns | changed), folder / "inter.parquet")
    return folder


def loaded(tmp_path: Path, *names: str, **changed: Any) -> InteractionData:
    return from_folder(
        folder_of(tmp_path, **changed), name="mine", history_length=2, context=names
    )


def test_ids_and_scales_are_those_of_training_rows(tmp_path: Path) -> None:
    data = loaded(tmp_path, "hour", "device", "price")
    assert {name: data.vocab[name] for name in ("hour", "device")} == {
        "hour": 3,
        "device": 3,
    }
    assert data.dense == ("price",)
    assert data.train["hour"].values.tolist() == [2, 1, 2, 2]  # 8 is 1 and 20 is 2
    assert data.train["device"].values.tolist() == [1, 2, 1, 1]
    assert data.train["price"].values.tolist() == [-1, 1, 1, -1]
    # no training row has them
    assert (
        data.test["hour"].values.tolist()
        == data.test["device"].values.tolist()
        == [0, 0]
    )
    assert data.test["price"].values.tolist() == [97, 97]


def test_a_request_says_what_the_file_said(tmp_path: Path) -> None:
    data = loaded(tmp_path, "hour", "device", "price")
    said = data.context.raw(data.train)
    assert said["hour"].to_pylist() == [20, 8, 20, 20]
    assert said["device"].to_pylist() == ["pc", "phone", "pc", "pc"]
    assert said["price"].to_pylist() == [1, 3, 3, 1]


def test_train_and_test_files_have_it_too(tmp_path: Path) -> None:
    for part, hours in (("train", [9, 7, 9]), ("test", [7, 1, 9])):
        table = pa.table(
            {
                "user": [0, 1, 2],
                "item": [0, 1, 2] if part == "train" else [1, 2, 0],
                "hour": hours,
            }
        )
        pq.write_table(table, tmp_path / f"{part}.parquet")
    data = from_folder(tmp_path, name="mine", history_length=0, context=("hour",))
    by_user = dict(
        zip(
            data.test["user_id"].values.tolist(),
            data.test["hour"].values.tolist(),
            strict=True,
        )
    )
    assert by_user == {1: 1, 2: 0, 3: 2}


def test_without_it_a_set_is_what_it_was(tmp_path: Path) -> None:
    data = loaded(tmp_path)
    assert data.context.names == ()
    assert "hour" not in data.train


def test_one_value_only_is_no_division_by_zero() -> None:
    context = RowContext.fit({"price": pa.array([2.0, 2.0])})
    assert context.transform({"price": pa.array([2.0, 3.0])})[
        "price"
    ].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("names", "changed", "message"),
    [
        (["hours"], {}, r"inter\.parquet: .*'hours'.*hour"),
        (
            ["item_id"],
            {},
            r"data\.context names \['item_id'\]: .* have a meaning of their own",
        ),
        (
            ["price"],
            {"price": [1.0, float("nan")] + [0.0] * 6},
            r"column 'price', row 1: nan; must be a finite number",
        ),
        (
            ["hour"],
            {"hour": [[1]] * 8},
            r"column 'hour' holds lists; context is one value per row",
        ),
        (
            ["hour"],
            {"hour": [None] * 8},
            r"column 'hour': all 4 values are missing; leave the column out",
        ),
        (
            ["day"],
            {"day": ["2024-02-29", "03/01/2024"] + ["2024-01-01"] * 6},
            r"inter\.parquet: column 'day', row 1: '03/01/2024' must be a date in ISO 8601, such as 2024-02-29, .*; wr",
        ),
        (
            ["day"],
            {"day": ["29.02.2024"] * 8},
            r"inter\.parquet: column 'day', row 0: '29\.02\.2024' must be a date in ISO 8601",
        ),
        (
            ["day"],
            {"day": ["2024-02-30"] * 8},
            r"inter\.parquet: column 'day', row 0: '2024-02-30' must be a date",
        ),
        (
            ["hour", "hour_weekday"],
            {"hour": ["2024-02-29"] * 8, "hour_weekday": [1] * 8},
            r"column 'hour_weekday' is there, and is made of the dates in 'hour' too",
        ),
    ],
)
def test_what_is_wrong_is_told_with_file_and_column(
    tmp_path: Path, names: list[str], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, *names, **changed)


def test_another_type_in_another_file_is_told(tmp_path: Path) -> None:
    for part, hours in (("train", [9, 7, 9]), ("test", ["7", "1", "9"])):
        pq.write_table(
            pa.table({"user": [0, 1, 2], "item": [0, 1, 2], "hour": hours}),
            tmp_path / f"{part}.parquet",
        )
    with pytest.raises(
        DataError,
        match=r"test\.parquet: column 'hour' is string, in train\.parquet int64; write one type",
    ):
        from_folder(tmp_path, name="mine", history_length=0, context=("hour",))


def test_a_column_that_describes_users_too_is_told(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user_id": [0, 1, 2, 3], "device": ["tv", "pc", "tv", "pc"]}),
        folder_of(tmp_path) / "users.parquet",
    )
    with pytest.raises(
        DataError,
        match=r"data\.context names \['device'\], which users\.parquet or items\.parquet has too",
    ):
        from_folder(
            tmp_path / "mine", name="mine", history_length=2, context=("device",)
        )


def test_published_and_generated_sets_have_none() -> None:
    with pytest.raises(
        ValueError,
        match=r"data\.context=hour: of a folder of your own; the rows of planted have none",
    ):
        DataConfig(name="planted", context=("hour",))


def test_the_key_of_the_command_line_reaches_the_files(tmp_path: Path) -> None:
    folder_of(tmp_path)
    data = load_config(
        DataConfig(
            name="mine",
            folder=str(tmp_path),
            context=("device", "hour"),
            history_length=0,
        )
    )
    assert data.context.names == ("device", "hour")
