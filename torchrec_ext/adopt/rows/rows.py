"""Rows: a user's Dataset as columns, from which torch ops make the batches that its DataLoader makes row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.column_search import COMPARED, ColumnSearch, Reading, equal
from torchrec_ext.adopt.rows.evidence import UNLIKELY, UNSEEN, Evidence, gathered
from torchrec_ext.adopt.rows.law import Law, NegativeDraws
from torchrec_ext.adopt.rows.reading import GETITEMS, DatasetReader, seed_everything

Make = Callable[[dict[str, Tensor]], Any]

_DRAWN_AHEAD = 1 << 18  # integers drawn at a time
_SPOT_CHECK = 64  # rows that are read again at the start of an epoch


class RowStep(NamedTuple):
    """A step whose batch is not made yet: (B,) int64 ``indices`` of its rows, and (B, n) drawn integers or None."""

    indices: Tensor
    draws: Tensor | None


class Rows:
    """Rows in memory as columns, and the batches of an epoch: iterate over it as over a DataLoader.

    A captured step makes the batch inside: it takes the :class:`RowStep` of :meth:`steps`, gives :attr:`tensors` to
    :meth:`assemble`, and looks equal ids up once, see :attr:`repeats`.

    Args:
        columns: (N, ...) tensors by name.
        make: function from the rows of a batch, (B, ...) by the name of their column, with ``"negatives"`` (B, n) where
            there are any, to the batch: a tuple of tensors, or whatever the step takes. Torch ops only.
        batch_size: B, rows of a step on each rank.
        negatives: law by which negatives are drawn; see :class:`Uniform`.
        draws: n, the number of negatives of a row.
        positive: column of the positives, from which a law without ``items`` knows the ids.
        shuffle: take the rows of each epoch in a new order.
        drop_last: leave out the last rows of an epoch where they are fewer than a batch.
        seed: seed of the order and of the draws.
        rank: number of this process.
        ranks: R, the number of processes; each row is on one of them, and all take the same number of steps.

    Attributes:
        columns: the columns by name.
        batch_size: B.
        repeats: how often the first dimension of each tensor of a batch repeats a row's value, by :attr:`names`; those
            that do not repeat are not there.
        names: names of the tensors of a batch in order, where they are known.

    Raises:
        ValueError: an argument is out of range.
        CannotAdopt: the law does not fit the columns.

    Example:
        >>> user, item = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 3])
        >>> rows = Rows({"user": user, "item": item}, lambda row: (row["user"], row["item"]), 2, shuffle=False)
        >>> [tuple(batch) for batch in rows]
        [(tensor([0, 0]), tensor([0, 1])), (tensor([1, 1]), tensor([2, 3]))]
    """

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        make: Make,
        batch_size: int,
        *,
        negatives: Law | None = None,
        draws: int = 0,
        positive: str | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.num_rows = _checked(columns)
        _check(batch_size=batch_size, ranks=ranks)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank}: must be 0 to ranks - 1 = {ranks - 1}")
        if (negatives is not None) != (draws > 0):
            raise ValueError(f"draws={draws}, negatives={negatives}: a law and a number of draws go together")
        if self.num_rows < ranks or (drop_last and self.num_rows < ranks * batch_size):
            raise ValueError(
                f"{self.num_rows} rows are not a batch of {batch_size if drop_last else 1} for each of {ranks} ranks: "
                "take fewer ranks or a smaller batch_size"
            )
        self.columns = dict(columns)
        self.batch_size = batch_size
        self._make = make
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._constants: dict[str, Tensor] = {}
        self._negatives = None if negatives is None else NegativeDraws(negatives, self.columns, positive, draws, seed)
        self._epoch = -1
        self._step = 0
        self._continued = False
        self._notes: list[str] = []
        self._reader: DatasetReader | None = None
        self._reading: Reading | None = None
        self._sampler: Any = None  # of a loader: yields the rows of each batch, and has a length
        self.repeats: dict[str, int] = {}
        self.names: tuple[str, ...] = ()

    @overload
    @classmethod
    def of(cls, dataset: Any, batch_size: int | None, negatives: Literal["check"], **settings: Any) -> Evidence: ...

    @overload
    @classmethod
    def of(cls, dataset: Any, batch_size: int | None = None, negatives: Law | None = None, **settings: Any) -> Rows: ...

    @classmethod
    def of(
        cls,
        dataset: Any,
        batch_size: int | None = None,
        negatives: Law | Literal["check"] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        compared: int | None = None,
        **settings: Any,
    ) -> Rows | Evidence:
        """Returns the rows of a map-style Dataset, or of a DataLoader over one, as columns, unchanged.

        Its source is not read. Rows are: what is equal to an attribute of the Dataset in all rows that are compared is
        that attribute, what is in none is written in one pass, what is equal in all rows is a constant, and integers
        that change from call to call are drawn, by a law that the user signs. The Dataset and all generators are
        afterwards as before.

        Args:
            dataset: map-style Dataset of two rows or more, or a DataLoader over one, whose sampler, batch size,
                drop_last and collate_fn are kept; the sampler is seeded by ``seed`` and the epoch.
            batch_size: rows of a step on each rank; of a DataLoader its own.
            negatives: law of the draws. ``"check"`` returns what the Dataset's draws say about their law, and what to
                write.
            collate_fn: the DataLoader's, where it has one: each slot stacked or concatenated.
            compared: number of rows to compare, with rare values among them; by default all where they are read in 8 s,
                otherwise 4,096.
            settings: ``shuffle``, ``drop_last``, ``seed``, ``rank`` and ``ranks``, see :class:`Rows`.

        Raises:
            CannotAdopt: the rows have no such form, or the draws contradict the law; the message says why, and the
                remedy.
        """
        sampler = None
        call = f"Rows.of(dataset, batch_size={batch_size}"
        if isinstance(dataset, DataLoader):
            loader = dataset
            call = "Rows.of(loader"
            sampler, settings = _sampler_of(loader, dict(settings, batch_size=batch_size, collate_fn=collate_fn))
            batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            dataset = loader.dataset
            collate_fn = loader.collate_fn
        _check(batch_size=batch_size, compared=COMPARED if compared is None else compared)
        reader = DatasetReader(dataset)
        evidence = None
        with reader.untouched():
            reading = ColumnSearch(reader, compared).run()
            layout = _Layout(reader, reading, collate_fn)
            if reading.drawn is not None:
                evidence = gathered(reader, reading, call)
        speaks = not settings.get("rank", 0)
        if speaks and reading.notes:
            print("\n".join(reading.notes), flush=True)
        if negatives == "check":
            if evidence is None:
                raise CannotAdopt(f"negatives='check': {reader.where} draws nothing: its rows stay the same")
            return evidence
        if evidence is None and negatives is not None:
            raise CannotAdopt(f"negatives={negatives}: {reader.where} draws nothing; leave negatives out")
        signed = None if evidence is None else _signed(negatives, reader, evidence, settings.get("seed", 0))
        assert batch_size is not None
        rows = cls(reading.columns, layout.make, batch_size, **settings)
        if signed is not None:
            rows._negatives, rows._notes = signed
            if speaks:
                print("\n".join(f"rows: {note}" for note in [rows._negatives.describe(), *rows._notes]), flush=True)
        rows._constants = reading.constants
        rows._reader = reader
        rows._reading = reading
        rows.names = layout.names
        rows.repeats = layout.repeats
        rows._sampler = sampler
        return rows

    def __len__(self) -> int:
        if self._sampler is not None:
            return len(self._sampler)
        rows = self.num_rows
        size = self.batch_size * self._ranks
        full, rest = divmod(rows, size)
        return full if self._drop_last or (full and rest < self._ranks) else full + (rest > 0)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold the rows, by name: columns and constants."""
        return {**self.columns, **self._constants}

    def assemble(
        self, indices: Tensor, draws: Tensor | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[Any, ...]:
        """Makes the batch of a step by torch ops alone; returns the arguments of the step.

        Args:
            indices: (B,) int64 rows.
            draws: (B, n) negatives, see :meth:`draw`.
            tensors: :attr:`tensors`, or what stands for them while a step is captured.
        """
        batch = self._batch(indices, draws, self.tensors if tensors is None else tensors)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def _batch(self, indices: Tensor, draws: Tensor | None, tensors: Mapping[str, Tensor]) -> Any:
        pieces = {name: tensors[name].index_select(0, indices) for name in self.columns}
        pieces |= {name: tensors[name] for name in self._constants}
        if draws is not None:
            pieces["negatives"] = draws
        return self._make(pieces)

    def draw(self, indices: Tensor, epoch: int = 0) -> Tensor | None:
        """Returns the (B, n) negatives of rows (B,) in an epoch; None where nothing is drawn."""
        if self._negatives is None:
            return None
        return torch.from_numpy(self._negatives.draw(indices.numpy(force=True), epoch)).to(indices.device)

    def steps(self) -> Iterator[RowStep]:
        """Returns the steps of an epoch: the next, or the rest of the one whose state was loaded."""
        if self._continued and self._step >= len(self):
            self._epoch = self._epoch + 1
            self._step = 0
            self._continued = False
        elif not self._continued:
            self._epoch = self._epoch + 1
            self._step = 0
        self._continued = False
        self._check_dataset()
        return self._rest(self._epoch)

    def _rest(self, epoch: int) -> Iterator[RowStep]:
        batches = self._batches(epoch)[self._step :]
        ahead = max(1, _DRAWN_AHEAD // (self.batch_size * max(1, self._negatives.count))) if self._negatives else 1
        ahead = min(ahead, 64)
        for start in range(0, len(batches), ahead):
            some = batches[start : start + ahead]
            draws_ahead = self.draw(torch.cat(some), epoch)
            parts = (
                [None] * len(some)
                if draws_ahead is None
                else torch.split(draws_ahead, [len(indices) for indices in some])
            )
            for indices, draws in zip(some, parts, strict=True):
                self._step += 1
                yield RowStep(indices, draws)

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps():
            batch = self._batch(step.indices, step.draws, self.tensors)
            batch = pytree.tree_map_only(Tensor, Tensor.contiguous, batch)
            yield tuple(batch) if type(batch) in (tuple, list) else batch

    def _batches(self, epoch: int) -> list[Tensor]:
        """Returns this rank's rows in each step of an epoch."""
        order = torch.arange(self.num_rows)
        key = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        if self._sampler is not None:
            return self._sampled(epoch, key)
        if self._shuffle:
            order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(key))
        size = self.batch_size
        ranks = self._ranks
        full, rest = divmod(self.num_rows, size * ranks)
        mine = order[: full * size * ranks].view(full, ranks, size)[:, self._rank]
        batches = list(mine.unbind())
        last = order[self.num_rows - rest :]
        if full and rest < ranks:  # too few for a batch on every rank
            if not self._drop_last and self._rank < rest:
                batches[-1] = torch.cat([batches[-1], last[self._rank, None]])
        elif not self._drop_last:
            batches.append(last.tensor_split(ranks)[self._rank])
        return batches

    def _sampled(self, epoch: int, key: int) -> list[Tensor]:
        """Returns the rows that the loader's sampler draws for each step of an epoch."""
        assert self._reader is not None
        with self._reader.untouched(generators_alone=True):
            seed_everything(key % 2**32)
            samplers: tuple[Any, ...] = (self._sampler, getattr(self._sampler, "sampler", None))
            for sampler in samplers:
                if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                    generator.manual_seed(key)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            batches = [torch.tensor(list(rows), dtype=torch.int64) for rows in self._sampler]
        outside = [row for batch in batches for row in batch.tolist() if not 0 <= row < self.num_rows]
        if outside:
            raise CannotAdopt(f"the loader's sampler gives row {outside[0]}: must be 0 to {self.num_rows - 1}")
        if self._negatives is not None and len(rows := torch.cat(batches).tolist()) > len(set(rows)):
            raise CannotAdopt(
                "the loader's sampler takes a row twice in an epoch, whose negatives would be the same; draw them in "
                "the loss, or take shuffle=True"
            )
        return batches

    def _check_dataset(self) -> None:
        """Reads a few rows of the Dataset again: it may have been written anew since."""
        if self._reader is None or self._reading is None:
            return
        rows = np.random.default_rng([self._seed, self._epoch]).integers(0, self.num_rows, _SPOT_CHECK)
        rows[:2] = 0, self.num_rows - 1
        if len(self._reader.dataset) != self.num_rows:
            raise CannotAdopt(self._anew(f"it has {len(self._reader.dataset)} rows, then {self.num_rows}"))
        with self._reader.untouched(generators_alone=True):
            wrong = self._reading.wrong(torch.from_numpy(rows), self._reader.rows(rows))
        if wrong is not None:
            raise CannotAdopt(self._anew(f"{wrong} is another"))

    def _anew(self, what: str) -> str:
        assert self._reader is not None
        return (
            f"the rows of {self._reader.kind} are no longer those that Rows.of read: {what}. Where the Dataset is "
            "written anew, as for an epoch's negatives, call Rows.of again after it"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, after the last batch."""
        return {"epoch": max(self._epoch, 0), "step": self._step, **self._stream()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch at which ``state`` was taken, with the next iteration.

        Raises:
            ValueError: the state is of other rows or of another order.
        """
        for name, value in self._stream().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state has {name}={state.get(name)}, these rows {name}={value}: load it into those"
                )
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._continued = True

    def _stream(self) -> dict[str, Any]:
        names = ("num_rows", "batch_size", "_seed", "_shuffle", "_drop_last", "_ranks")
        return {name.lstrip("_"): getattr(self, name) for name in names}

    def describe(self) -> str:
        """Describes in lines the source of each tensor of a batch, and the rows compared."""
        kind = f"rows of {self._reader.kind}" if self._reader else "rows"
        lines = [f"{self.num_rows:,} {kind} as columns, {self.batch_size} a step, {len(self):,} steps an epoch"]
        if self._reading is None:
            lines += [f"  {name}: {tuple(column.shape)}, {column.dtype}" for name, column in self.columns.items()]
        else:
            lines += [f"  {slot.name}: {slot.describe(self._constants)}" for slot in self._reading.slots]
            lines.append(f"  {self._reading.seen(self.num_rows)}")
        if self._negatives is not None:
            lines.append(f"  negatives: {self._negatives.describe()}")
        return "\n".join([*lines, *(f"  {note}" for note in self._notes)])


def _checked(columns: Mapping[str, Tensor]) -> int:
    """Returns the number of rows of columns."""
    lengths = {name: len(column) if column.dim() else 0 for name, column in columns.items()}
    if not lengths or len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"columns have {lengths} rows: must be one number of 1 or more, the same for all")
    return next(iter(lengths.values()))


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number of 1 or more")


