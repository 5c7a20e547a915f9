"""What is counted of a step: look-ups of tables, and work on whole tables and on all items. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """A table of embeddings, or a rank's shard of it.

    Args:
        name: path of its module; the table's own name if it is sharded.
        rows: number of rows.
        dim: width of a row.
        read: ids that a step looks up, repeats counted.
        sharding: sharding type by the plan, such as ``row_wise``; empty if there is no plan.
    """

    name: str
    rows: int
    dim: int
    read: int
    sharding: str = ""

    @property
    def numbers(self) -> int:
        """The numbers in all rows."""
        return self.rows * self.dim

    @property
    def numbers_read(self) -> int:
        """The numbers in the rows that a step looks up."""
        return self.read * self.dim


@dataclass(frozen=True, kw_only=True)
class WholeTableOp:
    """A line with ops on all rows of a table, of which few are looked up.

    Args:
        line: the user's line.
        rows: rows of the table.
        read: rows that a step looks up.
        seconds: seconds inside of the line's ops on all rows.
        backward_s: seconds inside of ops on all rows in backward.
    """

    line: str
    rows: int
    read: int
    seconds: float
    backward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AllItems:
    """A softmax over a large number of items.

    Args:
        line: the user's line.
        items: number of items.
        seconds: seconds of a step inside of ops on a tensor that has a dimension of so many entries.
    """

    line: str
    items: int
    seconds: float
