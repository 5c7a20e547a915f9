"""Recipes and settings: what a user types becomes a typed Job, or an error in one line."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchrec_ext.ids.policy import Dynamic
from torchx_apps import recipes
from torchx_apps.config import (
    RunOptions,
    as_toml,
    changed,
    keys_of,
    parse_job,
)
from torchx_apps.recipes.by_name import list_recipes, load_recipe

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]

pytestmark = pytest.mark.unit


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    seed: int = 0
    other: "OnlyForTypeCheckers | None" = None
    rates: Mapping[str, float] = field(default_factory=dict)


JOB = load_recipe("two_tower")


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("loader.batch_size=4096", 4096),
        ("loader.batch_size=1_000", 1000),
        ("loader.batch_size=1e3", 1000),
        ("optimizer.dense_lr=1e-2", 0.01),
        ("loader.shuffle=False", False),
        ("loader.drop_last=on", True),
        ("data.users=5", 5),
        ("data.users=None", None),
        ("checkpoint.folder=s3://a/b=c,d", "s3://a/b=c,d"),
        ("model.tower_widths=64,32", (64, 32)),
        ("model.tower_widths=", ()),
        ("optimizer.betas=0.8,0.9", (0.8, 0.9)),
        ("loader.sampling=popularity", "popularity"),
    ],
)
def test_a_value_takes_the_type_of_its_key(item: str, value: object) -> None:
    name, _, text = item.partition("=")
    words = text.split(",") if name == "optimizer.betas" else [text]
    result = dict(keys_of(changed(JOB, [f"--{name}", *words])))[name]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loader.batch_size many", "'many' is not an int; write for example 4096"),
        ("--loader.batch_size 1.5", "'1.5' is not an int"),
        ("--loader.batch_size 1e-3", "'1e-3' is not an int"),
        ("--loader.batch_size 1e999", "'1e999' is not an int"),
        ("--optimizer.dense_lr fast", "'fast'"),
        ("--loader.shuffle maybe", "'maybe' is neither true nor false"),
        ("--model.tower_widths 64,b", "'b' is not an int"),
        ("--optimizer.betas 0.9", "--optimizer.betas"),
        ("--data.seed plnted", "'plnted'"),
        ("--loader.batchsize 1", "did you mean --loader.batch_size?"),
        ("--batch_size 1", "did you mean --loader.batch_size?"),
        ("--zzz 1", "--zzz"),
        ("seed", "seed"),
        ("--train.epochs 0", "epochs=0: must be 1 or more"),
    ],
)
def test_a_wrong_word_is_told_in_one_line(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        changed(JOB, words.split())
    assert "\n" not in str(raised.value)


def test_a_type_that_only_type_checkers_import_is_told() -> None:
    for words in (["--seed", "1"], ["--rates.item_id", ".1"]):
        with pytest.raises(ValueError, match="'OnlyForTypeCheckers' is not defined"):
            changed(Unreadable(), words)


def test_a_dataclass_sees_all_changes_at_once() -> None:
    words = "--loader.label label --loader.negatives 0"
    assert changed(JOB, words.split()).loader.label == "label"
    assert JOB.loader.label is None


needs_toml = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 reads no TOML"
)
SETTINGS = """
export = "never"
[pretrained]
item_id = "a,b.parquet"
[ids.features.user_id]
capacity = 1e6
evict = "lru"
[train]
epochs = 7
[train.early_stop]
metric = "auc"
restore = false
[model]
tower_widths = [16, 8]
[optimizer]
dense_lr = 2e-3
"""


def parsed(*words: str) -> tuple[RunOptions, Any]:
    return parse_job(RunOptions(), "torchx_apps.train", words, load_recipe)


@needs_toml
def test_flags_come_after_a_file_of_settings_whose_lists_keep_their_entries(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SETTINGS)
    _, job = parsed("--train.epochs", "3", "--settings", str(file))
    assert (job.export, job.train.epochs) == ("never", 3)
    assert (job.model.tower_widths, job.optimizer.dense_lr) == ((16, 8), 2e-3)
    assert job.pretrained == {"item_id": Path("a,b.parquet")}
    assert job.ids.features == {"user_id": Dynamic(capacity=10**6, evict="lru")}
    file.write_text(as_toml(job))
    assert parsed("--settings", str(file))[1] == job


@needs_toml
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_dry_run_is_a_file_of_settings_that_gives_the_same_job(
    recipe: str, tmp_path: Path
) -> None:
    _, job = parsed("--recipe", recipe, "--train.epochs", "3", "--loader.seed", "5")
    file = tmp_path / "run.toml"
    file.write_text(as_toml(job))
    assert parsed("--recipe", recipe, "--settings", str(file))[1] == job


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_the_help_of_a_recipe_has_every_key(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--recipe", recipe, "--help")
    assert not ended.value.code
    shown = capsys.readouterr().out
    keys = [path for path, _ in keys_of(load_recipe(recipe))]
    assert [key for key in keys if f"--{key} " not in shown] == []
    assert max(map(len, list_recipes().splitlines())) <= 80


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    neighbour = "from torchx_apps.recipes import two_tower\n"
    recipe = "from neighbour import two_tower\ndef job():\n    return two_tower()\ndef number():\n    return 3\n"
    (tmp_path / "neighbour.py").write_text(neighbour)
    (tmp_path / "my_recipe.py").write_text(recipe)
    (tmp_path / "my_broken.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "my_typo.py").write_text("import os\ndef job(:\n    return 3\n")
    (tmp_path / "my_script.py").write_text(
        "import sys\ndef job(path):\n    return 3\ndef stop():\n    sys.exit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("neighbour", "my_recipe", "_recipe_my_recipe"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "spec", ["my_recipe.py:job", "my_recipe:job", "{folder}/my_recipe.py:job"]
)
def test_a_recipe_of_the_users_own(spec: str, folder: Path) -> None:
    assert load_recipe(spec.format(folder=folder)).name == "two_tower"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("two_towr", "there is no such recipe; did you mean 'two_tower'? Built in: "),
        (
            "zzz",
            "there is no such recipe; write a built-in name, my_recipe.py:job or my.module:job. Built in: ",
        ),
        ("missing.py:job", "there is no file missing.py in "),
        ("missing.module:job", "there is no module missing; install it"),
        (
            "my_recipe.py:jb",
            "there is no function 'jb'; did you mean 'job'?",
        ),
        (
            "my_recipe.py:number",
            "it returned a int; here a recipe returns a Job of torchx_apps",
        ),
        (
            "my_typo.py:job",
            "invalid syntax (my_typo.py, line 2); correct the file",
        ),
        (
            "my_script.py:job",
            "missing a required argument: 'path', and a recipe is called without any; give it a default",
        ),
        (
            "my_script.py:stop",
            "it ends the program with exit(0); a recipe returns one Job",
        ),
    ],
)
def test_a_wrong_recipe_is_told(spec: str, message: str, folder: Path) -> None:
    pattern = re.escape(f"--recipe {spec}: {message}").replace(
        re.escape("{folder}/"), ".*"
    )
    with pytest.raises(ValueError, match=pattern):
        load_recipe(spec)


def test_a_recipe_that_misses_an_import_keeps_its_own_error(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_recipe("my_broken:job")


def test_flags_have_dashes_or_underscores() -> None:
    for flag in ("--run_dir", "--run-dir"):
        options, job = parsed(flag, "runs", "--train.early_stop.patience=2")
        assert (options.run_dir, job.train.early_stop.patience) == (Path("runs"), 2)


@pytest.mark.launch
def test_a_list_may_be_cut_by_head() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from torchx_apps.process import say_once; sys.exit(say_once('a list'))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
