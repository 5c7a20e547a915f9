from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.datasets.catalog import DatasetUnavailable
from torchrec_ext.data.datasets.labelled import (
    LabelledConfig,
    load_labelled,
    planted_context,
)
from torchrec_ext.schema import DataError


def folder_of(root: Path, **changed: Any) -> LabelledConfig:
    folder = root / "clicks"
    folder.mkdir()
    columns = {
        "label": [1, 0],
        "user": [0, 4],
        "item": [2, 0],
        "hour": [23, 1],
        "price": [1.0, 3.0],
    }
    for part in ("train", "validation", "test"):
        pq.write_table(
            pa.table({**columns, **(changed if part == "test" else {})}),
            folder / f"{part}.parquet",
        )
    return LabelledConfig(name="clicks", folder=str(root))


@pytest.mark.unit
def test_whole_numbers_are_ids_and_fractions_dense(tmp_path: Path) -> None:
    data = load_labelled(folder_of(tmp_path, hour=[30, 1]))
    assert data.vocab == {"user_id": 3, "item_id": 3, "hour": 3}, (
        "a row for each id of the training rows, and the unknown one"
    )
    assert data.test["hour"].values.tolist() == [0, 1]
    assert data.ids("user_id", data.trained("user_id")).tolist() == [0, 4]
    assert (data.context, data.dense) == (("hour",), ("price",))
    assert data.train["label"].values.tolist() == [1, 0]
    assert data.test["price"].values.tolist() == [-1, 1]


