"""MixedCandidates: the extra candidates of each step, and how likely each item is to stand among all candidates of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.frequency import StreamingFrequency
from torchrec_ext.data.mixed_negatives import MixedNegatives
from torchrec_ext.data.negatives import Float32
from torchrec_ext.data.share import Share

_BUCKETS = 8  # per item: with two hash functions one item in 70 shares both of its buckets with others


class MixedCandidates:
    """Draws by :class:`MixedNegatives`, corrected by counts, or by an estimate of them made while the rows go by.

    An estimate takes each global batch before that batch is corrected. What is saved is its state at the start of an epoch: the
    loader shows the items of the steps before the one where it resumes once more, so that a state is the same whatever a prefetch
    thread has built.

    Args:
        mixed: draws the candidates that the steps share.
        counts: (num_items + 1,) training rows by item; None estimates, which takes rows in memory, since a rank must see the items
            of all ranks.
    """

    def __init__(self, mixed: MixedNegatives, counts: Int64 | None = None) -> None:
        if counts is not None and (counts.shape != (mixed.num_items + 1,) or not counts[1:].sum() > 0):
            raise ValueError(
                f"counts: shape {counts.shape} with sum {counts.sum()}, must be (num_items + 1,) = ({mixed.num_items + 1},) with a "
                "count above 0: row i counts the training rows of item i"
            )
        self.mixed = mixed
        self._log_p = None if counts is None else torch.from_numpy(np.maximum(counts, 0) / counts[1:].sum()).log()
        self._frequency = StreamingFrequency(_BUCKETS * (mixed.num_items + 1), seed=mixed.seed) if counts is None else None
        self._epoch, self._counts = 0, False
        self._saved = None if self._frequency is None else self._frequency.state_dict()
        self._after: dict[str, Any] | None = None  # at its end, which a prefetch thread reaches before the caller

    @property
    def estimates(self) -> bool:
        """Whether it must :meth:`observe`."""
        return self._frequency is not None

    def draw(self, epoch: int, step: int, share: Share) -> Int64:
        """See :meth:`MixedNegatives.draw`."""
        return self.mixed.draw(epoch, step, rank=share.rank, world_size=share.world_size)

    def log_q(self, ids: Int64) -> Float32:
        """(C,) log-probability that a place among the candidates of a batch holds each item; 0 is the unknown one."""
        items = torch.from_numpy(ids)
        if self._frequency is not None:
            in_batch = self._frequency.log_q(items).double() - math.log(self.mixed.batch_size)
        else:
            assert self._log_p is not None
            in_batch = self._log_p[items]
        log_q: Float32 = self.mixed.log_q(in_batch).float().numpy()
        return log_q

    def begin(self, epoch: int) -> None:
        """Goes to the start of ``epoch``; what is shown of one before that of its state is not counted again."""
        if self._after is not None and epoch > self._epoch:
            self._epoch, self._saved, self._after = self._epoch + 1, self._after, None
        self._counts = self._epoch <= epoch
        if self._frequency is not None and self._saved is not None:
            self._epoch = max(self._epoch, epoch)
            self._frequency.load_state_dict(self._saved)

    def observe(self, ids: Int64) -> None:
        """Takes the items of a global batch."""
        if self._frequency is not None and self._counts:
            self._frequency.update(torch.from_numpy(ids))

    def end(self) -> None:
        """The epoch is over: the next one starts from here."""
        if self._frequency is not None and self._counts:
            self._after = self._frequency.state_dict()

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """The estimate at the start of ``epoch``; nothing where the counts are known."""
        if self._saved is None:
            return {}
        if self._after is not None and epoch > self._epoch:
            return {"epoch": self._epoch + 1, "frequency": self._after}
        return {"epoch": self._epoch, "frequency": self._saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``.

        Raises:
            ValueError: see :meth:`StreamingFrequency.load_state_dict`.
        """
        if self._frequency is not None:
            self._frequency.load_state_dict(state["frequency"])
            self._epoch, self._saved, self._after = int(state["epoch"]), self._frequency.state_dict(), None
