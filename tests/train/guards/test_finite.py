"""For a loss or gradient that is not finite every rank names rank, step and column; nothing is written by that step."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from tests.train.test_loop import Batches
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.train.guards.finite import FiniteLoss
from torchrec_ext.train.loop import TrainConfig, TrainingDivergedError, train

NAN, INF = float("nan"), float("inf")


IN_DATA = {
    "label": (
        "the label is nan in row 3 and 1 more of the batch on rank 1; nothing was written by this step; mend the column"
    ),
    "dense "
    "column": "the dense column 'price' is inf in row 2 of the batch on rank 1; nothing was written by this step; mend",
    "weight": "the weight is nan in row 0 of the batch on rank 1; nothing was written by this step; mend the column",
}
IN_WEIGHTS = {
    "table": "table 'item_id' is not finite in row 7; nothing was written by this step; lower optimizer.tables_lr",
    "layer": (
        "the weights interaction.mlp.0.weight are not finite; nothing was written by this step; lower "
        "optimizer.tables_lr"
    ),
}


def spoil_data(fault: str, batch: TowerBatch) -> None:
    if fault == "label":
        batch.labels[[3, 5]] = NAN
    elif fault == "dense column":
        batch.dense[2, 1] = INF
    else:
        batch.weights[0] = NAN


def spoil_weights(fault: str, model: nn.Module) -> None:
    if fault == "layer":
        dict(model.named_parameters())["interaction.mlp.0.weight"].data[0, 0] = NAN
    else:
        next(
            shard.tensor
            for shard in local_shards(model)
            if shard.config.name == "item_id"
        )[7] = NAN


def made(runtime: Runtime, sharding: Any) -> Any:
    model = small_model(META)
    return hybrid_parallel(
        model,
        runtime,
        plan=plan_sharding(model, runtime, PlanConfig(sharding=sharding)),
        seed=3,
    )


def spoiled(runtime: Runtime) -> dict[str, Any]:
    """What is told, recorded and left in the weights where rank 1 has what is no number at step 3, for each fault."""
    told = {}
    for fault in [*IN_DATA, *IN_WEIGHTS]:
        # Rows of other ranks too would take up a bad gradient where tables are sharded;
        # replicas let rank 1 alone have bad weights.
        parallel, optimizer = made(
            runtime, "row_wise" if fault in IN_DATA else "data_parallel"
        )
        loader = Batches(runtime, 4 if fault in IN_DATA else 2)
        if fault in IN_DATA and runtime.rank == 1:
            spoil_data(fault, list(loader)[2])
        records: list[Any] = []

        def between(
            fault: str = fault, parallel: nn.Module = parallel
        ) -> dict[str, Any]:
            if fault in IN_WEIGHTS and runtime.rank == 1:
                spoil_weights(fault, parallel)
            return {}

        with pytest.raises(TrainingDivergedError) as error:
            train(
                parallel,
                optimizer,
                loader,
                runtime,
                TrainConfig(epochs=3),
                evaluate=between,
                log=records.append,
            )
        told[fault] = {
            "told": str(error.value),
            "step": error.value.step,
            "records": records,
            "state": gather_state(parallel),
        }
    parallel, optimizer = made(runtime, "row_wise")
    train(parallel, optimizer, Batches(runtime, 2), runtime, TrainConfig(epochs=1))
    return {**told, "after two good steps": gather_state(parallel)}


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(spoiled, 2)


@pytest.mark.parametrize("fault", [*IN_DATA, *IN_WEIGHTS])
def test_every_rank_tells_the_same_step_rank_and_column_at_once(
    ranks: Any, fault: str
) -> None:
    first, second = (rank[fault] for rank in ranks)
    assert first["told"] == second["told"]
    epoch = 1 if fault in IN_DATA else 2
    start = f"the loss is nan on rank(s) [1] at step 3 of epoch {epoch}: "
    assert first["told"].startswith(start + {**IN_DATA, **IN_WEIGHTS}[fault])
    assert (first["step"], second["step"]) == (3, 3)
    assert first["records"][-1] == {
        "kind": "error",
        "epoch": epoch,
        "step": 3,
        "message": first["told"],
    }
    assert second["records"] == []


@pytest.mark.parametrize("fault", IN_DATA)
def test_the_bad_step_writes_nothing(ranks: Any, fault: str) -> None:
    before, after = ranks[0]["after two good steps"], ranks[0][fault]["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def late(runtime: Runtime) -> list[Any]:
    """FiniteLoss as on CUDA: three good losses and then a bad one, read one step late or when the epoch is settled."""
    told = []
    for calls in (5, 4):
        forward = FiniteLoss(MeanLabel(), runtime, steps_per_epoch=3, late=True)
        own = list(batches(5, rank=runtime.rank, world_size=runtime.world_size))
        if runtime.rank == 0:
            own[3].labels[1] = NAN
        made = 0
        try:
            for batch in own[:calls]:
                forward(batch)
                made += 1
            forward.settle()
        except TrainingDivergedError as error:
            told.append((made, error.step, str(error)))
    return told


class MeanLabel(nn.Module):
    """A loss, and no output."""

    def forward(self, batch: TowerBatch) -> Any:
        return batch.labels.mean(), None


def test_an_answer_that_is_read_late_still_names_its_own_step() -> None:
    first, second = run_ranks(late, 2)
    message = (
        "the loss is nan on rank(s) [0] at step 4 of epoch 2: the label is nan in row 1 of the batch on rank 0; the "
        "update of this step was written; mend the column, or fill its missing values in preprocessing"
    )
    assert first == second == [(4, 4, message), (4, 4, message)]
