"""Rows.of: a Dataset's columns give its DataLoader's batches and its draws follow a signed law, or it is refused."""

from __future__ import annotations

import collections
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torchrec_ext.adopt import CannotAdopt, Evidence, Popular, Rows, Uniform
from torchrec_ext.adopt.rows import column_search, evidence
from torchrec_ext.adopt.rows.law import NegativeDraws
from torchrec_ext.adopt.rows.law_tests import LawTests, p_values
from torchrec_ext.data.negatives.samplers import PopularityNegatives

USERS, ITEMS, CONTEXT, NEGATIVES = 40, 150, 3, 4
# draws, enough where what is refused is not their law
FEW = {"_DRAWS": 2000, "_FEWEST_CALLS": 200}


def positives(
    rows: int = 1500, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    item = np.minimum((ITEMS * rng.random(rows) ** 2.5).astype(np.int64), ITEMS - 1)
    return (
        rng.integers(0, USERS, rows),
        item,
        (rng.random((rows, CONTEXT)) < 0.3).astype(np.float32),
    )


def known_of(user: np.ndarray, item: np.ndarray) -> dict[int, set[int]]:
    known = collections.defaultdict(set)
    for u, i in zip(user.tolist(), item.tolist(), strict=True):
        known[u].add(i)
    return known


class Interactions(Dataset):
    """The second user's Dataset, with other laws of its draws beside his two."""

    def __init__(self, sampler: str = "rejection", rows: int = 1500) -> None:
        user, item, context = positives(rows)
        self.items, self.sampler = ITEMS, sampler
        self.user = torch.from_numpy(user)
        self.item = torch.from_numpy(item)
        self.context = torch.from_numpy(context)
        self.known = known_of(user, item)
        self.share = np.bincount(item, minlength=ITEMS) / rows

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        user, chosen = int(self.user[row]), [int(self.item[row])]
        chosen += SAMPLERS[self.sampler](self, row, self.known[user])
        k = 1 + NEGATIVES
        label = torch.tensor([1.0] + [0.0] * NEGATIVES)
        return (
            torch.full((k,), user),
            torch.tensor(chosen),
            self.context[row].repeat(k, 1),
            label,
        )


def rejection(items: int) -> Callable[[Interactions, int, set[int]], list[int]]:
    def drawn(data: Interactions, row: int, known: set[int]) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < NEGATIVES:
            item = np.random.randint(0, items)
            if item not in known:
                chosen.append(int(item))
        return chosen

    return drawn


def setdiff(data: Interactions, row: int, known: set[int]) -> list[int]:
    rest = np.setdiff1d(np.arange(data.items), np.fromiter(known, int))
    return np.random.choice(rest, NEGATIVES, replace=False).tolist()


def by_popularity(data: Interactions, row: int, known: set[int]) -> list[int]:
    free = np.array([item not in known for item in range(data.items)]) * data.share
    return np.random.choice(data.items, NEGATIVES, p=free / free.sum()).tolist()


def near(data: Interactions, row: int, known: set[int]) -> list[int]:
    rest = np.setdiff1d(np.arange(data.items), np.fromiter(known, int))
    closest = np.abs(rest - int(data.item[row])).argsort()[:30]
    return np.random.choice(rest[closest], NEGATIVES).tolist()


def of_three(data: Interactions, row: int, known: set[int]) -> list[int]:
    """Each row draws from the same twelve items of its own, uniform over all rows."""
    rest = np.setdiff1d(np.arange(data.items), np.fromiter(known, int))
    return np.random.choice(
        np.random.default_rng(row).choice(rest, 12, replace=False), NEGATIVES
    ).tolist()


def beside(data: Interactions, row: int, known: set[int]) -> list[int]:
    rest = np.setdiff1d(np.arange(data.items), np.fromiter(known, int))
    first = np.random.randint(len(rest))
    return [int(rest[(first + step) % len(rest)]) for step in range(NEGATIVES)]


SAMPLERS: dict[str, Callable[[Interactions, int, set[int]], list[int]]] = {
    "rejection": rejection(ITEMS),
    "setdiff": setdiff,
    "no exclusion": lambda data, row, known: np.random.randint(
        0, data.items, NEGATIVES
    ).tolist(),
    "by popularity": by_popularity,
    "sorted": lambda data, row, known: sorted(rejection(ITEMS)(data, row, known)),
    "one item less": rejection(ITEMS - 1),
    "hard": near,
    "twelve of each row": of_three,
    "beside each other": beside,
    "not the positive": lambda data, row, known: rejection(ITEMS)(
        data, row, {int(data.item[row])}
    ),
}


def concatenated(rows: list[Any]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def same(left: Any, right: Any) -> bool:
    """Equal to the bit, in values, shapes and dtypes; a tuple is as good as a list."""
    ours, theirs = pytree.tree_leaves(left), pytree.tree_leaves(right)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))
        for a, b in zip(ours, theirs, strict=True)
    )


def gives_what_the_loader_gives(
    dataset: Any, batch_size: int = 4, **settings: Any
) -> Rows:
    drop_last = settings.pop("drop_last", False)
    collate = settings.get("collate_fn")
    rows = Rows.of(dataset, batch_size, shuffle=False, drop_last=drop_last, **settings)
    loader = DataLoader(
        dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate
    )
    assert len(rows) == len(loader)
    for ours, theirs in zip(rows, loader, strict=True):
        assert same(ours, theirs)
    return rows


class Listed(Dataset):
    """Rows made by a function of the Dataset and of the row's number."""

    def __init__(
        self, make: Callable[[Any, int], Any], rows: int = 11, **attributes: Any
    ) -> None:
        self.make, self.rows = staticmethod(make), rows
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        return self.make.__func__(self, row)


class Pair(NamedTuple):
    id: Any
    value: Any


def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "user": np.arange(11) % 4,
            "rating": np.linspace(0, 1, 11),
            "name": list("abcdefghijk"),
        }
    )


