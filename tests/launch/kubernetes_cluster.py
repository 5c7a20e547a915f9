"""A real Kubernetes API server on this machine, with tests/launch/kubernetes_loop.py for all that is behind it.

The variable TORCHREC_EXT_KUBERNETES names a folder with the programs `kube-apiserver` and `etcd` and Volcano's
`batch.volcano.sh_jobs.yaml`. From Debian's source package `kubernetes` 1.20.2 with Go 1.15 the server is built in some
minutes; etcd is its package `etcd-server`.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import yaml
from typing_extensions import Self

from tests.launch.kubernetes_loop import CLAIM, NAMESPACE
from tests.launch.two_hosts import Network

PROGRAMS = "TORCHREC_EXT_KUBERNETES"
_FILES = ("kube-apiserver", "etcd", "batch.volcano.sh_jobs.yaml")
_HEAD, _NODES = 0, (1, 2)
_ADDRESS = "https://10.214.0.1:6443"
_ETCD = "http://127.0.0.1:2379"


def missing_programs() -> str:
    """Says what there is no API server of; empty where there is one."""
    folder = os.environ.get(PROGRAMS)
    if not folder:
        return f"{PROGRAMS} names no folder with {', '.join(_FILES)}"
    absent = [name for name in _FILES if not Path(folder, name).exists()]
    return f"{PROGRAMS}={folder}: has no {', '.join(absent)}" if absent else ""


class KubernetesCluster:
    """An API server with two nodes; leaving the context ends it with all pods.

    Args:
        network: network of three hosts; the API server is on the first.
        folder: folder for keys, logs and claims.

    Attributes:
        claim: folder that is the claim ``runs`` of the namespace ``ml``.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        self._programs = Path(os.environ[PROGRAMS])
        self.claim = folder / "claims" / CLAIM
        for path in (self.claim, folder / "pods", folder / "submitted"):
            path.mkdir(parents=True)
        self.claim.chmod(0o777)
        self._running: list[subprocess.Popen[bytes]] = []

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
        self._stop()

    def torchx(
        self, *words: str, user: str = "admin"
    ) -> subprocess.CompletedProcess[str]:
        """Runs `torchx` as a user of the cluster, ``admin`` or ``guest``, who may do nothing."""
        return subprocess.run(
            [*self._network.within(_HEAD), "torchx", *words],
            cwd=self._folder / "submitted",
            env={
                **self._environment(),
                "KUBECONFIG": str(self._folder / f"{user}.yaml"),
                "PYTHONWARNINGS": "ignore",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def run(
        self, *words: str, cfg: str = "", user: str = "admin"
    ) -> subprocess.CompletedProcess[str]:
        """Runs `torchx run -s kubernetes`, with the claim at /mnt."""
        settings = ",".join(filter(None, [f"queue=default,namespace={NAMESPACE}", cfg]))
        component, *flags = words
        mounts = (
            []
            if "--mounts" in flags
            else ["--mounts", f"type=volume,src={CLAIM},dst=/mnt"]
        )
        return self.torchx(
            "run", "-s", "kubernetes", "-cfg", settings, "--workspace", "", component, "--image", "my_image:1", *mounts,
            *flags, user=user,
        )  # fmt: skip

    def submit(self, *words: str, cfg: str = "") -> str:
        """Submits a component; returns the job's address."""
        done = self.run(*words, cfg=cfg)
        assert done.returncode == 0, done.stderr
        match = re.fullmatch(rf"(kubernetes://torchx/{NAMESPACE}:\S+)\n", done.stdout)
        assert match, done.stdout
        return match[1]

    def state(self, job: str) -> str:
        """Returns the job's state as `torchx status` prints it."""
        done = self.torchx("status", job)
        match = re.search(r"State: (\w+)", done.stdout)
        assert match, done.stdout + done.stderr
        return match[1]

    def end(self, job: str, seconds: float = 300) -> str:
        """Waits until the job has ended; returns its state."""
        states = [""]

        def ended() -> bool:
            states.append(self.state(job))
            return states[-1] in ("SUCCEEDED", "FAILED", "CANCELLED")

        self.until(job, ended, seconds)
        return states[-1]

    def until(
        self, job: str, condition: Callable[[], object], seconds: float = 240
    ) -> None:
        """Waits for a condition; fails with what the job's pods have written after ``seconds``."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (
                f"{job}: not after {seconds} s:\n{self.files(job)}"
            )
            time.sleep(0.3)

    def files(self, job: str) -> str:
        """Returns what the job's pods have written last, and the loop."""
        logs = sorted((self._folder / "pods").glob(f"{job.rpartition(':')[2]}-*/log"))
        return "\n".join(
            f"--- {log}\n{log.read_text()}"
            for log in [*logs, self._folder / "loop.out"]
        )

    def kill(self, job: str, task: int) -> None:
        """Kills a pod at once."""
        (pod,) = (self._folder / "pods").glob(
            f"{job.rpartition(':')[2]}-*-{task}-0/pid"
        )
        for pid in (
            Path(f"/proc/{pod.read_text()}/task/{pod.read_text()}/children")
            .read_text()
            .split()
        ):
            os.kill(int(pid), signal.SIGKILL)

    @contextlib.contextmanager
    def held(self, task: str) -> Iterator[None]:
        """Keeps the pods of a task, such as ``train-1``, from beginning, as if their image had not come yet."""
        file = self._folder / f"held-{task}"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
        }

    def _start(self) -> None:
        folder = self._folder
        tokens = {user: secrets.token_hex(16) for user in ("admin", "guest")}
        (folder / "tokens.csv").write_text(
            f"{tokens['admin']},admin,1,system:masters\n{tokens['guest']},guest,2\n"
        )
        for user, token in tokens.items():
            context = {"cluster": "lab", "user": user, "namespace": NAMESPACE}
            text = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "lab",
                "clusters": [
                    {
                        "name": "lab",
                        "cluster": {
                            "server": _ADDRESS,
                            "insecure-skip-tls-verify": True,
                        },
                    }
                ],
                "users": [{"name": user, "user": {"token": token}}],
                "contexts": [{"name": "lab", "context": context}],
            }
            (folder / f"{user}.yaml").write_text(yaml.safe_dump(text))
        nodes = [
            {
                "name": f"host{node}",
                "network": self._network.name(node),
                "address": f"10.214.0.{node + 1}",
            }
            for node in _NODES
        ]
        (folder / "nodes.json").write_text(json.dumps(nodes))
        shutil.copy(self._programs / _FILES[2], folder / "crd.yaml")
        for words in (
            "genrsa -out account.key 2048",
            "req -x509 -newkey rsa:2048 -nodes -keyout kubelet.key -out kubelet.crt -subj /CN=kubelet -days 1",
        ):
            subprocess.run(
                ["openssl", *words.split()], cwd=folder, check=True, capture_output=True
            )
        self._daemon(
            self._programs / "etcd", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}", "--listen-peer-urls=http://127.0.0.1:2380",
        )  # fmt: skip
        self._daemon(
            self._programs / "kube-apiserver", f"--etcd-servers={_ETCD}", "--secure-port=6443",
            "--bind-address=0.0.0.0", "--advertise-address=10.214.0.1", f"--cert-dir={folder / 'certificates'}",
            "--service-account-issuer=https://lab", f"--service-account-signing-key-file={folder / 'account.key'}",
            f"--service-account-key-file={folder / 'account.key'}", f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC", "--service-cluster-ip-range=10.99.0.0/24",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        self._daemon(
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.launch.kubernetes_loop",
            folder,
            name="loop",
        )
        end = time.monotonic() + 180
        while not (folder / "ready").exists():
            log = "\n".join(file.read_text()[-3000:] for file in folder.glob("*.out"))
            assert time.monotonic() < end, log
            assert self._running[-1].poll() is None, log
            time.sleep(0.2)

    def _daemon(self, *words: object, name: str = "") -> None:
        with (self._folder / f"{name or Path(str(words[0])).name}.out").open(
            "wb"
        ) as out:
            self._running.append(
                subprocess.Popen(
                    [*self._network.within(_HEAD), *map(str, words)],
                    env=self._environment(),
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _stop(self) -> None:
        for daemon in reversed(self._running):
            daemon.terminate()
            daemon.wait()
        for host in (_HEAD, *_NODES):
            for pid in self._network.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
