"""The law of a diagnosis: a training that was diagnosed goes on as if it had not been, bit for bit."""

import random
import types
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from tests.diagnose.programs import Training, mlp, trained, training
from torchrec_ext.capture import executors
from torchrec_ext.diagnose import StateCopy, measure, why_slow


def by_parts(made: Training) -> object:
    return why_slow(made.model, made.optimizer, made.loss, made.loader)


def by_step(made: Training) -> object:
    return why_slow.step(made.step, made.loader)


def captured(made: Training) -> object:
    return why_slow(made.model, made.optimizer, made.loss, made.loader, capture=True)


def everything(made: Training) -> list[object]:
    """All that a step changes, in a form that compares bit for bit."""
    state = made.optimizer.state_dict()["state"]
    return [
        made.losses,
        *(tensor.tolist() for tensor in made.model.state_dict().values()),
        *(value.tolist() for entry in state.values() for value in entry.values()),
        [parameter.grad.tolist() for parameter in made.model.parameters()],
        made.model.calls,
        made.model.history,
        made.model.average.tolist(),
        made.loader.dataset.reads,  # type: ignore[attr-defined]
        made.schedule.state_dict(),
        torch.rand(3).tolist(),
    ]


@pytest.mark.parametrize(
    ("diagnose", "when"),
    [
        pytest.param(captured, (0,), marks=pytest.mark.slow),
        (by_step, (13,)),
        (by_parts, (0, 7, 20)),
    ],
    ids=["captured, before the first step", "by step, in an epoch", "by parts, often"],
)
def test_a_diagnosed_training_goes_on_bit_for_bit(
    diagnose: Callable[[Training], object],
    when: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Captured steps run as traced: what is put back does not depend on the compiler.
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    undisturbed = training()
    trained(undisturbed, lambda _: None, when)
    expected = everything(undisturbed)
    diagnosed = training()
    trained(diagnosed, diagnose, when)
    assert everything(diagnosed) == expected


def identities(made: Training) -> list[object]:
    """Which objects hold what a step changes."""
    parameters = list(made.model.parameters())
    groups = made.optimizer.param_groups
    return [
        [(id(each), each.data_ptr(), id(each.grad)) for each in parameters],
        [list(map(id, each.values())) for each in made.optimizer.state.values()],
        [list(map(id, group["params"])) for group in groups],
    ]


@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_put_back_are_the_same_objects_modes_and_threads_or_none(
    steps: int,
) -> None:
    made, threads = training(), torch.get_num_threads()
    trained(made, lambda _: None, (), steps=steps)
    made.model.layers[2].eval()
    made.model.table.weight.requires_grad_(False)
    before = identities(made)
    by_step(made)
    assert identities(made) == before
    assert bool(made.optimizer.state) == bool(steps)
    assert vars(made.optimizer).get("_opt_called", False) == bool(steps)
    assert made.model.training
    assert not made.model.layers[2].training
    assert not made.model.table.weight.requires_grad
    assert not made.model.table._forward_pre_hooks
    assert torch.get_num_threads() == threads


def test_state_is_put_back_where_a_diagnosis_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    made = training()
    before = [p.tolist() for p in made.model.parameters()]
    monkeypatch.setattr(measure, "_loader_facts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        by_step(made)
    assert [p.tolist() for p in made.model.parameters()] == before
    assert not made.optimizer.state


def test_what_a_step_reaches_is_reached() -> None:
    """Through a closure, a partial, a bound method and an object's attributes."""
    import functools

    model, optimizer, _, _ = mlp()

    class Trainer:
        def __init__(self) -> None:
            self.inner = {"model": [model]}

        def train(
            self, scale: float, x: torch.Tensor, *, moved: Optimizer = optimizer
        ) -> None:
            moved.zero_grad()
            (scale * self.inner["model"][0](x)).mean().backward()

    state = StateCopy(functools.partial(Trainer().train, 2.0))
    assert state.modules == [model]
    assert state.optimizers == [optimizer]
    assert state.bytes > 0


def test_modules_in_plain_lists_are_put_back_and_views_of_what_is_copied_are_copied_once() -> (
    None
):
    """As TorchRec's sharded collections keep their kernels, and show shards of them as parameters."""
    collection, kernel = nn.Module(), nn.BatchNorm1d(4)
    collection._lookups = [kernel]
    collection.table = nn.Parameter(kernel.weight.detach()[1:])
    state = StateCopy(collection)
    kernel(torch.randn(8, 4))
    with torch.no_grad():
        collection.table.add_(1)
    collection._lookups.append(kernel)
    before = collection.table
    assert state.bytes == sum(
        each.numel() * each.element_size()
        for each in (*kernel.parameters(), *kernel.buffers())
    )
    state.restore()
    assert collection.table is before
    assert collection.table.equal(torch.ones(3))
    assert kernel.weight.equal(torch.ones(4))
    assert kernel.running_mean is not None
    assert kernel.running_mean.equal(torch.zeros(4))
    assert int(kernel.num_batches_tracked or 0) == 0
    assert collection._lookups == [kernel]


def test_tensors_without_bytes_as_a_captured_graph_has_them_do_no_harm() -> None:
    module = nn.Linear(2, 1)
    with FakeTensorMode():
        module.example = torch.ones(3)
    module.shape_only = torch.ones(3, device="meta")
    state, weight = StateCopy(module), module.weight.detach().clone()
    with torch.no_grad():
        module.weight.add_(1)
    state.restore()
    assert module.weight.equal(weight)


def test_a_distributed_tensor_is_put_back() -> None:
    """As fully_shard makes of each parameter."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = nn.Linear(2, 1)
        module.weight = nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh))
        state = StateCopy(module)
        with torch.no_grad():
            module.weight.mul_(2)
        state.restore()
        assert module.weight.to_local().tolist() == [[1.0, 1.0]]  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------- what programs keep outside of it


LONG = list(range(5_000))


class Keeping:
    """A step of a user whose values lie wherever Python has a place for them."""

    def __init__(self) -> None:
        self.average = {"weight": torch.zeros(320_000)}
        self.order = np.arange(8)
        self.settings = types.SimpleNamespace(seen={"steps": 0})
        self.history = deque([1.0], maxlen=3)

    def __call__(self, x: Tensor) -> None:
        self.average["weight"].lerp_(torch.ones(320_000), 0.5)
        np.random.shuffle(self.order)
        self.history.append(2.0)
        self.settings.seen["steps"] += 1
        random.shuffle(LONG)

    def values(self) -> list[object]:
        return [
            self.average["weight"].tolist(),
            self.order.tolist(),
            list(self.history),
            dict(self.settings.seen),
            list(LONG),
        ]


def test_values_are_put_back_wherever_a_program_keeps_them() -> None:
    keeping = Keeping()
    before = keeping.values()
    state = StateCopy(keeping)
    for _ in range(3):
        keeping(torch.ones(1))
    assert all(
        value != kept for value, kept in zip(keeping.values(), before, strict=True)
    )
    state.restore_step()
    assert keeping.values() == before
    keeping(torch.ones(1))
    state.restore()
    assert keeping.values() == before


def test_a_loader_in_the_middle_of_an_epoch_is_put_back_at_the_end_alone() -> None:
    class Shuffled:
        def __init__(self) -> None:
            self.order, self.place = np.arange(100), 0

        def __iter__(self) -> Iterator[Tensor]:
            np.random.shuffle(self.order)
            for self.place in range(10):
                yield torch.from_numpy(
                    self.order[self.place * 10 : self.place * 10 + 10].copy()
                )

    loader = Shuffled()
    state = StateCopy(print, loader=loader)
    batches = iter(loader)
    next(batches), next(batches)
    state.restore_step()
    assert loader.place == 1
    assert loader.order.tolist() != list(range(100))
    state.restore()
    assert (loader.place, loader.order.tolist()) == (0, list(range(100)))


def test_a_large_array_of_a_loader_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchrec_ext.observe.state_copy._LARGE", 1_000)
    loader = types.SimpleNamespace(rows=np.zeros(2**17), small=np.zeros(3))
    state = StateCopy(print, loader=loader)
    assert state.notes == [
        "an array of 1 MiB is not copied; what a step writes into it stays"
    ]
    loader.small += 1
    state.restore()
    assert loader.small.tolist() == [0.0] * 3


def test_new_optimizer_state_stays_between_experiments_as_zeros_and_goes_at_the_end() -> (
    None
):
    model, optimizer, loss, batches = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    state = StateCopy(model, optimizer)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    loss(*batches[0]).backward()
    optimizer.step()
    state.restore_step()
    assert all(
        parameter.equal(kept)
        for parameter, kept in zip(model.parameters(), weights, strict=True)
    )
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    assert values
    assert not any(value.any() for value in values)
    state.restore()
    assert not optimizer.state
