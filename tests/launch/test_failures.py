"""In which words a failure is told, and with which exit code a process ends."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from torchx_apps import embed, export, preprocess, process, publish, serve, train
from torchx_apps.config import changed
from torchx_apps.process import describe_error, exit_code, is_users_mistake
from torchx_apps.recipes.by_name import load_recipe

pytestmark = pytest.mark.unit


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def library_error() -> Exception:
    try:
        json.loads("{")
    except ValueError as error:
        return error
    raise AssertionError


def our_error() -> Exception:
    try:
        changed(load_recipe("two_tower"), ["--train.epochs", "many"])
    except ValueError as error:
        return error
    raise AssertionError


def test_a_users_mistake_is_one_line_with_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    told = describe_error(our_error())
    assert told.startswith("rank 3: ")
    assert "'many' is not an int" in told
    assert "\n" not in told
    assert describe_error(raised(ValueError("mine"))) == "rank 3: mine"
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert describe_error(our_error()).startswith("Traceback")


def test_a_bug_keeps_its_traceback_and_ends_with_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    text = describe_error(raised(KeyError("tower")))
    assert text.startswith("Traceback")
    assert text.splitlines()[-1] == "rank 1: KeyError: 'tower'"
    assert not is_users_mistake(library_error())


def test_a_rank_leaves_its_error_where_torchrun_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(_: object) -> int:
        raise ValueError("mine")

    reply = tmp_path / "error.json"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    assert exit_code(app, []) == 1
    message = json.loads(reply.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "rank 1: mine"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("app", "flags", "message"),
    [
        (export, "nowhere", "nowhere"),
        (serve, "bundle --workers 0", ""),
        (serve, "bundle --worker 0", "Unrecognized options: --worker"),
        (embed, "nowhere --out o --store fp8", ""),
        (publish, "--checkpoint last", ""),
        (preprocess, "--config.test_share 2", ""),
        (train, "--bogus", "Unrecognized options: --bogus"),
        (
            train,
            "two_tower",
            "Unrecognized options: two_tower; name a recipe by --recipe two_tower",
        ),
        (
            train,
            "--loader.batch_siz 1",
            "Unrecognized options: --loader.batch_siz, 1;",
        ),
        (
            train,
            "--recipe two_towr",
            "--recipe two_towr: there is no such recipe",
        ),
        (
            train,
            "--run_dir runs\udcff",
            r"'runs\udcff' is not UTF-8; choose another name",
        ),
        (
            train,
            "--id_dropout item_id",
            "--id_dropout: 'item_id': put the name into the flag, --KEY.NAME VALUE",
        ),
        (
            train,
            "--pretrained.item_id",
            "Missing value for argument '--pretrained.item_id'",
        ),
    ],
)
def test_every_app_ends_a_mistake_with_one_line_and_1(
    app: ModuleType,
    flags: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert app.main(flags.split()) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("end", "code"),
    [(KeyboardInterrupt(), 130), (ValueError("mine"), 1), (KeyError("tower"), 1)],
)
def test_an_end_has_its_exit_code(
    end: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def app(_: object) -> int:
        raise end

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert exit_code(app, []) == code
