"""A line that moves, on a pseudo terminal: of this process, or of the one that started it."""

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator

import pytest

from torchrec_ext.drawing.terminal import TERMINAL, is_moving, terminal
from torchrec_ext.train.report.progress import Progress

pytestmark = pytest.mark.unit
TRAIN = {"kind": "train", "epoch": 1, "step": 2, "loss": 0.5, "rows_per_s": 1000.0}
EVAL = {"kind": "eval", "epoch": 1, "step": 2, "auc": 0.75}
LINES = [
    "epoch 1, step 2 of 4: loss 0.5000, rows_per_s 1,000\n",
    "epoch 1, step 2 of 4: auc 0.7500\n",
]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The terminal of a launcher, as its owner reads it."""
    owner, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setenv(TERMINAL, os.ttyname(device))
    yield owner
    os.close(device)
    os.close(owner)


def _read_until(owner: int, text: str) -> str:
    """Returns what a terminal's owner reads up to a text: the kernel hands it on in pieces."""
    drawn = ""
    while text not in drawn:
        assert select.select([owner], [], [], 30)[0], f"no {text!r} after {drawn!r}"
        drawn += os.read(owner, 10_000).decode()
    return drawn


def test_a_rank_draws_on_its_launchers_terminal_and_prints_plain_lines(
    launcher: int, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(total=4, visible=True)
    progress.advance()
    progress.show(TRAIN)
    progress.show(EVAL)
    progress.close()
    drawn = _read_until(launcher, "rows/s")
    assert "\r" in drawn
    assert "1/4" in drawn
    assert "loss 0.5000, 1,000 rows/s" in drawn
    assert capsys.readouterr().out == "".join(LINES)
    assert [is_moving(line) for line in LINES] == [True, False]


def test_a_terminal_that_was_closed_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, device = pty.openpty()
    monkeypatch.setenv(TERMINAL, os.ttyname(device))
    line = terminal()
    os.close(device)
    os.close(owner)
    line.write("of nobody")
    assert terminal() is None


def test_other_ranks_and_jobs_without_a_terminal_draw_nothing(
    launcher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Progress(total=4, visible=False).advance()
    terminal().write("the end")
    assert _read_until(launcher, "the end") == "the end"
    monkeypatch.delenv(TERMINAL)
    assert terminal() is None
