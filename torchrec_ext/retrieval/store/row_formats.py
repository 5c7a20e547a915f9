"""Row formats of a store, fp32, fp16 and int8, and a meter of what the shorter ones lose."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from torchrec_ext.schema.validation import check_choice

Dtype = str  # a name in ROW_FORMATS
_QUERIES = 64
_K = 100


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Difference between rows stored in fewer bits and the same rows in fp32.

    Args:
        greatest: greatest absolute difference of a number.
        mean: mean absolute difference of all numbers.
        recall: share of a query's nearest ``k`` by dot product that are among its nearest ``k`` of the stored rows;
            None without queries.
        k: number of neighbours by which ``recall`` is measured.
        rows: number of rows that were measured.
    """

    greatest: float
    mean: float
    recall: float | None
    k: int
    rows: int

    def with_more(self, other: Loss) -> Loss:
        """Merges the losses of two sets of rows; keeps the recall of the first."""
        rows = self.rows + other.rows
        mean = (self.mean * self.rows + other.mean * other.rows) / max(1, rows)
        return Loss(
            greatest=max(self.greatest, other.greatest),
            mean=mean,
            recall=self.recall,
            k=self.k,
            rows=rows,
        )

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the values for a manifest."""
        return asdict(self)


class RowFormat:
    """Stores rows unchanged, in 32 bits. Each subclass is another format, and another value of ``--store``.

    Attributes:
        name: what manifests and commands call it.
        numbers: type of the numbers on disk.
        greatest: the greatest number that a row may have.
        scaled: whether each row has a float32 scale beside it.
    """

    name = "fp32"
    numbers = torch.float32
    greatest = float(torch.finfo(torch.float32).max)
    scaled = False

    @property
    def exact(self) -> bool:
        """Whether rows are read back as they were written."""
        return self.numbers is torch.float32

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Converts rows (N, D) float32 to the stored type; also returns (N,) scales if the format is ``scaled``."""
        return vectors.to(self.numbers), None

    def rounding(self, greatest: float) -> float:
        """Returns the largest rounding error in a row with largest absolute number ``greatest``."""
        return 0.0


class HalfRows(RowFormat):
    """Numbers in 16 bits, up to 65,504."""

    name = "fp16"
    numbers = torch.float16
    greatest = 65504.0

    def rounding(self, greatest: float) -> float:
        """Returns half of the distance between neighbouring 16-bit numbers."""
        # 11 significant bits; the smallest numbers lie 2^-24 apart.
        return max(greatest * 2**-11, 2**-25)


class Int8Rows(RowFormat):
    """Whole numbers from -127 to 127, times a scale of the row."""

    name = "int8"
    numbers = torch.int8
    scaled = True

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns rows (N, D) int8 and scales (N,) float32; a row of zeros has the scale 1."""
        scales = vectors.abs().amax(dim=1) / 127
        # A row of zeros would be divided by 0.
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        numbers = (vectors / scales[:, None]).round().clamp(-127, 127)
        return numbers.to(torch.int8), scales

    def rounding(self, greatest: float) -> float:
        """Returns half of the distance between two neighbouring multiples of the scale."""
        return greatest / 254


ROW_FORMATS: dict[str, RowFormat] = {
    each.name: each for each in (RowFormat(), HalfRows(), Int8Rows())
}


def row_format(dtype: Dtype) -> RowFormat:
    """Returns a row format by name.

    Raises:
        ValueError: there is none of this name.
    """
    check_choice("dtype", dtype, ROW_FORMATS)
    return ROW_FORMATS[dtype]


def encode(vectors: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor | None]:
    """Converts rows (N, D) to the type on disk; also returns (N,) scales for int8.

    Raises:
        ValueError: a number that is not finite, or greater than the format holds; it names the row.
    """
    target_format = ROW_FORMATS[dtype]
    wrong = ~(vectors.abs() <= target_format.greatest)  # NaN compares false
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        rule = "must be finite"
        if vectors[row].isfinite().all():
            rule = (
                f"{dtype} holds up to {target_format.greatest:,.0f}; use fp32 or int8"
            )
        raise ValueError(
            f"vectors: row {row}, column {column} is {vectors[row, column]:g}; {rule}"
        )
    return target_format.encode(vectors)


def decode(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Converts the results of :func:`encode` back to (N, D) float32."""
    if scales is None:
        return rows.float()
    return rows.float().mul_(scales[:, None])


def greatest_loss(vectors: Tensor, dtype: Dtype) -> float:
    """Returns the largest error of rounding ``vectors`` (N, D) to ``dtype``."""
    greatest = float(vectors.abs().max()) if vectors.numel() else 0.0
    return ROW_FORMATS[dtype].rounding(greatest)


class LossMeter:
    """Measures the loss of rows as they stream by: two running top-k lists, no second copy of the catalogue.

    Args:
        queries: (Q, D) queries whose 100 nearest rows are compared; without, only differences are measured.
    """

    def __init__(self, queries: Tensor | None = None) -> None:
        self.queries = queries
        self._greatest = 0.0
        self._sum = 0.0
        self._numbers = 0
        self._rows = 0
        # Scores and rows of the best k so far: by the exact rows, then by the stored
        # ones.
        self._best: list[tuple[Tensor, Tensor] | None] = [None, None]

    def add(self, vectors: Tensor, stored: Tensor) -> None:
        """Adds rows (N, D): as they were, and as they are read back."""
        difference = (vectors - stored).abs()
        if difference.numel():
            self._greatest = max(self._greatest, float(difference.max()))
            self._sum += float(difference.sum(dtype=torch.float64))
        if self.queries is not None:
            # The same queries over both, so that what differs between the lists is
            # rounding alone.
            self._best[0] = self._merge_best(self._best[0], self.queries @ vectors.T)
            self._best[1] = self._merge_best(self._best[1], self.queries @ stored.T)
        self._numbers += difference.numel()
        self._rows += len(vectors)

    def _merge_best(
        self, best: tuple[Tensor, Tensor] | None, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        values, rows = scores.topk(min(_K, scores.shape[1]), dim=1)
        rows = rows + self._rows  # from a row of this block to a row of all
        if best is not None:
            values = torch.cat([best[0], values], dim=1)
            rows = torch.cat([best[1], rows], dim=1)
        best_values, order = values.topk(min(_K, values.shape[1]), dim=1)
        return best_values, rows.gather(1, order)

    def loss(self) -> Loss:
        """Returns the loss of all rows so far."""
        recall = None
        exact, stored = self._best
        if exact is not None and stored is not None:
            hits = (exact[1][:, :, None] == stored[1][:, None, :]).any(dim=2)
            recall = float(hits.float().mean())
        return Loss(
            greatest=self._greatest,
            mean=self._sum / max(1, self._numbers),
            recall=recall,
            k=_K,
            rows=self._rows,
        )


def some_of(block: Tensor) -> Tensor:
    """Returns up to 64 rows of a block, evenly spaced."""
    return block[:: max(1, len(block) // _QUERIES)][:_QUERIES].clone()
