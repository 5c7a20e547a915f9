"""Users' vectors in a folder: a newer version is taken, a damaged one not; another tower's are refused at the start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_ext.retrieval.scorer.requests import UnavailableError
from torchrec_ext.retrieval.scorer.user_vectors import FolderVectors, user_vectors
from torchrec_ext.retrieval.store.writer import write_store

pytestmark = pytest.mark.unit
IDS = np.array([7, 8])


def written(folder: Path, value: float, tower: str = "ours") -> Path:
    write_store(folder, [(IDS, torch.full((2, 3), value))], tower=tower)
    return folder


def first_of(vectors: FolderVectors) -> float:
    time.sleep(0.01)
    found, there = vectors.find([7, 9], tower="ours")
    assert there.tolist() == [True, False]
    return float(found[0, 0])


def test_a_newer_version_is_taken_and_a_damaged_one_left(tmp_path: Path) -> None:
    folder = written(tmp_path / "users", 1.0)
    vectors = FolderVectors(folder, retry_s=0.001)
    assert first_of(vectors) == 1.0
    written(folder, 2.0)
    assert (first_of(vectors), vectors.available) == (2.0, True)
    (folder / "CURRENT").write_text("nonsense")
    assert (first_of(vectors), vectors.available) == (2.0, False)
    written(folder, 3.0)
    assert (first_of(vectors), vectors.available) == (3.0, True)
    written(folder, 4.0, tower="another")
    time.sleep(0.01)
    assert not vectors.find([7], tower="ours")[1].any()


def test_files_that_are_cut_under_the_server_are_unavailable(tmp_path: Path) -> None:
    vectors = FolderVectors(written(tmp_path / "users", 1.0))
    for path in (tmp_path / "users").rglob("rows.bin"):
        os.truncate(path, 4)
    with pytest.raises(
        UnavailableError,
        match="the files of users' vectors in 'users' were changed in place",
    ):
        vectors.find([7], tower="ours")


def test_where_a_server_looks(tmp_path: Path) -> None:
    folder = written(tmp_path / "users", 1.0)
    assert user_vectors(None, None, "ours", key=None) == []
    assert [one.source for one in user_vectors(folder, None, "ours", key="user")] == [
        "store"
    ]
    with pytest.raises(
        ValueError,
        match=r"--vectors .*users: made by tower ours, this bundle's query is by theirs; embed the",
    ):
        user_vectors(folder, None, "theirs", key="user")
    with pytest.raises(ValueError, match="holds no embedding store"):
        user_vectors(tmp_path / "nowhere", None, "ours", key="user")
    with pytest.raises(
        ValueError,
        match=r"--vectors: the bundle has no users, .*; export it with users=NamedUsers",
    ):
        user_vectors(folder, None, "ours", key=None)
