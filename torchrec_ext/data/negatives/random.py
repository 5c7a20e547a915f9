"""Random numbers by formula: each is a function of (key, position, draw), bit for bit alike in numpy and in torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.columns import Int64
from torchrec_ext.ids.index import mixed as mixed
from torchrec_ext.ids.index import shifted

Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
# The constants of splitmix64.
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_64 = np.uint64(_GOLDEN)
_FIRST_64 = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_64 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


@lru_cache(maxsize=256)
def stream(seed: int, *numbers: int) -> int:
    """Returns the 64-bit key of one stream of random numbers."""
    key = seed & _MASK
    for number in numbers:
        # An array of one number, because _mixed works in place and uint64 arrays wrap
        # around in silence.
        key = int(
            _mixed(np.array([(key * _GOLDEN + number + 1) & _MASK], dtype=np.uint64))[0]
        )
    return key


def uniform(key: int, positions: Int64, draws: Int64) -> Float64:
    """Returns numbers in [0, 1) with 53 random bits, one for each (position, draw); the arguments broadcast."""
    rows = _mixed(positions.astype(np.uint64) * _GOLDEN_64 + np.uint64(key))
    hashed = _mixed(rows + (draws.astype(np.uint64) + _ONE) * _GOLDEN_64)
    # A float64 holds 53 of the 64 bits.
    hashed >>= np.uint64(11)
    return np.asarray(hashed * 2.0**-53)


def _mixed(x: UInt64) -> UInt64:
    """Applies the finaliser of splitmix64 (Steele, Lea and Flood 2014) in place."""
    x ^= x >> np.uint64(30)
    x *= _FIRST_64
    x ^= x >> np.uint64(27)
    x *= _SECOND_64
    x ^= x >> np.uint64(31)
    return x


def device_uniform(key: int | Tensor, positions: Tensor, draws: Tensor) -> Tensor:
    """Returns :func:`uniform` on the device of ``positions``: int64 in, float64 out, without a synchronisation.

    A key that changes from call to call inside a captured step is a tensor (), :func:`signed`.
    """
    if isinstance(key, int):
        key = signed(key)
    rows = mixed(positions * signed(_GOLDEN) + key)
    hashed = mixed(rows + (draws + 1) * signed(_GOLDEN))
    return shifted(hashed, 11).double() * 2.0**-53


def signed(number: int) -> int:
    """Returns the int64 of the bits of a uint64: torch calculates with int64 alone."""
    return number - (1 << 64) if number >> 63 else number
