"""Share: which rows of each global batch are a rank's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """Rank r of R: a contiguous part of each global batch, of which the sizes differ by one row at most.

    Args:
        rank: r.
        world_size: R.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} of world_size={self.world_size}: rank must be 0 to {self.world_size - 1}")

    def part(self, count: int) -> slice:
        """Its places in a global batch of ``count`` rows."""
        return slice(self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size)

    def rows(self, batch_size: int) -> int:
        """Rows of its batch, padding included: the same on every rank."""
        return -(-batch_size // self.world_size)
