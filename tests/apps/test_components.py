"""The components as TorchX sees them: listed, valid, and AppDefs that say what was asked for."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torchrec_ext.components as components  # type: ignore[import-not-found]
from torchrec_ext.components import serve, train
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

from torchx_apps import train as app
from torchx_apps.cli.process import MISTAKE, MISTAKE_FILE
from torchx_apps.tasks.job import ELASTIC
from torchx_apps.torchx_run import gather_overrides

pytestmark = pytest.mark.unit


def launch(*flags: str) -> AppDef:
    return materialize_appdef(train.hybrid, list(flags))


def command(*flags: str) -> str:
    return str(launch(*flags).roles[0].args[-1])


class TestValid(ComponentTestCase):
    def test_hybrid(self) -> None:
        self.validate(train, "hybrid")

    def test_networks(self) -> None:
        self.validate(train, "networks")


def test_ours_and_torchxs_own_are_listed() -> None:
    # A component with a lint error vanishes from this list without a word, and our
    # group hides TorchX's unless named again.
    listed = set(get_components())
    assert {"rec.train.hybrid", "rec.train.networks", "dist.ddp"} <= listed
    assert not any(name.startswith("rec.train._") for name in listed)


def test_torchx_run_is_ours() -> None:
    commands = {
        point.name: point.value for point in entry_points(group="torchx.cli.cmds")
    }
    assert commands.get("run") == "torchx_apps.torchx_run:Run", (
        'pyproject needs [project.entry-points."torchx.cli.cmds"] run = "torchx_apps.torchx_run:Run", and then `pip '
        "install -e .`"
    )


def test_by_default_two_ranks_train_two_tower_on_one_thread_each() -> None:
    (role,) = launch().roles
    assert role.entrypoint == "bash"
    assert role.args[-1].endswith(
        "--nnodes 1 --nproc_per_node 2 --tee 2 --role '' -m torchx_apps.train --recipe two_tower"
    )
    assert role.env["OMP_NUM_THREADS"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in role.env


def test_the_agent_takes_the_place_of_torchrun() -> None:
    # TorchX writes `torchrun --flags`; were that to change, the agent's command would
    # be wrong from its first word.
    assert (
        "; exec python3 -m torchx_apps.agent --max_restarts 0 --rdzv_backend c10d "
        in command()
    )
    assert "torchrun" not in command()


def test_overrides_and_further_flags_reach_the_app_in_order() -> None:
    flags = [
        "--set",
        "loader.batch_size=4096",
        "-j",
        "1x4",
        "--set=model.layers=64,32",
        "--",
        "--dry-run",
    ]
    words = command(*gather_overrides(["rec.train.hybrid", *flags])[1:])
    assert "--nproc_per_node 4" in words
    assert words.endswith(
        "two_tower --dry-run --set=loader.batch_size=4096 --set=model.layers=64,32"
    )


def test_one_override_without_our_torchx_run() -> None:
    assert command("--set", "model.layers=64,32", "--run_dir", "runs/a b").endswith(
        "--set=model.layers=64,32 '--run-dir=runs/a b'"
    )


def test_restarts_reach_scheduler_and_torchrun_with_a_fresh_store() -> None:
    (role,) = launch("--max_retries", "3", "--env", "A=1").roles
    assert role.max_retries == 3
    assert "--max_restarts 3 " in role.args[-1]
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert role.env["A"] == "1"


def test_the_users_environment_wins() -> None:
    assert launch("--env", "OMP_NUM_THREADS=4").roles[0].env["OMP_NUM_THREADS"] == "4"


def test_what_torchrun_waits_for_goes_through_a_variable() -> None:
    env = (
        launch("--env", "PET_RDZV_CONF=join_timeout:60,last_call_timeout:5,A=b")
        .roles[0]
        .env
    )
    assert (env["PET_RDZV_CONF"], env["A"]) == (
        "join_timeout=60,last_call_timeout=5",
        "b",
    )


def test_resources_nodes_and_mounts() -> None:
    (role,) = launch(
        "-j",
        "2:4x8",
        "--gpu",
        "8",
        "--memMB",
        "9000",
        "--mounts",
        "type=volume,src=r,dst=/r",
    ).roles
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", (
        "a node that joins later starts all ranks again"
    )
    assert (
        role.min_replicas,
        role.num_replicas,
        role.resource.gpu,
        role.resource.memMB,
    ) == (2, 4, 8, 9000)
    assert role.mounts[0].dst_path == "/r"
    assert ":0 " in role.args[-1], "which the agent makes a port of the job's id"
    assert not role.port_map
    (role,) = launch("-j", "2x8", "--rdzv_port", "29500").roles
    assert ":29500 " in role.args[-1]
    assert role.port_map == {"c10d": 29500}


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ("", (2, 4096)),
        ("-j 1x1", (2, 4096)),
        ("-j 2x8", (8, 16_384)),
        ("-j 1x4 --threads 2", (8, 8192)),
        ("-j 1x4 --gpu 4", (16, 32_768)),
        ("-j 1x4 --gpu 4 --threads 8", (32, 32_768)),
        ("-j 1x4 --gpu 4 --cpu 3 --memMB 5", (3, 5)),
    ],
)
def test_cores_and_memory_follow_the_ranks_of_a_node_where_not_given(
    flags: str, asked: tuple[int, int]
) -> None:
    (role,) = launch(*flags.split()).roles
    assert (role.resource.cpu, role.resource.memMB) == asked


def test_cores_and_memory_of_other_components_follow_their_processes() -> None:
    made = [
        components.embed(bundle="b", out="v", catalogue="c", id="i", cpu=5),
        serve.http(bundle="b", workers=5),
        serve.http(bundle="b"),
    ]
    resources = [app.roles[0].resource for app in made]
    assert [(each.cpu, each.memMB) for each in resources] == [
        (5, 2048),
        (5, 2560),
        (2, 1024),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-j 2x4 --gpu 8", "-j 2x4 with --gpu 8: each of a node's 4 ranks needs a GPU of its own, and each GPU a rank; "
         "write -j 2x8 or --gpu 4"),
        ("-j 1:2x16 --gpu 8", "-j 1:2x16 with --gpu 8: each of a node's 16 ranks .* write -j 1:2x8 or --gpu 16"),
        ("-j 1x16 -h aws_p4d.24xlarge", "-j 1x16 with -h aws_p4d.24xlarge, which has 8: .* write -j 1x8$"),
    ],
)  # fmt: skip
def test_gpus_without_ranks_and_ranks_without_gpus_are_refused(
    flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        launch(*flags.split())


@pytest.mark.parametrize("port", [-1, 65_536, 129_500])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"^--rdzv_port {port}: must be 1 to 65535"):
        train.hybrid(rdzv_port=port)
    with pytest.raises(ValueError, match=f"^--port {port}: must be 1 to 65535"):
        serve.http(bundle="b", port=port)


def test_every_component_writes_its_output_at_once() -> None:
    required = {
        "rec.embed": "--bundle b --out o",
        "rec.serve.http": "--bundle b",
        "rec.serve.export": "--run r",
    }
    listed = {
        name: each for name, each in get_components().items() if name.startswith("rec.")
    }
    assert len(listed) == 7
    for name, component in listed.items():
        (role,) = materialize_appdef(component.fn, required.get(name, "").split()).roles
        assert role.env["PYTHONUNBUFFERED"] == "1", name


@pytest.mark.parametrize("lacking", ["python3", "the package"])
def test_a_node_or_an_image_without_the_package_says_so_in_one_line(
    lacking: str, tmp_path: Path
) -> None:
    if lacking == "the package":
        (tmp_path / "python3").write_text(
            f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'
        )
        (tmp_path / "python3").chmod(0o755)
    mistake = tmp_path / "mistake"
    done = subprocess.run(
        [str(shutil.which("bash")), *launch("-j", "2x1").roles[0].args],
        env={"PATH": str(tmp_path), MISTAKE_FILE: str(mistake), "HOSTNAME": "host2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (MISTAKE, "")
    (line,) = done.stderr.splitlines()
    assert (
        "this node, or its image, has no python3 with the package torchrec_ext; install it there, or submit"
        in line
    )
    assert mistake.exists(), "for Slurm, whose srun returns another node's exit code"


@pytest.mark.parametrize(
    "j", ["", "2", "1y2", "0x2", "1x0", "1x-2", "x2", "1x2x3", "1:2:3x4", "ax2"]
)
def test_a_bad_j_is_told_with_its_value(j: str) -> None:
    with pytest.raises(ValueError, match=f"^-j {j}: write NODESxPROCS"):
        train.hybrid(j=j)


def test_what_needs_one_number_of_ranks_is_refused_where_nodes_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch("-j", "1:2x1").roles[0].env[ELASTIC] == "1:2x1"
    assert ELASTIC not in launch("-j", "2x1").roles[0].env
    with pytest.raises(
        ValueError,
        match=r"^--groups a:0 with -j 1:2x1: it names ranks, .* or write -j 2x1$",
    ):
        train.networks(groups="a:0", j="1:2x1")
    monkeypatch.setenv(ELASTIC, "1:2x1")
    for setting, message in (
        (
            "plan.towers=user:0,item:1",
            "plan.towers=user:0,item:1 with -j 1:2x1: it gives towers ranks of their own, .*",
        ),
        (
            "plan.towers=tower_parallel",
            "plan.towers=tower_parallel with -j 1:2x1: .* or write -j 2x1$",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            app._train(["--set", setting, "--dry-run"])
    assert app._train(["--set", "plan.towers=auto", "--dry-run"]) == 0


def test_min_nodes_above_max_nodes() -> None:
    with pytest.raises(ValueError, match="MIN is 4 and MAX is 2"):
        train.hybrid(j="4:2x1")


@pytest.mark.parametrize(("flag", "value"), [("threads", 0), ("max_retries", -1)])
def test_a_number_out_of_range_is_told(flag: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^--{flag} {value}: "):
        train.hybrid(**{flag: value})


def test_the_members_of_a_job_reach_its_app_in_order() -> None:
    flags = [
        "--vary",
        "train.seed=0,1",
        "--set",
        "train.epochs=1",
        "--vary=optimizer.dense_lr=1e-3,3e-3",
        "--groups",
        "a:0,b:1",
    ]
    role = materialize_appdef(
        train.networks, gather_overrides(["rec.train.networks", *flags])[1:]
    ).roles[0]
    words = str(role.args[-1])
    assert (
        "-m torchx_apps.train_networks --recipe two_tower --groups=a:0,b:1 --stack=auto --vary=train.seed=0,1"
        in words
    )
    assert words.endswith("--set=train.epochs=1 --vary=optimizer.dense_lr=1e-3,3e-3")


def test_every_component_that_a_page_a_message_or_a_remedy_names_exists() -> None:
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(root / "docs").rglob("*.md")]
    for folder in ("torchrec_ext", "torchx_apps", "components", "examples"):
        texts += (root / folder).rglob("*.py")
    named: dict[str, Path] = {}
    for path in texts:
        for name in re.findall(r"\brec\.(?:\w+\.)?[a-z_]{4,}\b", path.read_text()):
            named[name] = path.relative_to(root)
    listed = {name for name in get_components() if name.startswith("rec.")}
    # An example of a wrong word.
    listed.add("rec.train.hybird")
    unknown = {name: str(path) for name, path in named.items() if name not in listed}
    assert unknown == {}
