"""TorchRec's own source of the installed version, in the folder that TORCHREC_SOURCE names: its wheel lacks tests and examples.

Nothing of it is in this repository; `git clone --branch release/v1.8.0 https://github.com/meta-pytorch/torchrec` brings it.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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


def example(path: str) -> ModuleType:
    """The module in the file ``path`` of ``examples/``."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, SOURCE / "examples" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
