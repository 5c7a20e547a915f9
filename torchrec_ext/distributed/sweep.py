"""Whether moving the rows that a step reads is cheaper than sweeping the whole table: a measured rule."""

from __future__ import annotations

ROWS_PER_LOOKUP = 5
"""Rows of a table per look-up of a step from which only the rows that are read are moved.

Whole: each weight is read and written with its two moments, its gradient set to 0, added to and read. Row by row: each look-up
finds its row in six matrices, of which few lines are in a cache. benchmarks/small_model.py measures both (row ``sweep``): at 1, 4
and 16 rows per look-up a step takes 1.4, 2.1, 5.4 ms whole and 1.7, 2.4, 2.9 ms row by row; the lines meet at 5 or 6.
"""


def row_by_row(rows: int, lookups: int) -> bool:
    """Whether a captured step moves a table row by row.

    Args:
        rows: of the table.
        lookups: of it in one step.

    Example:
        >>> row_by_row(250_000, 256), row_by_row(654, 256)
        (True, False)
    """
    return rows > ROWS_PER_LOOKUP * lookups
