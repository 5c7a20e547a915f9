"""The components as TorchX sees them: listed, valid, and AppDefs that say what was asked for."""

import re
from pathlib import Path

import pytest
from torchrec_ext.components import (  # type: ignore[import-not-found]
    data,
    train,
)
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

pytestmark = pytest.mark.unit
COMPONENTS = {
    "rec.train.hybrid": "-j 2x4 --gpu 4 -- --train.seed 1",
    "rec.train.networks": "--max_retries 2 --vary train.seed 1 -- --run_dir grid",
    "rec.train.stream": "-- --data.folder /data/clicks",
    "rec.data.preprocess": "--recipe taobao -- --out o",
    "rec.serve.export": "--run r",
    "rec.serve.embed": "--bundle b -- --out o --tower query",
    "rec.serve.http": "--bundle b -- --workers 2",
}


def launch(*flags: str) -> AppDef:
    return materialize_appdef(train.hybrid, list(flags))


def command(*flags: str) -> str:
    return str(launch(*flags).roles[0].args[-1])


def test_ours_and_torchxs_own_are_listed() -> None:
    # A component with a lint error vanishes from this list without a word, and our
    # group hides TorchX's unless named again.
    listed = set(get_components())
    assert {name for name in listed if name.startswith("rec.")} == set(COMPONENTS)
    assert "dist.ddp" in listed


def test_by_default_two_ranks_train_two_tower_on_one_thread_each() -> None:
    (role,) = launch().roles
    assert role.entrypoint == "bash"
    assert role.args[-1].startswith("torchrun --rdzv_backend c10d ")
    assert role.args[-1].endswith(
        "--nnodes 1 --nproc_per_node 2 --tee 2 --role '' -m torchx_apps.train --recipe two_tower"
    )
    assert role.env["OMP_NUM_THREADS"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in role.env


def test_words_behind_two_dashes_reach_the_app_in_order() -> None:
    words = ["--loader.batch_size", "4096", "--model.tower_widths", "64,32"]
    made = command("-j", "1x4", "--", *words, "--run_dir", "runs/a b")
    assert "--nproc_per_node 4" in made
    assert made.endswith(f"--recipe two_tower {' '.join(words)} --run_dir 'runs/a b'")


def test_restarts_reach_scheduler_and_torchrun_with_a_fresh_store() -> None:
    (role,) = launch("--max_retries", "3", "--env", "A=1").roles
    assert role.max_retries == 3
    assert role.env["PET_MAX_RESTARTS"] == "3"
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert role.env["A"] == "1"


def test_the_users_environment_wins() -> None:
    assert launch("--env", "OMP_NUM_THREADS=4").roles[0].env["OMP_NUM_THREADS"] == "4"


def test_resources_nodes_and_mounts() -> None:
    (role,) = launch(
        *("-j", "2:4x8", "--gpu", "8", "--memMB", "9000", "--rdzv_port", "29501"),
        *("--mounts", "type=volume,src=r,dst=/r"),
    ).roles
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", (
        "a node that joins later starts all ranks again"
    )
    assert (role.min_replicas, role.num_replicas) == (2, 4)
    assert (role.resource.gpu, role.resource.memMB) == (8, 9000)
    assert role.mounts[0].dst_path == "/r"
    assert ":29501 " in role.args[-1]
    (role,) = launch("--metadata", "kubernetes=file:///overlay.yaml").roles
    assert role.metadata == {"kubernetes": "file:///overlay.yaml"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_writes_its_output_at_once(name: str) -> None:
    component = get_components()[name]
    (role,) = materialize_appdef(component.fn, COMPONENTS[name].split()).roles
    assert role.env["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("component", "words", "message"),
    [
        (train.hybrid, ["--train.epoch", "5"], "did you mean --train.epochs?"),
        (train.hybrid, ["--train.epochs", "0"], "epochs=0: must be 1 or more"),
        (train.stream, ["--publish_s", "soon"], "'soon'"),
        (data.preprocess, ["--config.test_share", "2"], "between 0 and 1"),
    ],
)
def test_a_wrong_word_ends_the_launcher_in_one_line(
    component: object, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)) as ended:
        materialize_appdef(component, ["--", *words])
    assert "\n" not in str(ended.value.code)


def test_a_users_own_recipe_is_not_executed_by_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('executed')\n")
    recipe = f"{tmp_path}/mine.py:job"
    made = command("--recipe", recipe, "--", "--model.dim", "16")
    assert made.endswith(f"--recipe {recipe} --model.dim 16")
