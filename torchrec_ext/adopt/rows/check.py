"""compare_rows(): compares every value of declared rows with what a user's DataLoader makes of its Dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.observe.state_copy import copies_of_global_generators

if TYPE_CHECKING:
    from torchrec_ext.adopt.rows.rows import Rows


# Where a batch holds the drawn ids, by its number of rows; see _places().
Places = dict[int, tuple[int, Tensor] | None]

_AT_ONCE = 4096  # rows that are compared at a time, in whole batches of the loader


def compare_rows(rows: Rows, loader: DataLoader[Any]) -> str:
    """Compares rows with a loader; see :meth:`Rows.check`."""
    per_row = _check_settings(rows, loader)
    size = max(1, _AT_ONCE // rows.batch_size) * rows.batch_size
    known_places: Places = {}
    copies = copies_of_global_generators()
    try:
        # A loader of the same Dataset in its own order, in larger batches of the same form.
        in_order = DataLoader(
            loader.dataset,
            size * per_row,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
        )
        for start, batch in zip(range(0, rows.num_rows, size), in_order, strict=True):
            indices = torch.arange(start, min(start + size, rows.num_rows))
            _compare(rows, indices, batch, known_places)
    finally:
        for put_back in copies:
            put_back()
    drawn = ""
    if rows.negatives is not None:
        drawn = "; drawn ids are those that can be drawn, how often was not looked at"
    return (
        f"all {rows.num_rows:,} rows equal those of {type(loader.dataset).__name__}{drawn}"
        + (_APART if per_row > 1 else "")
    )


_APART = "; a positive and its negatives come in one batch, which the loader shuffles"


def _check_settings(rows: Rows, loader: DataLoader[Any]) -> int:
    """Returns how many rows of the Dataset are one row: 1, or 1 + n with a row for each instance.

    Raises:
        CannotAdopt: the loader says something else than the rows.
    """
    dataset = loader.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise CannotAdopt(
            f"{kind} has no rows by number, which check() compares; keep the loader, and adopt the step alone"
        )
    per_row = 1
    instances = 1 + rows.negatives.count if rows.negatives is not None else 1
    length = len(dataset)
    if length == rows.num_rows * instances:
        per_row = instances
    elif length != rows.num_rows:
        raise CannotAdopt(
            f"{kind} has {length:,} rows, the columns {rows.num_rows:,}: give columns of one value for each row, or "
            "for each positive"
        )
    order = rows.order
    sampler = loader.sampler
    # By the class itself: one derived from them may do anything.
    shuffles = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == length
    )
    if not shuffles and type(sampler) is not SequentialSampler:
        raise CannotAdopt(
            f"the loader's {type(sampler).__name__} chooses rows, Rows takes each once in an epoch; keep the loader, "
            "and adopt the step alone"
        )
    batch_size = rows.batch_size * per_row
    if loader.batch_size != batch_size:
        raise CannotAdopt(
            f"the loader's batch_size is {loader.batch_size}, that of these rows {batch_size} rows of {kind}: give "
            "the same to both, and no batch_sampler"
        )
    for name, theirs, ours in (
        ("shuffle", shuffles, rows.shuffle),
        ("drop_last", loader.drop_last, order.drop_last),
    ):
        if theirs != ours:
            raise CannotAdopt(
                f"the loader has {name}={theirs}, these rows {name}={ours}: write Rows(..., {name}={theirs})"
            )
    return per_row


def _compare(rows: Rows, indices: Tensor, batch: Any, known_places: Places) -> None:
    """Raises CannotAdopt if a batch of the loader is not the one of ``indices`` (B,), whatever was drawn."""
    theirs, structure = pytree.tree_flatten(batch)
    draws = None
    if rows.negatives is not None:
        draws = _drawn_ids(rows, indices, theirs, known_places)
    own_batch = rows.batch(indices, draws)
    ours, own_structure = pytree.tree_flatten(own_batch)
    # A list of tensors and a tuple of tensors are one batch.
    are_flat = _is_flat(batch, theirs) and _is_flat(own_batch, ours)
    if len(ours) != len(theirs) or (structure != own_structure and not are_flat):
        raise CannotAdopt(
            f"a batch of the loader has {len(theirs)} tensors, {structure!s:.40}, one of Rows {len(ours)}, "
            f"{own_structure!s:.40}: give columns for these, or make="
        )
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        _compare_tensor(_name(rows, number), indices, our, their)


def _is_flat(batch: Any, leaves: list[Any]) -> bool:
    return type(batch) in (tuple, list) and len(batch) == len(leaves)


def _name(rows: Rows, number: int) -> str:
    return rows.names[number] if rows.names else f"tensor {number}"


def _compare_tensor(name: str, indices: Tensor, our: Any, their: Any) -> None:
    if not isinstance(their, Tensor):
        raise CannotAdopt(
            f"{name}: the loader gives a {type(their).__name__}, Rows tensors; have collate_fn give tensors"
        )
    if our.shape != their.shape or our.dtype != their.dtype:
        raise CannotAdopt(
            f"{name}: the loader gives {their.dtype} {tuple(their.shape)}, Rows {our.dtype} {tuple(our.shape)}; "
            "convert the column, have collate_fn join rows by torch.cat, or give make="
        )
    # NaN equals NaN here: both are what the row holds.
    differs = our != their
    if their.is_floating_point():
        differs &= ~(our.isnan() & their.isnan())
    if not differs.any():
        return
    place = int(differs.flatten().nonzero()[0, 0])
    rows_of = max(1, our.numel() // len(indices))
    row = int(indices[min(place // rows_of, len(indices) - 1)])
    theirs = their.flatten()[place].item()
    ours = our.flatten()[place].item()
    raise CannotAdopt(
        f"{name} of row {row}: the loader gives {theirs}, Rows {ours}, and {int(differs.sum())} values differ in these "
        f"{len(indices)} rows; correct the column, or give make="
    )


def _drawn_ids(
    rows: Rows, indices: Tensor, theirs: list[Any], known_places: Places
) -> Tensor:
    """Returns the ids (B, n) drawn by the loader's Dataset, at the place of ours in a batch.

    Raises:
        CannotAdopt: a batch does not hold them as they were drawn, or one is none that can be drawn.
    """
    negatives = rows.negatives
    assert negatives is not None
    # The same for all blocks of a size, of which there are two.
    if len(indices) not in known_places:
        known_places[len(indices)] = _places(rows, indices)
    places = known_places[len(indices)]
    if places is None:
        # A catalogue of one item, or of none that a row could change.
        return torch.from_numpy(negatives.draw(indices.numpy(), epoch=0)[0])
    leaf, positions = places
    their = theirs[leaf] if leaf < len(theirs) else None
    if (
        not isinstance(their, Tensor)
        or their.is_floating_point()
        or their.numel() <= int(positions.max())
    ):
        raise CannotAdopt(
            f"{_name(rows, leaf)}: a batch of the loader does not hold {negatives.count} negatives, whole numbers, for "
            "each row there; give make="
        )
    drawn = their.flatten()[positions].view(len(indices), negatives.count)
    possible = negatives.can_draw(indices.numpy(), drawn.numpy().astype(np.int64))
    if not possible.all():
        row, index = np.unravel_index(int(possible.argmin()), possible.shape)
        raise CannotAdopt(
            f"{_name(rows, leaf)} of row {int(indices[row])}: the loader drew {int(drawn[row, index])}, which these "
            "negatives never are; correct negatives="
        )
    return drawn.long()


def _places(rows: Rows, indices: Tensor) -> tuple[int, Tensor] | None:
    """Returns the tensor of a batch that holds the drawn ids, and their flat positions (B x n,) in their order.

    None if no other ids could be drawn.

    Raises:
        CannotAdopt: no tensor holds them as they are.
    """
    negatives = rows.negatives
    assert negatives is not None
    ids = torch.from_numpy(negatives.catalogue)
    if len(ids) < 2:
        return None
    shape = (len(indices), negatives.count)
    # Two batches that differ in every drawn id and in nothing else.
    first = ids[:1].expand(shape).contiguous()
    numbers = torch.arange(first.numel()) % (len(ids) - 1)
    second = ids[1 + numbers].view(shape)
    before, after = (
        pytree.tree_leaves(rows.batch(indices, draws)) for draws in (first, second)
    )
    for number, (one, two) in enumerate(zip(before, after, strict=True)):
        positions = (one != two).flatten().nonzero()[:, 0]
        found = two.flatten()[positions]
        if not found.is_floating_point() and torch.equal(
            found.long(), second.flatten()
        ):
            return number, positions
    raise CannotAdopt(
        "make: no tensor of its batch holds the negatives as they were drawn, row by row; check() cannot compare it"
    )
