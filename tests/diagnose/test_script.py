"""A script's own loop, taken without a change to the script."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from torchrec_ext.diagnose.__main__ import main
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
    "with private names": (
        "class Trainer:\n def __init__(self):\n  self.__total, self.__loader = 0.0, loader\n"
        " def train(self):\n  for x, y in self.__loader:\n"
        f"{textwrap.indent(BODY.replace('total', 'self.__total'), '   ')}"
        "\nfor epoch in range(9):\n Trainer().train()"
    ),
    "in functions": (
        f"def train_step(x, y):\n  global total\n{textwrap.indent(BODY, '  ')}\n"
        "def epoch(batches):\n  seen = 0\n  for x, y in batches:\n    train_step(x, y)\n    seen += len(x)\n"
        "for _ in range(9):\n  epoch(loader)"
    ),
}
if sys.version_info < (3, 11):
    del SCRIPTS["with private names"]  # whose class a frame does not say there


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
        (
            "def train():\n total = 0.0\n def epoch():\n  for x, y in loader:\n   nonlocal total\n"
            f"{textwrap.indent(BODY, '   ')}"
            "\n epoch()\ntrain()",
            r"train.py:13: .*nonlocal.* in the loop's body, which cannot be taken out of it",
        ),
        (
            "from torchrec_ext.adopt import adopt\n"
            "step = adopt(model, optimizer, lambda x, y: (model(x) - y).square().mean())\n"
            "for epoch in range(9):\n for x, y in loader:\n  step(x, y)",
            "the script's step is adopted.*diagnose before adopt",
        ),
    ],
)
def test_a_loop_that_cannot_be_taken_is_refused_in_one_line(
    body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        run_script(written(tmp_path, body), [], print)
    assert main([written(tmp_path, body)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines if "adopt:" not in line] == [
        "torchrec_ext.diagnose"
    ]


@pytest.mark.parametrize("taken", [True, False])
def test_a_script_that_catches_errors_ends_as_asked(
    taken: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop that is taken, and a `while` loop, which is refused: both catch what their step raises."""
    head = (
        "for _ in range(99):"
        if taken
        else "x, y = next(iter(loader))\nwhile steps < 99:"
    )
    inner = "for x, y in loader:" if taken else "if True:"
    body = (
        f"steps = 0\nfinished = 0\n{head}\n {inner}\n  try:\n   steps += 1\n{textwrap.indent(BODY, '   ')}\n"
        f"   finished += 1\n  except:\n   pass\nassert finished == 3, finished\n"
    )
    diagnosed: list[Loop] = []
    if taken:
        run_script(written(tmp_path, body), [], diagnosed.append)
        assert len(diagnosed) == 1
        return
    with pytest.raises(ValueError, match="no `for` loop of the script"):
        run_script(written(tmp_path, body), [], diagnosed.append)
    assert main([written(tmp_path, body)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no `for` loop of the script" in line
    assert diagnosed == []


def test_a_script_of_several_ranks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([written(tmp_path, "")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torchrun started 2 ranks" in line


def test_a_script_is_diagnosed_with_its_arguments(
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
    assert any(line.startswith("train.py:") for line, _ in made["facts"]["op_lines"])


def test_a_report_that_cannot_be_written_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    script = written(tmp_path, f"open({str(ran)!r}, 'w')\n{SCRIPTS['at the top']}")
    report = tmp_path / "missing" / "x.json"
    assert main(["--json", str(report), script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--json {report}: cannot be written: No such file or directory" in line
    assert main(["--json", str(tmp_path), script]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert not ran.exists()
