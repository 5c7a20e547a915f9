"""Training with dynamic ids equals training of static tables, weights and optimizer state, on real ranks.

While the capacity suffices it equals a static table with the same ids; with evictions it equals a table without an end,
in which each admission has a row of its own: a row begun anew too early, too late or not at all differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.contracts import run_ranks
from tests.examples import META
from tests.train.checkpoint.test_plans import whole
from torchrec_ext.batch import Fresh, Jagged, TowerBatch
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.ids import Dynamic
from torchrec_ext.ids.index import mixed
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train import loop
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import (
    CheckpointConfig,
    RunCheckpoints,
)
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.config import EarlyStop
from torchrec_ext.train.guards import RunStoppedError
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps
from torchrec_ext.train.step.fresh_rows import FreshRows

FEATURES = ("user", "place", "item", "brand")
WIDTH = 8
STEPS, SIZE = 18, 96
ENOUGH, FEW = 400, 80
PLANS = [
    ("table_wise", "row_wise_adagrad"),
    ("row_wise", "row_wise_adagrad"),
    ("row_wise", "adagrad"),
    ("column_wise", "row_wise_adagrad"),
    ("data_parallel", "adam"),
]


def model_of(rows: int) -> Any:
    def table(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=WIDTH
        )

    model = two_tower(
        [table("user"), table("place")],
        [table("item"), table("brand")],
        tower_widths=(16, 8),
        device=META,
    )
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def begin(table: str, ids: Tensor) -> Tensor:
    """First values, a function of the id."""
    column = torch.arange(WIDTH) + FEATURES.index(table) * WIDTH
    return (mixed(ids[:, None] + column) >> 40).float() / 2**27


class Known(FreshRows):
    """Rows begin with values that depend on the id alone."""

    def _drawn(self, table: str, ids: Tensor) -> Tensor:
        return begin(table, ids)


class Raw:
    """Batches of raw ids that drift; each rank has its share."""

    def __init__(self, runtime: Runtime, schema: BatchSchema, drift: int) -> None:
        self.schema, self.hook = schema.with_hook()
        self.first = 0
        self.here = slice(
            runtime.rank * SIZE // runtime.world_size,
            (runtime.rank + 1) * SIZE // runtime.world_size,
        )
        generator = torch.Generator().manual_seed(3)
        catalogue = 60 + drift * STEPS
        self.names = torch.randint(
            -(2**62), 2**62, (len(FEATURES), catalogue), generator=generator
        )
        places = (
            torch.rand(STEPS, len(FEATURES), SIZE, generator=generator) ** 3 * 60
        ).long()
        self.places = places + drift * torch.arange(STEPS)[:, None, None]
        self.labels = torch.randint(0, 2, (STEPS, SIZE), generator=generator).float()
        self.share = SIZE / runtime.world_size

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[TowerBatch]:
        for step in range(self.first, STEPS):
            ids = torch.gather(self.names, 1, self.places[step])[:, self.here]
            columns = {
                name: Jagged(ids[number].contiguous())
                for number, name in enumerate(FEATURES)
            }
            yield self.schema.assemble(
                columns, labels=self.labels[step, self.here], total_weight=self.share
            )
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        pass

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        return {"step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = state["step"]


class WithoutEnd(DynamicIdLoader):
    """The same ids, but each admission has a row of its own, of a table that no id leaves; ``row_of`` names it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.row_of = {name: torch.arange(FEW) for name in FEATURES}
        self.used = dict.fromkeys(FEATURES, FEW)

    def __iter__(self) -> Iterator[TowerBatch]:
        for batch in super().__iter__():
            notes = []
            for note in batch.fresh or ():
                rows = torch.arange(
                    self.used[note.table], self.used[note.table] + len(note.rows)
                )
                self.row_of[note.table][note.rows] = rows
                self.used[note.table] += len(rows)
                notes.append(note._replace(rows=rows))
            yield self._moved(batch, tuple(notes))

    def _moved(self, batch: TowerBatch, notes: tuple[Fresh, ...]) -> TowerBatch:
        sparse = batch.sparse
        rows = [self.row_of[name][sparse[name].values()] for name in sparse.keys()]  # noqa: SIM118
        sparse = type(sparse)(
            keys=sparse.keys(), values=torch.cat(rows), lengths=sparse.lengths()
        )
        return dataclasses.replace(batch, sparse=sparse, fresh=notes)


