"""Towers on ranks of their own equal one process that runs them all: losses, and weights after 20 steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.towers import TowersOnRanks

STEPS, ROWS = 20, 40
# The batch divides by neither 2 nor 3 ranks.
BATCH = 23
WIDTHS = {"user": 4, "item": 4, "place": 3}


class Sub(nn.Module):
    """A table of TorchRec, a dense column and a layer; in double, so that a wrong gradient cannot hide in rounding."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=4
        )
        self.bags = EmbeddingBagCollection(tables=[config])
        self.layer = nn.Linear(5, WIDTHS[name], dtype=torch.float64)

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.bags(ids).values().double()
        return torch.tanh(self.layer(torch.cat([pooled, dense], dim=1)))


class Top(nn.Module):
    def __init__(self, width: int, layers: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, dtype=torch.float64) if layers else None
        self.loss = nn.MSELoss()

    def forward(
        self, outputs: Sequence[Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat(list(outputs), dim=1)
        scores = joined.sum(dim=1) if self.layer is None else self.layer(joined)[:, 0]
        return self.loss(scores, labels), scores.detach()


def made(names: Sequence[str], layers: bool) -> tuple[dict[str, nn.Module], Top]:
    torch.manual_seed(0)
    towers: dict[str, nn.Module] = {name: Sub(name) for name in names}
    return towers, Top(sum(WIDTHS[name] for name in names), layers)


def batch(
    step: int, names: Sequence[str], rows: int = BATCH
) -> tuple[dict[str, tuple[Any, ...]], Tensor]:
    draws = torch.Generator().manual_seed(step)
    inputs = {}
    for name in names:
        lengths = torch.randint(0, 3, (rows,), generator=draws)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=draws)
        dense = torch.rand(rows, 1, generator=draws, dtype=torch.float64)
        inputs[name] = (KeyedJaggedTensor([name], ids, lengths=lengths), dense)
    return inputs, torch.rand(rows, generator=draws, dtype=torch.float64)


def trained(
    runtime: Runtime,
    names: Sequence[str],
    layers: bool,
) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Losses, the last step's scores of this rank's rows, and this rank's weights."""
    towers, top = made(names, layers)
    model = TowersOnRanks(towers, top, runtime)
    # A rank may have no tower, and a top without layers.
    own = list(model.parameters())
    optimizer = torch.optim.Adam(own, 0.01) if own else None
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step, names)
        loss, scores = model(inputs, labels)
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(float(loss.detach()))
    return (
        losses,
        scores,
        {name: value.detach() for name, value in model.state_dict().items()},
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("names", "layers"),
    [(("user", "item"), False), (("user", "item", "place"), True)],
)
def test_towers_on_ranks_equal_one_process(
    world_size: int, names: tuple[str, ...], layers: bool
) -> None:
    losses, scores, weights = trained(Runtime(), names, layers)
    by_rank = run_ranks(trained, world_size, names, layers)
    merged: dict[str, Tensor] = {}
    for theirs, _, state in by_rank:
        assert theirs == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            # The layers above are on every rank, and move alike.
            assert torch.equal(merged.setdefault(name, value), value)
    torch.testing.assert_close(torch.cat([own for _, own, _ in by_rank]), scores)
    assert merged.keys() == weights.keys()
    for name, value in weights.items():
        # Tables are in float32, and their gradient is added in another order.
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)


def saved(runtime: Runtime, folder: str) -> None:
    towers, top = made(("user", "item"), True)
    model = TowersOnRanks(towers, top, runtime)
    with torch.no_grad():
        for value in model.towers.parameters():
            value += runtime.rank + 1
    dcp.save(model.state_dict(), checkpoint_id=folder)


def test_what_ranks_save_is_the_whole_model(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))
    towers, top = made(("user", "item"), True)
    expected = {
        name: value + (name.startswith("towers.user") or 2 * name.startswith("towers."))
        for name, value in TowersOnRanks(towers, top, Runtime()).state_dict().items()
    }
    towers, top = made(("user", "item"), True)
    model = TowersOnRanks(towers, top, Runtime())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.unit
