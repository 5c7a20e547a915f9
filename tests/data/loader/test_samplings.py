"""Every sampling of the loader: what it draws, and that a resumed stream equals the uninterrupted one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.data.loader.test_loader import ITEM_TABLE, ITEMS, rows_of, schema_of
from tests.data.loader.test_places import loader_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.mixed import MixedNegatives
from torchrec_ext.data.negatives.samplers import UniformNegatives

pytestmark = pytest.mark.unit
SIZE, EXTRA = 53, 5
TABLES = {"user_id": SIZE, "history": ITEMS + 1, "item_id": ITEMS + 1, "kind": 3}
MIXED: dict[str, Any] = {"sampling": "mixed", "negatives": 0, "shared_negatives": EXTRA}


@pytest.mark.parametrize(
    "shared",
    [(), ("user_id", "history", "row"), ("item_id", "kind")],
    ids=["alone", "users", "items"],
)
def test_mixed_candidates_follow_the_positives_and_are_the_same_on_any_number_of_ranks(
    shared: tuple[str, ...],
) -> None:
    rows, streams = rows_of(SIZE), []
    for world_size in (1, 2, 3):
        loaders = [
            loader_of(
                rows,
                rows,
                shared=shared,
                place={"rank": rank, "world_size": world_size},
                **MIXED,
            )
            for rank in range(world_size)
        ]
        queries = -(-8 // world_size)
        stream = []
        for step in zip(*loaders, strict=True):
            seen: list[list[Any]] = [[], []]
            for batch in step:
                assert len(batch) == queries + -(-EXTRA // world_size)
                assert (
                    batch.weights[queries:].sum() == batch.labels[queries:].sum() == 0
                )
                assert batch.log_q is not None
                for side, (low, high) in enumerate(
                    ((0, queries), (queries, len(batch)))
                ):
                    seen[side] += candidates(batch, low, high)
            stream.append(seen)
        streams.append(stream)
    assert streams[0] == streams[1] == streams[2]
    assert [len(positives) for positives, _ in streams[0]] == [8] * 6 + [5]
    assert {len(extra) for _, extra in streams[0]} == {EXTRA}


def candidates(batch: TowerBatch, low: int, high: int) -> list[tuple[int, int, float]]:
    """Returns (item, kind, log q) of the rows from ``low`` to ``high`` that are no padding; checks users and dense."""
    rows = []
    for row in range(low, high):
        bags = {}
        for part, at in (
            (batch.sparse, row),
            *(
                [(batch.shared.sparse, int(batch.shared.index[row]))]
                if batch.shared
                else []
            ),
        ):
            bags |= {name: part[name].to_dense()[at].tolist() for name in part.keys()}  # noqa: SIM118
        if bags["item_id"]:
            (item,), (kind,) = bags["item_id"], bags["kind"]
            assert kind == item % 3
            if low == 0:
                assert len(bags["user_id"]) == 1
            elif not (batch.shared and "user_id" in batch.shared.sparse.keys()):  # noqa: SIM118
                assert bags["user_id"] == bags["history"] == []
            rows.append((item, kind, round(float(batch.log_q[row]), 4)))  # type: ignore[index]
    return rows


def test_samplers_that_do_not_fit_are_refused() -> None:
    rows, config = rows_of(SIZE), LoaderConfig(batch_size=8, **MIXED)  # type: ignore[arg-type]
    uniform = UniformNegatives(ITEMS, rows["user_id"].values, rows["item_id"].values)
    mixed = MixedNegatives(ITEMS, EXTRA, 8, np.ones(ITEMS + 1, np.int64))

    def make(
        config: LoaderConfig,
        sampler: Any,
        items: Chunk | None = ITEM_TABLE,
        **options: Any,
    ) -> None:
        made = schema_of(TABLES, ("row",))
        ChunkLoader(
            rows, made, config=config, items=items, negatives=sampler, **options
        )

    for given, sampler, value in (
        (config, None, "shared_negatives=5 with negatives=NoneType"),
        (config, uniform, "shared_negatives=5 with negatives=UniformNegatives"),
        (LoaderConfig(), mixed, "negatives=MixedNegatives"),
        (LoaderConfig(negatives=4), None, "loader.negatives=4, "),
    ):
        with pytest.raises(ValueError, match=re.escape(value)):
            make(given, sampler)
    with pytest.raises(
        ValueError, match=r"negatives=4 with shared=item_id, kind: each"
    ):
        ChunkLoader(
            rows,
            schema_of(TABLES, ("row",), shared=("item_id", "kind")),
            config=LoaderConfig(),
            items=ITEM_TABLE,
            negatives=uniform,
        )
    with pytest.raises(ValueError, match="MixedNegatives without items"):
        make(config, mixed, None)
    with pytest.raises(ValueError, match=r"device=cpu with loader\.sampling='mixed'"):
        make(config, mixed, device="cpu")
