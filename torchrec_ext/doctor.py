"""`python -m torchrec_ext.doctor`: is this environment healthy, and if not, which one line repairs each part?

Exit status 0 when healthy, 1 when not. `--install` repairs it, `--with-shared-memory` compiles the library of shared
memory between ranks, `--json` answers for machines. Needs no torch to run.

install() brings torch, fbgemm and torchrec into the running interpreter's environment: the triple that `--stack` names,
else the one that is there in part, else the newest. Its one hard part is torch without CUDA. The public registry's
torch is the CUDA build on every Linux, gigabytes of it. On a CPU machine install() therefore takes the newest
`torch==...+cpu` from wherever the user's pip looks (a folder of wheels, a mirror), or else from uv, which knows
PyTorch's own CPU index by itself. If there is none, it ends with a clear error, or takes the CUDA build for a triple
that was named.

build_shared_memory() compiles the library with which ranks of one host share memory, if `--with-shared-memory` asks for
it: ahead, so that no job waits for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchrec_ext import private_names, stack
from torchrec_ext.stack import Problem, Triple, Variant

Say = Callable[[str], None]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


class InstallError(RuntimeError):
    """The installation cannot continue; the message names a remedy."""


class CommandError(InstallError):
    """A command failed; the message is the explanation in its output."""


def run_quietly(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """Runs a command, silently when it succeeds, and returns its stdout.

    Raises:
        CommandError: the command failed, or does not exist.
    """
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            check=False,
        )
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from None
    if process.returncode:
        raise CommandError(
            reason(process.stderr or process.stdout)
            or f"{' '.join(command)} ended with {process.returncode}"
        )
    return process.stdout


def reason(output: str) -> str:
    r"""Returns the error lines of pip's or uv's output, without warnings and progress.

    Example:
        >>> reason("WARNING: Location is ignored\nERROR: No matching distribution found for torch==2.13.0+cpu\n")
        'No matching distribution found for torch==2.13.0+cpu'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line.removeprefix("ERROR: ")
        for line in lines
        if line.startswith(("ERROR: ", "error: ", "cause: "))
    ]
    if any("after connection broken by" in line for line in lines):
        errors.append(
            "pip did not reach its package index; without a network give it a folder of wheels: PIP_FIND_LINKS=DIR"
        )
    if not errors:
        errors = [line for line in lines if not line.startswith("WARNING")][-5:]
    return "\n    ".join(errors[-6:])


def install(
    variant: Variant,
    editable: str | None = None,
    say: Say = print,
    named: Triple | None = None,
) -> None:
    """Installs a triple of `variant` into the environment; correct packages stay as they are.

    Args:
        variant: the builds to install.
        editable: folder with extras to install in place beside the triple, such as ``.[dev]``.
        say: receives a line for each step.
        named: the triple to install. By default the one that is there in part, or else the newest; on a CPU the newest
            of which pip finds a CPU build of torch.

    Raises:
        InstallError: a step failed; the message says why and what to do.
    """
    current = stack.installed()
    newer = stack.newer_torch(current)
    if newer and named is None:
        remedy = stack.problems(current, variant, stack.interpreter())[0].repair
        raise InstallError(
            f"torch {newer} is installed, and there is no fbgemm for it; to replace it: {remedy}"
        )
    triple = named or stack.installed_triple(current)
    _check_platform(variant, triple or stack.TRIPLES[0])
    _check_pip()
    wrong = stack.problems(current, variant, named=named)
    extra = ["--editable", editable] if editable else []
    if not wrong and not extra:
        say("the triple is in place: nothing to install")
        return
    # Uninstall packages in pip's way: the other fbgemm, in the same folder, and the
    # other torch build.
    other = stack.FBGEMM_NAME["cuda" if variant == "cpu" else "cpu"]
    names = []
    # The two share files, so taking one out breaks the other: both go.
    if other in current.versions:
        names = [other, stack.FBGEMM_NAME[variant]]
    if current.torch_build and not stack.torch_fits(current, variant):
        names.append("torch")
    if names := [name for name in names if name in current.versions]:
        _step(
            say,
            f"taking out {', '.join(names)}",
            [*PIP, "uninstall", "--quiet", "--yes", *names],
        )
    torch_in_place = all(problem.what != "torch" for problem in wrong)
    torch = ""
    if variant == "cpu" and not torch_in_place:
        triple, torch = _cpu_torch(
            [triple] if triple else list(stack.TRIPLES),
            forced=named is not None,
            say=say,
        )
    triple = triple or stack.TRIPLES[0]
    torch = torch or f"torch=={triple.torch}"
    pins = [
        need.pin
        for need in stack.requirements(variant, triple)
        if need.name not in ("torch", "torchrec")
    ]
    # By one pip call, because each call costs seconds.
    _step(
        say,
        f"{torch} for {variant} and what goes with it",
        _pip_install(torch, *pins, *extra),
    )
    # Without its dependencies: they name the CUDA build of fbgemm on every machine.
    _step(
        say,
        f"torchrec {triple.torchrec}",
        _pip_install("--no-deps", f"torchrec=={triple.torchrec}"),
    )


