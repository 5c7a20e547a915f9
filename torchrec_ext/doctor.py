"""Installs the triple into the running interpreter's environment; `python -m torchrec_ext.doctor --install` calls it.

The one hard part is torch without CUDA. The public registry's torch is the CUDA build on every Linux, gigabytes of it, so on a CPU
machine it is never asked for. Instead, in this order: `torch==2.13.0+cpu` from wherever the user's pip looks (a folder of wheels, a
mirror), then uv, which knows PyTorch's own CPU index by itself, and then a clear error.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrec_ext import stack
from torchrec_ext.stack import Variant

Say = Callable[[str], None]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


class InstallError(RuntimeError):
    """An installation that cannot go on; the message says what the user can do."""


class CommandError(InstallError):
    """A command that failed; the message is the part of its output that says why."""


def run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Runs a command, silently when it succeeds.

    Raises:
        CommandError: it failed, or is not there.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise CommandError(reason(done.stderr or done.stdout) or f"{' '.join(command)} ended with {done.returncode}")


def reason(output: str) -> str:
    r"""The lines of pip's or uv's output that say why it failed, without warnings and progress.

    Example:
        >>> reason("WARNING: Location is ignored\nERROR: No matching distribution found for torch==2.13.0+cpu\n")
        'No matching distribution found for torch==2.13.0+cpu'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith(("ERROR: ", "error: ", "cause: "))]
    if any("after connection broken by" in line for line in lines):
        errors.append("pip did not reach its package index; without a network give it a folder of wheels: PIP_FIND_LINKS=DIR")
    return "\n    ".join(errors[-6:] or [line for line in lines if not line.startswith("WARNING")][-5:])


def install(variant: Variant, editable: str | None = None, say: Say = print) -> None:
    """Brings the environment to the triple of `variant`; what is right already stays as it is.

    Args:
        variant: the builds to install.
        editable: a folder with extras to install in place beside the triple, such as ``.[dev]``.
        say: takes one line for each step.

    Raises:
        InstallError: a step failed; the message says why and what to do.
    """
    _check_platform(variant)
    _check_pip()
    found = stack.installed()
    wrong = stack.problems(found, variant)
    extra = ["--editable", editable] if editable else []
    if not wrong and not extra:
        say("the triple is in place: nothing to install")
        return
    _remove_intruders(found, variant, say)
    pins = [need.pin for need in stack.requirements(variant) if need.name not in ("torch", "torchrec")]
    _with_torch(variant, [*pins, *extra], torch_in_place=all(problem.what != "torch" for problem in wrong), say=say)
    # Without its dependencies: they name the CUDA build of fbgemm on every machine.
    _step(say, f"torchrec {stack.TORCHREC}", _pip_install("--no-deps", f"torchrec=={stack.TORCHREC}"))


def _with_torch(variant: Variant, rest: list[str], *, torch_in_place: bool, say: Say) -> None:
    """One pip call for torch and all the rest, because each call costs seconds."""
    if variant == "cpu" and not torch_in_place:
        try:
            what = f"torch {stack.TORCH}+cpu as your pip finds it, and what goes with it"
            _step(say, what, _pip_install(f"torch=={stack.TORCH}+cpu", *rest))
            return
        except CommandError as error:
            if "No matching distribution found for torch" not in str(error):
                raise
            _torch_by_uv(pip_said=str(error).splitlines()[-1].strip(), say=say)
    _step(say, f"torch {stack.TORCH} ({variant}) and what goes with it", _pip_install(f"torch=={stack.TORCH}", *rest))


def _torch_by_uv(pip_said: str, say: Say) -> None:
    say("  your pip finds no CPU build of torch; uv knows PyTorch's own CPU index")
    # uv reads neither pip's settings nor, where a proxy needs one, pip's certificate.
    env = {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
    with tempfile.TemporaryDirectory(prefix="torchrec_ext-uv-") as scratch:
        try:
            uv = shutil.which("uv") or _fetch_uv(Path(scratch), say)
            # Only torch itself: its dependencies come from the user's own index, by pip, one step later.
            command = [uv, "pip", "install", "--python", sys.executable, "--torch-backend=cpu", "--no-deps"]
            _step(say, f"torch {stack.TORCH} from PyTorch's CPU index, by uv", [*command, f"torch=={stack.TORCH}"], env)
        except CommandError as error:
            raise InstallError(no_torch(pip_said, str(error))) from None


def _fetch_uv(folder: Path, say: Say) -> str:
    _step(say, "uv, into a temporary folder", _pip_install("--target", str(folder), "uv"))
    return str(folder / "bin" / "uv")


def no_torch(pip_said: str, uv_said: str) -> str:
    """The message when neither pip nor uv could get a CPU build of torch."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = f"torch-{stack.TORCH}+cpu-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl"
    return (
        f"no CPU build of torch {stack.TORCH} for Python {platform.python_version()} could be had:\n"
        f"    pip: {pip_said}\n"
        f"    uv: {uv_said}\n"
        f"  Do this: get {wheel}\n"
        "  from PyTorch's own package index (its Get Started page, compute platform CPU) on a machine that reaches it,\n"
        "  put it into a folder DIR here, and run: PIP_FIND_LINKS=DIR make demo\n"
        "  (The plain torch of the public registry is the CUDA build with gigabytes of packages, so it is not taken.)"
    )


def _remove_intruders(found: stack.Installed, variant: Variant, say: Say) -> None:
    """Takes out what pip would leave in the way: the other fbgemm, in the same folder, and torch of the other build."""
    other = stack.FBGEMM_NAME["cuda" if variant == "cpu" else "cpu"]
    names = [other, stack.FBGEMM_NAME[variant]] if other in found.versions else []
    if found.torch_build not in (None, variant):
        names.append("torch")
    if names := [name for name in names if name in found.versions]:
        _step(say, f"taking out {', '.join(names)}", [*PIP, "uninstall", "--quiet", "--yes", *names])


def _pip_install(*what: str) -> list[str]:
    # Bytecode for everything costs 40 s; the doctor's first import writes it for what is used.
    return [*PIP, "install", "--quiet", "--no-compile", *what]


def _step(say: Say, what: str, command: Sequence[str], env: dict[str, str] | None = None) -> None:
    say(f"  {what} ...")
    start = time.monotonic()
    run(command, env)
    say(f"    done in {time.monotonic() - start:.0f} s")


def _check_platform(variant: Variant) -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise InstallError(
            f"this is {system} on {machine}: fbgemm {stack.FBGEMM} has wheels for Linux on x86_64 and aarch64 only; "
            "use a Linux container or virtual machine"
        )
    if variant == "cuda" and machine != "x86_64":
        raise InstallError(
            f"fbgemm-gpu {stack.FBGEMM} has no CUDA wheel for {machine}: build it from source, "
            "or train on the CPU with TORCHREC_EXT_VARIANT=cpu"
        )


def _check_pip() -> None:
    try:
        run([sys.executable, "-m", "pip", "--version"])
    except CommandError:
        raise InstallError(
            f"{stack.interpreter()} has no pip: run `{stack.interpreter()} -m ensurepip`, or use `make demo`, "
            "which makes an environment of its own"
        ) from None
