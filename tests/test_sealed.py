"""A folder is whole or not there: files by size and SHA-256, a manifest that knows its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from torchrec_ext.sealed import (
    MeasuredStream,
    files_below,
    json_digest,
    measure_file,
    package_versions,
    sealed_json,
)

pytestmark = pytest.mark.unit


def test_files_are_listed_by_path_and_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/x", "a", "c"):
        (tmp_path / name).write_text(name)
    assert list(files_below(tmp_path)) == ["a", "b/x", "c"]
    (tmp_path / "b/link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="it is not a plain file") as refused:
        files_below(tmp_path)
    assert refused.value.filename == str(tmp_path / "b/link")


def test_a_manifest_holds_the_digest_of_the_rest_of_it() -> None:
    content = {"rows": 3, "files": {}}
    whole = json.loads(sealed_json(content, "digest"))
    assert whole == {**content, "digest": json_digest(content)}
    assert json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})


def test_a_stream_is_measured_while_it_is_written(tmp_path: Path) -> None:
    blocks = [b"", b"a", bytes(2**20), b"b" * 5]
    with (tmp_path / "a").open("wb") as file:
        stream = MeasuredStream(file)
        for block in blocks:
            assert stream.write(block) == len(block)
        stream.flush()
        assert stream.tell() == os.fstat(stream.fileno()).st_size == 2**20 + 6
    assert (tmp_path / "a").read_bytes() == b"".join(blocks)
    assert stream.measured == measure_file(tmp_path / "a")


def test_a_clone_that_is_not_installed_has_no_version_and_exports_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torchrec-ext":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert set(package_versions()) == {"torch", "torchrec"}
