"""A store is whole or absent, and a refresh changes, adds and removes rows over a copy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.store import (
    Store,
    refresh_store,
    write_store,
)
from torchrec_ext.schema import DataError


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def write(folder: Path, *blocks: Any, **options: Any) -> Store:
    shape = (sum(len(ids) for ids, _ in blocks), 4)
    return write_store(folder, blocks, tower="t", side="query", shape=shape, **options)


def test_reads_what_was_written(tmp_path: Path) -> None:
    first, second = vectors(3), vectors(2, 1)
    write(tmp_path / "s", (["g", "e", "c"], first), (["k", "l"], second))
    store = Store.open(tmp_path / "s")
    assert len(store) == 5
    found = store.find("e")
    assert found is not None
    np.testing.assert_array_equal(found, first[1])
    assert store.find("d") is None
    assert store.find(5) is None
    np.testing.assert_array_equal(store.vectors, np.concatenate([first, second]))


def test_a_refresh_changes_adds_and_removes(tmp_path: Path) -> None:
    old, new = vectors(4), vectors(2, 1)
    opened = write(tmp_path / "s", ([1, 2, 3, 4], old))
    store = refresh_store(
        tmp_path / "s", [([3, 9], new)], tower="t", deleted=[1, 3, 100]
    )
    assert store.ids.ids(range(len(store))) == [2, 4, 3, 9]
    np.testing.assert_array_equal(store.vectors, [old[1], old[3], new[0], new[1]])
    # Whoever had opened the old store reads on in it.
    np.testing.assert_array_equal(opened.vectors, old)


def test_an_interrupted_write_leaves_the_old_store(tmp_path: Path) -> None:
    old = vectors(2)
    write(tmp_path / "s", ([1, 2], old))

    def blocks() -> Any:
        yield [5], vectors(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refresh_store(tmp_path / "s", blocks(), tower="t")
    np.testing.assert_array_equal(Store.open(tmp_path / "s").vectors, old)
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


def test_one_changed_byte_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "s", ([1, 2], vectors(2)))
    path = tmp_path / "s" / "vectors.npy"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(BundleError, match=r"does not fit its digest"):
        Store.open(tmp_path / "s")


def test_refusals(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    nan = vectors(2)
    nan[1, 0] = np.nan
    with pytest.raises(BundleError, match=r"id 8 is NaN"):
        write(folder, ([7, 8], nan))
    with pytest.raises(BundleError, match=r"7.* is there more than once"):
        write(folder, ([7, 7], vectors(2)))
    with pytest.raises(BundleError, match=r"there are no rows"):
        write(folder)
    assert not folder.exists()
    write(folder, ([7, 8], vectors(2)))
    with pytest.raises(DataError, match=r"something already"):
        write(folder, ([7], vectors(1)))
    with pytest.raises(BundleError, match=r"is of tower t, this bundle's is u"):
        refresh_store(folder, [([7], vectors(1))], tower="u")
    with pytest.raises(BundleError, match=r"give ids of its type"):
        refresh_store(folder, [(["a"], vectors(1))], tower="t")
    with pytest.raises(BundleError, match=r"cannot be read"):
        Store.open(tmp_path / "none")
