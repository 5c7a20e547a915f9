"""`python -m torchrec_ext.doctor`: is this environment healthy, and if not, which one line mends it?

Exit status 0 when healthy, 1 when not. `--install` runs that line, `--with-shared-memory` compiles the library of
shared memory between ranks. Needs no torch to run.

Its one hard part is torch without CUDA: the public registry's torch is the CUDA build on every Linux, gigabytes of it.
On a CPU machine the doctor takes `torch==...+cpu` from where the user's pip looks, or else from PyTorch's own index.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from torchrec_ext import stack
from torchrec_ext.stack import Triple, Variant

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


class InstallError(RuntimeError):
    """The installation cannot continue; the message names a remedy."""


def run(what: str, command: Sequence[str]) -> None:
    """Runs a command, silently when it succeeds.

    Raises:
        InstallError: the command failed; the message is the last line of its output that names an error.
    """
    print(f"  {what} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        named = [line for line in lines if line.lower().startswith("error")]
        raise InstallError(f"{what}: {(named or lines)[-1].strip()}")


def pip(*words: str) -> None:
    """Runs pip.

    Raises:
        InstallError: see :func:`run`.
    """
    # Bytecode for everything costs 40 s; the first import writes what is used.
    quiet = ["--quiet", "--no-compile"] if words[0] == "install" else ["--quiet"]
    run(" ".join(words), [*PIP, words[0], *quiet, *words[1:]])


def install(variant: Variant, named: Triple | None = None) -> None:
    """Installs a triple of ``variant`` into the environment; packages that fit stay as they are.

    Args:
        variant: the builds to install.
        named: the triple to install; by default the one that is there in part, or else the variant's.

    Raises:
        InstallError: a step failed; the message says why and what to do.
    """
    current = stack.installed()
    if named is None and (newer := stack.newer_torch(current)):
        line = stack.doctor_line(stack.DEFAULTS[variant])
        raise InstallError(
            f"torch {newer} is installed, and there is no fbgemm for it; to replace it: {line}"
        )
    triple = named or stack.installed_triple(current, variant)
    wrong = stack.mismatches(current, variant, triple)
    out = []
    if stack.FBGEMM_NAME[variant] in wrong:
        # Both builds unpack into one folder, so neither is whole beside the other.
        out = [name for name in stack.FBGEMM_NAME.values() if name in current.versions]
    if "torch" in wrong and variant == "cpu":
        _install_cpu_torch(f"torch=={triple.torch}")
    elif "torch" in wrong and current.torch_build == "cpu":
        # pip would keep the CPU build, whose version is the same but for a suffix.
        out.append("torch")
    if out:
        pip("uninstall", "--yes", *out)
    pins = stack.requirements(variant, triple)
    added = []
    for name in wrong:
        if name != "torchrec":
            added.append(f"{name}=={pins[name]}" if pins[name] else name)
    if added:
        pip("install", *added)
    if "torchrec" in wrong:
        # Its own dependencies name the CUDA build of fbgemm on every machine.
        pip("install", "--no-deps", f"torchrec=={triple.torchrec}")


def _install_cpu_torch(torch: str) -> None:
    """Installs the CPU build of a version of torch, from where pip looks or else from PyTorch's own index."""
    try:
        return pip("install", f"{torch}+cpu")
    except InstallError as error:
        reason = str(error)
    try:
        pip("install", f"{torch}+cpu", "--extra-index-url", _CPU_INDEX)
    except InstallError:
        raise InstallError(
            f"no CPU build of {torch} for Python {platform.python_version()} ({reason}); put its wheel from PyTorch's "
            "Get Started page into a folder and set PIP_FIND_LINKS to that folder"
        ) from None


def report(triple: Triple, variant: Variant) -> list[str]:
    """Returns a line for each part of this environment."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    compiler = next(filter(None, map(shutil.which, filter(None, names))), None)
    gpus = stack.gpu_nodes()
    lines = [
        f"python           {platform.python_version()}  {sys.executable}",
        f"devices          {variant}  {', '.join(gpus) or 'no GPU'}",
        f"C++              {compiler or 'none: torch.compile needs one (apt install g++)'}",
    ]
    versions = stack.installed().versions
    for name, expected in stack.requirements(variant, triple).items():
        found = versions.get(name, "nothing")
        lines.append(f"{name:<16} {found}  (expected {expected or 'any version'})")
    if variant == "cpu" and gpus:
        lines.append(
            "note             the cpu builds leave the GPU idle; to change that: TORCHREC_EXT_VARIANT=cuda "
            f"{stack.doctor_line()}"
        )
    return lines


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


def probe() -> tuple[bool, str]:
    """Imports the triple in another process and looks a row up; returns whether it could, and its output."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        # pip installs without bytecode: the first import writes what is needed of it.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return True, done.stdout.strip()
    last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
    return False, f"import: {last} (status {done.returncode})"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, installs if asked, prints the report.

    Returns:
        0 when healthy, 1 when not, 2 for a wrong flag.
    """
    flags = _parser().parse_args(argv)
    try:
        named = stack.triple_by_name(flags.stack) if flags.stack else None
        if flags.install:
            variant = stack.wanted_variant(stack.installed())
            print(f"installing for {variant} into {sys.prefix}", file=sys.stderr)
            install(variant, named)
            if flags.editable:
                pip("install", "--editable", flags.editable)
            # pip has installed packages since this process looked for some.
            importlib.invalidate_caches()
        if flags.with_shared_memory:
            library = "torchrec_ext.distributed.shared_memory.library"
            run("shared memory between ranks", [sys.executable, "-m", library])
        current = stack.installed()
        variant = stack.wanted_variant(current)
    except (InstallError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    triple = named or stack.installed_triple(current, variant)
    print(*report(triple, variant), sep="\n")
    wrong = list(stack.mismatches(current, variant, triple).values())
    line = stack.doctor_line(named)
    if not wrong and flags.really_import:
        healthy, found = probe()
        if healthy:
            print(found)
        else:
            wrong = [found]
            names = f"torch {stack.FBGEMM_NAME[variant]} torchrec"
            line = f"{stack.interpreter()} -m pip uninstall -y {names} && {line}"
    for each in wrong:
        print(f"WRONG {each}")
    print(f"repair: {line}" if wrong else "healthy")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_ext.doctor",
        description="Checks and repairs torch, fbgemm, torchrec.",
    )
    flag = parser.add_argument
    flag("--install", action="store_true", help="install or repair the triple first")
    names = ", ".join(each.name for each in stack.TRIPLES)
    flag("--stack", metavar="TORCH", help=f"the triple by its torch: {names}")
    flag("--editable", metavar="DIR", help="with --install: this folder too: '.[dev]'")
    flag(
        "--with-shared-memory",
        action="store_true",
        help="also compile shared memory between ranks of one host, half a minute",
    )
    flag(
        "--import",
        dest="really_import",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="import the triple in a process of its own and look a row up (seconds)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
