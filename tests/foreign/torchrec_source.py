"""TorchRec's own source of the installed version, in the folder that TORCHREC_SOURCE names: its wheel lacks some tests.

Nothing of it is in this repository; `git clone --branch release/v1.8.0 https://github.com/meta-pytorch/torchrec` brings
it.
"""

import os
from pathlib import Path

import pytest
import torchrec.distributed

SOURCE = Path(os.environ.get("TORCHREC_SOURCE") or "/nonexistent")
needs_source = pytest.mark.skipif(
    not (SOURCE / "torchrec/distributed/tests").is_dir(),
    reason=f"needs the source of TorchRec {torchrec.__version__} in the folder $TORCHREC_SOURCE",
)


def add_tests() -> None:
    """Makes ``torchrec.distributed.tests`` importable; all else stays the installed package's."""
    folder = str(SOURCE / "torchrec/distributed")
    if folder not in torchrec.distributed.__path__:
        torchrec.distributed.__path__.append(folder)
