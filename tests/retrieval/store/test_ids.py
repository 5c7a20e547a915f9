"""IdMap: there and back for every id, unknown ones, wrong ones, and the same map read from its files."""

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_ext.retrieval.store.ids import IdMap, hashed

pytestmark = pytest.mark.unit
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
BORDERS = [-(2**63), -1, 0, 2**63 - 1]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), unique=True),
    asked=st.lists(st.integers(-9, 20)),
)
def test_integers_as_a_dict_has_them(ids: list[int], asked: list[int]) -> None:
    where = {own: position for position, own in enumerate(ids)}
    made = IdMap.build(np.array(ids, np.int64))
    assert made.positions(np.array([*ids, *asked, *BORDERS], np.int64)).tolist() == [
        where.get(one, -1) for one in [*ids, *asked, *BORDERS]
    ]
    assert made.positions([*ids, *asked, *BORDERS]).tolist() == [
        where.get(one, -1) for one in [*ids, *asked, *BORDERS]
    ]
    assert made.ids(np.arange(len(ids))).tolist() == ids


@pytest.mark.parametrize("first", [-(2**63), -2, 0, 2**63 - 4])
def test_consecutive_integers_up_to_the_ends_of_int64(first: int) -> None:
    made = IdMap.build(range(first, first + 4))
    beyond = [
        one for one in (first - 1, first + 4, *BORDERS) if -(2**63) <= one < 2**63
    ]
    asked = [first + 3, first, *beyond]
    expected = [one - first if first <= one < first + 4 else -1 for one in asked]
    assert made.positions(asked).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(TEXT, unique=True, min_size=1, max_size=9),
    asked=st.lists(TEXT, max_size=5),
)
def test_strings_as_a_dict_has_them(ids: list[str], asked: list[str]) -> None:
    where = {own: position for position, own in enumerate(ids)}
    made = IdMap.build(np.array(ids, object))
    assert made.positions(np.array([*ids, *asked], object)).tolist() == [
        where.get(one, -1) for one in [*ids, *asked]
    ]
    assert made.ids(range(len(ids))).tolist() == ids == made.ids().tolist()


def test_a_slice_of_strings_is_its_own_ids_alone() -> None:
    whole = pa.array(["a", "bb", "ccc", "dddd"], pa.large_string())
    made = IdMap.build(whole.slice(1, 2))
    assert made.ids().tolist() == ["bb", "ccc"]
    assert made.positions(whole).tolist() == [-1, 0, 1, -1]
    assert made.positions(whole.slice(2)).tolist() == [1, -1]


def test_a_list_of_texts_is_never_as_wide_as_its_longest() -> None:
    ids = [f"item-{number}" for number in range(200_000)]
    IdMap.build(["a", "b"])  # pyarrow imports pandas at its first list of objects
    tracemalloc.start()
    built = IdMap.build([*ids, "x" * 1_000])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 60 * len(ids)
    assert built.positions(["x" * 1_000, "item-7", "no"]).tolist() == [200_000, 7, -1]


@pytest.mark.parametrize(
    "ids",
    [[5, 6, 7, 8], [3, 9, 12, 40], [40, -3, 12, 0], ["b", "", "a\u20ac", "item-7"]],
)
def test_opened_as_built_and_memory_mapped(ids: list[Any], tmp_path: Path) -> None:
    built = IdMap.build(np.array(ids))
    built.save(tmp_path)
    opened = IdMap.open(tmp_path)
    assert (
        opened.positions(ids).tolist() == [0, 1, 2, 3] == built.positions(ids).tolist()
    )
    assert opened.ids([2, 0]).tolist() == [ids[2], ids[0]]
    assert all(
        not array.flags.owndata and not array.flags.writeable
        for array in opened.arrays.values()
    )


def test_extended_at_the_end() -> None:
    for first, more in (([7, 3], [5]), (["x", "y"], ["a"])):
        made = IdMap.build(np.array(first)).extended(np.array(more))
        assert made.positions([*first, *more]).tolist() == [0, 1, 2]
        assert IdMap.build([]).extended(np.array(more)).positions(more).tolist() == [0]
    with pytest.raises(ValueError, match="a and 0 more are no int64"):
        IdMap.build([1]).extended(["a"])


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


