"""Compiles the simulated GPU, and gives the environment of a process that has it."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

# Versions whose dispatcher, hooks and torch.cuda the simulation was checked with.
KNOWN = ("2.13",)
SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]


def missing() -> str:
    """Says why there can be no simulated GPU here; empty if there can."""
    version = torch.__version__.split("+")[0].rpartition(".")[0]
    if torch.cuda.is_available():
        return "the simulated GPU is not used on a machine with a GPU: the tests marked gpu run on that"
    if version not in KNOWN:
        return f"the simulated GPU is for torch {', '.join(KNOWN)}; this is {torch.__version__}"
    if shutil.which(compiler()) is None:
        return (
            f"the simulated GPU needs a C++ compiler, and there is no '{compiler()}': "
            "install g++, or name one in CXX"
        )
    return ""


def compiler() -> str:
    """Returns the C++ compiler."""
    return os.environ.get("CXX", "g++")


def library() -> Path:
    """Returns the compiled device, from the user's cache if source and torch are the same."""
    source = SITE / "device.cpp"
    # It finds torch's libraries by their path, which goes with an environment.
    place = os.fsencode(torch.__file__)
    key = hashlib.sha256(source.read_bytes() + place).hexdigest()[:12]
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "torchrec_ext/simulated_gpu"
    )
    target = cache / f"torch-{torch.__version__}-{key}.so"
    cache.mkdir(parents=True, exist_ok=True)
    # One of several test workers compiles, the others wait for it.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    headers = [
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
    ]
    libraries = torch_folder / "lib"
    part = target.with_suffix(".part")
    command = [
        compiler(),
        "-std=c++20",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        "-DAT_PER_OPERATOR_HEADERS",
        str(source),
    ]
    command += [
        *(f"-I{folder}" for folder in headers),
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
    ]
    command += ["-ltorch_cpu", "-lc10", "-o", str(part)]
    subprocess.run(command, check=True, timeout=600)
    part.rename(target)


def environment(gpus: int) -> dict[str, str]:
    """Returns the environment of a process, and those that it starts, with simulated GPUs."""
    path = os.pathsep.join(
        [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {
        **os.environ,
        "PYTHONPATH": path,
        "SIMULATED_GPU_LIBRARY": str(library()),
        "SIMULATED_GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
    }
