"""What `torchx run` refuses before it submits anything, each in one line with the way that works."""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrec_ext.components import serve, train  # type: ignore[import-not-found]
from torchx.cli.cmd_base import SubCommand
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef

from torchx_apps.launch.checks import check_app, check_words
from torchx_apps.launch.commands import (
    CancelCommand,
    ListCommand,
    LogCommand,
    StatusCommand,
)
from torchx_apps.torchx_run import Run

pytestmark = pytest.mark.unit

IMAGE = "my_image:1"


def hybrid(*flags: str) -> AppDef:
    return materialize_appdef(train.hybrid, ["--image", IMAGE, *flags])


def refused(app: AppDef, scheduler: str = "kubernetes") -> str:
    with pytest.raises(ValueError) as caught:
        check_app(app, scheduler)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    "name", ["2026_run", "_x_", "x_", "Run 1", "-a", "été", "a" * 80]
)
def test_a_name_that_kubernetes_cannot_carry_is_refused_there_alone(name: str) -> None:
    app = hybrid("--name", f"exp/{name}")
    assert refused(app).startswith(f"--name {name}: ")
    assert check_app(app, "local_cwd") == check_app(app, "slurm") == []


@pytest.mark.parametrize("name", ["train", "two_tower-1", "A.b", "a" * 29])
def test_a_name_that_kubernetes_can_carry_is_taken(name: str) -> None:
    flags = ["--name", f"exp/{name}", "--image", IMAGE, "-j", "11x1"]
    for component in (train.hybrid, train.networks):
        assert check_app(materialize_appdef(component, flags), "kubernetes") == []


def test_port_0_and_an_address_that_nobody_reaches_are_refused_on_kubernetes_alone() -> (
    None
):
    made = {"bundle": "b", "image": IMAGE}
    assert refused(serve.http(port=0, host="0.0.0.0", **made)).startswith(
        "--port 0: Kubernetes opens a pod's port http"
    )
    assert refused(serve.http(**made)).startswith(
        "--host 127.0.0.1: nobody outside its pod would reach the service;"
    )
    assert check_app(serve.http(port=0, **made), "local_cwd") == []
    assert check_app(serve.http(host="0.0.0.0", **made), "kubernetes") == []


def test_nodes_that_come_and_go_are_refused_on_slurm_alone() -> None:
    for component in (train.hybrid, train.networks):
        app = materialize_appdef(component, ["-j", "1:2x4", "--image", IMAGE])
        line = refused(app, "slurm")
        assert line.startswith("-j 1:2x...: Slurm gives a job all of its nodes or none")
        assert line.endswith(
            "; write -j 2x... --max_retries 3, which goes on from the last checkpoint"
        )
        assert check_app(app, "kubernetes") == check_app(app, "local_cwd") == []
    assert (
        check_app(hybrid("-j", "2:2x4"), "slurm")
        == check_app(hybrid("-j", "2x4"), "slurm")
        == []
    )


def test_torchxs_own_image_is_refused_unless_a_dockerfile_builds_on_it(
    tmp_path: Path,
) -> None:
    app = train.hybrid()
    assert (
        "does not have this package; build one that has it and name it: --image my_image:1"
        in refused(app)
    )
    (tmp_path / "Dockerfile.torchx").touch()
    assert check_app(app, "kubernetes", workspace=f"file://{tmp_path}") == []
    assert check_app(app, "slurm") == []


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ("src=a,dst=/b", "begins without its type; write type=bind,src="),
        ("type=foo,src=a,dst=/b", "there is no type 'foo'; write type=bind"),
        ("type=bind,src=/a", "a bind needs dst; write "),
        ("type=volume,dst=/a", "a volume needs src; write "),
        ("type=volume", "a volume needs src and dst; write "),
        ("type=volume,src=a,dst=b", "dst=b must begin with /"),
        ("type=volume,src=a,to=/b", "there is no option 'to'; write "),
        (
            "type=device,src=/dev/a,perm=rx",
            "perm=rx may have the letters r, w and m alone",
        ),
        ("type=bind,src=/a,dst=/b,type=volume,src=c", "a volume needs dst; write "),
    ],
)
@pytest.mark.parametrize("form", ["--mounts {}", "--mounts={}"])
def test_mounts_in_a_wrong_form_are_refused(
    form: str, mounts: str, message: str
) -> None:
    with pytest.raises(
        ValueError, match=f"^--mounts {re.escape(mounts)}: {re.escape(message)}"
    ):
        check_words(["rec.train.hybrid", *form.format(mounts).split()])


