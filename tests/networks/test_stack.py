"""A stack of K networks: each learns what it learns alone, by its own rate; one that stops stays as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_ext.capture import executors
from torchrec_ext.networks import Stack

USERS, ITEMS, ROWS, STEPS = 60, 40, 32, 12
RATES = [1e-3, 3e-3, 1e-2]


class NCF(nn.Module):
    """A table that most steps read whole, one of which they read some rows, a bag, and layers."""

    def __init__(self, seed: int, width: int = 8, users: int = USERS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.Embedding(users, 8)
        self.item = nn.Embedding(ITEMS, 8, padding_idx=0)
        self.genre = nn.EmbeddingBag(9, 4, mode="sum")
        self.norm = nn.LayerNorm(20)
        self.mlp = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        genres = torch.stack([item % 9, user % 9], 1)
        found = torch.cat([self.user(user), self.item(item), self.genre(genres)], 1)
        return self.mlp(self.norm(found)).squeeze(1)  # type: ignore[no-any-return]


def loss(network: Any, user: Tensor, item: Tensor, label: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(network(user, item), label)


def batches() -> Iterator[tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        user = torch.randint(USERS, (ROWS,), generator=draws)
        item = torch.randint(ITEMS, (ROWS,), generator=draws)
        yield user, item, (user % 3 == item % 3).float()


# An eps above rounding: a step of Adam is as long for a gradient of 1e-9 as for others.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-6}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
}


def factor(step: int) -> float:
    """A schedule that all members have."""
    return 1.0 if step < 4 else 0.5


def scheduled(step: int, rates: list[float] = RATES) -> list[float]:
    return [rate * factor(step) for rate in rates]


def alone(
    optimizer: tuple[Any, dict[str, Any]],
    stop: dict[int, int] | None = None,
    kind_of_network: type[NCF] = NCF,
) -> tuple[list[Any], Tensor]:
    """Networks that are trained one after another, and their losses (STEPS, K)."""
    networks = [kind_of_network(seed) for seed in range(len(RATES))]
    losses = []
    kind, settings = optimizer
    for number, (network, rate) in enumerate(zip(networks, RATES, strict=True)):
        own_optimizer = kind(network.parameters(), rate, **settings)
        own = []
        for step, batch in enumerate(batches()):
            own_optimizer.param_groups[0]["lr"] = rate * factor(step)
            value = loss(network, *batch)
            own.append(float(value.detach()))
            if stop and step >= stop.get(number, STEPS):
                continue
            own_optimizer.zero_grad()
            value.backward()
            own_optimizer.step()
        losses.append(own)
    return networks, torch.tensor(losses).T


def stack(
    optimizer: tuple[Any, dict[str, Any]],
    kind_of_network: type[NCF] = NCF,
    *,
    is_compiled: bool = False,
) -> Stack:
    kind, settings = optimizer
    networks = [kind_of_network(seed) for seed in range(len(RATES))]
    return Stack(networks, loss, RATES, kind, compile=is_compiled, **settings)


def farthest(networks: list[Any], others: list[Any]) -> float:
    gaps = []
    for one, other in zip(networks, others, strict=True):
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        gaps += [float((a - b).abs().max()) for a, b in pairs]
    return max(gaps)


class Nearest(NCF):
    """Its members look other ids up."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        found = self.user(user).argmax(1)
        return super().forward(found, item)


class Tied(NCF):
    """A table that is also a layer."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = self.user(user) @ self.item.weight.T
        return super().forward(user, item) + scores.mean(1)


class TiedInside(NCF):
    """Two tables of one weight, and one table of two names."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.again = nn.Embedding(ITEMS, 8)
        self.again.weight = self.item.weight
        self.same = self.again

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) + self.same(user % ITEMS).sum(1)


