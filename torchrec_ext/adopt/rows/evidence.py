"""Evidence: draws that a Dataset made, what they say against a law, and the law that they suggest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.law import (
    Exclusion,
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
from torchrec_ext.adopt.rows.law_tests import (
    SEEN,
    UNLIKELY,
    LawTest,
    LawTests,
    p_values,
)
from torchrec_ext.adopt.rows.reading import (
    GETITEMS,
    DatasetReader,
    Ids,
    held_by,
    seed_everything,
)
from torchrec_ext.adopt.rows.rereads import ROUNDS
from torchrec_ext.adopt.rows.slots import Reading

_DRAWS = 24_000
_FEWEST_CALLS = 2000
_MOST_DRAWS = 400_000
_MOST_CALLS = 100_000
_CALLS = 8  # of each row whose draws are read
_EXPECTED = (
    30.0  # known pairs that should be expected, where so many calls can show them
)
_MOST_KEYS = 6  # columns that are tried as the key of known pairs


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
        # One draw that the law never makes refutes it, whatever the tests below say.
        wrong = self.ids[~np.isin(self.ids, draws.ids)]
        if len(wrong):
            text = f"{len(wrong):,} of {self.size} are not among {describe_ids(draws.ids)}, such as {wrong[0]}"
            return [LawTest(0.0, text)]
        tests = self._tests(draws)
        keys = draws.keys[self.rows][:, None]
        is_excluded = draws.known.contains(keys, tests.numbers)
        if is_excluded.any():
            call, index = np.argwhere(is_excluded)[0]
            pair = f"{self.ids[call, index]} in row {self.rows[call]}"
            text = f"{is_excluded.sum():,} of {self.size} are items that the law excludes, such as {pair}"
            return [LawTest(0.0, text)]
        return [
            *tests.ends(),
            *tests.exclusions(self.exclusions),
            *tests.frequencies(self._positives()),
            *tests.repeats(),
            *tests.dependence(self.columns),
        ]

    def _tests(self, draws: NegativeDraws) -> LawTests:
        """Returns the tests of a law among whose ids all draws are."""
        return LawTests(draws, self.rows, numbers_of(draws.ids, self.ids)[0])

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
        ids = f"ids {self.ids.min():,} to {self.ids.max():,}"
        if not trials:
            return [f"{self.size}, of the {ids}: no law here could be tried."]
        p, law, code, findings = max(trials, key=lambda case: case[0])
        lines = [f"From {self.size} in {len(self.rows):,} calls, {ids}:"]
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
        _, pairs = self._left_out(draws) or (0.0, draws.exclusion)
        exclude = pairs.exclude
        by = pairs.by
        code = pairs.code
        name = self.positive
        catalogues: dict[str, range | str] = {text: whole}
        if name is not None:
            catalogues[f'"{name}"'] = name
        laws: list[tuple[Law, str]] = []
        for items_code, items in catalogues.items():
            law: Law = Uniform(items, exclude, by)
            laws.append((law, f"Uniform({items_code}, {code})"))
            law = Uniform(items, exclude, by, replace=False)
            laws.append((law, f"Uniform({items_code}, {code}, replace=False)"))
        if name is not None:
            for exponent in (0.75, 1.0, 0.5):
                law = Popular(whole, exclude, by, counted=name, exponent=exponent)
                options = f'counted="{name}", exponent={exponent}'
                laws.append((law, f"Popular({text}, {code}, {options})"))
        return laws

    def _left_out(
        self, draws: NegativeDraws, least: float = SEEN
    ) -> tuple[float, Exclusion] | None:
        """Returns the pairs that the draws never hit, those of a mapping first, and how many hits are expected."""
        never = []
        tests = self._tests(draws)
        for other in self.exclusions:
            expected, count = tests.hits(other)
            # A mapping is there for this, so it is proposed also where too few draws
            # could show it.
            mapping = isinstance(other.exclude, Mapping)
            if not count and expected > 0 and (expected >= least or mapping):
                never.append((expected >= least, mapping, expected, other))
        if not never:
            return None
        return max(never, key=lambda case: case[:3])[2:]

    def expected(self) -> float | None:
        """Returns the expected draws of known pairs if these were not excluded; None if some are drawn."""
        draws = self.draws_by(Uniform(self._range()))
        left_out = self._left_out(draws, least=0.0)
        return None if left_out is None else left_out[0]

    def _range(self) -> range:
        values = np.concatenate([self.ids.reshape(-1), self._positives()])
        return range(int(values.min()), int(values.max()) + 1)

    def _positives(self) -> Ids:
        """Returns the (N,) positives of all rows, (0,) if their column is unknown."""
        if self.positive is None:
            return np.zeros(0, np.int64)
        return integers(self.columns, self.positive, "positive")


def read_draws(
    reader: DatasetReader, reading: Reading, among: Ids, calls: int = 0
) -> tuple[Ids, Ids]:
    """Reads what some rows of a Dataset draw, each row eight times or more.

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
    generator = np.random.default_rng(1)
    # Several calls of each row show whether it draws from the same few items each time.
    count = min(len(among), max(calls // _CALLS, 1))
    rows = np.sort(generator.choice(among, count, replace=False))
    rows = rows.repeat(max(_CALLS, calls // count)).astype(np.int64)
    seed_everything(ROUNDS)
    mask = torch.tensor([piece is None for piece in slot.pieces])
    draws = torch.empty((len(rows), slot.drawn), dtype=torch.int64)
    index = reading.slots.index(slot)
    title = "rows: reading what is drawn"
    for call, row in enumerate(
        tqdm(rows, desc=title, delay=2.0, unit="row", leave=False, disable=None)
    ):
        draws[call] = reader.leaves(int(row))[index].flatten()[mask]
    return rows, draws.numpy()


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
    if more <= calls or few * more / calls <= SEEN:
        return evidence
    rows, ids = read_draws(reader, reading, np.arange(reader.num_rows), more)
    return replace(evidence, rows=rows, ids=ids)


def _positive(reading: Reading, ids: Ids) -> str | None:
    """Returns the column of the positives: beside the draws, or that whose ids hold most of what is drawn."""
    assert reading.drawn is not None
    columns_beside = reading.columns.keys() & set(reading.drawn.pieces)
    if len(columns_beside) == 1:
        return columns_beside.pop()
    shares: dict[str | None, float] = {None: 0.5}
    # Most of the draws, or ids of something else share a few numbers with them.
    for name, column in reading.columns.items():
        if is_key(column):
            values = integers(reading.columns, name, "positive")
            shares[name] = float(np.isin(ids, values).mean())
    return max(shares, key=shares.__getitem__)


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
