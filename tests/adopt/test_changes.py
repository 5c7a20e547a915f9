"""Whatever somebody changes in mid-training, an adopted step learns as the eager loop does: captured anew, or eager."""

from __future__ import annotations

import copy
import itertools
import os
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import AdoptedStep, adopt
from torchrec_ext.capture import executors, policy

USERS, ITEMS, D, B = 300, 200, 4, 8  # rows that are moved row by row
STEPS, CHANGED = 24, 10
NEAR = 3e-3  # of weights that a rate of 1e-2 moves: eps counts as of the first of some steps

settings = types.ModuleType("settings")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op; a capture always pays."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(policy, "WATCHED", 2)
    monkeypatch.setattr(policy, "PATIENCE", 0)
    monkeypatch.setattr(adopted.StepWatch, "_report", lambda watch: None)


class Model(nn.Module):
    """Two towers and a network on top, times whatever a program reads."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, D), nn.Embedding(ITEMS, D)
        self.top = nn.Sequential(nn.Linear(2 * D, 4), nn.Tanh(), nn.Linear(4, 1))
        self.register_buffer("tau", torch.ones(()))
        self.mask = torch.tensor([False, True, False])
        self.factor: Callable[[], Any] = lambda: 1.0

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.user(user), self.item(item)], 1)
        return self.top(rows).squeeze(1) * self.factor()  # type: ignore[no-any-return]


class World(NamedTuple):
    """A user's script: what a program may read and change."""

    model: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any]


class Program(NamedTuple):
    """A program that changes something.

    Args:
        read: returns, for a world, the number or tensor by which scores are multiplied; None for 1.
        change: changes it, after some steps.
        loss: takes a world and returns another loss function; None for the plain one.
        every: steps after which it changes again.
        evaluates: whether the model is evaluated after the change, as between epochs: Dynamo does not see the change,
            and the comparison with an eager step does, which the first step after a pause is.
    """

    change: Callable[[World], Any]
    read: Callable[[Any], Callable[[], Any]] | None = None
    loss: Callable[[World], Callable[..., Any]] | None = None
    evaluates: bool = False
    every: int = STEPS


