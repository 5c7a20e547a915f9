"""LoaderConfig: settings of the loader, from rows to batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_ext.schema.validation import check_choice, check_least

Sampling = Literal["uniform", "popularity"]
_LEAST = {
    "batch_size": 1,
    "negatives": 0,
    "lanes": 1,
    "buffer_rows": 1,
    "read_ahead": 0,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings of the loader: how rows become batches.

    Args:
        batch_size: positives per step *over all ranks*, so that a result does not depend on the number of ranks. A
            rank's batch has ceil(batch_size / R) x (1 + negatives) rows; fewer where a whole epoch has fewer.
        negatives: drawn per positive; 0 for rows with labels of their own, or for losses that take negatives from the
            batch.
        sampling: how negatives are drawn: ``uniform`` or by ``popularity``.
        popularity_exponent: see :class:`PopularityNegatives`.
        shuffle: draw a new order each epoch; False keeps the order of the rows.
        drop_last: leave out the last step if it is not full; else rows of weight 0 fill it.
        seed: seed of the order and of the negatives.
        label: the column with the labels, for ``negatives=0``; all labels are 1 where not given.
        weight: the column with a weight for each row; all weights are 1 where not given.
        lanes: number of places in the files from which a batch is mixed; where it is a multiple of the number of ranks
            each rank reads only its share of the data, see :class:`StreamPlan`. The order of the rows depends on it.
            With more ranks than lanes every rank has a lane of its own, so the order depends on the number of ranks. On
            a click log of 40 columns (benchmarks/loader.py) a process took 850 MB at its peak, 430 MB of which are
            torch and TorchRec.
        buffer_rows: rows of files held for shuffling, over all lanes. A row group that is larger than a
            lane's share is read in parts, in its order, and a warning says so. By default fewer than ``4 * lanes`` row
            groups, some of them so large, are held and shuffled whole by every rank, if all their columns have at most
            2**26 values, a list counting as one; else they are read in parts of 8,192 rows from as many places as the
            buffer holds. The order of the rows depends on it.
        device: ``cpu`` or ``cuda``: hold all rows and items as tensors there, for a set that fits; gather and draw
            there, in the order of rows in memory and with the same draws. A captured step then makes its
            batches itself.
        read_ahead: parts of the buffer (``buffer_rows / lanes`` rows of files) read and shuffled ahead, by as many
            threads; 0 reads in the thread that builds the batches.
    """

    batch_size: int = 1024
    negatives: int = 4
    sampling: Sampling = "uniform"
    popularity_exponent: float = 0.75
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    label: str | None = None
    weight: str | None = None
    lanes: int = 4
    buffer_rows: int = 262_144
    read_ahead: int = 2
    device: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ValueError(f"loader.{name}={value!r}: must be a whole number")
            check_least(f"loader.{name}", value, least)
        check_choice("loader.sampling", self.sampling, get_args(Sampling))
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(
                f"loader.device={self.device!r}: must be cpu or cuda, the device that trains, or be left out"
            )
        self._check_sampling()

    def rank_rows(self, world_size: int) -> int:
        """Returns the number of rows of each rank's batch, with negatives and padding.

        Example:
            >>> LoaderConfig(batch_size=100, negatives=4).rank_rows(3)
            170
        """
        return -(-self.batch_size // world_size) * (1 + self.negatives)

    def num_steps(self, num_rows: int) -> int:
        """Returns the number of steps of an epoch of ``num_rows`` rows over all ranks.

        Example:
            >>> LoaderConfig(batch_size=100).num_steps(250), LoaderConfig(batch_size=100, drop_last=True).num_steps(250)
            (3, 2)
        """
        if self.drop_last:
            return num_rows // self.batch_size
        return -(-num_rows // self.batch_size)

    def _check_sampling(self) -> None:
        if self.sampling == "popularity" and not self.negatives:
            raise ValueError(
                "loader.sampling='popularity' with loader.negatives=0: it would do nothing; leave loader.sampling "
                "out, or set loader.negatives to 1 or more"
            )
        if self.label and self.negatives:
            raise ValueError(
                f"loader.label={self.label!r} with loader.negatives={self.negatives}: drawn negatives have label 0 "
                "and their positives label 1; set one of the two"
            )
