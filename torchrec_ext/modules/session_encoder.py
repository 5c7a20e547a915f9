"""SessionEncoder: positions and transformer layers over packed sequences, without tables and alike on all ranks.

Sequences of unequal length are packed one after the other, P steps in all, so that self-attention computes little on
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from torchrec_ext.modules.config import Position as Position
from torchrec_ext.modules.tower import Activation, activation_layer
from torchrec_ext.schema.validation import check_choice, check_least


class Bucket(NamedTuple):
    """b sequences of similar length, padded at the end to W steps.

    Attributes:
        steps: (b, W) int64, each step's index among the P packed steps; padding repeats the sequence's last step.
        valid: (b, W) bool, False for padding; None if there is none.
    """

    steps: Tensor
    valid: Tensor | None


class Packing:
    """Positions of the steps of B packed sequences; made once per batch and shared by all layers.

    Lengths 3, 0, 2 are packed as::

        rows     0 0 0 2 2      the step's sequence
        index    0 1 2 0 1      steps of that sequence before it
        to_end   2 1 0 1 0      steps of that sequence after it

    All of it is computed on the host, so a GPU is waited for only if the lengths are on it.

    Args:
        lengths: (B,) steps of each sequence, 0 or more.
        device: device of the positions; that of the lengths by default.

    Attributes:
        host: the positions on the host.
    """

    def __init__(
        self,
        lengths: Tensor,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._device = device or lengths.device
        self.host = _Positions.of(lengths.long().cpu())
        self.lengths, self.offsets, self.rows, self.index, self.to_end = map(
            self.to_device, self.host
        )

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the host on the device, which need not wait for it."""
        if self._device.type == "cpu":
            return tensor
        # From page-locked memory, or the copy would wait.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def without_last_steps(self) -> tuple[Tensor, Packing]:
        """Returns (P',) the steps that others of their sequence follow, and the packing of the sequences of these."""
        lengths = (self.host.lengths - 1).clamp(min=0)
        return self.to_device((self.host.to_end > 0).nonzero()[:, 0]), Packing(
            lengths, device=self._device
        )

    @cached_property
    def last_steps(self) -> tuple[Tensor, Tensor]:
        """The sequences with a step, and the last step of each, (B',) each."""
        last = (self.host.to_end == 0).nonzero()[:, 0]
        return self.to_device(self.host.rows[last]), self.to_device(last)

    @cached_property
    def longest(self) -> int:
        """Number of steps of the longest sequence, 0 without any."""
        return int(self.host.lengths.max()) if len(self.host.lengths) else 0

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The buckets; together they hold each sequence of one step or more once."""
        buckets = []
        for steps, valid in self._host_buckets:
            # Sequences of one length need no mask.
            mask = None if bool(valid.all()) else self.to_device(valid)
            buckets.append(Bucket(self.to_device(steps), mask))
        return buckets

    @cached_property
    def _host_buckets(self) -> list[tuple[Tensor, Tensor]]:
        # Each sequence is padded to the next of a few lengths, by half its length at most.
        widths = _widths(self.longest)
        lengths = self.host.lengths
        # An empty sequence is in no bucket.
        bucket_of = torch.bucketize(lengths, torch.tensor(widths)).masked_fill(
            lengths == 0, -1
        )
        buckets = []
        for index, width in enumerate(widths):
            rows = (bucket_of == index).nonzero()[:, 0]
            if len(rows):
                steps = torch.arange(width)
                lengths_of_rows = lengths[rows][:, None]
                # Padding repeats the last step, so that it is an index too.
                packed = self.host.offsets[rows][:, None] + torch.minimum(
                    steps, lengths_of_rows - 1
                )
                buckets.append((packed, steps < lengths_of_rows))
        return buckets

    @cached_property
    def back(self) -> Tensor:
        """(P,) int64, each packed step's index among the steps of all buckets, flattened one after the other."""
        # Padding has no packed step to go back to.
        flat = torch.cat(
            [valid.flatten() for _, valid in self._host_buckets]
        ).nonzero()[:, 0]
        packed = torch.cat([steps.flatten() for steps, _ in self._host_buckets])[flat]
        return self.to_device(torch.empty_like(flat).scatter_(0, packed, flat))


