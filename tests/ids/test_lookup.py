"""Compiled look-ups equal eager ones to the bit, and are said."""

from __future__ import annotations

import pytest
import torch

from tests.ids.dictionary import drifting
from tests.ids.test_dynamic import _same
from torchrec_ext.capture import executors
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.ids import Dynamic, DynamicIds, lookup

POLICY = Dynamic(capacity=300, admit_after=2)


def equal_steps() -> DynamicIds:
    """Compares compiled steps with eager ones, also after the index has grown and another number of ids has come."""
    eager = DynamicIds({"users": POLICY, "items": POLICY})
    compiled = DynamicIds({"users": POLICY, "items": POLICY})
    compiled.compile_look_ups()
    for number, (users, items) in enumerate(
        drifting(12, 200, 2, catalogue=800, new=20)
    ):
        if number == 6:
            for ids in (eager, compiled):
                ids._index._rebuild(0)
        batch = {"users": users, "items": items[: 150 if number % 5 == 4 else None]}
        assert _same(eager.step(batch), compiled.step(batch))
        assert _same(eager.rows(batch), compiled.rows(batch))
    assert _same(eager.state_dict(), compiled.state_dict())
    return compiled


@pytest.mark.unit
def test_compiled_look_ups_equal_eager_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executors, "inductor", executors.as_it_is)
    ids = equal_steps()
    assert {key[0] for key in ids._look_ups._compiled} == {350, 400}
    said = capsys.readouterr().out
    assert said.startswith("ids: compiling look-ups of 400 ids (kept in ")
    assert 2 <= said.count("compiling") <= 4


@pytest.mark.slow
def test_look_ups_that_inductor_compiles_equal_eager_ones() -> None:
    equal_steps()


@pytest.mark.unit
def test_look_ups_stay_eager_without_a_compiler_and_before_it_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: torch.device) -> None:
        raise CannotCaptureError(
            "there is no C++ compiler; install g++ or clang, or name one in CXX"
        )

    ids = DynamicIds({"users": POLICY})
    batch = {"users": torch.arange(100)}
    for _ in range(5):
        ids.step(batch)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(executors, "engine_for", missing)
    monkeypatch.setattr(lookup, "compile_s", lambda: 0.0)
    ids = DynamicIds({"users": POLICY})
    for _ in range(5):
        ids.step(batch)
    said = capsys.readouterr().out
    assert (
        said
        == "ids: look-ups stay eager: there is no C++ compiler; install g++ or clang, or name one in CXX\n"
    )
