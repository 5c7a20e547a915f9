"""Sets of sequences by name, in any of the spellings, and what is said where there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.datasets.catalog import DatasetUnavailable
from torchrec_ext.data.datasets.sequences import (
    SequenceConfig,
    load_sequences,
    planted_sequences,
)
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
ROWS = {
    "user": [3, 1, 3, 3, 1],
    "item": [40, 20, 10, 20, 10],
    "position": [1, 0, 0, 2, 1],
}
SEQUENCES = [[20, 10], [10, 40, 20]]


def write(
    folder: Path, name: str, columns: Mapping[str, Sequence[object]]
) -> SequenceConfig:
    (folder / "mine").mkdir(exist_ok=True)
    pq.write_table(pa.table(dict(columns)), folder / "mine" / name)
    return SequenceConfig(name="mine", folder=str(folder))


def named(config: SequenceConfig) -> list[list[int]]:
    data = load_sequences(config)
    assert data.item_ids is not None
    return [
        [int(data.item_ids[item]) for item in data.sequences.row(user)]
        for user in range(len(data.sequences))
    ]


def test_both_spellings_of_a_file_give_the_same_sequences(tmp_path: Path) -> None:
    assert named(write(tmp_path, "my_sequences.parquet", ROWS)) == SEQUENCES
    (tmp_path / "mine" / "my_sequences.parquet").unlink()
    user, item, order = ROWS.values()
    times = {
        "user_id": user,
        "item_id": item,
        "timestamp": [880_000_000 + place for place in order],
    }
    config = write(tmp_path, "inter.parquet", times)
    assert named(config) == SEQUENCES
    found = load_sequences(config).times
    assert found is not None
    assert found.row(0).tolist() == [880_000_000, 880_000_001]


def test_a_set_that_is_not_there_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHREC_EXT_DATA", raising=False)
    with pytest.raises(
        DatasetUnavailable,
        match=r"set 'mine': TORCHREC_EXT_DATA and data\.folder are not set; set one to the",
    ):
        load_sequences(SequenceConfig(name="mine"))
    with pytest.raises(
        DatasetUnavailable,
        match=f"set 'mine': {tmp_path}/mine is not there; it needs one file",
    ):
        load_sequences(SequenceConfig(name="mine", folder=str(tmp_path)))
    config = write(tmp_path, "a_sequences.parquet", ROWS)
    write(tmp_path, "b_sequences.parquet", ROWS)
    with pytest.raises(
        DatasetUnavailable,
        match=r"has a_sequences\.parquet, b_sequences\.parquet; it needs one file",
    ):
        load_sequences(config)


def test_ids_may_be_text(tmp_path: Path) -> None:
    text = {
        "user": ["c", "a", "c", "c", "a"],
        "item": [f"B{item}" for item in ROWS["item"]],
        "position": ROWS["position"],
    }
    data = load_sequences(write(tmp_path, "my_sequences.parquet", text))
    assert data.item_ids is not None
    assert [
        [data.item_ids[item] for item in data.sequences.row(user)] for user in (0, 1)
    ] == [
        ["B20", "B10"],
        ["B10", "B40", "B20"],
    ]


def test_lists_nulls_and_what_is_no_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="column 'item' holds lists, must hold one value per row"
    ):
        load_sequences(
            write(
                tmp_path,
                "my_sequences.parquet",
                {**ROWS, "item": [[item] for item in ROWS["item"]]},
            )
        )
    with pytest.raises(DataError, match="null"):
        load_sequences(
            write(
                tmp_path, "my_sequences.parquet", {**ROWS, "item": [1, None, 3, 4, 5]}
            )
        )
    with pytest.raises(
        DataError,
        match=r"my_sequences\.parquet: column 'position', row 1: nan; must be a finite number",
    ):
        load_sequences(
            write(
                tmp_path,
                "my_sequences.parquet",
                {**ROWS, "position": [1.0, float("nan"), 3.0, 4.0, 5.0]},
            )
        )


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"no column position or timestamp or time; the file has user, item",
    ):
        load_sequences(
            write(tmp_path, "my_sequences.parquet", {"user": [1], "item": [2]})
        )


def test_the_planted_best_is_that_of_the_rule_ranked_as_models_are() -> None:
    """Successors found from the data, the other items in a random order, what was taken before left out; by hand."""
    data = planted_sequences(users=2000, items=30)
    asked, rng = data.held_out("test"), np.random.default_rng(0)
    pairs = np.concatenate(
        [
            np.stack([row[:-1], row[1:]], axis=1)
            for row in map(data.sequences.row, range(2000))
        ]
    )
    successor = {
        item: np.bincount(pairs[pairs[:, 0] == item, 1]).argmax()
        for item in range(1, 31)
    }
    places = []
    for row, target in enumerate(asked.targets):
        before = asked.before.row(row)
        others = [
            item for item in rng.permutation(np.arange(1, 31)) if item not in before
        ]
        others.sort(key=lambda item, guess=successor[before[-1]]: item != guess)
        places.append(others.index(target))
    found = np.array(places)
    assert float((found < 1).mean()) == pytest.approx(data.best["HR@1"], abs=0.01)
    assert float((found < 10).mean()) == pytest.approx(data.best["HR@10"], abs=0.02)
    assert float(
        np.where(found < 10, 1 / np.log2(found + 2), 0).mean()
    ) == pytest.approx(data.best["NDCG@10"], abs=0.02)


def test_the_planted_answer_is_reached_by_its_rule_alone() -> None:
    data = planted_sequences(users=3000, items=50)
    asked = data.held_out("test")
    last = np.array([asked.before.row(row)[-1] for row in range(len(asked.targets))])
    following = {
        item: np.bincount(asked.targets[last == item]).argmax()
        for item in np.unique(last)
    }
    hits = float((np.array([following[item] for item in last]) == asked.targets).mean())
    assert hits == pytest.approx(data.best["HR@1"], abs=0.03)
    assert data.best["HR@1"] == pytest.approx(0.7, abs=0.05)
    assert np.bincount(asked.targets)[1:].max() < 100, "popularity knows nothing"
    assert all(
        len(set(row.tolist())) == len(row)
        for row in map(data.sequences.row, range(3000))
    ), "no item twice"
    with pytest.raises(
        ValueError, match=r"users=0, items=400: needs at least 1 user and 30 items"
    ):
        planted_sequences(users=0)
    with pytest.raises(ValueError, match=r"data\.users=0: must be 1 or more"):
        SequenceConfig(name="planted", users=0)
    with pytest.raises(ValueError, match=r"data\.users=5: mine has its own"):
        SequenceConfig(name="mine", users=5)
    with pytest.raises(ValueError, match=r"data\.max_length=0: must be 1 or more"):
        SequenceConfig(max_length=0)


@pytest.mark.skipif(
    "TORCHREC_EXT_DATA" not in os.environ, reason="TORCHREC_EXT_DATA is not set"
)
def test_the_beauty_sequences_are_those_that_were_published() -> None:
    data = load_sequences(SequenceConfig())
    assert (len(data.sequences), data.num_items, len(data.sequences.values)) == (
        22363,
        12101,
        198502,
    )
    assert len(data.held_out("test").targets) == 22363, "every user has at least 5"
