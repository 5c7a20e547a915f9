"""`python -m torchrec_ext.doctor`: is this environment healthy, and if not, which line of pip mends it?

Exit status 0 when healthy, 1 when not. `--install` runs that line first. Needs no torch to run.

The public registry's torch is the CUDA build on every Linux, gigabytes of it. For a CPU the line takes
`torch==...+cpu` from where pip looks, or else from PyTorch's own index.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence

from torchrec_ext import stack
from torchrec_ext.stack import FBGEMM_NAME, Installed, Triple, Variant

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_PYTHON = shlex.quote(sys.executable)


def repair(current: Installed, variant: Variant, triple: Triple) -> str:
    """Returns the line that mends what is installed, and leaves what fits; empty if all of it does."""
    pip = f"{_PYTHON} -m pip"
    wrong = stack.mismatches(current, variant, triple)
    pins = {}
    for name, version in stack.requirements(variant, triple).items():
        if name in wrong:
            pins[name] = f"{name}=={version}" if version else name
    steps = []
    out: list[str] = []
    if "torch" in pins and variant == "cpu":
        torch = f"{pip} install {pins.pop('torch')}+cpu"
        steps.append(f"{{ {torch} || {torch} --extra-index-url {_CPU_INDEX}; }}")
    elif "torch" in pins:
        # A CPU build of that version fits the pin, and would stay.
        out.append("torch")
    if FBGEMM_NAME[variant] in pins:
        # Both builds unpack into one folder, so neither is whole beside the other.
        out += FBGEMM_NAME.values()
    out = [name for name in out if name in current.versions]
    if out:
        steps.append(f"{pip} uninstall --yes {' '.join(out)}")
    # One call for the rest: each takes seconds.
    torchrec = pins.pop("torchrec", "")
    if pins:
        steps.append(f"{pip} install {' '.join(pins.values())}")
    if torchrec:
        # Its own dependencies name the CUDA build of fbgemm on every machine.
        steps.append(f"{pip} install --no-deps {torchrec}")
    return " && ".join(steps)


def install(line: str) -> None:
    """Runs a line of :func:`repair`; one that fails ends this process with a message."""
    # Bytecode for everything costs 40 s; the first import writes what is used.
    quick = {"PIP_QUIET": "2", "PIP_NO_COMPILE": "1"}
    if subprocess.run(line, shell=True, env=os.environ | quick, check=False).returncode:
        sys.exit(
            "doctor: pip failed, as it says above; if it has no CPU build of torch for this Python, set PIP_FIND_LINKS "
            "to a folder with the wheel"
        )
    # pip has installed packages since this process looked for some.
    importlib.invalidate_caches()


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
    last = done.stderr.strip().rpartition("\n")[2]
    print(done.stdout.strip() or f"WRONG import: {last} (status {done.returncode})")
    return not done.returncode


def main(argv: Sequence[str] | None = None) -> int:
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
    flag("--with-shared-memory", action="store_true", help="compile its library, too")
    flag("--stack", choices=stack.TRIPLES, help="another triple, by its torch")
    flag("--no-import", action="store_true", help="do not import torchrec (seconds)")
    flags = parser.parse_args(argv)
    current = stack.installed()
    try:
        variant = stack.wanted_variant(current)
    except ValueError as error:
        sys.exit(f"doctor: {error}")
    triple = stack.TRIPLES.get(flags.stack, stack.installed_triple(current, variant))
    again = f"{_PYTHON} -m torchrec_ext.doctor --install"
    if flags.install:
        torch = current.versions.get("torch", "")
        if torch and not flags.stack and stack.minor(torch) not in stack.TRIPLES:
            sys.exit(
                f"doctor: torch {torch} is installed, and there is no fbgemm for it; to replace it: {again} --stack "
                f"{stack.minor(triple.torch)}"
            )
        install(repair(current, variant, triple))
        current = stack.installed()
    if flags.with_shared_memory:
        module = "torchrec_ext.distributed.shared_memory.library"
        if subprocess.run([sys.executable, "-m", module], check=False).returncode:
            sys.exit("doctor: shared memory's library was not compiled, see above")
    print(f"python           {platform.python_version()}  {sys.executable}")
    print(f"devices          {variant}  {', '.join(stack.gpu_nodes()) or 'no GPU'}")
    wrong = stack.mismatches(current, variant, triple)
    for name in stack.requirements(variant, triple):
        if name in wrong:
            print(f"WRONG {wrong[name]}")
        else:
            print(f"{name:<16} {current.versions[name]}")
    line = repair(current, variant, triple)
    if not wrong and not flags.no_import and not probe():
        line = f"{_PYTHON} -m pip uninstall --yes torch {FBGEMM_NAME[variant]} torchrec && {again}"
    print(f"repair: {line}" if line else "healthy")
    return int(bool(line))


if __name__ == "__main__":
    sys.exit(main())
