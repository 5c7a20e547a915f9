"""LawTests: what the draws that a Dataset made say against a law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.adopt.rows.law import (
    Exclusion,
    Floats,
    NegativeDraws,
    TensorColumns,
    numbers_of,
)
from torchrec_ext.adopt.rows.reading import Ids

UNLIKELY = 1e-6  # evidence of a smaller p-value contradicts a law
SEEN = -math.log(UNLIKELY)  # of so many expected events, none has that probability
UNSEEN = "cannot be seen"  # begins what a test says where it has no power
_BINS = 64
_GROUPS = 16
_MOST_COLUMNS = 8  # on which draws are tested to depend
_CELL = 5.0  # least expected number in a cell of a chi-square test


class LawTest(NamedTuple):
    """A test's answer: the p-value of the draws under the law, None where the test can see nothing, and a text."""

    p: float | None
    text: str

    def __str__(self) -> str:
        return self.text if self.p is None else f"{self.text} (p={self.p:.2g})"


@dataclass(frozen=True, eq=False)
class LawTests:
    """Tests draws against a law that can make them.

    Args:
        draws: draws by the law.
        rows: (C,) the row of each call of the Dataset.
        numbers: (C, n) the number, from 1, of each item that it drew.
    """

    draws: NegativeDraws
    rows: Ids
    numbers: Ids

    def hits(self, other: Exclusion) -> tuple[float, int]:
        """Returns how many draws are expected to be of other pairs, and how many are."""
        pairs, chances = self.draws.expected(self.rows, other)
        is_hit = pairs.contains(other.keys[self.rows][:, None], self.numbers)
        return float(chances.sum() * self.numbers.shape[1]), int(is_hit.sum())

    def unseen(self, text: str) -> LawTest:
        """Returns the answer of a test for which there are too few draws."""
        return LawTest(None, f"{UNSEEN} in {self.numbers.size:,} draws{text}")

    def ends(self) -> list[LawTest]:
        """Tests whether the least and the greatest ids of the law are drawn."""
        ids = self.draws.ids
        least = self.numbers.min()
        greatest = self.numbers.max()
        # Below, within and above what was drawn.
        bins = np.searchsorted([least, greatest + 1], np.arange(len(ids) + 1), "right")
        chances = self.draws.chances(self.rows, bins, 3).sum(axis=0)
        below, _, above = chances * self.numbers.shape[1]
        findings = []
        for words, number, expected, has_more in (
            ("below the least", least, below, least > 1),
            ("above the greatest", greatest, above, greatest < len(ids)),
        ):
            if has_more:
                text = f"{expected:,.1f} draws expected {words} that was drawn, {ids[number - 1]:,}"
                # The Poisson probability of none.
                findings.append(LawTest(math.exp(-expected), text))
        if self.numbers.size / len(ids) < SEEN:
            text = f" of {len(ids):,} ids: a range too long or short by one or a few"
            findings.append(self.unseen(text))
        return findings

    def exclusions(self, others: Sequence[Exclusion]) -> list[LawTest]:
        """Tests whether the Dataset leaves out other pairs than the law does."""
        findings = []
        for other in others:
            expected, count = self.hits(other)
            # It is 0 where the law excludes these pairs too, but for rounding.
            if expected > 1e-9:
                text = f"{count:,} draws are of {other.code}, {expected:,.1f} expected"
                findings.append(LawTest(_poisson(count, expected), text))
        if self.draws.law.exclude is not None:
            free, _, _ = self.draws.moments(self.rows)
            excluded = (self.draws.share.sum() - free).sum() * self.numbers.shape[1]
            text = f"no draw is one that the law excludes; without the exclusion {excluded:,.1f} would be"
            finding = LawTest(None, text)
            if excluded < SEEN:
                text = f": whether known pairs are left out ({excluded:,.1f} expected)"
                finding = self.unseen(text)
            findings.append(finding)
        return findings

    def frequencies(self, positives: Ids) -> list[LawTest]:
        """Tests how often items are drawn, by their number of ``positives`` (N,) and by their id."""
        items = len(self.draws.ids)
        numbers, is_item = numbers_of(self.draws.ids, positives)
        counts = np.bincount(numbers[is_item], minlength=items + 1)
        # From the rarest item on; equally rare ones by their ids.
        order = 1 + counts[1:].argsort(kind="stable")
        by_id = self._equal_bins()
        by_popularity = np.zeros(items + 1, np.int64)
        by_popularity[order] = by_id[1:]
        findings = []
        for name, bins in (("popularity", by_popularity), ("id", by_id)):
            count = int(bins.max()) + 1
            observed = np.bincount(bins[self.numbers].reshape(-1), minlength=count)
            chances = self.draws.chances(self.rows, bins, count).sum(axis=0)
            p = _chi_square(observed, chances * self.numbers.shape[1])
            findings.append(LawTest(p, f"chi-square by {name}, {count} bins"))
        return findings

    def repeats(self) -> list[LawTest]:
        """Tests the number of equal pairs of draws, within a call and between the calls of one row."""
        calls, count = self.numbers.shape
        rows, first, row_calls = np.unique(
            self.rows, return_index=True, return_counts=True
        )
        _, second, third = self.draws.moments(self.rows)
        within = _equal_pairs(np.arange(calls), self.numbers)
        findings = []
        if count > 1:
            expected = second.sum() * math.comb(count, 2)
            text = f"{within:,} repeats within a row, {expected:,.1f} expected where a row's draws can repeat"
            if self.draws.law.replace:
                spread = _pairs_variance(count, second, third).sum()
                findings.append(LawTest(_tail(within, expected, spread), text))
            else:
                findings.append(LawTest(0.0 if within else None, text))
            if expected < SEEN:
                findings.append(self.unseen(": whether a row's draws can repeat"))
        groups = np.searchsorted(rows, self.rows)
        between = _equal_pairs(groups, self.numbers) - within
        totals = row_calls * count
        pairs = totals * (totals - 1) // 2 - row_calls * math.comb(count, 2)
        expected = (pairs * second[first]).sum()
        spread = _pairs_variance(totals, second[first], third[first]).sum()
        text = f"{between:,} equal draws between two calls of a row, {expected:,.1f} expected"
        findings.append(LawTest(_tail(between, expected, spread), text))
        return findings

    def dependence(self, columns: TensorColumns) -> list[LawTest]:
        """Tests whether draws depend on their index, on the draw or call before, or on the rest of the row."""
        bins = self._equal_bins(_GROUPS)
        binned = bins[self.numbers]
        calls, count = binned.shape
        chances = self.draws.chances(self.rows, bins, int(bins.max()) + 1)
        every = chances.repeat(count, axis=0)
        flat = binned.reshape(-1)
        findings = []
        if count > 1:
            index = np.tile(np.arange(count) % _GROUPS, calls)
            findings.append(_by_group("the index of the draw", index, flat, every))
            before = binned[:, :-1].reshape(-1)
            after = binned[:, 1:].reshape(-1)
            following = chances.repeat(count - 1, axis=0)
            if not self.draws.law.replace:
                # The draw before is not drawn again, and one item fewer is free.
                free = self.draws.known.free(self.draws.keys[self.rows])
                free = free.repeat(count - 1)[:, None]
                is_before = before[:, None] == np.arange(chances.shape[1])
                following = (following * free - is_before) / np.maximum(free - 1, 1)
            findings.append(_by_group("the draw before", before, after, following))
        before = binned[:-1, 0].repeat(count)
        after = flat[count:]
        findings.append(_by_group("the call before", before, after, every[count:]))
        values: dict[str, NDArray[Any]] = {"the row's number": self.rows}
        for name, column in list(columns.items())[:_MOST_COLUMNS]:
            # Of a row of several numbers, by the first.
            numbers = column.reshape(len(column), -1)[torch.from_numpy(self.rows), 0]
            values[f"'{name}'"] = numbers.numpy(force=True)
        for name, each in values.items():
            groups = _quantile_bins(each).repeat(count)
            findings.append(_by_group(name, groups, flat, every))
        return findings

    def _equal_bins(self, groups: int = 1) -> Ids:
        """Returns (I + 1,) bins, about equally full, of the numbers 1 to I for a table of groups; 0 has bin 0."""
        items = len(self.draws.ids)
        most = _BINS if groups == 1 else _GROUPS
        # Four times the least number on average, so that few cells are left out.
        enough = self.numbers.size // int(4 * _CELL * groups)
        count = max(2, min(most, items, enough))
        bins = np.arange(items, dtype=np.int64) * count // items
        return np.concatenate([np.zeros(1, np.int64), bins])