def _cpu_torch(triples: list[Triple], *, forced: bool, say: Say) -> tuple[Triple, str]:
    """Finds a CPU build of torch, for the first of ``triples`` with one.

    Args:
        triples: the triples in question, newest first.
        forced: take the CUDA build if there is no CPU build.
        say: receives a line for each step.

    Returns:
        The triple, and the requirement of its torch for pip.

    Raises:
        InstallError: neither pip nor uv has a CPU build of torch.
    """
    try:
        builds = re.findall(
            r"\d[\w.]*\+cpu", run_quietly([*PIP, "index", "versions", "torch"])
        )
        pip_said = "it finds torch, but no CPU build of it"
    except CommandError as error:
        builds = []
        pip_said = str(error).splitlines()[-1].strip()
    for triple in triples:
        if f"{triple.torch}+cpu" in builds:
            return triple, f"torch=={triple.torch}+cpu"
    try:
        triple = _torch_by_uv(triples, say)
    except CommandError as error:
        triple = triples[0]
        if not forced or stack.asked_variant():
            raise InstallError(no_torch(triple, pip_said, str(error))) from None
        say(
            f"  no CPU build of torch {triple.torch} to be had: taking the CUDA build, 5 GB, which runs on a CPU too"
        )
    return triple, f"torch=={triple.torch}"


