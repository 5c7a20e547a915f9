"""A table that shared and other features read: their bags are under one key, from memory, from files, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.data.loader.given import batch_of
from tests.data.stream_sets import ITEMS, parquet, table_of
from tests.small_sets import planted_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.id_dropout import IdDropout
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.schema import BatchSchema, DataError

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


def test_one_side_alone_leaves_the_other_half_empty() -> None:
    made = schema(["history", "item_id"], ["history"])
    builder = BatchBuilder(made, DATA.items.select(["item_id"]))
    users = builder.user_batch(DATA.rows("test").slice(0, 3))
    items = builder.item_batch(np.arange(7))
    assert bags(users, "history") == [
        DATA.rows("test")["history"].row(at).tolist() for at in range(3)
    ]
    assert bags(users, "item_id") == [[]] * 3
    assert bags(items, "history") == [[]] * 7
    assert bags(items, "item_id") == [[item] for item in range(7)]


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


def weighted_table() -> pa.Table:
    table = table_of(SIZE)
    ages = [
        [float(item) / 4 + row for item in items]
        for row, items in enumerate(table["history"].to_pylist())
    ]
    return table.append_column("ages", pa.array(ages, pa.list_(pa.float32())))


def weighted_sources(folder: Path) -> tuple[Chunk, ParquetSource]:
    """The same rows with a weight for each id of the history."""
    table = weighted_table()
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "rows.parquet", row_group_size=13)
    lengths = np.arange(SIZE) % 4
    chunk = Chunk(
        {
            "user_id": Column(table["user_id"].to_numpy()),
            "item_id": Column(table["item_id"].to_numpy().astype(np.int64)),
            "history": Column.from_lengths(
                np.concatenate(table["history"].to_pylist()).astype(np.int64), lengths
            ),
            "ages": Column.from_lengths(
                np.concatenate(table["ages"].to_pylist()).astype(np.float32), lengths
            ),
        }
    )
    return chunk, ParquetSource(folder)


def weights(batch: TowerBatch, name: str) -> list[list[float]]:
    bag = batch.bags(name)
    return [part.tolist() for part in bag.weights().split(bag.lengths().tolist())]


@pytest.mark.parametrize(
    "shared", [(), ("history", "user_id")], ids=["alone", "shared"]
)
@pytest.mark.parametrize(("negatives", "shuffle"), [(0, False), (0, True), (2, False)])
def test_weights_follow_their_ids(
    tmp_path: Path,
    shared: tuple[str, ...],
    negatives: int,
    shuffle: bool,
    device: torch.device,
) -> None:
    """From memory, from files and on a device, repeated beside candidates, shuffled and padded."""
    tables = [
        EmbeddingBagConfig(
            name="user_id",
            embedding_dim=4,
            num_embeddings=5_000,
            feature_names=["user_id"],
        ),
        EmbeddingBagConfig(
            name="item",
            embedding_dim=4,
            num_embeddings=ITEMS + 1,
            feature_names=["history", "item_id"],
        ),
    ]
    made = BatchSchema.from_tables(tables, shared=shared, weights={"history": "ages"})
    chunk, source = weighted_sources(tmp_path)
    config = LoaderConfig(
        batch_size=8, negatives=negatives, prefetch=0, read_ahead=0, shuffle=shuffle
    )
    items = Chunk({"item_id": Column(np.arange(ITEMS + 1))}) if negatives else None
    sampler = (
        UniformNegatives(ITEMS, chunk["user_id"].values, chunk["item_id"].values)
        if negatives
        else None
    )
    truth = dict(
        zip(
            map(tuple, weighted_table()["history"].to_pylist()),
            weighted_table()["ages"].to_pylist(),
            strict=True,
        )
    )
    truth[()] = []
    for rows, place in ((chunk, {}), (source, {}), (chunk, {"device": device})):
        loader = ChunkLoader(
            rows, made, config=config, items=items, negatives=sampler, **place
        )  # type: ignore[arg-type]
        for batch in loader:
            assert batch.weighted is not None
            histories = bags(batch, "history")
            assert len(histories) == (8 if shared else 8 * (1 + negatives))
            assert weights(batch, "history") == [
                truth[tuple(items)] for items in histories
            ]
            assert [part for row in weights(batch, "item_id") for part in row] == [
                1.0
            ] * int((batch.weights > 0).sum())


@pytest.mark.parametrize("change", ["missing", "shorter", "nan"])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: str) -> None:
    made = BatchSchema.from_tables(
        [
            EmbeddingBagConfig(
                name="item",
                embedding_dim=4,
                num_embeddings=ITEMS + 1,
                feature_names=["history"],
            )
        ],
        weights={"history": "ages"},
    )
    chunk, _ = weighted_sources(tmp_path)
    values, lengths = chunk["ages"].values, chunk["ages"].lengths
    if change == "nan":
        chunk = chunk.with_columns(
            {
                "ages": Column(
                    np.where(np.arange(len(values)) == 3, np.nan, values),
                    chunk["ages"].offsets,
                )
            }
        )
    elif change == "shorter":
        chunk = chunk.with_columns(
            {
                "ages": Column.from_lengths(
                    values[:-1], np.concatenate([lengths[:3], [2], lengths[4:]])
                )
            }
        )
    else:
        chunk = chunk.select([name for name in chunk if name != "ages"])
    text = {
        "missing": "column 'ages' is missing",
        "shorter": r"column 'ages', row 3.*: 2 weights for the 3 ids of 'history'; give one for each id",
        "nan": r"column 'ages'.*value nan.*not finite",
    }[change]
    for place in ({}, {"device": "cpu"}):
        with pytest.raises(DataError, match=text):
            list(
                ChunkLoader(
                    chunk,
                    made,
                    config=LoaderConfig(
                        batch_size=8, negatives=0, shuffle=False, prefetch=0
                    ),
                    **place,
                )
            )  # type: ignore[arg-type]


def test_one_side_alone_has_no_weights_of_the_other() -> None:
    made = BatchSchema.from_tables(
        [
            EmbeddingBagConfig(
                name="item",
                embedding_dim=4,
                num_embeddings=61,
                feature_names=["history", "item_id"],
            )
        ],
        shared=["history"],
        weights={"history": "ages"},
    )
    users = DATA.rows("test").slice(0, 3)
    ages = Column.from_lengths(
        np.linspace(0, 1, len(users["history"].values)), users["history"].lengths
    )
    builder = BatchBuilder(made, DATA.items.select(["item_id"]))
    assert (
        builder.item_batch(np.arange(7)).bags("item_id").weights().tolist() == [1.0] * 7
    )
    found = builder.user_batch(users.with_columns({"ages": ages}))
    assert found.bags("history").weights().tolist() == pytest.approx(
        ages.values.tolist()
    )


def test_id_dropout_reaches_joint_and_weighted_bags_alike(tmp_path: Path) -> None:
    """Which ids are replaced depends on the row and the id, not on the tensor in which they stand."""
    chunk, _ = weighted_sources(tmp_path)
    config = LoaderConfig(batch_size=SIZE, negatives=0, prefetch=0, shuffle=False)
    rates, dropped = {"history": 0.5, "item_id": 0.5}, []
    for options in (
        {"shared": ["history"]},
        {"shared": ["history"], "weights": {"history": "ages"}},
        {"weights": {"history": "ages"}},
    ):
        items = EmbeddingBagConfig(
            name="item",
            embedding_dim=4,
            num_embeddings=31,
            feature_names=["history", "item_id"],
        )
        made = BatchSchema.from_tables([items], **options)  # type: ignore[arg-type]
        (batch,) = ChunkLoader(chunk, made, config=config)
        loader = ChunkLoader(chunk, made, config=config)
        (changed,) = IdDropout(loader, made, rates, seed=7)
        dropped.append([bags(changed, name) for name in rates])
        if "weights" in options:
            assert weights(changed, "history") == weights(batch, "history")
    kept = [sum(row == [0] for row in bags_of) for bags_of in dropped[0]]
    assert 5 < kept[1] < 16, kept
    assert dropped[0] == dropped[1]
    assert sum(row == [0] for row in dropped[2][1]) > 5
