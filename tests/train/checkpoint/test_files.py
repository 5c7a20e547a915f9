"""What is damaged is found and named, what is half written is none, and nothing in a checkpoint runs."""

import errno
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.examples import NO_MANIFESTS, small_model
from tests.killing import killed_everywhere
from torchrec_ext import sealed
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint import checkpointer as module
from torchrec_ext.train.checkpoint import folder as manifest
from torchrec_ext.train.checkpoint import state
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import (
    CheckpointFolder,
    CheckpointRanks,
    damage,
)
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.checkpoint.state import (
    LoadPlanner,
    LocalShard,
    Parts,
    SavePlanner,
    model_state,
)
from torchrec_ext.train.checkpoint.storage import CheckpointError

HERE = Runtime()
SOME = {"files": {"a": {"bytes": 1, "sha256": "0"}}, "step": 3}


def filled(value: float) -> Any:
    model = small_model(torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def saved(folder: Path, *steps: int, keep: int = 9) -> list[str]:
    """A checkpoint of each step, every weight of which is the step."""
    checkpointer = Checkpointer(str(folder), HERE, keep=keep)
    for step in steps:
        checkpointer.save(step, model_state(filled(step)), content={"step": step})
    checkpointer.close()
    return [checkpointer.folder.path(step) for step in steps]


def test_no_checkpointer_removes_all_that_it_saves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0: must be 1 or more"):
        Checkpointer(str(tmp_path), HERE, keep=0)


def values(model: Any) -> set[float]:
    return {
        float(value)
        for parameter in model.parameters()
        for value in parameter.detach().unique()
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("two")
    saved(folder, 1, 2)
    (folder / "lock").unlink()
    return folder


def test_every_flipped_bit_and_every_cut_is_found_and_the_one_before_used(
    two: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    lines: list[str] = []
    for trial in range(168):  # 120 flips, 42 cuts, 6 files that are gone
        folder = tmp_path / str(trial)
        shutil.copytree(two, folder)
        checkpointer = Checkpointer(str(folder), HERE)
        victim = draw.choice(sorted(Path(checkpointer.folder.path(2)).iterdir()))
        data = bytearray(victim.read_bytes())
        if trial % 4 == 0:
            victim.write_bytes(data[: draw.randrange(len(data))])
        elif trial % 25 == 1:
            victim.unlink()
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            victim.write_bytes(data)
        assert checkpointer.last_good(lines.append) == checkpointer.folder.path(1), (
            trial,
            victim.name,
        )
        if victim.name != manifest.MANIFEST_NAME or victim.exists():
            assert victim.name in lines[-1], lines[-1]
            assert "left out" in lines[-1]
    assert len(lines) >= 160


def test_what_is_saved_is_as_it_was_when_the_save_began(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), HERE)
    model, position = filled(1), {"step": 1, "history": [{"loss": 0.5}]}
    checkpointer.save(1, model_state(model), content={"position": position})
    with torch.no_grad():  # as a run that goes on does, while the thread writes
        for parameter in model.parameters():
            parameter.fill_(2)
    position["step"] = 2
    position["history"].append({"loss": 0.4})  # type: ignore[attr-defined]
    checkpointer.close()
    saved = checkpointer.load(
        checkpointer.folder.path(1), model_state(found := filled(0))
    )
    assert saved["content"]["position"] == {"step": 1, "history": [{"loss": 0.5}]}
    assert values(found) == {1.0}


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def seal_again(path: str) -> None:
    """Gives a checkpoint a manifest that fits its files, as whoever crafted them would."""
    content = manifest.read_checkpoint(path).manifest
    content["files"] = {
        name: sealed.measure_file(Path(path, name)) for name in content["files"]
    }
    Path(path, manifest.MANIFEST_NAME).write_bytes(manifest.sealed(content))


def test_a_crafted_tensor_runs_nothing(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two, tmp_path / "c")
    checkpointer = Checkpointer(str(tmp_path / "c"), HERE)
    path = checkpointer.folder.path(2)
    index = manifest.read_checkpoint(path).index
    for name in {stored.relative_path for stored in index.storage_data.values()}:
        with Path(path, name).open("r+b") as file:
            for stored in index.storage_data.values():
                file.seek(stored.offset)
                file.write(pickle.dumps(Bomb()).ljust(stored.length, b"."))
    with pytest.raises(CheckpointError, match=r"\.distcp is damaged"):
        checkpointer.load(path, model_state(filled(0)))
    seal_again(path)
    with pytest.raises(
        CheckpointError,
        match=r"step-0000000002' could not be read: UnpicklingError: Weights only load failed",
    ):
        checkpointer.load(path, model_state(filled(0)))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.unit
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(b"[" * 100_000, 0, 0)
@given(st.binary(max_size=300), st.integers(0, 10**6), st.integers(0, 255))
def test_any_bytes_are_refused_in_words(noise: bytes, place: int, byte: int) -> None:
    whole = bytearray(manifest.sealed(SOME))
    whole[place % len(whole)] = byte
    for data in (noise, bytes(whole)):
        if data != manifest.sealed(SOME):
            with pytest.raises(CheckpointError, match=r"^m is (damaged|of format)"):
                manifest.opened(data, "m")


@pytest.mark.unit
@pytest.mark.parametrize("name", ["a pipe", "a device"])
def test_what_is_no_plain_file_is_named_and_the_one_before_used(
    name: str, two: Path, tmp_path: Path
) -> None:
    make, message = NO_MANIFESTS[name]
    folder = shutil.copytree(two, tmp_path / "run")
    newest = folder / "step-0000000002"
    (newest / "manifest.json").unlink()
    make(newest / "manifest.json")
    lines: list[str] = []
    checkpointer = Checkpointer(str(folder), HERE)
    assert checkpointer.last_good(lines.append) == str(folder / "step-0000000001")
    assert re.search(
        rf"checkpoint step 2: .*manifest\.json cannot be read: .*({message})", lines[0]
    )
    part = next(
        path
        for path in (folder / "step-0000000001").iterdir()
        if path.suffix == ".distcp"
    )
    part.unlink()
    make(part)
    assert re.search(
        rf"distcp cannot be read: {message}",
        str(damage(str(folder / "step-0000000001"), CheckpointRanks(HERE))),
    )
    checkpointer.close()


def test_another_format_names_the_version_that_reads_it() -> None:
    for version in (99, 2, 1):
        data = json.dumps({"format": version, "sha256": "0"}).encode()
        message = f"is of format {version}, this version reads 3: take the release"
        with pytest.raises(CheckpointError, match=message) as error:
            manifest.opened(data, "m")
        assert len(str(error.value)) <= 200


def test_only_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), HERE, keep=2)
    for step in (1, 2, 3, 4, 5):
        checkpointer.save(step, model_state(filled(step)))
        if step == 2:
            checkpointer.mark_best(2)
    checkpointer.close()
    assert checkpointer.folder.steps() == [5, 4, 2]
    assert checkpointer.folder.best() == 2


