"""TopK: the greatest scores over blocks of candidates, exact to the last tie."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
_SAMPLE = 8_192  # scores of the first block that say what is worth a look


class TopK:
    """Keeps the K greatest scores of each of Q queries while blocks of scores go by; of equal scores the smaller position.

    Args:
        queries: Q.
        k: K.
    """

    def __init__(self, queries: int, k: int) -> None:
        self._k = k
        self._best = [_Best(k) for _ in range(queries)]

    def add(self, start: int, scores: Tensor) -> None:
        """Scores (Q, n) of the positions from ``start`` on, which come in ascending order; -inf is left out."""
        for best, row in zip(self._best, scores.numpy(), strict=True):
            best.add(start, row)

    def result(self) -> tuple[Tensor, Tensor]:
        """Scores (Q, K), descending, and positions (Q, K); -inf and -1 where fewer than K are left."""
        scores = np.full((len(self._best), self._k), -np.inf, np.float32)
        positions = np.full((len(self._best), self._k), -1)
        for row, best in enumerate(self._best):
            found, values = best.result()
            scores[row, : len(values)], positions[row, : len(found)] = values, found
        return torch.from_numpy(scores), torch.from_numpy(positions)


class _Best:
    """The K greatest scores of one query.

    A block is compared with what is the K-th score so far, and only what is greater is looked at again: a sort of everything
    would cost as much as the products themselves. In numpy, which finds next to nothing in a block ten times as fast as torch.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._threshold = -np.inf
        self._kept: list[tuple[NDArray[np.int64], Floats]] = []
        self._waiting = 0

    def add(self, start: int, scores: Floats) -> None:
        if not self._kept and len(scores) > self._k:
            # The K-th of some of them is no greater than that of all, and takes a tenth of the time.
            some = scores[:: max(1, len(scores) // max(_SAMPLE, 8 * self._k))]
            self._threshold = float(np.nextafter(_kth(some, self._k), np.float32(-np.inf)))
        places = np.flatnonzero(scores > self._threshold)
        if not len(places):
            return
        found = scores[places]
        if len(found) > self._k:  # many of one score, or scores that rise with the position
            kth = _kth(found, self._k)
            places, found = places[found >= kth], found[found >= kth]
            self._threshold = float(kth)  # so many stand before what comes
        self._kept.append((places + start, found))
        self._waiting += len(places)
        if self._waiting > 2 * self._k:
            self.result()

    def result(self) -> tuple[NDArray[np.int64], Floats]:
        """Positions and scores, K or fewer, the greatest first; all others are forgotten."""
        if not self._kept:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        positions, scores = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        order = np.argsort(-scores, kind="stable")[: self._k]  # equal scores stay in the order of their positions
        positions, scores = positions[order], scores[order]
        if len(scores) == self._k:
            self._threshold = float(scores[-1])
        self._kept, self._waiting = [(positions, scores)], 0
        return positions, scores


def _kth(scores: Floats, k: int) -> np.float32:
    """The K-th greatest of more than K scores."""
    kth: np.float32 = np.partition(scores, -k)[-k]
    return kth
