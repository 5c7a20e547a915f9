"""Dense layers: activations by name, and the MLP of towers and interactions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from torch import Tensor, nn

from torchrec_ext.modules.batch_norm import BatchNorm

Activation = Literal["relu", "gelu", "silu", "tanh"]
Normalization = Literal["none", "layer", "batch"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def activation_layer(name: Activation) -> nn.Module:
    """The activation of that name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r}: must be one of {', '.join(get_args(Activation))}")
    return _ACTIVATIONS[name]()


class Layers(nn.Sequential):
    """Layers one after the other, of which those that take statistics are given the rows' weights."""

    def forward(self, input: Tensor, weights: Tensor | None = None) -> Tensor:  # noqa: A002 -- nn.Sequential's own name
        """(B, D) to (B, D'); ``weights`` (B,), see :class:`BatchNorm`."""
        for layer in self:
            input = layer(input, weights) if isinstance(layer, BatchNorm | Layers) else layer(input)  # noqa: A001
        return input


class Residual(Layers):
    """Layers whose input is added to their output (He et al. 2016)."""

    def forward(self, input: Tensor, weights: Tensor | None = None) -> Tensor:  # noqa: A002 -- nn.Sequential's own name
        """(B, D) to (B, D); ``weights`` (B,), see :class:`BatchNorm`."""
        return input + super().forward(input, weights)


def weighs_rows(module: nn.Module) -> bool:
    """Whether a tower or an interaction normalises over its batch, and takes the rows' ``weights`` for that."""
    normalises = any(isinstance(layer, BatchNorm) for layer in module.modules())
    return normalises and "weights" in inspect.signature(module.forward).parameters


def mlp(
    in_features: int,
    widths: Sequence[int],
    *,
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
    residual: bool = False,
) -> Layers:
    """Linear layers; between them normalisation, activation and dropout, none after the last: its output may be of either sign.

    Args:
        in_features: width of the input.
        widths: of the layers, in order.
        activation: after each hidden layer.
        normalization: before each activation: ``layer`` (Ba et al. 2016), ``batch`` (over the rows of all ranks that
            are no padding, see :class:`BatchNorm`) or ``none``.
        dropout: after each activation.
        residual: add the input of each hidden layer that is as wide as its output.

    Raises:
        ValueError: a width below 1, a wrong name, or ``residual`` where no hidden layer is as wide as its input.

    Example:
        >>> [type(layer).__name__ for layer in mlp(8, [8, 4, 2], normalization="layer", residual=True)]
        ['Residual', 'Linear', 'LayerNorm', 'ReLU', 'Linear']
    """
    _check(in_features, widths, normalization, dropout, residual)
    layers: list[nn.Module] = []
    hidden = [in_features, *widths[:-1]]
    for before, width in pairwise(hidden):
        block = _block(before, width, activation, normalization, dropout)
        layers += [Residual(*block)] if residual and before == width else block
    activation_layer(activation)  # a wrong name is told of without hidden layers too
    return Layers(*layers, nn.Linear(hidden[-1], widths[-1]))


def _block(before: int, width: int, activation: Activation, normalization: Normalization, dropout: float) -> list[nn.Module]:
    # Batch normalisation takes a constant away again, so a bias before it would never receive a gradient.
    block: list[nn.Module] = [nn.Linear(before, width, bias=normalization != "batch")]
    if normalization != "none":
        block.append(nn.LayerNorm(width) if normalization == "layer" else BatchNorm(width))
    return [*block, activation_layer(activation), *([nn.Dropout(dropout)] if dropout else [])]


def _check(in_features: int, widths: Sequence[int], normalization: str, dropout: float, residual: bool) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(f"widths={list(widths)}: an MLP needs at least one layer and every width 1 or more")
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization={normalization!r}: must be one of {', '.join(get_args(Normalization))}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
    hidden = [in_features, *widths[:-1]]
    if residual and not any(before == width for before, width in pairwise(hidden)):
        raise ValueError(
            f"residual=True with an input of width {in_features} and widths={list(widths)}: no hidden layer is as wide as its "
            "input, so there is nothing to add; give two neighbouring hidden layers one width, or leave residual out"
        )
