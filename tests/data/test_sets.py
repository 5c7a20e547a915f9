"""A folder as it stands becomes a prepared folder: pairs, labelled rows and sessions, read by one reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.data import features
from torchrec_ext.data.columns import Chunk, concatenate_rows
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.sets import (
    Form,
    load_set,
    set_of_sessions,
)
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def write(folder: Path, **tables: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def load(folder: Path, form: Form, **settings: Any) -> Prepared:
    config = DataConfig(name=folder.name, folder=str(folder.parent), **settings)
    return load_set(config, form)


def rows_of(data: Prepared, split: str) -> Chunk:
    names = [*data.features, *data.dense]
    return concatenate_rows(list(data.chunks(split, names)), names)


def raw(data: Prepared, name: str) -> dict[str, list[Any]]:
    return pq.read_table(data.folder / "raw" / f"{name}.parquet").to_pydict()  # type: ignore[no-any-return]


LOG = {
    "user": ["a", "a", "a", "b", "b", "b", "b", "a"],
    "item": [10, 20, 30, 20, 10, 30, 40, 20],
    "timestamp": [1, 2, 3, 1, 1, 2, 3, 9],
    "rating": [5, 4, 3, 2, 1, 5, 5, 5],
}


def test_a_log_is_split_by_time_and_each_column_told(tmp_path: Path) -> None:
    place = [item // 10 - 1 for item in LOG["item"]]
    more = {
        "title": [["t", "u", "v", "w"][number] for number in place],
        "item.brand": [[7, 7, 8, 8][number] for number in place],
        "item_price": [1.5 + number for number in place],
        "item_tags": [["x"]] * 8,
        "user_age": [{"a": 31.0, "b": 47.0}[user] for user in LOG["user"]],
    }
    folder = write(tmp_path / "shop", inter={**LOG, **more})
    data = load(folder, "pairs", history_length=2)
    assert {split: len(rows_of(data, split)["item_id"]) for split in data.splits} == {
        "train": 3,
        "validation": 2,
        "test": 2,
    }
    # The repeated pair (a, 20) at time 9 does not count.
    test = raw(data, "users")
    assert test["user_id"] == ["a", "b"]
    assert test["history"] == [[10, 20], [10, 30]], "as before the test item"
    assert data.towers["user"] == (("user_id", "history"), ("user_age",))
    assert data.towers["item"] == (("item_id", "item_brand"), ("item_price",))
    assert list(data.left_out) == ["rating", "item_tags"]
    lines = "\n".join(data.describe_columns())
    assert "left out rating: of an event" in lines
    assert "1 of 8 rows repeat a pair of user and item" in lines
    assert "column 'user_age' is read as a number, and all its values are wh" in lines
    assert "price' is read as a number" not in lines
    # Of training rows are (a, 10), (b, 20) and (b, 10).
    assert data.num_items == 2
    assert data.titles[1:3] == ["t", "u"]
    # Item 30 of a and item 40 of b are outside of the catalogue.
    assert data.rows("test")["item_id"].values.tolist() == [0, 0]


ADS: dict[str, dict[str, Any]] = {
    part: {
        "user": [1, 2, None, 1],
        "item": ["x", "y", "x", "y"],
        "when": ["2024-01-01T10:00:00", "2024-01-02T11:00:00"] * 2,
        "brand": [1.0, None, 3.0, 1.0],
        "spot": [7, 8, 7, 8],
        "stamp": [1_700_000_000_000 + n for n in range(4)],
        "user_age": [1.5, 2.5, 3.5, 1.5],
        "label": [0, 1, 1, 0],
    }
    for part in ("train", "validation", "test")
}


def test_labelled_rows_are_ids_numbers_and_times_by_their_type(tmp_path: Path) -> None:
    data = load(write(tmp_path / "ads", **ADS), "labels")
    assert data.towers == {
        "user": (("user_id",), ("user_age",)),
        "context": (("spot", "stamp", "when_hour", "when_weekday"), ("brand",)),
        "item": (("item_id",), ()),
    }
    assert rows_of(data, "train")["user_id"].values.tolist() == [1, 2, 0, 1]
    assert data.left_out == {}
    notes = " ".join(data.notes)
    # Codes with blanks, as pandas writes them, are told before they train as numbers.
    assert "column 'brand' is read as a number, and all its values are whole" in notes
    assert "column 'stamp' is read as ids, and its values look like milli" in notes
    assert "user_age" not in notes


def test_columns_of_one_file_are_named_and_swapped_ones_read_by_name(
    tmp_path: Path,
) -> None:
    test = dict(reversed(list({**ADS["test"], "price": [1.5] * 4}.items())))
    data = load(write(tmp_path / "set", **{**ADS, "test": test}), "labels")
    assert data.left_out == {"price": "test.parquet has it, and train.parquet has not"}


def test_a_split_of_one_label_is_told(tmp_path: Path) -> None:
    tables = {part: dict(columns) for part, columns in ADS.items()}
    tables["test"]["label"] = [0, 0, 0, 0]
    data = load(write(tmp_path / "ads", **tables), "labels")
    assert any(
        note.startswith("all 4 test rows have label 0: nothing tells")
        for note in data.notes
    )


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=3)


@given(events=EVENTS, length=st.integers(1, 4))
def test_every_item_but_a_users_first_is_a_target_once(
    events: list[tuple[int, int]], length: int
) -> None:
    events = [*events, *[(9, item) for item in range(3)]]
    order = sorted(range(len(events)), key=lambda row: events[row][0])
    users = [events[row][0] for row in order]
    items = [events[row][1] for row in order]
    made = set_of_sessions("s", pa.array(users), pa.array(items), length)
    taken: dict[int, list[int]] = {}
    for user, item in zip(users, items, strict=True):
        taken.setdefault(user, []).append(item)
    found: dict[int, list[int]] = {user: [] for user in taken}
    train = {name: values.to_pylist() for name, values in made.splits["train"].items()}
    for user, before, item in zip(
        train["user_id"], train["session"], train["item_id"], strict=True
    ):
        assert 1 <= len(before) <= length
        found[user] += [*before[1:], item]
    for user, mine in taken.items():
        held_out = 2 if len(mine) >= 3 else 0
        assert found[user] == mine[1 : len(mine) - held_out]
    for part, back in (("validation", 2), ("test", 1)):
        rows = {name: values.to_pylist() for name, values in made.splits[part].items()}
        for user, before, item in zip(
            rows["user_id"], rows["session"], rows["item_id"], strict=True
        ):
            mine = taken[user][: len(taken[user]) - back]
            assert (before, item) == (mine[-length:], taken[user][-back])


def test_a_session_has_an_item_before_its_target() -> None:
    items = pa.array(range(3))
    with pytest.raises(ValueError, match=r"data\.history_length=0: must be 1 or more"):
        set_of_sessions("s", items, items, 0)


def test_a_log_is_a_set_of_sessions_too(tmp_path: Path) -> None:
    data = load(write(tmp_path / "plays", inter=LOG), "sessions", history_length=3)
    assert data.features == ("user_id", "item_id", "session")
    assert data.tables["session"] == "item_id"
    # To the end, the held-out item included: what a user known by id took last.
    assert raw(data, "users")["session"] == [[10, 20, 30, 20], [20, 10, 30, 40]]
    assert raw(data, "items")["item_id"] == [10, 20]


def test_an_item_that_training_never_met_is_left_out_of_a_session(
    tmp_path: Path,
) -> None:
    """As training has none, its row is not trained: read last in a session, it would decide what is recommended."""
    events = {
        "user": [1, 1, 1, 1, 2, 2, 2, 2],
        "item": [3, 9, 2, 1, 2, 1, 2, 3],
        # The last event first; seconds in fractions, of which 32 bits would make one time.
        "time": [1.7e9 - row for row in range(8)],
    }
    data = load(write(tmp_path / "plays", inter=events), "sessions")
    test = data.rows("test")["session"]
    # Item 9 is in the validation alone; the ids of 1 to 3 are 1 to 3.
    assert [test.row(row).tolist() for row in range(2)] == [[1, 2], [3, 2, 1]]
    row = {"session": [[1, 9], [9], []], "user_id": [1] * 3, "item_id": [1] * 3}
    asked = data.preprocessor.online(row)["session"]
    assert [asked.row(row).tolist() for row in range(3)] == [[1], [], []]


@pytest.mark.parametrize(
    ("form", "tables", "message"),
    [
        ("pairs", {}, "set: has no inter.parquet"),
        (
            "pairs",
            {"inter": {**LOG, "item": [None, *LOG["item"][1:]]}},
            "column 'item', row 0: None, in 1 rows: each row needs one",
        ),
        (
            "pairs",
            {"inter": {**LOG, "item": pa.array([b"a", b"\xff"] * 4).view(pa.string())}},
            r"column 'item', row 1: b'\\xff' is no UTF-8; write the column as UTF-8",
        ),
        ("pairs", ADS, "rows with a label are for"),
        ("pairs", {"inter": {"user": [1], "item": [1]}}, "no column times"),
        (
            "labels",
            {"train": ADS["train"]},
            "has train.parquet and no validation.parquet",
        ),
        (
            "labels",
            {**ADS, "test": {**ADS["test"], "label": [0, 1, 2, 0]}},
            r"column 'label', row 2: 2, in 1 rows: must be 0 or 1; write ratings so",
        ),
        (
            "labels",
            {**ADS, "test": {name: ADS["test"][name] for name in ("item", "label")}},
            "test.parquet: column 'user' is missing, the file has",
        ),
        (
            "labels",
            {part: {**each, "user": ["", "u", "", "v"]} for part, each in ADS.items()},
            "column 'user', row 0: '', in 2 rows: an id without a name",
        ),
        (
            "sessions",
            {"inter": {**LOG, "item": ["a\0", *map(str, LOG["item"][1:])]}},
            r"column 'item', row 0: 'a\\x00', in 1 rows: .* NUL byte",
        ),
        (
            "labels",
            {**ADS, "test": {**ADS["test"], "spot": ["a", "b", "a", "b"]}},
            "column 'spot' is string, in .*train.parquet it is int64",
        ),
    ],
)
def test_what_is_wrong_in_a_folder_is_told(
    tmp_path: Path,
    form: Form,
    tables: dict[str, dict[str, Any]],
    message: str,
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / "set", **tables), form)
    assert str(tmp_path) in str(caught.value)


def test_a_new_value_of_a_held_out_row_is_unknown_and_numbers_nothing_anew(
    tmp_path: Path,
) -> None:
    tables = {part: {**columns, "spot": [0, 1, 0, 1]} for part, columns in ADS.items()}
    same = load(write(tmp_path / "same", **tables), "labels")
    tables["test"]["spot"] = [0, 1, 0, 7]
    other = load(write(tmp_path / "other", **tables), "labels")
    assert rows_of(same, "train")["spot"].values.tolist() == [1, 2, 1, 2]
    assert rows_of(other, "train")["spot"].values.tolist() == [1, 2, 1, 2]
    assert rows_of(other, "test")["spot"].values.tolist() == [1, 2, 1, 0]
    assert other.vocab["spot"] == same.vocab["spot"] == 3


def test_a_file_with_labels_may_have_integers_or_no_value_where_another_has_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_PROBE", 1)
    columns = {
        "train": (pa.array([1.0, None, 3.0]), pa.array(["a", "b", "a"])),
        "validation": (pa.array([3, 2, 1]), pa.nulls(3)),
        "test": (pa.nulls(3), pa.array(["b", "c", "a"])),
    }
    for part, (price, city) in columns.items():
        # Texts without a value where others are dates, of which the first one comes late.
        day = pa.array([None, None, "2024-01-02" if part == "train" else None])
        rows = {"label": [0, 1, 0], "price": price, "city": city}
        rows["day"] = day.cast(pa.string())
        pq.write_table(pa.table(rows), tmp_path / f"{part}.parquet")
    data = load_set(DataConfig(name=str(tmp_path)), "labels")
    made = [data.rows(part) for part in columns]
    prices = [[-1, 0, 1], [1, 0, -1], [0, 0, 0]]
    assert [each["price"].values.tolist() for each in made] == prices
    cities = [[1, 2, 1], [0, 0, 0], [2, 0, 1]]
    assert [each["city"].values.tolist() for each in made] == cities
    assert made[0]["day_weekday"].values.tolist() == [0, 0, 2]
