"""A script's own loop, taken without a change to the script; and two reports that are compared."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.diagnose.recorded import HEALTHY, RECORDED, facts, steps
from torchrec_ext.diagnose import Diagnosis
from torchrec_ext.diagnose.__main__ import compare_reports, main
from torchrec_ext.diagnose.script import Loop, run_script

pytestmark = pytest.mark.unit

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8)
total = 0.0
"""
BODY = """
optimizer.zero_grad()
loss = (model(x) - y).square().mean()
loss.backward()
optimizer.step()
total += loss.item()
"""
SCRIPTS = {
    "at the top": f"for epoch in range(9):\n for x, y in loader:\n{textwrap.indent(BODY, '  ')}",
    "numbered": f"for i, (x, y) in enumerate(loader):\n{textwrap.indent(BODY, '  ')}\n  assert i < 9 or len(sys.argv)",
    "that returns": (
        f"def train():\n global total\n for epoch in range(9):\n  for x, y in loader:\n{textwrap.indent(BODY, '   ')}\n"
        "   if total < 0 or epoch > 7: return total\ntrain()"
    ),
    "in functions": (
        f"def train_step(x, y):\n  global total\n{textwrap.indent(BODY, '  ')}\n"
        "def epoch(batches):\n  seen = 0\n  for x, y in batches:\n    train_step(x, y)\n    seen += len(x)\n"
        "for _ in range(9):\n  epoch(loader)"
    ),
}


def written(folder: Path, body: str) -> str:
    (folder / "train.py").write_text(HEAD + body)
    return str(folder / "train.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_is_taken_with_its_loader_and_a_step_that_trains_on_its_batches(
    name: str, tmp_path: Path
) -> None:
    loops: list[Loop] = []
    moved: list[bool] = []

    def look(loop: Loop) -> None:
        model = loop.step.__globals__["model"]  # type: ignore[attr-defined]
        before = model.weight.detach().clone()
        for batch in loop.batches:
            loop.step(batch)
        moved.append(not model.weight.equal(before))
        loops.append(loop)

    run_script(written(tmp_path, SCRIPTS[name]), [], look)
    (loop,) = loops
    assert moved == [True]
    assert isinstance(loop.batches, DataLoader)
    assert loop.line.startswith("train.py:")


def test_a_loop_over_numbers_is_taken_if_there_is_no_other(tmp_path: Path) -> None:
    loops: list[Loop] = []
    body = f"x, y = next(iter(loader))\nfor epoch in range(50):\n{textwrap.indent(BODY, '  ')}"
    run_script(written(tmp_path, body), [], loops.append)
    assert loops[0].batches == range(50)
    loops[0].step(3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            f"x, y = next(iter(loader))\nwhile True:\n{textwrap.indent(BODY, '  ')}",
            "no `for` loop of the script",
        ),
        (
            "x, y = next(iter(loader))" + BODY,
            "it ended after 1 optimizer steps, and 4 are needed",
        ),
        (
            f"def train():\n global total\n for x, y in loader:\n{textwrap.indent(BODY, '  ')}\n  yield total"
            "\nfor _ in train(): pass",
            r"train.py:12: the loop's body has `yield`, which cannot be taken out of it",
        ),
    ],
)
def test_a_loop_that_cannot_be_taken_is_refused_in_one_line(
    body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        run_script(written(tmp_path, body), [], print)
    assert main([written(tmp_path, body)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_script_of_several_ranks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([written(tmp_path, "")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torchrun started 2 ranks" in line
    assert "why_slow.step(step, batches) in the script, on every rank" in line


def test_a_script_is_diagnosed_with_its_arguments_and_its_report_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"assert sys.argv[1:] == ['--epochs', '3']\n{SCRIPTS['at the top']}\nraise SystemExit('not reached')"
    report = tmp_path / "report.json"
    assert (
        main(
            [
                "--budget",
                "1",
                "--json",
                str(report),
                written(tmp_path, body),
                "--epochs",
                "3",
            ]
        )
        == 0
    )
    assert "why is my training slow?" in capsys.readouterr().out
    made: Any = json.loads(report.read_text())
    assert made["facts"]["optimizers"] == ["SGD"]
    assert made["facts"]["rows"] == 8
    assert any(line.startswith("train.py:") for line, _ in made["facts"]["op_lines"])
    assert main(["--compare", str(report), str(report)]) == 0
    assert capsys.readouterr().out.startswith("within the limit: an iteration takes")


@pytest.mark.parametrize(
    ("milliseconds", "slower"),
    [(92.0, False), (95.0, False), (99.0, True), (60.0, False)],
)
def test_a_report_that_is_slower_by_more_than_the_limit_is_said_to_be(
    milliseconds: float, slower: bool, tmp_path: Path
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(Diagnosis(HEALTHY).to_json())
    after.write_text(Diagnosis(facts(steps(milliseconds), ops=159)).to_json())
    comparison = compare_reports(before, after, "5%")
    assert comparison.ratio == pytest.approx(milliseconds / 92, rel=0.01)
    assert main(["--compare", str(before), str(after), "--limit", "5%"]) == int(
        comparison.is_slower
    )
    assert (comparison.ratio > 1.05) == slower


def test_rounds_that_are_spread_far_do_not_make_a_report_slower(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    for path, scales in zip(
        paths, [(1.0, 2.0, 0.5, 1.0, 3.0), (1.1, 2.0, 0.5, 1.0, 3.0)], strict=True
    ):
        rounds = [{"data": 0.0, "step": scale} for scale in scales]
        path.write_text(
            json.dumps({"findings": [], "facts": {"rounds": rounds, "between": []}})
        )
    assert not compare_reports(*paths, "0%").is_slower


def test_new_causes_are_named(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(Diagnosis(HEALTHY).to_json())
    after.write_text(Diagnosis(RECORDED["python_lines"]).to_json())
    assert "new: python_lines" in str(compare_reports(before, after, "5%"))


@pytest.mark.parametrize(
    ("text", "limit", "message"),
    [
        ("no json", "5%", r"before\.json: holds no report of a diagnosis"),
        ("{}", "5%", r"before\.json: holds no report of a diagnosis"),
        ("{}", "five", "--limit 'five': must be a percentage of 0 or more, such as 5%"),
    ],
)
def test_wrong_reports_and_limits_are_refused(
    text: str, limit: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "before.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        compare_reports(tmp_path / "before.json", tmp_path / "before.json", limit)


def test_torch_is_not_left_with_a_hook() -> None:
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks
    assert torch.is_grad_enabled()
