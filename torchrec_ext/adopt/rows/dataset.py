"""ReadDataset: a user's Dataset whose rows were read as columns, and how a batch is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.column_search import ColumnSearch
from torchrec_ext.adopt.rows.evidence import (
    Evidence,
    evidence_of,
    read_draws,
    with_enough_draws,
)
from torchrec_ext.adopt.rows.law import Law, NegativeDraws, integers, is_key
from torchrec_ext.adopt.rows.law_tests import UNSEEN, p_values
from torchrec_ext.adopt.rows.reading import GETITEMS, DatasetReader, Ids
from torchrec_ext.adopt.rows.slots import Reading, equal

_SPOT_CHECK = 64  # rows that are read again at the start of an epoch


class ReadDataset:
    """Reads a Dataset's rows, and leaves it as it was.

    Args:
        dataset: map-style Dataset.
        collate_fn: makes a batch of rows; None for torch's.
        compared: number of rows to compare; None for what can be read in a few seconds.
        call: the user's call of Rows.of, less ``negatives``.
        law: the user's law of the draws, ``"check"`` or None.
        speaks: announce what takes long.

    Attributes:
        reader: reads rows.
        reading: columns, constants and draws that the rows are made of.
        layout: makes batches of them.
        evidence: the Dataset's draws; None if it draws nothing.
        notes: lines about the evidence for the law that :meth:`confirm` took.

    Raises:
        CannotAdopt: see :meth:`Rows.of`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        compared: int | None,
        call: str,
        law: Law | Literal["check"] | None,
        speaks: bool,
    ) -> None:
        self.reader = DatasetReader(dataset)
        self.evidence: Evidence | None = None
        self.notes: list[str] = []
        self._call = call
        self._speaks = speaks
        with self.reader.untouched():
            search = ColumnSearch(self.reader, compared, speaks)
            sample = search.sample()
            # All that can be refused is refused now: writing all rows may take minutes.
            SlotLayout(self.reader, sample, collate_fn)
            self._check_kind(law, sample)
            draws = None
            if sample.drawn is not None:
                # Of rows of the sample: no other row is read before the law is checked.
                draws = read_draws(self.reader, sample, search.rows)
                if isinstance(law, Law) and search.own_columns:
                    self._check_early(law, sample, search.own_columns, draws)
            self.reading = search.run()
            self.layout = SlotLayout(self.reader, self.reading, collate_fn)
            if draws is not None:
                evidence = evidence_of(self.reader, self.reading, draws, call)
                self.evidence = with_enough_draws(self.reader, self.reading, evidence)
        if speaks and self.reading.notes:
            print("\n".join(self.reading.notes), flush=True)

    def _check_kind(self, law: Any, reading: Reading) -> None:
        if reading.drawn is None and law is not None:
            raise CannotAdopt(
                f"negatives={law!r}: {self.reader.where} draws nothing; leave negatives out"
            )
        if law is not None and law != "check" and not isinstance(law, Law):
            raise CannotAdopt(
                f"negatives={law!r}: must be Uniform(...), Popular(...) or 'check'"
            )

    def _check_early(
        self, law: Law, sample: Reading, own: dict[str, Tensor], draws: tuple[Ids, Ids]
    ) -> None:
        """Checks the names of a law, and the law itself if it reads nothing but attributes of the Dataset.

        Args:
            law: the user's law.
            sample: what some rows are made of.
            own: (C, ...) values of columns in no attribute, in these rows.
            draws: rows and ids that the Dataset has drawn.
        """
        attributes = {
            name: column for name, column in sample.columns.items() if name not in own
        }
        names = law.column_names()
        for argument, name in names:
            integers({**attributes, **own}, name, argument)
        # A range of ids and the column of a mapping's keys are looked for in all
        # columns of integers.
        looks = law.items is None or (
            law.by is None and isinstance(law.exclude, Mapping)
        )
        needs_own = not own.keys().isdisjoint(name for _, name in names)
        if looks and any(map(is_key, own.values())):
            needs_own = True
        if attributes and not needs_own:
            # The draws that were read already, against a law that needs no row more.
            evidence = evidence_of(
                self.reader, replace(sample, columns=attributes), draws, self._call
            )
            evidence.refuse(evidence.draws_by(law))

    def confirm(self, law: Law | None, seed: int) -> NegativeDraws | None:
        """Returns draws by the user's sampling distribution, None without draws, and says the evidence for it.

        Raises:
            CannotAdopt: the distribution is missing, or the Dataset's draws contradict it.
        """
        evidence = self.evidence
        if evidence is None:
            return None
        if law is None:
            raise CannotAdopt(str(evidence))
        draws = evidence.draws_by(law, seed)
        findings = evidence.refuse(draws)
        tested = p_values(findings)
        least = "no test could be made"
        if tested:
            least = f"least p={min(tested):.2g} of {len(tested)} tests"
        self.notes = [
            f"{evidence.size} of {self.reader.kind} do not contradict it ({least})"
        ]
        self.notes += [each.text for each in findings if each.text.startswith(UNSEEN)]
        if self._speaks:
            lines = [draws.describe(), *self.notes]
            print("rows:", "\nrows: ".join(lines), flush=True)
        return draws

    def check(self, seed: int, epoch: int) -> None:
        """Reads a few rows of the Dataset again: it may have been written anew since."""
        reader = self.reader
        rows = np.random.default_rng([seed, epoch]).integers(
            0, reader.num_rows, _SPOT_CHECK
        )
        rows[:2] = 0, reader.num_rows - 1
        change = ""
        if len(reader.dataset) != reader.num_rows:
            change = f"it has {len(reader.dataset)} rows, then {reader.num_rows}"
        else:
            with reader.untouched(generators_alone=True):
                wrong = self.reading.wrong(torch.from_numpy(rows), reader.rows(rows))
            if wrong is not None:
                change = f"{wrong} is another"
        if change:
            raise CannotAdopt(
                f"the rows of {reader.kind} are no longer those that Rows.of read: {change}. Where the Dataset is "
                "written anew, as for an epoch's negatives, call Rows.of again after it"
            )


