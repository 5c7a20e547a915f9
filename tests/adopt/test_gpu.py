"""adopt() on a GPU: captured steps train like eager ones, and the host waits for none of them."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrec_ext.adopt import AdoptedStep, adopt, verify
from torchrec_ext.capture import executors
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import cuda_graph
from torchrec_ext.distributed import row_rule

pytestmark = pytest.mark.gpu
USERS, ITEMS, B, STEPS = 5_000, 300, 256, 12


class Pairs(nn.Module):
    """A user and an item, a network over both."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.top = nn.Sequential(
            *layers, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)  # type: ignore[no-any-return]


def batches(count: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        sizes = (USERS, ITEMS, 2)
        user, item, label = (
            torch.randint(size, (B,), generator=generator).cuda() for size in sizes
        )
        yield [user, item, label.float()]


def two_optimizers(model: Pairs) -> list[torch.optim.Optimizer]:
    tables = [*model.user.parameters(), *model.item.parameters()]
    return [
        torch.optim.Adagrad(tables, 0.05, eps=1e-3),
        torch.optim.AdamW(model.top.parameters(), 0.01),
    ]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), 0.01)]


CASES: dict[str, dict[str, Any]] = {
    "the loss alone": {},
    "loss and output": {"wrap": lambda loss, logits: (loss, {"logits": logits})},
    "dropout": {"layers": lambda: [nn.Dropout(0.3)]},
    "batch norm": {"layers": lambda: [nn.BatchNorm1d(32)]},
    "two optimizers": {"by": two_optimizers},
    "AdamW": {
        "by": lambda model: [
            torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
        ]
    },
    "weight decay": {
        "by": lambda model: [
            torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)
        ]
    },
    "SGD": {"by": lambda model: [torch.optim.SGD(model.parameters(), 0.5)]},
    "clipped": {"options": {"clip_norm": 0.1}},
    "bfloat16": {
        "options": {"autocast": lambda: torch.autocast("cuda", torch.bfloat16)}
    },
}


def trained(
    compile_: str, case: dict[str, Any]
) -> tuple[list[float], nn.Module, AdoptedStep]:
    torch.manual_seed(0)
    model = Pairs(*case.get("layers", list)()).cuda()
    optimizers = case.get("by", adam)(model)
    wrap: Callable[..., Any] = case.get("wrap", lambda loss, _: loss)

    def loss(user: Tensor, item: Tensor, label: Tensor) -> Any:
        logits = model(user, item)
        return wrap(F.binary_cross_entropy_with_logits(logits, label), logits)

    step = adopt(model, optimizers, loss, compile=compile_, **case.get("options", {}))  # type: ignore[arg-type]
    torch.manual_seed(1)
    losses = [step(*batch)[0] for batch in batches(STEPS)]
    step.settle()
    return torch.stack(losses).tolist(), model, step


def test_deterministic_algorithms_make_two_runs_equal_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Both kinds of tables: users by rows, items whole.
    monkeypatch.setattr(row_rule, "WEIGHTS_ON_GPU", USERS * 16)
    torch.use_deterministic_algorithms(True)
    try:
        (first, model, _), (second, again, _) = (trained("require", {}) for _ in "12")
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second
    weights = again.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_trains_like_the_eager_one(name: str) -> None:
    (eager, plain, _), (captured, model, step) = (
        trained(how, CASES[name]) for how in ("off", "require")
    )
    assert step.describe().startswith("captured since step 3"), step.describe()
    near = 0.02 if name == "bfloat16" else 1e-4
    assert captured == pytest.approx(eager, rel=near)
    weights = model.state_dict()
    for what, theirs in plain.state_dict().items():
        torch.testing.assert_close(
            weights[what], theirs, rtol=10 * near, atol=10 * near, msg=what.__add__
        )


