"""Plain lines of a run where there is no terminal."""

import io
import sys

import pytest

from torchrec_ext.train.report.progress import Progress

pytestmark = pytest.mark.unit
TRAIN = {"kind": "train", "epoch": 1, "step": 2, "loss": 0.5, "rows_per_s": 1000.0}
EVAL = {"kind": "eval", "epoch": 1, "step": 2, "auc": 0.75}
LINES = [
    "epoch 1, step 2 of 4: loss 0.5000, rows_per_s 1,000\n",
    "epoch 1, step 2 of 4: auc 0.7500\n",
]


def test_a_file_gets_plain_lines_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress(total=4, visible=True)
    progress.advance()
    progress.show(TRAIN)
    progress.show(EVAL)
    progress.close()
    assert capsys.readouterr().out == "".join(LINES)
