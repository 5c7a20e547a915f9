"""Array columns of rows in memory or in files, as the columns of one number that a batch is made of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.schema import DataError
from torchrec_ext.schema.arrays import widths_of


def with_elements(chunk: Chunk, names: Iterable[str], where: str = "", first: int = 0) -> Chunk:
    """``chunk`` with the elements of array columns that are among ``names`` as columns of their own, in the array's place.

    Args:
        chunk: rows.
        names: as of a schema, ``profile[3]`` among them.
        where: file and row group, for the message.
        first: number of the first row.

    Raises:
        DataError: a row of an array column has another number of numbers.
    """
    widths = {column: width for column, width in widths_of(names, chunk).items() if column in chunk}
    if not widths:
        return chunk
    columns = {name: column for name, column in chunk.items() if name not in widths}
    for name, width in widths.items():
        matrix = _matrix(where, name, chunk[name], width, first)
        columns |= {f"{name}[{index}]": Column(matrix[:, index]) for index in range(width)}
    return Chunk(columns)


def _matrix(where: str, name: str, column: Column, width: int, first: int) -> np.ndarray[tuple[int, int], np.dtype[np.generic]]:
    """(B, W)."""
    lengths = column.lengths
    if (lengths != width).any():
        row = int((lengths != width).argmax())
        said = f"{where}, " if where else ""
        raise DataError(
            f"{said}column '{name}', row {first + row}: {lengths[row]} numbers, must be {width} in each row, as the model's "
            f"dense={{'{name}': {width}}} says"
        )
    return column.values.reshape(len(column), width)