IDS, VALUES = np.arange(11) * 7 % 5, np.linspace(-1, 1, 33).reshape(11, 3)
LISTED: dict[str, Callable[[], Any]] = {
    "tuple of tensors": lambda: Listed(
        lambda d, i: (d.ids[i], d.x[i]), ids=torch.from_numpy(IDS), x=torch.rand(11, 3)
    ),
    "dict": lambda: Listed(
        lambda d, i: {"u": int(d.ids[i]), "x": d.x[i]},
        ids=IDS,
        x=VALUES.astype(np.float32),
    ),
    "one tensor": lambda: Listed(lambda d, i: torch.tensor(d.x[i]), x=VALUES),
    "Python numbers": lambda: Listed(
        lambda d, i: (d.ids[i], d.x[i], d.ids[i] > 2),
        ids=IDS.tolist(),
        x=VALUES[:, 0].tolist(),
    ),
    "numpy scalars": lambda: Listed(
        lambda d, i: (d.ids[i], d.x[i, 0]),
        ids=IDS.astype(np.int32),
        x=VALUES.astype("f4"),
    ),
    "named tuple": lambda: Listed(
        lambda d, i: Pair(d.ids[i], d.x[i]), ids=IDS, x=VALUES
    ),
    "nested": lambda: Listed(
        lambda d, i: ({"u": d.ids[i]}, [d.x[i], 3]), ids=IDS, x=VALUES
    ),
    "list of tuples": lambda: Listed(
        lambda d, i: d.samples[i][:2], samples=[(int(i), 1.5 * i, 7) for i in IDS]
    ),
    "a frame": lambda: Listed(
        lambda d, i: (int(d.df["user"].iloc[i]), float(d.df["rating"].iloc[i])),
        df=frame(),
    ),
    "a row of a frame": lambda: Listed(
        lambda d, i: torch.tensor(
            [d.df.iloc[i]["user"], d.df.iloc[i]["rating"]], dtype=torch.float32
        ),
        df=frame(),
    ),
    "repeats": lambda: Listed(
        lambda d, i: (torch.full((3,), int(d.ids[i])), d.x[i : i + 1].repeat(2, 0)),
        ids=IDS,
        x=VALUES,
    ),
    "computed": lambda: Listed(
        lambda d, i: (d.ids[i] * 2 + 1, np.abs(d.x[i])), ids=IDS, x=VALUES
    ),
    "no attribute": lambda: Listed(lambda d, i: torch.tensor([i * i, i])),
    "constants": lambda: Listed(
        lambda d, i: (d.ids[i], 1.0, torch.tensor([1, 0]), float("nan")), ids=IDS
    ),
    "not a number": lambda: Listed(
        lambda d, i: d.x[i], x=np.where(VALUES < 0, np.nan, VALUES)
    ),
    "big endian": lambda: Listed(lambda d, i: int(d.ids[i]), ids=IDS.astype(">i4")),
    "part of a Dataset": lambda: Subset(
        TensorDataset(torch.arange(40), torch.rand(40, 2)), [3, 30, 7, 7, 39, 0, 1]
    ),
    "all of a Dataset": lambda: Subset(
        TensorDataset(torch.arange(9)), [8, 1, 0, 2, 3, 4, 7, 5, 6]
    ),
    "several Datasets": lambda: torch.utils.data.ConcatDataset(
        [TensorDataset(torch.arange(9)), TensorDataset(torch.ones(2).long())]
    ),
}


@pytest.mark.parametrize("name", LISTED)
def test_a_dataset_without_draws_gives_its_loaders_batches(name: str) -> None:
    gives_what_the_loader_gives(LISTED[name]())
    gives_what_the_loader_gives(LISTED[name](), drop_last=True)


@pytest.mark.parametrize("name", ["tuple of tensors", "repeats", "computed"])
def test_a_users_collate_fn_is_followed(name: str) -> None:
    data = Listed(
        lambda d, i: (torch.full((3,), int(d.ids[i])), d.x[i].reshape(3, 1)),
        ids=IDS,
        x=VALUES.copy(),
    )
    rows = gives_what_the_loader_gives(
        data,
        collate_fn=lambda rows: {
            "x": torch.cat([torch.tensor(r[1]) for r in rows]),
            "u": torch.stack([r[0] for r in rows]),
        },
    )
    assert rows.names == ("x", "ids")
    assert rows.repeats == {"ids": 3}


def test_what_is_in_no_attribute_is_written_in_one_pass_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = gives_what_the_loader_gives(LISTED["computed"]())
    assert (
        "slot 0 (int64 ()), slot 1 (float64 (3,)) in no attribute of Listed: written in one pass over 11 rows"
        in (capsys.readouterr().out)
    )
    assert "all rows were compared with the Dataset's" in rows.describe()


def test_a_long_pass_is_announced_with_its_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch.object(column_search, "_LONG_S", 0.0):
        Rows.of(LISTED["computed"](), 4)
    announced, written = capsys.readouterr().out.splitlines()
    assert announced.startswith(
        "rows: slot 0, slot 1 in no attribute of Listed: writing 11 rows takes about 0.0 min, once"
    )
    assert "written in one pass" in written


def test_columns_are_the_users_tensors_themselves() -> None:
    data = LISTED["tuple of tensors"]()
    rows = Rows.of(data, 4)
    assert rows.columns["ids"].data_ptr() == data.ids.data_ptr()
    assert "ids: column `ids`" in rows.describe()


@pytest.mark.parametrize("differs", [17, 9_999, 19_999])
def test_of_two_alike_attributes_the_right_one_is_taken(differs: int) -> None:
    """20,000 rows, of which one tells the attributes apart: it is read, though few others are."""
    right = np.zeros(20_000, np.int64)
    right[differs] = 5
    for wrong in (np.zeros(20_000, np.int64), np.arange(20_000) == 3):
        data = Listed(
            lambda d, i: (int(d.right[i]), int(d.other[i])),
            20_000,
            a=wrong,
            right=right,
            other=right[::-1].copy(),
        )
        rows = gives_what_the_loader_gives(data, 1000, compared=100)
        assert "of 20,000 rows were NOT compared" in rows.describe()


def test_a_rare_change_of_a_column_is_written_and_not_taken_for_it() -> None:
    x = np.random.default_rng(0).normal(size=20_000)
    gives_what_the_loader_gives(
        Listed(lambda d, i: min(d.x[i], d.most), 20_000, x=x, most=x.max() - 1e-9), 1000
    )


def test_all_rows_are_compared_where_that_takes_few_seconds() -> None:
    """A label that is computed, and is 1 in two rows of 20,000, is no constant."""
    data = Listed(lambda d, i: (i, float(i in (777, 19_000))), 20_000)
    rows = gives_what_the_loader_gives(data, 1000)
    assert "all rows were compared" in rows.describe()


def test_ten_wrong_rows_of_a_large_dataset_are_found() -> None:
    """Ten rows next to each other differ from the attribute: no sample need have one."""
    item = np.arange(20_000) % 997
    data = Listed(
        lambda d, i: (int(d.item[i]) + (12_345 <= i < 12_355),), 20_000, item=item
    )
    with mock.patch.multiple(column_search, COMPARED=64, _SECONDS=float("inf")):
        rows = Rows.of(data, 1000)
    (given_,) = rows.columns.values()
    assert (given_.numpy() - item).nonzero()[0].tolist() == list(range(12_345, 12_355))
    assert "all rows were compared" in rows.describe()


