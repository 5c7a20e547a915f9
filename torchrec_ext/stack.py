"""The pinned triple torch, fbgemm and torchrec: the builds that belong together, what is installed, how to repair it.

Standard library only: this module must answer before torch can be imported, and above all when it cannot. The three are
compiled against each other (torch 2.13 = fbgemm 1.8 = torchrec 1.8); any other mix dies inside a shared object with
`undefined symbol` or `libtorch_cuda.so: cannot open shared object file`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

Variant = Literal["cpu", "cuda"]

TORCH, FBGEMM, TORCHREC = "2.13.0", "1.8.0", "1.8.0"
FBGEMM_NAME: Mapping[Variant, str] = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
# What torchrec needs beside torch and fbgemm. Listed here because torchrec itself goes in with --no-deps: its metadata
# asks for the CUDA build of fbgemm on every machine.
NEEDS: Mapping[str, str | None] = {"tensordict": None, "torchmetrics": "1.0.3", "tqdm": None, "pyre-extensions": None}
NEEDS_THAT_PULL_TORCH = frozenset({"tensordict", "torchmetrics"})
PYTHONS = ((3, 10), (3, 13))
_BUILD: Mapping[Variant, str] = {"cpu": "CPU build", "cuda": "CUDA build"}
UNREADABLE = "unreadable metadata"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One distribution of the stack and the version it must have (None: any)."""

    name: str
    version: str | None

    @property
    def pin(self) -> str:
        """The requirement in the form that pip takes.

        Example:
            >>> Requirement(name="torchrec", version="1.8.0").pin
            'torchrec==1.8.0'
        """
        return f"{self.name}=={self.version}" if self.version else self.name


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The installed builds as this environment's metadata has them; nothing is imported."""

    versions: Mapping[str, str]
    torch_build: Variant | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mismatch: its subject, the installed and the expected build, and the one line that repairs it."""

    what: str
    found: str
    expected: str
    repair: str

    def __str__(self) -> str:
        """Returns two lines: the mismatch, then the repair."""
        return f"{self.what}: found {self.found}, expected {self.expected}\n    repair: {self.repair}"


def requirements(variant: Variant) -> tuple[Requirement, ...]:
    """Returns the whole stack for one variant, in the order in which it can be installed."""
    triple = {"torch": TORCH, FBGEMM_NAME[variant]: FBGEMM, "torchrec": TORCHREC}
    return tuple(Requirement(name=name, version=version) for name, version in (triple | dict(NEEDS)).items())


def installed() -> Installed:
    """Reads the metadata of the running interpreter's environment; nothing is imported from it."""
    from importlib import metadata  # costs 40 ms, so only when asked

    names = ["torch", *FBGEMM_NAME.values(), "torchrec", *NEEDS]
    versions: dict[str, str] = {}
    for name in names:
        try:
            # An interrupted pip leaves metadata without a version: None, or KeyError in newer Pythons.
            versions[name] = metadata.version(name) or UNREADABLE
        except metadata.PackageNotFoundError:
            continue
        except KeyError:
            versions[name] = UNREADABLE
    readable = versions.get("torch", UNREADABLE) != UNREADABLE
    build = torch_build(versions["torch"], metadata.requires("torch") or []) if readable else None
    return Installed(versions=versions, torch_build=build)


def torch_build(version: str, requires: list[str]) -> Variant:
    """Tells a CPU build of torch from a CUDA build by its metadata.

    Example:
        >>> torch_build("2.13.0+cpu", []), torch_build("2.13.0+cu130", [])
        ('cpu', 'cuda')
        >>> torch_build("2.13.0", ["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"'])
        'cuda'
    """
    if "+" in version:
        return "cuda" if version.partition("+")[2].startswith("cu") else "cpu"
    return "cuda" if any(line.startswith(("nvidia-", "cuda-")) for line in requires) else "cpu"


def gpu_nodes(dev: Path = Path("/dev")) -> list[str]:
    """Returns the NVIDIA device nodes of this machine or container; under WSL, which has none, the shared one."""
    nodes = sorted(str(path) for path in dev.glob("nvidia[0-9]*"))
    if not nodes and (dev / "dxg").exists() and shutil.which("nvidia-smi"):
        return [str(dev / "dxg")]
    return nodes


def asked_variant() -> Variant | None:
    """Returns the variant named by TORCHREC_EXT_VARIANT, or None when it is not set.

    Raises:
        ValueError: the variable holds anything but cpu or cuda.
    """
    value = os.environ.get("TORCHREC_EXT_VARIANT", "")
    if value not in ("", "cpu", "cuda"):
        raise ValueError(
            f"TORCHREC_EXT_VARIANT={value!r}: it must be cpu or cuda; unset it to let the machine decide (an NVIDIA "
            "GPU in sight means cuda)"
        )
    return cast(Variant, value) if value else None


