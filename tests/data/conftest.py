from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.sets import load_dataset


@pytest.fixture(scope="session")
def ml_100k_folder() -> Path:
    """The folder with the real set's parquet files."""
    root = os.environ.get("TORCHREC_EXT_DATA")
    folder = Path(root or "") / "ml-100k"
    if not root or not (folder / "inter.parquet").exists():
        pytest.skip(
            "needs MovieLens 100K: set TORCHREC_EXT_DATA to a folder with ml-100k/inter.parquet"
        )
    return folder


@pytest.fixture(scope="session")
def ml_100k(ml_100k_folder: Path) -> Prepared:
    return load_dataset("ml-100k", folder=str(ml_100k_folder.parent))
