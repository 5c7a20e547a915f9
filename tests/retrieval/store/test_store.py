"""The store: rows as they were written, versions as a whole or not at all, readers that keep theirs, damage told of."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_ext import sealed
from torchrec_ext.retrieval.store import store as store_module
from torchrec_ext.retrieval.store.row_formats import (
    Dtype,
    LossMeter,
    decode,
    encode,
    some_of,
)
from torchrec_ext.retrieval.store.store import EmbeddingStore, refresh_store
from torchrec_ext.retrieval.store.versions import StoreError, prune_store, versions
from torchrec_ext.retrieval.store.writer import write_store

pytestmark = pytest.mark.unit
ROWS, WIDTH = 300, 12


def vectors(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def blocks(
    ids: Any, values: np.ndarray, size: int = 64
) -> list[tuple[Any, np.ndarray]]:
    return [
        (ids[at : at + size], values[at : at + size])
        for at in range(0, len(values), size)
    ]


def written(folder: Path, dtype: Dtype = "fp32", **options: Any) -> EmbeddingStore:
    return write_store(
        folder, blocks(np.arange(ROWS) * 3 + 1, vectors()), dtype=dtype, **options
    )


@pytest.mark.parametrize("strings", [False, True])
def test_rows_as_written(strings: bool, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).permutation(ROWS)
    named = np.array([f"item {one}" for one in ids]) if strings else ids
    write_store(tmp_path, blocks(named, vectors()), tower="abc")
    store = EmbeddingStore.open(tmp_path, verify=True)
    asked = named[[7, 250, 7]]
    positions = torch.from_numpy(store.ids.positions(asked))
    assert torch.equal(store.rows(positions), torch.from_numpy(vectors()[[7, 250, 7]]))
    assert torch.equal(store.matrix(), torch.from_numpy(vectors()))
    assert torch.equal(store.block(5, 9), store.matrix()[5:9])
    assert (
        len(store),
        store.width,
        store.dtype,
        store.tower,
        store.live.all(),
        store.loss,
    ) == (
        ROWS,
        WIDTH,
        "fp32",
        "abc",
        True,
        {},
    )


def test_the_digest_is_of_what_is_stored_and_of_nothing_else(tmp_path: Path) -> None:
    """Not of the block size, the folder or the time; of every number, id and the tower."""
    ids, values = np.arange(ROWS), vectors()
    first = write_store(tmp_path / "a", blocks(ids, values), tower="t").digest
    assert (
        write_store(tmp_path / "b" / "c", blocks(ids, values, size=7), tower="t").digest
        == first
    )
    changed = values.copy()
    changed[3, 4] = np.nextafter(changed[3, 4], 9)
    others = [
        (ids, values, "u"),
        (ids, changed, "t"),
        (ids[::-1], values, "t"),
        (ids + 1, values, "t"),
    ]
    assert (
        len(
            {
                first,
                *(
                    write_store(tmp_path / "d", blocks(i, v), tower=t).digest
                    for i, v, t in others
                ),
            }
        )
        == 5
    )


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_what_fewer_bits_lose_is_in_the_manifest(dtype: Dtype, tmp_path: Path) -> None:
    store = written(tmp_path, dtype)
    values = torch.from_numpy(vectors())
    error = (store.rows(torch.arange(ROWS)) - values).abs()
    assert store.loss["greatest"] == float(error.max()) > 0
    assert store.loss["mean"] == pytest.approx(float(error.double().mean()), rel=1e-9)
    bound = values.abs().amax(dim=1, keepdim=True) * (
        2**-11 if dtype == "fp16" else 0.5001 / 127
    )
    assert bool((error <= bound).all())
    queries = values[:64:1][:64]
    exact, found = (
        (queries @ rows.T).topk(100).indices
        for rows in (values, store.rows(torch.arange(ROWS)))
    )
    recall = np.mean(
        [
            len(set(a.tolist()) & set(b.tolist())) / 100
            for a, b in zip(exact, found, strict=True)
        ]
    )
    assert store.loss["recall"] == pytest.approx(recall)
    assert recall > 0.97
    meter = LossMeter(some_of(values[:64]))
    for block in torch.split(values, 64):
        meter.add(block, decode(*encode(block, dtype)))
    assert store.loss == meter.loss().as_dict()
    assert torch.equal(store.block(3, 8), store.rows(torch.arange(3, 8)))


def test_int8_of_a_zero_row_is_zero(tmp_path: Path) -> None:
    store = write_store(
        tmp_path, [([1, 2], np.array([[0.0, 0.0], [1.0, -2.0]]))], dtype="int8"
    )
    assert torch.allclose(
        store.rows(torch.tensor([0, 1])),
        torch.tensor([[0.0, 0.0], [1.0, -2.0]]),
        atol=1e-2,
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_refresh_changes_appends_and_takes_out(dtype: Dtype, tmp_path: Path) -> None:
    """The refreshed rows equal those of a store written at once; other rows, and an open reader, stay as they were."""
    old = written(tmp_path, dtype)
    before = old.rows(torch.arange(ROWS)).clone()
    more = vectors(4, seed=9) / 2
    new = refresh_store(tmp_path, np.array([1, 900_000, 31, -5]), more, deleted=[4, 7])
    fresh = write_store(
        tmp_path / "fresh", [(np.array([1, 900_000, 31, -5]), more)], dtype=dtype
    )
    assert new.ids.positions([1, 900_000, 31, -5, 4]).tolist() == [
        0,
        ROWS,
        10,
        ROWS + 1,
        1,
    ]
    assert torch.equal(
        new.rows(torch.tensor([0, ROWS, 10, ROWS + 1])), fresh.rows(torch.arange(4))
    )
    others = torch.tensor([place for place in range(ROWS) if place not in (0, 10)])
    assert torch.equal(new.rows(others), before[others])
    assert np.flatnonzero(~new.live).tolist() == [1, 2]
    assert len(new) == ROWS + 2
    assert torch.equal(old.rows(torch.arange(ROWS)), before)
    assert old.live.all()
    back = refresh_store(tmp_path, [4], more[:1])
    assert back.live[1]
    assert not back.live[2]
    assert len(back) == len(new)
    assert (
        EmbeddingStore.open(tmp_path, verify=True).digest
        == back.digest
        != new.digest
        != old.digest
    )
    if dtype != "fp32":
        assert new.loss["rows"] == ROWS + 4
        assert new.loss["greatest"] >= old.loss["greatest"]


def test_refresh_of_strings(tmp_path: Path) -> None:
    write_store(tmp_path, [(["a", "b"], vectors(2))])
    store = refresh_store(tmp_path, ["c", "a"], vectors(2, seed=1), deleted=["b"])
    assert store.ids.ids().tolist() == ["a", "b", "c"]
    assert store.live.tolist() == [True, False, True]
    assert torch.equal(
        store.rows(torch.tensor([2, 0])), torch.from_numpy(vectors(2, seed=1))
    )


def test_refresh_refuses_what_does_not_belong(tmp_path: Path) -> None:
    written(tmp_path, tower="0123456789abcdef")
    refused: list[tuple[str, Callable[[], object]]] = [
        (
            "holds vectors of the tower 0123456789ab",
            lambda: refresh_store(tmp_path, [1], vectors(1), tower="fedcba"),
        ),
        (
            "deleted: 2 is not in the store",
            lambda: refresh_store(tmp_path, [1], vectors(1), deleted=[2]),
        ),
        (
            "deleted: 1 is also among the ids to write",
            lambda: refresh_store(tmp_path, [1], vectors(1), deleted=[1]),
        ),
        (
            "ids: 5 stands at rows 0 and 1",
            lambda: refresh_store(tmp_path, [5, 5], vectors(2)),
        ),
        (
            r"vectors: shape \(1, 3\); 1 ids of this store need \(1, 12\)",
            lambda: refresh_store(tmp_path, [1], np.ones((1, 3))),
        ),
        (
            "is str, this|are str, this",
            lambda: refresh_store(tmp_path, ["a"], vectors(1)),
        ),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert versions(tmp_path) == ["v00000001"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(np.array([1, 2]), np.ones((1, 3)))], r"vectors: shape \(1, 3\) for 2 ids"),
        (
            [(np.array([1]), np.ones((1, 3))), (np.array([2]), np.ones((1, 4)))],
            "vectors: 4 wide from row 1 on, 3 before",
        ),
        (
            [
                (np.array([1]), np.ones((1, 2))),
                (np.array([2]), np.array([[1, np.nan]])),
            ],
            "row 0, column 1 is nan; must be fin.*row 1",
        ),
        ([(np.array([1, 3, 1]), np.ones((3, 2)))], "ids: 1 stands at rows 0 and 2"),
        (
            [(np.array([1]), np.ones((1, 2))), (["a"], np.ones((1, 2)))],
            "some blocks have int64 ids and others str",
        ),
    ],
)
def test_write_refuses_and_leaves_the_version_before(
    given: Any, message: str, tmp_path: Path
) -> None:
    digest = written(tmp_path).digest
    with pytest.raises(ValueError, match=message):
        write_store(tmp_path, given)
    assert EmbeddingStore.open(tmp_path).digest == digest
    assert not list(tmp_path.glob("*.partial"))


def test_numbers_beyond_fp16_and_wrong_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="row 0, column 0 is 70000; fp16 holds up to 65,504; use fp32 or int8",
    ):
        write_store(tmp_path, [([1], np.array([[7e4]]))], dtype="fp16")
    with pytest.raises(
        ValueError, match="dtype='fp8': must be one of fp32, fp16, int8"
    ):
        write_store(tmp_path, [], dtype="fp8")  # type: ignore[arg-type]


def test_an_empty_catalogue(tmp_path: Path) -> None:
    store = write_store(tmp_path, [])
    assert (
        len(store),
        store.ids.positions([1]).tolist(),
        store.rows(torch.zeros(0, dtype=torch.int64)).shape,
    ) == (
        0,
        [-1],
        (0, 0),
    )


def test_disk_full_is_told_and_the_version_before_stays(tmp_path: Path) -> None:
    """A limit on the size of a file stands in for a full disk: the same failing write."""
    digest = written(tmp_path).digest
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(
            StoreError,
            match=r"v00000002.partial' cannot be written: .* \(.* MiB are free there\)",
        ) as error:
            written(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.EFBIG
    assert EmbeddingStore.open(tmp_path, verify=True).digest == digest
    assert versions(tmp_path) == ["v00000001"]
    assert not list(tmp_path.glob("*.partial"))


def test_damage_is_named(tmp_path: Path) -> None:
    version = written(tmp_path / "whole").folder

    def damaged(change: Callable[[Path], object], *, verify: bool = False) -> str:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        change(folder / version.name)
        with pytest.raises(StoreError) as error:
            EmbeddingStore.open(folder, verify=verify)
        return str(error.value)

    def cut(name: str) -> Callable[[Path], object]:
        return lambda at: (at / name).write_bytes((at / name).read_bytes()[:-8])

    def flipped(at: Path) -> None:
        content = bytearray((at / "rows.bin").read_bytes())
        content[1000] ^= 4
        (at / "rows.bin").write_bytes(content)

    def edited(at: Path) -> None:
        manifest = json.loads((at / "manifest.json").read_text())
        (at / "manifest.json").write_text(json.dumps(manifest | {"tower": "other"}))

    assert "rows.bin' has 14,392 bytes and was written with 14,400" in damaged(
        cut("rows.bin")
    )
    assert "ids_ids.npy' has" in damaged(cut("ids_ids.npy"))
    assert "rows.bin' is damaged: its content does not fit its digest" in damaged(
        flipped, verify=True
    )
    assert "manifest.json' is damaged: its content does not fit" in damaged(edited)
    assert "live.npy' cannot be read: No such file" in damaged(
        lambda at: (at / "live.npy").unlink()
    )
    assert "was removed or never finished" in damaged(
        lambda at: (at / "manifest.json").unlink()
    )
    assert "CURRENT' is damaged: it names 'nonsense'" in damaged(
        lambda at: (at.parent / "CURRENT").write_text("nonsense")
    )
    with pytest.raises(
        StoreError,
        match="holds no embedding store: it has no file CURRENT; write one with write_store",
    ):
        EmbeddingStore.open(tmp_path / "nowhere")


def test_a_file_that_is_cut_off_under_its_reader_is_an_error_and_no_crash(
    tmp_path: Path,
) -> None:
    store = written(tmp_path)
    with (store.folder / "rows.bin").open("r+b") as stream:
        stream.truncate(48)
    with pytest.raises(
        StoreError,
        match="has 48 bytes and had 14,400 when it was opened: it was changed in place",
    ):
        store.rows(torch.tensor([200]))


def test_positions_outside_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"positions: -1 is not a row of this store, which has 300 \(0 to 299\)",
    ):
        written(tmp_path).rows(torch.tensor([0, -1]))


def test_old_versions_are_removed_when_asked_and_who_has_one_open_reads_on(
    tmp_path: Path,
) -> None:
    first = written(tmp_path)
    expected = first.rows(torch.arange(ROWS)).clone()
    for seed in range(3):
        refresh_store(tmp_path, [1], vectors(1, seed))
    assert prune_store(tmp_path, keep=2) == ["v00000001", "v00000002"]
    assert versions(tmp_path) == ["v00000003", "v00000004"]
    assert torch.equal(first.rows(torch.arange(ROWS)), expected)
    with pytest.raises(ValueError, match="keep=0: must be 1 or more"):
        prune_store(tmp_path, keep=0)


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    def second() -> Any:
        with pytest.raises(StoreError, match="is being written by another process"):
            written(tmp_path)
        yield (np.array([1]), vectors(1))

    write_store(tmp_path, second())
    assert versions(tmp_path) == ["v00000001"]


def test_a_file_system_without_locks_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(sealed.fcntl, "flock", refuse)
    with pytest.raises(
        StoreError,
        match=r"cannot be locked \(Operation not supported\): .*file system offers none; .*write elsewhere",
    ):
        written(tmp_path)


def test_readers_open_whole_versions_while_others_are_written_and_removed(
    tmp_path: Path,
) -> None:
    """Each version's rows are all of one value; a reader never sees two."""
    ids, stop, seen = np.arange(50), threading.Event(), set()
    write_store(tmp_path, [(ids, np.zeros((50, 2)))])
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                rows = EmbeddingStore.open(tmp_path).rows(torch.arange(50))
                assert len(rows.unique()) == 1
                seen.add(float(rows[0, 0]))
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for value in range(1, 12):
        write_store(tmp_path, [(ids, np.full((50, 2), value))])
        prune_store(tmp_path, keep=1)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert len(seen) > 1


