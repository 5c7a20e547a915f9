"""IdMap: ids of a catalogue's rows to positions and back, in memory-mapped arrays; strings by a keyed 64-bit hash."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_LONGEST = 1024  # most bytes of an id
_BLOCK = 2**14  # strings hashed at a time
_WORD = 8  # bytes hashed at a time
_KEY_BYTES = 16
# SipHash's own constants
_SIP = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def hashed(
    offsets: NDArray[np.int64], content: NDArray[np.uint8], key: bytes
) -> NDArray[np.uint64]:
    """Hashes N strings by SipHash-1-3 (Aumasson and Bernstein 2012), with the same result on every machine.

    Without the key, nobody can choose strings with equal hashes.

    Args:
        offsets: (N + 1,) begin of each string in ``content``, and the end of the last.
        content: UTF-8 bytes of all strings, one after the other.
        key: 16 bytes that select one of many hash functions.

    Raises:
        ValueError: a string of more than 1,024 bytes.
    """
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > _LONGEST:
        row = int(lengths.argmax())
        raise ValueError(
            f"ids: row {row} has {lengths[row]:,} bytes; an id may have {_LONGEST:,}"
        )
    hashes = [np.zeros(0, np.uint64)]
    # In blocks, because the four states of a string take more memory than most ids.
    for start in range(0, len(lengths), _BLOCK):
        rows = slice(start, start + _BLOCK)
        hashes.append(_hash_block(offsets[:-1][rows], lengths[rows], content, key))
    return np.concatenate(hashes)


def _hash_block(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    content: NDArray[np.uint8],
    key: bytes,
) -> NDArray[np.uint64]:
    begin = int(starts[0])
    end = int(starts[-1] + lengths[-1])
    # The last word is read in full, so it needs bytes behind the last string.
    padded = np.zeros(end - begin + _WORD, np.uint8)
    padded[: end - begin] = content[begin:end]
    # A view with one word from each byte on, without a copy.
    words: NDArray[np.uint64] = np.ndarray(
        (end - begin + 1,), "<u8", padded, strides=(1,)
    )
    halves = np.frombuffer(key, "<u8").tolist()
    state = [
        np.full(len(starts), constant ^ half, np.uint64)
        for constant, half in zip(_SIP, 2 * halves, strict=True)
    ]
    # The last word of a string has its length as highest byte.
    ends = lengths.astype(np.uint64) << np.uint64(56)
    for number in range(int(lengths.max()) // _WORD + 1):
        remaining = lengths - _WORD * number
        # A slice gives views, an index array copies: it is only for strings of
        # different lengths.
        rows: Any = slice(None)
        if remaining.min() < 0:
            rows = np.flatnonzero(remaining >= 0)
        word = words[starts[rows] - begin + _WORD * number]
        last = np.flatnonzero(remaining[rows] < _WORD)
        bits = remaining[rows][last].astype(np.uint64) << np.uint64(3)
        word[last] = (word[last] & ((_ONE << bits) - _ONE)) | ends[rows][last]
        active_state = [each[rows] for each in state]
        active_state[3] ^= word
        active_state = _mix(*active_state)
        active_state[0] ^= word
        for before, after in zip(state, active_state, strict=True):
            before[rows] = after
    state[2] ^= np.uint64(0xFF)
    for _ in range(3):
        state = _mix(*state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


Hashes = NDArray[np.uint64]
_ONE = np.uint64(1)


def _mix(a: Hashes, b: Hashes, c: Hashes, d: Hashes) -> list[Hashes]:
    """Applies one round of SipHash to the four words of N states."""
    a = a + b
    c = c + d
    b = _rotate(b, 13) ^ a
    d = _rotate(d, 16) ^ c
    a = _rotate(a, 32) + d
    c = c + b
    d = _rotate(d, 21) ^ a
    b = _rotate(b, 17) ^ c
    return [a, b, _rotate(c, 32), d]


# Left and right shifts of each rotation, in the words' own type.
_SHIFTS = {
    bits: (np.uint64(bits), np.uint64(64 - bits)) for bits in (13, 16, 17, 21, 32)
}


def _rotate(values: Hashes, bits: int) -> Hashes:
    left_shift, right_shift = _SHIFTS[bits]
    rotated: Hashes = (values << left_shift) | (values >> right_shift)
    return rotated


IdArray = NDArray[np.int64]
KnownIds = NDArray[Any] | Sequence[int] | Sequence[str]
_INTEGERS = dict.fromkeys(("ids", "sorted", "order"), np.dtype(np.int64))
_ASCENDING = {"ids": np.dtype(np.int64)}  # they are their own sorted copy
_STRINGS = {
    "offsets": np.dtype(np.int64),
    "bytes": np.dtype(np.uint8),
    "sorted": np.dtype(np.uint64),
    "order": np.dtype(np.int64),
}
_KEYS = 8  # keys to try if two strings share a hash, which is next to impossible


class IdMap:
    """Maps ids, int64 or str, to *positions*, the rows 0 to I - 1 of a catalogue, and back.

    Integers are looked up by bisection of a sorted copy, or by arithmetic if they are consecutive. Strings are looked
    up by bisection of their 64-bit hashes and then compared. No Python object is created per id. An opened map reads
    memory-mapped files, shared with every other process that opens them.

    Args:
        arrays: arrays by file name, as :meth:`save` writes them.
        key: key of the strings' hash.

    Example:
        >>> ids = IdMap.build(np.array([30, 10, 20]))
        >>> ids.positions([10, 99]).tolist(), ids.ids([0, 2]).tolist()
        ([1, -1], [30, 20])
    """

    def __init__(self, arrays: dict[str, NDArray[Any]], key: bytes = b"") -> None:
        self.arrays = arrays
        self.key = key
        if "offsets" in arrays:
            self.kind = "str"
            # Arrow reads the arrays in place, so the strings of a map are those of the
            # mapped file.
            buffers = (pa.py_buffer(arrays["offsets"]), pa.py_buffer(arrays["bytes"]))
            self._strings = pa.LargeStringArray.from_buffers(
                len(arrays["offsets"]) - 1, *buffers
            )
        else:
            self.kind = "int64"
            self._first = _first_of_consecutive(arrays)

    @classmethod
    def build(cls, ids: KnownIds) -> IdMap:
        """Builds the map of a catalogue from the id of each position.

        Raises:
            ValueError: ids of another type than int64 or str, or an id at two positions.
        """
        values = checked_ids(ids)
        if isinstance(values, pa.Array):
            return cls._build_from_strings(values)
        return cls._build_from_integers(values)

    @classmethod
    def _build_from_integers(cls, ids: IdArray) -> IdMap:
        # Ascending ids are their own sorted copy.
        if np.all(ids[1:] > ids[:-1]):
            return cls({"ids": ids})
        order, ascending, twins = _sort(ids)
        _refuse_duplicates(twins, order, lambda position: ids[position])
        return cls({"ids": ids, "sorted": ascending, "order": order})

    @classmethod
    def _build_from_strings(cls, strings: pa.LargeStringArray) -> IdMap:
        offsets, content = string_buffers(strings)
        # Equal hashes of different strings would need a second comparison in every
        # look-up: try another key instead.
        for attempt in range(_KEYS):
            # Derive a key from all ids: equal ids give equal files, and nobody knows
            # the key beforehand.
            digest = hashlib.blake2b(
                digest_size=_KEY_BYTES, salt=attempt.to_bytes(_KEY_BYTES, "little")
            )
            digest.update(np.diff(offsets).astype("<i8").tobytes())
            digest.update(content[offsets[0] : offsets[-1]].tobytes())
            key = digest.digest()
            hashes = hashed(offsets, content, key)
            order, ascending, twins = _sort(hashes)
            firsts = strings.take(pa.array(order[twins]))
            seconds = strings.take(pa.array(order[twins + 1]))
            same = _equal(firsts, seconds)
            _refuse_duplicates(
                twins[same], order, lambda position: strings[position].as_py()
            )
            if not len(twins):
                return cls(
                    {
                        "offsets": offsets,
                        "bytes": content,
                        "sorted": ascending,
                        "order": order,
                    },
                    key,
                )
        first = strings[int(order[twins[0]])].as_py()
        second = strings[int(order[twins[0] + 1])].as_py()
        raise ValueError(
            f"ids: '{first[:60]}' and '{second[:60]}' have one hash under {_KEYS} keys; rename one of them"
        )

    def __len__(self) -> int:
        if self.kind == "str":
            return len(self._strings)
        return len(self.arrays["ids"])

    def positions(self, ids: KnownIds) -> IdArray:
        """Returns (N,) int64 positions of ids, -1 for an unknown one.

        Raises:
            ValueError: ids of another type than the catalogue's.
        """
        values = checked_ids(ids)
        kind = "str" if isinstance(values, pa.Array) else "int64"
        if len(values) and kind != self.kind:
            raise ValueError(
                f"ids: {values[0]!s} and {len(values) - 1} more are {kind}, this catalogue's are {self.kind}; convert "
                "them"
            )
        # An empty map has no last id to compare with.
        if not len(values) or not len(self):
            return np.full(len(values), -1, np.int64)
        if self.kind == "str":
            return self._string_positions(values)
        return self._integer_positions(values)

    def _integer_positions(self, ids: IdArray) -> IdArray:
        if self._first is not None:
            # A far smaller id wraps around to a position beyond the last.
            positions: IdArray = ids - self._first
            positions[positions.view(np.uint64) >= len(self)] = -1
            return positions
        ascending = self.arrays.get("sorted", self.arrays["ids"])
        # An id beyond the last one is compared with the last, and differs.
        index = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
        positions = index
        if "order" in self.arrays:
            positions = self.arrays["order"][index]
        return np.where(ascending[index] == ids, positions, -1)

    def _string_positions(self, ids: pa.LargeStringArray) -> IdArray:
        hashes = hashed(*string_buffers(ids), self.key)
        index = np.minimum(
            np.searchsorted(self.arrays["sorted"], hashes), len(self) - 1
        )
        positions = self.arrays["order"][index]
        # An unknown string can share a hash with a known one, so the strings are
        # compared too.
        same = (self.arrays["sorted"][index] == hashes) & _equal(
            self._strings.take(pa.array(positions)), ids
        )
        return np.where(same, positions, -1)

    def ids(self, positions: IdArray | Sequence[int] | None = None) -> NDArray[Any]:
        """Returns the ids at positions (N,), or all ids by default, as int64 or str objects.

        Raises:
            ValueError: a position outside 0 to I - 1.
        """
        if positions is None:
            if self.kind == "str":
                return self._strings.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
            return self.arrays["ids"]
        rows = np.asarray(positions, np.int64)
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ValueError(
                f"positions: {wrong[0]} is not a row of this catalogue, which has {len(self)} (0 to {len(self) - 1})"
            )
        if self.kind == "str":
            return self._strings.take(pa.array(rows)).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        return self.arrays["ids"][rows]

    def extended(self, ids: KnownIds) -> IdMap:
        """Returns a map with further ids appended after the last position.

        Raises:
            ValueError: as :meth:`build`.
        """
        new_ids = checked_ids(ids)
        if not len(self):
            return IdMap.build(ids)
        if (self.kind == "str") != isinstance(new_ids, pa.Array):
            raise ValueError(
                f"ids: {ids[0]!s} and {len(ids) - 1} more are no {self.kind}, as this catalogue's are; convert them"
            )
        if self.kind == "str":
            return IdMap.build(pa.concat_arrays([self._strings, new_ids]))
        return IdMap.build(np.concatenate([self.arrays["ids"], new_ids]))

    def check(self) -> None:
        """Refuses arrays with an id mapped to a wrong position, or to two positions.

        Raises:
            ValueError: the message names the array and the entry.
        """
        if self.kind == "str":
            try:
                self._strings.validate(full=True)
            except pa.ArrowInvalid as error:
                raise ValueError(f"ids: the strings are damaged ({error})") from None
            keys = hashed(self.arrays["offsets"], self.arrays["bytes"], self.key)
        else:
            keys = self.arrays["ids"]
        # Without a sorted copy the keys themselves must ascend.
        ascending = self.arrays.get("sorted", keys)
        order = self.arrays.get("order")
        wrong = np.flatnonzero(ascending[1:] <= ascending[:-1])
        if len(wrong):
            raise ValueError(
                f"ids: entry {int(wrong[0]) + 1} of the sorted ones is not greater than the one before it"
            )
        if (
            order is not None
            and len(order)
            and not 0 <= order.min() <= order.max() < len(self)
        ):
            raise ValueError(
                f"ids: their order names the positions {order.min()} to {order.max()}, there are {len(self)}"
            )
        if order is not None and not np.array_equal(keys[order], ascending):
            raise ValueError("ids: the sorted ones are not those of the positions")

    def save(self, folder: Path) -> None:
        """Writes the arrays to files in ``folder``."""
        header = {
            "kind": self.kind,
            "seed": self.key.hex() or 0,
            "arrays": list(self.arrays),
        }
        (folder / "ids.json").write_text(json.dumps(header) + "\n")
        for name, array in self.arrays.items():
            np.save(folder / f"ids_{name}.npy", array, allow_pickle=False)

    @classmethod
    def open(cls, folder: Path) -> IdMap:
        """Opens a map written by :meth:`save`, memory-mapped.

        Older maps hash strings without a key: such a map is rebuilt in the memory of this process.

        Raises:
            ValueError: a file that is missing or damaged.
        """
        try:
            header = json.loads((folder / "ids.json").read_text())
            names = [str(name) for name in header["arrays"]]
            seed = header["seed"]
            arrays: dict[str, NDArray[Any]] = {}
            for name in names:
                arrays[name] = np.asarray(
                    np.load(
                        folder / f"ids_{name}.npy", mmap_mode="r", allow_pickle=False
                    )
                )
            # Refuse wrong types and lengths, to prevent reads beyond an array's end.
            types = {
                name: array.dtype for name, array in arrays.items() if array.ndim == 1
            }
            is_text = "offsets" in arrays
            expected_types = _STRINGS if is_text else _INTEGERS
            if types != expected_types and (is_text or types != _ASCENDING):
                raise ValueError(f"its arrays are {types}, must be {expected_types}")
            rows = len(arrays["offsets"]) - 1 if is_text else len(arrays["ids"])
            lengths = {name: len(array) for name, array in arrays.items()}
            if not {lengths.get("sorted", rows), lengths.get("order", rows)} <= {rows}:
                raise ValueError(
                    f"its arrays have {list(lengths.values())} entries, of {rows} ids"
                )
            if not is_text:
                return cls(arrays)
            first, last = arrays["offsets"][[0, -1]]
            if not 0 <= first <= last <= lengths["bytes"]:
                raise ValueError(
                    f"its strings end at {last}, there are {lengths['bytes']} bytes"
                )
            if isinstance(seed, int):  # written before the hash had a key
                return cls.build(cls(arrays)._strings)
            key = bytes.fromhex(seed)
            if len(key) != _KEY_BYTES:
                raise ValueError(
                    f"its key has {len(key)} bytes, must have {_KEY_BYTES}"
                )
            return cls(arrays, key)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            IndexError,
        ) as error:
            raise ValueError(
                f"the id map in '{folder}' cannot be read ({error}); write the store again"
            ) from None


def checked_ids(ids: KnownIds) -> IdArray | pa.LargeStringArray:
    """Returns ids as int64, or as an Arrow array of strings without nulls.

    Raises:
        ValueError: ids of another type or shape.
    """
    if isinstance(ids, pa.Array):
        return ids
    if type(ids) is list and ids and type(ids[0]) is int:
        try:  # takes a third of numpy's time for the ids of a request
            return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), np.int64)
        except struct.error:  # some ids are not int64 numbers
            pass
    if isinstance(ids, list | tuple) and len(ids) and isinstance(ids[0], str):
        # A numpy string array would give every id the width of the longest.
        array = np.array(ids, dtype=object)
    else:
        array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids: shape {array.shape}; must be (N,), one id for each row")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind in "iu":
        if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
            raise ValueError(
                f"ids: {array.max()} is beyond int64; give such ids as str"
            )
        return array.astype(np.int64, copy=False)
    if array.dtype.kind in "UOT":
        try:
            # Not from pandas, whose missing values are NaN too: here a NaN is a wrong
            # id.
            strings = pa.array(array, type=pa.large_string(), from_pandas=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"ids: {error}; all ids must be int64, or all str"
            ) from None
        if strings.null_count:
            raise ValueError(
                f"ids: row {np.flatnonzero(strings.is_null())[0]} has none; give every row an id"
            )
        return strings
    raise ValueError(
        f"ids of type {array.dtype}: {array[0]!s} is not an id; ids are int64 or str"
    )


def string_buffers(
    strings: pa.LargeStringArray,
) -> tuple[IdArray, NDArray[np.uint8]]:
    """Returns the offsets (N + 1,) of strings, and their bytes."""
    _, offsets, content = strings.buffers()
    first = strings.offset
    # Arrow pads its buffers, and a slice has those of its whole array, so there can be
    # more offsets than strings; no content at all is None.
    begins = np.frombuffer(offsets, np.int64)[first : first + len(strings) + 1]
    return begins, np.frombuffer(content or b"", np.uint8)


def _equal(first: pa.Array, second: pa.Array) -> NDArray[np.bool_]:
    return pc.equal(first, second).to_numpy(zero_copy_only=False).astype(bool)  # type: ignore[no-any-return]


def _first_of_consecutive(arrays: dict[str, NDArray[Any]]) -> int | None:
    ids = arrays["ids"]
    # Without an order the ids ascend, so the first and the last tell whether any is
    # missing between them.
    if "order" in arrays or not len(ids):
        return None
    if int(ids[-1]) - int(ids[0]) != len(ids) - 1:
        return None
    return int(ids[0])


def _sort(keys: NDArray[Any]) -> tuple[IdArray, NDArray[Any], IdArray]:
    """Returns the stable order of keys, the keys in it, and the indices of those equal to their successor."""
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    return order, ascending, np.flatnonzero(ascending[1:] == ascending[:-1])


def _refuse_duplicates(
    twins: IdArray, order: IdArray, name: Callable[[int], object]
) -> None:
    """Raises ValueError for the first of ``twins``: indices of sorted ids equal to their successor."""
    if len(twins):
        index = int(twins[0])
        first, second = sorted((int(order[index]), int(order[index + 1])))
        raise ValueError(
            f"ids: {name(first)!s} stands at rows {first} and {second}; each id must be there once"
        )
