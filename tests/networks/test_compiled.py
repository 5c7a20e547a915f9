"""A compiled step of a stack is a step of the stack; what is not compiled is refused with its name."""

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.networks.members import PLAIN, batch, greatest_difference, network
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture import policy
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import StepExecutor, as_it_is, inductor
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.networks import compiled as compiled_module
from torchrec_ext.networks.compiled import CompiledStep, StackSteps
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.skeleton import StackedSteps, StackError
from torchrec_ext.networks.stack import Stack
from torchrec_ext.networks.training import Member, train_stack
from torchrec_ext.schema import Jagged
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.config import Record
from torchrec_ext.train.guards.finite import RunStoppedError
from torchrec_ext.train.loop import Loader, TrainConfig

ADAM = OptimizerConfig(tables="adam", tables_lr=2e-3, dense_lr=1e-3, eps=1e-4)


def ncf(seed: int) -> ContextualNCF:
    torch.manual_seed(seed)
    return ContextualNCF(
        9,
        7,
        gmf_dim=4,
        mlp_dim=4,
        mlp_widths=(8, 4),
        context_dense=["c"],
        shared=("user",),
        activation="tanh",
        dropout=0.2 * seed,
    )


def rows(seed: int, users: int = 4) -> TowerBatch:
    draw = torch.Generator().manual_seed(seed)
    ids = {
        "user_id": Jagged(torch.randint(9, (users,), generator=draw)),
        "item_id": Jagged(torch.randint(7, (2 * users,), generator=draw)),
    }
    labels = torch.randint(2, (2 * users,), generator=draw).float()
    return (
        ncf(0)
        .schema()
        .assemble(
            ids,
            {"c": torch.rand(users, generator=draw)},
            labels=labels,
            index=2,
            shared_rows=torch.arange(users),
        )
    )


def agreed(engine: StepExecutor, configs: dict[str, OptimizerConfig]) -> float:
    """How far two members are, after five steps compiled or not, of which the first is not."""
    states = []
    for compiled in (True, False):
        stack = Stack({"a": ncf(0), "b": ncf(1)})
        optimizer = StackedOptimizer(stack, configs)
        step: Any = None
        for number in range(5):
            batches = [rows(2 * number), rows(2 * number + 1)]
            if step is None:
                stack.backward(batches)
                optimizer.step()
                step = (
                    CompiledStep(stack, optimizer, engine=engine) if compiled else None
                )
            else:
                step(batches)
        states.append(
            {
                f"{name}.{key}": value
                for name in "ab"
                for key, value in stack.state_of(name).items()
            }
        )
    return greatest_difference(*states)


@pytest.mark.parametrize(
    ("changes", "of_b"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),
        ({}, {"tables_lr": 6e-3, "dense_lr": 3e-3}),
        pytest.param({"clip_norm": 0.1}, {}, marks=pytest.mark.slow),
        ({"clip_norm": 0.1}, {"clip_norm": 0.0}),
        ({"tables_weight_decay": 0.1, "dense_weight_decay": 0.2}, {}),
        pytest.param({"tables_l2": 0.1}, {"tables_l2": 0.2}, marks=pytest.mark.slow),
        ({"tables": "lazy_adam", "dense": "sgd"}, {}),
        ({"tables": "adagrad", "dense": "adagrad"}, {"dense_lr": 3e-3}),
        pytest.param(
            {"tables": "row_wise_adagrad", "clip_norm": 0.1}, {}, marks=pytest.mark.slow
        ),
        pytest.param({"tables": "sgd", "dense": "sgd"}, {}, marks=pytest.mark.slow),
        pytest.param({"per_layer": ("*.bias=lr=0.1",)}, {}, marks=pytest.mark.slow),
        (
            {"per_layer": ("*.bias=lr=0.1",), "clip_norm": 0.1},
            {"per_layer": ("interaction.*=lr=0.1",)},
        ),
    ],
    ids=str,
)
def test_a_compiled_step_is_a_step(
    changes: dict[str, Any], of_b: dict[str, Any]
) -> None:
    first = dataclasses.replace(ADAM, **changes)
    assert (
        agreed(as_it_is, {"a": first, "b": dataclasses.replace(first, **of_b)}) < 1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"clip_norm": 0.1, "tables": "lazy_adam"}], ids=str
)
def test_inductors_step_is_a_step(changes: dict[str, Any]) -> None:
    first = dataclasses.replace(ADAM, **changes)
    assert (
        agreed(inductor, {"a": first, "b": dataclasses.replace(first, dense_lr=3e-3)})
        < 1e-6
    )


