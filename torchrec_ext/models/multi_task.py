"""MultiTaskModel: towers, a top NN with a head for each task, and the weighted sum of the tasks' losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Loss, Prediction, TowerModel
from torchrec_ext.modules.config import TaskRows
from torchrec_ext.modules.interaction import MultiTaskTop, logit_of_product
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange
from torchrec_ext.schema.validation import check_choice


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
        losses: function from (logits, batch) to the loss of each task, by task, whose ``batch.labels`` are the task's;
            binary cross entropy where not given.
        rows: rows by which further tasks are learned: ``all``; ``positive``, those whose first label is 1, such as the
            conversions among clicks, where other rows count 0 in the mean over the batch; or ``product``, all rows, of
            which the product of the first and the further head's probability is compared with the further label, which
            no row has without the first (ESMM, Ma et al. 2018).
        shared: see :class:`TowerModel`.

    Raises:
        ValueError: not one head for each task, a weight that is not positive, or what a TowerModel refuses.

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
        rows: TaskRows = "all",
        shared: Sequence[str] = (),
    ) -> None:
        losses = losses or {}
        _check(top, tasks, losses)
        check_choice("rows", rows, get_args(TaskRows))
        super().__init__(towers, top, shared=shared)
        self.tasks = dict(tasks)
        self.rows = rows
        self.of_tasks = _TaskLosses(
            {name: losses.get(name, bce) for name in tasks}, rows
        )

    def head_losses(self) -> list[Loss]:
        """Returns the loss of each task."""
        return list(self.of_tasks.losses.values())

    def begin_at(self, shares: Sequence[float]) -> list[float]:
        """See :meth:`TowerModel.begin_at`; further heads begin at the share among positives if they predict that."""
        if self.rows != "all" and shares:
            first, *others = shares
            # Below 1, of which there are no finite log-odds.
            shares = [first, *(min(share / first, 0.999) for share in others)]
        return super().begin_at(shares)

    def schema(
        self,
        *,
        out_of_range: OutOfRange = "error",
        oov_ids: Mapping[str, int] | None = None,
    ) -> BatchSchema:
        """See :meth:`TowerModel.schema`; labels may have any value if one of the losses is not binary cross entropy."""
        binary = all(loss is bce for loss in self.of_tasks.losses.values())
        return dataclasses.replace(
            super().schema(out_of_range=out_of_range, oov_ids=oov_ids),
            tasks=tuple(self.tasks)[1:],
            label_range=(0.0, 1.0) if binary else None,
        )

    def forward(self, batch: TowerBatch) -> tuple[Tensor, TaskPredictions]:  # type: ignore[override]
        """Returns the weighted sum of the losses, (), to call backward on, and the :class:`TaskPredictions`."""
        learned = self.of_tasks(
            self.interaction.of_tasks(self.outputs(batch), batch.weights),  # type: ignore[operator]
            batch,
        )
        # By index, because TorchRec's pipeline traces this method with stand-ins that
        # cannot be iterated.
        losses = learned[0]
        logits = learned[1]
        weights = learned[2]
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
                weights[:, task],
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

    def __init__(self, losses: Mapping[str, Loss], rows: TaskRows) -> None:
        super().__init__()
        self.losses = dict(losses)
        self.rows = rows

    def forward(
        self, logits: Tensor, batch: TowerBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (T,) losses of the heads' logits (B, T), the (B, T) logits of the labels, and the rows' weights."""
        labels = torch.cat([batch.labels[:, None], batch.targets], dim=1)  # type: ignore[list-item]
        weights = batch.weights[:, None].expand(labels.shape)
        if self.rows == "positive":
            # Further tasks count rows whose first label is 1.
            weights = torch.cat(
                [weights[:, :1], weights[:, 1:] * batch.labels[:, None]], dim=1
            )
        if self.rows == "product":
            first, *others = logits.unbind(1)
            products = [
                logit_of_product(torch.stack([first, further], dim=1))
                for further in others
            ]
            logits = torch.stack([first, *products], dim=1)
        losses = []
        for task, loss in enumerate(self.losses.values()):
            # A loss knows one task, so it sees the task's labels as the batch's.
            rows = dataclasses.replace(
                batch, labels=labels[:, task], weights=weights[:, task], targets=None
            )
            losses.append(loss(logits[:, task], rows))
        return torch.stack(losses), logits, weights


def _check(
    top: MultiTaskTop, tasks: Mapping[str, float], losses: Mapping[str, Loss]
) -> None:
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
    unknown = sorted(set(losses) - set(tasks))
    if unknown:
        raise ValueError(
            f"losses names {unknown}, which are no tasks; the tasks are {list(tasks)}"
        )
