"""Rows: a Dataset declared as columns, from which torch ops make the batches that its DataLoader makes row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from torchrec_ext.adopt.rows.check import compare_rows
from torchrec_ext.adopt.rows.law import Law, NegativeDraws, integers
from torchrec_ext.adopt.rows.order import RowOrder

Make = Callable[[dict[str, Tensor]], Any]

_DRAWN_AHEAD = 1 << 18  # integers drawn at a time
_STEPS_AHEAD = 64  # for which integers are drawn at a time at most
LABEL = "label"


class RowStep(NamedTuple):
    """A step whose batch is not made yet: (B,) int64 ``indices`` of its rows, and (B, n) drawn integers or None.

    ``on_device`` holds the indices on the device that steps were asked for.
    """

    indices: Tensor
    draws: Tensor | None
    on_device: Tensor


class Rows:
    """Rows in memory as columns, and the batches of an epoch: iterate over it as over a DataLoader.

    A batch holds each column in its order. With n negatives each row has 1 + n instances, one after the other: the
    positive's column holds the positive and then its negatives, every other column its value 1 + n times, and the
    labels, 1 and n times 0, come last. :meth:`check` compares all of them with a DataLoader of yours.

    A captured step makes the batch inside: it takes the :class:`RowStep` of :meth:`steps`, gives :attr:`tensors` to
    :meth:`assemble`, and looks equal ids up once, see :attr:`repeats`.

    Args:
        columns: (N, ...) tensors or arrays by name.
        batch_size: B, rows of a step on each rank.
        negatives: sampling distribution of the negatives; see :class:`Uniform`.
        positive: column of the positives; by default the second one of ``exclude=("user", "item")``.
        make: function from the rows of a batch, (B, ...) by the name of their column, with ``"negatives"`` (B, n) where
            there are any, to a batch of another form: a tuple of tensors, or whatever the step takes. Torch ops only.
        shuffle: take the rows of each epoch in a new order.
        drop_last: leave out the last rows of an epoch where they are fewer than a batch.
        seed: seed of the order and of the negatives.
        rank: number of this process.
        ranks: R, the number of processes; each row is on one of them, and all take the same number of steps.

    Attributes:
        columns: the columns by name.
        batch_size: B.
        repeats: how often the first dimension of each tensor of a batch repeats a row's value, by :attr:`names`; those
            that do not repeat are not there.
        names: names of the tensors of a batch in order; empty with ``make``.

    Raises:
        ValueError: an argument is out of range.
        CannotAdopt: the distribution does not fit the columns.

    Example:
        >>> user, item = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 3])
        >>> rows = Rows({"user": user, "item": item}, 2, shuffle=False)
        >>> [tuple(batch) for batch in rows]
        [(tensor([0, 0]), tensor([0, 1])), (tensor([1, 1]), tensor([2, 3]))]
        >>> from torchrec_ext.adopt import Uniform
        >>> negatives = Uniform(4, draws=2, exclude=("user", "item"))
        >>> user, item, label = next(iter(Rows({"user": user, "item": item}, 1, negatives=negatives, shuffle=False)))
        >>> user, item[0], sorted(item[1:].unique().tolist()) <= [2, 3], label
        (tensor([0, 0, 0]), tensor(0), True, tensor([1., 0., 0.]))
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        batch_size: int,
        *,
        negatives: Law | None = None,
        positive: str | None = None,
        make: Make | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.columns = _tensors(columns)
        self.num_rows = len(next(iter(self.columns.values())))
        order = RowOrder(
            self.num_rows, batch_size, seed, shuffle, drop_last, ranks, rank
        )
        self.batch_size = batch_size
        self.order = order
        self.negatives: NegativeDraws | None = None
        self._positive = ""
        self._make = make or self._usual
        self._constants: dict[str, Tensor] = {}
        self._stream = order.state()
        self._epoch = -1
        self._step = 0
        self._continued = False
        self.repeats: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        if negatives is not None:
            self.negatives = NegativeDraws(negatives, self.columns, seed)
        if make is None:
            self._declare_usual(negatives, positive)

    def _declare_usual(self, negatives: Law | None, positive: str | None) -> None:
        """Takes the names and repeats of the usual batch."""
        self.names = tuple(self.columns)
        if negatives is None:
            if positive is not None:
                raise ValueError(
                    f"positive={positive!r}: without negatives no column is repeated; leave it out"
                )
            return
        if positive is None and isinstance(negatives.exclude, tuple):
            positive = negatives.exclude[1]
        if positive is None:
            raise ValueError(
                "negatives: name the column of the positives, such as positive='item'"
            )
        integers(self.columns, positive, "positive")
        if LABEL in self.columns:
            raise ValueError(
                f"a column '{LABEL}' with negatives: labels are made, 1 for the positive; leave it out, or give make="
            )
        self._positive = positive
        count = 1 + negatives.draws
        for name in self.columns:
            if name != positive:
                self.repeats[name] = count
        self.names = (*self.columns, LABEL)
        labels = torch.zeros(count)
        labels[0] = 1.0
        # Of one row: a captured step repeats it for its batch.
        self._constants[LABEL] = labels

    def _usual(self, pieces: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Makes the usual batch, see :class:`Rows`."""
        if self.negatives is None:
            return tuple(pieces[name] for name in self.columns)
        positive = pieces[self._positive]
        size = len(positive)
        count = 1 + self.negatives.count
        batch = []
        for name in self.columns:
            piece = pieces[name]
            if name == self._positive:
                both = torch.cat(
                    [piece.reshape(size, 1), pieces["negatives"].to(piece.dtype)], 1
                )
                batch.append(both.flatten())
            else:
                batch.append(piece.repeat_interleave(count, 0))
        batch.append(pieces[LABEL].repeat(size))
        return tuple(batch)

    def check(self, loader: DataLoader[Any]) -> str:
        """Compares all batches of an epoch with those of the user's DataLoader, in the order of its Dataset.

        Every value of every row is compared, so the loader reads its Dataset once; the comparison itself takes less
        than a second for a million rows. Drawn ids must be those that the distribution can draw: how often each is
        drawn is not looked at. Generators are afterwards as before.

        Args:
            loader: the DataLoader that these rows take the place of: its batch size, order and ``drop_last`` must be
                those of the rows. Its Dataset has a row for each positive, or one for each instance.

        Returns:
            What was compared, in a line.

        Raises:
            CannotAdopt: a setting of the loader, or a value of a row, is another; the message names it.
        """
        return compare_rows(self, loader)

    def __len__(self) -> int:
        return len(self.order)

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
        batch = self.batch(indices, draws, tensors)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def batch(
        self,
        indices: Tensor,
        draws: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Makes the batch of a step, as iteration gives it; arguments are those of :meth:`assemble`."""
        tensors = tensors or self.tensors
        pieces = {name: tensors[name].index_select(0, indices) for name in self.columns}
        pieces |= {name: tensors[name] for name in self._constants}
        if draws is not None:
            pieces["negatives"] = draws
        return self._make(pieces)

    def draw(self, indices: Tensor, epoch: int = 0) -> Tensor | None:
        """Returns the (B, n) negatives of rows (B,) in an epoch; None where nothing is drawn."""
        if self.negatives is None:
            return None
        drawn = self.negatives.draw(indices.numpy(force=True), epoch)
        return torch.from_numpy(drawn).to(indices.device)

    @property
    def epoch(self) -> int:
        """The epoch whose steps were asked for last; -1 before the first."""
        return self._epoch

    def steps(
        self, device: torch.device | None = None, *, draws: bool = True
    ) -> Iterator[RowStep]:
        """Returns the steps of an epoch: the next, or the rest of the one whose state was loaded.

        Args:
            device: where draws, and a second copy of the indices, are; the CPU by default.
            draws: whether negatives are drawn; a captured step on a GPU draws them itself.
        """
        if not self._continued or self._step >= len(self):
            self._epoch += 1
            self._step = 0
        self._continued = False
        return self._rest(self._epoch, device or torch.device("cpu"), draws)

    def _rest(self, epoch: int, device: torch.device, draws: bool) -> Iterator[RowStep]:
        batches = self.order.batches(epoch)[self._step :]
        on_device: Sequence[Tensor] = batches
        if batches and device.type != "cpu":
            # One copy an epoch: one in each step would wait for the device.
            order = torch.cat(batches).to(device)
            on_device = torch.split(order, list(map(len, batches)))
        ahead = 1
        # One call of numpy draws for several steps.
        if self.negatives is not None:
            integers_of_step = self.batch_size * self.negatives.count
            ahead = min(max(1, _DRAWN_AHEAD // integers_of_step), _STEPS_AHEAD)
        for start in range(0, len(batches), ahead):
            some = batches[start : start + ahead]
            drawn = self.draw(torch.cat(some), epoch) if draws else None
            parts: Sequence[Tensor | None] = [None] * len(some)
            if drawn is not None:
                parts = torch.split(drawn.to(device), list(map(len, some)))
            there = on_device[start : start + ahead]
            for step in zip(some, parts, there, strict=True):
                self._step += 1
                yield RowStep(*step)

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps():
            batch = self.batch(step.indices, step.draws)
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


def _tensors(columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns columns as tensors, an array's on its own memory.

    Raises:
        ValueError: a column is no array of numbers, or their lengths differ.
    """
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        try:
            tensors[name] = torch.as_tensor(column)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:80]
            raise ValueError(
                f"column '{name}': must be a tensor or an array of numbers ({reason}); give texts numbers"
            ) from None
    lengths = {
        name: len(column) if column.dim() else 0 for name, column in tensors.items()
    }
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            f"columns have {lengths} rows: must be one number of 1 or more, the same for all"
        )
    return tensors
