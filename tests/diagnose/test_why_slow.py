"""Diagnoses of small programs: with a clock that the program moves, so that the verdict is known; and of bad input."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)

from tests.diagnose.programs import Clock, mlp, training
from torchrec_ext import OptimizerConfig, Runtime, hybrid_parallel
from torchrec_ext.adopt import adopt
from torchrec_ext.diagnose import (
    Diagnosis,
    ThreadClock,
    batches,
    measure,
    ops,
    why,
    why_slow,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(why, "ThreadClock", lambda: made)
    monkeypatch.setattr(batches, "thread_time", lambda: made.computed)
    monkeypatch.setattr(measure, "busy_elsewhere", lambda: lambda: 0.0)
    monkeypatch.setattr(why, "busy_elsewhere", lambda: lambda: 0.0)
    monkeypatch.setattr(measure, "SAMPLE_S", 0.0)  # samples are of the real clock
    return made


class Costly(nn.Module):
    """A table and a layer whose forward costs what it is told, by rows and by threads."""

    def __init__(
        self,
        clock: Clock,
        rows: int = 50,
        cost: Callable[[int], float] = lambda rows: 1 + rows / 16,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2)
        self.layer = nn.Linear(2, 1)
        self.clock = clock
        self.cost = cost

    def forward(self, ids: Tensor) -> Tensor:
        self.clock.compute(self.cost(len(ids)))
        return self.layer(self.table(ids))


class Collected(Costly):
    """The same network over a table of TorchRec, which calls it by keywords."""

    def __init__(self, clock: Clock, rows: int) -> None:
        super().__init__(clock)
        config = EmbeddingBagConfig(
            name="t", feature_names=["f"], num_embeddings=rows, embedding_dim=2
        )
        self.table = EmbeddingBagCollection(tables=[config])  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        self.clock.compute(self.cost(len(ids)))
        lengths = torch.ones(len(ids), dtype=torch.int32)
        return self.layer(
            self.table(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()
        )  # type: ignore[attr-defined]


class Sweeping(torch.optim.SGD):
    """SGD that takes a microsecond for each row of a parameter."""

    def __init__(self, model: Costly) -> None:
        super().__init__(model.parameters(), 1e-3)
        self.clock = model.clock

    def step(self, closure: Any = None) -> None:
        super().step()
        moved = [p for group in self.param_groups for p in group["params"]]
        self.clock.compute(1e-3 * sum(len(p) for p in moved if p.grad is not None))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that cost what they are told."""

    def __init__(self, take: Callable[[float], None], milliseconds: float) -> None:
        self.take, self.milliseconds = take, milliseconds

    def __len__(self) -> int:
        return 208

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.take(self.milliseconds)
        return torch.tensor(row % 50), torch.ones(1)


LIST = [(torch.arange(16) % 50, torch.ones(16, 1))] * 4


def diagnosed(model: Costly, given: Any = LIST, **more: Any) -> Diagnosis:
    def loss(ids: Tensor, y: Tensor) -> Tensor:
        return (model(ids) - y).square().mean()

    return why_slow(model, Sweeping(model), loss, given, **more)


def by_threads(clock: Clock) -> Diagnosis:
    model = Costly(clock, cost=lambda rows: rows / 16 * torch.get_num_threads())
    torch.set_num_threads(2)
    return diagnosed(model)


