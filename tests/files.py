"""Whole parquet files in memory, as the package's reader has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec_ext.data.columns import Chunk, concatenate_rows
from torchrec_ext.data.files.sources import ParquetSource


def read_parquet(paths: Any, names: Sequence[str] = ()) -> Chunk:
    """The columns ``names`` of files, all by default."""
    source = ParquetSource(paths)
    names = names or source.columns
    return concatenate_rows(
        [source.read(group, names) for group in source.groups], names
    )
