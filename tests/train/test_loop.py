"""train(): what it records, when it stops, and that an evaluation leaves no trace in what is learned."""

import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx

from tests.capture.runs import Given
from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from tests.small_sets import checkerboard_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.loader.loader import LoaderConfig, training_loader
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import TrainConfig, check_output, train
from torchrec_ext.train.report.progress import _Sleep, time_shares
from torchx_apps.recipes import TwoTowerConfig, build_two_tower
from torchx_apps.tasks.evaluator import Evaluator, OutputCheck


class Batches(Given):
    """The same few batches every epoch, of which each rank has its part."""

    def __init__(self, runtime: Runtime, count: int) -> None:
        super().__init__(
            list(batches(count, rank=runtime.rank, world_size=runtime.world_size))
        )
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def recorded(runtime: Runtime) -> dict[str, Any]:
    """Three epochs of 50 positives in steps of 16, neither a multiple of the other, evaluated after two and three."""
    data = checkerboard_data(users=10, items=14)
    model = build_two_tower(TwoTowerConfig(embedding_dim=8), data)
    parallel, optimizer = hybrid_parallel(model, runtime)
    config = LoaderConfig(batch_size=16, negatives=2)
    loader = training_loader(
        data, model.schema(), config, rank=runtime.rank, world_size=runtime.world_size
    )
    logged: list[Any] = []
    history = train(
        parallel,
        optimizer,
        loader,
        runtime,
        TrainConfig(epochs=3, log_every=3, eval_every=2),
        evaluate=lambda: {"auc": 0.5, "training": parallel.training},
        log=logged.append,
    )
    return {
        "history": history,
        "logged": logged,
        "rows": data.rows("train").num_rows * 3,
        "steps": len(loader),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_is_recorded_once_per_epoch_and_every_epoch_ends_with_a_record(
    world_size: int,
) -> None:
    ranks = run_ranks(recorded, world_size)
    first = ranks[0]
    times = {"rows_per_s": 0, "data_wait": 0, "ranks_wait": 0}
    for rank in ranks[1:]:
        assert rank["logged"] == []
        for record, other in zip(first["history"], rank["history"], strict=True):
            assert record | times == other | times
    assert first["history"] == [
        record for record in first["logged"] if record["kind"] != "steps"
    ]
    trained = [record for record in first["history"] if record["kind"] == "train"]
    for epoch in range(3):
        own = [record for record in trained if record["epoch"] == epoch + 1]
        assert sum(record["rows"] for record in own) == first["rows"]
        assert own[-1]["step"] == (epoch + 1) * first["steps"]
    steps = [record["step"] for record in trained]
    assert steps == sorted(set(steps))
    assert {step for step in range(1, 3 * first["steps"] + 1) if step % 3 == 0} <= set(
        steps
    )
    evaluated = [record for record in first["history"] if record["kind"] == "eval"]
    assert [(record["epoch"], record["step"]) for record in evaluated] == [
        (2, 2 * first["steps"]),
        (3, 3 * first["steps"]),
    ]
    assert all(
        record["auc"] == 0.5 and record["training"] is False for record in evaluated
    )


def slept(runtime: Runtime) -> list[dict[str, Any]]:
    """Two epochs by a clock: a batch takes 1, asleep, a forward 3, of which rank 1 sleeps 2."""
    clock, asleep = [0.0], [0.0]

    class Slow(Batches):
        def __iter__(self) -> Iterator[TowerBatch]:
            for batch in super().__iter__():
                clock[0], asleep[0] = clock[0] + 1, asleep[0] + 1
                yield batch

    def forward(*_: object) -> None:
        clock[0], asleep[0] = clock[0] + 3, asleep[0] + 2 * runtime.rank

    parallel, optimizer = hybrid_parallel(small_model(), runtime)
    parallel.register_forward_pre_hook(forward)
    with (
        mock.patch.object(time, "perf_counter", side_effect=lambda: clock[0]),
        mock.patch.object(_Sleep, "__call__", side_effect=lambda: asleep[0]),
    ):
        history = train(
            parallel,
            optimizer,
            Slow(runtime, 6),
            runtime,
            TrainConfig(epochs=2, log_every=6, compile="off"),
        )
    return [record for record in history if record["kind"] == "train"]


def test_sleep_that_is_no_wait_for_a_batch_is_a_ranks_share_in_collectives() -> None:
    first, second = run_ranks(slept, 2)
    for records in (first, second):
        assert [record["ranks_wait"] for record in records] == [pytest.approx(0.25)] * 2
        assert time_shares(records) == {
            "data": 0.25,
            "ranks": 0.25,
            "compute": pytest.approx(0.5),
        }
    (alone,) = run_ranks(slept, 1)
    assert not any("ranks_wait" in record for record in alone)


def foreign(runtime: Runtime) -> str:
    parallel, optimizer = hybrid_parallel(small_model(META), runtime)
    loader = Given([torch.zeros(2)])  # type: ignore[list-item]
    with pytest.raises(ValueError) as error:
        train(parallel, optimizer, loader, runtime, TrainConfig(epochs=1))
    return str(error.value)


def test_a_loader_of_something_else_is_refused() -> None:
    (told,) = run_ranks(foreign, 1)
    assert told.startswith("train(): the loader gives a Tensor, must be TowerBatches")


def bare(runtime: Runtime) -> str:
    parallel, optimizer = hybrid_parallel(small_model(), runtime)
    output = types.SimpleNamespace(loss=0.0)
    parallel.register_forward_hook(lambda *given: (given[2][0], output))
    with pytest.raises(ValueError) as error:
        train(parallel, optimizer, Batches(runtime, 2), runtime, TrainConfig(epochs=1))
    return str(error.value)


def test_a_run_whose_model_gives_no_weights_is_refused() -> None:
    (told,) = run_ranks(bare, 1)
    assert "has no weights; forward returns" in told


def learned(runtime: Runtime, evaluated: bool) -> dict[str, Any]:
    """Weights after three epochs with dropout, and so with random numbers that an evaluation might use up."""
    data = checkerboard_data(users=10, items=14)
    torch.manual_seed(3)
    model = build_two_tower(TwoTowerConfig(embedding_dim=8, dropout=0.2), data)
    parallel, optimizer = hybrid_parallel(model, runtime, seed=3)
    torch.manual_seed(4 + runtime.rank)
    schema = model.schema()
    loader = training_loader(
        data,
        schema,
        LoaderConfig(batch_size=16),
        rank=runtime.rank,
        world_size=runtime.world_size,
    )
    evaluator = Evaluator(data, schema, parallel, runtime)
    history = train(
        parallel,
        optimizer,
        loader,
        runtime,
        TrainConfig(epochs=3),
        evaluate=evaluator.validate if evaluated else None,
    )
    losses = [record["loss"] for record in history if record["kind"] == "train"]
    return {
        "state": gather_state(parallel),
        "losses": losses,
        "evaluations": len(history) - len(losses),
    }


def test_an_evaluation_between_epochs_changes_no_bit_of_what_is_learned() -> None:
    with_it, without = (
        run_ranks(learned, 2, evaluated)[0] for evaluated in (True, False)
    )
    assert (with_it["evaluations"], without["evaluations"]) == (3, 0)
    assert with_it["losses"] == without["losses"]
    assert with_it["state"].keys() == without["state"].keys()
    assert all(
        torch.equal(value, without["state"][name])
        for name, value in with_it["state"].items()
    )


@pytest.mark.unit
def test_an_output_without_what_is_read_of_it_is_refused_at_the_first_step() -> None:
    output = types.SimpleNamespace(loss=0.0, weights=1.0, logits=0.0)
    check_output(output, ("loss", "weights"))
    OutputCheck(types.SimpleNamespace(form="pairs")).see(output)
    check = OutputCheck(types.SimpleNamespace(form="labels"))
    with pytest.raises(
        ValueError, match=r"has no labels; forward returns \(loss, output\)"
    ):
        check.see(output)
    # A model of tasks has logits and labels by task.
    check.see(types.SimpleNamespace(tasks={"click": output}))