def _sampler_of(loader: DataLoader[Any], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a loader's sampler of batches, None where ``shuffle`` says the same, and the settings of its rows.

    Args:
        loader: the user's DataLoader.
        settings: what the user gave beside it, by name.

    Raises:
        CannotAdopt: it says something that the loader says too, or the order has no form.
    """
    for name in ("batch_size", "collate_fn", "shuffle", "drop_last"):
        if settings.pop(name, None) is not None:
            raise CannotAdopt(f"Rows.of(loader, {name}=...): the DataLoader has its own {name}; leave this one out")
    sampler = loader.sampler
    batches = loader.batch_sampler
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    if loader.batch_size is not None and (
        type(sampler) is SequentialSampler
        or (type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size)
    ):
        return None, {**settings, "shuffle": type(sampler) is RandomSampler, "drop_last": loader.drop_last}
    kind = type(batches if loader.batch_size is None else sampler).__name__
    try:
        fixed = hasattr(batches, "batch_size") and len(batches) >= 0  # type: ignore[arg-type]
    except TypeError:  # its sampler has no length
        fixed = False
    if not fixed and not isinstance(loader.dataset, IterableDataset):  # which is refused for what it is
        raise CannotAdopt(f"Rows.of(loader): its {kind} makes batches of no fixed size; give it batch_size, __len__")
    if settings.get("ranks", 1) > 1:
        raise CannotAdopt(f"Rows.of(loader, ranks=...): its {kind} does not say whose rows are whose; leave ranks out")
    return batches, settings


def _signed(law: Law | None, reader: DatasetReader, evidence: Evidence, seed: int) -> tuple[NegativeDraws, list[str]]:
    """Returns the draws of the user's sampling distribution, and lines with the evidence for it."""
    if law is None:
        raise CannotAdopt(str(evidence))
    if not isinstance(law, Law):
        raise CannotAdopt(f"negatives={law!r}: must be Uniform(...), Popular(...) or 'check'")
    draws = NegativeDraws(law, evidence.columns, evidence.positive, evidence.ids.shape[1], seed, evidence.exclusions)
    findings = evidence.against(draws)
    against = [finding for finding in findings if finding.p is not None and finding.p < UNLIKELY]
    if against:
        lines = [f"negatives: {evidence.what}, and not {draws.describe()}:", *(f"  {finding}" for finding in against)]
        raise CannotAdopt("\n".join([*lines, *evidence.proposal()]))
    tested = [finding.p for finding in findings if finding.p is not None]
    unseen = [finding.text for finding in findings if finding.p is None and finding.text.startswith(UNSEEN)]
    least = f"least p={min(tested):.2g} of {len(tested)} tests" if tested else "no test could be made"
    return draws, [f"{evidence.size} of {reader.kind} do not contradict it ({least})", *unseen]


class _Layout:
    """How the slots of rows become the tensors of a batch: each stacked or concatenated, by the user's collate_fn.

    Args:
        reader: reads rows; inside :meth:`DatasetReader.untouched`.
        reading: what the rows are made of.
        collate_fn: the user's, or None for torch's.
    """

    def __init__(self, reader: DatasetReader, reading: Reading, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._slots = reading.slots
        choices: list[set[tuple[int, str]]] = []
        spec: Any = None
        for size in (2, 3, 5):
            values, batch = reader.batch([row % reader.num_rows for row in range(size)], collate_fn or default_collate)
            leaves, structure = pytree.tree_flatten(batch)
            able = [_ways(leaf, values) for leaf in leaves]
            if spec is not None and structure != spec:
                raise CannotAdopt(
                    f"collate_fn returns another structure for {size} rows: {structure} and {spec}. {GETITEMS}"
                )
            spec = structure
            choices = able if not choices else [a & b for a, b in zip(choices, able, strict=True)]
        for index, ways in enumerate(choices):
            if not ways:
                raise CannotAdopt(
                    f"collate_fn: tensor {index} of its batch is no slot of the rows stacked or concatenated. "
                    f"{GETITEMS}"
                )
        self._spec = spec
        self._ways = [min(ways, key=lambda way: (way[0] != index, way)) for index, ways in enumerate(choices)]
        names = [self._slots[slot].name for slot, _ in self._ways]
        self.names = tuple(f"{name} ({index})" if name in names[:index] else name for index, name in enumerate(names))
        slots = [self._slots[slot] for slot, _ in self._ways]
        self.repeats = {name: slot.repeat for name, slot in zip(self.names, slots, strict=True) if slot.repeat}

    def make(self, pieces: dict[str, Tensor]) -> Any:
        """Returns a batch from the rows of columns and from constants, see :class:`Rows`."""
        size = max(len(piece) for piece in pieces.values())
        built = {slot: self._slots[slot].build(pieces, pieces.get("negatives"), size) for slot, _ in self._ways}
        leaves = [built[slot].flatten(0, 1) if way == "cat" else built[slot] for slot, way in self._ways]
        return pytree.tree_unflatten(leaves, self._spec)


def _ways(leaf: Any, values: list[Tensor]) -> set[tuple[int, str]]:
    """Returns the slots, with ``stack`` or ``cat``, of which a tensor of a batch is made; ``values`` are (C, *S)."""
    if not isinstance(leaf, Tensor):
        return set()
    ways = {(slot, "stack") for slot, value in enumerate(values) if _same(leaf, value)}
    return ways | {(s, "cat") for s, value in enumerate(values) if value.dim() > 1 and _same(leaf, value.flatten(0, 1))}


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and equal(first, second)
