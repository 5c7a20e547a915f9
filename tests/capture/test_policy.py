"""Captured steps that slow down are noted once."""

from __future__ import annotations

import pytest

from torchrec_ext.capture.policy import CapturePolicy

pytestmark = pytest.mark.unit


def test_three_slow_steps_in_a_row_are_noted_once() -> None:
    notes: list[str] = []
    policy = CapturePolicy("auto", notes.append)
    policy.captured_seconds = [0.008] * 4
    for seconds in (0.2, 0.2, 0.009, 0.2, 0.2):
        policy.note_pace(seconds)
    assert notes == []
    for _ in range(7):
        policy.note_pace(0.198)
    (note,) = notes
    assert note.startswith(
        "captured steps now take 198 ms, 8 ms when measured: other work may keep the cores busy"
    )