def test_a_step_with_a_loss_that_is_no_number_writes_nothing_and_counts_for_no_schedule() -> (
    None
):
    stack = Stack({"a": ncf(0), "b": ncf(1)})
    optimizer = StackedOptimizer(stack, {"a": ADAM, "b": ADAM})
    stack.backward([rows(0), rows(1)])
    optimizer.step()
    step = CompiledStep(stack, optimizer, engine=as_it_is)
    held = [part for *_, state in optimizer.entries() for part in state.values()]
    weight = stack.networks["a"].get_parameter("towers.user.mlp.linear.weight")
    kept = float(weight.data[0, 0])
    weight.data[0, 0] = float("nan")
    before = [part.clone() for part in (*held, stack.dense.matrix)]
    assert step([rows(2), rows(3)]).loss.isfinite().tolist() == [False, True]
    for old, new in zip(before, (*held, stack.dense.matrix), strict=True):
        assert torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)
    weight.data[0, 0] = kept
    assert step([rows(2), rows(3)]).loss.isfinite().all()
    assert not torch.equal(before[-1][1], stack.dense.matrix[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tables": "lamb"},
            "is moved by lamb, which has no compiled form; those with one: ",
        ),
        ({}, "the optimizer has no state yet: train one step before the compiled ones"),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    stack = Stack({"a": ncf(0)})
    with pytest.raises(StackError, match=message):
        CompiledStep(
            stack,
            StackedOptimizer(stack, {"a": dataclasses.replace(ADAM, **changes)}),
            engine=as_it_is,
        )


def test_lists_are_trained_step_by_step() -> None:
    stack = Stack({"a": copy.deepcopy(network())})
    optimizer = StackedOptimizer(stack, {"a": ADAM})
    stack.backward([batch(PLAIN, 0)])
    optimizer.step()
    with pytest.raises(
        StackError,
        match="one of the features user_id, history has several ids or weights in some row",
    ):
        CompiledStep(stack, optimizer, engine=as_it_is)([batch(PLAIN, 1)])


def _padded(batch: TowerBatch) -> TowerBatch:
    """The batch with an empty bag in place of its last id, as a loader fills an epoch's last batch up."""

    def cut(bags: KeyedJaggedTensor) -> KeyedJaggedTensor:
        lengths = bags.lengths().clone()
        lengths[-1] = 0
        return KeyedJaggedTensor(
            keys=bags.keys(), values=bags.values()[:-1], lengths=lengths
        )

    assert batch.shared is not None
    weights = torch.tensor([1.0] * 7 + [0.0])
    shared = dataclasses.replace(batch.shared, sparse=cut(batch.shared.sparse))
    return dataclasses.replace(
        batch, sparse=cut(batch.sparse), shared=shared, weights=weights
    )


class Run:
    """A stack of two that is trained by :class:`StackSteps` on batches of 4 or, at the steps ``short``, 2 users."""

    def __init__(
        self,
        compile: Compile,  # noqa: A002
        total: int,
        config: OptimizerConfig = ADAM,
    ) -> None:
        self.stack = Stack({"a": ncf(0), "b": ncf(1)})
        self.optimizer = StackedOptimizer(self.stack, {"a": config, "b": config})
        self.lines: list[str] = []
        self.step = StackSteps(
            self.stack,
            self.optimizer,
            compile=compile,
            total=total,
            say=self.lines.append,
        )

    def train(
        self, steps: int, short: Collection[int] = (), padded: Collection[int] = ()
    ) -> dict[str, Tensor]:
        for number in range(steps):
            users = 2 if number in short else 4
            batches = [rows(2 * number, users), rows(2 * number + 1, users)]
            self.step(
                [_padded(batch) for batch in batches] if number in padded else batches
            )
        self.step.finish()
        return {
            f"{name}.{key}": value
            for name in "ab"
            for key, value in self.stack.state_of(name).items()
        }

    def compiled(self) -> int:
        return len(self.step._step.shapes) if self.step._step else 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiled_module, "engine_for", lambda device: (as_it_is, "compiling")
    )


