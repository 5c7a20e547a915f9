"""RowPool: which rows of a table with dynamic ids are free, and which ids must go.

Candidates: ids that wait until they have been seen often enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.ids.index import EMPTY
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.ids.ranks import IdRanks


class Candidates:
    """Ids of one table that wait for their admission, with their sightings.

    Args:
        most: number of ids beyond which the half is forgotten that was not seen for longest, but none of this step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order in which they were last seen.
        self._sightings: dict[int, int] = {}

    def take(self, ids: Tensor, sightings: Tensor) -> Tensor:
        """Takes out ids, (n,), and returns all their sightings, those of now among them, (n,) int64."""
        if not self._sightings:
            return sightings
        earlier = [self._sightings.pop(each, 0) for each in ids.tolist()]
        return sightings + sightings.new_tensor(earlier)

    def add(self, ids: Tensor, sightings: Tensor) -> None:
        """Adds ids that were taken out; the oldest are forgotten where there are too many."""
        self._sightings |= zip(ids.tolist(), sightings.tolist(), strict=True)
        count = len(self._sightings)
        if count > self._most:
            # Those of one step are in the order of their numbers, so the lowest would never be admitted.
            stay = max(self._most // 2, len(ids))
            self._sightings = dict(islice(self._sightings.items(), count - stay, None))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the ids in the order in which they were last seen, and their sightings."""
        return {
            "waiting_ids": torch.tensor([*self._sightings], dtype=torch.int64),
            "waiting_sightings": torch.tensor(
                [*self._sightings.values()], dtype=torch.int64
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of :meth:`state_dict`."""
        ids = state["waiting_ids"].tolist()
        self._sightings = dict(
            zip(ids, state["waiting_sightings"].tolist(), strict=True)
        )


class RowPool:
    """The rows of one table: the id of each, when and how often it was seen, and which rows are free.

    Args:
        name: name of the table.
        policy: settings of the table.
        sightings: sightings of each row by this rank since :meth:`score_sightings`, (capacity,) int32, written.
        seen: step at which this rank last saw each row, (capacity,) int32, written.

    Attributes:
        candidates: ids that wait for their admission.
        has_warned: whether it was said that the table is too small.
    """

    def __init__(
        self, name: str, policy: Dynamic, sightings: Tensor, seen: Tensor
    ) -> None:
        self.name = name
        self.policy = policy
        self.candidates = Candidates(policy.most_candidates)
        self.has_warned = False
        self._sightings = sightings
        self._seen = seen
        self.id_of = torch.full_like(seen, EMPTY, dtype=torch.int64)
        # Look-ups of all ranks so far.
        self._lookups = 0
        # Sightings that fade.
        self._score = torch.zeros_like(seen, dtype=torch.float32)
        # Rows are given out in a permuted order, so this counts the first of them.
        self._used = 1
        self._freed = self.id_of[:0]

    @property
    def live(self) -> int:
        """Number of ids with a row."""
        return self._used - 1 - len(self._freed)

    @property
    def free(self) -> int:
        """Number of rows without an id."""
        return self.policy.capacity - 1 - self.live

    def live_rows(self) -> Tensor:
        """Returns the rows with an id, ascending, (n,) int64."""
        return (self.id_of != EMPTY).nonzero().squeeze(1)

    def take(self, count: int) -> Tensor:
        """Returns up to ``count`` free rows: those that were freed, the lowest first, then those never used."""
        again = self._freed[:count]
        self._freed = self._freed[count:]
        return torch.cat([again, self._take_unused(count - len(again))])

    def _take_unused(self, count: int) -> Tensor:
        """Returns the next ``count`` rows that no id has had, spread over the whole table.

        The most frequent ids come first: in ascending order, the first rank of a row-wise table would hold them all.
        """
        last = min(self._used + count, self.policy.capacity)
        places = torch.arange(self._used, last, device=self._freed.device)
        self._used = last
        return spread_rows(places, self.policy.capacity)

    def give(self, rows: Tensor, ids: Tensor, sightings: Tensor, now: int) -> None:
        """Gives ``rows`` to ``ids``, which were seen so often before this step."""
        self.id_of[rows] = ids
        self._seen[rows] = now
        self._sightings[rows] = 0
        self._score[rows] = sightings.float()

    def release(self, rows: Tensor) -> Tensor:
        """Frees rows, and returns the ids that had them."""
        ids = self.id_of[rows]
        self.id_of[rows] = EMPTY
        self._score[rows] = 0.0
        # Sorted, so that rows are given again in one order, whatever the order of
        # evictions.
        self._freed = torch.cat([self._freed, rows]).sort().values
        return ids

    def lowest(self, count: int, now: int) -> Tensor:
        """Returns up to ``count`` rows to evict, (n,) int64, none that step ``now`` reads; of equal ones the lowest."""
        # Row 0 has no id, so it is never freed.
        can_go = (self.id_of != EMPTY) & (self._seen < now)
        count = min(count, int(can_go.sum()))
        if not count:
            return self._freed[:0]
        rank = self._seen.double()
        if self.policy.evict == "lfu":
            # Without this, yesterday's ids would make today's go, each seen once so
            # far: it cost .0164 of log loss where half of the items are new each day.
            silence = (now - rank) * (self._lookups / now)
            gone = silence > self.policy.half_life * self.policy.capacity
            rank = torch.where(gone, -silence, self._score.double())
        rank = torch.where(can_go, rank, math.inf)
        # Not topk, which breaks ties as it likes.
        limit = torch.kthvalue(rank, count).values
        below = rank < limit
        equal = (rank == limit) & can_go
        equal &= equal.cumsum(0) <= count - below.sum()
        return (below | equal).nonzero().squeeze(1)

    def expired_rows(self, now: int) -> Tensor:
        """Returns the rows that no rank has seen for longer than ``ttl`` steps, (n,) int64."""
        return (
            ((self._seen < now - self.policy.ttl) & (self.id_of != EMPTY))
            .nonzero()
            .squeeze(1)
        )

    def score_sightings(self, ranks: IdRanks) -> None:
        """Adds the sightings of all ranks to the scores: integers, so that ranks do not matter. Collective."""
        ranks.reduced(self._sightings)
        ranks.reduced(self._seen, "MAX")
        # Look-ups that found no row are sightings of row 0.
        lookups = int(self._sightings.sum())
        self._lookups += lookups
        decay = 0.5 ** (lookups / (self.policy.half_life * self.policy.capacity))
        self._score.mul_(decay).add_(self._sightings)
        self._sightings.zero_()

    def state_dict(self, ranks: IdRanks) -> dict[str, Any]:
        """Returns the state, alike on every rank; changes nothing, the scores neither. Collective."""
        return {
            "ids": self.id_of.clone(),
            "score": self._score.clone(),
            "seen": ranks.reduced(self._seen.clone(), "MAX"),
            "sightings": ranks.reduced(self._sightings.clone()),
            "used": self._used,
            "lookups": self._lookups,
            **self.candidates.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_first: bool) -> None:
        """Continues from a state of as many rows or fewer; only the first rank takes the sightings, sums over ranks."""
        self.candidates.load_state_dict(state)
        # Of a larger table the state has some rows alone.
        self.release(self.live_rows())
        rows = len(state["ids"])
        for target, name in (
            (self.id_of, "ids"),
            (self._score, "score"),
            (self._seen, "seen"),
        ):
            target[:rows] = state[name]
        # A vocabulary has none.
        self._lookups = int(state.get("lookups", 0))
        self._sightings.zero_()
        if is_first:
            self._sightings[:rows] = state["sightings"]
        self._used = 1
        # The order of a larger table is another, in which rows with an id stand anywhere.
        has_grown = rows < self.policy.capacity
        used = self.policy.capacity if has_grown else state["used"]
        used_rows = self._take_unused(used - 1)
        freed = used_rows[self.id_of[used_rows] == EMPTY]
        self._freed = freed if has_grown else freed.sort().values


def spread_rows(places: Tensor, capacity: int) -> Tensor:
    """Permutes 1 to ``capacity`` - 1 so that the first few of them lie in all parts of the table."""
    count = capacity - 1
    factor = max(1, int(count * 0.6180339887))
    while math.gcd(factor, count) > 1:
        factor += 1
    return 1 + (places - 1) * factor % count
