"""Ids there and back, attributes of items, and users; wrong ones are refused with their place."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_ext.retrieval.catalogue import (
    Attribute,
    Catalogue,
    Ids,
    ItemTable,
    NamedUsers,
    UserTable,
    filterable,
)
from torchrec_ext.retrieval.manifest import BundleError

pytestmark = pytest.mark.unit
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
BORDERS = [-(2**63), -1, 0, 2**63 - 1]


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9)


@pytest.mark.parametrize(("ids", "borders"), [(NUMBERS, BORDERS), (TEXT, ["", "a"])])
def test_ids_as_a_dict_has_them(ids: Any, borders: list[Any]) -> None:
    @settings(max_examples=40, deadline=None)
    @given(
        ids=st.lists(ids, unique=True, min_size=1, max_size=20),
        asked=st.lists(ids, max_size=5),
    )
    def law(ids: list[Any], asked: list[Any]) -> None:
        where = {own: position for position, own in enumerate(ids)}
        made = Ids(ids)
        every = [*ids, *asked, *borders]
        assert made.positions(every).tolist() == [where.get(one, -1) for one in every]
        assert made.ids(np.arange(len(ids))) == ids

    law()


def test_wrong_ids_are_named() -> None:
    for ids, what in (
        ([1, 2, 1], "'1' is there more than once"),
        (["a", "a"], "'a' is there more than once"),
        ([1.5], "are double"),
        ([1, None], "with 1 nulls"),
    ):
        with pytest.raises(BundleError, match=what):
            Ids(ids)  # type: ignore[arg-type]
    for made, asked in (
        (Ids([1, 2]), ["a"]),
        (Ids([1, 2]), [1, "a"]),
        (Ids([1, 2]), [1.5]),
        (Ids([1, 2]), [2**70]),
        (Ids(["a"]), [1]),
    ):
        with pytest.raises(ValueError, match=r"ids here are"):
            made.positions(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("rare", [1, 500])
def test_an_attribute_has_the_items_with_any_of_its_values(rare: int) -> None:
    draw = np.random.default_rng(rare)
    lists = [draw.choice(rare + 5, 3, replace=False).tolist() for _ in range(300)]
    lists[7] = []
    column = pa.chunked_array([pa.array([*lists, None], pa.list_(pa.int64()))])
    attribute = Attribute(column)
    for values in ([lists[0][0]], lists[3], lists[4] + lists[5]):
        expected = [bool(set(values) & set(each)) for each in lists]
        assert attribute.mask(values).tolist() == [*expected, False]
    with pytest.raises(ValueError, match=r"no item has '99999'"):
        attribute.mask([99999])


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    catalogue = Catalogue(
        ids=np.array(["b", "a"]),
        features=pa.table({"x": [1, 2]}),
        titles=["B", None],  # type: ignore[list-item]
        attributes=pa.table({"year": [1, None]}),
    )
    catalogue.write(tmp_path)
    items = ItemTable.open(tmp_path)
    assert items.ids.positions(["a", "b", "c"]).tolist() == [1, 0, -1]
    assert items.titles_of([1, 0, 1]) == ["", "B", ""]
    assert sorted(items.attributes) == ["year"]
    assert items.attributes["year"].mask([1]).tolist() == [True, False]


def test_wrong_catalogues_are_refused(tmp_path: Path) -> None:
    features = pa.table({"x": [1, 2]})
    with pytest.raises(BundleError, match=r"1 titles for 2 ids"):
        Catalogue(ids=np.arange(2), features=features, titles=["a"])
    with pytest.raises(BundleError, match=r"has no items"):
        Catalogue(ids=np.arange(0), features=features.slice(0, 0))
    reserved = pa.table({"not": [1, 2]})
    with pytest.raises(BundleError, match=r"cannot have the name 'not'"):
        Catalogue(ids=np.arange(2), features=features, attributes=reserved).write(
            tmp_path
        )
    floats = pa.table({"price": [1.5, 2]})
    with pytest.raises(BundleError, match=r"'price' is double"):
        Catalogue(ids=np.arange(2), features=features, attributes=floats).write(
            tmp_path
        )
    kept = filterable(pa.table({"k": [1], "title": ["a"], "p": [0.5], "g": [[1]]}), "k")
    assert kept.column_names == ["g"]


def test_users_are_read_as_they_were_written(tmp_path: Path) -> None:
    users = NamedUsers(
        key="user",
        ids=np.array([5, 9]),
        features=pa.table({"id": [1, 2], "seen": [[1.5], []]}),
        unknown={"id": 0, "seen": [0.0]},
        # Of SQL's list() after a LEFT JOIN.
        seen_ids=pa.array([["a", None, "gone", "c"], [None]], pa.list_(pa.string())),
    )
    users.write(tmp_path, np.array(["a", "b", "c"]))
    table = UserTable.open(tmp_path, "user")
    assert len(table) == 2
    assert table.features(0) == {"id": 1, "seen": [1.5]}
    assert table.features(-1) == {"id": 0, "seen": [0.0]}
    assert [table.seen(row).tolist() for row in (0, 1, -1)] == [[0, 2], [], []]
