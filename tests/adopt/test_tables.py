"""Tables exchanged in a user's model: losses and weights of plain torch on 1 and 2 ranks, and what is refused."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
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


class Mixed(nn.Module):
    """Tables of two widths, a bag, tables within nn.Sequential and by two names, and a chain of computed ids."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, 4), nn.Linear(4, D))
        self.bag = nn.EmbeddingBag(ITEMS, D, mode="mean")
        self.item = nn.Embedding(ITEMS, D, padding_idx=3)
        self.again = self.item
        self.top, self.drop = nn.Linear(3 * D, 1), nn.Dropout(0.0)

    def forward(
        self, user: Tensor, history: Tensor, item: Tensor, city: Tensor
    ) -> Tensor:
        user_row = torch.relu(self.user(user))
        bag = self.bag(history)
        later = torch.where(city > 3, item, history[:, 0])
        rows = self.item(later) * self.again(item)
        return self.top(self.drop(torch.cat([user_row, bag, rows], 1))).squeeze(1)


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
        # Columns of one matrix, as a user slices them: their ids do not lie side by side.
        columns[2:] = torch.stack(columns[2:], 1).unbind(1)
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


def sharded(runtime: Runtime, sharding: str) -> dict[str, Any]:
    model = seeded(Mixed)
    torch.manual_seed(runtime.rank)  # what follows must not depend on it
    adopted = adopt_tables(model)
    assert adopted is model
    sgd = OptimizerConfig(tables="sgd", tables_lr=LR, dense="sgd", dense_lr=LR)
    plan = plan_sharding(adopted, runtime, PlanConfig(sharding=sharding), optimizer=sgd)  # type: ignore[arg-type]
    kinds = {
        kind.sharding_type for module in plan.plan.values() for kind in module.values()
    }  # type: ignore[attr-defined]
    parallel, optimizer = hybrid_parallel(
        adopted, runtime, plan=plan, optimizer=sgd, seed=7
    )
    first = gather_state(parallel)
    losses = trained(parallel, optimizer, runtime.rank, runtime.world_size)
    return {
        "losses": losses,
        "first": first,
        "state": gather_state(parallel),
        "kinds": kinds,
    }