class _Positions(NamedTuple):
    """The positions of packed steps, see :class:`Packing`."""

    lengths: Tensor
    offsets: Tensor
    rows: Tensor
    before: Tensor
    to_end: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> _Positions:
        """Computes the positions from (B,) int64 lengths."""
        offsets = pad(lengths.cumsum(0), (1, 0))
        rows = torch.repeat_interleave(lengths)
        steps = torch.arange(len(rows))
        return cls(
            lengths, offsets, rows, steps - offsets[rows], offsets[rows + 1] - 1 - steps
        )


def _widths(longest: int) -> Sequence[int]:
    """Returns the lengths for padding sequences to: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    Example:
        >>> _widths(10)
        [1, 2, 3, 4, 6, 8, 12]
    """
    widths = [1, 2]
    while widths[-1] < longest:
        last = widths[-1]
        is_power_of_two = last & (last - 1) == 0
        widths.append(last * 3 // 2 if is_power_of_two else last * 4 // 3)
    return widths


def attend(projected: Tensor, packing: Packing | Tensor, *, causal: bool) -> Tensor:
    """Returns (P, H, d), the multi-head attention of each step to the steps of its own sequence.

    Args:
        projected: (P, 3, H, d), query, key and value of each of H heads; (B, S, 3, H, d) of padded sequences.
        packing: positions of the P steps; for padded sequences (B, S) bool, False for padding, which is at the end.
        causal: whether a step attends only to itself and the steps before it.
    """
    if isinstance(packing, Tensor):
        return _attend_padded(projected, packing, causal)
    if not len(projected):
        # The result is empty but in the graph, because DistributedDataParallel waits
        # for every gradient.
        return projected.sum(dim=1)
    outputs = [_attend_bucket(projected, bucket, causal) for bucket in packing.buckets]
    return torch.cat(outputs).index_select(0, packing.back)


def _attend_padded(projected: Tensor, valid: Tensor, causal: bool) -> Tensor:
    """Returns (B, S, H, d); rows of padding hold arbitrary numbers."""
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    places = torch.arange(projected.shape[1], device=projected.device)
    # The first place is always attended to: a softmax over nothing has no value.
    mask = (valid | (places == 0))[:, None, None, :]
    if causal:
        mask = mask & (places <= places[:, None])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(
        1, 2
    )


def _attend_bucket(projected: Tensor, bucket: Bucket, causal: bool) -> Tensor:
    """Returns (b x W, H, d); rows of padding hold arbitrary numbers."""
    size, width = bucket.steps.shape
    padded = projected.index_select(0, bucket.steps.flatten()).view(
        size, width, *projected.shape[1:]
    )
    query, key, value = padded.permute(2, 0, 3, 1, 4)
    # Padding is at the end and no earlier step attends to it, so causal attention needs
    # no mask.
    mask = None if causal or bucket.valid is None else bucket.valid[:, None, None, :]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal
    )
    return output.transpose(1, 2).flatten(0, 1)


