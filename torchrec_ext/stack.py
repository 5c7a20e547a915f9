"""The pinned triples of torch, fbgemm and torchrec: matching builds, installed builds, and how to repair a mismatch.

What needs no TorchRec needs no triple, but a torch of TORCHES.

Standard library only: this module must answer before torch can be imported, and above all when it cannot. The three are
compiled against each other (torch 2.13 = fbgemm 1.8 = torchrec 1.8); any other mix dies inside a shared object with
`undefined symbol` or `libtorch_cuda.so: cannot open shared object file`. One mix works: fbgemm's CPU build next to the
CUDA build of torch, on a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

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
NEEDS_THAT_PULL_TORCH = frozenset({"tensordict", "torchmetrics"})
PYTHONS = ((3, 10), (3, 13))
_BUILD: Mapping[Variant, str] = {"cpu": "CPU build", "cuda": "CUDA build"}
UNREADABLE = "unreadable metadata"


@dataclass(frozen=True, kw_only=True)
class Triple:
    """Three versions compiled against each other."""

    torch: str
    fbgemm: str
    torchrec: str

    @property
    def name(self) -> str:
        """The triple's name for ``--stack``: torch's major and minor version.

        Example:
            >>> Triple(torch="2.13.0", fbgemm="1.8.0", torchrec="1.8.0").name
            '2.13'
        """
        return _minor(self.torch)


TRIPLES = (
    Triple(torch="2.14.1", fbgemm="1.9.0", torchrec="1.9.2"),
    Triple(torch="2.13.0", fbgemm="1.8.0", torchrec="1.8.0"),
)
"""All supported triples, newest first: what TorchRec needs."""

TORCHES = ("2.11", "2.14")
"""The oldest and the newest torch for what needs no TorchRec: `adopt`, `why_slow`."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One distribution of the stack and the version it must have (None: any)."""

    name: str
    version: str | None

    @property
    def pin(self) -> str:
        """The requirement in pip's form.

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


def requirements(variant: Variant, triple: Triple) -> tuple[Requirement, ...]:
    """Returns the whole stack for one variant, in order of installation."""
    versions: dict[str, str | None] = {
        "torch": triple.torch,
        FBGEMM_NAME[variant]: triple.fbgemm,
    }
    versions |= {"torchrec": triple.torchrec, **NEEDS}
    return tuple(
        Requirement(name=name, version=version) for name, version in versions.items()
    )


def triple_by_name(name: str) -> Triple:
    """Returns the triple named by ``--stack``.

    Raises:
        ValueError: no triple has that name.

    Example:
        >>> triple_by_name("2.15")
        Traceback (most recent call last):
        ValueError: --stack 2.15: there is no fbgemm for torch 2.15; choose 2.14 (fbgemm 1.9.0) or 2.13 (fbgemm 1.8.0)
    """
    for triple in TRIPLES:
        if triple.name == name:
            return triple
    choices = " or ".join(
        f"{triple.name} (fbgemm {triple.fbgemm})" for triple in TRIPLES
    )
    raise ValueError(
        f"--stack {name}: there is no fbgemm for torch {name}; choose {choices}"
    )


def installed_triple(current: Installed) -> Triple | None:
    """Returns the triple of most of the installed versions, torch's if in doubt; None if none fits."""
    best = max(TRIPLES, key=lambda triple: _agreement(current, triple))
    return best if any(_agreement(current, best)) else None


def _agreement(current: Installed, triple: Triple) -> tuple[int, bool]:
    """Returns how many of the three have the triple's minor version, and whether torch has."""
    expected = {"torch": triple.torch, "torchrec": triple.torchrec}
    expected |= dict.fromkeys(FBGEMM_NAME.values(), triple.fbgemm)
    equal = [
        name
        for name, version in expected.items()
        if _minor(current.versions.get(name, "")) == _minor(version)
    ]
    return len(equal), "torch" in equal


def _minor(version: str) -> str:
    """Returns the major and minor version; empty if there is none.

    Example:
        >>> _minor("2.13.0+cpu"), _minor("2.15.0a0+git1"), _minor("unreadable metadata")
        ('2.13', '2.15', '')
    """
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def newer_torch(current: Installed) -> str | None:
    """Returns the installed version of torch if it is newer than every triple's: no fbgemm is known for it."""
    version = current.versions.get("torch", "")
    return version if _numbers(_minor(version)) > _numbers(TRIPLES[0].name) else None


