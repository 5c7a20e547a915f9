"""BestWeights: the weights of the best evaluation so far, in memory, for a run that saves no checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_ext.train.checkpoint.parts import Parts, State
from torchrec_ext.train.checkpoint.state import model_state


class BestWeights:
    """A copy of what this rank holds of a model's tables, layers and running statistics, in host memory.

    Args:
        model: from :func:`hybrid_parallel`, or unsharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: State = {}

    @property
    def held(self) -> bool:
        """Whether any were kept."""
        return bool(self._copies)

    def keep(self) -> None:
        """Copies the weights as they are now, in place of those before."""
        self._copies = {
            name: held.map(lambda tensor, _: _copy(tensor)) if isinstance(held, Parts) else _copy(held)
            for name, held in model_state(self._model).tensors.items()
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes the weights that were kept into the model."""
        for name, held in model_state(self._model).tensors.items():
            kept = self._copies[name]
            if isinstance(held, Parts) and isinstance(kept, Parts):
                for part, own in zip(held.parts, kept.parts, strict=True):
                    part.tensor.copy_(own.tensor)
            elif isinstance(held, Tensor) and isinstance(kept, Tensor):
                held.copy_(kept)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