def test_strings_that_collide_under_any_polynomial_have_hashes_of_their_own() -> None:
    """Words of Thue and Morse are equal modulo 2^64 for every odd factor: two names could block an export."""
    word = "a"
    while len(word) < 1024:
        word += word.translate(str.maketrans("ab", "ba"))
    made = IdMap.build([word, word.translate(str.maketrans("ab", "ba"))])
    assert made.positions([word[::-1], "a"]).tolist() in ([0, -1], [1, -1])
    assert IdMap.build(made.ids()).key == made.key, "equal ids give equal files"
    assert IdMap.build(["a", "b"]).key != IdMap.build(["ab", ""]).key


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the first key all strings have one hash; the next key parts them."""
    real, keys = hashed, list[bytes]()

    def first_alike(offsets: Any, content: Any, key: bytes) -> Any:
        keys.append(key)
        return (
            np.zeros(len(offsets) - 1, np.uint64)
            if key == keys[0]
            else real(offsets, content, key)
        )

    monkeypatch.setattr("torchrec_ext.retrieval.store.ids.hashed", first_alike)
    made = IdMap.build(["a", "b", "c"])
    assert made.key == keys[1] != keys[0]
    assert made.positions(["c", "a", "zz"]).tolist() == [2, 0, -1]
    with pytest.raises(ValueError, match="ids: b stands at rows 1 and 3"):
        IdMap.build(["a", "b", "c", "b"])
    monkeypatch.setattr(
        "torchrec_ext.retrieval.store.ids.hashed",
        lambda o, c, k: np.zeros(len(o) - 1, np.uint64),
    )
    with pytest.raises(
        ValueError,
        match="ids: 'a' and 'b' have one hash under 8 keys; rename one of them",
    ):
        IdMap.build(["a", "b"])


def test_a_map_of_strings_from_before_keys_is_opened(tmp_path: Path) -> None:
    made = IdMap.build(["b", "", "a\u20ac"])
    made.save(tmp_path)
    header = json.loads((tmp_path / "ids.json").read_text())
    (tmp_path / "ids.json").write_text(json.dumps({**header, "seed": 0}))
    np.save(tmp_path / "ids_sorted.npy", np.arange(3, dtype=np.uint64))
    opened = IdMap.open(tmp_path)
    opened.check()
    assert opened.positions(["a\u20ac", "b", "", "c"]).tolist() == [2, 0, 1, -1]
    (tmp_path / "ids.json").write_text(json.dumps({**header, "seed": "00"}))
    with pytest.raises(ValueError, match="its key has 1 bytes, must have 16"):
        IdMap.open(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 5, 4], "ids: 4 stands at rows 0 and 2"),
        (["u", "v", "v"], "ids: v stands at rows 1 and 2"),
        ([1, 2.5], "ids of type float64: 1.0 is not an id; ids are int64 or str"),
        ([1, None], "all ids must be int64, or all str"),
        ([2**63], "9223372036854775808 is beyond int64; give such ids as str"),
        ([1.0, 2.5], "ids of type float64: 1.0 is not an id; ids are int64 or str"),
        ([True, False], "ids of type bool"),
        (
            np.array([2**64 - 1], np.uint64),
            "18446744073709551615 is beyond int64; give such ids as str",
        ),
        (np.array(["a", None], object), "ids: row 1 has none"),
        (np.array(["a", 7], object), "all ids must be int64, or all str"),
        ([[1, 2]], r"ids: shape \(1, 2\); must be \(N,\)"),
        (["x" * 1025], "row 0 has 1,025 bytes; an id may have 1,024"),
    ],
)
def test_refused(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IdMap.build(ids)


def test_ids_of_the_other_type_are_refused_and_none_are_none() -> None:
    integers, strings = IdMap.build([1, 2]), IdMap.build(["1", "2"])
    with pytest.raises(
        ValueError, match="1 and 0 more are str, this catalogue's are int64"
    ):
        integers.positions(["1"])
    with pytest.raises(
        ValueError, match="2 and 1 more are int64, this catalogue's are str"
    ):
        strings.positions([2, 3])
    assert len(strings.positions([])) == len(integers.positions([])) == 0
    assert IdMap.build([]).positions([3]).tolist() == [-1]
    with pytest.raises(
        ValueError,
        match=r"positions: 2 is not a row of this catalogue, which has 2 \(0 to 1\)",
    ):
        integers.ids([0, 2])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    IdMap.build([3, 1]).save(tmp_path)
    (tmp_path / "ids_sorted.npy").write_bytes(b"short")
    with pytest.raises(ValueError, match=f"the id map in '{tmp_path}' cannot be read"):
        IdMap.open(tmp_path)
