"""Self-attention over sequences of unequal length that lie one after the other, P steps in all, without computing on padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

Attention = Literal["bucketed", "nested", "padded"]


class Bucket(NamedTuple):
    """b sequences of similar length, padded at the end to W steps.

    ``places`` (b, W) are packed places, those of padding the sequence's own last; ``valid`` (b, W) is False for padding, and None
    where there is none.
    """

    places: Tensor
    valid: Tensor | None


class Packing:
    """Where each step of B packed sequences stands; made once per batch and shared by all layers.

    Lengths 3, 0, 2 are packed as::

        rows     0 0 0 2 2      which sequence
        index    0 1 2 0 1      how many steps of it stand before
        to_end   2 1 0 1 0      how many steps of it follow

    Args:
        lengths: (B,) steps of each sequence, 0 or more.
        attention: ``bucketed`` pads each sequence to the next of a few lengths, at most half as long again; ``padded`` pads all to
            the longest, to compare with; ``nested`` is torch's jagged layout, padded nowhere.
    """

    def __init__(self, lengths: Tensor, attention: Attention = "bucketed") -> None:
        self.lengths = lengths.long()
        self.attention = attention
        self.offsets = pad(self.lengths.cumsum(0), (1, 0))
        self.rows = torch.repeat_interleave(self.lengths)
        places = torch.arange(len(self.rows), device=lengths.device)
        self.index = places - self.offsets[self.rows]
        self.to_end = self.offsets[self.rows + 1] - 1 - places

    @cached_property
    def longest(self) -> int:
        """Steps of the longest sequence, 0 without any."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Every sequence that has a step, in exactly one bucket."""
        widths = torch.tensor(_widths(self.longest) if self.attention == "bucketed" else [self.longest], device=self.lengths.device)
        chosen = torch.bucketize(self.lengths, widths).masked_fill(self.lengths == 0, -1)
        members = [(int(width), (chosen == at).nonzero()[:, 0]) for at, width in enumerate(widths.tolist())]
        return [self._bucket(rows, width) for width, rows in members if len(rows)]

    def _bucket(self, rows: Tensor, width: int) -> Bucket:
        steps, lengths = torch.arange(width, device=rows.device), self.lengths[rows][:, None]
        places = self.offsets[rows][:, None] + torch.minimum(steps, lengths - 1)
        valid = steps < lengths
        return Bucket(places, None if bool(valid.all()) else valid)

    @cached_property
    def back(self) -> Tensor:
        """(P,) where each packed step stands in the flattened buckets, one after the other."""
        valid = [torch.ones_like(b.places, dtype=torch.bool) if b.valid is None else b.valid for b in self.buckets]
        flat = torch.cat([v.flatten() for v in valid]).nonzero()[:, 0]
        places = torch.cat([bucket.places.flatten() for bucket in self.buckets])[flat]
        return torch.empty_like(flat).scatter_(0, places, flat)


def _widths(longest: int) -> Sequence[int]:
    """Lengths that sequences are padded to: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    Example:
        >>> _widths(10)
        [1, 2, 3, 4, 6, 8, 12]
    """
    widths = [1, 2]
    while widths[-1] < longest:
        widths.append(widths[-1] * 3 // 2 if widths[-1] & (widths[-1] - 1) == 0 else widths[-1] * 4 // 3)
    return widths


def attend(projected: Tensor, packing: Packing, *, causal: bool) -> Tensor:
    """Multi-head attention of each step to the steps of its own sequence.

    Args:
        projected: (P, 3, H, d), query, key and value of each of H heads.
        packing: of the P steps.
        causal: to the steps before and itself only.

    Returns:
        (P, H, d).

    Raises:
        ValueError: ``nested`` and causal on a CPU, for which torch has no kernel.
    """
    if not len(projected):
        return projected.sum(dim=1)  # nothing, but part of the graph: DistributedDataParallel waits for every gradient
    if packing.attention == "nested":
        return _nested(projected, packing, causal)
    outputs = [_padded(projected, bucket, causal) for bucket in packing.buckets]
    return torch.cat(outputs).index_select(0, packing.back)


def _padded(projected: Tensor, bucket: Bucket, causal: bool) -> Tensor:
    """(b x W, H, d); the rows of padding hold anything."""
    size, width = bucket.places.shape
    query, key, value = (
        projected.index_select(0, bucket.places.flatten()).view(size, width, *projected.shape[1:]).permute(2, 0, 3, 1, 4)
    )
    # Padding stands at the end, where no earlier step looks, so that causal attention needs no mask.
    mask = None if causal or bucket.valid is None else bucket.valid[:, None, None, :]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(0, 1)


def _nested(projected: Tensor, packing: Packing, causal: bool) -> Tensor:
    if causal and projected.device.type == "cpu":
        raise ValueError("attention='nested' with causal=True on a cpu: torch has no kernel for it there; use attention='bucketed'")
    lengths = packing.lengths[packing.lengths > 0]  # no kernel takes an empty sequence
    offsets = pad(lengths.cumsum(0), (1, 0))
    shortest, longest = int(lengths.min()), packing.longest
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(part.contiguous(), offsets, None, 1, shortest, longest).transpose(1, 2)
        for part in projected.unbind(1)
    )
    output: Tensor = scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).values()
    return output
