"""trained() makes the step of torch's own loop, op by op, compiled and traced, with late rows and without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from torchrec_ext.capture.compiled import compiled
from torchrec_ext.capture.executors import inductor
from torchrec_ext.capture.memory import Clock, RowTable
from torchrec_ext.capture.step import StepPart, trained
from torchrec_ext.capture.update_rules import caught_up, row_clock
from torchrec_ext.distributed.optim.config import Choice

ROWS, D, B, STEPS, RATE = 300, 4, 8, 12, 1e-2
Step = Callable[..., Any]


class Model(nn.Module):
    """A table that is read twice, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(ROWS, D)
        self.top = nn.Linear(2 * D, 1)


# Its eps is so small that the closed form of late rows is exact.
ADAM = Choice(kind="adam", lr=RATE, eps=1e-16, betas=(0.9, 0.999), weight_decay=0.0)


class Trained:
    """The same model by trained(), its table moved row by row or whole."""

    def __init__(self, model: Model, *, by_row: bool, clip_norm: float) -> None:
        item, top = model.item.weight.detach(), model.top.weight.detach()
        bias = model.top.bias.detach()
        self.count = torch.zeros(())
        self.clock = Clock(self.count, torch.tensor(RATE))
        self.rows = row_clock(ROWS, 0, ADAM, item.device) if by_row else None
        self.clip_norm = clip_norm
        self.parts = []
        for weight in (item, top, bias):
            is_table = weight is item
            is_late = is_table and by_row
            self.parts.append(
                StepPart(
                    weight if is_late else weight.requires_grad_(),
                    [torch.zeros_like(weight), torch.zeros_like(weight)],
                    ADAM,
                    self.clock,
                    self.rows if is_late else None,
                    is_table,
                )
            )
        self.zero = torch.zeros((), requires_grad=True)

    def step(self) -> Step:
        """The step as a function of a batch, for the door that compiles."""
        parts, count, zero, clip_norm = (
            self.parts,
            self.count,
            self.zero,
            self.clip_norm,
        )

        def make(part: StepPart) -> RowTable:
            assert part.rows is not None
            return RowTable(
                part.weight, part.state, part.rows, part.choice, part.clock, zero
            )

        def forward(
            tables: Sequence[RowTable | None], one: Tensor, two: Tensor, label: Tensor
        ) -> tuple[Tensor, Tensor]:
            item, top, bias = parts
            table = tables[0]
            vectors = []
            for ids in (one, two):
                if table is None:
                    vectors.append(embedding(ids, item.weight))
                else:
                    vectors.append(table.read(ids))
            scores = nn.functional.linear(
                torch.cat(vectors, 1), top.weight, bias.weight
            )
            scores = scores.squeeze(1)
            return binary_cross_entropy_with_logits(scores, label), scores

        def step(*batch: Tensor) -> tuple[Tensor, Any]:
            return trained(forward, batch, parts, count, clip_norm=clip_norm, make=make)

        return step

    def item(self) -> Tensor:
        """The table with all rows up to date."""
        part = self.parts[0]
        if self.rows is None:
            return part.weight.detach()
        since, now = self.rows.since, self.count.int()
        rows, *_ = caught_up(part.weight, part.state, since, now, self.rows, ADAM)
        return rows


def batch(draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    one = torch.randint(ROWS, (B,), generator=draws)
    two = torch.randint(40, (B,), generator=draws)
    return one, two, torch.randint(2, (B,), generator=draws).float()


def own_loop(clip_norm: float) -> tuple[Model, list[float]]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=1e-16)
    draws, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        one, two, label = batch(draws)
        optimizer.zero_grad()
        vectors = torch.cat([model.item(one), model.item(two)], 1)
        loss = binary_cross_entropy_with_logits(model.top(vectors).squeeze(1), label)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["not limited", "limited"])
@pytest.mark.parametrize("by_row", [False, True], ids=["whole", "row by row"])
@pytest.mark.parametrize(
    "door", [lambda step: step, compiled], ids=["plain", "compiled"]
)
def test_a_step_is_that_of_torchs_own_loop(
    door: Callable[[Step], Step], by_row: bool, clip_norm: float
) -> None:
    own, losses = own_loop(clip_norm)
    made = Trained(copy.deepcopy(Model()), by_row=by_row, clip_norm=clip_norm)
    step = door(made.step())
    draws = torch.Generator().manual_seed(1)
    others = [float(step(*batch(draws))[0]) for _ in range(STEPS)]
    assert others == pytest.approx(losses, abs=1e-6)
    assert torch.allclose(made.item(), own.item.weight, atol=1e-5)
    assert torch.allclose(made.parts[1].weight, own.top.weight, atol=1e-5)


def test_a_compiled_step_is_traced_again_where_python_that_it_read_has_changed() -> (
    None
):
    made = Trained(Model(), by_row=False, clip_norm=0.0)
    inner, factor = made.step(), [1.0]

    def step(*given: Tensor) -> tuple[Tensor, Any]:
        loss, scores = inner(*given)
        return loss * factor[0], scores

    call = compiled(step)
    given = batch(torch.Generator().manual_seed(1))
    before = float(call(*given)[0])
    factor[0] = 0.0
    assert before > 0.0
    assert float(call(*given)[0]) == 0.0


def test_a_part_that_the_loss_does_not_reach_is_not_moved() -> None:
    made = Trained(Model(), by_row=False, clip_norm=0.0)
    item, top, bias = made.parts
    before = [part.weight.detach().clone() for part in made.parts]
    loss, _ = trained(
        lambda tables: (top.weight.square().sum(), None),
        (),
        made.parts,
        made.count,
    )
    assert float(loss) > 0.0
    assert torch.equal(item.weight, before[0])
    assert torch.equal(bias.weight, before[2])
    assert not torch.equal(top.weight, before[1])


def test_the_traced_door_makes_the_same_step() -> None:
    _, losses = own_loop(0.0)
    made = Trained(Model(), by_row=False, clip_norm=0.0)
    weights = [part.weight.detach() for part in made.parts]
    state = [tensor for part in made.parts for tensor in part.state]

    def step(*tensors: Tensor) -> list[Tensor]:
        count, rate, *rest = tensors
        one, two, label = rest[9:]
        parts = []
        for index in range(3):
            weight = rest[index].detach().requires_grad_()
            own = [rest[3 + 2 * index], rest[4 + 2 * index]]
            parts.append(StepPart(weight, own, ADAM, Clock(count, rate)))
        item, top, bias = parts

        def forward(tables: Any) -> tuple[Tensor, None]:
            vectors = [embedding(ids, item.weight) for ids in (one, two)]
            scores = nn.functional.linear(
                torch.cat(vectors, 1), top.weight, bias.weight
            )
            return binary_cross_entropy_with_logits(scores.squeeze(1), label), None

        return [trained(forward, (), parts, count)[0]]

    draws = torch.Generator().manual_seed(1)
    given = [list(batch(draws)) for _ in range(STEPS)]
    run = inductor(step, [made.count, made.clock.lr, *weights, *state], given[0])
    assert [float(run(each)[0]) for each in given] == pytest.approx(losses, abs=1e-6)
