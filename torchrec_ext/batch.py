"""TowerBatch: what a training step reads, in the shape that TorchRec's pipelines can copy and follow."""

from __future__ import annotations

from dataclasses import dataclass

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class TowerBatch(Pipelineable):
    """B rows for all towers at once.

    There is one KeyedJaggedTensor for all towers, as an attribute: ``TrainPipelineSparseDist`` overlaps the input dist only of
    modules whose input it can follow by ``getattr`` from the batch.

    Args:
        sparse: F keys, stride B.
        dense: (B, Fd) float32; Fd may be 0.
        labels: (B,) float32.
        weights: (B,) float32; 0 marks a padding row, which no loss and no metric counts.
        total_weight: () float32, the sum of ``weights`` over all ranks divided by R. Dividing the weighted loss by it makes the
            mean of the ranks' losses the mean over the global batch, however unevenly padding is spread.
        log_q: (B,) float32 log-probability with which the row's candidate was sampled, or None.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor
    weights: Tensor
    total_weight: Tensor
    log_q: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.numel()

    def to(self, device: torch.device, non_blocking: bool = False) -> TowerBatch:
        """The batch on ``device``."""
        return TowerBatch(
            sparse=self.sparse.to(device=device, non_blocking=non_blocking),
            dense=self.dense.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            total_weight=self.total_weight.to(device, non_blocking=non_blocking),
            log_q=None if self.log_q is None else self.log_q.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> TowerBatch:
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return TowerBatch(
            sparse=self.sparse.pin_memory(),
            dense=self.dense.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
            total_weight=self.total_weight.pin_memory(),
            log_q=None if self.log_q is None else self.log_q.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` still reads these tensors."""
        self.sparse.record_stream(stream)
        for tensor in (self.dense, self.labels, self.weights, self.total_weight, self.log_q):
            if tensor is not None:
                tensor.record_stream(stream)
