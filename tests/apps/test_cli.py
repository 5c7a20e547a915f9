"""Recipes and overrides: what a user types becomes a typed Job, or an error that names flag, value, rule and remedy."""

import enum
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from torchx_apps import recipes, train
from torchx_apps.cli.command_line import build_parser, describe_keys, setting_keys
from torchx_apps.cli.overrides import apply_overrides, convert, read_settings
from torchx_apps.recipes.by_name import list_recipes, load_recipe

if TYPE_CHECKING:
    from somewhere import OnlyForTypeCheckers  # type: ignore[import-not-found]

pytestmark = pytest.mark.unit


class Sync(enum.Enum):
    EVERY_STEP = "every_step"
    LOCAL_SGD = "local_sgd"


@dataclass(frozen=True, kw_only=True)
class Window:
    """Two keys that are checked together.

    Attributes:
        low: first step.
    """

    low: int = 0
    high: int = 10

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(
                f"low is {self.low} and high is {self.high}; low must not exceed high"
            )


@dataclass(frozen=True, kw_only=True)
class Loader:
    batch_size: int = 1024
    rate: float = 0.1
    shuffle: bool = True
    limit: int | None = None
    path: str | None = None
    layers: tuple[int, ...] = (8,)
    betas: tuple[float, float] = (0.9, 0.99)
    kind: Literal["planted", "checkerboard"] = "planted"
    sync: Sync = Sync.EVERY_STEP
    folder: Path = Path()
    other: "OnlyForTypeCheckers | None" = None


@dataclass(frozen=True, kw_only=True)
class Root:
    name: str = "root"
    loader: Loader = field(
        default_factory=Loader, metadata={"doc": "not shown: a group"}
    )
    window: Window = field(default_factory=Window)
    seed: int = field(default=0, metadata={"doc": "of every draw"})


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("batch_size=4096", 4096),
        ("batch_size=1_000", 1000),
        ("batch_size=1e3", 1000),
        ("rate=1e-2", 0.01),
        ("shuffle=False", False),
        ("shuffle=on", True),
        ("limit=5", 5),
        ("limit=none", None),
        ("path=s3://bucket/a=b,c", "s3://bucket/a=b,c"),
        ("path=null", None),
        ("layers=64,32", (64, 32)),
        ("layers=(64, 32,)", (64, 32)),
        ("layers=", ()),
        ("betas=0.8,0.9", (0.8, 0.9)),
        ("kind=checkerboard", "checkerboard"),
        ("sync=local_sgd", Sync.LOCAL_SGD),
        ("sync=LOCAL_SGD", Sync.LOCAL_SGD),
        ("folder=a/b", Path("a/b")),
    ],
)
def test_a_value_takes_the_type_of_its_key(item: str, value: object) -> None:
    changed = getattr(
        apply_overrides(Root(), [f"loader.{item}"]).loader, item.partition("=")[0]
    )
    assert changed == value
    assert type(changed) is type(value)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("loader.batch_size=many", "'many' is not an int; write for example 4096"),
        ("loader.batch_size=1.5", "'1.5' is not an int"),
        ("loader.batch_size=1e-3", "'1e-3' is not an int"),
        ("loader.batch_size=1e999", "'1e999' is not an int"),
        ("loader.batch_size=none", "'none' is not an int"),
        ("loader.rate=fast", "'fast' is not a float"),
        ("loader.shuffle=maybe", "'maybe' is not one of true, yes, on, 1, false"),
        (
            "loader.limit=x",
            "'x' is not an int; write for example 4096, 4_096 or 4e3, or none",
        ),
        ("loader.layers=64,b", "'b' is not an int"),
        ("loader.betas=0.9", "'0.9' has 1 values; expected 2"),
        (
            "loader.kind=plnted",
            "'plnted' is not one of planted, checkerboard; did you mean 'planted'?",
        ),
        ("loader.sync=local", "'local' is not one of every_step, local_sgd"),
        ("loader.other=1", "'other' cannot be given as text; write a recipe file"),
        (
            "loader.batchsize=1",
            "there is no key 'batchsize'; did you mean loader.batch_size?",
        ),
        (
            "loadr.batch_size=1",
            "there is no key 'loadr'; did you mean loader.batch_size?",
        ),
        (
            "zzz=1",
            "there is no key 'zzz'; keys are name, loader.batch_size, loader.rate, ",
        ),
        ("loader=1", "'loader' is a group; set one of its keys: batch_size, "),
        ("seed.x=1", "'seed' is 0 and has no keys of its own"),
        ("seed", "write key=value"),
        ("=1", "write key=value"),
        ("window.low=11", "low is 11 and high is 10; low must not exceed high"),
    ],
)
def test_a_wrong_override_is_told_with_its_flag(item: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"--set {item}: ") + ".*" + re.escape(message)
    ):
        apply_overrides(Root(), [item])


