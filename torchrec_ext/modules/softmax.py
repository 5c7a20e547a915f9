"""In-batch negatives: the candidates of a batch, of all ranks, are each other's negatives.

Axis letters: see torchrec_ext.schema. Here B are the queries of this rank, M extra candidates without a query, P the
greatest B + M of all ranks, and C = R x P.

Softmax over a catalogue, whole or estimated from a sample that all positions share, a block of scores at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

_PADDING = (
    -1
)  # what is no candidate at all; item 0 is the unknown one, or padding where nobody says which rows are present
# torch 2.13 renamed both and warns about the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class InBatch(NamedTuple):
    """The candidates of all ranks, in rank order, as :func:`torchrec_ext.modules.losses.in_batch_softmax` takes them.

    A rank with fewer than P has zeros and item 0 after them, which are excluded for every query.

    ``candidates`` (C, D) with gradient; ``targets`` (B,) int64, the place of each query's own candidate; ``excluded``
    (B, C) bool, which candidates are no negative of a query; ``log_q`` (C,) float32 or None; ``ids`` (C,) int64.
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

    Excluded are accidental hits (the query's own item elsewhere in the batch), the query's other known items, and
    padding; a query's own candidate never is. On more than one rank three exchanges, the first of which says how many
    candidates each rank has, or two with ``rows``; on one none.

    Args:
        embeddings: (B + M, D); the first B are the positives of this rank's queries, in order, the rest are negatives
            only (mixed negatives, Yang et al. 2020).
        ids: (B + M,) int64, which items they are, 0 or more. Not what is looked up for them: a candidate whose id was
            dropped stays itself, ``batch.items``.
        log_q: (B + M,) log-probability that a place of the batch holds the item, up to one constant.
        queries: B; all rows where not given.
        rows: P, where it is known and the same on every rank, as it is of the loader's batches: for batch_size rows of
            R ranks ceil(batch_size / R), plus M. Spares an exchange, and on CUDA a wait for it.
        present: (B + M,) bool, which rows have a candidate, the others being padding; where not given those with an id
            other than 0.
        is_known: from items (C,) to (B, C) bool, whether each query's user is known to have taken each, such as
            ``lambda items: known.contains(users[:, None], items)``.
        group: of ranks; all where not given.

    Raises:
        ValueError: shapes that do not fit together on this rank; or, on every rank unless ``rows`` is given, embeddings
            of different widths or log_q on some ranks only.

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

    Its gradient on a rank is the sum over ranks of what their losses say about this rank's rows. So the *mean* of the
    ranks' gradients of dense weights, which DistributedDataParallel and TorchRec take, is that of the mean loss over
    the whole batch.
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


def _check(
    embeddings: Tensor, ids: Tensor, log_q: Tensor | None, queries: int, rows: int | None, present: Tensor | None
) -> None:
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
            raise ValueError(
                f"{name}: shape {tuple(part.shape)}, must be (B + M,) = {tuple(ids.shape)}; give one for each id"
            )
    if not 0 <= queries <= size:
        raise ValueError(
            f"queries={queries}: must be 0 to {size}, the number of ids; the first rows belong to the queries"
        )
    if rows is not None and size > rows:
        raise ValueError(
            f"rows={rows}: this rank has {size} candidates; rows must be the most that any rank has, the same on all"
        )


def widened(values: Tensor) -> Tensor:
    """``values`` in float32 where they are of half precision, else as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


SCORES_PER_BLOCK = 2**20  # 4 MiB: they stay in the cache between the passes over them, and P x C never is in memory


def catalogue_softmax(
    states: Tensor, positives: Tensor, targets: Tensor, candidates: Tensor, candidate_ids: Tensor, *, num_items: int
) -> Tensor:
    """(P,) cross entropy of each target among all items, the score of an item being its dot product with the state.

    The sum over all items but the target is estimated by num_items / C times the sum over the C candidates but those
    that are the target. With each item once among the candidates that is the exact softmax; with candidates drawn
    uniformly, with or without replacement, the sum is estimated without bias (Jean et al. 2015; Bengio and Senecal
    2003). Scores are computed in float32 at least, under autocast too.

    Args:
        states: (P, D).
        positives: (P, D) the embeddings of the targets.
        targets: (P,) int64 ids.
        candidates: (C, D) embeddings.
        candidate_ids: (C,) int64 ids; 0 is padding.
        num_items: items of the catalogue, ids 1 to num_items.
    """
    states, positives, candidates = widened(states), widened(positives), widened(candidates)
    padding = candidate_ids == 0
    own = (states * positives).sum(dim=1)
    others: Tensor = _LogSumExp.apply(states, candidates, padding, *_hits(targets, candidate_ids))  # type: ignore[no-untyped-call]
    scale = (num_items / (~padding).sum().to(states)).log()
    return softplus(others + scale - own)


class _LogSumExp(torch.autograd.Function):
    """(P,) log of the sum of exp(state x candidate) over the candidates but padding and the (rows, columns) left out.

    The scores are made again in the backward, which costs a product and saves the memory and most passes over it: on
    one core 390 ms in place of 710 for 1,400 x 12,101 scores, 45 in place of 62 for 1,400 x 2,048.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, candidates: Tensor, padding: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        sums = states.new_empty(len(states))
        with torch.autocast(states.device.type, enabled=False):
            for block, scores in _scores(states, candidates, padding, rows, columns):
                greatest = scores.amax(dim=1, keepdim=True)
                sums[block] = scores.sub_(greatest).exp_().sum(dim=1).log_().add_(greatest[:, 0])
        ctx.save_for_backward(states, candidates, padding, rows, columns, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        states, candidates, padding, rows, columns, sums = ctx.saved_tensors
        of_states, of_candidates = torch.empty_like(states), torch.zeros_like(candidates)
        with torch.autocast(states.device.type, enabled=False):
            for block, scores in _scores(states, candidates, padding, rows, columns):
                shares = scores.sub_(sums[block, None]).exp_().mul_(gradient[block, None])
                of_states[block] = shares @ candidates
                of_candidates.addmm_(shares.T, states[block])
        return of_states, of_candidates, None, None, None


def _scores(
    states: Tensor, candidates: Tensor, padding: Tensor, rows: Tensor, columns: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of states and their scores. What is left out is not -inf: where nothing is left to sum, the gradient would be NaN."""
    nothing = torch.finfo(states.dtype).min
    bias = torch.zeros_like(candidates[:, 0]).masked_fill(padding, nothing)
    size = max(1, SCORES_PER_BLOCK // max(len(candidates), 1))
    starts = range(0, len(states), size)
    bounds = torch.searchsorted(rows, torch.tensor([*starts, len(states)], device=rows.device)).tolist()
    for at, start in enumerate(starts):
        block, left_out = slice(start, min(start + size, len(states))), slice(bounds[at], bounds[at + 1])
        scores = torch.addmm(bias, states[block], candidates.T)
        scores[rows[left_out] - start, columns[left_out]] = nothing
        yield block, scores


def _hits(targets: Tensor, candidate_ids: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (row, column) at which a candidate is the row's target, by row."""
    ordered, places = candidate_ids.sort()
    first = torch.searchsorted(ordered, targets)
    counts = torch.searchsorted(ordered, targets, right=True) - first
    rows = torch.repeat_interleave(counts)
    nth = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return rows, places[first[rows] + nth]
