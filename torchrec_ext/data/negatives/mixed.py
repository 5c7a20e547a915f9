"""MixedNegatives: uniform candidates beside those of the batch, so that items without interactions are pushed down too.

StreamingFrequency: an estimate of how often items occur, made while they go by (Yi et al. 2019, algorithm 2).

MixedCandidates: a loader's sampler, which draws by MixedNegatives and corrects by counts or by StreamingFrequency.

CatalogueCandidates: all items at every step, for a softmax over the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from torchrec_ext.data.columns import Float32, Int64
from torchrec_ext.data.negatives.random import mixed, signed, stream, uniform
from torchrec_ext.data.negatives.samplers import (
    SHARED,
    SampledData,
    SamplingSettings,
    TrainingSampler,
)
from torchrec_ext.schema.validation import check_least


class MixedNegatives:
    """Draws N uniform candidates for each step, shared by all queries of all ranks (Yang et al. 2020).

    They are appended to the positives of a rank as rows without a query (``in_batch_negatives(..., queries=B)``), which
    also excludes a user's known items among them. :meth:`log_q` corrects both together, by their mixture.

    Args:
        num_items: items have the ids 1 to ``num_items``.
        extra: N, over all ranks.
        batch_size: positives per step over all ranks.
        seed: seed of the draws.
    """

    def __init__(
        self, num_items: int, extra: int, batch_size: int, seed: int = 0
    ) -> None:
        check_least("num_items", num_items)
        check_least("extra", extra)
        check_least("batch_size", batch_size)
        self.num_items = num_items
        self.extra = extra
        self.batch_size = batch_size
        self.seed = seed

    def draw(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Int64:
        """Returns (ceil(N / R),) items: this rank's part of the step's N, filled up with 0, which is no item."""
        share = -(-self.extra // world_size)
        places = np.arange(rank * share, (rank + 1) * share)
        numbers = uniform(stream(self.seed, epoch, SHARED), np.array([step]), places)
        return np.where(
            places < self.extra, (numbers * self.num_items).astype(np.int64) + 1, 0
        )

    def log_q(self, in_batch: Tensor) -> Tensor:
        """Returns (C,) the log-probability of each item as one of the batch's and the extra candidates.

        Args:
            in_batch: (C,) log-probability that one of the batch's candidates is the item: its share of the training
                rows, or ``StreamingFrequency.log_q(ids) - log(batch_size)``.
        """
        # Of B + N candidates, B are drawn like the batch's and N uniformly: log((B p +
        # N / I) / (B + N)).
        from_batch = in_batch + math.log(self.batch_size)
        from_all = torch.full_like(in_batch, math.log(self.extra / self.num_items))
        return torch.logaddexp(from_batch, from_all) - math.log(
            self.batch_size + self.extra
        )


_SIGNED = 1 << 63


class StreamingFrequency:
    """Estimates the share of batches with an item from the steps between its appearances, in fixed memory.

    Per hash function and bucket it keeps A, the step of the last appearance, and B, the moving average of the gap; the
    estimate is 1 / B. Items that share a bucket look too frequent, so of several hash functions the greatest gap
    counts. All ops run on the device without a wait. With ids of all ranks (``InBatch.ids``) every rank holds the same
    state.

    The relative spread of an estimate is about sqrt(rate / 2), and it follows a change within about 1 / rate
    appearances.

    Args:
        buckets: H, the number of buckets per hash function; several times the number of items that occur.
        rate: alpha, the weight of the newest gap, above 0, at most 1.
        initial_gap: gap, in steps, that is assumed of an item before its first appearance.
        hashes: number of hash functions.
        seed: seed of the hash functions.
        device: device of the arrays.
    """

    def __init__(
        self,
        buckets: int = 1 << 20,
        *,
        rate: float = 0.05,
        initial_gap: float = 100.0,
        hashes: int = 2,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_least("buckets", buckets)
        check_least("hashes", hashes)
        if not 0 < rate <= 1:
            raise ValueError(
                f"rate={rate}: must be above 0 and at most 1; 0.01 to 0.1 is usual"
            )
        if not initial_gap >= 1:
            raise ValueError(f"initial_gap={initial_gap}: must be 1 step or more")
        self._settings = {
            "buckets": buckets,
            "rate": rate,
            "initial_gap": initial_gap,
            "hashes": hashes,
            "seed": seed,
        }
        keys = [signed(stream(seed, number)) for number in range(hashes)]
        self._keys = torch.tensor(keys, device=device)[:, None]
        self._rows = torch.arange(hashes, device=device)[:, None]
        # One bucket more, for what is not to be counted.
        self.last = torch.zeros(hashes, buckets + 1, dtype=torch.int64, device=device)
        self.gap = torch.full(
            (hashes, buckets + 1),
            float(initial_gap),
            dtype=torch.float64,
            device=device,
        )
        self.step = 0

    def update(self, ids: Tensor) -> None:
        """Counts one batch of all ranks, (C,) int64 items; a repeated item counts once, item 0 not at all."""
        self.step += 1
        rate = self._settings["rate"]
        buckets = self._places(ids)
        # Equal places write equal values, so their order does not matter.
        newest = self.step - self.last[self._rows, buckets]
        self.gap[self._rows, buckets] = (1 - rate) * self.gap[
            self._rows, buckets
        ] + rate * newest
        # A plain number would first be copied from the host.
        self.last[self._rows, buckets] = torch.full_like(buckets, self.step)

    def log_q(self, ids: Tensor) -> Tensor:
        """Returns (C,) float32 the log of each item's estimated probability to be in a batch."""
        return (
            -self.gap[self._rows, self._places(ids)]
            .amax(dim=0)
            .clamp(min=1.0)
            .log()
            .float()
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the arrays, the step and the settings."""
        return {
            "last": self.last.clone(),
            "gap": self.gap.clone(),
            "step": self.step,
            "settings": dict(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``.

        Raises:
            ValueError: the state was made with other settings, which would read other buckets.
        """
        changes = []
        for name, value in state["settings"].items():
            setting = self._settings.get(name)
            if value != setting:
                changes.append(f"{name} was {value} and is {setting}")
        if changes:
            raise ValueError(
                f"the frequencies were estimated with other settings: {', '.join(changes)}; restore these, or start "
                "anew"
            )
        self.last.copy_(state["last"])
        self.gap.copy_(state["gap"])
        self.step = int(state["step"])

    def _places(self, ids: Tensor) -> Tensor:
        """Returns (hashes, C) the bucket of each id under each hash function."""
        buckets = self._settings["buckets"]
        hashed = (mixed(ids + self._keys) & (_SIGNED - 1)) % buckets
        return torch.where(ids == 0, buckets, hashed)


# Per item. With two hash functions one item in 70 shares both of its buckets with
# others.
_BUCKETS = 8


class MixedCandidates(TrainingSampler):
    """Draws by :class:`MixedNegatives`, corrected by counts, or by an estimate of them made while the rows go by.

    An estimate takes each global batch before that batch is corrected. A checkpoint holds its state at the start of an
    epoch. On resuming, the loader repeats the items of the epoch's earlier steps. So a state does not depend on how far
    a prefetch thread has come.

    Args:
        mixed: sampler of the candidates that the queries of a step share.
        counts: (num_items + 1,) training rows by item; None estimates, which needs rows in memory, since a rank must
            see the items of all ranks.
    """

    shared = True
    host_only = "candidates are drawn"

    def __init__(self, mixed: MixedNegatives, counts: Int64 | None = None) -> None:
        if counts is not None and (
            counts.shape != (mixed.num_items + 1,) or not counts[1:].sum() > 0
        ):
            raise ValueError(
                f"counts: shape {counts.shape} with sum {counts.sum()}, must be (num_items + 1,) = "
                f"({mixed.num_items + 1},) with a count above 0: row i counts the training rows of item i"
            )
        self.mixed = mixed
        self._log_p: Tensor | None = None
        self._frequency: StreamingFrequency | None = None
        self._saved: dict[str, Any] | None = None
        if counts is None:
            self._frequency = StreamingFrequency(
                _BUCKETS * (mixed.num_items + 1), seed=mixed.seed
            )
            self._saved = self._frequency.state_dict()
        else:
            self._log_p = torch.from_numpy(
                np.maximum(counts, 0) / counts[1:].sum()
            ).log()
        self._epoch = 0
        self._counts = False
        # The state at the end of the epoch, which a prefetch thread reaches before the
        # caller.
        self._after: dict[str, Any] | None = None

    @classmethod
    def configured(cls, config: SamplingSettings, data: SampledData) -> Self:
        """See :meth:`TrainingSampler.configured`."""
        mixed = MixedNegatives(
            data.num_items, config.shared_negatives, config.batch_size, config.seed
        )
        return cls(mixed, data.counts if config.frequency == "counted" else None)

    @property
    def estimates(self) -> bool:
        """Whether :meth:`observe` must be called with the items of each global batch."""
        return self._frequency is not None

    def draw(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Int64:
        """See :meth:`MixedNegatives.draw`."""
        return self.mixed.draw(epoch, step, rank=rank, world_size=world_size)

    def log_q(self, ids: Int64) -> Float32:
        """Returns (C,) the log-probability of each item as one of a batch's candidates; item 0 is the unknown one."""
        items = torch.from_numpy(ids)
        if self._frequency is not None:
            # The estimate is of a batch; a candidate is one of its B.
            in_batch = self._frequency.log_q(items).double() - math.log(
                self.mixed.batch_size
            )
        else:
            assert self._log_p is not None
            in_batch = self._log_p[items]
        log_q: Float32 = self.mixed.log_q(in_batch).float().numpy()
        return log_q

    def begin(self, epoch: int) -> None:
        """Goes to the start of ``epoch``; items of epochs before the state's are not counted again."""
        if self._after is not None and epoch > self._epoch:
            # The epoch before has ended: its estimate is the start of this one.
            self._epoch += 1
            self._saved = self._after
            self._after = None
        # Items of an earlier epoch are in the estimate already.
        self._counts = self._epoch <= epoch
        if self._frequency is not None and self._saved is not None:
            self._epoch = max(self._epoch, epoch)
            self._frequency.load_state_dict(self._saved)

    def observe(self, ids: Int64) -> None:
        """Counts the items of a global batch."""
        if self._frequency is not None and self._counts:
            self._frequency.update(torch.from_numpy(ids))

    def end(self) -> None:
        """Ends the epoch; the next one starts from this estimate."""
        if self._frequency is not None and self._counts:
            self._after = self._frequency.state_dict()

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Returns the estimate at the start of ``epoch``; empty if the counts are known."""
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
            self._epoch = int(state["epoch"])
            self._saved = self._frequency.state_dict()
            self._after = None


class CatalogueCandidates:
    """Gives every step all items as shared candidates of its queries, a part on each rank.

    Args:
        items: (I,) ids of the items, from 1 on.
    """

    def __init__(self, items: Int64) -> None:
        self.items = items

    def draw(
        self, epoch: int, step: int, *, rank: int = 0, world_size: int = 1
    ) -> Int64:
        """Returns (ceil(I / R),) items: this rank's part of all, filled up with 0, which is no item."""
        del epoch, step
        share = -(-len(self.items) // world_size)
        items = self.items[rank * share : (rank + 1) * share]
        return np.concatenate([items, np.zeros(share - len(items), np.int64)])

    def log_q(self, ids: Int64) -> Float32:
        """Returns (C,) zeros: each item is there with probability 1."""
        return np.zeros(len(ids), np.float32)
