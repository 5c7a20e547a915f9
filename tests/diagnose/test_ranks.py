"""Diagnoses on two real ranks, whose clocks the programs move; and what ranks measured, as pure functions."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import examples
from tests.contracts import gather_state, run_ranks
from tests.diagnose.programs import Clock, on_ranks
from tests.examples import META, small_model
from torchrec_ext.diagnose import why, why_slow
from torchrec_ext.diagnose.experiments import batches, loop, measure, ranks, rounds
from torchrec_ext.diagnose.experiments.collectives import (
    Call,
    Collectives,
    Failures,
    Ranks,
    RanksFailedError,
)
from torchrec_ext.diagnose.experiments.loop import Moment, Span
from torchrec_ext.diagnose.experiments.traces import (
    Traced,
    collectives_of,
    common_rounds,
    parted,
)
from torchrec_ext.diagnose.facts import Facts
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.optim.sharded import kernels_of
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections
from torchrec_ext.schema import Jagged

# -------------------------------------------------------------------- on two real ranks


def _moved() -> Clock:
    """Has this process's diagnoses read a clock that programs move, and makes them short."""
    clock = Clock()
    why.ThreadClock = lambda: clock  # type: ignore[assignment, misc]
    batches.thread_time = lambda: clock.computed
    loop.time = ranks.time = types.SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    rounds.MOST_ROUNDS, loop.TURN_S = rounds.FEWEST_ROUNDS, 0.0
    measure.roofline = lambda: (5e10, 1e10)
    return clock


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [
        each.detach().clone() for each in (*model.parameters(), *model.buffers(), *held)
    ]


def _verdicts(
    runtime: Runtime, causes: tuple[str, ...]
) -> list[tuple[str, Any, str, str, list[Any]]]:
    """Each cause's verdict, ranks, page and JSON, with the state before and after and that of a step on both."""
    made = []
    for cause in causes:
        clock = _moved()
        program = on_ranks(clock, runtime.rank, cause)
        given = list(program.batches)

        def step(batch: Any, program: Any = program) -> None:
            program.optimizer.zero_grad()
            program.loss(*batch).backward()
            program.optimizer.step()

        for batch in given[:2]:
            step(batch)
        before = _state(program.model, program.optimizer)
        torch.manual_seed(5)
        diagnosis = why_slow(
            program.model, program.optimizer, program.loss, program.batches
        )
        drawn = float(torch.rand(()))
        after = _state(program.model, program.optimizer)
        step(given[2])
        first = diagnosis.findings[0].ranks if diagnosis.findings else ()
        state = [before, after, _state(program.model, program.optimizer), drawn]
        made.append(
            (diagnosis.verdict, first, str(diagnosis), diagnosis.to_json(), state)
        )
    return made


def _undiagnosed(runtime: Runtime) -> list[Tensor]:
    """The state after the three steps that :func:`_verdicts` trains."""
    program = on_ranks(Clock(), runtime.rank)
    for batch in list(program.batches)[:3]:
        program.optimizer.zero_grad()
        program.loss(*batch).backward()
        program.optimizer.step()
    return _state(program.model, program.optimizer)


def _raising(runtime: Runtime) -> list[str]:
    """What ranks end with where rank 1 alone raises: in its loss, in its loader, in a setting, without a batch."""
    clock = _moved()
    texts = []
    program = on_ranks(clock, runtime.rank)
    given = list(program.batches)

    def broken() -> Any:
        for number, batch in enumerate(given):
            clock.compute(0.01)
            if runtime.rank == 1 and number:
                raise OSError("no such shard")
            yield batch

    class Broken:
        def __iter__(self) -> Any:
            return broken()

    texts.append(
        str(
            why_slow(
                program.model, program.optimizer, program.loss, Broken()
            ).facts.not_measured["step"]
        )
    )
    for budget, given_to in (
        (25.0 if runtime.rank == 0 else -1.0, given),
        (25.0, given if runtime.rank == 0 else []),
    ):
        try:
            why_slow(
                program.model,
                program.optimizer,
                program.loss,
                given_to,
                budget_s=budget,
            )
        except ValueError as error:
            texts.append(str(error))

    def step(x: Tensor, y: Tensor) -> None:
        if runtime.rank == 1:
            raise RuntimeError("a bad row")
        program.loss(x, y).backward()

    texts.append(
        why_slow.step(
            step, given, model=program.model, optimizer=program.optimizer
        ).facts.not_measured["step"]
    )
    return texts


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.equal(b) for a, b in zip(some, others, strict=True)
    )


