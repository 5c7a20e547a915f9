"""One bundle, whatever ranks and plan its model was trained on; over real gloo processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, redrawn, small_model
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.session import NextItemModel
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue
from torchrec_ext.retrieval.export import export
from torchrec_ext.schema import DataError

SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)


def contents() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    items, users = np.arange(1, ITEMS), np.arange(1, USERS)
    history = [rng.integers(1, ITEMS, rng.integers(0, 5)).tolist() for _ in users]
    queries = {
        "user_id": users,
        "history": pa.array(history, type=pa.list_(pa.int64())),
        "age": rng.random(len(users)).astype(np.float32),
    }
    price = rng.random(len(items)).astype(np.float32)
    features = pa.table({"item_id": items, "price": price})
    return {
        "catalogue": Catalogue(ids=items, features=features),
        "queries": pa.table(queries),
    }


def exported(runtime: Runtime, folder: Path) -> dict[str, str]:
    """The digest of a bundle of one model, by plan."""
    digests = {}
    for name in SHARDINGS:
        model = small_model(META)
        plan = plan_sharding(model, runtime, PlanConfig(sharding=name))  # type: ignore[arg-type]
        sharded, _ = hybrid_parallel(model, runtime, plan=plan, seed=7)
        sharded.train()
        out = folder / f"{name}-{runtime.world_size}"
        digests[name] = export(
            sharded,
            out,
            details={"ranks": runtime.world_size, "plan": name},
            **contents(),
        ).digest
        assert sharded.training
    return digests


def next_items(runtime: Runtime, folder: Path) -> str:
    torch.manual_seed(0)
    encoder = SessionEncoder(8, 5, heads=2, causal=True)
    table = EmbeddingConfig(name="item_id", num_embeddings=ITEMS, embedding_dim=8)
    sharded, _ = hybrid_parallel(
        NextItemModel(table, encoder, device=META), runtime, seed=7
    )
    items = np.arange(1, ITEMS)
    session = pa.array([[1, 2, 3], [4], [5, 6]], type=pa.list_(pa.int64()))
    return export(
        sharded,
        folder / f"session-{runtime.world_size}",
        catalogue=Catalogue(ids=items, features=pa.table({"item_id": items})),
        queries=pa.table({"session": session}),
    ).digest


def sharded_dlrm(runtime: Runtime, folder: Path) -> str:
    """The digest of a DLRM's bundle, with histories of any length."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=8
        )
        for name, rows in (("user", 20), ("item", ITEMS), ("history", ITEMS))
    ]
    collection = EmbeddingBagCollection(tables=tables)
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    model = DistributedModelParallel(
        DLRM(collection, 2, [8], [8, 1]), env=env, device=runtime.device
    )
    rng = np.random.default_rng(0)
    history = [rng.integers(0, ITEMS, length % 4).tolist() for length in range(20)]
    queries = {
        "user": np.arange(20),
        "history": pa.array(history, pa.list_(pa.int64())),
        "dense_features": rng.random((20, 2)).astype(np.float32).tolist(),
    }
    items = np.arange(ITEMS)
    catalogue = Catalogue(ids=items, features=pa.table({"item": items}))
    out = folder / "sharded"
    return export(model, out, catalogue=catalogue, queries=pa.table(queries)).digest


@pytest.mark.slow
def test_a_dlrm_in_distributed_model_parallel_is_proven_too(tmp_path: Path) -> None:
    (digest,) = set(run_ranks(sharded_dlrm, 2, tmp_path))
    bundle = Bundle.load(tmp_path / "sharded")
    assert bundle.digest == digest
    parity = bundle.manifest.parity
    assert parity["greatest_difference"] <= parity["allowed"] < 1e-3


def refused(runtime: Runtime, folder: Path) -> str:
    """What every rank is told where rank 0 cannot write."""
    sharded, _ = hybrid_parallel(small_model(META), runtime, seed=7)
    try:
        export(sharded, folder / f"table_wise-{runtime.world_size}", **contents())
    except DataError as error:
        return str(error)
    return "nothing"


def everything(runtime: Runtime, folder: Path) -> dict[str, Any]:
    return {
        "digests": exported(runtime, folder),
        "session": next_items(runtime, folder),
        "refused": refused(runtime, folder),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bundles")
    by_ranks = {
        str(ranks): run_ranks(everything, ranks, folder, timeout_s=300)
        for ranks in (1, 2, 4)
    }
    return {"folder": folder, **by_ranks}


@pytest.mark.slow(minutes=1)
def test_the_digest_is_one_on_any_ranks_and_under_any_plan(
    found: dict[str, Any], tmp_path: Path
) -> None:
    digests = {
        (name, ranks): digest
        for ranks in ("1", "2", "4")
        for by_plan in found[ranks]
        for name, digest in by_plan["digests"].items()
    }
    assert len(digests) == 3 * len(SHARDINGS)
    assert len(set(digests.values())) == 1, digests
    plain = small_model()
    initialise_tables(plain, seed=7)
    digest = export(plain, tmp_path / "bundle", **contents()).digest
    assert {digest} == set(digests.values())
    sessions = {by_rank["session"] for ranks in "124" for by_rank in found[ranks]}
    assert len(sessions) == 1
    for name in ("row_wise-4", "column_wise-2", "session-2"):
        bundle = Bundle.load(found["folder"] / name)
        assert (bundle.metric == "product") == (name == "session-2")
        parity = bundle.manifest.parity
        assert parity["greatest_difference"] <= parity["allowed"]
    # Every rank is told why rank 0 could not write.
    for ranks in "124":
        for by_rank in found[ranks]:
            assert "there is something already" in by_rank["refused"]


def dying(runtime: Runtime, folder: Path) -> str:
    """Rank 0 is killed while it writes; the other one is told so, and does not wait for hours."""
    sharded, _ = hybrid_parallel(small_model(META), runtime, seed=7)
    ended: list[str] = []

    def kill(part: str, done: int, total: int) -> None:
        if part == "vectors":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        export(sharded, folder / "bundle", progress=kill, overwrite=True, **contents())
    except RuntimeError as error:
        ended.append(type(error).__name__)
    (folder / "told").write_text(" ".join(ended))
    return "alive"


@pytest.mark.slow(minutes=1)
def test_kill_9_during_an_export_leaves_the_earlier_bundle_and_ends_all_ranks(
    tmp_path: Path,
) -> None:
    model = small_model()
    before = export(model, tmp_path / "bundle", **contents()).digest
    with pytest.raises(Exception, match=r"ranks \[0\] gave no result"):
        run_ranks(dying, 2, tmp_path, timeout_s=45)
    assert (tmp_path / "told").read_text() == "RuntimeError"
    assert Bundle.load(tmp_path / "bundle").digest == before
    redrawn(model, 3)
    after = export(model, tmp_path / "bundle", overwrite=True, **contents()).digest
    assert after != before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
