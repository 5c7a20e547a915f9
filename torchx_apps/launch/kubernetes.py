"""TorchX's Kubernetes scheduler with what it cannot say: restarts that happen, secrets, a user, clear errors.

The manifest is TorchX's Volcano job, to which :func:`complete` adds in one place what TorchX 0.7.0 leaves out. A
service is no job: :func:`service_files` makes of TorchX's pod what kubectl applies.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from torchx.schedulers import kubernetes_scheduler as upstream
from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, ListAppResponse
from torchx.schedulers.kubernetes_scheduler import (
    KubernetesScheduler as TorchxKubernetes,
)
from torchx.specs import AppDef, Role, VolumeMount, runopts
from torchx.util.strings import normalize_str

from torchx_apps.cli.process import MISTAKE
from torchx_apps.launch.checks import role_flags

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

# Seconds between SIGTERM and SIGKILL, longer than a save; Kubernetes gives 30.
GRACE_S = 120
# Seconds until an ended job and its logs are deleted.
KEPT_S = 7 * 86_400
_SCRATCH = "/tmp"

# User of a service without -cfg run_as, and of the image of the package's Dockerfile.
USER = "10001"
_TOKEN = "TORCHREC_EXT_TOKEN"
# Seconds to load a bundle.
_START_S = 900
# Seconds for which a pod answers after the cluster was told to send it nothing more.
_LINGER_S = 15
# Seconds after them for the requests in progress.
_DRAIN_S = 40


class KubernetesScheduler(TorchxKubernetes):
    """Kubernetes with Volcano."""

    def _run_opts(self) -> runopts:
        options = super()._run_opts()
        options.add(
            "secret",
            type_=str,
            help="a Secret of the namespace, whose keys become variables of the job",
        )
        options.add(
            "run_as",
            type_=str,
            help="user and group number; then not root, and with a read-only root folder",
        )
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Any]:
        with warnings.catch_warnings():
            # That Volcano 1.4 does not restart; here the job's own policies do.
            warnings.filterwarnings("ignore", r"\s*Role .* configured with restarts")
            info = super()._submit_dryrun(app, cfg)
        complete(
            info.request.resource,
            app,
            secret=cfg.get("secret"),
            run_as=cfg.get("run_as"),
        )
        return info

    def _api_client(self) -> Any:
        with warnings.catch_warnings():
            # That there is no kubeconfig, which the error after it says too.
            warnings.filterwarnings("ignore", "failed to load kube config")
            return super()._api_client()

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        """Submits the job; returns its namespace and name.

        Raises:
            ValueError: the cluster does not answer or refuses the job, or a volume's claim does not exist.
        """
        namespace = (dryrun_info._cfg or {}).get("namespace") or "default"
        with self._readable("the job"):
            for role in dryrun_info._app.roles:
                for mount in role.mounts:
                    if isinstance(mount, VolumeMount):
                        self._check_claim(namespace, mount.src)
            return str(super().schedule(dryrun_info))

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Returns the job's state; None if the cluster has no such job.

        Raises:
            ValueError: the cluster does not answer, or does not tell it.
        """
        from kubernetes.client.rest import ApiException

        with self._readable(f"to tell the state of {app_id}"):
            try:
                return super().describe(app_id)
            except ApiException as error:
                if error.status != 404:
                    raise
                return None

    def log_iter(self, app_id: str, *args: Any, **options: Any) -> Iterable[str]:
        """Returns the lines of a pod.

        Raises:
            ValueError: there is no such pod, or it has not started.
        """
        with self._readable(f"the log of {app_id}"):
            lines: Iterable[str] = super().log_iter(app_id, *args, **options)
        return lines

    def list(self) -> list[ListAppResponse]:
        """Returns the jobs in the namespace of the kubeconfig's context, by default ``default``.

        Raises:
            ValueError: the cluster does not answer, or does not list them.
        """
        with self._readable("to list jobs"):
            namespace = self._get_active_context()["context"].get(
                "namespace", "default"
            )
            jobs = self._custom_objects_api().list_namespaced_custom_object(
                group="batch.volcano.sh",
                version="v1alpha1",
                namespace=namespace,
                plural="jobs",
                timeout_seconds=30,
            )
        answers = []
        for job in jobs["items"]:
            # A job that Volcano has not seen yet has no status.
            state = job.get("status", {}).get("state", {}).get("phase", "Pending")
            app_id = f"{namespace}:{job['metadata']['name']}"
            answers.append(
                ListAppResponse(app_id=app_id, state=upstream.JOB_STATE[state])
            )
        return answers

    def _cancel_existing(self, app_id: str) -> None:
        with self._readable(f"to cancel {app_id}"):
            super()._cancel_existing(app_id)

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Turns a refusal of the cluster, or a cluster without an answer, into one line."""
        from kubernetes.client.rest import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        # urllib3 would report each attempt.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        try:
            yield
        except ConfigException as error:
            raise ValueError(
                f"-s kubernetes: {error} Name a cluster in ~/.kube/config, or the file of another one in KUBECONFIG"
            ) from None
        except ApiException as error:
            raise ValueError(
                f"-s kubernetes: the cluster refuses {what}: {_message(error.body) or error.reason}"
            ) from None
        except HTTPError as error:
            host = self._api_client().configuration.host
            raise ValueError(
                f"-s kubernetes: no API server answers at {host} ({type(error).__name__}); name a cluster in "
                "~/.kube/config, or the file of another one in KUBECONFIG"
            ) from None

    def _check_claim(self, namespace: str, name: str) -> None:
        from kubernetes.client import CoreV1Api
        from kubernetes.client.rest import ApiException

        try:
            CoreV1Api(self._api_client()).read_namespaced_persistent_volume_claim(
                name, namespace
            )
        except ApiException as error:
            if error.status == 404:
                raise ValueError(
                    f"--mounts src={name}: namespace {namespace} has no PersistentVolumeClaim of that name, and the "
                    "job's pods would wait for it; `kubectl get pvc` lists those that exist"
                ) from None
            # A user who may not look may still submit.
            if error.status != 403:
                raise


def complete(
    job: dict[str, Any],
    app: AppDef,
    *,
    secret: str | None = None,
    run_as: str | None = None,
) -> None:
    """Adds settings to TorchX's Volcano job that TorchX cannot express.

    Args:
        job: the manifest; changed in place.
        app: the job, in the order of its roles.
        secret: a Secret whose keys become variables, or None.
        run_as: number of a user and group, under which the job runs on a read-only root folder; None for the image's.

    Raises:
        ValueError: ``run_as`` is not the number of a user other than root.
    """
    if run_as is not None and not (run_as.isdecimal() and int(run_as) > 0):
        raise ValueError(
            f"-cfg run_as={run_as}: must be the number of a user other than root, such as 10001"
        )
    spec = job["spec"]
    retries = spec["maxRetry"]
    elastic = any(
        role.min_replicas not in (None, role.num_replicas) for role in app.roles
    )
    # Volcano counts the first start too: with maxRetry 1 it starts nothing again.
    spec["maxRetry"] = retries + 1 if retries else 0
    spec["policies"] = _policies(bool(retries), elastic)
    spec["minAvailable"] = sum(
        task.get("minAvailable", task["replicas"]) for task in spec["tasks"]
    )
    spec["ttlSecondsAfterFinished"] = KEPT_S
    for task in spec["tasks"]:
        task.pop("policies", None)
        if "maxRetry" in task:
            task["maxRetry"] = spec["maxRetry"]
        _complete_pod(task["template"], secret, run_as)


def _policies(retries: bool, elastic: bool) -> list[dict[str, Any]]:
    """Returns Volcano's rules for the end of a pod; the first one that applies counts."""
    if retries:
        return [
            {"exitCode": MISTAKE, "action": "TerminateJob"},
            {"event": "PodEvicted", "action": "RestartJob"},
            {"event": "PodFailed", "action": "RestartJob"},
        ]
    # An elastic job goes on with the nodes that are left.
    if elastic:
        return []
    return [{"event": "PodFailed", "action": "TerminateJob"}]