class TransformerLayer(nn.Module):
    """Self-attention, then a network of one hidden layer, both with residual and layer norm (Vaswani et al. 2017).

    With the same weights it equals ``torch.nn.TransformerEncoderLayer`` but for dropout of attention weights, which it
    does not have.

    Args:
        width: D.
        heads: H, a divisor of D.
        hidden: width of the hidden layer.
        activation: activation of the hidden layer.
        dropout: share of values set to 0 in both branches before the residual is added, and in the hidden layer.
        norm_first: whether to normalise the input of each branch rather than the sum.
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
        self.heads = heads
        self.norm_first = norm_first
        # Query, key and value by one product.
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)
        self.attention_norm = nn.LayerNorm(width)
        self.network_norm = nn.LayerNorm(width)
        self.activation = activation_layer(activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, steps: Tensor, packing: Packing | Tensor, causal: bool) -> Tensor:
        """Returns (P, D) from the packed steps (P, D); see :func:`attend` for padded ones."""
        if self.norm_first:
            steps = steps + self._attention(self.attention_norm(steps), packing, causal)
            return steps + self._network(self.network_norm(steps))
        steps = self.attention_norm(steps + self._attention(steps, packing, causal))
        return self.network_norm(steps + self._network(steps))  # type: ignore[no-any-return]

    def _attention(
        self, steps: Tensor, packing: Packing | Tensor, causal: bool
    ) -> Tensor:
        projected = self.projection(steps).unflatten(-1, (3, self.heads, -1))
        return self.dropout(  # type: ignore[no-any-return]
            self.output(attend(projected, packing, causal=causal).flatten(-2))
        )

    def _network(self, steps: Tensor) -> Tensor:
        return self.dropout(  # type: ignore[no-any-return]
            self.second(self.dropout(self.activation(self.first(steps))))
        )


class SessionEncoder(nn.Module):
    """Adds positions to packed steps and applies transformer layers.

    Args:
        width: D of each step.
        max_length: S, the most steps that a sequence may have.
        layers: number of transformer layers.
        heads: H, a divisor of D.
        hidden: width of each layer's hidden layer; by default 4 x D.
        activation: activation of the hidden layers.
        dropout: share of values set to 0 in the steps and in each layer, see :class:`TransformerLayer`.
        causal: whether a step attends only to itself and the steps before it.
        norm_first: see :class:`TransformerLayer`; if so, the output is normalised once more.
        position: a learned vector for each number of steps since the ``start``, or until the ``end``; or ``none``,
            where the steps say it themselves, such as by time gaps.

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
    ) -> None:
        super().__init__()
        check_least("width", width)
        check_least("max_length", max_length)
        check_least("layers", layers)
        check_least("heads", heads)
        if width % heads:
            raise ValueError(
                f"heads={heads}: must divide the width of a step, D={width}"
            )
        check_choice("position", position, get_args(Position))
        self.width = width
        self.max_length = max_length
        self.causal = causal
        self._from_start = position == "start"
        self.positions = None if position == "none" else nn.Embedding(max_length, width)
        if self.positions is not None:
            # Small against the steps, which differ from the start.
            nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                width,
                heads,
                hidden or 4 * width,
                activation=activation,
                dropout=dropout,
                norm_first=norm_first,
            )
            for _ in range(layers)
        )
        # With norm_first nothing has normalised the sum of the last layer.
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Returns (P, D) from the packed steps (P, D) of B sequences with ``lengths`` (B,)."""
        return self.encode(steps, Packing(lengths))

    def encode(self, steps: Tensor, packing: Packing) -> Tensor:
        """Returns (P, D) from the packed steps (P, D) of an existing packing.

        Raises:
            ValueError: a sequence longer than ``max_length``.
        """
        self._check_lengths(packing)
        if self.positions is not None:
            places = packing.index if self._from_start else packing.to_end
            steps = steps + self.positions(places)
        steps = self.dropout(steps)
        for layer in self.layers:
            steps = layer(steps, packing, self.causal)
        return self.norm(steps)  # type: ignore[no-any-return]

    def padded(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Returns (B, S, D) of sequences padded at the end, (B, S, D), of ``lengths`` (B,); padding gets anything."""
        index = torch.arange(steps.shape[1], device=steps.device)
        if self.positions is not None:
            places = index
            if not self._from_start:
                places = (lengths[:, None] - 1 - index).clamp(min=0)
            steps = steps + self.positions(places)
        valid = index < lengths[:, None]
        for layer in self.layers:
            steps = layer(steps, valid, self.causal)
        return self.norm(steps)  # type: ignore[no-any-return]

    def _check_lengths(self, packing: Packing) -> None:
        if packing.longest > self.max_length:
            row = int(packing.host.lengths.argmax())
            raise ValueError(
                f"a sequence of {packing.longest} steps in row {row} of the batch: must have at most "
                f"max_length={self.max_length}; keep the most recent ones where it is read, or enlarge max_length"
            )


def from_end(steps: Tensor, lengths: Tensor) -> Tensor:
    """Returns (B, S, D) of padded sequences (B, S, D) from their end on: the last step first, zeros after the first."""
    places = lengths[:, None] - 1 - torch.arange(steps.shape[1], device=steps.device)
    index = places.clamp(min=0)[:, :, None].expand(-1, -1, steps.shape[2])
    return torch.where(places[:, :, None] >= 0, steps.gather(1, index), 0.0)
