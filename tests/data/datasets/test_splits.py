from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.datasets.catalog import load_dataset
from torchrec_ext.data.datasets.features import side_features
from torchrec_ext.data.datasets.folder import from_folder
from torchrec_ext.data.datasets.interactions import (
    TEST,
    TRAIN,
    VALIDATION,
    Evaluation,
    InteractionData,
    with_profiles,
)
from torchrec_ext.data.datasets.movielens import recbole
from torchrec_ext.schema import DataError

ROWS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.integers(1, 9),
        st.sampled_from([TRAIN, TRAIN, VALIDATION, TEST]),
    ),
    max_size=40,
)


@pytest.mark.unit
@given(rows=ROWS, length=st.integers(0, 5), seed=st.integers(0, 3))
def test_a_profile_holds_training_items_of_its_user_and_never_its_own_row(
    rows: list[tuple[int, int, int]], length: int, seed: int
) -> None:
    user, item, part = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    split = with_profiles(user, item, part.astype(np.int8), length, seed)
    kept = [rows[row] for row in split.rows]
    assert sorted(kept) == sorted(set(rows))
    for at, (owner, own, of_part) in enumerate(kept):
        known = [
            i
            for u, i, p in set(rows)
            if u == owner and p == TRAIN and not (of_part == TRAIN and i == own)
        ]
        profile = split.history.row(at).tolist()
        assert len(profile) == min(length, len(known))
        assert len(set(profile)) == len(profile)
        assert set(profile) <= set(known)


@pytest.mark.unit
def test_long_profiles_of_a_user_differ_from_row_to_row() -> None:
    many = np.arange(1, 101)
    split = with_profiles(
        np.ones(100, dtype=np.int64), many, np.zeros(100, dtype=np.int8), 10
    )
    shown = np.bincount(split.history.values, minlength=101)[1:]
    assert (shown == 10).all(), "each item stands in as many profiles as any other"


def ncf_folder(folder: Path, **changed: dict[str, list[Any]]) -> Path:
    tables: dict[str, dict[str, list[Any]]] = {
        "train": {"user": [0, 0, 1, 1, 2], "item": [0, 3, 1, 2, 4]},
        "test": {"user": [0, 1, 2], "item": [1, 0, 0]},
        "test_negatives": {"user": [1, 0, 0, 2, 2, 1], "negative": [3, 2, 1, 1, 2, 4]},
        "items": {
            "item": [4, 1],
            "genres": ["a|b", "a"],
            "year": [1995, 1995],
            "title": ["E", "B"],
            "taken": [9, 1],
        },
        **changed,
    }
    folder.mkdir(exist_ok=True)
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


@pytest.mark.unit
def test_a_folder_with_candidates_becomes_interactions_with_ids_from_1(
    tmp_path: Path,
) -> None:
    data = from_folder(
        ncf_folder(tmp_path),
        name="mine",
        history_length=5,
        columns={"items": ("genres", "year")},
    )
    assert data.test["user_id"].values.tolist() == [1, 2, 3]
    assert data.test["item_id"].values.tolist() == [2, 1, 1]
    assert data.evaluation.candidates["test"].tolist() == [[3, 2], [4, 5], [2, 3]], (
        "in the order of the test rows"
    )
    assert data.vocab == {
        "user_id": 4,
        "history": 6,
        "item_id": 6,
        "genres": 3,
        "year": 2,
    }
    assert [data.items["genres"].row(item).tolist() for item in range(6)] == [
        [],
        [],
        [1],
        [],
        [],
        [1, 2],
    ]
    assert data.titles == ["(unknown)", "(unknown)", "B", "(unknown)", "(unknown)", "E"]
    assert data.validation["user_id"].values.tolist() == [1, 2], (
        "user 3 has one training item, which stays"
    )
    for user, drawn in zip(
        (1, 2), data.evaluation.candidates["validation"], strict=True
    ):
        assert not set(drawn.tolist()) & {1: {1, 4}, 2: {2, 3}}[user]
    whole = from_folder(tmp_path, name="mine", history_length=5, validation=False)
    assert (whole.train.num_rows, whole.validation.num_rows) == (5, 0)