# A tied table's gradients are small: of Adam's, those with an eps above rounding.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, NCF) for name in OPTIMIZERS),
        ("adam", Nearest),
        ("adamw", Tied),
        ("sgd", Tied),
        ("sgd", TiedInside),
    ],
)
def test_stacked_equals_separate_with_rates_of_their_own(
    name: str, kind: type[NCF]
) -> None:
    expected, expected_losses = alone(OPTIMIZERS[name], kind_of_network=kind)
    stacked = stack(OPTIMIZERS[name], kind)
    losses = []
    for number, batch in enumerate(batches()):
        stacked.set_rates(scheduled(number))
        losses.append(stacked.step(*batch))
    assert float((torch.stack(losses) - expected_losses).abs().max()) < 2e-6
    networks = stacked.unstack()
    assert farthest(networks, expected) < 2e-6
    assert networks[0].state_dict().keys() == expected[0].state_dict().keys()


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor])
def test_a_loss_reads_of_its_network_what_it_has(
    make: Callable[[list[float]], Any], is_compiled: bool
) -> None:
    def penalised(network: Any, *batch: Tensor) -> Tensor:
        squares = [weight.square().sum() for weight in network.parameters()]
        factor = 0.1 if network.training else torch.nan
        return loss(network, *batch) + factor * (
            sum(squares) + network.user.weight[0, 0]
        )

    networks = [NCF(0), NCF(1)]
    batch = next(batches())
    expected = [penalised(network, *batch).item() for network in networks]
    stacked = Stack(networks, penalised, make([0.1, 0.2]), compile=is_compiled)
    assert stacked.step(*batch).tolist() == pytest.approx(expected)


@pytest.mark.slow(minutes=0.5)
def test_a_compiled_stack_equals_separate_and_a_member_that_stops_stays() -> None:
    expected, expected_losses = alone(OPTIMIZERS["adam"], {1: 5})
    stacked = stack(OPTIMIZERS["adam"], is_compiled=True)
    losses = []
    compiled = []
    for number, batch in enumerate(batches()):
        rates = scheduled(number)
        if number >= 5:
            rates[1] = 0.0
        stacked.set_rates(rates)
        if number == 5:
            kept = copy.deepcopy(stacked.unstack()[1].state_dict())
        losses.append(stacked.step(*batch))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1], "nothing is compiled anew"
    assert float((torch.stack(losses) - expected_losses).abs().max()) < 2e-6
    networks = stacked.unstack()
    assert farthest(networks, expected) < 2e-6
    for key, value in networks[1].state_dict().items():
        assert torch.equal(value, kept[key])


def test_a_loss_whose_number_changes_in_each_step_is_not_compiled_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    weight = [0]

    def annealed(network: Any, x: Tensor) -> Tensor:
        return network(x).mean() * 0.0 + weight[0]

    stacked = Stack([nn.Linear(3, 1), nn.Linear(3, 1)], annealed, [0.1, 0.2])

    def step(number: int) -> None:
        weight[0] = number
        assert stacked.step(ONES)[1] == number

    with pytest.warns(UserWarning, match=r"test_stack.py:.*: a value changes") as said:
        list(map(step, range(9)))
    assert len(said) == 1


class Fixed(NCF):
    """Parts that no step trains, drawn as the others are."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.genre.requires_grad_(False)
        self.register_buffer("scale", torch.rand(1).expand(ROWS))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.scale * super().forward(user, item)


class FixedAnew(Fixed):
    """The same in a process that draws other numbers, with a buffer of its own memory."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed + 10)
        self.scale = self.scale.clone()


def test_a_resumed_stack_equals_one_that_never_stopped() -> None:
    given = list(batches())
    one = stack(OPTIMIZERS["adam"], Fixed)
    for batch in given:
        one.step(*batch)
    before = stack(OPTIMIZERS["adam"], Fixed)
    for batch in given[:5]:
        before.step(*batch)
    after = stack(OPTIMIZERS["adam"], FixedAnew)
    after.step(*given[0])
    after.load_state_dict(before.state_dict())
    for batch in given[5:]:
        after.step(*batch)
    assert farthest(after.unstack(), one.unstack()) < 1e-6


