"""RetrievalModel: two towers trained to find each row's candidate among those of the batch, or of the catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Prediction, TowerModel
from torchrec_ext.modules.config import LOSSES, check_hardest
from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.losses import check_fed, in_batch_softmax
from torchrec_ext.modules.softmax import (
    catalogue_softmax,
    gather_rows,
    in_batch_negatives,
    to_float32,
)
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange


class RetrievalModel(TowerModel):
    """A query tower and a candidate tower under a softmax over the candidates of the batch (Yi et al. 2019).

    Its batches hold positives alone; every other row's candidate, on any rank, is a negative. Popular candidates are in
    many batches, so ``counts`` corrects their scores in training; afterwards the uncorrected score ranks. Where a batch
    gives the candidates' ``log_q``, as that of a log of events does, that corrects them instead.

    Under the loss ``catalogue`` the candidates are all items instead: they are the rows after the positives, spread
    over the ranks, and nothing is left to correct (see :func:`torchrec_ext.modules.softmax.catalogue_softmax`).

    Rows with labels of their own (see :meth:`expect_rows`) count as positives with their weight times their label; rows
    of label 0 are neither positives nor candidates.

    ``batch.items``, which a loader fills as :meth:`schema` asks, names the item of each row. A candidate whose id is
    dropped therefore stays that item, a negative of the other rows with its own log q, whatever was looked up for it.

    Args:
        towers: the query's tower and the candidate's, in this order.
        interaction: one with a ``metric``, :class:`DotProduct` or :class:`Cosine`, whose temperature is then that of
            the softmax.
        counts: (I,) number of training rows of each candidate, for batches without ``log_q``; None for no correction.
        item_feature: key that holds each row's candidate, one id from 1.
        temperature: divisor of the dot products in the softmax, greater than 0.
        loss: one of LOSSES that is over the batch or the catalogue.
        hardest: number of negatives of a query that count under ``in_batch``: those with the greatest scores, corrected
            and divided by the temperature; 0 for all.
        shared: see :class:`TowerModel`.
        device: see :class:`TowerModel`.

    Raises:
        ValueError: not two towers, another interaction, ``hardest`` under another loss, or what a TowerModel refuses.
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        interaction: InteractionLayer,
        *,
        counts: Tensor | None = None,
        item_feature: str = "item_id",
        temperature: float = 1.0,
        loss: str = "in_batch",
        hardest: int = 0,
        shared: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        if len(towers) != 2 or getattr(interaction, "metric", None) is None:
            raise ValueError(
                "a softmax over the batch needs a query tower, a candidate tower and DotProduct or Cosine, got "
                f"{list(towers)} and {type(interaction).__name__}; use TowerModel with a loss over given rows for "
                "others"
            )
        check_hardest("hardest", hardest, loss)
        super().__init__(towers, interaction, shared=shared, device=device)
        self.in_batch = _InBatchLoss(
            loss, interaction, counts, item_feature, temperature, hardest
        )
        self._candidate = item_feature

    def schema(
        self,
        *,
        out_of_range: OutOfRange = "error",
        oov_ids: Mapping[str, int] | None = None,
    ) -> BatchSchema:
        """See :meth:`TowerModel.schema`; labels may have any value if all rows are positives, as none is read."""
        schema = super().schema(out_of_range=out_of_range, oov_ids=oov_ids)
        return dataclasses.replace(
            schema,
            label_range=schema.label_range if self.in_batch.labelled else None,
            candidate=self._candidate,
            catalogue=self.in_batch.catalogue,
        )

    def expect_rows(self, *, negatives: int, label: str | None = None) -> None:
        """See :meth:`TowerModel.expect_rows`; drawn negatives would count as positives."""
        check_fed(self.in_batch.name, negatives=negatives, label=label)
        self.in_batch.labelled = label is not None

    def leave_out_counts(self) -> None:
        """Leaves the counts of candidates out of the state dict, because another day's log has others."""
        # Registered anew, which is torch's way to change whether a buffer is saved.
        self.in_batch.register_buffer("log_q", self.in_batch.log_q, persistent=False)

    @property
    def calibrated(self) -> bool:
        """See :meth:`TowerModel.calibrated`; a softmax over candidates knows no log-odds of a label."""
        return False

    def forward(self, batch: TowerBatch) -> tuple[Tensor, Prediction]:
        """Returns the loss over the batch, (), and each row's own logit in the :class:`Prediction`.

        In evaluation the rows have labels, and the loss is that of a TowerModel, which compares no rows.
        """
        if not self.training:
            return super().forward(batch)
        # Under autocast the outputs are of half precision.
        outputs = [to_float32(output) for output in self.outputs(batch)]
        loss = self.in_batch(outputs, batch)
        logits = self.interaction(outputs)
        return loss, Prediction(
            loss.detach(), logits.detach(), batch.labels, batch.weights
        )