def _real(runtime: Runtime) -> tuple[Any, Any, Any]:
    return (
        _verdicts(runtime, ("backward", "unmerged")),
        _undiagnosed(runtime),
        _raising(runtime),
    )


@pytest.mark.launch
def test_two_ranks_diagnose_together_put_everything_back_and_none_hangs() -> None:
    by_rank = run_ranks(_real, 2)
    (backward, unmerged), _, _ = by_rank[0]
    assert backward[:2] == ("straggler_backward", (1,))
    assert backward[2].startswith(
        "why is my training slow? rank 1 is slow in its backward only"
    )
    assert "12 all_reduce" not in backward[2]
    # 12 of the user's, and the gradients
    assert "13 all_reduce in a step" in unmerged[2]
    for rank, (made, undiagnosed, texts) in enumerate(by_rank):
        for number, (*_, page, facts, (before, after, trained, drawn)) in enumerate(
            made
        ):
            assert _same(before, after)
            assert drawn == pytest.approx(
                float(torch.rand((), generator=torch.Generator().manual_seed(5)))
            )
            if number == 0:
                assert _same(trained, undiagnosed)
            assert facts == by_rank[0][0][number][3]  # one report
            assert bool(page) == (rank == 0)
        assert texts[0].startswith(
            "the step raised on rank 1: the loader raised OSError: no such shard (test_ranks.py:"
        )
        assert [text.removeprefix("rank 1: ") for text in texts[1:3]] == [
            "budget_s=-1.0: must be a number of seconds above 0",
            "batches: list gives no batch; give at least one",
        ]
        assert texts[3].startswith(
            "the step raised on rank 1: RuntimeError: a bad row (test_ranks.py:"
        )


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("cause", "verdict", "named"),
    [
        ("input", "straggler_input", (1,)),
        ("forward", "straggler_forward", (1,)),
        ("rotating", "rotating_straggler", (0, 1)),
        ("everywhere", "slow_rank", (1,)),
        ("lists", "uneven_lists", (1,)),
    ],
)
def test_the_planted_cause_of_two_ranks_is_the_verdict(
    cause: str, verdict: str, named: tuple[int, ...]
) -> None:
    (made,) = run_ranks(_verdicts, 2, (cause,))[0]
    assert made[:2] == (verdict, named)


class Hybrid(NamedTuple):
    """A hybrid-parallel training of one rank."""

    model: Any
    optimizer: Any
    step: Callable[[Any], None]
    batches: list[Any]


def _hybrid(runtime: Runtime, sharding: Any, tables: Any = "adam") -> Hybrid:
    rounds.MOST_ROUNDS, loop.TURN_S = rounds.FEWEST_ROUNDS, 0.0
    measure.roofline = lambda: (5e10, 1e10)
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=plan, optimizer=OptimizerConfig(tables=tables), seed=7
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss, _ = parallel(batch)
        loss.backward()
        optimizer.step()

    local = list(examples.batches(6, rank=runtime.rank, world_size=runtime.world_size))
    return Hybrid(parallel, optimizer, step, local)


def _held(made: Hybrid) -> dict[str, Tensor]:
    """Copies of all that this rank holds: parameters, its kernels' weights and states, optimizers' states, rates."""
    held: dict[str, Any] = dict(made.model.named_parameters())
    held |= {f"buffer {name}": value for name, value in made.model.named_buffers()}
    for number, (_, collection) in enumerate(collections(made.model)):
        for kernel in kernels_of(collection):
            held |= {
                f"kernel {number} {name}": value
                for name, value in kernel.emb_module.state_dict().items()
            }
            held |= {
                f"kernel {number} {name}": value
                for name, value in kernel.emb_module.named_buffers()
            }
            held[f"rate {number}"] = torch.tensor(kernel.emb_module.get_learning_rate())
    for number, state in enumerate(made.optimizer.state.values()):
        for name, value in state.items():
            shards = value.local_shards() if hasattr(value, "local_shards") else []
            held |= {
                f"state {number} {name} {at}": shard.tensor
                for at, shard in enumerate(shards)
            }
            if isinstance(value, Tensor) and not shards:
                held[f"state {number} {name}"] = value
    return {
        name: value.detach().clone()
        for name, value in held.items()
        if type(value) in (Tensor, nn.Parameter)
    }


