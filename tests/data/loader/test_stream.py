from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.stream_sets import (
    ITEMS,
    check_weights,
    loader_of,
    parquet,
    row_numbers,
    schema_by,
    schema_of,
    steps_of,
)
from tests.files import read_parquet
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.files.arrow import RowGroup
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader import epoch_order
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.data.loader.epoch_order import StreamPlan
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.schema import DataError

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


@pytest.fixture
def folder() -> Iterator[Path]:
    """As tmp_path, for tests that make many sets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def rows_of_steps(ranks: list[ChunkLoader]) -> list[list[int]]:
    """The rows of each step, over all ranks."""
    return [
        [row for batch in step for row in row_numbers(batch)]
        for step in zip(*ranks, strict=True)
    ]


@settings(max_examples=12, deadline=None)
@given(
    sizes=SIZES,
    batch_size=st.integers(1, 40),
    lanes=st.integers(1, 9),
    buffer_rows=st.integers(1, 300),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    weight=st.sampled_from([None, "weight"]),
    drop_last=st.booleans(),
)
@example(
    sizes=[200] * 5 + [3],
    batch_size=64,
    lanes=8,
    buffer_rows=900,
    epoch=1,
    shuffle=True,
    weight="weight",
    drop_last=False,
)
@example(
    sizes=[91],
    batch_size=8,
    lanes=4,
    buffer_rows=900,
    epoch=0,
    shuffle=True,
    weight=None,
    drop_last=False,
)
def test_any_number_of_ranks_sees_each_row_once_in_the_same_step(
    sizes: list[int],
    batch_size: int,
    lanes: int,
    buffer_rows: int,
    epoch: int,
    shuffle: bool,
    weight: str | None,
    drop_last: bool,
) -> None:
    size = sum(sizes)
    if drop_last and size < batch_size:
        return
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "lanes": lanes,
        "buffer_rows": buffer_rows,
        "shuffle": shuffle,
        "weight": weight,
        "drop_last": drop_last,
    }
    streams = []
    with tempfile.TemporaryDirectory() as name:
        source = parquet(Path(name), sizes, files=2)
        for world_size in (1, 2, 3, 4):
            steps = steps_of(partial(loader_of, source, **options), world_size, epoch)
            assert len(steps[0][0]) == -(-min(batch_size, size) // world_size)
            stream: list[list[int]] = []
            for step in steps:
                check_weights(step)
                stream.append([row for batch in step for row in row_numbers(batch)])
            streams.append(stream)
    whole = size - size % batch_size
    for world_size, stream in enumerate(streams, start=1):
        if not shuffle or world_size <= lanes:
            assert stream == streams[0]
        seen = Counter(row for step in stream for row in step)
        assert seen.total() == len(seen) == (whole if drop_last else size)
        assert not shuffle or {len(step) for step in stream[:-1]} <= {batch_size}
        if not shuffle:
            assert list(seen) == list(range(len(seen)))


@settings(max_examples=15, deadline=None)
@given(
    sizes=SIZES,
    step=st.integers(0, 5),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    lanes=st.integers(1, 4),
)
def test_an_epoch_that_other_ranks_resume_keeps_its_order_and_the_next_has_theirs(
    sizes: list[int], step: int, before: int, after: int, lanes: int
) -> None:
    """With more ranks than lanes the order depends on their number."""
    options = {"lanes": lanes, "weight": "weight", "label": "label"}
    with tempfile.TemporaryDirectory() as name:
        source = parquet(Path(name), sizes)
        first = [loader_of(source, rank, before, **options) for rank in range(before)]
        second = [loader_of(source, rank, after, **options) for rank in range(after)]
        fresh = [loader_of(source, rank, after, **options) for rank in range(after)]
        for loader in (*first, *fresh):
            loader.set_epoch(2)
        step = min(step, len(first[0]))
        state = first[0].state_dict(step=step)
        for loader in second:
            loader.load_state_dict(state)
        assert rows_of_steps(second) == rows_of_steps(first)[step:]
        for loader in second:
            loader.set_epoch(2)
        assert rows_of_steps(second) == rows_of_steps(fresh)


def decoded(plan: StreamPlan, world_size: int) -> int:
    """The number of rows that all ranks decode in an epoch of row groups that are read whole."""
    lanes = plan.blocks(0)
    segments = [
        segment
        for rank in range(world_size)
        for lane in plan.lanes_of(rank, world_size)
        for block in lanes[lane]
        if plan.reads(block, rank, world_size)
        for segment in block.segments
    ]
    return sum(plan.group_rows[segment.group] for segment in segments)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 8, 512])
@pytest.mark.parametrize("each", [128, 97])
def test_all_ranks_together_decode_the_data_once(
    world_size: int, each: int, shuffle: bool
) -> None:
    plan = StreamPlan(
        group_rows=(65_536,) * 15_000,
        batch_size=each * world_size + (each == 97),
        lanes=4,
        buffer_rows=262_144,
        shuffle=shuffle,
        drop_last=False,
        seed=0,
        places=world_size if world_size > 4 or not shuffle else None,
    )
    assert decoded(plan, world_size) <= 1.05 * plan.num_rows * (
        1 if plan.num_lanes % world_size == 0 else 2
    )


@pytest.mark.parametrize(
    "options", [{"lanes": 4}, {"lanes": 1}, {"shuffle": False}], ids=str
)
@pytest.mark.parametrize("weight", [None, "weight"])
def test_a_rank_reads_only_its_share(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    weight: str | None,
) -> None:
    read: list[int] = []
    source = parquet(folder, [32] * 16)
    reader = source.columns_of

    def counted(group: RowGroup, names: Sequence[str]) -> Any:
        if "history" in names:  # not others' weights
            read.append(group.number)
        return reader(group, names)

    monkeypatch.setattr(source, "columns_of", counted)
    for rank in range(4):
        list(
            loader_of(
                source,
                rank,
                4,
                buffer_rows=128,
                weight=weight,
                in_order=False,
                **options,
            )
        )
    assert sorted(read) == list(range(16))


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize(
    "sizes", [[16] * 16, [256]], ids=["row groups", "parts of one"]
)
def test_rows_in_order_are_read_where_a_rank_has_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch, weight: str | None, sizes: list[int]
) -> None:
    source, asked = parquet(folder, sizes), Counter[int]()
    each = BlockLayout.each

    def counted(layout: BlockLayout, group: RowGroup, columns: Any) -> Any:
        if layout.features:
            asked[rank] += group.rows
        return each(layout, group, columns)

    monkeypatch.setattr(BlockLayout, "each", counted)
    options = {
        "batch_size": 64,
        "lanes": 1,
        "buffer_rows": 16,
        "shuffle": False,
        "weight": weight,
    }
    ranks = []
    for rank in range(4):
        ranks.append(list(loader_of(source, rank, 4, **options)))
    rows = [
        [row for batch in step for row in row_numbers(batch)]
        for step in zip(*ranks, strict=True)
    ]
    assert rows == [list(range(start, start + 64)) for start in range(0, 256, 64)]
    assert asked == dict.fromkeys(range(4), 64)


def test_a_row_group_larger_than_a_lane_s_share_is_decoded_once_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[int, int]] = []
    source = parquet(folder, [100] * 4)
    parts = source.parts
    monkeypatch.setattr(
        source,
        "parts",
        lambda group, names, start, size: (
            opened.append((group.number, size)) or parts(group, names, start, size)
        ),
    )
    monkeypatch.setattr(
        source,
        "columns_of",
        lambda group, names: pytest.fail("a row group of 100 was read whole"),
    )
    rows = [
        row
        for batch in loader_of(source, lanes=4, buffer_rows=40)
        for row in row_numbers(batch)
    ]
    assert sorted(rows) == list(range(400))
    assert sorted(opened) == [(number, 10) for number in range(4)]
    for at in range(0, 400, 8):
        assert sorted(row // 100 for row in rows[at : at + 8]) == [
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
        ]


@pytest.mark.parametrize("lanes", [1, 2])
def test_columns_keep_their_names_in_row_groups_of_any_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    """An array column, a partition before other ids, and groups whose columns are decoded in other portions."""
    monkeypatch.setattr("torchrec_ext.data.files.sources._AT_ONCE", 64)
    for day in (1, 2):
        file = folder / f"day={day}" / "rows.parquet"
        file.parent.mkdir(parents=True)
        user = np.arange(48) % 50 + 3
        columns = {"user": user, "age": user + 100.0, "label": user % 2}
        columns["vec"] = list(np.stack([user + 200.0, user + 300.0], 1))
        rows = pa.table(columns)
        with pq.ParquetWriter(file, rows.schema) as writer:
            writer.write_table(rows[:40])
            writer.write_table(rows[40:])
    dense = ["vec[0]", "age", "vec[1]"]
    loader = loader_of(
        ParquetSource(folder),
        schema=schema_by({"day": 3, "user": 60}, dense=dense),
        label="label",
        lanes=lanes,
        buffer_rows=96,
        batch_size=96,
    )
    (batch,) = loader
    user = batch.sparse["user"].values()
    assert batch.sparse["day"].values().bincount().tolist() == [0, 48, 48]
    assert torch.equal(batch.labels.long(), user % 2)
    apart = (batch.dense.long() - user[:, None]).unique(dim=0)
    assert apart.tolist() == [[200, 100, 300]]


def sorted_by_label(folder: Path, rows: int, groups: int = 1) -> ParquetSource:
    """Rows in the order of their label, in large row groups, as pandas writes them."""
    folder.mkdir()
    numbers = np.arange(rows)
    table = pa.table(
        {
            "user_id": numbers % 5_000,
            "history": pa.array([[]] * rows, pa.list_(pa.int64())),
            "item_id": 1 + numbers % ITEMS,
            "row": numbers.astype(np.float32),
            "label": numbers >= rows // 2,
        }
    )
    path = folder / "rows.parquet"
    pq.write_table(table, path, row_group_size=rows // groups, write_page_checksum=True)
    return ParquetSource(folder)


def rows_in(batch: TowerBatch) -> list[int]:
    numbers: list[int] = batch.dense[batch.weights > 0, 0].long().tolist()
    return numbers


LARGE: dict[str, Any] = {
    "label": "label",
    "batch_size": 4_096,
    "lanes": 4,
    "buffer_rows": LoaderConfig.buffer_rows,
}


@pytest.mark.parametrize("groups", [1, 3])
def test_a_few_large_row_groups_are_shuffled_whole(folder: Path, groups: int) -> None:
    """Every step has the share of positives that chance gives it, on any number of ranks the same rows."""
    rows = 300_000
    source = sorted_by_label(folder / "sorted", rows, groups)
    loader = loader_of(source, **LARGE)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        steps = [(rows_in(batch), batch.labels.mean()) for batch in loader]
        assert sorted(row for step, _ in steps for row in step) == list(range(rows))
        # Six standard deviations of 4,096 draws.
        for _, share in steps[:-1]:
            assert abs(float(share) - 0.5) < 6 * 0.5 / 64
        epochs.append([step for step, _ in steps])
    assert epochs[0][0] != epochs[1][0]
    for world_size in (2, 6):
        ranks = []
        for rank in range(world_size):
            ranks.append(iter(loader_of(source, rank, world_size, **LARGE)))
        first = [row for rank in ranks for row in rows_in(next(rank))]
        assert first == epochs[0][0]
    halfway = loader_of(source, **LARGE)
    halfway.load_state_dict(loader_of(source, **LARGE).state_dict(step=9))
    assert [rows_in(batch) for batch in halfway] == epochs[0][9:]


@pytest.mark.parametrize(("batch_size", "places"), [(4096, 32), (4098, 6)])
def test_a_row_group_that_is_too_large_is_shuffled_in_small_parts_and_named(
    batch_size: int, places: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_order, "WHOLE_VALUES", 2**20)
    rows = 300_000
    source = sorted_by_label(folder / "sorted", rows)
    options = {**LARGE, "batch_size": batch_size}
    said = f"300,000 rows are shuffled in parts of 8,192 rows, from {places} places"
    with pytest.warns(UserWarning, match=said):
        loader = loader_of(source, **options)
    steps = list(loader)
    # Half of the places are among the positives.
    for batch in steps[:-1]:
        assert float(batch.labels.mean()) == pytest.approx(0.5, abs=0.01)
    first = rows_in(steps[0])
    assert len({row * places // rows for row in first}) == places
    assert sorted(row for batch in steps for row in rows_in(batch)) == list(range(rows))
    ranks = [iter(loader_of(source, rank, 3, **options)) for rank in range(3)]
    assert [row for rank in ranks for row in rows_in(next(rank))] == first


@pytest.mark.parametrize("setting", ["label", "weight"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_column_that_a_setting_names_and_nobody_has_is_told(
    folder: Path, setting: str, device: str | None
) -> None:
    source = parquet(folder, [20, 20])
    chunk = read_parquet([file.path for file in source.files])
    named: Any = {setting: "clicked", "device": device}
    config = LoaderConfig(batch_size=8, negatives=0, **named)
    for rows in (chunk, source):
        with pytest.raises(DataError, match="column 'clicked' is missing"):
            ChunkLoader(rows, schema_of(), config=config)


@pytest.mark.parametrize(
    ("sizes", "options", "was"),
    [
        ([20, 40], {}, "content was .*; put settings and files"),
        ([30, 30], {"buffer_rows": 80}, "buffer_rows was 60 and is 80; put"),
        ([30, 30], {"lanes": 1}, "lanes was 2 and is 1; put"),
    ],
)
def test_a_state_of_other_files_or_lanes_is_refused(
    folder: Path, sizes: list[int], options: dict[str, int], was: str
) -> None:
    usual = {"lanes": 2, "buffer_rows": 60}
    state = loader_of(parquet(folder / "a", [30, 30]), **usual).state_dict()
    other = loader_of(parquet(folder / "b", sizes), **usual | options)
    with pytest.raises(ValueError, match=f"cannot resume .*{was}"):
        other.load_state_dict(state)


@pytest.mark.parametrize("make", ["files", "memory"])
def test_a_state_of_rewritten_rows_is_refused(folder: Path, make: str) -> None:
    """As many rows in groups of the same sizes, of which one label is another."""

    def loader() -> ChunkLoader:
        if make != "memory":
            return loader_of(ParquetSource(folder / "rows"))
        chunk = read_parquet([file.path for file in source.files])
        return ChunkLoader(
            chunk,
            schema_of(),
            config=LoaderConfig(batch_size=8, negatives=0, shuffle=False),
        )

    source = parquet(folder / "rows", [30, 30])
    state = loader().state_dict(step=2)
    loader().load_state_dict(state)
    file = Path(source.files[0].path)
    kept = file.read_bytes()
    table = pq.read_table(file)
    flipped = pa.array(
        [
            not label if row == 41 else label
            for row, label in enumerate(table["label"].to_pylist())
        ]
    )
    pq.write_table(
        table.set_column(5, "label", flipped),
        file,
        row_group_size=30,
        write_page_checksum=True,
    )
    with pytest.raises(
        ValueError,
        match=r"cannot resume .*: content was .*; put settings and",
    ):
        loader().load_state_dict(state)
    file.write_bytes(kept)
    loader().load_state_dict(state)
