"""SessionEncoder: positions and transformer layers over packed sequences; it has no tables and is the same on every rank."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from torchrec_ext.modules.jagged_attention import Attention, Packing, attend
from torchrec_ext.modules.recorded import Recorded
from torchrec_ext.modules.tower import Activation, activation_layer

Position = Literal["start", "end", "none"]


class TransformerLayer(nn.Module):
    """Self-attention, then a network of one hidden layer at each step, both with residual and layer norm (Vaswani et al. 2017).

    With the same weights it equals ``torch.nn.TransformerEncoderLayer`` but for dropout of attention weights, which it has not.

    Args:
        width: D.
        heads: H, a divisor of D.
        hidden: of the network at each step.
        activation: of the hidden layer.
        dropout: of both branches before the residual is added, and of the hidden layer.
        norm_first: normalise what enters a branch and not what leaves it.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, activation: Activation = "relu", dropout: float = 0.0, norm_first: bool = True
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
        position: a learned vector for each number of steps since the ``start``, or until the ``end``; or ``none``, where the steps
            carry it themselves, such as time gaps.
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
            raise ValueError(f"heads={heads}: must divide the width of a step, D={width}; choose {_nearest_divisor(width, heads)}")
        for name, choice, choices in (("position", position, Position), ("attention", attention, Attention)):
            if choice not in get_args(choices):
                raise ValueError(f"{name}={choice!r}: must be one of {', '.join(get_args(choices))}")
        self.width, self.max_length, self.causal, self.attention = width, max_length, causal, attention
        self._from_start = position == "start"
        self.positions = None if position == "none" else nn.Embedding(max_length, width)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)  # small beside a step, which is what tells steps apart at first
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, hidden or 4 * width, activation=activation, dropout=dropout, norm_first=norm_first)
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
                f"a sequence of {packing.longest} steps in row {row} of the batch: must have at most max_length={self.max_length}; "
                "keep the most recent ones where it is read, or enlarge max_length"
            )


def _nearest_divisor(width: int, heads: int) -> int:
    return min((number for number in range(1, width + 1) if width % number == 0), key=lambda number: abs(number - heads))
