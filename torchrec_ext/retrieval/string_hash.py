"""A 64-bit hash of many strings at once, the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LONGEST = 1024  # bytes of an id
_BLOCK = 2**14  # strings at a time, in a matrix as wide as the longest of them
_PRIMES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def hashed(offsets: NDArray[np.int64], content: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
    """(N,) a hash of each string: a polynomial of its bytes modulo 2^64, then mixed (splitmix64).

    Args:
        offsets: (N + 1,) where each string begins in ``content``.
        content: their UTF-8 bytes, one after the other.
        seed: another one gives other hashes.

    Raises:
        ValueError: a string of more than 1,024 bytes.
    """
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > _LONGEST:
        row = int(lengths.argmax())
        raise ValueError(f"ids: row {row} has {lengths[row]:,} bytes; an id may have {_LONGEST:,}")
    blocks = [slice(at, at + _BLOCK) for at in range(0, len(lengths), _BLOCK)]
    parts = [_block(offsets[:-1][rows], lengths[rows], content, seed) for rows in blocks]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _block(starts: NDArray[np.int64], lengths: NDArray[np.int64], content: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
    factor = np.uint64((_PRIMES[0] + 2 * seed) % 2**64)
    state = lengths.astype(np.uint64) + np.uint64(seed)
    for place in range(int(lengths.max(initial=0))):
        inside = lengths > place
        byte = content[np.where(inside, starts + place, 0)]
        state = np.where(inside, state * factor + byte + np.uint64(1), state)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_PRIMES[1])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_PRIMES[2])
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
