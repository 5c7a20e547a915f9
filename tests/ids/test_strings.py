"""string_ids(): strings as 64-bit ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from torchrec_ext.ids import Dynamic, DynamicIds, string_ids
from torchrec_ext.ids.index import EMPTY

pytestmark = pytest.mark.unit
KNOWN = [-5029544574863973789, -7906508632644235675]
NAMES = ["anna", "bob", "", "Ωmega", "anna", "x" * 1_000]


@pytest.mark.parametrize(
    "strings",
    [
        NAMES,
        np.array(NAMES),
        np.array(NAMES, dtype=object),
        pa.array(NAMES),
        pa.array(["before", *NAMES], pa.large_string())[1:],
        pa.chunked_array([NAMES[:2], NAMES[2:]]),
    ],
    ids=["list", "numpy", "objects", "arrow", "a slice", "chunks"],
)
def test_ids_do_not_depend_on_what_holds_the_strings(strings: Any) -> None:
    ids = string_ids(strings)
    assert ids.dtype == torch.int64
    # The same on every machine and in every version: ids stand in checkpoints.
    assert ids[:2].tolist() == KNOWN
    assert ids[0] == ids[4]
    assert len(ids.unique()) == 5


def test_no_string_reads_row_0() -> None:
    ids = string_ids(["anna", None])
    assert ids[1] == EMPTY
    rows, _ = DynamicIds({"user": Dynamic(capacity=9)}).step({"user": ids})
    assert rows["user"][0] > 0
    assert rows["user"][1] == 0
    assert string_ids([]).tolist() == []


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (
            [1, 2],
            "string ids: the values are int64, must be str; whole numbers are ids as they are",
        ),
        (["a", 2], "all values must be str"),
    ],
)
def test_what_is_no_string_is_refused_in_one_line(strings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        string_ids(strings)
    assert message in str(error.value)
    assert len(str(error.value)) <= 200