@pytest.mark.unit
def test_without_context_every_row_has_the_same(tmp_path: Path) -> None:
    config = folder_of(tmp_path)
    data = load_labelled(
        LabelledConfig(name="clicks", folder=config.folder, context=False)
    )
    for part in (data.train, data.validation, data.test):
        assert part["hour"].values.tolist() == part["price"].values.tolist() == [0, 0]
        assert part["user_id"].values.tolist() == [1, 2]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"label": [1, 2]},
            r"test\.parquet: column 'label', row 1: 2.0; must be 0 or 1",
        ),
        (
            {"label": [1, None]},
            r"test\.parquet: column 'label', row 1: None; must be 0 or 1",
        ),
        (
            {"label": ["1", "0"]},
            r"test\.parquet: column 'label', row 0: 1; must be 0 or 1",
        ),
        (
            {"hour": [[1], [2]]},
            r"test\.parquet: column 'hour' holds lists; must be one value per row",
        ),
        (
            {"price": [1.0, float("nan")]},
            r"test\.parquet: column 'price', row 1: nan; must be a finite number",
        ),
        (
            {"price": [float("-inf"), 1.0]},
            r"test\.parquet: column 'price', row 0: -inf",
        ),
        (
            {"hour": np.array([1, 2**63], np.uint64)},
            r"test\.parquet, column 'hour', row 1: 9223372036854775808 is beyond int64",
        ),
        (
            {"hour": ["a", "b"]},
            r"test\.parquet: column 'hour' is string, in train\.parquet int64; write one type",
        ),
        (
            {"user": ["a", "b"]},
            r"test\.parquet: column 'user_id' is string, in train\.parquet int64; write one type",
        ),
    ],
)
def test_wrong_values_are_told(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled(folder_of(tmp_path, **changed))


def described(root: Path, **about: Any) -> LabelledConfig:
    """The rows of :func:`folder_of` with columns of their own, and items.parquet beside them."""
    config = folder_of(root)
    rows = {
        "label": [1, 0, 1],
        "user": [0, 4, 0],
        "item": [2, 0, 2],
        "hour": [23, 1, 2],
        "item.price": [1.0, 3.0, 2.0],
    }
    for part in ("train", "validation", "test"):
        pq.write_table(pa.table({**rows, **about}), root / "clicks" / f"{part}.parquet")
    items = pa.table(
        {
            "item_id": [2, 7, 0, 9],
            "colour": ["red", "blue", "blue", "blue"],
            "size": [1.5, 2.5, 3.5, 3.5],
        }
    )
    pq.write_table(items, root / "clicks" / "items.parquet")
    return config


@pytest.mark.unit
def test_what_describes_the_item_is_the_items(tmp_path: Path) -> None:
    data = load_labelled(described(tmp_path, user_age=[20.5, 30.5, 21.5]))
    assert (data.user_features, data.item_features) == (
        ("user_age",),
        ("item_price", "colour", "size"),
    )
    assert data.towers == {
        "user": (("user_id",), ("user_age",)),
        "item": (("item_id", "colour"), ("item_price", "size")),
        "context": (("hour",), ()),
    }
    assert data.words.vocabularies["colour"].values.to_pylist() == ["blue", "red"]
    assert data.train["colour"].values.tolist() == [2, 1, 2]
    items = data.described("item_id", np.array([0, 1, 2]))
    assert items["colour"].values.tolist() == [0, 1, 2], "row 0 is the unknown item"
    np.testing.assert_allclose(
        data.words.raw(items)["item_price"].to_numpy()[1:],
        [3, 2],
        err_msg="the last row counts",
    )
    np.testing.assert_allclose(
        data.words.raw(items)["size"].to_numpy()[1:], [3.5, 1.5], rtol=1e-6
    )


@pytest.mark.unit
def test_columns_may_be_given_to_user_and_item_by_name(tmp_path: Path) -> None:
    config = dataclasses.replace(
        folder_of(tmp_path), item_features=("price",), user_features=("hour",)
    )
    data = load_labelled(config)
    assert data.towers == {
        "user": (("user_id", "hour"), ()),
        "item": (("item_id",), ("price",)),
    }
    with pytest.raises(
        DataError,
        match=r"data\.item_features=prize: the rows of 'clicks' have no column prize that",
    ):
        load_labelled(dataclasses.replace(config, item_features=("prize",)))
    with pytest.raises(
        ValueError,
        match=r"data\.user_features and data\.item_features name price: a column describes",
    ):
        dataclasses.replace(config, user_features=("price",))


@pytest.mark.unit
def test_rows_that_say_as_the_file_of_items_does_are_the_same_without_the_column(
    tmp_path: Path,
) -> None:
    data = load_labelled(described(tmp_path, size=[1.5, 3.5, 1.5]))
    assert data.item_features == ("item_price", "colour", "size")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"size": [1.5, 3.5, 1.0]},
            r"train\.parquet: column 'size', row 2: 1\.0 for item 2, and items\.parquet says 1\.5; leave the",
        ),
        (
            {"item": [2, 0, 8], "size": [1.5, 3.5, 1.0]},
            r"column 'size', row 2: 1\.0 for item 8, and items\.parquet does not have that item; leave the column out",
        ),
        (
            {"item_price": [1.0, 1.0, 1.0]},
            r"two columns are 'item_price', of which one is written 'item_price'; rename",
        ),
    ],
)
def test_rows_that_contradict_the_file_of_items_are_refused(
    tmp_path: Path, about: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled(described(tmp_path, **about))


def described_by_text(
    root: Path, items: dict[str, Any], **about: Any
) -> LabelledConfig:
    """Rows that name items by text, with items.parquet beside them."""
    config = folder_of(root)
    rows = {"label": [1, 0, 1], "item": ["b", "a", "b"], "hour": [23, 1, 2], **about}
    for part in ("train", "validation", "test"):
        pq.write_table(pa.table(rows), root / "clicks" / f"{part}.parquet")
    pq.write_table(pa.table(items), root / "clicks" / "items.parquet")
    return config


DAYS = [datetime.date(2024, 1, 1), None, datetime.date(2024, 2, 3)]
ITEMS = {"item": ["z", "b", "a"], "colour": ["red", None, "red"], "released": DAYS}


@pytest.mark.unit
def test_dates_and_missing_values_that_describe_the_item_are_the_items(
    tmp_path: Path,
) -> None:
    listed = pa.array(["2024-03-01", None, "2024-03-02"])
    data = load_labelled(described_by_text(tmp_path, ITEMS, **{"item.listed": listed}))
    listed_made, released = (
        tuple(f"{name}_{made}" for made in ("weekday", "month"))
        for name in ("item_listed", "released")
    )
    assert data.towers == {
        "item": (("item_id", *listed_made, "colour", *released), ()),
        "context": (("hour",), ()),
    }, "rows without a user have no tower of the user"
    assert data.train["colour"].values.tolist() == [0, 1, 0]
    assert data.train["released_month"].values.tolist() == [0, 2, 0]
    words = data.words.raw(data.described("item_id", np.array([1, 2])))
    assert words["item_id"].to_pylist() == ["a", "b"]
    assert words["colour"].to_pylist() == ["red", None]
    assert [day and day.date() for day in words["released"].to_pylist()] == [
        DAYS[2],
        None,
    ]
    assert [day and day.date() for day in words["item_listed"].to_pylist()] == [
        None,
        datetime.date(2024, 3, 2),
    ]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("items", "about", "message"),
    [
        (
            ITEMS,
            {"colour": ["red", "red", None]},
            r"'colour', row 0: red for item b, and items\.parquet says None; leave",
        ),
        (
            ITEMS,
            {"released": [None, DAYS[0], None]},
            r"'released', row 1: 2024-01-01 .* for item a, and .* says 2024-02",
        ),
        (
            ITEMS,
            {"colour": [1, None, None]},
            r"column 'colour', row 0: 1 for item b, and items\.parquet says None",
        ),
        (
            {**ITEMS, "item": [3, 2, 1]},
            {},
            r"items\.parquet: column 'item_id' is int64, in train\.parquet string; wri",
        ),
        (
            {**ITEMS, "item": ["z", None, "a"]},
            {},
            r"items\.parquet: column 'item', row 1: value is null \(1 such rows\)",
        ),
        (
            {**ITEMS, "item": ["z", "a", "a"]},
            {},
            r"items\.parquet: column 'item', rows 1 and 2: both describe id a",
        ),
        (
            {"colour": ["red"]},
            {},
            r"items\.parquet: no column item_id or item; the file has colour",
        ),
        (
            {**ITEMS, "a.b": [1, 1, 1], "a_b": [1, 1, 1]},
            {},
            r"items\.parquet: two columns are 'a_b', of which one is",
        ),
        (
            ITEMS,
            {"released_month": [1, 2, 3]},
            r"items\.parquet: 'released_month' is there, and is a column made of",
        ),
    ],
)
def test_files_of_items_that_do_not_fit_the_rows_are_named(
    tmp_path: Path, items: dict[str, Any], about: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled(described_by_text(tmp_path, items, **about))


@pytest.mark.unit
def test_a_missing_value_contradicts_no_file_of_items(tmp_path: Path) -> None:
    data = load_labelled(
        described_by_text(tmp_path, ITEMS, colour=pa.array([None, "red", None]))
    )
    assert data.train["colour"].values.tolist() == [0, 1, 0]


@pytest.mark.unit
def test_a_file_of_users_needs_rows_with_a_user(tmp_path: Path) -> None:
    config = described_by_text(tmp_path, ITEMS)
    pq.write_table(
        pa.table({"user": [1], "age": [2.5]}), tmp_path / "clicks" / "users.parquet"
    )
    with pytest.raises(
        DataError,
        match=r"users\.parquet: describes users, and train\.parquet has no column 'user'",
    ):
        load_labelled(config)


@pytest.mark.unit
def test_a_missing_part_says_what_to_put_where(tmp_path: Path) -> None:
    config = folder_of(tmp_path)
    (tmp_path / "clicks" / "test.parquet").unlink()
    with pytest.raises(
        DatasetUnavailable,
        match=r"no rows for test in .*clicks; put files as in docs/recipes\.md there",
    ):
        load_labelled(config)


@pytest.mark.unit
def test_the_best_figures_of_generated_rows_are_those_of_their_odds() -> None:
    data = planted_context(rows=20_000)
    labels = data.test["label"].values
    base = -np.log(np.where(labels > 0, labels.mean(), 1 - labels.mean())).mean()
    assert 0.8 < data.best["auc"] < 0.95
    assert data.best["log_loss"] < 0.75 * base
    assert (
        sum(part.num_rows for part in (data.train, data.validation, data.test))
        == 20_000
    )


def test_frappe_has_the_figures_of_its_readme() -> None:
    try:
        data = load_labelled(LabelledConfig())
    except DatasetUnavailable:
        pytest.skip("needs TORCHREC_EXT_DATA/frappe")
    assert [part.num_rows for part in (data.train, data.validation, data.test)] == [
        202_812,
        57_722,
        28_860,
    ]
    assert sum(data.vocab.values()) - len(data.vocab) == 5_382
    assert len(data.context) == 8
