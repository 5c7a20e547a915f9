"""Diagnoses in tests are short: four rounds, four steps a turn, no yardstick of a second, no worker for three."""

import pytest

from torchrec_ext.diagnose import why
from torchrec_ext.diagnose.experiments import batches, loop, measure, rounds


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_ROUNDS", rounds.FEWEST_ROUNDS)
    monkeypatch.setattr(loop, "TURN_S", 0.0)
    monkeypatch.setattr(batches, "_WORKER_S", 0.2)
    monkeypatch.setattr(measure, "SAMPLE_S", 0.2)
    monkeypatch.setattr(why, "_PROOF_S", 0.1)
    monkeypatch.setattr(measure, "roofline", lambda: (5e10, 1e10))