def ncf_text(folder: Path, **changed: str) -> Path:
    texts = {
        "train.rating": "0\t0\t5\t9\n0\t3\t4\t9\n1\t1\t4\t9\n1\t2\t4\t9\n2\t4\t4\t9\n",
        "test.rating": "0\t1\t5\t9\n1\t0\t5\t9\n2\t0\t5\t9\n",
        "test.negative": "(0,1)\t2\t1\n(1,0)\t3\t4\n(2,0)\t1\t2\n",
        **changed,
    }
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"ml-1m.{name}").write_text(text)
    return folder


@pytest.mark.unit
def test_the_papers_text_files_are_the_same_set(tmp_path: Path) -> None:
    made = [
        from_folder(folder, name="mine", history_length=5)
        for folder in (ncf_text(tmp_path / "text"), ncf_folder(tmp_path / "parquet"))
    ]
    for part in ("train", "validation", "test"):
        text, parquet = (getattr(data, part) for data in made)
        for name in ("user_id", "item_id", "history"):
            assert text[name].values.tolist() == parquet[name].values.tolist()
    assert (
        made[0].evaluation.candidates["test"].tolist()
        == made[1].evaluation.candidates["test"].tolist()
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "test.negative",
            "(0,1)\t2\t1\n(1,0)\t3\n",
            r"ml-1m\.test\.negative: line 2 has \['3'\], must have 2 ids of 0 or more",
        ),
        (
            "train.rating",
            "0\tx\t5\t9\n",
            r"ml-1m\.train\.rating: line 1 has \['0', 'x'\], must have 2 ids of 0 or more",
        ),
        ("test.rating", "", r"ml-1m\.test\.rating: no lines"),
    ],
)
def test_a_text_file_of_another_form_names_file_and_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_folder(
            ncf_text(tmp_path / "text", **{name: text}), name="mine", history_length=5
        )


@pytest.mark.unit
def test_a_folder_of_interactions_is_split_by_time(tmp_path: Path) -> None:
    rows = {"user_id": [3, 3, 3, 3], "item_id": [7, 5, 6, 8], "timestamp": [1, 4, 2, 3]}
    pq.write_table(pa.table(rows), tmp_path / "inter.parquet")
    data = from_folder(tmp_path, name="mine", history_length=5)
    assert data.items_by_row.tolist() == [-1, 6, 7, 5, 8], (
        "those of the catalogue, and after them the held-out ones"
    )
    assert (data.num_items, data.outside) == (2, 2)
    assert data.items_by_row[data.test["item_id"].values].tolist() == [5]
    assert data.items_by_row[data.validation["item_id"].values].tolist() == [8]
    assert data.items_by_row[data.validation["history"].values].tolist() == [7, 6]
    assert data.test["history"].values.tolist() == [2, 1, 0], (
        "an item outside of the catalogue is the unknown one"
    )
    assert data.users_by_row.tolist() == [-1, 3]


@pytest.mark.unit
def test_what_is_not_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "mine.train.inter").write_text("user_id:token\titem_id:token\n")
    with pytest.raises(
        DataError, match=r"mine\.train\.inter: is RecBole's; write it as parquet"
    ):
        load_dataset(tmp_path.name, folder=str(tmp_path.parent))
    rows = pa.table(
        {
            "user_id": [3, 3, 3],
            "item_id": [7, 5, 6],
            "timestamp": [1, 4, 2],
            "label": [1, 0, 1],
        }
    )
    pq.write_table(rows, tmp_path / "inter.parquet")
    with pytest.warns(
        UserWarning,
        match=r"inter\.parquet: column 'label' is not used, .* recipe contextual_ncf",
    ):
        from_folder(tmp_path, name="mine", history_length=5)
    pq.write_table(rows, tmp_path / "valid.parquet")
    with pytest.raises(
        DataError,
        match=r"valid\.parquet is not read under .* rename it to validation\.parquet",
    ):
        from_folder(tmp_path, name="mine", history_length=5)


@pytest.mark.unit
@pytest.mark.parametrize(
    "times", [[1.5, 2.5], [1.0, None], [None, None], [True, False], [[1], [2]]]
)
def test_times_of_another_type_are_named(tmp_path: Path, times: list[Any]) -> None:
    pq.write_table(
        pa.table({"user_id": [3, 3], "item_id": [7, 5], "timestamp": times}),
        tmp_path / "inter.parquet",
    )
    with pytest.raises(
        DataError,
        match=r"inter\.parquet: column 'timestamp' is .*; times must be whole numbers, timestamps",
    ):
        from_folder(tmp_path, name="mine", history_length=5)


