"""string_ids(): strings as 64-bit ids."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from torchrec_ext.ids import Dynamic, DynamicIds, string_ids
from torchrec_ext.ids.index import EMPTY
from torchrec_ext.ids.siphash import hashed

pytestmark = pytest.mark.unit
KNOWN = [-3556189864764467436, -3244128173026592940]
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


def test_strings_of_a_million_ids_do_not_collide_and_another_key_gives_others() -> None:
    names = pa.array(np.arange(200_000)).cast(pa.string())
    assert len(string_ids(names).unique()) == 200_000
    assert not (string_ids(names[:100]) == string_ids(names[:100], key=b"0" * 16)).any()


def test_no_string_reads_row_0() -> None:
    ids = string_ids(["anna", None])
    assert ids[1] == EMPTY
    rows, _ = DynamicIds({"user": Dynamic(capacity=9)}).step({"user": ids})
    assert rows["user"][0] > 0
    assert rows["user"][1] == 0
    assert string_ids([]).tolist() == []


@pytest.mark.parametrize(
    ("strings", "key", "message"),
    [
        (
            [1, 2],
            None,
            "string ids: the values are int64, must be str; whole numbers are ids as they are",
        ),
        (["a", 2], None, "all values must be str"),
        (["y" * 1_025], None, "row 0 has 1,025 bytes; an id may have 1,024"),
        (["a"], b"short", "key: has 5 bytes, must have 16"),
    ],
)
def test_what_is_no_string_is_refused_in_one_line(
    strings: Any, key: bytes | None, message: str
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        string_ids(strings, **({} if key is None else {"key": key}))
    assert message in str(error.value)
    assert len(str(error.value)) <= 200


def sip(data: bytes, key: bytes, rounds: int, final: int) -> int:
    """SipHash of one string, as its paper writes it."""
    mask, halves = 2**64 - 1, struct.unpack("<2Q", key)
    constants = (
        0x736F6D6570736575,
        0x646F72616E646F6D,
        0x6C7967656E657261,
        0x7465646279746573,
    )
    a, b, c, d = (
        halves[index % 2] ^ constant for index, constant in enumerate(constants)
    )

    def turn(value: int, by: int) -> int:
        return ((value << by) | (value >> (64 - by))) & mask

    def mixed(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
        a, c = (a + b) & mask, (c + d) & mask
        b, d, a = turn(b, 13) ^ a, turn(d, 16) ^ c, turn(a, 32)
        a, c = (a + d) & mask, (c + b) & mask
        return a, turn(b, 17) ^ c, turn(c, 32), turn(d, 21) ^ a

    whole = data + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", whole):
        d ^= word
        for _ in range(rounds):
            a, b, c, d = mixed(a, b, c, d)
        a ^= word
    c ^= 255
    for _ in range(final):
        a, b, c, d = mixed(a, b, c, d)
    return a ^ b ^ c ^ d


def test_strings_are_hashed_by_siphash() -> None:
    key = bytes(range(16))
    assert sip(bytes(range(15)), key, 2, 4) == 0xA129CA6149BE45E5, (
        "the example of the paper"
    )
    draw = random.Random(0)
    for most in (0, 1, 20, 1024):
        strings = [draw.randbytes(draw.randint(0, most)) for _ in range(40)]
        offsets = np.cumsum([0, *map(len, strings)]).astype(np.int64)
        content = np.frombuffer(b"".join(strings), np.uint8)
        assert hashed(offsets, content, key).tolist() == [
            sip(each, key, 1, 3) for each in strings
        ]