@pytest.mark.parametrize("compared", [None, 100])
def test_rows_that_are_not_compared_are_counted_in_one_line(
    compared: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Be it that the time did not suffice, or that a number was asked for."""
    data = Listed(lambda d, i: (int(d.item[i]),), 20_000, item=np.arange(20_000) % 7)
    with mock.patch.multiple(column_search, _SECONDS=0.0, _SECONDS_PER_ROW=0.0):
        rows = Rows.of(data, 1000, compared=compared)
    (line,) = capsys.readouterr().out.splitlines()
    count = re.fullmatch(r"rows: ([\d,]+) of 20,000 rows were NOT compared .*", line)
    assert count is not None
    read = 20_000 - int(count[1].replace(",", ""))
    assert (100 if compared else 4096) <= read < (150 if compared else 9000)
    assert line.removeprefix("rows: ") in rows.describe()


class Sampled(NamedTuple):
    """A loader that Rows.of takes as it is, and how its order is told from another."""

    loader: Callable[[TensorDataset], DataLoader[Any]]
    holds: Callable[[list[list[int]]], bool]


def _third_as_often(batches: list[list[int]]) -> bool:
    """The first 500 of 1,000 rows are drawn a third as often: 250 of 1,000."""
    return 200 < sum(row < 500 for batch in batches for row in batch) < 300


SAMPLED = {
    "in order": Sampled(
        lambda data: DataLoader(data, 64),
        lambda batches: (
            batches == [[*range(i, min(i + 64, 1000))] for i in range(0, 1000, 64)]
        ),
    ),
    "shuffled, without the last": Sampled(
        lambda data: DataLoader(data, 64, shuffle=True, drop_last=True),
        lambda batches: (
            len({row for batch in batches for row in batch}) == 960
            and [*map(len, batches)] == [64] * 15
        ),
    ),
    "weighted": Sampled(
        lambda data: DataLoader(
            data,
            64,
            sampler=WeightedRandomSampler(
                [1.0] * 500 + [3.0] * 500, 1000, generator=torch.Generator()
            ),
        ),
        _third_as_often,
    ),
    "of a rank": Sampled(
        lambda data: DataLoader(
            data, 64, sampler=DistributedSampler(data, 2, 1, shuffle=False)
        ),
        lambda batches: (
            [row for batch in batches for row in batch] == [*range(1, 1000, 2)]
        ),
    ),
    "a part": Sampled(
        lambda data: DataLoader(
            data, batch_sampler=BatchSampler(SubsetRandomSampler(range(100)), 30, False)
        ),
        lambda batches: (
            sorted(row for batch in batches for row in batch) == [*range(100)]
            and len(batches) == 4
        ),
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_loaders_sampler_and_batches_are_kept(name: str) -> None:
    loader = SAMPLED[name].loader(TensorDataset(torch.arange(1000)))
    rows = Rows.of(loader, seed=3)
    batches = [batch[0].tolist() for batch in rows]
    assert SAMPLED[name].holds(batches)
    assert len(rows) == len(loader) == len(batches)
    again = Rows.of(SAMPLED[name].loader(TensorDataset(torch.arange(1000))), seed=3)
    next(iter(again))
    state = again.state_dict()
    resumed = Rows.of(SAMPLED[name].loader(TensorDataset(torch.arange(1000))), seed=3)
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in resumed] == batches[1:]
    assert ([batch[0].tolist() for batch in rows] == batches) == (
        name in ("in order", "of a rank")
    )


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        (
            {"batch_size": 8},
            "Rows.of(loader, batch_size=...): the DataLoader has its own batch_size",
        ),
        (
            {"drop_last": True},
            "Rows.of(loader, drop_last=...): the DataLoader has its own drop_last",
        ),
        (
            {"ranks": 2},
            "Rows.of(loader, ranks=...): its WeightedRandomSampler does not say whose rows are whose",
        ),
    ],
)
def test_what_a_loader_says_too_is_refused_beside_it(
    settings_: dict[str, Any], text: str
) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(9)), 3, sampler=WeightedRandomSampler([1.0] * 9, 9)
    )
    with pytest.raises(CannotAdopt, match=re.escape(text)):
        Rows.of(loader, **settings_)


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


NO_FIXED_SIZE: dict[str, Callable[[Dataset], DataLoader[Any]]] = {
    "list": lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]),
    "Endless": lambda data: DataLoader(data, 2, sampler=Endless()),
}


@pytest.mark.parametrize("kind", NO_FIXED_SIZE)
def test_a_loader_whose_batches_have_no_fixed_size_is_refused(kind: str) -> None:
    loader = NO_FIXED_SIZE[kind](TensorDataset(torch.arange(3)))
    with pytest.raises(
        CannotAdopt,
        match=re.escape(f"Rows.of(loader): its {kind} makes batches of no fixed size"),
    ):
        Rows.of(loader)


def test_a_row_of_a_sampler_that_is_not_there_is_named() -> None:
    rows = Rows.of(DataLoader(TensorDataset(torch.arange(8)), 2, sampler=[1, 99]))
    with pytest.raises(
        CannotAdopt, match="the loader's sampler gives row 99: must be 0 to 7"
    ):
        next(iter(rows))


def test_negatives_of_a_row_that_a_sampler_takes_twice_are_refused() -> None:
    data = Interactions()
    loader = DataLoader(
        data, 256, sampler=WeightedRandomSampler([1.0] * len(data), len(data))
    )
    rows = Rows.of(loader, negatives=Uniform(ITEMS, exclude=data.known))
    with pytest.raises(
        CannotAdopt, match="the loader's sampler takes a row twice in an epoch"
    ):
        next(iter(rows))


def expected_counts(
    data: Interactions, epochs: int, exclude: bool = True
) -> np.ndarray:
    counts = np.zeros(ITEMS)
    for user in data.user.tolist():
        free = np.ones(ITEMS)
        if exclude:
            free[list(data.known[user])] = 0
        counts += free / free.sum()
    return counts * NEGATIVES * epochs


def follows(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Says whether a chi-square lies within 5 standard deviations of its mean."""
    cells = expected > 0
    assert not counts[~cells].any()
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return abs(statistic - cells.sum() + 1) < 5 * np.sqrt(2 * cells.sum())


@pytest.mark.parametrize(
    ("sampler", "collate"), [("rejection", concatenated), ("setdiff", None)]
)
def test_the_second_users_dataset_gives_its_batches_and_its_law(
    sampler: str, collate: Any
) -> None:
    data = Interactions(sampler)
    law = Uniform(ITEMS, exclude=data.known, replace=sampler == "rejection")
    rows = Rows.of(data, 256, law, collate_fn=collate, shuffle=False)
    loader = DataLoader(data, batch_size=256, collate_fn=collate)
    counts, epochs, repeated = np.zeros(ITEMS, np.int64), 10, 0
    first = list(loader)
    for _ in range(epochs):
        for ours, theirs in zip(rows, first, strict=True):
            assert isinstance(ours, tuple)
            assert same([ours[0], ours[2], ours[3]], [theirs[0], theirs[2], theirs[3]])
            items = ours[1].view(-1, 1 + NEGATIVES)
            assert ours[1].dtype == theirs[1].dtype
            assert ours[1].shape == theirs[1].shape
            assert torch.equal(items[:, 0], theirs[1].view(-1, 1 + NEGATIVES)[:, 0])
            drawn = items[:, 1:].numpy()
            repeated += sum(len(set(row)) < NEGATIVES for row in drawn.tolist())
            users = ours[0].view(-1, 1 + NEGATIVES)[:, 0].tolist()
            assert not any(
                i in data.known[u]
                for u, row in zip(users, drawn.tolist(), strict=True)
                for i in row
            )
            counts += np.bincount(drawn.reshape(-1), minlength=ITEMS)
    assert follows(counts, expected_counts(data, epochs))
    assert (repeated > 0) == (sampler == "rejection")
    assert rows.repeats == {"user": 5, "context": 5}
    assert rows.names == ("user", "item", "context", "slot 3")
    assert set(rows.columns) == {"user", "item", "context"}


def test_draws_without_repeats_are_equally_likely_in_every_order() -> None:
    columns = {
        "user": torch.zeros(30_000, dtype=torch.int64),
        "item": torch.full((30_000,), 3),
    }
    law = Uniform([2, 3, 5, 7, 11, 13], exclude=("user", "item"), replace=False)
    rows = Rows(
        columns,
        lambda row: row["negatives"],
        30_000,
        negatives=law,
        draws=3,
        shuffle=False,
    )
    (drawn,) = rows
    outcomes = collections.Counter(map(tuple, drawn.tolist()))
    assert set(outcomes) == set(itertools.permutations([2, 5, 7, 11, 13], 3))
    assert follows(np.array(list(outcomes.values())), np.full(60, 500.0))


def drawn_rows(batch_size: int, **settings: Any) -> Rows:
    user, item, _ = positives()
    columns = {"user": torch.from_numpy(user), "item": torch.from_numpy(item)}
    law = Uniform(ITEMS, exclude=("user", "item"))
    return Rows(
        columns,
        lambda row: tuple(row.values()),
        batch_size,
        negatives=law,
        draws=4,
        **settings,
    )


def test_draws_are_a_function_of_seed_epoch_and_row_alone() -> None:

    def drawn(batch_size: int = 64, **settings: Any) -> dict[int, tuple[int, ...]]:
        rows = drawn_rows(batch_size, **settings)
        return {
            int(i): tuple(d)
            for s in rows.steps()
            for i, d in zip(s.indices, s.draws.tolist(), strict=True)
        }

    first = drawn()
    assert first == drawn(batch_size=100, shuffle=False)
    assert first == {**drawn(rank=0, ranks=2), **drawn(rank=1, ranks=2)}
    assert first != drawn(seed=1)


PLANTED: dict[str, tuple[str, str | None]] = {
    "no exclusion": ("are items that the law excludes", "Uniform(150, exclude=None)"),
    "by popularity": (
        "chi-square",
        'Popular(150, exclude=dataset.known, by="user", counted="item", exponent=1.0)',
    ),
    "setdiff": (
        "0 repeats within a row",
        'Uniform(150, exclude=dataset.known, by="user", replace=False)',
    ),
    "one item less": (
        "expected above the greatest that was drawn, 148",
        'Uniform(149, exclude=dataset.known, by="user")',
    ),
    "not the positive": (
        "are items that the law excludes",
        'Uniform(150, exclude=("item", "item"))',
    ),
    "sorted": ("chi-square against the index of the draw", None),
    "hard": ("chi-square against 'item'", None),
    "twelve of each row": ("equal draws between two calls of a row", None),
    "beside each other": ("chi-square against the draw before", None),
}


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(name, marks=() if index % 2 else pytest.mark.slow)
        for index, name in enumerate(PLANTED)
    ],
)
def test_a_law_that_is_not_that_of_the_draws_is_refused_with_its_p_value(
    sampler: str,
) -> None:
    """The message names what contradicts it, and the law to sign, where the package has it: as a line to paste."""
    dataset = Interactions(sampler)
    if sampler == "one item less":  # so that its positives do not show the last item
        dataset.item.clamp_(max=ITEMS - 2)
        dataset.known = known_of(dataset.user.numpy(), dataset.item.numpy())
    with pytest.raises(CannotAdopt) as caught:
        Rows.of(dataset, 64, Uniform(ITEMS, exclude=dataset.known))
    against, _, proposed = str(caught.value).partition(
        "\nFrom 24,000 draws in 6,000 calls"
    )
    text, law = PLANTED[sampler]
    assert text in against
    assert max(float(p) for p in re.findall(r"\(p=([^)]*)\)", against)) < 1e-6
    assert re.search(
        r"Interactions\.__getitem__ \(.*test_rows\.py:\d+\) draws 4 of 5 integers of item",
        against,
    )
    if law is None:
        assert "None of the laws tried fits" in proposed
        assert "__getitems__" in proposed
    else:
        assert proposed.endswith(
            f"\n    rows = Rows.of(dataset, batch_size=64, negatives={law})"
        )


