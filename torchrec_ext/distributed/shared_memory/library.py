"""The compiled library of shared memory, one for each torch, source and CPU: built ahead, never when a job starts.

`python -m torchrec_ext.distributed.shared_memory.library` builds it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torchrec_ext.needs_torch  # noqa: F401

import torch

NAME = "shared_memory"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("backend.cpp", "ring.h"))
# A library for one CPU may not run on another, and a cache may lie in a home folder
# that hosts share.
_CPU = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)


class LibraryError(RuntimeError):
    """The library is not there or does not load; the message is one line, and names the remedy."""


def library_path() -> Path:
    """Returns the path at which the library of this torch, source and CPU is, once it is built."""
    digest = hashlib.sha256(
        f"{torch.__version__} {sys.implementation.cache_tag}".encode()
    )
    for source in SOURCES:
        digest.update(source.read_bytes())
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        if line.startswith(_CPU):
            digest.update(line.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torchrec_ext" / NAME / digest.hexdigest()[:16] / f"{NAME}.so"


@functools.cache
def load() -> ModuleType:
    """Imports the library.

    Raises:
        LibraryError: it is not built, or does not load.
    """
    path = library_path()
    if not path.exists():
        raise LibraryError(
            "its library is not built; build it by: python -m torchrec_ext.distributed.shared_memory.library"
        )
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise LibraryError(
            f"{path.parent} does not load ({str(error)[-50:]}); remove it, and build again"
        ) from None
    if module.torch != torch.__version__.partition("+")[0]:
        raise LibraryError(
            f"{path.parent} is of torch {module.torch}; remove it, and build again"
        )
    return module


def build() -> Path:
    """Builds the library, unless it is there, and returns its path.

    Raises:
        LibraryError: there is no compiler, or it fails.
    """
    path = library_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two installations at once build it once.
    with open(path.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path)
    return path


def compile_to(path: Path) -> None:
    """Compiles the library to a file.

    Raises:
        LibraryError: there is no compiler, or it fails.
    """
    # It imports setuptools, which a rank need not wait for.
    from torch.utils import cpp_extension

    command = [
        *shlex.split(os.environ.get("CXX") or "c++"),
        *(
            "-std=c++20",
            "-O3",
            "-march=native",
            "-fPIC",
            "-shared",
            f"-DTORCH_EXTENSION_NAME={NAME}",
        ),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(
            f"-isystem{folder}"
            for folder in (
                *cpp_extension.include_paths(),
                sysconfig.get_path("include"),
            )
        ),
        str(SOURCES[0]),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        subprocess.run(
            [*command, "-o", str(unfinished)],
            capture_output=True,
            text=True,
            check=True,
        )
    except OSError as error:
        raise LibraryError(
            f"the compiler {command[0]} does not start: {error.strerror}"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        # The first error is the cause of the others; without any, the last line says
        # most.
        why = next((line for line in lines if "error" in line), "".join(lines[-1:]))
        raise LibraryError(
            f"{command[0]} fails: {why[:150] or 'without a word'}"
        ) from None
    # A file that is there is whole.
    unfinished.replace(path)


if __name__ == "__main__":
    try:
        print(build())
    except LibraryError as error:
        sys.exit(f"error: {error}")