class SlotLayout:
    """How the slots of rows become the tensors of a batch: each stacked or concatenated, by the user's collate_fn.

    Args:
        reader: reads rows; inside :meth:`DatasetReader.untouched`.
        reading: what the rows are made of.
        collate_fn: the user's, or None for torch's.

    Attributes:
        names: names of the tensors of a batch in order.
        repeats: how often a tensor repeats a row's value, by its name; those that do not repeat are not there.
    """

    def __init__(
        self,
        reader: DatasetReader,
        reading: Reading,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._slots = reading.slots
        choices: list[set[tuple[int, str]]] = []
        spec: Any = None
        # A batch of one size could fit by chance.
        for size in (2, 3, 5):
            values, batch = reader.batch(
                [row % reader.num_rows for row in range(size)],
                collate_fn or default_collate,
            )
            leaves, structure = pytree.tree_flatten(batch)
            able = [_ways(leaf, values) for leaf in leaves]
            if spec is not None and structure != spec:
                raise CannotAdopt(
                    f"collate_fn returns another structure for {size} rows: {structure} and {spec}. {GETITEMS}"
                )
            spec = structure
            choices = choices or able
            for ways, able_ways in zip(choices, able, strict=True):
                ways.intersection_update(able_ways)
        for index, ways in enumerate(choices):
            if not ways:
                raise CannotAdopt(
                    f"collate_fn: tensor {index} of its batch is no slot of the rows stacked or concatenated. "
                    f"{GETITEMS}"
                )
        self._spec = spec
        self._ways: list[tuple[int, str]] = []
        self.repeats: dict[str, int] = {}
        names: list[str] = []
        for index, ways in enumerate(choices):
            # Of equal slots the one in the tensor's own place.
            way = min(ways, key=lambda way: (way[0] != index, way))
            self._ways.append(way)
            slot = self._slots[way[0]]
            name = slot.name
            if name in names:
                name = f"{name} ({index})"
            names.append(name)
            if slot.repeat:
                self.repeats[name] = slot.repeat
        self.names = tuple(names)

    def make(self, pieces: dict[str, Tensor]) -> Any:
        """Returns a batch from the rows of columns and from constants, see :class:`Rows`."""
        size = max(len(piece) for piece in pieces.values())
        leaves = []
        for slot, way in self._ways:
            leaf = self._slots[slot].build(pieces, pieces.get("negatives"), size)
            leaves.append(leaf.flatten(0, 1) if way == "cat" else leaf)
        return pytree.tree_unflatten(leaves, self._spec)


def _ways(leaf: Any, values: list[Tensor]) -> set[tuple[int, str]]:
    """Returns the slots, with ``stack`` or ``cat``, of which a tensor of a batch is made; ``values`` are (C, *S)."""
    ways: set[tuple[int, str]] = set()
    if not isinstance(leaf, Tensor):
        return ways
    for slot, value in enumerate(values):
        if _same(leaf, value):
            ways.add((slot, "stack"))
        if value.dim() > 1 and _same(leaf, value.flatten(0, 1)):
            ways.add((slot, "cat"))
    return ways


def _same(first: Tensor, second: Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and equal(first, second)
    )