def test_without_a_law_draws_are_refused_with_the_line_to_paste() -> None:
    dataset = Interactions()
    with pytest.raises(CannotAdopt, match="by a law that must be signed") as caught:
        Rows.of(dataset, batch_size=64)
    *_, cannot, sign, line = str(caught.value).splitlines()
    assert (
        cannot
        == "  cannot be seen by any test of draws: what changes with the time, the epoch or the worker"
    )
    assert sign.endswith("If that is your law, sign it:")
    names = {"Rows": Rows, "Uniform": Uniform, "dataset": dataset}
    exec(line.strip(), names)
    assert (
        "uniform, with repeats in a row, over the ids 0 to 149, without the items that dataset.known has"
        in (
            names["rows"].describe()  # type: ignore[attr-defined]
        )
    )


@pytest.mark.parametrize(
    ("law", "text"),
    [
        (Uniform(ITEMS), "are of exclude=dataset.known"),
        (
            Uniform(ITEMS + 20, exclude=("user", "item")),
            "above the greatest that was drawn, 149",
        ),
        (
            Uniform(range(2, ITEMS), exclude=("user", "item")),
            "are not among the ids 2 to 149",
        ),
        (
            Uniform(ITEMS, exclude=("user", "item"), replace=False),
            "repeats within a row",
        ),
        (
            Popular(ITEMS, exclude=("user", "item"), counted="item"),
            "chi-square by popularity",
        ),
    ],
)
def test_a_wrong_law_is_refused_for_right_draws(
    law: Uniform | Popular, text: str
) -> None:
    with pytest.raises(CannotAdopt, match=re.escape(text)):
        Rows.of(Interactions(), 64, law)


