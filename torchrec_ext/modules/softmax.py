"""In-batch negatives: the candidates of a batch, of all ranks, are each other's negatives.

Axis letters: see torchrec_ext.schema. Here B are the queries of this rank, M extra candidates without a query, P the greatest
B + M of all ranks, and C = R x P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_PADDING = -1  # what is no candidate at all; item 0 is the unknown one, or padding where nobody says which rows are present
# torch 2.13 renamed both and warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class InBatch(NamedTuple):
    """The candidates of all ranks, in rank order, as :func:`torchrec_ext.modules.losses.in_batch_softmax` takes them.

    A rank with fewer than P has zeros and item 0 after them, which are excluded for every query.

    ``candidates`` (C, D) with gradient; ``targets`` (B,) int64, the place of each query's own candidate; ``excluded`` (B, C) bool,
    which candidates are no negative of a query; ``log_q`` (C,) float32 or None; ``ids`` (C,) int64.
    """

    candidates: Tensor
    targets: Tensor
    excluded: Tensor
    log_q: Tensor | None
    ids: Tensor


def in_batch_negatives(
    embeddings: Tensor,
    ids: Tensor,
    *,
    log_q: Tensor | None = None,
    queries: int | None = None,
    rows: int | None = None,
    present: Tensor | None = None,
    is_known: Callable[[Tensor], Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> InBatch:
    """Gathers the candidates of all ranks and says which of them are negatives of which query.

    Excluded are accidental hits (the query's own item elsewhere in the batch), the query's other known items, and padding;
    a query's own candidate never is. On more than one rank three exchanges, the first of which says how many candidates
    each rank has, or two with ``rows``; on one none.

    Args:
        embeddings: (B + M, D); the first B are the positives of this rank's queries, in order, the rest are negatives only
            (mixed negatives, Yang et al. 2020).
        ids: (B + M,) int64, which items they are, 0 or more. Not what is looked up for them: a candidate whose id was dropped
            stays itself, ``batch.items``.
        log_q: (B + M,) log-probability that a place of the batch holds the item, up to one constant.
        queries: B; all rows where not given.
        rows: P, where it is known and the same on every rank, as it is of the loader's batches: for batch_size rows of R ranks
            ceil(batch_size / R), plus M. Spares an exchange, and on CUDA a wait for it.
        present: (B + M,) bool, which rows have a candidate, the others being padding; where not given those with an id
            other than 0.
        is_known: from items (C,) to (B, C) bool, whether each query's user is known to have taken each, such as
            ``lambda items: known.contains(users[:, None], items)``.
        group: of ranks; all where not given.

    Raises:
        ValueError: shapes that do not fit together on this rank; or, on every rank unless ``rows`` is given, embeddings of
            different widths or log_q on some ranks only.

    Example:
        >>> made = in_batch_negatives(torch.eye(4), torch.tensor([7, 8, 7, 5]), queries=3)
        >>> [made.ids[~row].tolist() for row in made.excluded]  # each query's own item and its negatives
        [[7, 8, 5], [7, 8, 7, 5], [8, 7, 5]]
    """
    size = len(ids)
    count = size if queries is None else queries
    _check(embeddings, ids, log_q, count, rows, present)
    if rows is None:
        rows = _greatest(embeddings, log_q, group)
    ids = torch.where(ids != 0 if present is None else present, ids, _PADDING)
    ids, log_q = _gather_facts(_padded(ids, rows, _PADDING), None if log_q is None else _padded(log_q, rows), group)
    targets = torch.arange(count, device=ids.device) + _rank(group) * rows
    padding, items = ids == _PADDING, ids.clamp(min=0)
    excluded = (ids == ids[targets][:, None]) | padding
    if is_known is not None:
        excluded |= is_known(items)
    # No scatter with a value of the host's: that would wait for a copy.
    excluded &= torch.arange(len(ids), device=ids.device) != targets[:, None]
    if log_q is not None:
        log_q = log_q.masked_fill(padding & log_q.isinf(), 0.0)  # 0 x inf would reach the loss
    return InBatch(gather_rows(_padded(embeddings, rows), group), targets, excluded, log_q, items)


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(R x B, D) the rows (B, D) of all ranks in rank order; every rank must give equally many, which nothing checks here.

    Its gradient on a rank is the sum over ranks of what their losses say about this rank's rows. So the *mean* of the ranks'
    gradients of dense weights, which DistributedDataParallel and TorchRec take, is that of the mean loss over the whole batch.
    """
    if _ranks(group) == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        own = gradient.new_empty(len(gradient) // _ranks(ctx.group), *gradient.shape[1:])
        _REDUCE_SCATTER(own, gradient.contiguous(), group=ctx.group)
        return own, None


def _gathered(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    everyone = rows.new_empty(_ranks(group) * len(rows), *rows.shape[1:])
    _ALL_GATHER(everyone, rows.contiguous(), group=group)
    return everyone


def _gather_facts(ids: Tensor, log_q: Tensor | None, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    """Ids and log_q of all ranks in one exchange: float64 travels as the int64 of the same bits."""
    if _ranks(group) == 1:
        return ids, log_q
    parts = [ids] if log_q is None else [ids, log_q.detach().double().view(torch.int64)]
    both = _gathered(torch.stack(parts, dim=1), group)
    return both[:, 0], None if log_q is None else both[:, 1].contiguous().view(torch.float64).to(log_q.dtype)


def _greatest(embeddings: Tensor, log_q: Tensor | None, group: dist.ProcessGroup | None) -> int:
    """P, after a check that makes every rank raise if one would."""
    if _ranks(group) == 1:
        return len(embeddings)
    mine = torch.tensor([[*embeddings.shape, log_q is not None]], device=embeddings.device)
    sizes = _gathered(mine, group).tolist()
    facts = {"D of the embeddings": [size[1] for size in sizes], "log_q given": [bool(size[2]) for size in sizes]}
    for name, by_rank in facts.items():
        if len(set(by_rank)) > 1:
            raise ValueError(f"{name}: {by_rank} on ranks 0 to {len(sizes) - 1}; must be the same on every rank")
    return int(max(size[0] for size in sizes))


def _padded(rows: Tensor, size: int, value: int = 0) -> Tensor:
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_full((size - len(rows), *rows.shape[1:]), value)])


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _check(embeddings: Tensor, ids: Tensor, log_q: Tensor | None, queries: int, rows: int | None, present: Tensor | None) -> None:
    size = len(ids)
    if embeddings.dim() != 2 or len(embeddings) != size:
        raise ValueError(
            f"embeddings: shape {tuple(embeddings.shape)} with {size} ids; must be (B + M, D) with one row for each id"
        )
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"ids: {ids.dtype} of shape {tuple(ids.shape)}; must be int64 of shape (B + M,); convert them with .long()"
        )
    for name, part in (("log_q", log_q), ("present", present)):
        if part is not None and part.shape != ids.shape:
            raise ValueError(f"{name}: shape {tuple(part.shape)}, must be (B + M,) = {tuple(ids.shape)}; give one for each id")
    if not 0 <= queries <= size:
        raise ValueError(f"queries={queries}: must be 0 to {size}, the number of ids; the first rows belong to the queries")
    if rows is not None and size > rows:
        raise ValueError(f"rows={rows}: this rank has {size} candidates; rows must be the most that any rank has, the same on all")


def widened(values: Tensor) -> Tensor:
    """``values`` in float32 where they are of half precision, else as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
