"""TowerPlacement: which ranks run which tower, and which ranks' rows each of them takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

PLACEMENTS = ("data_parallel", "tower_parallel", "auto")


class PlacementError(ValueError):
    """A placement is impossible; the message names the tower, the rank, the rule and the remedy."""


@dataclass(frozen=True, kw_only=True)
class TowerPlacement:
    """Assignment of ranks to towers.

    Every rank has rows of its own. A rank that runs a tower keeps its own rows for it; the rows of the other ranks are
    divided evenly among the tower's ranks.

    Args:
        ranks: ranks of each tower, ascending, by tower name.
        world_size: R, the number of ranks.

    Raises:
        PlacementError: a tower has no rank, or a rank does not exist or is named twice.

    Example:
        >>> placement = TowerPlacement.parse("user:0-1,item:2", ["user", "item"], world_size=4)
        >>> placement.ranks["user"], placement.targets("user", 0), placement.targets("user", 3)
        ((0, 1), [0], [0, 1])
        >>> placement.cuts("user", 0, 6), placement.cuts("user", 3, 6)
        ([(0, 6)], [(0, 0), (0, 6)])
        >>> str(placement)
        'user:0-1,item:2'
    """

    ranks: Mapping[str, tuple[int, ...]]
    world_size: int

    def __post_init__(self) -> None:
        for tower, ranks in self.ranks.items():
            if not ranks:
                raise PlacementError(
                    f"tower '{tower}' has no rank; give it at least one of 0 to {self.world_size - 1}"
                )
            strange = [rank for rank in ranks if not 0 <= rank < self.world_size]
            if strange:
                raise PlacementError(
                    f"tower '{tower}' is placed on rank {strange[0]}, but the job has ranks 0 to "
                    f"{self.world_size - 1}; name another rank, or start more of them"
                )
            if list(ranks) != sorted(set(ranks)):
                raise PlacementError(
                    f"tower '{tower}' is placed on {list(ranks)}; name each rank once, in ascending order"
                )

    @classmethod
    def parse(cls, text: str, towers: Sequence[str], world_size: int) -> TowerPlacement:
        """Parses ``user:0-1,item:2+4``: each tower with a rank or a range of ranks, or several joined by ``+``.

        Towers with the same ranks may be joined by ``+`` too: ``user+item:0,place:1``.

        Raises:
            PlacementError: the text has another form, or a tower does not exist, is placed twice, or not at all.
        """
        ranks = parse_ranks(text)
        unknown = [tower for tower in ranks if tower not in towers]
        if unknown:
            raise PlacementError(
                f"{text!r} names the tower '{unknown[0]}'; the towers are {', '.join(towers)}"
            )
        missing = [tower for tower in towers if tower not in ranks]
        if missing:
            raise PlacementError(
                f"{text!r} leaves the tower '{missing[0]}' without a rank; place every one of {', '.join(towers)}"
            )
        return cls(
            ranks={tower: ranks[tower] for tower in towers}, world_size=world_size
        )

    @classmethod
    def apart(cls, loads: Mapping[str, float], world_size: int) -> TowerPlacement:
        """Gives each rank one tower and each tower ranks in proportion to its load; few ranks run several towers each.

        Args:
            loads: cost of one row, by tower name, in any unit.
            world_size: R, the number of ranks.

        Example:
            >>> str(TowerPlacement.apart({"user": 3.0, "item": 1.0}, 4))
            'user:0-2,item:3'
            >>> str(TowerPlacement.apart({"a": 1, "b": 5, "c": 3}, 2))
            'a:1,b:0,c:1'
        """
        ranks: dict[str, list[int]] = {tower: [] for tower in loads}
        if world_size < len(loads):
            # Large towers are placed first, each on the least loaded rank, so that the
            # small ones even out the loads.
            totals = [0.0] * world_size
            for tower in sorted(loads, key=lambda tower: -loads[tower]):
                rank = totals.index(min(totals))
                totals[rank] += loads[tower]
                ranks[tower].append(rank)
        else:
            # Each further rank goes to the tower with the busiest ranks, because these
            # set the time of a step.
            counts = dict.fromkeys(loads, 1)
            for _ in range(world_size - len(loads)):
                busiest = max(loads, key=lambda tower: loads[tower] / counts[tower])
                counts[busiest] += 1
            first = 0
            for tower, count in counts.items():
                ranks[tower] = list(range(first, first + count))
                first += count
        return cls(
            ranks={tower: tuple(members) for tower, members in ranks.items()},
            world_size=world_size,
        )

    def targets(self, tower: str, rank: int) -> list[int]:
        """Returns the receivers of ``rank``'s rows for ``tower``: only itself if it runs the tower."""
        members = self.ranks[tower]
        if rank in members:
            return [rank]
        return list(members)

    def cuts(self, tower: str, rank: int, rows: int) -> list[tuple[int, int]]:
        """Returns (start, stop) of the share of ``rank``'s ``rows`` for each of :meth:`targets`.

        With equally many rows on every rank, the shares of a tower's ranks differ by one row at most.
        """
        members = self.ranks[tower]
        if rank in members:
            return [(0, rows)]
        others = [other for other in range(self.world_size) if other not in members]
        # The rows of all ranks without the tower form one sequence, which is cut into
        # equal shares for its ranks.
        first = others.index(rank) * rows
        total = len(others) * rows
        ends = [
            min(max(total * index // len(members) - first, 0), rows)
            for index in range(len(members) + 1)
        ]
        return list(pairwise(ends))

    def busiest(self, tower: str, rows: Sequence[int]) -> int:
        """Returns the row count of the busiest rank of ``tower`` if each rank r brings ``rows[r]`` rows."""
        sums = dict.fromkeys(self.ranks[tower], 0)
        for rank, count in enumerate(rows):
            for target, (start, stop) in zip(
                self.targets(tower, rank), self.cuts(tower, rank, count), strict=True
            ):
                sums[target] += stop - start
        return max(sums.values())

    def __str__(self) -> str:
        # A text that parse() takes, since plans and trials are named by it.
        return ",".join(
            f"{tower}:{_text(ranks)}" for tower, ranks in self.ranks.items()
        )


def parse_ranks(text: str) -> dict[str, tuple[int, ...]]:
    """Parses the ranks of each tower from a text; does not check that such towers and ranks exist.

    Raises:
        PlacementError: the text has another form.

    Example:
        >>> parse_ranks("user:0-1,item:2")
        {'user': (0, 1), 'item': (2,)}
        >>> parse_ranks("user+item:0,place:1")
        {'user': (0,), 'item': (0,), 'place': (1,)}
    """
    ranks: dict[str, tuple[int, ...]] = {}
    for entry in text.split(","):
        names, colon, ranges = entry.strip().partition(":")
        for tower in names.split("+"):
            if not tower or not colon or not ranges:
                fault = "names no tower"
                if tower:
                    fault = f"gives the tower '{tower}' no rank"
                raise PlacementError(
                    f"{text!r} {fault}; write {', '.join(PLACEMENTS)}, or ranks such as user:0-1,item:2+3"
                )
            if tower in ranks:
                raise PlacementError(
                    f"{text!r} places the tower '{tower}' twice; join its ranks with '+', as in {tower}:0+2"
                )
            ranks[tower] = tuple(sorted(_ranks(ranges, text)))
    return ranks


def _ranks(ranges: str, text: str) -> list[int]:
    ranks: list[int] = []
    for entry in ranges.split("+"):
        first, dash, last = entry.partition("-")
        if not dash:
            last = first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise PlacementError(
                f"{text!r}: {entry!r} is neither a rank, such as 0, nor a range of ranks, such as 0-1"
            )
        ranks += range(int(first), int(last) + 1)
    return ranks


def _text(ranks: Sequence[int]) -> str:
    texts = []
    # Within a run of consecutive ranks, a rank minus its index is constant.
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        text = str(run[0])
        if len(run) > 1:
            text += f"-{run[-1]}"
        texts.append(text)
    return "+".join(texts)
