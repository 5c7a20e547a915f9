"""RetrievalModel: two towers trained to find each row's candidate among those of the whole batch, of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import normalize

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import Prediction, TowerModel
from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.losses import check_fed, in_batch_softmax
from torchrec_ext.modules.softmax import in_batch_negatives, widened
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange


class RetrievalModel(TowerModel):
    """A query tower and a candidate tower under a softmax over the candidates of the batch (Yi et al. 2019).

    Its batches hold positives alone; every other row's candidate is a negative, on every rank. Candidates that are
    popular stand in many batches, so by ``counts`` their scores are corrected in training; what ranks afterwards is the
    uncorrected score. Where a batch says how its candidates were sampled, by ``log_q``, that corrects them instead: of
    ``loader.sampling=mixed``, whose rows after the positives are candidates alone, with weight 0 (Yang et al. 2020).

    ``batch.items`` and ``batch.users``, which a loader fills as :meth:`schema` asks, say which item and whose row each
    is. So a candidate whose id is dropped stays itself, a negative of the others with its own log q, however it is
    looked up.

    Args:
        towers: the query's and the candidate's, in this order.
        interaction: one with a ``metric``, :class:`DotProduct` or :class:`Cosine`, whose temperature is then that of
            the softmax.
        counts: (I,) how often each candidate stands in the training rows, for batches without ``log_q``; these are not
            corrected where it is not given.
        known: from users (B,) and items (C,) to (B, C) bool, what each user is known to have taken, such as a
            ``KnownItems`` of the training rows: these are no negatives. Where it is not given, of a query's items only
            its own candidate.
        user_feature: the column with each row's user, needed where ``known`` is given; no tower has to read it.
        item_feature: the key that holds each row's candidate, one id from 1.
        temperature: of the softmax over dot products; greater than 0.
        shared: see :class:`TowerModel`.

    Raises:
        ValueError: not two towers, another interaction, or what a TowerModel refuses.
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        interaction: InteractionLayer,
        *,
        counts: Tensor | None = None,
        known: nn.Module | None = None,
        user_feature: str = "user_id",
        item_feature: str = "item_id",
        temperature: float = 1.0,
        shared: Sequence[str] = (),
    ) -> None:
        if len(towers) != 2 or getattr(interaction, "metric", None) is None:
            raise ValueError(
                "a softmax over the batch needs a query tower, a candidate tower and DotProduct or Cosine, got "
                f"{list(towers)} and {type(interaction).__name__}; use TowerModel with a loss over given rows for others"
            )
        super().__init__(towers, interaction, shared=shared)
        self.in_batch = _InBatchSoftmax(interaction, counts, known, item_feature, temperature)
        self._query, self._candidate = None if known is None else user_feature, item_feature

    def schema(self, *, out_of_range: OutOfRange = "error", oov_ids: Mapping[str, int] | None = None) -> BatchSchema:
        """See :meth:`TowerModel.schema`; a loss that compares rows reads no labels, so they may have any value."""
        made = super().schema(out_of_range=out_of_range, oov_ids=oov_ids)
        return dataclasses.replace(made, label_range=None, query=self._query, candidate=self._candidate)

    def expect_rows(self, *, negatives: int, label: str | None = None) -> None:
        """See :meth:`TowerModel.expect_rows`; drawn negatives would count as positives."""
        check_fed("in_batch", negatives=negatives, label=label, metric=self._metric())

    def forward(self, batch: TowerBatch) -> tuple[Tensor, Prediction]:
        """The loss over the batch, (), and each row's own logit in the :class:`Prediction`.

        In evaluation the rows have labels, and the loss is that of a TowerModel, which compares no rows.
        """
        if not self.training:
            return super().forward(batch)
        outputs = [
            widened(output) for output in self.outputs(batch)
        ]  # under autocast the towers' are of half precision
        loss = self.in_batch(outputs, batch)
        logits = self.interaction(outputs)
        return loss, Prediction(loss.detach(), logits.detach(), batch.labels, batch.weights)


class _InBatchSoftmax(nn.Module):
    """A module, so that TorchRec's pipelines do not trace into it."""

    log_q: Tensor | None

    def __init__(
        self,
        interaction: InteractionLayer,
        counts: Tensor | None,
        known: nn.Module | None,
        item_feature: str,
        temperature: float,
    ) -> None:
        super().__init__()
        self.known = known
        self._cosine = interaction.metric == "cosine"
        self._temperature = interaction.temperature or temperature
        self._item_feature = item_feature
        # What is in no training row is in no batch either; its correction only has to be a number.
        self.register_buffer("log_q", None if counts is None else (counts.clamp(min=1) / counts.sum()).log().float())

    def forward(self, outputs: list[Tensor], batch: TowerBatch) -> Tensor:
        queries, candidates = map(normalize, outputs) if self._cosine else outputs
        ids = batch.ids(self._item_feature) if batch.items is None else batch.items
        log_q = batch.log_q
        if log_q is None and self.log_q is not None:
            log_q = self.log_q[ids]
        count = len(ids) if batch.queries is None else batch.queries
        negatives = in_batch_negatives(
            candidates,
            ids,
            log_q=log_q,
            queries=count,
            rows=None if batch.queries is None else len(ids),
            present=(ids != 0) | (batch.weights > 0),  # item 0 with a weight is one that nobody knows
            is_known=None if self.known is None else partial(self.known, _users(batch)[:count]),
        )
        return in_batch_softmax(
            queries[:count],
            negatives,
            weights=batch.weights[:count],
            total_weight=batch.total_weight,
            temperature=self._temperature,
        )


def _users(batch: TowerBatch) -> Tensor:
    if batch.users is None:
        raise ValueError(
            "the model has known=..., and the batch does not say whose its rows are: make the loader with the model's "
            "schema(), set batch.users, or leave known out"
        )
    return batch.users
