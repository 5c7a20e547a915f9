"""Every component's Kubernetes manifest against Kubernetes' schema, Volcano's Job and the rules for names and labels.

The pods are validated by the package kubernetes-validate, strictly; Volcano's part of the manifest by the types of its
custom resource, of which FIELDS is an extract (volcano-sh/volcano, config/crd/volcano/bases, batch.volcano.sh_jobs).
"""

import argparse
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torchrec_ext.components as components  # type: ignore[import-not-found]
import yaml
from torchrec_ext.components import data, serve, train
from torchx.specs import AppDef
from torchx.specs.finder import get_components

from torchx_apps.cli.process import MISTAKE
from torchx_apps.launch.checks import check_app

kubernetes = pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

IMAGE = "my_image:1"
VERSIONS = ("1.25", "1.33")
MOUNTS = [
    "type=volume",
    "src=runs",
    "dst=/runs",
    "type=bind",
    "src=/data",
    "dst=/data",
    "readonly",
]
RUNS = {"image": IMAGE, "env": {"NCCL_SOCKET_IFNAME": "eth0,eth1"}, "mounts": MOUNTS}
APPS: Mapping[str, Callable[[], AppDef]] = {
    "train.hybrid": lambda: train.hybrid(
        j="2x4", gpu=4, max_retries=3, run_dir="/runs/a", **RUNS
    ),
    "train.networks": lambda: train.networks(
        j="2x2", vary="train.seed=0,1", run_dir="/runs/n", **RUNS
    ),
    "train.stream": lambda: train.stream(
        log="/data/clicks", run_dir="/runs/s", max_retries=3, **RUNS
    ),
    "embed": lambda: components.embed(
        bundle="/runs/b", catalogue="/data/i", id="i", out="/runs/v", **RUNS
    ),
    "data.preprocess": lambda: data.preprocess(
        recipe="clicks", out="/runs/ready", **RUNS
    ),
    "serve.export": lambda: serve.export(run="/runs/a", out="/runs/b", **RUNS),
    "serve.http": lambda: serve.http(
        bundle="/runs/b", host="0.0.0.0", workers=2, **RUNS
    ),
    "elastic": lambda: train.hybrid(j="1:3x2", max_retries=3, **RUNS),
    "elastic once": lambda: train.hybrid(j="1:3x2", **RUNS),
    "named resource": lambda: train.hybrid(j="2x8", h="aws_p4d.24xlarge", **RUNS),
    "device": lambda: train.hybrid(
        image=IMAGE, mounts=["type=device", "src=/dev/infiniband/uverbs0"]
    ),
    "long name": lambda: train.networks(j="11x1", name="a" * 29, image=IMAGE),
}

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
EVENT = {
    "enum": [
        "*",
        "PodPending",
        "PodRunning",
        "PodFailed",
        "PodEvicted",
        "Unknown",
        "TaskCompleted",
        "OutOfSync",
        "CommandIssued",
    ]
}
ACTION = {
    "enum": [
        "AbortJob",
        "RestartJob",
        "RestartTask",
        "RestartPod",
        "TerminateJob",
        "CompleteJob",
        "ResumeJob",
    ]
}
NAME = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """The schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": required.split(),
    }


# One event or one exit code, which is none of success.
POLICY = {
    **fields(
        "action", event=EVENT, exitCode={"type": "integer", "minimum": 1}, action=ACTION
    ),
    "oneOf": [{"required": ["event"]}, {"required": ["exitCode"]}],
}
TASK = fields(
    "name replicas template",
    name=NAME,
    replicas=COUNT,
    minAvailable=COUNT,
    maxRetry=COUNT,
    policies={"type": "array", "items": POLICY},
    template={"type": "object"},
)
SPEC = fields(
    "tasks queue",
    schedulerName=TEXT,
    queue=TEXT,
    priorityClassName=TEXT,
    maxRetry=COUNT,
    minAvailable=COUNT,
    ttlSecondsAfterFinished=COUNT,
    plugins={
        "type": "object",
        "additionalProperties": {"type": "array", "items": TEXT},
    },
    policies={"type": "array", "items": POLICY},
    tasks={"type": "array", "items": TASK, "minItems": 1},
)
FIELDS = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=fields("name", name={**NAME, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
    spec=SPEC,
)
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")


def manifest(app: AppDef, **cfg: str) -> Any:
    """What `torchx run -s kubernetes --dryrun` prints, read again."""
    from torchx_apps.launch.kubernetes import KubernetesScheduler

    scheduler = KubernetesScheduler("test")
    # Releases after 0.7.0 ask a server in a dry run too, unless told not to.
    options = (
        {"validate_spec": False}
        if "validate_spec" in dict(scheduler.run_opts())
        else {}
    )
    return yaml.safe_load(
        str(
            scheduler.submit_dryrun(app, {"queue": "default", **options, **cfg}).request
        )
    )


def pods(job: Any) -> list[Any]:
    return [task["template"]["spec"] for task in job["spec"]["tasks"]]


def complaints(job: Any) -> list[str]:
    """What an API server with Volcano would refuse, or could never run."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra dev")
    validate = pytest.importorskip("kubernetes_validate", reason="needs the extra dev")
    lines = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(FIELDS).iter_errors(job)
    ]
    for task in job["spec"]["tasks"]:
        name = f"{job['metadata']['name']}-{task['name']}-0"
        metadata = {**task["template"]["metadata"], "name": name}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": task["template"]["spec"],
        }
        for version in VERSIONS:
            try:
                validate.validate(pod, version, strict=True)
            except validate.ValidationError as error:
                lines.append(f"{task['name']}: {error}")
        if len(name) > 63:
            lines.append(f"pod {name} has {len(name)} characters")
        labels = metadata["labels"].items()
        lines += [
            f"label {key}={text}"
            for key, text in labels
            if len(text) > 63 or not LABEL.fullmatch(text)
        ]
    return lines


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize(
    "cfg",
    [{}, {"secret": "torchrec-ext", "run_as": "10001"}],
    ids=["plain", "hardened"],
)
def test_an_api_server_would_take_every_manifest(
    name: str, cfg: dict[str, str]
) -> None:
    app = APPS[name]()
    assert check_app(app, "kubernetes") == []
    job = manifest(app, **cfg)
    assert complaints(job) == []
    for pod in pods(job):
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]
        assert pod["terminationGracePeriodSeconds"] > 30


