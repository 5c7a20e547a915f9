"""Diagnoses in tests are short: four rounds, four steps a turn."""

import pytest

from torchrec_ext.diagnose import loop, measure, why


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MOST_ROUNDS", loop.FEWEST_ROUNDS)
    monkeypatch.setattr(loop, "TURN_S", 0.0)
    monkeypatch.setattr(why, "LISTEN_S", 0.0)
    monkeypatch.setattr(measure, "SAMPLE_S", 0.2)
    monkeypatch.setattr(why, "_CAPTURED_S", 0.1)