def test_what_cannot_run_is_refused() -> None:
    towers, top = made(("user", "item"), True)
    one, two = Runtime(), Runtime(world_size=2)
    for build, message in (
        (lambda: TowersOnRanks({}, top, one), "towers: give at least one"),
        (
            lambda: TowersOnRanks({**towers, "user": None}, top, two),
            "towers: 'user' is None on rank 0, which runs it",
        ),
        (
            lambda: TowersOnRanks({**towers, "item": towers["user"]}, top, two),
            "towers: 'user' and 'item' share the parameter",
        ),
    ):
        with pytest.raises(ValueError) as error:
            build()
        assert message in str(error.value)
    inputs, labels = batch(0, ("user", "item"))
    model = TowersOnRanks(towers, top, one)
    with pytest.raises(ValueError, match="rows: give the labels"):
        model(inputs)
    for wrong, kind in (
        ({"user": inputs["user"]}, "NoneType"),
        ({**inputs, "item": labels}, "Tensor"),
    ):
        with pytest.raises(ValueError, match=f"inputs: tower 'item' has {kind}; give"):
            model(wrong, labels)
    with pytest.raises(
        ValueError, match=r"tower 'user' returned \(23, 4\) for 22 rows"
    ):
        model(inputs, labels[:22])
    with pytest.raises(ValueError, match="rows: 0 rows on 1 ranks"):
        model(inputs, labels[:0])


def refusals(runtime: Runtime) -> list[str]:
    towers, top = made(("user", "item"), True)
    inputs, labels = batch(0, ("user", "item"))
    others, other_labels = batch(runtime.rank, ("user", "item"))
    found = []
    swapped = dict(reversed(towers.items())) if runtime.rank else towers
    own = {name: tower if runtime.rank == 0 else None for name, tower in towers.items()}
    for wrong in (
        swapped,
        # Each rank names its own first: rank 1 would run one that it has not.
        {name: None if name == "item" else tower for name, tower in swapped.items()},
        own,
        towers if runtime.rank else {**towers, "place": None},
    ):
        with pytest.raises(ValueError) as error:
            TowersOnRanks(wrong, top, runtime)
        found.append(str(error.value))
    for given, rows in (
        (inputs, other_labels),
        (inputs, labels[torch.randperm(BATCH) if runtime.rank else slice(None)]),
        (others, labels),
        (inputs, labels[: BATCH - runtime.rank]),
        ({"user": inputs["user"]}, labels),
    ):
        with pytest.raises(ValueError) as error:
            TowersOnRanks(towers, top, runtime)(given, rows)
        found.append(str(error.value))
    # A batch may be shorter on both after the first. One rank's alone is refused on both, in the same step.
    model = TowersOnRanks(towers, top, runtime)
    model(inputs, labels)
    model(*batch(0, ("user", "item"), BATCH - 1))
    model(inputs, labels)
    fewer, fewer_labels = batch(0, ("user", "item"), BATCH - runtime.rank)
    with pytest.raises(ValueError) as error:
        model(fewer, fewer_labels)
    found.append(str(error.value))
    return found


def test_ranks_without_the_same_whole_batch_are_refused_on_all_alike() -> None:
    first, second = run_ranks(refusals, 2)
    assert first == second
    assert max(map(len, first)) <= 200
    for message, start in zip(
        first,
        (
            "towers: user, item on rank 0, item, user on rank 1; give all ranks",
            "towers: user, item on rank 0, item, user on rank 1; give all ranks",
            "towers: 'item' is None on rank 1, which runs it; give that rank the module",
            "towers: user, item, place on rank 0, user, item on rank 1; give all",
            "rows: 23 of ",
            "rows: 23 of ",
            "inputs['user']: ",
            "rows: 23 of ",
            "inputs: tower 'item' has NoneType; give the tuple",
            "rows: 23 of ",
        ),
        strict=True,
    ):
        assert message.startswith(start)