def test_a_dataclass_sees_all_changes_at_once_and_an_error_names_them_all() -> None:
    assert apply_overrides(
        Root(), ["window.low=20", "window.high=30"]
    ).window == Window(low=20, high=30)
    with pytest.raises(
        ValueError,
        match=r"^--set window.low=20 --set window.high=15: low is 20 and high is 15",
    ):
        apply_overrides(Root(), ["window.low=20", "seed=1", "window.high=15"])


def test_the_later_of_two_wins_and_what_is_not_named_stays_the_same_object() -> None:
    root = Root()
    changed = apply_overrides(root, ["seed=1", "seed=2"])
    assert (changed.seed, root.seed) == (2, 0)
    assert changed.loader is root.loader


needs_toml = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 reads no TOML"
)
SETTINGS = """
export = "never"
[train]
epochs = 7
[train.early_stop]
metric = "auc"
[model]
tower_widths = [16, 8]
[optimizer]
dense_lr = 2e-3
"""


@needs_toml
def test_a_file_of_settings_comes_before_set(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SETTINGS)
    options = build_parser("train", None).parse_args(
        ["--set", "train.epochs=3", "--settings", str(file)]
    )
    job = apply_overrides(load_recipe("two_tower"), options.set)
    assert (job.export, job.train.epochs, job.train.early_stop.metric) == (
        "never",
        3,
        "auc",
    )
    assert (job.model.tower_widths, job.optimizer.dense_lr) == ((16, 8), 2e-3)


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nepoch = 3",
            "train.epoch=3: there is no key 'epoch'; did you mean train.epochs or",
        ),
        ("[train]\nepochs = 'many'", "train.epochs=many: 'many' is not an int"),
        ("train = 3", "train=3: 'train' is a group; set one of its keys"),
        (
            "[train]\nepochs = 2020-01-01",
            "train.epochs = 2020-01-01: write a text, a number, true, false or a list",
        ),
        ("[train\n", "Expected ']' at the end of a table declaration (at line 1"),
    ],
)
def test_a_mistake_in_a_file_of_settings_names_the_file(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--settings {file}: {message}")):
        apply_overrides(load_recipe("two_tower"), read_settings(str(file)))


def test_a_missing_file_of_settings_is_told() -> None:
    message = (
        "cannot be read: No such file"
        if sys.version_info >= (3, 11)
        else "Python 3.10 reads no TOML"
    )
    with pytest.raises(ValueError, match=f"--settings nowhere.toml: {message}"):
        read_settings("nowhere.toml")


@pytest.mark.parametrize("hint", [dict[str, int], object, Any])
def test_what_cannot_be_text_says_so(hint: object) -> None:
    with pytest.raises(
        ValueError, match="cannot be given as text; write a recipe file"
    ):
        convert("1", hint)


def described(config: Any) -> dict[str, str]:
    """What `--dry-run` prints of each key, by key, its lines joined."""
    entries: dict[str, str] = {}
    for line in describe_keys(config).splitlines():
        if line.startswith(" "):
            entries[list(entries)[-1]] += " " + line.strip()
        else:
            entries[line.split(" ")[0]] = line
    return entries


def test_describe_shows_every_key_that_can_be_set() -> None:
    entries = described(Root())
    keys = {key.path: key for key in setting_keys(Root())}
    assert list(keys)[:3] == ["loader.batch_size", "loader.rate", "loader.shuffle"]
    assert list(keys)[-2:] == ["name", "seed"]
    assert keys.keys() <= entries.keys()
    assert (keys["seed"].section, keys["loader.rate"].section) == ("job", "loader")
    assert (keys["seed"].type, keys["seed"].value, keys["seed"].meaning) == (
        "int",
        "0",
        "of every draw",
    )
    assert "of every draw" in entries["seed"]
    assert "first step." in entries["window.low"]
    assert "'planted' | 'checkerboard'" in entries["loader.kind"]
    assert "OnlyForTypeCheckers | None" in entries["loader.other"]


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_description_fits_80_columns_and_loses_nothing(recipe: str) -> None:
    job = load_recipe(recipe)
    text, entries = describe_keys(job), described(job)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("most used\n---------\ndata.name ")
    assert max(map(len, list_recipes().splitlines())) <= 80
    for key in setting_keys(job):
        assert re.match(
            re.escape(key.path) + " +" + re.escape(key.value), entries[key.path]
        )
        assert key.meaning
        assert f"{key.type}: {key.meaning}".rstrip() in entries[key.path]


@dataclass(frozen=True, kw_only=True)
class Marked:
    """As Sphinx reads it.

    Args:
        kind: ``plain``, see :class:`torchrec_ext.data.loader.loader.ChunkLoader` and :data:`LAYOUT`.
    """

    kind: str = "plain"


def test_describe_has_no_markup_and_is_as_wide_as_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert describe_keys(Marked()).endswith("plain, see ChunkLoader and LAYOUT.")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "110")
    shown = describe_keys(load_recipe("contextual_ncf"))
    assert 100 < max(map(len, shown.splitlines())) <= 110
    assert re.search(r"^model\.share_user +False\n    bool: ", shown, re.MULTILINE)