PLANTED: dict[str, Callable[[Clock], Diagnosis]] = {
    "loader_waits": lambda clock: diagnosed(
        Costly(clock), DataLoader(Rows(clock.sleep, 1), 16)
    ),
    "loader_rows": lambda clock: diagnosed(
        Costly(clock), DataLoader(Rows(clock.compute, 0.5), 16)
    ),
    "untouched_rows": lambda clock: diagnosed(Costly(clock, rows=10_000)),
    "threads": by_threads,
    "products": lambda clock: diagnosed(Costly(clock)),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_the_verdict_is_the_planted_cause(
    cause: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    threads = torch.get_num_threads()
    try:
        assert PLANTED[cause](clock).verdict == cause
    finally:
        torch.set_num_threads(threads)


def test_rows_of_torchrec_s_collections_are_known_too(clock: Clock) -> None:
    diagnosis = diagnosed(Collected(clock, rows=10_000))
    assert diagnosis.verdict == "untouched_rows"
    (table,) = diagnosis.facts.tables
    assert (table.name, table.rows, table.read) == (
        "table.embedding_bags.t",
        10_000,
        16,
    )


def test_what_is_measured_is_what_the_program_takes(clock: Clock) -> None:
    """2 ms of forward for 16 rows and 1 for the rest, 10.003 ms of optimizer, 8 ms of loader, of it 8 asleep."""
    facts = diagnosed(
        Costly(clock, rows=10_000), DataLoader(Rows(clock.sleep, 0.5), 16)
    ).facts
    expected = {
        "data": 8,
        "sleep": 8,
        "step": 12.002,
        "model": 2,
        "optimizer": 10.002,
    }
    expected |= {
        "still_tables": 2.002,
        "quadruple": 15.002,
        "bf16": 12.002,
        "ready": 12.002,
    }
    for name, milliseconds in expected.items():
        assert facts.median(name) * 1e3 == pytest.approx(milliseconds, abs=1e-6), name
    (table,) = facts.tables
    assert (table.name, table.rows, table.dim, table.read) == ("table", 10_000, 2, 16)
    assert (facts.loader.row_calls, facts.loader.row_s) == (16, pytest.approx(0.5e-3))


def test_more_threads_are_tried_on_an_idle_machine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    torch.set_num_threads(1)
    diagnosis = diagnosed(Costly(clock, cost=lambda rows: 2 / torch.get_num_threads()))
    assert diagnosis.verdict == "threads"
    assert torch.get_num_threads() == 1


# ------------------------------------------------------------- what the step is made of


def test_ops_syncs_and_products_are_counted_by_the_users_lines() -> None:
    _, optimizer, loss, given = mlp(rows=32)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        value = loss(x, y)
        # seven values to Python
        assert [float(each) for each in value.detach().repeat(7)]
        value.backward()
        optimizer.step()

    facts = why_slow.step(step, given).facts
    assert facts.syncs == 7
    assert facts.sync_ops == 7 + 3  # detach, repeat, and the loop's unbind
    ((line, count),) = facts.sync_lines
    assert count == 7
    assert re.fullmatch(
        r"test_why_slow\.py:\d+ in <listcomp>|test_why_slow\.py:\d+ in step", line
    )
    lines = dict(facts.op_lines)
    assert sum(lines.values()) <= facts.ops
    assert {"backward", "optimizer"} <= set(lines)
    assert facts.product_s > 0


def test_others_on_the_machine_do_not_lengthen_an_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the wall clock an hour passes between two looks."""
    hours = itertools.count(step=3600.0)
    clocks = SimpleNamespace(
        thread_time=time.thread_time, perf_counter=lambda: next(hours)
    )
    monkeypatch.setattr(ops, "time", clocks)
    _, _, loss, given = mlp(rows=32)
    counted = ops.count_ops(lambda: loss(*given[0]), [])
    assert 0 < counted.product_s <= counted.seconds < 60


@pytest.mark.gpu
def test_each_wait_for_the_device_is_counted_at_the_users_line() -> None:
    model = nn.Linear(8, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batches = [
        (torch.randn(32, 8, device="cuda"), torch.randn(32, 1, device="cuda"))
        for _ in range(8)
    ]

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        square = (model(x) - y).square()
        worst = square[square > square.mean()].sum()
        worst.backward()
        optimizer.step()
        square.detach().to("cpu", non_blocking=True)  # does not wait
        assert [square.detach().cpu(), worst.item()]

    facts = why_slow.step(step, batches).facts
    assert facts.sync_lines[-1] == ("backward", 1)  # of the mask
    lines = facts.sync_lines[:-1]
    # what is read at the end, and the mask
    assert [count for _, count in lines] == [2, 1]
    assert {line.split(":")[0] for line, _ in lines} == {"test_why_slow.py"}
    assert facts.syncs == 4


def test_tables_whose_read_rows_alone_move_are_not_left_alone() -> None:
    table = nn.Embedding(1_000, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    facts = why_slow(
        table, optimizer, lambda ids: table(ids).sum(), [torch.arange(4)] * 3
    ).facts
    assert not facts.tables
    assert not facts.has("still_tables")


def test_a_step_that_adopt_refuses_is_known() -> None:
    model, optimizer, loss, given = mlp()
    assert "captured" not in why_slow(model, optimizer, loss, given).facts.not_measured
    momentum = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    reasons = why_slow(model, momentum, loss, given).facts.not_measured
    assert "SGD with momentum=0.9 has no captured form" in reasons["captured"]
    accumulates = lambda *batch: loss(*batch).backward()  # noqa: E731
    reasons = why_slow.step(accumulates, given, optimizer=optimizer).facts.not_measured
    assert "not every iteration takes an optimizer's step" in reasons["captured"]
    with Runtime.start() as runtime:
        sharded, moving = hybrid_parallel(model, runtime, optimizer=OptimizerConfig())
        diagnosis = why_slow(
            sharded, moving, lambda x, y: (sharded(x) - y).square().mean(), given
        )
    reason = diagnosis.facts.not_measured["captured"]
    assert "is a DistributedModelParallel: " in reason
    assert len(reason) <= 200
    assert "import adopt" not in str(diagnosis)


def test_a_function_of_one_parameter_gets_the_batch_whole() -> None:
    model, optimizer, _, given = mlp()

    def loss(batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    facts = why_slow(model, optimizer, loss, given, capture=True).facts
    assert facts.has("step")
    # adopt gives entries.
    assert "TypeError: " in facts.not_measured["captured"]
    assert why_slow.step(step, given).facts.has("step")


# ---------------------------------------------------------------------------- bad input


def test_a_step_that_raises_is_named() -> None:
    model, optimizer, _, _ = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return model(x.repeat(1, 2)).mean()

    given = DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), 4)
    diagnosis = why_slow(model, optimizer, loss, given)
    assert diagnosis.verdict == "step failed"
    page = " ".join(str(diagnosis).split())
    assert (
        "the step raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
        in page
    )
    assert re.search(r"\(test_why_slow\.py:\d+\)", page)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.ones(8), torch.ones(1)) for _ in range(40))


def on_meta() -> Any:
    model, optimizer, loss, given = mlp()
    return model.to("meta"), optimizer, loss, given


def by(loss_of: Callable[..., Any], given: Any = None, model: Any = None) -> Any:
    made, optimizer, _, batches = mlp(rows=16)
    loss = lambda x, y: loss_of(model or made, x, y)  # noqa: E731
    return model or made, optimizer, loss, batches if given is None else given


def limited(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    assert 8 <= len(x) <= 32, f"{len(x)} rows"
    return (model(x) - y).square().mean()  # type: ignore[no-any-return]


SQUARE = lambda model, x, y: (model(x) - y).square().mean()  # noqa: E731
# a program, what of it is not measured and why, and what is
LEFT_OUT: dict[str, tuple[Callable[[], Any], dict[str, str], tuple[str, ...]]] = {
    "no scalar": (lambda: by(lambda m, x, y: m(x) - y), {"step": "scalar"}, ()),
    "device": (on_meta, {"step": "meta"}, ()),
    "variant": (lambda: by(limited), {"quadruple": "64 rows"}, ("step", "bf16")),
    "stream": (lambda: by(SQUARE, DataLoader(Stream(), 4)), {}, ("data", "step")),
    "no tensors": (
        lambda: by(
            lambda m, x, y: m(x).mean() * len(y),
            [(torch.randn(4, 8), list("abcd"))] * 3,
        ),
        {"quadruple": "rows"},
        ("step",),
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_cannot_be_measured_is_left_out_with_its_reason(name: str) -> None:
    make, reasons, measured = LEFT_OUT[name]
    facts = why_slow(*make()).facts
    for variant, reason in reasons.items():
        assert reason in facts.not_measured[variant]
        assert not facts.has(variant)
    assert not measured or facts.has(*measured)


def test_an_adopted_step_is_refused_and_a_global_of_that_name_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loss, batches = mlp()
    adopted = adopt(model, optimizer, loss)
    monkeypatch.setitem(globals(), "step", adopted)

    def by_global(x: Tensor, y: Tensor) -> None:
        step(x, y)  # type: ignore[name-defined]  # noqa: F821

    for function in (adopted, by_global, lambda x, y: adopted(x, y)):
        with pytest.raises(
            ValueError,
            match=r"this step is adopted, .*; diagnose before adopt, .*realised\(step\)",
        ):
            why_slow.step(function, batches)
    with pytest.raises(ValueError, match="gives no batch"):
        why_slow.step(lambda x, y: optimizer.step(), [])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"budget_s": 0}, "budget_s=0"),
    ({"batches": []}, "batches: list"),
    ({"batches": iter([1])}, "batches: a list_iterator cannot be begun anew"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG)
def test_wrong_arguments_are_refused_by_name_and_value(
    wrong: dict[str, Any], named: str
) -> None:
    model, optimizer, loss, batches = mlp()
    with pytest.raises(ValueError, match=named):
        why_slow(model, optimizer, loss, **{"batches": batches, **wrong})


def test_a_compiled_step_is_not_compiled_again_for_an_experiment() -> None:
    model, _, _, given = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    facts = why_slow(
        compiled, optimizer, lambda x, y: (compiled(x) - y).square().mean(), given
    ).facts  # type: ignore[arg-type, operator]
    assert "would be compiled again" in facts.not_measured["quadruple"]
    assert "would be compiled again" in facts.not_measured["bf16"]
    assert facts.has("step")


def test_the_clock_leaves_out_what_the_thread_waited_for_a_core(tmp_path: Any) -> None:
    file = tmp_path / "schedstat"
    file.write_text("100 2000000000 7\n")
    with ThreadClock(str(file)) as clock:
        before = clock()
        file.write_text("100 5000000000 9\n")  # three seconds in the queue
        assert -3.0 <= clock() - before < -2.0
        assert not clock.note


# ----------------------------------------------------------------------------- realised


def test_a_remedy_is_measured_beside_the_step_as_it_was(clock: Clock) -> None:
    """By the clock: 10 ms of rows nobody reads go, so that a step takes 2 ms; the old step's training is put back."""
    model = Costly(clock, rows=10_000)
    slow = Sweeping(model)
    calls = []

    def loss(ids: Tensor, y: Tensor) -> Tensor:
        return (model(ids) - y).square().mean()

    def remedy(ids: Tensor, y: Tensor) -> None:
        calls.append(1)
        model.zero_grad()
        loss(ids, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad  # type: ignore[operator]

    diagnosis = why_slow(model, slow, loss, LIST)
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    assert diagnosis.realised(remedy, seconds=0).middle == pytest.approx(12.002 / 2)
    moved = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, kept in zip(model.parameters(), reference, strict=True):
            parameter.copy_(kept)
    for _ in range(len(calls)):
        remedy(*LIST[0])
    assert all(
        parameter.equal(kept)
        for parameter, kept in zip(model.parameters(), moved, strict=True)
    )


def test_a_remedy_of_other_batches_is_compared_by_row_and_an_iterator_by_iteration(
    clock: Clock,
) -> None:
    model = Costly(clock)
    optimizer = Sweeping(model)
    diagnosis = why_slow(
        model, optimizer, lambda ids, y: (model(ids) - y).square().mean(), LIST
    )
    doubled = [(torch.arange(32) % 50, torch.ones(32, 1))] * 4

    def step(ids: Tensor, y: Tensor) -> None:
        clock.compute(3)

    assert diagnosis.realised(step, doubled, seconds=0).middle == pytest.approx(
        2 * 2.052 / 3
    )

    def epoch() -> Iterator[float]:
        while True:
            clock.compute(1)
            yield 0.0

    assert diagnosis.realised(epoch(), seconds=0).middle == pytest.approx(2.052)


@pytest.mark.launch
def test_a_running_iterator_of_persistent_workers_is_left_alone() -> None:
    made = training(num_workers=1, persistent_workers=True)
    running = iter(made.loader)
    next(running)
    diagnosis = why_slow(made.model, made.optimizer, made.loss, made.loader)
    assert len(list(running)) == len(made.loader) - 1
    assert diagnosis.facts.loader.workers == 1


# ----------------------------------------------------- real programs, by the real clock


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object]
) -> Callable[..., None]:
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        after()

    return step


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLE_S", 0.6)


def test_lines_that_hold_a_step_without_ops_are_named(sampled: None) -> None:
    """A text that is built and sorted, and a lock that is waited for: neither a sleep nor JSON."""
    model, optimizer, _, given = mlp()
    lock = threading.Lock()
    lock.acquire()

    def publish() -> None:
        lock.acquire(timeout=0.012)
        sorted(str(number) for number in range(90_000))

    diagnosis = why_slow.step(stepping(model, optimizer, publish), given)
    assert diagnosis.verdict == "your_line"
    evidence = " ".join(diagnosis.findings[0].evidence)
    assert "lock.acquire" in evidence
    assert "sorted(str(n" in evidence


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_computes_is_named_with_its_line(
    sampled: None, workers: int
) -> None:
    class Numbers(Dataset[str]):
        def __len__(self) -> int:
            return 4_096

        def __getitem__(self, row: int) -> str:
            return " ".join(str(row * number) for number in range(8))

    def collate(texts: list[str]) -> tuple[Tensor, Tensor]:
        rows = [
            [float(len(word)) for word in text.split() for _ in range(40)][:8]
            for text in texts
        ]
        return torch.tensor(rows), torch.zeros(len(texts), 1)

    model, optimizer, _, _ = mlp()
    loader = DataLoader(Numbers(), 256, collate_fn=collate, num_workers=workers)
    diagnosis = why_slow.step(stepping(model, optimizer, lambda: None), loader)
    assert diagnosis.verdict == "loader_rows"
    assert "collate_fn" in diagnosis.findings[0].title
    assert any(
        "for word in text.split()" in sentence
        for sentence in diagnosis.findings[0].evidence
    )


def test_anomaly_mode_that_was_left_on_is_refused() -> None:
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(
            ValueError, match=r"anomaly mode is on, .*set_detect_anomaly\(False\)"
        ),
    ):
        why_slow(*mlp())


