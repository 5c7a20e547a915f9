"""What every export of these tests begins with, and a small bundle."""

from pathlib import Path

import pytest

from tests import torchlib


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_functions() -> None:
    torchlib.keep()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.retrieval.small import Small  # which needs onnx

    out = tmp_path_factory.mktemp("bundles") / "bundle"
    Small().write(out)
    return out