def attribute(
    make: Callable[[], Any], get: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Program:
    """A program that reads a value of an object which it holds, and changes the object."""
    kept: dict[int, Any] = {}

    def read(model: Any) -> Callable[[], Any]:
        thing = kept[id(model)] = make()
        return lambda: get(thing)

    return Program(lambda world: change(kept[id(world.model)]), read)


class Config:
    tau = 1.0


class Dotted:
    """A configuration as OmegaConf's."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"tau": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["values"][name]  # type: ignore[no-any-return]


def put(thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


def item_of(thing: Any, key: Any, value: Any) -> None:
    thing[key] = value


def set_environment(_: Any) -> None:
    os.environ["TAU_OF_A_TEST"] = "0.3"


def named(make: Callable[[], Any]) -> Program:
    """A program that sets an attribute of what it made, which may not have been there."""
    return attribute(
        make, lambda o: getattr(o, "tau", 1.0), lambda o: put(o, "tau", 0.3)
    )


def at(
    key: Any, make: Callable[[], Any], read: Callable[[Any], Any], value: Any = 0.3
) -> Program:
    """A program that sets an entry of what it made."""
    return attribute(make, read, lambda o: item_of(o, key, value))


# Dynamo's own guards see what Python values change; these are one of each kind, and what they do not see.
PYTHON: dict[str, Program] = {
    "an attribute": named(types.SimpleNamespace),
    "a module's global": named(lambda: settings),
    "a class": named(lambda: Config),
    "__getattr__": attribute(
        Dotted, lambda o: o.tau, lambda o: item_of(o.__dict__["values"], "tau", 0.3)
    ),
    "a key": at("tau", lambda: {"tau": 1.0}, lambda o: o["tau"]),
    "a numpy array as a tensor": at(
        0, lambda: np.ones(1, np.float32), lambda o: torch.from_numpy(o)
    ),
    "the environment": attribute(
        lambda: None,
        lambda _: float(os.environ.get("TAU_OF_A_TEST", "1")),
        set_environment,
    ),
    "an iterator": attribute(
        lambda: iter([1.0] * 200),
        lambda o: next(o),
        lambda o: [next(o) for _ in range(3)],
    ),
    "a counter of calls": attribute(
        itertools.count, lambda o: 1.0 if next(o) < 12 else 0.3, lambda o: None
    ),
    "random numbers of an object": attribute(
        lambda: random.Random(1),
        lambda o: 1.0 if o.random() < 0.5 else 0.5,
        lambda o: None,
    ),
    "a generator of torch's": attribute(
        lambda: torch.Generator().manual_seed(3),
        lambda o: torch.rand(1, generator=o),
        lambda o: o.manual_seed(9),
    ),
}


def in_model(
    change: Callable[[Any], Any], read: Callable[[Any], Any] | None = None
) -> Program:
    """A program that changes the model."""
    reads = None if read is None else lambda model: lambda: read(model)
    return Program(lambda world: change(world.model), reads)


class Scale(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * 0.3


def replace_forward(model: Any) -> None:
    before = model.top.forward
    model.top.forward = lambda rows: before(rows) * 0.3


MODEL: dict[str, Program] = {
    "an attribute of the model": in_model(
        lambda m: put(m, "own", 0.3), lambda m: getattr(m, "own", 1.0)
    ),
    "a buffer in place": in_model(lambda m: m.tau.fill_(0.3), lambda m: m.tau),
    "another buffer": in_model(
        lambda m: put(m, "tau", torch.tensor(0.3)), lambda m: m.tau
    ),
    "a mask": in_model(
        lambda m: m.mask.fill_(True),
        lambda m: torch.arange(3.0).masked_select(m.mask).sum(),
    ),
    "eval mode": in_model(lambda m: m.eval(), lambda m: 1.0 if m.training else 0.3),
    "a layer appended": in_model(lambda m: m.top.append(Scale())),
    "a forward replaced": in_model(replace_forward),
    "a forward hook": in_model(
        lambda m: m.top.register_forward_hook(lambda _m, _i, out: out * 0.3)
    ),
    "a full backward hook": in_model(
        lambda m: m.top[0].register_full_backward_hook(
            lambda _m, grads, _o: tuple(g * 0.5 for g in grads)
        )
    ),
    "a layer frozen": in_model(lambda m: m.top[0].requires_grad_(False)),
    "a table's data": in_model(
        lambda m: put(m.user.weight, "data", m.user.weight.data * 0.5)
    ),
    "a row in place": in_model(lambda m: m.item.weight.data[3].zero_()),
    "a state loaded": in_model(
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})
    ),
    "a parametrization": in_model(
        lambda m: nn.utils.parametrize.register_parametrization(
            m.top[0], "weight", Scale()
        )
    ),
    "deep copies and goes on": in_model(lambda m: copy.deepcopy(m)),
    "a matrix read from now on": in_model(
        lambda m: put(m, "whole", True),
        lambda m: (
            1.0 + (m.item.weight.square().mean() if getattr(m, "whole", 0) else 0.0)
        ),
    ),
}


def in_optimizer(change: Callable[[Any], Any]) -> Program:
    return Program(lambda world: change(world.optimizer))


def each_group(optimizer: Any, **values: Any) -> None:
    for group in optimizer.param_groups:
        group.update(values)


def each_state(optimizer: Any, change: Callable[[dict[str, Tensor]], Any]) -> None:
    for state in optimizer.state.values():
        change(state)


def own_step(world: World) -> None:
    """The user's own step between two adopted ones."""
    for number in range(3):
        world.optimizer.zero_grad()
        ids = torch.arange(B) + number
        world.loss(ids, ids, torch.ones(B)).backward()
        world.optimizer.step()


def own_backward(world: World) -> None:
    ids = torch.arange(B)
    world.optimizer.zero_grad()
    world.loss(ids, ids, torch.ones(B)).backward()


def global_hook(world: World) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(
        lambda opt, *_: [p.data.mul_(0.99) for p in world.model.top.parameters()]
    )
    HANDLES.append(handle)


def global_forward_hook(world: World) -> None:
    def hook(module: Any, _: Any, output: Any) -> Any:
        return output * 0.3 if module is world.model.top else None

    HANDLES.append(nn.modules.module.register_module_forward_hook(hook))


HANDLES: list[Any] = []

OPTIMIZER: dict[str, Program] = {
    "the rate": in_optimizer(lambda o: each_group(o, lr=3e-3)),
    "weight decay": in_optimizer(lambda o: each_group(o, weight_decay=0.1)),
    "state cleared": in_optimizer(lambda o: o.state.clear()),
    "a moment replaced": in_optimizer(
        lambda o: each_state(
            o, lambda s: s.update(exp_avg=torch.zeros_like(s["exp_avg"]))
        )
    ),
    "a moment in place": in_optimizer(
        lambda o: each_state(o, lambda s: s["exp_avg"].zero_())
    ),
    "the count of steps": in_optimizer(
        lambda o: each_state(o, lambda s: s["step"].fill_(3.0))
    ),
    "a group added": Program(
        lambda w: w.optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2))], "lr": 1e-2}
        )
    ),
    "a step hook": Program(
        lambda w: w.optimizer.register_step_post_hook(
            lambda *_: [p.data.mul_(0.99) for p in w.model.top.parameters()]
        )
    ),
    "a step pre-hook": Program(
        lambda w: w.optimizer.register_step_pre_hook(
            lambda *_: [p.grad.mul_(0.5) for p in w.model.top.parameters()] and None
        )
    ),
    "a hook on all optimizers": Program(global_hook),
    "a hook on all modules": Program(global_forward_hook),
    "the user's own step": Program(own_step),
    "the user's own backward": Program(own_backward),
    "a hook on a gradient": Program(
        lambda w: w.model.top[0].weight.register_hook(lambda grad: grad * 0.5)
    ),
    "a hook behind a gradient": Program(
        lambda w: w.model.top[0].weight.register_post_accumulate_grad_hook(
            lambda p: put(p, "grad", p.grad * 0.5)
        )
    ),
    "a hook on a table's gradient": Program(
        lambda w: w.model.user.weight.register_hook(lambda grad: grad * 0.5)
    ),
}


