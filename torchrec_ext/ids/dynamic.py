"""DynamicIds: raw 64-bit ids to rows of tables of fixed capacity: which ids have a row, which wait, which must go.

Ids are mapped before a batch is made, on every rank alike; what is behind, the shardings, TorchRec's pipeline, kernels,
sees rows. A row that is given to an id is fresh: whoever holds the weights must initialise it, and its optimizer state,
before the step that looks it up. The notes about it travel with the batch, see :class:`Fresh`.

The law: no two live ids share a row, and an id that is not live reads row 0. All that happens depends on the global
batches so far: not on the number of ranks, nor on the order within a batch, nor on the layout of the index. So sums
are over integers, ties go to the lowest row, and new ids are taken in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.index import EMPTY, IdIndex, Layout

Evict = Literal["lfu", "lru"]
# An index value has 32 bits, of which one is a candidate's mark and one the sign.
_MOST_ROWS = 2**31 - 1
_MOST_SIGHTINGS = 2**28


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """How the ids of a table come and go.

    Args:
        capacity: rows of the table; row 0 is that of all ids without a row.
        admit_after: sightings in training before an id gets a row; from 2 on, row 0 learns from every first sight.
        evict: which ids make room: ``lfu``, the least frequent, or ``lru``, those not seen for longest.
        half_life: look-ups for each row of the table in which counts of sightings halve under ``lfu``: with 4 and 1,000
            rows, every 4,000 look-ups. Infinity never forgets, and keeps what was popular once.
        ttl: steps after which an id that was not seen loses its row in any case; 0 for never.
        share: share of the rows that an eviction frees: few at a time, but not one by one.
        candidates: ids that may be counted before their admission; beyond it, those not seen lately are forgotten. By
            default as many as rows.

    Raises:
        ValueError: a setting out of its range.
    """

    capacity: int
    admit_after: int = 1
    evict: Evict = "lfu"
    half_life: float = 4.0
    ttl: int = 0
    share: float = 1 / 64
    candidates: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.capacity <= _MOST_ROWS:
            raise ValueError(
                f"capacity={self.capacity:,}: must be from 2 to {_MOST_ROWS:,} rows, of which row 0 is that of unknown "
                "ids"
            )
        if not 1 <= self.admit_after <= _MOST_SIGHTINGS:
            raise ValueError(f"admit_after={self.admit_after:,}: must be from 1 to {_MOST_SIGHTINGS:,} sightings")
        if self.evict not in get_args(Evict):
            raise ValueError(f"evict={self.evict!r}: must be one of {', '.join(get_args(Evict))}")
        if not self.half_life > 0:
            raise ValueError(f"half_life={self.half_life}: must be above 0 look-ups for each row; inf forgets nothing")
        if self.ttl < 0:
            raise ValueError(f"ttl={self.ttl}: must be 0 or more steps; 0 evicts no id for its age")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: must be above 0 and at most 1")
        if self.candidates is not None and self.candidates < 0:
            raise ValueError(f"candidates={self.candidates}: must be 0 or more ids")

    @property
    def most_candidates(self) -> int:
        """Number of ids that are counted before their admission."""
        if self.admit_after == 1:
            return 0
        return self.capacity if self.candidates is None else self.candidates


class _Table:
    """The rows of one table in the arena, and which of them are free."""

    def __init__(self, name: str, policy: Dynamic, start: int, device: torch.device) -> None:
        self.name = name
        self.policy = policy
        self.rows = slice(start, start + policy.capacity)
        # Rows are given out in a permuted order, so this counts the first of them.
        self.used = 1
        self.freed = torch.empty(0, dtype=torch.int64, device=device)
        self.candidates = 0

    @property
    def live(self) -> int:
        """Number of ids with a row."""
        return self.used - 1 - len(self.freed)

    def never_used(self, count: int, device: torch.device) -> Tensor:
        """Returns the next ``count`` rows that no id has had, (n,) int64, spread over the whole table.

        The most frequent ids come first: in ascending order, the first rank of a row-wise table would hold them all.
        """
        last = min(self.used + count, self.policy.capacity)
        places = torch.arange(self.used, last, device=device)
        self.used = last
        return spread_rows(places, self.policy.capacity)


def spread_rows(places: Tensor, capacity: int) -> Tensor:
    """Permutes 1 to ``capacity`` - 1 so that the first few of them lie in all parts of the table."""
    count = capacity - 1
    factor = max(1, int(count * 0.6180339887))
    while math.gcd(factor, count) > 1:
        factor += 1
    return 1 + (places - 1) * factor % count


class DynamicIds:
    """Gives the ids of several tables rows; every rank has all of it, and all ranks call each method together.

    Args:
        tables: settings of each table, by name.
        every: steps between two admissions; meanwhile new ids wait and read row 0. An admission costs about a
            millisecond whatever it admits: 8 pays where steps are short or ranks several.
        group: the ranks that share the ids; by default all ranks of the job, if there is a process group.
        device: device of the index.

    Attributes:
        now: number of steps so far.
        counts: numbers of ``lookups`` in training, of those that read row 0 (``unknown``), of ids ``admitted``,
            ``evicted``, ``refused`` (no row was free that this step does not read) and ``forgotten`` (candidates); of
            this rank for the first two, else of all.

    Example:
        >>> ids = DynamicIds({"item": Dynamic(capacity=4)})
        >>> rows, fresh = ids.step({"item": torch.tensor([900, -7, 900])})
        >>> rows["item"].tolist(), fresh[0].ids.tolist()
        ([2, 1, 2], [-7, 900])
        >>> ids.rows({"item": torch.tensor([900, 5])})["item"].tolist()
        [2, 0]
    """

    def __init__(
        self,
        tables: Mapping[str, Dynamic],
        *,
        every: int = 1,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not tables:
            raise ValueError("tables={}: name at least one table, as in {'item': Dynamic(capacity=1_000_000)}")
        if every < 1:
            raise ValueError(f"every={every}: must be 1 step or more")
        self._device = device or torch.device("cpu")
        self._every = every
        self._group = group
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self._world_size = dist.get_world_size(group) if several else 1
        self._tables: list[_Table] = []
        total = 0
        for name, policy in tables.items():
            self._tables.append(_Table(name, policy, total, self._device))
            total += policy.capacity
        self._starts = torch.tensor([table.rows.start for table in self._tables], device=self._device)
        self._admit_after = torch.tensor([policy.admit_after for policy in tables.values()], device=self._device)
        self.now = 0
        self.counts = dict.fromkeys(("lookups", "unknown", "admitted", "evicted", "refused", "forgotten"), 0)
        # Look-ups of this rank that found no row since the last admission: table, id, number; (n, 3) each.
        self._waiting: list[Tensor] = []
        self._id_of = torch.full((total,), EMPTY, dtype=torch.int64, device=self._device)
        self._score = torch.zeros(total, device=self._device)
        # Of this rank alone, since they were last added to the scores.
        self._sightings = torch.zeros(total, dtype=torch.int32, device=self._device)
        self._seen = torch.zeros(total, dtype=torch.int32, device=self._device)
        self._index = self._new_index()

    def _new_index(self) -> IdIndex:
        sizes = [table.policy.capacity + table.policy.most_candidates for table in self._tables]
        return IdIndex(sizes, self._device)

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self._tables]

    @property
    def live(self) -> dict[str, int]:
        """Number of ids with a row, by table."""
        return {table.name: table.live for table in self._tables}

    def figures(self) -> dict[str, float]:
        """Returns the figures of a record: ``ids_live`` and the counts, and the share of look-ups that read row 0."""
        figures: dict[str, float] = {"ids_live": sum(self.live.values())}
        for name in ("admitted", "evicted", "refused"):
            figures[f"ids_{name}"] = self.counts[name]
        figures["ids_unknown"] = self.counts["unknown"] / max(1, self.counts["lookups"])
        return figures

    def live_ids(self, table: str) -> tuple[Tensor, Tensor]:
        """Returns the ids of a table that have a row, and their rows, ascending; (n,) int64 each."""
        ids = self._id_of[self._table(table).rows]
        rows = (ids != EMPTY).nonzero().squeeze(1)
        return ids[rows], rows

    def _table(self, name: str) -> _Table:
        for table in self._tables:
            if table.name == name:
                return table
        raise ValueError(f"table '{name}' has no dynamic ids; the tables are {', '.join(self.names)}")

    def rows(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the rows of ids, (n,) int64 by table; 0 for an id without a row. Changes nothing; not collective."""
        flat, layout = self._flat(ids)
        return self._by_table(self._index.find(flat, layout).clamp(min=0), ids)

    def _flat(self, ids: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        """Returns the ids of all tables one after the other, and their layout."""
        unknown = [name for name in ids if name not in self.names]
        if unknown:
            self._table(unknown[0])
        for name, values in ids.items():
            if values.dtype != torch.int64:
                raise ValueError(
                    f"table '{name}': ids are {values.dtype}, must be int64; convert them where they are read"
                )
        pieces = [ids[name].reshape(-1) for name in self.names if name in ids]
        layout = self._index.layout([ids[name].numel() if name in ids else 0 for name in self.names])
        return torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *pieces]), layout

    def _by_table(self, rows: Tensor, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        present = [name for name in self.names if name in ids]
        pieces = torch.split(rows, [ids[name].numel() for name in present])
        return {name: piece.view(ids[name].shape) for name, piece in zip(present, pieces, strict=True)}

    @torch.no_grad()
    def step(self, ids: Mapping[str, Tensor], *, again: bool = False) -> tuple[dict[str, Tensor], tuple[Fresh, ...]]:
        """Counts a training batch of this rank, admits and evicts; collective.

        Args:
            ids: int64 ids by table, of any shape; ranks may have different numbers of them.
            again: whether these are further ids of the same step, whose rows so far must stay.

        Returns:
            The rows of the ids, of the same shapes, and what must be initialised before they are looked up.
        """
        flat, layout = self._flat(ids)
        self.now += not again
        rows = self._index.find(flat, layout).clamp_(min=0)
        places = rows + self._starts[layout.table]
        self._sightings.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        self._seen.index_fill_(0, places, self.now)
        missing = (rows == 0).nonzero().squeeze(1)
        self.counts["lookups"] += len(flat)
        self.counts["unknown"] += len(missing)
        self._waiting.append(torch.stack([layout.table[missing], flat[missing], torch.ones_like(missing)], dim=1))
        changes = _Changes(self.names)
        if self.now % self._every == 0:
            waiting = torch.cat(self._waiting)
            self._waiting = []
            local, place_of_waiting = _summed(waiting)
            everyones, place_of_local = _summed(self._gathered(local), local)
            found = self._admit(everyones, changes)[place_of_local][place_of_waiting]
            # The last of those that waited are this batch's.
            rows[missing] = found[len(found) - len(missing) :]
            self.counts["unknown"] -= int((rows[missing] > 0).sum())
            self._expire(changes)
        return self._by_table(rows, ids), changes.notes()

    def _gathered(self, new: Tensor) -> Tensor:
        """Returns the (n, 3) rows of all ranks, one rank after the other."""
        if self._world_size == 1:
            return new
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._world_size)]
        dist.all_gather(sizes, torch.tensor([len(new)], device=self._device), group=self._group)
        counts = [int(size) for size in sizes]
        padded = new.new_zeros(max(counts), 3)
        padded[: len(new)] = new
        pieces = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(pieces, padded, group=self._group)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    def _admit(self, new: Tensor, changes: _Changes) -> Tensor:
        """Returns the rows of (n, 3) tables, ids and numbers in canonical order; 0 for an id that is not admitted."""
        number, ids, sightings = new.unbind(1)
        rows = torch.zeros_like(ids)
        if not len(ids):
            return rows
        can_have_row = ids != EMPTY
        slots, counted = self._index.slots(ids, self._index.of(number))
        # A look-up of EMPTY finds an empty place.
        counted &= can_have_row
        total = sightings + torch.where(counted, _sightings_of(self._index.values(slots)), 0)
        ready = can_have_row & (total >= self._admit_after[number])
        for index, table in enumerate(self._tables):
            chosen = (ready & (number == index)).nonzero().squeeze(1)
            given = self._take(table, len(chosen), changes)
            self.counts["refused"] += len(chosen) - len(given)
            chosen = chosen[: len(given)]
            rows[chosen] = given
            self._give(table, given, ids[chosen], sightings[chosen])
            changes.admit(table.name, given, ids[chosen])
            self.counts["admitted"] += len(given)
        # The lowest bit marks a candidate as seen since candidates were last forgotten.
        values = torch.where(rows > 0, rows, -(2 * total.clamp(max=_MOST_SIGHTINGS) + 1))
        self._index.set(slots[counted], values[counted])
        absent = (~counted & can_have_row).nonzero().squeeze(1)
        self._index.insert(ids[absent], number[absent], values[absent])
        joined = (rows == 0) & ~counted & can_have_row
        left = (rows > 0) & counted
        for index, table in enumerate(self._tables):
            of_table = number == index
            table.candidates += int((joined & of_table).sum()) - int((left & of_table).sum())
            if table.candidates > table.policy.most_candidates:
                self._forget(index)
        return rows

    def _give(self, table: _Table, rows: Tensor, ids: Tensor, sightings: Tensor) -> None:
        places = rows + table.rows.start
        self._id_of[places] = ids
        self._seen[places] = self.now
        self._sightings[places] = 0
        self._score[places] = sightings.float()

    def _take(self, table: _Table, wanted: int, changes: _Changes) -> Tensor:
        """Returns up to ``wanted`` free rows: those that were evicted, the lowest first, then those never used."""
        free = len(table.freed) + table.policy.capacity - table.used
        if wanted > free:
            self._evict(table, max(wanted - free, int(table.policy.share * table.policy.capacity)), changes)
        again = table.freed[:wanted]
        table.freed = table.freed[wanted:]
        return torch.cat([again, table.never_used(wanted - len(again), self._device)])

    def _evict(self, table: _Table, count: int, changes: _Changes) -> None:
        """Frees the rows of lowest rank, but none that this step reads; of equal ones the lowest rows."""
        self._add_sightings(table)
        # Row 0 has no id, so it is never freed.
        can_go = (self._id_of[table.rows] != EMPTY) & (self._seen[table.rows] < self.now)
        count = min(count, int(can_go.sum()))
        if not count:
            return
        rank = self._score[table.rows].double() if table.policy.evict == "lfu" else self._seen[table.rows].double()
        rank = torch.where(can_go, rank, math.inf)
        # Not topk, which breaks ties as it likes.
        limit = torch.kthvalue(rank, count).values
        below = rank < limit
        equal = (rank == limit) & can_go
        equal &= equal.cumsum(0) <= count - below.sum()
        self._remove(table, (below | equal).nonzero().squeeze(1), changes)

    def _add_sightings(self, table: _Table) -> None:
        """Adds the sightings of all ranks to the scores; integers, whose sum does not depend on the ranks."""
        if self._world_size > 1:
            dist.all_reduce(self._sightings[table.rows], dist.ReduceOp.SUM, group=self._group)
            dist.all_reduce(self._seen[table.rows], dist.ReduceOp.MAX, group=self._group)
        # Look-ups that found no row are sightings of row 0.
        lookups = int(self._sightings[table.rows].sum())
        decay = 0.5 ** (lookups / (table.policy.half_life * table.policy.capacity))
        self._score[table.rows].mul_(decay).add_(self._sightings[table.rows])
        self._sightings[table.rows] = 0

    def _remove(self, table: _Table, rows: Tensor, changes: _Changes) -> None:
        places = rows + table.rows.start
        ids = self._id_of[places]
        number = torch.full_like(ids, self._tables.index(table))
        self._index.remove(self._index.slots(ids, self._index.of(number))[0])
        self._id_of[places] = EMPTY
        self._score[places] = 0.0
        table.freed = torch.cat([table.freed, rows]).sort().values
        self.counts["evicted"] += len(rows)
        changes.evict(table.name, ids)

    def _expire(self, changes: _Changes) -> None:
        for table in self._tables:
            if table.policy.ttl:
                self._add_sightings(table)
                is_old = self._seen[table.rows] < self.now - table.policy.ttl
                is_old &= self._id_of[table.rows] != EMPTY
                self._remove(table, is_old.nonzero().squeeze(1), changes)

    def _forget(self, number: int) -> None:
        """Forgets the candidates that were not seen since this was last done, and unmarks the others."""
        items = self._index.items()
        of_table = (items.table == number) & (items.values < 0)
        slots = items.slots[of_table]
        values = items.values[of_table]
        is_marked = (values & 1) == 1
        self._index.remove(slots[~is_marked])
        self._index.set(slots[is_marked], values[is_marked] + 1)
        self.counts["forgotten"] += int((~is_marked).sum())
        self._tables[number].candidates = int(is_marked.sum())

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later steps depend on, alike on every rank; changes nothing. Collective."""
        sightings = self._sightings.clone()
        seen = self._seen.clone()
        if self._world_size > 1:
            dist.all_reduce(sightings, dist.ReduceOp.SUM, group=self._group)
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        waiting, _ = _summed(torch.cat([torch.empty(0, 3, dtype=torch.int64, device=self._device), *self._waiting]))
        items = self._index.items()
        tables = {}
        for number, table in enumerate(self._tables):
            of_table = (items.table == number) & (items.values < 0)
            # In the order of ids, because that in the index depends on its layout.
            order = items.ids[of_table].argsort()
            tables[table.name] = {
                "ids": self._id_of[table.rows].clone(),
                "score": self._score[table.rows].clone(),
                "seen": seen[table.rows],
                "sightings": sightings[table.rows],
                "candidates": items.ids[of_table][order],
                "candidate_values": items.values[of_table][order],
                "used": table.used,
            }
        return {"now": self.now, "counts": dict(self.counts), "waiting": self._gathered(waiting), "tables": tables}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of :meth:`state_dict`, on any number of ranks.

        Raises:
            ValueError: the state is of other tables, or of another capacity.
        """
        saved = state["tables"]
        if list(saved) != self.names:
            raise ValueError(f"the saved ids are of tables {', '.join(saved)}, not of {', '.join(self.names)}")
        for table in self._tables:
            capacity = len(saved[table.name]["ids"])
            if capacity != table.policy.capacity:
                raise ValueError(
                    f"table '{table.name}': capacity={table.policy.capacity:,}, but {capacity:,} rows were saved; set "
                    f"capacity={capacity}"
                )
        self.now = state["now"]
        self.counts = dict(state["counts"])
        is_first = self._world_size == 1 or dist.get_rank(self._group) == 0
        # Sightings and what waits are sums over ranks, so one rank has them all.
        self._waiting = [state["waiting"].to(self._device)] if is_first else []
        self._index = self._new_index()
        for number, table in enumerate(self._tables):
            tensors = {}
            for name, value in saved[table.name].items():
                if isinstance(value, Tensor):
                    tensors[name] = value.to(self._device)
            ids = tensors["ids"]
            self._id_of[table.rows] = ids
            self._score[table.rows] = tensors["score"]
            self._seen[table.rows] = tensors["seen"]
            self._sightings[table.rows] = tensors["sightings"] if is_first else 0
            table.used = 1
            given = table.never_used(saved[table.name]["used"] - 1, self._device)
            table.freed = given[ids[given] == EMPTY].sort().values
            table.candidates = len(tensors["candidates"])
            live = (ids != EMPTY).nonzero().squeeze(1)
            known = torch.cat([ids[live], tensors["candidates"]])
            values = torch.cat([live, tensors["candidate_values"]])
            self._index.insert(known, torch.full_like(known, number), values)


