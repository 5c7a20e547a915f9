"""What every test of a command begins with."""

import pytest
from torchx.cli import argparse_util

from tests import torchlib


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_functions() -> None:
    torchlib.keep()


@pytest.fixture(autouse=True)
def _flags_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchX counts a flag once in a process: without this a test that gives `-s` refuses the next one's."""
    for action in (argparse_util.torchxconfig, argparse_util.ArgOnceAction):
        # newer releases have none
        monkeypatch.setattr(action, "called_args", set(), raising=False)