def test_a_captured_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = trained("require", CASES["the loss alone"])
    monkeypatch.setattr(verify, "_CHECKED", 0.0)  # comparisons with eager steps do wait
    given = list(batches(6))
    step(*given[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given[1:]:
            step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_outlives_the_workspaces_that_other_graphs_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "FIRST", 0)
    model = Pairs().cuda()
    logistic = F.binary_cross_entropy_with_logits
    step = adopt(
        model,
        adam(model),
        lambda u, i, y: logistic(model(u, i), y),
        compile="require",
    )
    for batch in batches(6):
        step(*batch)
    # As torch.compile(mode="reduce-overhead") does before a graph of its own.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    other = [torch.full((4 << 20,), 3.0, device="cuda") for _ in range(8)]
    losses = [step(*batch)[0] for batch in batches(6)]
    torch.cuda.synchronize()
    assert all(bool((each == 3).all()) for each in other), (
        "a replay wrote into memory of others"
    )
    assert all(bool(loss.isfinite()) for loss in losses)


def test_a_model_on_another_device_than_the_current_one_is_captured_there() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = Pairs().to("cuda:1")
    logistic = F.binary_cross_entropy_with_logits
    step = adopt(
        model, adam(model), lambda u, i, y: logistic(model(u, i), y), compile="require"
    )
    for batch in batches(4):
        loss, _ = step(*(tensor.to("cuda:1") for tensor in batch))
    assert (loss.device.index, step.describe()[:8]) == (1, "captured")


def test_a_capture_leaves_memory_and_random_numbers_as_they_were() -> None:
    weight, ones = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")

    def step(weight: Tensor, given: Tensor) -> list[Any]:
        weight.add_(F.dropout(given, 0.5))
        return [weight.sum(), None]

    random = torch.cuda.get_rng_state()
    run = cuda_graph(step, [weight], [ones])
    assert not weight.any()
    assert torch.equal(random, torch.cuda.get_rng_state())
    (first, nothing), (second, _) = run([ones]), run([ones])
    assert nothing is None
    assert first.item() <= second.item() == weight.sum().item()


def test_the_memory_of_a_large_model_is_kept_on_the_host_during_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    weight = torch.zeros(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cuda_graph(
        lambda weight, given: [weight[:8].add_(given).sum()],
        [weight],
        [torch.ones(8, device="cuda")],
    )
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert not weight.any()


def test_steps_are_compared_on_the_host_where_a_gpu_has_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As much as is free changes from copy to copy.
    free = itertools.cycle([100, 1 << 40, 100])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 1 << 40))
    difference = verify.step_difference

    def twice(*given: Any, noise: Mapping[str, float] = MappingProxyType({})) -> str:
        # At first as if they differed, so that it is looked at what rounding does.
        return difference(*given, noise=noise) if noise else "something"

    monkeypatch.setattr(verify, "step_difference", twice)
    eager, _, _ = trained("off", CASES["batch norm"])
    captured, _, step = trained("require", CASES["batch norm"])
    assert step.describe().startswith("captured since step 3"), step.describe()
    assert captured == pytest.approx(eager, rel=1e-4)


def test_another_thread_may_pin_memory_during_a_capture() -> None:
    pinned: list[Tensor] = []

    def step(weight: Tensor, given: Tensor) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            # More than any kept block, so that the driver is called.
            large = torch.empty(33 << 20, dtype=torch.uint8)
            thread = threading.Thread(target=lambda: pinned.append(large.pin_memory()))
            thread.start()
            thread.join()
        return [weight.add_(given).sum()]

    weight = torch.zeros(8, device="cuda")
    run = cuda_graph(step, [weight], [torch.ones(8, device="cuda")])
    assert (run([torch.ones(8, device="cuda")])[0].item(), len(pinned)) == (8.0, 1)


@pytest.mark.parametrize("is_found", [True, False], ids=["before", "half way"])
def test_a_step_that_waits_is_refused_and_steps_with_dropout_go_on(
    is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_found:
        monkeypatch.setattr(executors, "_RefusesWaits", nullcontext)
    weight, ones = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    with pytest.raises(
        CannotCaptureError, match=r"test_gpu\.py:\d+ .*waits for the device"
    ):
        cuda_graph(
            lambda weight, given: [weight.sum() * float(F.dropout(given, 0.5).sum())],
            [weight],
            [ones],
        )
    assert not weight.any()
    assert F.dropout(ones, 0.5).sum().item() % 2 == 0


def test_too_little_memory_is_refused_by_name() -> None:
    weight = torch.zeros(8, device="cuda")
    free = torch.cuda.mem_get_info()[1]

    def step(weight: Tensor, given: Tensor) -> list[Tensor]:
        return [
            torch.empty(free, dtype=torch.uint8, device="cuda").sum() + weight.sum()
        ]

    with pytest.raises(
        CannotCaptureError,
        match="too little memory for a CUDA graph: CUDA out of memory",
    ):
        cuda_graph(step, [weight], [torch.ones(8, device="cuda")])
