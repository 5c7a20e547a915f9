from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.datasets.catalog import DatasetUnavailable
from torchrec_ext.data.datasets.labelled import LabelledConfig, load_labelled, planted_context
from torchrec_ext.schema import DataError


def folder_of(root: Path, **changed: Any) -> LabelledConfig:
    folder = root / "clicks"
    folder.mkdir()
    columns = {"label": [1, 0], "user": [0, 4], "item": [2, 0], "hour": [23, 1], "price": [1.0, 3.0]}
    for part in ("train", "validation", "test"):
        pq.write_table(pa.table({**columns, **(changed if part == "test" else {})}), folder / f"{part}.parquet")
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
    data = load_labelled(LabelledConfig(name="clicks", folder=config.folder, context=False))
    for part in (data.train, data.validation, data.test):
        assert part["hour"].values.tolist() == part["price"].values.tolist() == [0, 0]
        assert part["user_id"].values.tolist() == [1, 2]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": [1, 2]}, r"test\.parquet: column 'label', row 1: 2.0; must be 0 or 1"),
        ({"hour": [-1, 0]}, r"column 'hour', row 0: id -1; must be 0 or more"),
        ({"price": [1.0, float("nan")]}, r"test\.parquet: column 'price', row 1: nan; must be a finite number"),
        ({"price": [float("-inf"), 1.0]}, r"test\.parquet: column 'price', row 0: -inf"),
        (
            {"hour": np.array([1, 2**63], np.uint64)},
            r"test\.parquet, column 'hour', row 1: 9223372036854775808 is beyond int64",
        ),
        ({"hour": ["a", "b"]}, r"column 'hour' is Column\(2 rows of object\); must be one number per row"),
    ],
)
def test_wrong_values_are_told(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled(folder_of(tmp_path, **changed))


@pytest.mark.unit
def test_a_missing_part_says_what_to_put_where(tmp_path: Path) -> None:
    config = folder_of(tmp_path)
    (tmp_path / "clicks" / "test.parquet").unlink()
    with pytest.raises(
        DatasetUnavailable, match=r"no rows for test in .*clicks; put train\.parquet, validation\.parquet and test"
    ):
        load_labelled(config)


@pytest.mark.unit
def test_the_best_figures_of_generated_rows_are_those_of_their_odds() -> None:
    data = planted_context(rows=20_000)
    labels = data.test["label"].values
    base = -np.log(np.where(labels > 0, labels.mean(), 1 - labels.mean())).mean()
    assert 0.8 < data.best["auc"] < 0.95
    assert data.best["log_loss"] < 0.75 * base
    assert sum(part.num_rows for part in (data.train, data.validation, data.test)) == 20_000


def test_frappe_has_the_figures_of_its_readme() -> None:
    try:
        data = load_labelled(LabelledConfig())
    except DatasetUnavailable:
        pytest.skip("needs TORCHREC_EXT_DATA/frappe")
    assert [part.num_rows for part in (data.train, data.validation, data.test)] == [202_812, 57_722, 28_860]
    assert sum(data.vocab.values()) - len(data.vocab) == 5_382
    assert len(data.context) == 8
