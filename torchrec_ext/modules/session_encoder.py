"""SessionEncoder: positions and transformer layers over packed sequences; it has no tables and is the same on every rank.

Self-attention over sequences of unequal length that lie one after the other, P steps in all, without computing on
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.tower import Activation, activation_layer

Attention = Literal["bucketed", "nested", "padded"]


class Bucket(NamedTuple):
    """b sequences of similar length, padded at the end to W steps.

    ``places`` (b, W) are packed places, those of padding the sequence's own last; ``valid`` (b, W) is False for
    padding, and None where there is none.
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
        attention: ``bucketed`` pads each sequence to the next of a few lengths, at most half as long again; ``padded``
            pads all to the longest, to compare with; ``nested`` is torch's jagged layout, padded nowhere.
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
        widths = torch.tensor(
            _widths(self.longest) if self.attention == "bucketed" else [self.longest], device=self.lengths.device
        )
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
        projected.index_select(0, bucket.places.flatten())
        .view(size, width, *projected.shape[1:])
        .permute(2, 0, 3, 1, 4)
    )
    # Padding stands at the end, where no earlier step looks, so that causal attention needs no mask.
    mask = None if causal or bucket.valid is None else bucket.valid[:, None, None, :]
    return (
        scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(0, 1)
    )


def _nested(projected: Tensor, packing: Packing, causal: bool) -> Tensor:
    if causal and projected.device.type == "cpu":
        raise ValueError(
            "attention='nested' with causal=True on a cpu: torch has no kernel for it there; use attention='bucketed'"
        )
    lengths = packing.lengths[packing.lengths > 0]  # no kernel takes an empty sequence
    offsets = pad(lengths.cumsum(0), (1, 0))
    shortest, longest = int(lengths.min()), packing.longest
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(part.contiguous(), offsets, None, 1, shortest, longest).transpose(1, 2)
        for part in projected.unbind(1)
    )
    output: Tensor = scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).values()
    return output


Position = Literal["start", "end", "none"]


class TransformerLayer(nn.Module):
    """Self-attention, then a network of one hidden layer at each step, both with residual and layer norm (Vaswani et al. 2017).

    With the same weights it equals ``torch.nn.TransformerEncoderLayer`` but for dropout of attention weights, which it
    has not.

    Args:
        width: D.
        heads: H, a divisor of D.
        hidden: of the network at each step.
        activation: of the hidden layer.
        dropout: of both branches before the residual is added, and of the hidden layer.
        norm_first: normalise what enters a branch and not what leaves it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        activation: Activation = "relu",
        dropout: float = 0.0,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.activation, self.dropout = activation_layer(activation), nn.Dropout(dropout)

    def forward(self, steps: Tensor, packing: Packing, causal: bool) -> Tensor:
        """(P, D) from (P, D)."""
        if self.norm_first:
            steps = steps + self._attention(self.attention_norm(steps), packing, causal)
            return steps + self._network(self.network_norm(steps))
        steps = self.attention_norm(steps + self._attention(steps, packing, causal))
        return self.network_norm(steps + self._network(steps))  # type: ignore[no-any-return]

    def _attention(self, steps: Tensor, packing: Packing, causal: bool) -> Tensor:
        projected = self.projection(steps).view(len(steps), 3, self.heads, steps.shape[1] // self.heads)
        return self.dropout(self.output(attend(projected, packing, causal=causal).flatten(1)))  # type: ignore[no-any-return]

    def _network(self, steps: Tensor) -> Tensor:
        return self.dropout(self.second(self.dropout(self.activation(self.first(steps)))))  # type: ignore[no-any-return]


class SessionEncoder(Recorded, nn.Module):
    """Positions are added to packed steps, then come transformer layers.

    Args:
        width: D of each step.
        max_length: S, the most steps that a sequence may have.
        layers: how many.
        heads: H, a divisor of D.
        hidden: of each layer's network; 4 x D where not given.
        activation: of the hidden layers.
        dropout: of the steps, and see :class:`TransformerLayer`.
        causal: each step sees itself and those before it only.
        norm_first: see :class:`TransformerLayer`; if so, the output is normalised once more.
        position: a learned vector for each number of steps since the ``start``, or until the ``end``; or ``none``,
            where the steps carry it themselves, such as time gaps.
        attention: how it is computed, see :class:`Packing`; the result is the same.

    Raises:
        ValueError: a setting out of its range; when run, a sequence longer than ``max_length``.
    """

    def __init__(
        self,
        width: int,
        max_length: int,
        *,
        layers: int = 1,
        heads: int = 8,
        hidden: int | None = None,
        activation: Activation = "relu",
        dropout: float = 0.0,
        causal: bool = False,
        norm_first: bool = True,
        position: Position = "start",
        attention: Attention = "bucketed",
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("max_length", max_length), ("layers", layers), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        if width % heads:
            raise ValueError(
                f"heads={heads}: must divide the width of a step, D={width}; choose {_nearest_divisor(width, heads)}"
            )
        for name, choice, choices in (("position", position, Position), ("attention", attention, Attention)):
            if choice not in get_args(choices):
                raise ValueError(f"{name}={choice!r}: must be one of {', '.join(get_args(choices))}")
        self.width, self.max_length, self.causal, self.attention = width, max_length, causal, attention
        self._from_start = position == "start"
        self.positions = None if position == "none" else nn.Embedding(max_length, width)
        if self.positions is not None:
            nn.init.normal_(
                self.positions.weight, std=0.02
            )  # small beside a step, which is what tells steps apart at first
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                width, heads, hidden or 4 * width, activation=activation, dropout=dropout, norm_first=norm_first
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """(P, D) from the packed steps (P, D) of B sequences with ``lengths`` (B,)."""
        return self.encode(steps, Packing(lengths, self.attention))

    def encode(self, steps: Tensor, packing: Packing) -> Tensor:
        """The same where the packing is at hand."""
        self._check_lengths(packing)
        if self.positions is not None:
            steps = steps + self.positions(packing.index if self._from_start else packing.to_end)
        steps = self.dropout(steps)
        for layer in self.layers:
            steps = layer(steps, packing, self.causal)
        return self.norm(steps)  # type: ignore[no-any-return]

    def _check_lengths(self, packing: Packing) -> None:
        if packing.longest > self.max_length:
            row = int(packing.lengths.argmax())
            raise ValueError(
                f"a sequence of {packing.longest} steps in row {row} of the batch: must have at most "
                f"max_length={self.max_length}; "
                "keep the most recent ones where it is read, or enlarge max_length"
            )


def _nearest_divisor(width: int, heads: int) -> int:
    return min(
        (number for number in range(1, width + 1) if width % number == 0), key=lambda number: abs(number - heads)
    )