@pytest.mark.parametrize(
    "mounts",
    [
        "type=bind,src=/a,dst=/b,readonly,type=volume,src=c,dst=/d",
        "type=device,src=/dev/a",
    ],
)
def test_mounts_in_a_right_form_are_taken_and_a_scheduler_that_mounts_nothing_says_so(
    mounts: str,
) -> None:
    check_words(["--mounts", mounts])
    app = hybrid("--mounts", mounts)
    assert check_app(app, "kubernetes") == []
    for scheduler in ("local_cwd", "slurm"):
        assert check_app(app, scheduler) == [
            f"note: --mounts: {scheduler} runs in this machine's own folders and mounts nothing"
        ]


@pytest.mark.parametrize("form", ["--env {}", "--env={}"])
def test_a_value_with_an_equals_sign_is_refused(form: str) -> None:
    words = "--env A=b,PET_RDZV_CONF=last_call_timeout=5: TorchX takes no '=' within a value; write ':' in"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        check_words(
            [
                "rec.train.hybrid",
                *form.format("A=b,PET_RDZV_CONF=last_call_timeout=5").split(),
            ]
        )
    check_words(["--env", "A=b,c;D=e,F=", "--env=A=b"])


def test_a_dollar_that_torchx_would_swallow_is_refused_with_the_form_that_arrives() -> (
    None
):
    with pytest.raises(
        ValueError,
        match=r"^runs/a\$\$b: TorchX makes one \$ of two; write runs/a\$\$\$\$b$",
    ):
        check_words(["--run_dir", "runs/a$$b"])
    check_words(["--run_dir", "runs/a$$$$b", "--out", "costs$5", "--name", "${app_id}"])


SECRETS = [
    "REDIS_PASSWORD=hunter2",
    "AWS_SECRET_ACCESS_KEY=/hunter2",
    "TORCHREC_EXT_TOKEN=hunter2",
    "URL=s3://a:hunter2@b",
    *(
        f"{name}=hunter2"
        for name in (
            "DB_PASS",
            "MYSQL_PWD",
            "AUTH",
            "GH_PAT",
            "COOKIE",
            "SESSION_TOKENS",
            "dbPassword",
        )
    ),
    "URL=https://hunter2@example.org/a",
]
ADDRESSES = [
    "https://host/a?sig=hunter2",
    "s3://b/c?X-Amz-Signature=hunter2",
    "https://host/a?x=1&token=hunter2",
]


@pytest.mark.parametrize("scheduler", ["local_cwd", "slurm", "kubernetes"])
@pytest.mark.parametrize("variable", SECRETS)
def test_a_secret_in_env_is_refused_unseen_with_the_schedulers_way(
    variable: str, scheduler: str
) -> None:
    name = variable.partition("=")[0]
    for app in (
        hybrid("--env", f"A=1,{variable}"),
        serve.http(bundle="b", host="h", image=IMAGE, env=dict([variable.split("=")])),
    ):
        line = refused(app, scheduler)
        assert line.startswith(f"--env {name}: ")
        assert "hunter2" not in line
        assert (
            "-cfg secret=NAME"
            if scheduler == "kubernetes"
            else f"export {name} in the shell"
        ) in line


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_signed_address_is_refused_unseen(address: str) -> None:
    app = serve.http(bundle="b", host="h", image=IMAGE, env={"URL": address})
    for line in (
        refused(app),
        refused(hybrid("--", f"--set=data.files={address}"), "slurm"),
    ):
        assert ": the address holds a password, " in line
        assert "hunter2" not in line


@pytest.mark.parametrize(
    "scheduler", ["local_cwd", "local_docker", "slurm", "kubernetes"]
)
@pytest.mark.parametrize(
    "name", ["A;touch X;B", "A B", "1A", "$(touch X)", "A-B", "", "A\nB", "É"]
)
def test_a_name_that_is_no_variables_is_refused(name: str, scheduler: str) -> None:
    app = serve.http(bundle="b", host="h", image=IMAGE, env={name: "1", "_B2": "1"})
    assert refused(app, scheduler).startswith(
        f"--env {name!r}: a variable's name has letters, digits and _ alone"
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--set=data.password=hunter2",
        "--set data.secret=hunter2",
        "--set model.api_key=hunter2",
        "--set=model.apikey=hunter2",
        "--set data.secret_key=hunter2",
        "--set data.token=hunter2",
        "--set data.files=s3://a:hunter2@b/c",
    ],
)
def test_a_secret_in_a_setting_is_refused_unseen(flag: str) -> None:
    line = refused(hybrid("--", *flag.split()), "slurm")
    assert line.startswith("--set")
    assert "hunter2" not in line


