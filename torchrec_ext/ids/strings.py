"""string_ids(): 64-bit ids of strings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.ids.index import EMPTY

_KEY = b"torchrec_ext ids"


def string_ids(
    strings: pa.Array | pa.ChunkedArray | NDArray[Any] | Sequence[str | None],
) -> Tensor:
    """Hashes strings to ids for :class:`DynamicIds` by BLAKE2, with the same result on every machine; (N,) int64.

    Two of n strings have one id with a probability of about n**2 / 2**65: 2.7e-6 for ten million, 2.7 % for a billion.
    A string that is None reads row 0.

    Args:
        strings: N strings.

    Raises:
        ValueError: values that are no strings.

    Example:
        >>> ids = string_ids(["anna", "bob", "anna"])
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    try:
        array = pa.array(strings)
    except pa.ArrowException as error:
        raise ValueError(
            f"string ids: {str(error)[:100]}; all values must be str"
        ) from None
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if not (is_text or pa.types.is_null(array.type)):
        raise ValueError(
            f"string ids: the values are {array.type}, must be str; whole numbers are ids as they are"
        )
    # Each distinct string is hashed once; the last place is that of None.
    encoded = array.cast(pa.large_string()).dictionary_encode()
    ids = [_hashed(text) for text in encoded.dictionary.to_pylist()]
    places = encoded.indices.fill_null(len(ids)).to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array([*ids, EMPTY])[places])


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=_KEY).digest()
    return int.from_bytes(digest, "little", signed=True)
