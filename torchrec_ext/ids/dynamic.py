"""DynamicIds: raw 64-bit ids to rows of tables of fixed capacity: which ids have a row, which wait, which must go.

Ids are mapped before a batch is made, on every rank alike; what is behind, the shardings, TorchRec's pipeline, kernels,
sees rows. A row that is given to an id is fresh: whoever holds the weights must initialise it, and its optimizer state,
before the step that looks it up. The notes about it travel with the batch, see :class:`Fresh`.

The law: no two live ids share a row, and an id that is not live reads row 0. All that happens depends on the global
batches so far: not on the number of ranks, nor on the order within a batch, nor on the layout of the index. So sums
are over integers, ties go to the lowest row, and new ids are taken in the order of their numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.index import EMPTY, IdIndex, Layout
from torchrec_ext.ids.lookup import LookUps
from torchrec_ext.ids.policy import MOST_SIGHTINGS, Dynamic
from torchrec_ext.ids.rows import RowPool, Sightings


def host_group() -> dist.ProcessGroup | None:
    """Makes a group of all ranks for tensors in the host's memory; returns None if the job's takes them. Collective."""
    several = (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )
    # NCCL moves no tensors of the host.
    return (
        dist.new_group(backend="gloo")
        if several and dist.get_backend() == "nccl"
        else None
    )


class DynamicIds:
    """Gives the ids of several tables rows; every rank has all of it, and all ranks call each method together.

    Args:
        tables: settings of each table, by name.
        every: steps between two admissions; meanwhile new ids wait and read row 0. An admission costs about a
            millisecond whatever it admits: 8 pays where steps are short or ranks several.
        group: the ranks that share the ids; by default all ranks of the job, if there is a process group. Ids in the
            host's memory are exchanged over gloo, also where the job has NCCL.
        device: device of the index, by default the host's memory.

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
            raise ValueError(
                "tables={}: name at least one table, as in {'item': Dynamic(capacity=1_000_000)}"
            )
        if every < 1:
            raise ValueError(f"every={every}: must be 1 step or more")
        self._device = device or torch.device("cpu")
        self._every = every
        if group is None and self._device.type == "cpu":
            group = host_group()
        several = (
            dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(group) > 1
        )
        self._group = group
        self._world_size = dist.get_world_size(group) if several else 1
        starts = [0]
        for policy in tables.values():
            starts.append(starts[-1] + policy.capacity)
        self._starts = torch.tensor(starts[:-1], device=self._device)
        self._admit_after = torch.tensor(
            [policy.admit_after for policy in tables.values()], device=self._device
        )
        self.now = 0
        self.counts = dict.fromkeys(
            ("lookups", "unknown", "admitted", "evicted", "refused", "forgotten"), 0
        )
        # Look-ups of this rank that found no row since the last admission: table, id,
        # number; (n, 3) each.
        self._waiting: list[Tensor] = []
        # One memory for all tables, because each step writes into those of all.
        self._sightings = Sightings(starts[-1], self._device)
        self._tables: list[RowPool] = []
        for start, (name, policy) in zip(starts, tables.items(), strict=False):
            rows = slice(start, start + policy.capacity)
            self._tables.append(
                RowPool(
                    name,
                    policy,
                    self._sightings.number[rows],
                    self._sightings.step[rows],
                )
            )
        self._look_ups = LookUps()
        self._index = self._new_index()

    def _new_index(self) -> IdIndex:
        sizes = [
            table.policy.capacity + table.policy.most_candidates
            for table in self._tables
        ]
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

    def compile_look_ups(self) -> None:
        """Compiles look-ups from now on; otherwise they are once eager ones have taken as long as a compiler takes.

        It is said, and kept in inductor's cache for later runs. Numbers of ids that come once stay eager.
        """
        self._look_ups.compile_now()

    def live_ids(self, table: str) -> tuple[Tensor, Tensor]:
        """Returns the ids of a table that have a row, and their rows, ascending; (n,) int64 each."""
        pool = self._table(table)
        rows = pool.live_rows()
        return pool.id_of[rows], rows

    def _table(self, name: str) -> RowPool:
        for table in self._tables:
            if table.name == name:
                return table
        raise ValueError(
            f"table '{name}' has no dynamic ids; the tables are {', '.join(self.names)}"
        )

    def rows(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the rows of ids, (n,) int64 by table; 0 for an id without a row. Changes nothing; not collective."""
        flat, layout = self._flat(ids)
        return self._by_table(
            self._look_ups.find(self._index, flat, layout).clamp(min=0), ids
        )

    def _flat(self, ids: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        """Returns the ids of all tables one after the other, and their layout."""
        unknown = [name for name in ids if name not in self.names]
        if unknown:
            self._table(unknown[0])
        _check_ids(ids)
        pieces = [ids[name].reshape(-1) for name in self.names if name in ids]
        layout = self._index.layout(
            [ids[name].numel() if name in ids else 0 for name in self.names]
        )
        if not pieces:
            return torch.empty(0, dtype=torch.int64, device=self._device), layout
        return torch.cat(pieces), layout

    def _by_table(self, rows: Tensor, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        present = [name for name in self.names if name in ids]
        pieces = torch.split(rows, [ids[name].numel() for name in present])
        return {
            name: piece.view(ids[name].shape)
            for name, piece in zip(present, pieces, strict=True)
        }

    def summed(self, numbers: Tensor) -> Tensor:
        """Returns the sum of these numbers over all ranks; collective."""
        if self._world_size > 1:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    @torch.no_grad()
    def step(
        self, ids: Mapping[str, Tensor], *, again: bool = False
    ) -> tuple[dict[str, Tensor], tuple[Fresh, ...]]:
        """Counts a training batch of this rank, admits and evicts; collective.

        Args:
            ids: int64 ids by table, of any shape; ranks may have different numbers of them.
            again: whether these are further ids of the same step, whose rows so far must stay.

        Returns:
            The rows of the ids, of the same shapes, and what must be initialised before they are looked up.
        """
        flat, layout = self._flat(ids)
        self.now += not again
        rows = self._look_ups.find(self._index, flat, layout).clamp_(min=0)
        self._sightings.add(self.now, rows + self._starts[layout.table])
        missing = (rows == 0).nonzero().squeeze(1)
        self.counts["lookups"] += len(flat)
        self.counts["unknown"] += len(missing)
        self._waiting.append(
            torch.stack(
                [layout.table[missing], flat[missing], torch.ones_like(missing)], dim=1
            )
        )
        changes = _Changes(self.names)
        if self.now % self._every == 0:
            waiting = torch.cat(self._waiting)
            self._waiting = []
            # Often nothing waits, as where a model looks the same ids up twice.
            if len(waiting) or self._world_size > 1:
                found = self._rows_of_waiting(waiting, changes)
                # The last of those that waited are this batch's.
                rows[missing] = found[len(found) - len(missing) :]
                self.counts["unknown"] -= int((rows[missing] > 0).sum())
            self._expire(changes)
        return self._by_table(rows, ids), changes.notes()

    def _rows_of_waiting(self, waiting: Tensor, changes: _Changes) -> Tensor:
        """Admits the ids that wait on all ranks; returns the rows of this rank's (n, 3), 0 for those not admitted."""
        local, place_of_waiting = _summed(waiting)
        if self._world_size == 1:
            return self._admit(local, changes)[place_of_waiting]
        everyones, place_of_local = _summed(self._gathered(local), local)
        return self._admit(everyones, changes)[place_of_local][place_of_waiting]

    def _gathered(self, new: Tensor) -> Tensor:
        """Returns the (n, 3) rows of all ranks, one rank after the other."""
        return (
            new
            if self._world_size == 1
            else _gathered_rows(new, self._world_size, self._group)
        )

    def _admit(self, new: Tensor, changes: _Changes) -> Tensor:
        """Returns the rows of (n, 3) tables, ids and numbers in canonical order; 0 for an id that is not admitted."""
        number, ids, sightings = new.unbind(1)
        rows = torch.zeros_like(ids)
        if not len(ids):
            return rows
        can_have_row = ids != EMPTY
        total = sightings
        if any(table.candidates for table in self._tables):
            slots, counted = self._index.slots(ids, self._index.of(number))
            # A look-up of EMPTY finds an empty place.
            counted &= can_have_row
            total = sightings + torch.where(
                counted, _sightings_of(self._index.values(slots)), 0
            )
        else:
            # What waits has no row, so that nothing of it is in the index.
            slots = torch.zeros_like(ids)
            counted = torch.zeros_like(can_have_row)
        ready = can_have_row & (total >= self._admit_after[number])
        for table, chosen in zip(
            self._tables,
            _places_by_table(ready, number, len(self._tables)),
            strict=True,
        ):
            free = self._take(table, len(chosen), changes)
            refused = len(chosen) - len(free)
            self.counts["refused"] += refused
            _warn_of_refused(table, self.now, refused)
            # In the order of ids, so that all ranks refuse the same ones.
            chosen = chosen[: len(free)]
            rows[chosen] = free
            table.give(free, ids[chosen], sightings[chosen], self.now)
            changes.admit(table.name, free, ids[chosen])
            self.counts["admitted"] += len(free)
        # The lowest bit marks a candidate as seen since candidates were last forgotten.
        values = torch.where(rows > 0, rows, -(2 * total.clamp(max=MOST_SIGHTINGS) + 1))
        # What has been counted before has a place already; only the others are
        # inserted.
        self._index.set(slots[counted], values[counted])
        absent = (~counted & can_have_row).nonzero().squeeze(1)
        self._index.insert(ids[absent], number[absent], values[absent])
        joined = (rows == 0) & ~counted & can_have_row
        left = (rows > 0) & counted
        more = (
            torch.zeros_like(self._starts)
            .index_add_(0, number, joined.long() - left.long())
            .tolist()
        )
        for index, table in enumerate(self._tables):
            table.candidates += more[index]
            if table.candidates > table.policy.most_candidates:
                self._forget(index)
        return rows

    def _take(self, table: RowPool, count: int, changes: _Changes) -> Tensor:
        """Returns up to ``count`` free rows; evicts if there are not as many."""
        missing = count - table.free
        if missing > 0:
            self._sightings.count()
            table.score_sightings(self._group, several=self._world_size > 1)
            count_to_free = max(
                missing, int(table.policy.share * table.policy.capacity)
            )
            self._remove(table, table.lowest(count_to_free, self.now), changes)
        return table.take(count)

    def _remove(self, table: RowPool, rows: Tensor, changes: _Changes) -> None:
        ids = table.release(rows)
        number = torch.full_like(ids, self._tables.index(table))
        self._index.remove(self._index.slots(ids, self._index.of(number))[0])
        self.counts["evicted"] += len(rows)
        changes.evict(table.name, ids)

    def _expire(self, changes: _Changes) -> None:
        for table in self._tables:
            if table.policy.ttl:
                self._sightings.count()
                table.score_sightings(self._group, several=self._world_size > 1)
                self._remove(table, table.expired(self.now), changes)

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
        """Returns all that later steps depend on, alike on every rank; changes nothing of it. Collective."""
        self._sightings.count()
        waiting, _ = _summed(
            torch.cat(
                [
                    torch.empty(0, 3, dtype=torch.int64, device=self._device),
                    *self._waiting,
                ]
            )
        )
        items = self._index.items()
        tables = {}
        for number, table in enumerate(self._tables):
            of_table = (items.table == number) & (items.values < 0)
            # In the order of ids, because that in the index depends on its layout.
            order = items.ids[of_table].argsort()
            tables[table.name] = {
                **table.state_dict(self._group, several=self._world_size > 1),
                "candidates": items.ids[of_table][order],
                "candidate_values": items.values[of_table][order],
            }
        return {
            "now": self.now,
            "counts": dict(self.counts),
            "waiting": self._gathered(waiting),
            "tables": tables,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of :meth:`state_dict`, on any number of ranks; a table may have more rows than before.

        Raises:
            ValueError: the state is of other tables, of more rows, or damaged.
        """
        saved = state["tables"]
        _check_saved_tables(saved, self._tables, state["now"])
        self.now = state["now"]
        self.counts = dict(state["counts"])
        self._sightings.drop()
        is_first = self._world_size == 1 or dist.get_rank(self._group) == 0
        # What waits is a sum over ranks, so one rank has it all. Tables are numbered as
        # they were given, which may be another order than before.
        waiting = state["waiting"].to(self._device, copy=True)
        numbers = torch.tensor(
            [self.names.index(name) for name in saved], device=self._device
        )
        waiting[:, 0] = numbers[waiting[:, 0]]
        self._waiting = [waiting] if is_first else []
        self._index = self._new_index()
        for number, table in enumerate(self._tables):
            table.load_state_dict(saved[table.name], is_first=is_first)
            candidates = saved[table.name]["candidates"].to(self._device)
            table.candidates = len(candidates)
            live = table.live_rows()
            ids = torch.cat([table.id_of[live], candidates])
            values = torch.cat(
                [live, saved[table.name]["candidate_values"].to(self._device)]
            )
            self._index.insert(ids, torch.full_like(ids, number), values)


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
        # Most steps change nothing.
        for name in self._names if self._admitted or self._evicted else ():
            rows, ids = self._admitted.get(
                name, (torch.empty(0, dtype=torch.int64),) * 2
            )
            evicted = torch.cat([rows.new_empty(0), *self._evicted.get(name, [])])
            if len(rows) or len(evicted):
                notes.append(Fresh(name, rows, ids, evicted))
        return tuple(notes)


def _gathered_rows(
    new: Tensor, world_size: int, group: dist.ProcessGroup | None
) -> Tensor:
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=new.device) for _ in range(world_size)
    ]
    dist.all_gather(sizes, torch.tensor([len(new)], device=new.device), group=group)
    counts = [int(size) for size in sizes]
    padded = new.new_zeros(max(counts), 3)
    padded[: len(new)] = new
    pieces = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat(
        [piece[:count] for piece, count in zip(pieces, counts, strict=True)]
    )


def _places_by_table(chosen: Tensor, number: Tensor, tables: int) -> tuple[Tensor, ...]:
    """Returns the places of the chosen ones of each table, (n,) each, given the tables' numbers, ascending."""
    places = chosen.nonzero().squeeze(1)
    return torch.split(
        places, torch.bincount(number[places], minlength=tables).tolist()
    )


def _check_ids(ids: Mapping[str, Tensor]) -> None:
    for name, values in ids.items():
        kind = (
            values.dtype if isinstance(values, Tensor) else f"a {type(values).__name__}"
        )
        if kind != torch.int64:
            raise ValueError(
                f"table '{name}': ids are {kind}, must be an int64 tensor; convert them where they are read, strings "
                "by string_ids()"
            )


def _warn_of_refused(table: RowPool, step: int, count: int) -> None:
    # Once for a table: where one step is too large, the next ones are too.
    if not count or table.has_warned:
        return
    table.has_warned = True
    warnings.warn(
        f"table '{table.name}': capacity={table.policy.capacity:,} is below what step {step:,} needs: {count:,} new "
        "ids read row 0 and were not admitted; make the table larger",
        stacklevel=3,
    )


def _check_saved_tables(
    saved: Mapping[str, Any], tables: Sequence[RowPool], now: int
) -> None:
    names = [table.name for table in tables]
    if set(saved) != set(names):
        raise ValueError(
            f"the saved ids are of tables {', '.join(saved)}, not of {', '.join(names)}"
        )
    for table in tables:
        capacity = len(saved[table.name]["ids"])
        if capacity > table.policy.capacity:
            raise ValueError(
                f"table '{table.name}': capacity={table.policy.capacity:,}, but {capacity:,} rows were saved; a "
                f"table may only grow: set capacity={capacity} or more, or see ids.resized()"
            )
        _check_saved(table.name, saved[table.name], now)


def _check_saved(name: str, saved: Mapping[str, Any], now: int) -> None:
    """Refuses a saved table by which no eviction could be decided."""
    wrong = int((~saved["score"].isfinite()).sum())
    if wrong:
        raise ValueError(
            f"table '{name}': {wrong:,} saved scores are not finite, so that no eviction can be decided; load an "
            "earlier checkpoint"
        )
    last = int(saved["seen"].max())
    if last > now:
        raise ValueError(
            f"table '{name}': an id was seen at step {last:,}, but the saved clock stands at {now:,}; load the ids of "
            "one checkpoint, whose clock goes with them"
        )


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
    tables = both[order, 0]
    if len(both) and tables.min() != tables.max():
        order = order[torch.argsort(tables, stable=True)]
    in_order = both[order]
    begins = torch.ones(len(both), dtype=torch.bool, device=both.device)
    begins[1:] = (in_order[1:, :2] != in_order[:-1, :2]).any(1)
    places = torch.empty_like(order)
    places[order] = begins.cumsum(0) - 1
    sums = in_order[begins]
    sums[:, 2] = torch.zeros_like(sums[:, 2]).index_add_(
        0, places[: len(triples)], triples[:, 2]
    )
    return sums, places if wanted is None else places[len(triples) :]
