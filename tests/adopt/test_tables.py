"""Tables hoisted out of a user's model: losses and weights of plain torch on 1 and 2 ranks, and what is refused."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contracts import gather_state, run_ranks
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.tables import adopt_tables
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime

USERS, ITEMS, D, ROWS, STEPS, LR = 40, 30, 8, 24, 40, 0.5


class Four(nn.Module):
    """A user's model of four tables, all read id by id."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, D), nn.Embedding(ITEMS, D)
        self.city, self.hashed = nn.Embedding(7, D), nn.Embedding(11, D)
        self.top = nn.Sequential(nn.Linear(5 * D, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(
        self, user: Tensor, history: Tensor, item: Tensor, city: Tensor
    ) -> Tensor:
        seen = self.item(history).mean(1)
        rows = [self.user(user), seen, self.item(item), self.city(city)]
        crossed = self.hashed((user * 31 + item) % 11)
        return self.top(torch.cat([*rows, crossed], 1)).squeeze(1)


class Mixed(nn.Module):
    """Tables of two widths, a bag, tables within nn.Sequential and by a tied weight, and a chain of computed ids."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, 4), nn.Linear(4, D))
        self.bag = nn.EmbeddingBag(ITEMS, D, mode="mean")
        self.item, self.again = nn.Embedding(ITEMS, D), nn.Embedding(ITEMS, D)
        self.again.weight = self.item.weight
        self.top, self.drop = nn.Linear(3 * D, 1), nn.Dropout(0.0)

    def forward(
        self, user: Tensor, history: Tensor, item: Tensor, city: Tensor
    ) -> Tensor:
        user_row = torch.relu(self.user(user))
        bag = self.bag(history)
        later = torch.where(city > 3, item, history[:, 0])
        rows = self.item(later) * self.again(item)
        return self.top(self.drop(torch.cat([user_row, bag, rows], 1))).squeeze(1)


MODELS: dict[str, Callable[[], nn.Module]] = {"four": Four, "mixed": Mixed}
# One collection exchanges the sizes, lengths and ids, then rows, and in the backward
# gradients.
EXCHANGES = {"four": 5, "mixed": 15}


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    return make()


def batches(
    count: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[list[Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        columns = [
            torch.randint(USERS, (ROWS,), generator=generator),
            torch.randint(ITEMS, (ROWS, 3), generator=generator),
            torch.randint(ITEMS, (ROWS,), generator=generator),
            torch.randint(7, (ROWS,), generator=generator),
        ]
        label = torch.randint(2, (ROWS,), generator=generator).float()
        local = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        yield [column[local] for column in columns], label[local]


def trained(
    model: nn.Module, optimizer: Any, rank: int = 0, world_size: int = 1
) -> list[float]:
    losses = []
    for columns, label in batches(STEPS, rank, world_size):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(*columns), label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def sharded(runtime: Runtime, name: str, sharding: str) -> dict[str, Any]:
    model = seeded(MODELS[name])
    torch.manual_seed(runtime.rank)  # what follows must not depend on it
    adopted = adopt_tables(model)
    sgd = OptimizerConfig(tables="sgd", tables_lr=LR, dense="sgd", dense_lr=LR)
    plan = plan_sharding(adopted, runtime, PlanConfig(sharding=sharding), optimizer=sgd)  # type: ignore[arg-type]
    kinds = {
        kind.sharding_type for module in plan.plan.values() for kind in module.values()
    }  # type: ignore[attr-defined]
    parallel, optimizer = hybrid_parallel(
        adopted, runtime, plan=plan, optimizer=sgd, seed=7
    )
    first = gather_state(parallel)
    count, exchange = [0], dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        return exchange(*args, **options)

    dist.all_to_all_single = counted
    losses = trained(parallel, optimizer, runtime.rank, runtime.world_size)
    dist.all_to_all_single = exchange
    return {
        "losses": losses,
        "first": first,
        "state": gather_state(parallel),
        "kinds": kinds,
        "exchanges": count[0] / STEPS,
    }


def users_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gathered state by the user's own names, which the adopted tables' names tell."""
    names = {}
    for name, value in state.items():
        table = re.fullmatch(r"tables\.\w+\.\w+\.(\w+)\.weight", name)
        key = (
            f"{table[1].removesuffix('_table').replace('_', '.')}.weight"
            if table
            else name
        )
        names[key] = value
    return names


@pytest.mark.parametrize(
    ("name", "world_size", "sharding"),
    [
        ("four", 1, "auto"),
        ("four", 2, "row_wise"),
        ("mixed", 1, "table_wise"),
        ("mixed", 2, "table_wise"),
    ],
)
def test_hoisted_tables_learn_as_plain_ones_from_the_users_weights(
    name: str, world_size: int, sharding: str
) -> None:
    model = seeded(MODELS[name])
    before = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if key != "again.weight"
    }
    losses = trained(model, torch.optim.SGD(model.parameters(), LR))
    ranks = run_ranks(sharded, world_size, name, sharding)
    torch.testing.assert_close(users_names(ranks[0]["first"]), before, rtol=0, atol=0)
    mean = torch.tensor([rank["losses"] for rank in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=0, atol=2e-6)
    after = {
        key: value for key, value in model.state_dict().items() if key != "again.weight"
    }
    torch.testing.assert_close(users_names(ranks[0]["state"]), after, rtol=0, atol=1e-5)
    if world_size > 1:
        assert ranks[0]["kinds"] == {sharding}
        assert ranks[0]["exchanges"] == EXCHANGES[name]


def test_unsharded_it_is_the_users_model_and_shares_its_weights() -> None:
    model, (columns, label) = seeded(Mixed), next(batches(1))
    adopted = adopt_tables(model)
    torch.testing.assert_close(adopted(*columns), model(*columns), rtol=0, atol=0)
    optimizer = torch.optim.SGD(adopted.parameters(), LR)
    nn.functional.mse_loss(adopted(*columns), label).backward()
    optimizer.step()
    torch.testing.assert_close(adopted(*columns), model(*columns), rtol=0, atol=0)
    assert {
        name for name, _ in adopted.named_parameters() if not name.startswith("tables.")
    } <= set(model.state_dict())
    assert sum(value.numel() for value in adopted.parameters()) == sum(
        value.numel() for value in model.parameters()
    )


def on_meta(runtime: Runtime) -> tuple[float, float]:
    with torch.device("meta"):
        model = Four()
    parallel, _ = hybrid_parallel(
        adopt_tables(model.to_empty(device="meta")), runtime, seed=1
    )
    state = gather_state(parallel)
    rows = torch.cat(
        [value.flatten() for name, value in state.items() if name.startswith("tables.")]
    )  # type: ignore[union-attr]
    return float(rows.mean()), float(rows.std())


def test_tables_without_memory_are_drawn_as_torch_draws_them() -> None:
    """88 rows of 8 normal numbers."""
    ((mean, deviation),) = run_ranks(on_meta, 1)
    assert abs(mean) < 4 / 26
    assert abs(deviation - 1) < 4 / 37


def forward_of(
    forward: Callable[..., Any], make: Callable[[], nn.Module] = Four
) -> Callable[[], nn.Module]:
    def changed() -> nn.Module:
        model = make()
        model.__class__ = type("Changed", (type(model),), {"forward": forward})
        return model

    return changed


def with_table(table: nn.Module) -> Callable[[], nn.Module]:
    def changed() -> nn.Module:
        model = Four()
        model.user = table  # type: ignore[assignment]
        return model

    return changed


def tied_to_a_bag() -> nn.Module:
    model = Mixed()
    model.bag.weight = model.item.weight
    return model


class OfItsOwn(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def branching(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    return self.user(user) if user.sum() > 3 else self.item(item)


def as_matrix(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    return (
        self.user(user) @ self.item.weight.T
        + self.item(item).sum()
        + self.city(city).sum()
        + self.hashed(city).sum()
    )


def chained(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    nearest = (self.user(user) * self.city(city)).argmax(1)
    return self.item(nearest) + self.hashed(city)


def in_place(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    rows = self.user(user)
    user.clamp_(max=5)
    return rows + self.item(user) + self.city(city) + self.hashed(city)


def by_mode(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    rows = self.user(user) + self.item(item) + self.city(city) + self.hashed(city)
    return nn.functional.dropout(rows, 0.5, self.training)


def counting(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.user(user) + self.item(item) + self.city(city) + self.hashed(city)


def unread(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    return self.user(user) + self.item(item) + self.city(city)


def optional(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor | None = None
) -> Tensor:
    return self.user(user) + self.item(item)


def offsets(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    return (
        self.bag(history.flatten(), torch.arange(0, 3 * history.shape[0], 3))
        + self.item(item)
        + self.user(user)
    )


def weights(
    self: Any, user: Tensor, history: Tensor, item: Tensor, city: Tensor
) -> Tensor:
    return (
        self.bag(history, per_sample_weights=history.float())
        + self.item(item)
        + self.user(user)
    )


def frozen() -> nn.Module:
    return nn.Embedding.from_pretrained(torch.zeros(USERS, D))


LINE = r"tests/adopt/test_tables\.py:\d+: "
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no table": (
        lambda: nn.Linear(2, 1),
        "Linear has no nn.Embedding and no nn.EmbeddingBag: there is no table to move",
    ),
    "padding": (
        with_table(nn.Embedding(USERS, D, padding_idx=0)),
        "table 'user' has padding_idx=0, .* mask its rows in",
    ),
    "norm": (
        with_table(nn.Embedding(USERS, D, max_norm=1.0)),
        "table 'user' has max_norm=1.0, .* normalise the rows",
    ),
    "frequency": (
        with_table(nn.Embedding(USERS, D, scale_grad_by_freq=True)),
        "has scale_grad_by_freq=True",
    ),
    "max": (
        with_table(nn.EmbeddingBag(USERS, D, mode="max")),
        "table 'user' has mode='max', .* take nn.Embedding and",
    ),
    "frozen": (
        with_table(frozen()),
        "table 'user' has a frozen weight, .* make it a buffer of a module of your own",
    ),
    "half": (
        with_table(nn.Embedding(USERS, D).half()),
        r"table 'user' has a torch.float16 weight, .* call float\(\)",
    ),
    "own forward": (
        with_table(OfItsOwn(USERS, D)),
        "table 'user' has a forward of its own",
    ),
    "tied": (
        tied_to_a_bag,
        rf"{LINE}'item' shares its weight with a table that is pooled otherwise: look both up",
    ),
    "if": (
        forward_of(branching),
        rf"{LINE}torch.fx cannot follow forward here: .*control flow.*torch.where in place",
    ),
    "matrix": (
        forward_of(as_matrix),
        rf"{LINE}the weight of table 'item' is read as a matrix, but a sharded table is",
    ),
    "chain": (
        forward_of(chained),
        rf"{LINE}the ids of table 'item' are decided by rows of another table",
    ),
    "in place": (
        forward_of(in_place),
        rf"{LINE}forward changes a tensor in place before its last look-up",
    ),
    "mode": (
        forward_of(by_mode),
        rf"{LINE}forward does something else in train and in eval mode .*take modules",
    ),
    "attribute": (
        forward_of(counting),
        "forward sets the attribute 'calls', which torch.fx would fix",
    ),
    "unread": (
        forward_of(unread),
        "table 'hashed' is not looked up by forward: remove it, or look it up",
    ),
    "default": (
        forward_of(optional),
        "forward's argument 'city' has the default None, and torch.fx would follow only",
    ),
    "offsets": (
        forward_of(offsets, Mixed),
        rf"{LINE}table 'bag' is looked up with offsets: give ids as \(B, L\)",
    ),
    "weights": (
        forward_of(weights, Mixed),
        rf"{LINE}table 'bag' is looked up with per_sample_weights: .*weigh the rows",
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_hoisted_is_refused_by_name(name: str) -> None:
    make, pattern = REFUSED[name]
    with pytest.raises(CannotAdopt, match=re.compile(pattern, re.DOTALL)):
        adopt_tables(make())


@pytest.mark.unit
def test_ids_outside_of_a_table_and_ids_of_other_rows_are_refused_in_the_step() -> None:
    adopted, (columns, _) = adopt_tables(seeded(Four)), next(batches(1))
    with pytest.raises(
        IndexError, match="table 'user': ids from 40 to 40, must be 0 to 39"
    ):
        adopted(torch.full((ROWS,), USERS), *columns[1:])
    with pytest.raises(
        ValueError,
        match=r"ids of table 'city' have the shape \(3,\), beside \(24, 3\) of 'item'",
    ):
        adopted(*columns[:3], columns[3][:3])
