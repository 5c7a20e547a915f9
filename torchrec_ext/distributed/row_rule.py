"""row_by_row(): whether updating the rows that a step reads is cheaper than sweeping the whole table, as measured."""

ROWS_PER_LOOKUP = 5
"""Rows of a table per look-up of a step above which only the rows that are read are updated.

Whole: each weight is read and written with its two moments, its gradient set to 0, added to and read. Row by row: each
look-up finds its row in six matrices, of which few lines are in a cache. Measured with 1,280 look-ups on one core, at
1, 4 and 16 rows per look-up a step takes 1.4, 2.1, 5.4 ms whole and 1.7, 2.4, 2.9 ms row by row; the lines meet at 5 or
6.
"""


WEIGHTS_ON_GPU = 1 << 23
"""Weights of a table on a GPU above which only the rows that are read are updated.

Whole: one kernel sweeps all weights. Row by row: some 40 small kernels, whatever the table's size. Measured on an H100
with Adam, D=32 and 1,280 look-ups: with 3.2, 32 and 128 M weights a step takes .20, .55, 1.91 ms whole and
.26, .27, .25 ms row by row; the lines meet at 8 M.
"""


def row_by_row(rows: int, lookups: int, width: int = 1, device: str = "cpu") -> bool:
    """Whether a captured step updates a table row by row.

    Args:
        rows: number of rows of the table.
        lookups: number of look-ups in the table in one step.
        width: weights of a row.
        device: type of the table's device.

    Example:
        >>> row_by_row(250_000, 256), row_by_row(654, 256), row_by_row(250_000, 256, 32, "cuda")
        (True, False, False)
    """
    is_swept_fast = device == "cuda" and rows * width < WEIGHTS_ON_GPU
    return rows > ROWS_PER_LOOKUP * lookups and not is_swept_fast
