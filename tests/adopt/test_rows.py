"""Rows: declared columns give the batches of the user's DataLoader, every row compared, or they are refused."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from torchrec_ext.adopt import CannotAdopt, Popular, Rows, Uniform
from torchrec_ext.adopt.rows.law import NegativeDraws
from torchrec_ext.adopt.rows.rows import RowsOnDevice

USERS, ITEMS, CONTEXT, NEGATIVES = 40, 150, 3, 4
TAKEN = ("user", "item")


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


class Interactions(Dataset):
    """The second user's Dataset: a row is a positive with four negatives."""

    def __init__(self, rows: int = 1500) -> None:
        user, item, context = positives(rows)
        self.items = ITEMS
        self.user = torch.from_numpy(user)
        self.item = torch.from_numpy(item)
        self.context = torch.from_numpy(context)
        self.known = collections.defaultdict(set)
        for u, i in zip(user.tolist(), item.tolist(), strict=True):
            self.known[u].add(i)
        self.share = np.bincount(item, minlength=ITEMS) / rows

    @property
    def columns(self) -> dict[str, Tensor]:
        return {"user": self.user, "item": self.item, "context": self.context}

    def __len__(self) -> int:
        return len(self.user)

    def draw(self, user: int) -> list[int]:
        rest = np.setdiff1d(np.arange(self.items), np.fromiter(self.known[user], int))
        return np.random.choice(rest, NEGATIVES).tolist()

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        user = int(self.user[row])
        k = 1 + NEGATIVES
        return (
            torch.full((k,), user),
            torch.tensor([int(self.item[row]), *self.draw(user)]),
            self.context[row].repeat(k, 1),
            torch.tensor([1.0] + [0.0] * NEGATIVES),
        )