def test_every_component_is_among_them() -> None:
    assert {
        name.removeprefix("rec.")
        for name in get_components()
        if name.startswith("rec.")
    } <= set(APPS)


VOLUME = ["type=volume", "src=bundles", "dst=/bundles", "readonly"]
SERVICES: Mapping[str, Callable[[], AppDef]] = {
    "plain": lambda: serve.http(bundle="/bundles/live", manifest="k8s", mounts=VOLUME, image=IMAGE),
    "full": lambda: serve.http(
        "--watch", "30",
        bundle="/bundles/live", manifest="k8s", replicas=5, workers=4, name="My_Recommender", image=IMAGE,
        mounts=[*VOLUME, "type=bind", "src=/keys", "dst=/keys", "readonly"], allowed_hosts="*.b.c, d",
        token_file="/keys/token", vectors="/keys/users",
    ),
}  # fmt: skip
CFG = {
    "secret": "serving",
    "run_as": "20002",
    "namespace": "ml",
    "image_secret": "registry",
    "service_account": "a",
}


def service(app: AppDef, **cfg: str) -> dict[str, Any]:
    """The objects of a service by their kind."""
    from torchx_apps.launch.kubernetes import service_files

    assert check_app(app, "kubernetes") == []
    return {made["kind"]: made for made in service_files(app, cfg).values()}


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("cfg", [{}, CFG], ids=["plain", "configured"])
def test_an_api_server_would_take_every_service(name: str, cfg: dict[str, str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the extra dev")
    made = service(SERVICES[name](), **cfg)
    assert set(made) == {"Deployment", "Service", "PodDisruptionBudget"}
    for version in VERSIONS:
        for each in made.values():
            validate.validate(each, version, strict=True)
    template = made["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels == made["Deployment"]["spec"]["selector"]["matchLabels"]
    assert (
        labels
        == made["Service"]["spec"]["selector"]
        == made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    )
    assert all(LABEL.fullmatch(text) for text in labels.values())
    (container,) = template["spec"]["containers"]
    (port,) = made["Service"]["spec"]["ports"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}
    names = [variable["name"] for variable in container["env"]]
    assert len(names) == len(set(names))
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {each["metadata"].get("namespace") for each in made.values()} == {
        cfg.get("namespace")
    }


def test_a_mistake_in_a_service_is_noticed() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the extra dev")
    made = service(SERVICES["plain"]())["Deployment"]
    made["spec"]["minReadySecondss"] = 5
    with pytest.raises(validate.ValidationError):
        validate.validate(made, VERSIONS[0], strict=True)


@pytest.mark.parametrize(("name", "pods"), [("plain", 2), ("full", 5)])
def test_an_update_keeps_every_pod_until_another_answers_and_gives_it_time_to_end(
    name: str, pods: int
) -> None:
    spec = service(SERVICES[name]())["Deployment"]["spec"]
    assert spec["replicas"] == pods
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + 30


def test_a_service_with_a_secret_does_not_start_without_its_token() -> None:
    def token(app: AppDef, **cfg: str) -> list[Any]:
        (container,) = service(app, **cfg)["Deployment"]["spec"]["template"]["spec"][
            "containers"
        ]
        return [
            each["valueFrom"]
            for each in container["env"]
            if each["name"] == "TORCHREC_EXT_TOKEN"
        ]

    reference = {"secretKeyRef": {"name": "serving", "key": "TORCHREC_EXT_TOKEN"}}
    assert token(SERVICES["plain"](), secret="serving") == [reference]
    assert (
        token(SERVICES["plain"]()) == token(SERVICES["full"](), secret="serving") == []
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "9lives"}, "--name 9lives: "),
        ({"name": "a" * 46}, f"--name {'a' * 46}: has 46 characters; "),
        (
            {"port": 80},
            "--port 80: the pods do not run as root, so their port is 1024 to 65535; callers ask the Service",
        ),
        (
            {"bundle": "runs/b"},
            "--bundle runs/b: the pods have no such folder; give the volume with it",
        ),
        ({"image": None}, "--image: TorchX's own image, "),
    ],
)
def test_a_service_that_would_not_run_is_refused(
    changes: dict[str, Any], line: str
) -> None:
    given = {
        "bundle": "/bundles/live",
        "manifest": "k8s",
        "mounts": VOLUME,
        "image": IMAGE,
    } | changes
    with pytest.raises(ValueError) as caught:
        service(
            serve.http(
                **{key: value for key, value in given.items() if value is not None}
            )
        )
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_replicas_are_those_of_a_manifest() -> None:
    with pytest.raises(
        ValueError,
        match=r"^--replicas 3: the pods of --manifest, 1 or more; leave it out without",
    ):
        serve.http(bundle="b", replicas=3)
    job, app = serve.http(bundle="b"), SERVICES["plain"]()
    assert (job.roles[0].num_replicas, app.roles[0].num_replicas) == (1, 2)
    assert (job.metadata, app.metadata) == ({}, {"manifest": "k8s"})


