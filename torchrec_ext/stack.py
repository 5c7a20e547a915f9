"""The triples of torch, fbgemm and torchrec that fit, what is installed, and the one line that mends a mismatch.

What needs no TorchRec needs no triple, but a torch of TORCHES.

Standard library only: this module must answer before torch can be imported, and above all when it cannot. The three are
compiled against each other (torch 2.13 = fbgemm 1.8 = torchrec 1.8); any other mix dies inside a shared object with
`undefined symbol` or `libtorch_cuda.so: cannot open shared object file`. One mix works: fbgemm's CPU build next to the
CUDA build of torch, on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast

Variant = Literal["cpu", "cuda"]

FBGEMM_NAME: Mapping[Variant, str] = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
# What torchrec needs beside torch and fbgemm. Listed here because torchrec itself goes
# in with --no-deps: its metadata asks for the CUDA build of fbgemm on every machine.
NEEDS: Mapping[str, str | None] = {
    "tensordict": None,
    "torchmetrics": "1.0.3",
    "tqdm": None,
    "pyre-extensions": None,
}


class Triple(NamedTuple):
    """Three versions compiled against each other."""

    torch: str
    fbgemm: str
    torchrec: str


TRIPLES: Mapping[str, Triple] = {
    "2.14": Triple("2.14.1", "1.9.0", "1.9.2"),
    "2.13": Triple("2.13.0", "1.8.0", "1.8.0"),
    "2.11": Triple("2.11.0", "1.6.0", "1.6.1"),
}
"""All supported triples by their torch, newest first: what TorchRec needs."""

DEFAULTS: Mapping[Variant, Triple] = {
    "cpu": TRIPLES["2.13"],
    "cuda": TRIPLES["2.14"],
}
"""The triple of a new environment, which the extras ``sharded-cpu`` and ``sharded-cuda`` pin."""

TORCHES = ("2.11", "2.14")
"""The oldest and the newest torch for what needs no TorchRec: `adopt`, `why_slow`."""


class Installed(NamedTuple):
    """The installed builds as this environment's metadata has them; nothing is imported."""

    versions: Mapping[str, str]
    torch_build: Variant | None = None


def requirements(variant: Variant, triple: Triple) -> dict[str, str | None]:
    """Returns the version of each package of the stack, None for any, in order of installation."""
    versions: dict[str, str | None] = {
        "torch": triple.torch + ("+cpu" if variant == "cpu" else ""),
        FBGEMM_NAME[variant]: triple.fbgemm,
    }
    versions |= NEEDS
    if triple.torchrec.startswith("1.6."):
        versions["iopath"] = None
    # Last, or pip would call what comes after it missing.
    return versions | {"torchrec": triple.torchrec}


def installed_triple(current: Installed, variant: Variant) -> Triple:
    """Returns the triple of the installed torch, else the variant's."""
    return TRIPLES.get(minor(current.versions.get("torch", "")), DEFAULTS[variant])


def minor(version: str) -> str:
    """Returns the major and minor version; empty if there is none.

    Example:
        >>> minor("2.13.0+cpu"), minor("2.15.0a0+git1"), minor("nothing")
        ('2.13', '2.15', '')
    """
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in minor(version).split(".") if digits]


def _version_of(name: str) -> str | None:
    """Returns the installed version of a distribution; None if there is none, or if pip was interrupted."""
    # Costs 40 ms, so it is imported only when needed.
    from importlib import metadata

    # Metadata without a version: None, or KeyError in newer Pythons.
    with contextlib.suppress(metadata.PackageNotFoundError, KeyError):
        return metadata.version(name)
    return None


def installed() -> Installed:
    """Reads the metadata of the running interpreter's environment; nothing is imported from it."""
    from importlib import metadata

    versions: dict[str, str] = {}
    for name in ("torch", *FBGEMM_NAME.values(), "torchrec", *NEEDS, "iopath"):
        if version := _version_of(name):
            versions[name] = version
    build = None
    if "torch" in versions:
        build = torch_build(versions["torch"], metadata.requires("torch") or [])
    return Installed(versions=versions, torch_build=build)


def torch_build(version: str, requires: list[str]) -> Variant:
    """Tells a CPU build of torch from a CUDA build by its metadata.

    Example:
        >>> torch_build("2.13.0+cpu", []), torch_build("2.13.0+cu130", [])
        ('cpu', 'cuda')
        >>> torch_build("2.13.0", ["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"'])
        'cuda'
    """
    # PyTorch's own index marks its builds by a suffix: +cpu or +cu130. The public
    # registry's have none.
    _, plus, suffix = version.partition("+")
    is_cuda = suffix.startswith("cu")
    if not plus:
        is_cuda = any(line.startswith(("nvidia-", "cuda-")) for line in requires)
    return "cuda" if is_cuda else "cpu"


