"""`python -m torchrec_ext.doctor`: is this environment healthy, and if not, which line of pip mends it?

Exit status 0 when healthy, 1 when not. `--install` runs that line first. Needs no torch to run.

The public registry's torch is the CUDA build on every Linux, gigabytes of it. For a CPU the line takes
`torch==...+cpu` from where pip looks, or else by uv, which knows PyTorch's own index.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys

from torchrec_ext import stack
from torchrec_ext.stack import (
    FBGEMM_NAME,
    TRIPLES,
    Installed,
    Triple,
    Variant,
    installed_triple,
    minor,
    mismatches,
    requirements,
    wanted_variant,
)

_PYTHON = shlex.quote(sys.executable)
_PIP = f"{_PYTHON} -m pip"
_UV = f"{_PIP} install uv && {_PYTHON} -m uv pip"


def repair(current: Installed, variant: Variant, triple: Triple) -> str:
    """Returns the command for packages that do not fit; empty if all do."""
    needs = requirements(variant, triple)
    pins = {
        name: f"{name}=={needs[name]}".removesuffix("==None")
        for name in mismatches(current, variant, triple)
    }
    steps = []
    # What does not fit goes first: a CPU build of torch fits the CUDA build's pin, and would stay.
    # Both builds of fbgemm unpack into one folder, so neither is whole beside the other.
    other = {*FBGEMM_NAME.values()} - needs.keys()
    if out := current.versions.keys() & (pins.keys() | other):
        steps.append(f"{_PIP} uninstall --yes {' '.join(sorted(out))}")
    # Its own dependencies name the CUDA build of fbgemm on every machine.
    torchrec = pins.pop("torchrec", "")
    if pins:
        # One call for the rest: each takes seconds.
        install = f"{_PIP} install {' '.join(pins.values())}"
        if variant == "cpu":
            install += f" || {{ {install.replace(_PIP, _UV)} --torch-backend cpu; }}"
        steps.append(install)
    if torchrec:
        steps.append(f"{_PIP} install --no-deps {torchrec}")
    return " && ".join(steps)


def run(line: str) -> None:
    """Runs lines of the shell; one that fails ends this process with a message."""
    # Bytecode for everything costs 40 s; the first import writes what is used.
    os.environ |= {"PIP_QUIET": "2", "PIP_NO_COMPILE": "1"}
    if subprocess.call(line, shell=True):
        sys.exit(
            "doctor: this failed, as it says above; if pip has no CPU build of torch for this Python, set "
            "PIP_FIND_LINKS to a folder with the wheel"
        )


# Run as a separate process, because a mixed triple may end it without an exception. To take
# torch down in order would cost half a second.
_PROBE = """
import os, sys, time
start = time.perf_counter()
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
table = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=4, feature_names=["f"])
bags = EmbeddingBagCollection(tables=[table], device=device)
with torch.no_grad():
    bags.embedding_bags["t"].weight.copy_(torch.arange(8.0).reshape(4, 2))
ids = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 3]), lengths=torch.tensor([2]))
answer = bags(ids.to(device)).values()[0].tolist()
if answer != [8.0, 10.0]:
    sys.exit(f"a look-up gave {answer} instead of [8.0, 10.0]")
print(f"import           the triple imports and looks rows up, {time.perf_counter() - start:.1f} s")
shared = "ready: ranks of one host use it in place of sockets"
try:
    from torchrec_ext.distributed.shared_memory import library
    library.load()
except (ImportError, RuntimeError) as error:
    shared = error
print(f"shared memory    {shared}", flush=True)
os._exit(0)
"""


def probe() -> bool:
    """Imports the triple in another process and looks a row up; prints how that went, and returns whether it did."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False
    )
    *_, last = done.stderr.splitlines() or [""]
    print(done.stdout.strip() or f"WRONG import: {last} (status {done.returncode})")
    return not done.returncode


def main(argv: list[str] | None = None) -> int:
    """Parses the flags, installs if asked, and prints the report.

    Returns:
        0 when healthy, 1 when not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_ext.doctor",
        description="Checks torch, fbgemm and torchrec, and prints the line that repairs them.",
    )
    flag = parser.add_argument
    flag("--install", action="store_true", help="run that line first")
    flag("--stack", choices=TRIPLES, help="another triple, by its torch")
    flags = parser.parse_args(argv)
    current = stack.installed()
    try:
        variant = wanted_variant(current)
    except ValueError as error:
        sys.exit(f"doctor: {error}")
    triple = TRIPLES.get(flags.stack, installed_triple(current, variant))
    again = f"{_PYTHON} -m torchrec_ext.doctor --install --stack {minor(triple.torch)}"
    if flags.install:
        torch = current.versions.get("torch", triple.torch)
        if not flags.stack and minor(torch) not in TRIPLES:
            sys.exit(
                f"doctor: torch {torch} is installed, and there is no fbgemm for it; to replace it: {again}"
            )
        run(repair(current, variant, triple))
    current = stack.installed()
    print("python          ", platform.python_version(), sys.executable)
    print("devices         ", variant, ", ".join(stack.gpu_nodes()) or "no GPU")
    for name, version in current.versions.items():
        print(f"{name:<16}", version)
    for wrong in mismatches(current, variant, triple).values():
        print(f"WRONG {wrong}")
    line = repair(current, variant, triple)
    if not (line or probe()):
        line = (
            f"{_PIP} uninstall --yes torch {FBGEMM_NAME[variant]} torchrec && {again}"
        )
    print(f"repair: {line}" if line else "healthy")
    return bool(line)


if __name__ == "__main__":
    sys.exit(main())
