"""MultiTaskModel: towers, a top NN with a head for each task, and the weighted sum of the tasks' losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Prediction, TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.layers import Activation, Normalization, row_weights
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange


class MultiTaskTop(TopMLP):
    """A top NN with a head for each of T tasks over its last hidden layer (hard sharing, Caruana 1997).

    The first head is TopMLP's, by which a catalogue is ranked.

    Args:
        widths: D of each tower, in order.
        tasks: T, 2 or more.
        hidden: widths of the hidden layers; the heads read the last one.
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
            raise ValueError(
                f"tasks={tasks}: must be 2 or more; TopMLP is the network for one"
            )
        super().__init__(
            widths,
            hidden,
            activation=activation,
            normalization=normalization,
            dropout=dropout,
        )
        first: nn.Linear = self.mlp[-1]  # type: ignore[assignment]
        # The first head is TopMLP's, whose weights keep their names.
        self.further = nn.ModuleList(
            nn.Linear(first.in_features, 1) for _ in range(tasks - 1)
        )

    def of_tasks(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B, T) logits of the towers' outputs, (B, D) of any D each."""
        *layers, first = self.mlp
        hidden = self.activation(torch.cat(outputs, dim=1))
        # Layer by layer, because TorchRec's pipelines trace modules of the model, and a
        # slice of a Sequential is none.
        for layer in layers:
            hidden = layer(hidden)
        logits = [head(hidden) for head in (first, *self.further)]
        return torch.cat(logits, dim=1)


class TaskPredictions(NamedTuple):
    """The detached results of a step.

    Attributes:
        loss: () weighted sum of the tasks' losses.
        logits: (B,) logits of the first task.
        labels: (B,) labels of the first task.
        weights: (B,) weights of the rows.
        tasks: prediction of each task, by name.
    """

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor
    tasks: dict[str, Prediction]


class MultiTaskModel(TowerModel):
    """A :class:`TowerModel` with T labels per row, such as a click and a purchase, from one hidden layer.

    The first task's labels are ``batch.labels``; the others' are ``batch.targets``, columns of the data with the tasks'
    names. A drawn negative has label 0 in all tasks.

    Args:
        towers: see :class:`TowerModel`.
        top: network over the towers' outputs, with T heads.
        tasks: weight of each of the T tasks' losses, greater than 0, by task; the loss is the weighted sum.
        shared: see :class:`TowerModel`.
        device: see :class:`TowerModel`.

    Raises:
        ValueError: not one head for each task, a weight that is not positive, or what a TowerModel refuses.

    Example:
        ``ClassificationMetrics().update(*output.tasks["buy"][1:])`` takes the logits of the task ``buy``::

            MultiTaskModel(towers, MultiTaskTop([32, 32], tasks=2), tasks={"click": 1.0, "buy": 0.5})
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        top: MultiTaskTop,
        *,
        tasks: Mapping[str, float],
        shared: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        _check(top, tasks)
        super().__init__(towers, top, shared=shared, device=device)
        self.tasks = dict(tasks)
        self.of_tasks = _TaskLosses()

    def schema(
        self,
        *,
        out_of_range: OutOfRange = "error",
        oov_ids: Mapping[str, int] | None = None,
    ) -> BatchSchema:
        """See :meth:`TowerModel.schema`."""
        schema = super().schema(out_of_range=out_of_range, oov_ids=oov_ids)
        return dataclasses.replace(schema, tasks=tuple(self.tasks)[1:])

    def forward(self, batch: TowerBatch) -> tuple[Tensor, TaskPredictions]:  # type: ignore[override]
        """Returns the weighted sum of the losses, (), to call backward on, and the :class:`TaskPredictions`."""
        outputs = self.outputs(batch)
        with row_weights(batch.weights):
            logits = self.interaction.of_tasks(outputs)  # type: ignore[operator]
        losses = self.of_tasks(logits, batch)
        loss = sum(
            weight * losses[task] for task, weight in enumerate(self.tasks.values())
        )
        predictions = {}
        for task, name in enumerate(self.tasks):
            # The first task's labels are the batch's own.
            labels = batch.targets[:, task - 1] if task else batch.labels  # type: ignore[index]
            predictions[name] = Prediction(
                losses[task].detach(),
                logits[:, task].detach(),
                labels,
                batch.weights,
            )
        return loss, TaskPredictions(
            loss.detach(),
            logits[:, 0].detach(),
            batch.labels,
            batch.weights,
            predictions,
        )


class _TaskLosses(nn.Module):
    """The losses of all tasks, as a module to keep TorchRec's pipelines from tracing into it."""

    def forward(self, logits: Tensor, batch: TowerBatch) -> Tensor:
        """Returns (T,) losses of the heads' logits (B, T), as :func:`bce`."""
        labels = torch.cat([batch.labels[:, None], batch.targets], dim=1)  # type: ignore[list-item]
        weights = batch.weights[:, None]
        losses = binary_cross_entropy_with_logits(
            logits, labels, weights, reduction="none"
        )
        return losses.sum(0) / batch.total_weight


def _check(top: MultiTaskTop, tasks: Mapping[str, float]) -> None:
    heads = 1 + len(top.further)
    if len(tasks) != heads:
        raise ValueError(
            f"tasks={list(tasks)} with a MultiTaskTop of {heads} heads: give it tasks={len(tasks)}"
        )
    for name, weight in tasks.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"tasks: {name}={weight}: the weight of a loss must be greater than 0; leave the task out instead"
            )
