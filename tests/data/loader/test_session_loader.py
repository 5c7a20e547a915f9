"""The session loader: each sequence once on any number of ranks, ranks of equal load, resumed equals uninterrupted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingConfig

from tests.data.stream_sets import steps_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.id_dropout import drop_ids
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.schema import BatchSchema, DataError

pytestmark = pytest.mark.unit
ITEMS = 50
SCHEMA = BatchSchema.from_tables(
    [
        EmbeddingConfig(
            name="item_id",
            embedding_dim=4,
            num_embeddings=ITEMS + 1,
            feature_names=["session", "item_id"],
        )
    ],
    label_range=None,
)


def sequences(count: int) -> Column:
    """Each of its own, so that a set of tuples says which were seen."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 9, count)
    values = generator.integers(1, ITEMS + 1, lengths.sum())
    return Column.from_lengths(values, lengths)


def loader_of(
    count: int, rank: int = 0, world_size: int = 1, **options: Any
) -> ChunkLoader:
    config = LoaderConfig(**{"batch_size": 8, "negatives": 3} | options)
    return ChunkLoader(
        Chunk({"session": sequences(count)}),
        SCHEMA,
        config=config,
        sessions=ITEMS,
        rank=rank,
        world_size=world_size,
    )


def feature(batch: TowerBatch, name: str) -> list[tuple[int, ...]]:
    jagged = batch.sparse[name]
    return [
        tuple(row.tolist())
        for row in torch.split(jagged.values(), jagged.lengths().tolist())
    ]


def seen(batch: TowerBatch) -> list[tuple[int, ...]]:
    return [
        row
        for row, weight in zip(
            feature(batch, "session"), batch.weights.tolist(), strict=True
        )
        if weight
    ]


def candidates(batches: list[TowerBatch]) -> list[int]:
    return sorted(
        item
        for batch in batches
        for row in feature(batch, "item_id")
        for item in row
        if item
    )


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    negatives=st.integers(0, 3),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)
def test_any_number_of_ranks_sees_every_sequence_once(
    count: int, batch_size: int, negatives: int, epoch: int, shuffle: bool
) -> None:
    options = {"batch_size": batch_size, "negatives": negatives, "shuffle": shuffle}
    expected = sorted(tuple(sequences(count).row(row).tolist()) for row in range(count))
    single: list[TowerBatch] = []
    for world_size in (1, 2, 3):
        steps = steps_of(partial(loader_of, count, **options), world_size, epoch)
        assert len(steps) == -(-count // batch_size)
        rows = [row for step in steps for batch in step for row in seen(batch)]
        assert sorted(rows) == expected
        if world_size == 1:
            single = [batch for (batch,) in steps]
        for step, whole in zip(steps, single, strict=True):
            assert sorted(row for batch in step for row in seen(batch)) == sorted(
                seen(whole)
            ), "step by step the same ones"
            assert candidates(list(step)) == candidates([whole])
            drawn = {batch.sparse["item_id"].values().numel() for batch in step}
            assert len(drawn) == 1
            targets = sum(len(row) - 1 for row in seen(whole))
            assert all(
                float(batch.total_weight) == pytest.approx(targets / world_size)
                for batch in step
            )


def test_no_negatives_make_the_whole_catalogue_the_candidates() -> None:
    for batch in loader_of(20, negatives=0):
        assert candidates([batch]) == list(range(1, ITEMS + 1))


def test_a_sequence_without_a_target_and_an_item_outside_the_table_are_refused() -> (
    None
):
    for values, lengths, where in (
        ([1, 2, 3], [2, 1], "sequence 1 has 1 items"),
        ([1, 2, 1, ITEMS + 1], [2, 2], f"row 1, column 'session': id {ITEMS + 1}"),
    ):
        column = Column.from_lengths(np.array(values), np.array(lengths))
        with pytest.raises(DataError, match=where):
            ChunkLoader(
                Chunk({"session": column}),
                SCHEMA,
                config=LoaderConfig(),
                sessions=ITEMS,
            )


@pytest.mark.parametrize("setting", ["label", "weight"])
def test_columns_that_sessions_do_not_read_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"loader\.{setting}='session'.*leave both"):
        loader_of(5, negatives=0, **{setting: "session"})


def test_sessions_of_ids_alone_take_no_id_dropout() -> None:
    """Whole sessions of unknown items would train nothing, and still count in the weight by which a loss is divided."""
    with pytest.raises(ValueError, match=r"id_dropout=session=0.1 with sessions"):
        drop_ids(loader_of(5), SCHEMA, {"session": 0.1})
