"""nn.Embedding with dynamic ids in a plain loop equals static ones, and tables without an end."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.contracts import run_ranks
from torchrec_ext.ids import Dynamic, DynamicEmbeddings
from torchrec_ext.ids.index import mixed

WIDTH, SIZE, STEPS = 8, 64, 20
FEW, ENOUGH = 90, 600
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.05),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
}


class Model(nn.Module):
    """Items of a history and a candidate share an embedding, which a forward calls twice."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(rows, WIDTH)
        self.item = nn.Embedding(rows, WIDTH, padding_idx=0)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        vectors = self.user(user) * self.item(item) + self.item(history).mean(1)
        return self.top(vectors).squeeze(1)  # type: ignore[no-any-return]


def begin(path: str, ids: Tensor) -> Tensor:
    return (
        mixed(ids[:, None] + torch.arange(WIDTH) * (1 + len(path))) >> 40
    ).float() / 2**26


class Known(DynamicEmbeddings):
    """Rows begin with values that depend on the id alone."""

    def _drawn(self, path: str, ids: Tensor) -> Tensor:
        return begin(path, ids)


def batches(drift: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Users, histories of which a part is padding, candidates and labels."""
    generator = torch.Generator().manual_seed(1)
    names = torch.randint(1, 2**62, (2, 60 + drift * STEPS), generator=generator)

    def drawn(of: int, first: int, *shape: int) -> Tensor:
        return names[of][
            (torch.rand(*shape, generator=generator) ** 3 * 60).long() + first
        ]

    for first in range(0, drift * STEPS, drift):
        history = drawn(1, first, SIZE, 3)
        history[torch.rand(SIZE, 3, generator=generator) < 0.2] = 0
        labels = torch.randint(0, 2, (SIZE,), generator=generator).float()
        yield drawn(0, first, SIZE), history, drawn(1, first, SIZE), labels


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]
) -> float:
    *inputs, labels = batch
    optimizer.zero_grad()
    loss = binary_cross_entropy_with_logits(model(*inputs), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def dynamic(
    kind: str, rows: int, drift: int
) -> tuple[Any, Any, DynamicEmbeddings, list[float]]:
    model = Model(rows)
    optimizer = OPTIMIZERS[kind](model.parameters())
    policies = {name: Dynamic(capacity=rows) for name in ("user", "item")}
    ids = Known(model, optimizer, policies)
    return (
        model,
        optimizer,
        ids,
        [step(model, optimizer, batch) for batch in batches(drift)],
    )


@pytest.mark.unit
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_while_the_capacity_suffices_it_equals_a_vocabulary(kind: str) -> None:
    model, _, ids, losses = dynamic(kind, ENOUGH, 5)
    assert not ids.ids.counts["evicted"]
    static = Model(ENOUGH)
    with torch.no_grad():
        for path in ("user", "item"):
            live, rows = ids.ids.live_ids(path)
            static.get_submodule(path).weight[rows] = begin(path, live)
    optimizer = OPTIMIZERS[kind](static.parameters())

    def known(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        user, history, item, labels = batch
        rows = ids.ids.rows(
            {"user": user, "item": torch.cat([history, item[:, None]], dim=1)}
        )
        return rows["user"], rows["item"][:, :3], rows["item"][:, 3], labels

    assert losses == [step(static, optimizer, known(batch)) for batch in batches(5)]
    for path in ("user", "item"):
        rows = ids.ids.live_ids(path)[1]
        assert torch.equal(
            model.get_submodule(path).weight[rows],
            static.get_submodule(path).weight[rows],
        )


@pytest.mark.unit
def test_eval_reads_and_changes_nothing_and_a_saved_run_goes_on() -> None:
    model, optimizer, ids, _ = dynamic("adam", FEW, 8)
    before = copy.deepcopy(ids.state_dict())
    model.eval()
    user, history, item, _ = next(batches(8))
    model(user + 1, history, item)
    assert ids.state_dict()["counts"] == before["counts"]
    model.train()
    other = Model(FEW)
    other_optimizer = OPTIMIZERS["adam"](other.parameters())
    policies = {name: Dynamic(capacity=FEW) for name in ("user", "item")}
    resumed = Known(other, other_optimizer, policies)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(before)
    for batch in batches(11):
        assert step(model, optimizer, batch) == step(other, other_optimizer, batch)


def _begun(_: Any) -> Tensor:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Embedding(FEW, 4))
    sgd = torch.optim.SGD(model.parameters())
    DynamicEmbeddings(model, sgd, {"0": Dynamic(capacity=FEW)})
    return model(torch.arange(8)).detach()  # type: ignore[no-any-return]


def test_ranks_begin_rows_alike_whose_first_weights_differ_as_until_ddp() -> None:
    assert torch.equal(*run_ranks(_begun, 2))


@pytest.mark.unit
def test_rows_begin_as_the_weights_were_drawn() -> None:
    model = Model(FEW)
    with torch.no_grad():
        model.user.weight.normal_(3.0, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = DynamicEmbeddings(model, optimizer, {"user": Dynamic(capacity=FEW)})
    rows = ids.ids.rows({"user": torch.tensor([7])})
    _ = model.user(torch.arange(1_000, 1_080))
    assert not rows["user"].any()
    fresh = model.user.weight.detach()[ids.ids.live_ids("user")[1]]
    assert abs(float(fresh.mean()) - 3.0) < 0.02
    assert 0.08 < float(fresh.std()) < 0.12


@pytest.mark.unit
@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"items": Dynamic(capacity=FEW)},
            "'items' is no nn.Embedding of the model; its embeddings are user, item",
        ),
        (
            {"user": Dynamic(capacity=5)},
            "'user': capacity=5, but the embedding has 90 rows",
        ),
        (
            {"padded": Dynamic(capacity=FEW)},
            "'padded': padding_idx=3: must be 0 or None",
        ),
        (
            {"left_out": Dynamic(capacity=FEW)},
            "'left_out': the optimizer does not hold its weight",
        ),
        (
            {"tied": Dynamic(capacity=FEW), "user": Dynamic(capacity=FEW, evict="lru")},
            "'tied' shares its weight with 'user', whose ids would need the same rows",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tables: Any, message: str) -> None:
    model = Model(FEW)
    model.padded = nn.Embedding(FEW, 2, padding_idx=3)
    optimizer = torch.optim.SGD(model.parameters())
    model.left_out = nn.Embedding(FEW, 2)
    model.tied = nn.Embedding(FEW, WIDTH)
    model.tied.weight = model.user.weight
    with pytest.raises(ValueError, match=r".") as error:
        DynamicEmbeddings(model, optimizer, tables)
    assert message in str(error.value)
    assert len(str(error.value)) <= 200


def drifting(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    loss = (model(ids[:, None]).squeeze(1) - (ids % 3).float()).square().mean()
    loss.backward()
    optimizer.step()


def single(rows: int = 50) -> tuple[nn.Sequential, torch.optim.Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(rows, 4), nn.Flatten(), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.unit
def test_ids_are_an_argument_by_place_or_by_name() -> None:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(50, 4)})
    optimizer = torch.optim.Adam(model.parameters())
    DynamicEmbeddings(model, optimizer, {"bag": Dynamic(capacity=50)})
    bag = model["bag"]
    items = torch.tensor([10**12, 7, -3])
    expected = bag(items, torch.tensor([0, 1]))
    assert torch.equal(bag(input=items, offsets=torch.tensor([0, 1])), expected)
    assert torch.equal(bag(items, offsets=torch.tensor([0, 1])), expected)
    with pytest.raises(TypeError, match="input"):
        bag()


@pytest.mark.unit
def test_another_optimizer_that_steps_is_noticed() -> None:
    model, optimizer = single()
    DynamicEmbeddings(model, optimizer, {"0": Dynamic(capacity=50)})
    other = torch.optim.Adam(model.parameters(), lr=0.2)
    drifting(model, optimizer, torch.arange(20))
    for name in ("a", "b"):  # gradients of two batches, as of one step
        model(torch.arange(30 + len(name))[:, None]).sum().backward()
    optimizer.step()
    drifting(model, other, torch.arange(20))
    with pytest.raises(ValueError, match="'0': its weight has moved, but no") as error:
        drifting(model, other, torch.arange(20))
    assert len(str(error.value)) <= 200


@pytest.mark.unit
def test_a_model_takes_ids_by_one_alone() -> None:
    model, optimizer = single()
    first_tables = {"0": Dynamic(capacity=50)}
    first = DynamicEmbeddings(model, optimizer, first_tables)
    for call, message in (
        (
            lambda: DynamicEmbeddings(model, optimizer, first_tables),
            "has dynamic ids already",
        ),
        (lambda: copy.deepcopy(model), "is not copied or saved whole"),
        (lambda: copy.deepcopy(first), "is not copied or saved whole"),
        (lambda: torch.optim.swa_utils.AveragedModel(model), "is not copied or saved"),
        (lambda: torch.save(model, io.BytesIO()), "is not copied or saved whole"),
    ):
        with pytest.raises(ValueError, match=f"'0' .*{message}") as error:
            call()
        assert len(str(error.value)) <= 200
    first.remove()
    copy.deepcopy(model)
    second = DynamicEmbeddings(model, optimizer, {"0": Dynamic(capacity=50)})
    drifting(model, optimizer, torch.tensor([2**50, -4]))
    assert second.ids.live_ids("0")[0].sort().values.tolist() == [-4, 2**50]


FIRST_VALUES: dict[str, Any] = {
    "Adagrad": lambda w: torch.optim.Adagrad(w, 0.1, initial_accumulator_value=0.5),
    "Adagrad, of a group": lambda w: torch.optim.Adagrad(
        [{"params": list(w), "initial_accumulator_value": 0.25}],
        lr=0.1,
        initial_accumulator_value=0.75,
    ),
    "SGD": lambda w: torch.optim.SGD(w, 0.1, momentum=0.9, dampening=0.3),
    "RMSprop": lambda w: torch.optim.RMSprop(w, 0.1, momentum=0.5, centered=True),
    "Adam": lambda w: torch.optim.Adam(w, 0.1, amsgrad=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.unit
@pytest.mark.parametrize("kind", FIRST_VALUES)
def test_state_of_a_new_id_begins_as_the_optimizer_begins_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an id that takes over a row; the state of a static table without steps on the row is the expectation."""
    model, static = nn.Sequential(nn.Embedding(4, 3)), nn.Embedding(9, 3)
    optimizer = FIRST_VALUES[kind](model.parameters())
    static_optimizer = FIRST_VALUES[kind](static.parameters())
    nn.init.constant_(static.weight, 0.1)
    monkeypatch.setattr(
        DynamicEmbeddings, "_drawn", lambda _, __, new: torch.full((len(new), 3), 0.1)
    )
    policies = {"0": Dynamic(capacity=4, evict="lru")}
    ids = DynamicEmbeddings(model, optimizer, policies)
    for items in ([1, 2, 3], [1, 2, 3], [2, 3, 4], [4, 5, 3], [4, 5], [4, 5, 6]):
        batch = torch.tensor(items)
        for table, each in ((model, optimizer), (static, static_optimizer)):
            each.zero_grad()
            loss = (table(batch) - batch[:, None] / 20).square().sum()
            loss.backward()
            each.step()
    live, rows = ids.ids.live_ids("0")
    assert sorted(live.tolist()) == [4, 5, 6]
    torch.testing.assert_close(
        model[0].weight[rows], static.weight[live], rtol=0, atol=0
    )


@pytest.mark.unit
@pytest.mark.parametrize("kind", ["Rprop", "ASGD", "Adafactor", "LBFGS"])
def test_an_optimizer_without_a_state_of_each_row_is_refused(kind: str) -> None:
    model, _ = single()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    with pytest.raises(ValueError, match=f"'0': the state of {kind} cannot") as error:
        DynamicEmbeddings(model, optimizer, {"0": Dynamic(capacity=50)})
    assert len(str(error.value)) <= 200
