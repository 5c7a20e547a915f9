"""BST: sharded equals unsharded, the pipeline follows it, and it learns what only session and target together tell."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from tests.contracts import run_ranks
from tests.modules.test_session_encoder import same_weights
from tests.sharded import Case, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.session import bst
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

META = torch.device("meta")
ITEMS, GAPS, WIDTH, S = 10, 8, 16, 4
OPTIMIZER = OptimizerConfig(tables="sgd", tables_lr=1.0, dense="sgd", dense_lr=0.1)


def small(device: torch.device | None = None, **options: Any) -> TowerModel:
    tables = [
        EmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=WIDTH,
            feature_names=features,
            init_fn=torch.nn.init.normal_,
        )
        for name, rows, features in (
            ("item_id", ITEMS, ["history", "item_id"]),
            ("gap", GAPS, ["gap"]),
        )
    ]
    user = EmbeddingBagConfig(
        name="user_id",
        num_embeddings=20,
        embedding_dim=8,
        feature_names=["user_id"],
        pooling=PoolingType.SUM,
    )
    settings = {
        "max_length": S,
        "heads": 2,
        "top_widths": (24, 8),
    } | options
    model = bst(
        tables,
        session=settings.pop("session_order", ["history", "gap"]),  # type: ignore[arg-type]
        target=["item_id"],
        others={"user": Tower([user], [8], dense=["hour"])},
        device=device,
        **settings,
    )
    # here, because tables off the meta device have drawn numbers too
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
        if name.endswith(".positions"):
            torch.nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
    return model


def batches(
    count: int, size: int = 24, *, rank: int = 0, world_size: int = 1
) -> Iterator[TowerBatch]:
    """Whether the target is in the session, in any place: a rule that neither of them tells alone."""
    schema, generator = small(META).schema(), torch.Generator().manual_seed(0)
    for _ in range(count):
        lengths = torch.randint(0, S + 1, (size,), generator=generator)
        rows = torch.repeat_interleave(lengths)
        history = torch.randint(1, ITEMS, (len(rows),), generator=generator)
        gaps = torch.randint(GAPS, (len(rows),), generator=generator)
        users = torch.randint(20, (size,), generator=generator)
        hours = torch.rand(size, generator=generator)
        targets = torch.randint(1, ITEMS, (size,), generator=generator)
        copied = (torch.rand(size, generator=generator) < 0.5) & (lengths > 0)
        ends = lengths.cumsum(0)
        picked = ends - 1 - (torch.rand(size, generator=generator) * lengths).long()
        targets = torch.where(copied, history[picked.clamp(min=0)], targets)
        labels = (
            torch.zeros(size)
            .index_add(0, rows, (history == targets[rows]).float())
            .clamp(max=1)
        )
        local = slice(rank * size // world_size, (rank + 1) * size // world_size)
        part = slice(
            int(ends[local.start] - lengths[local.start]), int(ends[local.stop - 1])
        )
        yield schema.assemble(
            {
                "history": Jagged(history[part], lengths[local]),
                "gap": Jagged(gaps[part], lengths[local]),
                "item_id": Jagged(targets[local]),
                "user_id": Jagged(users[local]),
            },
            {"hour": hours[local]},
            labels=labels[local],
            total_weight=size / world_size,
        )


def case(sharding: str) -> Case:
    plan = PlanConfig(sharding=sharding)  # type: ignore[arg-type]
    return Case(small, partial(batches, 20), OPTIMIZER, plan, 20)


@pytest.mark.parametrize(
    ("world_size", "shardings"), [(1, ["auto"]), (2, ["row_wise", "column_wise"])]
)
def test_sharded_equals_unsharded(world_size: int, shardings: list[str]) -> None:
    expected = alone(case("auto"))
    ranks = run_ranks(on_ranks, world_size, {name: case(name) for name in shardings})
    for name in shardings:
        found = [rank[name] for rank in ranks]
        check_equal(found, expected, atol=2e-4)
        assert all(rank.pipelined == 2 for rank in found), (
            "the items' and the gaps' as one, and the user's"
        )
    assert any(
        float((value - expected.first[name]).abs().max()) > 1e-3
        for name, value in expected.state.items()
        if "embed" in name
    )


@pytest.mark.unit
def test_the_target_stands_in_the_slot_of_its_table() -> None:
    """The logits are those of torch's transformer over steps that are concatenated by hand, the target's gap zeros."""
    model = small(
        session_order=("gap", "history"),
        position="none",
        top_widths=(),
    ).eval()
    initialise_tables(model, seed=7)
    held = {
        name.split(".")[-2]: weight.detach()
        for name, weight in model.look_ups.named_parameters()
    }
    top: Any = model.interaction
    batch = next(batches(1))
    layer = torch.nn.TransformerEncoderLayer(
        2 * WIDTH, 2, 8 * WIDTH, dropout=0.0, batch_first=True
    ).eval()
    same_weights(top.encoder.layers[0], layer)
    history, gaps, items = (
        batch.bags(name).to_dense() for name in ("history", "gap", "item_id")
    )
    expected = []
    for row in range(24):
        steps = [
            torch.cat([held["gap"][gap], held["item_id"][item]])
            for gap, item in zip(gaps[row], history[row], strict=True)
        ]
        steps.append(
            torch.cat([torch.zeros(WIDTH), held["item_id"][items[row][0]]]) + top.target
        )
        made = layer(torch.stack(steps)[None])[0].flip(0)
        flat = torch.nn.functional.pad(made, (0, 0, 0, S + 1 - len(made))).flatten()
        rest = model.embed("user", batch)[row]
        expected.append(top.mlp(torch.cat([flat, rest])))
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(batch), torch.cat(expected), rtol=0, atol=1e-5
        )


@pytest.mark.unit
def test_of_a_longer_session_the_most_recent_steps_are_read() -> None:
    model = small().eval()
    initialise_tables(model, seed=7)
    schema, ids = model.schema(), torch.tensor([9, 1, 2, 3, 4, 5])

    def logits(session: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([len(session)])
        sparse = {
            name: Jagged(session % size, lengths)
            for name, size in (("history", ITEMS), ("gap", GAPS))
        }
        sparse |= {
            "item_id": Jagged(torch.tensor([3])),
            "user_id": Jagged(torch.tensor([7])),
        }
        return model.logits(
            schema.assemble(sparse, {"hour": torch.zeros(1)}, labels=torch.zeros(1))
        )

    assert torch.equal(logits(ids), logits(ids[-S:]))
    assert not torch.equal(logits(ids[1:]), logits(ids[-S + 1 :]))


@pytest.mark.gpu
def test_sessions_of_unequal_lengths_train_on_a_gpu_as_on_a_cpu() -> None:
    losses: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for name, each in losses.items():
        torch.manual_seed(0)
        model = small().to(name)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches(12):
            loss, _ = model(batch.to(torch.device(name)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            each.append(float(loss.detach()))
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0, abs=1e-5)


@pytest.mark.unit
def test_features_of_one_step_that_are_not_equally_many_are_refused(
    device: torch.device,
) -> None:
    model = small().to(device)
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([3])
    sparse = {
        "history": Jagged(ids, lengths),
        "gap": Jagged(ids[:2], lengths - 1),
        "item_id": Jagged(ids[:1]),
        "user_id": Jagged(ids[:1]),
    }
    batch = model.schema().assemble(
        sparse, {"hour": torch.zeros(1)}, labels=torch.zeros(1)
    )
    with pytest.raises(ValueError, match="feature 'gap' has 2 values in row 0"):
        model(batch.to(device))
    # An assertion of a kernel would leave no device to go on with.
    good = next(batches(1)).to(device)
    assert model(good)[0].isfinite()
