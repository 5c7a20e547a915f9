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
from torchrec_ext.data.loader.shared import CatalogueCandidates
from torchrec_ext.data.negatives.samplers import UniformNegatives

pytestmark = pytest.mark.unit
SIZE = 53
TABLES = {"user_id": SIZE, "history": ITEMS + 1, "item_id": ITEMS + 1, "kind": 3}


@pytest.mark.parametrize(
    "shared",
    [(), ("user_id", "history", "row")],
    ids=["alone", "users"],
)
def test_the_catalogue_follows_the_positives_and_is_the_same_on_any_number_of_ranks(
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
                negatives=0,
                catalogue=True,
            )
            for rank in range(world_size)
        ]
        queries = -(-8 // world_size)
        stream = []
        for step in zip(*loaders, strict=True):
            seen: list[list[Any]] = [[], []]
            for batch in step:
                assert len(batch) == queries + -(-ITEMS // world_size)
                assert (
                    batch.weights[queries:].sum() == batch.labels[queries:].sum() == 0
                )
                for side, (low, high) in enumerate(
                    ((0, queries), (queries, len(batch)))
                ):
                    seen[side] += candidates(batch, low, high)
            stream.append(seen)
        streams.append(stream)
    assert streams[0] == streams[1] == streams[2]
    assert [len(positives) for positives, _ in streams[0]] == [8] * 6 + [5]
    assert {len(extra) for _, extra in streams[0]} == {ITEMS}


def candidates(batch: TowerBatch, low: int, high: int) -> list[tuple[int, int]]:
    """Returns (item, kind) of the rows from ``low`` to ``high`` that are no padding; checks users and dense."""
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
            rows.append((item, kind))
    return rows


def test_samplers_that_do_not_fit_are_refused() -> None:
    rows = rows_of(SIZE)
    uniform = UniformNegatives(ITEMS, rows["user_id"].values, rows["item_id"].values)
    everything = CatalogueCandidates(np.arange(1, ITEMS + 1))
    none = LoaderConfig(batch_size=8, negatives=0)
    of_items = ("item_id", "kind")

    def make(
        config: LoaderConfig,
        sampler: Any,
        items: Chunk | None = ITEM_TABLE,
        shared: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        made = schema_of(TABLES, ("row",), shared=shared)
        ChunkLoader(
            rows, made, config=config, items=items, negatives=sampler, **options
        )

    for value, arguments, options in (
        ("loader.negatives=4, ", (LoaderConfig(), everything), {}),
        ("loader.negatives=4 without", (LoaderConfig(), None), {}),
        ("loader.negatives=4 without", (LoaderConfig(), uniform, None), {}),
        (
            "shared=item_id, kind: each",
            (LoaderConfig(), uniform),
            {"shared": of_items},
        ),
        ("CatalogueCandidates without items", (none, everything, None), {}),
        ("loader.device='cpu' with a loss over", (none, everything), {"device": "cpu"}),
    ):
        with pytest.raises(ValueError, match=re.escape(value)):
            make(*arguments, **options)  # type: ignore[arg-type]