def torchx_run(*words: str) -> None:
    from torchx_apps.torchx_run import Run

    parser = argparse.ArgumentParser(prog="torchx run")
    parser.add_argument("--log_level", default="WARNING")
    command = Run()
    command.add_arguments(parser)
    command.run(parser.parse_args(words))


def test_torchx_run_writes_the_files_of_a_service_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "k8s"
    words = [
        "rec.serve.http",
        "--manifest",
        str(folder),
        "--image",
        IMAGE,
        "--bundle",
        "/bundles/live",
    ]
    words += ["--mounts", ",".join(VOLUME)]
    with pytest.raises(SystemExit) as ended:
        torchx_run("--dryrun", *words)
    assert ended.value.code == 0
    shown = list(yaml.safe_load_all(capsys.readouterr().out))
    assert not folder.exists()
    with pytest.raises(SystemExit) as ended:
        torchx_run(*words)
    assert ended.value.code == 0
    files = ["deployment.yaml", "service.yaml", "disruption_budget.yaml"]
    assert (
        capsys.readouterr().out
        == f"wrote {', '.join(files)}; now: kubectl apply -f {folder}\n"
    )
    assert [yaml.safe_load((folder / name).read_text()) for name in files] == shown
    assert shown == list(service(SERVICES["plain"]()).values())
    for option, line in (
        (
            ["-s", "slurm"],
            "--manifest: it writes files for Kubernetes, not for -s slurm",
        ),
    ):
        with pytest.raises(SystemExit):
            torchx_run(*option, *words)
        assert line in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        torchx_run(
            *[
                str(tmp_path / "file" / "k8s") if word == str(folder) else word
                for word in words
            ]
        )
    assert "name a folder that can be written" in capsys.readouterr().err


def test_mistakes_in_a_manifest_are_noticed() -> None:
    job = manifest(APPS["train.hybrid"]())
    job["spec"]["maxRetrys"] = job["spec"].pop("maxRetry")
    job["spec"]["policies"][0]["event"] = "PodFailed"
    pods(job)[0]["restartPolicyy"] = "Never"
    pods(job)[1]["containers"][0]["ports"] = [{"containerPort": "x"}]
    noticed = "\n".join(complaints(job))
    for mistake in ("maxRetrys", "policies[0]", "restartPolicyy", "containerPort"):
        assert mistake in noticed


def test_restarts_are_counted_as_volcano_does_and_a_mistake_ends_the_job() -> None:
    spec = manifest(train.hybrid(j="2x1", max_retries=1, image=IMAGE))["spec"]
    assert spec["maxRetry"] == 2
    assert [rule["action"] for rule in spec["policies"]] == [
        "TerminateJob",
        "RestartJob",
        "RestartJob",
    ]
    assert spec["policies"][0]["exitCode"] == MISTAKE
    assert spec["minAvailable"] == 2
    spec = manifest(train.hybrid(j="2x1", image=IMAGE))["spec"]
    assert (spec["maxRetry"], spec["policies"]) == (
        0,
        [{"event": "PodFailed", "action": "TerminateJob"}],
    )
    spec = manifest(train.hybrid(j="1:2x1", image=IMAGE))["spec"]
    assert (spec["minAvailable"], spec["policies"]) == (1, []), (
        "it begins with one node"
    )


