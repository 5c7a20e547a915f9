"""What every export of these tests begins with."""

import pytest

from tests import torchlib


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_functions() -> None:
    torchlib.keep()
