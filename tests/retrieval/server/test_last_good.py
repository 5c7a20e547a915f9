"""The last good bundle: its files stay when the folder is overwritten, and leave with the server."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchrec_ext.retrieval.server import last_good
from torchrec_ext.retrieval.server.last_good import LastGood

pytestmark = pytest.mark.unit


def bundle(folder: Path, content: str) -> Path:
    (folder / "store").mkdir(parents=True)
    (folder / "manifest.json").write_text(content)
    (folder / "store" / "rows.bin").write_bytes(bytes(last_good._COPIED_BYTES))
    return folder


def test_large_files_are_linked_and_small_ones_copied_until_the_next_bundle(
    tmp_path: Path,
) -> None:
    good = LastGood(print)
    there = bundle(tmp_path / "a", "first")
    good.keep(there)
    _, kept = good.folders
    assert (kept / "store" / "rows.bin").samefile(there / "store" / "rows.bin")
    (there / "manifest.json").write_text("broken")
    shutil.rmtree(there)
    assert (kept / "manifest.json").read_text() == "first"
    assert (kept / "store" / "rows.bin").stat().st_size == last_good._COPIED_BYTES
    good.keep(kept)  # by a worker that began with it
    assert (kept / "manifest.json").read_text() == "first"
    other = bundle(tmp_path / "b", "second")
    good.keep(other)
    assert good.folders[0] == other
    assert not kept.exists()
    good.close()
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


def test_a_server_that_was_killed_leaves_files_that_the_next_one_removes(
    tmp_path: Path,
) -> None:
    there = bundle(tmp_path / "a", "first")
    leftover, others = (
        tmp_path / f".a.served.partial-elsewhere-{number}" for number in (1, 2)
    )
    leftover.mkdir()
    others.mkdir()
    handle = os.open(others, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as another server does while it runs
    good = LastGood(print)
    good.keep(there)
    assert (leftover.exists(), others.exists()) == (False, True)
    good.close()
    os.close(handle)


def test_files_that_cannot_be_kept_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    good = LastGood(lambda event, **values: events.append((event, values)))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", "somewhere")

    monkeypatch.setattr(last_good.os, "link", refuse)
    there = bundle(tmp_path / "a", "first")
    good.keep(there)
    good.keep(there)
    assert good.folders == [there]
    ((event, values),) = events
    assert event == "last_good_not_kept"
    assert "(Operation not permitted)" in values["why"]
    assert len(values["why"]) < 200
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
