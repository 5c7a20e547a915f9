"""What a machine lacks for the simulated GPU is said in one line."""

import pytest
import torch

from tests.simulated_gpu import build

pytestmark = pytest.mark.unit


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", f"{build.KNOWN[0]}.0+cpu")
    monkeypatch.setenv("CXX", "sh")
    assert build.missing() == ""
    monkeypatch.setenv("CXX", "no-compiler")
    assert "there is no 'no-compiler'" in build.missing()
    monkeypatch.setattr(torch, "__version__", "1.13.1")
    assert (
        build.missing()
        == f"the simulated GPU is for torch {build.KNOWN[0]}; this is 1.13.1"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "a machine with a GPU" in build.missing()


def test_nothing_of_it_is_in_this_process() -> None:
    assert not hasattr(torch.ops.simulated, "replay")