def resident_kib(path: Path) -> int:
    """Memory of this process that is mapped from a file."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return sum(
        int(line.split()[1])
        for start in starts
        for line in lines[start : start + 6]
        if line.startswith("Rss:")
    )


@pytest.mark.parametrize("kernel", ["this one", "an older one"])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_populating_maps_every_page(
    dtype: Dtype, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "an older one":
        # refused as older kernels refuse it
        monkeypatch.setattr(store_module, "_POPULATE_READ", 9_999)
    monkeypatch.setattr(store_module, "_PIECE", 2**16)
    values = (
        np.random.default_rng(0).standard_normal((20_000, WIDTH)).astype(np.float32)
    )
    write_store(tmp_path, [(np.arange(20_000), values)], dtype=dtype)
    store = EmbeddingStore.open(tmp_path)
    rows = store.folder / "rows.bin"
    before = resident_kib(rows)
    assert store.populate()
    assert before < resident_kib(rows) == -(-rows.stat().st_size // 4096) * 4
    assert torch.equal(store.matrix(), EmbeddingStore.open(tmp_path).matrix())


def test_rows_of_more_than_half_of_the_memory_stay_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path)
    size = ROWS * WIDTH * 4
    for left, populated in ((2 * size - 1, False), (2 * size, True)):
        monkeypatch.setattr(store_module, "available_memory", lambda left=left: left)
        assert store.populate() is populated


def test_populating_a_store_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    store = written(tmp_path)
    os.truncate(store.folder / "rows.bin", 100)
    with pytest.raises(
        StoreError, match="has 100 bytes and had 14,400 when it was opened"
    ):
        store.populate()


def _sum_of(folder: Path, queue: Any) -> None:
    queue.put(float(EmbeddingStore.open(folder).rows(torch.arange(ROWS)).sum()))


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    expected = float(written(tmp_path).rows(torch.arange(ROWS)).sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    reader = context.Process(target=_sum_of, args=(tmp_path, queue))
    reader.start()
    assert queue.get(timeout=60) == expected
    reader.join()
