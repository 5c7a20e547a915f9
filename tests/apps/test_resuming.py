"""What a rank that is asked to stop can see of the others, and which checkpoints several runs have in common."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.examples import small_model
from tests.files import records
from tests.settings import with_settings
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import (
    CheckpointRanks,
    read_checkpoint,
    sealed,
)
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.report.progress import RunFolderError
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    check_recipe,
    checkpoint_to_export,
    ended,
)
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

pytestmark = pytest.mark.unit


def test_a_run_has_ended_when_it_was_tested_or_its_last_record_is_an_error(
    tmp_path: Path,
) -> None:
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n')
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "error"}\n')
    assert ended(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    assert ended(tmp_path / "other")


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    other = tmp_path / "b-1"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"name": "b"}))
    rule = "b-1: is a run of recipe 'b', not of 'a'; give a run of 'a', or"
    with pytest.raises(CheckpointError, match=rule):
        check_recipe(other, "a")
    check_recipe(other, "b")
    check_recipe(tmp_path / "none", "a")
    # A folder of several networks has one folder for each.
    with pytest.raises(CheckpointError, match="recipe 'b', not of 'a'"):
        check_recipe(tmp_path, "a")
    (other / "config.json").write_text("[" * 100_000)
    check_recipe(other, "a")


SHORT = (
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "train.compile=off",
    "loader.batch_size=256",
    "evaluation.baselines=",
)


def test_a_run_never_goes_on_in_the_folder_of_another_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest run of a name that begins alike was gone on with, and written over."""
    monkeypatch.chdir(tmp_path)
    job = with_settings(load_recipe("two_tower"), [*SHORT, "train.epochs=1"])
    wide = dataclasses.replace(job, name="two_tower-wide")
    run_training(wide, Path("runs/two_tower-wide-1"))
    before = Path("runs/two_tower-wide-1/config.json").read_text()
    run_training(job)
    assert "resuming" not in capsys.readouterr().out
    assert Path("runs/two_tower-wide-1/config.json").read_text() == before
    with pytest.raises(CheckpointError, match="is a run of recipe 'two_tower-wide'"):
        run_training(job, Path("runs/two_tower-wide-1"))
    assert Path("runs/two_tower-wide-1/config.json").read_text() == before


def test_a_run_goes_on_with_the_records_up_to_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*SHORT, "train.epochs=2", "train.log_every=2", "checkpoint.steps=5"]
    job = with_settings(load_recipe("two_tower"), settings)
    run_training(job, tmp_path / "whole")
    for name in ("run", "copy"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        for newer in sorted((tmp_path / name / CHECKPOINTS).glob("step-*"))[1:]:
            shutil.rmtree(newer)
    (tmp_path / "run" / "summary.json").unlink()
    # What was being written when the run was killed.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    run_training(job, tmp_path / "run")
    assert f"resuming from {tmp_path}/run/checkpoints/" in capsys.readouterr().out
    # A copy of a run that has ended goes on from the checkpoint that it still has.
    run_training(job, tmp_path / "copy")
    whole, *others = (records(tmp_path / name) for name in ("whole", "run", "copy"))
    assert others == [whole, whole]


@pytest.mark.slow
def test_a_million_records_do_not_grow_a_checkpoint_and_are_gone_on_with(
    tmp_path: Path,
) -> None:
    """Manifests held all records, and one of more than 16 MiB was taken for damaged: the run began anew."""
    settings = [*SHORT, "train.epochs=2", "train.log_every=2", "checkpoint.keep=9"]
    job = with_settings(load_recipe("two_tower"), settings)
    run = tmp_path / "run"
    run_training(job, run)
    whole = records(run)
    first, *_, last = sorted((run / CHECKPOINTS).glob("step-*/manifest.json"))
    size = last.stat().st_size
    shutil.rmtree(last.parent)
    manifest = read_checkpoint(str(first.parent)).manifest
    manifest["content"]["position"]["records"] += 10**6
    first.write_bytes(sealed(manifest))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text('{"kind": "train"}\n' * 10**6 + lines)
    run_training(job, run)
    after = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(after[10**6 :]))
    assert records(run) == whole
    assert abs(last.stat().st_size - size) < 100


def test_a_run_without_checkpoints_that_has_ended_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unsaved = ["checkpoint.epochs=0", "checkpoint.steps=0", "train.epochs=1"]
    job = with_settings(load_recipe("two_tower"), [*SHORT, *unsaved])
    run_training(job, tmp_path / "run")
    with pytest.raises(RunFolderError, match="holds another run"):
        run_training(job, tmp_path / "run")
    assert "begins anew" not in capsys.readouterr().err
    # One that was cut short before it could be saved begins again.
    (tmp_path / "run" / "summary.json").unlink()
    run_training(job, tmp_path / "run")
    assert "begins anew, from nothing" in capsys.readouterr().err


def test_best_last_and_steps_of_a_run_are_found_and_others_told(tmp_path: Path) -> None:
    model, together = small_model(), CheckpointRanks(Runtime())
    checkpointer = Checkpointer(str(tmp_path / CHECKPOINTS), Runtime())
    for step in (3, 6):
        checkpointer.save(step, model_state(model))
    checkpointer.wait()

    def found(which: str | None, **options: bool) -> tuple[int, str]:
        path, text = checkpoint_to_export(str(tmp_path), which, together, **options)
        return int(path[-10:]), text

    assert found(None) == found("last") == (6, "the last")
    with pytest.raises(
        CheckpointError,
        match=r"--checkpoint best: there is no such .* steps 3, 6; best is of runs with",
    ):
        found("best")
    checkpointer.mark_best(3)
    checkpointer.close()
    assert found(None) == found("best") == (3, "the best")
    assert found(None, restores=False) == found("last") == (6, "the last")
    assert found("6") == (6, "of step 6")
    path, text = checkpoint_to_export(
        str(tmp_path / CHECKPOINTS / "step-0000000003"), None, together
    )
    assert (int(path[-10:]), text) == (3, "the named")
    with pytest.raises(
        CheckpointError,
        match=r"--checkpoint 5: there is no such checkpoint; give last, or one of the steps 3",
    ):
        found("5")


def test_a_run_that_failed_lets_its_folder_go(tmp_path: Path) -> None:
    """A notebook keeps an error with its frames, and so kept the folder's lock."""
    settings = [*SHORT, "train.epochs=1", "checkpoint.steps=5"]
    job = with_settings(load_recipe("two_tower"), settings)
    given = with_settings(job, ["pretrained.nothing=nothing.parquet"])
    with pytest.raises(ValueError, match="is no table of the model") as failed:
        run_training(given, tmp_path / "run")
    unwatched = with_settings(job, ["train.early_stop.metric=auc"])
    with pytest.raises(ValueError, match="has no such figure"):
        run_training(unwatched, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    run_training(job, tmp_path / "run")
    assert failed.value.__traceback__ is not None
    # A start that is refused leaves settings, records and plan of what is saved.
    files = [tmp_path / f"run/{name}" for name in ("config.json", "metrics.jsonl")]
    files.append(tmp_path / "run/plan.txt")
    saved = [file.read_text() for file in files]
    with pytest.raises(CheckpointError, match="is of another model"):
        run_training(with_settings(job, ["model.embedding_dim=8"]), tmp_path / "run")
    assert [file.read_text() for file in files] == saved
