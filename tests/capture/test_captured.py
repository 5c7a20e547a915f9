"""A captured step trains as the sharded model: under every optimizer, on every shape, with every name of the state."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from tests.capture.runs import Ended, Few, ended
from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, USERS, batches, redrawn, small_model, table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.captured import CapturedStep
from torchrec_ext.capture.executors import (
    StepExecutor,
    as_it_is,
    cuda_graph,
    inductor,
    traced,
)
from torchrec_ext.capture.policy import MOST_GRAPHS
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.models.tower_model import Prediction, two_tower
from torchrec_ext.modules.interaction import DotProduct
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("adam", "auto", {}),
    ("adam", "auto", {"clip_norm": 0.1}),
    ("adam", "data_parallel", {"tables_l2": 0.1, "eps": 1e-4}),
    ("lazy_adam", "auto", {}),
    ("adagrad", "data_parallel", {"clip_norm": 0.1}),
    ("row_wise_adagrad", "auto", {"dense": "adagrad"}),
    ("sgd", "data_parallel", {"dense_weight_decay": 0.1}),
]


def sharded(
    runtime: Runtime, tables: str, sharding: str, options: dict[str, Any]
) -> Any:
    model, optimizer = (
        small_model(META),
        OptimizerConfig(tables=tables, **{"tables_lr": 0.01, **options}),
    )  # type: ignore[arg-type]
    plan = plan_sharding(
        model, runtime, PlanConfig(sharding=sharding), optimizer=optimizer
    )  # type: ignore[arg-type]
    return hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer)


def stepped(model: nn.Module, optimizer: Any, batch: TowerBatch) -> Tensor:
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    return loss.detach()  # type: ignore[no-any-return]


def differences(
    runtime: Runtime,
    kind: tuple[str, str, dict[str, Any]],
    engine: StepExecutor,
    count: int,
) -> list[dict[str, float]]:
    """Returns how far loss, weights and state are from the sharded model's after ``count`` steps, for both moves."""
    given = [batch.to(runtime.device) for batch in batches(count)]
    model, optimizer = sharded(runtime, *kind)
    losses, found = [stepped(model, optimizer, batch) for batch in given], []
    for rows in (False, True):
        other, own = sharded(runtime, *kind)
        stepped(other, own, given[0])
        step = CapturedStep(other, own, engine, rule=lambda *_, rows=rows: rows)
        off = max(
            abs(float(loss - step(batch)[0]))
            for loss, batch in zip(losses[1:], given[1:], strict=True)
        )
        step.settle()
        pairs = [
            (optimizer.state.get(one, {}), own.state.get(own.params[name], {}))
            for name, one in optimizer.params.items()
        ]
        states = [
            (before[name], after[name]) for before, after in pairs for name in before
        ]
        found.append(
            {
                "loss": off,
                "weights": farthest(gather_state(model), gather_state(other)),
                "state": max(
                    (distance(whole(one), whole(two)) for one, two in states),
                    default=0.0,
                ),
                "by_row": float(len(step._memory.row_tables)),
            }
        )
    return found


def farthest(
    before: dict[str, Tensor] | None, after: dict[str, Tensor] | None
) -> float:
    """Of all parameters, which must have the same names."""
    assert before is not None
    assert after is not None
    assert list(before) == list(after)
    return max(distance(before[name], after[name]) for name in before)


def whole(state: Any) -> Tensor:
    return (
        state.local_shards()[0].tensor
        if hasattr(state, "local_shards")
        else torch.as_tensor(state, dtype=torch.float32)
    )


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-6))


def under_every_optimizer(runtime: Runtime) -> list[tuple[Any, list[dict[str, float]]]]:
    return [(kind, differences(runtime, kind, as_it_is, 12)) for kind in KINDS]


def test_a_captured_step_learns_what_the_sharded_model_learns_under_every_optimizer() -> (
    None
):
    (found,) = run_ranks(under_every_optimizer, 1, timeout_s=600)
    for kind, ways in found:
        check(kind, ways)


