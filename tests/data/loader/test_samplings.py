"""Every sampling of the loader: what it draws, and that a resumed stream equals the uninterrupted one."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contracts import run_ranks
from tests.data.loader.test_loader import DATA, ITEM_TABLE, ITEMS, rows_of, schema_of
from tests.data.stream_sets import parquet
from tests.data.stream_sets import schema_of as stream_schema
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column, concatenate
from torchrec_ext.data.files.sources import FileSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig, training_loader
from torchrec_ext.data.negatives.hard import HardNegatives
from torchrec_ext.data.negatives.mixed import MixedCandidates, MixedNegatives
from torchrec_ext.data.negatives.registry import NEGATIVES
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.losses import in_batch_softmax
from torchrec_ext.modules.softmax import in_batch_negatives
from torchrec_ext.schema import BatchSchema

pytestmark = pytest.mark.unit
SIZE, EXTRA = 53, 5
TABLES = {"user_id": SIZE, "history": ITEMS + 1, "item_id": ITEMS + 1, "kind": 3}
MIXED = {"sampling": "mixed", "negatives": 0, "shared_negatives": EXTRA}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "popularity": {"sampling": "popularity"},
    "hard": {"sampling": "hard", "hard_k": 4},
    "mixed": MIXED,
    "mixed, estimated": MIXED | {"frequency": "estimated"},
}


def schema(shared: tuple[str, ...] = ()) -> BatchSchema:
    made = schema_of(TABLES, ("row",))
    return BatchSchema(
        sparse=made.sparse, dense=made.dense, shared=frozenset(shared), label_range=None
    )


def best(epoch: int) -> Any:
    """An index that says other items each epoch."""
    return lambda users: (
        1 + (users[:, None] * 5 + np.arange(12) * 7 + epoch * 3) % ITEMS
    )


def loader_of(
    options: dict[str, Any], shared: tuple[str, ...] = (), **places: Any
) -> ChunkLoader:
    rows = rows_of(SIZE)
    config = LoaderConfig(**{"batch_size": 8, "negatives": 2, "prefetch": 0} | options)
    easy = UniformNegatives(
        ITEMS, rows["user_id"].values, rows["item_id"].values, config.seed
    )
    sampler: Any = easy
    if config.sampling == "hard":
        sampler = HardNegatives(easy, k=config.hard_k, share=config.hard_share)
    elif config.sampling == "mixed":
        counts = (
            np.bincount(rows["item_id"].values, minlength=ITEMS + 1)
            if config.frequency == "counted"
            else None
        )
        sampler = MixedCandidates(
            MixedNegatives(ITEMS, EXTRA, config.batch_size, config.seed), counts
        )
    refresh = best if config.sampling == "hard" else None
    return ChunkLoader(
        rows,
        schema(shared),
        config=config,
        items=ITEM_TABLE,
        negatives=sampler,
        refresh=refresh,
        **places,
    )


def equal(left: TowerBatch, right: TowerBatch) -> bool:
    names = ("dense", "labels", "weights", "total_weight", "log_q")
    return all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    ) and (
        torch.equal(left.sparse.values(), right.sparse.values())
        and torch.equal(left.sparse.lengths(), right.sparse.lengths())
    )


def epochs(loader: ChunkLoader, first: int, last: int) -> Iterator[list[TowerBatch]]:
    for epoch in range(first, last):
        loader.set_epoch(epoch)
        yield list(loader)


@pytest.mark.parametrize("stop", [0, 3, 7])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_resumed_stream_equals_the_uninterrupted_one_in_this_epoch_and_the_next(
    sampling: str, stop: int
) -> None:
    options = SAMPLINGS[sampling]
    expected = list(epochs(loader_of(options, rank=1, world_size=2), 0, 4))
    first = loader_of(options | {"prefetch": 3}, rank=0, world_size=3)
    list(epochs(first, 0, 2))
    first.set_epoch(2)
    batches = iter(first)
    for _ in zip(range(min(stop + 1, 7)), batches, strict=False):
        # a pipeline fetches ahead of the step that it has finished
        pass
    file = io.BytesIO()
    torch.save(first.state_dict(step=stop), file)
    batches.close()  # type: ignore[attr-defined]
    second = loader_of(options, rank=1, world_size=2)
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    if stop < 7:  # an epoch that is over need not be asked for its last batches
        resumed = list(second)
        assert len(resumed) == 7 - stop
        assert all(
            equal(*pair) for pair in zip(resumed, expected[2][stop:], strict=True)
        )
    (following,) = epochs(second, 3, 4)
    assert all(equal(*pair) for pair in zip(following, expected[3], strict=True))


def test_every_sampler_is_resumed_here() -> None:
    assert {
        options.get("sampling", "uniform") for options in SAMPLINGS.values()
    } == set(NEGATIVES)


def test_each_epoch_but_the_first_draws_from_its_own_refresh() -> None:
    loader = loader_of({"sampling": "hard", "hard_k": 4, "hard_share": 0.9})
    uniform = loader_of({})
    for epoch, (hard, easy) in enumerate(
        zip(epochs(loader, 0, 3), epochs(uniform, 0, 3), strict=True)
    ):
        same = [
            torch.equal(
                left.sparse["item_id"].values(), right.sparse["item_id"].values()
            )
            for left, right in zip(hard, easy, strict=True)
        ]
        assert all(same) if epoch == 0 else not any(same)
        if epoch == 0:
            continue
        users, items = (
            np.concatenate([batch.sparse[name].values() for batch in hard])
            for name in ("user_id", "item_id")
        )
        negative = (
            np.concatenate([batch.labels[batch.weights > 0] for batch in hard]) == 0
        )
        among = (best(epoch)(users) == items[:, None]).any(axis=1)
        assert among[negative].mean() > 0.8
    assert loader.state_dict()["sampler"]["refreshes"] == 2


@pytest.mark.parametrize(
    "shared",
    [(), ("user_id", "history", "row"), ("item_id", "kind")],
    ids=["alone", "users", "items"],
)
@pytest.mark.parametrize("frequency", ["counted", "estimated"])
def test_mixed_candidates_follow_the_positives_and_are_the_same_on_any_number_of_ranks(
    frequency: str, shared: tuple[str, ...]
) -> None:
    streams = []
    for world_size in (1, 2, 3):
        loaders = [
            loader_of(
                MIXED | {"frequency": frequency},
                shared,
                rank=rank,
                world_size=world_size,
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


def test_log_q_of_counted_candidates_is_the_mixture_of_both_sides() -> None:
    counts = np.bincount(rows_of(SIZE)["item_id"].values, minlength=ITEMS + 1)
    for batch in loader_of(MIXED):
        for item, _, log_q in candidates(batch, 0, 8) + candidates(
            batch, 8, len(batch)
        ):
            q = (8 * counts[item] / SIZE + EXTRA / ITEMS) / (8 + EXTRA)
            assert log_q == pytest.approx(np.log(q), abs=1e-3)


def mixed_losses(runtime: Runtime) -> list[float]:
    """Returns the in-batch softmax of each step, over positives and extra candidates, as SharedCandidates describes."""
    users, items = (
        torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        for rows in (SIZE, ITEMS + 1)
    )
    queries, losses = -(-8 // runtime.world_size), []
    for batch in loader_of(MIXED, rank=runtime.rank, world_size=runtime.world_size):
        who, what = (
            batch.sparse[name].to_padded_dense(1)[:, 0].long()
            for name in ("user_id", "item_id")
        )
        negatives = in_batch_negatives(
            items[what].double(),
            what,
            log_q=batch.log_q,
            queries=queries,
            rows=len(batch),
        )
        weights, total = batch.weights[:queries], batch.total_weight
        losses.append(
            float(
                in_batch_softmax(
                    users[who[:queries]].double(),
                    negatives,
                    weights=weights,
                    total_weight=total,
                )
            )
        )
    return losses


@pytest.mark.launch
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_of_the_ranks_losses_over_mixed_candidates_is_that_of_one_rank(
    world_size: int,
) -> None:
    expected = mixed_losses(
        Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1)
    )
    ranks = run_ranks(mixed_losses, world_size)
    assert [
        sum(step) / world_size for step in zip(*ranks, strict=True)
    ] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stop", [3, 7])
def test_a_state_is_the_same_wherever_the_prefetch_thread_is(stop: int) -> None:
    """It has reached the end of the epoch, which the caller has not; the epoch after it is begun from either state."""
    options = SAMPLINGS["mixed, estimated"]
    expected = list(epochs(loader_of(options), 0, 3))
    first = loader_of(options | {"prefetch": 20})
    others = threading.enumerate()
    batches = iter(first)
    for _ in range(stop):
        next(batches)
    for thread in threading.enumerate():
        if thread.name == "torchrec_ext-prefetch" and thread not in others:
            thread.join()
    second = loader_of(options)
    second.load_state_dict(first.state_dict(step=stop))
    if stop < 7:
        assert all(
            equal(*pair) for pair in zip(second, expected[0][stop:], strict=True)
        )
    assert all(
        equal(*pair)
        for pair in zip(next(epochs(second, 1, 2)), expected[1], strict=True)
    )
    first.set_epoch(1)
    second.load_state_dict(first.state_dict())
    assert all(equal(*pair) for pair in zip(second, expected[1], strict=True))
    assert all(
        equal(*pair)
        for pair in zip(next(epochs(second, 2, 3)), expected[2], strict=True)
    )


def test_an_estimate_comes_near_how_often_a_batch_holds_an_item() -> None:
    p = 1 / np.arange(1, ITEMS + 1)
    p /= p.sum()
    mixed = MixedNegatives(ITEMS, 1, 4)
    sampler = MixedCandidates(mixed)
    rng, every = np.random.default_rng(0), np.arange(1, ITEMS + 1)
    estimates: list[np.ndarray] = []
    for epoch in range(2):
        sampler.begin(epoch)
        for step in range(1500):
            sampler.observe(rng.choice(ITEMS, 4, p=p) + 1)
            if epoch and step > 500:
                estimates.append(sampler.log_q(every))
        sampler.end()
    expected = mixed.log_q(
        torch.from_numpy(np.log(1 - (1 - p) ** 4) - np.log(4))
    ).numpy()
    assert np.abs(np.mean(estimates, axis=0) - expected).mean() < 0.1


def test_mixed_candidates_of_files_are_those_of_rows_in_memory(tmp_path: Path) -> None:
    source = parquet(tmp_path, [20, 21])
    numbers = np.arange(41)
    chunk = source_rows(source)
    items = Chunk({"item_id": Column(np.arange(31))})
    config = LoaderConfig(batch_size=8, shuffle=False, prefetch=0, **MIXED)  # type: ignore[arg-type]
    sampler = MixedCandidates(
        MixedNegatives(30, EXTRA, 8), np.bincount(1 + numbers % 30, minlength=31)
    )
    memory, stream = (
        ChunkLoader(
            rows, stream_schema(), config=config, items=items, negatives=sampler
        )
        for rows in (chunk, source)
    )
    assert all(equal(left, right) for left, right in zip(memory, stream, strict=True))
    with pytest.raises(
        ValueError,
        match="a frequency estimate with a source of rows: a rank sees its own rows only",
    ):
        ChunkLoader(
            source,
            stream_schema(),
            config=config,
            items=items,
            negatives=MixedCandidates(sampler.mixed),
        )


def source_rows(source: FileSource) -> Chunk:
    chunks = [
        source.read(group, ["user_id", "history", "item_id", "row"])
        for group in source.groups
    ]
    return Chunk(
        {name: concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_generated_data_runs_through_the_training_loader(sampling: str) -> None:
    config = LoaderConfig(**{"batch_size": 128} | SAMPLINGS[sampling])
    asked: list[int] = []

    def refresh(epoch: int) -> Any:
        asked.append(epoch)
        return lambda users: np.ones((len(users), 1), dtype=np.int64)

    loader = training_loader(
        DATA,
        schema_of(dict(DATA.vocab), DATA.dense),
        config,
        refresh=refresh,
        rank=1,
        world_size=2,
    )
    for batches in epochs(loader, 0, 2):
        assert len(batches) == len(loader)
        assert all(batch.log_q is not None for batch in batches)
    assert asked == ([1] if sampling == "hard" else [])


def test_samplers_that_do_not_fit_are_refused() -> None:
    rows, config = rows_of(SIZE), LoaderConfig(batch_size=8, **MIXED)  # type: ignore[arg-type]
    uniform = UniformNegatives(ITEMS, rows["user_id"].values, rows["item_id"].values)
    mixed = MixedCandidates(
        MixedNegatives(ITEMS, EXTRA, 8), np.ones(ITEMS + 1, np.int64)
    )

    def make(
        config: LoaderConfig,
        sampler: Any,
        items: Chunk | None = ITEM_TABLE,
        **options: Any,
    ) -> None:
        ChunkLoader(
            rows, schema(), config=config, items=items, negatives=sampler, **options
        )

    with pytest.raises(
        ValueError, match=r"loader\.shared_negatives=5, but no sampler was given"
    ):
        make(config, None)
    with pytest.raises(
        ValueError,
        match=r"sampling='mixed' with negatives=UniformNegatives: must be MixedCandidates",
    ):
        make(config, uniform)
    with pytest.raises(
        ValueError,
        match=r"sampling='uniform' with negatives=MixedCandidates: must be a sampler with draw",
    ):
        make(LoaderConfig(), mixed)
    with pytest.raises(ValueError, match=r"sampling='mixed' without items"):
        make(config, mixed, None)
    with pytest.raises(
        ValueError,
        match=r"MixedNegatives\(extra=5, batch_size=8\) with loader\.shared_negatives=5 and loader\.batch_size=9",
    ):
        make(LoaderConfig(batch_size=9, **MIXED), mixed)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"refresh with negatives=UniformNegatives: only HardNegatives are refreshed",
    ):
        make(LoaderConfig(), uniform, refresh=best)
    with pytest.raises(
        ValueError,
        match=r"device=cpu with loader\.sampling='mixed': its candidates are drawn on the host",
    ):
        make(config, mixed, device="cpu")
    with pytest.raises(
        ValueError,
        match=r"loader\.sampling='hard' without refresh: nobody says which items are hard",
    ):
        training_loader(DATA, schema(), LoaderConfig(sampling="hard"))
    with pytest.raises(
        ValueError,
        match=r"counts: shape \(3,\) with sum 3, must be \(num_items \+ 1,\) = \(31,\)",
    ):
        MixedCandidates(mixed.mixed, np.ones(3, np.int64))