def test_a_user_who_is_not_root_on_a_root_folder_that_is_read_only() -> None:
    for pod in pods(manifest(APPS["train.networks"](), run_as="10001", secret="keys")):
        (container,) = pod["containers"]
        assert (
            pod["securityContext"]["runAsUser"]
            == pod["securityContext"]["fsGroup"]
            == 10001
        )
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    for number in ("0", "root", "-1"):
        with pytest.raises(
            ValueError,
            match=f"^-cfg run_as={number}: must be the number of a user other than root",
        ):
            manifest(APPS["train.hybrid"](), run_as=number)


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    """An API server's address, and its answers by the end of the path."""
    known: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, body = next(
                (known[end] for end in known if path.endswith(end)),
                (404, '{"message": "not found"}'),
            )
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", known
        server.shutdown()


def scheduler_at(host: str) -> Any:
    from torchx_apps.launch.kubernetes import KubernetesScheduler

    configuration = kubernetes.client.Configuration(host=host)
    configuration.retries = False
    made = KubernetesScheduler(
        "test", client=kubernetes.client.ApiClient(configuration)
    )
    # which names no namespace
    made._get_active_context = lambda: {"context": {"cluster": "lab"}}
    return made


def submit(host: str, app: AppDef) -> str:
    scheduler = scheduler_at(host)
    return str(
        scheduler.schedule(
            scheduler.submit_dryrun(app, {"queue": "default", "namespace": "ml"})
        )
    )


def test_what_a_cluster_lacks_or_refuses_is_one_line(
    answers: tuple[str, dict[str, tuple[int, str]]],
) -> None:
    host, known = answers
    app = train.hybrid(image=IMAGE, mounts=MOUNTS)
    with pytest.raises(
        ValueError,
        match=r"^--mounts src=runs: namespace ml has no PersistentVolumeClaim of that name, .*$",
    ):
        submit(host, app)
    known["/persistentvolumeclaims/runs"] = (403, "{}")  # who may not look may submit
    known["/jobs"] = (
        403,
        json.dumps(
            {"message": 'jobs is forbidden: User "u" cannot create resource "jobs"'}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r'^-s kubernetes: the cluster refuses the job: jobs is forbidden: User "u".*$',
    ):
        submit(host, app)
    known["/jobs"] = (201, json.dumps({"metadata": {"name": "train-1"}}))
    assert submit(host, app) == "ml:train-1"
    with pytest.raises(
        ValueError,
        match=r"^-s kubernetes: no API server answers at http://127.0.0.1:9 \(.*$",
    ):
        submit("http://127.0.0.1:9", app)


def test_what_status_log_list_and_cancel_cannot_do_is_one_line(
    answers: tuple[str, dict[str, tuple[int, str]]],
) -> None:
    host, known = answers
    scheduler = scheduler_at(host)
    assert scheduler.describe("ml:train-1") is None
    known["/log"] = (
        400,
        json.dumps(
            {"message": 'container "train-0" is waiting to start: ContainerCreating'}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"^-s kubernetes: the cluster refuses the log of ml:train-1: container .*$",
    ):
        scheduler.log_iter("ml:train-1", "train", 0)
    with pytest.raises(
        ValueError,
        match=r"^-s kubernetes: the cluster refuses to cancel ml:train-1: not found$",
    ):
        scheduler._cancel_existing("ml:train-1")
    jobs = [
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "b"}, "status": {"state": {"phase": "Running"}}},
    ]
    known["/namespaces/default/jobs"] = (200, json.dumps({"items": jobs}))
    assert [(job.app_id, job.state.name) for job in scheduler.list()] == [
        ("default:a", "PENDING"),
        ("default:b", "RUNNING"),
    ]
    for ask in (
        lambda: scheduler_at("http://127.0.0.1:9").describe("a:b"),
        scheduler_at("http://127.0.0.1:9").list,
    ):
        with pytest.raises(
            ValueError,
            match=r"^-s kubernetes: no API server answers at http://127.0.0.1:9 \(.*$",
        ):
            ask()


def test_the_log_of_a_pod_is_text(
    answers: tuple[str, dict[str, tuple[int, str]]],
) -> None:
    from torchx_apps.launch.kubernetes import KubernetesScheduler

    host, known = answers
    known["/pods/train-1-train-0-0/log"] = (200, "step 1, größer\nstep 2\n")
    client = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=host))
    lines = KubernetesScheduler("test", client=client).log_iter(
        "ml:train-1", "train", 0
    )
    assert "".join(lines) == "step 1, größer\nstep 2\n"
