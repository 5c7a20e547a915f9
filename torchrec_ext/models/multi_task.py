"""MultiTaskModel: towers under a top NN with a head for each task, and the weighted sum of the tasks' losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Loss, Prediction, TowerModel
from torchrec_ext.modules.interaction import MultiTaskTop
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange


class TaskPredictions(NamedTuple):
    """What a step leaves behind, detached: the whole ``loss``, the first task's prediction, and that of each task by name."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor
    tasks: dict[str, Prediction]


class MultiTaskModel(TowerModel):
    """A :class:`TowerModel` that predicts T things of a row, such as a click and a purchase, from one hidden layer.

    The first task's labels are ``batch.labels``; those of the others are ``batch.targets``, columns of the data by the
    tasks' names. A drawn negative has label 0 in all.

    Args:
        towers: see :class:`TowerModel`.
        top: over the towers' outputs, with T heads.
        tasks: by name, T of them, the weight of its loss, greater than 0; the loss is the weighted sum.
        losses: by task a function of (logits, batch), whose ``batch.labels`` are the task's; binary cross entropy where
            not given.
        shared: see :class:`TowerModel`.

    Raises:
        ValueError: other numbers of tasks and heads, a weight that is not positive, or what a TowerModel refuses.

    Example:
        ``auc(*output.tasks["buy"][1:], runtime)`` after a step is the AUC of the task ``buy``::

            MultiTaskModel(towers, MultiTaskTop([32, 32], tasks=2), tasks={"click": 1.0, "buy": 0.5})
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        top: MultiTaskTop,
        *,
        tasks: Mapping[str, float],
        losses: Mapping[str, Loss] | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        losses = losses or {}
        _check(top, tasks, losses)
        super().__init__(towers, top, shared=shared)
        self.tasks = dict(tasks)
        self.of_tasks = _TaskLosses({name: losses.get(name, bce) for name in tasks})

    def _losses(self) -> list[Loss]:
        return list(self.of_tasks.losses.values())

    def schema(self, *, out_of_range: OutOfRange = "error", oov_ids: Mapping[str, int] | None = None) -> BatchSchema:
        """See :meth:`TowerModel.schema`; labels may have any value if a loss is not binary cross entropy."""
        binary = all(loss is bce for loss in self.of_tasks.losses.values())
        return dataclasses.replace(
            super().schema(out_of_range=out_of_range, oov_ids=oov_ids),
            tasks=tuple(self.tasks)[1:],
            label_range=(0.0, 1.0) if binary else None,
        )

    def forward(self, batch: TowerBatch) -> tuple[Tensor, TaskPredictions]:  # type: ignore[override]
        """The weighted sum of the losses, (), to call backward on, and the :class:`TaskPredictions`."""
        logits = self.interaction.of_tasks(self.outputs(batch), batch.weights)  # type: ignore[operator]
        losses = self.of_tasks(logits, batch)
        loss = sum(weight * losses[at] for at, weight in enumerate(self.tasks.values()))
        found = {}
        for at, name in enumerate(self.tasks):
            labels = batch.targets[:, at - 1] if at else batch.labels  # type: ignore[index]
            found[name] = Prediction(losses[at].detach(), logits[:, at].detach(), labels, batch.weights)
        return loss, TaskPredictions(loss.detach(), logits[:, 0].detach(), batch.labels, batch.weights, found)


class _TaskLosses(nn.Module):
    """A module, so that TorchRec's pipelines do not trace into it."""

    def __init__(self, losses: Mapping[str, Loss]) -> None:
        super().__init__()
        self.losses = dict(losses)

    def forward(self, logits: Tensor, batch: TowerBatch) -> Tensor:
        """(T,) from logits (B, T)."""
        labels = torch.cat([batch.labels[:, None], batch.targets], dim=1)  # type: ignore[list-item]
        return torch.stack(
            [
                loss(logits[:, at], dataclasses.replace(batch, labels=labels[:, at], targets=None))
                for at, loss in enumerate(self.losses.values())
            ]
        )


def _check(top: MultiTaskTop, tasks: Mapping[str, float], losses: Mapping[str, Loss]) -> None:
    heads = 1 + len(top.further)
    if len(tasks) != heads:
        raise ValueError(f"tasks={list(tasks)} with a MultiTaskTop of {heads} heads: give it tasks={len(tasks)}")
    for name, weight in tasks.items():
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"tasks: {name}={weight}: the weight of a loss must be greater than 0; leave the task out instead"
            )
    unknown = sorted(set(losses) - set(tasks))
    if unknown:
        raise ValueError(f"losses names {unknown}, which are no tasks; the tasks are {list(tasks)}")
