"""`python -m torchrec_ext.doctor`: is this environment healthy, and if not, which one line repairs each part?

Exit status 0 when healthy, 1 when not. `--install` repairs it, `--json` answers for machines. Needs no torch to run.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from torchrec_ext import install, stack
from torchrec_ext.stack import Problem, Variant

RIGHT_ANSWER = [8.0, 10.0]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One line of the report: a distribution as found, and as expected."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that the doctor found; `healthy` when there is no problem."""

    python: str
    interpreter: str
    variant: Variant
    devices: tuple[str, ...]
    cores: int
    ranks: int
    threads: int
    compiler: str | None
    parts: tuple[Part, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    import_seconds: float | None = None

    @property
    def healthy(self) -> bool:
        """Whether training would start here."""
        return not self.problems


def diagnose(*, really_import: bool = True) -> Diagnosis:
    """Looks at the interpreter, the packages and the machine.

    Args:
        really_import: also import the triple in a process of its own and look two rows up; takes seconds.
    """
    found, machine = stack.installed(), stack.machine_variant()
    variant = stack.wanted_variant(found, machine)
    problems = [*_python_problem(sys.version_info[:2]), *stack.problems(found, variant, stack.interpreter())]
    seconds = None
    if really_import and not problems:
        outcome = probe(variant)
        seconds, problems = (outcome, []) if isinstance(outcome, float) else (None, [outcome])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = tuple(stack.gpu_nodes()) if variant == "cuda" else ()
    ranks = len(devices) or cores
    return Diagnosis(
        python=platform.python_version(),
        interpreter=sys.executable,
        variant=variant,
        devices=devices or ("cpu",),
        cores=cores,
        ranks=ranks,
        threads=max(1, cores // ranks),
        compiler=compiler(),
        parts=_parts(found, variant),
        problems=tuple(problems),
        notes=tuple(_notes(variant, machine)),
        import_seconds=seconds,
    )


def probe(variant: Variant) -> float | Problem:
    """Imports the triple in a process of its own and looks two rows up; the seconds it took, or what went wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_ext.probe"],
        # pip installs without bytecode (install.py): the first import writes what is needed of it, 15 s once, 5 s ever after.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        seen = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return _failed_import(done.stderr, done.returncode, variant)
    if seen["answer"] != RIGHT_ANSWER:
        return _failed_import(f"a lookup gave {seen['answer']} instead of {RIGHT_ANSWER}", done.returncode, variant)
    return float(seen["seconds"])


def _failed_import(stderr: str, status: int, variant: Variant) -> Problem:
    last = [line.strip() for line in stderr.splitlines() if line.strip()][-1:] or ["nothing on stderr"]
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    python, fbgemm = stack.interpreter(), stack.FBGEMM_NAME[variant]
    return Problem(
        what="import",
        found=f"{last[0]} ({ended})",
        expected="torch, fbgemm_gpu and torchrec import, and look a row up",
        repair=f"{python} -m pip uninstall -y torch {fbgemm} torchrec && {stack.doctor_line(python)}",
    )


def _python_problem(version: tuple[int, int]) -> list[Problem]:
    first, last = stack.PYTHONS
    if first <= version <= last:
        return []
    expected = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    repair = f"make demo PYTHON=python{last[0]}.{last[1] - 1}"
    return [Problem(what="python", found=f"{version[0]}.{version[1]}", expected=expected, repair=repair)]


def _parts(found: stack.Installed, variant: Variant) -> tuple[Part, ...]:
    return tuple(
        Part(name=need.name, found=found.versions.get(need.name, "nothing"), expected=need.version or "any version")
        for need in stack.requirements(variant)
    )


def _notes(variant: Variant, machine: Variant) -> list[str]:
    if variant == machine:
        return []
    switch = f"TORCHREC_EXT_VARIANT={machine} {stack.interpreter()} -m torchrec_ext.doctor --install"
    seen = "an NVIDIA GPU is in sight, but the CPU builds are used" if machine == "cuda" else "CUDA builds, but no GPU in sight"
    return [f"{seen}; to change that: {switch}"]


def compiler() -> str | None:
    """The C++ compiler that torch.compile would call, or None."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), "g++", "clang++", "c++"]))), None)


def text(seen: Diagnosis) -> str:
    """The report for people."""
    rows = [
        ("python", f"{seen.python}  {seen.interpreter}"),
        ("variant", f"{seen.variant}  on {', '.join(seen.devices)}"),
        ("job", f"-j 1x{seen.ranks} --threads {seen.threads} fills this machine ({seen.cores} cores)"),
        ("C++", seen.compiler or "none: torch.compile needs one (apt install g++)"),
        *((part.name, f"{part.found}  (expected {part.expected})") for part in seen.parts),
    ]
    if seen.import_seconds is not None:
        rows.append(("import", f"the triple imports and looks rows up, {seen.import_seconds} s"))
    lines = [f"{name:<16} {value}" for name, value in rows]
    lines += [f"note: {note}" for note in seen.notes]
    lines += [f"WRONG {problem}" for problem in seen.problems]
    return "\n".join([*lines, "healthy" if seen.healthy else f"not healthy: {len(seen.problems)} to repair"])


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags, installs if asked, prints the report.

    Returns:
        0 when healthy, 1 when not, 2 for a wrong flag.
    """
    flags = _parser().parse_args(argv)
    try:
        if flags.install or flags.editable:
            _install(flags.editable)
        seen = diagnose(really_import=flags.really_import)
    except (install.InstallError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(seen) | {"healthy": seen.healthy}, indent=2) if flags.json else text(seen))
    return 0 if seen.healthy else 1


def _install(editable: str | None) -> None:
    variant = stack.wanted_variant(stack.installed(), stack.machine_variant())
    say = partial(print, file=sys.stderr, flush=True)
    say(f"installing for {variant} into {sys.prefix}")
    if python := _python_problem(sys.version_info[:2]):
        raise install.InstallError(str(python[0]))
    install.install(variant, editable, say)
    importlib.invalidate_caches()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_ext.doctor", description="Checks and repairs torch, fbgemm, torchrec."
    )
    parser.add_argument("--install", action="store_true", help="install or repair the triple in this environment first")
    parser.add_argument("--editable", metavar="DIR", help="with it, install this folder in place, such as '.[dev]'")
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
