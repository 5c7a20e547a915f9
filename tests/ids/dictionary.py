"""The same as DynamicIds for one table, by Python dictionaries and one id after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.ids import Dynamic
from torchrec_ext.ids.dynamic import EVICTED_OF
from torchrec_ext.ids.rows import spread_rows


class Dictionary:
    """Rows by id, in the order that the law of DynamicIds names."""

    def __init__(self, policy: Dynamic, every: int = 1) -> None:
        self.policy = policy
        self.every = every
        self.waiting: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.id: dict[int, int] = {}
        self.candidates: dict[int, int] = {}
        self.score: dict[int, np.float32] = {}
        self.sightings: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.unused = spread_rows(
            torch.arange(1, policy.capacity), policy.capacity
        ).tolist()
        self.free: list[int] = []
        self.now = self.lookups = self.refused = self.all_lookups = 0

    def step(self, ids: list[int]) -> tuple[list[int], dict[int, int], list[int]]:
        """The rows of ids, the ids of fresh rows, and the ids that were evicted."""
        self.now += 1
        self.lookups += len(ids)
        for each in ids:
            row = self.row.get(each)
            if row:
                self.sightings[row] += 1
                self.seen[row] = self.now
            else:
                self.waiting[each] = self.waiting.get(each, 0) + 1
        fresh: dict[int, int] = {}
        evicted: list[int] = []
        if self.now % self.every == 0:
            fresh, evicted = self._admit()
            evicted += self._expire()
        return [self.row.get(each, 0) for each in ids], fresh, evicted

    def _admit(self) -> tuple[dict[int, int], list[int]]:
        new = self.waiting
        self.waiting = {}
        ready = [
            each
            for each in sorted(new)
            if self.candidates.get(each, 0) + new[each] >= self.policy.admit_after
        ]
        evicted = []
        missing = len(ready) - len(self.free) - len(self.unused)
        if missing > 0:
            evicted = self._evict(max(missing, self.policy.capacity // EVICTED_OF))
        fresh = {}
        for each in ready:
            if not self.free and not self.unused:
                self.refused += 1
                continue
            row = (self.free or self.unused).pop(0)
            self.row[each] = row
            self.id[row] = fresh[row] = each
            self.sightings[row] = 0
            self.score[row] = np.float32(new[each])
            self.seen[row] = self.now
            self.candidates.pop(each, None)
        waiting = sorted(set(new) - set(self.row))
        for each in waiting:
            # Once more at the end: they are in the order in which they were seen.
            earlier = self.candidates.pop(each, 0)
            self.candidates[each] = earlier + new[each]
        most = self.policy.most_candidates
        if len(self.candidates) > most:
            stay = max(most // 2, len(waiting))
            for each in list(self.candidates)[: len(self.candidates) - stay]:
                del self.candidates[each]
        return fresh, evicted

    def _add_sightings(self) -> None:
        left = 0.5 ** (self.lookups / (self.policy.half_life * self.policy.capacity))
        decay = np.float32(left)
        self.all_lookups += self.lookups
        self.lookups = 0
        for row in self.score:
            self.score[row] = np.float32(
                np.float32(self.score[row]) * decay + np.float32(self.sightings[row])
            )
            self.sightings[row] = 0

    def _evict(self, count: int) -> list[int]:
        self._add_sightings()
        rank: Mapping[int, float] = self.seen
        if self.policy.evict == "lfu":
            rank = {row: self._rank(row) for row in self.score}
        able = sorted((rank[row], row) for row in self.id if self.seen[row] < self.now)
        return self._remove([row for _, row in able[:count]])

    def _rank(self, row: int) -> float:
        silence = float(self.now - self.seen[row]) * (self.all_lookups / self.now)
        if silence > self.policy.half_life * self.policy.capacity:
            return -silence
        return float(self.score[row])

    def _expire(self) -> list[int]:
        if not self.policy.ttl:
            return []
        self._add_sightings()
        return self._remove(
            [row for row in self.id if self.seen[row] < self.now - self.policy.ttl]
        )

    def _remove(self, rows: list[int]) -> list[int]:
        evicted = []
        for row in sorted(rows):
            each = self.id.pop(row)
            for by in (self.score, self.sightings, self.seen):
                del by[row]
            del self.row[each]
            evicted.append(each)
        self.free = sorted(self.free + rows)
        return evicted


def drifting(
    batches: int, size: int, tables: int, *, catalogue: int, new: int, seed: int = 0
) -> Iterator[list[Tensor]]:
    """Batches of random 64-bit ids by table, of a catalogue in which ``new`` ids a batch take the place of others."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(1 / np.arange(1, catalogue + 1) ** 1.05)
    shares /= shares[-1]
    names = random.integers(
        -(2**63) + 1, 2**63 - 1, (tables, catalogue + new * batches), dtype=np.int64
    )
    places = [random.permutation(catalogue) for _ in range(tables)]
    for batch in range(batches):
        yield [
            torch.from_numpy(
                names[
                    table,
                    new * batch
                    + places[table][np.searchsorted(shares, random.random(size))],
                ]
            )
            for table in range(tables)
        ]
