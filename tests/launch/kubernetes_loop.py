"""Plays Volcano's controller, the kubelets and DNS for a real API server: `python -m tests.launch.kubernetes_loop DIR`.

DIR/nodes.json names the nodes' networks. A pod is a process in the network of its node and in mount, process and host
name spaces of its own, with the variables, volumes and user of its manifest; a claim is a folder of DIR/claims. There
are no limits of memory, no queues and no network policies. A pod does not begin as long as there is a file
DIR/held-TASK, as if its image had not come to the node yet. States are those of Volcano's pkg/controllers/job/state.
"""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from urllib3.exceptions import HTTPError

NAMESPACE, CLAIM = "ml", "runs"
PORT = 10_250
VOLCANO = {"group": "batch.volcano.sh", "version": "v1alpha1", "plural": "jobs"}
ENDED = ("Completed", "Failed", "Terminated")


@dataclass
class Pod:
    """A pod that was started.

    Args:
        process: what runs it, whose one child is the container's process 1.
        task: name of its task.
        grace_s: seconds between SIGTERM and SIGKILL.
        phase: Running, Succeeded or Failed.
    """

    process: subprocess.Popen[bytes]
    task: str
    grace_s: float
    phase: str = "Running"

    def send(self, number: int) -> None:
        """Sends a signal to process 1."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                os.kill(int(pid), number)


class Cluster:
    """The controller.

    Args:
        folder: the cluster's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[dict[str, str]] = json.loads(
            (folder / "nodes.json").read_text()
        )
        # Here, because pytest imports this file wherever it collects, with the extra
        # `kubernetes` or without.
        from kubernetes import client, config

        config.load_kube_config(str(folder / "admin.yaml"))
        self._core, self._jobs = client.CoreV1Api(), client.CustomObjectsApi()
        self._definitions = client.ApiextensionsV1Api()
        self._pods: dict[str, dict[str, Pod]] = {}  # by job, and by name

    def prepare(self, crd: Path) -> None:
        """Waits for the API server and gives it Volcano's Job, a namespace, a claim and the nodes."""
        self._until(self._core.list_namespace)
        definition = yaml.safe_load(crd.read_text())
        for version in definition["spec"]["versions"]:
            simplify(version["schema"])
        self._definitions.create_custom_resource_definition(definition)
        self._core.create_namespace({"metadata": {"name": NAMESPACE}})
        self._until(self._listed)  # the server takes a while to know the resource
        spec = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        }
        self._core.create_namespaced_persistent_volume_claim(
            NAMESPACE, {"metadata": {"name": CLAIM}, "spec": spec}
        )
        # where this process answers for all kubelets
        address = {"type": "InternalIP", "address": "10.214.0.1"}
        status = {
            "addresses": [address],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}},
        }
        for node in self._nodes:
            self._core.create_node({"metadata": {"name": node["name"]}})
            self._core.patch_node_status(node["name"], {"status": status})

    def _until(self, answered: Callable[[], object]) -> None:
        from kubernetes.client.rest import ApiException

        end = time.monotonic() + 120
        while True:
            try:
                answered()
                return
            except (ApiException, HTTPError):
                assert time.monotonic() < end
                time.sleep(0.2)

    def _listed(self) -> list[Any]:
        return list(
            self._jobs.list_namespaced_custom_object(**VOLCANO, namespace=NAMESPACE)[
                "items"
            ]
        )

    def step(self) -> None:
        """Brings every job one step further."""
        jobs = {job["metadata"]["name"]: job for job in self._listed()}
        for name in [name for name in self._pods if name not in jobs]:
            self.kill(name)
        for job in jobs.values():
            state = job.get("status", {}).get("state", {}).get("phase")
            if state not in ENDED:
                self._bring_on(job, job.get("status", {}).get("retryCount", 0))

    def _bring_on(self, job: Any, retries: int) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        if name not in self._pods:
            self._pods[name] = {}
            for number, task in enumerate(spec["tasks"]):
                self._start(job, task, number)
            self._report(name, "Running", retries)
            return
        failed: list[int] = []
        for pod_name, pod in self._pods[name].items():
            code = pod.process.poll()
            if pod.phase == "Running" and code is not None:
                pod.phase = "Failed" if code else "Succeeded"
                failed += [code] if code else []
                self._report_pod(pod_name, pod, code)
        action = next(
            (action for code in failed for action in actions(spec["policies"], code)),
            None,
        )
        pods = self._pods[name].values()
        if action == "RestartJob":
            self.kill(name, forget=True)
            self._report(
                name,
                "Failed"
                if retries + 1 >= (spec.get("maxRetry") or 3)
                else "Restarting",
                retries + 1,
            )
        elif action == "TerminateJob":
            self.kill(name, forget=False)
            self._report(name, "Terminated", retries)
        elif all(pod.phase != "Running" for pod in pods):
            enough = (
                sum(pod.phase == "Succeeded" for pod in pods) >= spec["minAvailable"]
            )
            self._report(name, "Completed" if enough else "Failed", retries)
        elif failed:
            self._report(name, "Running", retries)

    def _start(self, job: Any, task: Any, number: int) -> None:
        """Creates the Pod as Volcano does, and runs it as a kubelet does."""
        job_name = job["metadata"]["name"]
        tasks = [each["name"] for each in job["spec"]["tasks"]]
        name = f"{job_name}-{task['name']}-0"
        node = self._nodes[number % len(self._nodes)]
        template = json.loads(json.dumps(task["template"]))
        spec = template["spec"]
        (container,) = spec["containers"]
        hosts = {
            f"VC_{each.replace('-', '_').upper()}_HOSTS": f"{job_name}-{each}-0.{job_name}"
            for each in tasks
        }
        container["env"] += [
            {"name": key, "value": value} for key, value in hosts.items()
        ]
        spec.update(hostname=name, subdomain=job_name, nodeName=node["name"])
        metadata = {**template["metadata"], "name": name}
        self._core.create_namespaced_pod(
            NAMESPACE, {"metadata": metadata, "spec": spec}
        )
        box = self._folder / "pods" / name
        (box / "work").mkdir(parents=True, exist_ok=True)
        (box / "work").chmod(0o777)
        lines = [
            f"{self._nodes[index % len(self._nodes)]['address']} {job_name}-{each}-0.{job_name} {job_name}-{each}-0"
            for index, each in enumerate(tasks)
        ]
        (box / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        held = self._folder / f"held-{task['name']}"
        user = as_user(spec)
        script = [
            "set -e", f"hostname {name}", f"mount --bind {box / 'hosts'} /etc/hosts",
            *(python_for_others(box) if user else []), f"cd {box / 'work'}", *self._mounts(spec, container),
            f"while [ -e {held} ]; do sleep 0.2; done", *(["cd /tmp"] if user else []), 'exec "$@"',
        ]  # fmt: skip
        words = [
            "nsenter", f"--net=/run/netns/{node['network']}",
            "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
            "sh", "-c", "\n".join(script), "pod", *user, *container["command"], *container.get("args", []),
        ]  # fmt: skip
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {
            "PATH": path,
            "HOSTNAME": name,
            **{each["name"]: each["value"] for each in container["env"]},
        }
        with (box / "log").open("wb") as log:
            process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        pod = Pod(process, task["name"], spec["terminationGracePeriodSeconds"])
        (box / "pid").write_text(str(process.pid))
        self._pods[job_name][name] = pod
        self._report_pod(name, pod, None)

    def _mounts(self, spec: Any, container: Any) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "persistentVolumeClaim" in volume:
                yield f"mount --bind {self._folder / 'claims' / volume['persistentVolumeClaim']['claimName']} {path}"
            else:
                yield f"mount -t tmpfs -o mode=1777 none {path}"
        if container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            yield "mount -o remount,bind,ro /"

    def kill(self, job: str, *, forget: bool = True) -> None:
        """Ends a job's pods as kubelets do: SIGTERM, and SIGKILL after their time."""
        pods = self._pods.pop(job) if forget else self._pods[job]
        for pod in pods.values():
            pod.send(signal.SIGTERM)
        begun = time.monotonic()
        for name, pod in pods.items():
            try:
                pod.process.wait(max(0.1, begun + pod.grace_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                pod.process.kill()
                pod.process.wait()
            if forget:
                self._core.delete_namespaced_pod(
                    name, NAMESPACE, grace_period_seconds=0
                )

    def close(self) -> None:
        """Ends all pods."""
        for pods in self._pods.values():
            for pod in pods.values():
                pod.process.kill()

    def _report_pod(self, name: str, pod: Pod, code: int | None) -> None:
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = {
            "name": pod.task, "image": "i", "imageID": "", "ready": code is None, "restartCount": 0, "state": state
        }  # fmt: skip
        status = {"phase": pod.phase, "containerStatuses": [container]}
        self._core.patch_namespaced_pod_status(name, NAMESPACE, {"status": status})

    def _report(self, job: str, phase: str, retries: int) -> None:
        # A merge keeps what it is not told: each phase that no longer is has to go by
        # name.
        tasks = {
            pod.task: {
                "phase": {
                    each: 1 if each == pod.phase else None
                    for each in ("Running", "Succeeded", "Failed")
                }
            }
            for pod in self._pods.get(job, {}).values()
        }
        status = {
            "state": {"phase": phase},
            "retryCount": retries,
            "taskStatusCount": tasks,
        }
        self._jobs.patch_namespaced_custom_object_status(
            **VOLCANO, namespace=NAMESPACE, name=job, body={"status": status}
        )


def actions(policies: list[Any], code: int) -> Iterator[str]:
    """Yields the actions of the policies that apply to a pod's exit code, the one that counts first."""
    for policy in policies:
        if policy.get("exitCode") == code or policy.get("event") == "PodFailed":
            yield policy["action"]


def as_user(spec: Mapping[str, Any]) -> list[str]:
    """Returns the words before a command that make it run as the pod's user."""
    user = spec.get("securityContext", {}).get("runAsUser")
    if user is None:
        return []
    return [
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--inh-caps=-all",
        "--no-new-privs",
    ]


def python_for_others(box: Path) -> Iterator[str]:
    """Yields what makes this Python one that users who are not root can run, where it lies in a folder of root's."""
    python = Path(sys.base_prefix)
    closed = next(
        (path for path in reversed(python.parents) if not path.stat().st_mode & 0o001),
        None,
    )
    if closed is not None:
        yield f"mkdir -p {box / 'python'}"
        yield f"mount --bind {python} {box / 'python'}"
        yield f"mount -t tmpfs -o mode=755 none {closed}"
        yield f"mkdir -p {python}"
        yield f"mount --bind {box / 'python'} {python}"


def simplify(schema: Any) -> None:
    """Takes from a schema what Kubernetes 1.20, which is what can be built, does not know yet."""
    if isinstance(schema, dict):
        if schema.get("default") == "":
            del schema["default"]
        for key in (
            "x-kubernetes-validations",
            "x-kubernetes-list-map-keys",
            "x-kubernetes-list-type",
        ):
            schema.pop(key, None)
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            simplify(each)


def answer_for_kubelets(folder: Path) -> None:
    """Answers the API server's requests for the logs of pods."""

    class Kubelet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # /containerLogs/NAMESPACE/POD/CONTAINER
            pod = self.path.partition("?")[0].split("/")[3]
            stamp = (
                b"2026-11-23T12:00:00.0Z " if "timestamps=true" in self.path else b""
            )
            log = (folder / "pods" / pod / "log").read_bytes().splitlines(keepends=True)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(stamp + line for line in log))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", PORT), Kubelet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "kubelet.crt", folder / "kubelet.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    """Runs until SIGTERM."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    answer_for_kubelets(folder)
    cluster = Cluster(folder)
    cluster.prepare(folder / "crd.yaml")
    (folder / "ready").touch()
    try:
        while True:
            cluster.step()
            time.sleep(0.3)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