class _InBatchLoss(nn.Module):
    """The loss over the batch or the catalogue, as a module to keep TorchRec's pipelines from tracing into it."""

    log_q: Tensor | None

    def __init__(
        self,
        name: str,
        interaction: InteractionLayer,
        counts: Tensor | None,
        item_feature: str,
        temperature: float,
        hardest: int,
    ) -> None:
        super().__init__()
        self.name = name
        self._hardest = hardest
        self.catalogue = LOSSES[name].catalogue
        self.labelled = False
        self._cosine = interaction.metric == "cosine"
        self._temperature = interaction.temperature or temperature
        self._item_feature = item_feature
        log_q = None
        if counts is not None:
            # A candidate of no training row is in no batch either; its correction only
            # has to be finite.
            log_q = (counts.clamp(min=1) / counts.sum()).log().float()
        self.register_buffer("log_q", log_q)

    def forward(self, outputs: list[Tensor], batch: TowerBatch) -> Tensor:
        queries, candidates = map(normalize, outputs) if self._cosine else outputs
        ids = batch.items
        if ids is None:
            ids = batch.ids(self._item_feature)
        if self.catalogue:
            return self._over_catalogue(queries, candidates, ids, batch)
        weights = batch.weights
        total = batch.total_weight
        log_q = batch.log_q
        # With queries, a loader makes batches of one size on all ranks, see TowerBatch,
        # so none need be exchanged.
        rows = None if batch.queries is None else len(ids)
        # Item 0 with a weight is an unknown item, not padding.
        present = (ids != 0) | (batch.weights > 0)
        if self.labelled:
            # The rows with a label above 0, whose number differs between ranks.
            clicks = batch.weights * batch.labels
            chosen = clicks.nonzero()[:, 0]
            queries, candidates, ids, weights = (
                each[chosen] for each in (queries, candidates, ids, clicks)
            )
            log_q = rows = None
            present = torch.ones_like(ids, dtype=torch.bool)
            total = _mean_over_ranks(weights)
        if log_q is None and self.log_q is not None:
            log_q = self.log_q[ids]
        negatives = in_batch_negatives(
            candidates,
            ids,
            log_q=log_q,
            rows=rows,
            present=present,
        )
        return in_batch_softmax(
            queries,
            negatives,
            weights=weights,
            total_weight=total,
            temperature=self._temperature,
            hardest=self._hardest,
        )

    def _over_catalogue(
        self, queries: Tensor, candidates: Tensor, ids: Tensor, batch: TowerBatch
    ) -> Tensor:
        """Returns the loss of the first B of (B + I, D) queries with their items first in ``candidates`` (B + I, D)."""
        count = batch.queries
        if count is None or len(ids) == count:
            raise ValueError(
                "loss 'catalogue': the batch does not end with all items; make its loader with "
                "CatalogueCandidates(items), as training_loader does"
            )
        weights = batch.weights[:count]
        total = batch.total_weight
        if self.labelled:
            # The total of a batch counts all rows, and here only those with a label do.
            # The unknown item is not in the catalogue.
            weights = weights * batch.labels[:count] * (ids[:count] > 0)
            total = _mean_over_ranks(weights)
        weighted = weights.nonzero()[:, 0]
        everything = gather_rows(ids[count:])
        losses = catalogue_softmax(
            to_float32(queries[weighted]) / self._temperature,
            candidates[weighted],
            ids[weighted],
            gather_rows(candidates[count:]),
            everything,
            num_items=(everything > 0).sum(),
        )
        return (losses * weights[weighted]).sum() / total


def _mean_over_ranks(weights: Tensor) -> Tensor:
    """Returns the sum of the weights of all ranks divided by R, (), as in :class:`TowerBatch`; never quite 0."""
    return (
        gather_rows(weights.detach().sum()[None])
        .mean()
        .clamp(min=torch.finfo(torch.float32).tiny)
    )
