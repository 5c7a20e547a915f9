"""Row `gradient-gate` of checkpoint.py: a step that checks gradients before they reach a table, against one without.

Two towers of 4 tables, 32 wide, and layers of 128-64 on 2 ranks with 1,024 rows each. Both sides are steps of `train()`
and look at the loss; the baseline has check_gradients=off.
"""

import torch
import torch.distributed as dist
from harness import Row, Trainings, on_ranks, row, slowest
from hybrid_training import Side, training
from torchrec import EmbeddingBagConfig

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import TrainConfig

TABLES, ROWS, WIDTH, LAYERS, BATCH = 4, 50_000, 32, (128, 64), 1024
REQUIRED = 1 / 1.05


def gate_row(turns: int) -> Row:
    """The slower rank's milliseconds of a step, of each side."""
    seconds = slowest(on_ranks(_rank, 2, turns))
    without, gated = ([1e3 * turn for turn in seconds[side]] for side in ("off", "on"))
    return row("gradient-gate", gated, "ms a step", baseline=without, required=REQUIRED)


def _rank(runtime: Runtime, turns: int) -> dict[str, list[float]]:
    trainings = Trainings(
        {side: _side(runtime, gated=side == "on") for side in ("off", "on")},
        before=dist.barrier,
    )
    times = trainings.seconds_per_step(40, turns, warm_up=10)
    trainings.close()
    return times


def _side(runtime: Runtime, *, gated: bool) -> Side:
    names = {
        tower: [f"{tower}_{number}" for number in range(TABLES)]
        for tower in ("user", "item")
    }
    towers = {tower: _tower(own) for tower, own in names.items()}
    model = TowerModel(
        towers,
        interaction_layer("dot", [tower.out_features for tower in towers.values()]),
    )
    generator, schema = torch.Generator().manual_seed(runtime.rank), model.schema()
    columns = [
        {
            name: Jagged(torch.randint(ROWS, (BATCH,), generator=generator))
            for own in names.values()
            for name in own
        }
        for _ in range(8)
    ]
    batches = [
        schema.assemble(
            own, labels=torch.randint(2, (BATCH,), generator=generator).float()
        )
        for own in columns
    ]
    return training(
        model,
        runtime,
        batches,
        PlanConfig(sharding="row_wise"),
        OptimizerConfig(tables="row_wise_adagrad", dense="adam"),
        config=TrainConfig(epochs=1, check_gradients="on" if gated else "off"),
    )


def _tower(names: list[str]) -> Tower:
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=WIDTH
        )
        for name in names
    ]
    return Tower(tables, LAYERS, device=torch.device("meta"))
