"""string_ids(): 64-bit ids of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.ids.index import EMPTY
from torchrec_ext.ids.siphash import hashed, string_buffers

_KEY = b"torchrec_ext ids"


def string_ids(
    strings: pa.Array | pa.ChunkedArray | NDArray[Any] | Sequence[str | None],
    key: bytes = _KEY,
) -> Tensor:
    """Hashes strings to ids for :class:`DynamicIds`, with the same result on every machine; (N,) int64.

    Two of n strings have one id with a probability of about n**2 / 2**65: 2.7e-6 for ten million, 2.7 % for a billion.
    A string that is None reads row 0.

    Args:
        strings: N strings.
        key: 16 bytes. If it is secret, nobody can choose strings with equal ids. Keep it with the checkpoint.

    Raises:
        ValueError: values that are no strings, a string of more than 1,024 bytes, or a key of another length.

    Example:
        >>> ids = string_ids(["anna", "bob", "anna"])
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    if len(key) != len(_KEY):
        raise ValueError(f"key: has {len(key)} bytes, must have {len(_KEY)}")
    column = (
        strings
        if isinstance(strings, pa.ChunkedArray)
        else pa.chunked_array([_array(strings)])
    )
    if not (
        pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
        or pa.types.is_null(column.type)
    ):
        raise ValueError(
            f"string ids: the values are {column.type}, must be str; whole numbers are ids as they are"
        )
    texts = column.cast(pa.large_string())
    array = pa.concat_arrays(
        [pa.array([], pa.large_string()), *texts.fill_null("").chunks]
    )
    hashes = hashed(*string_buffers(array), key)
    ids = torch.from_numpy(hashes.view(np.int64))
    if texts.null_count:
        ids[torch.from_numpy(texts.is_null().to_numpy())] = EMPTY
    return ids


def _array(strings: Any) -> pa.Array:
    try:
        return pa.array(strings)
    except pa.ArrowException as error:
        raise ValueError(
            f"string ids: {str(error)[:100]}; all values must be str"
        ) from None
