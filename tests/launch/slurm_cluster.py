"""A real Slurm on this machine: a head and two nodes, as network namespaces, from Debian's packages.

Nothing is installed: the packages (3.5 MB) are unpacked into the test's folder. There is no accounting.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from tests.launch.two_hosts import Network

PACKAGES = (
    "libhwloc15", "liblua5.1-0", "libmunge2", "munge", "slurm-wlm-basic-plugins", "slurm-client", "slurmctld", "slurmd",
)  # fmt: skip
HEAD, NODES = 0, (1, 2)
# cred_expire cuts the wait of a requeued job from two minutes to some seconds.
CONF = """
ClusterName=lab
SlurmctldHost=host0(10.214.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
PluginDir={libraries}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
InactiveLimit=0
MinJobAge=3600
JobRequeue=1
AccountingStorageType=accounting_storage/none
NodeName=host1 NodeAddr=10.214.0.2 NodeHostname=host1 CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=host2 NodeAddr=10.214.0.3 NodeHostname=host2 CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=host1,host2 Default=YES MaxTime=INFINITE State=UP
"""


class NoPackagesError(Exception):
    """Debian's packages of Slurm cannot be had on this machine."""


def unpack(folder: Path) -> Path:
    """Fetches and unpacks Slurm's packages; returns their root folder.

    Raises:
        NoPackagesError: with the reason.
    """
    (folder / "packages").mkdir(parents=True)
    try:
        words = ["apt-get", "download", *PACKAGES]
        subprocess.run(
            words,
            cwd=folder / "packages",
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for package in sorted((folder / "packages").glob("*.deb")):
            subprocess.run(
                ["dpkg", "-x", package, folder / "root"],
                check=True,
                capture_output=True,
                text=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise NoPackagesError(
            f"Debian's packages of Slurm cannot be had: {lines[-1]}"
        ) from None
    return folder / "root"


class SlurmCluster:
    """Slurm's daemons on three hosts of a network; leaving the context ends all jobs and daemons.

    Args:
        network: network of three hosts; the first is the head.
        folder: folder for the packages, Slurm's state and logs.

    Attributes:
        submitted: folder from which jobs are submitted.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        root = unpack(folder)
        libraries = next((root / "usr" / "lib").glob("*-linux-gnu"))
        for name in (
            "etc",
            "state",
            "run",
            "log",
            "submitted",
            *(f"spool-host{node}" for node in NODES),
        ):
            (folder / name).mkdir()
        self.submitted = folder / "submitted"
        self._conf = folder / "etc" / "slurm.conf"
        self._conf.write_text(CONF.format(folder=folder, libraries=libraries))
        (folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._step = root / "usr" / "sbin" / "slurmstepd-wlm"
        paths = [
            Path(sys.executable).parent,
            root / "usr" / "bin",
            root / "usr" / "sbin",
            os.environ["PATH"],
        ]
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{libraries / 'slurm-wlm'}",
            "SLURM_CONF": str(self._conf),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run("scancel", "-u", "root")
        self._stop()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the head, in the folder of submission."""
        return subprocess.run(
            [*self._network.within(HEAD), *words],
            cwd=self.submitted,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def torchx(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `torchx` on the head."""
        return self.run("torchx", *words)

    def submit(self, *words: str, cfg: str = "") -> str:
        """Submits a component by `torchx run -s slurm`; returns the number of its job."""
        done = self.torchx(
            "run", "-s", "slurm", *(["-cfg", cfg] if cfg else []), *words
        )
        assert done.returncode == 0, done.stderr
        match = re.fullmatch(r"slurm://torchx/(\d+)\n", done.stdout)
        assert match, done.stdout
        return match[1]

    def state(self, job: str) -> str:
        """Returns the job's state as `torchx status` prints it."""
        done = self.torchx("status", f"slurm://torchx/{job}")
        match = re.search(r"State: (\w+)", done.stdout)
        assert match, done.stdout + done.stderr
        return match[1]

    def end(self, job: str, seconds: float = 300) -> str:
        """Waits until no part of the job runs or waits; returns the state."""

        def ended() -> bool:
            states = set(
                self.run(
                    "squeue", "-h", "-t", "all", "-j", job, "-o", "%T"
                ).stdout.split()
            )
            return states.isdisjoint(
                {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
            )

        self.until(job, ended, seconds)
        return self.state(job)

    def until(
        self, job: str, condition: Callable[[], object], seconds: float = 240
    ) -> None:
        """Waits for a condition; fails with what the job has written after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (
                f"job {job}: not after {seconds} s:\n{self.files(job)}"
            )
            # Slurm looks for jobs of several nodes after a change alone. On a cluster
            # other jobs make changes; here one that was put into the queue again would
            # wait for minutes.
            self.run("scontrol", "update", "NodeName=host1", "Comment=changed")
            time.sleep(0.3)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lets no job begin meanwhile."""
        assert (
            self.run(
                "scontrol", "update", "PartitionName=main", "State=DOWN"
            ).returncode
            == 0
        )
        try:
            yield
        finally:
            self.run("scontrol", "update", "PartitionName=main", "State=UP")

    def restarts(self, job: str) -> int:
        """Returns how often Slurm has started the job again."""
        return int(
            re.findall(
                r"Restarts=(\d+)", self.run("scontrol", "show", "job", job).stdout
            )[0]
        )

    def processes(self, node: int, *, running: str) -> list[int]:
        """Returns the ids of a node's Python processes that run the module ``running``."""
        pids = []
        for pid in self._network.processes(node):
            with contextlib.suppress(OSError):
                words = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .split("\0")
                )
                if "python" in Path(words[0]).name and running in words[:5]:
                    pids.append(pid)
        return pids

    @contextlib.contextmanager
    def listening(self, node: int, *, port: int) -> Iterator[None]:
        """Has a program of a node listen on a port."""
        words = [
            *self._network.within(node),
            sys.executable,
            "-m",
            "http.server",
            str(port),
        ]
        with subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            env={**self._environment, "PYTHONUNBUFFERED": "1"},
        ) as program:
            assert program.stdout is not None
            program.stdout.readline()  # it listens
            yield
            program.kill()

    def files(self, job: str) -> str:
        """Returns what Slurm and the job's nodes have written."""
        return "\n".join(
            f"--- {file.name}\n{file.read_text()}"
            for file in sorted(self.submitted.glob(f"slurm-{job}*"))
        )

    def _start(self) -> None:
        key = self._folder / "etc" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        run, log = self._folder / "run", self._folder / "log"
        self._daemon(
            HEAD, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log", f"--seed-file={run}/munged.seed",
        )  # fmt: skip
        self._wait(lambda: (run / "munge.socket").exists())
        self._daemon(HEAD, "slurmctld-wlm", "-D", "-f", self._conf)
        for node in NODES:
            self._daemon(
                node,
                "slurmd-wlm",
                "-D",
                "-N",
                f"host{node}",
                "-f",
                self._conf,
                "-d",
                self._step,
            )
        self._wait(
            lambda: (
                self.run("sinfo", "-h", "-o", "%t %D").stdout.split() == ["idle", "2"]
            )
        )

    def _daemon(self, host: int, *words: object) -> None:
        with (self._folder / "log" / f"{words[0]}-{host}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [*self._network.within(host), *map(str, words)],
                    env=self._environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _wait(self, condition: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(
                file.read_text() for file in (self._folder / "log").iterdir()
            )
            time.sleep(0.2)

    def _stop(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for host in (HEAD, *NODES):  # a job's steps, and what they have started
            for pid in self._network.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait()