def _numbers(minor: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", minor)]


def _version_of(name: str) -> str | None:
    """Returns the installed version of a distribution; None if there is none."""
    # Costs 40 ms, so it is imported only when needed.
    from importlib import metadata

    try:
        # An interrupted pip leaves metadata without a version: None, or KeyError in
        # newer Pythons.
        return metadata.version(name) or UNREADABLE
    except metadata.PackageNotFoundError:
        return None
    except KeyError:
        return UNREADABLE


def installed() -> Installed:
    """Reads the metadata of the running interpreter's environment; nothing is imported from it."""
    from importlib import metadata

    names = ["torch", *FBGEMM_NAME.values(), "torchrec", *NEEDS]
    versions: dict[str, str] = {}
    for name in names:
        if version := _version_of(name):
            versions[name] = version
    build = None
    if versions.get("torch", UNREADABLE) != UNREADABLE:
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
    """Returns the NVIDIA device nodes of this machine or container; under WSL, without such nodes, the shared one."""
    nodes = sorted(str(path) for path in dev.glob("nvidia[0-9]*"))
    # WSL has /dev/dxg for a GPU of any make; only NVIDIA's comes with nvidia-smi.
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
    """Returns the environment's expected variant.

    It is the requested one, else the installed one if torch and fbgemm agree on it, else the machine's. CUDA builds
    work on a login node without a GPU, and CPU builds on a machine with one: only a mix is broken.
    """
    if requested := asked_variant():
        return requested
    for variant, name in FBGEMM_NAME.items():
        # Both packages of fbgemm can be installed at once, which is a mix and no
        # variant.
        if current.torch_build == variant and set(current.versions) & set(
            FBGEMM_NAME.values()
        ) == {name}:
            return variant
    return machine


def machine_variant() -> Variant:
    """Returns the variant for the hardware: cuda when there is an NVIDIA device."""
    return "cuda" if gpu_nodes() else "cpu"


def problems(
    current: Installed,
    variant: Variant,
    python: str = "python",
    named: Triple | None = None,
) -> tuple[Problem, ...]:
    """Compares the installed builds with a triple, in order of repair; empty when healthy.

    Args:
        current: the environment's metadata, see `installed`.
        variant: the expected builds, see `wanted_variant`.
        python: name of the interpreter in the repair lines.
        named: the expected triple; by default the installed one, or the newest if none is.
    """
    triple = named or installed_triple(current)
    by_doctor = doctor_line(python, _stack_to_name(current, named))
    torch, fbgemm, *rest = requirements(variant, triple or TRIPLES[0])
    candidates = [
        _torch_problem(current, torch, variant, by_doctor),
        _fbgemm_problem(current, fbgemm, variant, python),
    ]
    candidates += [_plain_problem(current, need, python) for need in rest]
    # Installed before torch, some would pull the registry's torch: gigabytes of CUDA
    # packages. And if no triple is chosen yet, the doctor chooses one that this machine
    # can have.
    left_to_doctor = set(NEEDS_THAT_PULL_TORCH)
    if triple is None:
        left_to_doctor |= {fbgemm.name, "torchrec"}
    torch_is_wrong = candidates[0] is not None
    result = []
    for problem in candidates:
        if problem is None:
            continue
        if torch_is_wrong and problem.what in left_to_doctor:
            problem = replace(problem, repair=by_doctor)
        result.append(problem)
    return tuple(result)


def _stack_to_name(current: Installed, requested: Triple | None) -> Triple | None:
    """Returns the triple to name in a repair: the requested one, or any in place of a torch without an fbgemm."""
    if requested or not newer_torch(current):
        return requested
    return installed_triple(current) or TRIPLES[0]


def torch_fits(current: Installed, variant: Variant) -> bool:
    """Whether the installed build of torch works with this variant's build of fbgemm.

    The CUDA build of torch runs on a CPU too, next to fbgemm's CPU build. It is no fault unless the CPU was asked for:
    on a machine with a GPU such a torch would put the tables there.
    """
    if current.torch_build == variant:
        return True
    beside_cuda = FBGEMM_NAME["cuda"] in current.versions
    return current.torch_build == "cuda" and not beside_cuda and asked_variant() is None


def _torch_problem(
    current: Installed, torch: Requirement, variant: Variant, by_doctor: str
) -> Problem | None:
    version = current.versions.get("torch")
    if (
        version
        and version.partition("+")[0] == torch.version
        and torch_fits(current, variant)
    ):
        return None
    here = version or "nothing"
    if version and current.torch_build:
        here = f"{version} ({_BUILD[current.torch_build]})"
    # Never a plain `pip install torch`: on a CPU machine it takes the CUDA build, and
    # beside a CPU build it does nothing.
    return Problem(
        what="torch",
        found=here,
        expected=f"{torch.version} ({_BUILD[variant]})",
        repair=by_doctor,
    )


def _fbgemm_problem(
    current: Installed, fbgemm: Requirement, variant: Variant, python: str
) -> Problem | None:
    other = FBGEMM_NAME["cuda" if variant == "cpu" else "cpu"]
    if other not in current.versions:
        return _plain_problem(current, fbgemm, python)
    # Both unpack into the same folder `fbgemm_gpu`: removing one takes files of the
    # other along.
    repair = f"{python} -m pip uninstall -y {other} && {python} -m pip install --force-reinstall --no-deps {fbgemm.pin}"
    version = current.versions.get(fbgemm.name)
    here = f"{other} {current.versions[other]}"
    if version:
        here += f" laid over {fbgemm.name} {version}"
    return Problem(
        what=fbgemm.name, found=here, expected=f"{fbgemm.version} alone", repair=repair
    )


def _plain_problem(
    current: Installed, need: Requirement, python: str
) -> Problem | None:
    version = current.versions.get(need.name)
    if (
        version
        and version != UNREADABLE
        and need.version in (None, version.partition("+")[0])
    ):
        return None
    no_deps = "--no-deps " if need.name == "torchrec" else ""
    force = "--force-reinstall " if version == UNREADABLE else ""
    repair = f"{python} -m pip install {force}{no_deps}{need.pin}"
    return Problem(
        what=need.name,
        found=version or "nothing",
        expected=need.version or "any version",
        repair=repair,
    )


def doctor_line(python: str, named: Triple | None = None) -> str:
    """Returns the command to repair everything, in a working order and from working sources."""
    requested = asked_variant()
    line = f"{python} -m torchrec_ext.doctor --install"
    if requested:
        line = f"TORCHREC_EXT_VARIANT={requested} {line}"
    return f"{line} --stack {named.name}" if named else line


def interpreter() -> str:
    """Returns the running interpreter as a user in this folder would type it."""
    path = Path(sys.executable)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


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
    minor = _numbers(_minor(version or ""))
    if _numbers(first) <= minor <= _numbers(last):
        return None
    found = f"torch {version}" if version else "no torch"
    above = ".".join(map(str, [*_numbers(last)[:-1], _numbers(last)[-1] + 1]))
    return (
        f"{found} is installed, and torchrec_ext needs torch {first} to {last}: "
        f'pip install "torch>={first},<{above}"'
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
    variant = wanted_variant(current, machine_variant())
    if line := torchrec_problem(current, variant, interpreter()):
        raise ImportError(line)


def torchrec_problem(
    current: Installed, variant: Variant, python: str = "python"
) -> str | None:
    """Returns one line about a stack that TorchRec cannot run on: what was found, what fits, what to run.

    Example:
        >>> torchrec_problem(Installed(versions={"torch": "2.13.0+cpu"}, torch_build="cpu"), "cpu")
        'this part of torchrec_ext needs TorchRec, which is not installed: pip install "torchrec-ext[sharded-cpu]"'
    """
    if not {"torchrec", *FBGEMM_NAME.values()} & set(current.versions):
        return (
            "this part of torchrec_ext needs TorchRec, which is not installed: "
            f'pip install "{extra(variant)}"'
        )
    wrong = problems(current, variant, python)
    if not wrong:
        return None
    # Several commands have an order, which the doctor knows.
    repair = doctor_line(python, _stack_to_name(current, None))
    if len(wrong) == 1 and wrong[0].what != "torch":
        problem = wrong[0]
        if "&&" not in problem.repair:
            repair = problem.repair
        beside = f"torch {current.versions.get('torch')}"
        return f"{problem.what}: found {problem.found}, beside {beside} must be {problem.expected}: {repair}"
    triple = installed_triple(current) or TRIPLES[0]
    three = ("torch", *FBGEMM_NAME.values(), "torchrec")
    found = [
        f"{name} {version}"
        for name, version in current.versions.items()
        if name in three
    ]
    fits = [need.pin for need in requirements(variant, triple)[:3]]
    return f"found {', '.join(found)}; what fits is {', '.join(fits)}: {repair}"


def extra(variant: Variant) -> str:
    """Returns the package with the extra that installs TorchRec for a variant."""
    return f"torchrec-ext[sharded-{variant}]"


def _is_unchecked() -> bool:
    return os.environ.get("TORCHREC_EXT_UNCHECKED") == "1"
