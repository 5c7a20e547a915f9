"""MultiTaskTop: the top NN with a head for each of several tasks over its last hidden layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_ext.modules.batch_norm import BatchNorm
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Activation, Normalization


class MultiTaskTop(TopMLP):
    """The towers' outputs concatenated, an MLP, and T heads (hard sharing: Caruana 1997; Covington et al. 2016 on top).

    The first head is TopMLP's own, so that whatever ranks by one logit, :meth:`score_all` too, ranks by the first task.

    Args:
        widths: D of each tower, in order.
        tasks: T, 2 or more.
        hidden: widths of the hidden layers, over the last of which the heads are.
        activation: see :class:`TopMLP`.
        normalization: see :class:`TopMLP`.
        dropout: see :class:`TopMLP`.
    """

    def __init__(
        self,
        widths: Sequence[int],
        tasks: int,
        hidden: Sequence[int] = (64,),
        *,
        activation: Activation = "relu",
        normalization: Normalization = "none",
        dropout: float = 0.0,
    ) -> None:
        if tasks < 2:
            raise ValueError(f"tasks={tasks}: must be 2 or more; TopMLP is the network for one")
        super().__init__(widths, hidden, activation=activation, normalization=normalization, dropout=dropout)
        first: nn.Linear = self.mlp[-1]  # type: ignore[assignment]
        self.further = nn.ModuleList(nn.Linear(first.in_features, 1) for _ in range(tasks - 1))

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of each task's logit, (1,), in order."""
        return [*super().last_biases, *(head.bias for head in self.further)]  # type: ignore[list-item]

    def of_tasks(self, outputs: list[Tensor], weights: Tensor | None = None) -> Tensor:
        """(B, T) logits from the towers' outputs, each (B, D) with a D of its own; column 0 is what :meth:`forward` gives."""
        *layers, first = self.mlp
        hidden = self.activation(torch.cat(outputs, dim=1))
        # One by one, as TorchRec's pipelines trace them: a slice of a Sequential is none of the model's modules.
        for layer in layers:
            hidden = layer(hidden, weights) if isinstance(layer, BatchNorm) else layer(hidden)
        return torch.cat([first(hidden), *(head(hidden) for head in self.further)], dim=1)
