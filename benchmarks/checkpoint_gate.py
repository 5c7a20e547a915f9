"""Row `gradient-gate` of checkpoint.py: a step that checks gradients before they reach a table, against one without.

Two towers of 4 tables, 32 wide, and layers of 128-64 on 2 ranks with 1,024 rows each; both sides look at the loss.
"""

import itertools
from collections.abc import Callable

import torch
from hybrid_ranks import Row, in_turn, on_ranks, row
from torchrec import EmbeddingBagConfig

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.guards.finite import FiniteLoss
from torchrec_ext.train.guards.gradient_gate import GradientGate
from torchrec_ext.train.step.pipeline import make_pipeline

TABLES, ROWS, WIDTH, LAYERS, BATCH = 4, 50_000, 32, (128, 64), 1024
REQUIRED = 1.05


def gate_row(repeats: int) -> Row:
    """The slower rank's seconds of a step, of each side."""
    ranks = on_ranks(_rank, 2, repeats)
    off, on = (max(rank[side] for rank in ranks) for side in ("off", "on"))
    return row("gradient-gate", off * 1e3, on * 1e3, "ms/step, lower is better", on / off, REQUIRED)


def _rank(runtime: Runtime, repeats: int) -> dict[str, float]:
    return in_turn({side: _steps(runtime, gated=side == "on") for side in ("off", "on")}, repeats, 40)


def _steps(runtime: Runtime, *, gated: bool) -> Callable[[], object]:
    names = {side: [f"{side}_{number}" for number in range(TABLES)] for side in ("user", "item")}
    towers = {side: _tower(own) for side, own in names.items()}
    model = TowerModel(towers, interaction_layer("dot", [tower.out_features for tower in towers.values()]))
    generator, schema = torch.Generator().manual_seed(runtime.rank), model.schema()
    columns = [
        {name: Jagged(torch.randint(ROWS, (BATCH,), generator=generator)) for own in names.values() for name in own}
        for _ in range(8)
    ]
    batches = [schema.assemble(own, labels=torch.randint(2, (BATCH,), generator=generator).float()) for own in columns]
    optimizers = OptimizerConfig(tables="row_wise_adagrad", dense="adam")
    plan = plan_sharding(model, runtime, PlanConfig(sharding="row_wise"), optimizer=optimizers)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=optimizers)
    forward = FiniteLoss(
        parallel, runtime, 1_000_000, gate=GradientGate(parallel, optimizer, runtime) if gated else None
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device, forward=forward, before_tables=forward.before_tables)
    endless = itertools.cycle(batches)
    return lambda: pipeline.progress(endless)


def _tower(names: list[str]) -> Tower:
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=WIDTH) for name in names
    ]
    return Tower(tables, LAYERS, device=torch.device("meta"))
