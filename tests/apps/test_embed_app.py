"""rec.serve.embed: one side of a bundle over parquet files or known users into a store; what is told if it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.retrieval.small import Small
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.store import Store
from torchx_apps import embed
from torchx_apps.jobs import embedding

ITEMS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, and its catalogue in files whose rows are in no order."""
    root = tmp_path_factory.mktemp("embed")
    Small(ITEMS).write(root / "bundle")
    order = np.random.default_rng(0).permutation(ITEMS)
    rows = pa.table({"key": 100 + 10 * order, "item": order + 1, "other": order * 0.5})
    (root / "items").mkdir()
    for name, part in (("a", rows.slice(0, 21)), ("b", rows.slice(21))):
        pq.write_table(part, root / "items" / f"{name}.parquet", row_group_size=9)
    return root


def run(folder: Path, *flags: object) -> int:
    return embed.main([str(folder / "bundle"), *map(str, flags)])


def test_a_store_has_the_bundles_rows(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(embedding, "BLOCK_ROWS", 4)
    out = tmp_path / "store"
    assert run(folder, "--catalogue", folder / "items", "--id=key", "--out", out) == 0
    assert (
        f"store: {out} (50 x 8 fp32 of the candidate side)" in capsys.readouterr().out
    )
    bundle = Bundle.load(folder / "bundle")
    store = Store.open(out)
    assert (store.tower, store.side) == (bundle.digest_of("candidate"), "candidate")
    for position, item in enumerate(bundle.items.ids.ids(range(ITEMS))):
        found = store.find(item)
        assert found is not None
        np.testing.assert_allclose(found, bundle.rows[position], rtol=1e-5, atol=1e-6)


def test_the_users_that_a_bundle_knows(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "users"
    assert run(folder, "--tower=query", "--out", out, "--store=fp16") == 0
    store = Store.open(out)
    small = Small(ITEMS)
    for user in (1, 7, 20):
        found = store.find(user)
        assert found is not None
        np.testing.assert_allclose(found, small.known(user), rtol=1e-2, atol=1e-2)
    # A row of a file among them: all of them still are of these users' features.
    pq.write_table(
        pa.table({"user": [7], "history": [[1]], "age": [0.0]}), tmp_path / "one"
    )
    flags = ["--tower=query", "--catalogue", tmp_path / "one", "--id=user"]
    assert run(folder, *flags, "--refresh", out) == 0
    assert Store.open(out).features == store.features


def test_a_refresh(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    files = folder / "items"
    assert run(folder, "--catalogue", files, "--id=key", "--out", out) == 0
    changed = pa.table({"key": [120, 777], "item": [9, 5_000]})
    pq.write_table(changed, tmp_path / "changed.parquet")
    flags = ["--catalogue", tmp_path / "changed.parquet", "--id=key", "--refresh", out]
    assert run(folder, *flags, "--delete=100,110") == 0
    told = capsys.readouterr().out
    assert "embedded as unknown: item in 1 row(s)" in told
    store = Store.open(out)
    assert len(store) == ITEMS - 1
    assert store.find(100) is None
    found = store.find(120)
    assert found is not None
    np.testing.assert_allclose(found, Small(ITEMS).row(9), rtol=1e-5, atol=1e-6)


def test_mistakes_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(
        pa.table({"key": [1, 1], "item": [1, 2]}), tmp_path / "twice.parquet"
    )
    pq.write_table(
        pa.table({"key": [1, None], "item": [1, 2]}), tmp_path / "null.parquet"
    )
    pq.write_table(pa.table({"key": [1], "item": ["x"]}), tmp_path / "text.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "two").mkdir()
    for name, keys in (("a", [1]), ("b", ["x"])):
        file = tmp_path / "two" / f"{name}.parquet"
        pq.write_table(pa.table({"key": keys, "item": [1]}), file)
    out = tmp_path / "out"
    items = folder / "items"
    for flags, what in (
        (["--out", out, "--refresh", out], "say one of --out"),
        (["--out", out, "--delete=1"], "--delete: a store that is written whole"),
        (["--refresh", out, "--store=fp16"], "--store fp16: is for --out"),
        (["--out", out], "the candidate side; the bundle does not know their item"),
        (["--out", out, "--catalogue", items], "--id: name the column"),
        (["--out", out, "--catalogue", items, "--id=ky"], "column 'ky' is missing"),
        (["--out", out, "--catalogue", tmp_path / "none", "--id=key"], "none"),
        (["--out", out, "--catalogue", tmp_path / "twice.parquet", "--id=key"], "1"),
        (
            ["--out", out, "--catalogue", tmp_path / "null.parquet", "--id=key"],
            "with 1 nulls",
        ),
        (
            ["--out", out, "--catalogue", tmp_path / "text.parquet", "--id=key"],
            "column 'item'",
        ),
        (
            ["--out", out, "--catalogue", tmp_path / "cut.parquet", "--id=key"],
            "cannot be read as parquet",
        ),
        (
            ["--out", out, "--catalogue", tmp_path / "two", "--id=key"],
            "b.parquet: column 'key' is string, in ",
        ),
        (["--refresh", tmp_path / "none", "--delete=1"], "cannot be read"),
        (["--tower=query", "--out", folder / "bundle"], "it has no vectors.npy"),
    ):
        assert run(folder, *flags) == 1
        told = capsys.readouterr().err
        assert what in told
        assert len(told.strip().splitlines()) == 1
        assert not out.exists()


@pytest.mark.launch
def test_as_a_program_without_torch(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from torchx_apps.embed import main\n"
        f"sys.exit(main([{str(folder / 'bundle')!r}, '--tower=query', '--out', {str(tmp_path / 's')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(Store.open(tmp_path / "s")) == 20