@pytest.mark.usefixtures("engine")
def test_required_steps_are_compiled_after_the_first_and_equal_eager_ones() -> None:
    required, eager = Run("require", 30), Run("off", 30)
    of_required, of_eager = (
        run.train(30, short={9, 19}, padded={20, 29}) for run in (required, eager)
    )
    assert greatest_difference(of_required, of_eager) < 1e-6
    assert (required.compiled(), eager.compiled()) == (3, 0)
    assert required.lines[0] == "compiling ..."
    assert required.lines[1].startswith("stack: compiled since step 2: ")
    assert eager.lines == []


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_auto_compiles_where_the_rest_of_the_run_pays_for_it_and_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = Run("auto", 100)
    short.train(20)
    assert re.fullmatch(
        r"stack: eager: compiling pays from [\d,]+ steps on, and 88 are left; [\d.]+ ms a step",
        short.lines[0],
    )
    required = Run("require", 5)
    required.train(5)
    assert required.lines == [
        "compiling ...",
        "stack: compiled since step 2; 4 steps are too few to time",
    ]
    few = Run("auto", 5)
    few.train(5)
    assert few.lines == ["stack: eager: 5 steps are too few to look at"]
    monkeypatch.setattr(policy, "PAYS_S", {"cpu": 0.0})
    monkeypatch.setattr(policy, "median_step", lambda seconds: float(len(seconds) < 13))
    faster = Run("auto", 60)
    faster.train(60, {20, 30})
    assert faster.lines[1].startswith(
        "stack: compiled since step 13: 0 ms a step, eager 1e+03 ms"
    )
    assert faster.compiled() == 1, "a shape that came twice goes kernel by kernel"
    monkeypatch.setattr(policy, "median_step", lambda seconds: float(len(seconds) > 12))
    slower = Run("auto", 60)
    slower.train(60)
    assert (
        slower.lines[1] == "stack: eager: a compiled step takes 1e+03 ms; 0 ms a step"
    )
    assert slower.compiled() == 0


@pytest.mark.usefixtures("engine")
def test_what_cannot_be_compiled_is_refused_before_the_first_step_or_trained_without() -> (
    None
):
    lamb = dataclasses.replace(ADAM, tables="lamb")
    required = Run("require", 30, lamb)
    before = required.stack.dense.matrix.clone()
    with pytest.raises(
        StackError,
        match=r"the step of the stack cannot be compiled: .* is moved by lamb",
    ):
        required.train(1)
    assert torch.equal(before, required.stack.dense.matrix)


def test_one_compiles_where_it_pays_and_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_engine(device: torch.device) -> Any:
        raise CannotCaptureError("there is no C++ compiler")

    monkeypatch.setattr(compiled_module, "engine_for", no_engine)
    monkeypatch.setattr(policy, "PAYS_S", {"cpu": 0.0})
    run = Run("auto", 30)
    run.train(20)
    assert len(run.lines) == 1
    assert run.lines[0].startswith("stack: eager: there is no C++ compiler; ")