@pytest.mark.parametrize("recipe", ["two_tower", "contextual_ncf", "session"])
def test_a_dry_run_says_how_a_folder_of_ones_own_must_look(recipe: str) -> None:
    text = described(load_recipe(recipe))["data.name"]
    assert "a folder of your own" in text
    assert ".parquet" in text


def test_built_in_recipes_are_listed_with_what_they_are() -> None:
    assert re.search(r"^two_tower +\w", list_recipes(), re.MULTILINE)
    assert load_recipe("two_tower").name == "two_tower"


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
            "there is no function 'jb'; did you mean 'job'? Functions there: job, number",
        ),
        ("my_recipe.py:number", "it returned 3; a recipe returns one Job"),
        (
            "my_typo.py:job",
            "{folder}/my_typo.py, line 2: invalid syntax: def job(:; correct the file",
        ),
        (
            "my_script.py:job",
            "it needs the argument 'path', and is called without any; give it a default",
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


def test_flags() -> None:
    options = build_parser("train", None).parse_args(
        ["--set", "a=1", "--set=b=2", "--run-dir", "runs"]
    )
    assert (options.recipe, options.set, options.run_dir) == (
        "two_tower",
        ["a=1", "b=2"],
        Path("runs"),
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--bogus"],
            "unrecognized arguments: --bogus; `python -m torchx_apps.train --help` lists the flags",
        ),
        (
            ["--set", "loader.batch_siz=1"],
            "--set loader.batch_siz=1: there is no key 'batch_siz'; did",
        ),
        (["--recipe", "two_towr"], "--recipe two_towr: there is no such recipe"),
        (
            ["--run-dir", "runs\udcff"],
            r"argument --run-dir: 'runs\udcff' is not UTF-8; choose another name;",
        ),
        (
            ["--set", "id_dropout=item_id"],
            "--set id_dropout=item_id: id_dropout: 'item_id' must be a feature and a share of",
        ),
    ],
)
def test_a_wrong_flag_ends_in_one_line_and_no_traceback(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(flags) == 1
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_dry_run_prints_the_changed_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train.main(["--dry-run", "--set", "loader.batch_size=7"]) == 0
    assert re.search(r"^loader.batch_size +7$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.launch
def test_a_list_may_be_cut_by_head() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from torchx_apps.cli.process import say_once; sys.exit(say_once('a list'))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
