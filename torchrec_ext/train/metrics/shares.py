"""own_share(): the rows that a rank embeds; embed_all(): the embedded rows of all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.ids.ranks import gather_rows

# A batch and the number of its rows that count; the rest is padding.
Kept = tuple[TowerBatch, int]


class Interaction(Protocol):
    """The methods of an interaction module used by ranking."""

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Returns logits (B, N) of every query with every candidate; a query is its towers' outputs, concatenated."""

    def __call__(self, outputs: list[Tensor]) -> Tensor:
        """Returns logits of rows, (B,), from each tower's output (B, D)."""


class Recommender(Protocol):
    """The parts of a model, such as a TowerModel, used by ranking."""

    interaction: Interaction

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        """Returns the outputs of a tower, (B, D)."""


class PaddedRows(NamedTuple):
    """Rows of one look-up; the first ``keep`` count. Never empty, because a sharded look-up of no rows fails."""

    rows: slice
    keep: int


def own_share(total: int, runtime: Runtime, block: int = 1024) -> list[PaddedRows]:
    """Splits this rank's rows of ``total`` (1 or more) into blocks, equally many on every rank.

    Example:
        >>> own_share(5, Runtime(rank=1, world_size=2), block=2)
        [PaddedRows(rows=slice(3, 5, None), keep=2), PaddedRows(rows=slice(4, 5, None), keep=0)]
    """
    # Every rank gets equally many blocks, the last ones perhaps without a row that
    # counts: look-ups are collective.
    share = -(-total // runtime.world_size)
    stop = min((runtime.rank + 1) * share, total)
    shares = []
    for start in range(runtime.rank * share, (runtime.rank + 1) * share, block):
        keep = max(0, min(start + block, stop) - start)
        rows = slice(start, start + keep)
        if not keep:
            rows = slice(total - 1, total)
        shares.append(PaddedRows(rows, keep))
    return shares


def own_start(rows: int, total: int, runtime: Runtime) -> int:
    """Returns the first of this rank's ``rows`` rows of ``total``.

    Raises:
        ValueError: the rank's share has another number of rows.
    """
    share = -(-total // runtime.world_size)
    start = runtime.rank * share
    expected = max(0, min(share, total - start))
    if rows != expected:
        raise ValueError(
            f"queries: {rows} rows on rank {runtime.rank}, must be {expected} of {total}; make a batch for each share "
            "in own_share(number of queries, runtime)"
        )
    return start


@torch.no_grad()
def embed_all(
    model: Recommender, tower: str, batches: Iterable[Kept], runtime: Runtime
) -> Tensor:
    """Returns one tower's outputs of all ranks' rows, (rows, D); ``batches`` as in :func:`model_hits`."""
    return gather_uneven_rows(embed_own(model, [tower], batches, runtime)[0], runtime)


@torch.no_grad()
def embed_own(
    model: Recommender, towers: Sequence[str], batches: Iterable[Kept], runtime: Runtime
) -> list[Tensor]:
    """Returns each tower's outputs of this rank's rows, (rows, D); ranks must have equally many batches."""
    outputs_by_tower: list[list[Tensor]] = [[] for _ in towers]
    for batch, keep in batches:
        batch_on_device = batch.to(runtime.device)
        for tower, outputs in zip(towers, outputs_by_tower, strict=True):
            outputs.append(model.embed(tower, batch_on_device)[:keep])
    return [torch.cat(outputs) for outputs in outputs_by_tower]


def gather_uneven_rows(rows: Tensor, runtime: Runtime) -> Tensor:
    """Concatenates the rows (n_r, ...) of all ranks; their numbers n_r may differ."""
    if runtime.world_size == 1:
        return rows
    return gather_rows(rows)