def test_check_returns_the_evidence_and_takes_nothing() -> None:
    answer = Rows.of(Interactions(), 64, "check")
    assert isinstance(answer, Evidence)
    assert "no draw is one that the law excludes; without the exclusion" in str(answer)
    with pytest.raises(CannotAdopt, match="draws nothing"):
        Rows.of(LISTED["dict"](), 4, "check")


def test_what_the_draws_cannot_show_is_stated() -> None:
    """Of a million items, 24,000 draws hit no known pair, no item twice, and the ends of the range by chance alone."""
    user, item, _ = positives()

    def row(data: Any, index: int) -> tuple[int, Tensor]:
        return int(data.user[index]), torch.tensor(
            [int(data.item[index]), *np.random.randint(0, 10**6, 4).tolist()]
        )

    data = Listed(row, len(user), user=user, item=item * 6700)
    answer = str(Rows.of(data, 64, "check"))
    for text in (
        "a range too long or short",
        "whether known pairs are left out",
        "whether a row's draws can repeat",
    ):
        assert (
            f"cannot be seen in 24,000 draws{' of' if 'range' in text else ''}"
            in answer
        )
        assert text in answer or "pairs" in text
    rows = Rows.of(data, 64, Uniform(10**6, exclude=("user", "item")))
    assert (
        "cannot be seen in 24,000 draws: whether known pairs are left out"
        in rows.describe()
    )


def test_draws_of_a_single_item_repeat_for_certain() -> None:
    draws = NegativeDraws(Uniform(1), {"user": torch.arange(50)}, None, 4)
    ones = np.ones((100, 4), np.int64)
    findings = LawTests(draws, np.arange(50).repeat(2), ones).repeats()
    assert p_values(findings) == [1.0, 1.0]


def test_popular_draws_are_drawn_by_popularity() -> None:
    data = Interactions("by popularity")
    rows = Rows.of(
        data, 64, Popular(ITEMS, exclude=data.known, counted="item", exponent=1.0)
    )
    counts = np.zeros(ITEMS, np.int64)
    for _ in range(20):
        for drawn in rows.steps():
            counts += np.bincount(drawn.draws.reshape(-1).numpy(), minlength=ITEMS)
    expected = np.zeros(ITEMS)
    for user in data.user.tolist():
        free = data.share.copy()
        free[list(data.known[user])] = 0
        expected += free / free.sum()
    assert follows(counts, expected * NEGATIVES * 20)


def test_counts_that_are_not_those_of_the_known_pairs_weigh_items() -> None:
    nothing = np.zeros(0, np.int64)
    sampler = PopularityNegatives(
        3, nothing, nothing, exponent=1.0, smoothing=1e-9, counts=np.array([0, 1, 2, 5])
    )
    assert np.exp(
        sampler.log_q(np.zeros(3, np.int64), np.arange(1, 4))
    ) == pytest.approx([0.125, 0.25, 0.625])


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        ([4, 9, 10, 300], [4, 9, 10, 300]),
        ("item", [5, 7, 11]),
        (range(3, 6), [3, 4, 5]),
        (torch.tensor([8, 6]), [6, 8]),
    ],
)
def test_ids_need_not_be_a_range(items: Any, ids: list[int]) -> None:
    columns = {"user": torch.tensor([-5, 10**12, 3]), "item": torch.tensor([5, 7, 11])}
    rows = Rows(
        columns,
        lambda row: row["negatives"],
        3,
        negatives=Uniform(items),
        draws=100,
        shuffle=False,
    )
    (drawn,) = rows
    assert set(drawn.reshape(-1).tolist()) == set(ids)