def check(kind: tuple[str, str, dict[str, Any]], ways: list[dict[str, float]]) -> None:
    """Rows that catch up are within half a percent: eps counts where a gradient is near 0, as it was at its step."""
    always_whole = "tables_l2" in kind[2]
    for rows, far in enumerate(ways):
        catches_up = kind[0] == "adam" and rows
        assert far["loss"] < (1e-4 if catches_up else 1e-5), (kind, rows)
        assert far["weights"] < (5e-3 if catches_up else 2e-5), (kind, rows)
        assert far["state"] < (5e-3 if catches_up else 1e-4), (kind, rows)
        assert far["by_row"] == (3 if rows and not always_whole else 0), (kind, rows)


def ncf(runtime: Runtime) -> tuple[Any, Any, ChunkLoader]:
    """A model over 90 positives with 2 negatives, resident, in steps of 16: the last one has 10."""
    generator = np.random.default_rng(0)
    users, items = generator.integers(0, 20, 90), generator.integers(1, 31, 90)
    ages = generator.random(90, dtype=np.float32)
    model = ContextualNCF(20, 31, context_dense=["age"], shared=("user",), device=META)
    columns = {"user_id": users, "item_id": items, "age": ages}
    torch.manual_seed(0)
    loader = ChunkLoader(
        Chunk({name: Column(values) for name, values in columns.items()}),
        model.schema(),
        config=LoaderConfig(batch_size=16, negatives=2, device=runtime.device.type),
        items=Chunk({"item_id": Column(np.arange(31))}),
        negatives=UniformNegatives(30, users, items),
    )
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=OptimizerConfig(tables="adam", tables_lr=0.01)
    )
    return parallel, optimizer, loader


