"""The law of every model: trained on any number of ranks, under any plan, it equals itself trained in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from tests.contracts import gather_state
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, initialise_tables
from torchrec_ext.train.step.pipeline import make_pipeline

SEED = 7
META = torch.device("meta")


@dataclass(frozen=True)
class Case:
    """A model to train in both ways.

    Args:
        make: function from the tables' device to the model, whose dense layers are the same on each call.
        batches: function from ``rank`` and ``world_size`` to that rank's batches.
        optimizer: the optimizers.
        plan: the plan on ranks.
        steps: number of steps.
    """

    make: Callable[[torch.device | None], Any]
    batches: Callable[..., Iterator[TowerBatch]]
    optimizer: OptimizerConfig
    plan: PlanConfig
    steps: int = 8


class Learned(NamedTuple):
    """The first and last weights of all ranks, on rank 0, and the losses of this rank.

    ``kinds`` are the sharding types by table, ``pipelined`` and ``missed`` the look-ups in the pipeline and beside it.
    """

    first: Any
    state: Any
    losses: list[float]
    logits: list[Any]
    kinds: dict[str, str]
    pipelined: int
    missed: list[str]


def alone(case: Case) -> Learned:
    """Plain modules and torch's optimizers in one process, clipping by hand."""
    model = case.make(None)
    initialise_tables(model, seed=SEED)
    parameters = dict(model.named_parameters())
    first = {name: value.detach().clone() for name, value in parameters.items()}
    tables = {}
    for _, collection in collections(model):
        tables |= {id(weight): name for name, weight in collection.named_parameters()}
    of_tables = case.optimizer.for_tables(model)
    dense = [name for name, value in parameters.items() if id(value) not in tables]
    choices = case.optimizer.for_layers(dense)
    optimizers = []
    for name, parameter in parameters.items():
        if id(parameter) in tables:
            choices[name] = of_tables[tables[id(parameter)].split(".")[1]]
        make, arguments = choices[name].unfused()
        optimizers.append(make([parameter], **arguments))
    losses, logits = [], []
    batches = case.batches(rank=0, world_size=1)
    for _, batch in zip(range(case.steps), batches, strict=False):
        model.zero_grad()
        loss, output = model(batch)
        loss.backward()
        if case.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.optimizer.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(output.loss))
        logits.append(getattr(output, "logits", None))
    state = {name: value.detach() for name, value in parameters.items()}
    return Learned(first, state, losses, logits, {}, 0, [])


def on_ranks(runtime: Runtime, cases: Mapping[Any, Case]) -> dict[Any, Learned]:
    """Each case on TorchRec's pipeline; all of a file in one spawn of ranks."""
    return {name: _on_ranks(runtime, case) for name, case in cases.items()}


def _on_ranks(runtime: Runtime, case: Case) -> Learned:
    model = case.make(META)
    plan = plan_sharding(model, runtime, case.plan, optimizer=case.optimizer)
    kinds: dict[str, str] = {}
    for tables in plan.plan.values():
        kinds |= {name: table.sharding_type for name, table in tables.items()}  # type: ignore[attr-defined]
    parallel, keyed = hybrid_parallel(
        model, runtime, plan=plan, optimizer=case.optimizer, seed=SEED
    )
    first = gather_state(parallel)
    pipeline = make_pipeline(parallel, keyed, runtime.device)
    batches = case.batches(rank=runtime.rank, world_size=runtime.world_size)
    outputs = []
    for _ in range(case.steps):
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            break
    return Learned(
        first,
        gather_state(parallel),
        [float(output.loss) for output in outputs],
        [getattr(output, "logits", None) for output in outputs],
        kinds,
        len(pipeline._pipelined_modules),
        unpipelined(pipeline, parallel),
    )


def check_equal(
    ranks: Sequence[Learned], expected: Learned, *, atol: float = 1e-4
) -> None:
    """Weights, and the mean of the ranks' losses, are those of one process; all look-ups are in the pipeline."""
    assert_close(ranks[0].state, expected.state, atol)
    mean = torch.tensor([rank.losses for rank in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected.losses), rtol=0, atol=1e-4)
    assert all(rank.missed == [] for rank in ranks)


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float
) -> None:
    """The same names, and values that differ by at most ``atol``."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def unpipelined(pipeline: Any, model: nn.Module) -> list[str]:
    """Paths of sharded modules whose input dist does not overlap with the step before; known after the first step."""
    pipelined = set(map(id, pipeline._pipelined_modules))
    paths = []
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        # A module inside of another sharded module has its input dist in that one.
        if not isinstance(module, ShardedModule) or path.startswith(inside):
            continue
        inside += (f"{path}.",)
        if id(module) not in pipelined:
            paths.append(path)
    return paths