def _complete_pod(pod: V1Pod, secret: str | None, run_as: str | None) -> None:
    from kubernetes.client import models

    spec = pod.spec
    container = pod.spec.containers[0]
    # TorchX asks for less than the limit. A pod whose requests equal its limits is the
    # last to be evicted.
    container.resources.requests = dict(container.resources.limits)
    spec.termination_grace_period_seconds = GRACE_S
    spec.enable_service_links = False
    if spec.service_account_name is None:
        spec.automount_service_account_token = False
    memory = container.resources.limits.get("memory")
    for volume in spec.volumes:
        # Files in the volume count as the pod's memory.
        if volume.empty_dir is not None and memory:
            volume.empty_dir.size_limit = memory
    if secret is not None:
        container.env_from = [
            models.V1EnvFromSource(secret_ref=models.V1SecretEnvSource(name=secret))
        ]
    if run_as is None:
        return
    user = int(run_as)
    spec.security_context = models.V1PodSecurityContext(
        run_as_non_root=True,
        run_as_user=user,
        run_as_group=user,
        fs_group=user,
        seccomp_profile=models.V1SeccompProfile(type="RuntimeDefault"),
    )
    # A pod with a mounted device is privileged.
    if not container.security_context.privileged:
        container.security_context.allow_privilege_escalation = False
        container.security_context.capabilities = models.V1Capabilities(drop=["ALL"])
    container.security_context.read_only_root_filesystem = True
    spec.volumes.append(
        models.V1Volume(name="scratch", empty_dir=models.V1EmptyDirVolumeSource())
    )
    container.volume_mounts.append(
        models.V1VolumeMount(name="scratch", mount_path=_SCRATCH)
    )
    names = {variable.name for variable in container.env}
    container.env += [
        models.V1EnvVar(name=name, value=_SCRATCH)
        for name in ("HOME", "TMPDIR")
        if name not in names
    ]