def _diagnosed(
    runtime: Runtime, sharding: str, tables: str, when: int
) -> tuple[Any, Any, Facts]:
    """States of a hybrid-parallel training with and without a diagnosis, around it and at the end; its facts."""
    states, around = [], []
    for diagnosed in (False, True):
        made = _hybrid(runtime, sharding, tables)
        for number, batch in enumerate(made.batches):
            if number == when and diagnosed:
                around.append(_held(made))
                diagnosis = why_slow.step(
                    made.step,
                    made.batches,
                    model=made.model,
                    optimizer=made.optimizer,
                    budget_s=30,
                )
                around.append(_held(made))
            made.step(batch)
        states.append((gather_state(made.model), _held(made)))
    return states, around, diagnosis.facts


def _held_still(runtime: Runtime, sharding: str) -> tuple[list[bool], list[bool]]:
    """Whether sharded tables are the same after each stretch of steps without exchange; and without their rate of 0."""
    stretch = ranks.LocalSteps.without_exchange
    seen = {True: list[bool](), False: list[bool]()}
    for held in seen:
        made = _hybrid(runtime, sharding, "sgd")
        tables = [weight for _, each in collections(made.model) for kernel in kernels_of(each)
                  for weight in kernel.emb_module.split_embedding_weights()]  # fmt: skip

        @contextlib.contextmanager
        def watched(
            self: Any, tables: Any = tables, held: bool = held
        ) -> Iterator[None]:
            state = self.loop.state
            before, put_back = [table.clone() for table in tables], state.restore_step
            self.fused = self.fused if held else []

            def looked_at() -> None:
                seen[held].append(_same(before, tables))
                put_back()
                before[:] = [table.clone() for table in tables]

            state.restore_step = looked_at
            try:
                with stretch(self):
                    yield
            finally:
                state.restore_step = put_back
            seen[held].append(_same(before, tables))

        ranks.LocalSteps.without_exchange = watched  # type: ignore[method-assign]
        why_slow.step(
            made.step,
            made.batches,
            model=made.model,
            optimizer=made.optimizer,
            budget_s=30,
        )
    return seen[True], seen[False]


@pytest.mark.slow
@pytest.mark.launch
def test_steps_without_exchange_leave_the_rows_of_sharded_tables_where_they_are() -> (
    None
):
    for held, moved in run_ranks(_held_still, 2, "table_wise"):
        assert all(held)
        assert not all(moved)


def _equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        some[name].equal(others[name]) for name in some
    )


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("world_size", "sharding", "tables", "when"),
    [
        (2, "data_parallel", "adam", 2),
        (2, "table_wise", "row_wise_adagrad", 2),
        (2, "row_wise", "adagrad", 2),
        (2, "row_wise", "sgd", 0),
        (2, "column_wise", "adam", 2),
        (2, "table_wise", "lazy_adam", 0),
        (3, "table_wise", "row_wise_adagrad", 2),
        (3, "row_wise", "adagrad", 2),
    ],
)
def test_a_hybrid_parallel_training_goes_on_as_if_it_had_not_been_diagnosed(
    world_size: int, sharding: str, tables: str, when: int
) -> None:
    """Rows of kernels whose optimizers run inside the backward, their moments and their counters among it."""
    by_rank = run_ranks(_diagnosed, world_size, sharding, tables, when)
    for (undiagnosed, diagnosed), (before, after), facts in by_rank:
        assert "step" not in facts.not_measured, facts.not_measured
        assert _equal(before, after)
        assert _equal(undiagnosed[1], diagnosed[1])
        assert any(name.startswith(("kernel", "state")) for name in before)
        assert facts.has("data", "step", "ready")
        names = {each.name for each in facts.collectives}
        assert ("all_to_all" in names) == (sharding != "data_parallel")
    (undiagnosed, _), (diagnosed, _) = by_rank[0][0]
    assert _equal(undiagnosed, diagnosed)
    held: dict[str, int] = {}
    for each in by_rank[0][2].ranks:
        for table in each.tables:
            held[table.name] = held.get(table.name, 0) + table.rows * table.dim
    cells = {
        "user_id": examples.USERS,
        "history": examples.ITEMS,
        "item_id": examples.ITEMS,
    }
    copies = 2 if sharding == "data_parallel" else 1
    assert held == {
        name: rows * examples.DIM * copies for name, rows in cells.items()
    }, "from the plan"
    rows = sum(
        table.read
        for each in by_rank[0][2].ranks
        for table in each.tables
        if table.name == "item_id"
    )
    assert rows == 24 * (2 if sharding == "column_wise" else 1), (
        "every row's item, once in each of the columns' shards"
    )