@pytest.mark.unit
def test_a_folder_of_pairs_without_candidates_is_ranked_whole(tmp_path: Path) -> None:
    for part, items in (("train", [0, 1, 2]), ("validation", [3]), ("test", [4, 5])):
        pq.write_table(
            pa.table({"user": [0] * len(items), "item": items}),
            tmp_path / f"{part}.parquet",
        )
    data = from_folder(tmp_path, name="mine", history_length=5)
    assert (data.evaluation.by, data.evaluation.figures) == (
        "user",
        ("hr", "recall", "ndcg"),
    )
    assert data.validation["item_id"].values.tolist() == [4]
    assert sorted(data.test["history"].row(0).tolist()) == [1, 2, 3]
    assert (
        from_folder(
            tmp_path, name="mine", history_length=5, validation=False
        ).train.num_rows
        == 4
    )
    (tmp_path / "train.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"train\.parquet: is not parquet"):
        from_folder(tmp_path, name="mine", history_length=5)


@pytest.mark.unit
def test_a_folder_of_a_users_own_is_a_set_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncf_folder(tmp_path / "mine")
    assert load_dataset("mine", folder=str(tmp_path)).name == "mine"
    monkeypatch.delenv("TORCHREC_EXT_DATA", raising=False)
    with pytest.raises(
        DataError,
        match=r"data\.name='mine': no such set in .*; choose ml-100k, .* or a folder with inter",
    ):
        load_dataset("mine")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"test_negatives": {"user": [0, 1], "negative": [2, 2]}},
            "user 2, who has a test item, has no row",
        ),
        (
            {"train": {"user": ["u0", "u1"], "item": [0, 1]}},
            r"the ids in 'user_id' are string in train\.parquet, int64 in test\.parquet.*; write one type to all files",
        ),
        (
            {"train": {"user": [0, None, None], "item": [0, 1, 2]}},
            r"train\.parquet: column 'user', row 1: value is null \(2 such rows\), and a row needs user, item; leave",
        ),
        (
            {"train": {"user": [0.0, 1.5], "item": [0, 1]}},
            r"train\.parquet: column 'user' is double; ids must be whole numbers or text",
        ),
        (
            {"train": {"user": [0], "item": [1], "label": [0]}},
            "has a column 'label', so not every row is a positive",
        ),
        (
            {"train": {"user": np.array([1, 2**64 - 1], np.uint64), "item": [0, 1]}},
            r"train\.parquet, column 'user', row 1: 18446744073709551615 is beyond int64 \(1 such values",
        ),
        (
            {"test": {"user": [0]}},
            r"test\.parquet: no column item_id or item; the file has user",
        ),
        (
            {"items": {"item": [4, 1, 2], "price": [1.0, float("nan"), float("inf")]}},
            r"items\.parquet: column 'price', row 1: nan; must be a finite number of 32 bits \(2 rows are not\)",
        ),
        (
            {"items": {"item": [4, 1], "price": [1.0, 1e39]}},
            r"items\.parquet: column 'price', row 1: 1e\+39",
        ),
        (
            {"items": {"item": [4, 1, 2, 4, 2], "genres": list("abcde")}},
            r"items\.parquet: column 'item', rows 2 and 4: both describe id 2 \(2 rows more than there are ids\)",
        ),
        (
            {"users": {"user": [7, 0, 7], "sex": ["m", "f", "f"]}},
            r"users\.parquet: column 'user', rows 0 and 2: both describe id 7",
        ),
        (
            {
                **{
                    part: {"user": list("abc"), "item": [0, 1, 2]}
                    for part in ("train", "test", "test_negatives")
                },
                "users": {"user": ["b", "a", "b"], "sex": ["m", "f", "f"]},
            },
            r"users\.parquet: column 'user', rows 0 and 2: both describe id b",
        ),
    ],
)
def test_what_is_wrong_in_a_folder_is_told(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_folder(ncf_folder(tmp_path, **changed), name="mine", history_length=5)


@pytest.mark.unit
def test_ids_of_text_beside_text_files_of_whole_numbers_are_refused(
    tmp_path: Path,
) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_text("0 1 2\n1 0 2\n")
    pq.write_table(
        pa.table({"item": ["a", "b", "c"], "kind": ["x", "x", "y"]}),
        tmp_path / "items.parquet",
    )
    with pytest.raises(
        DataError,
        match=r"'item_id' are int64 in train\.txt, int64 in test\.txt, string in items",
    ):
        from_folder(tmp_path, name="mine", history_length=5)


@pytest.mark.unit
def test_columns_that_name_a_row_describe_nothing() -> None:
    ids = np.arange(1, 5)
    table = {
        "title": pa.array(list("wxyz")),
        "sex": pa.array(["m", "f", "f", "m"]),
        "price": pa.array([1.0, 3.0, 1.0, 3.0]),
    }
    made = side_features(ids, table, 5)
    assert made.words.vocab == {"sex": 3}
    assert tuple(made.words.scales) == ("price",)
    assert made.columns["price"].values.tolist() == [0, -1, 1, -1, 1]
    assert made.columns["sex"].values.tolist() == [0, 2, 1, 1, 2]


@pytest.mark.unit
def test_recboles_file_must_hold_each_rating_once(tmp_path: Path) -> None:
    ratings = Chunk(
        {"user_id": Column(np.array([1, 1, 2])), "item_id": Column(np.array([1, 2, 1]))}
    )
    file = tmp_path / "recbole_split.parquet"
    pq.write_table(
        pa.table(
            {
                "user_id": [2, 1, 1],
                "item_id": [1, 2, 1],
                "split": ["test", "train", "valid"],
            }
        ),
        file,
    )
    split = recbole(ratings, file, 5).split
    assert split is not None
    assert {
        int(row): int(part) for row, part in zip(split.rows, split.part, strict=True)
    } == {
        0: VALIDATION,
        1: TRAIN,
        2: TEST,
    }
    pq.write_table(
        pa.table({"user_id": [2, 1], "item_id": [1, 2], "split": ["test", "train"]}),
        file,
    )
    with pytest.raises(DataError, match="2 pairs, which are not the 3 of the ratings"):
        recbole(ratings, file, 5)


def test_the_published_splits_of_movielens(ml_100k_folder: Path) -> None:
    root = str(ml_100k_folder.parent)
    made = load_dataset("ml-100k", folder=root, split="recbole")
    assert (made.train.num_rows, made.validation.num_rows, made.test.num_rows) == (
        80_808,
        9_596,
        9_596,
    )
    assert made.evaluation.by == "user"
    tutorial = load_dataset("ml-100k", folder=root, split="tfrs", validation=False)
    # 18 titles have two ids each: 206 ratings are a user's second of one title.
    assert (
        tutorial.train.num_rows + tutorial.test.num_rows,
        tutorial.test.num_rows,
    ) == (99_794, 19_987)
    for data in (made, tutorial):
        own = data.train["item_id"].values.repeat(data.train["history"].lengths)
        assert not (data.train["history"].values == own).any()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"split": "random"},
            r"data\.split='random': must be one of last_item, recbole, tfrs",
        ),
        (
            {"name": "planted", "split": "tfrs"},
            r"data\.split='tfrs': a split of ml-100k; leave it out with data\.name=planted, and write a split",
        ),
        (
            {"validation": False},
            r"data\.validation=False: ml-100k split by last_item always has validation rows",
        ),
    ],
)
def test_a_wrong_split_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(**options)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": (0,)}, r"at=\(0,\)"),
        ({"figures": ("auc",)}, r"figures=\('auc',\): must be some of hr,"),
    ],
)
def test_a_wrong_evaluation_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evaluation(**options)


def test_the_ncf_papers_split(ml_100k_folder: Path) -> None:
    folder = ml_100k_folder.parent / "ml-1m-ncf"
    if not folder.exists():
        pytest.skip("needs TORCHREC_EXT_DATA/ml-1m-ncf")
    data: InteractionData = load_dataset(
        "ml-1m-ncf", folder=str(folder.parent), validation=False, history_length=0
    )
    assert (data.train.num_rows, data.test.num_rows, data.num_items) == (
        994_169,
        6_040,
        3_706,
    )
    assert data.evaluation.candidates["test"].shape == (6_040, 99)
    assert "n_interactions" not in data.items, "it counts the test items"
