"""rec.embed --refresh: a refreshed store equals one that is written whole, on any number of ranks; and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import run_ranks
from tests.retrieval.bundles import bundle_of, contents
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.scorer.user_vectors import FolderVectors
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.versions import versions
from torchx_apps import embed
from torchx_apps.jobs import embedding as catalogue
from torchx_apps.jobs.embedding import TowerGroup, refresh_files

CHANGED, NEW, GONE = [7, 3, 41], [49, 48], [5, 6]


def main(bundle: Path, *flags: object) -> int:
    return embed.main([str(bundle), "--id=item_id", *map(str, flags)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, a store of its items but the last two with old prices, and files with all that changed since."""
    root = tmp_path_factory.mktemp("refresh")
    bundle_of(root / "bundle")
    now = contents()["catalogue"].features
    once = now.set_column(1, "price", pa.array(np.zeros(len(now), np.float32)))
    pq.write_table(once.slice(0, 47), root / "once.parquet")
    pq.write_table(now, root / "now.parquet")
    pq.write_table(
        now.take(np.array([*CHANGED, *NEW]) - 1),
        root / "changes.parquet",
        row_group_size=1,
    )
    pq.write_table(pa.table({"item_id": GONE}), root / "gone.parquet")
    assert (
        main(
            root / "bundle",
            "--catalogue",
            root / "once.parquet",
            "--out",
            root / "once",
        )
        == 0
    )
    return root


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder / "once", tmp_path / "store")


def on_ranks(runtime: Runtime, root: Path, out: Path) -> tuple[str, str]:
    catalogue.BLOCK_ROWS = 1
    bundle = Bundle.load(root / "bundle")
    rows = TowerGroup(
        bundle, [bundle.candidate], runtime, [str(root / "changes.parquet")], "item_id"
    )
    store, done = refresh_files(rows, out, GONE)
    return store.digest, done


def test_changed_rows_are_those_of_the_whole_from_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    results = set()
    for ranks in (1, 2):
        out = shutil.copytree(folder / "once", tmp_path / f"ranks-{ranks}")
        results |= set(run_ranks(on_ranks, ranks, folder, out))
    ((_, done),) = results
    assert done == "3 changed, 2 new, 2 deleted"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks-1", "ranks-2"], (
        "what the ranks shared is left behind"
    )
    assert (
        main(
            folder / "bundle",
            "--catalogue",
            folder / "now.parquet",
            "--out",
            tmp_path / "whole",
        )
        == 0
    )
    once = EmbeddingStore.open(folder / "once")
    whole = EmbeddingStore.open(tmp_path / "whole")
    store = EmbeddingStore.open(tmp_path / "ranks-2", verify=True)
    assert store.ids.ids().tolist() == [*range(1, 48), *sorted(NEW)]
    assert store.ids.ids()[~store.live].tolist() == GONE
    for now, ids in (
        (whole, [*CHANGED, *NEW]),
        (once, sorted({*range(1, 48)} - {*CHANGED})),
    ):
        rows = [
            version.rows(torch.from_numpy(version.ids.positions(ids)))
            for version in (store, now)
        ]
        torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("delete", ["5,6", "gone.parquet"])
def test_a_reader_takes_what_the_command_wrote(
    delete: str,
    folder: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    reader = FolderVectors(store, retry_s=0)
    assert reader.find([5, 7], tower=reader.tower)[1].tolist() == [True, True]
    assert main(folder / "bundle", "--refresh", store, "--delete", delete) == 0
    assert capsys.readouterr().out.endswith(": 0 changed, 0 new, 2 deleted\n")
    assert reader.find([5, 6, 7], tower=reader.tower)[1].tolist() == [
        False,
        False,
        True,
    ]
    pq.write_table(
        contents()["catalogue"].features.slice(4, 1), store.parent / "back.parquet"
    )
    assert (
        main(
            folder / "bundle",
            "--refresh",
            store,
            "--catalogue",
            store.parent / "back.parquet",
            "--keep=1",
        )
        == 0
    )
    assert capsys.readouterr().out.endswith(
        ": 1 changed, 0 new, 0 deleted; 2 older versions removed\n"
    )
    assert versions(store) == ["v00000003"]
    assert reader.find([5, 6], tower=reader.tower)[1].tolist() == [True, False]


def test_a_store_keeps_its_type(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--catalogue",
        folder / "once.parquet",
        "--out",
        tmp_path / "store",
        "--store=int8",
    ]
    assert main(folder / "bundle", *flags) == 0
    assert (
        main(
            folder / "bundle",
            "--refresh",
            tmp_path / "store",
            "--catalogue",
            folder / "changes.parquet",
        )
        == 0
    )
    assert "49 x 8 int8 of tower item" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--refresh=nowhere", "--delete=5"],
            "--refresh nowhere: there is no store; write one of the whole catalogue first, with",
        ),
        (["--delete=5,99"], "deleted: 99 is not in the store; leave it out"),
        (
            ["--delete=5,x"],
            "--delete: ids must be whole numbers like those of the store; got 5, x",
        ),
        (
            ["--delete=41", "--catalogue", "changes.parquet"],
            "deleted: 41 is also among the ids to write; leave it out",
        ),
        (["--delete=none.parquet"], "none.parquet: no such file"),
        (
            ["--delete=5", "--store=int8"],
            "--store int8: is for --out; a store keeps its type when it is refreshed",
        ),
        (
            ["--delete=5", "--keep=0"],
            "--keep 0: must be 1 or more; the version just written stays",
        ),
        (
            ["--delete=5", "--expire=9"],
            "--expire 9.0: is for --redis; what is in a folder stays",
        ),
        (
            ["--delete=5", "--out=x"],
            "say one of --out FOLDER, --refresh FOLDER and --redis URL",
        ),
        (
            ["--catalogue", "changes.parquet", "--id="],
            "--id: name the column with the ids",
        ),
        ([], "--catalogue: name the parquet files with the rows"),
    ],
)
def test_mistakes_are_told_and_change_nothing(
    flags: list[str],
    message: str,
    folder: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(folder / "bundle", "--refresh", store, *flags) == 1
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output
    assert [path.name for path in store.parent.iterdir()] == ["store"]
    assert EmbeddingStore.open(store).version == "v00000001"
    assert not (folder / "nowhere").exists()


def test_rows_of_another_tower_are_refused(
    folder: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle_of(tmp_path / "other", seed=1)
    assert (
        main(
            tmp_path / "other",
            "--refresh",
            store,
            "--catalogue",
            folder / "changes.parquet",
        )
        == 1
    )
    assert "embed the whole catalogue anew, with --out" in capsys.readouterr().err
    assert main(folder / "bundle", "--out", store, "--delete=5") == 1
    assert (
        "with --refresh FOLDER in place of --out ids are taken out"
        in capsys.readouterr().err
    )
    assert EmbeddingStore.open(store).version == "v00000001"


def test_what_a_killed_run_left_beside_the_store_is_removed_by_the_next(
    folder: Path, store: Path
) -> None:
    left = store.with_name(f".{store.name}.partial-another-host-17")
    (left / f"{store.name}.share1").mkdir(parents=True)
    assert (
        main(
            folder / "bundle",
            "--catalogue",
            folder / "changes.parquet",
            "--refresh",
            store,
        )
        == 0
    )
    assert [path.name for path in store.parent.iterdir()] == [store.name]
