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
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.index import EMPTY, IdIndex, Layout, found
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.ids.ranks import IdRanks
from torchrec_ext.ids.rows import RowPool
from torchrec_ext.schema.validation import check_least

# An eviction frees one in so many rows: few at a time, but not one by one.
EVICTED_OF = 64
_MOST_COMPILED = 2  # numbers of ids in a batch whose look-ups are compiled

LookUps = Callable[[Tensor], Tensor]  # from ids to rows
# Takes a function of tensors, those that stay and those that change, see
# :class:`torchrec_ext.capture.executors.StepExecutor`.
Engine = Callable[
    [Callable[..., list[Tensor]], list[Tensor], list[Tensor]],
    Callable[[Sequence[Tensor]], list[Tensor]] | None,
]


class DynamicIds:
    """Gives the ids of several tables rows; every rank has all of it, and all ranks call each method together.

    Ranks exchange ids over gloo, also where the job has NCCL.

    Args:
        tables: settings of each table, by name.
        every: steps between two admissions; meanwhile new ids wait and read row 0. An admission costs about a
            millisecond whatever it admits: 8 pays where steps are short or ranks several, 64 on a GPU. Until then a
            look-up takes 17 bytes.
        device: where ids are looked up and rows are returned; the host unless given. Between two admissions no step
            waits for a GPU.

    Attributes:
        ranks: the ranks that share the ids.
        now: number of steps so far.

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
        device: torch.device | str | None = None,
    ) -> None:
        if not tables:
            raise ValueError(
                "tables={}: name at least one table, as in {'item': Dynamic(capacity=1_000_000)}"
            )
        check_least("every", every)
        self._every = every
        self.ranks = IdRanks()
        self.now = 0
        self._counts = dict.fromkeys(
            ("lookups", "unknown", "admitted", "evicted", "refused"), 0
        )
        self._no_ids = torch.empty(0, dtype=torch.int64, device=device)
        # Look-ups of this rank that were not read yet: table, id, whether it has no row; (n,).
        self._looked_up: list[tuple[Tensor, Tensor, Tensor]] = []
        # Look-ups of this rank that found no row since the last admission: table, id,
        # number; (n, 3).
        self._waiting = self._no_ids.view(0, 3)
        capacities = [policy.capacity for policy in tables.values()]
        self._starts = self._no_ids.new_tensor([0, *accumulate(capacities[:-1])])
        # One memory for all tables, because each step writes into those of all.
        self._sightings = self._no_ids.new_zeros(sum(capacities), dtype=torch.int32)
        self._seen = torch.zeros_like(self._sightings)
        parts = (
            torch.split(self._sightings, capacities),
            torch.split(self._seen, capacities),
        )
        self._tables = list(map(RowPool, tables, tables.values(), *parts))
        self._index = IdIndex(capacities, self._no_ids.device)
        self._engine: Engine | None = None
        self._compiled_lines: Tensor | None = None
        self._runs: dict[tuple[int, ...], LookUps | None] = {}
        self._last_counts: tuple[int, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of ``lookups`` in training, of those that read row 0 (``unknown``), and of ids.

        Ids are ``admitted``, ``evicted`` or ``refused`` (no row was free that this step does not read). Look-ups are
        those of this rank, ids those of all.
        """
        self._read_look_ups()
        return self._counts

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
        counts = self.counts
        names = ("admitted", "evicted", "refused")
        return {
            "ids_live": sum(self.live.values()),
            **{f"ids_{name}": counts[name] for name in names},
            "ids_unknown": counts["unknown"] / max(1, counts["lookups"]),
        }

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
        rows = self._index.find(flat, layout)
        return _by_table(rows, ids, self.names)

    def _flat(self, ids: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        """Returns the ids of all tables one after the other, and their layout."""
        for name, values in ids.items():
            self._table(name)
            is_tensor = isinstance(values, Tensor)
            kind = values.dtype if is_tensor else f"a {type(values).__name__}"
            if kind != torch.int64:
                raise ValueError(
                    f"table '{name}': ids are {kind}, must be an int64 tensor; convert them "
                    "where they are read, strings by string_ids()"
                )
        pieces = [
            ids.get(name, self._no_ids).reshape(-1).to(self._no_ids.device)
            for name in self.names
        ]
        return torch.cat(pieces), self._index.layout(tuple(map(len, pieces)))

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
        rows = self._counted(flat, layout)
        # As they are now: the caller may write into them.
        is_unknown = rows == 0
        self._counts["lookups"] += len(flat)
        self._looked_up.append((layout.table, flat, is_unknown))
        changes = {name: Fresh(name, *[self._no_ids] * 3) for name in self.names}
        if self.now % self._every == 0:
            self._read_look_ups()
            waiting = self._waiting
            self._waiting = waiting[:0]
            # Often nothing waits, as where a model looks the same ids up twice.
            if len(waiting) or self.ranks.several:
                found = self._rows_of_waiting(waiting, changes)
                # The last of those that waited are this batch's.
                missing = _missing(flat, is_unknown)
                rows[missing] = found[len(found) - len(missing) :]
                self._counts["unknown"] -= int((rows[missing] > 0).sum())
            self._expire(changes)
        notes = (
            note for note in changes.values() if len(note.rows) or len(note.evicted)
        )
        return _by_table(rows, ids, self.names), tuple(notes)

    def compile_look_ups(self, engine: Engine) -> None:
        """Has look-ups of later steps compiled, those of batches with as many ids in each table as the one before.

        They are then one loop: 16,384 of them take .8 ms with their counts, in place of 1.9.

        Args:
            engine: such as :func:`torchrec_ext.capture.executors.inductor`; returns None where it cannot.
        """
        self._engine = engine

    def _read_look_ups(self) -> None:
        """Adds the look-ups without a row since the last call to those that wait, and counts them; waits for a GPU."""
        if not self._looked_up:
            return
        table, ids, is_unknown = map(torch.cat, zip(*self._looked_up, strict=True))
        self._looked_up = []
        self._counts["unknown"] += int(is_unknown.sum())
        missing = _missing(ids, is_unknown)
        new = [table[missing], ids[missing], torch.ones_like(missing)]
        self._waiting = torch.cat([self._waiting, torch.stack(new, dim=1)])

    def _counted(self, ids: Tensor, layout: Layout) -> Tensor:
        """Returns the rows of all ids, 0 for one without a row, and counts them."""
        run = self._run_of(layout)
        if run is not None:
            return run(ids)
        rows = self._index.find(ids, layout)
        places = rows + self._starts[layout.table]
        # Expanded, not repeated: a tensor of ones would be read from memory.
        one = self._sightings.new_ones(())
        self._sightings.scatter_add_(0, places, one.expand(len(places)))
        self._seen.index_fill_(0, places, self.now)
        return rows

    def _run_of(self, layout: Layout) -> LookUps | None:
        """Returns the compiled look-ups of a layout; None if there are none."""
        if self._engine is None:
            return None
        # An index that was rebuilt has other buckets.
        if self._compiled_lines is not self._index.lines:
            self._compiled_lines = self._index.lines
            self._runs = {}
        key = layout.counts
        is_again = key == self._last_counts
        self._last_counts = key
        # Bags of any length make many layouts, and each costs seconds.
        if is_again and key not in self._runs and len(self._runs) < _MOST_COMPILED:
            self._runs[key] = self._compiled(self._engine, layout)
        return self._runs.get(key)

    def _compiled(self, engine: Engine, layout: Layout) -> LookUps | None:
        """Compiles the look-ups of a layout; None if the engine cannot."""
        memory = [self._index.lines, layout.first, layout.size]
        memory += [self._starts[layout.table], self._sightings, self._seen]
        now = self._seen.new_zeros(())
        run = engine(found_and_counted, memory, [torch.zeros_like(layout.first), now])
        if run is None:
            return None

        def rows(ids: Tensor) -> Tensor:
            # A CUDA graph has addresses alone, so this keeps what lies there.
            assert memory
            return run([ids, now.fill_(self.now)])[0]

        return rows

    def _rows_of_waiting(self, waiting: Tensor, changes: dict[str, Fresh]) -> Tensor:
        """Admits the ids that wait on all ranks; returns the rows of this rank's (n, 3), 0 for those not admitted."""
        local, place_of_waiting = _sum_equal(waiting)
        if not self.ranks.several:
            return self._admit(local, changes)[place_of_waiting]
        everyones, place_of_local = _sum_equal(self.ranks.gather(local), local)
        return self._admit(everyones, changes)[place_of_local][place_of_waiting]

    def _admit(self, new: Tensor, changes: dict[str, Fresh]) -> Tensor:
        """Returns the rows of (n, 3) tables, ids and numbers in canonical order; 0 for an id that is not admitted."""
        number, ids, sightings = new.unbind(1)
        sizes = torch.bincount(number, minlength=len(self._tables)).tolist()
        by_table = zip(
            self._tables,
            torch.split(ids, sizes),
            torch.split(sightings, sizes),
            strict=True,
        )
        rows = torch.cat([self._admit_to(*each, changes) for each in by_table])
        # Those of all tables at once: its rounds take as long for one id.
        has_row = rows > 0
        self._index.insert(ids[has_row], number[has_row], rows[has_row])
        return rows

    def _admit_to(
        self, table: RowPool, ids: Tensor, sightings: Tensor, changes: dict[str, Fresh]
    ) -> Tensor:
        """Returns the rows of new ids of a table, (n,) int64, which are not in the index yet."""
        rows = torch.zeros_like(ids)
        # Most tables have no new id in most steps.
        if not len(ids):
            return rows
        total = table.candidates.take(ids, sightings)
        chosen = (total >= table.policy.admit_after).nonzero().squeeze(1)
        free = self._take(table, len(chosen), changes)
        refused = len(chosen) - len(free)
        self._counts["refused"] += refused
        # Once for a table: where one step is too large, the next ones are too.
        if refused and not table.has_warned:
            table.has_warned = True
            warnings.warn(
                f"table '{table.name}': capacity={table.policy.capacity:,} is below what step {self.now:,} needs: "
                f"{refused:,} new ids read row 0 and were not admitted; make the table larger",
                stacklevel=2,
            )
        # In the order of ids, so that all ranks refuse the same ones.
        chosen = chosen[: len(free)]
        rows[chosen] = free
        table.give(free, ids[chosen], sightings[chosen], self.now)
        note = changes[table.name]
        changes[table.name] = note._replace(rows=free, ids=ids[chosen])
        self._counts["admitted"] += len(free)
        waits = rows == 0
        table.candidates.add(ids[waits], total[waits])
        return rows

    def _take(self, table: RowPool, count: int, changes: dict[str, Fresh]) -> Tensor:
        """Returns up to ``count`` free rows; evicts if there are not as many."""
        missing = count - table.free
        if missing > 0:
            table.score_sightings(self.ranks)
            most = max(missing, table.policy.capacity // EVICTED_OF)
            self._remove(table, table.lowest(most, self.now), changes)
        return table.take(count)

    def _remove(self, table: RowPool, rows: Tensor, changes: dict[str, Fresh]) -> None:
        ids = table.release(rows)
        number = torch.full_like(ids, self._tables.index(table))
        self._index.remove(ids, self._index.of(number))
        self._counts["evicted"] += len(rows)
        note = changes[table.name]
        changes[table.name] = note._replace(evicted=torch.cat([note.evicted, ids]))

    def _expire(self, changes: dict[str, Fresh]) -> None:
        for table in self._tables:
            if table.policy.ttl:
                table.score_sightings(self.ranks)
                self._remove(table, table.expired_rows(self.now), changes)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later steps depend on, alike on every rank; changes nothing of it. Collective."""
        self._read_look_ups()
        waiting, _ = _sum_equal(self._waiting)
        tables = {table.name: table.state_dict(self.ranks) for table in self._tables}
        return {
            "now": self.now,
            "counts": dict(self._counts),
            "waiting": self.ranks.gather(waiting),
            "tables": tables,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of :meth:`state_dict`, on any number of ranks; a table may have more rows than before.

        Raises:
            ValueError: the state is of other tables, or of more rows.
        """
        saved = state["tables"]
        _check_saved_tables(saved, self._tables)
        self.now = state["now"]
        self._counts = dict(state["counts"])
        self._looked_up = []
        waiting = state["waiting"].to(self._no_ids.device, copy=True)
        # Tables are numbered as they were given, which may be another order than before.
        numbers = list(map(self.names.index, saved))
        waiting[:, 0] = waiting.new_tensor(numbers)[waiting[:, 0]]
        # What waits is a sum over ranks, so one rank has it all.
        if not self.ranks.is_first:
            waiting = waiting[:0]
        self._waiting = waiting
        self._index.clear()
        for number, table in enumerate(self._tables):
            table.load_state_dict(saved[table.name], is_first=self.ranks.is_first)
            rows = table.live_rows()
            self._index.insert(table.id_of[rows], torch.full_like(rows, number), rows)


def found_and_counted(
    lines: Tensor,
    first: Tensor,
    size: Tensor,
    start: Tensor,
    sightings: Tensor,
    seen: Tensor,
    ids: Tensor,
    now: Tensor,
) -> list[Tensor]:
    """Returns the rows of ids, and counts them, as :meth:`DynamicIds._counted` does, for a compiler.

    Args:
        lines: see :attr:`IdIndex.lines`.
        first: see :class:`Layout`.
        size: see :class:`Layout`.
        start: number of the rows of earlier tables, (n,) int64.
        sightings: sightings of the rows of all tables, written.
        seen: the step at which each was seen last, written.
        ids: (n,) int64.
        now: number of this step, () int32.
    """
    rows = found(lines, ids, first, size)
    places = (rows + start,)
    sightings.index_put_(places, torch.ones_like(now), accumulate=True)
    seen.index_put_(places, now)
    return [rows]


def _missing(ids: Tensor, is_unknown: Tensor) -> Tensor:
    """Returns the places of ids without a row, but of none that can have one, (n,) int64."""
    # A look-up of EMPTY would find an empty place, so it never gets a row.
    return (is_unknown & (ids != EMPTY)).nonzero().squeeze(1)


def _by_table(
    rows: Tensor, ids: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    """Splits the rows of all ids, in the order of ``names``, into tensors of the shapes of ``ids``."""
    shapes = {name: ids[name].shape for name in names if name in ids}
    pieces = torch.split(rows, [shape.numel() for shape in shapes.values()])
    views = map(Tensor.view, pieces, shapes.values())
    return dict(zip(shapes, views, strict=True))


def _check_saved_tables(saved: Mapping[str, Any], tables: Sequence[RowPool]) -> None:
    names = [table.name for table in tables]
    if set(saved) != set(names):
        raise ValueError(
            f"the saved ids are of tables {', '.join(saved)}, not of {', '.join(names)}"
        )
    for table in tables:
        if "waiting_ids" not in saved[table.name]:
            raise ValueError(
                f"table '{table.name}': the saved ids are of an earlier version; train anew, or go on with that version"
            )
        capacity = len(saved[table.name]["ids"])
        if capacity > table.policy.capacity:
            raise ValueError(
                f"table '{table.name}': capacity={table.policy.capacity:,}, but {capacity:,} rows were saved; a "
                f"table may only grow: set capacity={capacity} or more"
            )


def _sum_equal(triples: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums (table, id, number) triples over equal pairs of table and id, in the order of tables and ids.

    Returns:
        The sums, (n, 3), and the place among them of each triple, or of each of ``wanted``.
    """
    both = triples if wanted is None else torch.cat([triples, wanted])
    # By number of the id: two keys of 64 bits would not fit into one.
    ids = torch.unique(both[:, 1], return_inverse=True)[1]
    keys = both[:, 0] * len(both) + ids
    pairs, places = torch.unique(keys, return_inverse=True)
    sums = triples.new_empty(len(pairs), 3)
    sums[places] = both
    sums[:, 2] = 0
    sums[:, 2].index_add_(0, places[: len(triples)], triples[:, 2])
    return sums, places if wanted is None else places[len(triples) :]