def test_a_triple_of_user_positive_and_negative_has_a_law_too() -> None:
    base = Interactions()
    data = Listed(
        lambda d, i: (
            int(d.user[i]),
            int(d.item[i]),
            rejection(ITEMS)(d, i, d.known[int(d.user[i])])[0],
        ),
        len(base),
        user=base.user,
        item=base.item,
        known=dict(base.known),
    )
    rows = Rows.of(data, 64, Uniform(ITEMS, exclude=data.known))
    user, item, negative = next(iter(rows))
    assert negative.shape == (64,)
    assert not any(
        n in data.known[u]
        for u, n in zip(user.tolist(), negative.tolist(), strict=True)
    )
    assert all(
        i in data.known[u] for u, i in zip(user.tolist(), item.tolist(), strict=True)
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_each_row_once_in_an_order_of_its_own(drop_last: bool) -> None:
    data = TensorDataset(torch.arange(107))
    rows = Rows.of(data, 10, seed=3, drop_last=drop_last)
    epochs = [torch.cat([batch[0] for batch in rows]).tolist() for _ in range(3)]
    assert len(rows) == (10 if drop_last else 11)
    assert all(
        len(epoch) == len(set(epoch)) == (100 if drop_last else 107) for epoch in epochs
    )
    assert epochs[0] != epochs[1] != epochs[2]
    assert (
        epochs[0]
        == torch.cat(
            [batch[0] for batch in Rows.of(data, 10, seed=3, drop_last=drop_last)]
        ).tolist()
    )


@pytest.mark.parametrize("stop", [0, 1, 7, 24])
def test_a_resumed_run_equals_one_that_never_stopped(stop: int) -> None:
    whole, first = drawn_rows(64), drawn_rows(64)
    expected = [batch for _ in range(3) for batch in whole]
    seen = list(first)
    for batch, _ in zip(first if stop else [], range(stop), strict=False):
        seen.append(batch)
        if len(seen) == 24 + stop:
            break
    second = drawn_rows(64)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    seen += list(second)
    while len(seen) < len(expected):
        seen += list(second)
    assert len(seen) == len(expected)
    assert all(same(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))


def test_a_state_of_other_rows_is_refused() -> None:
    rows = Rows.of(TensorDataset(torch.arange(20)), 4)
    for other in (
        Rows.of(TensorDataset(torch.arange(21)), 4),
        Rows.of(TensorDataset(torch.arange(20)), 4, seed=9),
    ):
        with pytest.raises(
            ValueError, match=r"the state has (num_rows=21|seed=9), these rows"
        ):
            rows.load_state_dict(other.state_dict())


@settings(max_examples=60)
@given(
    rows=st.integers(1, 90),
    ranks=st.integers(1, 5),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_row_is_on_one_rank_and_all_take_equal_steps(
    rows: int, ranks: int, size: int, drop_last: bool, seed: int
) -> None:
    def of_rank(rank: int) -> list[list[int]]:
        made = Rows(
            {"x": torch.arange(rows)},
            lambda row: row["x"],
            size,
            rank=rank,
            ranks=ranks,
            drop_last=drop_last,
            seed=seed,
        )
        batches = [batch.tolist() for batch in made]
        assert len(batches) == len(made)
        return batches

    if rows < ranks or (drop_last and rows < ranks * size):
        with pytest.raises(ValueError, match=f"{rows} rows are not a batch"):
            of_rank(0)
        return
    every = [of_rank(rank) for rank in range(ranks)]
    assert len({len(batches) for batches in every}) == 1
    seen = sorted(row for batches in every for batch in batches for row in batch)
    assert all(1 <= len(batch) <= size + 1 for batches in every for batch in batches)
    if drop_last:
        assert len(seen) == len(set(seen)) == rows // (ranks * size) * ranks * size
    else:
        assert seen == list(range(rows))


class Drawing(Dataset):
    """Draws from generators of its own, two steps away, and from all global ones."""

    def __init__(self) -> None:
        self.user = torch.arange(500) % 7
        self.generator = np.random.default_rng(1)
        self.nested = {
            "torch": torch.Generator().manual_seed(2),
            "python": random.Random(3),
            "old": np.random.RandomState(4),
        }
        self.empty: dict[int, set[int]] = collections.defaultdict(set)

    def __len__(self) -> int:
        return 500

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        assert not self.empty[row]
        torch.rand(1), random.random(), np.random.rand()
        some = [
            self.generator.integers(50),
            int(torch.randint(50, (1,), generator=self.nested["torch"])),
        ]
        return int(self.user[row]), torch.tensor(
            [*some, self.nested["python"].randrange(50), self.nested["old"].randint(50)]
        )

    def state(self) -> list[Any]:
        old, global_ = self.nested["old"].get_state(), np.random.get_state()
        return [
            self.generator.bit_generator.state,
            self.nested["torch"].get_state().tolist(),
            self.nested["python"].getstate(),
            [
                value.tolist() if isinstance(value, np.ndarray) else value
                for value in (*old, *global_)
            ],
            torch.get_rng_state().tolist(),
            random.getstate(),
            dict(self.empty),
        ]


def test_the_dataset_and_all_generators_are_afterwards_as_before() -> None:
    data = Drawing()
    before = data.state()
    rows = Rows.of(data, 64, Uniform(50))
    assert data.state() == before
    next(iter(rows))
    assert data.state()[:-1] == before[:-1]
    # its defaultdict has what a DataLoader's look-ups leave there
    before = data.state()
    with pytest.raises(CannotAdopt):
        Rows.of(data, 64)
    assert data.state() == before


class Counting(Listed):
    def __getitem__(self, row: int) -> Any:
        self.calls = self.calls + 1
        return row


class Caching(Listed):
    def __getitem__(self, row: int) -> Any:
        if row not in self.cache:
            self.cache[row] = random.randrange(10**6)
        return self.cache[row]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


class NoLength:
    def __getitem__(self, row: int) -> int:
        return row


def read_file(data: Any, row: int) -> int:
    with open(data.path) as stream:
        return int(stream.read()) + row


def with_features(table: Tensor) -> tuple[Tensor, Tensor]:
    """Two drawn items, and what a table has for them."""
    items = torch.randint(len(table), (2,))
    return items, table[items]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one row": (
        lambda _: TensorDataset(torch.ones(1)),
        "TensorDataset has 1 row: columns cannot be told from constants",
    ),
    "no row": (lambda _: TensorDataset(torch.ones(0)), "TensorDataset has 0 rows"),
    "a stream": (
        lambda _: Stream(),
        "Stream has no rows by number (an IterableDataset?)",
    ),
    "no length": (lambda _: NoLength(), "NoLength has no __len__"),
    "shapes": (
        lambda _: Listed(lambda d, i: torch.ones(i % 2 + 1)),
        "slot 0 of row 1 is float32 (2,), that of the row before float32 (1,)",
    ),
    "a rare shape": (
        lambda _: Listed(
            lambda d, i: torch.tensor(d.x[i]),
            9000,
            x=[*([1, i] for i in range(8999)), [3]],
        ),
        "slot 0 of row 8999 is int64 (1,), that of the row before int64 (2,)",
    ),
    "dtypes": (
        lambda _: Listed(lambda d, i: i if i != 6 else 0.5),
        "slot 0 of row 6 is float64 ()",
    ),
    "structure": (
        lambda _: Listed(lambda d, i: (i,) * (1 + (i == 4))),
        "returns rows of different structure: row 4",
    ),
    "text": (lambda _: Listed(lambda d, i: (i, "abc")), "returns a str in slot 1"),
    "None": (lambda _: Listed(lambda d, i: {"u": i, "v": None}), "returns a "),
    "nothing": (lambda _: Listed(lambda d, i: ()), "returns a row without a value"),
    "noise": (
        lambda _: Listed(lambda d, i: (i, torch.rand(2))),
        "returns rows that change from call to call: slot 1 (float32 (2,)) is noise, dropout or augmentation",
    ),
    "rare noise": (
        lambda _: Listed(
            lambda d, i: (i, d.x[i] + (random.random() < 0.02)), 3000, x=np.zeros(3000)
        ),
        "returns rows that change from call to call",
    ),
    "two drawn": (
        lambda _: Listed(lambda d, i: (np.random.randint(9), np.random.randint(9))),
        "draws more than one slot: slot 0 and slot 1 change from call to call",
    ),
    "random places": (
        lambda _: Listed(
            lambda d, i: (lambda p: (p, (p == 0).float()))(torch.randperm(4))
        ),
        "slot 1 (float32 (4,)) depends on the drawn item, slot 0: leave it out of the rows",
    ),
    "features of the drawn item": (
        lambda _: Listed(
            lambda d, i: (i, *with_features(d.genres)), 200, genres=torch.rand(50, 3)
        ),
        "slot 2 (float32 (2, 3)) depends on the drawn item, slot 1: leave it out of the rows, keep its table as a",
    ),
    "a number of the drawn item": (
        lambda _: Listed(
            lambda d, i: (*with_features(d.year), i), 200, year=torch.arange(50) % 7
        ),
        "slot 1 (int64 (2,)) depends on the drawn item, slot 0",
    ),
    "a row of each instance": (
        lambda _: Listed(
            lambda d, i: (
                d.user[i // 5],
                d.item[i // 5] if i % 5 == 0 else np.random.randint(50),
            ),
            500,
            user=np.arange(100) % 9,
            item=np.arange(100) % 50,
        ),
        "draws slot 1 in some rows and not in others, such as row ",
    ),
    "files": (lambda path: Listed(read_file, path=path), "reads files, such as '"),
    "a counter": (lambda _: Counting(lambda d, i: i, calls=0), "changes self.calls"),
    "a cache": (lambda _: Caching(lambda d, i: i, cache={}), "changes self.cache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_columns_is_refused_by_name(name: str, tmp_path: Any) -> None:
    (tmp_path / "number").write_text("3")
    make, text = REFUSED[name]
    dataset = make(str(tmp_path / "number"))
    before = dict(vars(dataset)) if hasattr(dataset, "__dict__") else {}
    copies = {
        key: dict(value) for key, value in before.items() if isinstance(value, dict)
    }
    with pytest.raises(CannotAdopt, match=re.escape(text)) as caught:
        Rows.of(dataset, 4)
    if isinstance(dataset, Listed):
        assert re.search(r"__getitem__ \(.*test_rows\.py:\d+\)", str(caught.value))
        assert {key: vars(dataset)[key] for key in before} == before
        assert all(vars(dataset)[key] == value for key, value in copies.items())
    if name in ("shapes", "noise", "two drawn", "files", "a counter"):
        assert "__getitems__" in str(caught.value)


@pytest.mark.parametrize(
    ("collate", "text"),
    [
        (
            lambda rows: torch.stack([r[0] for r in rows]) * 2,
            "tensor 0 of its batch is no slot of the rows",
        ),
        (
            lambda rows: [r[0] for r in rows],
            "collate_fn returns another structure for 3 rows",
        ),
        (
            lambda rows: (torch.stack([r[0] for r in rows]), len(rows)),
            "tensor 1 of its batch is no slot",
        ),
    ],
)
def test_a_collate_fn_that_makes_something_new_is_refused(
    collate: Any, text: str
) -> None:
    with pytest.raises(CannotAdopt, match=re.escape(text)):
        Rows.of(LISTED["tuple of tensors"](), 4, collate_fn=collate)


def test_a_dataset_that_is_written_anew_is_noticed_at_the_next_epoch() -> None:
    data = Listed(
        lambda d, i: (d.user[i], d.filled[i]),
        200,
        user=np.arange(200),
        filled=np.arange(200) % 7,
    )
    rows = Rows.of(data, 10)
    list(rows)
    data.filled = np.arange(200) % 8
    with pytest.raises(CannotAdopt, match=r"no longer those that Rows\.of read"):
        list(rows)


@pytest.mark.parametrize(
    ("law", "text"),
    [
        ("uniform", "negatives='uniform': must be Uniform"),
        (Uniform(0), "items=0: must be a number of 1 or more"),
        (Uniform([]), "items=[]"),
        (Uniform([0.5]), "items is an array of float64 (1,)"),
        (
            Uniform(ITEMS, exclude=("user", "thing")),
            "exclude='thing': must be a column of one integer a row: user, item; if your Dataset has no attribute "
            "equal to it, set self.thing = ...",
        ),
        (Uniform(ITEMS, exclude=("user", "context")), "exclude='context'"),
        (Uniform(ITEMS, exclude=[1, 2]), "exclude is a list: must be two names"),  # type: ignore[arg-type]
        (
            Uniform(ITEMS, exclude={"a": {1}}),
            "exclude must map ids to collections of ids",
        ),
        (Uniform(ITEMS, exclude={1: 2}, by="user"), "exclude must map ids"),  # type: ignore[dict-item]
        (
            Uniform(ITEMS, exclude={0: {1}}),
            "no column could hold its keys: name the column, by='user'",
        ),
        (Uniform(ITEMS, exclude={0: {1}}, by="film"), "by='film': must be a column"),
        (
            Uniform(5, exclude={u: {0, 1, 2, 3, 4} for u in range(USERS)}),
            "has 0 items left to draw from (5 items",
        ),
        (Popular(ITEMS, counted="item", replace=False), "Popular(replace=False)"),
        (Popular(ITEMS), "counted='': must be a column"),
    ],
)
def test_a_law_that_does_not_fit_the_columns_is_refused(law: Any, text: str) -> None:
    with (
        pytest.raises(CannotAdopt, match=re.escape(text)),
        mock.patch.multiple(evidence, **FEW),
    ):
        Rows.of(Interactions(), 64, law)


class Computed(Interactions):
    """Its users stand in no attribute."""

    calls: ClassVar[list[int]] = []

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        self.calls.append(row)
        user, *rest = super().__getitem__(row)
        return user + 1, *rest


@pytest.mark.parametrize(
    ("law", "text"),
    [
        (
            Uniform(ITEMS, exclude=("user", "item")),
            "exclude='user': must be a column of one integer a row: item, slot 0; ",
        ),
        (Uniform(ITEMS // 2), "are not among the ids 0 to 74"),
        ("uniform", "negatives='uniform': must be Uniform"),
    ],
)
def test_a_law_is_refused_before_all_rows_are_written(law: Any, text: str) -> None:
    data = Computed(rows=3000)
    Computed.calls.clear()
    with (
        pytest.raises(CannotAdopt, match=re.escape(text)),
        mock.patch.multiple(evidence, **FEW),
    ):
        Rows.of(data, 64, law, collate_fn=concatenated, compared=100)
    assert len(set(Computed.calls)) < 1000


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"batch_size": 0}, "batch_size=0: must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"ranks": 0}, "ranks=0"),
        ({"rank": 3, "ranks": 3}, "rank=3: must be 0 to ranks - 1 = 2"),
        ({"compared": 0}, "compared=0"),
    ],
)
def test_a_number_out_of_range_is_refused(settings_: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Rows.of(TensorDataset(torch.arange(20)), **{"batch_size": 4, **settings_})


def test_a_law_for_a_dataset_that_draws_nothing_is_refused() -> None:
    with pytest.raises(CannotAdopt, match="draws nothing; leave negatives out"):
        Rows.of(TensorDataset(torch.arange(20)), 4, Uniform(3))


def test_rows_of_the_users_own_columns_as_the_page_shows_it() -> None:
    data = Interactions()
    columns = {"user": data.user, "item": data.item, "context": data.context}
    make = on_the_page("def make(row)")["make"]
    law = Uniform(ITEMS, exclude=("user", "item"))
    theirs = Rows.of(data, 64, law, collate_fn=concatenated)
    for ours, other in zip(
        Rows(columns, make, 64, negatives=law, draws=4), theirs, strict=True
    ):
        assert same(ours, other)
    with pytest.raises(ValueError, match="draws=0"):
        Rows(columns, make, 64, negatives=law)
    declared = Rows(columns, make, 64, negatives=law, draws=4, repeats=(5, 1, 5, 1))
    places = [theirs.names.index(name) for name in theirs.repeats]
    assert [declared.names.index(name) for name in declared.repeats] == places == [0, 2]
    assert list(declared.repeats.values()) == list(theirs.repeats.values()) == [5, 5]
    # of the items, which hold a negative, and of another number of tensors
    for wrong in ((5, 5, 5, 1), (4, 1, 5, 1), (5, 1, 5)):
        with pytest.raises(ValueError, match=re.escape(f"repeats={list(wrong)}")):
            Rows(columns, make, 64, negatives=law, draws=4, repeats=wrong)
    with pytest.raises(ValueError, match=r"columns have \{'a': 2, 'b': 3\} rows"):
        Rows({"a": torch.ones(2), "b": torch.ones(3)}, make, 1)


PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"


def on_the_page(start: str, **more: Any) -> dict[str, Any]:
    """Runs the first definition of the page's example that begins with ``start``."""
    example = PAGE.read_text().partition(f"```py\n{start}")[2].partition("\n\n\n")[0]
    names = {
        "torch": torch,
        "Interactions": Interactions,
        "NEGATIVES": NEGATIVES,
        **more,
    }
    exec(start + example, names)
    return names


def test_the_pages_dataset_of_whole_batches_has_the_law_of_the_users() -> None:
    data = on_the_page("class Batched(Interactions)")["Batched"]()
    batched = DataLoader(data, batch_size=64, collate_fn=lambda batch: batch)
    counts = np.zeros(ITEMS, np.int64)
    first = list(DataLoader(Interactions(), 64, collate_fn=concatenated))
    for _ in range(10):
        for ours, theirs in zip(batched, first, strict=True):
            assert same([ours[0], ours[2], ours[3]], [theirs[0], theirs[2], theirs[3]])
            assert ours[1].dtype == theirs[1].dtype
            items = ours[1].view(-1, 1 + NEGATIVES)
            assert torch.equal(items[:, 0], theirs[1].view(-1, 1 + NEGATIVES)[:, 0])
            counts += np.bincount(items[:, 1:].reshape(-1).numpy(), minlength=ITEMS)
    assert follows(counts, expected_counts(data, 10))


def test_the_pages_dataset_with_a_row_for_each_instance_draws_what_is_not_known() -> (
    None
):
    batched = on_the_page("class Batched(Interactions)")
    data = on_the_page("class Instances(Batched)", **batched)["Instances"]()
    user, item, context, label = data.__getitems__(range(len(data)))
    assert same(user, data.user.repeat_interleave(5))
    assert same(context, data.context.repeat_interleave(5, dim=0))
    assert same(item[::5], data.item)
    assert label.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0] * len(data.user)
    drawn = zip(user[label == 0].tolist(), item[label == 0].tolist(), strict=True)
    assert not any(number in data.known[key] for key, number in drawn)


def test_a_batch_is_made_by_torch_ops_that_a_captured_step_can_hold() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    data = Interactions()
    rows = Rows.of(
        data, 64, Uniform(ITEMS, exclude=data.known), collate_fn=concatenated
    )
    names, tensors = list(rows.tensors), list(rows.tensors.values())

    def assembled(*values: Tensor) -> tuple[Tensor, ...]:
        return rows.assemble(
            values[0], values[1], dict(zip(names, values[2:], strict=True))
        )

    first, second, *_ = rows.steps()
    graph = make_fx(assembled, tracing_mode="fake")(
        first.indices, first.draws, *tensors
    )
    assert same(
        graph(second.indices, second.draws, *tensors),
        rows.assemble(second.indices, second.draws),
    )
    users = rows.assemble(second.indices, second.draws)[rows.names.index("user")]
    assert torch.equal(
        users.view(-1, rows.repeats["user"])[:, 0], data.user[second.indices]
    )


KINDS: dict[
    str,
    Callable[
        [np.random.Generator, int], tuple[dict[str, Any], Callable[[Any, int], Any]]
    ],
] = {
    "ids": lambda rng, n: ({"a": rng.integers(0, 9, n)}, lambda d, i: int(d.a[i])),
    "tensor": lambda rng, n: (
        {"b": torch.from_numpy(rng.normal(size=(n, 2)))},
        lambda d, i: d.b[i],
    ),
    "cast": lambda rng, n: ({"c": rng.normal(size=n)}, lambda d, i: np.float32(d.c[i])),
    "list": lambda rng, n: (
        {"e": [(int(v), 0.5) for v in rng.integers(0, 3, n)]},
        lambda d, i: d.e[i][0],
    ),
    "rare": lambda rng, n: (
        {"f": rng.integers(0, 99, n)},
        lambda d, i: 1.0 * (d.f[i] == 98),
    ),
    "clipped": lambda rng, n: (
        {"g": rng.normal(size=n)},
        lambda d, i: max(d.g[i], -2.0),
    ),
    "constant": lambda rng, n: ({}, lambda d, i: torch.tensor([1.0, 0.0])),
    "repeat": lambda rng, n: (
        {"h": rng.integers(0, 9, n)},
        lambda d, i: torch.full((3,), int(d.h[i])),
    ),
    "mixed": lambda rng, n: (
        {"k": rng.integers(0, 9, n)},
        lambda d, i: torch.tensor([int(d.k[i]), i]),
    ),
    "computed": lambda rng, n: (
        {"m": rng.integers(0, 9, n)},
        lambda d, i: int(d.m[i]) ** 2 % 7,
    ),
    "neighbour": lambda rng, n: (
        {"o": rng.integers(0, 9, n)},
        lambda d, i: int(d.o[i - 1]),
    ),
    "ragged": lambda rng, n: ({}, lambda d, i: torch.ones(1 + i % 3)),
    "noise": lambda rng, n: ({}, lambda d, i: torch.rand(())),
    "drawn": lambda rng, n: ({}, lambda d, i: np.random.randint(0, 6)),
    "rarely drawn": lambda rng, n: ({}, lambda d, i: int(random.random() < 0.3)),
}
STEADY = set(KINDS) - {"ragged", "noise", "drawn", "rarely drawn"}


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True),
    rows=st.integers(2, 150),
    seed=st.integers(0, 99),
    dict_=st.booleans(),
)
def test_generated_datasets_are_equal_or_refused(
    kinds: list[str], rows: int, seed: int, dict_: bool
) -> None:
    rng = np.random.default_rng(seed)
    made = [KINDS[kind](rng, rows) for kind in kinds]
    attributes = {
        name: value for attributes, _ in made for name, value in attributes.items()
    }

    def row(data: Any, index: int) -> Any:
        values = [make(data, index) for _, make in made]
        return dict(zip(kinds, values, strict=True)) if dict_ else tuple(values)

    data = Listed(row, rows, **attributes)
    if set(kinds) <= STEADY:
        gives_what_the_loader_gives(data, 16)
        return
    with pytest.raises(CannotAdopt), mock.patch.multiple(evidence, **FEW):
        Rows.of(data, 16)
