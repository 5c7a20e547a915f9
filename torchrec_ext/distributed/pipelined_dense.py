"""PipelinedDense: a deep dense part in stages on the ranks of a job, micro-batches in flight, by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from torchrec_ext.distributed.runtime import Runtime

Schedule = Literal["1f1b", "gpipe"]
Loss = Callable[[Tensor, Tensor], Tensor]


def cut(layers: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """``layers`` in so many contiguous parts, the largest of which has as few weights as can be.

    A layer without weights, such as an activation, stays with the one before it.

    Raises:
        ValueError: fewer layers with weights than stages.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> [len(part) for part in cut(net, 2)]
        [2, 3]
    """
    blocks: list[list[nn.Module]] = []
    for layer in layers:
        if not blocks or any(True for _ in layer.parameters()):
            blocks.append([layer])
        else:
            blocks[-1].append(layer)
    weights = [sum(weight.numel() for layer in block for weight in layer.parameters()) for block in blocks]
    if stages < 1 or len(blocks) < stages:
        raise ValueError(
            f"stages={stages}: the dense part has {len(blocks)} layers with weights, and each stage needs one; use at "
            "most as many "
            "ranks"
        )
    ends = _ends(weights, stages)
    return [
        nn.Sequential(*[layer for block in blocks[start:stop] for layer in block])
        for start, stop in zip([0, *ends], [*ends, len(blocks)], strict=True)
    ]


def _ends(weights: list[int], stages: int) -> list[int]:
    """Where each part but the last ends, by the least greatest sum."""
    best: dict[tuple[int, int], tuple[int, list[int]]] = {
        (count, 1): (sum(weights[:count]), []) for count in range(len(weights) + 1)
    }
    for parts in range(2, stages + 1):
        for count in range(parts, len(weights) + 1):
            best[count, parts] = min(
                (max(best[end, parts - 1][0], sum(weights[end:count])), [*best[end, parts - 1][1], end])
                for end in range(parts - 1, count)
            )
    return best[len(weights), stages][1]


class PipelinedDense:
    """A stack of dense layers, too deep for one device, of which each rank holds a part; a batch goes through in micro-batches.

    What the ranks have learned after a step is what one rank learns from the whole batch. While one micro-batch is in a
    later stage the next is in an earlier one: with M micro-batches on R ranks a share of (R - 1) / (M + R - 1) of the
    time is idle (Huang et al. 2019). The look-ups stay in front of it on the first rank: give :meth:`step` their
    output, which gets its gradient.

    Args:
        layers: all of them, with the same weights on every rank; this rank keeps its own.
        runtime: this process's place in the job; the stages follow the ranks.
        loss: of (output, targets) of a micro-batch, the mean over its rows.
        microbatches: M, at least as many as ranks; must divide the rows of a batch.
        schedule: ``1f1b`` holds the activations of at most R micro-batches, ``gpipe`` of all.
        group: of the ranks; all where not given.

    Raises:
        ValueError: fewer layers with weights than ranks, fewer micro-batches than ranks, another schedule.

    Example::

        dense = PipelinedDense(mlp(512, [512] * 16 + [1]), runtime, loss=binary_cross_entropy_with_logits, microbatches=8)
        optimizer = torch.optim.Adam(dense.stage.parameters())
        pooled = tables(batch.sparse).values() if dense.is_first else None
        loss = dense.step(pooled, batch.labels[:, None])  # on every rank; the last one returns the loss
        optimizer.step()
    """

    def __init__(
        self,
        layers: nn.Sequential,
        runtime: Runtime,
        *,
        loss: Loss,
        microbatches: int = 4,
        schedule: Schedule = "1f1b",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        stages = dist.get_world_size(group)
        if microbatches < stages:
            raise ValueError(
                f"microbatches={microbatches}: must be at least the number of stages, {stages}, or ranks only wait"
            )
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule={schedule!r}: must be one of {', '.join(get_args(Schedule))}")
        place = dist.get_rank(group)
        self.is_first, self.is_last = place == 0, place + 1 == stages
        self.stage = cut(layers, stages)[place].to(runtime.device)
        self._microbatches = microbatches
        made = PipelineStage(self.stage, place, stages, runtime.device, group=group)
        kind: Any = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        self._schedule = kind(made, n_microbatches=microbatches, loss_fn=loss)

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor | None:
        """Forward and backward of one batch, on every rank; adds to ``grad`` of this rank's stage and of what ``inputs`` came from.

        Args:
            inputs: (B, D), read on the first rank.
            targets: of B rows, read on the last rank.

        Returns:
            The mean loss over the batch, detached, on the last rank; None on the others.

        Raises:
            ValueError: no inputs on the first or no targets on the last rank, or rows that the micro-batches do not
                divide.
        """
        for name, rows, here in (("inputs", inputs, self.is_first), ("targets", targets, self.is_last)):
            if here and rows is None:
                raise ValueError(
                    f"{name}: None on the {'first' if name == 'inputs' else 'last'} rank, which reads them"
                )
            if here and rows is not None and len(rows) % self._microbatches:
                raise ValueError(
                    f"{name}: {len(rows)} rows in microbatches={self._microbatches}: must be a multiple, or the mean "
                    "over the "
                    "batch is not that of its parts; use loader.drop_last, or another number"
                )
        losses: list[Tensor] = []
        leaf = inputs.detach().requires_grad_(inputs.requires_grad) if self.is_first and inputs is not None else None
        told: dict[str, Any] = {"target": targets, "losses": losses} if self.is_last else {}
        self._schedule.step(*([leaf] if leaf is not None else []), **told)
        if leaf is not None and leaf.grad is not None and inputs is not None:
            inputs.backward(leaf.grad / self._microbatches)  # type: ignore[no-untyped-call]
        return sum(loss.detach() for loss in losses) / len(losses) if self.is_last else None  # type: ignore[return-value]
