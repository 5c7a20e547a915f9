"""Files and requests agree; fitting sees its own rows alone; no history looks ahead; saved is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")

from tests.data.preprocess_cases import (
    EVERY_STEP,
    random_rows,
    same,
    with_events,
    write,
)
from tests.files import read_parquet
from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    FittedPreprocessor,
    HashBucket,
    History,
    Normalize,
    Preprocessor,
    Step,
    categorical,
)


def test_requests_agree_with_files_on_many_rows_in_their_order(
    con: Any, tmp_path: Path
) -> None:
    rows = random_rows(900, seed=1)
    files = [
        write(
            {k: v[at : at + 300] for k, v in rows.items()},
            tmp_path / f"{at}.parquet",
            row_group_size=90,
        )
        for at in (0, 300, 600)
    ]
    fitted = EVERY_STEP.fit(files, con=con)
    assert fitted.transform(files, tmp_path / "out", con=con) == 900
    whole = read_parquet(tmp_path / "out/part-00000.parquet")
    requests = with_events(rows, rows)
    fitted.save(tmp_path / "saved")
    loaded = FittedPreprocessor.load(tmp_path / "saved")
    names = ("vocab", "outputs", "dense", "steps", "vocabularies", "origins")
    for name in names:
        assert getattr(loaded, name) == getattr(fitted, name)
    same(loaded.online(requests), whole)
    # A few values are read without Arrow.
    for start, stop in ((0, 1), (17, 50), (899, 900)):
        some = {name: list(values)[start:stop] for name, values in requests.items()}
        same(fitted.online(some), whole.slice(start, stop))


def test_the_state_is_that_of_the_training_rows_alone_byte_for_byte(
    con: Any, tmp_path: Path
) -> None:
    rows = random_rows(1000, seed=7)
    train = write(rows, tmp_path / "train.parquet")
    EVERY_STEP.fit(train, con=con).save(tmp_path / "one")
    # In another order, beside another split, which is in histories' events too.
    backwards = {name: values[::-1] for name, values in rows.items()}
    again = write(backwards, tmp_path / "again.parquet", row_group_size=100)
    test = write(random_rows(300, seed=6), tmp_path / "test.parquet")
    fitted = EVERY_STEP.fit(again, con=con, events=[again, test])
    fitted.transform(test, tmp_path / "out", con=con, events=[again, test])
    fitted.save(tmp_path / "two")
    one, two = (tmp_path / name / "preprocessor.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_histories_against_brute_force(con: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    size = 2000
    user = rng.integers(0, 20, size)
    item = rng.integers(0, 50, size)
    time = rng.integers(0, 40, size)
    rows = {
        "user": user.tolist(),
        "item": [str(i) for i in item],
        "ts": time.tolist(),
        "age": [[None, 3, 5][number] for number in rng.integers(0, 3, size)],
        "city": [[None, "x", "y"][number] for number in rng.integers(0, 3, size)],
    }
    also = ("age", "city")
    steps: list[Step] = [
        History(user="user", item="item", time="ts", length=4, also=also),
        Categorify(column="item", also=("history",)),
        *(Categorify(column=name, also=(f"history_{name}",)) for name in also),
    ]
    path = write(rows, tmp_path / "a.parquet")
    fitted = Preprocessor(steps).fit(path, con=con)
    fitted.transform(path, tmp_path / "out", con=con)
    made = read_parquet(tmp_path / "out/part-00000.parquet")
    ids: list[dict[Any, int]] = []
    for _, vocabulary in fitted.pairs[1:]:
        values = vocabulary.values.to_pylist()
        ids.append({None: 0} | {value: place for place, value in enumerate(values, 1)})
    # A null comes last among the events of one time and item.
    names = ("ts", "item", *also, "user")
    events = list(zip(*(rows[name] for name in names), strict=True))
    events.sort(
        key=lambda e: (e[0], e[1], e[2] is None, e[2] or 0, e[3] is None, e[3] or "")
    )
    for row in range(size):
        before = [
            event[1:4]
            for event in events
            if event[4] == user[row] and event[0] < time[row]
        ][-4:]
        for place, name in enumerate(("history", "history_age", "history_city")):
            expected = [ids[place][event[place]] for event in before]
            assert made[name].row(row).tolist() == expected


@pytest.mark.parametrize("parts", [2, 7, 100])
def test_quantiles_are_the_smallest_values_that_so_many_rows_do_not_exceed(
    con: Any, tmp_path: Path, parts: int
) -> None:
    values = np.random.default_rng(9).integers(0, 40, 100)
    path = write({"age": values.tolist()}, tmp_path / "a.parquet")
    fitted = Preprocessor([Bucketize(column="age", quantiles=parts)]).fit(path, con=con)
    ordered = np.sort(values)
    expected = [ordered[-(-at * 100 // parts) - 1] for at in range(1, parts)]
    assert fitted.pairs[0][1]["boundaries"] == sorted(
        {float(value) for value in expected}
    )


def fitted_by_hand(
    *,
    buckets: int = 100,
    edges: tuple[float, ...] = (1.0, 2.0),
    mean: float = 0.5,
    length: int = 5,
    items: int = 2,
) -> FittedPreprocessor:
    vocabulary = categorical.Vocabulary(
        pa.array([f"i{number}" for number in range(items)])
    )
    raw = dict.fromkeys(("shop", "user", "item"), "string")
    return FittedPreprocessor(
        [
            (HashBucket(column="shop", buckets=buckets), {}),
            (Bucketize(column="price", boundaries=edges, output="price_bucket"), {}),
            (Normalize(column="price"), {"mean": mean, "std": 1.0}),
            (History(user="user", item="item", time="time", length=length), {}),
            (Categorify(column="item", also=("history",)), vocabulary),
        ],
        {**raw, "price": "double", "time": "int64"},
    )


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"buckets": 99}, {"shop"}),
        ({"edges": (1.0, 3.0)}, {"price_bucket"}),
        ({"mean": 0.6}, {"price"}),
        ({"length": 9}, set()),
        ({"items": 3}, set()),
    ],
)
def test_the_origin_of_a_column_changes_with_what_its_values_stand_for(
    change: dict[str, Any], moved: set[str], tmp_path: Path
) -> None:
    """A longer history and new values after the old ones of a vocabulary leave each value as it was."""
    before, after = fitted_by_hand(), fitted_by_hand(**change)
    assert {
        name for name, origin in before.origins.items() if after.origins[name] != origin
    } == moved
    assert set(before.origins) == {"shop", "price_bucket", "price", "history", "item"}
    after.save(tmp_path / "saved")
    assert FittedPreprocessor.load(tmp_path / "saved").origins == after.origins
