from __future__ import annotations

import dataclasses
import re
import warnings
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from tests.data.stream_sets import check_weights, schema_by, steps_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import (
    ChunkLoader,
    LoaderConfig,
)
from torchrec_ext.data.loader.shared import CatalogueCandidates
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.modules.losses import bce
from torchrec_ext.schema import BatchSchema, DataError

pytestmark = pytest.mark.unit
ITEMS = 30


def schema_of(
    rows: dict[str, int], dense: tuple[str, ...] = (), shared: tuple[str, ...] = ()
) -> BatchSchema:
    return schema_by(rows, dense=dense, shared=shared, label_range=None)


def rows_of(size: int) -> Chunk:
    """Distinct (user, item) pairs, so that a multiset says which row was seen how often."""
    numbers = np.arange(size)
    return Chunk(
        {
            "user_id": Column(numbers // 3),
            "item_id": Column(1 + numbers % ITEMS),
            "history": Column.from_lengths(
                np.arange((numbers % 4).sum()) % ITEMS, numbers % 4
            ),
            "row": Column(numbers.astype(np.float32)),
            "weight": Column((numbers % 5).astype(np.float32)),
        }
    )


ITEM_TABLE = Chunk(
    {"item_id": Column(np.arange(ITEMS + 1)), "kind": Column(np.arange(ITEMS + 1) % 3)}
)


SCHEMA = schema_of(
    {"user_id": 2_000, "history": ITEMS + 1, "item_id": ITEMS + 1, "kind": 3}, ("row",)
)


def loader_of(
    size: int, rank: int = 0, world_size: int = 1, **options: Any
) -> ChunkLoader:
    chunk = rows_of(size)
    negatives = UniformNegatives(
        ITEMS, chunk["user_id"].values, chunk["item_id"].values, options.get("seed", 0)
    )
    config = LoaderConfig(**{"batch_size": 8, "negatives": 2} | options)
    return ChunkLoader(
        chunk,
        SCHEMA,
        config=config,
        items=ITEM_TABLE,
        negatives=negatives,
        rank=rank,
        world_size=world_size,
    )


def samples(batch: TowerBatch) -> list[tuple[int, int, int, float]]:
    """(user, item, label, weight) of the rows that count."""
    real = batch.weights > 0
    users, items = (batch.sparse[name].values() for name in ("user_id", "item_id"))
    return list(
        zip(
            users.tolist(),
            items.tolist(),
            batch.labels[real].long().tolist(),
            batch.weights[real].tolist(),
            strict=True,
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 120),
    batch_size=st.integers(1, 40),
    negatives=st.integers(0, 3),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
@example(size=1003, batch_size=64, negatives=4, epoch=1, shuffle=True)
def test_any_number_of_ranks_sees_the_same_samples_once(
    size: int, batch_size: int, negatives: int, epoch: int, shuffle: bool
) -> None:
    options = {"batch_size": batch_size, "negatives": negatives, "shuffle": shuffle}
    seen: list[Counter[tuple[int, int, int, float]]] = []
    for world_size in (1, 2, 3, 4):
        steps = steps_of(partial(loader_of, size, **options), world_size, epoch)
        assert len(steps) == -(-size // batch_size)
        rows = -(-min(batch_size, size) // world_size)
        assert len(steps[0][0]) == rows * (1 + negatives)
        seen.append(Counter())
        for step in steps:
            check_weights(step)
            for batch in step:
                seen[-1].update(samples(batch))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    positives = Counter(
        (user, item) for user, item, label, _ in seen[0].elements() if label == 1
    )
    pairs = [rows_of(size)[name].values.tolist() for name in ("user_id", "item_id")]
    assert positives == Counter(zip(*pairs, strict=True))
    assert seen[0].total() == size * (1 + negatives)


def test_batches_own_their_memory() -> None:
    """A batch that is kept or sent must not hold the rows of the other batches that were gathered with it."""
    first, second, *_ = loader_of(100, shuffle=False)
    second.dense.zero_()
    assert first.dense[:, 0].tolist() == np.arange(8).repeat(3).tolist()
    assert first.log_q is not None
    for tensor in (
        first.dense,
        first.labels,
        first.weights,
        first.log_q,
        first.sparse.values(),
    ):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_pass_that_repeats_the_order_of_the_one_before_is_told() -> None:
    loader = loader_of(20, batch_size=8)
    first = [samples(batch) for batch in loader]
    with pytest.warns(
        UserWarning, match=r"another pass over epoch 0, in the same order"
    ):
        assert [samples(batch) for batch in loader] == first
    loader.set_epoch(1)
    in_file_order = loader_of(20, batch_size=8, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [samples(batch) for batch in loader] != first
        for _ in range(2):
            assert len(list(in_file_order)) == len(in_file_order)


def test_weights_and_labels_come_from_the_columns_that_are_named() -> None:
    loader = loader_of(23, negatives=0, weight="weight", label="weight", shuffle=False)
    for step, batch in enumerate(loader):
        rows = np.arange(step * 8, min(23, step * 8 + 8))
        assert (
            batch.weights[: len(rows)].tolist()
            == batch.labels[: len(rows)].tolist()
            == (rows % 5).tolist()
        )
        assert batch.total_weight == (rows % 5).sum()
        assert batch.log_q is None
    # Without a weight there is no loss.
    loader = loader_of(2, batch_size=1, negatives=0, weight="weight", shuffle=False)
    assert bce(torch.ones(1), next(iter(loader))) == 0


def test_a_column_of_labels_that_nothing_reads_is_told() -> None:
    rows = rows_of(8).with_columns({"label": Column(np.ones(8, np.float32))})
    schema = dataclasses.replace(schema_of({"user_id": 50}), label_range=(0.0, 1.0))
    with pytest.warns(UserWarning, match=r"every row has label 1.*label='label'"):
        ChunkLoader(rows, schema, config=LoaderConfig(negatives=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChunkLoader(rows, schema, config=LoaderConfig(negatives=0, label="label"))


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    loader = loader_of(23, drop_last=True)
    assert len(loader) == len(list(loader)) == 2
    assert all(bool((batch.weights == 1).all()) for batch in loader)
    with pytest.raises(
        DataError,
        match=r"7 rows with loader\.batch_size=8 and loader\.drop_last=True make no step",
    ):
        loader_of(7, drop_last=True)


def test_a_loader_in_several_workers_is_refused() -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (int(batch.labels.sum()) for batch in loader_of(23))

    assert len(list(DataLoader(Rows(), num_workers=1))) == 3
    with pytest.raises(RuntimeError, match="ChunkLoader in 2 workers of a DataLoader"):
        list(DataLoader(Rows(), num_workers=2))


@pytest.mark.parametrize("step", [-1, 4])
def test_a_position_outside_of_the_epoch_is_refused(step: int) -> None:
    loader = loader_of(23)
    assert loader.state_dict(step=3)["step"] == 3
    with pytest.raises(ValueError, match=f"step={step}: epoch 0 has 3 steps"):
        loader.state_dict(step=step)


def test_an_id_out_of_range_names_its_row_in_the_set() -> None:
    chunk = rows_of(30)
    users = chunk["user_id"].values.copy()
    users[17] = 99
    schema = schema_of({"user_id": 30})
    config = LoaderConfig(batch_size=8, negatives=0)
    with pytest.raises(
        DataError,
        match=r"the rows in memory, row 17, column 'user_id': id 99 is outside table 'user_id'",
    ):
        list(
            ChunkLoader(
                chunk.with_columns({"user_id": Column(users)}), schema, config=config
            )
        )
    items = chunk["item_id"].values.copy()
    items[4] = -3
    broken = chunk.with_columns({"item_id": Column(items)})
    negatives = UniformNegatives(ITEMS, users, chunk["item_id"].values)
    schema = schema_of({"user_id": 100, "item_id": 31})
    with pytest.raises(
        DataError, match="row 4, column 'item_id': id -3 has no features"
    ):
        list(
            ChunkLoader(
                broken,
                schema,
                config=LoaderConfig(batch_size=8),
                items=ITEM_TABLE,
                negatives=negatives,
            )
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"loader\.batch_size=0: must be 1 or more"),
        ({"batch_size": "512"}, r"loader\.batch_size='512': must be a whole number"),
        ({"negatives": 4.0}, r"loader\.negatives=4\.0: must be a whole number"),
        ({"seed": -1}, r"loader\.seed=-1: must be 0 or more"),
        ({"negatives": -1}, r"loader\.negatives=-1: must be 0 or more"),
        (
            {"sampling": "soft"},
            r"loader\.sampling='soft': must be one of uniform, popularity",
        ),
        ({"label": "label"}, r"loader\.label='label' with loader\.negatives=4"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderConfig(**options)


def test_samplers_that_do_not_fit_are_refused() -> None:
    rows = rows_of(53)
    uniform = UniformNegatives(ITEMS, rows["user_id"].values, rows["item_id"].values)
    everything = CatalogueCandidates(np.arange(1, ITEMS + 1))
    of_items = ("item_id", "kind")

    def make(
        config: LoaderConfig,
        sampler: Any,
        items: Chunk | None = ITEM_TABLE,
        shared: tuple[str, ...] = (),
    ) -> None:
        tables = {"user_id": 53, "history": ITEMS + 1, "item_id": ITEMS + 1, "kind": 3}
        made = schema_of(tables, ("row",), shared=shared)
        ChunkLoader(rows, made, config=config, items=items, negatives=sampler)

    for value, arguments, options in (
        ("loader.negatives=4, ", (LoaderConfig(), everything), {}),
        ("loader.negatives=4 without", (LoaderConfig(), None), {}),
        ("loader.negatives=4 without", (LoaderConfig(), uniform, None), {}),
        (
            "shared=item_id, kind: each",
            (LoaderConfig(), uniform),
            {"shared": of_items},
        ),
        (
            "loader.device='cpu' with a loss over",
            (LoaderConfig(negatives=0, device="cpu"), everything),
            {},
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(value)):
            make(*arguments, **options)  # type: ignore[arg-type]