class Outer:
    """Tensors around the loss."""

    def __init__(self) -> None:
        self.weights = torch.ones(B)
        self.teacher = nn.Embedding(ITEMS, D)
        with torch.no_grad():
            self.teacher.weight.copy_(
                torch.arange(ITEMS * D).view(ITEMS, D) / (ITEMS * D)
            )
        self.teacher.requires_grad_(False)
        self.seen = torch.zeros(())
        self.total = torch.zeros(())
        self.history = list[Tensor]()


OUTER: dict[int, Outer] = {}


def with_outer(
    make: Callable[[World, Outer], Callable[..., Any]],
    change: Callable[[Outer, World], Any],
) -> Program:
    def loss(world: World) -> Callable[..., Any]:
        outer = OUTER[id(world.model)] = Outer()
        return make(world, outer)

    return Program(lambda world: change(OUTER[id(world.model)], world), None, loss)


def weighted(world: World, outer: Outer) -> Callable[..., Any]:
    return lambda user, item, label: F.binary_cross_entropy_with_logits(
        world.model(user, item), label, weight=outer.weights
    )


def taught(world: World, outer: Outer) -> Callable[..., Any]:
    return lambda user, item, label: (
        world.loss(user, item, label)
        + (world.model.item(item) - outer.teacher(item)).square().mean()
    )


def counted(world: World, outer: Outer) -> Callable[..., Any]:
    def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        value = world.loss(user, item, label)
        outer.seen += len(user)
        outer.total += value.detach()
        return value * (1.0 + 0.001 * outer.seen)

    return loss


def listed(world: World, outer: Outer) -> Callable[..., Any]:
    def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        value = world.loss(user, item, label)
        outer.history.append(value.detach())
        return value

    return loss


