"""Batch normalisation over the rows that count: padding changes nothing, on one rank or several, in every network."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import run_ranks
from tests.examples import ITEMS, USERS, by_table, pair_batches, redrawn, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.multi_task import MultiTaskModel, MultiTaskTop
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import (
    INTERACTIONS,
    TopMLP,
    interaction_layer,
)
from torchrec_ext.modules.layers import BatchNorm, row_weights
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

WIDTH, ROWS = 5, 12


def rows_of(seed: int = 0, count: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def learned(
    layer: nn.Module, rows: Tensor, real: slice, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """What two training steps on ``rows`` leave, and the last output and gradient of those that are ``real``."""
    layer.double().train()
    for _ in range(2):
        values = rows.clone().requires_grad_()
        with row_weights(weights):
            output = layer(values)
        layer.zero_grad()
        output[real].square().mul(torch.arange(1, 1 + WIDTH)).sum().backward()
    result = {"output": output[real].detach(), "gradient": values.grad[real]}
    return (
        result
        | {name: p.grad.clone() for name, p in layer.named_parameters()}
        | dict(layer.named_buffers())
    )


@pytest.mark.unit
@pytest.mark.parametrize("padding", [0, 1, 30])
def test_rows_of_weight_0_change_nothing(padding: int) -> None:
    rows = rows_of()
    real = slice(ROWS)
    padded = torch.cat([rows, torch.full((padding, WIDTH), 77.0, dtype=torch.float64)])
    weights = (torch.arange(len(padded)) < ROWS).float()
    expected = learned(nn.BatchNorm1d(WIDTH), rows, real)
    for name, value in learned(BatchNorm(WIDTH), padded, real, weights).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.unit
def test_a_batch_without_any_row_that_counts_leaves_the_statistics_alone() -> None:
    layer = BatchNorm(WIDTH).train()
    with row_weights(torch.zeros(ROWS)):
        output = layer(rows_of().float())
    assert torch.isfinite(output).all()
    assert torch.equal(layer.running_mean, torch.zeros(WIDTH))
    assert torch.equal(layer.running_var, torch.ones(WIDTH))


def on_rank(
    runtime: Runtime, counts: list[int], padding: list[int]
) -> dict[str, Tensor]:
    """This rank's share of the rows, with rows of weight 0 after them."""
    start, count = sum(counts[: runtime.rank]), counts[runtime.rank]
    rows = torch.cat(
        [
            rows_of()[start : start + count],
            torch.full((padding[runtime.rank], WIDTH), 77.0, dtype=torch.float64),
        ]
    )
    weights = (torch.arange(len(rows)) < count).float()
    return learned(BatchNorm(WIDTH), rows, slice(count), weights)


@pytest.mark.parametrize(("counts", "padding"), [([7, 5], [0, 2]), ([12, 0], [0, 12])])
def test_two_ranks_are_one_batch_without_its_padding(
    counts: list[int], padding: list[int]
) -> None:
    expected = learned(nn.BatchNorm1d(WIDTH), rows_of(), slice(ROWS))
    results = run_ranks(on_rank, 2, counts, padding)
    for name in ("output", "gradient"):
        torch.testing.assert_close(
            torch.cat([result[name] for result in results]), expected[name], msg=name
        )
    for result in results:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(result[name], expected[name], msg=name)


Make = Callable[[list[int]], nn.Module]
TOPS: dict[str, Make] = {
    **{
        name: lambda widths, name=name: interaction_layer(  # type: ignore[misc]
            name, widths, (8, 4), normalization="batch"
        )
        for name, kind in INTERACTIONS.items()
        if "normalization" in inspect.signature(kind).parameters
    },
    "tasks": lambda widths: MultiTaskTop(widths, 2, (8, 4), normalization="batch"),
    "own": lambda widths: nn.Sequential(
        TopMLP(widths, (8,), normalization="batch"), nn.Identity()
    ),
}


def model_of(top: str, shared: tuple[str, ...]) -> TowerModel:
    towers = {
        "user": Tower(
            [table("user_id", USERS)],
            [8, 8, 4],
            dense=["age"],
            normalization="batch",
        ),
        "item": Tower([table("item_id", ITEMS)], [8, 4], normalization="batch"),
    }
    interaction: Any = TOPS[top]([4, 4])
    if top == "tasks":
        return redrawn(
            MultiTaskModel(
                towers, interaction, tasks={"click": 1.0, "buy": 0.5}, shared=shared
            ),
            tables=0,
        )
    return redrawn(TowerModel(towers, interaction, shared=shared), tables=0)


def batch_of(model: TowerModel, padding: int) -> TowerBatch:
    """Twelve rows, and padding after them."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.arange(ROWS + padding) < ROWS).int()
    ids = {
        name: Jagged(torch.randint(1, high, (ROWS,), generator=generator), lengths)
        for name, high in (("user_id", USERS), ("item_id", ITEMS))
    }
    ages = torch.rand(len(lengths), generator=generator) * lengths
    labels = (ages > 0.5).float()
    targets = labels[:, None] if model.schema().tasks else None
    return model.schema().assemble(
        ids, {"age": ages}, labels=labels, weights=lengths.float(), targets=targets
    )


@pytest.mark.unit
@pytest.mark.parametrize("shared", [(), ("user",)])
@pytest.mark.parametrize("top", TOPS)
def test_a_network_learns_nothing_of_its_padding(
    top: str, shared: tuple[str, ...]
) -> None:
    model = model_of(top, shared)
    results = []
    for padding in (0, 9):
        twin = copy.deepcopy(model).train()
        loss, output = twin(batch_of(twin, padding))
        loss.backward()
        grads = {name: parameter.grad for name, parameter in twin.named_parameters()}
        results.append(
            {
                "loss": loss.detach(),
                "logits": output.logits[:ROWS],
                **grads,
                **dict(twin.named_buffers()),
            }
        )
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=name)


@pytest.mark.unit
def test_a_shared_row_counts_as_often_as_it_is_read() -> None:
    """With weighted rows, but for the running variance, whose effective number of rows is that of shared rows."""
    results = []
    for shared in ((), ("user",)):
        model = model_of("top_nn", shared).train()
        weights = torch.rand(18, generator=torch.Generator().manual_seed(1))
        ids = {"user_id": (USERS, 1), "item_id": (ITEMS, 1)}
        (batch,) = pair_batches(
            model.schema(), 1, ids, of_query=("user_id", "age"), queries=6, width=3
        )
        loss, output = model(dataclasses.replace(batch, weights=weights))
        loss.backward()
        grads = by_table(
            {name: parameter.grad for name, parameter in model.named_parameters()}
        )
        buffers = {
            name: value
            for name, value in model.named_buffers()
            if "user" not in name or "mean" in name
        }
        results.append(
            {"loss": loss.detach(), "logits": output.logits, **grads, **buffers}
        )
    for name, value in results[0].items():
        torch.testing.assert_close(
            results[1][name], value, msg=name, atol=1e-5, rtol=1e-4
        )