def test_a_state_of_another_stack_is_refused_before_anything_is_written() -> None:
    other = stack(OPTIMIZERS["adam"])
    other.step(*next(batches()))
    kind, settings = OPTIMIZERS["adam"]
    two = Stack([NCF(0), NCF(1)], loss, RATES[:2], kind, compile=False, **settings)
    for stacked in (stack(OPTIMIZERS["sgd"]), two):
        before = stacked.state_dict()
        with pytest.raises(ValueError, match="this is a state of another stack"):
            stacked.load_state_dict(other.state_dict())
        for name, value in stacked.state_dict().items():
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_an_id_out_of_range_is_refused_before_anything_is_written(
    computed: bool,
) -> None:
    def shifted(network: Any, user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return loss(network, user * 1 if computed else user, item, label)

    networks = [NCF(seed) for seed in range(2)]
    stacked = Stack(networks, shifted, [1e-2, 1e-2], compile=False)
    given = list(batches())
    stacked.step(*given[0])
    before = stacked.state_dict()
    user, *rest = given[1]
    for wrong in (-1, USERS):
        with pytest.raises(IndexError, match=f"'user.weight' has no row {wrong}: ids"):
            stacked.step(torch.cat([user[1:], torch.tensor([wrong])]), *rest)
    for name, value in stacked.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_member_that_diverges_leaves_the_others() -> None:
    expected, _ = alone(OPTIMIZERS["sgd"])
    networks = [NCF(seed) for seed in range(3)]
    kind, settings = OPTIMIZERS["sgd"]
    rates = [*RATES[:2], 1e38]
    stacked = Stack(networks, loss, rates, kind, compile=False, **settings)
    for number, batch in enumerate(batches()):
        stacked.set_rates(scheduled(number, rates))
        values = stacked.step(*batch)
    assert not torch.isfinite(values[2])
    assert farthest(stacked.unstack()[:2], expected[:2]) < 2e-6
    # Once stopped it stays as it is, whatever its loss.
    stacked.set_rates([*rates[:2], 0.0])
    before = stacked.state_dict()
    stacked.step(*batch)
    for name, value in stacked.state_dict().items():
        if name not in ("step", "rates"):
            same = torch.allclose(value[2], before[name][2], 0, 0, equal_nan=True)
            assert same, name


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_dropout_differs_between_members_and_an_evaluation_has_none(
    is_compiled: bool,
) -> None:
    def losses(*, training: bool) -> list[float]:
        networks = [nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1)) for _ in range(2)]
        networks[1].load_state_dict(networks[0].state_dict())
        for network in networks:
            network.train(training)
        stacked = Stack(
            networks,
            lambda network, x: network(x).sum(),
            [0.0, 0.0],
            compile=is_compiled,
        )
        return stacked.step(torch.ones(4, 64)).tolist()  # type: ignore[no-any-return]

    first, other = losses(training=True)
    assert first != other
    first, other = losses(training=False)
    assert first == other