def _imbalanced(runtime: Runtime) -> tuple[int, str, tuple[int, ...], str]:
    """The rank that holds the table of long lists, the verdict, its ranks, and the page: time goes by the rows read."""
    clock = _moved()
    made = _hybrid(runtime, "table_wise")
    schema = small_model(META).schema()
    generator = torch.Generator().manual_seed(runtime.rank)
    rows = 12
    batches = [
        schema.assemble(
            {
                "user_id": Jagged(
                    torch.randint(examples.USERS, (rows,), generator=generator)
                ),
                "history": Jagged(
                    torch.randint(examples.ITEMS, (40 * rows,)), torch.full((rows,), 40)
                ),
                "item_id": Jagged(
                    torch.randint(examples.ITEMS, (rows,), generator=generator)
                ),
            },
            {
                "age": torch.rand(rows, generator=generator),
                "price": torch.rand(rows, generator=generator),
            },
            labels=torch.ones(rows),
        )
        for _ in range(6)
    ]
    holder = -1
    for _, collection in collections(made.model):
        plan: Any = collection.module_sharding_plan
        holder = plan["history"].ranks[0] if "history" in plan else holder
        for kernel in kernels_of(collection):
            kernel.register_forward_pre_hook(
                lambda _, args: clock.compute(1 + 0.05 * args[0].values().numel())
            )
    diagnosis = why_slow.step(
        made.step, batches, model=made.model, optimizer=made.optimizer
    )
    finding = diagnosis.findings[0]
    return (
        holder,
        diagnosis.verdict,
        finding.ranks,
        " ".join((finding.title, *finding.evidence, str(diagnosis))),
    )


@pytest.mark.slow
@pytest.mark.launch
def test_a_table_that_is_read_most_is_named_with_its_rank() -> None:
    by_rank = run_ranks(_imbalanced, 2)
    for holder, verdict, named, page in by_rank:
        assert (verdict, named) == ("imbalanced_table", (holder,))
        assert f"rank {holder} holds the tables that are read most" in page
        assert "of history, 50 x 16 (table_wise) alone 960 rows a step" in page
    assert "history, 50 x 16 (table_wise)\n" in by_rank[0][3], (
        "the table of what each rank holds and reads"
    )


# ----------------------------------------------------------- collectives of one process


def _watched(runtime: Runtime) -> list[Any]:
    """Results of every mode beside those without it, what was called, and what replaying other calls raises."""
    store = dist.distributed_c10d._get_default_store()
    collectives = Collectives(Failures(store, "test/1"))

    def exchange(rows: int = 3) -> list[Tensor]:
        mine = torch.arange(2.0 * rows) + 10 * runtime.rank
        out = torch.empty(2 * rows)
        all_of = torch.empty(4 * rows)
        share = torch.empty(rows)
        dist.all_to_all_single(out, mine)
        dist.all_gather_into_tensor(all_of, mine)
        dist.reduce_scatter_tensor(share, mine.clone())
        summed = mine.clone()
        dist.all_reduce(summed, async_op=True).wait()
        dist.broadcast(mine, 1)
        dist.barrier()
        return [out, all_of, share, summed, mine]

    expected, recorded = exchange(), list[Any]()
    results: list[Any] = []
    for mode in ("watch", "trace", "record"):
        with collectives.watching(mode, recorded):  # type: ignore[arg-type]
            results.append(_same(exchange(), expected))
    results.append([(each.name, each.bytes, each.ranks) for each in collectives.calls])
    with collectives.watching("replay", recorded):
        replayed = exchange()
        results.append(_same(replayed[:3], expected[:3]))
        results.append(replayed[3].equal(torch.arange(6.0) + 10 * runtime.rank))
        collectives.rewind(recorded)
        for call in (
            lambda: exchange(4),
            lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(4)),
        ):
            try:
                call()
            except RuntimeError as error:
                results.append(str(error))
    results.append(_same(exchange(), expected))
    return results


def _left_alone(runtime: Runtime) -> str:
    """What a rank hears that waits in a reduce_scatter, of which gloo has no future, for one that has raised."""
    together = Ranks()
    collectives = Collectives(together.failures)

    def exchange() -> None:
        with collectives.watching("watch"):
            if runtime.rank == 1:
                raise OSError("gone")
            dist.reduce_scatter_tensor(
                torch.empty(2), torch.ones(4), async_op=True
            ).wait()  # type: ignore[union-attr]

    with pytest.raises(RanksFailedError) as caught:
        together.together(collectives, exchange)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.launch
def test_no_rank_waits_in_a_collective_without_a_future() -> None:
    for text in run_ranks(_left_alone, 2):
        assert text.startswith("rank 1: OSError: gone")


