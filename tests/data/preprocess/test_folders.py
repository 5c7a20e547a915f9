"""A folder is whole or not there: after an error, a kill, a full disk; nobody's data are replaced by a result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.killing import killed_everywhere
from torchrec_ext.data.files.sources import find_files
from torchrec_ext.data.preprocess.folders import keep_sources, whole_folder
from torchrec_ext.schema import DataError
from torchrec_ext.sealed import existing_folder

pytestmark = pytest.mark.unit


def write(out: Path, text: str, *, overwrite: bool = False) -> None:
    with whole_folder(out, overwrite=overwrite, mark="part-*") as staging:
        (staging / "part-0").write_text(text)


def test_an_error_leaves_the_earlier_result(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")

    def fail() -> None:
        with whole_folder(tmp_path / "out", overwrite=True, mark="part-*") as staging:
            (staging / "part-0").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "out/part-0").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def replace(out: str) -> None:
    write(Path(out), "new", overwrite=True)


@pytest.mark.launch
@pytest.mark.slow
def test_killed_at_any_moment_of_a_replacement_a_reader_finds_the_old_or_the_new_one(
    tmp_path: Path,
) -> None:
    out, seen = tmp_path / "out", []
    write(out, "old")
    for _ in killed_everywhere(replace, str(out)):
        seen.append((existing_folder(out) / "part-0").read_text())
        hidden = [path for path in tmp_path.iterdir() if path != out]
        assert all(path.name.startswith(".") for path in hidden), "no loader's data"
        write(out, "old", overwrite=True)
        assert os.listdir(tmp_path) == ["out"], "no leftovers"
        assert (out / "part-0").read_text() == "old"
    assert seen[0] == "old"
    assert seen[-1] == "new"
    assert set(seen) == {"old", "new"}


def test_what_a_living_process_writes_stays_and_a_second_writer_is_refused(
    tmp_path: Path,
) -> None:
    with whole_folder(tmp_path / "out", overwrite=False, mark="part-*") as staging:
        (staging / "part-0").write_text("first")
        with pytest.raises(
            DataError, match=r"out: cannot be written \(another process writes it; if"
        ):
            write(tmp_path / "out", "second")
    assert (tmp_path / "out" / "part-0").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_without_locks_what_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    write(tmp_path / "out", "a")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "part-0").touch()
    with pytest.raises(DataError, match=r"if none does, remove .*/\.out\.partial\)"):
        write(tmp_path / "out", "b", overwrite=True)
    assert (tmp_path / ".out.partial" / "part-0").exists()


def test_what_is_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(
        DataError,
        match=r"out: there is something already; choose another folder, or give --overwrite true",
    ):
        write(tmp_path / "out", "new")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(
        DataError,
        match=r"home: is not the folder of an earlier result \(it has no part-\*\), and is not",
    ):
        write(tmp_path / "home", "new", overwrite=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new")
    with pytest.raises(
        DataError,
        match=r"out: holds .*out/part-0, which is being read; choose another folder",
    ):
        keep_sources(tmp_path / "out", find_files(tmp_path / "out/part-0"))
    keep_sources(tmp_path / "other", find_files(tmp_path / "out/part-0"))


@pytest.mark.parametrize("out", ["s3://bucket/ready", ".", "/"])
def test_where_no_folder_can_be_made(out: str) -> None:
    with pytest.raises(DataError, match=r"must be the path of a folder to make"):
        write(Path(out), "a", overwrite=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError,
        match=r"file/out: cannot be written \(Not a directory\); choose another folder",
    ):
        write(tmp_path / "file/out", "a")


def test_an_error_of_reading_is_not_called_one_of_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"rates\.csv"),
        whole_folder(tmp_path / "out", overwrite=False, mark="part-*"),
    ):
        open("rates.csv")  # noqa: SIM115  (what a user's recipe may do)
