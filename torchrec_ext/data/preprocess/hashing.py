"""A hash that numpy, DuckDB and Spark compute alike: the first 60 bits of MD5 over a text, integers written in decimal.

MD5 is no secret here and no safeguard: it is the one well mixed hash that every engine ships with the same result.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess.engines import Engine

_DIGITS = 15  # hexadecimal ones: 60 bits are never negative as int64


def hashed_id(text: str, buckets: int, salt: str) -> int:
    """1 to ``buckets``.

    Example:
        >>> hashed_id("sushi", 1000, ""), hashed_id("-7", 1000, "")
        (387, 748)
    """
    return int(md5(salt + text)[:_DIGITS], 16) % buckets + 1


def md5(text: str) -> str:
    """The hexadecimal digest of a text's UTF-8 bytes."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def hashed_id_expression(text: Any, buckets: int, salt: str, engine: Engine) -> Any:
    """The same as an Ibis expression over a string column; null stays null."""
    if salt:
        text = engine.text(salt) + text
    return (engine.hex_to_int(text.hexdigest("md5").substr(0, _DIGITS)) % buckets + 1).cast("int64")