@pytest.mark.slow
@pytest.mark.launch
def test_collectives_give_what_they_give_whether_watched_traced_or_replayed() -> None:
    for results in run_ranks(_watched, 2):
        calls = [
            ("all_to_all", 24),
            ("all_gather", 24),
            ("reduce_scatter", 24),
            ("all_reduce", 24),
            ("broadcast", 24),
        ]
        assert results[:3] == [True] * 3
        assert results[3] == [
            *((name, size, (0, 1)) for name, size in calls),
            ("barrier", 0, (0, 1)),
        ]
        assert results[4:6] == [True, True]
        assert (
            results[6]
            == "what all_to_all exchanges has other sizes than it had, so it cannot be left out"
        )
        assert results[7] == "the step calls reduce_scatter where it called all_gather"
        assert results[8] is True


# --------------------------------------------------------- from measures to facts: pure


def span(name: str, begin: float, end: float, queued: float = 0.0) -> Span:
    return Span(name, Moment(begin, begin), Moment(end, end - queued))


def call(begin: float, end: float, count: int = 8) -> Call:
    return Call(
        "all_reduce",
        "train.py:3 in step",
        (0, 1),
        count,
        Moment(begin, begin),
        Moment(end, end),
    )


def traced(late: float, by: float = 0.0) -> Traced:
    """A step: data to 1, forward to 3, backward with a collective at 5 + ``late`` to 9, optimizer to 10; ends at 11."""
    backward = Span("backward", Moment(3 + by, 3), Moment(9 + by, 9))
    optimizer = Span("optimizer", Moment(9 + by, 9), Moment(10 + by, 10))
    collective = Call(
        "all_reduce",
        "backward",
        (0, 1),
        8,
        Moment(5 + late + by, 5 + late),
        Moment(8 + by, 8),
    )
    whole = Span("step", Moment(1 + by, 1), Moment(11 + by, 11))
    return Traced(
        Span("data", Moment(by, 0), Moment(1 + by, 1)),
        whole,
        [backward, optimizer],
        [collective],
        4,
    )


@pytest.mark.unit
@pytest.mark.parametrize("ahead", [0.0, 7.0])
def test_a_rank_waits_for_the_last_one_to_come_and_then_exchanges(ahead: float) -> None:
    """Whatever the wall clock of its host says."""
    early, late = parted([[traced(0.0)], [traced(2.0, ahead)]], [0.0, ahead])
    rest = {"data": 1, "forward": 3, "optimizer": 1, "queue": 0, "exchange": 1}
    assert early == [{**rest, "backward": 3, "wait": 2}]
    assert late == [{**rest, "backward": 5, "wait": 0}]
    assert all(sum(each.values()) == 11 for (each,) in (early, late))
    (collective,) = collectives_of([[traced(0.0)], [traced(2.0, ahead)]], [0.0, ahead])
    assert (collective.span, collective.exchange_s, collective.waits_s) == (
        "backward",
        1,
        [2, 0],
    )
    assert (collective.ranks, collective.bytes) == ([0, 1], [8, 8])


@pytest.mark.unit
def test_time_without_a_core_is_in_no_span() -> None:
    step = traced(0.0)._replace(step=span("step", 1, 11, queued=2.0))
    ((first,), _) = parted([[step], [traced(0.0)]])
    assert first["queue"] == 2
    assert first["forward"] == 1


@pytest.mark.unit
def test_a_changed_step_keeps_its_exchange() -> None:
    """Rank 0 computes 5, rank 1 7, an iteration takes 10; in bf16 they take 3 and 4: 2 of the typical 5 go."""
    names = {
        "traced_optimizer": 1.0,
        "traced_exchange": 2.0,
        "traced_wait": 0.0,
        "sleep": 0.0,
        "op": 1e-3,
        "sync": 1e-4,
    }
    first = {
        "data": 0.5,
        "step": 9.5,
        "traced_forward": 2,
        "traced_backward": 2,
        "ready": 5,
        "bf16": 3,
        **names,
    }
    second = {
        "data": 0.5,
        "step": 9.6,
        "traced_forward": 2,
        "traced_backward": 4,
        "ready": 7,
        "bf16": 4,
        **names,
    }
    (made,) = common_rounds([[first], [second]])
    assert made["data"] + made["step"] == 10
    assert made["ready"] == made["step"]
    assert made["ready"] - made["bf16"] == 2
    assert (made["forward"], made["backward"], made["optimizer"]) == (2, 2, 1)
    assert made["exchange"] + made["wait"] == made["step"] - 5
    assert made["op"] == 1e-3