def gpu_nodes(dev: Path = Path("/dev")) -> list[str]:
    """Returns the NVIDIA device nodes of this machine or container; WSL has none."""
    return sorted(str(path) for path in dev.glob("nvidia[0-9]*"))


def wanted_variant(current: Installed) -> Variant:
    """Returns the environment's expected variant.

    It is that of TORCHREC_EXT_VARIANT, else the installed one if torch and fbgemm agree on it, else the machine's.
    CUDA builds work on a login node without a GPU, and CPU builds on a machine with one: only a mix is broken.

    Raises:
        ValueError: TORCHREC_EXT_VARIANT is neither cpu nor cuda.
    """
    value = os.environ.get("TORCHREC_EXT_VARIANT", "")
    if value not in ("", "cpu", "cuda"):
        raise ValueError(
            f"TORCHREC_EXT_VARIANT={value!r}: it must be cpu or cuda; unset it to let the machine decide"
        )
    if value:
        return cast(Variant, value)
    for variant, name in FBGEMM_NAME.items():
        # Both packages of fbgemm can be installed at once, which is a mix and no
        # variant.
        both = set(current.versions) & set(FBGEMM_NAME.values())
        if current.torch_build == variant and both == {name}:
            return variant
    return "cuda" if gpu_nodes() else "cpu"


def mismatches(current: Installed, variant: Variant, triple: Triple) -> dict[str, str]:
    """Returns a line about each package that does not fit a triple, by its name, in order of installation."""
    other = FBGEMM_NAME["cuda" if variant == "cpu" else "cpu"]
    wrong = {}
    for name, version in requirements(variant, triple).items():
        found = current.versions.get(name, "nothing")
        is_right = name in current.versions
        # A CPU build need not be marked +cpu, and a CUDA build is marked +cu130, for example.
        is_right &= (version or found).split("+")[0] == found.split("+")[0]
        # The CUDA build of torch runs on a CPU too. On a machine with a GPU it would put the tables there.
        if name == "torch" and current.torch_build not in (None, variant):
            is_right &= variant == "cpu" and not gpu_nodes()
            found += f" for {current.torch_build}, not {variant}"
        # Both unpack into one folder: removing one takes files of the other along.
        if name == FBGEMM_NAME[variant] and other in current.versions:
            is_right = False
            found += f" and {other}"
        if not is_right:
            wrong[name] = f"{name}: found {found}, expected {version or 'any version'}"
    return wrong


def require_torch() -> None:
    """Checks the version of torch before it is imported; `import torchrec_ext.needs_torch` calls it once per process.

    Raises:
        ImportError: torch is missing, too old or too new; the message is one line with the command that repairs it.
    """
    if _is_unchecked():
        return
    if problem := torch_problem(_version_of("torch")):
        raise ImportError(problem)


def torch_problem(version: str | None) -> str | None:
    """Returns one line about a torch outside of :data:`TORCHES`, the installed version or None; None if it is inside.

    Example:
        >>> torch_problem("2.12.1+cpu")
        >>> torch_problem("2.10.0")
        'torch 2.10.0 is installed, and torchrec_ext needs torch 2.11 to 2.14: pip install "torch>=2.11,<2.15"'
    """
    first, last = TORCHES
    if _numbers(first) <= _numbers(version or "") <= _numbers(last):
        return None
    found = f"torch {version}" if version else "no torch"
    major, minor = _numbers(last)
    return (
        f"{found} is installed, and torchrec_ext needs torch {first} to {last}: "
        f'pip install "torch>={first},<{major}.{minor + 1}"'
    )


def require() -> None:
    """Checks TorchRec's stack before it is imported; `needs_torch` calls it once per process.

    TORCHREC_EXT_UNCHECKED=1 lets a stack through that was built by hand.

    Raises:
        ImportError: TorchRec is missing, or the triple is incomplete or mixed; the message is one line.
    """
    if _is_unchecked():
        return
    current = installed()
    if line := torchrec_problem(current, wanted_variant(current)):
        raise ImportError(line)


def torchrec_problem(current: Installed, variant: Variant) -> str | None:
    """Returns one line about a stack that TorchRec cannot run on: what was found, what fits, what to run.

    Example:
        >>> torchrec_problem(Installed(versions={"torch": "2.13.0+cpu"}, torch_build="cpu"), "cpu")
        'this part of torchrec_ext needs TorchRec, which is not installed: pip install "torchrec-ext[sharded-cpu]"'
    """
    if not {"torchrec", *FBGEMM_NAME.values()} & set(current.versions):
        return (
            "this part of torchrec_ext needs TorchRec, which is not installed: "
            f'pip install "torchrec-ext[sharded-{variant}]"'
        )
    triple = installed_triple(current, variant)
    wrong = list(mismatches(current, variant, triple).values())
    if not wrong:
        return None
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}: {shlex.quote(sys.executable)} -m torchrec_ext.doctor --install"


def _is_unchecked() -> bool:
    return os.environ.get("TORCHREC_EXT_UNCHECKED") == "1"