class Scaled(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(3, 1)
        self.scale = scale


SHARED = nn.Linear(3, 1)


class Held:
    def __init__(self, k: float) -> None:
        self.k = k


class Names(nn.Linear):
    """Holds its weight by a second name, which is not that of the copy that a stack runs."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.all = [self.weight]


def networks_with(*values: Any) -> list[nn.Module]:
    """Networks that differ in the attribute ``a``."""
    networks: list[nn.Module] = []
    for value in values:
        networks.append(nn.Linear(3, 1))
        networks[-1].a = value
    return networks


def doubled(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """A forward hook."""
    return 2 * output


def changed(change: Callable[[Any], Any]) -> list[nn.Module]:
    """Networks of which the second was changed."""
    networks: list[nn.Module] = [nn.Linear(3, 1), nn.Linear(3, 1)]
    change(networks[1])
    return networks


def tied(*names: str) -> nn.Module:
    """Three layers, of which the third is one of the others."""
    layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    for name in names:
        layers["c"] = layers[name]
    return layers


REFUSED_NETWORKS: list[tuple[Callable[[], list[nn.Module]], str]] = [
    (lambda: [Names()], "1 networks: a stack has two or more"),
    (
        lambda: [NCF(0), NCF(1, width=9)],
        "mlp.0.weight of network 1 is not that of network 0",
    ),
    (lambda: [Scaled(1.0), Scaled(2.0)], "scale of network 1 is not that of network 0"),
    (
        lambda: [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1))],
        "the network of network 1 is not",
    ),
    (lambda: [tied("a"), tied("b")], "_modules of network 1"),
    (lambda: [SHARED, SHARED], "two networks share a weight"),
    (lambda: [nn.ReLU(), nn.ReLU()], "empty parameter list"),
    (lambda: [Names(), Names()], "all of network 1"),
    (lambda: [nn.Embedding(3, 2, max_norm=1.0) for _ in range(2)], "has max_norm=1"),
    (lambda: networks_with(Held(1.0), Held(5.0)), "a of network 1"),
    (lambda: networks_with(lambda x: x, lambda x: 5 * x), "a of network 1"),
    (
        lambda: networks_with(partial(F.dropout, p=0.1), partial(F.dropout, p=0.5)),
        "a of network 1",
    ),
    (
        lambda: networks_with(
            *(MethodType(lambda _, x, k=k: k * x, 0) for k in (1, 2))
        ),
        "a of network 1",
    ),
    (lambda: networks_with(torch.zeros(2), torch.ones(2)), "a of network 1"),
    (lambda: networks_with([nn.Linear(3, 1)], [nn.Linear(3, 1)]), "a of network 1"),
    (lambda: networks_with(Lock(), Lock()), "a of network 1"),
    (lambda: networks_with(np.arange(2), np.ones(2, int)), "a of network 1"),
    (
        lambda: changed(lambda network: network.weight.requires_grad_(False)),
        "weight of network 1",
    ),
    (
        lambda: changed(lambda network: setattr(network, "forward", abs)),
        "forward of network 1",
    ),
    (
        lambda: changed(lambda network: network.register_forward_hook(print)),
        "_forward_hooks of network 1",
    ),
    (
        lambda: changed(lambda network: network.register_full_backward_hook(print)),
        "has a backward hook",
    ),
    (
        lambda: changed(lambda network: network.weight.register_hook(print)),
        "has a hook on its gradient",
    ),
    (
        lambda: changed(lambda network: network.train(False)),
        "training of network 1",
    ),
]


@pytest.mark.parametrize(("make", "told"), REFUSED_NETWORKS)
def test_networks_that_are_not_of_one_shape_are_refused(
    make: Callable[[], list[nn.Module]], told: str
) -> None:
    networks = make()
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        Stack(networks, loss, [1e-3] * len(networks))
    assert len(str(refused.value)) <= 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (F.relu, F.relu),
        (partial(F.dropout, p=0.1), partial(F.dropout, p=0.1)),
        # Equal sets in another order, as copies of one may be.
        ({0, 8}, {8, 0}),
        # The first of these strings are one object, the others are two.
        (["item"] * 2, ["item", "".join("item")]),
        (np.ones(2), np.ones(2)),
    ],
)
def test_networks_whose_attributes_are_equal_are_taken(one: Any, other: Any) -> None:
    networks = networks_with(one, other)
    for network in networks:
        network.own_hooks = [1.0]
        # Torch numbers hooks on: the same hook has another key in each network.
        network.register_forward_hook(doubled)
    made = partial(torch.optim.Adagrad, initial_accumulator_value=0.5)
    stacked = Stack(networks, loss, [0.1, 0.1], made, compile=False)  # type: ignore[arg-type]
    assert stacked.state_dict()["bias/0"].tolist() == [[0.5], [0.5]]


class Writes(nn.Linear):
    """Writes what a stack would lose: a buffer in place or anew, a weight, or an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__(3, 1)
        self.how = how
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "place":
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            elif self.how == "anew":
                self.mean = self.mean + x.mean(0)
            elif self.how == "data":
                self.weight.data.clamp_(-0.01, 0.01)
        if self.how == "count":
            self.calls += 1
        return super().forward(x - self.mean)


def writes(how: str) -> None:
    steps(lambda network, x: network(x).mean(), Writes(how), Writes(how))


def loads(name: str, value: Any) -> None:
    stacked = makes([0.1, 0.1])
    stacked.load_state_dict({**stacked.state_dict(), name: value})


def makes(rates: Any, optimizer: Any = torch.optim.SGD, **settings: Any) -> Stack:
    networks = [NCF(0), NCF(1)]
    return Stack(networks, loss, rates, optimizer, compile=False, **settings)


def steps(each_loss: Callable[..., Any], *networks: nn.Module) -> None:
    networks = networks or (nn.Linear(3, 1), nn.Linear(3, 1))
    Stack(networks, each_loss, [0.1, 0.1], compile=False).step(ONES)


ONES = torch.ones(4, 3)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "other rates": (lambda: makes(RATES), r"rates=\[.*: must be 2 finite numbers"),
    "a negative rate": (lambda: makes([0.1, -1.0]), r"rates=\[0.1, -1.0\]: must be"),
    "NaN": (
        lambda: makes([float("nan"), 0.1]),
        r"rates=\[nan, 0.1\]: must be 2 finite",
    ),
    "text": (lambda: makes("ab"), r"rates='ab': must be 2 finite"),
    "later rates": (
        lambda: makes([0.1, 0.1]).set_rates([0.1, -1.0]),
        r"rates=\[0.1, -1.0\]: must be",
    ),
    "a rate of NaN": (
        lambda: loads("rates", torch.tensor([0.1, torch.nan])),
        "rates=tensor.*: must be 2 finite",
    ),
    "momentum": (
        lambda: makes([0.1, 0.1], momentum=0.9),
        r"SGD with momentum=0\.9 has no captured form",
    ),
    "a loss of each row": (
        lambda: steps(lambda network, x: network(x)),
        r"the loss is of shape \(4, 1\), must be a tensor \(\): take its mean",
    ),
    **{
        f"writes {how}": (lambda how=how: writes(how), name)
        for how, name in (
            ("place", "mean is written by forward, which a stack would lose"),
            ("anew", "mean is written by forward, which a stack would lose"),
            ("data", "weight is written by forward, which a stack would lose"),
            ("count", "calls is written by forward: make it"),
        )
    },
    "a batch in a dict": (
        lambda: makes([0.1, 0.1]).step({"user": ONES}),  # type: ignore[arg-type]
        "tensor 0 of the batch is a dict: must be a tensor; give",
    ),
    "running statistics": (
        lambda: steps(
            lambda network, x: network(x).mean(), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        ),
        "running_mean is written by forward, which a stack would lose",
    ),
    "limited rows": (
        lambda: steps(
            lambda network, x: F.embedding(
                x.long(), network.weight, max_norm=1.0
            ).mean(),
            nn.Embedding(3, 2),
            nn.Embedding(3, 2),
        ),
        "embedding with max_norm, .* is not in a stack: leave it out",
    ),
    "another network": (
        lambda: steps(lambda network, x: SHARED(x).mean()),
        "does not depend on a weight of the network",
    ),
    "recurrent": (
        lambda: steps(
            lambda network, x: network(x)[0].mean(), nn.GRU(3, 1), nn.GRU(3, 1)
        ),
        "the network is GRU, of which .*: write a loop over nn.GRUCell",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_told_in_a_line(name: str) -> None:
    call, told = REFUSED[name]
    with pytest.raises(ValueError, match=told) as refused:
        call()
    assert len(str(refused.value)) <= 200


@pytest.mark.gpu
def test_on_a_gpu_the_step_is_one_graph_and_equals_that_op_by_op() -> None:
    stacks = []
    for compiles in (True, False):
        networks = [NCF(seed).cuda() for seed in range(3)]
        stacks.append(Stack(networks, loss, RATES, compile=compiles))
    for number, batch in enumerate(batches()):
        here = [each.cuda() for each in batch]
        for stacked in stacks:
            stacked.set_rates(scheduled(number))
        graph, op_by_op = (stacked.step(*here) for stacked in stacks)
        torch.testing.assert_close(graph, op_by_op, rtol=1e-5, atol=1e-6)
    members = zip(*(stacked.unstack() for stacked in stacks), strict=True)
    for graph_member, other in members:
        pairs = zip(graph_member.parameters(), other.parameters(), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_a_stack_learns_as_on_a_cpu_and_waits_for_nothing() -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        networks = [NCF(seed).to(device) for seed in range(len(RATES))]
        is_cuda = device == "cuda"
        stacked = Stack(networks, loss, RATES, torch.optim.Adam, compile=is_cuda)
        given = [[each.to(device) for each in batch] for batch in batches()]
        rows = [stacked.step(*given[0])]  # which captures
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows += [stacked.step(*batch) for batch in given[1:]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses[device] = torch.stack(rows).cpu()
    torch.testing.assert_close(losses["cuda"], losses["cpu"], rtol=0, atol=1e-5)
