"""A line that moves where stderr is a terminal, and plain lines anywhere."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time

import pytest

from torchrec_ext.terminal import terminal
from torchrec_ext.train.report.progress import Progress

pytestmark = pytest.mark.unit
TRAIN = {"kind": "train", "epoch": 1, "step": 2, "loss": 0.5, "rows_per_s": 1000.0}
EVAL = {"kind": "eval", "epoch": 1, "step": 2, "auc": 0.75}
LINES = [
    "epoch 1, step 2 of 4: loss 0.5000, rows_per_s 1,000\n",
    "epoch 1, step 2 of 4: auc 0.7500\n",
]


def test_a_terminal_gets_a_moving_line_and_the_output_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    # What is never drawn must not be waited for.
    os.set_blocking(owner, False)
    # Here and not in a fixture, after which pytest puts its own stderr back.
    monkeypatch.setattr(sys, "stderr", os.fdopen(device, "w"))
    progress = Progress(total=4, visible=True)
    progress.advance()
    progress.show(TRAIN)
    progress.show(EVAL)
    progress.close()
    sys.stderr.flush()
    drawn = ""
    end = time.monotonic() + 5
    # What was written comes a little later, and in parts.
    while "1/4" not in drawn and time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            drawn += os.read(owner, 10_000).decode()
    sys.stderr.close()
    os.close(owner)
    assert "\r" in drawn
    assert "1/4" in drawn


def test_a_file_gets_plain_lines_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal() is None
    progress = Progress(total=4, visible=True)
    progress.advance()
    progress.show(TRAIN)
    progress.show(EVAL)
    progress.close()
    assert capsys.readouterr().out == "".join(LINES)
