"""Batches made inside of a step, of rows on its device, are those of a loader, and train as these do."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adopt.pairs import D, Pairs, logistic
from torchrec_ext.adopt import AdoptedStep, CannotAdopt, Rows, Uniform, adopt, verify
from torchrec_ext.adopt.rows.rows import RowsOnDevice
from torchrec_ext.capture import executors

USERS, ITEMS, B = 700, 20, 16
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)


class Script(NamedTuple):
    """A user's script up to its loop."""

    model: Pairs
    optimizer: torch.optim.Optimizer
    rows: Rows
    step: AdoptedStep

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def script(compile_: Any = "require", kind: type[Pairs] = Pairs) -> Script:
    generator = torch.Generator().manual_seed(5)
    columns = {
        "user": torch.randint(USERS, (90,), generator=generator),
        "item": torch.randint(ITEMS, (90,), generator=generator),
    }
    negatives = Uniform(ITEMS, draws=2, exclude=("user", "item"))
    rows = Rows(columns, B, negatives=negatives, seed=3)
    torch.manual_seed(0)
    model = kind(USERS, ITEMS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = adopt(model, optimizer, logistic(model), compile=compile_)
    return Script(model, optimizer, rows, step)


def losses_of(step: AdoptedStep, rows: Rows, epochs: int) -> list[float]:
    return [float(loss) for _ in range(epochs) for loss in step.epoch(rows)]


def test_batches_made_inside_of_a_step_train_as_those_of_a_loader_and_equal_ids_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn by numpy or inside, as on a GPU; stopped in mid-epoch and resumed by another process, or not."""
    eager, inside, captured = script("off"), script("off"), script()
    losses = []
    for _ in range(3):
        losses += [float(eager.step(*batch)[0]) for batch in eager.rows]
    assert len(losses) == 18  # the last batch of an epoch has 10 rows
    assert losses_of(inside.step, inside.rows, 3) == losses
    torch.testing.assert_close(inside.weights(), eager.weights(), rtol=0, atol=0)
    assert losses_of(captured.step, captured.rows, 3) == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(captured.weights(), eager.weights(), rtol=0, atol=2e-3)
    assert "moved row by row: user.weight" in captured.step.describe()
    seen = captured.step._captures.look_ups
    assert seen[id(captured.model.user.weight)] == B
    assert seen[id(captured.model.item.weight)] == 3 * B

    monkeypatch.setattr(
        "torchrec_ext.adopt.step.RowsOnDevice",
        lambda rows, device: RowsOnDevice(rows, device, draws_inside=True),
    )
    first = script()
    begun = losses_of(first.step, first.rows, 1)
    begun += [float(loss) for loss in itertools.islice(first.step.epoch(first.rows), 3)]
    file = io.BytesIO()
    torch.save([each.state_dict() for each in first[:3]], file)
    second = script()
    states = torch.load(io.BytesIO(file.getvalue()))
    for each, state in zip(second[:3], states, strict=True):
        each.load_state_dict(state)
    assert begun + losses_of(second.step, second.rows, 2) == pytest.approx(
        losses, abs=1e-5
    )
    torch.testing.assert_close(second.weights(), eager.weights(), rtol=0, atol=2e-3)


class Masking(Pairs):
    """Writes into the ids of a batch if it is told so."""

    is_masking = False

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        if self.is_masking:
            user[::2] = 0
        return super().forward(user, item)


def test_ids_that_later_steps_write_into_do_not_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "FIRST", 0)  # no step is compared with the eager one
    found = []
    for way in ("off", "require"):
        made = script(way, Masking)
        losses = losses_of(made.step, made.rows, 1)
        made.model.is_masking = True  # type: ignore[assignment]
        found.append(losses + losses_of(made.step, made.rows, 2))
    assert "captured since" in made.step.describe()
    assert found[1] == pytest.approx(found[0], abs=1e-5)


class Concatenated(nn.Module):
    """A layer over what is looked up by ids that repeat, by others, and a column of numbers that repeats."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, D)
        self.change, self.top = change, nn.Linear(8 + D + 8, 6)

    def forward(self, user: Tensor, item: Tensor, context: Tensor) -> Tensor:
        rows = torch.cat([self.user(user), self.item(item), context], 1)
        self.change(rows)
        return self.top(rows).tanh().sum(1)  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda rows: None,
    "written": lambda rows: rows[1].mul_(2.0),
    "halved": lambda rows: None,  # multiplied in bfloat16: a sum of products is another
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_multiplies_rows_that_repeat_once_and_learns_the_same(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    columns = {
        "user": torch.randint(USERS, (40,), generator=generator),
        "item": torch.randint(ITEMS, (40,), generator=generator),
        "context": torch.randn(40, 8, generator=generator),
    }
    multiplied: list[Any] = []

    def compile_graph(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is F.linear:
                multiplied.append(tuple(node.meta["example_value"].shape))
        return graph

    monkeypatch.setattr(executors, "compile_graph", compile_graph)
    found = []
    for way in ("off", "require"):
        torch.manual_seed(0)
        model = Concatenated(CHANGES[change])
        negatives = Uniform(ITEMS, draws=4, exclude=("item", "item"))
        rows = Rows(columns, 8, negatives=negatives, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        autocast = partial(
            torch.autocast, "cpu", torch.bfloat16, enabled=change == "halved"
        )
        step = adopt(
            model,
            optimizer,
            logistic(model),
            autocast=autocast,
            compile=way,  # type: ignore[arg-type]
        )
        found.append((losses_of(step, rows, 4), model.state_dict()))
    (eager, weights), (captured, others) = found
    assert captured == pytest.approx(eager, abs=2e-6)
    torch.testing.assert_close(others, weights, rtol=0, atol=1e-5)
    assert ((8, 6) in multiplied) == (change == "read")


def test_an_epoch_of_other_batches_is_refused() -> None:
    with pytest.raises(CannotAdopt, match=r"epoch\(\) takes Rows, not a list"):
        next(script().step.epoch([]))  # type: ignore[arg-type]


def test_the_second_users_script_is_adopted_by_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Unparsed, each statement is one line, however the files are formatted.
    texts = [
        ast.unparse(ast.parse((EXAMPLES / name).read_text().split('"""', 2)[2]))
        for name in ("ncf_script.py", "ncf_adopted.py")
    ]
    lines = list(difflib.unified_diff(*[text.splitlines() for text in texts], n=0))
    added = [line for line in lines[2:] if line.startswith("+") and line.strip("+ ")]
    assert (
        len([line for line in added if "import" not in line and "print" not in line])
        == 3
    )
    monkeypatch.chdir(tmp_path)
    for name in ("ncf_script", "ncf_adopted"):
        path = EXAMPLES / f"{name}.py"
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        module.main(2_000, 3)
    said = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in said.splitlines() if "epoch " in line]
    assert losses[:3] == pytest.approx(losses[3:], rel=0.05)
    assert losses[0] > losses[2]
    assert "adopt: compiling the training step" in said
