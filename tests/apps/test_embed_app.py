"""rec.embed: a tower over parquet files, by any number of ranks, into one store; and what is told when it cannot be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torchrec_ext.components as components  # type: ignore[import-not-found]
from torchx.components.component_test_base import ComponentTestCase

from tests.contracts import run_ranks
from tests.retrieval.bundles import bundle_of, contents
from tests.small_sets import write_ml_100k
from torchrec_ext.data.datasets.catalog import load_dataset
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.schema import DataError
from torchx_apps import embed, recipes
from torchx_apps.jobs import embedding
from torchx_apps.jobs.embedding import CatalogueFiles, TowerGroup, embed_files
from torchx_apps.tasks.export_data import of_interactions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, and its catalogue in files whose rows are in no order."""
    root = tmp_path_factory.mktemp("embed")
    bundle_of(root / "bundle")
    features = contents()["catalogue"].features
    shuffled = features.take(np.random.default_rng(0).permutation(len(features)))
    (root / "items").mkdir()
    half = len(shuffled) // 2
    for name, rows in (("a", shuffled.slice(0, half)), ("b", shuffled.slice(half))):
        pq.write_table(rows, root / "items" / f"{name}.parquet", row_group_size=9)
    return root


def on_ranks(runtime: Runtime, root: Path) -> str:
    embedding.BLOCK_ROWS = 4  # several blocks of a row group
    bundle = Bundle.load(root / "bundle")
    out = root / f"ranks-{runtime.world_size}"
    rows = TowerGroup(
        bundle, [bundle.candidate], runtime, [str(root / "items")], "item_id"
    )
    store = embed_files(rows, out, "fp32")
    assert not rows.unknown()
    return store.digest


