"""Rows in fp32, fp16 or int8, and what the shorter forms lose, measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Dtype = Literal["fp32", "fp16", "int8"]
STORED: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
_FP16_GREATEST = 65504.0
QUERIES, K = 64, 100


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What storing rows in fewer bits lost, against the same rows in fp32.

    Args:
        greatest: absolute difference of any number.
        mean: absolute difference, over all numbers.
        recall: part of a query's nearest ``k`` by dot product that are among the nearest ``k`` of the stored rows; None
            where no queries were given.
        k: of ``recall``.
        rows: how many rows were measured.
    """

    greatest: float
    mean: float
    recall: float | None
    k: int
    rows: int

    def with_more(self, other: Loss) -> Loss:
        """Of both sets of rows; the recall stays that of the first."""
        rows = self.rows + other.rows
        mean = (self.mean * self.rows + other.mean * other.rows) / max(1, rows)
        return Loss(greatest=max(self.greatest, other.greatest), mean=mean, recall=self.recall, k=self.k, rows=rows)

    def as_dict(self) -> dict[str, float | int | None]:
        """For a manifest."""
        return asdict(self)


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a name that is none of ``Dtype``."""
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(get_args(Dtype))}")


def encode(vectors: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor | None]:
    """(N, D) as stored, and for int8 the (N,) float32 scales: each row is its integers times its scale.

    Raises:
        ValueError: a number that is not finite, or for fp16 one beyond 65,504; it names the row.
    """
    limit = _FP16_GREATEST if dtype == "fp16" else torch.finfo(torch.float32).max
    wrong = ~(vectors.abs() <= limit)  # NaN compares false
    if wrong.any():
        row, column = (int(place) for place in wrong.nonzero()[0])
        rule = f"fp16 holds up to {limit:,.0f}; use fp32 or int8" if vectors[row].isfinite().all() else "must be finite"
        raise ValueError(f"vectors: row {row}, column {column} is {vectors[row, column]:g}; {rule}")
    if dtype != "int8":
        return vectors.to(STORED[dtype]), None
    scales = vectors.abs().amax(dim=1) / 127
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (vectors / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def decode(rows: Tensor, scales: Tensor | None) -> Tensor:
    """(N, D) float32 of what :func:`encode` made."""
    return rows.float() if scales is None else rows.float().mul_(scales[:, None])


def greatest_loss(vectors: Tensor, dtype: Dtype) -> float:
    """What rounding to ``dtype`` may change a number of ``vectors`` (N, D) by: half of the distance between two that it holds."""
    greatest = float(vectors.abs().max()) if vectors.numel() else 0.0
    return {"fp32": 0.0, "fp16": max(greatest * 2**-11, 2**-25), "int8": greatest / 254}[dtype]


class LossMeter:
    """Measures the loss of rows as they stream by: two running top-k lists, no second copy of the catalogue.

    Args:
        queries: (Q, D) whose nearest rows are compared; none for the differences alone.
        k: of the recall.
    """

    def __init__(self, queries: Tensor | None = None, k: int = K) -> None:
        self.queries, self.k = queries, k
        self._greatest, self._sum, self._numbers, self._rows = 0.0, 0.0, 0, 0
        self._best: list[tuple[Tensor, Tensor] | None] = [None, None]

    def add(self, vectors: Tensor, stored: Tensor) -> None:
        """The next rows, (N, D): as they were and as they are read back."""
        difference = (vectors - stored).abs()
        if difference.numel():
            self._greatest = max(self._greatest, float(difference.max()))
            self._sum += float(difference.sum(dtype=torch.float64))
        if self.queries is not None:
            for place, rows in enumerate((vectors, stored)):
                self._best[place] = self._merged(self._best[place], self.queries @ rows.T)
        self._numbers += difference.numel()
        self._rows += len(vectors)

    def _merged(self, best: tuple[Tensor, Tensor] | None, scores: Tensor) -> tuple[Tensor, Tensor]:
        values, places = scores.topk(min(self.k, scores.shape[1]), dim=1)
        places = places + self._rows
        if best is not None:
            values, places = torch.cat([best[0], values], dim=1), torch.cat([best[1], places], dim=1)
        kept, order = values.topk(min(self.k, values.shape[1]), dim=1)
        return kept, places.gather(1, order)

    def loss(self) -> Loss:
        """Of all rows so far."""
        recall = None
        if self._best[0] is not None and self._best[1] is not None:
            exact, found = self._best[0][1], self._best[1][1]
            recall = float((exact[:, :, None] == found[:, None, :]).any(dim=2).float().mean())
        return Loss(
            greatest=self._greatest, mean=self._sum / max(1, self._numbers), recall=recall, k=self.k, rows=self._rows
        )


def measured_loss(blocks: Iterable[Tensor], dtype: Dtype, *, queries: Tensor | None = None, k: int = K) -> Loss:
    """What ``dtype`` would lose of the rows of ``blocks``, each (N, D).

    Args:
        blocks: the catalogue, streamed.
        dtype: to store it in.
        queries: (Q, D) for the recall at ``k``; rows of the first block where not given.
        k: of the recall.

    Example:
        >>> measured_loss([torch.tensor([[0.0, 127.0], [1.0, 2.0]])], "int8", k=1).greatest < 1 / 127
        True
    """
    check_dtype(dtype)
    meter: LossMeter | None = None
    for block in blocks:
        meter = meter or LossMeter(some_of(block) if queries is None else queries, k)
        meter.add(block, decode(*encode(block, dtype)))
    return (meter or LossMeter(queries, k)).loss()


def some_of(block: Tensor) -> Tensor:
    """(up to 64, D) rows of a block, evenly spaced."""
    return block[:: max(1, len(block) // QUERIES)][:QUERIES].clone()
