"""Rows: a user's Dataset as columns, from which torch ops make the batches that its DataLoader makes row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from torchrec_ext.adopt.rows.column_search import COMPARED
from torchrec_ext.adopt.rows.dataset import ReadDataset
from torchrec_ext.adopt.rows.evidence import Evidence
from torchrec_ext.adopt.rows.law import Law, NegativeDraws
from torchrec_ext.adopt.rows.order import (
    LoaderOrder,
    RowOrder,
    check_positive,
    sampler_of,
)
from torchrec_ext.adopt.rows.slots import equal

Make = Callable[[dict[str, Tensor]], Any]

_DRAWN_AHEAD = 1 << 18  # integers drawn at a time
_TRIED = 64  # rows in which declared repeats are looked for
_STEPS_AHEAD = 64  # for which integers are drawn at a time at most


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
        repeats: how often each tensor of a batch, in order, holds each row's value, one after the other, as
            ``repeat_interleave`` gives it; 1 for none. A captured step then looks a row's equal ids up once.
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
        repeats: Sequence[int] = (),
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        lengths = {}
        for name, column in columns.items():
            lengths[name] = len(column) if column.dim() else 0
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(
                f"columns have {lengths} rows: must be one number of 1 or more, the same for all"
            )
        self.num_rows = next(iter(lengths.values()))
        order = RowOrder(
            self.num_rows, batch_size, seed, shuffle, drop_last, ranks, rank
        )
        if (negatives is not None) != (draws > 0):
            raise ValueError(
                f"draws={draws}, negatives={negatives}: a law and a number of draws go together"
            )
        self.columns = dict(columns)
        self.batch_size = batch_size
        self._make = make
        self._order: RowOrder | LoaderOrder = order
        self._stream = order.state()
        self._constants: dict[str, Tensor] = {}
        self._negatives: NegativeDraws | None = None
        if negatives is not None:
            self._negatives = NegativeDraws(
                negatives, self.columns, positive, draws, seed
            )
        self._dataset: ReadDataset | None = None
        self._epoch = -1
        self._step = 0
        self._continued = False
        self.repeats: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        if repeats:
            self._declare(repeats)

    def _declare(self, repeats: Sequence[int]) -> None:
        """Takes the number of repeats of each tensor of a batch, as far as its first rows show no other."""
        indices = torch.arange(min(self.num_rows, _TRIED))
        leaves = list(
            map(
                torch.as_tensor,
                pytree.tree_leaves(
                    self._batch(indices, self.draw(indices), self.tensors)
                ),
            )
        )
        if len(repeats) != len(leaves):
            raise ValueError(
                f"repeats={list(repeats)}: must be {len(leaves)} numbers, one for each tensor of a batch"
            )
        self.names = tuple(f"tensor {index}" for index in range(len(leaves)))
        for name, count, leaf in zip(self.names, repeats, leaves, strict=True):
            if count == 1:
                continue
            is_so = count > 1 and leaf.dim() > 0 and len(leaf) == len(indices) * count
            if is_so:
                each = leaf.reshape(len(indices), count, *leaf.shape[1:])
                is_so = equal(each, each[:, :1].expand_as(each))
            if not is_so:
                raise ValueError(
                    f"repeats={list(repeats)}: {name} of a batch, {tuple(leaf.shape)} of {len(indices)} rows, does not "
                    f"hold each row's value {count} times, one after the other; give 1 for it"
                )
            self.repeats[name] = count

    @overload
    @classmethod
    def of(
        cls,
        dataset: Any,
        batch_size: int | None,
        negatives: Literal["check"],
        **settings: Any,
    ) -> Evidence: ...

    @overload
    @classmethod
    def of(
        cls,
        dataset: Any,
        batch_size: int | None = None,
        negatives: Law | None = None,
        **settings: Any,
    ) -> Rows: ...

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
            batch_size: rows of a step on each rank, each with its draws; of a DataLoader its own.
            negatives: law of the draws. ``"check"`` returns what the Dataset's draws say about their law, and what to
                write.
            collate_fn: the DataLoader's, where it has one: each slot stacked or concatenated.
            compared: number of rows to compare, with rare values among them; by default all that are read in 8 s, or in
                .2 ms for each row. If some are not, a line names their number.
            settings: ``shuffle``, ``drop_last``, ``seed``, ``rank`` and ``ranks``, see :class:`Rows`.

        Raises:
            CannotAdopt: the rows have no such form, or the draws contradict the law; the message says why, and the
                remedy.
        """
        sampler = None
        # The call as a line to paste, which an error ends with ``negatives=``.
        call = f"Rows.of(dataset, batch_size={batch_size}"
        if isinstance(dataset, DataLoader):
            loader = dataset
            call = "Rows.of(loader"
            sampler, settings = sampler_of(
                loader, dict(settings, batch_size=batch_size, collate_fn=collate_fn)
            )
            batch_size = loader.batch_size or getattr(
                loader.batch_sampler, "batch_size", None
            )
            dataset = loader.dataset
            collate_fn = loader.collate_fn
        check_positive(
            batch_size=batch_size, compared=COMPARED if compared is None else compared
        )
        assert batch_size is not None
        # All ranks read the same rows, and one of them says what it finds.
        speaks = not settings.get("rank", 0)
        source = ReadDataset(dataset, collate_fn, compared, call, negatives, speaks)
        if negatives == "check":
            assert source.evidence is not None
            return source.evidence
        seed = settings.get("seed", 0)
        draws = source.confirm(negatives, seed)
        rows = cls(source.reading.columns, source.layout.make, batch_size, **settings)
        rows._negatives = draws
        # Its sampler decides the order, seeded anew in each epoch.
        if sampler is not None:
            rows._order = LoaderOrder(
                sampler, source.reader, seed, draws=draws is not None
            )
        rows._dataset = source
        rows._constants = source.reading.constants
        rows.names = source.layout.names
        rows.repeats = source.layout.repeats
        return rows

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold the rows, by name: columns and constants."""
        return {**self.columns, **self._constants}

    def assemble(
        self,
        indices: Tensor,
        draws: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Makes the batch of a step by torch ops alone; returns the arguments of the step.

        Args:
            indices: (B,) int64 rows.
            draws: (B, n) negatives, see :meth:`draw`.
            tensors: :attr:`tensors`, or what stands for them while a step is captured.
        """
        batch = self._batch(indices, draws, tensors or self.tensors)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def _batch(
        self, indices: Tensor, draws: Tensor | None, tensors: Mapping[str, Tensor]
    ) -> Any:
        pieces = {name: tensors[name].index_select(0, indices) for name in self.columns}
        pieces |= {name: tensors[name] for name in self._constants}
        if draws is not None:
            pieces["negatives"] = draws
        return self._make(pieces)

    def draw(self, indices: Tensor, epoch: int = 0) -> Tensor | None:
        """Returns the (B, n) negatives of rows (B,) in an epoch; None where nothing is drawn."""
        if self._negatives is None:
            return None
        drawn = self._negatives.draw(indices.numpy(force=True), epoch)
        return torch.from_numpy(drawn).to(indices.device)

    def steps(self) -> Iterator[RowStep]:
        """Returns the steps of an epoch: the next, or the rest of the one whose state was loaded."""
        if not self._continued or self._step >= len(self):
            self._epoch += 1
            self._step = 0
        self._continued = False
        # Here, because a Dataset is written anew between epochs if at all.
        if self._dataset is not None:
            self._dataset.check(self._stream["seed"], self._epoch)
        return self._rest(self._epoch)

    def _rest(self, epoch: int) -> Iterator[RowStep]:
        batches = self._order.batches(epoch)[self._step :]
        ahead = 1
        # One call of numpy draws for several steps.
        if self._negatives is not None:
            integers = self.batch_size * self._negatives.count
            ahead = min(max(1, _DRAWN_AHEAD // integers), _STEPS_AHEAD)
        for start in range(0, len(batches), ahead):
            some = batches[start : start + ahead]
            draws_ahead = self.draw(torch.cat(some), epoch)
            parts: Sequence[Tensor | None] = [None] * len(some)
            if draws_ahead is not None:
                parts = torch.split(draws_ahead, list(map(len, some)))
            for indices, draws in zip(some, parts, strict=True):
                self._step += 1
                yield RowStep(indices, draws)

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps():
            batch = self._batch(step.indices, step.draws, self.tensors)
            batch = pytree.tree_map_only(Tensor, Tensor.contiguous, batch)
            # Not by isinstance: a named tuple stays one.
            yield tuple(batch) if type(batch) in (tuple, list) else batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, after the last batch."""
        # Before the first epoch, the state is that of its beginning.
        return {"epoch": max(self._epoch, 0), "step": self._step, **self._stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch at which ``state`` was taken, with the next iteration.

        Raises:
            ValueError: the state is of other rows or of another order.
        """
        for name, value in self._stream.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state has {name}={state.get(name)}, these rows {name}={value}: load it into those"
                )
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._continued = True

    def describe(self) -> str:
        """Describes in lines the source of each tensor of a batch, and the rows compared."""
        kind = "rows"
        lines = []
        if self._dataset is None:
            for name, column in self.columns.items():
                lines.append(f"{name}: {tuple(column.shape)}, {column.dtype}")
        else:
            kind = f"rows of {self._dataset.reader.kind}"
            lines = self._dataset.reading.describe(self.num_rows)
        if self._negatives is not None:
            lines.append(f"negatives: {self._negatives.describe()}")
        if self._dataset is not None:
            lines += self._dataset.notes
        title = f"{self.num_rows:,} {kind} as columns, {self.batch_size} a step, {len(self):,} steps an epoch"
        return "\n  ".join([title, *lines])