def test_the_store_is_that_of_the_bundle_from_any_number_of_ranks(folder: Path) -> None:
    digests = {
        digest for ranks in (1, 2) for digest in run_ranks(on_ranks, ranks, folder)
    }
    assert len(digests) == 1
    bundle = Bundle.load(folder / "bundle")
    store = EmbeddingStore.open(folder / "ranks-2", verify=True)
    assert store.tower == bundle.candidate_digest
    assert store.ids.ids().tolist() == bundle.store.ids.ids().tolist()
    torch.testing.assert_close(store.matrix(), bundle.store.matrix(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
def test_every_row_is_read_once(
    ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "BLOCK_ROWS", 4)
    shares = [
        CatalogueFiles(
            folder / "items", ["price"], "item_id", rank=rank, world_size=ranks
        )
        for rank in range(ranks)
    ]
    blocks = [block for share in shares for block in share]
    assert sorted(
        np.concatenate([block.ids.to_numpy() for block in blocks]).tolist()
    ) == list(range(1, 50))
    assert [sum(len(block.ids) for block in share) for share in shares] == [
        share.rows for share in shares
    ]


def test_the_demos_own_items_file_gives_what_training_read(tmp_path: Path) -> None:
    root = write_ml_100k(tmp_path)
    data = load_dataset("ml-100k", folder=str(root))
    model = recipes.two_tower()
    trained = of_interactions(
        data, model.build(model.model, data).schema()
    ).catalogue.features
    # so does a tower that reads one of both alone
    names = [name for name in trained.column_names if name != "genres"]
    for columns in (trained.column_names, names):
        files = CatalogueFiles(
            root / "ml-100k" / "items.parquet",
            columns,
            "item_id",
            derived=embedding.PUBLISHED["ml-100k"],
        )
        rows = pa.Table.from_batches(
            [pa.RecordBatch.from_pydict(dict(block.columns)) for block in files]
        )
        assert (
            rows.sort_by("item_id")
            .cast(trained.select(columns).schema)
            .equals(trained.select(columns))
        )
    with pytest.raises(DataError, match=r"items\.parquet: column 'genres' is missing"):
        CatalogueFiles(
            root / "ml-100k" / "items.parquet", trained.column_names, "item_id"
        )


def run(*flags: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torchx_apps.embed", *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def values_never_seen(runtime: Runtime, root: Path) -> tuple[dict[str, int], int]:
    embedding.BLOCK_ROWS = 4
    bundle = Bundle.load(root / "bundle")
    items = pa.table({"item_id": np.arange(1, 60), "price": np.zeros(59, np.float32)})
    if runtime.is_main:
        pq.write_table(items, root / "more.parquet")
    dist.barrier()
    out = root / f"more-{runtime.world_size}"
    rows = TowerGroup(
        bundle, [bundle.candidate], runtime, [str(root / "more.parquet")], "item_id"
    )
    store = embed_files(rows, out, "fp32")
    return dict(rows.unknown()), len(store)


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_that_training_never_saw_are_counted_over_all_ranks(
    ranks: int, folder: Path
) -> None:
    assert (
        run_ranks(values_never_seen, ranks, folder) == [({"item_id": 10}, 59)] * ranks
    )


@pytest.mark.slow
@pytest.mark.launch
def test_two_ranks_of_torchrun_write_users_vectors(
    folder: Path, tmp_path: Path
) -> None:
    pq.write_table(contents()["users"].features, tmp_path / "users.parquet")
    flags = [
        "--catalogue",
        tmp_path / "users.parquet",
        "--id=user_id",
        "--tower=query",
        "--store=int8",
        f"--out={tmp_path / 'out'}",
    ]
    launcher = [
        sys.executable,
        "-m",
        "torchx_apps.agent",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "torchx_apps.embed",
    ]
    done = subprocess.run(
        [*launcher, str(folder / "bundle"), *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bundle = Bundle.load(folder / "bundle")
    store = EmbeddingStore.open(tmp_path / "out", verify=True)
    assert (
        f"x {bundle.query_width} int8 of tower user ({bundle.query_digest[:12]}); lost by int8:"
        in done.stdout
    )
    assert bundle.users is not None
    expected = bundle.embed_query(bundle.users.rows(range(len(bundle.users))))
    torch.testing.assert_close(
        store.rows(torch.arange(len(store))),
        expected,
        rtol=0,
        atol=float(expected.abs().max()) / 100,
    )


def known_users(runtime: Runtime, root: Path, out: Path) -> str:
    bundle = Bundle.load(root / "bundle")
    return embed_files(
        TowerGroup(bundle, list(bundle.query), runtime, "known", ""), out, "fp32"
    ).digest


def test_without_a_catalogue_the_users_that_the_bundle_knows_are_embedded(
    folder: Path, tmp_path: Path
) -> None:
    alone, *both = [
        digest
        for ranks in (1, 2)
        for digest in run_ranks(known_users, ranks, folder, tmp_path / str(ranks))
    ]
    assert both == [alone, alone]
    bundle = Bundle.load(folder / "bundle")
    store = EmbeddingStore.open(tmp_path / "2", verify=True)
    assert bundle.users is not None
    places = store.ids.positions(bundle.users.ids.ids(range(len(bundle.users))))
    expected = bundle.embed_query(bundle.users.rows(range(len(bundle.users))))
    torch.testing.assert_close(
        store.rows(torch.from_numpy(places)), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--id=item"],
            r"items/a\.parquet: column 'item' is missing, it has .*; did you mean 'item_id'",
        ),
        (
            ["--id=price"],
            r"column 'price' is float; ids are whole numbers or strings: name another column with --id",
        ),
        (
            ["--id=item_id", "--tower=itm"],
            r"--tower itm: the bundle's towers are user, item; name one, or query",
        ),
        (["--id=item_id", "--tower=user"], r"column 'user_id' is missing"),
        (
            ["--id=item_id", "--catalogue", "nowhere"],
            r"nowhere: no such file; check the path",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        str(folder / "bundle"),
        "--catalogue",
        str(folder / "items"),
        f"--out={folder / 'none'}",
        *flags,
    ]
    assert embed.main(given) == 1
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert not (folder / "none" / "current").exists()


def test_a_bad_value_is_told_with_its_file_and_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"item_id": [1, 2, 3], "price": pa.array([0.5, None, 1.0], pa.float32())}
    for name, column, message in (
        ("null", rows["price"], "column 'price', row 1: there is no value"),
        ("text", ["a", "b", "c"], "column 'price', row 0: value 'a' is not float32"),
    ):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({**rows, "price": column}), path)
        assert (
            embed.main(
                [
                    str(folder / "bundle"),
                    "--catalogue",
                    str(path),
                    "--id=item_id",
                    f"--out={tmp_path / 'out'}",
                ]
            )
            == 1
        )
        assert (
            f"{path}: row group 0, rows from 0 on: {message}" in capsys.readouterr().err
        )


def test_a_run_without_a_bundle_and_a_file_of_another_kind_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = [
        "--catalogue",
        str(folder / "items"),
        "--id=item_id",
        f"--out={tmp_path / 'out'}",
    ]
    assert embed.main([str(tmp_path), *flags]) == 1
    assert (
        "is a run without a bundle; make one: torchx run rec.serve.export --run"
        in capsys.readouterr().err
    )
    (tmp_path / "x.parquet").write_text("no parquet at all")
    assert (
        embed.main(
            [str(folder / "bundle"), *flags, "--catalogue", str(tmp_path / "x.parquet")]
        )
        == 1
    )
    assert "x.parquet: is not parquet, or was cut short" in capsys.readouterr().err


class TestValid(ComponentTestCase):
    def test_embed(self) -> None:
        self.validate(components, "embed")


def test_the_component_starts_ranks() -> None:
    (role,) = components.embed(
        bundle="b",
        catalogue="items",
        id="item_id",
        out="vectors",
        store="fp16",
        procs=2,
    ).roles
    ranks = [
        "-m",
        "torchx_apps.agent",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "torchx_apps.embed",
    ]
    assert role.args == [
        *ranks,
        "b",
        "--catalogue",
        "items",
        "--id=item_id",
        "--out=vectors",
        "--store=fp16",
    ]


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (
            {"catalogue": "c", "id": "i", "refresh": "vectors", "delete": "7,8"},
            "--catalogue c --id=i --refresh=vectors --delete=7,8",
        ),
        (
            {
                "catalogue": "c",
                "id": "i",
                "redis": "redis://h/0",
                "tower": "query",
                "expire": 60,
            },
            "--catalogue c --id=i --redis=redis://h/0 --expire=60 --tower=query",
        ),
    ],
)
def test_the_component_says_where_to_write(given: dict[str, Any], flags: str) -> None:
    (role,) = components.embed(bundle="b", **given).roles
    assert role.args[4:] == ["-m", "torchx_apps.embed", "b", *flags.split()]
