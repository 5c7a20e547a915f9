"""A table that shared and other features read: their bags are under one key, from memory, from files, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.data.loader.given import batch_of
from tests.data.stream_sets import ITEMS, parquet, table_of
from tests.small_sets import planted_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.schema import BatchSchema

pytestmark = pytest.mark.unit
SIZE = 21
DATA = planted_data(users=40, items=60, clusters=4)


def schema(names: Sequence[str], shared: Sequence[str], **rows: int) -> BatchSchema:
    """Features ``names`` over the table of items, and one table for each of ``rows``."""
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=size, feature_names=[name]
        )
        for name, size in rows.items()
    ]
    items = EmbeddingBagConfig(
        name="item",
        embedding_dim=4,
        num_embeddings=max(ITEMS, 60) + 1,
        feature_names=list(names),
    )
    return BatchSchema.from_tables([*tables, items], shared=shared)


def bags(batch: TowerBatch, name: str) -> list[list[int]]:
    return [bag.tolist() for bag in batch.bags(name).to_dense()]


def test_the_user_and_the_candidates_meet_in_one_key() -> None:
    rows = DATA.rows("train").take(np.array([5, 0]))
    candidates = np.array([[3, 1, 2], [9, 9, 0]])
    made = schema(["history", "item_id"], ["history", "user_id"], user_id=41)
    batch = batch_of(
        made, rows, candidates, items=DATA.items.select(["item_id"]), padded_rows=3
    )
    assert batch.joint is not None
    assert batch.joint.keys() == ["history|item_id"]
    assert batch.joint.stride() == 3 + 9
    assert bags(batch, "history") == [
        rows["history"].row(0).tolist(),
        rows["history"].row(1).tolist(),
        [],
    ]
    assert bags(batch, "item_id") == [[3], [1], [2], [9], [9], [0], [], [], []]
    assert len(batch) == 9


def loaders(
    folder: Path, made: BatchSchema, device: torch.device, **options: Any
) -> list[ChunkLoader]:
    """The same rows in the same order from memory, from files, and on a device."""
    table = table_of(SIZE)
    chunk = Chunk(
        {
            "user_id": Column(table["user_id"].to_numpy()),
            "item_id": Column(table["item_id"].to_numpy().astype(np.int64)),
            "history": Column.from_lengths(
                table["history"].combine_chunks().values.to_numpy(), np.arange(SIZE) % 4
            ),
        }
    )
    config = LoaderConfig(
        **{"batch_size": 8, "prefetch": 0, "read_ahead": 0, "shuffle": False} | options
    )
    places: list[tuple[Any, dict[str, Any]]] = [
        (chunk, {}),
        (parquet(folder, [13, 8]), {}),
        (chunk, {"device": device}),
    ]
    known = UniformNegatives(ITEMS, chunk["user_id"].values, chunk["item_id"].values)
    items = (
        Chunk({"item_id": Column(np.arange(ITEMS + 1))}) if config.negatives else None
    )
    sampler = known if config.negatives else None
    return [
        ChunkLoader(rows, made, config=config, items=items, negatives=sampler, **place)
        for rows, place in places
    ]


@pytest.mark.parametrize("negatives", [0, 2])
def test_memory_files_and_device_give_the_same_joint_bags(
    tmp_path: Path, negatives: int, device: torch.device
) -> None:
    joint = schema(["history", "item_id"], ["history", "user_id"], user_id=5_000)
    plain = schema(["history", "item_id"], [], user_id=5_000)
    width = 1 + negatives
    expected = list(loaders(tmp_path, plain, device, negatives=negatives)[0])
    for loader in loaders(tmp_path, joint, device, negatives=negatives):
        found = list(loader)
        assert len(found) == len(expected) == 3
        for batch, other in zip(found, expected, strict=True):
            assert batch.joint is not None
            assert batch.joint.keys() == ["history|item_id"]
            assert batch.joint.stride() == 8 + 8 * width
            assert bags(batch, "item_id") == bags(other, "item_id")
            assert bags(batch, "history") == bags(other, "history")[::width]
            assert bags(batch, "user_id") == bags(other, "user_id")[::width]


@pytest.mark.parametrize(
    "names", [["history", "item_id", "user_id"], ["history", "user_id", "item_id"]]
)
def test_a_missing_half_is_empty_bags(
    tmp_path: Path, names: list[str], device: torch.device
) -> None:
    made = schema(names, ["history", "user_id"])
    assert [joint.key for joint in made.joint] == ["history|item_id", "user_id|"]
    for loader in loaders(tmp_path, made, device, negatives=0):
        for batch in loader:
            assert batch.joint is not None
            assert [bag.tolist() for bag in batch.joint["user_id|"].to_dense()][8:] == [
                []
            ] * 8
            assert bags(batch, "user_id")[0] == [
                (bags(batch, "item_id")[0][0] - 1) // 3
            ]
