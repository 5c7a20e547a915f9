"""Rows: a Dataset declared as columns, from which torch ops make the batches that its DataLoader makes row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from torchrec_ext.adopt.rows.check import compare_rows
from torchrec_ext.adopt.rows.law import Law, NegativeDraws
from torchrec_ext.capture import policy
from torchrec_ext.data.order import RowOrder, Share
from torchrec_ext.data.resident import ResidentRows, RowStep
from torchrec_ext.drawn import DrawnStep

Make = Callable[[dict[str, Tensor]], Any]

LABEL = "label"
DRAWN = "negatives"
_CPU = torch.device("cpu")


class Rows:
    """Rows in memory as columns, and the batches of an epoch: iterate over it as over a DataLoader.

    A batch holds each column in its order. With n negatives each row has 1 + n instances, one after the other: the
    positive's column, the second one of ``exclude=("user", "item")``, holds the positive and then its negatives, every
    other column its value 1 + n times, and the labels, 1 and n times 0, come last. :meth:`check` compares all of them
    with a DataLoader of yours.

    A captured step makes the batch inside, see :class:`RowsOnDevice`, and looks equal ids up once, see :attr:`repeats`.

    Args:
        columns: (N, ...) tensors or arrays by name.
        batch_size: B, rows of a step on each rank.
        negatives: sampling distribution of the negatives; see :class:`Uniform`.
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
        make: Make | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.columns = _tensors(columns)
        self.num_rows = len(next(iter(self.columns.values())))
        # What the order of all ranks depends on.
        self._stream = {
            "num_rows": self.num_rows,
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "ranks": ranks,
            # Version 0.1 shuffled by another generator: its places are those of other rows.
            "order": "PCG64" if shuffle else None,
        }
        self.batch_size = batch_size
        self.shuffle = shuffle
        share = Share(rank=rank, world_size=ranks)
        self.order = _order(
            self.num_rows, batch_size, seed if shuffle else None, drop_last, share
        )
        self.negatives: NegativeDraws | None = None
        self._positive = ""
        self._make = make or self._usual
        self._epoch = -1
        self._step = 0
        self._continued = False
        self.repeats: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        if negatives is not None:
            if not isinstance(negatives, Law):
                raise ValueError(
                    f"negatives={negatives!r:.60}: must be a Uniform or Popular, such as Uniform(ITEMS, draws=4, "
                    "exclude=('user', 'item'))"
                )
            if DRAWN in self.columns:
                raise ValueError(
                    f"a column '{DRAWN}' with negatives=: the drawn ids have this name; rename the column"
                )
            self.negatives = NegativeDraws(negatives, self.columns, seed)
        if make is None:
            self._declare_usual(negatives)

    def _declare_usual(self, negatives: Law | None) -> None:
        """Takes the names and repeats of the usual batch."""
        self.names = tuple(self.columns)
        if negatives is None:
            return
        if negatives.exclude is None:
            raise ValueError(
                "negatives without exclude=: name the positives' column, such as exclude=('item', 'item'), or give "
                "make="
            )
        if LABEL in self.columns:
            raise ValueError(
                f"a column '{LABEL}' with negatives: labels are made, 1 for the positive; leave it out, or give make="
            )
        _, self._positive = negatives.exclude
        assert self.negatives is not None
        items = self.columns[self._positive]
        # Drawn ids have the type of the positives', which a larger one would overflow.
        if self.negatives.catalogue[-1] > torch.iinfo(items.dtype).max:
            self.columns[self._positive] = items.long()
        self.repeats = dict.fromkeys(self.columns, 1 + negatives.draws)
        del self.repeats[self._positive]
        self.names = (*self.columns, LABEL)

    def _usual(self, pieces: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Makes the usual batch, see :class:`Rows`."""
        if self.negatives is None:
            return tuple(pieces[name] for name in self.columns)
        positive = pieces[self._positive]
        count = 1 + self.negatives.count
        drawn = pieces[DRAWN].to(positive.dtype)
        items = torch.cat([positive.reshape(-1, 1), drawn], 1).flatten()
        places = torch.arange(len(items), device=positive.device)
        return (
            *(
                items
                if name == self._positive
                else pieces[name].repeat_interleave(count, 0)
                for name in self.columns
            ),
            (places % count == 0).float(),
        )

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
        return self.order.num_steps

    def batch(
        self,
        indices: Tensor,
        draws: Tensor | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Makes the batch of a step by torch ops alone, as iteration gives it.

        Args:
            indices: (B,) int64 rows.
            draws: (B, n) negatives.
            tensors: :attr:`columns`, or what stands for them while a step is captured.
        """
        tensors = tensors or self.columns
        pieces = {name: tensors[name].index_select(0, indices) for name in self.columns}
        if draws is not None:
            pieces[DRAWN] = draws
        return self._make(pieces)

    def steps(self, rows: RowsOnDevice) -> Iterator[DrawnStep]:
        """Yields the steps of an epoch: the next, or the rest of the one whose state was loaded."""
        if not self._continued or self._step >= len(self):
            self._epoch += 1
            self._step = 0
        self._continued = False
        for step in rows.steps(self._epoch, self._step, inside=rows.draws_inside):
            self._step += 1
            yield step

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps(RowsOnDevice(self, _CPU)):
            batch = self.batch(*step.tensors)
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
                    f"the state has {name}={state.get(name)}, these rows {name}={value}: load it into such rows, or "
                    "begin the epoch anew without it"
                )
        self._epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._continued = True


