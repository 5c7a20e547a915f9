"""Evidence: draws that a Dataset made, what they say against a law, and the law that they suggest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.law import (
    Exclusion,
    Floats,
    Law,
    NegativeDraws,
    Popular,
    TensorColumns,
    Uniform,
    describe_ids,
    integers,
    is_key,
    numbers_of,
    of_columns,
    of_mapping,
)
from torchrec_ext.adopt.rows.reading import (
    GETITEMS,
    DatasetReader,
    Ids,
    held_by,
    seed_everything,
)
from torchrec_ext.adopt.rows.rereads import ROUNDS
from torchrec_ext.adopt.rows.slots import Reading, Slot

UNLIKELY = 1e-6  # evidence of a smaller p-value contradicts a law
_SEEN = -math.log(UNLIKELY)  # of so many expected events, none has that probability
_BINS = 64
_GROUPS = 16
_MOST_COLUMNS = 8  # on which draws are tested to depend
UNSEEN = "cannot be seen"  # begins what a test says where it has no power
_CELL = 5.0  # least expected number in a cell of a chi-square test
_DRAWS = 24_000
_CALLS = 8  # of each row whose draws are read
_FEWEST_CALLS = 2000
_MOST_DRAWS = 400_000
_MOST_CALLS = 100_000
_EXPECTED = (
    30.0  # known pairs that should be expected, where so many calls can show them
)
_MOST_KEYS = 6  # columns that are tried as the key of known pairs


class LawTest(NamedTuple):
    """A test's answer: the p-value of the draws under the law, None where the test can see nothing, and a text."""

    p: float | None
    text: str

    def __str__(self) -> str:
        return self.text if self.p is None else f"{self.text} (p={self.p:.2g})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Draws that a Dataset made.

    Args:
        what: the drawn integers in words, with the user's line.
        rows: (C,) the row of each call of the Dataset, calls of one row beside each other.
        ids: (C, n) what it drew.
        columns: (N, ...) the other columns by name.
        positive: column of the positive, where the row shows which that is.
        exclusions: pairs that the Dataset may leave out.
        call: the user's call of Rows.of, less ``negatives``.
    """

    what: str
    rows: Ids
    ids: Ids
    columns: TensorColumns
    positive: str | None
    exclusions: Sequence[Exclusion]
    call: str

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.what} by a law that must be signed.", *self.proposal()]
        )

    def draws_by(self, law: Law, seed: int = 0) -> NegativeDraws:
        """Returns draws by a law over the rows of the Dataset, as many a row as its own.

        Raises:
            CannotAdopt: the law does not fit the columns.
        """
        return NegativeDraws(
            law, self.columns, self.positive, self.ids.shape[1], seed, self.exclusions
        )

    def refuse(self, draws: NegativeDraws) -> list[LawTest]:
        """Returns the tests of a law that the draws do not contradict.

        Raises:
            CannotAdopt: they contradict it.
        """
        findings = self.against(draws)
        against = [
            finding
            for finding in findings
            if finding.p is not None and finding.p < UNLIKELY
        ]
        if against:
            lines = [f"negatives: {self.what}, and not {draws.describe()}:"]
            lines += [f"  {finding}" for finding in against]
            raise CannotAdopt("\n".join(lines + self.proposal()))
        return findings

    @property
    def size(self) -> str:
        """The number of draws in words."""
        return f"{self.ids.size:,} draws"

    def against(self, draws: NegativeDraws) -> list[LawTest]:
        """Tests the draws against a law."""
        numbers, there = numbers_of(draws.ids, self.ids)
        # One draw that the law never makes refutes it, whatever the tests below say.
        if not there.all():
            wrong = self.ids[~there]
            text = f"{len(wrong):,} of {self.size} are not among {describe_ids(draws.ids)}, such as {wrong[0]}"
            return [LawTest(0.0, text)]
        is_excluded = draws.known.contains(draws.keys[self.rows][:, None], numbers)
        if is_excluded.any():
            call, index = np.argwhere(is_excluded)[0]
            pair = f"{self.ids[call, index]} in row {self.rows[call]}"
            text = f"{is_excluded.sum():,} of {self.size} are items that the law excludes, such as {pair}"
            return [LawTest(0.0, text)]
        return [
            *self._ends(draws, numbers),
            *self._excluded(draws),
            self._binned("by popularity", draws, numbers, self._by_popularity(draws)),
            self._binned(
                "by id",
                draws,
                numbers,
                _equal_bins(len(draws.ids), self._bins(draws, 1)),
            ),
            *self._repeats(draws, numbers),
            *self._dependence(draws, numbers),
        ]

    def _bins(self, draws: NegativeDraws, groups: int) -> int:
        most = _BINS if groups == 1 else _GROUPS
        # Four times the least number on average, so that few cells are left out.
        enough = self.ids.size // int(4 * _CELL * groups)
        return max(2, min(most, len(draws.ids), enough))

    def _by_popularity(self, draws: NegativeDraws) -> Ids:
        counts = np.zeros(len(draws.ids) + 1, np.int64)
        if self.positive is not None:
            numbers, there = numbers_of(
                draws.ids, integers(self.columns, self.positive, "positive")
            )
            counts = np.bincount(numbers[there], minlength=len(counts))
        # From the rarest item on; equally rare ones by their ids.
        order = 1 + counts[1:].argsort(kind="stable")
        bins = np.zeros(len(counts), np.int64)
        bins[order] = _equal_bins(len(draws.ids), self._bins(draws, 1))[1:]
        return bins

    def _ends(self, draws: NegativeDraws, numbers: Ids) -> list[LawTest]:
        """Tests whether the least and the greatest ids of the law are drawn."""
        findings = []
        index = np.arange(len(draws.ids) + 1)
        least = numbers.min()
        greatest = numbers.max()
        ends = [
            ("below the least", least, index < least),
            ("above the greatest", greatest, index > greatest),
        ]
        for words, number, beyond in ends:
            # Number 0 is no item.
            if beyond[1:].any():
                chances = draws.chances(self.rows, beyond.astype(np.int64), 2)[:, 1]
                expected = chances.sum() * self.ids.shape[1]
                text = f"{expected:,.1f} draws expected {words} that was drawn, {draws.ids[number - 1]:,}"
                # The Poisson probability of none.
                findings.append(LawTest(math.exp(-expected), text))
        if self.ids.size / len(draws.ids) < _SEEN:
            text = f"{UNSEEN} in {self.size} of {len(draws.ids):,} ids: a range too long or short by one or a few"
            findings.append(LawTest(None, text))
        return findings

    def _excluded(self, draws: NegativeDraws) -> list[LawTest]:
        """Tests whether the Dataset leaves out pairs that the law does not."""
        findings = []
        for other in self.exclusions:
            expected, count = self.hits(draws, other)
            # It is 0 where the law excludes these pairs too, but for rounding.
            if expected > 1e-9:
                text = f"{count:,} draws are of {other.code}, {expected:,.1f} expected"
                findings.append(LawTest(_poisson(count, expected), text))
        if draws.law.exclude is not None:
            free = replace(draws.law, exclude=None, by=None, items=draws.ids)
            expected, _ = self.hits(self.draws_by(free), draws.exclusion)
            text = f"no draw is one that the law excludes; without the exclusion {expected:,.1f} would be"
            if expected < _SEEN:
                text = f"{UNSEEN} in {self.size}: whether known pairs are left out ({expected:,.1f} expected)"
            findings.append(LawTest(None, text))
        return findings

    def _binned(
        self, name: str, draws: NegativeDraws, numbers: Ids, bins: Ids
    ) -> LawTest:
        count = int(bins.max()) + 1
        observed = np.bincount(bins[numbers].reshape(-1), minlength=count)
        expected = draws.chances(self.rows, bins, count).sum(axis=0) * self.ids.shape[1]
        return LawTest(
            _chi_square(observed, expected), f"chi-square {name}, {count} bins"
        )

    def _repeats(self, draws: NegativeDraws, numbers: Ids) -> list[LawTest]:
        """Tests the number of equal pairs of draws, within a call and between the calls of one row."""
        count = self.ids.shape[1]
        rows, first, calls = np.unique(self.rows, return_index=True, return_counts=True)
        _, second, third = draws.moments(self.rows)
        within = _equal_pairs(np.arange(len(self.rows)), numbers)
        findings = []
        if count > 1:
            expected = second.sum() * math.comb(count, 2)
            text = f"{within:,} repeats within a row, {expected:,.1f} expected where a row's draws can repeat"
            if not draws.law.replace:
                p = 0.0 if within else None
                findings.append(LawTest(p, text))
            else:
                spread = _pairs_variance(
                    np.full(len(self.rows), count), second, third
                ).sum()
                findings.append(LawTest(_tail(within, expected, spread), text))
            if expected < _SEEN:
                findings.append(
                    LawTest(
                        None,
                        f"{UNSEEN} in {self.size}: whether a row's draws can repeat",
                    )
                )
        between = _equal_pairs(np.searchsorted(rows, self.rows), numbers) - within
        totals = calls * count
        pairs = totals * (totals - 1) // 2 - calls * math.comb(count, 2)
        expected = (pairs * second[first]).sum()
        spread = _pairs_variance(totals, second[first], third[first]).sum()
        text = f"{between:,} equal draws between two calls of a row, {expected:,.1f} expected"
        findings.append(LawTest(_tail(between, expected, spread), text))
        return findings

    def _dependence(self, draws: NegativeDraws, numbers: Ids) -> list[LawTest]:
        """Tests whether draws depend on their index, on the draw or call before, or on the rest of the row."""
        bins = _equal_bins(len(draws.ids), self._bins(draws, _GROUPS))
        width = int(bins.max()) + 1
        binned = bins[numbers]
        calls = len(self.rows)
        chances = draws.chances(self.rows, bins, width)
        findings = []

        def test(name: str, groups: Ids, bins_seen: Ids, expected: Floats) -> None:
            size = int(groups.max()) + 1
            observed = np.bincount(groups * width + bins_seen, minlength=size * width)
            of_groups = np.stack(
                [expected[groups == group].sum(axis=0) for group in range(size)]
            )
            p = _chi_square(observed, of_groups.reshape(-1))
            findings.append(
                LawTest(p, f"chi-square against {name}, {size} x {width} bins")
            )

        count = self.ids.shape[1]
        every = np.repeat(chances, count, axis=0)
        if count > 1:
            test(
                "the index of the draw",
                np.tile(np.arange(count) % _GROUPS, calls),
                binned.reshape(-1),
                every,
            )
            before = binned[:, :-1].reshape(-1)
            after = binned[:, 1:].reshape(-1)
            following = np.repeat(chances, count - 1, axis=0)
            if not draws.law.replace:
                # The draw before is not drawn again, and one item fewer is free.
                free = np.repeat(draws.known.free(draws.keys[self.rows]), count - 1)[
                    :, None
                ]
                following = (
                    following * free - (before[:, None] == np.arange(width))
                ) / np.maximum(free - 1, 1)
            test("the draw before", before, after, following)
        test(
            "the call before",
            np.repeat(binned[:-1, 0], count),
            binned[1:].reshape(-1),
            every[count:],
        )
        test(
            "the row's number",
            np.repeat(_quantile_bins(self.rows), count),
            binned.reshape(-1),
            every,
        )
        for name, column in list(self.columns.items())[:_MOST_COLUMNS]:
            # Of a row of several numbers, by the first.
            values = column.reshape(len(column), -1)[
                torch.from_numpy(self.rows), 0
            ].numpy(force=True)
            test(
                f"'{name}'",
                np.repeat(_quantile_bins(values), count),
                binned.reshape(-1),
                every,
            )
        return findings

    def proposal(self) -> list[str]:
        """Returns lines: the simplest law that the draws do not contradict with its evidence, and what to write."""
        trials = []
        for law, code in self._laws():
            try:
                findings = self.against(self.draws_by(law))
            except CannotAdopt:
                # Rows without an item left to draw, for one.
                continue
            least = min(p_values(findings), default=1.0)
            trials.append((least, law, code, findings))
            if least >= UNLIKELY:
                break
        if not trials:
            return [
                f"{self.size}, of the ids {self.ids.min():,} to {self.ids.max():,}: no law here could be tried."
            ]
        p, law, code, findings = max(trials, key=lambda case: case[0])
        lines = [
            f"From {self.size} in {len(self.rows):,} calls, ids {self.ids.min():,} to {self.ids.max():,}:"
        ]
        lines += [f"  {finding}" for finding in findings]
        if p < UNLIKELY:
            worst = [f"{other.text()}: p={least:.2g}" for least, other, _, _ in trials]
            return [
                *lines,
                f"None of the laws tried fits ({'; '.join(worst)}).",
                GETITEMS,
            ]
        return [
            *lines,
            "  cannot be seen by any test of draws: what changes with the time, the epoch or the worker",
            f"They are as if drawn {law.text()}. If that is your law, sign it:",
            f"    rows = {self.call}, negatives={code})",
        ]

    def _laws(self) -> list[tuple[Law, str]]:
        """Returns the laws to try, the simplest first, with what a user writes for each."""
        whole = self._range()
        text = f"range({whole.start}, {whole.stop})" if whole.start else str(whole.stop)
        draws = self.draws_by(Uniform(whole))
        pairs = self._left_out(draws) or draws.exclusion
        exclude = pairs.exclude
        by = pairs.by
        code = pairs.code
        laws: list[tuple[Law, str]] = [
            (Uniform(whole, exclude, by), f"Uniform({text}, {code})"),
            (
                Uniform(whole, exclude, by, replace=False),
                f"Uniform({text}, {code}, replace=False)",
            ),
        ]
        name = self.positive
        if name is None:
            return laws
        laws.append((Uniform(name, exclude, by), f'Uniform("{name}", {code})'))
        laws.append(
            (
                Uniform(name, exclude, by, replace=False),
                f'Uniform("{name}", {code}, replace=False)',
            )
        )
        for exponent in (0.75, 1.0, 0.5):
            law = Popular(whole, exclude, by, counted=name, exponent=exponent)
            laws.append(
                (law, f'Popular({text}, {code}, counted="{name}", exponent={exponent})')
            )
        return laws

    def _left_out(self, draws: NegativeDraws, least: float = _SEEN) -> Exclusion | None:
        """Returns the pairs that the draws never hit, those of a mapping first and the most often expected first."""
        never = []
        for other in self.exclusions:
            expected, count = self.hits(draws, other)
            # A mapping is there for this, so it is proposed also where too few draws
            # could show it.
            mapping = isinstance(other.exclude, Mapping)
            if not count and expected > 0 and (expected >= least or mapping):
                never.append((expected >= least, mapping, expected, other))
        if not never:
            return None
        *_, pairs = max(never, key=lambda case: case[:3])
        return pairs

    def expected(self) -> float | None:
        """Returns the expected draws of known pairs if these were not excluded; None if some are drawn."""
        draws = self.draws_by(Uniform(self._range()))
        pairs = self._left_out(draws, least=0.0)
        return None if pairs is None else self.hits(draws, pairs)[0]

    def _range(self) -> range:
        values = self.ids.reshape(-1)
        if self.positive is not None:
            values = np.concatenate(
                [values, integers(self.columns, self.positive, "positive")]
            )
        return range(int(values.min()), int(values.max()) + 1)

    def hits(self, draws: NegativeDraws, other: Exclusion) -> tuple[float, int]:
        """Returns how many draws are expected to be of other pairs, and how many are."""
        numbers, there = numbers_of(draws.ids, self.ids)
        pairs, chances = draws.expected(self.rows, other)
        is_hit = pairs.contains(other.keys[self.rows][:, None], numbers)
        return float(chances.sum() * self.ids.shape[1]), int((is_hit & there).sum())


def p_values(findings: Sequence[LawTest]) -> list[float]:
    """Returns the p-values of the tests that could see something."""
    return [finding.p for finding in findings if finding.p is not None]


def _equal_bins(items: int, count: int) -> Ids:
    """Returns (I + 1,) bins of the numbers 1 to I, ``count`` bins of about equal size; that of number 0 is 0."""
    bins = np.arange(items, dtype=np.int64) * count // items
    return np.concatenate([np.zeros(1, np.int64), bins])


def _quantile_bins(values: NDArray[Any]) -> Ids:
    """Returns up to 16 bins of values, (C,), about equally full; equal values share a bin."""
    ordered = np.nan_to_num(values.astype(np.float64))
    edges = np.unique(np.quantile(ordered, np.linspace(0, 1, _GROUPS + 1)[1:-1]))
    return np.unique(edges.searchsorted(ordered, side="right"), return_inverse=True)[
        1
    ].astype(np.int64)


def _equal_pairs(groups: Ids, numbers: Ids) -> int:
    """Returns the number of pairs of equal numbers (C, n) within a group, (C,)."""
    keys = groups[:, None] * (int(numbers.max()) + 1) + numbers
    _, counts = np.unique(keys, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def _pairs_variance(counts: Ids, second: Floats, third: Floats) -> Floats:
    """Returns the variance of the number of equal pairs among draws, from sums of powers of probabilities."""
    # Two pairs that share a draw depend on each other unless all items are as likely.
    pairs = counts * (counts - 1) / 2
    return pairs * second * (1 - second) + 2 * pairs * (counts - 2) * np.maximum(
        third - second**2, 0
    )


def _gamma(function: Callable[[Tensor, Tensor], Tensor], a: float, x: float) -> float:
    return float(
        function(
            torch.tensor(a, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)
        )
    )


def _chi_square(observed: Ids, expected: Floats) -> float | None:
    """Returns the p-value of counts; cells of less than 5 expected are left out, but for those that cannot be hit."""
    if (observed[expected < 1e-9] > 0).any():
        return 0.0
    # The statistic follows a chi-square law only where each cell expects some.
    cells = expected >= _CELL
    if cells.sum() < 2:
        return None
    statistic = float(
        ((observed[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    )
    return _gamma(torch.special.gammaincc, (int(cells.sum()) - 1) / 2, statistic / 2)


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
    return math.erfc(abs(observed - expected) / math.sqrt(2 * variance))


def read_draws(
    reader: DatasetReader, reading: Reading, among: Ids, calls: int = 0
) -> tuple[Ids, Ids]:
    """Reads what a Dataset draws.

    Args:
        reader: reads its rows; inside :meth:`DatasetReader.untouched`.
        reading: what its rows are made of.
        among: rows from which some are read.
        calls: number of calls; by default enough for a test.

    Returns:
        (C,) the row of each call, and (C, n) what it drew.
    """
    slot = reading.drawn
    assert slot is not None
    if not calls:
        calls = min(max(_DRAWS // slot.drawn, _FEWEST_CALLS), _DRAWS)
    return drawn_rows(reader, slot, reading.slots.index(slot), calls, among)


def evidence_of(
    reader: DatasetReader, reading: Reading, draws: tuple[Ids, Ids], call: str
) -> Evidence:
    """Returns what draws say.

    Args:
        reader: has read them.
        reading: what the rows of the Dataset are made of.
        draws: rows and ids of :func:`read_draws`.
        call: the user's call of Rows.of, less ``negatives``.
    """
    slot = reading.drawn
    assert slot is not None
    rows, ids = draws
    positive = _positive(reading, ids)
    return Evidence(
        what=f"{reader.where} draws {slot.drawn} of {len(slot.pieces)} integers of {slot.name}",
        rows=rows,
        ids=ids,
        columns=reading.columns,
        positive=positive,
        exclusions=list(_exclusions(reader, reading, positive)),
        call=call,
    )


def with_enough_draws(
    reader: DatasetReader, reading: Reading, evidence: Evidence
) -> Evidence:
    """Returns evidence of as many calls as are needed to see whether known pairs are left out."""
    few = evidence.expected()
    if few is None or few >= _EXPECTED:
        return evidence
    calls = len(evidence.rows)
    count = evidence.ids.shape[1]
    more = min(
        _MOST_CALLS, _MOST_DRAWS // count, int(calls * _EXPECTED / max(few, 1e-9))
    )
    # Where even the most calls would show nothing, none are made.
    if more <= calls or few * more / calls <= _SEEN:
        return evidence
    rows, ids = read_draws(reader, reading, np.arange(reader.num_rows), more)
    return replace(evidence, rows=rows, ids=ids)


def _positive(reading: Reading, ids: Ids) -> str | None:
    """Returns the column of the positives: beside the draws, or that whose ids hold most of what is drawn."""
    assert reading.drawn is not None
    columns_beside = reading.columns.keys() & set(reading.drawn.pieces)
    if len(columns_beside) == 1:
        return columns_beside.pop()
    best = None
    most = (
        0.5  # most of the draws, or ids of something else share a few numbers with them
    )
    for name, column in reading.columns.items():
        if is_key(column):
            share = float(
                np.isin(ids, integers(reading.columns, name, "positive")).mean()
            )
            if share > most:
                best = name
                most = share
    return best


def _exclusions(
    reader: DatasetReader, reading: Reading, positive: str | None
) -> Iterator[Exclusion]:
    """Returns the pairs that draws may leave out: of the Dataset's mappings, and of a column with the positives."""
    keys = [
        name
        for name, column in reading.columns.items()
        if is_key(column) and name != positive
    ][:_MOST_KEYS]
    for path, value in held_by(reader.dataset):
        pairs = value
        code = f"dataset.{path}"
        # Sets by the number of a user, as a mapping has them by the user's id.
        if isinstance(value, list) and value and isinstance(value[0], set | frozenset):
            pairs = dict(enumerate(value))
            code = f"dict(enumerate({code}))"
        if not isinstance(pairs, Mapping) or not _maps_ids(pairs):
            continue
        for name in keys:
            exclusion = of_mapping(pairs, reading.columns, name, code)
            # The column holds the keys if most rows have one; a look at the first is
            # enough.
            if (exclusion.keys[:1000] >= 0).mean() > 0.5:
                yield exclusion
    if positive is not None:
        # By itself too: a Dataset may leave out nothing but the row's own positive.
        for name in [*keys, positive]:
            yield of_columns(reading.columns, name, positive)


