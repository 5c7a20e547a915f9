"""Rows in memory, in files and on a device make the same batches, to the last bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.loader.test_loader import ITEMS, rows_of
from tests.data.loader.test_resident import CATALOGUE, SIZE, TABLES
from tests.data.stream_sets import equal, schema_by
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.id_dropout import drop_ids
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.loader.shared import CatalogueCandidates
from torchrec_ext.data.negatives.samplers import PopularityNegatives, UniformNegatives

pytestmark = pytest.mark.unit
USERS = ("user_id", "history", "row")
RATES = {"item_id": 0.3, "user_id": 0.2, "history": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "users shared": {"shared": USERS},
    "no negatives": {"negatives": 0},
    "no negatives, users shared": {"negatives": 0, "shared": USERS},
    "labels": {"negatives": 0, "label": "weight"},
    "tasks": {"tasks": ("weight",)},
    "popularity": {"kind": PopularityNegatives, "shared": USERS},
    "catalogue": {"negatives": 0, "catalogue": True},
    "dropout": {"rates": RATES},
    "dropout, no negatives": {"rates": RATES, "negatives": 0},
}


def written(rows: Chunk, folder: Path) -> ParquetSource:
    columns = {
        name: [column.row(row).tolist() for row in range(SIZE)]
        if column.ragged
        else column.values
        for name, column in rows.items()
    }
    file = folder / "rows.parquet"
    pq.write_table(pa.table(columns), file, row_group_size=17, write_page_checksum=True)
    return ParquetSource(file)


def loader_of(
    source: Chunk | ParquetSource,
    rows: Chunk,
    *,
    shared: tuple[str, ...] = (),
    kind: Any = UniformNegatives,
    rates: dict[str, float] | None = None,
    catalogue: bool = False,
    tasks: tuple[str, ...] = (),
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Any:
    schema = schema_by(
        TABLES,
        dense=["row", "year"],
        shared=shared,
        label_range=None,
    )
    schema = dataclasses.replace(schema, tasks=tasks)
    usual = {"batch_size": 8, "negatives": 2, "weight": "weight"}
    config = LoaderConfig(**{**usual, "read_ahead": 0, **options})
    users, items = (rows[name].values for name in ("user_id", "item_id"))
    sampler = kind(ITEMS, users, items, 3) if config.negatives else None
    if catalogue:
        sampler = CatalogueCandidates(np.arange(1, ITEMS + 1))
    loader = ChunkLoader(
        source,
        schema,
        config=config,
        items=CATALOGUE,
        negatives=sampler,
        rank=rank,
        world_size=world_size,
    )
    return drop_ids(loader, schema, rates) if rates else loader


ORDERS = [(0, 1, False), (2, 3, False), (1, 3, True)]


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "shuffle"),
    [
        (name, *order)
        for name in CASES
        for order in ORDERS
        # Files have an order of their own, and the candidates are the host's: there is nothing beside.
        if name != "catalogue" or not order[2]
    ],
)
def test_memory_files_and_device_give_the_same_batches(
    name: str,
    rank: int,
    world_size: int,
    shuffle: bool,
    tmp_path: Path,
    device: torch.device,
) -> None:
    rows = rows_of(SIZE)
    place = {"rank": rank, "world_size": world_size}
    sources: list[tuple[Any, dict[str, Any]]] = [(rows, place)]
    if not shuffle:  # files have an order of their own
        sources.append((written(rows, tmp_path), place))
    if name != "catalogue":  # whose candidates are the host's
        sources.append((rows, {**place, "device": device.type}))
    epochs = []
    for source, at in sources:
        loader = loader_of(source, rows, shuffle=shuffle, **at, **CASES[name])
        loader.set_epoch(2)
        epochs.append(list(loader))
    memory, *others = epochs
    assert len(memory) == 6
    for batches in others:
        assert batches[0].sparse.keys() == memory[0].sparse.keys()
        assert len(batches) == len(memory)
        assert all(map(equal, memory, batches))
    if name != "catalogue":
        assert others[-1][0].labels.device.type == device.type


def test_candidates_of_all_ranks_have_numbers_of_their_own() -> None:
    rows, numbers = rows_of(SIZE), []
    for rank in range(2):
        options: Any = {"negatives": 0, "catalogue": True, "shuffle": False}
        loader = loader_of(rows, rows, rank=rank, world_size=2, **options)
        loader.hook.replace = lambda bags, of: numbers.extend(of.rows.tolist()) or bags
        next(iter(loader))
    candidates = sorted(number for number in numbers if number < 0)
    assert candidates == list(range(-len(candidates), 0))
    assert len(candidates) >= ITEMS


@pytest.mark.parametrize("negatives", [0, 2])
def test_a_positive_has_the_labels_of_all_tasks_and_a_drawn_item_none(
    negatives: int,
) -> None:
    rows = rows_of(SIZE)
    for batch in loader_of(rows, rows, negatives=negatives, tasks=("weight",)):
        expected = batch.dense[:, 0] % 5 * batch.labels * (batch.weights > 0)
        assert torch.equal(batch.targets[:, 0], expected)