def _message(body: str | None) -> str:
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def service_files(app: AppDef, cfg: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the objects to run ``rec.serve.http`` on Kubernetes: a Deployment, a Service, a disruption budget.

    A rolling update and a drained node lose no request: a new pod answers before an old one ends, and an old one
    answers for some seconds after the cluster has been told to send it nothing more.

    Args:
        app: the service.
        cfg: ``run_as``, ``secret``, ``namespace``, ``service_account`` and ``image_secret`` of ``-cfg``.

    Returns:
        Objects by the name of their file.

    Raises:
        ValueError: Kubernetes would not run it.
    """
    from kubernetes.client import ApiClient, models

    (role,) = app.roles
    name = normalize_str(app.name)
    flags = dict(role_flags(role))
    _check_service(role)
    labels = {"app.kubernetes.io/name": name}
    pod = upstream.role_to_pod(name, role, cfg.get("service_account"))
    if cfg.get("image_secret"):
        pod.spec.image_pull_secrets = [
            models.V1LocalObjectReference(name=cfg["image_secret"])
        ]
    _complete_pod(pod, cfg.get("secret"), cfg.get("run_as") or USER)
    _as_server(pod, labels, flags, token=cfg.get("secret"))
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if cfg.get("namespace"):
        metadata["namespace"] = cfg["namespace"]
    deployment = {
        "replicas": role.num_replicas,
        "selector": {"matchLabels": labels},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
        },
        "minReadySeconds": 5,
        "progressDeadlineSeconds": _START_S + 60,
        "template": models.V1PodTemplateSpec(metadata=pod.metadata, spec=pod.spec),
    }
    service = {
        "selector": labels,
        "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
    }
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    kinds = {
        "deployment.yaml": ("apps/v1", "Deployment", deployment),
        "service.yaml": ("v1", "Service", service),
        "disruption_budget.yaml": ("policy/v1", "PodDisruptionBudget", budget),
    }
    plain = ApiClient().sanitize_for_serialization
    return {
        file: plain(
            {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        )
        for file, (version, kind, spec) in kinds.items()
    }


def _check_service(role: Role) -> None:
    port = role.port_map["http"]
    if port < 1024:
        raise ValueError(
            f"--port {port}: the pods do not run as root, so their port is 1024 to 65535; callers ask the Service, on "
            "port 80, whatever it is"
        )
    bundle = role.args[2]
    if not any(
        PurePosixPath(bundle).is_relative_to(mount.dst_path) for mount in role.mounts
    ):
        raise ValueError(
            f"--bundle {bundle}: the pods have no such folder; give the volume with it, as in "
            "--mounts type=volume,src=CLAIM,dst=/bundles,readonly"
        )


def _as_server(
    pod: V1Pod, labels: Mapping[str, str], flags: Mapping[str, str], token: str | None
) -> None:
    """Makes a job's pod a server: it stays, answers probes for readiness, and ends after its last answer."""
    from kubernetes.client import models

    pod.metadata = models.V1ObjectMeta(labels=labels)
    spec = pod.spec
    container = pod.spec.containers[0]
    spec.restart_policy = "Always"
    spec.termination_grace_period_seconds = _LINGER_S + _DRAIN_S
    # SIGTERM ends the server at once, so the cluster waits before it.
    container.lifecycle = models.V1Lifecycle(
        pre_stop=models.V1LifecycleHandler(
            _exec=models.V1ExecAction(command=["sleep", str(_LINGER_S)])
        )
    )
    spec.topology_spread_constraints = [
        models.V1TopologySpreadConstraint(
            max_skew=1,
            topology_key="kubernetes.io/hostname",
            when_unsatisfiable="ScheduleAnyway",
            label_selector=models.V1LabelSelector(match_labels=labels),
        )
    ]
    # A Secret without a token keeps the pods from starting; without this they would
    # answer everybody.
    if token is not None and "token-file" not in flags:
        reference = models.V1SecretKeySelector(name=token, key=_TOKEN)
        container.env.append(
            models.V1EnvVar(
                name=_TOKEN, value_from=models.V1EnvVarSource(secret_key_ref=reference)
            )
        )
    container.startup_probe = _probe(
        "/readyz", flags, period_s=2, failures=_START_S // 2
    )
    container.readiness_probe = _probe("/readyz", flags, period_s=2, failures=2)
    container.liveness_probe = _probe("/healthz", flags, period_s=10, failures=6)


def _probe(path: str, flags: Mapping[str, str], *, period_s: int, failures: int) -> Any:
    from kubernetes.client import models

    # The kubelet asks under the pod's address, which --allowed_hosts refuses.
    host = flags.get("allowed-hosts", "*").split(",")[0].strip()
    headers = (
        []
        if host == "*"
        else [models.V1HTTPHeader(name="Host", value=host.replace("*.", "probe."))]
    )
    return models.V1Probe(
        http_get=models.V1HTTPGetAction(
            path=path, port="http", http_headers=headers or None
        ),
        period_seconds=period_s,
        timeout_seconds=5,
        failure_threshold=failures,
    )
