"""SessionEncoder: positions and transformer layers over sequences, without tables and alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from torchrec_ext.modules.config import Position as Position
from torchrec_ext.modules.tower import Activation, activation_layer
from torchrec_ext.schema.validation import check_choice, check_least

# (..., 3, H, d), query, key and value of H heads -> (..., H, d)
Attend = Callable[[Tensor], Tensor]


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

    def forward(self, steps: Tensor, attend: Attend) -> Tensor:
        """Returns (..., D) from (..., D); ``attend`` reads other steps of the same sequence."""
        if self.norm_first:
            steps = steps + self._attention(self.attention_norm(steps), attend)
            return steps + self._network(self.network_norm(steps))
        steps = self.attention_norm(steps + self._attention(steps, attend))
        return self.network_norm(steps + self._network(steps))  # type: ignore[no-any-return]

    def _attention(self, steps: Tensor, attend: Attend) -> Tensor:
        projected = self.projection(steps).unflatten(-1, (3, self.heads, -1))
        return self.dropout(self.output(attend(projected).flatten(-2)))  # type: ignore[no-any-return]

    def _network(self, steps: Tensor) -> Tensor:
        return self.dropout(  # type: ignore[no-any-return]
            self.second(self.dropout(self.activation(self.first(steps))))
        )


class SessionEncoder(nn.Module):
    """Adds positions to the steps of sequences and applies transformer layers.

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
        """Returns (B, S, D) of sequences padded at the end, (B, S, D), of ``lengths`` (B,); padding gets anything."""
        index = torch.arange(steps.shape[1], device=steps.device)
        places = index
        if not self._from_start:
            places = (lengths[:, None] - 1 - index).clamp(min=0)
        valid = index < lengths[:, None]
        return self._encoded(steps, places, lambda each: self._attend(each, valid))

    def packed(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Returns (P, D) from the steps (P, D) of B sequences, one after the other, of ``lengths`` (B,).

        Sequences of similar length are padded together, so that little is computed on padding. A GPU is waited for.

        Raises:
            ValueError: a sequence longer than ``max_length``.
        """
        on_host = lengths.long().cpu()
        longest = int(on_host.max()) if len(on_host) else 0
        if longest > self.max_length:
            raise ValueError(
                f"a sequence of {longest} steps in row {int(on_host.argmax())} of the batch: must have at most "
                f"max_length={self.max_length}; keep the most recent ones where it is read, or enlarge max_length"
            )
        if not longest:
            # Empty but in the graph, because DistributedDataParallel waits for every gradient.
            one = on_device(on_host.new_ones(1), steps.device)
            nothing = self(steps.new_zeros(1, 1, self.width), one)[0, :0]
            return steps + nothing  # type: ignore[no-any-return]
        starts = on_host.cumsum(0) - on_host
        rows = torch.repeat_interleave(on_host)
        index = torch.arange(len(rows)) - starts[rows]
        if not self._from_start:
            index = on_host[rows] - 1 - index
        # Each is padded by less than half of its length.
        sizes = on_host.clamp(min=1).float().log2().mul(2).ceil()
        buckets: list[tuple[Tensor, Tensor]] = []
        order: list[Tensor] = []
        for size in sorted(set(sizes.tolist())):
            alike = ((sizes == size) & (on_host > 0)).nonzero()[:, 0]
            if not len(alike):
                continue
            counts = on_host[alike][:, None]
            nth = torch.arange(int(counts.max()))
            is_step = nth < counts
            # Padding repeats the last step, so that it is an index too.
            packed = starts[alike][:, None] + torch.minimum(nth, counts - 1)
            order.append(packed.masked_fill(~is_step, len(index)).flatten())
            buckets.append(
                (on_device(packed, steps.device), on_device(is_step, steps.device))
            )
        # Padding comes last, and no step takes it back.
        back = on_device(torch.cat(order).argsort()[: len(index)], steps.device)

        def attend(projected: Tensor) -> Tensor:
            outputs = []
            for places, valid in buckets:
                # Not projected[places], because its backward adds number by number.
                padded = projected.index_select(0, places.flatten())
                padded = padded.view(*places.shape, *projected.shape[1:])
                outputs.append(self._attend(padded, valid).flatten(0, 1))
            return torch.cat(outputs).index_select(0, back)

        return self._encoded(steps, on_device(index, steps.device), attend)

    def _encoded(self, steps: Tensor, places: Tensor, attend: Attend) -> Tensor:
        if self.positions is not None:
            steps = steps + self.positions(places)
        steps = self.dropout(steps)
        for layer in self.layers:
            steps = layer(steps, attend)
        return self.norm(steps)  # type: ignore[no-any-return]

    def _attend(self, projected: Tensor, valid: Tensor) -> Tensor:
        """Returns (B, S, H, d) from (B, S, 3, H, d); ``valid`` (B, S) is false for padding, which is at the end."""
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        # Of causal attention no step before the padding reads it.
        if not self.causal:
            # The first place is always read: a softmax over nothing has no value.
            first = torch.arange(valid.shape[1], device=valid.device) == 0
            mask = (valid | first)[:, None, None, :]
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal
        )
        return attended.transpose(1, 2)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device; to a GPU from page-locked memory, or the copy would wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def from_end(steps: Tensor, lengths: Tensor) -> Tensor:
    """Returns (B, S, D) of padded sequences (B, S, D) from their end on: the last step first, zeros after the first."""
    places = lengths[:, None] - 1 - torch.arange(steps.shape[1], device=steps.device)
    index = places.clamp(min=0)[:, :, None].expand(-1, -1, steps.shape[2])
    return torch.where(places[:, :, None] >= 0, steps.gather(1, index), 0.0)
