"""Several hosts on this machine, as network namespaces on one switch, and a job that the component starts on them.

Each host has its own network, host name and hosts file; they share the file system, as on a cluster.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torchx.specs import macros
from typing_extensions import Self

from components.train import hybrid
from tests.launch.jobs import SETTINGS, Launched, RunFiles, alive, overriding

_AS_HOST = 'hostname "$0" && exec "$@"'  # in a UTS namespace of its own


class Network:
    """Hosts ``host0``, ``host1``, ... at 10.214.0.1, .2, ..., each on a cable to one switch.

    Args:
        count: number of hosts.
    """

    def __init__(self, count: int) -> None:
        self._switch = f"rec{os.getpid()}s"
        self._names = [f"rec{os.getpid()}h{number}" for number in range(count)]

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def name(self, host: int) -> str:
        """Returns the name of a host's network."""
        return self._names[host]

    def on(self, host: int) -> list[str]:
        """Returns the words before a command that make it run on a host."""
        return [
            "ip",
            "netns",
            "exec",
            self._names[host],
            "unshare",
            "--uts",
            "sh",
            "-c",
            _AS_HOST,
            f"host{host}",
        ]

    def within(self, host: int) -> list[str]:
        """Returns the words before a command that make it run on a host, which keeps this machine's cgroups."""
        name = self._names[host]
        mounted = f"mount --bind {_files(name) / 'hosts'} /etc/hosts && {_AS_HOST}"
        return [
            "nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", mounted, f"host{host}",
        ]  # fmt: skip

    def processes(self, host: int) -> list[int]:
        """Returns the ids of all processes in the host's network."""
        inside = os.stat(f"/run/netns/{self._names[host]}").st_ino
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.stat(process / "ns" / "net").st_ino == inside:
                    pids.append(int(process.name))
        return pids

    def cut(self, host: int) -> None:
        """Pulls the host's cable at the switch: connections stay open, and what is sent is lost."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Plugs the host's cable in again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"10.214.0.{host + 1} host{host}\n" for host in range(len(self._names))
        )
        for host, name in enumerate(self._names):
            _files(name).mkdir(parents=True)
            # `ip netns exec` mounts it over /etc/hosts
            (_files(name) / "hosts").write_text(hosts)
            # there is no name server
            (_files(name) / "nsswitch.conf").write_text("hosts: files\n")
            _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"port{host}",
                "netns",
                self._switch,
            )
            _ip(
                "-n",
                self._switch,
                "link",
                "set",
                f"port{host}",
                "master",
                "bridge",
                "up",
            )
            _ip("-n", name, "addr", "add", f"10.214.0.{host + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (self._switch, *self._names):
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True
            )
            shutil.rmtree(_files(name), ignore_errors=True)
        with contextlib.suppress(OSError):
            _files("").rmdir()


def missing() -> str:
    """Says why this machine cannot have such hosts; empty where it can."""
    tools = [
        tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None
    ]
    if tools or os.geteuid():
        return f"hosts as network namespaces need {', '.join(tools) or 'root'}"
    try:
        with Network(1) as network:
            subprocess.run(
                [*network.on(0), "true"], check=True, capture_output=True, text=True
            )
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces are not permitted here: {getattr(error, 'stderr', '') or error}"
    return ""


def _files(name: str) -> Path:
    return Path("/etc/netns") / name


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Cluster(RunFiles):
    """A job of ``rec.train.hybrid`` whose nodes are hosts; leaving the context kills all of its processes.

    Args:
        network: network of the hosts; the scheduler gives the address of host 0 to all.
        run_dir: the run folder, which all hosts see.
        flags: flags of the app.
        settings: overrides of the recipe.
        j: NODESxPROCS.
        max_retries: the component's max_retries.
        environment: the component's env.
    """

    def __init__(
        self,
        network: Network,
        run_dir: Path,
        *flags: str,
        settings: Sequence[str] = SETTINGS,
        j: str = "2x1",
        max_retries: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(run_dir)
        self._network, self._stack = network, contextlib.ExitStack()
        env, app_flags = dict(environment or {}), [*overriding(settings), *flags]
        app = hybrid(
            *app_flags, run_dir=str(run_dir), j=j, max_retries=max_retries, env=env
        )
        values = macros.Values(
            img_root="",
            app_id=run_dir.parent.name,
            replica_id="0",
            rank0_env="TORCHX_RANK0_HOST",
        )
        self._role = values.apply(app.roles[0])
        self.nodes: dict[int, Launched] = {}

    def start(self, *hosts: int) -> Self:
        """Starts the job's node on each of the hosts."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = {**self._role.env, "TORCHX_RANK0_HOST": "host0", "PATH": path}
        for host in hosts:
            command = [*self._network.on(host), self._role.entrypoint, *self._role.args]
            self.nodes[host] = self._stack.enter_context(Launched(command, environment))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def kill(self, host: int) -> None:
        """Kills everything that runs on the host, at once."""
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[host].process.wait()

    def processes(self, *hosts: int) -> list[int]:
        """Returns the ids of the hosts' running processes."""
        pids = [
            pid
            for host in hosts
            for pid in (self.nodes[host].process.pid, *self.nodes[host].descendants())
        ]
        return alive(pids)

    def until(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Waits for a condition; fails when a node ends before, or after ``seconds``."""
        running = [node for node in self.nodes.values() if node.process.poll() is None]
        try:
            running[0].until(
                lambda: (
                    condition()
                    or any(node.process.poll() is not None for node in running)
                ),
                seconds,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        assert condition(), f"a node has ended\n{self.output}"

    def end(self, seconds: float = 400) -> dict[int, int]:
        """Waits for the end; returns the exit code of each host."""
        return {host: node.end(seconds) for host, node in self.nodes.items()}

    @property
    def output(self) -> str:
        """The hosts' output so far."""
        return "\n".join(
            f"--- host{host}, exit code {node.process.poll()}\n{node.output}"
            for host, node in self.nodes.items()
        )