TENSORS: dict[str, Program] = {
    "weights in place": with_outer(weighted, lambda o, _: o.weights.mul_(0.3)),
    "other weights": with_outer(
        weighted, lambda o, _: put(o, "weights", torch.full((B,), 0.3))
    ),
    "a teacher's data": with_outer(
        taught,
        lambda o, w: put(o.teacher.weight, "data", w.model.item.weight.data.clone()),
    ),
    "a teacher that shares memory": with_outer(
        taught,
        lambda o, w: put(
            o, "teacher", nn.Embedding.from_pretrained(w.model.item.weight.data)
        ),
    ),
    "counts beside the loss": with_outer(counted, lambda o, _: o.seen.zero_()),
    "a history": with_outer(listed, lambda o, _: o.history.clear()),
}


def toggle(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def grow(world: World) -> None:
    """Gives the model a parameter that the loss reads, in a group of its own, which has made no step."""
    world.model.extra = nn.Parameter(torch.ones(()))
    world.optimizer.add_param_group({"params": [world.model.extra], "lr": 1e-2})


AGAIN: dict[str, Program] = {
    "a layer frozen and unfrozen": in_model(lambda m: toggle(m.top[0]))._replace(
        every=4
    ),
    "a group added that the loss reads": Program(
        grow, lambda model: lambda: getattr(model, "extra", 1.0)
    ),
    "a target network renewed": with_outer(
        taught,
        lambda o, w: put(
            o.teacher.weight, "data", w.model.item.weight.detach().clone()
        ),
    )._replace(every=2),
    "a target network that holds the weights": with_outer(
        taught,
        lambda o, w: put(o.teacher.weight, "data", w.model.item.weight.data),
    )._replace(every=3),
}

# which were not there at the capture
UNSEEN = {"a module's global", "the environment"}
PROGRAMS: dict[str, Program] = {
    **PYTHON,
    **MODEL,
    **OPTIMIZER,
    **TENSORS,
    **AGAIN,
}
# In the default run; the others are in the slow one.
OFTEN = {
    "a class",
    "__getattr__",
    "the environment",
    "a layer appended",
    "a matrix read from now on",
    "state cleared",
    "the user's own step",
    "a teacher that shares memory",
    "counts beside the loss",
    "a layer frozen and unfrozen",
    "a target network renewed",
}


def trained(program: Program, compile_: Any) -> tuple[Any, list[float], AdoptedStep]:
    torch.manual_seed(0)
    model: Any = Model()
    if program.read is not None:
        model.factor = program.read(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def plain(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(user, item), label)

    world = World(model, optimizer, plain)
    loss = plain if program.loss is None else program.loss(world)
    step = adopt(model, optimizer, loss, compile=compile_)
    generator, losses = torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        if number >= CHANGED and not (number - CHANGED) % program.every:
            program.change(world)
            if program.evaluates:
                with torch.no_grad():
                    model(torch.arange(B), torch.arange(B))
        user = torch.randint(USERS, (B,), generator=generator)
        item = torch.randint(ITEMS, (B,), generator=generator)
        label = torch.randint(2, (B,), generator=generator).float()
        losses.append(float(step(user, item, label)[0]))
    return model, losses, step


def restore() -> None:
    """Puts back what programs change for the whole process."""
    Config.tau = 1.0
    settings.__dict__.pop("tau", None)
    os.environ.pop("TAU_OF_A_TEST", None)
    for handle in HANDLES:
        handle.remove()
    HANDLES.clear()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow])
        for name in PROGRAMS
    ],
)
def test_what_somebody_changes_in_mid_training_takes_effect(name: str) -> None:
    program = PROGRAMS[name]._replace(evaluates=name in UNSEEN)
    try:
        plain, losses, _ = trained(program, "off")
        restore()
        model, others, step = trained(program, "auto")
    finally:
        restore()
    assert others == pytest.approx(losses, abs=NEAR), step.describe()
    for key, value in plain.state_dict().items():
        assert torch.allclose(value, model.state_dict()[key], atol=NEAR), (
            key,
            step.describe(),
        )
