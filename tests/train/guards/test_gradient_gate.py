"""A gradient that is not finite on one rank reaches no table of any rank: the whole step is refused or left out."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contracts import gather_state, run_ranks
from tests.examples import META, small_model
from tests.train.test_loop import Batches
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.train.loop import TrainConfig, TrainingDivergedError, train

NAN = float("nan")
Case = tuple[str, str, SyncConfig]
PLANS: dict[str, dict[str, Any]] = {
    "row_wise": {"sharding": "row_wise"},
    "column_wise": {"sharding": "column_wise"},
    "mixed": {
        "sharding": "table_wise",
        "tables": {"history": TablePlan(sharding="data_parallel")},
    },
}
# no kernel moves a table, so there is no gate
REPLICAS: Case = ("replicas", "adagrad", SyncConfig())
OPTIMIZERS = {
    "adagrad": OptimizerConfig(tables="adagrad", tables_lr=0.05),
    "adam": OptimizerConfig(tables="adam", tables_lr=0.05),
}
STOPS: list[Case] = [
    *((plan, "adagrad", SyncConfig()) for plan in PLANS),
    ("row_wise", "adam", SyncConfig()),
]
SKIPS: list[Case] = [
    ("row_wise", "adam", SyncConfig()),
    ("mixed", "adagrad", SyncConfig()),
]
ALL_SKIPS: list[Case] = [
    *((plan, kind, SyncConfig()) for plan in PLANS for kind in OPTIMIZERS),
]


def made(runtime: Runtime, case: Case) -> Any:
    plan, kind, _ = case
    model, optimizers = small_model(META), OPTIMIZERS[kind]
    config = PlanConfig(**PLANS.get(plan, {"sharding": "data_parallel"}))
    chosen = plan_sharding(model, runtime, config, optimizer=optimizers)
    return hybrid_parallel(
        model,
        runtime,
        plan=chosen,
        optimizer=optimizers,
        seed=3,
    )


def spoil(model: nn.Module, step: int, where: str) -> None:
    """Makes the ``step``-th backward from here on have a gradient that is not finite, of ``vectors`` or a ``layer``."""
    calls: list[int] = []

    def spoilt(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * NAN if len(calls) == step else gradient

    def into(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(spoilt)  # type: ignore[no-untyped-call]

    if where == "layer":
        dict(model.named_parameters())["interaction.mlp.0.bias"].register_hook(spoilt)  # type: ignore[no-untyped-call]
    else:
        ends = ("towers.user.mlp", "towers.item.mlp")
        next(
            module for name, module in model.named_modules() if name.endswith(ends)
        ).register_forward_pre_hook(into)


def trained(
    runtime: Runtime, case: Case, bad: int, where: str, count: int, **settings: Any
) -> dict[str, Any]:
    """The state after ``count`` steps, of which ``bad`` has a gradient that is no number on rank 1; 0 for none."""
    parallel, optimizer = made(runtime, case)
    if bad and runtime.rank == 1:
        spoil(parallel, bad, where)
    told, history = "", []
    try:
        history = train(
            parallel,
            optimizer,
            Batches(runtime, count),
            runtime,
            TrainConfig(epochs=1, **settings),
            sync=case[2],
        )
    except TrainingDivergedError as error:
        told = str(error)
    shards = [shard.tensor.clone() for shard in local_shards(parallel)]
    return {
        "told": told,
        "history": history,
        "state": gather_state(parallel),
        "shards": shards,
    }


def stopped(runtime: Runtime) -> Any:
    found = {}
    for number, case in enumerate(STOPS):
        found[number, "before"] = trained(runtime, case, 0, "", 3)
        for where in ("vectors", "layer"):
            found[number, where] = trained(runtime, case, 4, where, 6)
    found["off"] = trained(runtime, STOPS[0], 4, "vectors", 6, check_gradients="off")
    return found


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(stopped, 2)


@pytest.mark.parametrize("where", ["vectors", "layer"])
@pytest.mark.parametrize(
    "number",
    range(len(STOPS)),
    ids=["-".join((*case[:2], case[2].mode)) for case in STOPS],
)
def test_the_run_ends_on_every_rank_with_every_table_as_it_was(
    ranks: Any, number: int, where: str
) -> None:
    first, second = (rank[number, where] for rank in ranks)
    assert first["told"] == second["told"]
    assert (
        " at step 4 of epoch 1; nothing was written by this step; lower optimizer.tables_lr"
        in first["told"]
    )
    part = "vectors of towers." if where == "vectors" else "interaction.mlp.0.bias"
    assert first["told"].startswith(f"the gradient of {part}")
    for rank in ranks:
        before, after = rank[number, "before"], rank[number, where]
        assert all(
            torch.equal(*pair)
            for pair in zip(before["shards"], after["shards"], strict=True)
        )
    before, after = ranks[0][number, "before"]["state"], first["state"]
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_without_the_gate_tables_of_all_ranks_take_it_up(ranks: Any) -> None:
    assert not all(torch.isfinite(tensor).all() for tensor in ranks[0]["off"]["shards"])


def skipped(
    runtime: Runtime, cases: list[Case], bad_steps: list[tuple[int, str]]
) -> Any:
    found = {}
    for number, case in enumerate(cases):
        for bad, where in bad_steps:
            with_it = trained(runtime, case, bad, where, 5, on_nan="skip")
            parallel, optimizer = made(runtime, case)
            loader = Batches(runtime, 5)
            del loader._own[bad - 1]
            train(
                parallel,
                optimizer,
                loader,
                runtime,
                TrainConfig(epochs=1, on_nan="skip"),
                sync=case[2],
            )
            found[number, bad, where] = with_it, gather_state(parallel)
    return found


EITHER = [(1, "vectors"), (3, "layer"), (3, "vectors")]


@pytest.mark.parametrize(
    ("cases", "bad_steps"),
    [(SKIPS, EITHER[2:]), pytest.param(ALL_SKIPS, EITHER, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_step_that_is_left_out_is_as_if_its_batch_were_not_there(
    cases: list[Case], bad_steps: list[tuple[int, str]]
) -> None:
    first, second = run_ranks(skipped, 2, cases, bad_steps)
    for key, (with_it, without) in first.items():
        assert not with_it["told"], key
        for name, value in without.items():
            assert torch.equal(with_it["state"][name], value), (key, name)
        left_out = [
            record for record in with_it["history"] if record["kind"] == "left_out"
        ]
        assert [record["step"] for record in left_out] == [key[1]], key
        assert left_out == [
            record
            for record in second[key][0]["history"]
            if record["kind"] == "left_out"
        ]


def all_reduces(runtime: Runtime) -> dict[str, list[int]]:
    """The all-reduces between one look for a stop and the next, besides those of DistributedDataParallel, by case."""
    counts: dict[str, list[int]] = {}
    real, calls = dist.all_reduce, [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return real(*args, **options)

    for name, case in (("kernels", STOPS[0]), ("replicas", REPLICAS)):
        parallel, optimizer = made(runtime, case)
        steps: list[int] = []

        def after_step(steps: list[int] = steps) -> bool:
            steps.append(calls[0])
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", counted)
            train(
                parallel,
                optimizer,
                Batches(runtime, 5),
                runtime,
                TrainConfig(epochs=1),
                sync=case[2],
                stop=after_step,
            )
        counts[name] = [after - before for before, after in itertools.pairwise(steps)]
    return counts


def test_one_all_reduce_a_step_compares_loss_gradients_and_stops() -> None:
    for counts in run_ranks(all_reduces, 2):
        assert counts == {key: [1, 1, 1, 1] for key in ("kernels", "replicas")}


def bad_loss(runtime: Runtime) -> Any:
    """What a run does where the loss and so every gradient is no number on rank 1 at step 3, for each ``on_nan``."""
    results = []
    for on_nan in ("stop", "skip"):
        parallel, optimizer = made(runtime, STOPS[0])
        loader = Batches(runtime, 5)
        if runtime.rank == 1:
            loader._own[2].labels[3] = NAN
        told, history = "", []
        try:
            history = train(
                parallel,
                optimizer,
                loader,
                runtime,
                TrainConfig(epochs=1, on_nan=on_nan),
            )
        except TrainingDivergedError as error:
            told = str(error)
        results.append(
            (
                told,
                [one["message"] for one in history if one["kind"] == "left_out"],
                gather_state(parallel),
            )
        )
    parallel, optimizer = made(runtime, STOPS[0])
    train(parallel, optimizer, Batches(runtime, 2), runtime, TrainConfig(epochs=1))
    return results, gather_state(parallel)


def test_a_loss_that_is_no_number_is_told_as_such_although_its_gradients_are_none_either() -> (
    None
):
    (first, before), (second, _) = run_ranks(bad_loss, 2)
    assert [one[:2] for one in first] == [one[:2] for one in second]
    message = (
        "the loss is nan on rank(s) [1] at step 3 of epoch 1: the label is nan in row 3 of the batch on rank 1; "
        "nothing was written by this step; mend the column"
    )
    (told, _, stopped_state), (nothing, left_out, _) = first
    assert told.startswith(message)
    assert (nothing, len(left_out)) == ("", 1)
    assert left_out[0].startswith(message)
    assert all(torch.equal(value, stopped_state[key]) for key, value in before.items())
