"""A connection to DuckDB for each file of tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from torchrec_ext.data.preprocess.rows import connected


@pytest.fixture(scope="module")
def con() -> Iterator[Any]:
    with connected(threads=2) as opened:
        yield opened
