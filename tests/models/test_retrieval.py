"""RetrievalModel: on two ranks what it is on one, a gradient for everything, and what it refuses."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, redrawn, table
from tests.sharded import Case, alone, check_equal, on_ranks
from tests.small_sets import planted_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.loader.shared import CatalogueCandidates
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.modules.interaction import Cosine, DotProduct, TopMLP
from torchrec_ext.modules.losses import softmax_losses
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

ROWS = 12
COUNTS = torch.arange(ITEMS)


def retrieval(
    interaction: nn.Module | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> RetrievalModel:
    torch.manual_seed(0)
    towers = {
        "user": Tower([table("user_id", USERS)], (8,)),
        "item": Tower([table("item_id", ITEMS)], (8,)),
    }
    torch.manual_seed(1)
    for tower in towers.values():
        for layer in tower.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return RetrievalModel(
        towers, interaction or DotProduct([8, 8]), device=device, **options
    )  # type: ignore[arg-type]


def batch(rank: int = 0, world_size: int = 1, *, seed: int = 0) -> TowerBatch:
    generator = torch.Generator().manual_seed(seed)
    users, items = (
        torch.randint(1, high, (ROWS,), generator=generator) for high in (USERS, ITEMS)
    )
    local = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return (
        retrieval(device=META)
        .schema()
        .assemble(
            {"user_id": Jagged(users[local]), "item_id": Jagged(items[local])},
            labels=torch.ones(len(users[local])),
            total_weight=ROWS / world_size,
        )
    )


@pytest.mark.unit
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "interaction", [DotProduct([8, 8]), Cosine([8, 8], temperature=0.2)]
)
def test_the_loss_is_a_softmax_over_the_batch_corrected_for_popularity(
    interaction: nn.Module, autocast: bool
) -> None:
    """Under autocast too: at the logits of 20 and more that log q makes, a score in bfloat16 would be .06 off."""
    # Every other item has never been taken, which counts as once.
    counts = COUNTS**4 * (COUNTS % 2)
    model, rows = retrieval(interaction, counts=counts).train(), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, prediction = model(rows)
        vectors = [output.float() for output in model.outputs(rows)]
    ids = rows.sparse["item_id"].values()
    scores = interaction.score_all(*vectors)  # type: ignore[operator]
    log_q = (counts.clamp(min=1) / counts.sum()).log()[ids]
    again = (ids[:, None] == ids) & ~torch.eye(ROWS, dtype=torch.bool)
    expected = softmax_losses(
        scores, torch.arange(ROWS), log_q=log_q, excluded=again
    ).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(prediction.logits, scores.diagonal())
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in model.parameters()
    )


@pytest.mark.unit
def test_a_dropped_candidate_is_itself() -> None:
    """Items 3 (looked up as 0), 4, 4 again (looked up as 0), and 6."""
    model = retrieval(counts=COUNTS).train()
    items = torch.tensor([3, 4, 4, 6])
    rows = model.schema().assemble(
        {
            "user_id": Jagged(torch.arange(1, 5)),
            "item_id": Jagged(torch.tensor([0, 4, 0, 6])),
        },
        labels=torch.ones(4),
    )
    rows = dataclasses.replace(rows, items=items, queries=4)
    user, item = model.outputs(rows)
    negatives = {0: [1, 2, 3], 1: [0, 3], 2: [0, 3], 3: [0, 1, 2]}  # by query
    corrected = user @ item.T - (COUNTS.clamp(min=1) / COUNTS.sum()).log()[items]
    expected = [
        corrected[query, [query, *negatives[query]]].logsumexp(dim=0)
        - corrected[query, query]
        for query in range(4)
    ]
    torch.testing.assert_close(model(rows)[0], torch.stack(expected).mean())


def clicks_set() -> Prepared:
    return planted_data(users=60, items=50, clusters=4, history_length=1)


def test_the_hardest_candidates_alone_are_trained() -> None:
    losses = {}
    for hardest in (0, 1, 3):
        model = retrieval(hardest=hardest).train()
        losses[hardest] = float(model(batch())[0])
    assert losses[1] < losses[3] < losses[0]


@pytest.mark.unit
@pytest.mark.parametrize(("loss", "hardest"), [("catalogue", 2), ("in_batch", -1)])
def test_hardest_candidates_are_refused(loss: str, hardest: int) -> None:
    with pytest.raises(ValueError, match=f"hardest={hardest}"):
        retrieval(loss=loss, hardest=hardest)


LABELS, WEIGHTS = np.array([1.0, 0.0, 0.5, 1.0, 0.0]), np.array([1.0, 2.0, 0.5])


def clicks() -> Chunk:
    """The rows of the set with a label and a weight each."""
    count = clicks_set().rows("train").num_rows
    columns = {"label": np.resize(LABELS, count), "weight": np.resize(WEIGHTS, count)}
    return (
        clicks_set()
        .rows("train")
        .with_columns(
            {
                name: Column(values.astype(np.float32))
                for name, values in columns.items()
            }
        )
    )


def of_clicks(
    loss: str, device: torch.device | None = None, **options: Any
) -> RetrievalModel:
    towers = {
        "user": Tower([table("occupation", 22)], (8,)),
        "item": Tower([table("item_id", 51)], (8,)),
    }
    counts = torch.from_numpy(clicks_set().popularity) if loss == "in_batch" else None
    return RetrievalModel(
        towers, DotProduct([8, 8]), counts=counts, loss=loss, device=device, **options
    )


def loader_of_clicks(
    model: RetrievalModel, runtime: Runtime, label: str | None
) -> ChunkLoader:
    model.expect_rows(negatives=0, label=label)
    schema = model.schema()
    config = LoaderConfig(
        batch_size=101,
        negatives=0,
        label=label,
        weight="weight" if label else None,
    )
    everything = (
        CatalogueCandidates(np.arange(1, clicks_set().num_items + 1))
        if schema.catalogue
        else None
    )
    items = clicks_set().items if schema.catalogue else None
    return ChunkLoader(
        clicks(),
        schema,
        config=config,
        items=items,
        negatives=everything,
        rank=runtime.rank,
        world_size=runtime.world_size,
    )


CLICK_LOSSES = [("in_batch", "label"), ("catalogue", None), ("catalogue", "label")]


@pytest.mark.parametrize(("loss", "label"), CLICK_LOSSES)
def test_the_loss_of_clicks_is_that_of_a_by_hand_count(
    loss: str, label: str | None
) -> None:
    torch.manual_seed(0)
    model = of_clicks(loss, temperature=0.5).train()
    batch = next(iter(loader_of_clicks(model, Runtime(), label)))
    assert batch.items is not None
    count = 101
    assert len(batch) == (
        count if loss == "in_batch" else count + clicks_set().num_items
    )
    users, items = model.outputs(batch)
    ids = batch.items[:count]
    weights = (batch.weights * batch.labels)[:count] if label else batch.weights[:count]
    if loss == "catalogue":
        assert sorted(batch.items[count:].tolist()) == list(
            range(1, clicks_set().num_items + 1)
        )
        losses = cross_entropy(
            users[:count] @ items[count:].T / 0.5, ids - 1, reduction="none"
        )
    else:
        clicked = weights > 0
        users, items, ids, weights = (
            users[clicked],
            items[clicked],
            ids[clicked],
            weights[clicked],
        )
        log_q = (
            (
                torch.from_numpy(clicks_set().popularity)
                / len(clicks_set().taken("train").items)
            )
            .log()
            .float()[ids]
        )
        again = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        corrected = (users @ items.T / 0.5 - log_q).masked_fill(again, -torch.inf)
        losses = cross_entropy(corrected, torch.arange(len(ids)), reduction="none")
    torch.testing.assert_close(
        model(batch)[0], (losses * weights).sum() / weights.sum()
    )


@pytest.mark.unit
@pytest.mark.parametrize("loss", ["in_batch", "catalogue"])
def test_a_batch_without_a_click_has_the_loss_0(loss: str) -> None:
    model = of_clicks(loss).train()
    batch = next(iter(loader_of_clicks(model, Runtime(), "label")))
    value, _ = model(dataclasses.replace(batch, labels=torch.zeros_like(batch.labels)))
    value.backward()
    assert float(value.detach()) == 0
    assert all(
        float(parameter.grad.abs().sum()) == 0
        for parameter in model.parameters()
        if parameter.grad is not None
    )


def clicks_model(
    loss: str, label: str | None, device: torch.device | None
) -> RetrievalModel:
    model = redrawn(of_clicks(loss, device))
    model.expect_rows(negatives=0, label=label)
    return model


def click_batches(
    loss: str, label: str | None, rank: int, world_size: int
) -> Iterator[TowerBatch]:
    place = Runtime(rank=rank, world_size=world_size)
    return iter(loader_of_clicks(of_clicks(loss, META), place, label))


def popular(device: torch.device | None) -> RetrievalModel:
    return retrieval(device=device, counts=COUNTS)


def popular_batches(rank: int, world_size: int) -> Iterator[TowerBatch]:
    return (batch(rank, world_size, seed=seed) for seed in range(6))


SGD = OptimizerConfig(tables="sgd", dense="sgd", dense_lr=0.05)
CASES = {
    (loss, label): Case(
        partial(clicks_model, loss, label),
        partial(click_batches, loss, label),
        SGD,
        PlanConfig(),
        4,
    )
    for loss, label in CLICK_LOSSES
}
CASES["popular", None] = Case(popular, popular_batches, SGD, PlanConfig(), 6)


def test_two_ranks_are_one_batch() -> None:
    ranks = run_ranks(on_ranks, 2, CASES)
    for name, case in CASES.items():
        check_equal([rank[name] for rank in ranks], alone(case), atol=1e-5)


@pytest.mark.unit
def test_a_network_on_top_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"a candidate tower and DotProduct or Cosine, got \['user', 'item'\] and TopMLP",
    ):
        retrieval(TopMLP([8, 8]))