def users_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gathered state by the user's own names, which the adopted tables' names tell."""
    names = {}
    for name, value in state.items():
        table = re.fullmatch(r"(.+)\.collection\.\w+\.\w+\.weight", name)
        names[f"{table[1]}.weight" if table else name] = value
    return names


@pytest.mark.parametrize(
    ("world_size", "sharding"), [(1, "auto"), (2, "table_wise"), (2, "row_wise")]
)
def test_exchanged_tables_learn_as_plain_ones_from_the_users_weights(
    world_size: int, sharding: str
) -> None:
    model = seeded(Mixed)
    before = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if key != "again.weight"
    }
    losses = trained(model, torch.optim.SGD(model.parameters(), LR))
    ranks = run_ranks(sharded, world_size, sharding)
    torch.testing.assert_close(users_names(ranks[0]["first"]), before, rtol=0, atol=0)
    mean = torch.tensor([rank["losses"] for rank in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=0, atol=2e-6)
    after = {
        key: value for key, value in model.state_dict().items() if key != "again.weight"
    }
    torch.testing.assert_close(users_names(ranks[0]["state"]), after, rtol=0, atol=1e-5)
    if world_size > 1:
        assert ranks[0]["kinds"] == {sharding}


def test_unsharded_it_is_the_users_model() -> None:
    model, (columns, label) = seeded(Mixed), next(batches(1))
    adopted = adopt_tables(copy.deepcopy(model))
    torch.testing.assert_close(adopted(*columns), model(*columns), rtol=0, atol=0)
    for each in (adopted, model):
        optimizer = torch.optim.SGD(each.parameters(), LR)
        nn.functional.mse_loss(each(*columns), label).backward()
        optimizer.step()
    torch.testing.assert_close(adopted(*columns), model(*columns), rtol=0, atol=1e-6)
    assert adopted.again is adopted.item
    assert sum(value.numel() for value in adopted.parameters()) == sum(
        value.numel() for value in model.parameters()
    )


def on_meta(runtime: Runtime) -> tuple[float, float]:
    with torch.device("meta"):
        tables = nn.ModuleList([nn.Embedding(22, D) for _ in range(4)])
    parallel, _ = hybrid_parallel(adopt_tables(tables), runtime, seed=1)
    state = gather_state(parallel)
    rows = torch.cat(
        [value.flatten() for name, value in state.items() if ".collection." in name]
    )  # type: ignore[union-attr]
    return float(rows.mean()), float(rows.std())


def test_tables_without_memory_are_drawn_as_torch_draws_them() -> None:
    """88 rows of 8 normal numbers."""
    ((mean, deviation),) = run_ranks(on_meta, 1)
    assert abs(mean) < 4 / 26
    assert abs(deviation - 1) < 4 / 37


class OfItsOwn(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def tied() -> nn.ModuleDict:
    item, other = nn.Embedding(8, D), nn.Embedding(8, D)
    other.weight = item.weight
    return nn.ModuleDict({"item": item, "other": other})


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "no table": (
        nn.Linear(2, 1),
        "has no nn.Embedding and no nn.EmbeddingBag to move",
    ),
    "padding": (
        nn.EmbeddingBag(8, D, padding_idx=0),
        "table 'user' has padding_idx=0; take nn.Embedding",
    ),
    "norm": (
        nn.Embedding(8, D, max_norm=1.0),
        "table 'user' has max_norm=1, .* limit the rows",
    ),
    "frequency": (
        nn.Embedding(8, D, scale_grad_by_freq=True),
        "has scale_grad_by_freq=True",
    ),
    "max": (
        nn.EmbeddingBag(8, D, mode="max"),
        "table 'user' has mode='max'; take .* nn.Embedding and",
    ),
    "frozen": (
        nn.Embedding.from_pretrained(torch.zeros(8, D)),
        "table 'user' has a frozen weight; make it a buffer of a module of your own",
    ),
    "half": (
        nn.Embedding(8, D).half(),
        r"table 'user' has a torch.float16 weight; call float\(\)",
    ),
    "own forward": (OfItsOwn(8, D), "table 'user' has a forward of its own"),
    "tied": (tied(), "table 'user.other' shares its weight with another: look both up"),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", REFUSED)
def test_a_table_without_a_collection_of_its_kind_is_refused_by_name(name: str) -> None:
    table, pattern = REFUSED[name]
    with pytest.raises(CannotAdopt, match=re.compile(pattern, re.DOTALL)):
        adopt_tables(nn.ModuleDict({"user": table}))


@pytest.mark.unit
def test_tables_named_in_without_stay() -> None:
    tables = {"user": nn.Embedding(8, D), "pos": nn.Embedding(2, D)}
    model = nn.ModuleDict(tables)
    with pytest.raises(ValueError, match=r"without='post'.* there are pos, user"):
        adopt_tables(model, without=["post"])
    adopt_tables(model, without=["pos"])
    assert model["pos"] is tables["pos"]
    assert model["user"] is not tables["user"]
    # Those of a collection are TorchRec's already.
    collection = model["user"].collection
    with pytest.raises(CannotAdopt, match=r"has no nn\.Embedding and no"):
        adopt_tables(nn.ModuleDict({"user": collection}))


IDS = torch.tensor([[0, 1], [2, 3]])
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "matrix": (
        lambda model: model["user"].weight.T,
        CannotAdopt,
        "the weight of table 'user' is read as a matrix, .*adopt_tables\\(without=\\)",
    ),
    "offsets": (
        lambda model: model["bag"](IDS.flatten(), torch.tensor([0, 2])),
        CannotAdopt,
        r"table 'bag' is looked up with offsets or .*: give ids as \(B, L\)",
    ),
    "weights": (
        lambda model: model["bag"](IDS, per_sample_weights=IDS.float()),
        CannotAdopt,
        "table 'bag' is looked up with .*per_sample_weights: .*weigh the rows",
    ),
    "an id": (
        lambda model: model["user"](IDS + 5),
        IndexError,
        "'user' has no row 8: ids must be 0 to 7",
    ),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", CALLS)
def test_what_a_collection_does_not_do_is_refused_with_the_users_line(
    name: str,
) -> None:
    call, kind, pattern = CALLS[name]
    tables = {"user": nn.Embedding(8, D), "bag": nn.EmbeddingBag(8, D, mode="sum")}
    model = adopt_tables(nn.ModuleDict(tables))
    with pytest.raises(kind, match=re.compile(pattern, re.DOTALL)) as refused:
        call(model)
    assert kind is IndexError or "test_tables.py:" in str(refused.value)