def concatenated(rows: list[Any]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def uniform(**more: Any) -> Uniform:
    return Uniform(ITEMS, draws=NEGATIVES, exclude=TAKEN, **more)


def declared(data: Interactions, batch_size: int = 64, **more: Any) -> Rows:
    return Rows(data.columns, batch_size, **{"negatives": uniform(), **more})


def loader_of(data: Any, batch_size: int = 64, **more: Any) -> DataLoader[Any]:
    how = {"shuffle": True, "collate_fn": concatenated, **more}
    return DataLoader(data, batch_size, **how)


def same(left: Any, right: Any) -> bool:
    """Equal to the bit, in values, shapes and dtypes; a tuple is as good as a list."""
    ours, theirs = pytree.tree_leaves(left), pytree.tree_leaves(right)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def expected_counts(data: Interactions, epochs: int) -> np.ndarray:
    counts = np.zeros(ITEMS)
    for user in data.user.tolist():
        free = np.ones(ITEMS)
        free[list(data.known[user])] = 0
        counts += free / free.sum()
    return counts * NEGATIVES * epochs


def follows(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Says whether a chi-square lies within 5 standard deviations of its mean."""
    cells = expected > 0
    assert not counts[~cells].any()
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return abs(statistic - cells.sum() + 1) < 5 * np.sqrt(2 * cells.sum())


def test_the_second_users_dataset_gives_its_batches_and_its_distribution() -> None:
    data = Interactions()
    rows = declared(data, 256, shuffle=False)
    loader = loader_of(data, 256, shuffle=False)
    rows.check(loader)
    counts, epochs = np.zeros(ITEMS, np.int64), 10
    first = list(loader)
    for _ in range(epochs):
        for ours, theirs in zip(rows, first, strict=True):
            assert isinstance(ours, tuple)
            assert same([ours[0], ours[2], ours[3]], [theirs[0], theirs[2], theirs[3]])
            assert ours[1].dtype == theirs[1].dtype
            items = ours[1].view(-1, 1 + NEGATIVES)
            assert torch.equal(items[:, 0], theirs[1].view(-1, 1 + NEGATIVES)[:, 0])
            drawn = items[:, 1:].numpy()
            counts += np.bincount(drawn.reshape(-1), minlength=ITEMS)
    assert follows(counts, expected_counts(data, epochs))
    # A step looks equal ids up once.
    assert rows.names == ("user", "item", "context", "label")
    assert rows.repeats == {"user": 5, "context": 5}


def test_rows_without_negatives_are_the_columns() -> None:
    columns = {"a": np.arange(20), "b": torch.rand(20, 2)}
    data = TensorDataset(torch.arange(20), columns["b"])
    rows = Rows(columns, 4)
    rows.check(DataLoader(data, 4, shuffle=True))
    first, second, again, other = (
        torch.cat([batch[0] for batch in each]).tolist()
        for each in (rows, rows, Rows(columns, 4), Rows(columns, 4, seed=1))
    )
    assert sorted(first) == list(range(20))
    assert first == again
    assert len({tuple(each) for each in (first, second, other)}) == 3
    assert rows.repeats == {}


@pytest.mark.parametrize("rows", [1500, 4096, 4097])
def test_check_compares_and_leaves_generators_as_they_were(rows: int) -> None:
    data = Interactions(rows)
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    said = declared(data).check(loader_of(data))
    assert said.startswith(f"all {rows:,} rows equal those of Interactions")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


class Edited(Interactions):
    """The user's Dataset with a rule of its own for some rows."""

    rule: ClassVar[Callable[[int, list[Tensor]], None]]

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        values = list(super().__getitem__(row))
        type(self).rule(row, values)
        return tuple(values)


class Labelled(Dataset):
    """Many rows of an item and a label, which is 1 in five of them."""

    def __init__(self, rows: int) -> None:
        self.item = np.random.default_rng(0).integers(0, 1000, rows)

    def __len__(self) -> int:
        return len(self.item)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([float(row % 40_000 == 7) for row in rows])
        return torch.from_numpy(self.item[rows]), labels

    def rows(self) -> Rows:
        zeros = np.zeros(len(self.item), np.float32)
        return Rows({"item": self.item, "label": zeros}, 256)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self, 256, shuffle=True, collate_fn=lambda batch: batch)


def test_a_difference_in_a_few_rows_of_many_is_refused() -> None:
    """4,096 compared rows called themselves equal, and trained on the wrong ones."""
    data = Labelled(200_000)
    with pytest.raises(CannotAdopt, match="label of row 7: the loader gives 1"):
        data.rows().check(data.loader())


def items_changed(by: Callable[[Tensor], None]) -> Callable[[int, list[Tensor]], None]:
    def rule(row: int, values: list[Tensor]) -> None:
        if row == 900:
            by(values[1])

    return rule


EDITS: dict[str, tuple[Callable[[int, list[Tensor]], None], str]] = {
    "another positive": (
        items_changed(lambda item: item[:1].add_(1)),
        "item of row 900: the loader gives",
    ),
    "an excluded item": (
        items_changed(lambda item: item[3:4].copy_(item[:1])),
        "which these negatives never are; correct negatives=",
    ),
    "an item that is not there": (
        items_changed(lambda item: item[4:].fill_(ITEMS)),
        "the loader drew 150, which these negatives never are",
    ),
    "a repeat of the context": (
        lambda row, values: values[2][3].add_(row == 1499),
        "context of row 1499: the loader gives",
    ),
    "another dtype": (
        lambda row, values: values.__setitem__(0, values[0].int()),
        "user: the loader gives torch.int32 (7500,), Rows torch.int64",
    ),
    "a tensor less": (
        lambda row, values: values.pop(2),
        "a batch of the loader has 3 tensors",
    ),
    "noise": (
        lambda row, values: values[2].add_(torch.rand(1)),
        "context of row 0: the loader gives",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_value_that_is_another_is_refused_with_its_row(name: str) -> None:
    rule, text = EDITS[name]
    data = type("Mine", (Edited,), {"rule": staticmethod(rule)})()
    with pytest.raises(CannotAdopt, match=re.escape(text)) as refused:
        declared(data).check(loader_of(data))
    assert len(str(refused.value)) <= 200


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ({"batch_size": 65}, "batch_size is 65, that of these rows 64"),
        ({"shuffle": False}, "shuffle=False, these rows shuffle=True"),
        ({"drop_last": True}, "drop_last=True, these rows drop_last=False"),
        (
            {"sampler": WeightedRandomSampler([1.0] * 1500, 1500), "shuffle": None},
            "the loader's WeightedRandomSampler chooses rows",
        ),
        (
            {"sampler": RandomSampler(range(1500), replacement=True), "shuffle": None},
            "the loader's RandomSampler chooses rows",
        ),
        (
            {"sampler": DistributedSampler(range(1500), 2, 0), "shuffle": None},
            "the loader's DistributedSampler chooses rows",
        ),
        (
            {
                "batch_sampler": BatchSampler(RandomSampler(range(1500)), 64, False),
                "shuffle": None,
                "batch_size": 1,
            },
            "batch_size is None, that of these rows 64",
        ),
        ({"collate_fn": default_collate}, "have collate_fn join rows by torch.cat"),
    ],
)
def test_what_the_loader_says_is_taken_or_refused(
    loader: dict[str, Any], text: str
) -> None:
    data = Interactions()
    with pytest.raises(CannotAdopt, match=re.escape(text)) as refused:
        declared(data).check(loader_of(data, **loader))
    assert len(str(refused.value)) <= 200


def test_a_dataset_of_other_rows_and_one_without_numbers_are_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    data = Interactions()
    with pytest.raises(
        CannotAdopt, match="Subset has 100 rows, the columns 1,500: give columns"
    ):
        declared(data).check(loader_of(Subset(data, range(100))))
    with pytest.raises(CannotAdopt, match="Stream has no rows by number"):
        declared(data).check(DataLoader(Stream(), 64))


class Instances(Interactions):
    """A row for each instance, whose number decides between the positive and a negative."""

    def __len__(self) -> int:
        return 5 * len(self.user)

    def __getitem__(self, row: int) -> Any:
        user = int(self.user[row // 5])
        item = self.draw(user)[0] if row % 5 else int(self.item[row // 5])
        return user, item, self.context[row // 5], np.float32(row % 5 == 0)


def test_a_dataset_with_a_row_for_each_instance_is_compared_as_it_is() -> None:
    data = Instances()
    rows = declared(data)
    said = rows.check(DataLoader(data, 320, shuffle=True))
    assert said.endswith("come in one batch, which the loader shuffles")
    with pytest.raises(
        CannotAdopt, match=r"batch_size is 64, .* 320 rows of Instances"
    ):
        rows.check(DataLoader(data, 64, shuffle=True))


class WithGenres(Interactions):
    """A dict, with a feature of the drawn items."""

    def __init__(self, genre: Tensor) -> None:
        super().__init__()
        self.genre = genre

    def __getitem__(self, row: int) -> Any:
        user = int(self.user[row])
        drawn = torch.tensor(self.draw(user))
        return {"user": user, "drawn": drawn, "genre": self.genre[drawn]}


def test_a_batch_of_another_form_is_made_by_a_function_of_the_users() -> None:
    genre = torch.arange(ITEMS) % 7

    def make(row: dict[str, Tensor]) -> dict[str, Tensor]:
        drawn = row["negatives"]
        return {"user": row["user"], "drawn": drawn, "genre": genre[drawn]}

    data = WithGenres(genre)
    rows = declared(data, make=make)
    rows.check(loader_of(data, collate_fn=None))
    assert set(next(iter(rows))) == {"user", "drawn", "genre"}
    # Compared for the items that were drawn.
    data.genre = genre.clone()
    data.genre[149] += 1
    with pytest.raises(CannotAdopt, match=r"tensor \d of row \d+: the loader gives"):
        rows.check(loader_of(data, collate_fn=None))
    lost = declared(data, make=lambda row: (row["user"], genre[row["negatives"]]))
    with pytest.raises(CannotAdopt, match="no tensor of its batch holds the negatives"):
        lost.check(loader_of(data, collate_fn=None))


def drawn_rows(batch_size: int, **more: Any) -> Rows:
    return declared(Interactions(), batch_size, **more)


def steps_of(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows and negatives of the steps of an epoch."""
    for step in rows.steps(RowsOnDevice(rows, torch.device("cpu"))):
        yield step.tensors


def test_draws_are_a_function_of_seed_epoch_and_row_alone() -> None:
    def drawn(batch_size: int = 64, **more: Any) -> dict[int, tuple[int, ...]]:
        found = {}
        for indices, draws in steps_of(drawn_rows(batch_size, **more)):
            pairs = zip(indices, draws.tolist(), strict=True)
            found.update({int(index): tuple(ids) for index, ids in pairs})
        return found

    first = drawn()
    assert first == drawn(batch_size=100, shuffle=False)
    assert first == {**drawn(rank=0, ranks=2), **drawn(rank=1, ranks=2)}
    assert first != drawn(seed=1)


def test_popular_draws_are_drawn_by_popularity() -> None:
    data = Interactions()
    law = Popular(ITEMS, draws=NEGATIVES, exclude=TAKEN, counted="item", exponent=1.0)
    rows = declared(data, negatives=law)
    counts = np.zeros(ITEMS, np.int64)
    for _ in range(20):
        for _, draws in steps_of(rows):
            counts += np.bincount(draws.reshape(-1).numpy(), minlength=ITEMS)
    expected = np.zeros(ITEMS)
    for user in data.user.tolist():
        free = data.share.copy()
        free[list(data.known[user])] = 0
        expected += free / free.sum()
    assert follows(counts, expected * NEGATIVES * 20)


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        ([4, 9, 10, 300], [4, 9, 10, 300]),
        (range(3, 6), [3, 4, 5]),
        (torch.tensor([8, 6]), [6, 8]),
        (np.arange(3).max(), [0, 1]),
    ],
)
def test_ids_are_a_number_of_any_kind_or_stand_anywhere(
    items: Any, ids: list[int]
) -> None:
    columns = {"user": torch.tensor([-5, 10**12, 3]), "item": torch.tensor([5, 7, 11])}
    draws = NegativeDraws(Uniform(items, draws=100), columns)
    (drawn,) = draws.draw(np.arange(3), 0)
    assert set(drawn.reshape(-1).tolist()) == set(ids)
    assert draws.can_draw(np.arange(3), drawn).all()
    drawn[1, 99] = 12
    assert np.argwhere(~draws.can_draw(np.arange(3), drawn)).tolist() == [[1, 99]]


def test_drawn_ids_may_be_beyond_the_type_of_the_positives() -> None:
    columns = {"user": torch.arange(3), "item": torch.arange(3, dtype=torch.int8)}
    negatives = Uniform([130], exclude=TAKEN)
    item = next(iter(Rows(columns, 3, negatives=negatives)))[1]
    assert set(item.tolist()) == {0, 1, 2, 130}


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
    rows = Rows({"x": torch.arange(20)}, 4)
    earlier = rows.state_dict()
    del earlier["order"]  # as version 0.1 saved it, which shuffled otherwise
    for state, what in (
        (Rows({"x": torch.arange(21)}, 4).state_dict(), "num_rows=21"),
        (Rows({"x": torch.arange(20)}, 4, seed=9).state_dict(), "seed=9"),
        (earlier, "order=None"),
    ):
        with pytest.raises(ValueError, match=f"the state has {what}, these rows"):
            rows.load_state_dict(state)


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
            size,
            rank=rank,
            ranks=ranks,
            drop_last=drop_last,
            seed=seed,
        )
        batches = [batch[0].tolist() for batch in made]
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


@pytest.mark.parametrize(
    ("law", "text"),
    [
        (Uniform(0, exclude=TAKEN), "items=0: must be a number of 1 or more"),
        (Uniform([0.5], exclude=TAKEN), "items=[0.5]: must be"),  # type: ignore[list-item]
        (
            Uniform(ITEMS, exclude=("user", "thing")),
            "exclude='thing': must be a column of one integer a row: user, item",
        ),
        (Uniform(ITEMS, exclude=("user", "context")), "exclude='context'"),
        (Uniform(5, exclude=TAKEN), "has 0 items left to draw from: all 5 are exc"),
        (Popular(ITEMS, exclude=TAKEN, counted=""), "counted='': must be a column"),
        (
            Uniform(ITEMS, exclude=TAKEN, known=([1, 2], [3])),
            "known has int64 (2,) and int64 (1,): must be two arrays of integers",
        ),
        (
            Uniform(ITEMS, exclude=TAKEN, known=([0.5], [3])),
            "known has float32 (1,) and int64 (1,): must be two arrays",
        ),
    ],
)
def test_a_distribution_that_does_not_fit_the_columns_is_refused(
    law: Any, text: str
) -> None:
    with pytest.raises(CannotAdopt, match=re.escape(text)):
        declared(Interactions(), negatives=law)


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"batch_size": 0}, "batch_size=0: must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"rank": 3, "ranks": 3}, "rank=3 of world_size=3: rank must be 0 to 2"),
        ({"columns": {}}, "columns have {} rows"),
        ({"columns": {"a": [1, 2], "b": [1]}}, "columns have {'a': 2, 'b': 1} rows"),
        ({"columns": {"a": ["x"]}}, "column 'a': must be a tensor or an array"),
        ({"negatives": Uniform(4)}, "name the positives' column, such as exclude="),
        ({"negatives": 4}, "negatives=4: must be a Uniform or Popular"),
        (
            {
                "columns": {"item": [1, 2], "label": [0, 1]},
                "negatives": Uniform(4, exclude=("item", "item")),
            },
            "a column 'label' with negatives",
        ),
        (
            {"columns": {"negatives": [1, 2]}, "negatives": Uniform(4)},
            "a column 'negatives' with negatives=",
        ),
    ],
)
def test_an_argument_out_of_range_is_refused(
    settings_: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Rows(**{"columns": {"x": torch.arange(20)}, "batch_size": 4, **settings_})
    with pytest.raises(ValueError, match="draws=0: must be the number of negatives"):
        Uniform(3, draws=0)
    with pytest.raises(ValueError, match="known= without exclude="):
        Uniform(3, known=([0], [1]))
    pairs: dict[str, Any] = {"exclude": "user", "known": ([0],)}
    for name, pair in pairs.items():
        with pytest.raises(ValueError, match=rf"{name}=.*: must be two, the user's"):
            Uniform(3, **{"exclude": ("user", "item"), name: pair})


@pytest.mark.parametrize("first", [0, -7], ids=["numbered", "other numbers"])
def test_further_pairs_are_never_drawn(first: int) -> None:
    users = torch.arange(40).repeat_interleave(3) + first
    items = torch.randint(12, (120,))
    # The last two users have no row.
    known = torch.arange(42) + first, torch.arange(42) % 12
    law = Uniform(12, draws=5, exclude=("user", "item"), known=known)
    rows = Rows({"user": users, "item": items}, 24, negatives=law)
    taken = {*zip(users.tolist(), items.tolist(), strict=True)}
    taken |= {*zip(*(each.tolist() for each in known), strict=True)}
    drawn: set[tuple[int, int]] = set()
    for _ in range(60):
        for user, item, label in rows:
            pairs = zip(user.tolist(), item.tolist(), label.tolist(), strict=True)
            drawn |= {(user, item) for user, item, is_row in pairs if not is_row}
    every = {(user + first, item) for user in range(40) for item in range(12)}
    assert drawn == every - taken