def test_what_was_never_finished_is_no_checkpoint_and_is_removed(
    tmp_path: Path,
) -> None:
    (path,) = saved(tmp_path, 1)
    folder = CheckpointFolder(str(tmp_path))
    shutil.copytree(path, folder.path(3))
    Path(folder.path(3), manifest.MANIFEST_NAME).unlink()
    assert folder.steps() == [1]
    assert folder.clean() == ["step-0000000003"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "lock",
        "step-0000000001",
    ]


def _set_aside(folder: str) -> None:
    CheckpointFolder(folder).set_aside(1)


@pytest.mark.slow
def test_killed_at_any_moment_of_a_rollback_the_newest_left_is_of_the_former_run(
    two: Path, tmp_path: Path
) -> None:
    shutil.copytree(two, tmp_path / "whole")
    saved(tmp_path / "whole", 3)
    folder, seen = tmp_path / "run", []
    shutil.copytree(tmp_path / "whole", folder)
    for ended in killed_everywhere(_set_aside, str(folder)):
        seen.append(CheckpointFolder(str(folder)).steps())
        # The newest goes first: what is left is that run, a little earlier.
        assert seen[-1] in ([3, 2, 1], [2, 1], [1])
        aside = {int(path.name[-10:]) for path in folder.glob("aside-*")}
        assert aside == {1, 2, 3} - set(seen[-1])
        if not ended:
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "whole", folder)
    assert seen[0] == [3, 2, 1]
    assert seen[-1] == [1]


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize(("step", "left"), [(6, [6, 5]), (9, [9, 5]), (2, [2])])
def test_the_first_save_after_a_load_sets_aside_what_the_loaded_run_never_was(
    step: int,
    left: list[int],
    restarted: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpointer = Checkpointer(str(tmp_path), HERE)
    for earlier in (5, 6, 7):
        checkpointer.save(earlier, model_state(filled(earlier)))
    if restarted:
        checkpointer.close()
        checkpointer = Checkpointer(str(tmp_path), HERE)
    checkpointer.load(checkpointer.folder.path(5), model_state(filled(0)))
    checkpointer.save(step, model_state(filled(step)))
    checkpointer.close()
    assert checkpointer.folder.steps() == left
    assert len(list(tmp_path.glob("aside-*"))) == 4 - len(left)
    assert "set aside: the checkpoints of step " in capsys.readouterr().out


def _save_again(folder: str) -> None:
    checkpointer = Checkpointer(folder, HERE)
    checkpointer.save(2, model_state(filled(4)))
    checkpointer.close()


def test_killed_while_a_step_is_saved_again_it_is_there_or_the_one_before(
    two: Path, tmp_path: Path
) -> None:
    folder, seen = tmp_path / "run", []
    shutil.copytree(two, folder)
    for ended in killed_everywhere(_save_again, str(folder)):
        checkpointer = Checkpointer(str(folder), HERE)
        path = checkpointer.last_good()
        assert path is not None
        checkpointer.load(path, model_state(model := filled(0)))
        seen.append(values(model))
        assert seen[-1] in ({1.0}, {2.0}, {4.0})
        checkpointer.folder.clean()
        checkpointer.close()
        names = {"lock", "step-0000000001", "step-0000000002"}
        assert {entry.name for entry in folder.iterdir()} <= names, "no leftovers"
        if not ended:
            shutil.rmtree(folder)
            shutil.copytree(two, folder)
    assert seen[0] == {2.0}
    assert seen[-1] == {4.0}


def test_two_jobs_do_not_write_one_folder(tmp_path: Path) -> None:
    first = Checkpointer(str(tmp_path), HERE)
    with pytest.raises(
        CheckpointError,
        match=r"is being written by another job; .*--run_dir",
    ):
        Checkpointer(str(tmp_path), HERE)
    first.close()


def test_another_model_is_refused_by_its_first_differences(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    model = small_model(torch.device("cpu"), interaction="dot")
    model.towers["user"].mlp[0] = torch.nn.Linear(33, 20)  # type: ignore[index]
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(str(tmp_path / "other"), HERE).load(path, model_state(model))
    said = str(caught.value)
    assert "dense.towers.user.mlp.0.weight is (20, 33), saved as (16, 33)" in said
    assert re.search(r", \d+ difference\(s\): .* \.\.\.$", said)
    assert len(said) <= 200
    assert values(model) - {1.0}, "nothing was written"


def test_a_full_disk_is_told_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(tmp_path, 1)
    checkpointer = Checkpointer(str(tmp_path), HERE)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpointer.folder, "seal", fail)
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0)
    )
    checkpointer.save(2, model_state(filled(2)))
    with pytest.raises(CheckpointError, match=r"step-0000000002' .*: no space is left"):
        checkpointer.wait()
    assert checkpointer.last_good() == path