def test_what_only_resembles_a_secret_is_taken() -> None:
    env = "PWD=/a,MAX_TOKENS=512,SSH_AUTH_SOCK=/s,"
    env += "TOKENIZERS_PARALLELISM=0,REDIS_PASSWORD_FILE=/run/p,GOOGLE_APPLICATION_CREDENTIALS=/run/key.json"
    assert (
        check_app(
            hybrid(
                "--env",
                env,
                "--",
                "--set",
                "data.key=user_id",
                "--set",
                "data.sort_key=time",
                "--set=model.tokens=64",
                "--set=model.token_widths=64,32",
                "--set=data.files=s3://a/b@c",
            ),
            "slurm",
        )
        == []
    )
    assert (
        check_app(
            serve.http(bundle="s3://user@host/b", token_file="/run/token"),
            "slurm",
        )
        == []
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "rec.train.hybrid --mounts type=bind,src=/a",
            "--mounts type=bind,src=/a: a bind needs dst",
        ),
        (
            "rec.train.hybrid -j 2x4 --gpu 8",
            "-j 2x4 with --gpu 8: each of a node's 4 ranks needs a GPU",
        ),
        (
            "-s kubernetes -cfg queue=q --workspace= rec.train.hybrid --image i:1 --name 1a",
            "--name 1a: on Kubernetes",
        ),
        (
            "-s kubernetes -cfg queue=q --workspace= rec.train.hybrid",
            "--image: TorchX's own image",
        ),
        (
            "-s slurm rec.train.hybrid --env HF_TOKEN=hunter2",
            "--env HF_TOKEN: this looks like a secret",
        ),
    ],
)
def test_torchx_run_answers_a_mistake_with_usage_and_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    command = Run()
    parser = argparse.ArgumentParser(prog="torchx run")
    command.add_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        command.run(
            parser.parse_args(
                ["--dryrun", *shlex.split(words)], argparse.Namespace(log_level="INFO")
            )
        )
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"torchx run: error: {message}")
    assert "hunter2" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            StatusCommand,
            "pbs://torchx/7",
            "pbs://torchx/7: there is no scheduler pbs; known are ",
        ),
        (
            StatusCommand,
            "job-7",
            "job-7: a job's address is the line that torchx run has printed, such as slurm://",
        ),
        (
            LogCommand,
            "slurm://torchx/7/train/0",
            "slurm: there is no squeue on this machine; go to a login node of the",
        ),
        (
            CancelCommand,
            "slurm://torchx/7",
            "slurm: there is no squeue on this machine; ",
        ),
        (
            ListCommand,
            "-s slurm",
            "slurm: there is no sacct on this machine; go to a login node of the cluster, or ins",
        ),
        (
            ListCommand,
            "-s kubernetes",
            "-s kubernetes: Invalid kube-config file. No configuration found. Name a cluster",
        ),
        (
            CancelCommand,
            "kubernetes://torchx/ml:a",
            "-s kubernetes: no API server answers at http://localhost (MaxRet",
        ),
    ],
)
def test_a_scheduler_that_is_not_there_is_one_line(
    command: Callable[[], SubCommand],
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "kubernetes" in words:
        pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
        monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
            str(tmp_path / "none"),
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    made, parser = command(), argparse.ArgumentParser(prog="torchx")
    made.add_arguments(parser)
    with pytest.raises(SystemExit, match="1"):
        made.run(parser.parse_args(words.split()))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_a_job_for_a_slurm_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command, parser = Run(), argparse.ArgumentParser(prog="torchx run")
    command.add_arguments(parser)
    words = parser.parse_args(
        ["-s", "slurm", "rec.serve.export", "--run", "runs/a"],
        argparse.Namespace(log_level="INFO"),
    )
    with pytest.raises(SystemExit, match="2"):
        command.run(words)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "torchx run: error: slurm: there is no sinfo on this machine; "
    )
    assert line.endswith("or install Slurm's commands (Debian's package slurm-client)")
