"""Whether a damaged file would be found out: said once of a run's first file of each kind that would be read with other values."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pyarrow.parquet as pq

_CRC = 4  # the field of a page's header, after its type and its two sizes
_HEADER = 64  # bytes that hold the fields up to it
_told: set[str] = set()


def warn_of_parquet(name: str, path: str | Path, metadata: pq.FileMetaData) -> None:
    """Warns where the pages of a local file have no checksums; a checksum that is there is verified when its page is read.

    Args:
        name: what messages call it.
        path: of the file.
        metadata: its footer.
    """
    if "parquet" not in _told and metadata.num_row_groups and metadata.num_columns:
        column = metadata.row_group(0).column(0)
        start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        with open(path, "rb") as stream:
            stream.seek(start)
            header = stream.read(_HEADER)
        if not _has_checksum(header):
            _warn("parquet", f"{name}: parquet without page checksums")


def warn_of_arrow(name: str) -> None:
    """Warns of an Arrow IPC file: the format has no checksums."""
    _warn("arrow", f"{name}: Arrow IPC, which has no checksums")


def _warn(kind: str, what: str) -> None:
    """Once for each kind and run, on its first rank."""
    if kind in _told or os.environ.get("RANK", "0") != "0":
        return
    _told.add(kind)
    warnings.warn(
        f"{what}: a bit that flips on a disk or on its way is read as another value, and nobody is told; pyarrow writes parquet "
        "with checksums by write_page_checksum=True, as rec.data.preprocess does (.06 % of size), and they are verified here",
        stacklevel=3,
    )


def _has_checksum(header: bytes) -> bool:
    """Whether the header of a page, in Thrift's compact protocol, has the field ``crc``: up to it all fields are varints.

    Example:
        >>> _has_checksum(bytes.fromhex("1504 1510 1522 15c2a60f 4c15")), _has_checksum(bytes.fromhex("1504 1510 1522 4c15"))
        (True, False)
    """
    field, at = 0, 0
    while at < len(header):
        field += header[at] >> 4
        if field >= _CRC or header[at] & 15 != 5:  # of a type other than i32: a header that is not as it should be
            return field == _CRC
        at += 1
        while at < len(header) and header[at] & 128:
            at += 1
        at += 1
    return False
