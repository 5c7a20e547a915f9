"""Saved ids in tables of other capacities: what stays keeps its weights and its optimizer state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.ids.test_embeddings import (
    FEW,
    OPTIMIZERS,
    Model,
    batches,
    begin,
    dynamic,
    step,
)
from torchrec_ext.ids import Dynamic, DynamicEmbeddings, DynamicIds, resized

pytestmark = pytest.mark.unit


def loaded(
    kind: str, rows: int, evict: Any = "lfu"
) -> tuple[Any, Any, DynamicEmbeddings, list[Any]]:
    """A run whose tables had :data:`FEW` rows, saved and loaded into tables of ``rows``."""
    model, optimizer, ids, _ = dynamic(kind, FEW, 8)
    saved = copy.deepcopy(
        [model.state_dict(), optimizer.state_dict(), ids.state_dict()]
    )
    other = Model(rows)
    policies = {
        name: Dynamic(capacity=rows, share=1 / 16, evict=evict)
        for name in ("user", "item")
    }
    resumed = DynamicEmbeddings(
        other, OPTIMIZERS[kind](other.parameters()), policies, begin=begin
    )
    resumed.load(*saved)
    return other, resumed._optimizers[0], resumed, [model, optimizer, ids]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("adam", 70), ("adam", FEW), ("adam", 200), ("momentum", 70), ("adagrad", 200)],
)
def test_ids_that_stay_keep_their_rows(kind: str, rows: int) -> None:
    other, other_optimizer, resumed, (model, optimizer, ids) = loaded(kind, rows)
    for path in ("user", "item"):
        live, places = resumed.ids.live_ids(path)
        before, before_places = ids.ids.live_ids(path)
        assert len(live) == min(len(before), rows - 1)
        source = ids.ids.rows({path: live})[path]
        assert (source > 0).all()
        if rows >= FEW:
            assert torch.equal(places, before_places)
        weight, old = other.get_submodule(path).weight, model.get_submodule(path).weight
        assert torch.equal(weight[places], old[source])
        assert torch.equal(weight[0], old[0])
        for name, value in optimizer.state[old].items():
            moved = other_optimizer.state[weight][name]
            if value.dim():
                assert len(moved) == rows
                assert torch.equal(moved[places], value[source])
                assert torch.equal(moved[0], value[0])
            else:
                assert moved == value
    for batch in batches(8):
        step(other, other_optimizer, batch)
    for path in ("user", "item"):
        live, places = resumed.ids.live_ids(path)
        assert len(live) == rows - 1 or rows == 200
        assert torch.equal(resumed.ids.rows({path: live})[path], places)


@pytest.mark.parametrize("evict", ["lfu", "lru"])
def test_a_smaller_table_evicts_whom_the_larger_one_would_have_evicted(
    evict: Any,
) -> None:
    """As many as an eviction of that size takes, by the same scores and in the same order."""
    policy = Dynamic(capacity=60, evict=evict, half_life=2)
    ids = DynamicIds({"a": policy})
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        ids.step(
            {"a": (torch.rand(40, generator=generator) ** 2 * 50).long() + 3 * number}
        )
    state = copy.deepcopy(ids.state_dict())
    smaller = DynamicIds({"a": Dynamic(capacity=30, evict=evict, half_life=2)})
    fitted, _ = resized(state, {"a": Dynamic(capacity=30, evict=evict, half_life=2)})
    smaller.load_state_dict(fitted)
    pool = ids._tables[0]
    pool.score_sightings(ids.ranks)
    gone = pool.id_of[pool.lowest(pool.live - 29, now=ids.now + 1)]
    before = ids.live_ids("a")[0].tolist()
    assert sorted(smaller.live_ids("a")[0].tolist()) == sorted(
        set(before) - set(gone.tolist())
    )
    assert smaller.counts["evicted"] == ids.counts["evicted"] + len(gone)


def test_a_table_without_settings_is_refused() -> None:
    ids = DynamicIds({"a": Dynamic(capacity=9)})
    with pytest.raises(
        ValueError,
        match="table 'a' was saved and has no settings; those with some are b",
    ):
        resized(ids.state_dict(), {"b": Dynamic(capacity=9)})
