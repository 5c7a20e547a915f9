"""One preprocessor with every step, and rows that are unkind to it; shared by the tests of the laws."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    Cross,
    FillMissing,
    HashBucket,
    History,
    Lists,
    LogClip,
    Normalize,
    Preprocessor,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.history import GAPS

TYPES: Mapping[str, pa.DataType] = {
    "user": pa.int64(),
    "item": pa.string(),
    "ts": pa.int64(),
    "when": pa.timestamp("ms"),
    "price": pa.float32(),
    "age": pa.int32(),
    "score": pa.float64(),
    "city": pa.string(),
    "tags": pa.list_(pa.string()),
    "shops": pa.list_(pa.int64()),
    "genre": pa.string(),
    "prime": pa.bool_(),
    "label": pa.float32(),
}
ALL_TIMES = ("hour", "weekday", "month")

EVERY_STEP = Preprocessor(
    [
        History(user="user", item="item", time="ts", length=3, gaps=GAPS),
        History(
            user="user",
            item="item",
            time="when",
            length=2,
            output="past",
            also=("city", "age"),
            gaps=(3600,),
        ),
        Cross(columns=("user", "city", "prime"), buckets=97),
        Categorify(column="item", also=("history", "past"), max_size=5),
        HashBucket(column="past_city", buckets=9),
        HashBucket(column="past_age", buckets=7),
        HashBucket(column="user", buckets=1000, output="user_hash"),
        Categorify(column="user", min_count=2),
        Categorify(column="city", output="city_id"),
        HashBucket(column="city", buckets=50),
        Lists(column="tags", max_length=2),
        Categorify(column="tags"),
        Categorify(column="shops", min_count=2, output="shop_ids"),
        Lists(column="shops"),
        HashBucket(column="shops", buckets=11),
        Lists(column="genre", separator="|"),
        Categorify(column="genre"),
        Bucketize(column="age", quantiles=4, output="age_bucket"),
        FillMissing(column="age", value=-1),
        Normalize(column="age"),
        Bucketize(column="price", boundaries=(-1.5, 0.1, 1e6), output="price_bucket"),
        FillMissing(column="price", value=1.5),
        LogClip(column="price", low=-2.0, high=1e9),
        Normalize(column="price"),
        LogClip(column="score", low=-100, high=100),
        Bucketize(column="score", quantiles=20, output="score_bucket"),
        FillMissing(column="score", value=0.1),
        Categorify(column="prime", max_size=1),
        TimeFeatures(column="ts", zone="Europe/Berlin", features=ALL_TIMES),
        TimeFeatures(column="when", zone="America/Sao_Paulo", features=ALL_TIMES),
    ],
    keep=("label",),
)

Rows = Mapping[str, Sequence[Any]]


def write(rows: Rows, path: Path, **options: Any) -> Path:
    """The rows as a parquet file."""
    pq.write_table(
        pa.table(
            {name: pa.array(values, TYPES[name]) for name, values in rows.items()}
        ),
        path,
        **options,
    )
    return path


TEXTS = (
    *("", " ", "a", "\u00fc", "\U0001f363", "it's", "back\\slash", "a|b||c", "%x_"),
    *("\x00", "zz", None, "\u00e9", "e\u0301"),
)
NUMBERS = (
    *(0.0, -0.0, 0.1, -1.5, 1e12, float("nan"), float("inf"), float("-inf")),
    *(None, 3.25, 1e-9),
)
WHOLE = (0, 1, -1, 2**63 - 1, -(2**63), 7, None, 2**53 + 1)
MOMENT = datetime.datetime(2018, 11, 4, 2, 30, 0, 999_000)
# Nulls, NaN, infinities, unicode, huge and negative numbers, ties in time.
UNKIND: Rows = {
    "user": WHOLE,
    "item": TEXTS[:9],
    "ts": (
        *range(1_616_893_190, 1_616_893_215, 5),
        *(-1, 0, 1_635_642_000, 4_000_000_000, -(10**12), None),
    ),
    "when": (None, *(MOMENT + datetime.timedelta(hours=h) for h in range(0, 5000, 7))),
    "price": NUMBERS,
    "age": (-5, 0, 18, 18, 40, 99, None),
    "score": (*NUMBERS, 99.99, -1e300, 1e300),
    "city": TEXTS,
    "tags": (None, [], *(TEXTS[at : at + at % 4] for at in range(len(TEXTS)))),
    "shops": ([], *(WHOLE[at : at + at % 3 + 1] for at in range(len(WHOLE)))),
    "genre": ("Act|Dra", "|", "Dra", "", None, "Com|Act|", "a.c"),
    "prime": (True, False, None),
    "label": (0.0, 1.0),
}


def random_rows(size: int, seed: int) -> dict[str, list[Any]]:
    """Rows that are unkind to a preprocessor."""
    rng = np.random.default_rng(seed)
    return {
        name: [values[at] for at in rng.integers(0, len(values), size)]
        for name, values in UNKIND.items()
    }


def with_events(rows: Rows, events: Rows) -> dict[str, Sequence[Any]]:
    """The rows as a request, with what the keeper of the users' events would send: all of them, the future too."""
    kept: dict[Any, list[int]] = {}
    for index, user in enumerate(events["user"]):
        kept.setdefault(user, []).append(index)
    lists = [kept.get(user, []) if user is not None else [] for user in rows["user"]]
    sent = {
        "history": {"items": "item", "times": "ts"},
        "past": {"items": "item", "times": "when", "city": "city", "age": "age"},
    }
    return {
        **rows,
        **{
            f"{output}_{name}": [
                [events[column][index] for index in past] for past in lists
            ]
            for output, columns in sent.items()
            for name, column in columns.items()
            if column in events
        },
    }


def same(left: Chunk, right: Chunk) -> None:
    """Both hold the same columns, types, lengths and values, to the last bit."""
    assert list(left) == list(right)
    for name in left:
        ours, theirs = left[name], right[name]
        assert ours.values.dtype == theirs.values.dtype, name
        np.testing.assert_array_equal(ours.lengths, theirs.lengths, err_msg=name)
        np.testing.assert_array_equal(ours.values, theirs.values, err_msg=name)
