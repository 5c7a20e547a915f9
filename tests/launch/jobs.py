"""Jobs under a launcher, watched from outside: every wait has a limit, and no process outlives its test."""

import contextlib
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

from tests.files import records, summary
from torchrec_ext.train.checkpoint.folder import MANIFEST_NAME

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


def torchx_run(
    folder: Path, component: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a component of ours on this machine, from a folder; TorchX starts torchrun by name."""
    binaries = Path(sys.executable).parent
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    return subprocess.run(
        [binaries / "torchx", "run", "-s", "local_cwd", component, *words],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


class RunFiles:
    """The files that a run leaves in its folder.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, which exist once their manifest does."""
        checkpoints = self.run_dir / "checkpoints"
        return sorted(
            int(path.parent.name[-10:])
            for path in checkpoints.glob(f"step-*[0-9]/{MANIFEST_NAME}")
        )

    def records(self) -> list[dict[str, Any]]:
        """Returns the run's records so far, without times and without those of kind ``steps``, which are measured."""
        return records(self.run_dir)

    def figures(self) -> Any:
        """Returns the test figures at the end of the run."""
        return summary(self.run_dir)["test"]


class Launched:
    """Processes under a launcher; leaving the context kills all of them.

    Args:
        command: the launcher with its flags.
        environment: variables that are added to the environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Into a file: a pipe that nobody reads blocks a job that prints much.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the job)
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in [self.process.pid, *self.descendants()]:
            _kill(pid)
        self.process.wait()
        self._output.close()

    @property
    def output(self) -> str:
        """The job's output so far."""
        self._output.seek(0)
        return self._output.read()

    def until(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Waits for a condition; fails when the job ends before, or after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"the job ended with {self.process.returncode} before it came to this:\n{self.output}"
            )
            assert time.monotonic() < end, f"not after {seconds} s:\n{self.output}"
            time.sleep(0.05)

    def end(self, seconds: float = 400) -> int:
        """Waits for the end of the job; returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the job has not ended after {seconds} s:\n{self.output}"
            ) from None

    def ranks(self) -> list[int]:
        """Returns the process ids of the ranks."""
        return [
            pid
            for pid in self.descendants()
            if "torchx_apps.train" in _command(pid) and "nproc" not in _command(pid)
        ]

    def descendants(self) -> list[int]:
        """Returns the ids of all processes that the launcher has started, directly or not."""
        pids, parents = [], [self.process.pid]
        while parents:
            children = [pid for parent in parents for pid in _children(parent)]
            pids += children
            parents = children
        return pids


class Job(Launched, RunFiles):
    """A training job on this host, under torchrun.

    Args:
        run_dir: the run folder.
        flags: flags of the app.
        ranks: number of processes on this host.
        restarts: torchrun's max-restarts.
        settings: overrides of the recipe two_tower.
    """

    def __init__(
        self,
        run_dir: Path,
        *flags: str,
        ranks: int = 2,
        restarts: int = 0,
        settings: Sequence[str] = SETTINGS,
    ) -> None:
        launches = [
            *TORCHRUN,
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}",
        ]
        app = [
            "-m",
            "torchx_apps.train",
            "--run_dir",
            str(run_dir),
            *(f"--{setting}" for setting in settings),
            *flags,
        ]
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        Launched.__init__(self, [sys.executable, *launches, *app], environment)
        RunFiles.__init__(self, run_dir)


def alive(pids: Sequence[int]) -> list[int]:
    """Returns the processes that run; a zombie, for which its parent has not waited yet, does not."""
    return [pid for pid in pids if _state(pid) not in (None, "Z")]


def gone(pids: Sequence[int], seconds: float) -> bool:
    """Waits at most ``seconds`` until none of the processes runs; returns whether that is so."""
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    return not alive(pids)


def _children(pid: int) -> list[int]:
    pids = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


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