class Static(DynamicIdLoader):
    """The rows that the ids have in the end, without notes: those of a vocabulary that was known before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loader.hook.replace = self.rows  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[TowerBatch]:
        return iter(self._loader)


Result = dict[str, Tensor]


def made(runtime: Runtime, plan: tuple[str, str], rows: int) -> tuple[Any, Any]:
    sharding, kind = plan
    optimizers = OptimizerConfig(tables=kind, tables_lr=0.1, dense="sgd", dense_lr=0.05)  # type: ignore[arg-type]
    return hybrid_parallel(
        model_of(rows),
        runtime,
        plan=PlanConfig(sharding=sharding),  # type: ignore[arg-type]
        optimizer=optimizers,
        seed=3,
    )


def schema_of(capacity: int) -> BatchSchema:
    return model_of(capacity).schema().with_dynamic(FEATURES)  # type: ignore[no-any-return]


def tables_of(model: Any, optimizer: Any) -> Result:
    """The tables and their state by row, whole on every rank."""
    state = whole(model_state(model, optimizer))
    return {
        name: tensor
        for name, tensor in state.items()
        if name.startswith("tables.") and tensor.ndim == 2
    }


def assert_equal(one: Result, other: Result, **tolerance: float) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], **{"rtol": 0.0, "atol": 0.0, **tolerance}
        )


def trained(
    runtime: Runtime,
    plan: tuple[str, str],
    loader_of: type[DynamicIdLoader],
    rows: int,
    capacity: int,
    drift: int,
    compile: Compile = "off",  # noqa: A002  the setting's name
    early_stop: EarlyStop | None = None,
) -> tuple[Result, Any]:
    """The tables and their state after a training, and the loader."""
    sharded, optimizer = made(runtime, plan, rows)
    schema = schema_of(capacity)
    raw = Raw(runtime, schema, drift)
    loader = loader_of(
        raw,
        schema,
        {name: Dynamic(capacity=capacity) for name in FEATURES},
    )
    loop.FreshRows = Known  # type: ignore[misc]  # in the process of this rank
    fresh = Known(sharded, optimizer)
    if loader_of is Static:
        for step in range(STEPS):
            ids = torch.gather(raw.names, 1, raw.places[step])[:, raw.here]
            loader.ids.step(dict(zip(FEATURES, ids.contiguous(), strict=True)))
        fresh(
            tuple(
                Fresh(name, rows, ids, rows)
                for name in FEATURES
                for ids, rows in [loader.ids.live_ids(name)]
            )
        )
    config = TrainConfig(
        epochs=1, compile=compile, early_stop=early_stop or EarlyStop()
    )
    train(
        sharded,
        optimizer,
        loader,
        runtime,
        config,
        evaluate=lambda: {"auc": 0.5},
    )
    return tables_of(sharded, optimizer), loader


def both_laws(runtime: Runtime, plans: list[tuple[str, str]]) -> list[dict[str, Any]]:
    results = []
    for plan in plans:
        dynamic, loader = trained(runtime, plan, DynamicIdLoader, ENOUGH, ENOUGH, 5)
        static, _ = trained(runtime, plan, Static, ENOUGH, ENOUGH, 5)
        evicting, evicted = trained(runtime, plan, DynamicIdLoader, FEW, FEW, 8)
        endless, without_end = trained(runtime, plan, WithoutEnd, FEW + 400, FEW, 8)
        assert not loader.ids.counts["evicted"]
        results.append(
            {
                "dynamic": dynamic,
                "static": static,
                "evicting": evicting,
                "endless": endless,
                "live": {name: loader.ids.live_ids(name) for name in FEATURES},
                "few": {name: evicted.ids.live_ids(name) for name in FEATURES},
                "row_of": without_end.row_of,
                "counts": evicted.ids.counts,
            }
        )
    return results


def check(world_size: int, plans: list[tuple[str, str]]) -> None:
    by_rank = run_ranks(both_laws, world_size, plans, timeout_s=300)
    for number, plan in enumerate(plans):
        ranks = [results[number] for results in by_rank]
        assert ranks[0]["counts"]["evicted"] > 300
        tables = ranks[0]
        for name in tables["dynamic"]:
            feature = name.split(".")[1]
            rows = ranks[0]["live"][feature][1]
            assert torch.equal(
                tables["dynamic"][name][rows], tables["static"][name][rows]
            ), (plan, name)
            few = ranks[0]["few"][feature][1]
            same = tables["endless"][name][ranks[0]["row_of"][feature][few]]
            # On three ranks and more a gradient is rounded by its place in a message,
            # which Adam magnifies.
            tolerance = 1e-5 if plan[0] == "data_parallel" and world_size > 2 else 0.0
            assert torch.allclose(
                tables["evicting"][name][few], same, rtol=0, atol=tolerance
            ), (plan, name)
        for rank in ranks:
            assert all(
                torch.equal(rank["few"][name][0], ranks[0]["few"][name][0])
                for name in FEATURES
            )


def test_two_ranks_equal_static_tables_and_tables_without_an_end() -> None:
    check(2, PLANS[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_plan_equals_static_tables_and_tables_without_an_end(
    world_size: int,
) -> None:
    check(world_size, PLANS)


def captured(runtime: Runtime) -> list[tuple[Result, Result]]:
    # Op by op: what is captured is tested, not how it is compiled.
    captures = []

    def engine(step: Any, *tensors: Any) -> Any:
        captures.append(getattr(step, "__name__", ""))
        return as_it_is(step, *tensors)

    steps.engine_for = lambda _: (engine, "capturing")
    results = []
    for plan in (PLANS[1], PLANS[4]):
        eager, _ = trained(runtime, plan, DynamicIdLoader, FEW, FEW, 8)
        results.append(
            (eager, trained(runtime, plan, DynamicIdLoader, FEW, FEW, 8, "require")[0])
        )
    assert "found_and_counted" in captures, "look-ups are compiled with the step"
    return results


def test_captured_steps_equal_eager_ones() -> None:
    (results,) = run_ranks(captured, 1)
    for eager, by_capture in results:
        assert_equal(eager, by_capture, rtol=1e-4, atol=1e-5)


def test_beginning_rows_leaves_all_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a GPU too: dropout must not depend on which ids are new."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=64, embedding_dim=WIDTH
        )
        for name in "ab"
    ]
    model = two_tower(tables[:1], tables[1:], device=torch.device("cpu"))
    before = torch.get_rng_state()
    rows, ids = torch.arange(1, 5), torch.arange(100, 104)
    FreshRows(model, None)((Fresh("a", rows, ids, ids[:0]),))
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


def restoring(runtime: Runtime) -> str:
    stop = EarlyStop(metric="auc")
    with pytest.raises(ValueError, match="early_stop") as error:
        trained(
            runtime, ("row_wise", "sgd"), DynamicIdLoader, FEW, FEW, 8, early_stop=stop
        )
    return str(error.value)


def test_restoring_the_best_weights_is_refused_with_dynamic_ids() -> None:
    # By the last step, other ids have the rows of the best evaluation.
    assert run_ranks(restoring, 1)[0].endswith("set train.early_stop.restore=false")


def in_ones_own_loop(runtime: Runtime) -> tuple[Result, Result]:
    plan = ("table_wise", "row_wise_adagrad")
    by_train, _ = trained(runtime, plan, DynamicIdLoader, FEW, FEW, 8)
    sharded, optimizer = made(runtime, plan, FEW)
    schema = schema_of(FEW)
    policies = {name: Dynamic(capacity=FEW) for name in FEATURES}
    begin_rows = Known(sharded, optimizer)
    for batch in DynamicIdLoader(Raw(runtime, schema, 8), schema, policies):
        begin_rows(batch.fresh or ())
        optimizer.zero_grad()
        sharded(batch)[0].backward()
        optimizer.step()
    return by_train, tables_of(sharded, optimizer)


def test_a_loop_of_ones_own_equals_train() -> None:
    assert_equal(*run_ranks(in_ones_own_loop, 1)[0])


def interrupted(
    runtime: Runtime, folder: str, plan: tuple[str, str]
) -> tuple[Result, Any]:
    """A training that ends twice by a signal, each time resumed; and the ids in the end."""
    stops = [6, 4, 0] if folder else [0]
    for stop_after in stops:
        sharded, optimizer = made(runtime, plan, FEW)
        schema = schema_of(FEW)
        loader = DynamicIdLoader(
            Raw(runtime, schema, 8),
            schema,
            {name: Dynamic(capacity=FEW) for name in FEATURES},
        )
        checkpoints = None
        if folder:
            checkpointer = Checkpointer(folder, runtime)
            checkpoints = RunCheckpoints(
                checkpointer,
                CheckpointConfig(),
                resume=checkpointer.last_good(lambda _: None),
            )
        left = stop_after

        def stop() -> bool:
            nonlocal left
            left -= 1
            return left == 0

        with contextlib.suppress(RunStoppedError):
            train(
                sharded,
                optimizer,
                loader,  # type: ignore[arg-type]
                runtime,
                TrainConfig(epochs=1, compile="off"),
                checkpoints=checkpoints,
                stop=stop,
            )
    return tables_of(sharded, optimizer), loader.ids.state_dict()["tables"]


def by_both_ways(
    runtime: Runtime, folder: str, plans: list[tuple[str, str]]
) -> dict[str, Any]:
    results = {}
    for plan in plans:
        results[plan[0]] = [
            interrupted(runtime, where, plan) for where in ("", f"{folder}/{plan[0]}")
        ]
    return results


@pytest.mark.parametrize(
    "plans",
    [PLANS[1:2], pytest.param(PLANS[2:], marks=pytest.mark.slow)],
    ids=["row_wise", "others"],
)
def test_resumed_equals_uninterrupted(
    tmp_path: Path, plans: list[tuple[str, str]]
) -> None:
    for rank in run_ranks(by_both_ways, 2, str(tmp_path), plans):
        for (whole_run, ids), (resumed, resumed_ids) in rank.values():
            assert_equal(whole_run, resumed)
            for table in FEATURES:
                for name, value in ids[table].items():
                    other = resumed_ids[table][name]
                    assert (
                        torch.equal(value, other)
                        if isinstance(value, Tensor)
                        else value == other
                    )


@pytest.mark.unit
def test_what_cannot_be_is_refused_in_one_line() -> None:
    plain = model_of(FEW).schema()
    dynamic = plain.with_dynamic(FEATURES)
    for schema, message in (
        (plain, "feature 'user': the schema checks its ids"),
        (dynamic, "feature 'user': capacity=9, but table 'user' has 80 rows"),
    ):
        raw = Raw(Runtime(), schema, 1)
        with pytest.raises(ValueError, match=message) as error:
            DynamicIdLoader(raw, schema, {"user": Dynamic(capacity=9)})
        assert len(str(error.value)) <= 200
