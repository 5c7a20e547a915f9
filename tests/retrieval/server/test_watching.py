"""Where the bundle is, by folder, link or text; a change is acted on once, and one that is broken is told and left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from tests.retrieval.server.launched import until
from torchrec_ext.retrieval.server.worker import Watcher, bundle_folder, identity

pytestmark = pytest.mark.unit


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(content)
    return path


def test_a_folder_a_link_and_a_text_file_lead_to_the_same(tmp_path: Path) -> None:
    there = folder(tmp_path / "a bundle", "{}")
    (tmp_path / "link").symlink_to(there)
    (tmp_path / "text").write_text("a bundle\n")
    (tmp_path / "absolute").write_text(str(there))
    for name in ("a bundle", "link", "text", "absolute"):
        assert bundle_folder(tmp_path / name) == there


def test_the_folder_of_a_run_leads_to_the_bundle_that_it_ended_with(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert bundle_folder(run) == run, "which is then told to be none"
    there = folder(run / "bundle", "{}")
    assert bundle_folder(run) == there
    (run / "manifest.json").write_text("{}")
    assert bundle_folder(run) == run


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "there is no such file or folder"),
        ("gone", "which is not a folder"),
        ("", "no such file"),
        ("\xff" * 9_000, "not a folder"),
    ],
)
def test_what_leads_nowhere_is_told(
    tmp_path: Path, written: str | None, message: str
) -> None:
    if written is not None:
        (tmp_path / "pointer").write_text(written)
    with pytest.raises(ValueError, match=message):
        bundle_folder(tmp_path / "pointer")
    assert len(identity(tmp_path / "pointer")) == 1


def test_an_identity_changes_with_every_file(tmp_path: Path) -> None:
    there = folder(tmp_path / "bundle", "{}")
    before = identity(there)
    assert identity(there) == before
    (there / "manifest.json").write_text("[]...")
    after = identity(there)
    assert after != before
    os.replace(there, tmp_path / "elsewhere")
    assert identity(there) != after


class Events:
    """What a watcher did, with bundles that are the text of their manifest; `bad` cannot be loaded."""

    def __init__(self, pointer: Path, every_s: float = 0.01) -> None:
        self.done: list[str] = []
        self.looks = 0
        self.watcher = Watcher(
            pointer,
            self.load,
            cast(Any, self.done.append),
            self.done.append,
            self.tick,
            every_s,
        )

    def load(self, there: Path) -> Any:
        content = (there / "manifest.json").read_text()
        if content == "bad":
            raise ValueError("refused: bad")
        if content == "worse":
            raise KeyError("digest")
        return content

    def tick(self) -> None:
        self.looks += 1

    def wait(self, looks: int) -> None:
        target = self.looks + looks
        until(lambda: self.looks >= target)


def test_a_change_is_served_once_and_a_broken_one_told_once(tmp_path: Path) -> None:
    bundles = {
        content: folder(tmp_path / content, content)
        for content in ("one", "two", "bad", "worse")
    }
    pointer = tmp_path / "pointer"
    pointer.write_text("one")
    events = Events(pointer)
    events.watcher.start()
    events.wait(3)
    assert events.done == []
    for name in ("two", "bad", "worse", "one"):
        fresh = tmp_path / "fresh"
        fresh.write_text(str(bundles[name]))
        os.replace(fresh, pointer)
        events.wait(5)
    assert events.done == ["two", "refused: bad", "KeyError: 'digest'", "one"]
    pointer.unlink()
    events.wait(5)
    assert "there is no such file or folder" in events.done[-1]
    events.watcher.end()
    events.watcher.join(20)
    assert not events.watcher.is_alive()


def test_a_look_acts_at_once_and_tries_again_what_was_refused(tmp_path: Path) -> None:
    there = folder(tmp_path / "bundle", "bad")
    events = Events(there, every_s=60)
    events.watcher.start()
    for place, content in enumerate(("bad", "good"), start=1):
        (there / "manifest.json").write_text(content)
        events.watcher.look()
        until(lambda place=place: len(events.done) == place)
    assert events.done == ["refused: bad", "good"]
    events.watcher.end()
    events.watcher.join(20)


def test_a_tick_that_fails_does_not_end_the_watcher(tmp_path: Path) -> None:
    there = folder(tmp_path / "bundle", "good")
    events = Events(there)
    looked = events.watcher._tick

    def out_of_files() -> None:
        looked()
        raise OSError(24, "Too many open files")  # as where sockets have taken them all

    events.watcher._tick = out_of_files
    events.watcher.start()
    events.wait(3)
    (there / "manifest.json").write_text("another")
    until(lambda: events.done == ["another"])
    events.watcher.end()
    events.watcher.join(20)
    assert not events.watcher.is_alive()