def drawing(loader_steps: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **_: loader_steps(inside=True)


def runs(
    runtime: Runtime,
    engine: StepExecutor,
    ways: Sequence[str] = ("off", "require", "inside"),
    **options: Any,
) -> dict[str, Any]:
    """Three epochs with and without a captured step, and with one that draws its negatives; what was said."""
    found: dict[str, Any] = {}
    steps.engine_for = lambda _: (engine, "capturing")
    for way in ways:
        torch.manual_seed(1)
        model, optimizer, loader = ncf(runtime)
        compile_ = way
        if way == "inside":
            # As on a GPU with Triton.
            compile_ = "require"
            loader.steps = drawing(loader.steps)  # type: ignore[method-assign]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            config = TrainConfig(epochs=3, log_every=4, compile=compile_, **options)  # type: ignore[arg-type]
            history = train(
                model,
                optimizer,
                loader,
                runtime,
                config,
                evaluate=lambda model=model: {"sum": total(model)},
            )
        found[way] = {
            "state": gather_state(model),
            "history": history,
            "said": said.getvalue(),
        }
    return found


def total(model: nn.Module) -> float:
    return float(
        sum(value.abs().sum() for value in (gather_state(model) or {}).values())
    )


def same_runs(found: dict[str, Any]) -> None:
    for way in ("require", "inside"):
        same_run(found["off"], found[way])


def same_run(off: dict[str, Any], on: dict[str, Any]) -> None:
    assert farthest(off["state"], on["state"]) < 1e-4
    pairs = list(zip(off["history"], on["history"], strict=True))
    assert [one["step"] for one, _ in pairs] == [other["step"] for _, other in pairs]
    for one, other in pairs:
        assert all(
            one[name] == pytest.approx(other[name], rel=1e-4)
            for name in ("loss", "sum", "rows")
            if name in one
        )
    assert "capturing ..." in on["said"]
    whole = "moved whole (at most 5 rows per look-up): user_id_gmf, user_id_mlp, item_id_gmf, item_id_mlp"
    assert on["said"].count(whole) == 1
    assert "capturing" not in off["said"]


def test_a_run_of_captured_steps_is_the_run_without_last_batch_and_evaluations_included() -> (
    None
):
    same_runs(run_ranks(runs, 1, as_it_is)[0])


def in_bfloat16(runtime: Runtime) -> list[dict[str, Any]]:
    return [runs(runtime, as_it_is), runs(runtime, as_it_is, amp="bf16")]


def test_mixed_precision_keeps_weights_in_float32_and_learns_nearly_the_same_captured_or_not() -> (
    None
):
    ((plain, mixed),) = run_ranks(in_bfloat16, 1)
    for way in ("off", "require", "inside"):
        assert {value.dtype for value in mixed[way]["state"].values()} == {
            torch.float32
        }
        assert farthest(plain[way]["state"], mixed[way]["state"]) > 0
        losses = [
            [
                record["loss"]
                for record in run[way]["history"]
                if record["kind"] == "train"
            ]
            for run in (plain, mixed)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["drawn", "drawn inside"])
def test_a_cuda_graph_learns_what_the_sharded_model_learns_and_waits_for_nothing(
    inside: bool,
) -> None:
    with Runtime.start("cuda") as runtime:
        check(KINDS[0], differences(runtime, KINDS[0], cuda_graph, 30))
        model, optimizer, loader = ncf(runtime)
        items = loader.steps(inside=inside)
        first = next(items)
        stepped(
            model, optimizer, first.batch() if isinstance(first, DrawnStep) else first
        )
        step = CapturedStep(model, optimizer, cuda_graph)
        step(next(items))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for item in itertools.islice(items, 3):
                step(item)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_a_compiled_run_is_the_run_without() -> None:
    same_runs(run_ranks(runs, 1, inductor, timeout_s=900)[0])


def doubled(logits: Tensor, batch: TowerBatch) -> Tensor:
    """A loss that asks for a value."""
    loss = bce(logits, batch)
    return loss * 2 if float(loss) > 1 else loss


def branching() -> nn.Module:
    model = small_model(META)
    model.loss.function = doubled
    return model


class Listed(nn.Module):
    """A model with a row for each id."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="user_id",
            feature_names=["user_id"],
            num_embeddings=USERS,
            embedding_dim=4,
        )
        self.rows = EmbeddingCollection(tables=[config], device=META)

    def forward(self, batch: TowerBatch) -> Any:
        loss = self.rows(batch.sparse)["user_id"].values().square().mean()
        return loss, Prediction(
            loss.detach(), batch.labels, batch.labels, batch.weights
        )


class Annealed(nn.Module):
    """Its loss grows with a number of steps that it counts in Python."""

    counts = 1

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = small_model(META), 0
        np.random.seed(1)

    def forward(self, batch: TowerBatch) -> Any:
        self.calls += self.counts
        loss, output = self.inner(batch)
        return loss * (self.calls or np.random.rand()), output


class Drawing(Annealed):
    """Its loss is multiplied by a number that numpy draws."""

    counts = 0


def refused(runtime: Runtime) -> list[Ended]:
    """Models that cannot be captured: by "auto" with a note, by "require" with an error."""
    return [
        ended(runtime, Few([24] * 4), as_traced, way, made(), tables="adagrad")
        for made in (branching, Listed, Annealed, Drawing)
        for way in ("auto", "require", "off")
    ]


def test_what_cannot_be_captured_is_named_and_trained_without_unless_it_is_required() -> (
    None
):
    (found,) = run_ranks(refused, 1)
    reasons = [
        r"aten\._local_scalar_dense.*test_captured\.py.*\(return loss \* 2 if",
        "'rows' returns a row for each id",
        "forward changes 'calls'",
        "forward changes 'random'",
    ]
    ways = zip(found[::3], found[1::3], found[2::3], strict=True)
    for reason, (auto, required, off) in zip(reasons, ways, strict=True):
        assert re.search(f"{reason}.*training goes on without", auto.said)
        assert re.match(
            f"CannotCaptureError: train.compile=require: .*{reason}", required.error
        )
        assert not auto.error
        assert farthest(off.state, auto.state) == 0


def shapes(runtime: Runtime) -> list[Ended]:
    loader = Few([24, 24, 24, 8, 12, 24, 16])
    return [
        ended(runtime, loader, as_it_is, way, epochs=2, patience=1)
        for way in ("off", "require", "auto")
    ]


def test_batches_of_another_size_are_captured_too_and_learn_the_same() -> None:
    ((off, required, auto),) = run_ranks(shapes, 1)
    assert 2 <= required.captures <= MOST_GRAPHS
    # the three rare shapes when they come for the second time
    assert auto.captures == 4
    assert farthest(off.state, required.state) < 1e-4
    assert farthest(off.state, auto.state) < 1e-4


def as_traced(step: Any, memory: list[Tensor], inputs: list[Tensor]) -> Any:
    """The ops that were captured, without a compiler: nothing that depends on a batch's values is left in Python."""
    graph = traced(step, [*memory, *inputs])

    def run(inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            return graph(*memory, *inputs)  # type: ignore[no-any-return]

    return run


def with_noise_and_statistics() -> nn.Module:
    """Batch norm over rows with weights, and dropout."""
    return two_tower(
        [table("user_id", USERS), table("history", ITEMS)],
        [table("item_id", ITEMS)],
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(16, 8),
        normalization="batch",
        dropout=0.2,
        device=META,
    )


def over_a_batch() -> nn.Module:
    """A softmax over the batch."""
    towers = {
        "user": Tower(
            [table("user_id", USERS), table("history", ITEMS)],
            (8,),
            dense=["age"],
        ),
        "item": Tower([table("item_id", ITEMS)], (8,), dense=["price"]),
    }
    return RetrievalModel(
        towers,
        DotProduct([8, 8]),
        counts=torch.arange(1, ITEMS + 1),
        device=META,
    )


def padded_batches(count: int) -> Iterator[TowerBatch]:
    """As a loader gives them: the last rows are padding."""
    for batch in batches(count):
        weights = batch.weights * (torch.arange(len(batch)) < 17)
        ids = {
            "items": batch.ids("item_id").masked_fill(weights == 0, 0),
        }
        yield dataclasses.replace(
            batch,
            weights=weights,
            total_weight=weights.sum(),
            queries=len(batch),
            **ids,
        )


def of_layers(runtime: Runtime) -> list[dict[str, float]]:
    """Losses, weights and statistics of captured and of the sharded model's steps, from the same random numbers."""
    found, given = [], list(padded_batches(8))
    for make in (with_noise_and_statistics, over_a_batch):
        made = []
        for _ in range(2):
            # A softmax over the batch says nothing of the items' last bias: Adam would
            # make steps of that nothing's rounding.
            optimizer = OptimizerConfig(
                tables="adagrad", tables_lr=0.01, dense="sgd", dense_lr=0.1
            )
            model = redrawn(make())
            plan = plan_sharding(
                model,
                runtime,
                PlanConfig(sharding="data_parallel"),
                optimizer=optimizer,
            )
            made.append(hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer))
        (model, optimizer), (other, own) = made
        for each in made:  # of which the state is made
            torch.manual_seed(0)
            stepped(*each, given[0])
        # As after a resume: no checkpoint has a table's count under Adagrad.
        own.state[own.replicated_tables[0]]["step"].zero_()
        captured = CapturedStep(other, own, as_traced)
        far = {"loss": 0.0}
        for number, batch in enumerate(given[1:]):
            torch.manual_seed(number)
            loss = stepped(model, optimizer, batch)
            torch.manual_seed(number)
            far["loss"] = max(far["loss"], abs(float(loss - captured(batch)[0])))
        captured.settle()
        far["weights"] = farthest(gather_state(model), gather_state(other))
        one, two = (dict(each.named_buffers()) for each in (model, other))
        far["statistics"] = max(
            (distance(one[name].float(), two[name].float()) for name in one),
            default=0.0,
        )
        far["moved"] = max(
            (
                float(value.float().abs().max())
                for name, value in two.items()
                if "running_mean" in name
            ),
            default=1.0,
        )
        found.append(far)
    return found


def test_captured_steps_take_noise_statistics_and_the_candidates_of_a_batch() -> None:
    for far in run_ranks(of_layers, 1)[0]:
        assert far["loss"] < 1e-5
        assert far["weights"] < 1e-4
        assert far["statistics"] < 1e-5
        assert far["moved"] > 0.01
