"""NextItemModel: sharded equals unsharded, the known answer is found, and a giant catalogue takes no memory to plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from tests.contracts import run_ranks
from tests.sharded import Case, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.loader import ChunkLoader
from torchrec_ext.data.planted import planted_sequences
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.models.session import NextItemModel
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.schema import Jagged

META = torch.device("meta")
# Its sequences are no longer than 20 items.
ITEMS = 40
CLICKS, _ = planted_sequences(users=60, items=ITEMS)
DATA = Column.grouped(CLICKS.items, CLICKS.users - 1, 60)
STEPS = 6


def small(device: torch.device | None = None) -> NextItemModel:
    torch.manual_seed(0)
    encoder = SessionEncoder(16, 20, layers=2, heads=2, hidden=32, causal=True)
    table = EmbeddingConfig(
        name="item_id",
        num_embeddings=ITEMS + 1,
        embedding_dim=16,
        init_fn=partial(torch.nn.init.normal_, std=0.3),
    )
    return NextItemModel(table, encoder, device=device)


def batches(
    negatives: int, rank: int = 0, world_size: int = 1, size: int = 10
) -> Iterator[TowerBatch]:
    config = LoaderConfig(batch_size=size, negatives=negatives)
    loader = ChunkLoader(
        Chunk({"session": DATA}),
        small(META).schema(),
        config=config,
        sessions=ITEMS,
        rank=rank,
        world_size=world_size,
    )
    return iter(loader)


# Dense layers by SGD: attention does not change with the bias of its keys, and Adagrad
# would magnify the noise in that gradient.
OPTIMIZERS = {
    "adagrad": OptimizerConfig(
        tables="adagrad", tables_lr=0.1, dense="sgd", dense_lr=0.2
    ),
    "sgd": OptimizerConfig(tables="sgd", tables_lr=2.0, dense="sgd", dense_lr=0.2),
}


def case(sharding: str, kind: str, negatives: int, size: int = 10) -> Case:
    return Case(
        small,
        partial(batches, negatives, size=size),
        OPTIMIZERS[kind],
        PlanConfig(sharding=sharding),  # type: ignore[arg-type]
        STEPS,
    )


CASES = {
    name: case(*name)
    for name in (
        ("row_wise", "sgd", 0),
        ("row_wise", "adagrad", 2),
        ("table_wise", "adagrad", 0),
        ("column_wise", "sgd", 2),
    )
}
# One sequence for two ranks in the last step.
CASES["a rank without a sequence"] = case("row_wise", "sgd", 0, len(DATA) - 1)  # type: ignore[index]
ONE = {"one rank": case("auto", "sgd", 0)}


@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE), (2, CASES)])
def test_sharded_equals_unsharded(world_size: int, cases: dict[Any, Case]) -> None:
    ranks = run_ranks(on_ranks, world_size, cases)
    for name, each in cases.items():
        expected = alone(each)
        for key, value in expected.state.items():
            moved = (value - expected.first[key]).abs().max()
            assert float(moved) > 1e-3, "or there would be nothing to compare"
        found = [rank[name] for rank in ranks]
        check_equal(found, expected, atol=2e-4)
        assert all(rank.pipelined == 1 for rank in found)
        if name == "a rank without a sequence":
            assert [len(rank.losses) for rank in found] == [2, 2]
            assert 0.0 in (rank.losses[1] for rank in found)


@pytest.mark.unit
def test_the_loss_is_the_cross_entropy_of_what_embed_scores() -> None:
    """What ranking does with the model is what it was trained for: prefix by prefix, over the whole catalogue."""
    model = small().eval()
    batch = next(batches(0))
    jagged = batch.sparse["session"]
    sequences = torch.split(jagged.values(), jagged.lengths().tolist())
    items = model.embed(
        "item",
        only("item_id", [torch.tensor([item]) for item in range(ITEMS + 1)]),
    )
    losses = []
    for sequence in sequences:
        prefixes = [sequence[:stop] for stop in range(1, len(sequence))]
        scores = model.interaction.score_all(
            model.embed("session", only("session", prefixes)), items
        )[:, 1:]
        losses.append(
            torch.nn.functional.cross_entropy(
                scores, sequence[1:] - 1, reduction="none"
            ).detach()
        )
    assert float(model(batch)[0].detach()) == pytest.approx(
        float(torch.cat(losses).mean()), abs=1e-5
    )


def only(feature: str, rows: list[Tensor]) -> TowerBatch:
    """Rows of one feature; the other one is empty."""
    size = len(rows)
    empty = Jagged(
        torch.zeros(0, dtype=torch.int64), torch.zeros(size, dtype=torch.int32)
    )
    bags = Jagged(torch.cat(rows), torch.tensor([len(row) for row in rows]))
    columns = {"session": empty, "item_id": empty} | {feature: bags}
    return small(META).schema().assemble(columns, labels=torch.zeros(size))


@pytest.mark.unit
def test_an_empty_session_is_a_vector_of_zeros() -> None:
    vectors = (
        small()
        .eval()
        .embed(
            "session",
            only("session", [torch.tensor([3, 4]), torch.zeros(0, dtype=torch.int64)]),
        )
    )
    assert bool(vectors[0].any())
    assert not bool(vectors[1].any())


@pytest.mark.unit
def test_what_does_not_fit_is_named() -> None:
    table = EmbeddingConfig(name="item_id", num_embeddings=9, embedding_dim=16)
    with pytest.raises(
        ValueError,
        match="encoder: is not causal, so each step would see the item it must predict",
    ):
        NextItemModel(table, SessionEncoder(16, 5))
    with pytest.raises(ValueError, match=r"width D=8 .* embedding_dim=16; must be"):
        NextItemModel(table, SessionEncoder(8, 5, causal=True))
    with pytest.raises(
        ValueError, match="tower 'user' is not one of 'session', 'item'"
    ):
        small().embed("user", next(batches(0)))
    with pytest.raises(
        ValueError,
        match="a sequence of 21 steps in row 0 of the batch: must have at most max_length=20",
    ):
        small()(only("session", [torch.ones(22, dtype=torch.int64)]))
