"""RetrievalModel: two towers trained to find each row's candidate among those of the whole batch, of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.functional import normalize

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Prediction, TowerModel
from torchrec_ext.modules.in_batch import in_batch_negatives
from torchrec_ext.modules.interaction import Cosine, DotProduct
from torchrec_ext.modules.losses import in_batch_softmax, widened
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange


class RetrievalModel(TowerModel):
    """A query tower and a candidate tower under a softmax over the candidates of the batch (Yi et al. 2019).

    Its batches hold positives alone; every other row's candidate is a negative, on every rank. Candidates that are popular stand in
    many batches, so by ``counts`` their scores are corrected in training; what ranks afterwards is the uncorrected score. Where a
    batch says how its candidates were sampled, by ``log_q``, that corrects them instead: of ``loader.sampling=mixed``, whose rows
    after the positives are candidates alone, with weight 0 (Yang et al. 2020).

    Args:
        towers: the query's and the candidate's, in this order.
        interaction: :class:`DotProduct` or :class:`Cosine`, whose temperature is that of the softmax.
        counts: (I,) how often each candidate stands in the training rows, for batches without ``log_q``; these are not corrected
            where it is not given.
        item_feature: the key that holds each row's candidate, one id from 1.
        temperature: of the softmax over dot products; greater than 0.
        shared: see :class:`TowerModel`.

    Raises:
        ValueError: not two towers, another interaction, or what a TowerModel refuses.
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        interaction: DotProduct | Cosine,
        *,
        counts: Tensor | None = None,
        item_feature: str = "item_id",
        temperature: float = 1.0,
        shared: Sequence[str] = (),
    ) -> None:
        if len(towers) != 2 or not isinstance(interaction, DotProduct | Cosine):
            raise ValueError(
                f"a softmax over the batch needs a query tower, a candidate tower and DotProduct or Cosine, got {list(towers)} and "
                f"{type(interaction).__name__}; use TowerModel with a loss over given rows for others"
            )
        super().__init__(towers, interaction, shared=shared)
        self.in_batch = _InBatchSoftmax(interaction, counts, item_feature, temperature)

    def schema(self, *, out_of_range: OutOfRange = "error", oov_ids: Mapping[str, int] | None = None) -> BatchSchema:
        """See :meth:`TowerModel.schema`; a loss that compares rows reads no labels, so they may have any value."""
        return dataclasses.replace(super().schema(out_of_range=out_of_range, oov_ids=oov_ids), label_range=None)

    def forward(self, batch: TowerBatch) -> tuple[Tensor, Prediction]:
        """The loss over the batch, (), and each row's own logit in the :class:`Prediction`.

        In evaluation the rows have labels, and the loss is that of a TowerModel, which compares no rows.
        """
        if not self.training:
            return super().forward(batch)
        outputs = [widened(output) for output in self.outputs(batch)]  # under autocast the towers' are of half precision
        loss = self.in_batch(outputs, batch)
        logits = self.interaction(outputs)
        return loss, Prediction(loss.detach(), logits.detach(), batch.labels, batch.weights)


class _InBatchSoftmax(nn.Module):
    """A module, so that TorchRec's pipelines do not trace into it."""

    log_q: Tensor | None

    def __init__(self, interaction: nn.Module, counts: Tensor | None, item_feature: str, temperature: float) -> None:
        super().__init__()
        self._cosine = isinstance(interaction, Cosine)
        self._temperature = interaction.temperature if isinstance(interaction, Cosine) else temperature
        self._item_feature = item_feature
        # What is in no training row is in no batch either; its correction only has to be a number.
        self.register_buffer("log_q", None if counts is None else (counts.clamp(min=1) / counts.sum()).log().float())

    def forward(self, outputs: list[Tensor], batch: TowerBatch) -> Tensor:
        queries, candidates = map(normalize, outputs) if self._cosine else outputs
        ids = batch.bags(self._item_feature).to_padded_dense(1)[:, 0].long()
        log_q = batch.log_q
        if log_q is None and self.log_q is not None:
            log_q = self.log_q[ids]
        negatives = in_batch_negatives(candidates, ids, log_q=log_q)
        return in_batch_softmax(
            queries, negatives, weights=batch.weights, total_weight=batch.total_weight, temperature=self._temperature
        )
