"""hashed(): 64-bit hashes of strings by SipHash, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_LONGEST = 1024  # most bytes of an id
_BLOCK = 2**14  # strings hashed at a time
_WORD = 8  # bytes hashed at a time
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


def string_buffers(
    strings: pa.LargeStringArray,
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns the offsets (N + 1,) of strings, and their bytes."""
    _, offsets, content = strings.buffers()
    first = strings.offset
    # Arrow pads its buffers, and a slice has those of its whole array, so there can be
    # more offsets than strings; no content at all is None.
    begins = np.frombuffer(offsets, np.int64)[first : first + len(strings) + 1]
    return begins, np.frombuffer(content or b"", np.uint8)
