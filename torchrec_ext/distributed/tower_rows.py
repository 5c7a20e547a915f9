"""Rows for one tower: packed to travel, cut and joined by rank, whole runs of ids at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class TowerRows(NamedTuple):
    """n rows for one tower: ``values`` (V,) int64, ``lengths`` (F, n) int32, ``dense`` (n, Fd) float32."""

    values: Tensor
    lengths: Tensor
    dense: Tensor

    @property
    def height(self) -> int:
        """How many rows."""
        return self.lengths.shape[1]


class Widths(NamedTuple):
    """F and Fd of a tower."""

    features: int
    dense: int


def packed(parts: Sequence[tuple[TowerRows, Widths]], device: torch.device) -> Tensor:
    """All of them as int64, one after the other."""
    sizes = [packed_size(rows.height, len(rows.values), widths) for rows, widths in parts]
    payload = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for (rows, widths), place in zip(parts, torch.split(payload, sizes), strict=True):
        for to, own in zip(unpacked(place, rows.height, len(rows.values), widths), rows, strict=True):
            to.copy_(own)
    return payload


def packed_size(count: int, ids: int, widths: Widths) -> int:
    """How many int64 hold ``count`` rows with ``ids`` ids."""
    return ids + (widths.features * count + 1) // 2 + (widths.dense * count + 1) // 2


def unpacked(payload: Tensor, count: int, ids: int, widths: Widths) -> TowerRows:
    """``count`` rows with ``ids`` ids, as views of their part of a payload."""
    middle = ids + (widths.features * count + 1) // 2
    lengths = payload[ids:middle].view(torch.int32)[: widths.features * count]
    dense = payload[middle:].view(torch.float32)[: widths.dense * count]
    return TowerRows(payload[:ids], lengths.view(widths.features, count), dense.view(count, widths.dense))


def joined(parts: Sequence[TowerRows]) -> TowerRows:
    """The rows of several ranks below one another."""
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([part.lengths for part in parts], dim=1)
    features = len(lengths)
    # From rank by rank, each feature by feature, to feature by feature: whole runs of ids move.
    runs = torch.stack([part.lengths.sum(dim=1, dtype=torch.int32) for part in parts]).view(-1)
    order = torch.arange(len(runs), dtype=torch.int32, device=runs.device).view(len(parts), features).T.reshape(-1)
    values = torch.cat([part.values for part in parts])
    _, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, runs, values, None, len(values))
    return TowerRows(values, lengths, torch.cat([part.dense for part in parts]))


def cut(rows: TowerRows, start: int, stop: int) -> TowerRows:
    """Rows ``start`` to ``stop``."""
    if (start, stop) == (0, rows.height):
        return rows
    # Each feature's ids of the rows before, of these, and after are a run.
    ends = rows.lengths.sum(dim=1).cumsum(0)
    firsts = ends - rows.lengths[:, start:].sum(dim=1)
    lasts = ends - rows.lengths[:, stop:].sum(dim=1)
    runs = [rows.values[first:last] for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    return TowerRows(torch.cat(runs), rows.lengths[:, start:stop].contiguous(), rows.dense[start:stop])


def padded(rows: TowerRows, count: int) -> TowerRows:
    """``rows`` and empty ones after them, ``count`` together."""
    missing = count - rows.height
    if not missing:
        return rows
    return TowerRows(rows.values, pad(rows.lengths, (0, missing)), pad(rows.dense, (0, 0, 0, missing)))