def p_values(findings: Sequence[LawTest]) -> list[float]:
    """Returns the p-values of the tests that could see something."""
    return [finding.p for finding in findings if finding.p is not None]


def _quantile_bins(values: NDArray[Any]) -> Ids:
    """Returns up to 16 bins of values, (C,), about equally full; equal values share a bin."""
    ordered = np.nan_to_num(values.astype(np.float64))
    edges = np.unique(np.quantile(ordered, np.linspace(0, 1, _GROUPS + 1)[1:-1]))
    _, bins = np.unique(edges.searchsorted(ordered, side="right"), return_inverse=True)
    return bins.astype(np.int64)


def _by_group(name: str, groups: Ids, bins: Ids, chances: Floats) -> LawTest:
    """Tests whether the bins (D,) of draws depend on their groups (D,), by the chances (D, bins)."""
    width = chances.shape[1]
    size = int(groups.max()) + 1
    observed = np.bincount(groups * width + bins, minlength=size * width)
    expected = np.stack([chances[groups == group].sum(axis=0) for group in range(size)])
    p = _chi_square(observed, expected.reshape(-1))
    return LawTest(p, f"chi-square against {name}, {size} x {width} bins")


def _equal_pairs(groups: Ids, numbers: Ids) -> int:
    """Returns the number of pairs of equal numbers (C, n) within a group, (C,)."""
    keys = groups[:, None] * (int(numbers.max()) + 1) + numbers
    _, counts = np.unique(keys, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _pairs_variance(counts: Ids | int, second: Floats, third: Floats) -> Floats:
    """Returns the variance of the number of equal pairs among draws, from sums of powers of probabilities."""
    # Two pairs that share a draw depend on each other unless all items are as likely.
    pairs = counts * (counts - 1) / 2
    shared = np.maximum(third - second**2, 0)
    return pairs * second * (1 - second) + 2 * pairs * (counts - 2) * shared


def _gamma(function: Callable[[Tensor, Tensor], Tensor], a: float, x: float) -> float:
    numbers = torch.tensor([a, x], dtype=torch.float64)
    return float(function(*numbers))


def _chi_square(observed: Ids, expected: Floats) -> float | None:
    """Returns the p-value of counts; cells of less than 5 expected are left out, but for those that cannot be hit."""
    if (observed[expected < 1e-9] > 0).any():
        return 0.0
    # The statistic follows a chi-square law only where each cell expects some.
    cells = expected >= _CELL
    if cells.sum() < 2:
        return None
    observed = observed[cells]
    expected = expected[cells]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return _gamma(torch.special.gammaincc, (len(expected) - 1) / 2, statistic / 2)


def _poisson(observed: int, expected: float) -> float:
    """Returns the two-sided p-value of a count."""
    below = _gamma(torch.special.gammaincc, observed + 1, expected)
    above = _gamma(torch.special.gammainc, observed, expected) if observed else 1.0
    return min(1.0, 2 * min(below, above))


def _tail(observed: int, expected: float, variance: float) -> float:
    """Returns the two-sided p-value of a number of equal pairs: Poisson where few are expected, normal above."""
    # Pairs of one item come together, which a Poisson law does not know: with many the
    # variance counts.
    if expected < 100:
        return _poisson(observed, float(expected))
    if variance <= 0:  # with one item every pair is equal
        return 1.0 if observed == round(expected) else 0.0
    return math.erfc(abs(observed - expected) / math.sqrt(2 * variance))