class RowsOnDevice(ResidentRows):
    """:class:`Rows` on a device, whose batches are the arguments of a user's step.

    On a GPU uniform negatives are drawn inside the step, id by id those of numpy: nothing is copied for a step. That
    is 9 kernels where Triton fuses them, and 138 to 150 of an NCF's step without it. So numpy draws for many steps at
    once without Triton, and on a CPU, where it takes a third of the time.

    Args:
        rows: the rows.
        device: the device.
        draws_inside: whether a step draws its negatives itself, where it can; see above.
    """

    def __init__(
        self, rows: Rows, device: torch.device, *, draws_inside: bool | None = None
    ) -> None:
        super().__init__(rows.order, rows.negatives, device)
        self.rows = rows
        if draws_inside is None:
            draws_inside = device.type != "cpu" and policy.HAS_TRITON
        self.draws_inside = draws_inside
        self.tensors = [column.to(device) for column in rows.columns.values()]

    def assemble(
        self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Makes the arguments of a step of its rows and their negatives."""
        named = dict(zip(self.rows.columns, tensors, strict=True))
        batch = self.rows.batch(*drawn, tensors=named)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def made(self, step: RowStep) -> tuple[Any, ...]:
        """Makes the arguments of a step outside of it."""
        batch = self.assemble(self.tensors, (step.rows, *step.drawn))
        # In memory as a DataLoader's batch: repeated rows are views until here.
        return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)  # type: ignore[no-any-return]

    def repeats(self, batch: Any, size: int) -> list[tuple[Tensor, int]]:
        """Returns the tensors of a batch of ``size`` rows that repeat each value, with how often."""
        repeats = []
        for name, leaf in zip(self.rows.names, pytree.tree_leaves(batch), strict=False):
            count = self.rows.repeats.get(name)
            # Concatenated, a row's values repeat along the first dimension; stacked, they
            # have one of their own.
            if count is not None and leaf.dim() and leaf.shape[0] == size * count:
                repeats.append((leaf, count))
        return repeats


def _order(
    num_rows: int,
    batch_size: int,
    seed: int | None,
    drop_last: bool,
    share: Share,
) -> RowOrder:
    """Returns the order of rows of which each rank takes ``batch_size`` a step.

    Raises:
        ValueError: an argument is out of range.
    """
    ranks = share.world_size
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(
            f"batch_size={batch_size!r}: must be a whole number of 1 or more"
        )
    least = batch_size if drop_last else 1
    if num_rows < ranks * least:
        raise ValueError(
            f"{num_rows} rows are not a batch of {least} for each of {ranks} ranks: take fewer ranks or a smaller "
            "batch_size"
        )
    full, rest = divmod(num_rows, batch_size * ranks)
    # Nothing pads a user's batch. Too few rows for one more step on every rank go to the step before.
    has_short = not drop_last and (rest >= ranks or not full)
    return RowOrder(
        num_rows=num_rows,
        batch_size=batch_size * ranks,
        num_steps=full + has_short,
        drop_last=drop_last,
        share=share,
        seed=seed,
    )


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