def wanted_variant(current: Installed, machine: Variant) -> Variant:
    """Returns the variant that the environment should have.

    It is the requested one, else the installed one if torch and fbgemm agree on it, else the machine's. CUDA builds
    work on a login node without a GPU, and CPU builds on a machine with one: only a mix is broken.
    """
    if asked := asked_variant():
        return asked
    for variant, name in FBGEMM_NAME.items():
        if current.torch_build == variant and set(current.versions) & set(FBGEMM_NAME.values()) == {name}:
            return variant
    return machine


def machine_variant() -> Variant:
    """Returns the variant that fits the hardware: cuda when there is an NVIDIA device."""
    return "cuda" if gpu_nodes() else "cpu"


def problems(current: Installed, variant: Variant, python: str = "python") -> tuple[Problem, ...]:
    """Compares what is installed with the triple, in the order in which to repair it; empty when healthy.

    Args:
        current: the environment's metadata, see `installed`.
        variant: the expected builds, see `wanted_variant`.
        python: name of the interpreter in the repair lines.
    """
    torch, fbgemm, *rest = requirements(variant)
    candidates = [_torch_problem(current, torch, variant, python), _fbgemm_problem(current, fbgemm, variant, python)]
    for need in rest:
        # Installed before torch, these would pull the registry's torch: gigabytes of CUDA packages.
        by_doctor = candidates[0] is not None and need.name in NEEDS_THAT_PULL_TORCH
        candidates.append(_plain_problem(current, need, python, by_doctor=by_doctor))
    return tuple(problem for problem in candidates if problem)


def _torch_problem(current: Installed, torch: Requirement, variant: Variant, python: str) -> Problem | None:
    version = current.versions.get("torch")
    if version and version.partition("+")[0] == torch.version and current.torch_build == variant:
        return None
    here = f"{version} ({_BUILD[current.torch_build]})" if version and current.torch_build else version or "nothing"
    # Never a plain `pip install torch`: on a CPU machine it takes the CUDA build, and beside a CPU build it does
    # nothing.
    return Problem(
        what="torch", found=here, expected=f"{torch.version} ({_BUILD[variant]})", repair=doctor_line(python)
    )


def _fbgemm_problem(current: Installed, fbgemm: Requirement, variant: Variant, python: str) -> Problem | None:
    other = FBGEMM_NAME["cuda" if variant == "cpu" else "cpu"]
    if other not in current.versions:
        return _plain_problem(current, fbgemm, python)
    # Both unpack into the same folder `fbgemm_gpu`: removing one takes files of the other along.
    repair = f"{python} -m pip uninstall -y {other} && {python} -m pip install --force-reinstall --no-deps {fbgemm.pin}"
    version = current.versions.get(fbgemm.name)
    here = f"{other} {current.versions[other]}" + (f" laid over {fbgemm.name} {version}" if version else "")
    return Problem(what=fbgemm.name, found=here, expected=f"{fbgemm.version} alone", repair=repair)


def _plain_problem(current: Installed, need: Requirement, python: str, *, by_doctor: bool = False) -> Problem | None:
    version = current.versions.get(need.name)
    if version and version != UNREADABLE and need.version in (None, version.partition("+")[0]):
        return None
    no_deps = "--no-deps " if need.name == "torchrec" else ""
    force = "--force-reinstall " if version == UNREADABLE else ""
    repair = f"{python} -m pip install {force}{no_deps}{need.pin}"
    if by_doctor:
        repair = doctor_line(python)
    return Problem(what=need.name, found=version or "nothing", expected=need.version or "any version", repair=repair)


def doctor_line(python: str) -> str:
    """Returns the command that repairs everything, in an order and from sources that work."""
    asked = asked_variant()
    return (f"TORCHREC_EXT_VARIANT={asked} " if asked else "") + f"{python} -m torchrec_ext.doctor --install"


def interpreter() -> str:
    """Returns the running interpreter as a user in this folder would type it."""
    here = Path(sys.executable)
    return shlex.quote(str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here))


def require() -> None:
    """Checks the stack before torch is imported; `import torchrec_ext.needs_torch` calls it once per process.

    TORCHREC_EXT_UNCHECKED=1 lets a stack through that was built by hand.

    Raises:
        ImportError: the triple is incomplete or mixed; the message holds each mismatch and the line that repairs it.
    """
    if os.environ.get("TORCHREC_EXT_UNCHECKED") == "1":
        return
    current = installed()
    variant = wanted_variant(current, machine_variant())
    if wrong := problems(current, variant, interpreter()):
        raise ImportError(message(wrong, variant, interpreter()))


def message(wrong: tuple[Problem, ...], variant: Variant, python: str) -> str:
    """Returns the message of `require`: every mismatch with its repair, and the one command that repairs them all."""
    triple = ", ".join(need.pin for need in requirements(variant)[:3])
    lines = [f"torchrec_ext needs {triple}, built for each other; this environment differs:"]
    lines += [f"  {problem}" for problem in wrong]
    lines += [f"  all at once: {doctor_line(python)}"]
    lines += ["  a stack you built yourself: TORCHREC_EXT_UNCHECKED=1 skips this check"]
    return "\n".join(lines)
