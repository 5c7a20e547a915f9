"""Whatever somebody changes in mid-training, an adopted step learns as the eager loop does: captured anew, or eager."""

from __future__ import annotations

import argparse
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import os
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import AdoptedStep, adopt
from torchrec_ext.capture import executors, policy

USERS, ITEMS, D, B = 300, 200, 4, 8  # rows that are moved row by row
STEPS, CHANGED = 24, 10
NEAR = 3e-3  # of weights that a rate of 1e-2 moves: eps counts as of the first of some steps

settings = types.ModuleType("settings")
TEMPERATURE = 1.0


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

    shared = 1.0  # of the class

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


@dataclasses.dataclass
class Plain:
    tau: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    tau: float = 1.0


class Config:
    tau = 1.0

    @staticmethod
    def static() -> float:
        return Config.tau

    @classmethod
    def of_class(cls) -> float:
        return cls.tau


class Items:
    """A configuration as RecBole's."""

    def __init__(self) -> None:
        self.values = {"tau": 1.0}

    def __getitem__(self, name: str) -> float:
        return self.values[name]


class Dotted:
    """A configuration as OmegaConf's."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"tau": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["values"][name]  # type: ignore[no-any-return]


class Computed:
    def __init__(self) -> None:
        self.base = 1.0

    @property
    def tau(self) -> float:
        return self.base * 1.0


class Mode(enum.Enum):
    ONE = 1.0
    OTHER = 0.3


class Doubled:
    """Its method is replaced."""

    def tau(self) -> float:
        return 1.0


def no_grad_reader(thing: Any) -> float:
    with torch.no_grad():
        return float(thing.tau)


def put(thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


def item_of(thing: Any, key: Any, value: Any) -> None:
    thing[key] = value


def set_environment(_: Any) -> None:
    os.environ["TAU_OF_A_TEST"] = "0.3"


def set_global(_: Any) -> None:
    global TEMPERATURE
    TEMPERATURE = 0.3


CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
Pair = collections.namedtuple("Pair", "tau other")


def named(
    make: Callable[[], Any],
    read: Callable[[Any], Any] = lambda o: o.tau,
    name: str = "tau",
    value: Any = 0.3,
) -> Program:
    """A program that sets an attribute of what it made."""
    return attribute(make, read, lambda o: put(o, name, value))


def at(
    key: Any,
    make: Callable[[], Any],
    read: Callable[[Any], Any] | None = None,
    value: Any = 0.3,
) -> Program:
    """A program that sets an entry of what it made."""
    return attribute(make, read or (lambda o: o[key]), lambda o: item_of(o, key, value))


def or_one(thing: Any) -> float:
    return getattr(thing, "tau", 1.0)  # type: ignore[no-any-return]


PYTHON: dict[str, Program] = {
    "an attribute": named(types.SimpleNamespace, or_one),
    "a namespace of argparse": named(lambda: argparse.Namespace(tau=1.0)),
    "a dataclass": named(Plain),
    "slots": named(Slots),
    "a module's global": named(lambda: settings, or_one),
    "this module's global": attribute(lambda: None, lambda _: TEMPERATURE, set_global),
    "a class": named(lambda: Config),
    "a static method's class": named(lambda: Config, lambda o: o.static()),
    "a class method": named(lambda: Config, lambda o: o.of_class()),
    "__getitem__": attribute(
        Items, lambda o: o["tau"], lambda o: item_of(o.values, "tau", 0.3)
    ),
    "__getattr__": attribute(
        Dotted, lambda o: o.tau, lambda o: item_of(o.__dict__["values"], "tau", 0.3)
    ),
    "a property": named(Computed, name="base"),
    "an enum": at(0, lambda: [Mode.ONE], lambda o: o[0].value, Mode.OTHER),
    "a key": at("tau", lambda: {"tau": 1.0}),
    "a new key": at("tau", dict, lambda o: o.get("tau", 1.0)),
    "one key of 80": at("70", lambda: dict.fromkeys(map(str, range(80)), 1.0)),
    "nested dicts": attribute(
        lambda: {"a": {"b": {"tau": 1.0}}},
        lambda o: o["a"]["b"]["tau"],
        lambda o: item_of(o["a"]["b"], "tau", 0.3),
    ),
    "an ordered dict": at("tau", lambda: collections.OrderedDict(tau=1.0)),
    "a default dict": at("tau", lambda: collections.defaultdict(lambda: 1.0, tau=1.0)),
    "an element": at(0, lambda: [1.0, 2.0]),
    "a longer list": attribute(
        list, lambda o: 1.0 / (1 + len(o)), lambda o: o.append(1)
    ),
    "a tuple in a list": at(0, lambda: [(1.0, 2.0)], lambda o: o[0][0], (0.3, 2.0)),
    "a named tuple": at(0, lambda: [Pair(1.0, 2)], lambda o: o[0].tau, Pair(0.3, 2)),
    "a set": attribute(
        set, lambda o: 0.3 if "user" in o else 1.0, lambda o: o.add("user")
    ),
    "a deque": attribute(
        lambda: collections.deque([1.0]), lambda o: o[0], lambda o: o.appendleft(0.3)
    ),
    "a range": at(0, lambda: [range(1)], lambda o: 1.0 / len(o[0]), range(3)),
    "a string": at(
        0, lambda: ["one"], lambda o: 1.0 if o[0] == "one" else 0.3, "other"
    ),
    "None": at(0, lambda: [None], lambda o: 1.0 if o[0] is None else o[0]),
    "a bool": at(0, lambda: [True], lambda o: 1.0 if o[0] else 0.3, False),
    "an int": at(0, lambda: [1], lambda o: 1.0 / o[0], 3),
    "an int for a float": at(0, lambda: [1.0], lambda o: o[0] * 1.0, 2),
    "a numpy number": at(0, lambda: np.ones(2), lambda o: float(o[0])),
    "a numpy array as a tensor": at(
        0, lambda: np.ones(1, np.float32), lambda o: torch.from_numpy(o)
    ),
    "a function": at(0, lambda: [lambda: 1.0], lambda o: o[0](), lambda: 0.3),
    "a default": named(
        lambda: lambda tau=1.0: tau, lambda o: o(), "__defaults__", (0.3,)
    ),
    "a function's attribute": named(lambda: functools.wraps(max)(lambda: 1.0), or_one),
    "a partial": at(
        0,
        lambda: [functools.partial(float, 1.0)],
        lambda o: o[0](),
        functools.partial(float, 0.3),
    ),
    "a cached function": attribute(
        lambda: (cell := [1.0], functools.lru_cache(lambda: cell[0])),
        lambda o: o[1](),
        lambda o: (item_of(o[0], 0, 0.3), o[1].cache_clear()),
    ),
    "a method replaced in its class": named(
        Doubled, lambda o: o.tau(), value=lambda: 0.3
    ),
    "under no_grad": named(Plain, no_grad_reader),
    "the environment": attribute(
        lambda: None,
        lambda _: float(os.environ.get("TAU_OF_A_TEST", "1")),
        set_environment,
    ),
    "a thread's local": named(lambda: LOCAL, or_one),
    "a context variable": attribute(
        lambda: CONTEXT, lambda o: o.get(), lambda o: o.set(0.3)
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


def renew(model: Any, name: str) -> None:
    tensor = functools.reduce(getattr, name.split("."), model)
    tensor.data = tensor.data.clone() * 0.5


def replace_forward(model: Any) -> None:
    before = model.top.forward
    model.top.forward = lambda rows: before(rows) * 0.3


def insert(model: Any) -> None:
    model.top.insert(1, Scale())


MODEL: dict[str, Program] = {
    "an attribute of the model": in_model(
        lambda m: put(m, "own", 0.3), lambda m: getattr(m, "own", 1.0)
    ),
    "an attribute of its class": in_model(
        lambda m: put(type(m), "shared", 0.3), lambda m: m.shared
    ),
    "a buffer in place": in_model(lambda m: m.tau.fill_(0.3), lambda m: m.tau),
    "a buffer's data": in_model(
        lambda m: put(m.tau, "data", torch.tensor(0.3)), lambda m: m.tau
    ),
    "another buffer": in_model(
        lambda m: put(m, "tau", torch.tensor(0.3)), lambda m: m.tau
    ),
    "a mask": in_model(
        lambda m: m.mask.fill_(True),
        lambda m: torch.arange(3.0).masked_select(m.mask).sum(),
    ),
    "eval mode": in_model(lambda m: m.eval(), lambda m: 1.0 if m.training else 0.3),
    "a part in eval mode": in_model(
        lambda m: m.top.eval(), lambda m: 1.0 if m.top.training else 0.3
    ),
    "a layer appended": in_model(lambda m: m.top.append(Scale())),
    "a layer inserted": in_model(insert),
    "an activation exchanged": in_model(lambda m: item_of(m.top, 1, nn.ReLU())),
    "a forward replaced": in_model(replace_forward),
    "a forward hook": in_model(
        lambda m: m.top.register_forward_hook(lambda _m, _i, out: out * 0.3)
    ),
    "a forward pre-hook": in_model(
        lambda m: m.top.register_forward_pre_hook(lambda _m, args: (args[0] * 0.3,))
    ),
    "a full backward hook": in_model(
        lambda m: m.top[0].register_full_backward_hook(
            lambda _m, grads, _o: tuple(g * 0.5 for g in grads)
        )
    ),
    "a layer frozen": in_model(lambda m: m.top[0].requires_grad_(False)),
    "a table frozen": in_model(lambda m: m.item.requires_grad_(False)),
    "a table's data": in_model(lambda m: renew(m, "user.weight")),
    "a layer's data": in_model(lambda m: renew(m, "top.0.weight")),
    "a table in place": in_model(lambda m: m.item.weight.data.mul_(0.5)),
    "a row in place": in_model(lambda m: m.item.weight.data[3].zero_()),
    "a layer in place": in_model(lambda m: m.top[0].weight.data.mul_(0.5)),
    "initialised anew": in_model(lambda m: nn.init.constant_(m.item.weight, 0.1)),
    "a state loaded": in_model(
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})
    ),
    "a parametrization": in_model(
        lambda m: nn.utils.parametrize.register_parametrization(
            m.top[0], "weight", Scale()
        )
    ),
    "pruned": in_model(lambda m: prune.l1_unstructured(m.top[0], "weight", 0.5)),
    "a bias taken away": in_model(lambda m: put(m.top[0], "bias", None)),
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
    "betas": in_optimizer(lambda o: each_group(o, betas=(0.5, 0.9))),
    "weight decay": in_optimizer(lambda o: each_group(o, weight_decay=0.1)),
    "eps": in_optimizer(lambda o: each_group(o, eps=1e-4)),
    "amsgrad": in_optimizer(lambda o: each_group(o, maximize=True)),
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
    "state saved and loaded": in_optimizer(lambda o: o.load_state_dict(o.state_dict())),
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
    "weights' data": with_outer(
        weighted, lambda o, _: put(o.weights, "data", torch.full((B,), 0.3))
    ),
    "other weights": with_outer(
        weighted, lambda o, _: put(o, "weights", torch.full((B,), 0.3))
    ),
    "weights set": with_outer(
        weighted, lambda o, _: o.weights.set_(torch.full((B,), 0.3))
    ),
    "weights of another shape": with_outer(
        weighted, lambda o, _: put(o, "weights", torch.tensor(0.3))
    ),
    "a teacher in place": with_outer(
        taught, lambda o, w: o.teacher.weight.data.copy_(w.model.item.weight.data)
    ),
    "a teacher's data": with_outer(
        taught,
        lambda o, w: put(o.teacher.weight, "data", w.model.item.weight.data.clone()),
    ),
    "a teacher's averages": with_outer(
        taught,
        lambda o, w: o.teacher.weight.data.mul_(0.9).add_(
            w.model.item.weight.data, alpha=0.1
        ),
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


def read_as(way: str) -> Program:
    """A program that takes the weights in some way, and later multiplies by what it holds."""
    kept: dict[int, Any] = {}

    def take(world: World) -> None:
        weight = world.model.item.weight
        kept[id(world.model)] = {
            "data": lambda: weight.data,
            "numpy": lambda: weight.detach().numpy(),
            "state_dict": lambda: world.model.state_dict()["item.weight"],
            "a copy": lambda: weight.detach().clone(),
            "dlpack": lambda: torch.from_dlpack(weight.detach()),
        }[way]()

    def loss(world: World) -> Callable[..., Any]:
        def of(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
            return world.loss(user, item, label)

        return of

    return Program(take, None, loss)


def mean_of_numpy(world: World) -> None:
    """Scales a layer by the mean of the weights as numpy sees them."""
    with torch.no_grad():
        world.model.top[0].weight.mul_(
            1.0 + float(world.model.item.weight.detach().numpy().mean())
        )


READS: dict[str, Program] = {
    **{
        f"kept: {way}": read_as(way)
        for way in ("data", "numpy", "state_dict", "a copy", "dlpack")
    },
    "read as numpy": Program(mean_of_numpy),
    "number of threads": Program(lambda _: torch.set_num_threads(1)),
    "deterministic algorithms": Program(
        lambda _: HANDLES.append(torch.are_deterministic_algorithms_enabled())
    ),
    "random numbers seeded": Program(lambda _: torch.manual_seed(5)),
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
    "a table frozen and unfrozen": in_model(lambda m: toggle(m.item))._replace(every=4),
    "all frozen but one layer, and unfrozen": Program(
        lambda w: (toggle(w.model.user), toggle(w.model.item)), every=5
    ),
    "a group added that the loss reads": Program(
        grow, lambda model: lambda: getattr(model, "extra", 1.0)
    ),
    "pruned twice": in_model(
        lambda m: prune.l1_unstructured(m.top[0], "weight", 0.3)
    )._replace(every=6),
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
UNSEEN = {"a module's global", "the environment", "a function's attribute"}
PROGRAMS: dict[str, Program] = {
    **PYTHON,
    **MODEL,
    **OPTIMIZER,
    **TENSORS,
    **READS,
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
    global TEMPERATURE
    TEMPERATURE, Config.tau, Model.shared = 1.0, 1.0, 1.0
    settings.__dict__.pop("tau", None)
    os.environ.pop("TAU_OF_A_TEST", None)
    LOCAL.__dict__.pop("tau", None)
    CONTEXT.set(1.0)
    for handle in HANDLES:
        if hasattr(handle, "remove"):
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
    if "class" in name and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 guards no attribute of a class")
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
