"""Ranking figures over a whole catalogue, exact and distributed; AUC from torchmetrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime

Kept = tuple[TowerBatch, int]  # a batch and how many of its rows count
PAIRS_PER_BLOCK = 2**17  # x hidden width x 4 bytes: 32 MiB at width 64


class Interaction(Protocol):
    """What ranking needs from an interaction module."""

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(B, N) logits."""


class Recommender(Protocol):
    """What ranking needs from a model, e.g. a TowerModel."""

    interaction: Interaction

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        """(B, D)."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Held-out interactions to rank the catalogue for, U of them; the same on every rank.

    Args:
        targets: (U,) the item that each query should find.
        seen_rows: (P,) and
        seen_items: (P,) pairs (query, item) that are left out of the ranking of that query.
        not_items: ids that are never ranked, such as the out-of-vocabulary row.
    """

    targets: Tensor
    seen_rows: Tensor
    seen_items: Tensor
    not_items: Sequence[int] = (0,)


class Ranks(NamedTuple):
    """Where the target stands: ``better`` (U,) candidates score higher, ``ties`` (U,) other candidates score the same."""

    better: Tensor
    ties: Tensor


def ranks_of(scores: Tensor, question: Question, start: int = 0) -> Ranks:
    """Ranks of the targets of queries ``start`` to ``start + U'`` by ``scores`` (U', I); changes ``scores``."""
    stop = start + scores.shape[0]
    targets = question.targets[start:stop, None]
    target_scores = scores.gather(1, targets)
    inside = (question.seen_rows >= start) & (question.seen_rows < stop)
    scores[question.seen_rows[inside] - start, question.seen_items[inside]] = -torch.inf
    scores[:, list(question.not_items)] = -torch.inf
    scores.scatter_(1, targets, target_scores)
    return Ranks((scores > target_scores).sum(1), (scores == target_scores).sum(1) - 1)


def ranking_metrics(ranks: Ranks, k: int = 10) -> dict[str, float]:
    """HR@k and NDCG@k with one relevant item per query.

    Ties are broken without favour: a target that ties with t others stands at each of the t + 1 places with equal probability, and
    the expectation is what counts.

    Example:
        >>> ranking_metrics(Ranks(torch.tensor([0, 9, 10]), torch.tensor([0, 1, 0])))["hr@10"]
        0.5
    """
    gains = torch.zeros(k + 1, dtype=torch.float64)
    gains[1:] = torch.cumsum(1 / torch.log2(torch.arange(k, dtype=torch.float64) + 2), dim=0)
    first, last = ranks.better.clamp(max=k), (ranks.better + ranks.ties + 1).clamp(max=k)
    places = (ranks.ties + 1).double()
    return {
        f"hr@{k}": float(((last - first) / places).mean()),
        f"ndcg@{k}": float(((gains[last] - gains[first]) / places).mean()),
    }


def popularity_metrics(popularity: Tensor, question: Question, k: int = 10, block: int = 1024) -> dict[str, float]:
    """The figures of ranking every query by ``popularity`` (I,), on the same candidates: what a model must beat."""
    parts = []
    for start in range(0, len(question.targets), block):
        size = min(block, len(question.targets) - start)
        parts.append(ranks_of(popularity.float().repeat(size, 1), question, start))
    return ranking_metrics(Ranks(*(torch.cat(values) for values in zip(*parts, strict=True))), k)


@torch.no_grad()
def catalogue_ranks(
    model: Recommender,
    runtime: Runtime,
    queries: Iterable[Kept],
    candidates: Iterable[Kept],
    question: Question,
    *,
    towers: tuple[str, str] = ("user", "item"),
) -> Ranks:
    """Ranks each query's target among all items; every rank must call it and gets the ranks of all queries.

    Both towers run once per row, spread over the ranks; then each rank scores its own queries against the whole catalogue, a block
    of pairs at a time, never a whole U x I matrix.

    Args:
        model: the model, under DistributedModelParallel its ``module``.
        runtime: this process's place in the job.
        queries: for each :class:`Share` of the queries in :func:`own_share` the batch of its rows, and its ``keep``.
        candidates: batches of the items 0 to I - 1, likewise.
        question: targets and what to leave out.
        towers: names of the query tower and of the candidate tower.
    """
    items = embed_all(model, towers[1], candidates, runtime)
    own = _embed(model, towers[0], queries, runtime)
    share = -(-len(question.targets) // runtime.world_size)
    start = runtime.rank * share
    parts = []
    for block in torch.split(own, max(1, PAIRS_PER_BLOCK // max(len(items), 1))):
        scores = model.interaction.score_all(block, items).cpu()
        parts.append(ranks_of(scores, question, start))
        start += len(block)
    better, ties = (torch.cat(values) for values in zip(*parts, strict=True))
    whole = gather_rows(torch.stack([better, ties], dim=1).to(runtime.device), runtime).cpu()
    return Ranks(whole[:, 0], whole[:, 1])


class Share(NamedTuple):
    """Rows of one look-up, never none (a row-wise sharded look-up of no rows fails), of which the first ``keep`` count."""

    rows: slice
    keep: int


def own_share(total: int, runtime: Runtime, block: int = 1024) -> list[Share]:
    """This rank's rows of ``total`` (1 or more), a block at a time: as many look-ups on every rank.

    Example:
        >>> own_share(5, Runtime(rank=1, world_size=2), block=2)
        [Share(rows=slice(3, 5, None), keep=2), Share(rows=slice(4, 5, None), keep=0)]
    """
    share = -(-total // runtime.world_size)
    stop = min((runtime.rank + 1) * share, total)
    shares = []
    for start in range(runtime.rank * share, (runtime.rank + 1) * share, block):
        keep = max(0, min(start + block, stop) - start)
        shares.append(Share(slice(start, start + keep) if keep else slice(total - 1, total), keep))
    return shares


@torch.no_grad()
def embed_all(model: Recommender, tower: str, batches: Iterable[Kept], runtime: Runtime) -> Tensor:
    """(rows of all ranks, D), the outputs of one tower; ``batches`` as in :func:`catalogue_ranks`."""
    return gather_rows(_embed(model, tower, batches, runtime), runtime)


def _embed(model: Recommender, tower: str, batches: Iterable[Kept], runtime: Runtime) -> Tensor:
    """(rows, D) of this rank; every rank looks up as many batches, because a look-up is collective."""
    return torch.cat([model.embed(tower, batch.to(runtime.device))[:keep] for batch, keep in batches])


def gather_rows(rows: Tensor, runtime: Runtime) -> Tensor:
    """The (n_r, D) rows of all ranks below one another, n_r differing between ranks."""
    if runtime.world_size == 1:
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(runtime.world_size)]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
    longest = max(int(size) for size in sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return torch.cat([part[: int(size)] for part, size in zip(received, sizes, strict=True)])


def auc(logits: Tensor, labels: Tensor, weights: Tensor, runtime: Runtime) -> float:
    """Exact AUC over the rows of all ranks with a weight above 0."""
    rows = gather_rows(torch.stack([logits, labels], dim=1)[weights > 0], runtime)
    # Places in the order, because torchmetrics puts logits through a float32 sigmoid, after which large ones tie.
    places = torch.unique(rows[:, 0], return_inverse=True)[1].double()
    return float(binary_auroc(places / places.max().clamp(min=1), rows[:, 1].long()))
