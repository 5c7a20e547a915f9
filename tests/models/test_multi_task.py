"""Several tasks over one hidden layer: a head, a loss and figures for each; the loader brings the labels of all."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.contracts import run_ranks
from tests.examples import (
    ITEMS,
    META,
    USERS,
    batches,
    redrawn,
    table,
)
from tests.sharded import Case, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.models.multi_task import (
    MultiTaskModel,
    MultiTaskTop,
)
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower

WEIGHTS = {"click": 1.0, "buy": 0.25, "like": 2.0}
STEPS = 6


def model(device: torch.device | None = None, **options: Any) -> MultiTaskModel:
    towers = {
        "user": Tower(
            [table("user_id", USERS), table("history", ITEMS)],
            [16, 8],
            dense=["age"],
        ),
        "item": Tower([table("item_id", ITEMS)], [16, 8], dense=["price"]),
    }
    made = MultiTaskModel(
        towers,
        MultiTaskTop([8, 8], len(WEIGHTS), [6]),
        **{"tasks": WEIGHTS, "device": device} | options,
    )
    return redrawn(made, 0, tables=3 if device is None else None)


def labelled(count: int, **place: int) -> Iterator[TowerBatch]:
    """The batches of the examples with labels of two further tasks, which follow from the others."""
    for batch in batches(count, **place):
        batch.targets = torch.stack(
            [
                (batch.dense[:, 0] > 0.5).float(),
                (batch.dense[:, 1] > 0.3).float() * batch.labels,
            ],
            dim=1,
        )
        yield batch


@pytest.mark.unit
def test_the_loss_is_the_weighted_sum_of_the_tasks_losses() -> None:
    made, batch = model(), next(labelled(1))
    loss, output = made(batch)
    logits = made.interaction.of_tasks(made.outputs(batch))  # type: ignore[operator]
    labels = torch.cat([batch.labels[:, None], batch.targets], dim=1)  # type: ignore[list-item]
    by_row = [
        binary_cross_entropy_with_logits(logits[:, at], labels[:, at], reduction="none")
        for at in range(3)
    ]
    parts = [(batch.weights * losses).sum() / batch.weights.sum() for losses in by_row]
    torch.testing.assert_close(loss, parts[0] + 0.25 * parts[1] + 2.0 * parts[2])
    assert list(output.tasks) == ["click", "buy", "like"]
    for at, (name, prediction) in enumerate(output.tasks.items()):
        torch.testing.assert_close(prediction.loss, parts[at], msg=name)
        torch.testing.assert_close(prediction.logits, logits[:, at])
        torch.testing.assert_close(prediction.labels, labels[:, at])
        assert not prediction.logits.requires_grad
    torch.testing.assert_close(output.logits, logits[:, 0])
    assert made.schema().tasks == ("buy", "like")


@pytest.mark.unit
def test_the_first_task_is_what_a_top_nn_of_one_task_would_be() -> None:
    """So whatever ranks a catalogue by one logit ranks by the first task."""
    top = MultiTaskTop([8, 4], tasks=2, hidden=[6])
    one = TopMLP([8, 4], hidden=[6])
    one.load_state_dict(
        {
            name: value
            for name, value in top.state_dict().items()
            if not name.startswith("further")
        }
    )
    outputs = [torch.randn(5, 8), torch.randn(5, 4)]
    torch.testing.assert_close(top.of_tasks(outputs)[:, 0], one(outputs))
    torch.testing.assert_close(top(outputs), one(outputs))
    torch.testing.assert_close(top.score_all(*outputs), one.score_all(*outputs))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tasks": {"click": 1.0}},
            "tasks=['click'] with a MultiTaskTop of 3 heads: give it tasks=1",
        ),
        (
            {"tasks": WEIGHTS | {"buy": 0.0}},
            "tasks: buy=0.0: the weight of a loss must be greater than 0",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        model(META, **options)
    assert text in str(error.value)
    with pytest.raises(
        ValueError, match="tasks=1: must be 2 or more; TopMLP is the network for one"
    ):
        MultiTaskTop([8, 8], 1)


CASE = Case(
    model,
    partial(labelled, STEPS),
    OptimizerConfig(
        tables="adagrad", tables_lr=0.1, dense="adam", dense_lr=1e-3, eps=1e-8
    ),
    PlanConfig(sharding="row_wise"),
    STEPS,
)


def test_several_tasks_trained_on_two_ranks_equal_those_trained_unsharded() -> None:
    ranks = run_ranks(on_ranks, 2, {"": CASE})
    check_equal([rank[""] for rank in ranks], alone(CASE))