class _Changes:
    """Collects what one step changes, by table."""

    def __init__(self, names: Sequence[str]) -> None:
        self._admitted: dict[str, tuple[Tensor, Tensor]] = {}
        self._evicted: dict[str, list[Tensor]] = {}
        self._names = names

    def admit(self, table: str, rows: Tensor, ids: Tensor) -> None:
        self._admitted[table] = (rows, ids)

    def evict(self, table: str, ids: Tensor) -> None:
        self._evicted.setdefault(table, []).append(ids)

    def notes(self) -> tuple[Fresh, ...]:
        """Returns a note for each table with a change."""
        notes = []
        for name in self._names:
            rows, ids = self._admitted.get(name, (torch.empty(0, dtype=torch.int64),) * 2)
            evicted = torch.cat([rows.new_empty(0), *self._evicted.get(name, [])])
            if len(rows) or len(evicted):
                notes.append(Fresh(name, rows, ids, evicted))
        return tuple(notes)


def _sightings_of(values: Tensor) -> Tensor:
    """Returns the number of sightings of candidates, from their values in the index."""
    return -values >> 1


def _summed(triples: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums (table, id, number) triples over equal pairs of table and id, in the order of tables and ids.

    Returns:
        The sums, (n, 3), and the place among them of each triple, or of each of ``wanted``.
    """
    both = triples if wanted is None else torch.cat([triples, wanted])
    # Equal pairs become one, so their own order does not matter.
    order = torch.argsort(both[:, 1])
    order = order[torch.argsort(both[order, 0], stable=True)]
    in_order = both[order]
    begins = torch.ones(len(both), dtype=torch.bool, device=both.device)
    begins[1:] = (in_order[1:, :2] != in_order[:-1, :2]).any(1)
    places = torch.empty_like(order)
    places[order] = begins.cumsum(0) - 1
    sums = in_order[begins]
    sums[:, 2] = torch.zeros_like(sums[:, 2]).index_add_(0, places[: len(triples)], triples[:, 2])
    return sums, places if wanted is None else places[len(triples) :]
