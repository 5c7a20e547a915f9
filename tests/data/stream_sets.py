"""Small sets in files, for the tests of sources and of the streaming loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.schema import BatchSchema

ITEMS = 30


def table_of(size: int, start: int = 0) -> pa.Table:
    """Rows that can be told apart by ``row``; every other column follows from it."""
    numbers = np.arange(start, start + size)
    return pa.table(
        {
            "user_id": numbers // 3,
            "history": pa.array(
                [[int(n * 7 + k) % ITEMS for k in range(n % 4)] for n in numbers],
                pa.list_(pa.int64()),
            ),
            "item_id": pa.array(1 + numbers % ITEMS, pa.int32()),
            "row": numbers.astype(np.float32),
            "weight": (1 + numbers % 5).astype(np.float32),
            "label": numbers % 2 == 0,
        }
    )


def schema_by(rows: Mapping[str, int], **options: Any) -> BatchSchema:
    """A schema of tables by their number of rows, each read by the feature of its name, or by those of ``features``."""
    features = options.pop("features", {})
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=4,
            num_embeddings=count,
            feature_names=list(features.get(name, [name])),
        )
        for name, count in rows.items()
    ]
    return BatchSchema.from_tables(tables, **options)


def schema_of(
    shared: Sequence[str] = (), users: int = 5_000, **options: Any
) -> BatchSchema:
    rows = {"user_id": users, "history": ITEMS + 1, "item_id": ITEMS + 1}
    return schema_by(rows, dense=["row"], shared=shared, **options)


def parquet(folder: Path, sizes: Sequence[int], files: int = 1) -> ParquetSource:
    """A source with row groups of these sizes, spread over some files."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.cumsum([0, *sizes])
    for part, places in enumerate(np.array_split(np.arange(len(sizes)), files)):
        with pq.ParquetWriter(
            folder / f"part-{part}.parquet",
            table_of(0).schema,
            write_page_checksum=True,
        ) as writer:
            for at in places:
                writer.write_table(
                    table_of(sizes[at], int(starts[at])),
                    row_group_size=max(1, sizes[at]),
                )
    return ParquetSource(folder)


def loader_of(
    source: ParquetSource, rank: int = 0, world_size: int = 1, **options: Any
) -> ChunkLoader:
    schema = options.pop("schema", None) or schema_of()
    in_order = options.pop("in_order", True)
    config = LoaderConfig(
        **{
            "read_ahead": 0,
            "batch_size": 8,
            "negatives": 0,
            "buffer_rows": 40,
        }
        | options
    )
    return ChunkLoader(
        source,
        schema,
        config=config,
        rank=rank,
        world_size=world_size,
        in_order=in_order,
    )


def steps_of(
    make: Callable[[int, int], ChunkLoader], world_size: int, epoch: int = 0
) -> list[tuple[TowerBatch, ...]]:
    """The steps of an epoch on all ranks; all ranks have equally many, and all batches are of one size."""
    loaders = [make(rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        loader.set_epoch(epoch)
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == len(loaders[0])
    assert len({len(batch) for step in steps for batch in step}) == 1
    return steps


def check_weights(step: Sequence[TowerBatch]) -> None:
    """All ranks divide by the weight of the global batch, divided by their number."""
    share = sum(float(batch.weights.sum()) for batch in step) / len(step)
    totals = [float(batch.total_weight) for batch in step]
    assert totals == pytest.approx([share] * len(step))


def bags(batch: TowerBatch, name: str) -> list[list[int]]:
    part = (
        batch.shared.sparse
        if batch.shared and name in batch.shared.sparse.keys()  # noqa: SIM118
        else batch.sparse
    )
    return [bag.tolist() for bag in part[name].to_dense()]


def row_numbers(batch: TowerBatch) -> list[int]:
    """The rows that count, after a check that every column of each is its own and that padding is empty."""
    real = batch.weights > 0
    count = int(real.sum())
    assert bool(real[:count].all())
    dense = batch.dense if batch.dense.shape[1] else batch.shared.dense  # type: ignore[union-attr]
    numbers = dense[:count, 0].long().tolist()
    assert bags(batch, "user_id") == [[n // 3] for n in numbers] + [[]] * (
        len(batch) - count
    )
    assert bags(batch, "item_id") == [[1 + n % ITEMS] for n in numbers] + [[]] * (
        len(batch) - count
    )
    assert bags(batch, "history") == [
        [(n * 7 + k) % ITEMS for k in range(n % 4)] for n in numbers
    ] + [[]] * (len(batch) - count)
    assert dense[count:].abs().sum() == 0
    return numbers


def equal(left: TowerBatch, right: TowerBatch) -> bool:
    """Whether two batches, on any device, are the same to the last bit."""

    def parts(batch: TowerBatch) -> list[torch.Tensor]:
        names = ("dense", "labels", "weights", "total_weight", "log_q", "targets")
        found = [part for name in names if (part := getattr(batch, name)) is not None]
        sides = [batch] if batch.shared is None else [batch, batch.shared]
        for side in sides:
            found += [side.sparse.values(), side.sparse.lengths()]
        if batch.shared is not None:
            found += [batch.shared.dense, batch.shared.index]
        return [part.cpu() for part in found]

    ours, theirs = parts(left), parts(right)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