def resident(seed: int, *, age: float = 1.0, device: str | None = "cpu") -> ChunkLoader:
    """50 rows in memory in steps of 8, the last of 2, with a negative each; ``age`` changes a column."""
    numbers = np.arange(50)
    columns = {
        "user_id": numbers % 9,
        "item_id": numbers % 3 + 1,
        "c": (age * numbers / 50).astype(np.float32),
    }
    positives = Chunk({name: Column(values) for name, values in columns.items()})
    items = Chunk({"item_id": Column(np.arange(7))})
    negatives = UniformNegatives(6, columns["user_id"], columns["item_id"], seed)
    config = LoaderConfig(batch_size=8, negatives=1, seed=seed)
    return ChunkLoader(
        positives,
        ncf(0).schema(),
        config=config,
        items=items,
        negatives=negatives,
        device=device,
    )


def trained(
    loaders: Sequence[Loader],
    compile: Compile,  # noqa: A002
    checkpoints: Mapping[str, RunCheckpoints] | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[dict[str, Tensor], dict[str, list[Record]]]:
    """Weights and records of two members with dropout after two epochs."""
    members = {
        name: Member(
            network=ncf(number),
            loader=loaders[number],
            optimizer=ADAM,
            train=TrainConfig(epochs=2, log_every=3, compile=compile),
            seed=number,
            checkpoints=checkpoints[name] if checkpoints else None,
        )
        for number, name in enumerate("ab")
    }
    history = train_stack(members, stop=stop)
    records = {
        name: [
            {
                key: value
                for key, value in record.items()
                if key not in ("rows_per_s", "data_wait")
            }
            for record in of_member
        ]
        for name, of_member in history.items()
    }
    weights = {
        f"{name}.{key}": v
        for name in "ab"
        for key, v in members[name].network.state_dict().items()
    }
    return weights, records


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("compile", ["off", "require"])
@pytest.mark.parametrize("one_loader", [True, False], ids=["one loader", "loaders"])
def test_batches_made_inside_the_step_are_those_that_loaders_build(
    compile: Compile,  # noqa: A002
    one_loader: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[int] = []
    init = StackedSteps.__init__
    monkeypatch.setattr(
        StackedSteps,
        "__init__",
        lambda *given: joined.append(len(given[1])) or init(*given),
    )
    drawn, built = (
        [resident(seed, device=device) for seed in range(2)] for device in ("cpu", None)
    )
    if one_loader:
        drawn, built = [drawn[0]] * 2, [built[0]] * 2
    weights, records = trained(drawn, compile)
    assert joined == [2] * 12, "all steps but the last of each epoch, which is not full"
    expected, expected_records = trained(built, compile)
    assert joined == [2] * 12
    assert records == expected_records
    assert [record["rows"] for record in records["a"]] == [48, 48, 4, 32, 48, 20]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("age", "device"), [(2.0, "cpu"), (1.0, None)], ids=["rows", "kind"]
)
def test_members_with_other_rows_read_their_own_batches(
    age: float, device: str | None
) -> None:
    weights, records = trained(
        [resident(0), resident(1, age=age, device=device)], "off"
    )
    expected, expected_records = trained(
        [resident(0, device=None), resident(1, age=age, device=None)], "off"
    )
    assert records == expected_records
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stopped", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_steps_drawn_ahead_go_on_where_they_were_stopped(
    stopped: int, tmp_path: Path
) -> None:
    def loaders() -> list[ChunkLoader]:
        return [resident(0), resident(1)]

    def saving(step: int | None) -> dict[str, RunCheckpoints]:
        checkpointers = {
            name: Checkpointer(str(tmp_path / name), Runtime()) for name in "ab"
        }
        return {
            name: RunCheckpoints(
                kept,
                CheckpointConfig(steps=2),
                resume=kept.folder.path(step) if step else None,
            )
            for name, kept in checkpointers.items()
        }

    whole, records = trained(loaders(), "off")
    asked = iter(range(1, 100))
    with pytest.raises(RunStoppedError, match="stopped by a signal"):
        trained(loaders(), "off", saving(None), lambda: next(asked) == stopped)
    again, resumed = trained(loaders(), "off", saving(stopped))
    assert resumed == records
    assert all(torch.equal(again[name], value) for name, value in whole.items())
