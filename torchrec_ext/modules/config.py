"""The names that settings of a model can have: of activations, of interactions, of losses.

METRICS and LOSSES say in one line each what a recipe must know of an interaction or a loss. This module imports no
torch, so that a command line is checked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torchrec_ext.schema.validation import check_choice, check_least

Activation = Literal["relu", "gelu", "silu", "tanh", "leaky_relu"]
Normalization = Literal["none", "layer", "batch"]
Position = Literal["start", "end", "none"]


# What model.interaction of a recipe may be, in the order in which a message lists them, and
# `metric` of its class in INTERACTIONS of interaction.py.
METRICS: Mapping[str, Literal["dot", "cosine"] | None] = {
    "top_nn": None,
    "dot": "dot",
    "cosine": "cosine",
    "gmf": None,
    "dcn": None,
    "fm": None,
}
if TYPE_CHECKING:
    Interaction: TypeAlias = str
else:
    Interaction = Literal[tuple(METRICS)]  # what the command line checks


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """A loss and the kind of its comparison, on which the usable rows depend.

    A loss that is neither pairwise nor over the batch compares each row with its own label.

    Args:
        pairwise: whether it compares each positive with its own N drawn negatives.
        in_batch: whether it compares each query with the candidates of the whole batch, which an interaction with a
            ``metric`` makes cheap enough; :class:`torchrec_ext.models.retrieval.RetrievalModel` calls it.
        catalogue: whether it compares each query with all items, under such an interaction; they end each batch, and
            it takes what :func:`torchrec_ext.modules.softmax.catalogue_softmax` takes.
    """

    pairwise: bool = False
    in_batch: bool = False
    catalogue: bool = False

    @property
    def shared(self) -> bool:
        """Whether the queries of a step share their candidates; then vectors are compared, not rows."""
        return self.in_batch or self.catalogue


# What model.loss of a recipe may be, in the order in which a message lists them.
LOSSES: Mapping[str, LossKind] = {
    "bce": LossKind(),
    "in_batch": LossKind(in_batch=True),
    "bpr": LossKind(pairwise=True),
    "sampled_softmax": LossKind(pairwise=True),
    "catalogue": LossKind(catalogue=True),
}
if TYPE_CHECKING:
    LossName: TypeAlias = str
    RowLossName: TypeAlias = str
else:  # what the command line checks
    LossName = Literal[tuple(LOSSES)]
    RowLossName = Literal[
        tuple(name for name, kind in LOSSES.items() if not kind.shared)
    ]


def check_hardest(name: str, hardest: int, loss: str) -> None:
    """Refuses a number of hardest negatives that the loss does not choose among.

    Raises:
        ValueError: by its ``name``.
    """
    check_least(name, hardest, 0)
    if hardest and not LOSSES[loss].in_batch:
        raise ValueError(
            f"{name}={hardest} with loss {loss!r}: the hardest are chosen among the candidates of the batch; leave it "
            "out, or take the loss in_batch"
        )


def check_loss(loss: str, interaction: str, temperature: float) -> None:
    """Refuses settings of a recipe's towers that its loss cannot be computed with.

    Args:
        loss: ``model.loss``.
        interaction: ``model.interaction``.
        temperature: ``model.temperature``.

    Raises:
        ValueError: such a setting, by its name.
    """
    check_choice("model.loss", loss, LOSSES)
    if LOSSES[loss].shared and METRICS.get(interaction) is None:
        which = (
            "every item" if LOSSES[loss].catalogue else "every candidate of the batch"
        )
        raise ValueError(
            f"model.loss={loss} with model.interaction={interaction}: each query meets {which}, for which a product is "
            "cheap enough; set model.interaction=dot or cosine"
        )
    if not temperature > 0:
        raise ValueError(f"model.temperature={temperature}: must be greater than 0")