def test_what_is_not_finite_is_named_and_not_saved(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    checkpointer = Checkpointer(str(tmp_path), HERE)
    for step, value in ((2, math.nan), (3, math.inf)):
        model = filled(step)
        with torch.no_grad():
            tables = model.look_ups.collections["rows"].embedding_bags
            tables["item_id"].weight[7] = value
        checkpointer.save(step, model_state(model))
        with pytest.raises(
            CheckpointError,
            match=r"^tables\.item_id\.weight is not finite.*of a mask set persistent=F",
        ):
            checkpointer.wait()
    assert checkpointer.last_good() == path
    # Large numbers whose sum overflows are finite.
    checkpointer.save(4, model_state(filled(3e38)))
    checkpointer.close()
    assert checkpointer.folder.steps() == [4, 1]


@pytest.mark.parametrize("folder", ["memory://checkpoints/a", "memory://"])
def test_a_url_works_as_a_path_does(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(folder, HERE, keep=1)
    for step in (1, 2):
        checkpointer.save(step, model_state(filled(step)))
    checkpointer.wait()
    model = filled(0)
    assert checkpointer.folder.steps() == [2]
    path = checkpointer.last_good()
    assert path == f"{folder}/step-0000000002"
    checkpointer.load(path, model_state(model))
    assert values(model) == {2.0}
    assert not list(tmp_path.iterdir())
    RunCheckpoints(checkpointer, CheckpointConfig(), resume=path)
    with pytest.raises(CheckpointError, match="an address without '::' is needed"):
        Checkpointer(f"simplecache::{folder}", HERE)


def test_a_run_goes_on_in_its_own_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("own", HERE)
    for path in ("own/step-1", f"{tmp_path}/own/step-1/"):
        RunCheckpoints(checkpointer, CheckpointConfig(), resume=path)
    with pytest.raises(ValueError, match=r"'other/step-1': a run goes on in its own"):
        RunCheckpoints(checkpointer, CheckpointConfig(), resume="other/step-1")


@pytest.mark.parametrize("rows", [60, 100, 130])
@pytest.mark.parametrize(
    "division", [(130,), (40, 90)], ids=["one rank's", "two ranks'"]
)
def test_a_tensor_of_several_blocks_is_loaded_as_it_was_saved(
    rows: int,
    division: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are those of the writer; a reader's rectangle may begin where a block does and be larger."""
    monkeypatch.setattr(state, "_BLOCK_BYTES", 25 * 4 * 4)  # 25 rows
    whole = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4)
    dcp.save(
        {"tables.a.weight": Parts((rows, 4), [LocalShard(whole, (0, 0))])},
        checkpoint_id=tmp_path,
        planner=SavePlanner(),
        no_dist=True,
    )
    starts = [0, *itertools.accumulate(division)]
    loaded = torch.full_like(whole, math.nan)
    parts = [
        LocalShard(loaded[start:end], (start, 0))
        for start, end in itertools.pairwise(starts)
    ]
    dcp.load(
        {"tables.a.weight": Parts((rows, 4), parts)},
        checkpoint_id=tmp_path,
        planner=LoadPlanner(),
        no_dist=True,
    )
    assert torch.equal(loaded, whole)
