"""Rows on a device give the batches of rows in memory, bit for bit, with the draws and the items' features."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.loader.test_loader import ITEMS, rows_of, schema_of
from tests.data.stream_sets import equal
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import PopularityNegatives, UniformNegatives
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.schema import BatchSchema, DataError

pytestmark = pytest.mark.unit
SIZE = 43
TABLES = {
    "user_id": SIZE,
    "history": ITEMS + 1,
    "item_id": ITEMS + 1,
    "kind": 3,
    "genres": 5,
}
NUMBERS = np.arange(ITEMS + 1)
CATALOGUE = Chunk(
    {
        "item_id": Column(NUMBERS),
        "kind": Column(NUMBERS % 3),
        "genres": Column.from_lengths(np.arange((NUMBERS % 4).sum()) % 5, NUMBERS % 4),
        "year": Column((NUMBERS / 10).astype(np.float32)),
    }
)


def schema(shared: tuple[str, ...] = ()) -> BatchSchema:
    made = schema_of(TABLES, ("row", "year"))
    return BatchSchema(
        sparse=made.sparse, dense=made.dense, shared=frozenset(shared), label_range=None
    )


def sampler_of(kind: Any, chunk: Chunk) -> Any:
    return kind(ITEMS, chunk["user_id"].values, chunk["item_id"].values, 3)


def loader_of(
    chunk: Chunk,
    shared: tuple[str, ...] = (),
    kind: Any = UniformNegatives,
    **options: Any,
) -> ChunkLoader:
    places = {
        name: options.pop(name) for name in ("rank", "world_size") if name in options
    }
    config = LoaderConfig(
        **{"batch_size": 8, "negatives": 2, "weight": "weight"} | options
    )
    sampler = sampler_of(kind, chunk) if config.negatives else None
    return ChunkLoader(
        chunk,
        schema(shared),
        config=config,
        items=CATALOGUE,
        negatives=sampler,
        **places,
    )


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu() -> None:
    batches = iter(
        loader_of(
            rows_of(SIZE),
            ("user_id", "history", "row"),
            PopularityNegatives,
            device="cuda",
        )
    )
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in batches:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_user_without_negatives_is_named_before_the_first_step() -> None:
    chunk = rows_of(SIZE)
    users = np.concatenate([chunk["user_id"].values, np.zeros(ITEMS, np.int64)])
    taken = np.concatenate([chunk["item_id"].values, NUMBERS[1:]])
    everything = Chunk({"user_id": Column(users), "item_id": Column(taken)})
    loader = ChunkLoader(
        everything,
        schema_of({"user_id": SIZE, "kind": 3}),
        config=LoaderConfig(negatives=2, device="cpu"),
        items=CATALOGUE.select(["kind"]),
        negatives=sampler_of(UniformNegatives, everything),
    )
    # Inside of a captured step nobody could tell.
    for read in (iter, lambda loader: loader.steps(inside=True)):
        with pytest.raises(
            DataError, match=r"user 0 has taken all 30 items.*\(1 such users here\)"
        ):
            list(read(loader))


@pytest.mark.parametrize("shared", [(), ("user_id", "row")], ids=["alone", "shared"])
@pytest.mark.parametrize("negatives", [0, 2])
def test_steps_that_are_drawn_ahead_make_the_same_batches(
    negatives: int, shared: tuple[str, ...], device: torch.device
) -> None:
    """50 rows in steps of 8 on rank 1 of 3: six that are drawn, and one that is not full."""
    rows = rows_of(50)
    chunk = rows.select([name for name in rows if rows[name].offsets is None])
    made = schema_of({"user_id": SIZE, "item_id": ITEMS + 1, "kind": 3}, ("row",))
    loader = ChunkLoader(
        chunk,
        dataclasses.replace(made, shared=frozenset(shared), label_range=None),
        config=LoaderConfig(
            batch_size=8, negatives=negatives, weight="weight", device=device.type
        ),
        items=CATALOGUE.select(["item_id", "kind"]),
        negatives=sampler_of(UniformNegatives, chunk) if negatives else None,
        rank=1,
        world_size=3,
    )
    loader.set_epoch(1)
    right = list(loader)
    for inside in (False, True):
        steps = list(loader.steps(inside=inside))
        assert [isinstance(step, DrawnStep) for step in steps] == [True] * 6 + [False]
        # What a captured step gets in place of candidates: the keys of its draws.
        widths = [len(step.tensors) for step in steps if isinstance(step, DrawnStep)]
        assert widths == [4 if negatives and not inside else 3] * 6
        for step, expected in zip(steps, right, strict=True):
            batches = [step]
            if isinstance(step, DrawnStep):
                inner = step.source.assemble(step.source.tensors, step.tensors)
                batches = [step.batch(), inner]
            for batch in batches:
                assert equal(batch, expected)


@pytest.mark.parametrize(
    "shared", [(), ("user_id", "history", "row")], ids=["alone", "shared"]
)
@pytest.mark.parametrize("negatives", [0, 2])
def test_lists_of_any_length_are_gathered_inside_of_a_step(
    negatives: int, shared: tuple[str, ...], device: torch.device
) -> None:
    """All shapes are those of any other step; after the bags' own ids come zeros."""
    options: dict[str, Any] = {"negatives": negatives, "world_size": 3, "rank": 1}
    loader = loader_of(rows_of(SIZE), shared, device=device.type, **options)
    loader.set_epoch(1)
    right = list(loader)
    assert not any(isinstance(step, DrawnStep) for step in loader.steps())
    sizes = set()
    for step, expected in zip(loader.steps(inside=True), right, strict=True):
        bags = [expected.sparse, *([expected.shared.sparse] if shared else [])]
        ragged = {
            key
            for each in bags
            for key, of_key in each.to_dict().items()
            if (of_key.lengths() != 1).any()
        }
        # A captured step takes all other keys for one id a row.
        assert expected.lists is None or ragged <= {*expected.lists}
        if not isinstance(step, DrawnStep):
            assert equal(step, expected)
            continue
        assert equal(step.batch(), expected)
        inner = step.source.assemble(step.source.tensors, step.tensors)
        assert torch.equal(inner.labels, expected.labels)
        assert torch.equal(inner.dense, expected.dense)
        parts = [(inner.sparse, expected.sparse)]
        if shared:
            parts.append((inner.shared.sparse, expected.shared.sparse))
        for made, given in parts:
            sizes.add((made.stride(), *made.length_per_key()))
            assert torch.equal(made.lengths(), given.lengths())
            ids = made.values().split(made.length_per_key())
            for key, of_key in zip(made.keys(), ids, strict=True):
                own = given[key].values()
                assert torch.equal(of_key[: len(own)], own), key
                assert not of_key[len(own) :].any(), key
    assert len(sizes) == (2 if shared else 1)