def _maps_ids(pairs: Mapping[Any, Any]) -> bool:
    if not pairs:
        return False
    key, items = next(iter(pairs.items()))
    able = (
        isinstance(items, set | frozenset | list | tuple | np.ndarray)
        and len(items) > 0
    )
    return (
        isinstance(key, int | np.integer)
        and able
        and isinstance(next(iter(items)), int | np.integer)
    )


def drawn_rows(
    reader: DatasetReader, slot: Slot, index: int, calls: int, among: Ids
) -> tuple[Ids, Ids]:
    """Reads what some rows draw, each row eight times.

    Args:
        reader: reads them; inside :meth:`DatasetReader.untouched`.
        slot: the slot with drawn integers.
        index: number of this slot.
        calls: about so many calls.
        among: rows from which some are chosen.

    Returns:
        (C,) the row of each call, and (C, n) what it drew.
    """
    generator = np.random.default_rng(1)
    # Several calls of each row show whether it draws from the same few items each time.
    rows = generator.choice(
        among, min(len(among), max(calls // _CALLS, 1)), replace=False
    )
    again = max(_CALLS, calls // len(rows))
    rows = np.sort(rows).repeat(again).astype(np.int64)
    seed_everything(ROUNDS)
    mask = torch.tensor([piece is None for piece in slot.pieces])
    draws = torch.empty((len(rows), slot.drawn), dtype=torch.int64)
    title = "rows: reading what is drawn"
    for call, row in enumerate(
        tqdm(rows, desc=title, delay=2.0, unit="row", leave=False, disable=None)
    ):
        draws[call] = reader.leaves(int(row))[index].flatten()[mask]
    return rows, draws.numpy()
