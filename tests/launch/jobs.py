"""Jobs under a launcher, watched from outside: every wait has an end, and nothing of a job outlives its test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

AGENT = ("-m", "torchx_apps.agent")
TORCHRUN = ("-m", "torch.distributed.run")
SETTINGS = (
    "data.name=planted",
    "data.users=100",
    "data.items=80",
    "model.dropout=0.1",
    "train.epochs=8",
    "train.compile=off",
    "loader.batch_size=256",
    "checkpoint.steps=5",
)


class RunFiles:
    """What a run leaves in its folder.

    Args:
        run_dir: the folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def steps(self) -> list[int]:
        """Of its checkpoints."""
        return sorted(int(path.name[-10:]) for path in (self.run_dir / "checkpoints").glob("step-*[0-9]"))

    def records(self) -> list[dict[str, Any]]:
        """Of the run so far, without what a clock says: a record of kind ``steps`` is each attempt's own measurement."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [
            {name: value for name, value in record.items() if name != "rows_per_s"}
            for record in found
            if record["kind"] != "steps"
        ]

    def figures(self) -> Any:
        """Those of the end."""
        return json.loads((self.run_dir / "summary.json").read_text())["test"]


class Launched:
    """Processes under a launcher; all are killed where the test leaves them.

    Args:
        command: the launcher with its flags.
        environment: changes to it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Into a file: a pipe that nobody reads stops a job that says much.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the job)
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=self._said, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [self.process.pid, *self.descendants()]
        for pid in left:
            _kill(pid)
        self.process.wait()
        self._said.close()

    @property
    def said(self) -> str:
        """All that the job has said so far."""
        self._said.seek(0)
        return self._said.read()

    def until(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Waits; fails where the job ends before, or after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"the job ended with {self.process.returncode} before it came to this:\n{self.said}"
            )
            assert time.monotonic() < end, f"not after {seconds} s:\n{self.said}"
            time.sleep(0.05)

    def end(self, seconds: float = 400) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended after {seconds} s:\n{self.said}") from None

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        return [
            pid for pid in self.descendants() if "torchx_apps.train" in _command(pid) and "nproc" not in _command(pid)
        ]

    def descendants(self) -> list[int]:
        """Process ids of all that the launcher has started, directly or not."""
        found, parents = [], [self.process.pid]
        while parents:
            children = [pid for parent in parents for pid in _children(parent)]
            found += children
            parents = children
        return found


class Job(Launched, RunFiles):
    """A training job on this host, as the component starts it.

    Args:
        run_dir: its run folder.
        flags: of the app.
        ranks: processes on this host.
        restarts: torchrun's max-restarts.
        settings: overrides of the recipe two_tower.
        launcher: the launcher's module.
    """

    def __init__(
        self,
        run_dir: Path,
        *flags: str,
        ranks: int = 2,
        restarts: int = 0,
        settings: Sequence[str] = SETTINGS,
        launcher: Sequence[str] = AGENT,
    ) -> None:
        launches = [*launcher, "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        app = ["-m", "torchx_apps.train", "--run-dir", str(run_dir), *overriding(settings), *flags]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        Launched.__init__(self, [sys.executable, *launches, *app], environment)
        RunFiles.__init__(self, run_dir)


def overriding(settings: Sequence[str]) -> list[str]:
    """The flags that set them."""
    return [word for item in settings for word in ("--set", item)]


def alive(pids: Sequence[int]) -> list[int]:
    """Those that run; a zombie, whom only its parent has not asked after, does not."""
    return [pid for pid in pids if (state := _state(pid)) is not None and state != "Z"]


def gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether none of them runs any more after at most ``seconds``."""
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not alive(pids)


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it is gone
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
