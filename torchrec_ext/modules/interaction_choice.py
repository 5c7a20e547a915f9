"""The interactions by the names that recipes use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch import nn

from torchrec_ext.modules.crossing import DeepCross, DeepFM, FactorizationMachine
from torchrec_ext.modules.interaction import Cosine, DotProduct, GeneralizedMF, TopMLP
from torchrec_ext.modules.layers import Activation, Normalization

Interaction = Literal["top_nn", "dot", "cosine", "gmf", "dcn", "fm", "deepfm"]
_PLAIN: dict[str, Callable[..., nn.Module]] = {
    "dot": DotProduct,
    "cosine": Cosine,
    "gmf": GeneralizedMF,
    "fm": FactorizationMachine,
}
_LAYERED: dict[str, Callable[..., nn.Module]] = {"top_nn": TopMLP, "dcn": DeepCross, "deepfm": DeepFM}
_ACTIVATES_INPUT = ("top_nn", "deepfm")


def interaction_layer(
    name: Interaction,
    widths: Sequence[int],
    hidden: Sequence[int] = (64,),
    *,
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
    activate_input: bool = True,
) -> nn.Module:
    """The interaction of that name over towers of ``widths``.

    Args:
        name: ``top_nn``, :class:`TopMLP`; ``dot``, :class:`DotProduct`; ``cosine``, :class:`Cosine`; ``gmf``,
            :class:`GeneralizedMF`; ``dcn``, :class:`DeepCross`; ``fm``, :class:`FactorizationMachine`; ``deepfm``, :class:`DeepFM`.
        widths: D of each tower, in order.
        hidden: widths of the hidden layers of ``top_nn``, ``dcn`` and ``deepfm``; the others have none.
        activation: between these.
        normalization: before each activation.
        dropout: after each activation.
        activate_input: whether ``top_nn`` and ``deepfm`` begin with an activation; not over towers without layers.

    Raises:
        ValueError: another name, or widths that do not fit.
    """
    if name not in get_args(Interaction):
        raise ValueError(f"interaction={name!r}: must be one of {', '.join(get_args(Interaction))}")
    if name in _PLAIN:
        return _PLAIN[name](widths)
    options: dict[str, bool] = {"activate_input": activate_input} if name in _ACTIVATES_INPUT else {}
    return _LAYERED[name](widths, hidden, activation=activation, normalization=normalization, dropout=dropout, **options)
