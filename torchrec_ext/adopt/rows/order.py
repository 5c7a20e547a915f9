"""RowOrder, LoaderOrder: the rows of each step of an epoch, in an order of ours or in that of a user's DataLoader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.reading import DatasetReader, seed_everything


@dataclass(frozen=True)
class RowOrder:
    """Each row once in an epoch, on one of the ranks; arguments as those of :class:`Rows`.

    Raises:
        ValueError: an argument is out of range.
    """

    num_rows: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, ranks=self.ranks)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank={self.rank}: must be 0 to ranks - 1 = {self.ranks - 1}"
            )
        if self.num_rows < self.ranks or (
            self.drop_last and self.num_rows < self.ranks * self.batch_size
        ):
            least = self.batch_size if self.drop_last else 1
            raise ValueError(
                f"{self.num_rows} rows are not a batch of {least} for each of "
                f"{self.ranks} ranks: take fewer ranks or a smaller batch_size"
            )

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size * self.ranks)
        if self.drop_last or (full and rest < self.ranks):
            return full
        return full + 1

    def batches(self, epoch: int) -> list[Tensor]:
        """Returns this rank's rows in each step of an epoch."""
        order = torch.arange(self.num_rows)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_epoch_seed(self.seed, epoch))
            order = torch.randperm(self.num_rows, generator=generator)
        size = self.batch_size
        ranks = self.ranks
        full, rest = divmod(self.num_rows, size * ranks)
        mine = order[: full * size * ranks].view(full, ranks, size)[:, self.rank]
        batches = list(mine.unbind())
        if self.drop_last:
            return batches
        last = order[self.num_rows - rest :]
        if not full or rest >= ranks:
            batches.append(last.tensor_split(ranks)[self.rank])
        elif self.rank < rest:
            # Too few rows for one more step on every rank: some ranks have a row more
            # in the step before.
            batches[-1] = torch.cat([batches[-1], last[self.rank, None]])
        return batches

    def state(self) -> dict[str, Any]:
        """Returns what the order of all ranks depends on."""
        return {name: value for name, value in vars(self).items() if name != "rank"}


@dataclass(frozen=True)
class LoaderOrder:
    """The order of a DataLoader's own sampler, seeded by a seed and the epoch; ``draws`` if rows have negatives."""

    sampler: Any
    reader: DatasetReader
    seed: int
    draws: bool

    def __len__(self) -> int:
        return len(self.sampler)

    def batches(self, epoch: int) -> list[Tensor]:
        """Returns the rows that the sampler draws for each step of an epoch.

        Raises:
            CannotAdopt: a row that is not there, or twice one whose negatives would be the same.
        """
        seed = _epoch_seed(self.seed, epoch)
        with self.reader.untouched(generators_alone=True):
            # numpy's seed has 32 bits.
            seed_everything(seed % 2**32)
            # A sampler may draw from a generator of its own, also the one inside a
            # BatchSampler.
            samplers: tuple[Any, ...] = (
                self.sampler,
                getattr(self.sampler, "sampler", None),
            )
            for sampler in samplers:
                generator = getattr(sampler, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            batches = [
                torch.tensor(list(rows), dtype=torch.int64) for rows in self.sampler
            ]
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *batches])
        outside = rows[(rows < 0) | (rows >= self.reader.num_rows)]
        if len(outside):
            raise CannotAdopt(
                f"the loader's sampler gives row {outside[0]}: must be 0 to {self.reader.num_rows - 1}"
            )
        # Draws are a function of the row and the epoch.
        if self.draws and len(rows) > len(set(rows.tolist())):
            raise CannotAdopt(
                "the loader's sampler takes a row twice in an epoch, whose negatives would be the same; draw them in "
                "the loss, or take shuffle=True"
            )
        return batches


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(
        np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
        >> np.uint64(1)
    )


def check_positive(**numbers: int | None) -> None:
    """Raises ValueError if a number is not a whole number of 1 or more."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number of 1 or more")


def sampler_of(
    loader: DataLoader[Any], settings: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns a loader's sampler of batches, None where ``shuffle`` says the same, and the settings of its rows.

    Args:
        loader: the user's DataLoader.
        settings: what the user gave beside it, by name.

    Raises:
        CannotAdopt: it says something that the loader says too, or the order has no form.
    """
    for name in ("batch_size", "collate_fn", "shuffle", "drop_last"):
        if settings.pop(name, None) is not None:
            raise CannotAdopt(
                f"Rows.of(loader, {name}=...): the DataLoader has its own {name}; leave this one out"
            )
    sampler = loader.sampler
    batches = loader.batch_sampler
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    # Of torch's own samplers, by the class itself: one derived from them may do
    # anything.
    shuffles = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == size
    )
    if loader.batch_size is not None and (
        shuffles or type(sampler) is SequentialSampler
    ):
        return None, {**settings, "shuffle": shuffles, "drop_last": loader.drop_last}
    kind = type(batches if loader.batch_size is None else sampler).__name__
    try:
        fixed = hasattr(batches, "batch_size") and len(batches) >= 0  # type: ignore[arg-type]
    except TypeError:  # its sampler has no length
        fixed = False
    # An IterableDataset is refused for what it is, by DatasetReader.
    if not fixed and not isinstance(loader.dataset, IterableDataset):
        raise CannotAdopt(
            f"Rows.of(loader): its {kind} makes batches of no fixed size; give it batch_size, __len__"
        )
    if settings.get("ranks", 1) > 1:
        raise CannotAdopt(
            f"Rows.of(loader, ranks=...): its {kind} does not say whose rows are whose; leave ranks out"
        )
    return batches, settings