def test_a_loop_that_raises_in_the_rounds_is_a_verdict_and_not_an_error() -> None:
    model, optimizer, _, given = mlp()
    steps = [0]

    def limit() -> None:
        steps[0] += 1
        if torch.rand(()) < 2 and next(counter) > 40:
            raise ValueError("the schedule has 40 steps")

    counter = itertools.count()
    diagnosis = why_slow.step(stepping(model, optimizer, limit), given)
    assert diagnosis.verdict == "loop failed"
    assert "ValueError: the schedule has 40 steps" in str(diagnosis)
    assert steps == [0]


def test_beside_busy_processes_a_step_is_measured_on_one_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that two threads make ten times as long, since one of them waits for a core."""
    monkeypatch.setattr(why, "busy_elsewhere", lambda: lambda: 1.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        diagnosis = diagnosed(
            Costly(clock, cost=lambda rows: 2 * 10 ** (torch.get_num_threads() - 1))
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert diagnosis.facts.median("step") == pytest.approx(2.052e-3)
    assert diagnosis.verdict == "products"
    assert (diagnosis.facts.threads, diagnosis.facts.own_threads) == (1, 2)
    first = " ".join(str(diagnosis).split())[:600]
    assert "Your program takes 2 threads" in first
    assert "OMP_NUM_THREADS=1" in first


@pytest.mark.slow
def test_a_captured_step_is_tried_on_request_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loss, given = mlp()
    before = [each.detach().clone() for each in model.parameters()]
    monkeypatch.setattr(why, "busy_elsewhere", lambda: lambda: 1.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    diagnosis = why_slow(model, optimizer, loss, given, capture=True)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    (captured,) = (each for each in diagnosis.trials if "captured" in each.name)
    assert captured.gain.middle > 0
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert parameter.equal(kept)
    assert not optimizer._optimizer_state_dict_post_hooks
    plain = why_slow(model, optimizer, loss, given)
    assert not [each for each in plain.trials if "captured" in each.name]