def _torch_by_uv(triples: list[Triple], say: Say) -> Triple:
    """Installs the CPU build of the first triple with one, and returns the triple.

    Raises:
        CommandError: uv has no CPU build for any.
    """
    say("  your pip finds no CPU build of torch; uv knows PyTorch's own CPU index")
    # uv reads neither pip's settings nor, where a proxy needs one, pip's certificate.
    env = {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
    with tempfile.TemporaryDirectory(prefix="torchrec_ext-uv-") as scratch:
        uv = shutil.which("uv") or _fetch_uv(Path(scratch), say)
        # Only torch itself: its dependencies come from the user's own index, by pip,
        # one step later.
        command = [
            uv,
            "pip",
            "install",
            "--python",
            sys.executable,
            "--torch-backend=cpu",
            "--no-deps",
        ]
        for triple in triples:
            try:
                what = f"torch {triple.torch} from PyTorch's CPU index, by uv"
                _step(say, what, [*command, f"torch=={triple.torch}"], env)
                return triple
            except CommandError as error:
                failure = error
    raise failure


def _fetch_uv(folder: Path, say: Say) -> str:
    _step(
        say, "uv, into a temporary folder", _pip_install("--target", str(folder), "uv")
    )
    return str(folder / "bin" / "uv")


def no_torch(triple: Triple, pip_said: str, uv_said: str) -> str:
    """Returns the message if neither pip nor uv has a CPU build of torch."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = (
        f"torch-{triple.torch}+cpu-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
    )
    return (
        f"no CPU build of torch {triple.torch} for Python {platform.python_version()} could be had:\n"
        f"    pip: {pip_said}\n"
        f"    uv: {uv_said}\n"
        f"  Do this: get {wheel}\n"
        "  from PyTorch's own package index (its Get Started page, compute platform CPU) on a machine that reaches "
        "it,\n"
        "  put it into a folder DIR here, and run: PIP_FIND_LINKS=DIR make demo\n"
        "  (The plain torch of the public registry is the CUDA build with gigabytes of packages. It runs on a CPU\n"
        f"  too: `doctor --install --stack {triple.name}` takes it, without TORCHREC_EXT_VARIANT=cpu.)"
    )


def build_shared_memory(say: Say = print) -> None:
    """Builds the library of shared memory between ranks; training works without it.

    Raises:
        InstallError: there is no C++ compiler, or it fails.
    """
    path = compiler()
    if path is None:
        raise InstallError(
            "--with-shared-memory: there is no C++ compiler (apt install g++)"
        )
    command = [sys.executable, "-m", "torchrec_ext.distributed.shared_memory.library"]
    _step(
        say,
        "shared memory between ranks: its library, half a minute if it is new",
        command,
        {"CXX": path},
    )


def _pip_install(*what: str) -> list[str]:
    # Bytecode for everything costs 40 s; the doctor's first import writes it for what
    # is used.
    return [*PIP, "install", "--quiet", "--no-compile", *what]


def _step(
    say: Say, what: str, command: Sequence[str], env: dict[str, str] | None = None
) -> None:
    say(f"  {what} ...")
    start = time.monotonic()
    run_quietly(command, env)
    say(f"    done in {time.monotonic() - start:.0f} s")


def _check_platform(variant: Variant, triple: Triple) -> None:
    system = platform.system()
    machine = platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise InstallError(
            f"this is {system} on {machine}: fbgemm {triple.fbgemm} has wheels for Linux on x86_64 and aarch64 only; "
            "use a Linux container or virtual machine"
        )
    if variant == "cuda" and machine != "x86_64":
        raise InstallError(
            f"fbgemm-gpu {triple.fbgemm} has no CUDA wheel for {machine}: build it from source, or train on the CPU "
            "with TORCHREC_EXT_VARIANT=cpu"
        )


def _check_pip() -> None:
    try:
        run_quietly([sys.executable, "-m", "pip", "--version"])
    except CommandError:
        raise InstallError(
            f"{stack.interpreter()} has no pip: run `{stack.interpreter()} -m ensurepip`, or use `make demo`, which "
            "makes an environment of its own"
        ) from None


RIGHT_ANSWER = [8.0, 10.0]


@dataclass(frozen=True, kw_only=True)
class PackageStatus:
    """One line of the report: a distribution's installed and expected version."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The doctor's findings; `healthy` when there is no problem."""

    python: str
    interpreter: str
    variant: Variant
    stack: str
    devices: tuple[str, ...]
    cores: int
    ranks: int
    threads: int
    compiler: str | None
    parts: tuple[PackageStatus, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    import_seconds: float | None = None
    no_shared_memory: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether training would start here."""
        return not self.problems


def diagnose(
    *, really_import: bool = True, named: Triple | None = None
) -> Installation:
    """Examines the interpreter, the packages and the machine.

    Args:
        really_import: import the triple in a separate process too and look two rows up, which takes seconds.
        named: the expected triple; by default the installed one, or the newest if none is.
    """
    current = stack.installed()
    machine = stack.machine_variant()
    variant = stack.wanted_variant(current, machine)
    triple = named or stack.installed_triple(current) or stack.TRIPLES[0]
    problems = _python_problem(sys.version_info[:2])
    problems += stack.problems(current, variant, stack.interpreter(), named)
    problems += _dropped_names()
    seconds = no_shared_memory = None
    if really_import and not problems:
        outcome = probe(variant)
        if isinstance(outcome, Problem):
            problems = [outcome]
        else:
            seconds, no_shared_memory = outcome
    # A container or a scheduler may give this process fewer cores than the machine has.
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    devices: tuple[str, ...] = ()
    if variant == "cuda":
        devices = tuple(stack.gpu_nodes())
    ranks = len(devices) or cores
    parts = []
    for need in stack.requirements(variant, triple):
        version = current.versions.get(need.name, "nothing")
        parts.append(
            PackageStatus(
                name=need.name, found=version, expected=need.version or "any version"
            )
        )
    return Installation(
        python=platform.python_version(),
        interpreter=sys.executable,
        variant=variant,
        stack=triple.name,
        devices=devices or ("cpu",),
        cores=cores,
        ranks=ranks,
        threads=max(1, cores // ranks),
        compiler=compiler(),
        parts=tuple(parts),
        problems=tuple(problems),
        notes=tuple(_notes(variant, machine)),
        import_seconds=seconds,
        no_shared_memory=no_shared_memory,
    )


def _dropped_names() -> list[Problem]:
    """Returns the private names that an installed release has dropped, as one problem."""
    dropped = [f"{name} ({file})" for file, name in private_names.missing()]
    if not dropped:
        return []
    return [
        Problem(
            what="private names",
            found=f"{len(dropped)} are gone, first {dropped[0]}",
            expected="those of torchrec_ext/private_names.py",
            repair=stack.doctor_line(stack.interpreter()),
        )
    ]


class Probed(NamedTuple):
    """The seconds that an import of the triple takes, and why ranks of one host cannot share memory, if so."""

    seconds: float
    no_shared_memory: str


def probe(variant: Variant) -> Probed | Problem:
    """Imports the triple in a separate process and looks two rows up; returns the findings, or the problem."""
    process = subprocess.run(
        [sys.executable, "-m", "torchrec_ext.probe"],
        # pip installs without bytecode (install.py): the first import writes what is
        # needed of it, 15 s once, 5 s ever after.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        report = json.loads(process.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return _failed_import(process.stderr, process.returncode, variant)
    if report["answer"] != RIGHT_ANSWER:
        return _failed_import(
            f"a lookup gave {report['answer']} instead of {RIGHT_ANSWER}",
            process.returncode,
            variant,
        )
    return Probed(float(report["seconds"]), report["no_shared_memory"])


def _failed_import(stderr: str, status: int, variant: Variant) -> Problem:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing on stderr"
    # A mixed triple can end the process inside a shared object, without an exception.
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    python = stack.interpreter()
    fbgemm = stack.FBGEMM_NAME[variant]
    return Problem(
        what="import",
        found=f"{last} ({ended})",
        expected="torch, fbgemm_gpu and torchrec import, and look a row up",
        repair=f"{python} -m pip uninstall -y torch {fbgemm} torchrec && {stack.doctor_line(python)}",
    )


def _python_problem(version: tuple[int, int]) -> list[Problem]:
    first, last = stack.PYTHONS
    if first <= version <= last:
        return []
    expected = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    repair = f"make demo PYTHON=python{last[0]}.{last[1] - 1}"
    return [
        Problem(
            what="python",
            found=f"{version[0]}.{version[1]}",
            expected=expected,
            repair=repair,
        )
    ]


def _notes(variant: Variant, machine: Variant) -> list[str]:
    if variant == machine:
        return []
    switch = f"TORCHREC_EXT_VARIANT={machine} {stack.interpreter()} -m torchrec_ext.doctor --install"
    mismatch = "CUDA builds, but no GPU in sight"
    if machine == "cuda":
        mismatch = "an NVIDIA GPU is in sight, but the CPU builds are used"
    return [f"{mismatch}; to change that: {switch}"]


def compiler() -> str | None:
    """Returns the C++ compiler for torch.compile, or None."""
    # An empty name is no program, so an unset CXX is passed over.
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    return None


def text(installation: Installation) -> str:
    """Returns the report for people."""
    rows = [
        ("python", f"{installation.python}  {installation.interpreter}"),
        ("stack", installation.stack),
        ("variant", f"{installation.variant}  on {', '.join(installation.devices)}"),
        (
            "job",
            f"-j 1x{installation.ranks} --threads {installation.threads} fills this machine ({installation.cores} "
            "cores)",
        ),
        (
            "C++",
            installation.compiler or "none: torch.compile needs one (apt install g++)",
        ),
        *(
            (part.name, f"{part.found}  (expected {part.expected})")
            for part in installation.parts
        ),
    ]
    if installation.import_seconds is not None:
        rows.append(
            (
                "import",
                f"the triple imports and looks rows up, {installation.import_seconds} s",
            )
        )
    if installation.no_shared_memory is not None:
        rows.append(
            (
                "shared memory",
                installation.no_shared_memory
                or "ready: ranks of one host use it in place of sockets",
            )
        )
    lines = [f"{name:<16} {value}" for name, value in rows]
    lines += [f"note: {note}" for note in installation.notes]
    lines += [f"WRONG {problem}" for problem in installation.problems]
    lines.append(
        "healthy"
        if installation.healthy
        else f"not healthy: {len(installation.problems)} to repair"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, installs if asked, prints the report.

    Returns:
        0 when healthy, 1 when not, 2 for a wrong flag.
    """
    flags = _parser().parse_args(argv)
    try:
        requested_triple = stack.triple_by_name(flags.stack) if flags.stack else None
        # stdout is for the report, which may be JSON.
        say = partial(print, file=sys.stderr, flush=True)
        if flags.install or flags.editable:
            variant = stack.wanted_variant(stack.installed(), stack.machine_variant())
            say(f"installing for {variant} into {sys.prefix}")
            if python := _python_problem(sys.version_info[:2]):
                raise InstallError(str(python[0]))
            install(variant, flags.editable, say, requested_triple)
            # pip has installed packages since this process looked for some.
            importlib.invalidate_caches()
        if flags.with_shared_memory:
            build_shared_memory(say)
        installation = diagnose(
            really_import=flags.really_import, named=requested_triple
        )
    except (InstallError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    if flags.json:
        print(
            json.dumps(
                asdict(installation) | {"healthy": installation.healthy}, indent=2
            )
        )
    else:
        print(text(installation))
    return 0 if installation.healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_ext.doctor",
        description="Checks and repairs torch, fbgemm, torchrec.",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install or repair the triple in this environment first",
    )
    names = ", ".join(
        f"{triple.name} (torchrec {triple.torchrec})" for triple in stack.TRIPLES
    )
    parser.add_argument(
        "--stack",
        metavar="TORCH",
        help=f"the triple by its torch: {names}. By default the installed one; in a new environment the newest, "
        "without a GPU the newest of which pip or uv finds a CPU build of torch. If there is none for the triple that "
        "you name, the CUDA build is taken, which runs on a CPU too",
    )
    parser.add_argument(
        "--editable",
        metavar="DIR",
        help="with it, install this folder in place, such as '.[dev]'",
    )
    parser.add_argument(
        "--with-shared-memory",
        action="store_true",
        help="also compile the library with which ranks of one host's CPU share memory, half a minute",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--import",
        dest="really_import",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="import the triple in a process of its own and look a row up (seconds)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
