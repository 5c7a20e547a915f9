"""`torchx run rec.X --help` and `-- --help`: every component shows its flags; flags have two spellings."""

import argparse
import re
import subprocess
import sys

import pytest

from torchx_apps.launch.component_help import Component
from torchx_apps.torchx_run import Run

NAMES = (
    "embed",
    "data.preprocess",
    "serve.export",
)
NAMES += ("serve.http", "train.hybrid", "train.networks")
COMPONENTS = [f"rec.{name}" for name in NAMES]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`torchx run`, as a terminal of 80 columns sees it."""
    monkeypatch.setenv("COLUMNS", "80")
    return Run()


def answer(command: Run, *words: str) -> int:
    """Returns the exit code of `torchx run` with these words."""
    parser = argparse.ArgumentParser(prog="torchx run")
    command.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        command.run(parser.parse_args(words, argparse.Namespace(log_level="INFO")))
    return int(ended.value.code or 0)


def check_width(printed: str) -> None:
    assert [line for line in printed.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_shows_its_flags(
    name: str, flag: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(run, name, flag) == 0
    printed = capsys.readouterr().out
    check_width(printed)
    assert printed.startswith(f"usage: torchx run {name} ")
    assert f"\nexample:\n  torchx run {name} " in printed
    for parameter in Component.named(name).parameters:
        assert re.search(rf"^  --?{parameter}\b", printed, re.MULTILINE), parameter
    assert printed.endswith(f"torchx run {name} -- --help\n")


@pytest.mark.launch
@pytest.mark.parametrize("name", COMPONENTS)
def test_an_app_shows_its_flags_without_required_ones(
    name: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert answer(run, name, "--", "--help") == 0
    printed = capfd.readouterr().out
    check_width(printed)
    assert printed.startswith("usage: python -m torchx_apps.")
    assert "This file reads the command line" not in printed
    assert len(re.findall(r"^  --\w", printed, re.MULTILINE)) >= 5


def test_a_component_with_a_recipe_shows_its_five_most_used_settings() -> None:
    text = Component.named("rec.train.hybrid").help()
    settings = text.partition(
        "most used settings, of recipe two_tower (--set KEY=VALUE):"
    )[2].partition("\n\n")[0]
    names = re.findall(r"^  (\S+)", settings, re.MULTILINE)
    assert names == [
        "data.name",
        "data.folder",
        "loader.batch_size",
        "train.epochs",
        "optimizer.dense_lr",
    ]
    assert "rec.train.hybrid --recipe two_tower -- --dry-run" in " ".join(text.split())


def test_a_short_h_with_a_value_is_a_named_resource() -> None:
    words = ["-h", "gpu.small", "--run-dir", "a"]
    assert Component.named("rec.train.hybrid").check_flags(words) == [
        "-h",
        "gpu.small",
        "--run_dir",
        "a",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rec.train.hybird"],
            "there is no component rec.train.hybird; did you mean 'rec.train.hybrid'?",
        ),
        (
            ["rec.train.hybrid", "--epochs", "3"],
            "--epochs: rec.train.hybrid has no such flag; --help lists all; a set",
        ),
        (
            ["rec.embed", "--catalog", "x"],
            "the following arguments are required: --bundle",
        ),
        (
            ["rec.embed", "--catalogues", "x"],
            "--catalogues: rec.embed has no such flag; did you mean 'catalogue'?",
        ),
    ],
)
def test_a_wrong_word_is_one_line(
    words: list[str], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(run, *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert message in line
    assert len(line) <= 200


@pytest.mark.launch
@pytest.mark.parametrize("flag", ["--run-dir", "--run_dir"])
def test_an_app_takes_both_spellings(flag: str) -> None:
    command = [sys.executable, "-m", "torchx_apps.train", flag, "a", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
